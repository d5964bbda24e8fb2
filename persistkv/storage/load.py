"""Read path of promotions: find the frames that hold the keys, read them with few calls, verify them, fill the rows.

A job is cut into parts of some MiB, which are read concurrently. Adjacent frames of a pack form one span. Bytes are not
copied if the medium or the codec can write into the rows: raw frames are read straight into them, even if only some of
a frame's blocks are wanted, and whole encoded frames are decoded straight into consecutive rows. Unwanted blocks and
encoded bytes are read into temporary buffers (scratch memory). The thread that read a part verifies and decodes it,
while other threads continue to read.

A call to a remote store has high latency, so one call reads all adjacent encoded frames. They share a buffer of the
size of the largest frame, and are decoded as they arrive.
"""

from __future__ import annotations

import logging
import mmap
from collections.abc import Collection, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import groupby, zip_longest

import numpy as np

from persistkv.config import PAGE_BYTES
from persistkv.errors import CorruptPackError, StoreError
from persistkv.memory.pages import huge_memory
from persistkv.memory.rows import Rows, runs
from persistkv.storage.backend import Backend, ReadSpan
from persistkv.storage.extensions import read_frames
from persistkv.storage.format.pack import (
    FRAME_BYTES,
    Frame,
    align,
    decode_frame,
    frame_checksum,
    frame_seed,
    verify_frame,
)
from persistkv.storage.index import HeldPack

logger = logging.getLogger(__name__)

_UNWANTED = -1  # in the place of a row: no row receives the block

_REMOTE_PART_BYTES = 36 << 20  # 36 MiB: one request reads a pack that was cut at fixed depths, with its padding
_PART_BYTES = (1 << 20, 16 << 20)
"""Bounds of a part, 1 to 16 MiB; between them, each thread gets an equal share of the job. Shorter parts keep the disk
waiting: with reads of 4 MiB, cold jobs of 512 x 64 KiB took 18.4 ms alone and 16.3 ms in a queue; with one part per
thread, 17.3 and 14.3 ms. The disk alone took 13.3 ms."""


def part_bytes(num_bytes: int, threads: int, *, remote: bool) -> int:
    """Return the bound, in stored bytes, of the parts into which a load job is cut.

    :param num_bytes: upper bound on the raw bytes of the whole job.
    :param threads: number of threads that read concurrently.
    :param remote: whether calls of the backend use a network; then parts are larger and fewer.
    """
    least, most = _PART_BYTES
    return _REMOTE_PART_BYTES if remote else min(max(least, -(-num_bytes // max(1, threads))), most)


class Scratch:
    """Pool of equal buffers. It grows to the largest number that was lent at once."""

    def __init__(self, num_bytes: int) -> None:
        """Create an empty pool; buffers are allocated on demand.

        :param num_bytes: size of one buffer, rounded up to a multiple of 4 KiB.
        """
        self._num_bytes = align(max(num_bytes, PAGE_BYTES))
        self._free: list[mmap.mmap] = []

    @contextmanager
    def lend(self) -> Iterator[Lease]:
        """Lend a buffer for the duration of the ``with`` block. Thread-safe.

        Memory taken from it must not be used after the block.
        """
        try:
            buffer = self._free.pop()
        except IndexError:
            buffer = huge_memory(self._num_bytes)
        try:
            yield Lease(memoryview(buffer))
        finally:
            self._free.append(buffer)


class Lease:
    """Allocator that divides one buffer of ``Scratch`` from front to back."""

    def __init__(self, buffer: memoryview) -> None:
        self._rest = buffer

    def take(self, num_bytes: int) -> memoryview:
        """Return page-aligned memory of ``num_bytes`` bytes.

        If the rest of the buffer is too small, as for a very large block, this is new memory, which is not kept in the
        pool.
        """
        taken = align(num_bytes)
        if taken > len(self._rest):
            return memoryview(mmap.mmap(-1, max(taken, PAGE_BYTES)))[:num_bytes]
        piece, self._rest = self._rest[:num_bytes], self._rest[taken:]
        return piece


@dataclass
class ReadOutcome:
    """Result of a load job, or of one of its parts."""

    failed: list[bytes] = field(default_factory=list)
    """Keys whose blocks were not read and verified."""
    suspects: dict[bytes, HeldPack] = field(default_factory=dict)
    """Packs with a frame that failed verification, and packs that are absent or too short, by id."""
    bad_frames: int = 0
    """Number of frames that failed verification or decoding, without those of a codec that this release lacks."""
    raw_bytes: int = 0
    """Raw bytes of the blocks that were verified and put into rows."""

    def add(self, other: ReadOutcome) -> None:
        """Add the result of another part to this one."""
        self.failed += other.failed
        self.suspects.update(other.suspects)
        self.bad_frames += other.bad_frames
        self.raw_bytes += other.raw_bytes


@dataclass(slots=True)
class FrameRead:
    """One frame, and the rows into which its blocks are read."""

    pack: HeldPack
    frame: Frame
    keys: Sequence[bytes]
    """Keys of all blocks of the frame."""
    rows: list[int]
    """For each block of the frame, the row to fill; ``_UNWANTED`` (-1) if the job does not want the block."""

    @property
    def whole(self) -> bool:
        """Whether all blocks of the frame are wanted."""
        return _UNWANTED not in self.rows

    @property
    def wanted(self) -> list[bytes]:
        """Keys of the blocks that the job wants."""
        return [key for key, row in zip(self.keys, self.rows, strict=True) if row != _UNWANTED]


def plan_reads(
    holders: Sequence[HeldPack | None],
    rows: Rows,
    keys: Sequence[bytes],
    block_ids: Sequence[int],
    part_bytes: int,
    scratch_bytes: int,
    *,
    remote: bool = False,
) -> tuple[list[list[FrameRead]], list[bytes]]:
    """Return the frames that hold ``keys``, divided into parts, and the missing keys.

    A key is missing if no pack holds it, or if the size of its block is not that of ``rows``.

    :param holders: for each key, a pack that holds it; None if it is not held.
    :param block_ids: for each key, the row into which its block is read.
    :param part_bytes: bound on the stored bytes of a part. Each pack starts a new part, unless the current one has
        fewer than ``scratch_bytes``.
    :param scratch_bytes: bound on the bytes of a part that are not read straight into rows.
    :param remote: whether the store is remote. Then adjacent encoded frames are a part of their own, without the
        bound ``scratch_bytes``: they pass through a buffer for one frame.
    """
    fitting: list[FrameRead] = []
    streamed: list[list[FrameRead]] = []
    missing: list[bytes] = []
    sizes = dict(enumerate(group.block_bytes for group in rows.layout.groups))
    for pack, some, places in _by_pack(holders, keys, block_ids):
        if pack is None:
            missing += some
            continue
        reads = []
        for read in _frames(pack, some, places):
            if sizes.get(read.frame.group) == read.frame.block_bytes:
                reads.append(read)
            else:
                missing += read.wanted
        for run in _adjacent(reads) if remote else [reads]:
            if remote and _is_streamed(run):
                streamed += _cut(run, part_bytes)
            else:
                fitting += run
    return [*streamed, *_parts(fitting, part_bytes, scratch_bytes)], missing


def _by_pack(
    holders: Sequence[HeldPack | None], keys: Sequence[bytes], block_ids: Sequence[int]
) -> list[tuple[HeldPack | None, Sequence[bytes], Sequence[int]]]:
    """Return each pack with the keys that it holds and their rows; the pack is None for keys that no pack holds."""
    if holders and holders.count(holders[0]) == len(holders):  # the usual case: a context that was stored as one
        return [(holders[0], keys, block_ids)]
    found: dict[HeldPack | None, tuple[list[bytes], list[int]]] = {}
    for pack, key, row in zip(holders, keys, block_ids, strict=True):
        some, places = found.setdefault(pack, ([], []))
        some.append(key)
        places.append(row)
    return [(pack, *wanted) for pack, wanted in found.items()]


def _adjacent(reads: Iterable[FrameRead]) -> Iterator[list[FrameRead]]:
    """Divide frames into runs that are consecutive in one pack, apart from padding."""
    run: list[FrameRead] = []
    for read in reads:
        if run:
            before = run[-1].frame
            if read.pack is not run[-1].pack or read.frame.offset != align(before.offset + before.stored_length):
                yield run
                run = []
        run.append(read)
    if run:
        yield run


def _is_streamed(run: Iterable[FrameRead]) -> bool:
    return any(read.frame.encoded for read in run)


def _cut(run: Sequence[FrameRead], part_bytes: int) -> Iterator[list[FrameRead]]:
    first = run[0].frame.offset
    for _, part in groupby(run, key=lambda read: (read.frame.offset - first) // part_bytes):
        yield list(part)


def _frames(pack: HeldPack, keys: Sequence[bytes], block_ids: Sequence[int]) -> list[FrameRead]:
    """Return the frames of the pack that hold the keys, in the order of the pack. The pack must hold all keys."""
    rows = [_UNWANTED] * len(pack.keys)
    first = pack.start_of(keys)
    if first is not None:
        rows[first : first + len(keys)] = block_ids
    else:
        for key, row in zip(keys, block_ids, strict=True):
            rows[pack.places[key]] = row
    reads = []
    start = 0
    for frame in pack.table.frames:
        stop = start + frame.block_count
        of_frame = rows[start:stop]
        if of_frame.count(_UNWANTED) < len(of_frame):
            reads.append(FrameRead(pack, frame, pack.keys[start:stop], of_frame))
        start = stop
    return reads


def _parts(reads: Iterable[FrameRead], part_bytes: int, scratch_bytes: int) -> Iterator[list[FrameRead]]:
    part: list[FrameRead] = []
    size = aside = 0
    for read in reads:
        length = align(read.frame.stored_length)
        beside = length if _needs_scratch(read) else 0
        full = size + length > part_bytes or aside + beside > scratch_bytes
        if part and (full or (size >= scratch_bytes and part[-1].pack is not read.pack)):
            yield part
            part, size, aside = [], 0, 0
        part.append(read)
        size += length
        aside += beside
    if part:
        yield part


def _needs_scratch(read: FrameRead) -> bool:
    """Return whether some of the frame's stored bytes are not read straight into rows."""
    return read.frame.encoded or not read.whole


def make_scratch(part_bytes: int) -> Scratch:
    """Return a pool of buffers, each with room for one part: at most ``part_bytes`` stored bytes that are not read
    straight into rows, one decoded frame, and padding.
    """
    return Scratch(part_bytes + 2 * FRAME_BYTES)


@dataclass
class _Placed:
    """A frame, and the memory into which its stored bytes are read."""

    read: FrameRead
    buffers: list[memoryview]
    """In the order of the stored bytes: rows or scratch memory."""
    direct: bool
    """Whether the buffers include the rows of the wanted blocks, so that no decoding is needed."""

    @property
    def end(self) -> int:
        """Offset in the pack after the last byte that the buffers receive."""
        return self.read.frame.offset + sum(map(len, self.buffers))


def read_part(
    backend: Backend, namespace: bytes, rows: Rows, scratch: Scratch, part: Sequence[FrameRead]
) -> ReadOutcome:
    """Read, verify and decode one part into its rows. Thread-safe.

    Raises no errors: the keys that an error affects are in ``ReadOutcome.failed``.
    """
    try:
        with scratch.lend() as lease:
            if backend.capabilities.remote and _is_streamed(part):
                return _read_streamed(backend, namespace, rows, lease, part)
            outcome = ReadOutcome()
            adjacent = [[_place(read, rows, lease) for read in run] for run in _adjacent(part)]
            padding = lease.take(align(1))
            raw = lease.take(max(read.frame.raw_length for read in part))
            answers = backend.read(namespace, [_span(frames, padding) for frames in adjacent])
            for frames, filled in zip(adjacent, answers, strict=True):
                for placed in frames:
                    _finish(placed, namespace, rows, raw, outcome, filled)
            return outcome
    except Exception as error:
        return _give_up(part, error)


def _give_up(reads: Collection[FrameRead], error: Exception) -> ReadOutcome:
    why = str(error) if isinstance(error, StoreError) else repr(error)  # the exception keeps references to the rows
    logger.warning("reading %d frames failed (%s): their blocks are misses", len(reads), why)
    return ReadOutcome([key for read in reads for key in read.wanted])


def _read_streamed(
    backend: Backend, namespace: bytes, rows: Rows, lease: Lease, part: Sequence[FrameRead]
) -> ReadOutcome:
    """Read adjacent frames of one pack through one buffer of the size of the largest.

    If the read fails, blocks of the frames before the failure are still served.
    """
    outcome, left = ReadOutcome(), dict(enumerate(part))
    frames = [read.frame for read in part]
    buffer = lease.take(max(frame.stored_length for frame in frames))
    raw = lease.take(max(frame.raw_length for frame in frames))

    def take(number: int, stored: memoryview) -> None:
        _finish(_Placed(left[number], [stored], False), namespace, rows, raw, outcome, True)
        del left[number]

    try:
        read_frames(backend, namespace, part[0].pack.pack_id, frames, buffer, take)
    except Exception as error:
        outcome.add(_give_up(left.values(), error))
    else:
        for read in left.values():
            _finish(_Placed(read, [], False), namespace, rows, raw, outcome, False)
    return outcome


def _place(read: FrameRead, rows: Rows, lease: Lease) -> _Placed:
    """Choose the memory into which the frame's stored bytes are read."""
    frame = read.frame
    if frame.encoded:  # with its padding: reads that bypass the page cache need whole pages
        return _Placed(read, [lease.take(align(frame.stored_length))], False)
    if read.whole:
        return _Placed(read, rows.pieces(frame.group, read.rows), True)
    size, aside = frame.block_bytes, lease.take(frame.stored_length)
    buffers: list[memoryview] = []
    begin = 0
    for first, end in runs([position for position, row in enumerate(read.rows) if row != _UNWANTED]):
        buffers.append(aside[begin * size : first * size])
        buffers += rows.pieces(frame.group, read.rows[first:end])
        begin = end
    buffers.append(aside[begin * size :])
    return _Placed(read, [buffer for buffer in buffers if buffer], True)


def _span(frames: Sequence[_Placed], padding: memoryview) -> ReadSpan:
    """Return adjacent frames as one span. Padding between them is read into ``padding``, one page, and ignored."""
    buffers: list[memoryview] = []
    for one, following in zip_longest(frames, frames[1:]):
        buffers += one.buffers
        if following is not None and following.read.frame.offset != one.end:
            buffers.append(padding[: following.read.frame.offset - one.end])
    first = frames[0].read
    return ReadSpan(first.pack.pack_id, first.frame.offset, buffers)


def _finish(placed: _Placed, namespace: bytes, rows: Rows, raw: memoryview, outcome: ReadOutcome, filled: bool) -> None:
    """Verify the frame, put its blocks into their rows and add the result to ``outcome``.

    The keys of a bad frame are added to ``outcome.failed``.

    :param raw: temporary memory for one decoded frame.
    :param filled: whether the medium filled the frame's buffers; if not, its keys are added to ``outcome.failed``.
    """
    read = placed.read
    if not filled:
        outcome.suspects[read.pack.pack_id] = read.pack
        outcome.failed += read.wanted
        return
    seed = frame_seed(namespace, b"".join(read.keys))
    try:
        if placed.direct:
            if frame_checksum(placed.buffers, seed) != read.frame.checksum:
                raise CorruptPackError("frame checksum", f"does not match at offset {read.frame.offset}")
        else:
            stored = placed.buffers[0][: read.frame.stored_length]
            verify_frame(read.frame, stored, seed)
            _decode(read, stored, rows, raw)
    except CorruptPackError as error:
        outcome.failed += read.wanted
        if error.field != "codec":  # a codec of another release is not damage: that release can read the pack
            outcome.bad_frames += 1
            outcome.suspects[read.pack.pack_id] = read.pack
    else:
        blocks = len(read.rows) - read.rows.count(_UNWANTED)
        outcome.raw_bytes += blocks * read.frame.block_bytes


def _decode(read: FrameRead, stored: memoryview, rows: Rows, raw: memoryview) -> None:
    frame, codec = read.frame, read.pack.table.codec
    if read.whole:
        places = rows.pieces(frame.group, read.rows)
        if len(places) == 1:
            decode_frame(codec, frame, stored, places[0])
            return
    out = raw[: frame.raw_length]
    decode_frame(codec, frame, stored, out)
    wanted = [position for position, row in enumerate(read.rows) if row != _UNWANTED]
    blocks = np.frombuffer(out, dtype=np.uint8).reshape(frame.block_count, frame.block_bytes)
    rows.scatter(frame.group, [read.rows[position] for position in wanted], blocks[wanted])
