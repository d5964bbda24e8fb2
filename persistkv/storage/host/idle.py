"""Supervision of a host while its engine is idle: an engine without requests takes no steps, and
may call nothing for hours."""

from __future__ import annotations

import threading
import time
import weakref
from collections.abc import Callable

_IDLE_S = 1.0  # seconds without a poll of the engine after which it counts as idle
_RESTART_LOOK_S = 0.05  # seconds between looks at a host that is not open


class IdleSupervision:
    """Looks at a host from a thread of its own while the engine does not poll."""

    def __init__(self, look: Callable[[], bool]) -> None:
        """:param look: a bound method, called with ``lock`` held; returns whether the host is
        open. The supervision ends when nothing else refers to its object.
        """
        # weak: a client that nobody closed must not keep its rows mapped
        self._look = weakref.WeakMethod(look)
        # reentrant: methods of a client that hold it call each other
        self.lock = threading.RLock()
        """Held during a look, so that the engine's thread can exclude one."""
        self.callback: Callable[[], None] | None = None
        """Called by the thread after each look, without the lock."""
        self._polled = 0.0
        self._stopped = threading.Event()
        self._thread: threading.Thread | None = None

    def start(self) -> None:
        """Start the thread, unless it has been started."""
        if self._thread is None:
            # a daemon: the exit of the interpreter does not wait for clients that nobody closed
            self._thread = threading.Thread(
                target=self._run, name="persistkv-idle", daemon=True
            )
            self._thread.start()

    def note_poll(self) -> float:
        """Note that the engine looks at the host itself; return the time of the monotonic clock."""
        self._polled = time.monotonic()
        return self._polled

    def stop(self) -> None:
        """Wait for a running look, and make no further one. Idempotent."""
        self._stopped.set()
        if self._thread is not None:
            self._thread.join()

    def _run(self) -> None:
        seconds = _IDLE_S
        while not self._stopped.wait(seconds):
            if time.monotonic() - self._polled < _IDLE_S:
                seconds = _IDLE_S
                continue
            # the reference is dropped before the next wait
            look = self._look()
            if look is None:
                return
            with self.lock:
                is_open = look()
            del look
            seconds = _IDLE_S if is_open else _RESTART_LOOK_S
            if self.callback is not None:
                self.callback()
