"""Pack objects: uploads and reads.

1. An object is a pack as in ``docs/format.md``: payload, table, trailer. If the store has a key, authentication tags
   are between payload and table.
2. Its name ends in a nonce, drawn for each upload: the bytes under a name never change, and no upload reuses an object.
3. Adjacent ranges of a pack are read with one request, and requests run in parallel.
"""

from __future__ import annotations

import threading
from bisect import bisect_left, bisect_right
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

from persistkv.storage.backend import ReadSpan
from persistkv.storage.format.codec import Buffer
from persistkv.storage.format.pack import Frame
from persistkv.storage.format.pack_writer import NewPack
from persistkv_s3.authentication import SignedObjects, slices
from persistkv_s3.catalogue import Catalogue, PackObject
from persistkv_s3.client.transport import FrameSink, ObjectMissingError
from persistkv_s3.feed.format import NONCE_BYTES, PackRow

_GAP_BYTES = 128 << 10  # 128 KiB: less than the bytes transferred in the latency of one request


class UploadBudget:
    """Limit on the memory of encoded packs during uploads, in bytes. A pack that is larger reserves all of the limit; a
    pack that is uploaded from its existing memory reserves none.
    """

    def __init__(self, num_bytes: int) -> None:
        self._free = self._all = num_bytes
        self._changed = threading.Condition()

    @contextmanager
    def reserved(self, writer: NewPack) -> Iterator[None]:
        """Reserve memory for a pack while the ``with`` block runs; wait until enough memory is free."""
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


class PackObjects:
    """Uploads and reads the pack objects of one namespace. Thread-safe.

    :param missing: called, in any thread, with id and nonce of a pack whose object is missing or too short.
    """

    def __init__(self, objects: SignedObjects, catalogue: Catalogue, missing: Callable[[bytes, bytes], None]) -> None:
        self._bucket = objects.bucket
        self._names = objects.names
        self._authenticator = objects.authenticator
        self._catalogue = catalogue
        self._missing = missing

    def upload(self, writer: NewPack) -> PackRow:
        """Upload a pack; return its row for the commit. Errors of the pack's stream are raised unchanged.

        :raises S3Error: the upload failed. The object may exist; a sweep deletes it, because no commit refers to it.
        """
        payload: list[Buffer] = list(writer.stream())
        nonce = self._bucket.clock.random.randbytes(NONCE_BYTES)
        body = self._authenticator.pack_tags(writer.table, payload) + writer.table.encode()
        self._bucket.put(self._names.pack(writer.pack_id, nonce), [*payload, body])
        return PackRow(writer.pack_id, nonce, body)

    def read(self, spans: Sequence[ReadSpan]) -> list[bool]:
        """See ``Backend.read``."""
        filled = [False] * len(spans)

        def fetch(run: _RangedGet) -> None:
            frames = run.widen() if self._authenticator.key_id else []
            try:
                self._bucket.fill(self._names.pack(run.pack_id, run.held.nonce), run.start, run.buffers)
            except ObjectMissingError:
                self._missing(run.pack_id, run.held.nonce)
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
        """See ``SupportsFrames.read_frames``."""
        held = self._catalogue.objects([pack_id]).get(pack_id)
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
                self._bucket.download_into(self._names.pack(pack_id, held.nonce), FrameSink(ranges, buffer, check))
            except ObjectMissingError:
                self._missing(pack_id, held.nonce)
                return

    def _runs(self, spans: Sequence[ReadSpan], filled: list[bool]) -> list[_RangedGet]:
        """Group spans into GETs; mark empty spans as filled; skip spans of missing packs or beyond the payload."""
        runs: list[_RangedGet] = []
        objects = self._catalogue.objects({span.pack_id for span in spans})
        for index in sorted(range(len(spans)), key=lambda n: (spans[n].pack_id, spans[n].offset)):
            span = spans[index]
            length = sum(buffer.nbytes for buffer in span.buffers)
            held = objects.get(span.pack_id)
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
    """Yield lists of frame indices, one list per GET: the gaps between its frames are at most 128 KiB.

    Skip frames that are empty or end beyond the payload.
    """
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
    """One GET of bytes ``start`` to ``end`` (exclusive) of the pack object ``held``. The range is empty at first."""

    def __init__(self, pack_id: bytes, held: PackObject, start: int) -> None:
        self.pack_id = pack_id
        self.held = held
        self.start = self.end = start
        self.buffers: list[memoryview] = []
        self.spans: list[tuple[int, int, int]] = []
        """(index among the requested spans, offset of the first byte in the payload, offset after the last byte)."""

    def add(self, index: int, span: ReadSpan, length: int) -> None:
        """Append requested span ``index``, of ``length`` bytes. Bytes between the previous span and this one are
        downloaded and discarded.
        """
        self._skip(span.offset - self.end)
        self.buffers += span.buffers
        self.end = span.offset + length
        self.spans.append((index, span.offset, self.end))

    def _skip(self, length: int) -> None:
        if length > 0:
            self.buffers.append(memoryview(bytearray(length)))
            self.end += length

    def widen(self) -> list[tuple[int, Frame]]:
        """Extend the range to whole frames, to verify their tags; return (index in pack, frame) of each."""
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
