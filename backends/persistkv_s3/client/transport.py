"""Interface of an object store client, its errors, and the source and destination of a transfer.

``boto.BotoClient`` implements it with single attempts; ``bucket.Bucket`` adds retries and the
breaker. ``blobs`` translates the errors into those of ``storage.blobs``.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

from persistkv.errors import StoreUnavailableError
from persistkv.storage.format.codec import Buffer
from persistkv.storage.shared import Clock

# 1 MiB: maximum bytes of one write to a socket, so that a stalled upload is detected
_PIECE_BYTES = 1 << 20

# maximum number of objects in one request for their deletion, which S3 limits
MOST_DELETED = 1000


class S3Error(StoreUnavailableError):
    """A request failed. The text never contains credentials."""

    retryable = False
    """Whether the same request may succeed if it is repeated."""
    healthy = False
    """Whether the server works although the request failed: it answered, and the error concerns an
    object or the caller. The breaker counts the other errors only."""
    pause_s = 0.0
    """Minimum pause in seconds that the server requests before the next attempt."""
    code = ""
    """S3's name of the error, such as ``AccessDenied``; empty if no answer came."""


class ObjectMissingError(S3Error):
    """The object does not exist, or ends before the requested range."""

    healthy = True


class RangeError(ObjectMissingError):
    """The object exists, and ends at or before the first byte of the requested range."""


class RequestRefusedError(S3Error):
    """The server rejected the request: credentials, policy, bucket, region, an archived or locked
    object."""

    healthy = True


class KeysRefusedError(RequestRefusedError):
    """The server carried out a deletion of several objects, and refused to delete some of them."""


class NoCredentialsError(RequestRefusedError):
    """No request was made: there are no credentials. Each call looks for them again, which takes
    time where a metadata server does not answer, so the breaker counts this error."""

    healthy = False


class ObjectReplacedError(S3Error):
    """The object was replaced during its download: the bytes that arrived belong to the previous
    one."""

    healthy = True


class BrokenError(S3Error):
    """The connection broke, or the server failed. A write may have taken effect."""

    retryable = True


class ThrottledError(S3Error):
    """The server asks for fewer requests. The request had no effect."""

    retryable = True
    pause_s = 0.5


class LateError(S3Error):
    """The deadline of the operation passed. A write may have taken effect."""


class BreakerOpenError(S3Error):
    """No request was made, because previous ones failed or were slow."""

    healthy = True


class Deadline:
    """Time by which an operation must end: ``seconds`` after its start."""

    def __init__(self, seconds: float, clock: Clock | None = None) -> None:
        self.seconds = seconds
        self._now = (clock or Clock()).monotonic
        self._at = self._now() + seconds
        """Time of the deadline, on the clock that ``_now`` reads."""

    @property
    def remaining(self) -> float:
        """Seconds left; 0 or less: the deadline has passed."""
        return self._at - self._now()

    def check(self, what: str) -> None:
        """Raise ``LateError`` if the deadline has passed; ``what`` names the operation in the
        error."""
        if self.remaining <= 0:
            raise LateError(f"{what} took longer than {self.seconds:g} s")


class Body:
    """Body of an upload, as a file object for boto3. ``read`` returns whole pieces of the bytes,
    without a copy. For a checksum or signature of the body, boto3 reads it twice."""

    def __init__(self, pieces: Sequence[Buffer], deadline: Deadline) -> None:
        self._pieces: list[memoryview] = []
        """Views of at most 1 MiB: the deadline is checked before each."""
        for buffer in pieces:
            part = memoryview(buffer).cast("B")
            for start in range(0, len(part), _PIECE_BYTES):
                stop = start + _PIECE_BYTES
                self._pieces.append(part[start:stop])
        self._length = sum(map(len, self._pieces))
        self._deadline = deadline
        self._next = 0
        """Index of the next piece to read."""
        self._start = 0
        """Bytes of the next piece that were read already."""

    def __len__(self) -> int:
        return self._length

    def read(self, _size: int = -1) -> Buffer:
        """Return the rest of the next piece, of any size; empty at the end. The requested size may
        be ignored: boto3 sends pieces of any size, until an empty one.

        :raises LateError: the upload is late; this aborts it.
        """
        self._deadline.check("an upload")
        if self._next == len(self._pieces):
            return b""
        # ``readinto`` may have read the start of the piece
        rest = self._pieces[self._next][self._start :]
        self._next += 1
        self._start = 0
        return rest

    def readinto(self, buffer: memoryview) -> int:
        """Copy the next bytes into a buffer; return their number, 0 at the end. Called if awscrt is
        installed: botocore then has it read and sign the body, with buffers of its own.

        :raises LateError: the upload is late.
        """
        target = buffer.cast("B")
        start = self._start  # position in the piece that is read here
        rest = memoryview(self.read())
        count = min(len(rest), len(target))
        target[:count] = rest[:count]
        if count < len(rest):
            # ``read`` has passed the whole piece: return to it, behind the bytes that were copied
            self._next -= 1
            self._start = start + count
        return count

    def seek(self, offset: int, whence: int = 0) -> int:
        """Seek to the start or the end; boto3 needs no other position."""
        if offset or whence not in (0, 2):
            raise ValueError(f"seek({offset}, {whence})")
        self._next = len(self._pieces) if whence else 0
        self._start = 0
        return self.tell()

    def tell(self) -> int:
        pieces_read = self._pieces[: self._next]
        return sum(map(len, pieces_read)) + self._start


class Sink:
    """Destination of a download: buffers for a range of an object, which may end before the range.

    :param length: bytes that the buffers hold together.
    :param buffers: each is taken when those before it are full. Exceptions of the iterable pass
        unchanged.
    """

    def __init__(self, length: int, buffers: Iterable[memoryview]) -> None:
        self.position = 0
        """Bytes that have arrived."""
        self._range_length = length
        """Bytes of the requested range."""
        self.length = length
        """Bytes that can arrive; less than the length of the range once the object's end is
        known."""
        self._etag = ""
        """ETag of the object from which bytes have arrived; empty: none have."""
        self._next_buffers = iter(buffers)
        self._room = memoryview(b"")
        """The part of the present buffer that is not filled yet."""

    @property
    def begun(self) -> bool:
        """Whether bytes have arrived."""
        return self.position > 0

    @property
    def complete(self) -> bool:
        """Whether all bytes have arrived."""
        return self.position == self.length

    def end(self) -> None:
        """Mark the download as complete: the object ends here."""
        self.length = self.position

    def expect(self, length: int, etag: str) -> None:
        """Check the number of bytes that an answer will deliver: fewer than the range has if the
        object ends there.

        :param etag: identifies the content of the object. Bytes of two objects are never mixed.
        :raises BrokenError: the server sends more bytes than requested, or others than at an
            earlier attempt.
        :raises ObjectReplacedError: this is not the object of the earlier attempts.
        """
        if not self.begun:
            # no attempt has delivered a byte yet, so any version of the object will do
            self._etag = etag
            self.length = min(self._range_length, length)
        elif etag != self._etag:
            raise ObjectReplacedError("the object was replaced while it was downloaded")
        # refuse a first answer with more than the range, and a later answer with another length
        missing = self.length - self.position
        if length != missing:
            raise BrokenError(f"the server sends {length} bytes instead of {missing}")

    def room(self) -> memoryview:
        """Return the memory for the next bytes; empty: the download is complete."""
        if self.complete:
            return memoryview(b"")
        # skip empty buffers
        while not len(self._room):
            self._room = self._take_next()
        missing = self.length - self.position
        return self._room[:missing]

    def _take_next(self) -> memoryview:
        """Return the next of the buffers.

        :raises ValueError: there is none.
        """
        # this loop has one iteration at most
        for buffer in self._next_buffers:
            return buffer.cast("B")
        raise ValueError("the buffers hold fewer bytes than the range has")

    def advance(self, count: int) -> None:
        """Record that ``count`` bytes were written to the memory that ``room`` returned."""
        self.position += count
        self._room = self._room[count:]

    def exhaust(self) -> None:
        """Let the owner of the buffers process the last one, if it is full: a generator that yields
        the buffers processes each when the next one is requested.

        :raises ValueError: the buffers hold more bytes than the range.
        """
        # the object has ended within the range, so the last buffer is not full and its generator
        # must not process it
        if self.position < self._range_length:
            return
        excess = len(self._room)
        # usually, this resumes the generator once, and it ends without another buffer
        for buffer in self._next_buffers:
            excess += buffer.nbytes
        if excess:
            raise ValueError("the buffers hold more bytes than the range has")


class ObjectInfo(NamedTuple):
    """S3 key, size in bytes and modification time of an object in a listing."""

    key: str
    size: int
    modified: float
    """Time of the last modification: seconds since the epoch, by the server's clock."""


class ListPage(NamedTuple):
    """One page of a listing."""

    objects: Sequence[ObjectInfo]
    next: str | None
    """Identifies the next page; None: this is the last one."""


class ObjectVersion(NamedTuple):
    """A version of an object, or a marker of its deletion."""

    key: str
    version: str


class VersionPage(NamedTuple):
    """One page of a listing of versions."""

    versions: Sequence[ObjectVersion]
    next: ObjectVersion | None
    """Last version of this page, after which the next page begins; None: this is the last page."""


class Transport(ABC):
    """Object store client that makes single attempts. Keys include the prefix of the store.

    All methods raise ``S3Error``s: ``ObjectMissingError`` if an object that they need does not
    exist. Errors that a sink raises pass unchanged.
    """

    @property
    def requests(self) -> dict[str, int]:
        """Number of requests sent so far, retries included, by HTTP method; empty if they are not
        counted."""
        return {}

    @abstractmethod
    def put(
        self,
        key: str,
        body: Body,
        deadline: Deadline,
    ) -> float:
        """Upload an object in one request; replace any with this key.

        :returns: the server's time: seconds since the epoch, rounded down to a second. The local
            time if it sent none.
        """

    @abstractmethod
    def get(
        self,
        key: str,
        start: int,
        stop: int,
        sink: Sink,
        deadline: Deadline,
    ) -> None:
        """Download bytes ``start`` to ``stop`` (exclusive) of an object into the sink: fewer if the
        object ends. After a failure, the bytes of the sink up to its position are valid.

        :raises RangeError: the object ends at ``start`` or before.
        :raises ObjectMissingError: there is no such object.
        """

    @abstractmethod
    def head(self, key: str, deadline: Deadline) -> None:
        """Raise ``ObjectMissingError`` if there is no such object."""

    @abstractmethod
    def list(
        self,
        prefix: str,
        page: str | None,
        deadline: Deadline,
        *,
        after: str = "",
    ) -> ListPage:
        """Return a page of the objects whose keys start with ``prefix``, sorted by key.

        :param page: identifier from the previous page; None: the first page.
        :param after: the first page begins with the first key that is greater.
        """

    @abstractmethod
    def delete(self, keys: Sequence[str], deadline: Deadline) -> None:
        """Delete at most ``MOST_DELETED`` objects; ignore missing ones. After an error some may be
        deleted.

        :raises KeysRefusedError: the server refuses to delete some of them; the others are deleted.
        :raises RequestRefusedError: the server refuses the request, perhaps because it deletes
            several objects.
        """

    def versions(
        self,
        prefix: str,
        after: ObjectVersion | None,
        deadline: Deadline,
    ) -> VersionPage:
        """Return a page of all versions of the objects whose keys start with ``prefix``, also of
        deleted ones.

        :param after: last one of the previous page; None: the first page.
        :raises RequestRefusedError: there is no permission, or the server knows no versions.
        """
        raise RequestRefusedError("versions are not known")

    def delete_versions(
        self,
        versions: Sequence[ObjectVersion],
        deadline: Deadline,
    ) -> None:
        """Delete at most ``MOST_DELETED`` versions for good; errors as in ``delete``."""
        raise RequestRefusedError("versions are not known")

    def setting(
        self,
        name: str,
        deadline: Deadline,
    ) -> Mapping[str, Any]:
        """Return a setting of the bucket, as the answer of boto3's ``get_bucket_…``; empty if it
        was never set.

        :param name: the operation, such as ``get_bucket_versioning``.
        :raises RequestRefusedError: there is no permission, or the server does not know the
            setting.
        """
        raise RequestRefusedError(f"{name} is not known")

    @abstractmethod
    def close(self) -> None:
        """Release connections; idempotent."""
