"""An event loop in a thread of its own, for callers without a loop."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Coroutine
from concurrent.futures import Future
from typing import Any, TypeVar

T = TypeVar("T")


class LoopThread:
    """An event loop in a daemon thread, because the caller's thread may run another loop, as in a
    notebook. Thread-safe.

    :param name: name of the thread.
    """

    def __init__(self, name: str) -> None:
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(
            target=self._loop.run_forever, name=name, daemon=True
        )
        self._thread.start()

    def start(self, coroutine: Coroutine[Any, Any, T]) -> Future[T]:
        """Start a task; return the future of its result. Cancelling it cancels the task."""
        return asyncio.run_coroutine_threadsafe(coroutine, self._loop)

    def wait(self, coroutine: Coroutine[Any, Any, T]) -> T:
        """Run a task to its end; return its result, or raise its exception."""
        return self.start(coroutine).result()

    def close(self) -> None:
        """End the loop and its thread. Tasks that have not ended never continue. Idempotent."""
        if self._loop.is_closed():
            return
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()
