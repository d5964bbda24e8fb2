"""A block store that is opened in a thread, because its medium may hang."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future

from persistkv.errors import StoreError
from persistkv.storage.blocks import BlockStore

logger = logging.getLogger(__name__)

RETRY_S = 30.0
"""Seconds until a store that did not open is tried again."""


class StoreOpener:
    """Opens a block store, and tries again while it does not open. Thread-safe.

    At most one attempt runs at a time: a hung medium holds one thread.
    """

    def __init__(
        self,
        open_store: Callable[[], BlockStore],
        timeout_s: float,
    ) -> None:
        """Open the store; return when it is open or has failed, after ``timeout_s`` at the latest.

        :param open_store: opens the store; may hang.
        :raises ConfigurationError: an option is invalid.
        """
        self._open_store = open_store
        self._lock = threading.Lock()
        self._store: BlockStore | None = None
        """The open store; None before the first attempt has succeeded, and after ``close``."""
        self._is_closed = False
        self._retry_at = 0.0
        """Monotonic time before which no other attempt is made."""
        self._attempt = self._begin_attempt()
        """The last attempt to open the store, which may still run."""
        try:
            self._attempt.result(timeout_s)
        except TimeoutError:
            logger.error(
                "the store does not open within %g s: pages are misses, and are not stored, until "
                "it is open",
                timeout_s,
            )
        except StoreError:
            pass  # the attempt has logged the error

    def get(self) -> BlockStore | None:
        """Return the store; None if it is not open. Does not wait. If the last attempt has failed
        long enough ago, the next one begins."""
        with self._lock:
            if self._store is None and self._may_try_again():
                self._attempt = self._begin_attempt()
            return self._store

    def _may_try_again(self) -> bool:
        """Return whether the last attempt has failed long enough ago; the lock is held."""
        if self._is_closed or not self._attempt.done():
            return False
        return time.monotonic() >= self._retry_at

    def close(self) -> None:
        """Close the store; if it is being opened, the thread of the attempt does it. Idempotent."""
        with self._lock:
            self._is_closed = True
            store = self._store
            self._store = None
        if store is not None:
            store.close()

    def _begin_attempt(self) -> Future[None]:
        """Start an attempt in a daemon thread: the interpreter's exit does not wait for it."""
        attempt: Future[None] = Future()
        thread = threading.Thread(
            target=self._run_attempt,
            args=(attempt,),
            name="persistkv-opener",
            daemon=True,
        )
        thread.start()
        return attempt

    def _run_attempt(self, attempt: Future[None]) -> None:
        """Try to open the store, and set the result of the attempt."""
        try:
            self._open()
        # Catch any error, because the thread has no caller. If the constructor still waits for the
        # attempt, it gets the error from the result.
        except Exception as error:
            logger.error(
                "the store does not open (%s): pages are misses, and are not stored; it is tried "
                "again after %g s",
                error,
                RETRY_S,
            )
            # set the time before the result, because ``get`` reads it as soon as the attempt is
            # done
            self._retry_at = time.monotonic() + RETRY_S
            attempt.set_exception(error)
        else:
            attempt.set_result(None)

    def _open(self) -> None:
        """Open the store and use it, or close it if this object was closed meanwhile."""
        store = self._open_store()
        with self._lock:
            is_closed = self._is_closed
            if not is_closed:
                self._store = store
        if is_closed:
            store.close()
