"""Spans that lie side by side in a pack, as one request."""

from __future__ import annotations

from dataclasses import dataclass, field

from persistkv.storage.backend import ReadSpan
from persistkv_s3.catalogue import StoredPack

_GAP_BYTES = 128 << 10  # 128 KiB: less than what a request's latency would have carried


def span_bytes(span: ReadSpan) -> int:
    """How much a span asks for."""
    return sum(buffer.nbytes for buffer in span.buffers)


@dataclass
class Run:
    """One ranged GET."""

    key: str
    pack_id: bytes
    held: StoredPack
    """What was known of the pack when the run was made."""
    start: int
    buffers: list[memoryview] = field(default_factory=list)
    numbers: list[int] = field(default_factory=list)
    """Of the spans, among those that were asked for."""
    _end: int = field(init=False)

    def __post_init__(self) -> None:
        self._end = self.start

    def takes(self, span: ReadSpan, held: StoredPack) -> bool:
        """Whether the span lies behind the run's end, near enough."""
        return span.pack_id == self.pack_id and held is self.held and 0 <= span.offset - self._end <= _GAP_BYTES

    def add(self, number: int, span: ReadSpan, length: int) -> None:
        """Read the span too, and what lies before it for nothing."""
        if gap := span.offset - self._end:
            self.buffers.append(memoryview(bytearray(gap)))
        self.buffers += span.buffers
        self.numbers.append(number)
        self._end = span.offset + length
