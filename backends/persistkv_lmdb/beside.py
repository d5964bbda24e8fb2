"""Calls that run beside what their owner does meanwhile, on threads that begin with the first of them.

An interrupt (KeyboardInterrupt) may come between any two steps of the owner's. So a call is known before it is given to
a thread, and given again by whoever waits for it where nobody knows whether it was: it runs once, however often.
"""

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
        made = _Call(call)
        self._calls.append(made)
        self._lane.put(made)
        made.given = True
        if running < self._threads:
            made.begun.wait()

    def settle(self) -> None:
        """Wait until all that was begun has ended, then raise what the first of them raised that did.

        Where it or a ``begin`` is interrupted, it can be called again; a call whose ``begin`` was may run until then.
        """
        calls = list(self._calls)
        for call in calls:
            if not call.given and self._lane is not None:
                self._lane.put(call)
            call.ended.wait()
        errors = [call.error for call in calls if call.error is not None]
        self._calls.clear()
        for call in calls:
            call.error = None
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
        self.given = False
        """Whether a thread is sure to run it."""
        self.error: BaseException | None = None
        """What it raised."""
        self._call = call
        self._claim = threading.Lock()

    def __call__(self) -> None:
        if not self._claim.acquire(blocking=False):
            return
        self.begun.set()
        try:
            self._call()
        except BaseException as error:  # raised again by ``settle``
            self.error = error
        finally:
            del self._call
            self.ended.set()
