"""Simulated caches of whole blocks, each with its own eviction policy, on traces of prefix reuse.

Requests and hits are defined in ``benchmarks.trace_replay``. After a request, all its blocks
are offered to the cache, from the last to the first. Policies that depend on use therefore evict
the end of a context before its prefix.
"""

from __future__ import annotations

import heapq
from abc import ABC, abstractmethod
from collections import OrderedDict
from collections.abc import Callable, Container, Sequence

from benchmarks.trace_replay import Request

_NEVER = 1 << 62


def lru_hits(requests: Sequence[Request], capacity: int) -> int:
    """Return the hits of an LRU cache of ``capacity`` blocks.

    The blocks of a request count as used from the last to the first, so a prefix outlives its
    continuation. This is the stronger of the two orders.
    """
    cache: OrderedDict[int, None] = OrderedDict()
    hits = 0
    for chain in requests:
        hits += prefix_length(chain, cache)
        for block in reversed(chain):
            cache[block] = None
            cache.move_to_end(block)
        while len(cache) > capacity:
            cache.popitem(last=False)
    return hits


def clairvoyant_hits(requests: Sequence[Request], capacity: int) -> int:
    """Return the most hits that any cache of ``capacity`` blocks can have: Belady's MIN with
    bypass, block by block.

    MIN counts every held block, with or without its prefix, so no cache has more prefix hits. The
    bound is attained: a block's parent is always requested again no later than the block itself, so
    MIN evicts the block first, and all its hits are prefix hits.
    """
    cache: dict[int, int] = {}
    furthest: list[tuple[int, int]] = []
    hits = 0
    for block, next_use in _with_next_use(requests):
        hits += block in cache
        if next_use == _NEVER:
            cache.pop(block, None)
            continue
        cache[block] = next_use
        heapq.heappush(furthest, (-next_use, block))
        while len(cache) > capacity:
            negative, candidate = heapq.heappop(furthest)
            if cache.get(candidate) == -negative:
                del cache[candidate]
    return hits


def _with_next_use(requests: Sequence[Request]) -> list[tuple[int, int]]:
    blocks = [block for chain in requests for block in chain]
    coming: dict[int, int] = {}
    uses = []
    for position in range(len(blocks) - 1, -1, -1):
        uses.append((blocks[position], coming.get(blocks[position], _NEVER)))
        coming[blocks[position]] = position
    return uses[::-1]


def prefix_length(chain: Sequence[int], held: Container[int]) -> int:
    """Return the number of leading blocks that are held."""
    return next(
        (position for position, block in enumerate(chain) if block not in held),
        len(chain),
    )


class _Cache(ABC):
    """Set of held blocks, with an eviction policy."""

    def __init__(self, capacity: int) -> None:
        self.capacity = capacity

    @abstractmethod
    def __contains__(self, block: object) -> bool: ...

    @abstractmethod
    def use(self, block: int) -> None:
        """Record a request for the block; the block is held afterwards unless the capacity is 0."""


class _Fifo(_Cache):
    """FIFO: evicts the block that was admitted first."""

    def __init__(self, capacity: int) -> None:
        super().__init__(capacity)
        self._held: OrderedDict[int, None] = OrderedDict()

    def __contains__(self, block: object) -> bool:
        return block in self._held

    def use(self, block: int) -> None:
        self._held.setdefault(block)
        if len(self._held) > self.capacity:
            self._held.popitem(last=False)


class _Lfu(_Cache):
    """LFU: evicts the block with the fewest uses since its admission; among these, the least
    recently used one."""

    def __init__(self, capacity: int) -> None:
        super().__init__(capacity)
        self._uses: dict[int, tuple[int, int]] = {}
        self._least: list[tuple[int, int, int]] = []
        self._now = 0

    def __contains__(self, block: object) -> bool:
        return block in self._uses

    def use(self, block: int) -> None:
        self._now += 1
        count = self._uses.get(block, (0, 0))[0] + 1
        if count == 1:
            self._make_room()
        if self.capacity:
            self._uses[block] = (count, self._now)
            heapq.heappush(self._least, (count, self._now, block))

    def _make_room(self) -> None:
        while self._uses and len(self._uses) >= self.capacity:
            count, moment, candidate = heapq.heappop(self._least)
            if self._uses.get(candidate) == (count, moment):
                del self._uses[candidate]


class _Arc(_Cache):
    """ARC (Megiddo and Modha, 2003): a list of blocks used once and a list of blocks used again.

    The sizes of the lists adapt to requests for blocks that were evicted from either list.
    """

    def __init__(self, capacity: int) -> None:
        super().__init__(capacity)
        self._once: OrderedDict[int, None] = OrderedDict()
        self._again: OrderedDict[int, None] = OrderedDict()
        self._once_gone: OrderedDict[int, None] = OrderedDict()
        self._again_gone: OrderedDict[int, None] = OrderedDict()
        self._target = 0.0
        """Target length of ``_once``."""

    def __contains__(self, block: object) -> bool:
        return block in self._once or block in self._again

    def use(self, block: int) -> None:
        if not self.capacity:
            return
        if block in self._once or block in self._again:
            self._once.pop(block, None)
            self._again.pop(block, None)
        elif block in self._once_gone:
            step = max(1.0, len(self._again_gone) / len(self._once_gone))
            self._target = min(float(self.capacity), self._target + step)
            self._drop(from_again_gone=False)
            del self._once_gone[block]
        elif block in self._again_gone:
            step = max(1.0, len(self._once_gone) / len(self._again_gone))
            self._target = max(0.0, self._target - step)
            self._drop(from_again_gone=True)
            del self._again_gone[block]
        else:
            self._admit(block)
            return
        self._again[block] = None

    def _admit(self, block: int) -> None:
        if len(self._once) + len(self._once_gone) == self.capacity:
            if len(self._once) < self.capacity:
                self._once_gone.popitem(last=False)
                self._drop(from_again_gone=False)
            else:
                self._once.popitem(last=False)
        else:
            total = sum(
                map(len, (self._once, self._again, self._once_gone, self._again_gone))
            )
            if total >= self.capacity:
                if total == 2 * self.capacity:
                    self._again_gone.popitem(last=False)
                self._drop(from_again_gone=False)
        self._once[block] = None

    def _drop(self, *, from_again_gone: bool) -> None:
        if len(self._once) + len(self._again) < self.capacity:
            return
        held = len(self._once)
        if held and (
            held > self._target
            or (from_again_gone and held == self._target)
            or not self._again
        ):
            self._once_gone[self._once.popitem(last=False)[0]] = None
        else:
            self._again_gone[self._again.popitem(last=False)[0]] = None


def _hits(make: Callable[[int], _Cache]) -> Callable[[Sequence[Request], int], int]:
    def count(requests: Sequence[Request], capacity: int) -> int:
        cache, hits = make(capacity), 0
        for chain in requests:
            hits += prefix_length(chain, cache)
            for block in reversed(chain):
                cache.use(block)
        return hits

    return count


OTHER_POLICIES: dict[str, Callable[[Sequence[Request], int], int]] = {
    "fifo": _hits(_Fifo),
    "lfu": _hits(_Lfu),
    "arc": _hits(_Arc),
}
"""Hits by policy, given the requests and the capacity in blocks; policies other than LRU and the
best possible."""
