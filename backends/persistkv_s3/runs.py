"""Spans that lie side by side in a pack, as one request."""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

from persistkv.storage.backend import ReadSpan
from persistkv.storage.pack import Frame
from persistkv_s3.authentication import Authenticator
from persistkv_s3.log.catalogue import StoredPack

_GAP_BYTES = 128 << 10  # 128 KiB: less than what a request's latency would have carried


def span_bytes(span: ReadSpan) -> int:
    """How much a span asks for."""
    return sum(buffer.nbytes for buffer in span.buffers)


def neighbours(frames: Sequence[Frame], payload_length: int) -> Iterator[list[int]]:
    """The numbers of frames that are fetched with one request; those that do not lie in the payload are left out."""
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
class Run:
    """One ranged GET."""

    key: str
    pack_id: bytes
    held: StoredPack
    """What was known of the pack when the run was made."""
    start: int
    buffers: list[memoryview] = field(default_factory=list)
    spans: list[tuple[int, int, int]] = field(default_factory=list)
    """Number of the span among those that were asked for, its first byte in the pack, its end."""
    _end: int = field(init=False)

    def __post_init__(self) -> None:
        self._end = self.start

    def takes(self, span: ReadSpan, held: StoredPack) -> bool:
        """Whether the span lies behind the run's end, near enough."""
        return span.pack_id == self.pack_id and held is self.held and 0 <= span.offset - self._end <= _GAP_BYTES

    def add(self, number: int, span: ReadSpan, length: int) -> None:
        """Read the span too, and what lies before it for nothing."""
        self._skip(span.offset - self._end)
        self.buffers += span.buffers
        self._end = span.offset + length
        self.spans.append((number, span.offset, self._end))

    def _skip(self, length: int) -> None:
        if length:
            self.buffers.append(memoryview(bytearray(length)))
        self._end += length

    def widen(self) -> range:
        """Read whole frames, so that their tags can be checked.

        :returns: their numbers.
        """
        frames = self.held.table.frames
        offsets = [frame.offset for frame in frames]
        numbers = range(bisect_right(offsets, self.start) - 1, bisect_left(offsets, self._end))
        if before := self.start - offsets[numbers[0]]:
            self.buffers.insert(0, memoryview(bytearray(before)))
            self.start -= before
        last = frames[numbers[-1]]
        self._skip(max(0, last.offset + last.stored_length - self._end))
        return numbers

    def good(self, authenticator: Authenticator, numbers: Sequence[int]) -> list[int]:
        """The spans whose bytes, which lie in the buffers, are all of somebody who has the key."""
        table, tags = self.held.table, self.held.tags
        bad = authenticator.bad_frames(table, tags, numbers, self.start, self.buffers)
        return [number for number, start, end in self.spans if not any(_overlaps(frame, start, end) for frame in bad)]


def _overlaps(frame: Frame, start: int, end: int) -> bool:
    return frame.offset < end and start < frame.offset + frame.stored_length
