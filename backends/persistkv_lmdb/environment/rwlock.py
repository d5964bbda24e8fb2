"""Who uses LMDB's memory map, so that it is never moved under anybody."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager

_COURTESY_S = 0.05
"""How long those that come let one go first who wants to be alone: they would follow each other for ever. Bounded,
because whoever comes may be inside already, and be waited for."""


class Gate:
    """Many are inside, or one is alone. Thread-safe."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._inside = 0
        self._wanted = 0

    @contextmanager
    def entered(self) -> Iterator[None]:
        """Be inside for the length of the block."""
        with self._changed:
            self._changed.wait_for(lambda: not self._wanted, _COURTESY_S)
            self._inside += 1
        try:
            yield
        finally:
            with self._changed:
                self._inside -= 1
                self._changed.notify_all()

    @contextmanager
    def alone(self) -> Iterator[None]:
        """Be alone for the length of the block, once all have left; not from inside."""
        with self._changed:
            self._wanted += 1
            try:
                self._changed.wait_for(lambda: not self._inside)
                yield
            finally:
                self._wanted -= 1
                self._changed.notify_all()
