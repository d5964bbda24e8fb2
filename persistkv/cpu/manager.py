"""Allocation, protection and eviction of the primary tier's rows.

1. A row is in one of three states: free, holding a block of this epoch, or holding one of an
   earlier epoch until the jobs that use it end. An epoch is the time between two calls of
   ``reset_cache``.
2. A block that is being written is not readable; a block that is being read or written is not
   evicted.
3. A key has at most one row over all epochs, so the keys that a job names at its end identify its
   rows.
4. The amortised cost of a call is proportional to its number of keys; only ``reset_cache`` iterates
   over all rows.
"""

from __future__ import annotations

import contextlib
from collections.abc import Collection, Iterable
from typing import TYPE_CHECKING, NamedTuple

from persistkv.base import (
    BlockIDsLoadStoreSpec,
    OffloadingEvent,
    OffloadingManager,
    OffloadKey,
    PrepareStoreOutput,
    ReqContext,
    RequestOffloadingContext,
)
from persistkv.cpu.policies import CACHE_POLICIES, Keys

if TYPE_CHECKING:
    from persistkv.cpu.shared_offload_region import SharedOffloadRegion

_BEING_WRITTEN = -1  # in the place of a row's number of readers


class CPULoadStoreSpec(BlockIDsLoadStoreSpec):
    """Rows of the primary tier, one per offloaded block."""

    @staticmethod
    def medium() -> str:
        return "CPU"


class EndedWrites(NamedTuple):
    """Distinct blocks that were being written until their writes ended."""

    written: list[OffloadKey]
    """Allocated since the last ``reset_cache``: readable now if the writes succeeded, otherwise
    misses."""
    orphaned: list[OffloadKey]
    """Allocated before the last ``reset_cache``: misses, whose rows are free now."""


class CPUOffloadingManager(OffloadingManager):
    """Allocates and evicts the rows of the primary tier. A call that raises KeyError changes
    nothing.

    :param num_blocks: number of rows, at least 1.
    :param cache_policy: ``lru``, ``arc``, or the name of an installed policy.
    :param enable_events: whether ``take_events`` returns events.
    """

    def __init__(
        self,
        num_blocks: int,
        cache_policy: str = "lru",
        enable_events: bool = False,
    ) -> None:
        self.num_blocks = num_blocks
        self._rows: dict[OffloadKey, int] = {}
        """Row of each block, of this and of earlier epochs."""
        self._before_reset: set[OffloadKey] = set()
        """Blocks of an earlier epoch: jobs in flight still use their rows, and lookups miss."""
        # plain numbers: a million objects would slow down each full garbage collection
        self._refs: list[int] = [0] * num_blocks
        """By row, the number of its readers, or ``_BEING_WRITTEN``."""
        # descending, because rows are taken from the end of the list: the first rows come first
        descending = reversed(range(num_blocks))
        self._free: list[int] = list(descending)
        """Rows that hold no block."""
        self._num_evictable = 0
        """Blocks of this epoch without readers and writers."""
        policy_class = CACHE_POLICIES.get(cache_policy)
        self._policy = policy_class(num_blocks, self._refs)
        self._enable_events = enable_events
        self._events: list[OffloadingEvent] = []
        """Events that ``take_events`` has not returned yet."""

    def lookup(self, key: OffloadKey, req_context: ReqContext) -> bool | None:
        """Return True for a readable block, None for one that is being written, False for a
        miss."""
        row = self._rows.get(key)
        # A block of an earlier epoch keeps its row until its jobs end, but no new job may read it.
        if row is None or key in self._before_reset:
            return False
        is_being_written = self._refs[row] < 0
        return None if is_being_written else True

    def is_held(self, key: OffloadKey) -> bool:
        return key in self._rows and key not in self._before_reset

    def is_ready(self, key: OffloadKey) -> bool:
        """Return whether the block is held and readable."""
        row = self._rows.get(key)
        if row is None or key in self._before_reset:
            return False
        is_being_written = self._refs[row] < 0
        return not is_being_written

    def num_free_or_evictable(self) -> int:
        """Return the number of rows that ``prepare_store`` could allocate now for blocks that are
        not held.

        A call with keys of held blocks can allocate fewer: one less for each evictable block among
        them, because the call does not evict blocks that it names.
        """
        return len(self._free) + self._num_evictable

    def num_evictable_of(self, keys: Keys) -> int:
        """Return how many of these distinct blocks are held and may be evicted."""
        num_evictable = 0
        for key in keys:
            row = self._rows.get(key)
            if row is not None and self._refs[row] == 0:
                num_evictable += 1
        return num_evictable

    def get_block_id(self, key: OffloadKey, req_context: ReqContext) -> int:
        """Return the row number of a block, which may not be readable yet; raise KeyError if it is
        not held."""
        return self._rows_of((key,))[0]

    def prepare_load(self, keys: Keys, req_context: ReqContext) -> CPULoadStoreSpec:
        """Add a reader to the row of each block, so that it is not evicted; return the rows."""
        refs = self._refs
        rows = self._rows_of(keys)
        # check all blocks before any is referenced, so that an error changes nothing
        for key, row in zip(keys, rows, strict=True):
            if refs[row] < 0:
                raise KeyError(f"block {key.hex()} is still being written")
        for row in rows:
            if not refs[row]:
                self._num_evictable -= 1
            refs[row] += 1
        return CPULoadStoreSpec(rows)

    def touch(self, keys: Keys, req_context: ReqContext) -> None:
        self._policy.touch(keys)

    def complete_load(self, keys: Keys, req_context: ReqContext) -> None:
        """Remove a reader from the row of each block. A row without readers can be evicted; if its
        block dates from before a ``reset_cache``, the row becomes free."""
        refs = self._refs
        rows = self._rows_of(keys, accept_before_reset=True)
        for position, row in enumerate(rows):
            if refs[row] <= 0:
                # A key may occur twice, so the counts cannot be checked beforehand: restore those
                # that were lowered.
                for released_row in rows[:position]:
                    refs[released_row] += 1
                raise KeyError(f"block {keys[position].hex()} is not being read")
            refs[row] -= 1
        # distinct keys: a block that occurs twice becomes evictable once
        unused: dict[OffloadKey, None] = {}
        for key, row in zip(keys, rows, strict=True):
            if not refs[row]:
                unused[key] = None
        freed = self._free_before_reset(unused)
        self._num_evictable += len(unused) - len(freed)
        # The policy tells by ``refs`` which of the blocks can be evicted now. It does not know
        # freed ones, and ignores them.
        self._policy.release(keys)

    def prepare_store(
        self,
        keys: Keys,
        req_context: ReqContext,
    ) -> PrepareStoreOutput | None:
        """Allocate rows for the blocks that are not held; held blocks in ``keys`` are not evicted
        for them. Return None, and change nothing, if there are too few rows to evict.

        A block from before the last ``reset_cache`` that a job still uses is left out, although it
        is a miss for ``lookup``; it can be stored once that job has ended.
        """
        rows = self._rows
        distinct = dict.fromkeys(keys)
        new = [key for key in distinct if key not in rows]
        if not new:
            no_rows = CPULoadStoreSpec(())
            return PrepareStoreOutput([], no_rows, evicted_keys=[])
        evicted: list[OffloadKey] = []
        num_rows_to_free = len(new) - len(self._free)
        if num_rows_to_free > 0:
            # The held blocks of the call must not be evicted for its new ones. Those in use are
            # never evicted. One loop without calls: this runs for each store of an engine.
            refs = self._refs
            spared = [key for key in distinct if key in rows and not refs[rows[key]]]
            # refuse before anything changes
            if num_rows_to_free > self._num_evictable - len(spared):
                return None
            evicted = self._evict(num_rows_to_free, spared)
        allocated = self._allocate(new)
        return PrepareStoreOutput(new, allocated, evicted)

    def _allocate(self, keys: list[OffloadKey]) -> CPULoadStoreSpec:
        """Take free rows for new blocks; there must be enough."""
        num_kept = len(self._free) - len(keys)
        # sorted: consecutive blocks tend to get adjacent rows, which one copy or read fills
        rows = sorted(self._free[num_kept:])
        del self._free[num_kept:]
        self._rows.update(zip(keys, rows, strict=True))
        for row in rows:
            self._refs[row] = _BEING_WRITTEN
        self._policy.insert(keys, rows)
        return CPULoadStoreSpec(rows)

    def complete_store(
        self,
        keys: Keys,
        req_context: ReqContext,
        success: bool = True,
    ) -> None:
        self.end_writes(keys, success)

    def end_writes(self, keys: Keys, success: bool) -> EndedWrites:
        """Do the work of ``complete_store`` and return the blocks that were being written."""
        refs = self._refs
        rows = self._rows
        being_written: list[OffloadKey] = []
        others: list[OffloadKey] = []
        for key in dict.fromkeys(keys):
            row = rows.get(key)
            if row is not None and refs[row] == _BEING_WRITTEN:
                being_written.append(key)
            else:
                others.append(key)
        # Other blocks are readable, and stay so, or are not held, which is an error. Raise it
        # before anything changes.
        if others:
            self._rows_of(others)
        for key in being_written:
            row = rows[key]
            refs[row] = 0
        orphaned = self._free_before_reset(being_written)
        written = being_written
        if orphaned:
            # the policy does not know blocks from before a reset, and their rows are free already
            written = [key for key in being_written if key in rows]
        if success:
            self._num_evictable += len(written)
            self._policy.release(written)
            self._add_event(written, removed=False)
        else:
            self._policy.remove(written)
            self._free_rows(written)
        return EndedWrites(written, orphaned)

    def take_events(self) -> list[OffloadingEvent]:
        taken = self._events
        self._events = []
        return taken

    def on_new_request(self, req_context: ReqContext) -> RequestOffloadingContext:
        return RequestOffloadingContext()

    def reset_cache(self, weights_changed: bool = True) -> None:
        """Forget all blocks. A row in use becomes free when its use ends. ``weights_changed`` has
        no effect."""
        refs = self._refs
        readable = [key for key in self._rows if self.is_ready(key)]
        self._add_event(readable, removed=True)
        in_use = {key: row for key, row in self._rows.items() if refs[row]}
        self._rows = in_use
        self._before_reset = set(in_use)
        self._policy.clear()
        self._num_evictable = 0
        # descending, because rows are taken from the end of the list: the first rows come first
        descending = reversed(range(self.num_blocks))
        self._free = [row for row in descending if not refs[row]]

    def _rows_of(
        self,
        keys: Keys,
        *,
        accept_before_reset: bool = False,
    ) -> list[int]:
        """Return the row numbers of blocks, in the order of ``keys``; raise KeyError if one is not
        held.

        :param accept_before_reset: whether blocks from before the last ``reset_cache`` count as
            held.
        """
        # usually, there are no blocks from before a reset
        if self._before_reset and not accept_before_reset:
            for key in keys:
                if key in self._before_reset:
                    raise KeyError(f"block {key.hex()} is not held")
        try:
            return list(map(self._rows.__getitem__, keys))
        except KeyError as error:
            missing = error.args[0].hex()
            raise KeyError(f"block {missing} is not held") from None

    def _free_before_reset(self, unused: Collection[OffloadKey]) -> list[OffloadKey]:
        """Free and return those blocks that date from before a ``reset_cache``.

        :param unused: blocks whose last reader or writer has ended.
        """
        if not self._before_reset:
            return []
        ended = [key for key in unused if key in self._before_reset]
        self._free_rows(ended)
        self._before_reset.difference_update(ended)
        return ended

    def _free_rows(self, keys: Iterable[OffloadKey]) -> None:
        """Forget blocks that have no reader and no writer; their rows become free."""
        rows = map(self._rows.pop, keys)
        self._free.extend(rows)

    def _evict(self, count: int, spared: Keys) -> list[OffloadKey]:
        """Evict ``count`` blocks, none of ``spared``, and return their keys. There must be enough
        evictable blocks."""
        refs = self._refs
        spared_rows = [self._rows[key] for key in spared]
        # a reader for the time of the call: the policy evicts no block in use
        for row in spared_rows:
            refs[row] = 1
        victims = self._policy.evict(count)
        for row in spared_rows:
            refs[row] = 0
        # the policy may have skipped these blocks as blocks in use: now it may evict them again
        self._policy.release(spared)
        self._num_evictable -= len(victims)
        evicted = [key for key, _ in victims]
        self._free_rows(evicted)
        self._add_event(evicted, removed=True)
        return evicted

    def _add_event(self, keys: Keys, *, removed: bool) -> None:
        """Add an event about blocks that became readable or were removed, if events are enabled."""
        if not self._enable_events or not keys:
            return
        medium = CPULoadStoreSpec.medium()
        event = OffloadingEvent(list(keys), medium, removed)
        self._events.append(event)


class CPUPrimaryTierOffloadingManager(CPUOffloadingManager):
    """Manager of the primary tier: allocates and evicts the rows of a shared memory region.

    A cascade to a secondary tier reads rows (``prepare_read``), a promotion writes them
    (``prepare_write``).

    :param mmap_region: holds the rows. Owned by the manager: ``shutdown`` releases it.
    """

    def __init__(
        self,
        mmap_region: SharedOffloadRegion,
        cache_policy: str = "lru",
        enable_events: bool = False,
    ) -> None:
        super().__init__(mmap_region.num_blocks, cache_policy, enable_events)
        self.mmap_region = mmap_region
        self._kv_memoryview: memoryview | None = None
        """View of all rows; None until ``get_kv_memoryview`` is first called."""

    prepare_read = CPUOffloadingManager.prepare_load
    complete_read = CPUOffloadingManager.complete_load
    prepare_write = CPUOffloadingManager.prepare_store
    complete_write = CPUOffloadingManager.complete_store

    def get_kv_memoryview(self) -> memoryview:
        """Return ``create_kv_memoryview`` of the region; the same object at each call."""
        if self._kv_memoryview is None:
            self._kv_memoryview = self.mmap_region.create_kv_memoryview()
        return self._kv_memoryview

    def shutdown(self) -> None:
        """Release the view, then the region. All readers of rows must have ended before."""
        view = self._kv_memoryview
        self._kv_memoryview = None
        if view is not None:
            # An array over the view prevents its release. If there is one, the region logs a
            # warning, and its memory stays mapped.
            with contextlib.suppress(BufferError):
                view.release()
        self.mmap_region.cleanup()
