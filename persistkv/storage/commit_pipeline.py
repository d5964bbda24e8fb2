"""Path from the blocks of jobs to transactions: cut blocks into packs, stage them, divide packs into transactions.

Staging copies the blocks of small packs to memory until enough of them can be written together. The depth of a block is
the number of blocks of its group before it in the context. If depths are known, packs are cut at fixed depths: two
engines that store the same prefix then cut the same packs, under the same names.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import groupby
from operator import attrgetter
from typing import NamedTuple

import numpy as np

from persistkv.config import MAX_PACK_BYTES
from persistkv.memory.rows import RowBlocks, Rows, StagedBlocks
from persistkv.storage.format.pack import UNKNOWN_DEPTH
from persistkv.storage.format.pack_writer import PackWriter, Segment
from persistkv.storage.records import RequestEnd

TARGET_PACK_BYTES = 32 << 20  # 32 MiB: the largest pack that a cut at fixed depths makes
DIRECT_BYTES = 4 << 20  # 4 MiB: smaller packs are staged, to be written together
FULL_BYTES = 16 << 20  # 16 MiB: a request's staged blocks become a pack at this size
_LENT_SHARE = 16  # with ``lends``, a transaction may have this multiple of the bound, so that its duration is limited


@dataclass(eq=False)
class StagedPack:
    """Copies of blocks of one request that will be written as one pack."""

    request: str
    """Id of the request."""
    since: float
    """Time of creation, by ``time.monotonic``."""
    segments: list[Segment] = field(default_factory=list)
    num_bytes: int = 0
    """Raw bytes of all segments."""
    closed: bool = False
    """Complete: blocks are no longer added."""
    claims: dict[bytes, str] = field(default_factory=dict)
    """Key → id of the request that offered it again while the pack was being written."""

    @property
    def num_blocks(self) -> int:
        """Blocks of all segments."""
        return sum(len(segment.keys) for segment in self.segments)


class Staging:
    """Copies of blocks that wait until they form packs of a useful size.

    1. Staged bytes are counted from ``add`` until ``end``, also while a transaction writes them.
    2. A key is found as long as its copy exists. A request that offers the key again while it is being written has a
       claim on the copy: if the transaction fails, the block is staged again for that request.

    ``add`` does not enforce the bound on the bytes: call ``fits`` before.
    """

    def __init__(self, max_bytes: int, max_age_s: float, *, gather_all: bool) -> None:
        """Create an empty staging area.

        :param max_bytes: bound that ``fits`` checks.
        :param max_age_s: age in seconds at which a pack is due.
        :param gather_all: all packs become due together, when the oldest is old enough. If False, each pack becomes due
            when it is full or old enough itself.
        """
        self.num_bytes = 0
        """Raw bytes of all copies."""
        self._max_bytes = max_bytes
        self._max_age_s = max_age_s
        self._gather_all = gather_all
        self._waiting: dict[StagedPack, None] = {}
        self._waiting_bytes = 0
        self._open: dict[str, StagedPack] = {}
        self._pack_of: dict[bytes, StagedPack] = {}

    def __contains__(self, key: bytes) -> bool:
        return key in self._pack_of

    def held(self, keys: Iterable[bytes]) -> list[bytes]:
        """Return the keys that are staged, in order."""
        return [key for key in keys if key in self._pack_of] if self._pack_of else []

    def fits(self, num_bytes: int) -> bool:
        """Whether ``num_bytes`` more raw bytes may be added within the bound."""
        return self.num_bytes + num_bytes <= self._max_bytes

    def add(self, request: str, segments: Iterable[Segment], *, whole: bool = False) -> None:
        """Copy blocks; their rows are free on return.

        :param whole: the blocks form a pack of their own; if False, they are added to the request's open pack.
        """
        pack = StagedPack(request, time.monotonic(), closed=True) if whole else self._open_pack(request)
        self._waiting[pack] = None
        for segment in segments:
            self._add(pack, segment)
        if pack.num_bytes >= FULL_BYTES:
            self._close(pack)

    def _open_pack(self, request: str) -> StagedPack:
        return self._open.setdefault(request, StagedPack(request, time.monotonic()))

    def _add(self, pack: StagedPack, segment: Segment) -> None:
        blocks = segment.source.gather(0, len(segment.keys))
        if isinstance(segment.source, RowBlocks):
            blocks = np.array(blocks, copy=True)
        copied = Segment(segment.group, segment.block_bytes, segment.keys, StagedBlocks([blocks]), segment.depth)
        pack.segments.append(copied)
        pack.num_bytes += segment.raw_length
        self.num_bytes += segment.raw_length
        self._waiting_bytes += segment.raw_length
        self._pack_of.update(dict.fromkeys(segment.keys, pack))

    def _close(self, pack: StagedPack) -> None:
        pack.closed = True
        if self._open.get(pack.request) is pack:
            del self._open[pack.request]

    def claim(self, key: bytes, request: str) -> None:
        """Record that a request offered a staged key: it gets a claim if the key's pack is being written."""
        pack = self._pack_of[key]
        if pack not in self._waiting:
            pack.claims[key] = request

    def owners(self, keys: Iterable[bytes]) -> set[StagedPack]:
        """Return the packs that hold any of these keys and are not being written."""
        return {pack for key in keys if (pack := self._pack_of.get(key)) is not None and pack in self._waiting}

    def of_request(self, request: str) -> list[StagedPack]:
        """Return the packs of a request that are not being written."""
        return [pack for pack in self._waiting if pack.request == request]

    def waiting(self) -> list[StagedPack]:
        """Return all packs that are not being written."""
        return list(self._waiting)

    def due(self) -> list[StagedPack]:
        """Return the packs to write now: those that are due by size or age, or all if they use half of the bound (the
        other half fills while they are written).
        """
        if 2 * self._waiting_bytes >= self._max_bytes:
            return list(self._waiting)
        old = time.monotonic() - self._max_age_s
        if self._gather_all:
            return list(self._waiting) if any(pack.since <= old for pack in self._waiting) else []
        return [pack for pack in self._waiting if pack.closed or pack.since <= old]

    def seconds_to_due(self) -> float | None:
        """Return the seconds until the oldest pack is due by its age; None if no pack waits to be written."""
        if not self._waiting:
            return None
        return max(0.0, min(pack.since for pack in self._waiting) + self._max_age_s - time.monotonic())

    def take(self, pack: StagedPack) -> list[Segment]:
        """Mark a pack as being written, and return its blocks in as few segments as their depths allow. They stay
        staged until ``end``.
        """
        del self._waiting[pack]
        self._waiting_bytes -= pack.num_bytes
        self._close(pack)
        pack.segments = _joined(pack.segments)
        return pack.segments

    def end(self, pack: StagedPack, *, written: bool) -> int:
        """Delete the copies of a pack that was taken, after its transaction; return the number of lost blocks.

        :param written: whether the pack is durable. If not, blocks with a claim are staged again, the others are lost.
        """
        self.num_bytes -= pack.num_bytes
        for segment in pack.segments:
            for key in segment.keys:
                del self._pack_of[key]
        if written:
            return 0
        for segment in pack.segments:
            self._restage(segment, pack.claims)
        return pack.num_blocks - len(pack.claims)

    def _restage(self, segment: Segment, claims: dict[bytes, str]) -> None:
        """Stage blocks with a claim again, in packs of the claiming requests. Drop the other blocks.

        :param claims: as in ``StagedPack``.
        """
        for position, key in enumerate(segment.keys):
            if key in claims:
                block = np.array(segment.source.gather(position, position + 1), copy=True)
                depth = segment.depth if segment.depth == UNKNOWN_DEPTH else segment.depth + position
                one = Segment(segment.group, segment.block_bytes, [key], StagedBlocks([block]), depth)
                self.add(claims[key], [one])


def _joined(segments: Sequence[Segment]) -> list[Segment]:
    """Join segments with consecutive depths, so that they share frames: generated tokens are staged block by block."""
    ordered = sorted(segments, key=lambda s: (s.group, s.depth))
    ends: list[int] = []
    for before, segment in zip([None, *ordered], ordered, strict=False):
        follows = (
            before is not None
            and before.group == segment.group
            and (segment.depth == UNKNOWN_DEPTH == before.depth or segment.depth == before.depth + len(before.keys))
        )
        ends.append(ends[-1] if follows else len(ends))
    runs = groupby(zip(ends, ordered, strict=True), key=lambda pair: pair[0])
    return [_one([segment for _, segment in run]) for _, run in runs]


def _one(run: list[Segment]) -> Segment:
    first = run[0]
    keys = [key for segment in run for key in segment.keys]
    blocks = [segment.source.gather(0, len(segment.keys)) for segment in run]
    return Segment(first.group, first.block_bytes, keys, StagedBlocks(blocks), first.depth)


@dataclass(eq=False)
class Outgoing:
    """Pack that a transaction writes."""

    writer: PackWriter
    staged: StagedPack | None = None
    """Staged copies of its blocks; None: it is written from rows."""


class Transaction(NamedTuple):
    """Packs and ends of requests that are committed together."""

    packs: Sequence[Outgoing]
    ends: Sequence[RequestEnd] = ()
    alone: bool = False
    """Whether it was split from a transaction that failed."""

    def split(self) -> list[Transaction]:
        """Return a transaction for each pack and each end of a request; an empty list if this one cannot be split."""
        if self.alone or not (self.ends or len(self.packs) > 1):
            return []
        alone = [Transaction([one], alone=True) for one in self.packs]
        return alone + [Transaction((), [end], alone=True) for end in self.ends]


def divide(
    outgoing: Iterable[Outgoing], ends: Sequence[RequestEnd], max_bytes: int, *, lends: bool = False
) -> deque[Transaction]:
    """Divide packs in order into at least one transaction, each as large as the bound allows. The last one also commits
    the ends of requests.

    :param max_bytes: bound on the raw bytes of one transaction, which the driver may hold in memory until it ends.
    :param lends: allow 16 times ``max_bytes``, because the driver holds at most ``CommitBatch.memory`` bytes at once.
    """
    slices: list[list[Outgoing]] = [[]]
    most = max_bytes * (_LENT_SHARE if lends else 1)
    size = 0
    for one in outgoing:
        if slices[-1] and size + one.writer.raw_length > most:
            slices.append([])
            size = 0
        slices[-1].append(one)
        size += one.writer.raw_length
    last = slices.pop()
    return deque([*map(Transaction, slices), Transaction(last, ends)])


class Blocks(NamedTuple):
    """Blocks of a job as parallel sequences, so that thousands of blocks need no object each."""

    keys: Sequence[bytes]
    groups: Sequence[int]
    """For each block, the number of its KV cache group."""
    rows: Sequence[int]
    """For each block, the number of its row in the primary tier."""
    depths: Sequence[int]
    """For each block, the number of blocks of its group before it in the context; UNKNOWN_DEPTH if not known."""

    def part(self, start: int, stop: int) -> Blocks:
        """Return blocks ``start`` to ``stop - 1``; fewer if there are not so many."""
        return Blocks._make(column[start:stop] for column in self)

    @property
    def chained(self) -> bool:
        """Whether all blocks are of one group and have consecutive, known depths. This is the usual case."""
        if not self.keys or UNKNOWN_DEPTH in self.depths:
            return False
        first, count = self.depths[0], len(self.keys)
        return list(self.depths) == list(range(first, first + count)) and self.groups.count(self.groups[0]) == count


class Block(NamedTuple):
    """One block of a job; the fields are as in ``Blocks``."""

    key: bytes
    group: int
    row: int
    depth: int


@dataclass
class PlannedPack:
    """Blocks in rows that will form one pack."""

    segments: list[Segment] = field(default_factory=list)

    @property
    def raw_length(self) -> int:
        """Raw bytes of all blocks."""
        return sum(segment.raw_length for segment in self.segments)


def blocks_per_pack(rows: Rows, max_bytes: int = TARGET_PACK_BYTES) -> int:
    """Return the maximum number of blocks of each group in a pack that is cut at fixed depths: the largest power of two
    for which these blocks of all groups take at most ``max_bytes`` and 32 MiB; at least 1.

    :param rows: rows of the primary tier; their layout contains the bytes of one block of each group.
    """
    one_of_each = sum(group.block_bytes for group in rows.layout.groups)
    return 1 << max(0, (min(TARGET_PACK_BYTES, max_bytes) // one_of_each).bit_length() - 1)


def plan_packs(rows: Rows, blocks: Blocks, max_bytes: int = MAX_PACK_BYTES) -> list[PlannedPack]:
    """Cut blocks into packs: at depths that are multiples of ``blocks_per_pack``. Blocks of unknown depth fill one pack
    after another.

    :param rows: rows of the primary tier, which contain the blocks.
    :param max_bytes: bound on the raw bytes of a pack, unless one block of each group takes more. Two stores cut the
        same packs of a prefix if ``max_bytes`` is at least 32 MiB in both, or equal in both.
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
    """Cut blocks of one group with consecutive depths into packs, before each depth that is a multiple of ``cut``."""
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
    """Split blocks into runs of one group with consecutive depths, as frames require."""
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
