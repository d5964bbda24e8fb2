"""Server of an engine: the event loop of a host. The same in both hosts.

The loop never waits for the medium: blocking calls run on threads. Opening the store is one of
them; the server answers a ``Ping`` meanwhile and reports how long opening has taken so far.

At the end, jobs without an answer are dropped, except those whose transaction or read has begun.
When no row is in use any more, the rows are released and the engine gets ``Ended``; then accepted
work is committed.
"""

from __future__ import annotations

import asyncio
import gc
import logging
import traceback
from contextlib import ExitStack
from typing import Any

from persistkv.errors import HostError, PersistKVError
from persistkv.memory.rows import Rows
from persistkv.storage import open_backend
from persistkv.storage.host import protocol
from persistkv.storage.host.connection import SocketConnection
from persistkv.storage.host.server.channel import Channel
from persistkv.storage.host.server.session import Session
from persistkv.storage.identity import Identity
from persistkv.storage.store.store import Store, start_threads
from persistkv.storage.threads import ThreadPool

logger = logging.getLogger(__name__)


class Lifecycle:
    """Callbacks of the server for its owner, the host process."""

    def connected(self, channel: Channel) -> None:
        """Messages can be sent to the engine."""

    def opened(self) -> None:
        """The store is open."""

    def ending(self, *, remote: bool) -> None:
        """The server begins to close. ``remote``: the storage medium is on another machine."""

    def released(self) -> None:
        """The server no longer uses the primary tier's rows."""


class _Server:
    """Serves one engine: opens a store for it, and closes the store when the engine ends."""

    def __init__(
        self,
        channel: Channel,
        rows_buffer: memoryview,
        lifecycle: Lifecycle,
    ) -> None:
        self._channel = channel
        self._buffer: memoryview | None = rows_buffer
        """The rows; None: they are released."""
        self._lifecycle = lifecycle
        self._opener: ThreadPool | None = None
        """The thread of the last ``_open``."""
        self._opening: asyncio.Task[None] | None = None
        """Task of the last ``_open``, running or done."""
        self._store: Store | None = None
        """The open store; ``_open_store`` sets it on the opener's thread."""
        self._session: Session | None = None
        """Serves the open store; set by ``_open`` a little after ``_store``."""
        self._is_ending = False
        """Whether the engine has sent ``End``."""
        self._has_begun_end = False
        """Whether ``_begin_end`` has been called."""

    async def run(self) -> None:
        """Serve the engine until it sends ``End``, closes the connection or dies; then close the
        store."""
        is_sound = False
        try:
            async with asyncio.TaskGroup() as tasks:
                await self._receive(tasks)
                await self._end()
            is_sound = True
        finally:
            # close outside of the task group, where no task uses the store any more
            self._close(is_sound=is_sound)

    async def _receive(self, tasks: asyncio.TaskGroup) -> None:
        """Process the engine's messages until it ends."""
        try:
            while not (self._is_ending or self._channel.ended):
                for message in await self._channel.receive():
                    self._handle(message, tasks)
        except HostError:
            logger.exception("the engine sent a malformed message; ending")
        # The caller drops jobs that have not begun. Let ``Jobs.run`` begin store jobs that arrived
        # together with the end: their blocks that are copied are still committed.
        await asyncio.sleep(0)

    def _handle(self, message: Any, tasks: asyncio.TaskGroup) -> None:
        """Process one message; those about an open store are passed to its session."""
        match message:
            case protocol.Hello():
                self._begin_opening(message, tasks)
            case protocol.Ping():
                pong = protocol.Pong(self._longest_s())
                self._channel.send(pong)
            case protocol.End():
                self._is_ending = True
            case _ if self._session is not None:
                self._session.handle(message)
            case protocol.Job():
                # an engine sends no jobs before the store is open: answer that all keys failed
                all_keys = None
                answer = protocol.JobDone(message.job_id, failed=all_keys, num_bytes=0)
                self._channel.send(answer)

    def _longest_s(self) -> float:
        """Return for how many seconds the oldest call has been running."""
        if self._store is not None:
            return self._store.view.threads.longest_s()
        if self._opener is not None:
            return self._opener.longest_s()
        return 0.0

    # Opening

    def _begin_opening(self, hello: protocol.Hello, tasks: asyncio.TaskGroup) -> None:
        """Open the store in a task, for the first ``Hello`` and for one after a failure; refuse any
        other."""
        opening = self._opening
        has_failed = opening is not None and opening.done() and self._session is None
        if opening is None or has_failed:
            self._opening = tasks.create_task(self._open(hello, tasks))
            return
        error = HostError("a store is opened once, before it is closed")
        self._channel.send(protocol.OpenFailed.of(error))

    async def _open(
        self,
        hello: protocol.Hello,
        tasks: asyncio.TaskGroup,
    ) -> None:
        """Open the store in a thread, and begin its session; answer if it cannot be opened."""
        opener = ThreadPool(1, "persistkv-opener")
        self._opener = opener
        try:
            # Use no variable for the future: the traceback of its error refers to this frame, so
            # that they would form a cycle which keeps the rows mapped.
            store = await asyncio.wrap_future(opener.submit(self._open_store, hello))
        except (PersistKVError, ValueError) as error:
            # clear the frames of the traceback, because they reference the rows, which could not be
            # unmapped
            traceback.clear_frames(error.__traceback__)
            self._channel.send(protocol.OpenFailed.of(error))
            return
        finally:
            opener.shutdown()
        self._session = Session(store, self._channel, tasks, hello)
        self._lifecycle.opened()

    def _open_store(self, hello: protocol.Hello) -> Store:
        """Open the backend and the store, on the opener's thread.

        :raises PersistKVError, ValueError: the store cannot be opened; nothing is left open.
        """
        if self._buffer is None:
            raise HostError("the host has released its rows")
        rows = Rows(self._buffer, hello.layout)
        identity = Identity.decode(hello.identity)
        options = hello.options
        url = hello.url.partition("?")[0]
        with ExitStack() as opened:
            backend = open_backend(hello.url)
            opened.callback(backend.close)
            threads = start_threads(backend, options)
            opened.callback(threads.close)
            # set on this thread, so that ``_close`` finds the store even if the task that waits is
            # cancelled
            self._store = Store(
                backend, identity, rows, options, url=url, threads=threads
            )
            # the opening succeeded: leave backend and threads open
            opened.pop_all()
        return self._store

    # The end

    async def _end(self) -> None:
        """End the session, once a store that is being opened is open."""
        self._begin_end()
        # wait for the opener's thread: it may access the rows, and the store that it opens must be
        # closed
        if self._opening is not None:
            await self._opening
        if self._session is not None:
            await self._session.end(self._release)

    def _begin_end(self) -> None:
        """Handle no further messages, and inform the owner, which bounds the time of the end.
        Idempotent: a later call does not extend the bound."""
        if self._has_begun_end:
            return
        self._has_begun_end = True
        self._channel.stop_receiving()
        is_remote = False
        if self._store is not None:
            is_remote = self._store.view.backend.capabilities.remote
        self._lifecycle.ending(remote=is_remote)

    def _close(self, *, is_sound: bool) -> None:
        """Close the store and release the rows. Idempotent.

        :param is_sound: False: after an internal error, nothing more is written.
        """
        # after an internal error, ``_end`` may not have begun the end
        self._begin_end()
        try:
            if self._opener is not None:
                self._opener.shutdown()
            # read the attribute after the shutdown, which has waited for a thread that was opening
            # the store
            store = self._store
            self._store = None
            self._session = None
            if store is not None:
                store.view.threads.close()
                store.close(is_sound=is_sound)
        finally:
            # release the rows last, because calls of cancelled tasks may use them until the threads
            # are closed
            self._release()

    def _release(self) -> None:
        """Have the owner unmap the rows, and send the engine ``Ended``, because they are free.
        Idempotent."""
        if self._buffer is not None:
            self._buffer = None
            self._lifecycle.released()
            self._channel.send(protocol.Ended())


async def _serve(
    connection: SocketConnection,
    rows_buffer: memoryview,
    engine_pidfd: int | None,
    lifecycle: Lifecycle,
) -> None:
    """Run ``serve`` within its event loop."""
    channel = Channel(connection, engine_pidfd)
    lifecycle.connected(channel)
    try:
        await _Server(channel, rows_buffer, lifecycle).run()
    finally:
        channel.close()


def serve(
    connection: SocketConnection,
    rows_buffer: memoryview,
    engine_pidfd: int | None = None,
    lifecycle: Lifecycle | None = None,
) -> None:
    """Run a store until the engine sends ``End``, closes the connection or dies; then close the
    store and return.

    :param rows_buffer: the primary tier's rows, writable; not used after the return.
    :param engine_pidfd: pidfd of the engine, whose death ends this call; None: the store runs in
        the engine's process.
    :param lifecycle: callbacks; None: the owner, a thread of the engine, needs none.
    """
    lifecycle = lifecycle or Lifecycle()
    try:
        asyncio.run(_serve(connection, rows_buffer, engine_pidfd, lifecycle))
    except BaseException as error:
        # The traceback of the error refers to this frame and to inner ones, whose variables would
        # keep the rows mapped.
        del rows_buffer
        _release_frames(error)
        raise


def _release_frames(error: BaseException) -> None:
    """Delete the variables of the frames in the tracebacks of an internal error, because they would
    keep the rows mapped."""
    pending = [error]
    while pending:
        current = pending.pop()
        traceback.clear_frames(current.__traceback__)
        if isinstance(current, BaseExceptionGroup):
            pending.extend(current.exceptions)
    gc.collect()  # tasks and their errors refer to each other
