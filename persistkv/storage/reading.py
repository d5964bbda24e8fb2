"""Promotion's inner loop: keys to frames, frames to gathered reads, reads to verified rows.

A job is cut into parts of some MiB, which are read beside each other. Frames that lie side by side in a pack become one
span. Nothing is copied where the medium or the codec can write into the rows: blocks of raw frames are read straight
into them, wanted or not for the whole frame; encoded frames are decoded straight into rows that lie side by side. What
is not wanted, and what is still encoded, goes to scratch memory. The thread that read a part verifies and decodes it,
while other threads read on.

Over a network each call takes long, so encoded frames that lie side by side are one call there: they come through the
memory of one frame, and are decoded as they arrive.
"""

from __future__ import annotations

import logging
from bisect import bisect_right
from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import accumulate, groupby, zip_longest

import numpy as np

from persistkv.errors import CorruptPackError, StoreError
from persistkv.storage.backend import Backend, ReadSpan
from persistkv.storage.extensions import read_frames
from persistkv.storage.index import HeldPack, Index
from persistkv.storage.pack import FRAME_BYTES, Frame, align, decode_frame, frame_checksum, frame_seed, verify_frame
from persistkv.storage.rows import Rows, runs
from persistkv.storage.scratch import Lease, Scratch

logger = logging.getLogger(__name__)

_UNWANTED = -1

_REMOTE_PART_BYTES = 36 << 20  # 36 MiB: a pack that is cut at fixed depths, padding included, in one request
_PART_BYTES = (1 << 20, 4 << 20)
"""1 to 4 MiB, an equal share for each thread: one gathered read. Longer parts leave more to verify when the disk is
done. Shorter ones wake threads more often, and each waits for a processor if the engine is busy: in reads of 2 MiB,
jobs of 32 MiB took 16 to 18 ms instead of 11 to 12."""


def part_bytes(num_bytes: int, threads: int, *, remote: bool) -> int:
    """Stored bytes of a part of a job.

    :param num_bytes: of the whole job, at most.
    :param threads: that read beside each other.
    """
    least, most = _PART_BYTES
    return _REMOTE_PART_BYTES if remote else min(max(least, -(-num_bytes // max(1, threads))), most)


@dataclass
class ReadOutcome:
    """What came of a part, or of a whole job."""

    failed: list[bytes] = field(default_factory=list)
    """Keys that could not be served."""
    suspects: dict[bytes, HeldPack] = field(default_factory=dict)
    """Packs with a frame that did not verify, or that the backend does not have, as the index knew them."""
    bad_frames: int = 0
    raw_bytes: int = 0
    """Bytes that were filled and verified."""

    def add(self, other: ReadOutcome) -> None:
        """Take in what came of another part."""
        self.failed += other.failed
        self.suspects.update(other.suspects)
        self.bad_frames += other.bad_frames
        self.raw_bytes += other.raw_bytes


@dataclass(slots=True)
class FrameRead:
    """One frame, and where its blocks are wanted."""

    pack: HeldPack
    frame: Frame
    keys: Sequence[bytes]
    """Those of its blocks."""
    rows: list[int]
    """For each block, the row that it is wanted in, or ``_UNWANTED``."""
    copies: list[tuple[int, int]] = field(default_factory=list)
    """(position in the frame, row): where a block is wanted beside that."""

    @property
    def whole(self) -> bool:
        """Whether all of its blocks are wanted."""
        return _UNWANTED not in self.rows

    @property
    def wanted(self) -> list[bytes]:
        """The keys, as often as they are wanted."""
        once = [key for key, row in zip(self.keys, self.rows, strict=True) if row != _UNWANTED]
        return once + [self.keys[position] for position, _ in self.copies]


def plan_reads(
    index: Index,
    rows: Rows,
    keys: Sequence[bytes],
    block_ids: Sequence[int],
    part_bytes: int,
    scratch_bytes: int,
    *,
    remote: bool = False,
) -> tuple[list[list[FrameRead]], list[bytes]]:
    """The frames that hold ``keys``, which are wanted in the rows ``block_ids``, in parts; and the missing.

    :param block_ids: one for each key.
    :param part_bytes: stored bytes of a part. A new one begins with each pack, unless what is there is small.
    :param scratch_bytes: of those, what cannot be read straight into rows.
    :param remote: encoded frames that lie side by side are a part of their own, which takes no more than one of them.
    """
    fitting: list[FrameRead] = []
    streamed: list[list[FrameRead]] = []
    missing: list[bytes] = []
    for pack, some, places in _by_pack(index, keys, block_ids):
        if pack is None:
            missing += some
            continue
        reads = []
        for read in _frames(pack, some, places):
            if _fits(read.frame, rows):
                reads.append(read)
            else:
                missing += read.wanted
        for run in _neighbours(reads) if remote else [reads]:
            if remote and _is_streamed(run):
                streamed += _cut(run, part_bytes)
            else:
                fitting += run
    return [*streamed, *_parts(fitting, part_bytes, scratch_bytes)], missing


def _by_pack(
    index: Index, keys: Sequence[bytes], block_ids: Sequence[int]
) -> list[tuple[HeldPack | None, Sequence[bytes], Sequence[int]]]:
    """Packs, and what is wanted of each; None has what no pack holds."""
    holders = index.packs_of(keys)
    if holders and holders.count(holders[0]) == len(holders):  # the usual case: a context that was stored as one
        return [(holders[0], keys, block_ids)]
    found: dict[HeldPack | None, tuple[list[bytes], list[int]]] = {}
    for pack, key, row in zip(holders, keys, block_ids, strict=True):
        some, places = found.setdefault(pack, ([], []))
        some.append(key)
        places.append(row)
    return [(pack, *wanted) for pack, wanted in found.items()]


def _neighbours(reads: Iterable[FrameRead]) -> Iterator[list[FrameRead]]:
    """Frames of one pack, in order, as runs of those that lie side by side."""
    run: list[FrameRead] = []
    for read in reads:
        if run and read.frame.offset != align(run[-1].frame.offset + run[-1].frame.stored_length):
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
    """In the order they lie in the pack."""
    first = pack.keys.index(keys[0])
    if pack.keys[first : first + len(keys)] == tuple(keys):  # the usual case, and several times as fast
        return _run_of_frames(pack, first, block_ids)
    frames = pack.frames
    starts = list(accumulate((frame.block_count for frame in frames[:-1]), initial=0))
    places = {key: position for position, key in enumerate(pack.keys)}
    reads: dict[int, FrameRead] = {}
    for key, row in zip(keys, block_ids, strict=True):
        position = places[key]
        number = bisect_right(starts, position) - 1
        start, frame = starts[number], frames[number]
        if number not in reads:
            keys_there = pack.keys[start : start + frame.block_count]
            reads[number] = FrameRead(pack, frame, keys_there, [_UNWANTED] * frame.block_count)
        read = reads[number]
        if read.rows[position - start] == _UNWANTED:
            read.rows[position - start] = row
        else:
            read.copies.append((position - start, row))
    return [reads[number] for number in sorted(reads)]


def _run_of_frames(pack: HeldPack, first: int, block_ids: Sequence[int]) -> list[FrameRead]:
    """The frames of consecutive blocks.

    :param first: position of the first one in the pack.
    """
    reads = []
    start, end = 0, first + len(block_ids)
    for frame in pack.frames:
        stop = start + frame.block_count
        if start < end and stop > first:
            before, behind = max(0, first - start), max(0, stop - end)
            rows = [*block_ids[start + before - first : stop - behind - first]]
            rows = [_UNWANTED] * before + rows + [_UNWANTED] * behind
            reads.append(FrameRead(pack, frame, pack.keys[start:stop], rows))
        start = stop
    return reads


def _fits(frame: Frame, rows: Rows) -> bool:
    groups = rows.layout.groups
    return frame.group < len(groups) and groups[frame.group].block_bytes == frame.block_bytes


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
    """Whether some of its stored bytes do not go straight into rows."""
    return read.frame.encoded or not read.whole


def make_scratch(part_bytes: int) -> Scratch:
    """Room for the stored bytes of a part, for one decoded frame, and for padding."""
    return Scratch(part_bytes + 2 * FRAME_BYTES)


@dataclass
class _Placed:
    """A frame, and the memory that its stored bytes go to."""

    read: FrameRead
    buffers: list[memoryview]
    direct: bool
    """The wanted blocks are in their rows once the buffers are filled."""

    @property
    def end(self) -> int:
        """Where its buffers end in the pack."""
        return self.read.frame.offset + sum(map(len, self.buffers))


def read_part(
    backend: Backend, namespace: bytes, rows: Rows, scratch: Scratch, part: Sequence[FrameRead]
) -> ReadOutcome:
    """Fill rows. May run in any thread, beside others. Raises nothing: a read that fails, by whatever, is a miss."""
    try:
        with scratch.lend() as lease:
            if backend.capabilities.remote and _is_streamed(part):
                return _read_streamed(backend, namespace, rows, lease, part)
            return _read_placed(backend, namespace, rows, lease, [_place(read, rows, lease) for read in part])
    except Exception as error:
        return _give_up(part, error)


def _give_up(reads: Collection[FrameRead], error: Exception) -> ReadOutcome:
    why = str(error) if isinstance(error, StoreError) else repr(error)  # the error itself holds the rows
    logger.warning("reading %d frames failed (%s): their blocks are misses", len(reads), why)
    return ReadOutcome([key for read in reads for key in read.wanted])


def _read_streamed(
    backend: Backend, namespace: bytes, rows: Rows, lease: Lease, part: Sequence[FrameRead]
) -> ReadOutcome:
    """Frames of one pack that lie side by side, through the memory of the largest. What came before a failure stays."""
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


def _read_placed(
    backend: Backend, namespace: bytes, rows: Rows, lease: Lease, placed: Sequence[_Placed]
) -> ReadOutcome:
    """One read, then verification of every frame.

    :raises Exception: the read failed, or a frame could not be processed; what the rows hold is undefined.
    """
    outcome = ReadOutcome()
    padding = lease.take(align(1))
    raw = lease.take(max(one.read.frame.raw_length for one in placed))
    spans = list(_side_by_side(placed))
    answers = backend.read(namespace, [_span(frames, padding) for frames in spans])
    for frames, filled in zip(spans, answers, strict=True):
        for frame in frames:
            _finish(frame, namespace, rows, raw, outcome, filled)
    return outcome


def _place(read: FrameRead, rows: Rows, lease: Lease) -> _Placed:
    """Decide where the frame's stored bytes go."""
    frame = read.frame
    if frame.encoded:  # with its padding: whole pages are what is read past the page cache
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


def _side_by_side(placed: Iterable[_Placed]) -> Iterator[list[_Placed]]:
    """Frames of one pack that follow one another, but for padding."""
    frames: list[_Placed] = []
    for one in placed:
        if frames and (frames[0].read.pack is not one.read.pack or one.read.frame.offset != align(frames[-1].end)):
            yield frames
            frames = []
        frames.append(one)
    if frames:
        yield frames


def _span(frames: Sequence[_Placed], padding: memoryview) -> ReadSpan:
    """Neighbours as one span; the padding between them goes nowhere."""
    buffers: list[memoryview] = []
    for one, following in zip_longest(frames, frames[1:]):
        buffers += one.buffers
        if following is not None and following.read.frame.offset != one.end:
            buffers.append(padding[: following.read.frame.offset - one.end])
    first = frames[0].read
    return ReadSpan(first.pack.pack_id, first.frame.offset, buffers)


def _finish(placed: _Placed, namespace: bytes, rows: Rows, raw: memoryview, outcome: ReadOutcome, filled: bool) -> None:
    """Verify the frame and see to it that its blocks are in their rows, or give them up."""
    read = placed.read
    if not filled:
        outcome.suspects[read.pack.pack_id] = read.pack
        outcome.failed += read.wanted
        return
    seed = frame_seed(namespace, b"".join(read.keys))
    try:
        if placed.direct:
            _verify_pieces(read.frame, placed.buffers, seed)
            _copy_repeated(read, rows)
        else:
            stored = placed.buffers[0][: read.frame.stored_length]
            verify_frame(read.frame, stored, seed)
            _decode(read, stored, rows, raw)
    except CorruptPackError as error:
        outcome.failed += read.wanted
        if error.field != "codec":  # a codec of another release's is no damage: its pack is that release's to read
            outcome.bad_frames += 1
            outcome.suspects[read.pack.pack_id] = read.pack
    else:
        blocks = len(read.rows) - read.rows.count(_UNWANTED) + len(read.copies)
        outcome.raw_bytes += blocks * read.frame.block_bytes


def _verify_pieces(frame: Frame, pieces: Iterable[memoryview], seed: int) -> None:
    if frame_checksum(pieces, seed) != frame.checksum:
        raise CorruptPackError("frame checksum", f"does not match at offset {frame.offset}")


def _copy_repeated(read: FrameRead, rows: Rows) -> None:
    """One job may want a block in several rows; it was read into the one in ``rows``."""
    group = read.frame.group
    for position, row in read.copies:
        rows.scatter(group, [row], rows.gather(group, [read.rows[position]]))


def _decode(read: FrameRead, stored: memoryview, rows: Rows, raw: memoryview) -> None:
    frame, codec = read.frame, read.pack.codec
    if read.whole:
        places = rows.pieces(frame.group, read.rows)
        if len(places) == 1:
            decode_frame(codec, frame, stored, places[0])
            _copy_repeated(read, rows)
            return
    out = raw[: frame.raw_length]
    decode_frame(codec, frame, stored, out)
    wants = [(position, row) for position, row in enumerate(read.rows) if row != _UNWANTED] + read.copies
    blocks = np.frombuffer(out, dtype=np.uint8).reshape(frame.block_count, frame.block_bytes)
    rows.scatter(frame.group, [row for _, row in wants], blocks[[position for position, _ in wants]])
