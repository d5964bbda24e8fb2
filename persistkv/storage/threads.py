"""Threads for the blocking calls of a store, which an event loop awaits.

1. A call that a coroutine awaits runs on another thread. It receives all it needs and never
   accesses shared state.
2. Calls of ``write`` run one at a time, in order. Calls of ``read`` run concurrently with all
   others.
3. ``read`` and ``read_until`` return or raise after all of their calls have ended, even if one
   raised, or were abandoned. From then on, no thread accesses the buffers of these calls. If the
   task is cancelled, they end with ``close``.
4. Another thread takes the place of one whose call was abandoned: a medium that hangs does not keep
   other calls from running.
"""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future, InvalidStateError
from contextlib import suppress
from functools import partial
from queue import Empty, SimpleQueue
from typing import Any, Protocol, TypeAlias, TypeVar

T = TypeVar("T")
T_co = TypeVar("T_co", covariant=True)


class AbandonableCall(Protocol[T_co]):
    """A call that can return while it is running."""

    def __call__(self) -> T_co: ...

    def abandon(self) -> T_co | None:
        """Return the result of the work that is done so far. From then on, the call does not access
        the caller's buffers, and its own result is ignored. None: the call cannot be abandoned, and
        the caller must wait for its end.

        Called from another thread while the call is running, or when it has just ended.
        """
        ...


class StoreThreads:
    """One thread that writes, and several that read, for the tasks of one event loop."""

    def __init__(self, readers: int) -> None:
        """:param readers: number of ``read`` and ``start`` calls that can run at once, at least 1.
        :raises RuntimeError: the system cannot start so many threads; none is left.
        """
        self.readers = readers
        self._writer = ThreadPool(1, "persistkv-writer")
        try:
            self._readers = ThreadPool(readers, "persistkv-reader")
        except BaseException:
            self._writer.shutdown()
            raise

    async def write(self, call: Callable[[], T]) -> T:
        """Run a call after all earlier ones of this method; return its result, or raise its
        exception."""
        (result,) = await _run_all(self._writer, [call])
        return result

    async def read(self, calls: Sequence[Callable[[], T]]) -> list[T]:
        """Run calls concurrently; return their results in order.

        If a call raises, its exception is raised here after all of them have ended; of several, the
        first in order.
        """
        return await _run_all(self._readers, calls)

    async def read_until(
        self,
        calls: Sequence[AbandonableCall[T]],
        deadline: float | None,
    ) -> list[T | None]:
        """Run calls concurrently, as ``read`` does. At the deadline, drop those that have not begun
        (their result is None), and abandon the others if they can be.

        :param deadline: time of the event loop, which is ``time.monotonic``; None: no deadline.
        """
        if deadline is None:
            return [*await _run_all(self._readers, calls)]
        loop = asyncio.get_running_loop()
        if loop.time() >= deadline:
            return [None] * len(calls)

        futures = list(map(self._readers.submit, calls))
        running = list(zip(calls, futures, strict=True))
        timer = loop.call_at(deadline, self._abandon, running)
        results: list[T | None] = [None] * len(calls)
        try:
            await _all_ended(futures)
            # Iterate by number: an exception of ``result`` references this frame, and in a cycle
            # with a variable that refers to the future, it would keep the rows of the call alive.
            for number in range(len(futures)):
                if not futures[number].cancelled():  # by ``_abandon``: it had not begun
                    results[number] = futures[number].result()
        finally:
            timer.cancel()
            # an exception of ``result`` references this frame, which must not refer to its future
            running.clear()
            futures.clear()
        return results

    def _abandon(self, running: list[tuple[AbandonableCall[T], Future[T]]]) -> None:
        """Cancel the calls that no thread has begun, and abandon those that can be."""
        for call, future in running:
            if future.cancel():
                continue
            result = call.abandon()
            # None: the call cannot be abandoned, and ``read_until`` waits for its end
            if result is not None:
                self._readers.abandon(future, result)
        # drop the calls, which refer to rows
        running.clear()

    def start(self, call: Callable[[], T]) -> Callable[[], T]:
        """Start a call that may run concurrently with the caller. Return a function that waits for
        it, and returns its result or raises its exception. Thread-safe.
        """
        return self._readers.submit(call).result

    def longest_s(self) -> float:
        """Return for how many seconds the oldest call has been running; 0 if there is none."""
        return max(self._writer.longest_s(), self._readers.longest_s())

    def close(self) -> None:
        """Wait for the submitted calls, then end the threads. Idempotent."""
        self._writer.shutdown()
        self._readers.shutdown()


async def _run_all(
    pool: ThreadPool,
    calls: Sequence[Callable[[], T]],
) -> list[T]:
    """Run calls, and wait until all have ended; return their results in order."""
    futures = list(map(pool.submit, calls))
    try:
        await _all_ended(futures)
        return list(map(Future.result, futures))
    finally:
        # An exception of ``result`` references this frame. Without this, it would be in a reference
        # cycle with its future, and keep the rows of the call alive.
        futures.clear()


def _all_ended(futures: Sequence[Future[T]]) -> asyncio.Future[None]:
    """Return a future of the running loop that is done when all ``futures`` are."""
    loop = asyncio.get_running_loop()
    ended = loop.create_future()
    left = list(range(len(futures)))

    def end_one(_: Future[T]) -> None:
        # ``pop`` is atomic: only the last thread to call it gets 0, so the loop wakes up once
        if left.pop() == 0:
            loop.call_soon_threadsafe(resolve, ended, None)

    for future in futures:
        future.add_done_callback(end_one)
    if not futures:
        ended.set_result(None)
    return ended


def resolve(future: asyncio.Future[T], result: T) -> None:
    """Complete a future, unless its task was cancelled."""
    if not future.done():
        future.set_result(result)


class _Pending:
    """A queued call, which is dropped when its future is done. If all threads hang, a cancelled
    call stays in the queue, and must not keep the rows that it references alive."""

    def __init__(self, call: Callable[[], Any]) -> None:
        self.call = call

    def end(self, future: Future[Any]) -> None:
        """Drop the call: callback of its future."""
        self.call = _do_nothing


def _do_nothing() -> None:
    pass


_Queue: TypeAlias = "SimpleQueue[tuple[Future[Any], _Pending] | None]"
"""Calls to run, with their futures; None ends the thread that takes it."""


class ThreadPool:
    """Fixed number of threads that run queued calls in order; results are futures of
    ``concurrent.futures``.

    Unlike those of ``ThreadPoolExecutor``, all threads start at once, so a queued call never waits
    for a thread that cannot start, and they are daemons: the interpreter's exit does not wait for a
    call that never returns, and handlers of ``atexit`` can still store and load.

    :raises RuntimeError: the system cannot start so many threads; those that started have ended.
    """

    def __init__(self, threads: int, name: str) -> None:
        self._queue: _Queue = SimpleQueue()
        self._name = name
        self._num_threads = threads
        self._num_started = 0
        """Number of threads started so far, replacements included, for their names."""
        self._workers: list[_Worker] = []
        """Threads that take calls from the queue."""
        self._replaced: list[_Worker] = []
        """Threads whose call was abandoned; they end with it."""
        self._closed = False
        try:
            for _ in range(threads):
                self._start_worker()
        except BaseException:
            self.shutdown()
            raise

    def _start_worker(self) -> None:
        worker = _Worker(self._queue, f"{self._name}_{self._num_started}")
        worker.start()
        self._num_started += 1
        self._workers.append(worker)

    def submit(
        self,
        call: Callable[..., T],
        *arguments: Any,
    ) -> Future[T]:
        """Queue a call, from any thread.

        :raises RuntimeError: the pool is shut down.
        """
        future: Future[T] = Future()
        self.begin(future, partial(call, *arguments))
        return future

    def begin(
        self,
        future: Future[T],
        call: Callable[[], T],
    ) -> None:
        """Queue a call that completes ``future``, which the caller already holds. With ``submit``,
        an exception such as KeyboardInterrupt could leave the caller without the future of a queued
        call.

        :raises RuntimeError: the pool is shut down; the future stays pending.
        """
        if self._closed:
            raise RuntimeError("the thread pool is shut down")
        pending = _Pending(call)
        # a future that is cancelled while its call is queued drops the call at once
        future.add_done_callback(pending.end)
        self._queue.put((future, pending))

    def abandon(self, future: Future[T], result: T) -> None:
        """Complete the future of a running call now, and have another thread take the place of its
        thread. Ignored if the call has just ended.

        At most as many threads are replaced at a time as the pool has. Not thread-safe.
        """
        # look up the thread before the future is done: afterwards, it may begin another call
        running = [worker for worker in self._workers if worker.future is future]
        try:
            future.set_result(result)
        except InvalidStateError:  # the call has ended
            return
        # at most one thread runs the call; it is marked, so that ``shutdown`` does not wait for it
        for worker in running:
            worker.abandoned = future
            self._replace(worker)

    def _replace(self, worker: _Worker) -> None:
        """Start a thread in place of one whose call was abandoned and may never end, unless many
        such threads still run."""
        self._replaced = [other for other in self._replaced if other.is_alive()]
        if len(self._replaced) >= self._num_threads:
            return
        # if no thread can be started, the old one continues
        with suppress(RuntimeError):
            self._start_worker()
            self._workers.remove(worker)
            self._replaced.append(worker)
            worker.is_replaced = True

    def longest_s(self) -> float:
        """Return for how many seconds the oldest call has been running, abandoned ones included; 0
        if there is none. Not thread-safe."""
        now = time.monotonic()
        oldest = now
        for worker in (*self._workers, *self._replaced):
            # read once, because the thread may set it to None at any time
            begun_at = worker.begun_at
            if begun_at is not None:
                oldest = min(oldest, begun_at)
        return now - oldest

    def shutdown(
        self,
        wait: bool = True,
        *,
        cancel_futures: bool = False,
    ) -> None:
        """Refuse further calls, and end the threads once the queued calls have run. Idempotent.

        :param wait: return only when the threads have ended, except those of abandoned calls.
        :param cancel_futures: cancel the queued calls instead of running them.
        """
        self._closed = True
        if cancel_futures:
            self._cancel_queued()
        # Put a None for each thread behind the queued calls: it ends the thread that takes it. A
        # replaced thread takes one, too, if its call ended just before it was replaced.
        for _ in (*self._workers, *self._replaced):
            self._queue.put(None)
        if not wait:
            return
        for worker in self._workers:
            # an abandoned call may never end; its thread is among ``_workers`` if no other one
            # could be started in its place
            if not worker.is_abandoned:
                worker.join()

    def _cancel_queued(self) -> None:
        """Cancel the calls that have not begun."""
        while not self._queue.empty():
            with suppress(Empty):
                queued = self._queue.get_nowait()
                if queued is not None:
                    future, _ = queued
                    future.cancel()
                    # without this call, ``concurrent.futures.wait`` would not notice the
                    # cancellation
                    future.set_running_or_notify_cancel()


class _Worker(threading.Thread):
    """Thread that runs queued calls, until it takes None from the queue or is replaced."""

    def __init__(self, queue: _Queue, name: str) -> None:
        super().__init__(name=name, daemon=True)
        self._queue = queue
        self.future: Future[Any] | None = None
        """Future of the running call."""
        self.abandoned: Future[Any] | None = None
        """Future of the last call that was abandoned; it may be running still."""
        self.is_replaced = False
        """Whether another thread has taken its place: it ends after its call."""
        self.begun_at: float | None = None
        """When the running call began, by ``time.monotonic``; None: no call runs."""

    @property
    def is_abandoned(self) -> bool:
        """Whether the running call was abandoned."""
        future = self.future
        return future is not None and future is self.abandoned

    def run(self) -> None:
        while not self.is_replaced:
            queued = self._queue.get()
            if queued is None:
                return
            future, pending = queued
            # set before the call runs, so that the running call can be abandoned
            self.future = future
            # False means that the call was cancelled in the queue
            if future.set_running_or_notify_cancel():
                # Run it in this frame: an exception references the frame of the call, and a
                # function would add its arguments.
                call = pending.call
                self.begun_at = time.monotonic()
                # ``begun_at`` is reset before the future is done: a task that has awaited the call
                # must not find it running in ``longest_s``
                try:
                    result = call()
                except BaseException as error:  # ``Future.result`` raises it
                    self.begun_at = None
                    with suppress(InvalidStateError):  # the call was abandoned
                        future.set_exception(error)
                else:
                    self.begun_at = None
                    with suppress(InvalidStateError):  # the call was abandoned
                        future.set_result(result)
                    del result
                del call
            self.future = None
            # these variables refer to rows, which must be free while this thread waits for the next
            # call
            del queued, future, pending
