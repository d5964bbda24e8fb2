"""Server of a store: receives messages, runs jobs, sends answers. The same code in all three hosts.

Everything here runs on one thread. If the executor has threads, this thread never waits for the
medium. Loads run concurrently with each other and with a transaction. Store jobs and ends of
requests keep their order; those that wait at the same time share one transaction.

A job is answered when its rows are no longer read or written: a load when all its parts have ended,
a store job when none of its keys is in flight.

At the end, jobs without an answer are dropped, except those whose transaction or read has begun.
When no row is in use any more, the rows are released and the engine gets ``Ended``; then accepted
work is committed.

Opening the store is also a call of the executor. If the executor has threads, the server answers
messages meanwhile and reports how long opening has taken so far.
"""

from __future__ import annotations

import logging
import time
import traceback
from array import array
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from persistkv.errors import HostError, PersistKVError, StoreError
from persistkv.memory.budget import MAX_IO_THREADS
from persistkv.memory.rows import Rows
from persistkv.storage import open_backend
from persistkv.storage.executor import Executor
from persistkv.storage.format.pack import PackedKeys
from persistkv.storage.host import protocol
from persistkv.storage.host.connection import CONGESTED_BYTES, SocketConnection
from persistkv.storage.host.prewarm import recent_contexts
from persistkv.storage.host.protocol import Notice
from persistkv.storage.host.status import StatusPublisher
from persistkv.storage.identity import Identity
from persistkv.storage.load import ReadOutcome
from persistkv.storage.records import News, RequestEnd
from persistkv.storage.store import Store

logger = logging.getLogger(__name__)

_CONGESTED_S = 0.1  # seconds between checks whether the engine receives messages again


@dataclass
class _Job:
    message: protocol.StoreJob
    keys: list[bytes]
    borrowed: set[bytes] = field(default_factory=set)
    """Keys that another job was already storing. If that job fails to store them, this job's rows
    are used instead."""


class Lifecycle:
    """Callbacks of ``StoreServer`` for its owner, the host process."""

    def opened(self) -> None:
        """The store is open."""

    def ending(self, *, remote: bool) -> None:
        """The server begins to close. ``remote``: the storage medium is on another machine."""

    def released(self) -> None:
        """The server no longer uses the primary tier's rows."""


class StoreServer:
    """Runs one store for an engine."""

    def __init__(
        self,
        rows_buffer: memoryview,
        send: Callable[[protocol.ToEngine], None],
        make_executor: Callable[[int], Executor],
        congested: Callable[[], bool] = lambda: False,
        lifecycle: Lifecycle | None = None,
    ) -> None:
        """:param rows_buffer: the primary tier's rows, writable; used from the first job to
        ``Lifecycle.released``.
        :param send: sends a message to the engine; never waits.
        :param make_executor: returns an executor with the given number of threads. The server
            closes it.
        :param congested: returns whether the engine is slow to receive.
        """
        self._buffer: memoryview | None = rows_buffer
        self._send = send
        self._make_executor = make_executor
        self._congested = congested
        self._lifecycle = lifecycle or Lifecycle()
        self._executor = Executor()
        self._opening = False
        self.ending = False
        """True: the engine asked the server to end. The owner must call ``close``."""
        self._store: Store | None = None
        self._table_version = -1
        self._is_mapping = False
        """Whether the engine has not mapped the last table yet. The next one waits: an idle engine
        maps none for hours, and each table that was sent must be kept."""
        self._taking = 0
        self._status: StatusPublisher | None = None
        self._loads: deque[protocol.LoadJob] = deque()
        self._loading = 0
        self._queue: deque[protocol.StoreJob | RequestEnd | protocol.Flush] = deque()
        self._writing: list[_Job] = []
        self._ended_packs = 0
        self._flushing: protocol.Flush | None = None
        self._flushed: list[protocol.Flush] = []

    def handle(self, message: Any) -> None:
        """Process one message from the engine. Jobs, flushes and request ends are queued, and
        ``step`` starts them.

        Other messages are ignored until the store is open: the engine does not wait for their
        answers.
        """
        store = self._store
        match message:
            case protocol.Hello() if store is not None or self._opening:
                self._send(
                    protocol.OpenFailed.of(
                        HostError("a store is opened once, before it is closed")
                    )
                )
            case protocol.Hello():
                self._opening = True
                self._executor = self._make_executor(1)
                self._executor.begin(self._open(message))
            case protocol.Ping():
                self._send(protocol.Pong(self._executor.longest_s()))
            case protocol.End():
                self.ending = True
            case protocol.LoadJob():
                self._loads.append(message)
            case protocol.StoreJob() | protocol.Flush() | RequestEnd():
                self._queue.append(message)
            case _ if store is None:
                pass
            case protocol.Loaded():
                if store.canary is not None:
                    store.canary.loaded_elsewhere(message.keys.unpack())
            case protocol.Touch():
                store.touch(message.keys.unpack())
            case protocol.Mapped():
                self._is_mapping = False
                store.index.release_retired()
            case protocol.AskStats():
                self._executor.begin(self._answer_stats(store, message))
            case protocol.AskRecent():
                self._executor.begin(self._answer_recent(store, message))

    async def _open(self, hello: protocol.Hello) -> None:
        opener = self._executor
        try:
            store = await opener.write(partial(self._make_store, hello))
        except (PersistKVError, ValueError) as error:
            # its frames would keep the rows mapped
            traceback.clear_frames(error.__traceback__)
            self._send(protocol.OpenFailed.of(error))
        else:
            self._store, self._executor = store, store.catalogue.executor
            opener.close()
            self._status = StatusPublisher(store, self._executor, hello.engine_pid)
            wants_all = store.canary is not None and store.canary.active
            self._send(
                protocol.Opened(self._share_table(store), store.notice, wants_all)
            )
            self._lifecycle.opened()
        finally:
            self._opening = False

    def _make_store(self, hello: protocol.Hello) -> Store:
        """Open the backend and the store. Runs on the executor; ``close`` waits for it before it
        releases the rows."""
        if self._buffer is None:
            raise HostError("the host has released its rows")
        rows = Rows(self._buffer, hello.layout)
        identity = Identity.decode(hello.identity)
        url = hello.url.partition("?")[0]
        backend = open_backend(hello.url)
        executor: Executor | None = None
        try:
            # they mostly wait
            threads = (
                MAX_IO_THREADS
                if backend.capabilities.remote
                else hello.options.io_threads
            )
            executor = self._make_executor(threads)
            return Store(
                backend, identity, rows, hello.options, url=url, executor=executor
            )
        except BaseException:
            if executor is not None:
                executor.close()
            backend.close()
            raise

    async def _answer_stats(self, store: Store, ask: protocol.AskStats) -> None:
        backend = store.catalogue.backend
        disk_bytes, capacity = 0, None
        try:
            totals = await store.catalogue.call(backend.stats)
            disk_bytes, capacity = totals.disk_bytes, totals.capacity
        except StoreError as error:
            # the exception references rows
            logger.warning("totals cannot be read: %s", str(error))
        stats = protocol.HostStats(
            ask.token,
            store.counters,
            len(store.index),
            store.staged_bytes,
            disk_bytes,
            capacity,
            time.process_time(),
        )
        stats.requests = dict(backend.requests)
        stats.breaker = backend.breaker_state
        self._send(stats)

    async def _answer_recent(self, store: Store, ask: protocol.AskRecent) -> None:
        contexts: list[list[bytes]] = []
        read = partial(
            recent_contexts,
            store.catalogue.backend,
            store.namespace,
            store.contains,
            ask.max_blocks,
            ask.choice,
        )
        try:
            contexts = await store.catalogue.call(read)
        except StoreError as error:
            logger.warning(
                "the most recently used contexts cannot be read: %s", str(error)
            )
        self._send(protocol.Recent(tuple(map(PackedKeys.of, contexts))))

    def seconds_to_work(self) -> float | None:
        """Return for how many seconds ``step`` has no work; None: until a message arrives or an
        executor call ends."""
        if self._store is None:
            return None
        if self._may_process_next(self._store):
            return 0.0
        seconds = self._store.seconds_to_work()
        waits_for_engine = self._store.news == News() and (
            self._is_mapping or not self._has_new_table(self._store)
        )
        return (
            seconds if waits_for_engine else min(_CONGESTED_S, seconds or _CONGESTED_S)
        )

    def step(self) -> None:
        """Continue all queued and running work that can proceed without waiting."""
        self._executor.run_ready()
        store = self._store
        if store is None:
            if not self._opening:
                self._refuse_all()
            return
        while self._loads and self._loading <= self._executor.threads:
            self._load(store, self._loads.popleft())
        while self._may_process_next(store):
            self._take(store, self._queue.popleft())
        store.tick()
        self._settle_jobs(store)
        self._send_news(store)
        while self._flushed and self._is_up_to_date(store):
            self._send(protocol.Flushed(self._flushed.pop(0).token))
        if self._status is not None:
            loading = self._loading + len(self._loads)
            self._status.tick(
                waiting_jobs=len(self._queue),
                writing_jobs=len(self._writing),
                loading_jobs=loading,
            )

    def _may_process_next(self, store: Store) -> bool:
        """Return whether the store has accepted the previous message, has memory left, and runs no
        flush."""
        return (
            bool(self._queue)
            and not self._taking
            and self._flushing is None
            and store.has_room
        )

    def _send_news(self, store: Store) -> None:
        """Send the engine the new lookup table and the store's news."""
        # an idle engine may receive nothing for hours, and the outbox must not grow meanwhile
        if self._congested():
            return
        if self._has_new_table(store) and not self._is_mapping:
            try:
                table = self._share_table(store)
            except OSError as error:
                # the engine uses the last table until a descriptor is free
                # the error references rows
                logger.warning("the new lookup table is not sent yet: %s", str(error))
            else:
                self._send(table)
        if store.news != News():
            self._send(store.take_news())

    def _share_table(self, store: Store) -> protocol.Table:
        fd, slots = store.index.share()
        self._table_version = store.index.version
        self._is_mapping = True
        return protocol.Table(slots, fd)

    def _has_new_table(self, store: Store) -> bool:
        return store.index.version != self._table_version

    def _is_up_to_date(self, store: Store) -> bool:
        return store.news == News() and not self._has_new_table(store)

    def _load(self, store: Store, message: protocol.LoadJob) -> None:
        keys = message.keys.unpack()

        def done(outcome: ReadOutcome) -> None:
            self._loading -= 1
            if outcome.failed:
                # collisions first: the engine skips stores of keys that it counts as held
                self._send_news(store)
            self._send(
                protocol.JobDone(
                    message.job_id, PackedKeys.of(outcome.failed), outcome.raw_bytes
                )
            )

        self._loading += 1
        try:
            store.begin_read(keys, array("I", message.block_ids), done)
        except ValueError as error:
            logger.error("load job %d is refused: %s", message.job_id, error)
            done(ReadOutcome(keys))

    def _take(
        self, store: Store, message: protocol.StoreJob | RequestEnd | protocol.Flush
    ) -> None:
        match message:
            case protocol.StoreJob():
                self._put(store, _Job(message, message.keys.unpack()))
            case RequestEnd():
                self._end_request(store, message)
            case protocol.Flush():
                self._flushing = message
                self._flush(store)

    def _put(self, store: Store, job: _Job) -> None:
        """Pass a job to the store. When the store has accepted its blocks, answer the job if its
        rows may be reused; otherwise ``_settle_jobs`` answers it later.
        """
        message = job.message

        def done(free: bool, borrowed: set[bytes]) -> None:
            self._taking -= 1
            job.borrowed = borrowed
            if free:
                self._done(job, [])
            else:
                self._writing.append(job)
            if self._flushing is not None:
                self._flush(store)

        self._taking += 1
        try:
            depths = array("I", message.depths) or None
            store.begin_put(
                message.request, job.keys, array("I", message.block_ids), depths, done
            )
        except ValueError as error:
            logger.error("store job %d is refused: %s", message.job_id, error)
            self._taking -= 1
            self._done(job, job.keys)

    def _end_request(self, store: Store, message: RequestEnd) -> None:
        try:
            store.end_request(message)
        except ValueError as error:
            logger.error("the end of request %s is refused: %s", message.request, error)
            store.news.persisted.append((message.request, False))

    def _flush(self, store: Store) -> None:
        """Commit until no accepted work is left, then record that the flush is done.

        Repeated, because blocks of a failed transaction can be stored again from the rows of
        another job.
        """
        self._settle_jobs(store)
        if store.unwritten:
            store.begin_flush(partial(self._flush, store))
        elif self._flushing is not None and not self._taking:
            self._flushed.append(self._flushing)
            self._flushing = None

    def _settle_jobs(self, store: Store) -> None:
        """Answer the store jobs whose rows are no longer read. If other jobs failed to store a
        job's ``borrowed`` keys, pass it to the store again instead, unless the host is ending.
        """
        if store.ended_packs == self._ended_packs:
            return
        self._ended_packs = store.ended_packs
        jobs, self._writing = self._writing, []
        for job in jobs:
            if store.in_flight(job.keys):
                self._writing.append(job)
                continue
            missing = store.missing(job.keys)
            if self.ending or job.borrowed.isdisjoint(missing):
                self._done(job, missing)
            else:
                self._put(store, job)

    def _done(self, job: _Job, failed: list[bytes]) -> None:
        self._send(protocol.JobDone(job.message.job_id, PackedKeys.of(failed), 0))

    def _refuse_all(self) -> None:
        """Fail all queued jobs, because no store is open."""
        for message in (*self._loads, *self._queue):
            if isinstance(message, protocol.Job):
                self._send(protocol.JobDone(message.job_id, message.keys, 0))
        self._loads.clear()
        self._queue.clear()

    def close(self, *, finish: bool = True) -> None:
        """Drop the jobs that have not begun, commit accepted work, release the rows and close the
        store. Idempotent.

        :param finish: False: do not commit. Must be False after an internal error: a commit might
            never end.
        """
        self.ending = True
        remote = (
            self._store is not None
            and self._store.catalogue.backend.capabilities.remote
        )
        self._lifecycle.ending(remote=remote)
        if self._opening:
            self._executor.run_until(lambda: not self._opening)
        store = self._store
        try:
            if store is not None and finish:
                self._drop(store)
                self._executor.run_until(self._finished)
                if self._status is not None:
                    self._status.withdraw()
                store.close()
        finally:
            self._executor.close()
            self._release()
            self._store = self._status = None
            if store is not None and not finish:
                store.catalogue.backend.close()
                if store.canary is not None:
                    store.canary.close()
                store.index.close()

    def _drop(self, store: Store) -> None:
        """Drop the jobs for which no read or transaction has begun; start to commit accepted work
        and request ends."""
        self._loads.clear()
        queue, self._queue = self._queue, deque()
        store.drop_direct()
        for message in queue:
            if isinstance(message, RequestEnd):
                self._end_request(store, message)
        store.begin_flush()  # also while a read hangs

    def _finished(self) -> bool:
        self.step()
        if not (self._loading or self._taking or self._writing):
            self._release()
        busy = (
            self._loads
            or self._loading
            or self._queue
            or self._taking
            or self._writing
            or self._flushing
        )
        return not (busy or self._executor.writing)

    def _release(self) -> None:
        if self._buffer is not None:
            self._buffer = None
            self._lifecycle.released()
            self._send(protocol.Ended())


class NoticeHandler(logging.Handler):
    """Log handler that sends the records of all threads to the engine, which logs them."""

    def __init__(self, connection: SocketConnection) -> None:
        super().__init__(logging.INFO)
        self._connection = connection

    def emit(self, record: logging.LogRecord) -> None:
        self._connection.post(Notice(record.levelno, record.getMessage()))


def serve(
    connection: SocketConnection,
    rows_buffer: memoryview,
    engine_pidfd: int | None = None,
    lifecycle: Lifecycle | None = None,
) -> None:
    """Run a store until the engine sends ``End``, closes the connection or dies; then close the
    store and return.

    :param rows_buffer: the primary tier's rows, writable.
    :param engine_pidfd: pidfd of the engine. Needed because a child that the engine forked can keep
        the connection open after the engine's death. None: the store runs in the engine's process.
    """
    server = StoreServer(
        rows_buffer,
        connection.send,
        lambda threads: Executor(threads, connection.wake),
        lambda: connection.outbox_bytes > CONGESTED_BYTES,
        lifecycle,
    )
    # a traceback can keep this frame alive, and with it the rows mapped
    del rows_buffer
    engine_died = finish = False
    try:
        while not (connection.ended or engine_died or server.ending):
            engine_died = connection.wait(server.seconds_to_work(), engine_pidfd)
            for message in connection.receive():
                server.handle(message)
            server.step()
        for message in connection.receive_rest() if engine_died else ():
            server.handle(message)
        finish = True
    except HostError:
        logger.exception("the engine sent a malformed message; ending")
        finish = True
    finally:
        try:
            server.close(finish=finish)
        finally:
            connection.close()
