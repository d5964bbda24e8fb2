"""Steps of an idle vLLM engine, which blocks until a request arrives: it exports metrics and events
in steps only."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

from persistkv.integrations.vllm.identity import find_engine_core

_INTERVAL_S = 5.0  # seconds between two requests: a third of Prometheus' usual interval


class StepRequests:
    """Requests of one tier for steps of its idle engine. Any thread may request one."""

    def __init__(self, wake: Callable[[], None]) -> None:
        """:param wake: has the engine ask its tiers for pending work."""
        self.is_waiting = False
        """Whether a step was requested that the engine has not taken yet. Until it does, the tier
        reports pending work."""
        self._wake = wake
        self._ignores_until = 0.0
        """Monotonic time until which requests are ignored, so that an idle
        engine takes few steps."""

    def request(self) -> None:
        """Have the engine take a step; at most one in 5 s."""
        now = time.monotonic()
        if self.is_waiting or now < self._ignores_until:
            return
        self._ignores_until = now + _INTERVAL_S
        # set before the wake, because the engine asks at once whether there is pending work
        self.is_waiting = True
        self._wake()

    def note_step(self) -> None:
        """Note that the engine takes a step."""
        self.is_waiting = False


def _do_nothing() -> None:
    pass


def find_wake() -> Callable[[], None]:
    """Return a function, for any thread, that has the engine which is being built take a step if a
    tier has pending work.

    The function does nothing if the engine runs in the process of its caller, or if its release
    cannot be woken: metrics and events then wait for the next request.
    """
    queue: Any = getattr(find_engine_core(), "input_queue", None)
    if queue is None:
        return _do_nothing
    from vllm.v1.engine import EngineCoreRequestType

    # vLLM's own signal handlers wake the engine in this way
    kind = getattr(EngineCoreRequestType, "WAKEUP", None)
    if kind is None:
        return _do_nothing
    return lambda: queue.put_nowait((kind, None))
