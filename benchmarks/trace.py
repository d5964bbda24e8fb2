"""Traces of prefix reuse, and what caches that hold a number of whole blocks make of them.

A request is the chain of its blocks' ids; equal ids mean equal prefixes, so a block always follows the same one. A hit
is a block of the longest prefix of a request that is held when the request comes; afterwards all its blocks are offered
to the cache.
"""

from __future__ import annotations

import heapq
import json
import lzma
from collections import OrderedDict
from collections.abc import Sequence
from pathlib import Path

Request = list[int]
"""Ids of the blocks, in order."""

CONVERSATION = Path(__file__).parent / "data" / "conversation.jsonl.xz"

_NEVER = 1 << 62


def read_trace(path: Path, limit: int | None = None) -> list[Request]:
    """The chains of the first requests of a trace in Mooncake's form, compressed with xz or plain.

    :raises ValueError: a block that follows two different ones: its id does not stand for a prefix.
    """
    with lzma.open(path, "rt") if path.suffix == ".xz" else path.open() as lines:
        requests = [json.loads(line)["hash_ids"] for _, line in zip(range(limit or _NEVER), lines, strict=False)]
    parents: dict[int, int] = {}
    for chain in requests:
        for parent, block in zip([-1, *chain], chain, strict=False):
            if parents.setdefault(block, parent) != parent:
                raise ValueError(f"{path}: block {block} follows both {parents[block]} and {parent}")
    return requests


def distinct_blocks(requests: Sequence[Request]) -> int:
    """How many different blocks there are."""
    return len({block for chain in requests for block in chain})


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


def prefix_length(chain: Sequence[int], held: OrderedDict[int, None]) -> int:
    """How many blocks from the first on are held."""
    return next((position for position, block in enumerate(chain) if block not in held), len(chain))
