"""Loads of blocks into rows: which packs hold them, reads in parts, and what failed."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Iterable, Sequence
from typing import NamedTuple

from persistkv.errors import StoreError
from persistkv.memory.budget import MemoryShares
from persistkv.memory.pages import huge_memory
from persistkv.memory.rows import BlockMemory, Rows
from persistkv.storage.records import StoreCounters, StoreOptions
from persistkv.storage.store.commit_queue import CommitQueue
from persistkv.storage.store.committer import describe_shortage
from persistkv.storage.store.index import HeldPack
from persistkv.storage.store.load import (
    FrameRead,
    PartRead,
    ReadOutcome,
    Scratch,
    part_bytes,
    plan_reads,
)
from persistkv.storage.store.namespace_view import NamespaceView

logger = logging.getLogger(__name__)

# 8 MiB: enough to show the bandwidth of a medium, and little for a slow one; at least one block
_PROBE_BYTES = 8 << 20


class _Wanted(NamedTuple):
    """Blocks to load."""

    keys: Sequence[bytes]
    block_ids: Sequence[int]
    """For each key, the row to fill."""
    rows: BlockMemory
    """Memory to fill: that of the engine, or of a probe."""
    deadline: float | None
    """Time, by ``time.monotonic``, at which blocks that are not read yet fail; None: no
    deadline."""


class Loader:
    """Loads blocks of a store's own namespace, and of an adopted one, into rows."""

    def __init__(
        self,
        view: NamespaceView,
        rows: BlockMemory,
        queue: CommitQueue,
        counters: StoreCounters,
        options: StoreOptions,
        sources: Callable[[], Sequence[NamespaceView]],
    ) -> None:
        """:param sources: returns the namespaces that serve loads, in order."""
        self._view = view
        self._rows = rows
        self._queue = queue
        self._counters = counters
        self._sources = sources
        self._scratch_bytes = MemoryShares.of(options.staging_bytes).part
        """Bound on the stored bytes of a part that are not read straight into rows."""
        self._scratch = Scratch(self._scratch_bytes)
        capabilities = view.backend.capabilities
        self._remote = capabilities.remote
        self._writable = capabilities.writable

    async def read(
        self,
        keys: Sequence[bytes],
        block_ids: Sequence[int],
        deadline: float | None = None,
    ) -> ReadOutcome:
        """Load blocks into rows, verify and count them.

        :param block_ids: for each key, the row to fill.
        :param deadline: ``time.monotonic`` time at which blocks fail that are not read yet; None:
            no deadline. A local store reads into rows, so its reads in progress end first.
        """
        wanted = _Wanted(keys, block_ids, self._rows, deadline)
        outcome = await self._read(wanted)
        num_failed = len(outcome.failed)
        self._counters.missed_blocks += num_failed
        self._counters.loaded_blocks += len(keys) - num_failed
        self._counters.loaded_bytes += outcome.raw_bytes
        # suspect bad packs before the caller stores a failed block again: it must not count as held
        self._suspect_packs(outcome)
        return outcome

    async def probe(self, keys: Sequence[bytes], deadline: float) -> ReadOutcome:
        """Read and verify the first blocks of these keys, as many as fit in 8 MiB, and discard
        them.

        :param deadline: ``time.monotonic`` time at which the probe ends, whatever the medium does.
        """
        layout = self._rows.layout
        num_rows = max(1, _PROBE_BYTES // layout.row_stride)
        probed = keys[:num_rows]
        # read into other memory, because the engine uses its rows meanwhile
        num_bytes = len(probed) * layout.row_stride
        memory = memoryview(huge_memory(num_bytes))[:num_bytes]
        rows = Rows(memory, layout)
        wanted = _Wanted(probed, range(len(probed)), rows, deadline)
        outcome = await self._read(wanted)
        # treat damage that the probe has found as if a load had found it
        self._suspect_packs(outcome)
        return outcome

    async def _read(self, wanted: _Wanted) -> ReadOutcome:
        """Find the packs that hold the keys, and read them into the rows until the deadline."""
        try:
            # the search writes to no row, so it may be cancelled at the deadline
            async with asyncio.timeout_at(wanted.deadline):
                reads, missing = await self._find(wanted)
            threads = self._view.threads
            results = await threads.read_until(reads, wanted.deadline)
        except TimeoutError:
            return ReadOutcome(failed=list(wanted.keys), is_late=True)
        except (OSError, MemoryError) as error:
            # reads raise nothing, so the error arose before any began: no row is in use
            why = describe_shortage(error)
            logger.warning("the blocks of a load job are misses: %s", why)
            return ReadOutcome(failed=list(wanted.keys))
        outcome = ReadOutcome(failed=missing)
        for read, result in zip(reads, results, strict=True):
            # None: the read had not begun at the deadline, so all its blocks count as failed
            part_outcome = read.drop() if result is None else result
            outcome.add(part_outcome)
        return outcome

    async def _find(self, wanted: _Wanted) -> tuple[list[PartRead], list[bytes]]:
        """Return the reads of the parts, and the keys that no namespace holds."""
        row_bytes = wanted.rows.layout.row_stride
        num_bytes = len(wanted.keys) * row_bytes
        num_threads = self._view.threads.readers
        bytes_per_part = part_bytes(num_bytes, num_threads, remote=self._remote)
        row_of = dict(zip(wanted.keys, wanted.block_ids, strict=True))
        is_timed = wanted.deadline is not None
        is_probe = wanted.rows is not self._rows  # a probe reads into rows of its own
        reads: list[PartRead] = []
        missing = list(wanted.keys)
        # ask each namespace for the keys that the namespaces before it lack
        for source in self._sources():
            if not missing:
                break
            try:
                holders = await source.holders(missing)
            except StoreError as error:
                # continue: the next namespace may hold the blocks; else they are misses
                source.log_failure(error)
                continue
            plan = plan_reads(
                holders,
                wanted.rows,
                keys=missing,
                block_ids=[row_of[key] for key in missing],
                part_bytes=bytes_per_part,
                scratch_bytes=self._scratch_bytes,
                remote=self._remote,
                is_timed=is_timed,
            )
            missing = plan.missing
            if not is_probe:
                self._record_uses(source, plan.parts)
            for part in plan.parts:
                read = PartRead(
                    source.backend,
                    source.namespace,
                    wanted.rows,
                    self._scratch,
                    part,
                    is_timed=is_timed,
                    is_private=is_probe,
                )
                reads.append(read)
        return reads, missing

    def _record_uses(
        self,
        source: NamespaceView,
        parts: Iterable[Sequence[FrameRead]],
    ) -> None:
        """Record a use of the packs to read, if they are in the store's own namespace: the blocks
        of another one are stored again in the own one."""
        if source is not self._view or not self._writable:
            return
        for part in parts:
            self._queue.touch(read.pack.pack_id for read in part)

    def _suspect_packs(self, outcome: ReadOutcome) -> None:
        """Remove packs with bad or missing frames from the index that they are in."""
        for source in self._sources():
            packs: list[HeldPack] = []
            for pack in outcome.suspects.values():
                if pack.table.namespace == source.namespace:
                    packs.append(pack)
            if packs:
                source.suspect(packs, outcome.bad_frames)
