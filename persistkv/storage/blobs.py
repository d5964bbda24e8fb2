"""Interface of a shared medium: four methods on immutable bytes under names.

``storage.shared`` builds a store on it: packs and the objects of the index are blobs. An object
store, a directory that several machines mount, and a database table are media of this kind.

All methods block. Any thread may call any of them, concurrently with every other call. A failure of
the medium raises a ``StoreError``, never an exception of the vendor: ``BlobMissingError`` for a
missing blob, ``RefusedError`` if another attempt would fail, too, and ``UnavailableError`` if a
later attempt may succeed. The medium itself retries, for a bounded time. After ``close``, all
methods raise a ``StoreError``.
"""

from __future__ import annotations

import re
from abc import ABC, abstractmethod
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, NamedTuple

from persistkv.errors import ConfigurationError, StoreError, StoreUnavailableError
from persistkv.storage.format.codec import Buffer

if TYPE_CHECKING:
    from persistkv.storage.checks import Check

MAX_NAME = 200
"""Longest name of a blob in bytes. Names consist of ``a-z``, ``0-9``, ``-`` and ``/``; no part is
empty."""

_NAME = re.compile("[a-z0-9-]+(/[a-z0-9-]+)*")


class BlobMissingError(StoreError):
    """There is no blob with this name."""


class UnavailableError(StoreUnavailableError):
    """The medium does not answer at present. A write or deletion may have taken effect, or may take
    effect later."""


class RefusedError(StoreUnavailableError):
    """The medium refuses the call: permissions, credentials, a full disk. The text never contains
    credentials."""


class BlobInfo(NamedTuple):
    """A blob in a listing."""

    name: str
    size: int
    """Bytes."""
    time: float
    """When it was written, on the medium's clock: seconds since the epoch, perhaps rounded down to
    a second."""


class Blobs(ABC):
    """Blobs of one store on a shared medium."""

    latency_s: float = 0.001
    """Typical duration of a small call in seconds. Neighbouring ranges are read with one call if
    the bytes between them take less time than a call."""
    connections: int = 8
    """Number of calls that the medium serves well at once."""

    @abstractmethod
    def put(self, name: str, pieces: Sequence[Buffer]) -> float:
        """Write a blob, the concatenation of ``pieces``; it is durable on return. A blob with this
        name is replaced: a reader gets the whole old or the whole new one.

        :returns: the time on the medium's clock when the call took effect or later: seconds since
            the epoch.
        :raises StoreError: the blob was not written, or (``UnavailableError``) may have been
            written, or may appear later. It never appears in part.
        """

    @abstractmethod
    def read(
        self,
        name: str,
        offset: int,
        length: int,
        buffers: Iterable[memoryview],
    ) -> int:
        """Read ``length`` bytes of a blob, from the byte ``offset`` on, into writable buffers, one
        after the other.

        A buffer is taken from the iterable only when the buffers before it are full: an iterator
        can process each buffer when the next one is taken. When all buffers are full, the iterator
        is exhausted, so that it can process the last one. Its exceptions pass unchanged, and end
        the call, such as that of a load at its deadline. The caller abandons a call that hangs, so
        a medium needs no deadline, but should have one.

        :param length: the number of bytes that the buffers hold together. A medium that requests a
            range from a server must know its end before it takes the first buffer.
        :returns: the number of bytes that were read: fewer than ``length`` only if the blob ends.
        :raises BlobMissingError: there is no such blob.
        :raises StoreError: the medium failed. Buffers that were followed by another one are
            complete.
        """

    @abstractmethod
    def delete(self, names: Sequence[str]) -> None:
        """Delete blobs; missing ones are ignored.

        :raises StoreError: some may have been deleted, or may be deleted later.
        """

    @abstractmethod
    def list(
        self,
        prefix: str,
        after: str = "",
    ) -> Iterator[BlobInfo]:
        """Iterate over the blobs whose names start with ``prefix`` and are greater than ``after``,
        by ascending name.

        Each blob is included that was durable before the call and is not deleted before the
        iteration ends. Blobs that are written or deleted meanwhile may be included or not.

        :param prefix: empty, or ends with ``/``.
        :raises StoreError: the medium failed; the iteration ends.
        """

    def erase(
        self,
        prefix: str,
        names: Collection[str],
    ) -> Sequence[str]:
        """Delete blobs with all older versions that the medium keeps, also versions of blobs that
        were deleted before. Other names are ignored.

        :param prefix: empty, or ends with ``/``; all names start with it.
        :returns: what the medium does not let the caller delete, in sentences; empty: nothing is
            left.
        :raises StoreError: some may have been deleted, or may be deleted later.
        """
        self.delete(list(names))
        return []

    @abstractmethod
    def close(self) -> None:
        """Release connections; idempotent."""

    def requests(self) -> Mapping[str, int]:
        """Return the number of requests sent since the medium was opened, by kind; empty if they
        are not counted."""
        return {}

    def check(self, *, writes: bool) -> Iterator[Check]:
        """Yield what ``persistkv doctor`` shows: whether the calls work (``checks.CallsCheck``),
        and settings of the medium that prevent or slow a store. By default nothing.

        Failures are outcomes; nothing is raised. The check deletes its own blobs again.

        :param writes: False: the store will only be read.
        """
        return iter(())

    def state(self) -> str:
        """Return ``closed`` if calls are sent to the medium, ``open`` if a breaker prevents them
        after failures, or ``half-open`` if it lets some through."""
        return "closed"


def check_name(name: str) -> None:
    """Check the name of a blob, before it becomes part of a path, an URL or a query.

    :raises ConfigurationError: it is no valid name (a ``ValueError``).
    """
    if not is_name(name):
        expected = (
            f"1 to {MAX_NAME} characters of a-z, 0-9 and -, in parts separated by /"
        )
        raise ConfigurationError("name of a blob", name, expected)


def check_prefix(prefix: str) -> None:
    """Check the prefix of a listing.

    :raises ConfigurationError: it is neither empty nor a valid name followed by ``/`` (a
        ``ValueError``).
    """
    is_valid = not prefix or (prefix.endswith("/") and is_name(prefix[:-1]))
    if not is_valid:
        raise ConfigurationError(
            "prefix of blobs", prefix, "nothing, or parts of names, each followed by /"
        )


def is_name(text: str) -> bool:
    """Return whether a blob may have this name; a medium shared with others may hold objects with
    other names."""
    return len(text) <= MAX_NAME and _NAME.fullmatch(text) is not None
