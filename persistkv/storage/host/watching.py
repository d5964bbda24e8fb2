"""When the store's side is to be given up, and when it is to be started again. By the clock alone."""

from __future__ import annotations

import enum
import logging
import time

logger = logging.getLogger(__name__)

_CALL_PATIENCE = 10  # times the watchdog's patience that one call of the medium may take
_FIRST_BACKOFF_S = 0.1
_LONGEST_BACKOFF_S = 30.0


class Look(enum.Enum):
    """What a look at one who owes an answer says."""

    FINE = "fine"
    ASK = "ask"
    """Silent for half of the time: it is to be asked whether it is alive."""
    SILENT = "silent"
    """It did not answer that, either."""


class Watchdog:
    """Watches one who owes an answer.

    :param patience_s: how long it may be silent.
    """

    def __init__(self, patience_s: float) -> None:
        self._patience_s = patience_s
        self._heard = 0.0
        self._asked: float | None = None

    def hear(self) -> None:
        """It said something, or nothing was owed until now."""
        self._heard = time.monotonic()
        self._asked = None

    def look(self) -> Look:
        """Whether it has been silent for long. Says ``ASK`` once."""
        now = time.monotonic()
        if self._asked is None:
            if now - self._heard <= self._patience_s / 2:
                return Look.FINE
            self._asked = now
            return Look.ASK
        if now - self._asked <= self._patience_s / 2:
            return Look.FINE
        logger.error("the store's side has not answered for %.1f s; killing it", self._patience_s)
        return Look.SILENT

    def call_hangs(self, longest_s: float) -> bool:
        """Whether a call of its medium takes too long; its loop is alive, so that is given much longer."""
        hangs = longest_s > _CALL_PATIENCE * self._patience_s
        if hangs:
            logger.error("a call of the store's medium has not ended for %.0f s; killing its side", longest_s)
        return hangs


class Backoff:
    """How long to wait before the next start: twice as long each time, until something went well."""

    def __init__(self) -> None:
        self._start_at = 0.0
        self._seconds = _FIRST_BACKOFF_S

    def reset(self) -> None:
        """It works."""
        self._seconds = _FIRST_BACKOFF_S

    def fail(self) -> float:
        """It died, or did not start; for how long nothing is started."""
        seconds = self._seconds
        self._start_at = time.monotonic() + seconds
        self._seconds = min(_LONGEST_BACKOFF_S, 2 * seconds)
        return seconds

    @property
    def over(self) -> bool:
        """Whether it may be started."""
        return time.monotonic() >= self._start_at
