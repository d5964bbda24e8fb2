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
from persistkv_s3.client.transport import ObjectMissingError
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
        """Upload a pack; return its row for the commit. A sweep deletes an object to which no commit refers."""
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
            if not self._fill(run):
                return
            is_ours = self._authenticator.frame_check(run.held.table, run.held.tags)
            pieces = slices(run.buffers, [(frame.offset - run.start, frame.stored_length) for _, frame in frames])
            bad = [frame for (number, frame), stored in zip(frames, pieces, strict=True) if not is_ours(number, stored)]
            for index, start, end in run.spans:
                filled[index] = not any(frame.offset < end and start < _end(frame) for frame in bad)

        self._bucket.all(fetch, self._runs(spans, filled))
        return filled

    def read_frames(
        self, pack_id: bytes, frames: Sequence[Frame], buffer: memoryview, take: Callable[[int, memoryview], None]
    ) -> None:
        """See ``SupportsFrames.read_frames``."""

        def fetch(run: _RangedGet) -> bool:
            offsets = [frame.offset for frame in run.held.table.frames]
            is_ours = self._authenticator.frame_check(run.held.table, run.held.tags)

            def check(number: int, stored: memoryview) -> None:
                index = run.first_buffers.get(number)
                if index is not None and is_ours(bisect_left(offsets, frames[index].offset), [stored]):
                    take(index, stored)

            return self._fill(run, check)

        spans = [ReadSpan(pack_id, frame.offset, [buffer[: frame.stored_length]]) for frame in frames]
        for run in self._runs(spans, [False] * len(spans)):
            if not fetch(run):
                return

    def _fill(self, run: _RangedGet, take: Callable[[int, memoryview], None] | None = None) -> bool:
        """Download the range of a run; return False if its object is missing."""
        try:
            self._bucket.fill(self._names.pack(run.pack_id, run.held.nonce), run.start, run.buffers, take)
            return True
        except ObjectMissingError:
            self._missing(run.pack_id, run.held.nonce)
            return False

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


class _RangedGet:
    """One GET of bytes ``start`` to ``end`` (exclusive) of the pack object ``held``. The range is empty at first."""

    def __init__(self, pack_id: bytes, held: PackObject, start: int) -> None:
        self.pack_id = pack_id
        self.held = held
        self.start = self.end = start
        self.buffers: list[memoryview] = []
        self.spans: list[tuple[int, int, int]] = []
        """(index among the requested spans, offset of the first byte in the payload, offset after the last byte)."""
        self.first_buffers: dict[int, int] = {}
        """Index of a span's first buffer → index of the span."""

    def add(self, index: int, span: ReadSpan, length: int) -> None:
        """Append span ``index``, of ``length`` bytes, and memory for the bytes between the previous span and it."""
        self._skip(span.offset - self.end)
        self.first_buffers[len(self.buffers)] = index
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
