"""``plan_packs`` divides a job into packs at fixed depths, for any part of a context and any order
of its blocks."""

from __future__ import annotations

import random
from collections.abc import Iterable, Sequence

import pytest

from persistkv.config import GroupLayout, RowLayout
from persistkv.memory.rows import RowBlocks, Rows
from persistkv.storage.format.pack import UNKNOWN_DEPTH
from persistkv.storage.format.pack_writer import Section
from persistkv.storage.store.commit_pipeline import Blocks, blocks_per_pack, plan_packs

STRIDE = 4096
MAX_BYTES = 8 * STRIDE


@pytest.fixture
def rows() -> Rows:
    layout = RowLayout(
        STRIDE, (GroupLayout(((0, STRIDE),)), GroupLayout(((0, STRIDE),)))
    )
    return Rows(memoryview(bytearray(64 * STRIDE)), layout)


def chain(first: int, count: int, group: int = 0) -> Blocks:
    """Return consecutive blocks of one group, in rows that are not adjacent."""
    depths = range(first, first + count)
    keys = [b"%d of %d" % (depth, group) for depth in depths]
    return Blocks(
        keys, [group] * count, [(7 * depth) % 64 for depth in depths], list(depths)
    )


def joined(one: Blocks, other: Blocks) -> Blocks:
    return Blocks._make(
        [*first, *second] for first, second in zip(one, other, strict=True)
    )


SegmentShape = tuple[int, int, list[bytes], list[int], int]
"""Group, bytes per block, keys, rows and depth of a segment."""


def shape(packs: Iterable[Sequence[Section]]) -> list[list[SegmentShape]]:
    """Describe the content of each pack by its segments."""
    return [[shape_of(segment) for segment in segments] for segments in packs]


def shape_of(segment: Section) -> SegmentShape:
    source = segment.source
    assert isinstance(source, RowBlocks)
    return (
        segment.group,
        segment.block_bytes,
        list(segment.keys),
        list(source.block_ids),
        segment.depth,
    )


@pytest.mark.parametrize("first", [0, 3, 8, 61])
@pytest.mark.parametrize("count", [1, 5, 8, 9, 30])
def test_plan_packs_shuffled_blocks_give_same_packs_as_chain(
    rows: Rows,
    first: int,
    count: int,
) -> None:
    blocks = chain(first, count)
    cut = blocks_per_pack(rows, MAX_BYTES)
    planned = shape(plan_packs(rows, blocks, MAX_BYTES))
    assert [segment[4] for (segment,) in planned] == sorted(
        {first, *range(-(-first // cut) * cut, first + count, cut)}
    )
    order = random.Random(count).sample(range(count), count)
    mixed = Blocks._make([column[place] for place in order] for column in blocks)
    assert (
        sorted(shape(plan_packs(rows, mixed, MAX_BYTES)), key=lambda pack: pack[0][4])
        == planned
    )
    assert [key for ((*_, keys, _, _),) in planned for key in keys] == blocks.keys


def test_plan_packs_groups_share_packs_and_unknown_depths_fill_packs(
    rows: Rows,
) -> None:
    both = joined(chain(0, 5), chain(0, 5, group=1))
    cut = blocks_per_pack(rows, MAX_BYTES)
    assert [len(pack) for pack in shape(plan_packs(rows, both, MAX_BYTES))] == [2, 2]
    assert [pack[0][4] for pack in shape(plan_packs(rows, both, MAX_BYTES))] == [0, cut]
    unknown = chain(0, 20)._replace(depths=[UNKNOWN_DEPTH] * 20)
    assert [
        len(pack[0][2]) for pack in shape(plan_packs(rows, unknown, MAX_BYTES))
    ] == [4] * 5


def test_plan_packs_no_blocks_returns_no_packs(rows: Rows) -> None:
    assert plan_packs(rows, Blocks([], [], [], []), MAX_BYTES) == []
