"""The engine's side of a hosted store.

Invariants of this file:

1. No call waits, but those that take a timeout. No thread is started (``ThreadHost`` aside).
2. Every job that was submitted is answered exactly once by ``poll``, whatever happens to the store's side.
3. A job is answered as failed only when its rows are certainly not used: refused before it was sent, answered by the
   store's side, or that side is known dead.
4. The replica of the index holds a key from its ``Stored`` to its ``Removed``, and none while nothing is open.

Used from one thread, the scheduler's. Refused after a fork.
"""

from __future__ import annotations

import enum
import logging
import os
import time
from array import array
from collections.abc import Collection, Sequence
from typing import Any, NamedTuple

from persistkv.errors import HostError, PersistKVError
from persistkv.storage.host import protocol
from persistkv.storage.host.answers import ClientCounters, JobOutcome, StoreStats, open_error
from persistkv.storage.host.launch import Host
from persistkv.storage.host.protocol import Connection
from persistkv.storage.keys import PackedKeys

logger = logging.getLogger(__name__)

_FIRST_BACKOFF_S = 0.1
_LONGEST_BACKOFF_S = 30.0
_TOUCHED_A_STEP = 2_048  # keys in a step's message: some 75 KB
_MOST_TOUCHED = 65_536  # keys that wait to be said
_NAP_S = 0.0005  # between polls of the calls that wait


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


class _Flight(NamedTuple):
    keys: Sequence[bytes]
    num_bytes: int
    begin: float
    is_store: bool


class StoreClient:
    """See the top of this file."""

    def __init__(self, host: Host, hello: protocol.Hello, *, max_queue_bytes: int, watchdog_s: float = 60.0) -> None:
        """Nothing is started yet.

        :param max_queue_bytes: bound on the raw bytes of store jobs in flight; a job past it is refused, unless it is
            the only one.
        :param watchdog_s: a store's side that owes an answer and is silent for so long is killed and started again.
        """
        self.counters = ClientCounters()
        self.notices: list[str] = []
        """Lines for a person that opening gave, such as what differs from the nearest namespace."""
        self._host = host
        self._hello = hello
        self._max_queue_bytes = max_queue_bytes
        self._watchdog_s = watchdog_s
        self._pid = os.getpid()
        self._connection: Connection | None = None
        self._state = State.DOWN
        self._backoff_s = _FIRST_BACKOFF_S
        self._start_at = 0.0
        self._held: set[bytes] = set()
        self._arriving: set[bytes] = set()
        self._touched: set[bytes] = set()
        self._flights: dict[int, _Flight] = {}
        self._queued_bytes = 0
        self._outcomes: list[JobOutcome] = []
        self._stored: list[bytes] = []
        self._removed: list[bytes] = []
        self._persisted: dict[str, bool] = {}
        self._ending: set[str] = set()
        self._answers: dict[int, Any] = {}
        self._next_token = 0
        self._heard = 0.0
        self._open_error: PersistKVError | None = None

    # Opening

    def open(self, timeout_s: float = 60.0) -> None:
        """Start the store's side and wait until its namespace is open.

        :raises ConfigurationError: a bad URL, option or codec.
        :raises IdentityMismatchError: as ``strict_identity`` asks.
        :raises StoreError: the store cannot be opened.
        :raises HostError: it did not start, died, or did not answer in time. Nothing is left running.
        """
        self._check_process()
        self._start()
        deadline = time.monotonic() + timeout_s
        while self._state is State.OPENING and time.monotonic() < deadline:
            if not self._receive():
                time.sleep(_NAP_S)
        if self._state is State.OPEN:
            return
        reason = f"did not open within {timeout_s} s" if self._state is State.OPENING else "died while it opened"
        error = self._open_error or HostError(f"the store's side {reason}")
        self._abandon()
        raise error

    def _start(self) -> None:
        self._connection = self._host.start()
        self._connection.send(self._hello)
        self._state = State.OPENING

    def _abandon(self) -> None:
        if self._connection is not None:
            self._connection.close()
        self._host.kill()
        self._host.wait(5.0)
        self._connection = None
        self._host.release()
        self._state = State.CLOSED

    @property
    def state(self) -> State:
        """Where the store's side stands, as of the last ``poll``."""
        return self._state

    def _check_process(self) -> None:
        if os.getpid() != self._pid:
            raise HostError("this store was opened before a fork; open it anew in the child")

    # Jobs

    def contains(self, key: bytes) -> bool:
        """Whether the key is durable and can be asked for: one probe of the replica."""
        return key in self._held

    def __len__(self) -> int:
        return len(self._held)

    def submit_store(
        self,
        job_id: int,
        request: str,
        keys: Sequence[bytes],
        block_ids: Sequence[int],
        depths: Sequence[int] | None,
        num_bytes: int,
    ) -> None:
        """Hand rows over to be persisted; they are read until the job is answered.

        :param depths: for each key, the blocks of its group before it; None where nobody can tell.
        :param num_bytes: raw bytes of the blocks, for the bound on the queue.
        :raises HostError: after a fork.
        :raises ValueError: an empty key; nothing was submitted.
        """
        self._check_process()
        self.counters.store_jobs += 1
        if self._state is not State.OPEN or 0 < self._queued_bytes > self._max_queue_bytes - num_bytes:
            self._refuse(job_id, keys, num_bytes)
            return
        depth_bytes = b"" if depths is None else _joined(depths)
        message = protocol.StoreJob(job_id, request, PackedKeys.of(keys), _joined(block_ids), depth_bytes)
        self._owe()
        self._flights[job_id] = _Flight(keys, num_bytes, time.monotonic(), True)
        self._queued_bytes += num_bytes
        self._send(message)

    def submit_load(self, job_id: int, keys: Sequence[bytes], block_ids: Sequence[int]) -> None:
        """Have rows filled; they are written until the job is answered.

        :raises HostError: after a fork.
        """
        self._check_process()
        self.counters.load_jobs += 1
        if self._state is not State.OPEN:
            self._refuse(job_id, keys, 0)
            return
        message = protocol.LoadJob(job_id, PackedKeys.of(keys), _joined(block_ids))
        self._owe()
        self._flights[job_id] = _Flight(keys, 0, time.monotonic(), False)
        self._send(message)

    def touch(self, keys: Collection[bytes]) -> None:
        """Blocks were used: what was used last is evicted last. The next calls of ``poll`` say so; where too many wait,
        some are not said.

        :raises HostError: after a fork.
        """
        self._check_process()
        if self._state is State.OPEN and len(self._touched) + len(keys) <= _MOST_TOUCHED:
            self._touched |= self._held.intersection(keys)

    def _send_touches(self) -> None:
        """At most one message, of bounded length."""
        if self._touched:
            keys = [self._touched.pop() for _ in range(min(len(self._touched), _TOUCHED_A_STEP))]
            self._send(protocol.Touch(PackedKeys.of(keys)))

    def end_request(self, end: protocol.EndRequest) -> None:
        """The request stores nothing more; its manifest is written with what it staged.

        :raises HostError: after a fork.
        """
        self._check_process()
        if self._state is not State.OPEN:
            self._persisted[end.request] = False
            return
        self._owe()
        self._ending.add(end.request)
        self._send(end)

    def _refuse(self, job_id: int, keys: Sequence[bytes], num_bytes: int) -> None:
        self.counters.refused_jobs += 1
        self.counters.refused_bytes += num_bytes
        self._outcomes.append(JobOutcome(job_id, list(keys), True, 0, 0.0))

    def _owe(self) -> None:
        """An answer is owed from now on, where none was."""
        if not (self._flights or self._ending):
            self._heard = time.monotonic()

    def _send(self, message: protocol.ToStore) -> None:
        if self._connection is not None:
            self._connection.send(message)

    # The step

    def poll(self) -> list[JobOutcome]:
        """Once a step: take what has arrived, look after the store's side, and hand over the jobs that ended.

        :raises HostError: after a fork.
        """
        self._check_process()
        if self._state in (State.OPENING, State.OPEN):
            self._receive()
        if self._state is State.OPEN:
            self._send_touches()
        if self._state is State.DYING and self._host.dead():
            self._mourn()
        if self._state is State.DOWN and self._host.restartable and time.monotonic() >= self._start_at:
            self._restart()
        outcomes, self._outcomes = self._outcomes, []
        return outcomes

    @property
    def num_jobs(self) -> int:
        """Jobs that the store's side has not answered yet."""
        return len(self._flights)

    @property
    def has_pending_work(self) -> bool:
        """Whether ``poll`` has something to wait for."""
        return bool(self._flights or self._ending or self._outcomes)

    def _receive(self) -> bool:
        """Take what has arrived; tells whether there was anything."""
        connection = self._connection
        if connection is None:
            return False
        messages: list[Any] = []
        try:
            messages = connection.receive()
        except HostError as error:
            logger.error("the store's side sent garbage: %s", error)
        self._take_all(connection, messages)
        self._check_health(connection)
        return bool(messages)

    def _take_all(self, connection: Connection, messages: list[Any]) -> None:
        if messages:
            self._heard = time.monotonic()
        try:
            for message in messages:
                self._take(message)
        except (ValueError, TypeError, PersistKVError) as error:
            logger.error("the store's side sent what makes no sense: %s", error)
            connection.close()

    def _check_health(self, connection: Connection) -> None:
        if self._state not in (State.OPENING, State.OPEN):
            return
        if connection.ended:
            self._lose()
        elif self._is_stuck():
            logger.error("the store's side has not answered for %.0f s; killing it", self._watchdog_s)
            self._lose()

    def _is_stuck(self) -> bool:
        """Silent, although it owes an answer. One that answers slowly is not stuck."""
        if not (self._flights or self._ending) or not self._host.restartable:
            return False
        return time.monotonic() - self._heard > self._watchdog_s

    def _take(self, message: Any) -> None:
        match message:
            case protocol.JobDone():
                self._finish(message)
            case protocol.Stored():
                keys = message.keys.unpack()
                (self._held if self._state is State.OPEN else self._arriving).update(keys)
                if self._state is State.OPEN or self.counters.restarts:  # ``_lose`` told that they had gone
                    self._stored += keys
            case protocol.Removed():
                keys = message.keys.unpack()
                (self._held if self._state is State.OPEN else self._arriving).difference_update(keys)
                self._gone(keys)
            case protocol.Persisted():
                self._ending.discard(message.request)
                self._persisted[message.request] = message.whole
            case protocol.Flushed() | protocol.HostStats():
                self._answers[message.token] = message
            case protocol.Opened():
                self._opened(message)
            case protocol.OpenFailed():
                self._open_error = open_error(message)
                logger.warning("the store does not open: %s", self._open_error)
                self._lose()
            case protocol.Notice():
                logger.log(message.level, "%s", message.text)

    def _finish(self, done: protocol.JobDone) -> None:
        flight = self._flights.pop(done.job_id, None)
        if flight is None:
            return
        failed = done.failed.unpack()
        num_bytes = done.num_bytes
        if flight.is_store:
            self._queued_bytes -= flight.num_bytes
            num_bytes = flight.num_bytes * (len(flight.keys) - len(failed)) // max(1, len(flight.keys))
        self._backoff_s = _FIRST_BACKOFF_S
        self._outcomes.append(JobOutcome(done.job_id, failed, False, num_bytes, time.monotonic() - flight.begin))

    def _opened(self, opened: protocol.Opened) -> None:
        self._state = State.OPEN
        self._held, self._arriving = self._arriving, set()
        if opened.notice and opened.notice not in self.notices:
            self.notices.append(opened.notice)
            logger.warning("%s", opened.notice)

    # Death and return

    def _lose(self) -> None:
        """The connection is of no use any more; its process may still touch rows until it is dead."""
        if self._connection is not None:
            self._connection.close()
        self._host.kill()
        self._state = State.DYING
        self._gone(self._held)
        self._held, self._arriving, self._touched = set(), set(), set()

    def _mourn(self) -> None:
        """It is dead: the rows of its jobs are free, what it did not report never happened."""
        self.counters.lost_jobs += len(self._flights)
        now = time.monotonic()
        for job_id, flight in self._flights.items():
            self._outcomes.append(JobOutcome(job_id, list(flight.keys), True, 0, now - flight.begin))
        self._persisted.update(dict.fromkeys(self._ending, False))
        self._flights.clear()
        self._ending.clear()
        self._queued_bytes = 0
        self._state = State.DOWN
        self._start_at = now + self._backoff_s
        if self._host.restartable:
            logger.warning("the store's side died; lookups miss until it is back, in %.1f s", self._backoff_s)
        self._backoff_s = min(_LONGEST_BACKOFF_S, 2 * self._backoff_s)

    def _restart(self) -> None:
        self.counters.restarts += 1
        try:
            self._start()
        except HostError as error:
            logger.error("%s", error)
            self._start_at = time.monotonic() + self._backoff_s
            self._backoff_s = min(_LONGEST_BACKOFF_S, 2 * self._backoff_s)

    # News

    def _gone(self, keys: Collection[bytes]) -> None:
        """News tells what is there in the end: a key that came and went since it was last taken only went."""
        if self._stored:
            gone = set(keys)
            self._stored = [key for key in self._stored if key not in gone]
        self._removed += keys

    def take_stored(self) -> list[bytes]:
        """Keys that became durable since the last call; those that opening found are not among them."""
        stored, self._stored = self._stored, []
        return stored

    def take_removed(self) -> list[bytes]:
        """Keys that went since the last call."""
        removed, self._removed = self._removed, []
        return removed

    def take_persisted(self) -> dict[str, bool]:
        """Requests whose end was dealt with since the last call, and whether the whole of their context is durable."""
        persisted, self._persisted = self._persisted, {}
        return persisted

    # Calls that wait, for the end of a program, tests and tools

    def flush(self, timeout_s: float) -> bool:
        """Wait until all that was submitted is durable or dropped; False where the time was too short.

        Jobs that end meanwhile are handed over by the next ``poll``.
        """
        token = self._token()
        self._send(protocol.Flush(token))
        return self._await(token, timeout_s) is not None

    def stats(self, timeout_s: float = 5.0) -> StoreStats:
        """Totals of both sides."""
        token = self._token()
        if self._state is State.OPEN:
            self._send(protocol.AskStats(token))
            return StoreStats(self._state.value, self.counters, self._await(token, timeout_s))
        return StoreStats(self._state.value, self.counters, None)

    def _token(self) -> int:
        self._check_process()
        self._next_token += 1
        return self._next_token

    def _await(self, token: int, timeout_s: float) -> Any:
        deadline = time.monotonic() + timeout_s
        while self._state is State.OPEN:
            self._receive()
            if token in self._answers:
                return self._answers.pop(token)
            if time.monotonic() >= deadline:
                break
            time.sleep(_NAP_S)
        return None

    def close(self, timeout_s: float = 60.0) -> bool:
        """Let the store's side commit what it was given, and end; idempotent.

        :returns: whether it ended by itself in time; it is killed otherwise, and what it had not committed is lost.
        """
        if self._state is State.CLOSED or os.getpid() != self._pid:
            return True
        deadline = time.monotonic() + timeout_s
        if self._state is State.OPEN:
            self.flush(timeout_s)
        if self._connection is not None:
            self._connection.close()
        self._state = State.CLOSED
        self._held = set()
        ended = self._host.wait(max(1.0, deadline - time.monotonic()))
        if not ended:
            self._host.kill()
            self._host.wait(5.0)
        self._connection = None
        self._host.release()
        return ended


def _joined(values: Sequence[int]) -> bytes:
    return array("I", values).tobytes()
