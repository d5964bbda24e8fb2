"""When to try a store again that was judged too slow."""

from __future__ import annotations

from collections.abc import Callable

PROBE_S = 10.0
"""Deadline of a probe in seconds."""
_LOST_S = (
    2 * PROBE_S
)  # until the answer to a probe counts as lost, as when the host ended
_FIRST_S = 1.0
_LONGEST_S = 5.0


class ProbeTimer:
    """Times of the probes of one store: one when it is judged too slow, then others at growing
    distances, up to 5 s, one at a time."""

    def __init__(self, clock: Callable[[], float]) -> None:
        """:param clock: returns seconds."""
        self._clock = clock
        self._lost_at: float | None = None  # None: no probe runs
        self._next_at = 0.0
        self._distance_s = _FIRST_S
        self.is_small = True
        """Whether the probe that begins now reads one block, to show the latency; each second one
        reads more, to show the bandwidth."""

    def begin(self) -> bool:
        """Return whether the caller must begin a probe now."""
        now = self._clock()
        is_running = self._lost_at is not None and now < self._lost_at
        if is_running or now < self._next_at:
            return False
        self.is_small = not self.is_small
        self._lost_at = now + _LOST_S
        self._next_at = now + self._distance_s
        self._distance_s = min(_LONGEST_S, 2 * self._distance_s)
        return True

    def end(self) -> None:
        """The probe has ended."""
        self._lost_at = None

    def reset(self) -> None:
        """A load was chosen again: the next probe is due at once."""
        self._next_at = 0.0
        self._distance_s = _FIRST_S
