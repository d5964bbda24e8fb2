"""Concurrent calls of a medium, and its time as their replies show it."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import wait
from typing import TypeVar

from persistkv.errors import CorruptPackError, StoreError
from persistkv.storage.blobs import BlobInfo, BlobMissingError, Blobs
from persistkv.storage.format.codec import Buffer
from persistkv.storage.format.keys import StoreKey
from persistkv.storage.format.seal import Seal
from persistkv.storage.shared.clock import Clock, ServerTime
from persistkv.storage.shared.forgetting.records import ForgetRecords
from persistkv.storage.shared.format import (
    LATEST_TIME,
    MAX_OBJECT_BYTES,
    MAX_SMALL_BYTES,
    StoreNames,
    open_object,
    seal_object,
)
from persistkv.storage.shared.keys import StoreKeys
from persistkv.storage.threads import ThreadPool

_MOST_LISTS = 6  # maximum number of lists in a row, while other engines delete blobs

A = TypeVar("A")
R = TypeVar("R")


class Calls:
    """Runs calls concurrently, at most ``connections`` at a time, in daemon threads of its own.

    :param connections: if 1, calls run in the caller's thread.
    :param name: prefix of the threads' names.
    """

    def __init__(self, connections: int, name: str) -> None:
        self._connections = connections
        self._pool = None if connections == 1 else ThreadPool(connections, name)

    def all(
        self,
        call: Callable[[A], R],
        things: Iterable[A],
    ) -> list[R]:
        """Call ``call`` with each thing; return the results in order.

        All calls have ended when it returns or raises the error of the first thing whose call
        failed. KeyboardInterrupt is raised at once: queued calls never start.
        """
        arguments = list(things)
        pool = self._pool
        if pool is None or len(arguments) <= 1:
            return [call(argument) for argument in arguments]
        futures = [pool.submit(call, argument) for argument in arguments]
        try:
            wait(futures)  # no call may use the caller's memory after the return
        finally:
            # only a KeyboardInterrupt leaves queued calls, which are cancelled
            for future in futures:
                future.cancel()
        return [future.result() for future in futures]

    def each(
        self,
        call: Callable[[A], R],
        things: Sequence[A],
    ) -> Iterator[tuple[A, R]]:
        """Yield each thing with the result of ``call``, in order. The results of ``connections``
        things at a time are in memory."""
        for start in range(0, len(things), self._connections):
            end = start + self._connections
            some = things[start:end]
            results = self.all(call, some)
            yield from zip(some, results, strict=True)

    def close(self) -> None:
        """End the threads; calls that hang are left behind. Idempotent."""
        if self._pool is not None:
            self._pool.shutdown(wait=False)


class Medium:
    """A shared medium as one handle uses it: sealed objects, separate threads for loads and for
    everything else.

    :param blobs: closed with this object.
    :param key: the store key; None: the store has none.
    """

    def __init__(
        self,
        blobs: Blobs,
        key: StoreKey | None,
        clock: Clock,
    ) -> None:
        self.blobs = blobs
        self.clock = clock
        self.keys = StoreKeys(self, key)
        """Data keys of the store and of its tenants."""
        self.seal: Seal = self.keys.seal
        """Seal of all that the store writes."""
        self.records = ForgetRecords(self)
        """Records of forgotten tenants."""
        self.time = ServerTime(clock)
        """The medium's clock. Replies to writes and lists set it."""
        self.loads = Calls(blobs.connections, "persistkv-shared-load")
        """For reads of packs, which an engine waits for: they never wait behind other calls."""
        self.uploads = Calls(blobs.connections, "persistkv-shared-upload")
        """For writes of packs, and reads of tenants' data keys."""
        self.maintenance = Calls(blobs.connections, "persistkv-shared-index")
        """For objects of the index, and everything else."""

    @property
    def names(self) -> StoreNames:
        """Names of the store's own blobs.

        :raises UnavailableError: the store has a key, and the medium has not answered yet.
        """
        return StoreNames(self.keys.keyring_id)

    def entry_time(self) -> float:
        """Return the time of an entry that an index object gets now. If it is unknown, return a
        time later than any: readers limit it to the time of the object (``Delta.clamped``)."""
        return self.time.time_of_use() or LATEST_TIME

    def put(self, name: str, pieces: Sequence[Buffer]) -> float:
        """Write a blob (``Blobs.put``); return the medium's time, and learn it."""
        written = self.blobs.put(name, pieces)
        self.time.learn(written)
        return written

    def put_sealed(
        self,
        name: str,
        body: bytes,
        namespace: bytes,
        limit: int = MAX_OBJECT_BYTES,
    ) -> BlobInfo:
        """Write an object, sealed under its name; see ``Blobs.put``.

        :param limit: bytes that readers accept under this name.
        :raises StoreError: it is larger than ``limit``, and was not written; or the medium failed.
        """
        data = seal_object(name, body, self.seal, namespace)
        size = len(data)
        if size > limit:
            raise StoreError(
                f"{name}: {size} bytes are more than the {limit} that readers accept"
            )
        written = self.put(name, [data])
        return BlobInfo(name, size, written)

    def read(
        self,
        name: str,
        start: int,
        length: int,
    ) -> bytearray:
        """Return ``length`` bytes of a blob; fewer if it ends before.

        :raises BlobMissingError: there is no such blob.
        """
        buffer = bytearray(length)
        view = memoryview(buffer)
        buffers = iter([view])
        done = self.blobs.read(name, start, length, buffers)
        if done == length:
            return buffer
        # copy, to free the buffer: the length is often a limit, and much larger than the blob
        return buffer[:done]

    def whole(self, name: str, limit: int) -> bytearray:
        """Return the content of a blob of at most ``limit`` bytes.

        :raises BlobMissingError: there is no such blob.
        :raises CorruptPackError: it is larger.
        """
        content = self.read(name, 0, limit + 1)
        if len(content) > limit:
            raise CorruptPackError(name, f"it has more than {limit} bytes")
        return content

    def sealed(
        self,
        name: str,
        namespace: bytes,
        limit: int = MAX_SMALL_BYTES,
    ) -> bytes:
        """Return the body of a sealed object.

        :raises BlobMissingError: there is no such blob.
        :raises CorruptPackError: it is damaged, too large, or not written with the key;
            ``NewerFormatError``: it was written by a newer release.
        """
        content = self.whole(name, limit)
        return open_object(name, content, self.seal, namespace)

    def listed(
        self,
        prefix: str,
        *,
        stable: bool = False,
    ) -> list[BlobInfo]:
        """Return the blobs whose names start with ``prefix``.

        :param stable: list again until one list shows all that the one before it has shown, and
            return that one. A single list is no snapshot: it may lack an object that was deleted
            meanwhile, and also the newer object that includes it. If blobs are deleted between all
            lists, return what any of them has shown: readers skip missing blobs.
        :returns: by ascending name.
        """
        found = self._list(prefix)
        if not stable:
            return list(found.values())
        all_shown = dict(found)
        for _ in range(_MOST_LISTS - 1):
            names_before = found.keys()
            found = self._list(prefix)
            is_stable = found.keys() >= names_before
            if is_stable:
                return list(found.values())
            all_shown.update(found)
        # the names come from several lists: sort them again
        return sorted(all_shown.values())

    def _list(self, prefix: str) -> dict[str, BlobInfo]:
        """Return the blobs of one list by name, and learn the medium's time from the newest one."""
        found: dict[str, BlobInfo] = {}
        newest = 0.0
        for info in self.blobs.list(prefix):
            found[info.name] = info
            newest = max(newest, info.time)
        self.time.learn_least(newest)
        return found

    def exists(self, name: str) -> bool:
        """Return whether there is a blob with this name."""
        try:
            self.read(name, 0, 1)
        except BlobMissingError:
            return False
        return True

    def close(self) -> None:
        self.loads.close()
        self.uploads.close()
        self.maintenance.close()
        self.blobs.close()
