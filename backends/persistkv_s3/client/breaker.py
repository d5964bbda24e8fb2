"""Circuit breaker: while a server fails or is slow, requests fail at once.

    closed     requests pass. Opens after 5 bad answers in a row, or if 10 of the last 20 were bad
    open       no request passes, for a pause that doubles each time, up to 30 s
    half-open  one request passes. Good answer: closed. Bad answer: open again

A bad answer is a failure caused by the server, or an answer that took longer than ``slow_s``. Thread-safe.
"""

from __future__ import annotations

import logging
import random
import threading
import time
from collections import deque
from collections.abc import Callable
from enum import Enum

logger = logging.getLogger(__name__)

_IN_A_ROW = 5
_WINDOW = 20
_FIRST_PAUSE_S = 1.0
_LONGEST_PAUSE_S = 30.0


class BreakerState(Enum):
    """States of a breaker, see the top of this file."""

    CLOSED = "closed"
    OPEN = "open"
    HALF_OPEN = "half-open"


class Breaker:
    """See the top of this file.

    :param name: of the server, for the log.
    :param slow_s: seconds after which even a correct answer is bad.
    """

    def __init__(
        self,
        name: str,
        slow_s: float,
        *,
        clock: Callable[[], float] = time.monotonic,
        jitter: Callable[[], float] = random.random,
    ) -> None:
        self._name = name
        self._slow_s = slow_s
        self._clock = clock
        self._jitter = jitter
        self._lock = threading.Lock()
        self._state = BreakerState.CLOSED
        self._recent: deque[bool] = deque(maxlen=_WINDOW)
        self._pause_s = _FIRST_PAUSE_S
        self._opens_until = 0.0
        self._probe_until = 0.0
        self.opened = 0
        """Number of times that it opened."""
        self.refused = 0
        """Number of requests that were refused."""

    @property
    def state(self) -> BreakerState:
        """The present state."""
        with self._lock:
            if self._state is BreakerState.OPEN and self._clock() >= self._opens_until:
                return BreakerState.HALF_OPEN
            return self._state

    def admit(self) -> bool:
        """Return whether a request may be made now. While half-open, one may; others are refused until ``record``."""
        with self._lock:
            now = self._clock()
            if self._state is BreakerState.CLOSED:
                return True
            waits = self._opens_until if self._state is BreakerState.OPEN else self._probe_until
            if now < waits:
                self.refused += 1
                return False
            self._state = BreakerState.HALF_OPEN
            self._probe_until = now + _LONGEST_PAUSE_S  # a probe whose thread died must not block it for ever
            return True

    def record(self, *, well: bool, seconds: float) -> None:
        """Record the result of an admitted request."""
        bad = not well or seconds > self._slow_s
        with self._lock:
            self._recent.append(bad)
            if self._state is BreakerState.OPEN:
                return  # it was sent before the breaker opened
            if self._state is BreakerState.HALF_OPEN:
                if bad:
                    self._open()
                else:
                    self._close()
            elif bad and self._too_bad():
                self._open()

    def _too_bad(self) -> bool:
        recent = list(self._recent)
        in_a_row = len(recent) >= _IN_A_ROW and all(recent[-_IN_A_ROW:])
        return in_a_row or sum(recent) * 2 >= _WINDOW

    def _open(self) -> None:
        if self._state is BreakerState.CLOSED:
            self.opened += 1
            logger.warning("%s fails or is slow: requests are held back until it answers again", self._name)
        self._opens_until = self._clock() + self._pause_s * (0.5 + 0.5 * self._jitter())
        self._pause_s = min(2 * self._pause_s, _LONGEST_PAUSE_S)
        self._state = BreakerState.OPEN

    def _close(self) -> None:
        logger.warning("%s answers again", self._name)
        self._state = BreakerState.CLOSED
        self._recent.clear()
        self._pause_s = _FIRST_PAUSE_S
