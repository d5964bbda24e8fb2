"""Supervision of the host by the engine: start, watchdog, kill, restart.

1. The engine sends nothing before it holds a pidfd of the host process, so a process that it cannot
   kill and watch never uses a row.
2. A host that owes an answer or opens the store must send messages: if it sends none for the time
   limit, not even the answer to a ``Ping``, it is killed. The limit is at most 2 s while requests
   wait for loads. While it answers, a call of its medium may take ten times as long. The host is
   also killed if it has not answered a load 2 s after its deadline: a read of a local disk hangs,
   and may write rows for as long as the host lives.
3. From the end of its connection until it is certainly dead, the host's state is ``DYING``: it may
   still use rows.
"""

from __future__ import annotations

import enum
import logging
import math
import time
from collections.abc import Callable
from contextlib import suppress

from persistkv.errors import HostError
from persistkv.storage.host import protocol
from persistkv.storage.host.connection import Connection
from persistkv.storage.host.hosts import KILL_S, Host

logger = logging.getLogger(__name__)

_NAP_S = 0.0005  # between polls while the engine waits for the host to release its rows
# seconds of silence that the watchdog allows while a load is due: the request that waits for it
# could be computing
LOAD_PATIENCE_S = 2.0
# longest time of one call of the medium, as a multiple of the watchdog's limit
_CALL_PATIENCE = 10
_FIRST_BACKOFF_S = 0.1
_LONGEST_BACKOFF_S = 30.0
# seconds for which a host must have been open for the shortest delay of the next start
HEALTHY_S = 60.0


class Watchdog:
    """Timer that detects a host which has to send an answer but is silent.

    After half of the time limit the host gets a ``Ping``. From then on, time that it waits for a
    CPU does not count: on an overloaded machine a host is slow, and killing it would lose accepted
    work.
    """

    def __init__(
        self,
        patience_s: float,
        cpu_wait_s: Callable[[], float],
    ) -> None:
        """:param cpu_wait_s: ``Host.cpu_wait_s`` of the watched host."""
        self.patience_s = patience_s
        """Time limit: seconds that the host may be silent. The owner may change it."""
        self._cpu_wait_s = cpu_wait_s
        self._heard = 0.0
        """Monotonic time of the last message."""
        self._pinged_at: float | None = None
        """``_host_time`` of the unanswered ping; None: no ping is unanswered."""
        self._late_deadline = math.inf
        """The last deadline that was found to have passed; infinity: none was."""
        self._late_since = 0.0
        """``_host_time`` at which ``_late_deadline`` was found to have passed."""

    def restart_timer(self) -> None:
        """Restart the timer. Call it when the host has sent a message, or when an answer becomes
        due."""
        self._heard = time.monotonic()
        self._pinged_at = None

    def _host_time(self) -> float:
        """Return the reading of a clock, in seconds, that stops while the host waits for a CPU."""
        return time.monotonic() - self._cpu_wait_s()

    def is_silent(
        self,
        ping: Callable[[], None],
        *,
        load_due: bool,
    ) -> bool:
        """Return whether the host has been silent for the time limit, so that the caller must kill
        it.

        :param ping: sends a ``Ping``; called once for each silence, after half of the limit.
        :param load_due: whether the host has to answer a load: then the limit is 2 s at most.
        """
        patience_s = self.patience_s
        if load_due:
            patience_s = min(patience_s, LOAD_PATIENCE_S)
        if self._pinged_at is None:
            silence_s = time.monotonic() - self._heard
            if silence_s > patience_s / 2:
                self._pinged_at = self._host_time()
                ping()
            return False
        # In the second half of the limit, only time counts in which the host had a CPU: it may be
        # slow because the machine is overloaded.
        silence_s = self._host_time() - self._pinged_at
        if silence_s <= patience_s / 2:
            return False
        logger.error("the host has not answered for %.1f s; killing it", patience_s)
        return True

    def is_late(self, deadline: float) -> bool:
        """Return whether a load has not ended 2 s after its deadline. A read that began before the
        deadline hangs, and only the end of the host frees its rows. Time that the host waits for a
        CPU does not count.

        :param deadline: the earliest deadline of the loads that are due; infinite if there is none.
        """
        if time.monotonic() <= deadline:
            return False
        now = self._host_time()
        # this deadline was not found to have passed before: count the 2 s from now
        if deadline != self._late_deadline:
            self._late_deadline = deadline
            self._late_since = now
        late_s = now - self._late_since
        if late_s <= LOAD_PATIENCE_S:
            return False
        logger.error(
            "a read has not ended %.1f s after the deadline of its load; killing the host",
            late_s,
        )
        return True

    def call_hangs(self, longest_s: float) -> bool:
        """Return whether the host's oldest backend call, which has run for ``longest_s``, exceeds
        ten times the time limit. The host's loop still answers."""
        hangs = longest_s > _CALL_PATIENCE * self.patience_s
        if hangs:
            logger.error(
                "a call of the medium has not ended for %.0f s; killing the host",
                longest_s,
            )
        return hangs


class State(enum.Enum):
    OPENING = "opening"
    """The host was started and opens the store: lookups miss, jobs are refused."""
    OPEN = "open"
    DYING = "dying"
    """The connection has ended, but the process may still run and use rows: jobs in flight have no
    result yet."""
    DOWN = "down"
    """The host is dead or was never started. If it can be restarted, or could not open the store,
    it is started again when its backoff is over."""
    CLOSED = "closed"
    """The client was closed, or its opening failed: no host is started any more."""


RUNNING = (State.OPENING, State.OPEN)
"""States in which the host opens the store or has it open."""


class _Event(enum.Enum):
    STARTED = "started"
    OPENED = "opened"
    LOST = "lost"
    """The connection has ended, or the host was killed."""
    EXITED = "exited"
    """The lost host is dead, and uses no rows."""
    CLOSED = "closed"


_NEXT_STATE = {
    (State.DOWN, _Event.STARTED): State.OPENING,
    # the client has waited for the exit of a host that did not open, and starts another one
    (State.DYING, _Event.STARTED): State.OPENING,
    (State.OPENING, _Event.OPENED): State.OPEN,
    (State.OPENING, _Event.LOST): State.DYING,
    (State.OPEN, _Event.LOST): State.DYING,
    (State.DYING, _Event.LOST): State.DYING,
    (State.DOWN, _Event.LOST): State.DYING,  # ``abandon`` after a failed start
    (State.DYING, _Event.EXITED): State.DOWN,
    **{(state, _Event.CLOSED): State.CLOSED for state in State},
}
"""The state after an event in a state. A pair that is missing is a defect: it raises KeyError."""


class Supervisor:
    """Starts, watches, kills and restarts the host of one ``StoreClient``."""

    def __init__(
        self,
        host: Host,
        hello: protocol.Hello,
        *,
        watchdog_s: float,
        least_start_s: float,
    ) -> None:
        """:param hello: first message to the host after each start; it opens the store.
        :param watchdog_s: seconds after which a host that has to send an answer, but sends no
            message, is lost. A single call to the storage medium may take ten times as long.
        :param least_start_s: minimum of ``watchdog_s`` while the host opens the store.
        """
        self.host = host
        self.hello = hello
        self.connection = Connection()
        """Connection to the host; closed while no host runs."""
        self.state = State.DOWN
        self.watchdog_s = watchdog_s
        """Time limit of the watchdog while the store is open."""
        self.opening_watchdog_s = max(watchdog_s, least_start_s)
        """Time limit while the host starts and opens the store: it answers nothing before its
        modules are imported."""
        self.watchdog = Watchdog(watchdog_s, host.cpu_wait_s)
        self._backoff_s = _FIRST_BACKOFF_S
        """Seconds by which the next failure delays a start."""
        self._start_at = 0.0
        """Monotonic time before which no host is started."""
        self._opened_at: float | None = None
        """Monotonic time at which the host opened the store; None: it has not."""
        self.uses_rows = False
        """Whether a host may use rows: from the first message to it until it sends ``Ended`` or
        exits."""
        self.open_failed = False
        """Whether the last host could not open the store. Such a host exits by itself, so another
        one may start even if hosts of this kind cannot be killed."""

    def start(self) -> None:
        """Start the host, or raise HostError. The caller must then call ``send_hello`` until it
        returns True."""
        try:
            self.connection = self.host.start()
        except OSError as error:
            raise HostError(f"the host of the store does not start: {error}") from error
        self._enter(_Event.STARTED)
        self.uses_rows = False
        self.open_failed = False
        self.watchdog.patience_s = self.opening_watchdog_s
        self.watchdog.restart_timer()

    def _enter(self, event: _Event) -> None:
        self.state = _NEXT_STATE[self.state, event]

    def send_hello(self) -> bool:
        """Send the host its first message if it is ready and has not received it; return whether it
        has been sent."""
        if not self.uses_rows and self.host.ready():
            self.connection.send(self.hello)
            self.uses_rows = True
        return self.uses_rows

    def opened(self) -> None:
        """Record that the host has opened the store: the shorter time limit applies from now on."""
        self._enter(_Event.OPENED)
        self._opened_at = time.monotonic()
        self.watchdog.patience_s = self.watchdog_s

    def end_failed_open(self) -> None:
        """End a host that could not open the store."""
        self.open_failed = True
        self.mark_lost()

    def mark_lost(self) -> None:
        """Kill the host and close the connection. The host may use rows until ``detect_exit``
        returns True."""
        self.host.kill()
        self.connection.close()
        self._enter(_Event.LOST)
        if self._opened_at is not None:
            open_s = time.monotonic() - self._opened_at
            # the host was open for long enough: the next start has the shortest delay
            if open_s >= HEALTHY_S:
                self._backoff_s = _FIRST_BACKOFF_S
        self._opened_at = None

    def detect_exit(self) -> bool:
        """Return True once, at the first call that finds a killed host dead; otherwise False."""
        is_dead = self.state is State.DYING and self.host.wait(0.0)
        if not is_dead:
            return False
        self._enter(_Event.EXITED)
        self.uses_rows = False
        seconds = self.delay_start()
        # the client itself reports a store that did not open
        if self.host.restartable and not self.open_failed:
            logger.warning(
                "the host process of %s ended; lookups miss until another one is open, in %.1f s "
                "or more",
                self.hello.url.partition("?")[0],
                seconds,
            )
        return True

    @property
    def may_restart(self) -> bool:
        """Whether another start may follow the end of the host."""
        return self.host.restartable or self.open_failed

    def maybe_restart(self) -> bool:
        """Restart a dead host if its backoff is over; return whether a start was attempted."""
        if self.state is not State.DOWN or not self.may_restart:
            return False
        if time.monotonic() < self._start_at:
            return False
        try:
            self.start()
        except HostError as error:
            logger.error("%s", error)
            self.delay_start()
        return True

    def delay_start(self) -> float:
        """Delay the next start; return for how many seconds: 0.1, doubled with each further
        failure, at most 30.

        A host that was open for 60 s begins again at 0.1. A single answer does not: a job that
        kills each host, or a crash soon after each start, would restart it ten times a second.
        """
        seconds = self._backoff_s
        self._backoff_s = min(_LONGEST_BACKOFF_S, 2 * seconds)
        self._start_at = time.monotonic() + seconds
        return seconds

    def abandon(self) -> None:
        """Kill the host without finishing its work, and wait at most 5 s for its exit."""
        self.mark_lost()
        self._end(exited=self.host.wait(KILL_S))

    def close(self, timeout_s: float) -> bool:
        """Have the host release the rows, commit its work and exit; return whether it exited within
        the timeout.

        After the timeout, a host process that has released the rows may continue to commit; any
        other is killed. The kernel ends a host process 20 s after it began to close the store, or
        60 s if the store is remote.
        """
        deadline = time.monotonic() + timeout_s
        self.connection.send(protocol.End())
        while self._awaits_release() and time.monotonic() < deadline:
            time.sleep(_NAP_S)
        self.connection.close()
        left_s = max(0.0, deadline - time.monotonic())
        exited_in_time = self.host.wait(left_s)
        has_exited = exited_in_time
        # do not kill a host that has released the rows: it commits accepted work
        if not has_exited and self.uses_rows:
            self.host.kill()
            has_exited = self.host.wait(KILL_S)
        self._end(exited=has_exited)
        return exited_in_time

    def _awaits_release(self) -> bool:
        """Receive messages, and clear ``uses_rows`` at ``Ended``. Return whether to wait longer for
        it: it has not arrived, and the connection has not ended."""
        # a malformed message ends the connection, and so the wait
        with suppress(HostError):
            messages = self.connection.receive()
            if any(isinstance(message, protocol.Ended) for message in messages):
                self.uses_rows = False
        return self.uses_rows and not self.connection.ended

    def _end(self, *, exited: bool) -> None:
        """Enter the last state.

        :param exited: whether the host is dead, so that it uses no rows.
        """
        if exited:
            self.uses_rows = False
        self.host.release()
        self._enter(_Event.CLOSED)

    def is_lost(
        self,
        *,
        owes: bool,
        load_due: bool,
        deadline: float,
    ) -> bool:
        """Return whether the host has died, is silent for too long, or keeps rows of a load for too
        long. The caller must then call ``mark_lost``.

        :param owes: whether the host has to answer a job or a request end.
        :param load_due: whether it has to answer a load job.
        :param deadline: the earliest deadline of the loads that are due; infinite if there is none.
        """
        if self.state not in RUNNING:
            return False
        if self.connection.ended:
            return True
        # a thread cannot be killed, so its silence does not matter
        if not self.host.restartable:
            return False
        # a host that has nothing to answer may be silent
        must_answer = owes or self.state is State.OPENING
        if not must_answer:
            return False
        if load_due and self.watchdog.is_late(deadline):
            return True
        # a load must be answered sooner than other work, so its host may be silent for less time
        return self.watchdog.is_silent(
            ping=lambda: self.connection.send(protocol.Ping()),
            load_due=load_due,
        )
