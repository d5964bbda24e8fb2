"""Pack objects: uploads and reads.

1. A pack is uploaded with one conditional PUT; the first writer wins. Its object is a pack as in ``docs/format.md``:
   payload, table, trailer; with a key, tags between payload and table.
2. The name is the pack's id and a generation. A pack that was deleted is written again under a higher generation, so
   the bytes under a name never change, and a damaged object is never taken for a valid one.
3. Adjacent ranges of a pack are read with one request, and requests run in parallel.
"""

from __future__ import annotations

import logging
import threading
from bisect import bisect_left, bisect_right
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from typing import NamedTuple

from persistkv.errors import CorruptPackError
from persistkv.storage.backend import ReadSpan
from persistkv.storage.format.codec import Buffer
from persistkv.storage.format.pack import Frame, PackTable
from persistkv.storage.format.pack_writer import NewPack
from persistkv_s3.authentication import Authenticator, SignedObjects
from persistkv_s3.client.errors import ObjectExistsError, ObjectMissingError, S3Error
from persistkv_s3.client.transport import FrameSink
from persistkv_s3.log.follower import Follower
from persistkv_s3.log.state import PackState

logger = logging.getLogger(__name__)

_GAP_BYTES = 128 << 10  # 128 KiB: less than the bytes transferred in the latency of one request
_TAIL_BYTES = 64 << 10  # 64 KiB: another writer's table is longer if it has cut the same keys into more frames
_GENERATIONS = 4
"""Maximum of generations tried for one pack: an unreadable object occupies its name."""


class UploadBudget:
    """Bound on the memory of encoded packs during uploads; one pack is always admitted. Raw packs need no memory."""

    def __init__(self, num_bytes: int) -> None:
        self._free = self._all = num_bytes
        self._changed = threading.Condition()

    @contextmanager
    def reserved(self, writer: NewPack) -> Iterator[None]:
        """Reserve memory for a pack during the block; wait until it is free."""
        length = min(writer.raw_length, self._all) if writer.encodes else 0
        with self._changed:
            self._changed.wait_for(lambda: length <= self._free)
            self._free -= length
        try:
            yield
        finally:
            with self._changed:
                self._free += length
                self._changed.notify_all()


class Uploaded(NamedTuple):
    """A pack whose object exists."""

    writer: NewPack
    table: PackTable
    """Table of the object, which another writer may have uploaded."""
    tags: bytes
    """Tags of the object, see ``authentication``."""
    generation: int
    reused: bool
    """Another writer, or an earlier attempt, had uploaded it."""


class PackObjects:
    """The packs of one namespace. Thread-safe."""

    def __init__(self, objects: SignedObjects, follower: Follower) -> None:
        self._bucket = objects.bucket
        self._names = objects.names
        self._authenticator = objects.authenticator
        self._follower = follower

    def upload(self, writer: NewPack, first_generation: int) -> Uploaded:
        """Upload a pack unless its object exists already. Errors of its stream are raised unchanged.

        :raises S3Error: the object may exist or not; no index object references it.
        """
        pieces, tags = self._pieces(writer)
        for generation in range(first_generation, first_generation + _GENERATIONS):
            try:
                self._bucket.put(self._names.pack(writer.pack_id, generation), pieces)
            except ObjectExistsError:
                held = self._held(writer.table, generation)
                if held is not None:
                    return Uploaded(writer, *held, generation, reused=True)
            else:
                return Uploaded(writer, writer.table, tags, generation, reused=False)
        raise S3Error(f"{self._names.pack(writer.pack_id, generation)}: the object is not this pack, or damaged")

    def restore(self, pack: Uploaded) -> None:
        """Upload a reused pack again if its object has been removed since."""
        pack_id, key = pack.table.pack_id, self._names.pack(pack.table.pack_id, pack.generation)
        try:
            self._bucket.head(key)
            return
        except ObjectMissingError:
            logger.warning("%s was removed while a commit reused it: uploading it again", key)
        held = self._follower.state.packs.get(pack_id)
        if pack.table == pack.writer.table:
            with suppress(ObjectExistsError):
                self._bucket.put(key, self._pieces(pack.writer)[0])
        elif held is not None:  # the index references another writer's bytes, which no longer exist
            self._follower.miss(pack_id, held)

    def _pieces(self, writer: NewPack) -> tuple[list[Buffer], bytes]:
        """Return the buffers of the whole object, and its tags."""
        payload: list[Buffer] = list(writer.stream())
        tags = self._authenticator.pack_tags(writer.table, payload)
        return [*payload, tags, writer.table.encode()], tags

    def _held(self, ours: PackTable, generation: int) -> tuple[PackTable, bytes] | None:
        """Return table and tags of an existing object; None if it is another pack, damaged, or not authentic."""
        key, tags_length = self._names.pack(ours.pack_id, generation), self._authenticator.tags_length
        try:
            tail = self._bucket.tail(key, max(tags_length(ours) + len(ours.encode()), _TAIL_BYTES))
            table = PackTable.parse(tail)
            size = self._bucket.head(key).size
        except (CorruptPackError, ObjectMissingError):  # retention may delete it at any time
            return None
        end = len(tail) - len(table.encode())
        tags = bytes(tail[max(0, end - tags_length(table)) : end])
        whole = table.payload_length + len(tags) + len(tail) - end
        same = (table.namespace, table.pack_id, table.keys) == (ours.namespace, ours.pack_id, ours.keys)
        return (table, tags) if same and size == whole and self._authenticator.is_ours(table, tags) else None

    def read(self, spans: Sequence[ReadSpan]) -> list[bool]:
        """See ``Backend.read``."""
        self._follower.ensure()
        filled = [False] * len(spans)
        runs = list(self._runs(spans))

        def fetch(run: _RangedGet) -> None:
            numbers = run.widen() if self._authenticator.key_id else range(0)
            try:
                self._bucket.fill(run.key, run.start, run.buffers)
            except ObjectMissingError:
                self._follower.miss(run.pack_id, run.held)
                return
            for number in run.authentic(self._authenticator, numbers):
                filled[number] = True

        if runs:
            self._bucket.all(fetch, runs)
        return [done or self._is_empty(span) for done, span in zip(filled, spans, strict=True)]

    def read_frames(
        self, pack_id: bytes, frames: Sequence[Frame], buffer: memoryview, take: Callable[[int, memoryview], None]
    ) -> None:
        """See ``Backend.read_frames``."""
        self._follower.ensure()
        held = self._follower.state.packs.get(pack_id)
        if held is None:
            return
        offsets = [frame.offset for frame in held.table.frames]
        is_ours = self._authenticator.frame_check(held.table, held.tags)
        for run in _adjacent(frames, held.table.payload_length):

            def check(number: int, stored: memoryview, run: Sequence[int] = run) -> None:
                frame = frames[run[number]]
                if is_ours(bisect_left(offsets, frame.offset), [stored]):
                    take(run[number], stored)

            ranges = [(frames[number].offset, frames[number].stored_length) for number in run]
            try:
                self._bucket.pour(self._names.pack(pack_id, held.generation), FrameSink(ranges, buffer, check))
            except ObjectMissingError:
                self._follower.miss(pack_id, held)
                return

    def _is_empty(self, span: ReadSpan) -> bool:
        held = self._follower.state.packs.get(span.pack_id)
        return _span_bytes(span) == 0 and held is not None and span.offset <= held.table.payload_length

    def _runs(self, spans: Sequence[ReadSpan]) -> Iterator[_RangedGet]:
        run: _RangedGet | None = None
        for number in sorted(range(len(spans)), key=lambda n: (spans[n].pack_id, spans[n].offset)):
            span, length = spans[number], _span_bytes(spans[number])
            held = self._follower.state.packs.get(span.pack_id)
            if held is None or not length or span.offset + length > held.table.payload_length:
                continue
            if run is None or not run.accepts(span, held):
                if run is not None:
                    yield run
                run = _RangedGet(self._names.pack(span.pack_id, held.generation), span.pack_id, held, span.offset)
            run.add(number, span, length)
        if run is not None:
            yield run


def _span_bytes(span: ReadSpan) -> int:
    """Return the length of a span."""
    return sum(buffer.nbytes for buffer in span.buffers)


def _adjacent(frames: Sequence[Frame], payload_length: int) -> Iterator[list[int]]:
    """Group the numbers of frames by request; skip frames beyond the payload."""
    run: list[int] = []
    end = 0
    for number, frame in enumerate(frames):
        if not frame.stored_length or frame.offset + frame.stored_length > payload_length:
            continue
        if run and frame.offset - end > _GAP_BYTES:
            yield run
            run = []
        run.append(number)
        end = frame.offset + frame.stored_length
    if run:
        yield run


@dataclass
class _RangedGet:
    """One ranged GET."""

    key: str
    pack_id: bytes
    held: PackState
    """State of the pack when the request was planned."""
    start: int
    buffers: list[memoryview] = field(default_factory=list)
    spans: list[tuple[int, int, int]] = field(default_factory=list)
    """(index among the requested spans, start in the payload, end)."""
    _end: int = field(init=False)

    def __post_init__(self) -> None:
        self._end = self.start

    def accepts(self, span: ReadSpan, held: PackState) -> bool:
        """Return whether the span follows closely enough to share the request."""
        return span.pack_id == self.pack_id and held is self.held and 0 <= span.offset - self._end <= _GAP_BYTES

    def add(self, number: int, span: ReadSpan, length: int) -> None:
        """Append a span, preceded by a buffer that discards the gap."""
        self._skip(span.offset - self._end)
        self.buffers += span.buffers
        self._end = span.offset + length
        self.spans.append((number, span.offset, self._end))

    def _skip(self, length: int) -> None:
        if length:
            self.buffers.append(memoryview(bytearray(length)))
        self._end += length

    def widen(self) -> range:
        """Extend the range to whole frames, so that their tags can be verified; return the numbers of the frames."""
        frames = self.held.table.frames
        offsets = [frame.offset for frame in frames]
        numbers = range(bisect_right(offsets, self.start) - 1, bisect_left(offsets, self._end))
        if before := self.start - offsets[numbers[0]]:
            self.buffers.insert(0, memoryview(bytearray(before)))
            self.start -= before
        last = frames[numbers[-1]]
        self._skip(max(0, last.offset + last.stored_length - self._end))
        return numbers

    def authentic(self, authenticator: Authenticator, numbers: Sequence[int]) -> list[int]:
        """Return the spans whose frames are all authentic."""
        table, tags = self.held.table, self.held.tags
        bad = authenticator.bad_frames(table, tags, numbers, self.start, self.buffers)
        return [number for number, start, end in self.spans if not any(_overlaps(frame, start, end) for frame in bad)]


def _overlaps(frame: Frame, start: int, end: int) -> bool:
    return frame.offset < end and start < frame.offset + frame.stored_length
