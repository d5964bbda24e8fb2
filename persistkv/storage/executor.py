"""Executors run a store's blocking calls. All other code of the store runs on one thread, that of
its owner.

1. Flows (coroutines) run only on the owner's thread, so the state that they share needs no lock. No
   other flow runs between two ``await`` of a flow.
2. A call that a flow awaits runs on another thread. It receives all it needs and never accesses
   shared state.
3. Calls of ``write`` run one at a time, in order. Flows of ``begin_write`` run one after another,
   each to its end.
4. A flow that awaits several calls resumes after all of them have ended, even if one raised. From
   then on, no thread accesses the buffers of these calls.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Coroutine, Generator, Sequence
from concurrent.futures import Future
from contextlib import suppress
from functools import partial
from queue import Empty, SimpleQueue
from types import coroutine
from typing import Any, TypeVar

T = TypeVar("T")

Flow = Coroutine[Any, None, None]
"""Coroutine that awaits only calls of an executor."""


class Executor:
    """Runs blocking calls for flows. All methods except ``ahead`` must be called on the owner's
    thread.

    :param threads: number of ``read`` and ``ahead`` calls that can run at once; ``write`` has a
        thread of its own. 0: all calls run on the owner's thread, and a flow has ended when
        ``begin`` returns.
    :param wake: called from any thread when a flow can be resumed; the owner must then call
        ``run_ready``.
    """

    def __init__(
        self, threads: int = 0, wake: Callable[[], None] | None = None
    ) -> None:
        self.threads = threads
        self._wake = wake
        self._writes: deque[Flow] = deque()
        self.writing = False
        """Whether a flow of ``begin_write`` is running or queued."""
        self._ready: SimpleQueue[Flow] = SimpleQueue()
        """Flows whose calls have ended."""
        self._since: dict[int, float] = {}
        """Thread id → ``time.monotonic()`` at the start of the call that the thread is running."""
        self._writer = ThreadPool(min(threads, 1), "persistkv-writer")
        self._readers = ThreadPool(threads, "persistkv-reader")

    async def write(self, call: Callable[[], T]) -> T:
        """Run a call and return its result, or raise its exception."""
        return (
            (await _results([self._writer.submit(self._run, call)]))[0]
            if self.threads
            else call()
        )

    async def read(self, calls: Sequence[Callable[[], T]]) -> list[T]:
        """Run calls concurrently with each other and with all others; return their results in
        order.

        If a call raises, its exception is raised here after all of them have ended; of several, the
        first in order.
        """
        if self.threads and calls:
            return await _results(
                [self._readers.submit(self._run, call) for call in calls]
            )
        return [call() for call in calls]

    def ahead(self, call: Callable[[], T]) -> Callable[[], T]:
        """Start a call that may run concurrently with the caller. Return a function that waits for
        it, and returns its result or raises its exception. Without threads, this function runs the
        call. Thread-safe.
        """
        return self._readers.submit(self._run, call).result if self.threads else call

    def _run(self, call: Callable[[], T]) -> T:
        thread = threading.get_ident()
        self._since[thread] = time.monotonic()
        try:
            return call()
        finally:
            del self._since[thread]

    def begin(self, flow: Flow) -> None:
        """Run a flow until it first waits for a call; ``run_ready`` and ``run_until`` resume it. If
        the flow raises, the method that started or resumed it raises the exception.
        """
        try:
            futures: list[Future[Any]] = flow.send(None)
        except StopIteration:
            return
        left = list(range(len(futures)))

        def end_one(_: Future[Any]) -> None:
            # ``pop`` is atomic: only the last thread to call it gets 0
            if not left.pop():
                self._ready.put(flow)
                if self._wake is not None:
                    self._wake()

        for future in futures:
            future.add_done_callback(end_one)

    def begin_write(self, flow: Flow) -> None:
        """Start a flow when all earlier flows of this method have ended, now if none is left. If a
        flow raises, the flows queued behind it wait for the next call of this method.
        """
        self._writes.append(flow)
        if not self.writing:
            self.writing = True
            self.begin(self._run_writes())

    async def _run_writes(self) -> None:
        try:
            while self._writes:
                await self._writes.popleft()
        finally:
            self.writing = False

    def run_ready(self) -> bool:
        """Resume the flows whose calls have ended, without waiting for other calls. Return whether
        there were any."""
        count = self._ready.qsize()
        for _ in range(count):
            self.begin(self._ready.get())
        return count > 0

    def run_until(self, ended: Callable[[], bool]) -> None:
        """Resume flows as their calls end, until ``ended`` returns True; it is called before each
        wait.

        :raises RuntimeError: ``ended`` returned False, and there are no threads, so no call can
            end.
        """
        while not ended():
            if not self.threads:
                raise RuntimeError(
                    "the awaited flow has not begun, and nothing else can begin it"
                )
            self.begin(self._ready.get())

    def longest_s(self) -> float:
        """Return for how many seconds the oldest call on another thread has been running; 0 if
        there is none."""
        now = time.monotonic()
        return max((now - since for since in self._since.copy().values()), default=0.0)

    def close(self) -> None:
        """Drop queued flows, wait for submitted calls, and end the threads. No flow is resumed.
        Idempotent."""
        while self._writes:
            self._writes.popleft().close()
        self._writer.shutdown()
        self._readers.shutdown()
        while not self._ready.empty():
            self._ready.get().close()


class ThreadPool:
    """Fixed number of threads that run queued calls in order; results are futures of
    ``concurrent.futures``.

    Unlike those of ``ThreadPoolExecutor``, all threads start at once, so a queued call never waits
    for a thread that cannot start, and they are daemons: the interpreter's exit does not wait for a
    call that never returns, and handlers of ``atexit`` can still store and load.

    :raises RuntimeError: the system cannot start so many threads; those that started have ended.
    """

    def __init__(self, threads: int, name: str) -> None:
        self._queue: SimpleQueue[tuple[Future[Any], Callable[[], Any]] | None] = (
            SimpleQueue()
        )
        self._threads: list[threading.Thread] = []
        self._closed = False
        try:
            for number in range(threads):
                thread = threading.Thread(
                    target=_run_calls,
                    args=(self._queue,),
                    name=f"{name}_{number}",
                    daemon=True,
                )
                thread.start()
                self._threads.append(thread)
        except BaseException:
            self.shutdown()
            raise

    def submit(self, call: Callable[..., T], *arguments: Any) -> Future[T]:
        """Queue a call, from any thread.

        :raises RuntimeError: the pool is shut down.
        """
        future: Future[T] = Future()
        self.begin(future, partial(call, *arguments))
        return future

    def begin(self, future: Future[T], call: Callable[[], T]) -> None:
        """Queue a call that completes ``future``, which the caller already holds. With ``submit``,
        an exception such as KeyboardInterrupt could leave the caller without the future of a queued
        call.

        :raises RuntimeError: the pool is shut down; the future stays pending.
        """
        if self._closed:
            raise RuntimeError("the thread pool is shut down")
        self._queue.put((future, call))

    def shutdown(self, wait: bool = True, *, cancel_futures: bool = False) -> None:
        """Refuse further calls, and end the threads once the queued calls have run. Idempotent.

        :param wait: return only when the threads have ended.
        :param cancel_futures: cancel the queued calls instead of running them.
        """
        self._closed = True
        while cancel_futures and not self._queue.empty():
            with suppress(Empty):
                if (item := self._queue.get_nowait()) is not None:
                    item[0].cancel()
                    item[0].set_running_or_notify_cancel()
        for _ in self._threads:
            self._queue.put(None)
        for thread in self._threads if wait else ():
            thread.join()


def _run_calls(
    queue: SimpleQueue[tuple[Future[Any], Callable[[], Any]] | None],
) -> None:
    while (item := queue.get()) is not None:
        future, call = item
        if future.set_running_or_notify_cancel():
            try:
                result = call()
            except BaseException as error:  # ``Future.result`` raises it
                future.set_exception(error)
            else:
                future.set_result(result)
                del result
        del item, future, call  # they reference rows


@coroutine
def _results(futures: list[Future[T]]) -> Generator[list[Future[T]], None, list[T]]:
    """Yield futures to the executor, which resumes this coroutine when all are done; return their
    results in order.

    The list is emptied, so that an exception is in no reference cycle that keeps the rows of its
    call alive.
    """
    try:
        yield futures
        return [futures.pop(0).result() for _ in range(len(futures))]
    finally:
        futures.clear()
