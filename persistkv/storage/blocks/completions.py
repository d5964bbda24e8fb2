"""Results of calls for callers that must not block: a queue with a descriptor to wait for."""

from __future__ import annotations

import itertools
import os
import threading
from collections import deque
from collections.abc import Sequence
from contextlib import suppress
from typing import NamedTuple


class Completion(NamedTuple):
    """A call that has ended: its buffers are not in use any more."""

    job_id: int
    """The number that the call returned."""
    results: Sequence[bool]
    """For each key, whether its block is durable, or was read and verified."""


class CompletionQueue:
    """Completions of any number of calls and stores. Thread-safe.

    ``fileno`` is an eventfd, which is readable while completions wait: for ``select``, ``poll`` and
    asyncio. ``take`` clears it.
    """

    def __init__(self) -> None:
        self._fd = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        """Descriptor of the eventfd; -1 after ``close``."""
        self._ended: deque[Completion] = deque()
        """Completions that ``take`` has not returned yet."""
        self._lock = threading.Lock()
        self._numbers = itertools.count(1)

    def new_number(self) -> int:
        """Return the number of a new call."""
        return next(self._numbers)

    def fileno(self) -> int:
        """Return the descriptor; -1 after ``close``."""
        return self._fd

    def add(self, completion: Completion) -> None:
        """Add a completion; ignored after ``close``."""
        with self._lock:
            if self._fd >= 0:
                self._ended.append(completion)
                os.eventfd_write(self._fd, 1)

    def take(self, *, clear: bool = True) -> list[Completion]:
        """Return the completions since the last call, in the order in which the calls ended.

        :param clear: False: leave the descriptor readable, because the caller reads it itself.
        """
        with self._lock:
            taken = list(self._ended)
            self._ended.clear()
            if self._fd >= 0 and clear:
                # BlockingIOError: nothing was added, or the caller has read the descriptor itself
                with suppress(BlockingIOError):
                    os.eventfd_read(self._fd)
        return taken

    def close(self) -> None:
        """Close the descriptor. Idempotent."""
        with self._lock:
            if self._fd >= 0:
                os.close(self._fd)
                self._fd = -1
