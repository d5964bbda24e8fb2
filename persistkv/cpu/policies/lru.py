"""Eviction of the least recently used block."""

from __future__ import annotations

from collections.abc import Sequence

from persistkv.base import OffloadKey
from persistkv.cpu.policies.base import CachePolicy, EvictionOrder


class LRUCachePolicy(CachePolicy):
    """One recency order; a store counts as the first use."""

    def __init__(self, num_blocks: int, refs: Sequence[int]) -> None:
        super().__init__(num_blocks, refs)
        self._order = EvictionOrder(refs)

    def insert(self, keys: Sequence[OffloadKey], rows: Sequence[int]) -> None:
        self._order.append(keys, rows)

    def touch(self, keys: Sequence[OffloadKey]) -> None:
        self._order.refresh(keys)

    def release(self, keys: Sequence[OffloadKey]) -> None:
        self._order.release(keys)

    def remove(self, keys: Sequence[OffloadKey]) -> None:
        for key in keys:
            self._order.discard(key)

    def evict(self, count: int) -> list[tuple[OffloadKey, int]]:
        pop_coldest = self._order.pop_coldest
        victims: list[tuple[OffloadKey, int]] = []
        while len(victims) < count and (victim := pop_coldest()) is not None:
            victims.append(victim)
        return victims

    def clear(self) -> None:
        self._order.clear()
