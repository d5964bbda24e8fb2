"""Adaptive replacement (Megiddo and Modha, FAST 2003): recency and frequency, balanced by early evictions."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence

from persistkv.base import OffloadKey
from persistkv.cpu.policies.base import CachePolicy
from persistkv.cpu.policies.lru import LRUCachePolicy


class ARCCachePolicy(CachePolicy):
    """Two lists in recency order, blocks used once and blocks used again, and the keys recently evicted from each.

    Eviction takes from the first list if it exceeds its target size, else from the second. If a block is stored again
    soon after its eviction, the list it was evicted from was too small, and the target size changes in favour of that
    list. A scan of blocks that are used once only affects the first list.
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
                # Storing a block also touches it. Only a use of a readable block counts as a second use.
                part = self._once if self._refs[row] < 0 else self._again
                part.insert((key,), (row,))

    def release(self, keys: Sequence[OffloadKey]) -> None:
        self._once.release(keys)
        self._again.release(keys)

    def remove(self, keys: Sequence[OffloadKey]) -> None:
        for key in keys:
            if self._once.discard(key) is None:
                self._again.discard(key)

    def evict(self, count: int) -> list[tuple[OffloadKey, int]]:
        victims: list[tuple[OffloadKey, int]] = []
        while len(victims) < count:
            victim = self._evict_one()
            if victim is None:
                break
            victims.append(victim)
        self._trim_gone()
        return victims

    def clear(self) -> None:
        for part in (self._once, self._again, self._gone_once, self._gone_again):
            part.clear()
        self._target = 0.0

    def _learn_from_return(self, key: OffloadKey) -> bool:
        """Return whether the key was recently evicted. If so, change the target size in favour of its list."""
        once, again = len(self._gone_once), len(self._gone_again)
        if key in self._gone_once:
            del self._gone_once[key]
            self._target = min(float(self._num_blocks), self._target + max(1.0, again / once))
            return True
        if key in self._gone_again:
            del self._gone_again[key]
            self._target = max(0.0, self._target - max(1.0, once / again))
            return True
        return False

    def _evict_one(self) -> tuple[OffloadKey, int] | None:
        lists = ((self._once, self._gone_once), (self._again, self._gone_again))
        for part, gone in lists if len(self._once) > self._target else reversed(lists):
            if victims := part.evict(1):
                gone[victims[0][0]] = None
                return victims[0]
        return None

    def _trim_gone(self) -> None:
        """Drop the oldest evicted keys, so that the first list and its evicted keys together have at most
        ``num_blocks`` entries, and both lists with theirs at most twice as many.
        """
        while self._gone_once and len(self._once) + len(self._gone_once) > self._num_blocks:
            self._gone_once.popitem(last=False)
        held = len(self._once) + len(self._again)
        while self._gone_again and held + len(self._gone_once) + len(self._gone_again) > 2 * self._num_blocks:
            self._gone_again.popitem(last=False)
