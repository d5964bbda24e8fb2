"""Where a store's blocking calls run, while its state stays on one thread.

1. Flows (coroutines) run on the owner's thread alone, so the state that they share needs no lock. Between two ``await``
   of a flow, no other flow runs.
2. A call that a flow awaits runs elsewhere. It gets all it needs and never looks at state.
3. Calls of ``write`` run one at a time, in order. Flows begun with ``begin_write`` take turns, each as a whole.
4. A flow that awaits several calls goes on when all of them have ended, also where one raised: nobody touches the
   buffers that they were given any more.
"""

from __future__ import annotations

import threading
import time
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Coroutine, Generator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from queue import SimpleQueue
from types import coroutine
from typing import Any, TypeVar

T = TypeVar("T")

Flow = Coroutine[Any, None, None]
"""Awaits nothing but what an executor hands out."""


class Executor(ABC):
    """See the top of this file. All methods but ``ahead`` belong to the owner's thread."""

    threads: int = 0
    """Calls of ``read`` that run at once; 0: in the owner's thread, and a flow has ended once it was begun."""

    def __init__(self) -> None:
        self._writes: deque[Flow] = deque()
        self._writing = False

    @abstractmethod
    async def write(self, call: Callable[[], T]) -> T:
        """Run a call that no other one of this kind may run beside."""

    @abstractmethod
    async def read(self, calls: Sequence[Callable[[], T]]) -> list[T]:
        """Run calls beside each other and beside everything else; their results, in order.

        What one raises is raised here, once all have ended.
        """

    @abstractmethod
    def ahead(self, call: Callable[[], T]) -> Callable[[], T]:
        """Begin a call beside the caller's own work, from any thread; what is returned waits for its result."""

    @abstractmethod
    def begin(self, flow: Flow) -> None:
        """Run a flow until it first waits. What it raises comes out here, or out of the call that goes on with it."""

    def begin_write(self, flow: Flow) -> None:
        """Run a flow once those before it have ended."""
        self._writes.append(flow)
        if not self._writing:
            self._writing = True
            self.begin(self._run_writes())

    async def _run_writes(self) -> None:
        try:
            while self._writes:
                await self._writes.popleft()
        finally:
            self._writing = False

    @property
    def writing(self) -> bool:
        """Whether a flow of ``begin_write`` runs or waits for its turn."""
        return self._writing

    @abstractmethod
    def run_ready(self) -> bool:
        """Go on with the flows whose calls have ended; tells whether there were any. Never waits."""

    @abstractmethod
    def run_until(self, ended: Callable[[], bool]) -> None:
        """Go on with flows, waiting for their calls, until ``ended``."""

    @abstractmethod
    def longest_s(self) -> float:
        """For how many seconds the oldest call has been running; 0 where none is."""

    def close(self) -> None:
        """Wait for the calls that run, and end; what waits for its turn never runs. Idempotent."""
        while self._writes:
            self._writes.popleft().close()


class InPlaceExecutor(Executor):
    """Everything runs at once, in the caller's own stack: for tools, and for hosts without a loop."""

    async def write(self, call: Callable[[], T]) -> T:
        return call()

    async def read(self, calls: Sequence[Callable[[], T]]) -> list[T]:
        return [call() for call in calls]

    def ahead(self, call: Callable[[], T]) -> Callable[[], T]:
        return call

    def begin(self, flow: Flow) -> None:
        try:
            flow.send(None)
        except StopIteration:
            return
        raise RuntimeError("a flow awaited what its executor did not hand out")

    def run_ready(self) -> bool:
        return False

    def run_until(self, ended: Callable[[], bool]) -> None:
        if not ended():
            raise RuntimeError("what is waited for can only be a flow that has not begun")

    def longest_s(self) -> float:
        return 0.0


class ThreadExecutor(Executor):
    """One thread for writes, some for reads. The interpreter's exit waits for calls that run."""

    def __init__(self, threads: int, wake: Callable[[], None]) -> None:
        """:param wake: called from any thread when ``run_ready`` has something to do."""
        super().__init__()
        self.threads = threads
        self._wake = wake
        self._ready: SimpleQueue[Flow] = SimpleQueue()
        """Flows whose calls have ended."""
        self._since: dict[int, float] = {}
        """When the call of each busy thread began, by ``time.monotonic``."""
        self._writer = thread_pool(1, "persistkv-writer")
        self._readers = thread_pool(threads, "persistkv-reader")

    async def write(self, call: Callable[[], T]) -> T:
        return (await _results([self._submit(self._writer, call)]))[0]

    async def read(self, calls: Sequence[Callable[[], T]]) -> list[T]:
        return await _results([self._submit(self._readers, call) for call in calls]) if calls else []

    def ahead(self, call: Callable[[], T]) -> Callable[[], T]:
        return self._submit(self._readers, call).result

    def _submit(self, pool: ThreadPoolExecutor, call: Callable[[], T]) -> Future[T]:
        return pool.submit(self._run, call)

    def _run(self, call: Callable[[], T]) -> T:
        thread = threading.get_ident()
        self._since[thread] = time.monotonic()
        try:
            return call()
        finally:
            del self._since[thread]

    def begin(self, flow: Flow) -> None:
        try:
            futures: list[Future[Any]] = flow.send(None)
        except StopIteration:
            return
        left = list(range(len(futures)))

        def end_one(_: Future[Any]) -> None:
            if not left.pop():  # atomic, so one thread gets 0: the last
                self._ready.put(flow)
                self._wake()

        for future in futures:
            future.add_done_callback(end_one)

    def run_ready(self) -> bool:
        count = self._ready.qsize()
        for _ in range(count):
            self.begin(self._ready.get())
        return count > 0

    def run_until(self, ended: Callable[[], bool]) -> None:
        while not ended():
            self.begin(self._ready.get())

    def longest_s(self) -> float:
        now = time.monotonic()
        return max((now - since for since in self._since.copy().values()), default=0.0)

    def close(self) -> None:
        super().close()
        self._writer.shutdown()
        self._readers.shutdown()
        while not self._ready.empty():
            self._ready.get().close()


def thread_pool(threads: int, name: str) -> ThreadPoolExecutor:
    """A pool whose threads have started: ``submit`` does not fail for lack of them, its call queued all the same.

    :raises RuntimeError: there are not as many threads; none is left running.
    """
    pool = ThreadPoolExecutor(threads, name)
    started = threading.Barrier(threads)
    try:
        for _ in range(threads):
            pool.submit(started.wait)
    except BaseException:
        started.abort()
        pool.shutdown()
        raise
    return pool


@coroutine
def _results(futures: list[Future[T]]) -> Generator[list[Future[T]], None, list[T]]:
    """Let the executor wait for calls; their results, in order.

    :param futures: emptied, because an error whose traceback leads back to itself would keep the rows of its call.
    """
    try:
        yield futures
        results = []
        while futures:
            results.append(futures.pop(0).result())
        return results
    finally:
        futures.clear()
