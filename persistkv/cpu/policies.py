"""Eviction policies of the primary tier: one interface, LRU and ARC, and a registry for others."""

from __future__ import annotations

import heapq
from abc import ABC, abstractmethod
from collections import OrderedDict
from collections.abc import Sequence

from persistkv.base import OffloadKey
from persistkv.config import Registry


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
    def insert(self, keys: Sequence[OffloadKey], rows: Sequence[int]) -> None:
        """Add blocks that the policy does not know, with their rows, as the most recently used
        ones."""

    @abstractmethod
    def touch(self, keys: Sequence[OffloadKey]) -> None:
        """Count a use of each of these blocks; unknown keys are ignored."""

    @abstractmethod
    def release(self, keys: Sequence[OffloadKey]) -> None:
        """Note that jobs which used these blocks have ended; those with ``refs`` 0 can be evicted
        again. Not a use. Unknown keys are ignored.
        """

    @abstractmethod
    def remove(self, keys: Sequence[OffloadKey]) -> None:
        """Forget blocks whose write failed; unknown keys are ignored."""

    @abstractmethod
    def evict(self, count: int) -> list[tuple[OffloadKey, int]]:
        """Choose ``count`` blocks with ``refs`` 0 to evict, and forget them.

        :returns: key and row of each, in eviction order; fewer than ``count`` only if fewer can be
            evicted.
        """

    @abstractmethod
    def clear(self) -> None:
        """Forget all blocks and all statistics of their use."""


class LRUCachePolicy(CachePolicy):
    """Evicts the least recently used block. Blocks are kept in order of use; a store counts as the
    first use.

    If an eviction finds that the least recently used block cannot be evicted, it parks the block:
    later evictions need not skip it again. After ``release``, the block regains its former place,
    before all blocks that were never parked. Every operation is amortised O(1), or O(log n) for
    blocks that were parked.
    """

    def __init__(self, num_blocks: int, refs: Sequence[int]) -> None:
        super().__init__(num_blocks, refs)
        # least recently used first, without parked blocks
        self._rows: OrderedDict[OffloadKey, int] = OrderedDict()
        # (place, row) of parked blocks: ``_parked`` while they are protected, ``_due`` and the heap
        # afterwards.
        self._parked: dict[OffloadKey, tuple[int, int]] = {}
        self._due: dict[OffloadKey, tuple[int, int]] = {}
        self._heap: list[tuple[int, int, OffloadKey]] = []
        self._last_place = 0

    def __len__(self) -> int:
        return len(self._rows) + len(self._parked) + len(self._due)

    def __contains__(self, key: OffloadKey) -> bool:
        return key in self._rows or key in self._parked or key in self._due

    def insert(self, keys: Sequence[OffloadKey], rows: Sequence[int]) -> None:
        # the first block of a prefix is the most recent one, so that it outlives the others
        self._rows.update(zip(reversed(keys), reversed(rows), strict=True))

    def touch(self, keys: Sequence[OffloadKey]) -> None:
        rows = self._rows
        # the start of a prefix last, so that it is evicted after the blocks that need it
        for key in reversed(keys):
            if key in rows:
                rows.move_to_end(key)
                continue
            row = self._unpark(key)
            if row is not None:
                rows[key] = row

    def release(self, keys: Sequence[OffloadKey]) -> None:
        if not self._parked:
            return
        for key in keys:
            entry = self._parked.pop(key, None)
            if entry is not None:
                # A heap, because jobs end in another order than their blocks were used.
                self._due[key] = entry
                heapq.heappush(self._heap, (*entry, key))

    def remove(self, keys: Sequence[OffloadKey]) -> None:
        for key in keys:
            self.discard(key)

    def discard(self, key: OffloadKey) -> int | None:
        """Forget a block and return its row; None if the key is unknown."""
        row = self._rows.pop(key, None)
        return self._unpark(key) if row is None else row

    def evict(self, count: int) -> list[tuple[OffloadKey, int]]:
        # released blocks first: they were least recently used before they were parked
        victims = self._evict_due(count)
        while self._rows and len(victims) < count:
            key, row = self._rows.popitem(last=False)
            if self._refs[row]:
                self._last_place += 1
                self._parked[key] = (self._last_place, row)
            else:
                victims.append((key, row))
        return victims

    def _evict_due(self, count: int) -> list[tuple[OffloadKey, int]]:
        """Evict up to ``count`` blocks that were parked and released."""
        victims: list[tuple[OffloadKey, int]] = []
        while self._heap and len(victims) < count:
            place, row, key = heapq.heappop(self._heap)
            if self._due.get(key) != (place, row):
                continue  # used or removed since
            del self._due[key]
            if self._refs[row]:
                self._parked[key] = (place, row)
            else:
                victims.append((key, row))
        return victims

    def clear(self) -> None:
        for part in (self._rows, self._parked, self._due, self._heap):
            part.clear()

    def _unpark(self, key: OffloadKey) -> int | None:
        entry = self._parked.pop(key, None) or self._due.pop(key, None)
        return None if entry is None else entry[1]


class ARCCachePolicy(CachePolicy):
    """Adaptive replacement (Megiddo and Modha, FAST 2003): recency and frequency, balanced by early
    evictions.

    It keeps two lists in order of use (blocks used once, blocks used again) and the keys recently
    evicted from each. Eviction takes from the first list if it exceeds its target size, else from
    the second. If a block is stored again soon after its eviction, the list from which it was
    evicted was too small, and the target size changes in favour of that list. A scan of blocks that
    are used once only affects the first list.
    """

    def __init__(self, num_blocks: int, refs: Sequence[int]) -> None:
        super().__init__(num_blocks, refs)
        self._once = LRUCachePolicy(num_blocks, refs)
        self._again = LRUCachePolicy(num_blocks, refs)
        self._gone_once: OrderedDict[OffloadKey, None] = OrderedDict()
        self._gone_again: OrderedDict[OffloadKey, None] = OrderedDict()
        self._target = 0.0  # target number of blocks in the first list

    def insert(self, keys: Sequence[OffloadKey], rows: Sequence[int]) -> None:
        for key, row in zip(reversed(keys), reversed(rows), strict=True):
            part = self._again if self._learn_from_return(key) else self._once
            part.insert((key,), (row,))
        self._trim_gone()

    def touch(self, keys: Sequence[OffloadKey]) -> None:
        for key in reversed(keys):
            if key in self._again:
                self._again.touch((key,))
                continue
            row = self._once.discard(key)
            if row is not None:
                # Storing a block also touches it. Only a use of a readable block counts as a second
                # use.
                part = self._once if self._refs[row] < 0 else self._again
                part.insert((key,), (row,))

    def release(self, keys: Sequence[OffloadKey]) -> None:
        self._once.release(keys)
        self._again.release(keys)

    def remove(self, keys: Sequence[OffloadKey]) -> None:
        self._once.remove(keys)
        self._again.remove(keys)

    def evict(self, count: int) -> list[tuple[OffloadKey, int]]:
        victims: list[tuple[OffloadKey, int]] = []
        while len(victims) < count:
            # the lengths change with each eviction, and with them the preferred list
            once_first = len(self._once) > self._target
            found = self._evict_one(used_once=once_first)
            if not found:
                # all blocks of that list are in use
                found = self._evict_one(used_once=not once_first)
            if not found:
                break
            victims += found
        self._trim_gone()
        return victims

    def _evict_one(self, *, used_once: bool) -> list[tuple[OffloadKey, int]]:
        """Evict a block of one of the lists, and remember its key; return no block if none can be
        evicted."""
        part = self._once if used_once else self._again
        gone = self._gone_once if used_once else self._gone_again
        victims = part.evict(1)
        for key, _ in victims:
            gone[key] = None
        return victims

    def clear(self) -> None:
        for part in (self._once, self._again, self._gone_once, self._gone_again):
            part.clear()
        self._target = 0.0

    def _learn_from_return(self, key: OffloadKey) -> bool:
        """Return whether the key was recently evicted. If so, change the target size in favour of
        its list."""
        once, again = len(self._gone_once), len(self._gone_again)
        if key in self._gone_once:
            del self._gone_once[key]
            target = self._target + max(1.0, again / once)
            self._target = min(float(self._num_blocks), target)
        elif key in self._gone_again:
            del self._gone_again[key]
            self._target = max(0.0, self._target - max(1.0, once / again))
        else:
            return False
        return True

    def _trim_gone(self) -> None:
        """Bound the first list and its evicted keys to ``num_blocks`` entries, and both lists with
        their evicted keys to twice as many.
        """
        most_gone_once = max(0, self._num_blocks - len(self._once))
        while len(self._gone_once) > most_gone_once:
            self._gone_once.popitem(last=False)
        others = len(self._once) + len(self._again) + len(self._gone_once)
        most_gone_again = max(0, 2 * self._num_blocks - others)
        while len(self._gone_again) > most_gone_again:
            self._gone_again.popitem(last=False)


CACHE_POLICIES = Registry[CachePolicy](
    "persistkv.cache_policies",
    "eviction_policy",
    CachePolicy,
    {"lru": LRUCachePolicy, "arc": ARCCachePolicy},
)
