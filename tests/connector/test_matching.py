"""The search for the longest match, compared with a model that tries every length."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Sequence

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from persistkv.connector.common import KVCacheGroupSpec
from persistkv.connector.matching import (
    GroupBlocks,
    GroupGeometry,
    longest_match,
    longest_that_fits,
)

Context = tuple[list[GroupGeometry], list[set[int]], int, int]


def blocks_needed(geometry: GroupGeometry, length: int, start: int) -> set[int]:
    """Return the offloaded blocks with tokens that the token at ``length`` attends to and the
    caller lacks."""
    window = geometry.spec.sliding_window or length + 1
    tokens = range(max(start, length - window + 1), length)
    return {token // geometry.offloaded_tokens for token in tokens}


def servable(
    groups: Sequence[GroupGeometry],
    present: Sequence[set[int]],
    length: int,
    start: int,
) -> bool:
    return all(
        blocks_needed(geometry, length, start) <= held
        for geometry, held in zip(groups, present, strict=True)
    )


@st.composite
def contexts(draw: st.DrawFn) -> Context:
    factor = draw(st.sampled_from([1, 2, 3]))
    groups = [
        GroupGeometry(
            KVCacheGroupSpec(
                draw(st.sampled_from([1, 2, 4])), draw(st.none() | st.integers(1, 20))
            ),
            block_size_factor=factor,
        )
        for _ in range(draw(st.integers(1, 3)))
    ]
    tokens = draw(st.integers(0, 60))
    present = []
    for geometry in groups:
        count = tokens // geometry.offloaded_tokens
        missing = draw(st.sets(st.integers(0, max(count - 1, 0)), max_size=4))
        present.append(set(range(count)) - missing)
    step = math.lcm(*(geometry.block_size for geometry in groups))
    start = step * draw(st.integers(0, tokens // step))
    return groups, present, tokens, start


def probes(
    groups: Sequence[GroupGeometry],
    present: Sequence[set[int]],
    tokens: int,
    asked: Counter[tuple[int, bytes]],
) -> list[GroupBlocks]:
    def probe(group: int) -> Callable[[bytes], bool]:
        def is_available(key: bytes) -> bool:
            asked[group, key] += 1
            return key[0] in present[group]

        return is_available

    return [
        GroupBlocks(
            geometry,
            [bytes([index]) for index in range(tokens // geometry.offloaded_tokens)],
            probe(group),
        )
        for group, geometry in enumerate(groups)
    ]


# the group that ends the match has smaller blocks than the other one
MIXED_BLOCKS = (
    [
        GroupGeometry(KVCacheGroupSpec(4, None), block_size_factor=1),
        GroupGeometry(KVCacheGroupSpec(1, None), block_size_factor=1),
    ],
    [{0, 1, 2}, {0, 1, 2, 3, 4}],
    12,
    0,
)


@settings(max_examples=200, deadline=None)
@example(MIXED_BLOCKS)
@given(contexts())
def test_longest_match_any_context_equals_exhaustive_search(context: Context) -> None:
    groups, present, tokens, start = context
    unit = math.lcm(*(geometry.offloaded_tokens for geometry in groups))
    limit = max(tokens - 1, 0)
    asked: Counter[tuple[int, bytes]] = Counter()
    found = longest_match(probes(groups, present, tokens, asked), unit, start, limit)
    candidates = [
        length
        for length in range(unit, limit + 1, unit)
        if length > start and servable(groups, present, length, start)
    ]
    assert found == max(candidates, default=0)
    assert set(asked.values()) <= {1}
    assert all(
        (key[0] + 1) * groups[group].offloaded_tokens > start for group, key in asked
    )


@settings(max_examples=100, deadline=None)
@given(contexts(), st.integers(1, 40))
def test_longest_that_fits_any_limit_equals_exhaustive_search(
    context: Context,
    max_blocks: int,
) -> None:
    groups, _, tokens, start = context
    unit = math.lcm(*(geometry.offloaded_tokens for geometry in groups))
    found = longest_that_fits(groups, unit, start, tokens, max_blocks)
    fitting = [
        length
        for length in range(unit, tokens + 1, unit)
        if length > start
        and sum(len(blocks_needed(geometry, length, start)) for geometry in groups)
        <= max_blocks
    ]
    assert found == max(fitting, default=found)
    assert fitting or found <= start


@pytest.mark.parametrize(
    ("missing", "length", "asked"),
    [
        (set(), 40, [9, 8]),  # only the window
        ({9}, 36, [9, 8, 7]),
        ({8}, 32, [9, 8, 7, 6]),
        ({5, 7, 9}, 20, [9, 8, 7, 6, 5, 4, 3]),
        (set(range(10)), 0, list(range(9, -1, -1))),
    ],
)
def test_longest_match_sliding_window_probes_only_blocks_in_window(
    missing: set[int],
    length: int,
    asked: list[int],
) -> None:
    group = GroupGeometry(KVCacheGroupSpec(4, sliding_window=8), block_size_factor=1)
    order = []

    def is_available(key: bytes) -> bool:
        order.append(key[0])
        return key[0] not in missing

    keys = [bytes([index]) for index in range(10)]
    assert longest_match([GroupBlocks(group, keys, is_available)], 4, 0, 41) == length
    assert order == asked
