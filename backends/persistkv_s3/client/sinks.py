"""Where downloads go."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from persistkv.errors import CorruptPackError
from persistkv_s3.client.errors import BrokenError


class RowSink:
    """Buffers of the caller's, filled one after the other."""

    def __init__(self, buffers: Sequence[memoryview]) -> None:
        self._parts = [part for buffer in buffers if len(part := buffer.cast("B"))]
        self._total = sum(map(len, self._parts))
        self._part = 0
        self._filled = 0
        self.position = 0

    def expect(self, length: int) -> None:
        if length != self._total - self.position:
            raise BrokenError(f"the server sends {length} bytes instead of {self._total - self.position}")

    def room(self) -> memoryview:
        return self._parts[self._part][self._filled :] if self._part < len(self._parts) else memoryview(b"")

    def advance(self, count: int) -> None:
        self.position += count
        self._filled += count
        if self._filled == len(self._parts[self._part]):
            self._part += 1
            self._filled = 0


class FrameSink:
    """Ranges of an object through one buffer; each is handed over once it is whole, and what lies between goes nowhere.

    :param ranges: (offset, length), ascending; the lengths are not 0.
    :param take: gets the number of a range, and its bytes, which lie there until it returns.
    """

    def __init__(
        self, ranges: Sequence[tuple[int, int]], buffer: memoryview, take: Callable[[int, memoryview], None]
    ) -> None:
        self.start = ranges[0][0]
        self.stop = sum(ranges[-1])
        self.position = 0
        self._ranges = ranges
        self._buffer = buffer
        self._take = take
        self._number = 0

    def expect(self, length: int) -> None:
        left = self.stop - self.start - self.position
        if length != left:
            raise BrokenError(f"the server sends {length} bytes instead of {left}")

    def room(self) -> memoryview:
        if self._number == len(self._ranges):
            return memoryview(b"")
        offset, length = self._ranges[self._number]
        inside = self.start + self.position - offset
        return self._buffer[inside:length] if inside >= 0 else self._buffer[:-inside]

    def advance(self, count: int) -> None:
        self.position += count
        offset, length = self._ranges[self._number]
        if self.start + self.position == offset + length:
            self._number += 1
            self._take(self._number - 1, self._buffer[:length])


class WholeSink:
    """An object of unknown length, up to a bound: what lies in a bucket may have been put there by anyone."""

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self.data = bytearray()
        self.position = 0

    def expect(self, length: int) -> None:
        if self.position + length > self._limit:
            raise CorruptPackError("object", f"{length} bytes where {self._limit} are the most that belong there")
        if self.position and self.position + length != len(self.data):
            raise BrokenError(f"the server sends {length} bytes more instead of {len(self.data) - self.position}")
        if not self.position:
            self.data = bytearray(length)

    def room(self) -> memoryview:
        return memoryview(self.data)[self.position :]

    def advance(self, count: int) -> None:
        self.position += count
