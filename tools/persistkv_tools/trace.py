"""Traces of prefix reuse, and what caches that hold a number of whole blocks make of them.

A request is the chain of its blocks' ids; equal ids mean equal prefixes, so a block always follows the same one. A hit
is a block of the longest prefix of a request that is held when the request comes; afterwards all its blocks are offered
to the cache.
"""

from __future__ import annotations

import heapq
import lzma
from collections import OrderedDict
from collections.abc import Sequence
from itertools import islice
from pathlib import Path
from typing import TextIO

import msgspec

from persistkv.errors import ConfigurationError

Request = list[int]
"""Ids of the blocks, in order."""

_NEVER = 1 << 62


class _Line(msgspec.Struct):
    """What is read of a line; the rest of it may be anything."""

    hash_ids: Request


def read_trace(path: Path, limit: int | None = None) -> list[Request]:
    """The chains of the first requests of a trace in Mooncake's form (JSON lines), compressed with xz or plain.

    :raises ConfigurationError: it does not read as one, or a block follows two different ones: its id does not stand
        for a prefix.
    """
    requests: list[Request] = []
    parents: dict[int, int] = {}
    try:
        with _opened(path) as lines:
            for line in islice(lines, limit):
                chain = msgspec.json.decode(line, type=_Line).hash_ids
                _check_prefixes(path, chain, parents)
                requests.append(chain)
    except OSError as error:
        raise ConfigurationError("trace", str(path), f"a readable file ({error.strerror or error})") from None
    except (ValueError, EOFError, lzma.LZMAError) as error:
        if isinstance(error, ConfigurationError):
            raise
        expected = f'lines of JSON with "hash_ids", plain or .xz (line {len(requests) + 1}: {error})'
        raise ConfigurationError("trace", str(path), expected) from None
    if not any(requests):
        raise ConfigurationError("trace", str(path), "a trace of at least one block")
    return requests


def _opened(path: Path) -> TextIO:
    return lzma.open(path, "rt") if path.suffix == ".xz" else path.open()


def _check_prefixes(path: Path, chain: Request, parents: dict[int, int]) -> None:
    for parent, block in zip([-1, *chain], chain, strict=False):
        if parents.setdefault(block, parent) != parent:
            expected = f"ids that stand for prefixes; block {block} follows both {parents[block]} and {parent}"
            raise ConfigurationError("trace", str(path), expected)


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
