"""Model of an engine's scheduler that polls for I/O.

Imports only the standard library, so that it also runs in vLLM's environment.
"""

from __future__ import annotations

import time
from collections.abc import Callable

TURN_S = 0.001


class Scheduler:
    """One Python thread that polls for ended jobs about once a millisecond, and works or sleeps in
    between."""

    def __init__(self, busy: bool) -> None:
        self.busy = busy
        self.waits: list[float] = []
        """Seconds of each call of ``ended``."""

    def run(self, ended: Callable[[], bool]) -> float:
        """Poll until ``ended`` returns True; return the seconds that this took."""
        begin = last = time.perf_counter()
        while True:
            if self.busy:
                work(0.0002)
            else:
                time.sleep(0.0002)
            now = time.perf_counter()
            if now - last < TURN_S:
                continue
            over = ended()
            last = time.perf_counter()
            self.waits.append(last - now)
            if over:
                return last - begin


def work(seconds: float) -> None:
    """Hold the GIL with Python code."""
    end = time.perf_counter() + seconds
    while time.perf_counter() < end:
        sum(range(100))
