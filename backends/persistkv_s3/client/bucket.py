"""One bucket as the driver uses it: the transport with the store's deadline, and threads for what goes side by side."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import wait
from typing import TypeVar

from persistkv.storage.codec import Buffer
from persistkv.storage.executor import ThreadPool
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

_SMALL_BYTES = 1 << 20  # 1 MiB: an identity, a lease, a root: more than that is none


class Bucket:
    """Used from any thread.

    :param deadline_s: for each operation, its retries included.
    :param connections: operations side by side in one call of ``all``.
    """

    def __init__(self, place: Place, transport: Transport, deadline_s: float, connections: int) -> None:
        self.place = place
        self._transport = transport
        self._deadline_s = deadline_s
        self._readers = ThreadPool(connections, "persistkv-s3-read")
        self._writers = ThreadPool(connections, "persistkv-s3-write")

    @property
    def requests(self) -> dict[str, int]:
        """As ``Transport.requests``."""
        return self._transport.requests

    def all(self, what: Callable[[A], R], things: Iterable[A]) -> list[R]:
        """``what`` of each thing, side by side; all have ended on return, whatever came of them.

        :raises StoreError: the first that one of them raised.
        :raises KeyboardInterrupt: at once. Queued calls never start; those that run end by their deadline, for which
            the interpreter's exit waits.
        """
        return self._all(self._readers, what, list(things))

    def all_writes(self, what: Callable[[A], R], things: Iterable[A]) -> list[R]:
        """The same on other threads, so that reads do not wait behind uploads."""
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
        """As ``Transport.put``."""
        self._transport.put(key, Body(pieces), Deadline(self._deadline_s), only_if_absent=only_if_absent)

    def get(self, key: str, limit: int = _SMALL_BYTES) -> bytearray:
        """A whole object.

        :raises CorruptPackError: it is larger than ``limit``.
        """
        sink = WholeSink(limit)
        self._transport.get(key, None, None, sink, Deadline(self._deadline_s))
        return sink.data

    def tail(self, key: str, length: int) -> bytearray:
        """The last bytes of an object; all of it where it is shorter."""
        sink = WholeSink(length)
        self._transport.get(key, None, length, sink, Deadline(self._deadline_s))
        return sink.data

    def fill(self, key: str, start: int, buffers: Sequence[memoryview]) -> None:
        """Fill buffers from byte ``start`` on.

        :raises ObjectMissingError: there is no such object, or it is shorter. What the buffers hold is undefined.
        """
        total = sum(buffer.nbytes for buffer in buffers)
        self._transport.get(key, start, start + total, RowSink(buffers), Deadline(self._deadline_s))

    def pour(self, key: str, sink: FrameSink) -> None:
        """Bring ranges of an object through a sink, with one request; errors as in ``fill``."""
        self._transport.get(key, sink.start, sink.stop, sink, Deadline(self._deadline_s))

    def head(self, key: str) -> ObjectInfo:
        """As ``Transport.head``."""
        return self._transport.head(key, Deadline(self._deadline_s))

    def list(self, prefix: str) -> list[ObjectInfo]:
        """All objects whose keys begin so, by key."""
        return list(self.pages(prefix))

    def pages(self, prefix: str) -> Iterator[ObjectInfo]:
        """The same, page by page, each within the deadline: there may be a million."""
        page = self._transport.list(prefix, None, Deadline(self._deadline_s))
        yield from page.objects
        while page.next is not None:
            page = self._transport.list(prefix, page.next, Deadline(self._deadline_s))
            yield from page.objects

    def delete(self, keys: Sequence[str]) -> None:
        """Delete objects; those that are not there are passed over."""
        for start in range(0, len(keys), MOST_DELETED):
            self._transport.delete(keys[start : start + MOST_DELETED], Deadline(self._deadline_s))

    def close(self) -> None:
        """Release connections; idempotent. Calls that an interrupt left running are not waited for."""
        self._readers.shutdown(wait=False)
        self._writers.shutdown(wait=False)
        self._transport.close()
