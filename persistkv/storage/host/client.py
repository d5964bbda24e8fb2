"""The engine's client of a hosted store.

Invariants of this file:

1. Only calls with a timeout wait. No thread is started (except by ``ThreadHost``).
2. ``poll`` returns exactly one outcome for each submitted job, regardless of what happens to the
   host.
3. A job fails only when its rows are certainly not in use: it was refused before it was sent, the
   host has answered it, or the host is known to be dead.
4. Store jobs and request ends are two queues, each bounded in bytes. An entry that exceeds the
   bound is refused unless its queue is empty. Load jobs are not bounded.

Must be used from one thread, the scheduler's. In a forked child, ``open``, ``poll``, ``flush``,
``stats`` and the methods that submit work raise HostError.
"""

from __future__ import annotations

import logging
import os
import time
from array import array
from collections.abc import Callable, Collection, Sequence
from itertools import compress
from typing import Any, NamedTuple

import msgspec

from persistkv.errors import (
    CorruptStoreError,
    HostError,
    PersistKVError,
    ProcessIdInUseError,
    StoreError,
)
from persistkv.storage.format.pack import PackedKeys
from persistkv.storage.host import protocol
from persistkv.storage.host.connection import CONGESTED_BYTES
from persistkv.storage.host.supervisor import KILL_S, Host, State, Supervisor
from persistkv.storage.index import LookupTable
from persistkv.storage.records import Choice, News, RequestEnd, are_encodable

logger = logging.getLogger(__name__)

_OPEN_ATTEMPTS = 4
# reasons why a store does not open that may pass; all others are the caller's
_TEMPORARY = (StoreError, HostError)
# 32 MiB of ends of requests: the host keeps them until it writes their manifests
_MOST_ENDING_BYTES = 32 << 20
_GLANCE_S = 5.0  # seconds between the requests for totals of ``glance``
_TOUCHED_A_STEP = 2_048  # keys in the message of one step: about 75 KB
_MOST_TOUCHED = 65_536  # bound on keys with a use that is not sent yet
_GLANCE_TOKEN = 0  # tokens of requests with a waiting caller start at 1
_NAP_S = 0.0005  # between polls of the calls that wait


class JobOutcome(NamedTuple):
    """Result of a store or load job. The host no longer uses the rows of the job."""

    job_id: int
    failed: list[bytes]
    """Store job: keys whose blocks were dropped; the others are durable, or staged to be written
    later. Load job: keys whose rows have undefined content."""
    refused: bool
    """True: the job was not sent, or the host died before its answer. All keys have failed."""
    num_bytes: int
    """Raw bytes of the job's blocks, without those of ``failed``."""
    seconds: float
    """Seconds from the submission to the end of the job."""


class ClientCounters(msgspec.Struct):
    """Counters of one ``StoreClient`` since its creation."""

    store_jobs: int = 0
    load_jobs: int = 0
    refused_jobs: int = 0
    """Jobs refused because the queue of store jobs was full, the store was not open, or their
    request's id cannot be encoded."""
    refused_bytes: int = 0
    """Raw bytes of the refused store jobs."""
    refused_ends: int = 0
    """Request ends refused because their queue was full, the store was not open, or an id or label
    cannot be encoded; their requests get no manifest."""
    lost_jobs: int = 0
    """Jobs that were in flight when the host died; they failed."""
    restarts: int = 0
    """Attempts to start another host after one ended."""


class StoreStats(msgspec.Struct, frozen=True):
    """State of the host, and the totals of the client and the host."""

    state: str
    """Value of the host's ``State``, such as ``open``."""
    client: ClientCounters
    host: protocol.HostStats | None
    """Totals of the host; None: the store is not open, or the host has not answered yet or in
    time."""
    queued_bytes: int = 0
    """Raw bytes of store jobs in flight; set by ``glance`` only."""


class _Job(NamedTuple):
    keys: Sequence[bytes]
    num_bytes: int
    """Raw bytes of a store job; 0 for a load job."""
    begin: float


class StoreClient:
    """The engine's client of the store in the host: submits jobs, polls for their results and
    restarts a dead host."""

    def __init__(
        self,
        host: Host,
        hello: protocol.Hello,
        *,
        max_queue_bytes: int,
        watchdog_s: float = 60.0,
        least_start_s: float = 60.0,
    ) -> None:
        """Create a client; ``open`` starts the host.

        :param max_queue_bytes: bound on the raw bytes of store jobs in flight.

        See ``Supervisor`` for the other parameters.
        """
        self.host = host
        self.counters = ClientCounters()
        self.notices: list[str] = []
        """Messages for the user from opening, such as the differences from the nearest
        namespace."""
        self.supervisor = Supervisor(
            host, hello, watchdog_s=watchdog_s, least_start_s=least_start_s
        )
        self._pid = os.getpid()
        self.table = LookupTable()
        """Fingerprints of the keys that are durable and can be loaded; empty while the host is
        down."""
        self.contains = self.table.contains
        self.wants_all = False
        """Whether store jobs must be submitted even if ``table`` contains all of their keys."""
        self._others_load = False
        self._touched: set[bytes] = set()
        self._events = News()
        self._max_queue_bytes = max_queue_bytes
        self._jobs: dict[int, _Job] = {}
        self._queued_bytes = 0  # raw bytes of the store jobs in flight
        self._ending: dict[str, int] = {}  # bytes of the request ends in flight
        self._ending_bytes = 0
        self._outcomes: list[JobOutcome] = []
        self._persisted: dict[str, bool] = {}
        self._answer: Any = None
        self._recent: list[list[bytes]] | None = None
        self._token = 0
        self._next_look = 0.0
        self._totals: protocol.HostStats | None = None
        self._next_glance = 0.0
        self._open_error: PersistKVError | None = None
        # kind of the last logged error, until the store is open
        self._reported: type[PersistKVError] | None = None

    # Opening

    def open(self, timeout_s: float = 60.0, *, required: bool = True) -> None:
        """Start the host and wait until the store is open, at most ``timeout_s`` seconds; an error
        may take a few seconds more.

        If a host process is still opening the store then (check of a large store after an unclean
        exit, slow disk), the call returns and the host continues; lookups miss until it has
        finished.

        :param required: False: if the store cannot be opened now (the errors marked *), log an
            error and return. Lookups miss and jobs are refused, and calls of ``poll`` start the
            host again, with its backoff, until the store is open. A thread that did not answer in
            time continues, too.
        :raises ConfigurationError: invalid URL, option or codec.
        :raises MissingExtraError: a package that the driver requires is not installed.
        :raises IdentityMismatchError: ``strict_identity`` is set and the store contains only other
            identities.
        :raises StoreError: * the store cannot be opened.
        :raises HostError: * the host did not start, died repeatedly, or is a thread that did not
            answer in time. After an error, no host process is left running; a thread that did not
            answer may continue to run.
        """
        self._check_process()
        try:
            error = self._try_to_open(
                timeout_s, may_continue=not required or self.host.restartable
            )
            if error is None:
                return
            if required or not (
                isinstance(error, _TEMPORARY) and self.supervisor.may_restart
            ):
                raise error
        except BaseException:
            self.supervisor.abandon()
            raise
        self._report_failed_open(error)

    def _try_to_open(
        self, timeout_s: float, *, may_continue: bool
    ) -> PersistKVError | None:
        """Start hosts until one has opened the store; return the last error if none has.

        :param may_continue: whether a host that is still opening the store after the timeout is no
            error.
        """
        deadline = time.monotonic() + timeout_s
        for attempt in range(_OPEN_ATTEMPTS):
            self._open_error = None
            try:
                self.supervisor.start()
            except HostError as not_started:
                self.supervisor.delay_start()
                return not_started
            while self.state is State.OPENING and time.monotonic() < deadline:
                if not self._receive():
                    time.sleep(_NAP_S)
            if self.state is State.OPEN:
                return None
            if self.state is State.OPENING and may_continue:
                logger.warning(
                    "the store did not open within %s s; lookups miss until it has",
                    timeout_s,
                )
                return None
            if not (
                self.host.restartable
                and self._may_retry_open(attempt)
                and self.host.wait(KILL_S)
            ):
                break
            logger.warning("the store did not open: starting its host again")
        if self._open_error is not None:
            error, self._open_error = self._open_error, None
            return error
        reason = (
            f"did not open within {timeout_s} s"
            if self.state is State.OPENING
            else "died while it opened"
        )
        return HostError(f"the store's host {reason}")

    def _report_failed_open(self, error: PersistKVError) -> None:
        """Log why the store cannot be opened: once for each kind of error, since each further
        attempt may find it."""
        if type(error) is self._reported:
            logger.debug("the store still does not open: %s", error)
            return
        self._reported = type(error)
        logger.error(
            "the store does not open (%s): until it does, lookups miss and new blocks are dropped. "
            "It is tried again in the background; required=true refuses to start instead",
            error,
        )

    def _may_retry_open(self, attempt: int) -> bool:
        """Return whether another host process may help: the last one died, or found its PID in use
        by another container. If the first one found damage, the next one checks the store before it
        opens it.
        """
        if self._open_error is None or isinstance(
            self._open_error, ProcessIdInUseError
        ):
            return True
        return attempt == 0 and isinstance(self._open_error, CorruptStoreError)

    @property
    def state(self) -> State:
        """State of the host as known from the last ``poll`` or blocking call."""
        return self.supervisor.state

    def _check_process(self) -> None:
        if os.getpid() != self._pid:
            raise HostError(
                "this store was opened before a fork; open it again in the child"
            )

    def __len__(self) -> int:
        return len(self.table)

    @property
    def num_jobs(self) -> int:
        """Number of jobs that the host has not answered yet."""
        return len(self._jobs)

    @property
    def has_pending_work(self) -> bool:
        """Whether jobs or request ends are in flight, or ``poll`` has outcomes to return."""
        return bool(self._jobs or self._ending or self._outcomes)

    def submit_store(
        self,
        job_id: int,
        request: str,
        keys: Sequence[bytes],
        block_ids: Sequence[int],
        depths: Sequence[int] | None,
        num_bytes: int,
    ) -> None:
        """Submit a store job: persist the blocks in these rows, which the host may read until
        ``poll`` returns the job.

        :param job_id: chosen by the caller; no other job in flight may have it.
        :param block_ids: for each key, the number of the block's row in the primary tier.
        :param depths: for each key, how many blocks of its group precede it in the request; None if
            unknown.
        :param num_bytes: raw bytes of the blocks, for the bound on the queue.
        :raises ValueError: a key is empty; nothing was submitted.
        """
        self._check_process()
        self.counters.store_jobs += 1
        is_full = (
            self._queued_bytes > 0
            and self._queued_bytes + num_bytes > self._max_queue_bytes
        )
        if self.state is not State.OPEN or is_full or not are_encodable([request]):
            self.counters.refused_bytes += num_bytes
            self._refuse(job_id, keys)
            return
        depth_bytes = b"" if depths is None else _joined(depths)
        message = protocol.StoreJob(
            job_id, PackedKeys.of(keys), _joined(block_ids), request, depth_bytes
        )
        self._begin(message, keys, num_bytes)

    def submit_load(
        self, job_id: int, keys: Sequence[bytes], block_ids: Sequence[int]
    ) -> None:
        """Submit a load job: read blocks into these rows, which the host may write until ``poll``
        returns the job.

        The parameters and errors are those of ``submit_store``.
        """
        self._check_process()
        self.counters.load_jobs += 1
        if self.state is State.OPEN:
            self._begin(
                protocol.LoadJob(job_id, PackedKeys.of(keys), _joined(block_ids)), keys
            )
        else:
            self._refuse(job_id, keys)

    def _begin(
        self,
        message: protocol.StoreJob | protocol.LoadJob,
        keys: Sequence[bytes],
        num_bytes: int = 0,
    ) -> None:
        self._expect_reply()
        self._jobs[message.job_id] = _Job(keys, num_bytes, time.monotonic())
        self._queued_bytes += num_bytes
        self.supervisor.connection.send(message)

    def _refuse(self, job_id: int, keys: Sequence[bytes]) -> None:
        self.counters.refused_jobs += 1
        self._outcomes.append(JobOutcome(job_id, list(keys), True, 0, 0.0))

    def _end(self, answer: protocol.JobDone) -> None:
        failed = answer.failed.unpack()
        job = self._jobs.pop(answer.job_id, None)
        if job is not None:
            self._queued_bytes -= job.num_bytes
            stored_bytes = (
                job.num_bytes * (len(job.keys) - len(failed)) // max(1, len(job.keys))
            )
            seconds = time.monotonic() - job.begin
            self._outcomes.append(
                JobOutcome(
                    answer.job_id,
                    failed,
                    False,
                    answer.num_bytes + stored_bytes,
                    seconds,
                )
            )

    def _fail_all(self) -> None:
        """Fail all jobs and request ends in flight. Call it once the host is dead and no longer
        uses rows."""
        self.counters.lost_jobs += len(self._jobs)
        now = time.monotonic()
        for job_id, job in self._jobs.items():
            self._outcomes.append(
                JobOutcome(job_id, list(job.keys), True, 0, now - job.begin)
            )
        self._persisted.update(dict.fromkeys(self._ending, False))
        self._jobs.clear()
        self._ending.clear()
        self._queued_bytes = self._ending_bytes = 0

    def touch(self, keys: Collection[bytes]) -> None:
        """Mark blocks as recently used, so that others are evicted first. The next calls of
        ``poll`` send the keys.

        Keys that are not stored are ignored. All keys of the call are dropped if the store is not
        open, or if more than 65,536 keys would wait to be sent.
        """
        self._check_process()
        if self.state is State.OPEN and len(self._touched) + len(keys) <= _MOST_TOUCHED:
            keys = list(keys)
            self._touched.update(compress(keys, self.table.held(keys)))

    def loaded_elsewhere(self, keys: Sequence[bytes]) -> None:
        """Report that another tier loads blocks, so that the store does not count them as computed
        by the engine."""
        self._check_process()
        self._others_load = True
        if self.wants_all and keys and self.state is State.OPEN:
            self.supervisor.connection.send(protocol.Loaded(PackedKeys.of(keys)))

    def end_request(self, end: RequestEnd) -> None:
        """Report the end of a request to the host, which writes its remaining blocks and its
        manifest.

        ``take_persisted`` later returns the result.
        """
        self._check_process()
        num_bytes = end.num_bytes
        is_full = (
            self._ending_bytes > 0
            and self._ending_bytes + num_bytes > _MOST_ENDING_BYTES
        )
        is_encodable = end.is_encodable
        if not is_encodable:
            logger.warning(
                "request %r is not stored: its id or a label is no valid text",
                end.request,
            )
        if self.state is not State.OPEN or is_full or not is_encodable:
            self.counters.refused_ends += 1
            self._persisted[end.request] = False
            return
        self._expect_reply()
        self._ending[end.request] = self._ending.get(end.request, 0) + num_bytes
        self._ending_bytes += num_bytes
        self.supervisor.connection.send(end)

    def _expect_reply(self) -> None:
        """Start the watchdog for the next answer, unless an earlier answer is still due."""
        if not (self._jobs or self._ending):
            self.supervisor.watchdog.restart_timer()

    # The step

    def poll(self) -> list[JobOutcome]:
        """Process messages, supervise the host, and return the results of ended jobs. Call once per
        scheduler step.

        Most steps of a decoding engine have nothing in flight: they skip the rest, unless the last
        poll is too old.
        """
        self._check_process()
        now = time.monotonic()
        if now < self._next_look and not self.has_pending_work and not self._touched:
            return []
        self._next_look = (
            now + self.host.idle_look_s if self.state is State.OPEN else now
        )
        if self.state in (State.OPENING, State.OPEN) and self._receive():
            self._next_look = 0.0  # more messages may be waiting
        if self._open_error is not None:
            error, self._open_error = self._open_error, None
            self._report_failed_open(error)
        self._send_touched()
        self.table.release_some()
        if self.supervisor.has_exited():
            self._fail_all()
        elif self.supervisor.maybe_restart():
            self.counters.restarts += 1
        outcomes, self._outcomes = self._outcomes, []
        return outcomes

    def _send_touched(self) -> None:
        """Send some keys recorded by ``touch``, unless the host is slow to receive: the outbox must
        stay bounded."""
        if (
            self.state is State.OPEN
            and self.supervisor.connection.outbox_bytes <= CONGESTED_BYTES
        ):
            touched = [
                self._touched.pop()
                for _ in range(min(len(self._touched), _TOUCHED_A_STEP))
            ]
            if touched:
                self.supervisor.connection.send(protocol.Touch(PackedKeys.of(touched)))

    def take_events(self) -> News:
        """Return the keys that were stored or removed since the last call; ``News.lost`` is set if
        some are missing.

        Empty unless ``StoreOptions.events`` is set. Keys that the store held when it was opened are
        not included.
        """
        events, self._events = self._events, News()
        return events

    def take_persisted(self) -> dict[str, bool]:
        """Return ids of requests whose end was processed since the last call. True: all their
        blocks are durable; False: some are not, or the end was refused or lost with the host.
        """
        persisted, self._persisted = self._persisted, {}
        return persisted

    def ask_recent(self, max_blocks: int, choice: Choice | None = None) -> bool:
        """Send ``protocol.AskRecent``, whose fields the parameters are; return False if the store
        is not open."""
        if self.state is State.OPEN:
            self.supervisor.connection.send(protocol.AskRecent(max_blocks, choice))
        return self.state is State.OPEN

    def take_recent(self) -> list[list[bytes]] | None:
        """Return the answer to ``ask_recent`` once. None: none has arrived; none will if the host
        ended meanwhile."""
        recent, self._recent = self._recent, None
        return recent

    def _receive(self) -> bool:
        """Handle the messages that have arrived; return whether there were any."""
        supervisor, messages = self.supervisor, list[Any]()
        try:
            if supervisor.uses_rows or supervisor.send_hello():
                messages = supervisor.connection.receive()
            if messages:
                supervisor.watchdog.restart_timer()
            for message in messages:
                self._take(message)
        except (ValueError, TypeError, PersistKVError) as error:
            logger.error("the host sent a malformed message: %s", error)
            self._mark_lost()
        if supervisor.is_lost(owes=bool(self._jobs or self._ending)):
            self._mark_lost()
        return bool(messages)

    def _take(self, message: Any) -> None:
        match message:
            case protocol.JobDone():
                self._end(message)
            case protocol.Table():
                self._map(message)
            case News():
                self.table.set_collided(message.collided)
                self._events.lost |= message.lost
                self._events.add(stored=message.stored, removed=message.removed)
                for request, whole in message.persisted:
                    self._ending_bytes -= self._ending.pop(request, 0)
                    self._persisted[request] = whole
            case protocol.Flushed() | protocol.HostStats():
                if isinstance(message, protocol.HostStats):
                    self._totals = message
                # callers of older tokens have timed out
                if message.token == self._token:
                    self._answer = message
            case protocol.Recent():
                self._recent = [keys.unpack() for keys in message.contexts]
            case protocol.Opened():
                self._opened(message)
            case protocol.OpenFailed():
                self._open_error = message.error()
                self.supervisor.end_failed_open()
                self._forget_content()
            case protocol.Pong():
                if self.supervisor.watchdog.call_hangs(message.longest_s):
                    self._mark_lost()
            case protocol.Notice():
                logger.log(message.level, "%s", message.text)

    def _map(self, table: protocol.Table) -> None:
        fd, table.fd = table.fd, -1
        self.table.map(fd, table.slots)
        self.supervisor.connection.send(protocol.Mapped())

    def _opened(self, opened: protocol.Opened) -> None:
        self._map(opened.table)
        self.supervisor.opened()
        if self._reported is not None:
            self._reported = None
            logger.warning(
                "the store is open now: lookups find its blocks, and new ones are stored"
            )
        self.wants_all = opened.wants_all
        if self.wants_all and self._others_load:  # while the store was not open
            self.supervisor.connection.send(protocol.Loaded(PackedKeys()))
        if opened.notice and opened.notice not in self.notices:
            self.notices.append(opened.notice)
            logger.warning("%s", opened.notice)

    def _mark_lost(self) -> None:
        self.supervisor.mark_lost()
        self._forget_content()

    def _forget_content(self) -> None:
        """Forget what the store holds: another host reads it again."""
        self.table.clear()
        self._touched.clear()
        self._events.lost |= self.supervisor.hello.options.events

    # Blocking calls, for shutdown, tests and tools

    def flush(self, timeout_s: float) -> bool:
        """Wait until all submitted blocks and request ends are durable or dropped.

        Return False if they are not after ``timeout_s`` seconds, or if the store is not open; the
        flush then continues in the host. The next ``poll`` returns jobs that end meanwhile.
        """
        return self._ask(protocol.Flush, timeout_s) is not None

    def stats(self, timeout_s: float = 5.0) -> StoreStats:
        """Return totals of client and host; waits for those of the host."""
        host = self._ask(protocol.AskStats, timeout_s)
        return StoreStats(self.state.value, self.counters, host)

    def glance(self) -> StoreStats:
        """Return totals of client and host without waiting, and ask the host for new ones for later
        calls, at most every 5 s. The host's totals are the last that arrived.
        """
        now = time.monotonic()
        if self.state is State.OPEN and now >= self._next_glance:
            self._next_glance = now + _GLANCE_S
            self.supervisor.connection.send(protocol.AskStats(_GLANCE_TOKEN))
        return StoreStats(
            self.state.value, self.counters, self._totals, self._queued_bytes
        )

    def _ask(
        self,
        question: Callable[[int], protocol.Flush | protocol.AskStats],
        timeout_s: float,
    ) -> Any:
        """Send a message with a new token, and return the answer; None if the store is not open or
        does not answer."""
        self._check_process()
        deadline = time.monotonic() + timeout_s
        self._token += 1
        self._answer = None
        if self.state is State.OPEN:
            self.supervisor.connection.send(question(self._token))
        while self.state is State.OPEN:
            self._receive()
            if self._answer is not None or time.monotonic() >= deadline:
                break
            time.sleep(_NAP_S)
        return self._answer

    def close(self, timeout_s: float = 60.0) -> bool:
        """Have the host commit its work and exit. Idempotent. The rows are free on return, unless
        the host is a thread that did not exit.

        :param timeout_s: seconds to wait for commit and exit. After that, a host process that still
            uses rows is killed; this takes up to 6 s more and loses uncommitted work. A process
            that only commits continues for at most 20 s, or 60 s if the store is remote.
        :returns: whether the host exited in time; True in a forked child, where this call does
            nothing.
        """
        if self.state is State.CLOSED or os.getpid() != self._pid:
            return True
        deadline = time.monotonic() + timeout_s
        if self.state is State.OPEN:
            self.flush(timeout_s)
        self.table.clear()
        exited = self.supervisor.close(max(1.0, deadline - time.monotonic()))
        if not self.supervisor.uses_rows:
            self._fail_all()
        return exited


def _joined(values: Sequence[int]) -> bytes:
    return array("I", values).tobytes()
