"""The interface of a cache policy, and the recency order from which policies are built."""

from __future__ import annotations

import heapq
from abc import ABC, abstractmethod
from collections import OrderedDict
from collections.abc import Sequence

from persistkv.base import OffloadKey


class CachePolicy(ABC):
    """Decides the order in which blocks are evicted from the primary tier.

    It knows every block that has a row, from the allocation of the row on. If a call passes several keys, the first is
    the start of a prefix and must be evicted after the last. The amortised cost of a call must be proportional to its
    number of keys. Not thread-safe. After a call that raised, the policy is unusable, because its state may differ from
    its manager's.

    :param num_blocks: rows of the primary tier.
    :param refs: one number per row, kept by the manager: 0 if the row can be evicted, any other value if it cannot.
    """

    def __init__(self, num_blocks: int, refs: Sequence[int]) -> None:
        self._num_blocks = num_blocks
        self._refs = refs

    @abstractmethod
    def insert(self, keys: Sequence[OffloadKey], rows: Sequence[int]) -> None:
        """Add blocks that the policy does not know, with their rows, as the most recently used ones."""

    @abstractmethod
    def touch(self, keys: Sequence[OffloadKey]) -> None:
        """Count a use of each of these blocks; unknown keys are ignored."""

    @abstractmethod
    def release(self, keys: Sequence[OffloadKey]) -> None:
        """Note that jobs which used these blocks have ended; blocks with ``refs`` 0 can be evicted again. Not a use.

        Unknown keys are ignored.
        """

    @abstractmethod
    def remove(self, keys: Sequence[OffloadKey]) -> None:
        """Forget blocks whose write failed; unknown keys are ignored."""

    @abstractmethod
    def evict(self, count: int) -> list[tuple[OffloadKey, int]]:
        """Choose ``count`` blocks to evict and forget them.

        :returns: key and row of each, in eviction order; fewer than ``count`` only if fewer can be evicted.
        """

    @abstractmethod
    def clear(self) -> None:
        """Forget all blocks and all statistics of their use."""


class EvictionOrder:
    """Keys in order of use, from the least recently used (cold end) to the most recently used (hot end).

    A key whose row cannot be evicted (``refs`` is not 0) is parked when it reaches the cold end, so that only one
    eviction has to skip it. When ``release`` is called, it regains its former place, before all keys never parked.
    Every operation is amortised O(1), or O(log n) for keys that were parked.
    """

    def __init__(self, refs: Sequence[int]) -> None:
        self._refs = refs
        self._order: OrderedDict[OffloadKey, int] = OrderedDict()
        # (place, row) of parked keys: ``_aside`` while they are protected, ``_due`` and the heap afterwards.
        self._aside: dict[OffloadKey, tuple[int, int]] = {}
        self._due: dict[OffloadKey, tuple[int, int]] = {}
        self._heap: list[tuple[int, int, OffloadKey]] = []
        self._last_place = 0

    def __len__(self) -> int:
        return len(self._order) + len(self._aside) + len(self._due)

    def __contains__(self, key: OffloadKey) -> bool:
        return key in self._order or key in self._aside or key in self._due

    def append(self, keys: Sequence[OffloadKey], rows: Sequence[int]) -> None:
        """Add new keys at the hot end, the first key as the most recently used."""
        self._order.update(zip(reversed(keys), reversed(rows), strict=True))

    def refresh(self, keys: Sequence[OffloadKey]) -> None:
        """Move known keys to the hot end, the first key as the most recently used; unknown keys are ignored."""
        order = self._order
        for key in reversed(keys):
            if key in order:
                order.move_to_end(key)
            else:
                row = self._take_aside(key)
                if row is not None:
                    order[key] = row

    def release(self, keys: Sequence[OffloadKey]) -> None:
        """Make parked keys available to ``pop_coldest`` again; other keys are ignored."""
        if not self._aside:
            return
        for key in keys:
            entry = self._aside.pop(key, None)
            if entry is not None:
                self._due[key] = entry
                heapq.heappush(self._heap, (*entry, key))

    def discard(self, key: OffloadKey) -> int | None:
        """Remove a key.

        :returns: its row; None if the key is unknown.
        """
        row = self._order.pop(key, None)
        return self._take_aside(key) if row is None else row

    def pop_coldest(self) -> tuple[OffloadKey, int] | None:
        """Remove and return the least recently used key whose row can be evicted, and the row; None: there is none."""
        refs = self._refs
        while self._heap:
            place, row, key = heapq.heappop(self._heap)
            if self._due.get(key) != (place, row):
                continue  # used or removed since
            del self._due[key]
            if not refs[row]:
                return key, row
            self._aside[key] = (place, row)
        while self._order:
            key, row = self._order.popitem(last=False)
            if not refs[row]:
                return key, row
            self._last_place += 1
            self._aside[key] = (self._last_place, row)
        return None

    def clear(self) -> None:
        """Forget every key."""
        for part in (self._order, self._aside, self._due, self._heap):
            part.clear()

    def _take_aside(self, key: OffloadKey) -> int | None:
        entry = self._aside.pop(key, None) or self._due.pop(key, None)
        return None if entry is None else entry[1]
