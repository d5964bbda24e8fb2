"""The engine's client of a hosted store.

Invariants of this file:

1. Only calls with a timeout wait.
2. ``poll`` returns exactly one outcome for each submitted job, regardless of what happens to the
   host (``in_flight`` has the states of a job).
3. A job fails only when its rows are certainly not in use: it was refused before it was sent, the
   host has answered it, or the host is known to be dead.
4. Store jobs and request ends are two queues, each bounded in bytes. An entry that exceeds the
   bound is refused unless its queue is empty. Load jobs are not bounded.

Must be used from one thread, the scheduler's. A second thread looks after the host while the
scheduler does not ``poll``. Methods that are ``_exclusive`` run one at a time, and raise HostError
in a forked child.
"""

from __future__ import annotations

import logging
import os
import time
from array import array
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from functools import wraps
from typing import Any, Concatenate, ParamSpec, TypeVar

import msgspec

from persistkv.base import StoredContext
from persistkv.errors import (
    CorruptStoreError,
    HostError,
    PersistKVError,
    ProcessIdInUseError,
    StoreError,
)
from persistkv.storage.format.pack import PackedKeys
from persistkv.storage.host import protocol
from persistkv.storage.host.answers import BACKGROUND_TOKEN, Answers
from persistkv.storage.host.connection import CONGESTED_BYTES, discard
from persistkv.storage.host.hosted_keys import HostedKeys
from persistkv.storage.host.hosts import KILL_S, Host
from persistkv.storage.host.idle import IdleSupervision
from persistkv.storage.host.in_flight import InFlight, JobOutcome
from persistkv.storage.host.supervisor import RUNNING, State, Supervisor
from persistkv.storage.records import (
    Choice,
    LoadReport,
    RequestEnd,
    StoreReport,
    are_encodable,
)
from persistkv.tenants import DEFAULT_TENANT

logger = logging.getLogger(__name__)

_OPEN_ATTEMPTS = 4  # maximum number of hosts that one call of ``open`` starts
# errors of opening whose cause may pass; the cause of any other error is the caller's configuration
_TEMPORARY = (StoreError, HostError)
_NAP_S = 0.0005  # seconds between polls of the calls that wait

P = ParamSpec("P")
T = TypeVar("T")


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


@dataclass
class _OpenFailures:
    """Why a store does not open."""

    place: str
    """URL of the store, without its options."""
    last: PersistKVError | None = None
    """Error in the last ``OpenFailed`` message, until it is reported or raised. None: the present
    host has sent no such message; if its connection has ended, it has died."""
    reported: type[PersistKVError] | None = None
    """Kind of the last logged error, until the store is open."""

    def take_last(self) -> PersistKVError | None:
        """Return ``last`` once."""
        last = self.last
        self.last = None
        return last

    def may_retry(self, attempt: int) -> bool:
        """Return whether another host process may succeed where the last one failed.

        It may if the last one died, or found its PID in use by another container. It may also if
        the first one found damage, because the next one checks the store before it opens it.

        :param attempt: number of the failed attempt, from 0.
        """
        has_died = self.last is None
        if has_died or isinstance(self.last, ProcessIdInUseError):
            return True
        is_first = attempt == 0
        return is_first and isinstance(self.last, CorruptStoreError)

    def report(self, error: PersistKVError) -> None:
        """Log an error: once for each kind, since each further attempt may find it."""
        if type(error) is self.reported:
            logger.debug("the store still does not open: %s", error)
            return
        self.reported = type(error)
        logger.error(
            "the store does not open (%s): until it does, lookups miss and new blocks are dropped. "
            "It is tried again in the background; required=true refuses to start instead",
            error,
        )

    def report_opened(self) -> None:
        """Log that the store is open, if an error was logged."""
        if self.reported is not None:
            self.reported = None
            logger.warning(
                "%s is open now: lookups find its blocks, and new ones are stored",
                self.place,
            )


def _exclusive(
    call: Callable[Concatenate[StoreClient, P], T],
) -> Callable[Concatenate[StoreClient, P], T]:
    """Decorate a method that must not run during a look of the idle supervision."""

    @wraps(call)
    def alone(
        self: StoreClient,
        /,
        *args: P.args,
        **kwargs: P.kwargs,
    ) -> T:
        # Check before the lock is acquired: in a forked child, a thread that does not exist there
        # may hold it for ever.
        if os.getpid() != self._pid:
            raise HostError(
                "this store was opened before a fork; open it again in the child"
            )
        with self.idle.lock:
            return call(self, *args, **kwargs)

    return alone


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

        :param hello: first message to each host; it opens the store.
        :param max_queue_bytes: bound on the raw bytes of store jobs in flight.
        :param watchdog_s: seconds of silence after which a host that has to answer is killed.
        :param least_start_s: minimum of ``watchdog_s`` while the host opens the store.
        """
        self.counters = ClientCounters()
        self.notices: list[str] = []
        """Messages for the user from opening, such as the differences from the nearest
        namespace."""
        self.prefill = (0, 0.0)
        """Tokens and seconds of this model's measured prefills, as recorded in the store; 0 if none
        is."""
        self.supervisor = Supervisor(
            host, hello, watchdog_s=watchdog_s, least_start_s=least_start_s
        )
        self._pid = os.getpid()
        """Process that created this client; a forked child has another id."""
        self.idle = IdleSupervision(self._look)
        """Calls ``_look`` about once a second while the engine does not ``poll``."""
        self._hosted_keys = HostedKeys(reports_events=hello.options.events)
        self.table = self._hosted_keys.table
        """Fingerprints of the keys that are durable and can be loaded; empty while the host is
        down."""
        self.contains = self.table.contains
        """Whether a key is stored: a method of ``table``, bound once because each lookup calls
        it."""
        self.sends_held_blocks = False
        """Whether store jobs must be submitted even if ``table`` contains all of their keys: the
        store compares their blocks with those of another engine release, or stores adopted blocks
        again."""
        self._others_load = False
        """Whether ``loaded_elsewhere`` was ever called: other tiers of the engine load blocks."""
        self._in_flight = InFlight(max_queue_bytes)
        self._answers = Answers()
        self._next_look = 0.0
        """``time.monotonic`` time from which ``poll`` looks after the host even if no work is in
        flight."""
        self._open_failures = _OpenFailures(hello.url.partition("?")[0])

    @property
    def host(self) -> Host:
        """Where the store runs."""
        return self.supervisor.host

    # Opening

    @_exclusive
    def open(
        self,
        timeout_s: float = 60.0,
        *,
        required: bool = True,
    ) -> None:
        """Start the host and wait until the store is open, at most ``timeout_s`` seconds; an error
        may take a few seconds more.

        If a host process is still opening the store then (check of a large store after an unclean
        exit, slow disk), the call returns and the host continues; lookups miss until it has
        finished.

        :param required: False: instead of raising a StoreError or HostError, log it and return if
            another attempt may succeed. Lookups miss and jobs are refused, and calls of ``poll``
            start the host again, with its backoff, until the store is open. A thread that did not
            answer in time continues, too.
        :raises ConfigurationError: invalid URL, option or codec.
        :raises MissingExtraError: a package that the driver requires is not installed.
        :raises IdentityMismatchError: ``strict_identity`` is set and the store contains only other
            identities.
        :raises StoreError: the store cannot be opened.
        :raises HostError: the host did not start, died repeatedly, or is a thread that did not
            answer in time. After an error, no host process is left running; a thread that did not
            answer may continue to run.
        """
        if self.state is State.CLOSED:
            raise HostError("the client is closed, or its open failed: create another")
        # a host thread that hangs cannot be replaced later, so it must open a required store within
        # the timeout
        may_continue = not required or self.host.restartable
        try:
            error = self._try_to_open(timeout_s, may_continue=may_continue)
            if error is not None:
                if required or not self._is_retried(error):
                    raise error
                self._open_failures.report(error)
        except BaseException:
            # abandon it even after an interrupt, because the caller gets no client that could end
            # the host
            self.supervisor.abandon()
            raise
        # start the idle thread only now, because the calling thread has checked the host until here
        self.idle.start()

    def _is_retried(self, error: PersistKVError) -> bool:
        """Return whether ``poll`` tries again to open the store after this error: the cause may
        pass, and a host can start again."""
        return isinstance(error, _TEMPORARY) and self.supervisor.may_restart

    def _try_to_open(
        self,
        timeout_s: float,
        *,
        may_continue: bool,
    ) -> PersistKVError | None:
        """Start hosts until one has opened the store; return the last error if none has.

        :param may_continue: whether a host that is still opening the store after the timeout is no
            error.
        """
        deadline = time.monotonic() + timeout_s
        for attempt in range(_OPEN_ATTEMPTS):
            self._open_failures.last = None
            try:
                self.supervisor.start()
            except HostError as not_started:
                # make no second attempt here, because ``poll`` makes it after the backoff
                self.supervisor.delay_start()
                return not_started
            self._wait_while_opening(deadline)
            if self.state is State.OPEN:
                return None
            if self.state is State.OPENING and may_continue:
                logger.warning(
                    "the store did not open within %s s; lookups miss until it has",
                    timeout_s,
                )
                return None
            if not self._may_start_another(attempt):
                break
            logger.warning("the store did not open: starting its host again")
        return self._opening_error(timeout_s)

    def _opening_error(self, timeout_s: float) -> PersistKVError:
        """Return why the last host has not opened the store."""
        # take the error, which ``open`` raises or logs, so that the next look does not log it again
        error = self._open_failures.take_last()
        if error is not None:
            return error
        if self.state is State.OPENING:
            return HostError(f"the store's host did not open within {timeout_s} s")
        return HostError("the store's host died while it opened")

    def _may_start_another(self, attempt: int) -> bool:
        """Return whether to start another host process: it may succeed, and the last one has
        exited, for which this call waits up to 5 s."""
        may_succeed = self.host.restartable and self._open_failures.may_retry(attempt)
        return may_succeed and self.host.wait(KILL_S)

    def _wait_while_opening(self, deadline: float) -> None:
        """Process messages until the host has opened the store, has failed or has died; at most
        until the deadline."""
        while self.state is State.OPENING and time.monotonic() < deadline:
            if not self._receive():
                time.sleep(_NAP_S)

    @property
    def state(self) -> State:
        """State of the host as known from the last look, ``poll`` or blocking call."""
        return self.supervisor.state

    def __len__(self) -> int:
        return len(self.table)

    @property
    def num_jobs(self) -> int:
        """Number of jobs that the host has not answered yet."""
        return self._in_flight.num_jobs

    @property
    def has_pending_work(self) -> bool:
        """Whether jobs or request ends are in flight, or ``poll`` has outcomes to return."""
        return self._in_flight.owes or bool(self._in_flight.outcomes)

    @_exclusive
    def submit_store(
        self,
        job_id: int,
        request: str,
        keys: Sequence[bytes],
        block_ids: Sequence[int],
        depths: Sequence[int] | None,
        num_bytes: int,
        tenant: str = DEFAULT_TENANT,
    ) -> None:
        """Submit a store job: persist the blocks in these rows, which the host may read until
        ``poll`` returns the job.

        :param job_id: chosen by the caller; no other job in flight may have it.
        :param block_ids: for each key, the number of the block's row in the primary tier.
        :param depths: for each key, how many blocks of its group precede it in the request; None if
            unknown.
        :param num_bytes: raw bytes of the blocks, for the bound on the queue.
        :param tenant: whose blocks these are; ``keys`` are what ``tenant_key`` returns for it.
        :raises ValueError: a key is empty; nothing was submitted.
        """
        self.counters.store_jobs += 1
        is_accepted = (
            self.state is State.OPEN
            and self._in_flight.fits_store(num_bytes)
            and are_encodable([request, tenant])
        )
        # a job that is not accepted is no error: the store just lacks its blocks
        if not is_accepted:
            self.counters.refused_bytes += num_bytes
            self._refuse_job(job_id, keys)
            return
        depth_bytes = b"" if depths is None else _as_u32(depths)
        packed = PackedKeys.of(keys)
        rows = _as_u32(block_ids)
        message = protocol.StoreJob(
            job_id,
            keys=packed,
            block_ids=rows,
            request=request,
            depths=depth_bytes,
            tenant=tenant,
        )
        self._expect_reply()
        self._in_flight.add_store(job_id, keys, num_bytes)
        self.supervisor.connection.send(message)

    @_exclusive
    def submit_load(
        self,
        job_id: int,
        keys: Sequence[bytes],
        block_ids: Sequence[int],
        deadline: float | None = None,
    ) -> None:
        """Submit a load job: read blocks into these rows, which the host may write until ``poll``
        returns the job.

        :param job_id: chosen by the caller; no other job in flight may have it.
        :param block_ids: for each key, the number of the row to fill.
        :param deadline: ``time.monotonic`` time at which blocks fail whose reads have not begun. A
            host whose read is still in progress 2 s later is killed, if it is a process. None: no
            deadline.
        :raises ValueError: a key is empty; nothing was submitted.
        """
        self.counters.load_jobs += 1
        if self.state is not State.OPEN:
            self._refuse_job(job_id, keys)
            return
        packed = PackedKeys.of(keys)
        rows = _as_u32(block_ids)
        message = protocol.LoadJob(job_id, packed, rows, deadline)
        if not self._in_flight.num_loads:
            # While no load is due, a host may be silent for longer than a load may wait: count its
            # silence from now on.
            self.supervisor.watchdog.restart_timer()
        self._in_flight.add_load(job_id, keys, deadline)
        self.supervisor.connection.send(message)

    def _refuse_job(self, job_id: int, keys: Sequence[bytes]) -> None:
        """Fail a job that is not sent: the next ``poll`` returns it with all of its keys failed."""
        self.counters.refused_jobs += 1
        outcome = JobOutcome(
            job_id,
            failed=list(keys),
            refused=True,
            num_bytes=0,
            seconds=0.0,
        )
        self._in_flight.outcomes.append(outcome)

    @_exclusive
    def probe(self, keys: Sequence[bytes], timeout_s: float) -> bool:
        """Have the host read a few of these blocks and discard them, to measure the medium.
        ``take_probed`` returns the result, with nothing read if the host ends meanwhile. Return
        False if the store is not open. One probe at a time.
        """
        if self.state is not State.OPEN:
            return False
        self._expect_reply()
        now = time.monotonic()
        self._answers.begin_probe(now)
        packed = PackedKeys.of(keys)
        message = protocol.Probe(packed, begin=now, deadline=now + timeout_s)
        self.supervisor.connection.send(message)
        return True

    @_exclusive
    def take_probed(self) -> protocol.Probed | None:
        """Return the result of ``probe`` once; None: it has not arrived."""
        probed = self._answers.probed
        self._answers.probed = None
        return probed

    @_exclusive
    def report_load(self, report: LoadReport) -> None:
        """Report to the host how the blocks that the store held for a request were used, for its
        status; dropped if the store is not open or the host is slow to receive. Makes no system
        call: the next ``poll`` or message sends it."""
        connection = self.supervisor.connection
        is_congested = connection.outbox_bytes > CONGESTED_BYTES
        if self.state is not State.OPEN or is_congested:
            return
        if are_encodable([report.request]):
            connection.queue(protocol.Reported(report))

    @_exclusive
    def touch(self, keys: Collection[bytes]) -> None:
        """Mark blocks as recently used, so that others are evicted first. The next calls of
        ``poll`` send the keys.

        Keys that are not stored are ignored. All keys of the call are dropped if the store is not
        open, or if more than 65,536 keys would wait to be sent.
        """
        if self.state is State.OPEN:
            self._hosted_keys.touch(keys)

    @_exclusive
    def loaded_elsewhere(self, keys: Sequence[bytes]) -> None:
        """Report that another tier loads blocks, so that the store does not take them for blocks
        that the engine computes.

        Reports are not kept while the store is not open. A store that opens later is told that any
        block may have been loaded elsewhere (``_opened``).

        :param keys: keys of the loaded blocks; empty: unknown, it may be any block.
        """
        self._others_load = True
        # Only a store that wants all store jobs compares blocks with those that the engine
        # computes. Any other store need not know which blocks were computed.
        if self.sends_held_blocks and self.state is State.OPEN:
            packed = PackedKeys.of(keys)
            self.supervisor.connection.send(protocol.Loaded(packed))

    @_exclusive
    def report_saved(self, saved: protocol.Saved) -> None:
        """Send statistics of a request to the host: its restored tokens, or a measured prefill. The
        host adds them up and records them with a delay. They are dropped if the store is not open
        or a label cannot be encoded."""
        texts = (*saved.labels, *saved.labels.values())
        if self.state is State.OPEN and are_encodable(texts):
            self.supervisor.connection.send(saved)

    @_exclusive
    def end_request(self, end: RequestEnd) -> None:
        """Report the end of a request to the host, which writes its remaining blocks and its
        manifest.

        ``take_persisted`` later returns the result.
        """
        is_encodable = end.is_encodable
        if not is_encodable:
            logger.warning(
                "request %r is not stored: its id or a label is no valid text",
                end.request,
            )
        is_accepted = (
            is_encodable and self.state is State.OPEN and self._in_flight.fits_end(end)
        )
        if not is_accepted:
            self.counters.refused_ends += 1
            self._in_flight.persisted[end.request] = False
            return
        self._expect_reply()
        self._in_flight.add_end(end)
        self.supervisor.connection.send(end)

    def _expect_reply(self) -> None:
        """Start the watchdog for the next answer, unless an earlier answer is still due.

        Call it before the new work is added to the work in flight, which makes an answer due.
        """
        if not self._owes:
            self.supervisor.watchdog.restart_timer()

    @property
    def _owes(self) -> bool:
        """Whether the host has to answer a job, the end of a request or a probe."""
        return self._in_flight.owes or self._answers.probe_began is not None

    # The step

    @_exclusive
    def poll(self) -> list[JobOutcome]:
        """Process messages, supervise the host, and return the results of ended jobs. Call once per
        scheduler step.

        Most steps of a decoding engine have nothing in flight. They skip the look after the host
        unless it is due, which ``Host.idle_look_s`` decides.
        """
        now = time.monotonic()
        # the idle thread does not look for a second from now on
        self.idle.polled_at = now
        is_due = now >= self._next_look
        if is_due or self.has_pending_work or self._hosted_keys.touched:
            self._look()
        outcomes = self._in_flight.outcomes
        self._in_flight.outcomes = []
        return outcomes

    def _look(self) -> bool:
        """Process messages and supervise the host; return whether the store is open."""
        pause_s = 0.0
        # while the store is not open, lookups miss: check its host in each step
        if self.state is State.OPEN:
            pause_s = self.supervisor.host.idle_look_s
        self._next_look = time.monotonic() + pause_s
        if self.state in RUNNING and self._receive():
            # more messages may be waiting: look again in the next step
            self._next_look = 0.0
        # look for an error, because an ``OpenFailed`` message may just have arrived
        error = self._open_failures.take_last()
        if error is not None:
            self._open_failures.report(error)
        if self._hosted_keys.touched:
            self._send_touched()
        # release one slice of a replaced table in each look, because the whole table would take 27
        # ms
        self.table.release_some()
        # check after ``_receive``, which may have found the host lost
        if self.state not in RUNNING:
            self._attend_lost_host()
        return self.state is State.OPEN

    def _attend_lost_host(self) -> None:
        """Fail the jobs of a lost host once it has exited: until then, it may use rows. In a later
        call, start another host if the backoff is over."""
        if self.supervisor.detect_exit():
            self.counters.lost_jobs += self._in_flight.fail_all()
            self._answers.fail_probe()
        elif self.supervisor.maybe_restart():
            self.counters.restarts += 1

    def _send_touched(self) -> None:
        """Send some keys recorded by ``touch``, unless the host is slow to receive: the outbox must
        stay bounded."""
        connection = self.supervisor.connection
        is_congested = connection.outbox_bytes > CONGESTED_BYTES
        if self.state is State.OPEN and not is_congested:
            touched = self._hosted_keys.take_touched()
            packed = PackedKeys.of(touched)
            connection.send(protocol.Touch(packed))

    @_exclusive
    def take_events(self) -> StoreReport:
        """Return the keys that were stored or removed since the last call;
        ``StoreReport.lost`` is set if some are missing.

        Empty unless ``StoreOptions.events`` is set. Keys that the store held when it was opened are
        not included.
        """
        return self._hosted_keys.take_events()

    @property
    def has_events(self) -> bool:
        """Whether ``take_events`` has something to return."""
        return self._hosted_keys.has_events

    @_exclusive
    def take_persisted(self) -> dict[str, bool]:
        """Return ids of requests whose end was processed since the last call. True: all their
        blocks are durable; False: some are not, or the end was refused or lost with the host.
        """
        persisted = self._in_flight.persisted
        self._in_flight.persisted = {}
        return persisted

    @_exclusive
    def ask_recent(self, max_blocks: int, choice: Choice | None = None) -> bool:
        """Send ``protocol.AskRecent``, whose fields the parameters are; return False if the store
        is not open."""
        if self.state is State.OPEN:
            self.supervisor.connection.send(protocol.AskRecent(max_blocks, choice))
        return self.state is State.OPEN

    @_exclusive
    def take_recent(self) -> list[StoredContext] | None:
        """Return the answer to ``ask_recent`` once. None: none has arrived; none will if the host
        ended meanwhile."""
        recent = self._answers.recent
        self._answers.recent = None
        return recent

    def _receive(self) -> bool:
        """Handle the messages that have arrived, and mark the host as lost if it is dead, silent or
        sends malformed messages; return whether there were messages."""
        supervisor = self.supervisor
        messages: list[Any] = []
        try:
            # ``Hello`` is sent when the host's pidfd has arrived. The host sends messages only
            # after it has received ``Hello``.
            has_hello = supervisor.send_hello()
            if has_hello:
                messages = supervisor.connection.receive()
            if messages:
                supervisor.watchdog.restart_timer()
            self._handle(messages)
        except (ValueError, TypeError, PersistKVError) as error:
            logger.error("the host sent a malformed message: %s", error)
            self._mark_lost()
            # close the descriptors of messages that were not handled; a handler has taken the
            # descriptor out of its message
            for message in messages:
                discard(message)
        is_lost = supervisor.is_lost(
            owes=self._owes,
            load_due=self._in_flight.num_loads > 0,
            deadline=self._in_flight.earliest_deadline(),
        )
        if is_lost:
            self._mark_lost()
        return bool(messages)

    def _handle(self, messages: Sequence[Any]) -> None:
        """Pass each message to the handler of its class."""
        for message in messages:
            has_table = protocol.table_of(message) is not None
            # An earlier message had the host killed: map no table of a lost host. Its answers to
            # jobs still count.
            if has_table and self.state not in RUNNING:
                discard(message)
                continue
            handle = self._HANDLERS[type(message)]
            handle(self, message)

    def _job_done(self, message: protocol.JobDone) -> None:
        self._in_flight.answer_job(message)

    def _take_report(self, report: StoreReport) -> None:
        """Add the changes of keys, and end the requests that the host has finished."""
        self._hosted_keys.add_report(report)
        for request, whole in report.persisted:
            self._in_flight.answer_end(request, whole)

    def _answer(self, message: protocol.Flushed | protocol.HostStats) -> None:
        self._answers.add(message)

    def _take_contexts(self, message: protocol.Recent) -> None:
        self._answers.recent = message.unpack()

    def _take_probed(self, message: protocol.Probed) -> None:
        self._answers.end_probe(message)

    def _open_failed(self, message: protocol.OpenFailed) -> None:
        """Keep the error, which ``open`` raises or the next look reports, and end the host."""
        self._open_failures.last = message.error()
        self.supervisor.end_failed_open()
        self._hosted_keys.forget()

    def _pong(self, message: protocol.Pong) -> None:
        if self.supervisor.watchdog.call_hangs(message.longest_s):
            self._mark_lost()

    def _log(self, message: protocol.Notice) -> None:
        logger.log(message.level, "%s", message.text)

    def _ended(self, message: protocol.Ended) -> None:
        """Do nothing: the host has released the rows, and its connection ends."""

    def _map_table(self, table: protocol.Table) -> None:
        """Use a new lookup table, and acknowledge it: the host then releases the previous one."""
        # ``map`` closes the descriptor, also if it raises
        fd = table.fd
        table.fd = -1
        self.table.map(fd, table.slots)
        self.supervisor.connection.send(protocol.Mapped())

    def _opened(self, opened: protocol.Opened) -> None:
        """Use the store, which the host has opened."""
        self._map_table(opened.table)
        self.supervisor.opened()
        self._open_failures.report_opened()
        self.sends_held_blocks = opened.sends_held_blocks
        if self.sends_held_blocks and self._others_load:
            # send no keys, which means that any block may have been loaded elsewhere: this host has
            # not received the keys that were reported before it opened the store
            unknown_keys = PackedKeys()
            self.supervisor.connection.send(protocol.Loaded(unknown_keys))
        self.prefill = opened.prefill
        # log a notice once only: a restarted host may send it again
        if opened.notice and opened.notice not in self.notices:
            self.notices.append(opened.notice)
            logger.warning("%s", opened.notice)

    def _mark_lost(self) -> None:
        """Have the host killed, and forget its keys: lookups miss until another host is open. Its
        jobs stay in flight until it has exited."""
        self.supervisor.mark_lost()
        self._hosted_keys.forget()

    # Blocking calls, for shutdown, tests and tools

    def flush(self, timeout_s: float) -> bool:
        """Wait until all submitted blocks and request ends are durable or dropped.

        Return False if they are not after ``timeout_s`` seconds, or if the store is not open; the
        flush then continues in the host. The next ``poll`` returns jobs that end meanwhile.
        """
        return self._ask(protocol.Flush, timeout_s) is not None

    def stats(self, timeout_s: float = 5.0) -> StoreStats:
        """Return totals of client and host; waits for those of the host."""
        answer = self._ask(protocol.AskStats, timeout_s)
        host = answer if isinstance(answer, protocol.HostStats) else None
        return StoreStats(self.state.value, self.counters, host)

    @_exclusive
    def glance(self) -> StoreStats:
        """Return totals of client and host without waiting, and ask the host for new ones for later
        calls, at most every 5 s. The host's totals are the last that arrived.
        """
        is_open = self.state is State.OPEN
        if is_open and self._answers.begin_background_request():
            question = protocol.AskStats(BACKGROUND_TOKEN)
            self.supervisor.connection.send(question)
        state = self.state.value
        totals = self._answers.totals
        queued_bytes = self._in_flight.queued_bytes
        return StoreStats(state, self.counters, totals, queued_bytes)

    @_exclusive
    def _ask(
        self,
        question: Callable[[int], protocol.Flush | protocol.AskStats],
        timeout_s: float,
    ) -> protocol.Flushed | protocol.HostStats | None:
        """Send a message with a new token, and wait for the answer with that token; return None if
        the store is not open or does not answer in time.

        :param question: makes the message from its token.
        """
        deadline = time.monotonic() + timeout_s
        token = self._answers.begin_question()
        if self.state is State.OPEN:
            self.supervisor.connection.send(question(token))
        while self.state is State.OPEN:
            self._receive()
            if self._answers.awaited is not None or time.monotonic() >= deadline:
                break
            time.sleep(_NAP_S)
        return self._answers.awaited

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
        self.idle.stop()
        if self.state is State.OPEN:
            self.flush(timeout_s)
        self.table.clear()
        # wait at least a second, even if the flush took all the time, because the host must release
        # the rows
        left_s = max(1.0, deadline - time.monotonic())
        exited = self.supervisor.close(left_s)
        # a thread that did not exit may still use the rows of the jobs in flight
        if not self.supervisor.uses_rows:
            self.counters.lost_jobs += self._in_flight.fail_all()
        return exited

    _HANDLERS: Mapping[type, Callable[[StoreClient, Any], None]] = {
        protocol.JobDone: _job_done,
        protocol.Table: _map_table,
        StoreReport: _take_report,
        protocol.Flushed: _answer,
        protocol.HostStats: _answer,
        protocol.Recent: _take_contexts,
        protocol.Probed: _take_probed,
        protocol.Opened: _opened,
        protocol.OpenFailed: _open_failed,
        protocol.Pong: _pong,
        protocol.Ended: _ended,
        protocol.Notice: _log,
    }
    """The handler of each class of message from the host."""


def _as_u32(values: Sequence[int]) -> bytes:
    """Return numbers as messages carry them: u32, joined."""
    return array("I", values).tobytes()
