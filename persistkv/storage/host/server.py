"""The store's side: takes messages, runs jobs, answers. The same code in all three hosts.

Everything here runs on one thread, which never waits for the medium where the executor has threads. Loads are read
beside one another and beside a transaction. Stores and the ends of requests keep their order; those that wait together
share one transaction.

A job is answered once nobody reads or writes its rows any more: a load when all its parts have ended, a store when none
of its keys is in flight.

The store is opened as one call of the executor, too: where that has threads, this side answers meanwhile, and tells how
long it has been at it.
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
from functools import partial
from typing import Any

from persistkv.errors import ConfigurationError, HostError, IdentityMismatchError, PersistKVError, StoreError
from persistkv.storage.executor import Executor, InPlaceExecutor
from persistkv.storage.extensions import SupportsCounters
from persistkv.storage.host import protocol
from persistkv.storage.host.news import NewsTeller
from persistkv.storage.host.publishing import StatusPublisher
from persistkv.storage.identity import Identity
from persistkv.storage.keys import PackedKeys
from persistkv.storage.memory import MAX_IO_THREADS
from persistkv.storage.reading import ReadOutcome
from persistkv.storage.records import RequestEnd
from persistkv.storage.registry import open_backend
from persistkv.storage.rows import Rows
from persistkv.storage.store import Store

logger = logging.getLogger(__name__)

_CONGESTED_S = 0.1  # seconds after which the store's side looks whether the engine takes messages again


@dataclass
class _Job:
    """A store job whose rows are in use."""

    message: protocol.StoreJob
    keys: list[bytes]
    begin: float
    borrowed: set[bytes] = field(default_factory=set)
    """Keys that another job had in flight: their rows are kept to be written, should that one's transaction fail."""
    failed: list[bytes] = field(default_factory=list)


class StoreServer:
    """One store and the work that waits for it."""

    def __init__(
        self,
        rows_buffer: memoryview,
        send: Callable[[protocol.ToEngine], None],
        make_executor: Callable[[int], Executor],
        congested: Callable[[], bool] = lambda: False,
        when_open: Callable[[], None] = lambda: None,
    ) -> None:
        """Nothing is open yet.

        :param rows_buffer: the primary tier's rows, writable; used from the first job to ``close``.
        :param make_executor: of a number of threads; it is closed with this object.
        :param congested: whether the engine's side has much to take.
        :param when_open: called once the store is open.
        """
        self._buffer: memoryview | None = rows_buffer
        self._send = send
        self._make_executor = make_executor
        self._congested = congested
        self._when_open = when_open
        self._executor: Executor = InPlaceExecutor()
        self._opening = False
        self._store: Store | None = None
        self._news: NewsTeller | None = None
        self._status: StatusPublisher | None = None
        self._loads: deque[protocol.LoadJob] = deque()
        self._loading = 0
        self._queue: deque[protocol.StoreJob | protocol.EndRequest | protocol.Flush] = deque()
        self._writing: list[_Job] = []
        self._ended_packs = 0
        self._flushing: protocol.Flush | None = None
        self._flushed: list[protocol.Flush] = []

    # Messages

    def handle(self, message: Any) -> None:
        """Take one message; work that takes long is queued for ``step``."""
        match message:
            case protocol.Hello():
                self._begin_opening(message)
            case protocol.LoadJob():
                self._loads.append(message)
            case protocol.Touch():
                if self._store is not None:
                    self._store.touch(message.keys.unpack())
            case protocol.AskStats():
                if self._store is not None:
                    self._executor.begin(self._answer_stats(self._store, message))
            case protocol.AskRecent():
                if self._store is not None:
                    self._executor.begin(self._answer_recent(self._store, message))
            case protocol.Ping():
                self._send(protocol.Pong(self._executor.longest_s()))
            case _:
                self._queue.append(message)

    def _begin_opening(self, hello: protocol.Hello) -> None:
        if self._store is not None or self._opening:
            self._send(_open_failed(HostError("a store is opened once, before it is closed")))
            return
        self._opening = True
        self._executor = self._make_executor(1)
        self._executor.begin_write(self._open(hello))

    async def _open(self, hello: protocol.Hello) -> None:
        opener = self._executor
        try:
            store = await opener.write(partial(self._make_store, hello))
        except (PersistKVError, ValueError) as error:
            traceback.clear_frames(error.__traceback__)  # they hold the rows, which could not be unmapped then
            self._send(_open_failed(error))
        else:
            self._store, self._executor = store, store.catalogue.executor
            opener.close()
            self._news = NewsTeller(store, self._send, self._congested)
            self._status = StatusPublisher(store, self._executor)
            self._when_open()
        finally:
            self._opening = False

    def _make_store(self, hello: protocol.Hello) -> Store:
        """Runs where the opener's calls do; the owner waits for it before it touches the rows."""
        if self._buffer is None:
            raise HostError("the rows were let go of")
        rows = Rows(self._buffer, hello.layout)
        identity = Identity.decode(hello.identity)
        url = hello.url.partition("?")[0]
        backend = open_backend(hello.url)
        executor: Executor | None = None
        try:
            threads = MAX_IO_THREADS if backend.capabilities.remote else hello.options.io_threads  # they mostly wait
            executor = self._make_executor(threads)
            return Store(backend, identity, rows, hello.options, url=url, executor=executor)
        except BaseException:
            if executor is not None:
                executor.close()
            backend.close()
            raise

    async def _answer_stats(self, store: Store, ask: protocol.AskStats) -> None:
        try:
            totals = await store.stats()
            disk_bytes, capacity = totals.disk_bytes, totals.capacity
        except StoreError as error:
            logger.warning("totals cannot be read: %s", str(error))  # the error holds rows
            disk_bytes, capacity = 0, None
        usage = resource.getrusage(resource.RUSAGE_SELF)
        backend = store.catalogue.backend
        self._send(
            protocol.HostStats(
                ask.token,
                store.counters,
                len(store.index),
                store.staged_bytes,
                disk_bytes,
                capacity,
                usage.ru_utime + usage.ru_stime,
                usage.ru_maxrss << 10,
                dict(backend.requests) if isinstance(backend, SupportsCounters) else {},
                backend.breaker_state if isinstance(backend, SupportsCounters) else None,
            )
        )

    async def _answer_recent(self, store: Store, ask: protocol.AskRecent) -> None:
        try:
            engine = "" if self._status is None else self._status.engine
            contexts = await store.recent(ask.max_blocks, engine, only_asked=ask.only_asked)
        except StoreError as error:
            logger.warning("what was used last cannot be read: %s", str(error))
            contexts = []
        self._send(protocol.Recent(tuple(map(PackedKeys.of, contexts))))

    # Work

    @property
    def busy(self) -> bool:
        """Whether something that was given is not done yet, and may be done now."""
        return bool(self._loads or self._loading or self._queue or self._writing or self._flushing or self._flushed)

    def seconds_to_work(self) -> float | None:
        """How long the owner may sleep unless a message comes or a call ends; None: until then."""
        if self._store is None or self._news is None:
            return None
        if self._may_take(self._store):
            return 0.0
        seconds = self._store.seconds_to_work()
        return seconds if self._news.up_to_date else min(_CONGESTED_S, seconds or _CONGESTED_S)

    def step(self) -> None:
        """Go on with all that can go on."""
        self._executor.run_ready()
        store = self._store
        if store is None:
            if not self._opening:
                self._refuse_all()
            return
        while self._loads and self._loading <= self._executor.threads:
            self._load(store, self._loads.popleft())
        while self._may_take(store):
            self._take(store, self._queue.popleft())
        store.tick()
        self._settle_jobs(store)
        if self._news is not None:
            self._news.tell()
            while self._flushed and self._news.up_to_date:
                self._send(protocol.Flushed(self._flushed.pop(0).token))
        if self._status is not None:
            loading = self._loading + len(self._loads)
            self._status.tick(waiting_jobs=len(self._queue), writing_jobs=len(self._writing), loading_jobs=loading)

    def _may_take(self, store: Store) -> bool:
        """A flush lets nothing pass; nor does a store whose memory is used up."""
        return bool(self._queue) and self._flushing is None and store.has_room

    def _load(self, store: Store, message: protocol.LoadJob) -> None:
        begin = time.perf_counter()
        keys = message.keys.unpack()

        def done(outcome: ReadOutcome) -> None:
            self._loading -= 1
            if outcome.failed and self._news is not None:
                self._news.tell()  # first that they are gone: the engine offers again what it does not take for held
            seconds = time.perf_counter() - begin
            failed = PackedKeys.of(outcome.failed)
            self._send(protocol.JobDone(message.job_id, failed, outcome.raw_bytes, seconds))

        self._loading += 1
        try:
            store.begin_read(keys, numbers(message.block_ids), done)
        except ValueError as error:
            logger.error("load job %d is refused: %s", message.job_id, error)
            done(ReadOutcome(keys))

    def _take(self, store: Store, message: protocol.StoreJob | protocol.EndRequest | protocol.Flush) -> None:
        match message:
            case protocol.StoreJob():
                job = _Job(message, message.keys.unpack(), time.perf_counter())
                self._put(store, job, job.keys, numbers(message.block_ids), numbers(message.depths) or None)
            case protocol.EndRequest():
                self._end_request(store, message)
            case protocol.Flush():
                self._flushing = message
                self._flush(store)

    def _put(
        self, store: Store, job: _Job, keys: list[bytes], block_ids: Sequence[int], depths: Sequence[int] | None
    ) -> None:
        """Give blocks to the store; answer at once where their rows are free already."""
        job.borrowed = store.in_flight(keys)
        try:
            free = store.put(job.message.request, keys, block_ids, depths)
        except ValueError as error:
            logger.error("store job %d is refused: %s", job.message.job_id, error)
            free, job.failed = True, job.keys
        if free:
            self._done(job)
        else:
            self._writing.append(job)

    def _end_request(self, store: Store, message: protocol.EndRequest) -> None:
        try:
            store.end_request(_request_end(message))
        except ValueError as error:
            logger.error("the end of request %s is refused: %s", message.request, error)
            self._send(protocol.Persisted(message.request, False))

    def _flush(self, store: Store) -> None:
        """Until nothing is left: a job may take over what another's failed transaction left in its rows."""
        self._settle_jobs(store)
        if store.unwritten:
            store.begin_commit(everything=True, then=partial(self._flush, store))
        elif self._flushing is not None:
            self._flushed.append(self._flushing)
            self._flushing = None

    def _settle_jobs(self, store: Store) -> None:
        """Answer the jobs whose rows nobody reads any more."""
        if store.ended_packs == self._ended_packs:
            return
        self._ended_packs = store.ended_packs
        jobs, self._writing = self._writing, []
        for job in jobs:
            if store.in_flight(job.keys):
                self._writing.append(job)
            else:
                self._settle(store, job)

    def _settle(self, store: Store, job: _Job) -> None:
        """What another job had in flight, and lost, is taken from this one's rows."""
        if store.took_all(job.keys):
            self._done(job)
            return
        places = [place for place, key in enumerate(job.keys) if not store.took(key)]
        job.failed += [job.keys[place] for place in places if job.keys[place] not in job.borrowed]
        again = [place for place in places if job.keys[place] in job.borrowed]
        if not again:
            self._done(job)
            return
        block_ids, depths = numbers(job.message.block_ids), numbers(job.message.depths)
        keys = [job.keys[place] for place in again]
        rows = [block_ids[place] for place in again]
        self._put(store, job, keys, rows, [depths[place] for place in again] if depths else None)

    def _done(self, job: _Job) -> None:
        seconds = time.perf_counter() - job.begin
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

    def close(self, *, finish: bool = True) -> None:
        """Release the store, and let go of the rows; idempotent.

        :param finish: do what was given before. Not after an error of this side's own: what it left may never end.
        """
        if self._opening:
            self._executor.run_until(lambda: not self._opening)
        store = self._store
        try:
            if store is not None and finish:
                self._executor.run_until(self._finished)
                if self._status is not None:
                    self._status.withdraw()
                store.close()
        finally:
            self._executor.close()
            self._store = self._news = self._status = self._buffer = None
            if store is not None and not finish:
                store.catalogue.backend.close()

    def _finished(self) -> bool:
        self._flushed.clear()  # nobody waits for the answer
        self.step()
        return not (self.busy or self._executor.writing)


def numbers(data: bytes) -> Sequence[int]:
    """Numbers of their joined little-endian u32 form."""
    values = array("I")
    values.frombytes(data)
    return values


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
