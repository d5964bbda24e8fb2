"""Wait for a file lock, with a deadline.

Polling with ``LOCK_NB`` starves: among eight processes that contend for a lock, one got it once
while another got it 642 times. The kernel wakes callers of a blocking ``flock`` as soon as the lock
is released, and all of them get it about equally often. Such a call has no timeout, so a daemon
thread makes it.
"""

from __future__ import annotations

import os
import threading
from fcntl import LOCK_EX, flock

from persistkv.errors import StoreError


class LockWait:
    """Pending exclusive ``flock`` on a file, through an open file description of its own.
    Thread-safe.

    A wait that has timed out stays pending, and the next one continues it: a lock that a stopped
    process holds costs one thread, however often it is tried. If the lock is obtained while no
    thread waits, it is released at once.

    :param descriptor: open descriptor of the lock file, used only here: the wait opens the same
        file again.
    :raises OSError: the file cannot be opened again, for example without ``/proc``.
    :raises StoreError: the process cannot start another thread.
    """

    def __init__(self, descriptor: int) -> None:
        self._changed = threading.Condition()
        """Notified when ``flock`` has returned."""
        self._is_awaited = False
        """Whether a thread waits in ``result``."""
        self._error: OSError | None = None
        """Error of ``flock``; None: it has not failed."""
        self._process = os.getpid()
        """The process in which the daemon thread runs: a forked child has no such thread."""
        self._is_over = False
        """Whether ``flock`` has returned."""
        self._granted: int | None = None
        """Descriptor that holds the lock, until ``result`` returns it; None: there is none to
        return."""
        # A new open file description, because a duplicate of the descriptor would share its lock.
        # The link leads to this file even if its name was removed.
        self._fd = os.open(f"/proc/self/fd/{descriptor}", os.O_RDWR)
        try:
            threading.Thread(
                target=self._run, name="persistkv-lock", daemon=True
            ).start()
        except RuntimeError as error:
            os.close(self._fd)
            raise StoreError(f"no thread can wait for the lock: {error}") from None

    @property
    def is_over(self) -> bool:
        """Whether the lock was obtained and given away or released, or the call failed."""
        with self._changed:
            return self._is_over

    def result(self, timeout_s: float) -> int | None:
        """Wait for the lock; return a descriptor that holds it and belongs to the caller.

        None after the timeout, or if the lock was released because no thread waited for it.

        :param timeout_s: in seconds.
        :raises OSError: the kernel refused the lock; this wait is over.
        """
        with self._changed:
            self._is_awaited = True
            try:
                self._changed.wait_for(lambda: self._is_over, timeout_s)
            except BaseException:
                # Ctrl-C ends this wait: a lock that was obtained meanwhile would never be released
                self._release()
                raise
            finally:
                self._is_awaited = False
            if self._error is not None:
                raise self._error
            granted = self._granted
            self._granted = None
            return granted

    def close_after_fork(self) -> None:
        """Close the descriptor in a forked child, where no thread waits. In the parent this does
        nothing: its thread is blocked in ``flock`` and still needs the descriptor."""
        if self._process != os.getpid() and not self._is_over:
            os.close(self._fd)
            self._is_over = True

    def _run(self) -> None:
        """Wait for the lock in the daemon thread; release it at once if no thread awaits it."""
        try:
            flock(self._fd, LOCK_EX)
        except OSError as error:
            self._error = error
        with self._changed:
            self._is_over = True
            if self._error is None and self._is_awaited:
                self._granted = self._fd
            else:
                # this releases the lock, if it was obtained
                os.close(self._fd)
            self._changed.notify_all()

    def _release(self) -> None:
        """Release the lock, by closing its descriptor, if it was obtained for ``result``. The
        caller holds the condition."""
        granted = self._granted
        self._granted = None
        if granted is not None:
            os.close(granted)
