from __future__ import annotations

import pytest

from benchmarks.trace_policies import OTHER_POLICIES, clairvoyant_hits
from benchmarks.trace_replay import distinct_blocks
from tests.benchmarks.test_replay import make_trace


@pytest.mark.parametrize("name", OTHER_POLICIES)
@pytest.mark.parametrize("seed", range(5))
def test_policy_any_capacity_never_exceeds_clairvoyant_hits(
    name: str, seed: int
) -> None:
    chains = make_trace(seed, 200)
    hits, distinct = OTHER_POLICIES[name], distinct_blocks(chains)
    for capacity in (0, 1, 2, 7, 20, distinct // 2, distinct - 1):
        assert hits(chains, capacity) <= clairvoyant_hits(chains, capacity)
    assert hits(chains, 0) == 0
    assert hits(chains, distinct) == clairvoyant_hits(chains, distinct) > 0


def hits(name: str, chains: list[list[int]], capacity: int) -> int:
    return OTHER_POLICIES[name](chains, capacity)


def test_fifo_full_cache_evicts_first_inserted_despite_reuse() -> None:
    assert hits("fifo", [[1], [2], [1], [3], [1]], 2) == 1
    assert hits("fifo", [[1], [2], [1], [3], [2]], 2) == 2


def test_lfu_full_cache_keeps_most_used_block() -> None:
    assert hits("lfu", [[1], [1], [2], [3], [1]], 2) == 2
    assert hits("lfu", [[1], [1], [2], [3], [2]], 2) == 1


def test_arc_scan_does_not_evict_reused_blocks() -> None:
    scan = [[block] for block in range(100, 120)]
    assert hits("arc", [[1], [2], [1], [2], *scan, [1], [2]], 4) == 4
    assert hits("fifo", [[1], [2], [1], [2], *scan, [1], [2]], 4) == 2
