"""Boundary around a component: its exceptions are logged and do not reach its caller or its
siblings."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, TypeVar

T = TypeVar("T")

_REPORT_INTERVAL_S = 60.0  # seconds between two reports of one call

logger = logging.getLogger(__name__)


@dataclass
class GuardedCall:
    """Result of the calls in a block of ``Isolation.guard``."""

    raised: bool = False
    """Whether the block raised; set when the block ends."""


class Isolation:
    """Logs the exceptions of one component instead of raising them. Not thread-safe.

    Exceptions of the same call are logged at most once a minute; the others are dropped. Only
    ``Exception`` is caught: KeyboardInterrupt and SystemExit are raised.

    :param component: name of the component in log lines.
    """

    def __init__(self, component: str) -> None:
        self.component = component
        self._next_report: dict[str, float] = {}
        """By name of a call, the monotonic time from which its next exception is logged."""

    @contextmanager
    def guard(self, call: str, consequence: str) -> Iterator[GuardedCall]:
        """Return a context manager around one call of the component that logs and suppresses its
        exception.

        :param call: name of the call in the log line.
        :param consequence: effect of an exception of the call, for the log line.
        """
        guarded = GuardedCall()
        try:
            yield guarded
        except Exception as error:
            guarded.raised = True
            self.report(call, consequence, error)

    def attempt(
        self,
        call: str,
        method: Callable[..., T],
        *arguments: Any,
        default: T,
        consequence: str,
        **keywords: Any,
    ) -> T:
        """Return the result of ``method(*arguments, **keywords)``; if it raises, log the exception
        and return ``default``.

        :param call: name of the call in the log line. The method may have none, or that of a
            decorator.
        :param consequence: effect of an exception, for the log line.
        """
        try:
            return method(*arguments, **keywords)
        except Exception as error:
            self.report(call, consequence, error)
            return default

    def report(
        self,
        call: str,
        consequence: str,
        error: Exception,
    ) -> None:
        """Log an exception of a call with its traceback, unless an exception of the same call was
        logged within the last minute."""
        now = time.monotonic()
        if now >= self._next_report.get(call, now):
            self._next_report[call] = now + _REPORT_INTERVAL_S
            logger.error(
                "%s raised in %s: %s", self.component, call, consequence, exc_info=error
            )
