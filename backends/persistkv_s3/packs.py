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
from typing import NamedTuple

from persistkv.errors import CorruptPackError
from persistkv.storage.backend import ReadSpan
from persistkv.storage.format.codec import Buffer
from persistkv.storage.format.pack import Frame, PackTable
from persistkv.storage.format.pack_writer import NewPack
from persistkv_s3.authentication import SignedObjects, slices
from persistkv_s3.client.transport import FrameSink, ObjectExistsError, ObjectMissingError, S3Error
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

        def fetch(run: _RangedGet) -> None:
            frames = run.widen() if self._authenticator.key_id else []
            try:
                self._bucket.fill(self._names.pack(run.pack_id, run.held.generation), run.start, run.buffers)
            except ObjectMissingError:
                self._follower.miss(run.pack_id, run.held)
                return
            is_ours = self._authenticator.frame_check(run.held.table, run.held.tags)
            pieces = slices(run.buffers, [(frame.offset - run.start, frame.stored_length) for _, frame in frames])
            bad = [frame for (number, frame), stored in zip(frames, pieces, strict=True) if not is_ours(number, stored)]
            for index, start, end in run.spans:
                filled[index] = not any(_overlaps(frame, start, end) for frame in bad)

        self._bucket.all(fetch, self._runs(spans, filled))
        return filled

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

    def _runs(self, spans: Sequence[ReadSpan], filled: list[bool]) -> list[_RangedGet]:
        """Group spans by request; mark empty ones as filled, and skip those beyond the payload."""
        runs: list[_RangedGet] = []
        for index in sorted(range(len(spans)), key=lambda n: (spans[n].pack_id, spans[n].offset)):
            span = spans[index]
            length = sum(buffer.nbytes for buffer in span.buffers)
            held = self._follower.state.packs.get(span.pack_id)
            if held is None or span.offset + length > held.table.payload_length:
                continue
            if not length:
                filled[index] = True
                continue
            if not runs or runs[-1].held is not held or not 0 <= span.offset - runs[-1].end <= _GAP_BYTES:
                runs.append(_RangedGet(span.pack_id, held, span.offset))
            runs[-1].add(index, span, length)
        return runs


def _adjacent(frames: Sequence[Frame], payload_length: int) -> Iterator[list[int]]:
    """Group the numbers of frames by request; skip frames beyond the payload."""
    run: list[int] = []
    end = 0
    for number, frame in enumerate(frames):
        if not frame.stored_length or _end(frame) > payload_length:
            continue
        if run and frame.offset - end > _GAP_BYTES:
            yield run
            run = []
        run.append(number)
        end = _end(frame)
    if run:
        yield run


class _RangedGet:
    """One ranged GET of a pack in the state ``held``, from byte ``start`` to ``end`` of its payload."""

    def __init__(self, pack_id: bytes, held: PackState, start: int) -> None:
        self.pack_id = pack_id
        self.held = held
        self.start = self.end = start
        self.buffers: list[memoryview] = []
        self.spans: list[tuple[int, int, int]] = []
        """(index among the requested spans, start in the payload, end)."""

    def add(self, index: int, span: ReadSpan, length: int) -> None:
        """Append a span, preceded by a buffer that discards the gap."""
        self._skip(span.offset - self.end)
        self.buffers += span.buffers
        self.end = span.offset + length
        self.spans.append((index, span.offset, self.end))

    def _skip(self, length: int) -> None:
        if length > 0:
            self.buffers.append(memoryview(bytearray(length)))
            self.end += length

    def widen(self) -> list[tuple[int, Frame]]:
        """Extend the range to whole frames, so that their tags can be verified; return these with their numbers."""
        table = self.held.table.frames
        offsets = [frame.offset for frame in table]
        numbers = range(bisect_right(offsets, self.start) - 1, bisect_left(offsets, self.end))
        frames = [(number, table[number]) for number in numbers]
        if before := self.start - frames[0][1].offset:
            self.buffers.insert(0, memoryview(bytearray(before)))
            self.start -= before
        self._skip(_end(frames[-1][1]) - self.end)
        return frames


def _end(frame: Frame) -> int:
    return frame.offset + frame.stored_length


def _overlaps(frame: Frame, start: int, end: int) -> bool:
    return frame.offset < end and start < _end(frame)
