"""Eviction of the least recently used block."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence

from persistkv.base import OffloadKey
from persistkv.cpu.policies.base import CachePolicy


class LRUCachePolicy(CachePolicy):
    """Blocks in order of use; a store counts as the first use.

    A block that cannot be evicted is parked when it is the least recently used one, so that only one eviction has to
    skip it. After ``release``, it is the next one to be evicted. Every operation is amortised O(1).
    """

    def __init__(self, num_blocks: int, refs: Sequence[int]) -> None:
        super().__init__(num_blocks, refs)
        self._rows: OrderedDict[OffloadKey, int] = OrderedDict()  # least recently used first, without parked blocks
        self._parked: dict[OffloadKey, int] = {}

    def __len__(self) -> int:
        return len(self._rows) + len(self._parked)

    def __contains__(self, key: OffloadKey) -> bool:
        return key in self._rows or key in self._parked

    def insert(self, keys: Sequence[OffloadKey], rows: Sequence[int]) -> None:
        self._rows.update(zip(reversed(keys), reversed(rows), strict=True))

    def touch(self, keys: Sequence[OffloadKey]) -> None:
        rows = self._rows
        for key in reversed(keys):
            if key in rows:
                rows.move_to_end(key)
            elif key in self._parked:
                rows[key] = self._parked.pop(key)

    def release(self, keys: Sequence[OffloadKey]) -> None:
        if not self._parked:
            return
        for key in keys:
            row = self._parked.get(key)
            if row is not None and not self._refs[row]:
                self._rows[key] = self._parked.pop(key)
                self._rows.move_to_end(key, last=False)

    def remove(self, keys: Sequence[OffloadKey]) -> None:
        for key in keys:
            self.discard(key)

    def discard(self, key: OffloadKey) -> int | None:
        """Forget a block and return its row; None if the key is unknown."""
        row = self._rows.pop(key, None)
        return self._parked.pop(key, None) if row is None else row

    def evict(self, count: int) -> list[tuple[OffloadKey, int]]:
        victims: list[tuple[OffloadKey, int]] = []
        refs, rows = self._refs, self._rows
        while rows and len(victims) < count:
            key, row = rows.popitem(last=False)
            if refs[row]:
                self._parked[key] = row
            else:
                victims.append((key, row))
        return victims

    def clear(self) -> None:
        self._rows.clear()
        self._parked.clear()
