"""Eviction policies of the primary tier: one interface, LRU and ARC, and a registry for others."""

from __future__ import annotations

import heapq
from abc import ABC, abstractmethod
from collections import OrderedDict
from collections.abc import Sequence
from typing import NamedTuple

from persistkv.base import OffloadKey
from persistkv.config import Registry

Keys = Sequence[OffloadKey]
Victim = tuple[OffloadKey, int]
"""An evicted block: its key and its row."""


class CachePolicy(ABC):
    """Decides the order in which blocks are evicted from the primary tier.

    It knows every block that has a row, from the allocation of the row on. If a call passes several
    keys, the first is the start of a prefix and must be evicted after the last. The amortised cost
    of a call must be proportional to its number of keys. Not thread-safe. After a call that raised,
    the policy is unusable, because its state may differ from its manager's.

    :param num_blocks: rows of the primary tier.
    :param refs: one number per row, kept by the manager: 0 if the row can be evicted, any other
        value if it cannot.
    """

    def __init__(self, num_blocks: int, refs: Sequence[int]) -> None:
        self._num_blocks = num_blocks
        self._refs = refs

    @abstractmethod
    def insert(self, keys: Keys, rows: Sequence[int]) -> None:
        """Add blocks that the policy does not know, with their rows, as the most recently used
        ones."""

    @abstractmethod
    def touch(self, keys: Keys) -> None:
        """Count a use of each of these blocks; unknown keys are ignored."""

    @abstractmethod
    def release(self, keys: Keys) -> None:
        """Note that jobs which used these blocks have ended; those with ``refs`` 0 can be evicted
        again. Not a use. Unknown keys are ignored.
        """

    @abstractmethod
    def remove(self, keys: Keys) -> None:
        """Forget blocks whose write failed; unknown keys are ignored."""

    @abstractmethod
    def evict(self, count: int) -> list[Victim]:
        """Choose ``count`` blocks with ``refs`` 0 to evict, and forget them.

        :returns: in eviction order; fewer than ``count`` only if fewer can be evicted.
        """

    @abstractmethod
    def clear(self) -> None:
        """Forget all blocks and all statistics of their use."""


class _ParkedBlock(NamedTuple):
    """A block that an eviction skipped because its row was in use; see ``LRUCachePolicy``."""

    place: int
    """Number in the order in which blocks were parked, which is that of their use."""
    row: int


class LRUCachePolicy(CachePolicy):
    """Evicts the least recently used block. Blocks are kept in order of use; a store counts as the
    first use.

    An eviction that finds the least recently used block in use moves it out of this order, so that
    later evictions need not skip it again. Such a block is *parked* until it is used, evicted or
    removed. When its job ends (``release``), it is a candidate again: the next eviction takes such
    blocks first, in the order of their use, because all others were used later. Every operation is
    amortised O(1), or O(log n) for blocks that were parked.
    """

    def __init__(self, num_blocks: int, refs: Sequence[int]) -> None:
        super().__init__(num_blocks, refs)
        self._rows: OrderedDict[OffloadKey, int] = OrderedDict()
        """Rows of the blocks that are not parked, least recently used first."""
        self._parked: dict[OffloadKey, _ParkedBlock] = {}
        """Blocks that an eviction skipped because jobs used them, and whose jobs have not ended
        since."""
        self._released: dict[OffloadKey, _ParkedBlock] = {}
        """Skipped blocks whose jobs have ended: candidates for the next eviction."""
        # a heap, because jobs end in another order than their blocks were used
        self._released_heap: list[tuple[_ParkedBlock, OffloadKey]] = []
        """``_released``, the least recently used block first. A block that leaves ``_released``
        leaves a stale entry here, which the eviction that reaches it drops."""
        self._last_place = 0
        """Place of the block that was parked last. Places number the blocks in the order in which
        they are parked, which is the order of their use."""

    def __len__(self) -> int:
        num_parked = len(self._parked) + len(self._released)
        return len(self._rows) + num_parked

    def __contains__(self, key: OffloadKey) -> bool:
        # parked blocks, and those that may be evicted again, are still in the primary tier
        return key in self._rows or key in self._parked or key in self._released

    def insert(self, keys: Keys, rows: Sequence[int]) -> None:
        # the first block of a prefix is the most recent one, so that it outlives the others
        deepest_first = zip(reversed(keys), reversed(rows), strict=True)
        self._rows.update(deepest_first)

    def touch(self, keys: Keys) -> None:
        """Make blocks the most recently used ones. A parked block returns to the order of use."""
        rows = self._rows
        # the start of a prefix last, so that it is evicted after the blocks that need it
        for key in reversed(keys):
            if key in rows:
                rows.move_to_end(key)
                continue
            row = self._unpark(key)
            # None means that the block is unknown
            if row is not None:
                rows[key] = row

    def release(self, keys: Keys) -> None:
        """Make those of these blocks that are parked candidates for the next eviction."""
        # usually, no eviction has met a block in use
        if not self._parked:
            return
        for key in keys:
            block = self._parked.pop(key, None)
            if block is not None:
                self._released[key] = block
                # ordered by the block's place in the order of use
                heapq.heappush(self._released_heap, (block, key))

    def remove(self, keys: Keys) -> None:
        for key in keys:
            self.discard(key)

    def discard(self, key: OffloadKey) -> int | None:
        """Forget a block and return its row; None if the key is unknown."""
        row = self._rows.pop(key, None)
        if row is None:
            row = self._unpark(key)
        return row

    def evict(self, count: int) -> list[Victim]:
        """Evict the least recently used blocks. Park those of them whose rows are in use: move them
        out of the order of use, so that later evictions need not skip them again."""
        # evict released blocks first: they were the least recently used when they were parked
        victims = self._evict_released(count)
        while self._rows and len(victims) < count:
            key, row = self._rows.popitem(last=False)
            is_in_use = self._refs[row] != 0
            if is_in_use:
                self._last_place += 1
                self._parked[key] = _ParkedBlock(self._last_place, row)
            else:
                victims.append((key, row))
        return victims

    def _evict_released(self, count: int) -> list[Victim]:
        """Evict up to ``count`` parked blocks whose jobs have ended; park those again that another
        job uses now."""
        victims: list[Victim] = []
        while self._released_heap and len(victims) < count:
            block, key = heapq.heappop(self._released_heap)
            # since this entry was added, the block was used, evicted or removed
            is_stale = self._released.get(key) != block
            if is_stale:
                continue
            del self._released[key]
            is_in_use = self._refs[block.row] != 0
            if is_in_use:
                # the block is in use again without ``touch``, so it keeps its place in the order of
                # use
                self._parked[key] = block
            else:
                victims.append((key, block.row))
        return victims

    def clear(self) -> None:
        self._rows.clear()
        self._parked.clear()
        self._released.clear()
        self._released_heap.clear()

    def _unpark(self, key: OffloadKey) -> int | None:
        """Forget a parked block, whether released or not, and return its row; None if it is not
        parked."""
        block = self._parked.pop(key, None)
        if block is None:
            block = self._released.pop(key, None)
        return None if block is None else block.row


class ARCCachePolicy(CachePolicy):
    """Adaptive replacement (Megiddo and Modha, FAST 2003): recency and frequency, balanced by early
    evictions.

    It keeps two lists in order of use, recent blocks (used once) and frequent blocks (used again),
    and for each list its ghosts: the keys recently evicted from it. Eviction takes from the recent
    blocks if they exceed their target number, else from the frequent blocks. If a block is stored
    again soon after its eviction, the list from which it was evicted was too small, and the target
    changes in favour of that list. A scan of blocks that are used once only affects the recent
    blocks.
    """

    def __init__(self, num_blocks: int, refs: Sequence[int]) -> None:
        super().__init__(num_blocks, refs)
        self._recent = LRUCachePolicy(num_blocks, refs)
        """Held blocks that were used once."""
        self._frequent = LRUCachePolicy(num_blocks, refs)
        """Held blocks that were used again."""
        # ghosts: keys that were evicted from each of the two lists, the first evicted first
        self._recent_ghosts: OrderedDict[OffloadKey, None] = OrderedDict()
        self._frequent_ghosts: OrderedDict[OffloadKey, None] = OrderedDict()
        self._target = 0.0
        """Target number of recent blocks."""

    def insert(self, keys: Keys, rows: Sequence[int]) -> None:
        # the start of a prefix last, so that it is evicted after the blocks that need it
        deepest_first = zip(reversed(keys), reversed(rows), strict=True)
        for key, row in deepest_first:
            was_ghost = self._adapt(key)
            blocks = self._frequent if was_ghost else self._recent
            blocks.insert((key,), (row,))
        self._trim_ghosts()

    def touch(self, keys: Keys) -> None:
        """Count a use: the blocks become the most recent ones of the frequent list. Recent blocks
        that are being written only become the most recent ones of their list."""
        # the start of a prefix last, so that it is evicted after the blocks that need it
        for key in reversed(keys):
            if key in self._frequent:
                self._frequent.touch((key,))
                continue
            row = self._recent.discard(key)
            # the block is unknown
            if row is None:
                continue
            # a store also touches its blocks; only a use of a readable block is a second use
            is_being_written = self._refs[row] < 0
            blocks = self._recent if is_being_written else self._frequent
            blocks.insert((key,), (row,))

    def release(self, keys: Keys) -> None:
        self._recent.release(keys)
        self._frequent.release(keys)

    def remove(self, keys: Keys) -> None:
        self._recent.remove(keys)
        self._frequent.remove(keys)

    def evict(self, count: int) -> list[Victim]:
        """Evict blocks one by one from the list that exceeds its target number; from the other one
        if all blocks of that list are in use."""
        victims: list[Victim] = []
        while len(victims) < count:
            # the lengths change with each eviction, and with them the preferred list
            recent_first = len(self._recent) > self._target
            found = self._evict_one(recent=recent_first)
            if not found:
                # all blocks of that list are in use
                found = self._evict_one(recent=not recent_first)
            if not found:
                break
            victims += found
        self._trim_ghosts()
        return victims

    def _evict_one(self, *, recent: bool) -> list[Victim]:
        """Evict a recent block, or a frequent one unless ``recent``, and make its key a ghost;
        return no block if none can be evicted."""
        blocks = self._frequent
        ghosts = self._frequent_ghosts
        if recent:
            blocks = self._recent
            ghosts = self._recent_ghosts
        victims = blocks.evict(1)
        for key, _ in victims:
            ghosts[key] = None
        return victims

    def clear(self) -> None:
        self._recent.clear()
        self._frequent.clear()
        self._recent_ghosts.clear()
        self._frequent_ghosts.clear()
        self._target = 0.0

    def _adapt(self, key: OffloadKey) -> bool:
        """Return whether the key was a ghost, the key of an evicted block. If so, remove it from
        the ghosts, and move the target in favour of the list that it was evicted from."""
        num_recent = len(self._recent_ghosts)
        num_frequent = len(self._frequent_ghosts)
        # The step is larger for the list with fewer ghosts: a hit among few is stronger evidence.
        if key in self._recent_ghosts:
            del self._recent_ghosts[key]
            step = max(1.0, num_frequent / num_recent)
            self._target = min(self._num_blocks, self._target + step)
            return True
        if key in self._frequent_ghosts:
            del self._frequent_ghosts[key]
            step = max(1.0, num_recent / num_frequent)
            self._target = max(0.0, self._target - step)
            return True
        return False

    def _trim_ghosts(self) -> None:
        """Bound the recent blocks with their ghosts to ``num_blocks`` entries, and both lists with
        their ghosts to twice as many.
        """
        max_recent_ghosts = max(0, self._num_blocks - len(self._recent))
        while len(self._recent_ghosts) > max_recent_ghosts:
            self._recent_ghosts.popitem(last=False)
        num_held = len(self._recent) + len(self._frequent)
        # entries of the two lists and of the recent ghosts
        num_other_entries = num_held + len(self._recent_ghosts)
        max_frequent_ghosts = max(0, 2 * self._num_blocks - num_other_entries)
        while len(self._frequent_ghosts) > max_frequent_ghosts:
            self._frequent_ghosts.popitem(last=False)


CACHE_POLICIES = Registry[CachePolicy](
    "persistkv.cache_policies",
    "eviction_policy",
    CachePolicy,
    {"lru": LRUCachePolicy, "arc": ARCCachePolicy},
)
