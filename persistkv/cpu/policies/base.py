"""The interface of a cache policy, and the recency order that policies are made of."""

from __future__ import annotations

import heapq
from abc import ABC, abstractmethod
from collections import OrderedDict
from collections.abc import Sequence

from persistkv.base import OffloadKey


class CachePolicy(ABC):
    """Decides in which order blocks leave the primary tier.

    It is told of every block that has a row, from the moment the row is given out. Wherever several keys are given,
    the first is the start of a prefix and must outlive the last. No call may cost more than its own keys do, amortised.
    Not thread-safe. Whatever a call raises leaves the policy unusable, since its manager would disagree with it.

    :param num_blocks: rows of the primary tier.
    :param refs: one number per row, kept by the manager: 0 where the row may be taken, anything else where it must not.
    """

    def __init__(self, num_blocks: int, refs: Sequence[int]) -> None:
        self._num_blocks = num_blocks
        self._refs = refs

    @abstractmethod
    def insert(self, keys: Sequence[OffloadKey], rows: Sequence[int]) -> None:
        """Take up blocks that it does not know, with their rows, as the most recently used ones."""

    @abstractmethod
    def touch(self, keys: Sequence[OffloadKey]) -> None:
        """Count a use of each of these blocks; unknown keys are passed over."""

    @abstractmethod
    def release(self, keys: Sequence[OffloadKey]) -> None:
        """Learn that the rows of these blocks may be taken again; not in itself a use. Unknown keys are passed over."""

    @abstractmethod
    def remove(self, keys: Sequence[OffloadKey]) -> None:
        """Forget blocks whose write failed; unknown keys are passed over."""

    @abstractmethod
    def evict(self, count: int) -> list[tuple[OffloadKey, int]]:
        """Choose and forget ``count`` blocks whose rows may be taken, the first to go first.

        :returns: key and row of each; fewer than ``count`` only where there are fewer.
        """

    @abstractmethod
    def clear(self) -> None:
        """Forget every block and whatever was learnt from their use."""


class EvictionOrder:
    """Keys from the least to the most recently used, where a protected key keeps its place without being in the way.

    A protected key that comes to the cold end is set aside, so that it is passed over once and not by every eviction
    after it; when its protection ends it returns to the very place it had, which is ahead of all that were not set
    aside. Every operation is amortised O(1), or O(log n) for keys that come back from being set aside.
    """

    def __init__(self, refs: Sequence[int]) -> None:
        self._refs = refs
        self._order: OrderedDict[OffloadKey, int] = OrderedDict()
        # (place, row) of the keys set aside: still protected, or due again and then in the heap too.
        self._aside: dict[OffloadKey, tuple[int, int]] = {}
        self._due: dict[OffloadKey, tuple[int, int]] = {}
        self._heap: list[tuple[int, int, OffloadKey]] = []
        self._last_place = 0

    def __len__(self) -> int:
        return len(self._order) + len(self._aside) + len(self._due)

    def __contains__(self, key: OffloadKey) -> bool:
        return key in self._order or key in self._aside or key in self._due

    def append(self, keys: Sequence[OffloadKey], rows: Sequence[int]) -> None:
        """Put new keys at the hot end, the first of them hottest."""
        self._order.update(zip(reversed(keys), reversed(rows), strict=True))

    def refresh(self, keys: Sequence[OffloadKey]) -> None:
        """Move the keys it holds to the hot end, the first of them hottest."""
        order = self._order
        for key in reversed(keys):
            if key in order:
                order.move_to_end(key)
            else:
                row = self._take_aside(key)
                if row is not None:
                    order[key] = row

    def release(self, keys: Sequence[OffloadKey]) -> None:
        """Let those of the keys that were set aside be found again."""
        if not self._aside:
            return
        for key in keys:
            entry = self._aside.pop(key, None)
            if entry is not None:
                self._due[key] = entry
                heapq.heappush(self._heap, (*entry, key))

    def discard(self, key: OffloadKey) -> int | None:
        """Take a key out.

        :returns: its row; None where it is not held.
        """
        row = self._order.pop(key, None)
        return self._take_aside(key) if row is None else row

    def pop_coldest(self) -> tuple[OffloadKey, int] | None:
        """Take out the least recently used key that is not protected; None where every key is."""
        refs = self._refs
        while self._heap:
            place, row, key = heapq.heappop(self._heap)
            if self._due.get(key) != (place, row):
                continue  # used or taken out since
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
