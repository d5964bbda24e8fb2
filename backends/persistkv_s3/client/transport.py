"""The five operations that the driver needs of an object store, each with a deadline, and their uploads and downloads.

``boto.BotoClient`` makes single attempts; ``retries.RetryingTransport`` adds retries, a breaker and the resumption of
bodies behind the same interface. Both may be used from several threads at once.
"""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple, Protocol

from persistkv.errors import CorruptPackError
from persistkv.storage.codec import Buffer
from persistkv_s3.client.errors import BrokenError, LateError

_PIECE_BYTES = 1 << 20  # 1 MiB: what one write to a socket takes at most, so that a stalled one is noticed

MOST_DELETED = 1000


class Deadline:
    """A moment by which an operation has to end."""

    def __init__(self, seconds: float) -> None:
        self.seconds = seconds
        self._at = time.monotonic() + seconds

    @property
    def remaining(self) -> float:
        """Seconds left; 0 or less: it has passed."""
        return self._at - time.monotonic()

    def check(self, what: str) -> None:
        """Do nothing before the deadline.

        :raises LateError: after it.
        """
        if self.remaining <= 0:
            raise LateError(f"{what} took longer than {self.seconds:g} s")


class Body:
    """The bytes of an upload, where they lie. A file as boto3 wants it: ``read`` hands out whole pieces, uncopied."""

    def __init__(self, pieces: Sequence[Buffer], deadline: Deadline | None = None) -> None:
        self._pieces = [
            part[start : start + _PIECE_BYTES]
            for piece in pieces
            if len(part := memoryview(piece).cast("B"))
            for start in range(0, len(part), _PIECE_BYTES)
        ]
        self._length = sum(map(len, self._pieces))
        self._deadline = deadline
        self._next = 0

    def __len__(self) -> int:
        return self._length

    def within(self, deadline: Deadline) -> Body:
        """The same bytes from their begin, which cannot be read once the deadline has passed."""
        return Body(self._pieces, deadline)

    def parts(self, length: int) -> Iterator[Body]:
        """The bytes cut into bodies of at least ``length``, the last one shorter."""
        part: list[Buffer] = []
        size = 0
        for piece in self._pieces:
            part.append(piece)
            size += len(piece)
            if size >= length:
                yield Body(part)
                part, size = [], 0
        if part:
            yield Body(part)

    def read(self, _size: int = -1) -> Buffer:
        """The next piece, whatever size was asked for; empty at the end.

        :raises LateError: the deadline has passed: the upload breaks off.
        """
        if self._deadline is not None:
            self._deadline.check("an upload")
        if self._next == len(self._pieces):
            return b""
        self._next += 1
        return self._pieces[self._next - 1]

    def seek(self, offset: int, whence: int = 0) -> int:
        """To the begin or the end; nobody asks for more.

        :raises ValueError: another place.
        """
        if offset or whence not in (0, 2):
            raise ValueError(f"seek({offset}, {whence})")
        self._next = len(self._pieces) if whence else 0
        return self.tell()

    def tell(self) -> int:
        """Bytes read."""
        return sum(map(len, self._pieces[: self._next]))


class Sink(Protocol):
    """Destination of a download."""

    @property
    def position(self) -> int:
        """Bytes that arrived."""
        ...

    def expect(self, length: int) -> None:
        """The server is about to send so many bytes, from ``position`` on.

        :raises BrokenError: that is not what was asked for.
        """
        ...

    def room(self) -> memoryview:
        """Where the next bytes go; empty: no more are wanted."""
        ...

    def advance(self, count: int) -> None:
        """So many were put there."""
        ...


class RowSink:
    """Fills the caller's buffers, one after the other."""

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
    """Passes ranges of an object through one buffer, each as soon as it is complete; drops the bytes between them.

    :param ranges: (offset, length), ascending; the lengths are not 0.
    :param take: called with the number of a range, and its bytes, which are valid until it returns.
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
    """Collects an object of unknown length, up to a bound, because the content of a bucket is untrusted."""

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


class ObjectInfo(NamedTuple):
    """An object as a listing shows it."""

    key: str
    size: int
    modified: float
    """Seconds since the epoch, by the server's clock."""


class ListPage(NamedTuple):
    """A part of a listing."""

    objects: Sequence[ObjectInfo]
    next: str | None
    """Names the next one; None: this is the last."""


class Transport(ABC):
    """See the top of this file. Keys are whole: prefix included. All methods raise ``S3Error``s only."""

    @property
    def requests(self) -> dict[str, int]:
        """How many were sent so far, by kind; empty where nobody counts."""
        return {}

    @abstractmethod
    def put(self, key: str, body: Body, deadline: Deadline, *, only_if_absent: bool = True) -> None:
        """Upload, in one request or in parts.

        :raises ObjectExistsError: ``only_if_absent``, and something lies there. After a lost reply that may be one's
        own.
        """

    @abstractmethod
    def get(self, key: str, start: int | None, stop: int | None, sink: Sink, deadline: Deadline) -> None:
        """Download bytes ``start`` to ``stop`` into the sink; with ``start`` None the last ``stop`` ones, with both
        None all. State after failure: what the sink holds up to its position is right.

        :raises ObjectMissingError: there is no such object, or it is shorter.
        """

    @abstractmethod
    def head(self, key: str, deadline: Deadline) -> ObjectInfo:
        """:raises ObjectMissingError: there is no such object."""

    @abstractmethod
    def list(self, prefix: str, page: str | None, deadline: Deadline) -> ListPage:
        """Some objects whose keys begin so, by key.

        :param page: which, as the one before names it; None: the first.
        """

    @abstractmethod
    def delete(self, keys: Sequence[str], deadline: Deadline) -> None:
        """Delete objects, at most ``MOST_DELETED``; those that are not there are passed over."""

    @abstractmethod
    def close(self) -> None:
        """Release connections; idempotent."""
