"""One bucket as the driver uses it: a transport with the store's deadline, and threads for concurrent operations."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import wait
from typing import TypeVar

from persistkv.storage.executor import ThreadPool
from persistkv.storage.format.codec import Buffer
from persistkv_s3.client.transport import (
    MOST_DELETED,
    Body,
    Deadline,
    FrameSink,
    ObjectInfo,
    RowSink,
    Transport,
    WholeSink,
)
from persistkv_s3.options import Place

A = TypeVar("A")
R = TypeVar("R")

_SMALL_BYTES = 1 << 20  # 1 MiB: identities, leases and roots are smaller


class Bucket:
    """Operations on one bucket. Thread-safe.

    :param deadline_s: of each operation in seconds, including retries.
    :param connections: maximum of concurrent operations in one call of ``all``.
    """

    def __init__(self, place: Place, transport: Transport, deadline_s: float, connections: int) -> None:
        self.place = place
        self._transport = transport
        self._deadline_s = deadline_s
        self._readers = ThreadPool(connections, "persistkv-s3-read")
        self._writers = ThreadPool(connections, "persistkv-s3-write")

    @property
    def requests(self) -> dict[str, int]:
        """See ``Transport.requests``."""
        return self._transport.requests

    def all(self, what: Callable[[A], R], things: Iterable[A]) -> list[R]:
        """Call ``what`` with each thing, concurrently; return the results.

        All calls have ended when it returns or raises a ``StoreError``.

        :raises StoreError: the error of the first thing whose call failed.
        :raises KeyboardInterrupt: at once. Queued calls never start; running ones end by their deadline, and the
            interpreter's exit waits for them.
        """
        return self._all(self._readers, what, list(things))

    def all_writes(self, what: Callable[[A], R], things: Iterable[A]) -> list[R]:
        """Do the same in other threads, so that reads do not wait behind uploads."""
        return self._all(self._writers, what, list(things))

    def _all(self, pool: ThreadPool, what: Callable[[A], R], todo: list[A]) -> list[R]:
        if len(todo) <= 1:
            return [what(thing) for thing in todo]
        futures = [pool.submit(what, thing) for thing in todo]
        try:
            wait(futures)  # no call uses the caller's memory after the return
        finally:
            for future in futures:
                future.cancel()
        return [future.result() for future in futures]

    def put(self, key: str, pieces: Sequence[Buffer], *, only_if_absent: bool = True) -> None:
        """See ``Transport.put``."""
        self._transport.put(key, Body(pieces), Deadline(self._deadline_s), only_if_absent=only_if_absent)

    def get(self, key: str, limit: int = _SMALL_BYTES) -> bytearray:
        """Return a whole object.

        :raises CorruptPackError: it is larger than ``limit`` bytes.
        """
        sink = WholeSink(limit)
        self._transport.get(key, None, None, sink, Deadline(self._deadline_s))
        return sink.data

    def tail(self, key: str, length: int) -> bytearray:
        """Return the last bytes of an object; all of it if it is shorter."""
        sink = WholeSink(length)
        self._transport.get(key, None, length, sink, Deadline(self._deadline_s))
        return sink.data

    def fill(self, key: str, start: int, buffers: Sequence[memoryview]) -> None:
        """Fill buffers from byte ``start`` on.

        :raises ObjectMissingError: there is no such object, or it is shorter; the content of the buffers is undefined.
        """
        total = sum(buffer.nbytes for buffer in buffers)
        self._transport.get(key, start, start + total, RowSink(buffers), Deadline(self._deadline_s))

    def pour(self, key: str, sink: FrameSink) -> None:
        """Download ranges of an object into a sink, with one request; errors as in ``fill``."""
        self._transport.get(key, sink.start, sink.stop, sink, Deadline(self._deadline_s))

    def head(self, key: str) -> ObjectInfo:
        """See ``Transport.head``."""
        return self._transport.head(key, Deadline(self._deadline_s))

    def list(self, prefix: str) -> list[ObjectInfo]:
        """Return all objects whose keys start with ``prefix``, by key."""
        return list(self.pages(prefix))

    def pages(self, prefix: str) -> Iterator[ObjectInfo]:
        """Yield the same page by page, each page within the deadline: there may be a million objects."""
        page = self._transport.list(prefix, None, Deadline(self._deadline_s))
        yield from page.objects
        while page.next is not None:
            page = self._transport.list(prefix, page.next, Deadline(self._deadline_s))
            yield from page.objects

    def delete(self, keys: Sequence[str]) -> None:
        """Delete objects; missing ones are ignored."""
        for start in range(0, len(keys), MOST_DELETED):
            self._transport.delete(keys[start : start + MOST_DELETED], Deadline(self._deadline_s))

    def close(self) -> None:
        """Release connections; idempotent. Does not wait for calls that an interrupt left running."""
        self._readers.shutdown(wait=False)
        self._writers.shutdown(wait=False)
        self._transport.close()
