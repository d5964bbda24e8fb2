"""Which tier loads which blocks of a prefix, and how many bytes these are."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple

from persistkv.rounding import divide_up
from persistkv.tiering.isolated_tier import IsolatedTier
from persistkv.tiering.load_cost import LoadRun


class GroupSize(NamedTuple):
    """Blocks of one KV cache group."""

    block_tokens: int
    block_bytes: int
    """Raw bytes of a block."""
    window: int | None = None
    """See ``OffloadingConfig.windows``."""


def prefix_bytes(groups: Iterable[GroupSize], num_tokens: int) -> int:
    """Return the raw bytes of the blocks that a load of so many tokens needs, of all groups."""
    num_bytes = 0
    for group in groups:
        needed_tokens = num_tokens
        # a group with a sliding window needs the last tokens only
        if group.window is not None:
            needed_tokens = min(num_tokens, group.window)
        num_blocks = divide_up(needed_tokens, group.block_tokens)
        num_bytes += num_blocks * group.block_bytes
    return num_bytes


class TierRun(NamedTuple):
    """Consecutive keys of a prefix that one tier would load."""

    tier: IsolatedTier
    start: int
    """Index of the first key."""
    stop: int
    """Index after the last key."""


def assign_runs(
    held: Mapping[IsolatedTier, int],
    block_bytes: int,
) -> list[TierRun]:
    """Divide a prefix among the tiers that hold it: each block is loaded by the tier that is
    expected to be the fastest; of equal ones, by the first.

    :param held: for each tier, in the order of lookups, the number of the prefix's leading keys
        that it holds, above 0.
    :param block_bytes: raw bytes of a block.
    """
    # usually, one tier holds blocks: there is nothing to compare
    if len(held) == 1:
        ((only_tier, num_held),) = held.items()
        return [TierRun(only_tier, 0, num_held)]
    runs: list[TierRun] = []
    start = 0
    # Each tier holds a prefix. Between two ends of these prefixes, the same tiers hold all blocks.
    for stop in sorted(set(held.values())):
        num_bytes = (stop - start) * block_bytes
        holders = [tier for tier, num_held in held.items() if num_held >= stop]
        expected_s = {}
        for tier in holders:
            # a tier without an expected time (None) is always loaded from: it counts as the fastest
            expected_s[tier] = tier.expected_load_s(num_bytes) or 0.0
        # ``min`` chooses the first of equally fast tiers
        fastest = min(holders, key=expected_s.__getitem__)
        if runs and runs[-1].tier is fastest:
            # the same tier is the fastest: extend the previous run
            runs[-1] = runs[-1]._replace(stop=stop)
        else:
            runs.append(TierRun(fastest, start, stop))
        start = stop
    return runs


def loads_of_runs(
    runs: Iterable[TierRun],
    groups: Sequence[GroupSize],
    block_tokens: int,
    start: int,
) -> list[LoadRun]:
    """Return the loads of all runs of a prefix, each with the bytes of all groups.

    :param groups: the KV cache groups that the request uses.
    :param block_tokens: tokens of a block.
    :param start: tokens of the request before the first key of the prefix.
    """
    loads = []
    bytes_before = 0
    for run in runs:
        num_tokens = run.stop * block_tokens
        # bytes of this run and the earlier ones
        num_bytes = prefix_bytes(groups, num_tokens)
        load = LoadRun(run.tier, start + num_tokens, num_bytes - bytes_before)
        loads.append(load)
        bytes_before = num_bytes
    return loads
