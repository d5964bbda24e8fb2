"""Caches of a number of whole blocks, each with its own eviction policy, on traces of prefix reuse.

See ``persistkv_tools.inspect.replay`` for requests and hits. After a request all its blocks are offered to the cache.
Within a request the end counts as used before the beginning, so a prefix outlives what follows it if the policy goes by
use at all.
"""

from __future__ import annotations

import heapq
from abc import ABC, abstractmethod
from collections import OrderedDict
from collections.abc import Callable, Container, Sequence

from persistkv_tools.inspect.replay import Request

_NEVER = 1 << 62


def lru_hits(requests: Sequence[Request], capacity: int) -> int:
    """Hits of a cache of ``capacity`` blocks that drops what was used longest ago.

    Within a request the end counts as used before the beginning, so a prefix outlives what follows it: the stronger of
    the two orders.
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
    """The most hits that any cache of ``capacity`` blocks can have: Belady's MIN with bypass, block by block.

    MIN counts every held block, held prefix or not, so no cache has more prefix hits. It is also attained: a block's
    parent is always wanted again no later than the block, so MIN gives up the block first, and all its hits are
    prefix hits.
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
    """How many blocks from the first on are held."""
    return next((position for position, block in enumerate(chain) if block not in held), len(chain))


class _Cache(ABC):
    """Blocks that are held."""

    def __init__(self, capacity: int) -> None:
        self.capacity = capacity

    @abstractmethod
    def __contains__(self, block: object) -> bool: ...

    @abstractmethod
    def use(self, block: int) -> None:
        """It is asked for, and held afterwards if there is room for any."""


class _Fifo(_Cache):
    """Drops what came first."""

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
    """Drops what was used least often since it came; of those, what was used longest ago."""

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
    """ARC (Megiddo and Modha, 2003): two lists, of what was used once and again, whose sizes adapt to what was dropped
    from either and came back."""

    def __init__(self, capacity: int) -> None:
        super().__init__(capacity)
        self._once: OrderedDict[int, None] = OrderedDict()
        self._again: OrderedDict[int, None] = OrderedDict()
        self._once_gone: OrderedDict[int, None] = OrderedDict()
        self._again_gone: OrderedDict[int, None] = OrderedDict()
        self._target = 0.0
        """Of ``_once``."""

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
            total = sum(map(len, (self._once, self._again, self._once_gone, self._again_gone)))
            if total >= self.capacity:
                if total == 2 * self.capacity:
                    self._again_gone.popitem(last=False)
                self._drop(from_again_gone=False)
        self._once[block] = None

    def _drop(self, *, from_again_gone: bool) -> None:
        if len(self._once) + len(self._again) < self.capacity:
            return
        held = len(self._once)
        if held and (held > self._target or (from_again_gone and held == self._target) or not self._again):
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
"""Hits of each, given the requests and the number of blocks that it may hold; beside LRU and the best possible."""
