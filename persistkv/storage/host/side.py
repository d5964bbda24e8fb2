"""The store's side as an engine has it: started, watched, given up, and started again.

1. What owes an answer, or is to open, and is silent is killed, unless its loop answers that it waits for its medium.
2. From the end of its connection until it is certainly dead it is ``DYING``: it may still use rows.
"""

from __future__ import annotations

import enum
import logging
from typing import Any

from persistkv.errors import HostError
from persistkv.storage.host import protocol
from persistkv.storage.host.answers import ClientCounters
from persistkv.storage.host.connection import Connection
from persistkv.storage.host.launch import Host
from persistkv.storage.host.watching import Backoff, Look, Watchdog

logger = logging.getLogger(__name__)

KILL_S = 5.0  # seconds to wait for the end of what was killed


class State(enum.Enum):
    """Where the store's side stands."""

    OPENING = "opening"
    """Started, and reading its catalogue: nothing is held yet, jobs are refused."""
    OPEN = "open"
    DYING = "dying"
    """Its connection ended, its process may still run: jobs in flight are not answered yet."""
    DOWN = "down"
    """Dead; started again once its backoff is over."""
    CLOSED = "closed"


class Side:
    """See the top of this file."""

    def __init__(
        self,
        host: Host,
        hello: protocol.Hello,
        counters: ClientCounters,
        *,
        watchdog_s: float,
        least_start_s: float,
    ) -> None:
        """Nothing is started yet; the times are those of ``StoreClient``."""
        self.host = host
        self.hello = hello
        """What each start is sent."""
        self.connection: Connection | None = None
        self.state = State.DOWN
        self._counters = counters
        self._watchdog = Watchdog(watchdog_s)
        self._opening_watchdog = Watchdog(max(watchdog_s, least_start_s))
        self._backoff = Backoff()

    # Life

    def start(self) -> None:
        """Start it, and have it open the store.

        :raises HostError: it cannot be started.
        """
        self.connection = self.host.start()
        self.connection.send(self.hello)
        self.state = State.OPENING
        self._opening_watchdog.hear()

    def opened(self) -> None:
        """It says that the store is open."""
        self.state = State.OPEN

    def lose(self) -> None:
        """The connection is of no use any more; its process may still touch rows until it is dead."""
        if self.connection is not None:
            self.connection.close()
        self.host.kill()
        self.state = State.DYING

    def is_buried(self) -> bool:
        """Whether it is certain, since this call, that it is dead."""
        if self.state is not State.DYING or not self.host.dead():
            return False
        self.state = State.DOWN
        seconds = self._backoff.fail()
        if self.host.restartable:
            logger.warning("the store's side died; lookups miss until it is back, in %.1f s", seconds)
        return True

    def come_back(self) -> None:
        """Start it again, where it is time to."""
        if self.state is not State.DOWN or not self.host.restartable or not self._backoff.over:
            return
        self._counters.restarts += 1
        try:
            self.start()
        except HostError as error:
            logger.error("%s", error)
            self._backoff.fail()

    def works(self) -> None:
        """It did a job: should it die, it is started again soon."""
        self._backoff.reset()

    def abandon(self) -> None:
        """End it, whatever it does."""
        if self.connection is not None:
            self.connection.close()
        self.host.kill()
        self.host.wait(KILL_S)
        self._release()

    def close(self, timeout_s: float) -> bool:
        """Let it finish, and end; whether it did so by itself in time. It is killed otherwise."""
        if self.connection is not None:
            self.connection.close()
        self.state = State.CLOSED
        ended = self.host.wait(timeout_s)
        if not ended:
            self.host.kill()
            self.host.wait(KILL_S)
        self._release()
        return ended

    def _release(self) -> None:
        self.connection = None
        self.host.release()
        self.state = State.CLOSED

    # Messages

    def send(self, message: protocol.ToStore) -> None:
        """Hand a message over, where there is anybody to take it. Never waits."""
        if self.connection is not None:
            self.connection.send(message)

    def receive(self) -> list[Any]:
        """What has arrived, or some of it."""
        messages: list[Any] = []
        if self.connection is not None:
            try:
                messages = self.connection.receive()
            except HostError as error:
                logger.error("the store's side sent garbage: %s", error)
        if messages:
            self._watchdog.hear()
            self._opening_watchdog.hear()
        return messages

    @property
    def congested(self) -> bool:
        """Whether it takes nothing just now."""
        return self.connection is None or self.connection.congested

    def owe(self) -> None:
        """It owes an answer from now on, and did not before."""
        self._watchdog.hear()

    def is_lost(self, *, owes: bool) -> bool:
        """Look after it: whether it is to be given up. ``lose`` is the caller's."""
        if self.connection is None or self.state not in (State.OPENING, State.OPEN):
            return False
        if self.connection.ended:
            return True
        if not (owes or self.state is State.OPENING) or not self.host.restartable:
            return False
        look = self._watching.look()
        if look is Look.ASK:
            self.send(protocol.Ping())
        return look is Look.SILENT

    def hangs(self, longest_s: float) -> bool:
        """It says for how long the oldest call of its medium has been running: whether that is too long."""
        return self._watching.call_hangs(longest_s)

    @property
    def _watching(self) -> Watchdog:
        return self._opening_watchdog if self.state is State.OPENING else self._watchdog
