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
from concurrent.futures import Future
from functools import partial
from queue import SimpleQueue
from typing import Any, Generic, TypeVar

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
    """One thread for writes, some for reads. They are daemons: a call that never returns does not keep a program."""

    def __init__(self, threads: int, wake: Callable[[], None]) -> None:
        """:param wake: called from any thread when ``run_ready`` has something to do."""
        super().__init__()
        self.threads = threads
        self._wake = wake
        self._ended: SimpleQueue[_Calls[Any]] = SimpleQueue()
        self._writer = Lane("persistkv-writer", 1)
        self._readers = Lane("persistkv-reader", threads)

    async def write(self, call: Callable[[], T]) -> T:
        return (await _Calls(self._writer, [call]))[0]

    async def read(self, calls: Sequence[Callable[[], T]]) -> list[T]:
        return await _Calls(self._readers, calls) if calls else []

    def ahead(self, call: Callable[[], T]) -> Callable[[], T]:
        result: SimpleQueue[_Result[T]] = SimpleQueue()
        self._readers.put(lambda: result.put(_Result.of(call)))
        return lambda: result.get().value()

    def begin(self, flow: Flow) -> None:
        try:
            calls = flow.send(None)
        except StopIteration:
            return
        calls.begin(flow, self._end_one)

    def _end_one(self, calls: _Calls[Any]) -> None:
        self._ended.put(calls)
        self._wake()

    def run_ready(self) -> bool:
        count = self._ended.qsize()
        for _ in range(count):
            self._go_on(self._ended.get())
        return count > 0

    def run_until(self, ended: Callable[[], bool]) -> None:
        while not ended():
            self._go_on(self._ended.get())

    def _go_on(self, calls: _Calls[Any]) -> None:
        flow = calls.end_one()
        if flow is not None:
            self.begin(flow)

    def longest_s(self) -> float:
        return max(self._writer.longest_s(), self._readers.longest_s())

    def close(self) -> None:
        super().close()
        self._writer.close()
        self._readers.close()
        while not self._ended.empty():
            self._ended.get().leave()


class _Result(Generic[T]):
    """What came of a call."""

    def __init__(self, values: list[T], error: BaseException | None = None) -> None:
        self._values = values
        self._error = error

    @classmethod
    def of(cls, call: Callable[[], T]) -> _Result[T]:
        try:
            return cls([call()])
        except BaseException as error:  # raised again where the result is asked for
            return cls([], error)

    def value(self) -> T:
        """Asked for once: an error that is kept here would, by its traceback, keep the call's buffers."""
        error, self._error = self._error, None
        try:
            if error is not None:
                raise error
        finally:
            del error
        return self._values[0]


class _Calls(Generic[T]):
    """Calls that one flow waits for."""

    def __init__(self, lane: Lane, calls: Sequence[Callable[[], T]]) -> None:
        self._lane = lane
        self._calls = calls
        self._results: dict[int, _Result[T]] = {}
        self._left = len(calls)
        self._flow: Flow | None = None

    def __await__(self) -> Generator[_Calls[T], None, list[T]]:
        yield self
        return [self._results[number].value() for number in range(len(self._results))]

    def begin(self, flow: Flow, end_one: Callable[[_Calls[T]], None]) -> None:
        """Hand the calls over; ``end_one`` is called from their thread as each ends."""
        self._flow = flow
        calls, self._calls = self._calls, ()  # what they hold is let go of as they end
        for number, call in enumerate(calls):
            self._lane.put(_Run(self, number, call, end_one))

    def take(self, number: int, result: _Result[T]) -> None:
        self._results[number] = result

    def leave(self) -> None:
        """End the flow, with which nobody goes on: it holds what it was given."""
        flow, self._flow = self._flow, None
        if flow is not None:
            flow.close()

    def end_one(self) -> Flow | None:
        """One more has ended; the flow where it was the last."""
        self._left -= 1
        return None if self._left else self._flow


class _Run(Generic[T]):
    """One call on its way through a lane."""

    def __init__(
        self, calls: _Calls[T], number: int, call: Callable[[], T], end_one: Callable[[_Calls[T]], None]
    ) -> None:
        self._calls = calls
        self._number = number
        self._call = call
        self._end_one = end_one

    def __call__(self) -> None:
        self._calls.take(self._number, _Result.of(self._call))
        del self._call  # before the owner hears of it: it may hold the rows
        self._end_one(self._calls)


class Lane:
    """Threads that run what is put, in order. They are daemons."""

    def __init__(self, name: str, threads: int) -> None:
        """Start them."""
        self._waiting: SimpleQueue[Callable[[], None] | None] = SimpleQueue()
        self._since: list[float | None] = [None] * threads
        self._threads = [
            threading.Thread(target=self._run, args=(number,), name=name, daemon=True) for number in range(threads)
        ]
        try:
            for thread in self._threads:
                thread.start()
        except RuntimeError:  # no more threads: those that there are end
            for _ in self._threads:
                self._waiting.put(None)
            raise

    def put(self, call: Callable[[], None]) -> None:
        """From any thread. ``call`` does not raise."""
        self._waiting.put(call)

    def submit(self, call: Callable[[], T]) -> Future[T]:
        """Run a call; one whose future is cancelled before its turn never runs. From any thread."""
        future: Future[T] = Future()
        self.put(partial(_fulfil, future, call))
        return future

    def _run(self, number: int) -> None:
        while (call := self._waiting.get()) is not None:
            self._since[number] = time.monotonic()
            call()
            del call
            self._since[number] = None

    def longest_s(self) -> float:
        """For how many seconds the oldest call has been running; 0 where none is."""
        now = time.monotonic()
        return max((now - since for since in self._since if since is not None), default=0.0)

    def close(self, *, wait: bool = True) -> None:
        """Run all queued calls, then end the threads; idempotent.

        :param wait: return after that. Otherwise a call that hangs delays neither the caller nor the process's exit.
        """
        threads, self._threads = self._threads, []
        for _ in threads:
            self._waiting.put(None)
        for thread in threads if wait else ():
            thread.join()


def _fulfil(future: Future[T], call: Callable[[], T]) -> None:
    if not future.set_running_or_notify_cancel():
        return
    try:
        result = call()
    except BaseException as error:  # raised again where the result is asked for
        future.set_exception(error)
    else:
        future.set_result(result)
