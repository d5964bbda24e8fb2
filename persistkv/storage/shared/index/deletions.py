"""Deletion of blobs that nothing needs. The sweep deletes what these deletions miss."""

from __future__ import annotations

import logging
import math
from collections.abc import Sequence
from heapq import heappop, heappush

from persistkv.errors import StoreError
from persistkv.storage.shared.calls import Medium
from persistkv.storage.shared.format import Names

logger = logging.getLogger(__name__)

TOMBSTONE_S = 3600.0  # seconds until the blobs of removed packs are deleted
_REFUSED_S = 60.0  # seconds from a failed deletion until the next attempt
_MOST_DUE = 10_000  # maximum number of deletions that wait; the sweep deletes the rest


class Deletions:
    """Deletions of one handle in one namespace. Any thread may add some; one thread at a time may
    do them."""

    def __init__(self, medium: Medium, names: Names) -> None:
        self._medium = medium
        self._names = names
        self._clock = medium.clock
        self._waiting: list[tuple[float, list[str]]] = []
        """Heap of (monotonic time, blobs to delete)."""
        self._paused_until = -math.inf
        """Monotonic time until which nothing is deleted, because a deletion has failed."""

    def add_packs(self, names: Sequence[bytes]) -> None:
        """Delete the blobs of packs an hour after their tombstones: engines may still read them."""
        # if too many deletions wait already, leave these blobs to the sweep
        if not names or len(self._waiting) >= _MOST_DUE:
            return
        blobs = [self._names.pack(name) for name in names]
        due_at = self._clock.monotonic() + TOMBSTONE_S
        heappush(self._waiting, (due_at, blobs))

    def due_at(self) -> float:
        """Return the monotonic time of the next deletion; infinity: none waits."""
        if not self._waiting:
            return math.inf
        due_at, _ = self._waiting[0]
        return due_at

    def step(self) -> None:
        """Delete the blobs that are due. Failures are only logged."""
        now = self._clock.monotonic()
        blobs: list[str] = []
        while self.due_at() <= now:
            _, due = heappop(self._waiting)
            blobs += due
        self.delete(blobs)

    def delete(self, blobs: Sequence[str]) -> None:
        """Delete blobs now. A failure is only logged; then all deletions are skipped for a minute.
        The caller, or the sweep, deletes those blobs later."""
        now = self._clock.monotonic()
        if not blobs or now < self._paused_until:
            return
        try:
            self._medium.blobs.delete(blobs)
        except StoreError as error:
            self._paused_until = now + _REFUSED_S
            text = "%s: %d blobs were not deleted (%s): they take space until a later attempt"
            logger.warning(text, self._names.base, len(blobs), error)
