"""Supervision of a host while its engine is idle: an engine without requests takes no steps, and
may call nothing for hours."""

from __future__ import annotations

import threading
import time
import weakref
from collections.abc import Callable

from persistkv.isolation import Isolation

_IDLE_S = 1.0  # seconds without a poll of the engine after which it counts as idle
_RESTART_LOOK_S = 0.05  # seconds between two checks of a host that is not open


class IdleSupervision:
    """Checks a host from a thread of its own while the engine does not poll."""

    def __init__(self, look: Callable[[], bool]) -> None:
        """:param look: a bound method that checks the host, called with ``lock`` held; returns
        whether the store is open. The thread ends when nothing else refers to the object of this
        method.
        """
        # keep a weak reference, because the thread would otherwise keep the rows of a client mapped
        # that was dropped without ``close``
        self._look = weakref.WeakMethod(look)
        # the lock is reentrant, because methods of a client that hold it call each other
        self.lock = threading.RLock()
        """Held during a look, so that the engine's thread can exclude one."""
        self.callback: Callable[[], None] | None = None
        """Called by the thread after each look, without the lock."""
        self.polled_at = 0.0
        """Time of the engine's last poll, by ``time.monotonic``; the engine sets it."""
        self._stopped = threading.Event()
        self._thread: threading.Thread | None = None
        # log exceptions: if one ended the thread, a host that dies later would stay down
        self._isolation = Isolation("the idle supervision of a store's host")

    def start(self) -> None:
        """Start the thread, unless it has been started."""
        if self._thread is None:
            # start a daemon, so that the exit of the interpreter does not wait for clients that are
            # open
            self._thread = threading.Thread(
                target=self._run, name="persistkv-idle", daemon=True
            )
            self._thread.start()

    def stop(self) -> None:
        """Wait for a running look, and make no further one. Idempotent."""
        self._stopped.set()
        # A garbage collection in the thread itself may close the client that it looks after, and a
        # thread cannot join itself.
        if self._thread not in (None, threading.current_thread()):
            self._thread.join()

    def _run(self) -> None:
        """Check the host while the engine does not poll, until the object of ``look`` is gone."""
        pause_s = _IDLE_S
        while not self._stopped.wait(pause_s):
            is_polled = time.monotonic() - self.polled_at < _IDLE_S
            if is_polled:
                pause_s = _IDLE_S
                continue
            look = self._look()
            if look is None:
                return
            # this stays False if ``look`` raises; the guard logs the error
            is_open = False
            with self._isolation.guard("look", "it is repeated"), self.lock:
                is_open = look()
            # drop the bound method, which would keep its object alive during the next pause
            del look
            # while the store is not open, look more often, because a look restarts its host
            pause_s = _IDLE_S if is_open else _RESTART_LOOK_S
            # the callback may ask the idle engine for a step, to take what the look has received
            if self.callback is not None:
                with self._isolation.guard("callback", "it is repeated"):
                    self.callback()
