"""Time, randomness and locks of one handle of a shared store. A simulation replaces them."""

from __future__ import annotations

import random
import threading
import time
from contextlib import AbstractContextManager
from typing import NamedTuple

ROUNDING_S = 1.0  # media may round their times to a second
AGREEING_S = 3600.0  # seconds: clocks that differ by less agree


class Clock:
    """The machine's clocks, random numbers and locks."""

    random: random.Random = random.SystemRandom()
    """Source of jitter and of the random part of names. It must not repeat after a restored
    snapshot of the machine: the default reads the operating system's source."""

    def monotonic(self) -> float:
        """Return seconds since an arbitrary time; the clock never jumps."""
        return time.monotonic()

    def wall(self) -> float:
        """Return the machine's idea of the time, in seconds since the epoch. It may be wrong."""
        return time.time()

    def sleep(self, seconds: float) -> None:
        time.sleep(seconds)

    def lock(self) -> AbstractContextManager[object]:
        """Return a new reentrant lock."""
        return threading.RLock()


class _ReplyTime(NamedTuple):
    """Time of the medium in a reply."""

    server_time: float
    """Seconds since the epoch, on the medium's clock."""
    arrived_at: float
    """Monotonic time of the reply's arrival."""


class ServerTime:
    """The medium's clock, as its replies have shown it. Thread-safe.

    Media round their times to a second. The estimate therefore moves backwards only by more than a
    second: the medium's own clock has moved backwards, or a reply was late.
    """

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._newest: _ReplyTime | None = None
        """Time in the newest reply; None: no reply yet."""
        self._confirmed: _ReplyTime | None = None
        """The latest time that agreed with the machine's clock when it arrived; None: none yet."""

    def learn(self, server_time: float) -> None:
        """Record a time that the medium has reported in the reply to a call that has just
        returned."""
        estimate = self.now()
        # the reply was probably rounded down, so the estimate is more exact
        if server_time < estimate <= server_time + ROUNDING_S:
            server_time = estimate
        self._newest = _ReplyTime(server_time, self._clock.monotonic())
        self._note_confirmed(server_time)

    def _note_confirmed(self, server_time: float) -> None:
        """Remember a time of the medium if the machine's clock confirms it, and if it is later than
        all times that were confirmed before."""
        if not self._is_confirmed(server_time):
            return
        if server_time > self._extrapolate(self._confirmed):
            self._confirmed = _ReplyTime(server_time, self._clock.monotonic())

    def _is_confirmed(self, server_time: float) -> bool:
        """Return whether the machine's clock agrees with a time of the medium at present."""
        difference_s = abs(server_time - self._clock.wall())
        return difference_s < AGREEING_S

    def learn_least(self, server_time: float) -> None:
        """Record a time that has passed on the medium's clock: that of a blob in a list. It is the
        present time or earlier, so it only moves the estimate forward."""
        if server_time > self.now():
            self.learn(server_time)
        else:
            # A wrong reply may have moved the estimate far into the future. If this time is right
            # instead, the machine's clock confirms it.
            self._note_confirmed(server_time)

    def now(self) -> float:
        """Return the medium's time in seconds since the epoch; 0 if no reply has shown it."""
        return self._extrapolate(self._newest)

    def now_or_wall(self) -> float:
        """Return the medium's time; the machine's time if no reply has shown it."""
        return self.now() or self._clock.wall()

    def time_of_use(self) -> float:
        """Return the time of a use at present: that of the newest reply, or a later one that the
        medium has shown before and that the machine's clock still confirms. 0 if no time is known.

        The newest reply may come from a proxy that dates it a year back: packs that are used
        meanwhile would expire as soon as its clock is right again. A time that is too late does no
        harm, because readers limit it to that of the object that carries it.
        """
        now = self.now()
        confirmed = self._extrapolate(self._confirmed)
        if self._is_confirmed(confirmed):
            return max(now, confirmed)
        return now

    def _extrapolate(self, reply: _ReplyTime | None) -> float:
        """Return the time in a reply plus the seconds since its arrival; 0 for None."""
        if reply is None:
            return 0.0
        return reply.server_time + self._clock.monotonic() - reply.arrived_at
