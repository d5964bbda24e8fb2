"""When to try a store again that was judged too slow."""

from __future__ import annotations

from collections.abc import Callable

PROBE_S = 10.0
"""Deadline of a probe in seconds."""
PROBED_KEYS = 128
"""Most blocks that a probe is asked for: more than it reads, unless they are small."""
_FIRST_S = 1.0  # seconds from the first probe to the second
_LONGEST_S = 5.0  # maximum seconds between two probes


class ProbeTimer:
    """Times of the probes of one store, small reads that show how fast it is: one when it is judged
    too slow, then others at growing distances, up to 5 s, one at a time."""

    def __init__(self, clock: Callable[[], float]) -> None:
        """:param clock: returns seconds."""
        self._clock = clock
        self.is_running = False
        """Whether a probe has begun and not ended."""
        self._next_at = 0.0
        """When the next probe is due, on ``clock``."""
        self._distance_s = _FIRST_S
        """Seconds from the next probe to the one after it."""
        self._next_is_small = False
        """Whether the next probe reads one block; otherwise it reads several."""

    @property
    def is_due(self) -> bool:
        """Whether ``begin`` would begin a probe."""
        return not self.is_running and self._clock() >= self._next_at

    def begin(self) -> int:
        """Begin a probe if one is due. Return the number of blocks to ask for, 1 or
        ``PROBED_KEYS``; 0: no probe is due."""
        if not self.is_due:
            return 0
        # alternate the sizes: a small probe shows the latency, a large one the bandwidth
        num_blocks = 1 if self._next_is_small else PROBED_KEYS
        self._next_is_small = not self._next_is_small
        self.is_running = True
        self._next_at = self._clock() + self._distance_s
        self._distance_s = min(_LONGEST_S, 2 * self._distance_s)
        return num_blocks

    def end(self) -> None:
        """Note that the probe has ended, or could not be sent."""
        self.is_running = False

    def reset(self) -> None:
        """Note that a load has ended in time, which shows more than a probe: the next probe is due
        in 1 s."""
        self._next_at = self._clock() + _FIRST_S
        self._distance_s = _FIRST_S
