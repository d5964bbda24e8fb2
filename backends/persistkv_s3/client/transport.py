"""Interface of an object store client, its errors, and the sources and destinations of transfers.

``boto.BotoClient`` implements it with single attempts; ``bucket.Bucket`` adds retries and the breaker.
"""

from __future__ import annotations

import random
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from typing import NamedTuple

from persistkv.errors import CorruptPackError, StoreUnavailableError
from persistkv.storage.format.codec import Buffer

_PIECE_BYTES = 1 << 20  # 1 MiB: maximum of one write to a socket, so that a stalled upload is detected

MOST_DELETED = 1000


class S3Error(StoreUnavailableError):
    """A request failed. The text never contains credentials."""

    retryable = False
    """Whether the same request may succeed if it is repeated."""
    healthy = False
    """Whether the server works although the request failed: it answered, and the error is not its fault."""
    uncertain = False
    """Whether the server may have carried out the request."""
    pause_s = 0.0
    """Minimum pause in seconds that the server requests before the next attempt."""


class ObjectMissingError(S3Error):
    """The object does not exist, or is shorter than the requested range."""

    healthy = True


class ConditionFailedError(S3Error):
    """The condition of a PUT does not hold: an object exists, or has another ETag."""

    healthy = True


class UnchangedError(S3Error):
    """The object still has the ETag that the caller knows, so nothing was downloaded."""

    healthy = True


class RefusedError(S3Error):
    """The server rejected the request: credentials, policy, bucket, region."""


class BrokenError(S3Error):
    """The connection broke, or the server failed. A write may have taken effect."""

    retryable = True
    uncertain = True


class ThrottledError(S3Error):
    """The server asks for fewer requests. The request had no effect."""

    retryable = True
    pause_s = 0.5


class LateError(S3Error):
    """The deadline of the operation passed. A write may have taken effect."""

    uncertain = True


class BreakerOpenError(S3Error):
    """No request was made, because previous ones failed or were slow."""

    healthy = True


PASSING = (BrokenError, ThrottledError, LateError, BreakerOpenError)
"""Temporary errors: the server does not answer at present, or no request is sent to it."""


ABSENT = "*"
"""Condition of a PUT: no object with this key exists."""


class Clock:
    """Time and randomness of one handle. A simulation replaces it."""

    random: random.Random = random.SystemRandom()
    """Source of nonces and jitter."""

    def monotonic(self) -> float:
        """Return seconds since an arbitrary moment; never moves backwards."""
        return time.monotonic()

    def sleep(self, seconds: float) -> None:
        """Pause the calling thread."""
        time.sleep(seconds)


class Deadline:
    """Time by which an operation must end: ``seconds`` after its start."""

    def __init__(self, seconds: float, clock: Clock | None = None) -> None:
        self.seconds = seconds
        self._now = time.monotonic if clock is None else clock.monotonic
        self._at = self._now() + seconds

    @property
    def remaining(self) -> float:
        """Seconds left; 0 or less: the deadline has passed."""
        return self._at - self._now()

    def check(self, what: str) -> None:
        """Raise ``LateError`` if the deadline has passed; ``what`` names the operation in the error."""
        if self.remaining <= 0:
            raise LateError(f"{what} took longer than {self.seconds:g} s")


class Body:
    """Body of an upload, as a file object for boto3. ``read`` returns whole pieces of the bytes, without a copy."""

    def __init__(self, pieces: Sequence[Buffer], deadline: Deadline) -> None:
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

    def read(self, _size: int = -1) -> Buffer:
        """Return the next piece, regardless of the requested size; empty at the end.

        :raises LateError: the deadline has passed; this aborts the upload.
        """
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
        """Return the number of bytes before the current position."""
        return sum(map(len, self._pieces[: self._next]))


class Sink(ABC):
    """Destination of a download.

    :param length: expected number of bytes.
    """

    def __init__(self, length: int) -> None:
        self.length = length
        self.position = 0
        """Bytes that have arrived."""

    def expect(self, length: int) -> None:
        """Check the number of bytes that an answer will deliver; ``position`` bytes of the download have arrived.

        :raises BrokenError: ``length`` is not the number of bytes that are left.
        """
        if length != self.length - self.position:
            raise BrokenError(f"the server sends {length} bytes instead of {self.length - self.position}")

    @abstractmethod
    def room(self) -> memoryview:
        """Return the memory for the next bytes; empty: the download is complete."""

    def advance(self, count: int) -> None:
        """Record that ``count`` bytes were written to the memory that ``room`` returned."""
        self.position += count


class RowSink(Sink):
    """Download into the caller's buffers, one after the other."""

    def __init__(self, buffers: Sequence[memoryview]) -> None:
        self._parts = [part for buffer in buffers if len(part := buffer.cast("B"))]
        self._part = 0
        self._filled = 0
        super().__init__(sum(map(len, self._parts)))

    def room(self) -> memoryview:
        return self._parts[self._part][self._filled :] if self._part < len(self._parts) else memoryview(b"")

    def advance(self, count: int) -> None:
        super().advance(count)
        self._filled += count
        if self._filled == len(self._parts[self._part]):
            self._part += 1
            self._filled = 0


class FrameSink(Sink):
    """Download of ranges of an object through one buffer: passes each range to ``take``, discards other bytes.

    :param ranges: (offset, length) in bytes of the object, ascending; no length is 0.
    :param buffer: holds one range at a time; at least as long as the longest one.
    :param take: called with the index of a range and its bytes, which are valid until it returns.
    """

    def __init__(
        self, ranges: Sequence[tuple[int, int]], buffer: memoryview, take: Callable[[int, memoryview], None]
    ) -> None:
        self.start = ranges[0][0]
        self.stop = sum(ranges[-1])
        self._ranges = ranges
        self._buffer = buffer
        self._take = take
        self._number = 0
        super().__init__(self.stop - self.start)

    def room(self) -> memoryview:
        if self._number == len(self._ranges):
            return memoryview(b"")
        offset, length = self._ranges[self._number]
        inside = self.start + self.position - offset
        return self._buffer[inside:length] if inside >= 0 else self._buffer[:-inside]

    def advance(self, count: int) -> None:
        super().advance(count)
        offset, length = self._ranges[self._number]
        if self.start + self.position == offset + length:
            self._number += 1
            self._take(self._number - 1, self._buffer[:length])


class WholeSink(Sink):
    """Download of a whole object into ``data``. A larger object than ``limit`` bytes raises ``CorruptPackError`` before
    its download: the content of a bucket is untrusted.
    """

    def __init__(self, limit: int) -> None:
        super().__init__(0)
        self._limit = limit
        self.data = bytearray()

    def expect(self, length: int) -> None:
        if length > self._limit:
            raise CorruptPackError("object", f"{length} bytes; at most {self._limit} belong there")
        if not self.position:  # the object may be another one than at a previous attempt
            self.length = length
            self.data = bytearray(length)
        super().expect(length)

    def room(self) -> memoryview:
        return memoryview(self.data)[self.position :]


class ObjectInfo(NamedTuple):
    """S3 key, size in bytes and modification time of an object, from a listing or a HEAD request."""

    key: str
    size: int
    modified: float
    """Time of the last modification: seconds since the epoch, by the server's clock."""


class ListPage(NamedTuple):
    """One page of a listing."""

    objects: Sequence[ObjectInfo]
    next: str | None
    """Identifies the next page, for ``Transport.list``; None: this is the last one."""


class Transport(ABC):
    """Object store client that makes single attempts. Keys include the prefix of the store.

    All methods raise ``S3Error``s. Errors that a sink raises pass unchanged.
    """

    @property
    def requests(self) -> dict[str, int]:
        """Number of requests sent since this object was created, retries included, by HTTP method; empty if they are
        not counted.
        """
        return {}

    def server_time(self) -> float:
        """Return the time by the server's clock, in seconds since the epoch; the local time before the first answer."""
        return time.time()

    @abstractmethod
    def put(self, key: str, body: Body, deadline: Deadline, *, condition: str | None = None) -> str:
        """Upload an object in one request; return its ETag as the server wrote it, usually in quotes.

        :param condition: ``ABSENT``, or the ETag that the present object must have. None: replace any object.
        :raises ConditionFailedError: the condition does not hold. After a lost reply, this upload may be the reason.
        :raises ObjectMissingError: the condition is an ETag, and there is no object.
        """

    @abstractmethod
    def get(
        self, key: str, start: int | None, stop: int | None, sink: Sink, deadline: Deadline, *, known: str | None = None
    ) -> str:
        """Download bytes ``start`` to ``stop`` (exclusive) into the sink; return the object's ETag.

        After a failure, the bytes of the sink up to its position are valid.

        :param start: None, together with ``stop``: download the whole object.
        :param known: an ETag; nothing is downloaded if the object still has it.
        :raises UnchangedError: the object still has the ETag ``known``.
        :raises ObjectMissingError: there is no such object, or it is shorter.
        """

    @abstractmethod
    def head(self, key: str, deadline: Deadline) -> ObjectInfo:
        """Return size and modification time of an object; raise ``ObjectMissingError`` if it does not exist."""

    @abstractmethod
    def list(self, prefix: str, page: str | None, deadline: Deadline) -> ListPage:
        """Return a page of the objects whose keys start with ``prefix``, sorted by key.

        :param page: identifier from the previous page; None: the first page.
        """

    @abstractmethod
    def delete(self, keys: Sequence[str], deadline: Deadline) -> None:
        """Delete objects, at most ``MOST_DELETED`` (1,000); missing ones are ignored. After an error some may be
        deleted.
        """

    @abstractmethod
    def close(self) -> None:
        """Release connections; idempotent."""
