"""Boundary around a component: its exceptions are logged and do not reach its caller or its siblings."""

from __future__ import annotations

import logging
import time
from types import TracebackType

_REPORT_INTERVAL_S = 60.0

logger = logging.getLogger(__name__)


class Isolation:
    """Logs the exceptions of one component instead of raising them. Not thread-safe.

    A component that fails in every step is reported once a minute for each of its calls. Only ``Exception`` is caught:
    KeyboardInterrupt and SystemExit are raised.

    :param component: name of the component in log lines.
    """

    def __init__(self, component: str) -> None:
        self.component = component
        self._next_report: dict[str, float] = {}

    def guard(self, call: str, consequence: str) -> Guard:
        """Return a context manager around one call of the component.

        :param call: name of the call in the log line.
        :param consequence: effect of an exception of the call, for the log line.
        """
        return Guard(self, call, consequence)

    def report(self, call: str, consequence: str, error: Exception) -> None:
        """Log an exception of a call, with its traceback."""
        now = time.monotonic()
        if now >= self._next_report.get(call, now):
            self._next_report[call] = now + _REPORT_INTERVAL_S
            logger.error("%s raised in %s: %s", self.component, call, consequence, exc_info=error)


class Guard:
    """Context manager that logs and suppresses an exception of its block; see ``Isolation.guard``."""

    def __init__(self, isolation: Isolation, call: str, consequence: str) -> None:
        self.raised = False
        """Whether the block raised; set when the block ends."""
        self._isolation = isolation
        self._call = call
        self._consequence = consequence

    def __enter__(self) -> Guard:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> bool:
        if not isinstance(error, Exception):
            return False
        self.raised = True
        self._isolation.report(self._call, self._consequence, error)
        return True
