"""Which tier loads which blocks of a prefix."""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

from persistkv.tiering.isolated_tier import IsolatedTier


class TierRun(NamedTuple):
    """Consecutive keys of a prefix that one tier would load."""

    tier: IsolatedTier
    start: int
    """Index of the first key."""
    stop: int
    """Index after the last key."""


def assign_runs(held: Mapping[IsolatedTier, int], block_bytes: int) -> list[TierRun]:
    """Divide a prefix among the tiers that hold it: each block is loaded by the tier that is
    expected to be the fastest; of equal ones, by the first.

    :param held: for each tier, in the order of lookups, the number of the prefix's leading keys
        that it holds, above 0.
    :param block_bytes: raw bytes of a block.
    """
    if len(held) == 1:
        ((tier, num_held),) = held.items()
        return [TierRun(tier, 0, num_held)]
    runs: list[TierRun] = []
    start = 0
    for stop in sorted(set(held.values())):
        num_bytes = (stop - start) * block_bytes
        holders = [tier for tier, num_held in held.items() if num_held >= stop]
        expected_s = [tier.expected_load_s(num_bytes) or 0.0 for tier in holders]
        fastest = holders[expected_s.index(min(expected_s))]
        if runs and runs[-1].tier is fastest:
            start = runs.pop().start
        runs.append(TierRun(fastest, start, stop))
        start = stop
    return runs
