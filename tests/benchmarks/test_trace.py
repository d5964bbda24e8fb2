"""Reference caches of the trace replay, compared with simple definitions."""

from __future__ import annotations

import random
from functools import cache
from itertools import combinations
from pathlib import Path

import pytest

from benchmarks.replay import CONVERSATION
from benchmarks.trace_policies import clairvoyant_hits, lru_hits
from benchmarks.trace_replay import Request, distinct_blocks, read_trace


def chains(seed: int, count: int) -> list[Request]:
    """Return paths from the root of a small tree, where a node has the children 3 × node + 1 and 3
    × node + 2."""
    draw = random.Random(seed)
    found = []
    for _ in range(count):
        block, chain = 0, []
        for _ in range(draw.randint(1, 3)):
            block = 3 * block + draw.randint(1, 2)
            chain.append(block)
        found.append(chain)
    return found


def prefix_hits(chain: Request, held: frozenset[int]) -> int:
    return next(
        (place for place, block in enumerate(chain) if block not in held), len(chain)
    )


def best_by_trying_all(requests: list[Request], capacity: int) -> int:
    """Return the most prefix hits over all sets of blocks that a cache may keep after each
    request."""

    @cache
    def best(number: int, held: frozenset[int]) -> int:
        if number == len(requests):
            return 0
        chain = requests[number]
        offered = held | set(chain)
        kept = [
            frozenset(choice)
            for choice in combinations(sorted(offered), min(capacity, len(offered)))
        ]
        return prefix_hits(chain, held) + max(
            best(number + 1, choice) for choice in kept
        )

    return best(0, frozenset())


@pytest.mark.parametrize("seed", range(12))
@pytest.mark.parametrize("capacity", [1, 2, 3, 4])
def test_clairvoyant_hits_small_traces_equal_exhaustive_search(
    seed: int,
    capacity: int,
) -> None:
    requests = chains(seed, 7)
    assert clairvoyant_hits(requests, capacity) == best_by_trying_all(
        requests, capacity
    )


def test_lru_hits_full_cache_evicts_oldest_chain_from_its_end() -> None:
    assert lru_hits([[1, 2], [3], [1, 2]], 2) == 1  # 2 was evicted for 3
    assert lru_hits([[1, 2], [3], [1, 2]], 3) == 2


def test_read_trace_block_with_two_parents_raises(tmp_path: Path) -> None:
    path = tmp_path / "trace.jsonl"
    path.write_text('{"hash_ids": [1, 2]}\n{"hash_ids": [3, 2]}\n')
    with pytest.raises(ValueError, match="block 2 follows both"):
        read_trace(path)


def test_read_trace_shipped_trace_matches_documented_counts() -> None:
    requests = read_trace(CONVERSATION)
    blocks = sum(map(len, requests))
    assert (len(requests), blocks, distinct_blocks(requests)) == (
        12_031,
        288_500,
        182_790,
    )
    assert round(lru_hits(requests, blocks) / blocks, 3) == 0.366
