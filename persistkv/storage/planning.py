"""How a job's blocks are cut into packs.

Where the depth of blocks in their chain is known, packs are cut at fixed depths, so that two engines that store one
prefix cut the same packs, which then have the same names.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from operator import attrgetter
from typing import NamedTuple

from persistkv.storage.pack import MAX_PACK_BYTES, UNKNOWN_DEPTH
from persistkv.storage.pack_writer import Segment
from persistkv.storage.rows import RowBlocks, Rows

TARGET_PACK_BYTES = 32 << 20  # 32 MiB: the largest pack that a cut at fixed depths makes
DIRECT_BYTES = 4 << 20  # 4 MiB: smaller packs wait in staging for company


class Blocks(NamedTuple):
    """The blocks of a job, as columns: thousands of them cost little until somebody looks at one."""

    keys: Sequence[bytes]
    groups: Sequence[int]
    rows: Sequence[int]
    depths: Sequence[int]
    """UNKNOWN_DEPTH where nobody told."""

    def part(self, start: int, stop: int) -> Blocks:
        """Some that stand side by side."""
        return Blocks._make(column[start:stop] for column in self)

    @property
    def chained(self) -> bool:
        """Whether they are of one group, and each is known to follow the one before it: so most jobs are."""
        if not self.keys or UNKNOWN_DEPTH in self.depths:
            return False
        first, count = self.depths[0], len(self.keys)
        return list(self.depths) == list(range(first, first + count)) and self.groups.count(self.groups[0]) == count


class Block(NamedTuple):
    """One block of a job."""

    key: bytes
    group: int
    row: int
    depth: int
    """As in ``Blocks``."""


@dataclass
class PlannedPack:
    """Blocks that lie in rows and go into one pack."""

    segments: list[Segment] = field(default_factory=list)

    @property
    def raw_length(self) -> int:
        """Bytes of all blocks."""
        return sum(segment.raw_length for segment in self.segments)


def blocks_per_pack(rows: Rows, max_bytes: int = TARGET_PACK_BYTES) -> int:
    """Depths between two cuts: the largest power of two of blocks, one of each group, that fits the target."""
    one_of_each = sum(group.block_bytes for group in rows.layout.groups)
    return 1 << max(0, (min(TARGET_PACK_BYTES, max_bytes) // one_of_each).bit_length() - 1)


def plan_packs(rows: Rows, blocks: Blocks, max_bytes: int = MAX_PACK_BYTES) -> list[PlannedPack]:
    """Cut blocks into packs: by depth where it is known, else whenever one is full.

    :param max_bytes: raw bytes of a pack, unless one block has more. Stores cut the same packs of a prefix where it is
        at least the target, or the same in both.
    """
    cut = blocks_per_pack(rows, max_bytes)
    if blocks.chained:
        return [PlannedPack([_segment(rows, part)]) for part in _parts(blocks, cut)]
    by_bucket: dict[int, list[Block]] = {}
    unknown: list[Block] = []
    for block in map(Block._make, zip(*blocks, strict=True)):
        if block.depth == UNKNOWN_DEPTH:
            unknown.append(block)
        else:
            by_bucket.setdefault(block.depth // cut, []).append(block)
    packs = [
        PlannedPack(_segments(rows, sorted(bucket, key=attrgetter("group", "depth")))) for bucket in by_bucket.values()
    ]
    return packs + [PlannedPack(_segments(rows, run)) for run in _full_runs(rows, unknown, max_bytes)]


def _parts(blocks: Blocks, cut: int) -> Iterator[Blocks]:
    """Of blocks that follow one another, those of each pack."""
    start = 0
    while start < len(blocks.keys):
        stop = start + cut - blocks.depths[start] % cut
        yield blocks.part(start, stop)
        start = stop


def _full_runs(rows: Rows, blocks: Iterable[Block], max_bytes: int) -> Iterable[list[Block]]:
    run: list[Block] = []
    size = 0
    for block in blocks:
        length = rows.layout.groups[block.group].block_bytes
        if run and size + length > max_bytes:
            yield run
            run, size = [], 0
        run.append(block)
        size += length
    if run:
        yield run


def _segments(rows: Rows, blocks: Sequence[Block]) -> list[Segment]:
    """Runs of one group whose depths follow one another, as frames ask for."""
    runs: list[list[Block]] = []
    expected = None
    for block in blocks:
        if (block.group, block.depth) == expected:
            runs[-1].append(block)
        else:
            runs.append([block])
        expected = block.group, block.depth + (block.depth != UNKNOWN_DEPTH)
    return [_segment(rows, Blocks._make(zip(*run, strict=True))) for run in runs]


def _segment(rows: Rows, run: Blocks) -> Segment:
    group = run.groups[0]
    return Segment(
        group, rows.layout.groups[group].block_bytes, run.keys, RowBlocks(rows, group, run.rows), run.depths[0]
    )
