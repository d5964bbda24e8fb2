"""The store's side: takes messages, runs jobs, answers. The same code in all three hosts; one thread.

Loads go first, within reason: a request waits for them. Stores and the ends of requests keep their order; those that
wait together share one transaction.
"""

from __future__ import annotations

import logging
import resource
import time
import traceback
from array import array
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from persistkv.errors import ConfigurationError, HostError, IdentityMismatchError, PersistKVError, StoreError
from persistkv.storage.host import protocol
from persistkv.storage.identity import Identity
from persistkv.storage.keys import PackedKeys
from persistkv.storage.pack import MAX_PACK_BYTES
from persistkv.storage.records import RequestEnd
from persistkv.storage.registry import open_backend
from persistkv.storage.rows import Rows
from persistkv.storage.store import Store

logger = logging.getLogger(__name__)

_MAX_LOADS_IN_A_ROW = 8  # then what waits to be written has a turn: its rows are kept from eviction meanwhile
_CATALOGUE_KEYS = 4_096  # keys a message: the other side takes about a millisecond for them


@dataclass
class _Job:
    message: protocol.StoreJob
    keys: list[bytes]
    failed: list[bytes] = field(default_factory=list)


class StoreServer:
    """One store and the work that waits for it."""

    def __init__(self, rows_buffer: memoryview, send: Callable[[protocol.ToEngine], None]) -> None:
        """:param rows_buffer: the primary tier's rows, writable; used from the first job to ``close``."""
        self._buffer: memoryview | None = rows_buffer
        self._send = send
        self._store: Store | None = None
        self._loads: deque[protocol.LoadJob] = deque()
        self._loads_in_a_row = 0
        self._queue: deque[protocol.StoreJob | protocol.EndRequest | protocol.Flush] = deque()

    # Messages

    def handle(self, message: Any) -> None:
        """Take one message; work that takes long is queued for ``step``."""
        match message:
            case protocol.Hello():
                self._open(message)
            case protocol.LoadJob():
                self._loads.append(message)
            case protocol.Touch():
                if self._store is not None:
                    self._store.touch(message.keys.unpack())
            case protocol.AskStats():
                self._answer_stats(message)
            case _:
                self._queue.append(message)

    def _open(self, hello: protocol.Hello) -> None:
        try:
            self._store = self._make_store(hello)
        except (PersistKVError, ValueError) as error:
            traceback.clear_frames(error.__traceback__)  # they hold the rows, which could not be unmapped then
            self._send(_open_failed(error))
            return
        self._send_news()
        self._send(protocol.Opened(self._store.namespace, self._store.notice))

    def _make_store(self, hello: protocol.Hello) -> Store:
        if self._buffer is None or self._store is not None:
            raise HostError("a store is opened once, before it is closed")
        rows = Rows(self._buffer, hello.layout)
        identity = Identity.decode(hello.identity)
        backend = open_backend(hello.url)
        try:
            return Store(backend, identity, rows, hello.options, url=hello.url.partition("?")[0])
        except BaseException:
            backend.close()
            raise

    def _answer_stats(self, ask: protocol.AskStats) -> None:
        if self._store is None:
            return
        try:
            totals = self._store.backend.stats()
            disk_bytes, capacity = totals.disk_bytes, totals.capacity
        except StoreError as error:
            logger.warning("totals cannot be read: %s", error)
            disk_bytes, capacity = 0, None
        usage = resource.getrusage(resource.RUSAGE_SELF)
        self._send(
            protocol.HostStats(
                ask.token,
                self._store.counters,
                len(self._store.index),
                self._store.staged_bytes,
                disk_bytes,
                capacity,
                usage.ru_utime + usage.ru_stime,
                usage.ru_maxrss << 10,
            )
        )

    # Work

    @property
    def busy(self) -> bool:
        """Whether ``step`` has something to do."""
        return bool(self._loads or self._queue)

    def seconds_to_work(self) -> float | None:
        """How long the owner may sleep unless a message comes; None: until one comes."""
        if self.busy:
            return 0.0
        return None if self._store is None else self._store.seconds_to_work()

    def step(self) -> None:
        """Run one load, or one batch of what waits to be written, or what time has made due."""
        store = self._store
        if store is None:
            self._refuse_all()
            return
        if self._loads and (not self._queue or self._loads_in_a_row < _MAX_LOADS_IN_A_ROW):
            self._loads_in_a_row += 1
            self._load(store, self._loads.popleft())
        elif self._queue:
            self._loads_in_a_row = 0
            self._write(store)
        else:
            store.tick()
        self._send_news()

    def _load(self, store: Store, job: protocol.LoadJob) -> None:
        begin = time.perf_counter()
        keys = job.keys.unpack()
        before = store.counters.loaded_bytes
        try:
            failed = store.read(keys, numbers(job.block_ids))
        except ValueError as error:
            logger.error("load job %d is refused: %s", job.job_id, error)
            failed = keys
        seconds = time.perf_counter() - begin
        loaded = store.counters.loaded_bytes - before
        self._send(protocol.JobDone(job.job_id, PackedKeys.of(failed), loaded, seconds))

    def _write(self, store: Store) -> None:
        """Take what is queued up to one pack's worth, then commit once."""
        begin = time.perf_counter()
        waiting: list[_Job] = []
        flush: protocol.Flush | None = None
        while self._queue and flush is None and store.waiting_bytes < MAX_PACK_BYTES:
            message = self._queue.popleft()
            match message:
                case protocol.StoreJob():
                    waiting += self._take(store, message)
                case protocol.EndRequest():
                    self._end_request(store, message)
                case protocol.Flush():
                    flush = message
        if flush is not None or store.wants_commit():
            store.commit(everything=flush is not None)
        seconds = time.perf_counter() - begin
        for job in waiting:
            job.failed += [key for key in job.keys if not store.took(key)]
            self._done(job, seconds)
        if flush is not None:
            self._send_news()
            self._send(protocol.Flushed(flush.token))

    def _take(self, store: Store, message: protocol.StoreJob) -> list[_Job]:
        """Give a job to the store; answer at once where its rows are free already."""
        begin = time.perf_counter()
        job = _Job(message, message.keys.unpack())
        try:
            free = store.put(message.request, job.keys, numbers(message.block_ids), numbers(message.depths) or None)
        except ValueError as error:
            logger.error("store job %d is refused: %s", message.job_id, error)
            free, job.failed = True, job.keys
        if not free:
            return [job]
        self._done(job, time.perf_counter() - begin)
        return []

    def _end_request(self, store: Store, message: protocol.EndRequest) -> None:
        try:
            store.end_request(_request_end(message))
        except ValueError as error:
            logger.error("the end of request %s is refused: %s", message.request, error)
            self._send(protocol.Persisted(message.request, False))

    def _done(self, job: _Job, seconds: float) -> None:
        self._send(protocol.JobDone(job.message.job_id, PackedKeys.of(job.failed), 0, seconds))

    def _refuse_all(self) -> None:
        """Nothing was opened: every job is answered all the same."""
        for load in self._loads:
            self._send(protocol.JobDone(load.job_id, load.keys, 0, 0.0))
        for message in self._queue:
            if isinstance(message, protocol.StoreJob):
                self._send(protocol.JobDone(message.job_id, message.keys, 0, 0.0))
        self._loads.clear()
        self._queue.clear()

    def _send_news(self) -> None:
        if self._store is None:
            return
        news = self._store.take_news()
        for chunk in _chunks(news.removed):
            self._send(protocol.Removed(PackedKeys.of(chunk)))
        for chunk in _chunks(news.stored):
            self._send(protocol.Stored(PackedKeys.of(chunk)))
        for request, whole in news.persisted:
            self._send(protocol.Persisted(request, whole))

    def close(self) -> None:
        """Finish what was given, release the store, let go of the rows; idempotent."""
        try:
            while self.busy:
                self.step()
            if self._store is not None:
                self._store.close()
        finally:
            self._store = self._buffer = None


def numbers(data: bytes) -> Sequence[int]:
    """Numbers of their joined little-endian u32 form."""
    values = array("I")
    values.frombytes(data)
    return values


def _chunks(keys: list[bytes]) -> list[list[bytes]]:
    return [keys[start : start + _CATALOGUE_KEYS] for start in range(0, len(keys), _CATALOGUE_KEYS)]


def _request_end(message: protocol.EndRequest) -> RequestEnd:
    return RequestEnd(
        message.request,
        message.manifest_id,
        tuple(keys.unpack() for keys in message.group_keys),
        message.tokens,
        message.block_size,
        message.ordered,
        message.labels,
    )


def _open_failed(error: Exception) -> protocol.OpenFailed:
    details: list[Any] = []
    if isinstance(error, ConfigurationError):
        details = [error.field, str(error.value), error.expected]
    elif isinstance(error, IdentityMismatchError):
        details = [error.url, [list(map(str, difference)) for difference in error.differences]]
    return protocol.OpenFailed(type(error).__name__, str(error), details)
