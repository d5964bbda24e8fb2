"""Promotion's inner loop: keys to frames, frames to gathered reads, reads to verified rows.

Frames that lie side by side in a pack become one span. A raw frame that is wanted whole is read straight into the rows
and verified there; any other goes through scratch memory, of which there is a bounded amount at a time.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field

import numpy as np
import xxhash

from persistkv.config import PAGE_BYTES
from persistkv.errors import CorruptPackError, StoreError
from persistkv.storage.backend import Backend, ReadSpan
from persistkv.storage.index import HeldPack, Index
from persistkv.storage.pack import Frame, decode_frame, verify_frame
from persistkv.storage.rows import Rows

logger = logging.getLogger(__name__)

SCRATCH_BYTES = 16 << 20  # 16 MiB: stored bytes that pass through scratch memory in one call of the backend


@dataclass
class ReadOutcome:
    """What came of one job."""

    failed: list[bytes] = field(default_factory=list)
    """Keys that could not be served."""
    suspects: dict[bytes, HeldPack] = field(default_factory=dict)
    """Packs with a frame that did not verify, or that the backend does not have, as the index knew them."""
    bad_frames: int = 0
    raw_bytes: int = 0
    """Bytes that were filled and verified."""


@dataclass
class _FrameRead:
    """One frame, and where its blocks are wanted."""

    pack: HeldPack
    number: int
    wanted: list[tuple[bytes, int, int]] = field(default_factory=list)
    """(key, position in the frame, row)"""
    buffers: list[memoryview] = field(default_factory=list)
    direct: bool = False

    @property
    def frame(self) -> Frame:
        return self.pack.frames[self.number]


def read_blocks(
    backend: Backend, namespace: bytes, index: Index, rows: Rows, wanted: Sequence[tuple[bytes, int]]
) -> ReadOutcome:
    """Fill rows; ``wanted`` is (key, row). Raises nothing of the backend's: a failed read is a miss."""
    outcome = ReadOutcome()
    for batch in _batches(_frames(index, rows, wanted, outcome)):
        for read in batch:
            _place(read, rows)
        spans = list(_spans(batch))
        try:
            answers = backend.read(namespace, [span for span, _ in spans])
        except StoreError as error:
            logger.warning("reading %d frames failed (%s): their blocks are misses", len(batch), error)
            for read in batch:
                _fail(read, outcome)
            continue
        for (_, reads), filled in zip(spans, answers, strict=True):
            for read in reads:
                _finish(read, rows, outcome, filled)
    return outcome


def _frames(index: Index, rows: Rows, wanted: Sequence[tuple[bytes, int]], outcome: ReadOutcome) -> list[_FrameRead]:
    """The frames that hold the keys, in the order they lie in their packs."""
    reads: dict[tuple[bytes, int], _FrameRead] = {}
    for key, row in wanted:
        found = index.locate(key)
        if found is None:
            outcome.failed.append(key)
            continue
        pack, position = found
        number = pack.frame_of(position)
        read = reads.setdefault((pack.pack_id, number), _FrameRead(pack, number))
        read.wanted.append((key, position - pack.starts[number], row))
    fitting = []
    for place in sorted(reads):
        read = reads[place]
        if _fits(read.frame, rows):
            fitting.append(read)
        else:
            _fail(read, outcome)
    return fitting


def _fits(frame: Frame, rows: Rows) -> bool:
    groups = rows.layout.groups
    return frame.group < len(groups) and groups[frame.group].block_bytes == frame.block_bytes


def _batches(reads: Iterable[_FrameRead]) -> Iterator[list[_FrameRead]]:
    batch: list[_FrameRead] = []
    size = 0
    for read in reads:
        if batch and size + read.frame.stored_length > SCRATCH_BYTES:
            yield batch
            batch, size = [], 0
        batch.append(read)
        size += read.frame.stored_length
    if batch:
        yield batch


def _place(read: _FrameRead, rows: Rows) -> None:
    """Decide where the frame's stored bytes go."""
    frame = read.frame
    read.wanted.sort(key=lambda want: want[1])
    positions = [position for _, position, _ in read.wanted]
    read.direct = not frame.encoded and positions == list(range(frame.block_count))
    if read.direct:
        read.buffers = [place for _, _, row in read.wanted for place in rows.places(frame.group, row)]
    else:
        read.buffers = [memoryview(bytearray(frame.stored_length))]


def _spans(batch: Sequence[_FrameRead]) -> Iterator[tuple[ReadSpan, list[_FrameRead]]]:
    """Neighbouring frames of a pack as one span; the padding between them goes nowhere."""
    padding = memoryview(bytearray(PAGE_BYTES))
    reads: list[_FrameRead] = []
    buffers: list[memoryview] = []
    end = 0
    for read in batch:
        gap = read.frame.offset - end
        if reads and (reads[0].pack.pack_id != read.pack.pack_id or not 0 <= gap < PAGE_BYTES):
            yield ReadSpan(reads[0].pack.pack_id, reads[0].frame.offset, buffers), reads
            reads, buffers = [], []
        elif gap and reads:
            buffers.append(padding[:gap])
        reads.append(read)
        buffers += read.buffers
        end = read.frame.offset + read.frame.stored_length
    if reads:
        yield ReadSpan(reads[0].pack.pack_id, reads[0].frame.offset, buffers), reads


def _finish(read: _FrameRead, rows: Rows, outcome: ReadOutcome, filled: bool) -> None:
    """Verify the frame and put its blocks into their rows, or give them up."""
    if not filled:
        outcome.suspects[read.pack.pack_id] = read.pack
        _fail(read, outcome)
        return
    try:
        if read.direct:
            _verify_in_place(read)
        else:
            verify_frame(read.frame, read.buffers[0], read.pack.seeds[read.number])
            _scatter(read, rows)
    except CorruptPackError as error:
        _fail(read, outcome)
        if error.field != "codec":  # a codec of another release's is no damage: its pack is that release's to read
            outcome.bad_frames += 1
            outcome.suspects[read.pack.pack_id] = read.pack
    else:
        outcome.raw_bytes += len(read.wanted) * read.frame.block_bytes


def _verify_in_place(read: _FrameRead) -> None:
    digest = xxhash.xxh3_64(seed=read.pack.seeds[read.number])
    for buffer in read.buffers:
        digest.update(buffer)
    if digest.intdigest() != read.frame.checksum:
        raise CorruptPackError("frame checksum", f"does not match at offset {read.frame.offset}")


def _scatter(read: _FrameRead, rows: Rows) -> None:
    frame = read.frame
    raw = np.empty((frame.block_count, frame.block_bytes), dtype=np.uint8)
    decode_frame(read.pack.codecs, frame, read.buffers[0], raw.data.cast("B"))
    for _, position, row in read.wanted:
        start = 0
        for place in rows.places(frame.group, row):
            place[:] = raw[position, start : start + len(place)].data
            start += len(place)


def _fail(read: _FrameRead, outcome: ReadOutcome) -> None:
    outcome.failed += [key for key, _, _ in read.wanted]
