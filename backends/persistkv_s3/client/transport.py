"""The operations on an object store that the driver needs, each with a deadline, and their uploads and downloads.

``boto.BotoClient`` makes single attempts; ``retries.RetryingTransport`` adds retries, a breaker and the resumption of
bodies behind the same interface. Both are thread-safe.
"""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple, Protocol

from persistkv.errors import CorruptPackError
from persistkv.storage.format.codec import Buffer
from persistkv_s3.client.errors import BrokenError, LateError

_PIECE_BYTES = 1 << 20  # 1 MiB: maximum of one write to a socket, so that a stalled upload is detected

MOST_DELETED = 1000


class Deadline:
    """Time by which an operation must end."""

    def __init__(self, seconds: float) -> None:
        self.seconds = seconds
        self._at = time.monotonic() + seconds

    @property
    def remaining(self) -> float:
        """Seconds left; 0 or less: it has passed."""
        return self._at - time.monotonic()

    def check(self, what: str) -> None:
        """Check the deadline.

        :raises LateError: it has passed.
        """
        if self.remaining <= 0:
            raise LateError(f"{what} took longer than {self.seconds:g} s")


class Body:
    """Bytes of an upload, not copied. A file object for boto3: ``read`` returns whole pieces."""

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
        """Return a body with the same bytes, from their start, that cannot be read after the deadline."""
        return Body(self._pieces, deadline)

    def parts(self, length: int) -> Iterator[Body]:
        """Split the bytes into bodies of at least ``length``; the last one may be shorter."""
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
        """Return the next piece, regardless of the requested size; empty at the end.

        :raises LateError: the deadline has passed; this aborts the upload.
        """
        if self._deadline is not None:
            self._deadline.check("an upload")
        if self._next == len(self._pieces):
            return b""
        self._next += 1
        return self._pieces[self._next - 1]

    def seek(self, offset: int, whence: int = 0) -> int:
        """Seek to the start or the end; boto3 needs no other position.

        :raises ValueError: another position.
        """
        if offset or whence not in (0, 2):
            raise ValueError(f"seek({offset}, {whence})")
        self._next = len(self._pieces) if whence else 0
        return self.tell()

    def tell(self) -> int:
        """Return the number of bytes read."""
        return sum(map(len, self._pieces[: self._next]))


class Sink(Protocol):
    """Destination of a download."""

    @property
    def position(self) -> int:
        """Bytes that have arrived."""
        ...

    def expect(self, length: int) -> None:
        """Called before the server sends ``length`` bytes, from ``position`` on.

        :raises BrokenError: that is not the requested length.
        """
        ...

    def room(self) -> memoryview:
        """Return the memory for the next bytes; empty: the download is complete."""
        ...

    def advance(self, count: int) -> None:
        """Called after ``count`` bytes were written there."""
        ...


class RowSink:
    """Fills the caller's buffers in order."""

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
    """Passes ranges of an object through one buffer, each as soon as it is complete; discards the bytes between them.

    :param ranges: (offset, length), ascending; no length is 0.
    :param take: called with the index of a range and its bytes, which are valid until it returns.
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
    """An object in a listing."""

    key: str
    size: int
    modified: float
    """Seconds since the epoch, by the server's clock."""


class ListPage(NamedTuple):
    """One page of a listing."""

    objects: Sequence[ObjectInfo]
    next: str | None
    """Identifies the next page; None: this is the last one."""


class Transport(ABC):
    """See the top of this file. Keys include the prefix. All methods raise ``S3Error``s, and pass errors of a sink."""

    @property
    def requests(self) -> dict[str, int]:
        """Number of requests sent so far, by kind; empty if they are not counted."""
        return {}

    @abstractmethod
    def put(self, key: str, body: Body, deadline: Deadline, *, only_if_absent: bool = True) -> None:
        """Upload an object, in one request or in parts.

        :raises ObjectExistsError: ``only_if_absent``, and there is an object. After a lost reply, this upload may have
            created it.
        """

    @abstractmethod
    def get(self, key: str, start: int | None, stop: int | None, sink: Sink, deadline: Deadline) -> None:
        """Download bytes ``start`` to ``stop`` into the sink.

        With ``start`` None: the last ``stop`` bytes. With both None: the whole object.

        After a failure, the bytes of the sink up to its position are valid.

        :raises ObjectMissingError: there is no such object, or it is shorter.
        """

    @abstractmethod
    def head(self, key: str, deadline: Deadline) -> ObjectInfo:
        """:raises ObjectMissingError: there is no such object."""

    @abstractmethod
    def list(self, prefix: str, page: str | None, deadline: Deadline) -> ListPage:
        """Return a page of the objects whose keys start with ``prefix``, by key.

        :param page: identifier from the previous page; None: the first page.
        """

    @abstractmethod
    def delete(self, keys: Sequence[str], deadline: Deadline) -> None:
        """Delete objects, at most ``MOST_DELETED``; missing ones are ignored."""

    @abstractmethod
    def close(self) -> None:
        """Release connections; idempotent."""
