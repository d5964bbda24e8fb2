"""Calls that run beside what their owner does meanwhile, on threads that begin with the first of them."""

from __future__ import annotations

import threading
from collections.abc import Callable

from persistkv.storage.executor import Lane


class Beside:
    """Calls on their way. For one owner at a time."""

    def __init__(self, name: str, threads: int) -> None:
        """Nothing is started yet.

        :param threads: calls that run at once; they begin in order.
        """
        self._name = name
        self._threads = threads
        self._lane: Lane | None = None
        self._calls: list[_Call] = []

    def begin(self, call: Callable[[], None]) -> None:
        """Run a call; what it raises comes out of ``settle``.

        Where a thread is idle, it has begun on return: else it would wait for the GIL of whoever goes on with other
        work, up to 5 ms.
        """
        if self._lane is None:
            self._lane = Lane(self._name, self._threads)
        running = sum(not call.ended.is_set() for call in self._calls)
        self._calls.append(_Call(call))
        self._lane.put(self._calls[-1])
        if running < self._threads:
            self._calls[-1].begun.wait()

    def settle(self) -> None:
        """Wait until all that was begun has ended, then raise what the first of them raised that did.

        Where the wait is interrupted, it can be called again.
        """
        for ended in [call.ended for call in self._calls]:
            ended.wait()
        taken = map(_Call.take_error, self._calls)
        errors = [error for error in taken if error is not None]
        self._calls.clear()
        try:
            if errors:
                raise errors[0]
        finally:
            del errors  # by its traceback, an error that is kept here would keep itself, and what its call was given

    def close(self) -> None:
        """End the threads; idempotent."""
        if self._lane is not None:
            self._lane.close()
            self._lane = None


class _Call:
    """One call, which is let go of with all that it holds once it has ended."""

    def __init__(self, call: Callable[[], None]) -> None:
        self.begun = threading.Event()
        self.ended = threading.Event()
        self._call = call
        self._error: BaseException | None = None

    def __call__(self) -> None:
        self.begun.set()
        try:
            self._call()
        except BaseException as error:  # raised again by ``settle``
            self._error = error
        finally:
            del self._call
            self.ended.set()

    def take_error(self) -> BaseException | None:
        """What it raised, once."""
        error, self._error = self._error, None
        return error
