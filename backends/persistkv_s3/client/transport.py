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
        return time.monotonic()

    def sleep(self, seconds: float) -> None:
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
        """Return the next piece, regardless of the requested size; raise ``LateError`` to abort a late upload."""
        self._deadline.check("an upload")
        if self._next == len(self._pieces):
            return b""
        self._next += 1
        return self._pieces[self._next - 1]

    def seek(self, offset: int, whence: int = 0) -> int:
        """Seek to the start or the end; boto3 needs no other position."""
        if offset or whence not in (0, 2):
            raise ValueError(f"seek({offset}, {whence})")
        self._next = len(self._pieces) if whence else 0
        return self.tell()

    def tell(self) -> int:
        return sum(map(len, self._pieces[: self._next]))


Take = Callable[[int, memoryview], None]
"""Receives the index of a buffer or frame, and its bytes, which are valid until it returns."""


class Sink:
    """Destination of a download.

    :param buffers: filled one after the other.
    :param take: called with the index of a buffer and the buffer when it is full; never for empty buffers.
    """

    def __init__(self, buffers: Sequence[memoryview] = (), take: Take | None = None) -> None:
        self.position = 0
        """Bytes that have arrived."""
        self._take = take
        self._use(buffers)

    def _use(self, buffers: Sequence[memoryview]) -> None:
        self._parts = [(number, part) for number, buffer in enumerate(buffers) if len(part := buffer.cast("B"))]
        self._next = self._filled = 0
        self.length = sum(len(part) for _, part in self._parts)
        """Expected number of bytes."""

    def expect(self, length: int) -> None:
        """Check the number of bytes that an answer will deliver; ``position`` bytes of the download have arrived.

        :raises BrokenError: ``length`` is not the number of bytes that are left.
        """
        if length != self.length - self.position:
            raise BrokenError(f"the server sends {length} bytes instead of {self.length - self.position}")

    def room(self) -> memoryview:
        """Return the memory for the next bytes; empty: the download is complete."""
        return self._parts[self._next][1][self._filled :] if self._next < len(self._parts) else memoryview(b"")

    def advance(self, count: int) -> None:
        """Record that ``count`` bytes were written to the memory that ``room`` returned."""
        self.position += count
        self._filled += count
        number, part = self._parts[self._next]
        if self._filled == len(part):
            self._next, self._filled = self._next + 1, 0
            if self._take is not None:
                self._take(number, part)


class WholeSink(Sink):
    """Download of a whole object into ``data``. A larger object than ``limit`` bytes raises ``CorruptPackError`` before
    its download: the content of a bucket is untrusted.
    """

    def __init__(self, limit: int) -> None:
        super().__init__()
        self._limit = limit
        self.data = bytearray()

    def expect(self, length: int) -> None:
        if length > self._limit:
            raise CorruptPackError("object", f"{length} bytes; at most {self._limit} belong there")
        if not self.position:  # the object may be another one than at a previous attempt
            self.data = bytearray(length)
            self._use([memoryview(self.data)])
        super().expect(length)


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
    """Identifies the next page; None: this is the last one."""


class Transport(ABC):
    """Object store client that makes single attempts. Keys include the prefix of the store.

    All methods raise ``S3Error``s: ``ObjectMissingError`` if an object that they need does not exist. Errors that a
    sink raises pass unchanged.
    """

    @property
    def requests(self) -> dict[str, int]:
        """Number of requests sent so far, retries included, by HTTP method; empty if they are not counted."""
        return {}

    def server_time(self) -> float:
        """Return the server's time in seconds since the epoch; the local time before the first answer."""
        return time.time()

    @abstractmethod
    def put(self, key: str, body: Body, deadline: Deadline, *, condition: str | None = None) -> str:
        """Upload an object in one request; return its ETag as the server wrote it, usually in quotes.

        :param condition: ``ABSENT``, or the ETag that the present object must have. None: replace any object.
        :raises ConditionFailedError: the condition does not hold. After a lost reply, this upload may be the reason.
        """

    @abstractmethod
    def get(
        self, key: str, start: int | None, stop: int | None, sink: Sink, deadline: Deadline, *, known: str | None = None
    ) -> str:
        """Download bytes ``start`` to ``stop`` (exclusive) into the sink; return the object's ETag. After a failure,
        the bytes of the sink up to its position are valid.

        :param start: None, together with ``stop``: download the whole object.
        :param known: an ETag; raise ``UnchangedError`` without a download if the object still has it.
        :raises ObjectMissingError: there is no such object, or it is shorter.
        """

    @abstractmethod
    def head(self, key: str, deadline: Deadline) -> ObjectInfo:
        """Return size and modification time of an object."""

    @abstractmethod
    def list(self, prefix: str, page: str | None, deadline: Deadline) -> ListPage:
        """Return a page of the objects whose keys start with ``prefix``, sorted by key.

        :param page: identifier from the previous page; None: the first page.
        """

    @abstractmethod
    def delete(self, keys: Sequence[str], deadline: Deadline) -> None:
        """Delete at most ``MOST_DELETED`` objects; ignore missing ones. After an error some may be deleted."""

    @abstractmethod
    def close(self) -> None:
        """Release connections; idempotent."""
