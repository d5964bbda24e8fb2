"""Read path of promotions: find the frames that hold the keys, read them with few calls, verify
them, fill the rows.

A job is cut into parts of some MiB, which are read concurrently. Adjacent frames of a pack form one
span. Frames of which all blocks are wanted are read straight into the rows if they are raw, and
decoded straight into consecutive rows if they are encoded; other frames pass through temporary
buffers (scratch memory). The thread that read a part verifies and decodes it, while other threads
continue to read.

A call to a remote store has high latency, so one call reads all neighbouring frames if some are
encoded, or if the load has a deadline. They pass through a buffer of the size of the largest frame,
as they arrive. Such a read can be abandoned: only this module writes rows, frame by frame, so a
server that hangs keeps none.
"""

from __future__ import annotations

import logging
import mmap
import threading
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import groupby
from typing import NamedTuple

import numpy as np

from persistkv.config import PAGE_BYTES
from persistkv.errors import CorruptPackError, StoreError
from persistkv.memory.pages import huge_memory
from persistkv.memory.rows import BlockMemory
from persistkv.rounding import divide_up
from persistkv.storage.backend import Backend, ReadSpan
from persistkv.storage.format.pack import (
    FRAME_BYTES,
    PlacedFrame,
    align,
    decode_frame,
)
from persistkv.storage.format.seal import FrameSeal
from persistkv.storage.store.index import HeldPack

logger = logging.getLogger(__name__)

_UNWANTED = -1  # stands for a row number if no row receives the block

# 36 MiB: enough for one request to read a pack that was cut at fixed depths, with its padding
_REMOTE_PART_BYTES = 36 << 20
_PART_BYTES = (1 << 20, 16 << 20)
"""Least and greatest bytes of a part of a local store, 1 and 16 MiB; between them, each thread gets
an equal share of the job. Shorter parts keep the disk waiting: with reads of 4 MiB, cold jobs of
512 x 64 KiB took 18.4 ms alone and 16.3 ms in a queue; with one part per thread, 17.3 and 14.3 ms.
The disk alone took 13.3 ms."""

# 256 KiB: largest gap between two frames that one call reads together with them. Reading the gap
# takes less time than a second call.
_MOST_GAP_BYTES = 256 << 10

TakeBuffer = Callable[[int], memoryview]
"""Returns page-aligned scratch memory of a number of bytes."""


def part_bytes(
    num_bytes: int,
    threads: int,
    *,
    remote: bool,
) -> int:
    """Return the bound, in stored bytes, of the parts of a load job of ``num_bytes`` raw bytes for
    these threads."""
    if remote:
        return _REMOTE_PART_BYTES
    least, most = _PART_BYTES
    share = divide_up(num_bytes, max(1, threads))
    return min(max(least, share), most)


class Scratch:
    """Pool of equal buffers. It grows to the largest number that was lent at once. Thread-safe."""

    def __init__(self, part_bytes: int) -> None:
        """:param part_bytes: stored bytes of a part that are not read straight into rows. A buffer
        has room for them, one decoded frame, and padding.
        """
        self._num_bytes = align(part_bytes + 2 * FRAME_BYTES)
        self._free: list[mmap.mmap] = []
        """Buffers that are not lent. No lock: ``pop`` and ``append`` are atomic."""

    @contextmanager
    def lend(self) -> Iterator[TakeBuffer]:
        """Lend a buffer, which must not be used after the ``with`` block.

        If the rest of the buffer is too small, as for a very large block, ``TakeBuffer`` returns
        new memory.
        """
        try:
            buffer = self._free.pop()
        except IndexError:
            buffer = huge_memory(self._num_bytes)
        rest = memoryview(buffer)

        def take(num_bytes: int) -> memoryview:
            """Return the next bytes of the buffer; new memory if it has too few left."""
            nonlocal rest
            # take whole pages, so that the next piece begins at a page, too
            taken = align(num_bytes)
            if taken > len(rest):
                own = huge_memory(max(taken, PAGE_BYTES))
                return memoryview(own)[:num_bytes]
            piece = rest[:num_bytes]
            rest = rest[taken:]
            return piece

        try:
            yield take
        finally:
            self._free.append(buffer)


@dataclass
class ReadOutcome:
    """Result of a load job, or of one of its parts."""

    failed: list[bytes] = field(default_factory=list)
    """Keys whose blocks were not read and verified; the content of their rows is undefined."""
    suspects: dict[bytes, HeldPack] = field(default_factory=dict)
    """Packs with a frame that failed verification, and packs that are absent or too short, by
    id."""
    bad_frames: Counter[bytes] = field(default_factory=Counter)
    """Number of frames of each pack, by id, that failed verification or decoding. Frames whose
    codec or key this process lacks are not counted. If the pack was deleted during the read, its
    place may hold bytes of another pack, which are no damage."""
    raw_bytes: int = 0
    """Raw bytes of the blocks that were verified and put into rows."""
    is_late: bool = False
    """Whether blocks failed because their reads had not begun, or had not ended, at the deadline of
    the job."""

    def add(self, other: ReadOutcome) -> None:
        """Add the result of a part."""
        self.is_late |= other.is_late
        self.failed += other.failed
        self.suspects.update(other.suspects)
        self.bad_frames.update(other.bad_frames)
        self.raw_bytes += other.raw_bytes


@dataclass(slots=True)
class FrameRead(PlacedFrame):
    """One frame, and the rows to fill."""

    pack: HeldPack
    rows: list[int]
    """For each block, the row to fill; ``_UNWANTED``: none."""
    whole: bool
    """Whether all blocks are wanted."""
    direct: bool
    """Whether the frame is raw and all of its blocks are wanted: its stored bytes are then read
    straight into rows, unless its part is streamed through a buffer."""

    @property
    def wanted(self) -> list[bytes]:
        """Keys of the blocks that are read into rows."""
        wanted: list[bytes] = []
        for key, row in zip(self.keys, self.rows, strict=True):
            if row != _UNWANTED:
                wanted.append(key)
        return wanted


class ReadPlan(NamedTuple):
    """Division of a load job."""

    parts: list[list[FrameRead]]
    """Frames that hold the keys, in parts to be read concurrently."""
    missing: list[bytes]
    """Distinct keys that no pack holds, or whose blocks differ in size from those of the rows."""


def plan_reads(
    holders: Sequence[HeldPack | None],
    rows: BlockMemory,
    keys: Sequence[bytes],
    block_ids: Sequence[int],
    part_bytes: int,
    scratch_bytes: int,
    *,
    remote: bool,
    is_timed: bool = False,
) -> ReadPlan:
    """Divide the frames that hold ``keys`` into parts.

    :param holders: for each key, a pack that holds it; None if it is not held.
    :param part_bytes: bound on the stored bytes of a part. Each pack starts a new part, unless the
        current one has fewer than ``scratch_bytes``.
    :param scratch_bytes: bound on the bytes of a part that are not read straight into rows.
    :param remote: whether the store is remote. Then neighbouring frames to stream are a part of
        their own, without the bound ``scratch_bytes``: they pass through a buffer for one frame.
    :param is_timed: whether the load has a deadline: then a remote store streams all frames.
    """
    # pack → wanted key → row that receives its block
    rows_of: dict[HeldPack, dict[bytes, int]] = {}
    missing: dict[bytes, None] = {}  # an ordered set: a job may name a key twice
    for pack, key, row in zip(holders, keys, block_ids, strict=True):
        if pack is None:
            missing[key] = None
        else:
            rows_of.setdefault(pack, {})[key] = row
    block_bytes = [group.block_bytes for group in rows.layout.groups]
    sizes = dict(enumerate(block_bytes))  # bytes of a block, by KV cache group
    reads: list[FrameRead] = []
    for pack, row_of in rows_of.items():
        for read in _frames(pack, row_of):
            fits_rows = sizes.get(read.frame.group) == read.frame.block_bytes
            if fits_rows:
                reads.append(read)
            else:
                # the frame is of another layout: its blocks count as misses
                missing.update(dict.fromkeys(read.wanted))
    if remote:
        parts = _remote_parts(reads, part_bytes, scratch_bytes, is_timed=is_timed)
    else:
        parts = list(_bounded_parts(reads, part_bytes, scratch_bytes))
    return ReadPlan(parts, list(missing))


def _remote_parts(
    reads: Iterable[FrameRead],
    part_bytes: int,
    scratch_bytes: int,
    *,
    is_timed: bool,
) -> list[list[FrameRead]]:
    """Divide the frames of a remote store into parts: first those to stream, then the others.

    A streamed part is read with one call. Its frames pass one after the other through a buffer for
    one frame, and are copied or decoded from there into rows. This is done for two kinds of runs:
    those with encoded frames, which must be decoded anyway, and those of a load with a deadline
    (``is_timed``). A streamed read can be abandoned at the deadline, because the driver that still
    runs writes only into the buffer. The frames of other runs are read straight into rows where
    possible, which saves the copy.
    """
    streamed: list[list[FrameRead]] = []
    others: list[FrameRead] = []
    for run in _runs(reads, _MOST_GAP_BYTES):
        if is_timed or _any_encoded(run):
            streamed += _cut_run(run, part_bytes)
        else:
            others += run
    return [*streamed, *_bounded_parts(others, part_bytes, scratch_bytes)]


def _any_encoded(reads: Iterable[FrameRead]) -> bool:
    return any(read.frame.encoded for read in reads)


def _runs(
    reads: Iterable[FrameRead],
    most_gap_bytes: int,
) -> Iterator[list[FrameRead]]:
    """Divide frames into runs that one call can read: frames of one pack, ascending by offset, with
    at most ``most_gap_bytes`` between two of them. Padding up to the next page does not count."""
    run: list[FrameRead] = []
    for read in reads:
        if run and not _follows(run[-1], read, most_gap_bytes):
            yield run
            run = []
        run.append(read)
    if run:
        yield run


def _follows(
    before: FrameRead,
    read: FrameRead,
    most_gap_bytes: int,
) -> bool:
    """Return whether one call can read a frame together with the one before it."""
    if read.pack is not before.pack:
        return False
    end = align(before.frame.offset + before.frame.stored_length)
    gap_bytes = read.frame.offset - end
    return 0 <= gap_bytes <= most_gap_bytes


def _cut_run(
    run: Sequence[FrameRead],
    part_bytes: int,
) -> Iterator[list[FrameRead]]:
    """Cut a run into parts of about ``part_bytes``, measured by offsets from the first frame. A
    frame belongs to the part in which it begins."""
    first = run[0].frame.offset

    def number_of_part(read: FrameRead) -> int:
        return (read.frame.offset - first) // part_bytes

    for _, part in groupby(run, key=number_of_part):
        yield list(part)


def _frames(
    pack: HeldPack,
    row_of: Mapping[bytes, int],
) -> Iterator[FrameRead]:
    """Yield the frames of a pack that hold any of the wanted keys.

    :param row_of: wanted key → row that receives its block.
    """
    all_rows = [row_of.get(key, _UNWANTED) for key in pack.keys]
    start = 0  # index of the frame's first key among those of the pack
    for number, frame in enumerate(pack.table.frames):
        stop = start + frame.block_count
        rows = all_rows[start:stop]
        keys = pack.keys[start:stop]
        start = stop
        num_unwanted = rows.count(_UNWANTED)
        if num_unwanted == len(rows):
            continue
        whole = num_unwanted == 0
        yield FrameRead(
            number,
            frame,
            keys,
            pack,
            rows,
            whole=whole,
            direct=whole and not frame.encoded,
        )


def _bounded_parts(
    reads: Iterable[FrameRead],
    part_bytes: int,
    scratch_bytes: int,
) -> Iterator[list[FrameRead]]:
    """Divide frames that are not streamed into parts. A part has at most ``part_bytes`` stored
    bytes, of which at most ``scratch_bytes`` pass through scratch memory; a single larger frame is
    a part.
    """
    part: list[FrameRead] = []
    size = 0  # bytes of the part so far
    indirect = 0  # bytes of the part that pass through memory other than rows
    for read in reads:
        length = align(read.frame.stored_length)
        scratch = 0 if read.direct else length
        fits = size + length <= part_bytes and indirect + scratch <= scratch_bytes
        # Each part is one call: small packs share a part, and a larger part ends with its pack.
        is_worth_a_call = size >= scratch_bytes
        is_other_pack = bool(part) and read.pack is not part[-1].pack
        if part and (not fits or (is_other_pack and is_worth_a_call)):
            yield part
            part = []
            size = 0
            indirect = 0
        part.append(read)
        size += length
        indirect += scratch
    if part:
        yield part


class PartRead:
    """The read of one part into rows: a call for ``StoreThreads``."""

    def __init__(
        self,
        backend: Backend,
        namespace: bytes,
        rows: BlockMemory,
        scratch: Scratch,
        part: Sequence[FrameRead],
        *,
        is_timed: bool = False,
        is_private: bool = False,
    ) -> None:
        """:param part: frames that ``plan_reads`` has put into one part.
        :param is_timed: whether the load has a deadline.
        :param is_private: whether the rows have no other use, also after the call.
        """
        self._backend = backend
        self._namespace = namespace
        self._scratch = scratch
        self._part = part
        is_remote = backend.capabilities.remote
        self._streams = is_remote and (is_timed or _any_encoded(part))
        """Whether frames pass through a buffer (``_stream``), from which only this object writes
        rows: for encoded frames, which must be decoded in any case, and for a load with a deadline.
        Otherwise, the backend may write into rows itself (``_gather``)."""
        self._may_abandon = self._streams or is_private
        """Whether a running read may be abandoned at its deadline. The call of the backend
        continues then: it must write no rows, or rows that have no other use."""
        # held while rows are written; no I/O happens under it
        self._lock = threading.Lock()
        self._rows: BlockMemory | None = rows
        """None: the read has ended, or was abandoned."""
        self._unread = dict(enumerate(part))
        """Frames about which nothing is in ``_outcome`` yet, by their numbers in the part."""
        self._outcome = ReadOutcome()
        self._seals: dict[bytes, FrameSeal] = {}
        """Seal of the frames of each pack, by pack id."""

    def __call__(self) -> ReadOutcome:
        """Read, verify and decode the part into its rows. Raises no errors: see
        ``ReadOutcome.failed``."""
        try:
            with self._scratch.lend() as take:
                if self._streams:
                    self._stream(take)
                else:
                    self._gather(take)
        except _AbandonedError:
            # the caller has this outcome from ``drop`` already
            return self._outcome
        except Exception as error:
            was_abandoned = self._rows is None
            if not was_abandoned:
                # log the error as text: the exception keeps references to the rows
                why = str(error) if isinstance(error, StoreError) else repr(error)
                logger.warning(
                    "reading %d frames failed (%s): their blocks are misses",
                    len(self._unread),
                    why,
                )
            return self._end_read(unread_are_absent=False)
        # the medium has answered every read: frames that are still unread are not on it
        return self._end_read(unread_are_absent=True)

    def abandon(self) -> ReadOutcome | None:
        """Return the result now, while the call is running; None: it must be waited for. Frames
        that are not verified yet have failed. Waits until the frame that is being decoded is in
        its rows."""
        return self.drop() if self._may_abandon else None

    def drop(self) -> ReadOutcome:
        """End a read at its deadline that has not begun, or that is abandoned; return the
        result."""
        return self._end_read(unread_are_absent=False, is_late=True)

    def _stream(self, take: TakeBuffer) -> None:
        """Read frames of one pack through one buffer; verify each as it arrives, and copy or decode
        it into its rows."""
        frames = [read.frame for read in self._part]
        # memory for one decoded frame; empty if all frames are raw, which need no decoding
        raw = memoryview(b"")
        if _any_encoded(self._part):
            raw = self._take_raw(take)
        largest_bytes = max(frame.stored_length for frame in frames)
        buffer = take(largest_bytes)

        def finish(number: int, stored: memoryview) -> None:
            self._finish_frame(number, [stored], raw, in_rows=False)

        pack_id = self._part[0].pack.pack_id
        self._backend.read_frames(self._namespace, pack_id, frames, buffer, finish)

    def _gather(self, take: TakeBuffer) -> None:
        """Read all frames with one call, into rows (``FrameRead.direct``) or scratch memory, and
        verify them afterwards. Frames that the medium lacks stay in ``_unread``."""
        raw = self._take_raw(take)
        # memory that receives the padding between frames, which nobody reads
        padding = take(PAGE_BYTES)
        # for each frame of the part: the views of memory to read it into
        buffers = [self._buffers_for(read, take) for read in self._part]
        spans: list[ReadSpan] = []
        # for each span: the numbers of its frames in the part
        numbers_of_spans: list[range] = []
        start = 0
        # allow no gaps: only frames that follow each other directly form a span
        for run in _runs(self._part, most_gap_bytes=0):
            stop = start + len(run)
            span = _span(run, buffers[start:stop], padding)
            spans.append(span)
            numbers_of_spans.append(range(start, stop))
            start = stop
        answers = self._backend.read(self._namespace, spans)
        for is_filled, numbers in zip(answers, numbers_of_spans, strict=True):
            if not is_filled:
                continue
            for number in numbers:
                in_rows = self._part[number].direct
                self._finish_frame(number, buffers[number], raw, in_rows=in_rows)

    def _buffers_for(self, read: FrameRead, take: TakeBuffer) -> list[memoryview]:
        """Return the memory into which the frame's stored bytes are read, in their order: its rows
        if it is ``direct``, else a piece that ``take`` takes from the scratch buffer."""
        if read.direct:
            rows = self._usable_rows()
            return rows.pieces(read.frame.group, read.rows)
        # reads that bypass the page cache need whole pages
        return [take(align(read.frame.stored_length))]

    def _usable_rows(self) -> BlockMemory:
        """Return the rows.

        :raises _AbandonedError: they must not be used any more.
        """
        if self._rows is None:
            raise _AbandonedError
        return self._rows

    def _take_raw(self, take: TakeBuffer) -> memoryview:
        """Return memory for one decoded frame."""
        largest_bytes = max(read.frame.raw_length for read in self._part)
        return take(largest_bytes)

    def _finish_frame(
        self,
        number: int,
        stored: Sequence[memoryview],
        raw: memoryview,
        *,
        in_rows: bool,
    ) -> None:
        """Verify a frame, put its blocks into their rows and add the result to the outcome.

        :param number: of the frame in the part.
        :param stored: the frame's stored bytes: pieces of the rows in order, or one buffer outside
            of them, which may also hold padding.
        :param raw: temporary memory for one decoded frame.
        :param in_rows: whether ``stored`` is memory of the rows: then nothing is copied.
        :raises _AbandonedError: the read was abandoned, and the frame was counted as failed.
        """
        read = self._part[number]
        frame = read.frame
        if not in_rows:
            # cut off the padding that was read behind the frame
            stored = [stored[0][: frame.stored_length]]
        try:
            # get the seal before the lock is taken, because a shared store may read its keys again,
            # and no I/O may happen under the lock
            seal = self._seal_of(read.pack)
            with self._lock:
                rows = self._usable_rows()
                seal.open(read, stored)
                if not in_rows:
                    _decode(read, stored[0], rows, raw)
                self._count_verified(read, rows)
                del self._unread[number]
        except CorruptPackError as error:
            with self._lock:
                # raises if the read was abandoned meanwhile, because ``_end_read`` has counted this
                # frame then
                self._usable_rows()
                self._add_bad_frame(read, error)
                del self._unread[number]

    def _count_verified(self, read: FrameRead, rows: BlockMemory) -> None:
        """Report to the memory which rows hold verified blocks now, and count them in the
        outcome."""
        filled = read.rows
        if not read.whole:
            filled = [row for row in filled if row != _UNWANTED]
        rows.verified(read.frame.group, filled)
        self._outcome.raw_bytes += len(filled) * read.frame.block_bytes

    def _add_bad_frame(self, read: FrameRead, error: CorruptPackError) -> None:
        """Add a frame whose bytes are bad to the outcome."""
        self._outcome.failed += read.wanted
        # otherwise the codec is of another release, or this process lacks the key
        is_damaged = error.field not in ("codec", "key")
        if is_damaged:
            self._outcome.bad_frames[read.pack.pack_id] += 1
            self._outcome.suspects[read.pack.pack_id] = read.pack

    def _end_read(
        self, *, unread_are_absent: bool, is_late: bool = False
    ) -> ReadOutcome:
        """Return the result; frames that were not read have failed. Rows are not written any more.
        A second call changes nothing.

        :param unread_are_absent: whether the medium lacks the unread frames: their packs are absent
            or too short, and become suspects.
        :param is_late: whether they are unread because the deadline has passed.
        """
        outcome = self._outcome
        # take the lock, so that a thread which writes a frame into rows finishes it first
        with self._lock:
            self._rows = None
            if self._unread:
                outcome.is_late = is_late
            for read in self._unread.values():
                outcome.failed += read.wanted
                if unread_are_absent:
                    outcome.suspects[read.pack.pack_id] = read.pack
            self._unread.clear()
        return outcome

    def _seal_of(self, pack: HeldPack) -> FrameSeal:
        """Return the seal of a pack's frames.

        :raises CorruptPackError: its key is not known.
        """
        found = self._seals.get(pack.pack_id)
        if found is None:
            found = self._backend.seal.of_pack(pack.table)
            self._seals[pack.pack_id] = found
        return found


class _AbandonedError(Exception):
    """The rows must not be used any more, because the read was abandoned or has ended. It ends the
    work of the thread that still reads."""


def _span(
    run: Sequence[FrameRead],
    buffers_of: Sequence[list[memoryview]],
    padding: memoryview,
) -> ReadSpan:
    """Return adjacent frames as one span. Padding between them is read into ``padding``, one page,
    and ignored.

    :param buffers_of: for each frame, the memory to read it into.
    """
    start = run[0].frame.offset
    end = start  # where the bytes end that the buffers so far receive
    buffers: list[memoryview] = []
    for read, of_frame in zip(run, buffers_of, strict=True):
        gap_bytes = read.frame.offset - end
        if gap_bytes:
            buffers.append(padding[:gap_bytes])
        buffers += of_frame
        # Rows receive the frame alone. A buffer of other memory has whole pages: it also receives
        # the padding behind the frame, so that no gap follows.
        received_bytes = sum(map(len, of_frame))
        end = read.frame.offset + received_bytes
    return ReadSpan(run[0].pack.pack_id, start, buffers)


def _decode(
    read: FrameRead,
    stored: memoryview,
    rows: BlockMemory,
    raw: memoryview,
) -> None:
    """Put the blocks of a frame into their rows.

    :param raw: temporary memory for the decoded frame.
    """
    frame = read.frame
    codec = read.pack.table.codec
    if read.whole:
        pieces = rows.pieces(frame.group, read.rows)
        are_consecutive = len(pieces) == 1
        # decode straight into the rows, without a copy of each block
        if are_consecutive:
            decode_frame(codec, frame, stored, pieces[0])
            return
    if frame.encoded:
        decoded = raw[: frame.raw_length]
        decode_frame(codec, frame, stored, decoded)
    else:
        decoded = stored
    # otherwise, copy each wanted block to its row
    all_bytes = np.frombuffer(decoded, dtype=np.uint8)
    blocks = all_bytes.reshape(frame.block_count, frame.block_bytes)
    positions: list[int] = []
    wanted_rows: list[int] = []
    for position, row in enumerate(read.rows):
        if row != _UNWANTED:
            positions.append(position)
            wanted_rows.append(row)
    rows.scatter(frame.group, wanted_rows, blocks[positions])
