"""A bound on bytes per second, so that an engine beside the command keeps its disk."""

from __future__ import annotations

import sys
import time

_LONGEST_S = 1.0


class Throttle:
    """Sleeps after each piece for as long as the bound asks. What was not used is not saved up beyond one second."""

    def __init__(self, bytes_per_s: int | None) -> None:
        self._rate = bytes_per_s
        self._free_at = time.monotonic()

    @property
    def bounded(self) -> bool:
        """Whether there is a bound at all."""
        return self._rate is not None

    def bytes_in(self, seconds: float) -> int:
        """What passes in so long; without a bound, more than there is anywhere."""
        return sys.maxsize if self._rate is None else max(1, int(self._rate * seconds))

    def took(self, num_bytes: int) -> None:
        """Account for bytes that were read or written."""
        if self._rate is None:
            return
        now = time.monotonic()
        self._free_at = max(self._free_at, now - _LONGEST_S) + num_bytes / self._rate
        if self._free_at > now:
            time.sleep(self._free_at - now)
