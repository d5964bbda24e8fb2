"""The engine's side of a hosted store.

Invariants of this file:

1. No call waits, but those that take a timeout. No thread is started (``ThreadHost`` aside).
2. Every job that was submitted is answered exactly once by ``poll``, whatever happens to the store's side.
3. A job is answered as failed only when its rows are certainly not used: refused before it was sent, answered by the
   store's side, or that side is known dead.

Used from one thread, the scheduler's. Refused after a fork.
"""

from __future__ import annotations

import logging
import os
import time
from array import array
from collections.abc import Callable, Collection, Sequence
from typing import Any, NamedTuple

import msgspec

from persistkv.errors import (
    CorruptStoreError,
    HostError,
    PersistKVError,
    ProcessIdInUseError,
)
from persistkv.storage.host import protocol
from persistkv.storage.host.replica import Replica
from persistkv.storage.host.supervisor import KILL_S, Host, State, Supervisor
from persistkv.storage.keys import PackedKeys

logger = logging.getLogger(__name__)

_OPEN_ATTEMPTS = 4
_END_BYTES = 512  # of the end of a request, beside its keys
_MOST_ENDING_BYTES = 16 << 20  # 16 MiB of keys in ends of requests: their manifests wait in the store's memory
_GLANCE_S = 5.0  # seconds between questions for totals that nobody waits for
_NAP_S = 0.0005  # between polls of the calls that wait


class JobOutcome(NamedTuple):
    """How a job ended; its rows are no longer used."""

    job_id: int
    failed: list[bytes]
    """Keys whose bytes were not taken (store) or not filled (load)."""
    refused: bool
    """None of the keys were served: the job never reached the store, or was lost with it."""
    num_bytes: int
    """Raw bytes of the others."""
    seconds: float
    """From submission to this answer."""


class ClientCounters(msgspec.Struct):
    """What happened on the engine's side since it was opened."""

    store_jobs: int = 0
    load_jobs: int = 0
    refused_jobs: int = 0
    """Jobs refused because the queue was full or nothing was open."""
    refused_bytes: int = 0
    refused_ends: int = 0
    """Ends of requests that were not sent, for the same reasons: their manifests are not written."""
    lost_jobs: int = 0
    """Jobs that were in flight when the store's side died."""
    restarts: int = 0


class StoreStats(msgspec.Struct, frozen=True):
    """Both sides at one moment."""

    state: str
    client: ClientCounters
    host: protocol.HostStats | None
    """None where the store's side did not answer in time."""
    queued_bytes: int = 0
    """Raw bytes of store jobs in flight, as of a glance."""


class Glance:
    """The last totals of the store's side, asked for now and then by an engine that does not wait for them."""

    TOKEN = 0
    """Of such a question; those that somebody waits for are counted from 1."""

    def __init__(self) -> None:
        self.totals: protocol.HostStats | None = None
        self._next = 0.0

    def is_due(self) -> bool:
        """Whether to ask anew; it is not due again for some seconds."""
        now = time.monotonic()
        if now < self._next:
            return False
        self._next = now + _GLANCE_S
        return True

    def take(self, answer: protocol.HostStats | protocol.Flushed) -> None:
        """Keep an answer that is of use here."""
        if isinstance(answer, protocol.HostStats):
            self.totals = answer


class _Job(NamedTuple):
    keys: Sequence[bytes]
    num_bytes: int
    begin: float
    is_store: bool


class InFlight:
    """Jobs and ends of requests that the host has not answered yet.

    1. Each job ends exactly once: refused here, answered, or lost with the host.
    2. Both queues are bounded in bytes; what exceeds a bound is refused, unless it is alone.
    """

    def __init__(self, counters: ClientCounters, max_queue_bytes: int) -> None:
        """:param max_queue_bytes: bound on the raw bytes of store jobs."""
        self._counters = counters
        self._max_queue_bytes = max_queue_bytes
        self._jobs: dict[int, _Job] = {}
        self._queued_bytes = 0
        self._ending: dict[str, int] = {}
        self._ending_bytes = 0
        self._outcomes: list[JobOutcome] = []
        self._persisted: dict[str, bool] = {}

    def __len__(self) -> int:
        return len(self._jobs)

    @property
    def owed(self) -> bool:
        """Whether the store's side owes an answer."""
        return bool(self._jobs or self._ending)

    @property
    def pending(self) -> bool:
        """Whether something is in flight, or to be taken."""
        return bool(self._jobs or self._ending or self._outcomes)

    @property
    def queued_bytes(self) -> int:
        """Raw bytes of the store jobs in flight."""
        return self._queued_bytes

    def fits(self, num_bytes: int) -> bool:
        """Whether a store job of so many raw bytes may be sent."""
        return self._queued_bytes == 0 or self._queued_bytes + num_bytes <= self._max_queue_bytes

    def begin(self, job_id: int, keys: Sequence[bytes], num_bytes: int, *, is_store: bool) -> None:
        """A job is sent."""
        self._jobs[job_id] = _Job(keys, num_bytes, time.monotonic(), is_store)
        self._queued_bytes += num_bytes

    def refuse(self, job_id: int, keys: Sequence[bytes], num_bytes: int) -> None:
        """A job is not sent."""
        self._counters.refused_jobs += 1
        self._counters.refused_bytes += num_bytes
        self._outcomes.append(JobOutcome(job_id, list(keys), True, 0, 0.0))

    def end(self, job_id: int, failed: list[bytes], loaded_bytes: int) -> None:
        """A job was answered; an answer to none is passed over."""
        job = self._jobs.pop(job_id, None)
        if job is None:
            return
        self._queued_bytes -= job.num_bytes
        num_bytes = loaded_bytes
        if job.is_store:
            num_bytes = job.num_bytes * (len(job.keys) - len(failed)) // max(1, len(job.keys))
        self._outcomes.append(JobOutcome(job_id, failed, False, num_bytes, time.monotonic() - job.begin))

    def begin_end(self, request: str, num_bytes: int) -> bool:
        """The end of a request is to be sent, with so many bytes of keys; whether it may be."""
        if self._ending_bytes and self._ending_bytes + num_bytes > _MOST_ENDING_BYTES:
            self.refuse_end(request)
            return False
        self._ending[request] = self._ending.get(request, 0) + num_bytes
        self._ending_bytes += num_bytes
        return True

    def refuse_end(self, request: str) -> None:
        """The end of a request is not sent."""
        self._counters.refused_ends += 1
        self._persisted[request] = False

    def request_persisted(self, request: str, whole: bool) -> None:
        """The end of a request was dealt with."""
        self._ending_bytes -= self._ending.pop(request, 0)
        self._persisted[request] = whole

    def lose_all(self) -> None:
        """The store's side is dead: the rows of its jobs are free, what it did not report never happened."""
        self._counters.lost_jobs += len(self._jobs)
        now = time.monotonic()
        for job_id, job in self._jobs.items():
            self._outcomes.append(JobOutcome(job_id, list(job.keys), True, 0, now - job.begin))
        self._persisted.update(dict.fromkeys(self._ending, False))
        self._jobs.clear()
        self._ending.clear()
        self._queued_bytes = self._ending_bytes = 0

    def take_outcomes(self) -> list[JobOutcome]:
        """Jobs that ended since the last call."""
        outcomes, self._outcomes = self._outcomes, []
        return outcomes

    def take_persisted(self) -> dict[str, bool]:
        """Ends that were dealt with since the last call, and whether the whole of the request's context is durable."""
        persisted, self._persisted = self._persisted, {}
        return persisted


class StoreClient:
    """See the top of this file."""

    def __init__(
        self,
        host: Host,
        hello: protocol.Hello,
        *,
        max_queue_bytes: int,
        watchdog_s: float = 60.0,
        least_start_s: float = 60.0,
    ) -> None:
        """Nothing is started yet.

        :param max_queue_bytes: bound on the raw bytes of store jobs in flight; a job past it is refused, unless it is
            the only one.
        :param watchdog_s: a store's side that owes an answer and whose loop is silent for so long is killed and started
            again; and one whose medium does not end a call within ten times as long.
        :param least_start_s: what one that was started has at least before it is silent in that sense: a process takes
            seconds until it can answer anything.
        """
        self.counters = ClientCounters()
        self.notices: list[str] = []
        """Lines for a person that opening gave, such as what differs from the nearest namespace."""
        self.supervisor = Supervisor(host, hello, watchdog_s=watchdog_s, least_start_s=least_start_s)
        self._pid = os.getpid()
        self._replica = Replica()
        self.held = self._replica.held
        """The keys that are durable and can be asked for: to be probed only."""
        self.contains: Callable[[bytes], bool] = self.held.__contains__
        """Whether a key is durable and can be asked for."""
        self._in_flight = InFlight(self.counters, max_queue_bytes)
        self._answer: Any = None
        self._recent: list[list[bytes]] | None = None
        self._next_token = 0
        self._next_look = 0.0
        self._glance = Glance()
        self._open_error: PersistKVError | None = None

    # Opening

    def open(self, timeout_s: float = 60.0) -> None:
        """Start the store's side and wait until its namespace is open. A process that is still at it when the time is
        up (a look at a large store that was killed, a slow disk) goes on: nothing is held until it is done.

        :raises ConfigurationError: a bad URL, option or codec.
        :raises IdentityMismatchError: as ``strict_identity`` asks.
        :raises StoreError: the store cannot be opened.
        :raises HostError: it did not start, died again and again, or is a thread that did not answer in time.
            Nothing is left running.
        """
        self._check_process()
        deadline = time.monotonic() + timeout_s
        supervisor = self.supervisor
        try:
            for attempt in range(_OPEN_ATTEMPTS):
                self._open_error = None
                supervisor.start()
                self._await_open(deadline)
                if supervisor.state is State.OPEN:
                    return
                if supervisor.state is State.OPENING and supervisor.host.restartable:
                    logger.warning("the store did not open within %s s; lookups miss until it has", timeout_s)
                    return
                if not self._may_be_mended(attempt):
                    break
                logger.warning("the store did not open: its side is started once more")
                supervisor.host.wait(KILL_S)
            slow = supervisor.state is State.OPENING
            reason = f"did not open within {timeout_s} s" if slow else "died while it opened"
            raise self._open_error or HostError(f"the store's side {reason}")
        except BaseException:
            supervisor.abandon()
            raise

    def _may_be_mended(self, attempt: int) -> bool:
        """Whether another process may succeed: one died, or has a PID that is in use, or found damage, which the next
        one checks for before it opens the store.
        """
        if not self.supervisor.host.restartable:
            return False
        if self._open_error is None or isinstance(self._open_error, ProcessIdInUseError):
            return True
        return attempt == 0 and isinstance(self._open_error, CorruptStoreError)

    def _await_open(self, deadline: float) -> None:
        while self.state is State.OPENING and time.monotonic() < deadline:
            if not self._receive():
                time.sleep(_NAP_S)

    @property
    def host(self) -> Host:
        """What runs the store's side."""
        return self.supervisor.host

    @property
    def state(self) -> State:
        """Where the store's side stands, as of the last ``poll``."""
        return self.supervisor.state

    def _check_process(self) -> None:
        if os.getpid() != self._pid:
            raise HostError("this store was opened before a fork; open it anew in the child")

    # Jobs

    def __len__(self) -> int:
        return len(self._replica.held)

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
        if self.state is not State.OPEN or not self._in_flight.fits(num_bytes):
            self._in_flight.refuse(job_id, keys, num_bytes)
            return
        depth_bytes = b"" if depths is None else _joined(depths)
        message = protocol.StoreJob(job_id, request, PackedKeys.of(keys), _joined(block_ids), depth_bytes)
        self._owe()
        self._in_flight.begin(job_id, keys, num_bytes, is_store=True)
        self.supervisor.send(message)

    def submit_load(self, job_id: int, keys: Sequence[bytes], block_ids: Sequence[int]) -> None:
        """Have rows filled; they are written until the job is answered.

        :raises HostError: after a fork.
        """
        self._check_process()
        self.counters.load_jobs += 1
        if self.state is not State.OPEN:
            self._in_flight.refuse(job_id, keys, 0)
            return
        message = protocol.LoadJob(job_id, PackedKeys.of(keys), _joined(block_ids))
        self._owe()
        self._in_flight.begin(job_id, keys, 0, is_store=False)
        self.supervisor.send(message)

    def touch(self, keys: Collection[bytes]) -> None:
        """Blocks were used: they are evicted later. The next calls of ``poll`` say so.

        Where too many wait, some are not said.

        :raises HostError: after a fork.
        """
        self._check_process()
        if self.state is State.OPEN:
            self._replica.touch(keys)

    def end_request(self, end: protocol.EndRequest) -> None:
        """The request stores nothing more; its manifest is written with what it staged.

        :raises HostError: after a fork.
        """
        self._check_process()
        self._owe()
        if self.state is not State.OPEN:
            self._in_flight.refuse_end(end.request)
        elif self._in_flight.begin_end(end.request, _end_bytes(end)):
            self.supervisor.send(end)

    def _owe(self) -> None:
        """An answer is owed from now on, where none was."""
        if not self._in_flight.owed:
            self.supervisor.expect_reply()

    # The step

    def poll(self) -> list[JobOutcome]:
        """Once a step: take what has arrived, look after the store's side, and hand over the jobs that ended.

        :raises HostError: after a fork.
        """
        self._check_process()
        if self._may_rest():
            return []
        if self.state in (State.OPENING, State.OPEN) and self._receive():
            self._next_look = 0.0  # there may be more
        self._tell_touched()
        if self.supervisor.has_exited():
            self._in_flight.lose_all()
        elif self.supervisor.maybe_restart():
            self.counters.restarts += 1
        return self._in_flight.take_outcomes()

    def _may_rest(self) -> bool:
        """Whether nothing is to be done in this step: nothing is owed or to be told, and the last look for news was a
        moment ago. An engine that decodes takes steps by the dozen with nothing in flight.
        """
        now = time.monotonic()
        if now < self._next_look and not self._in_flight.pending and not self._replica.has_touched:
            return True
        self._next_look = now + self.supervisor.host.idle_look_s if self.state is State.OPEN else now
        return False

    def _tell_touched(self) -> None:
        """Not while the store's side takes nothing: a queue of these would have no bound."""
        if self.state is State.OPEN and not self.supervisor.congested:
            touched = self._replica.take_touched()
            if touched:
                self.supervisor.send(protocol.Touch(PackedKeys.of(touched)))

    @property
    def num_jobs(self) -> int:
        """Jobs that the store's side has not answered yet."""
        return len(self._in_flight)

    @property
    def has_pending_work(self) -> bool:
        """Whether ``poll`` has something to wait for."""
        return self._in_flight.pending

    def take_stored(self) -> list[bytes]:
        """Keys that became durable since the last call; those that opening found are not among them."""
        return self._replica.take_stored()

    def take_removed(self) -> list[bytes]:
        """Keys that went since the last call. Where nobody takes them they do not pile up: as many wait as were held at
        most since then, and 65,536; what went first is let go of.
        """
        return self._replica.take_removed()

    def take_persisted(self) -> dict[str, bool]:
        """Requests whose end was dealt with since the last call, and whether the whole of their context is durable."""
        return self._in_flight.take_persisted()

    def ask_recent(self, max_blocks: int, *, only_asked: bool = False) -> bool:
        """Ask for the contexts that were used last, which ``take_recent`` tells once they are known.

        :param only_asked: only for those that somebody wants warmed up.
        :returns: False where the store is not open, and was not asked.
        """
        if self.state is State.OPEN:
            self.supervisor.send(protocol.AskRecent(max_blocks, only_asked))
        return self.state is State.OPEN

    def take_recent(self) -> list[list[bytes]] | None:
        """See ``persistkv.storage.prewarm``; None while they are not known, and after they were taken."""
        recent, self._recent = self._recent, None
        return recent

    # What arrives

    def _receive(self) -> bool:
        """Handle the messages that have arrived; return whether there were any."""
        messages = self.supervisor.receive()
        try:
            for message in messages:
                self._take(message)
        except (ValueError, TypeError, PersistKVError) as error:
            logger.error("the store's side sent what makes no sense: %s", error)
            self._lose()
        if self.supervisor.is_lost(owes=self._in_flight.owed):
            self._lose()
        return bool(messages)

    def _take(self, message: Any) -> None:
        match message:
            case protocol.JobDone():
                self.supervisor.backoff.reset()
                self._in_flight.end(message.job_id, message.failed.unpack(), message.num_bytes)
            case protocol.Stored():
                self._replica.add(message.keys.unpack())
            case protocol.Removed():
                self._replica.remove(message.keys.unpack())
            case protocol.Persisted():
                self._in_flight.request_persisted(message.request, message.whole)
            case protocol.Flushed() | protocol.HostStats():
                self._glance.take(message)
                if message.token == self._next_token:  # to older ones, nobody waits for an answer any more
                    self._answer = message
            case protocol.Recent():
                self._recent = [keys.unpack() for keys in message.contexts]
            case protocol.Listing():
                self._replica.begin_listing()
            case protocol.Listed():
                self._replica.end_listing(news=True)
            case protocol.Opened():
                self._opened(message)
            case protocol.OpenFailed():
                self._open_error = message.error()
                logger.warning("the store does not open: %s", self._open_error)
                self._lose()
            case protocol.Pong():
                if self.supervisor.hangs(message.longest_s):
                    self._lose()
            case protocol.Notice():
                logger.log(message.level, "%s", message.text)

    def _opened(self, opened: protocol.Opened) -> None:
        self.supervisor.state = State.OPEN
        self._replica.end_listing(news=self.counters.restarts > 0)  # ``_lose`` told that what is back had gone
        if opened.notice and opened.notice not in self.notices:
            self.notices.append(opened.notice)
            logger.warning("%s", opened.notice)

    def _lose(self) -> None:
        self.supervisor.mark_lost()
        self._replica.clear()

    # Calls that wait, for the end of a program, tests and tools

    def flush(self, timeout_s: float) -> bool:
        """Wait until all that was submitted is durable or dropped; False where the time was too short.

        Jobs that end meanwhile are handed over by the next ``poll``.
        """
        token = self._token()
        self.supervisor.send(protocol.Flush(token))
        return self._await(timeout_s) is not None

    def stats(self, timeout_s: float = 5.0) -> StoreStats:
        """Totals of both sides."""
        token = self._token()
        if self.state is State.OPEN:
            self.supervisor.send(protocol.AskStats(token))
            return StoreStats(self.state.value, self.counters, self._await(timeout_s))
        return StoreStats(self.state.value, self.counters, None)

    def glance(self) -> StoreStats:
        """Totals of both sides, without waiting: those of the store's side are some seconds old, or missing."""
        if self.state is State.OPEN and self._glance.is_due():
            self.supervisor.send(protocol.AskStats(Glance.TOKEN))
        return StoreStats(self.state.value, self.counters, self._glance.totals, self._in_flight.queued_bytes)

    def _token(self) -> int:
        self._check_process()
        self._next_token += 1
        self._answer = None
        return self._next_token

    def _await(self, timeout_s: float) -> Any:
        deadline = time.monotonic() + timeout_s
        while self.state is State.OPEN:
            self._receive()
            if self._answer is not None:
                answer, self._answer = self._answer, None
                return answer
            if time.monotonic() >= deadline:
                break
            time.sleep(_NAP_S)
        return None

    def close(self, timeout_s: float = 60.0) -> bool:
        """Let the store's side commit what it was given, and end; idempotent.

        :param timeout_s: for both. If it has not ended by then, it is killed, which takes up to 6 s more.
        :returns: whether it ended by itself in time. If it is killed, uncommitted work is lost.
        """
        if self.state is State.CLOSED or os.getpid() != self._pid:
            return True
        deadline = time.monotonic() + timeout_s
        if self.state is State.OPEN:
            self.flush(timeout_s)
        self._replica.held.clear()
        return self.supervisor.close(max(1.0, deadline - time.monotonic()))


def _end_bytes(end: protocol.EndRequest) -> int:
    """Memory that the message takes, roughly."""
    keys = sum(len(keys.data) + len(keys.lengths) for keys in end.group_keys)
    return _END_BYTES + keys + sum(len(name) + len(value) for name, value in end.labels.items())


def _joined(values: Sequence[int]) -> bytes:
    return array("I", values).tobytes()
