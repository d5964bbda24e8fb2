"""The jobs of an engine, from their message to their answer.

Store jobs, ends of requests and flushes keep their order. Loads run concurrently with each other
and with all else. ``NEXT_STATES`` has the states of a job. Its rows may be in use in three of them;
it is answered when they are not in use any more.
"""

from __future__ import annotations

import asyncio
import enum
import logging
import time
from array import array
from collections import Counter, deque
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, TypeAlias

from persistkv.errors import CorruptPackError, HostError
from persistkv.storage.format.pack import PackedKeys
from persistkv.storage.host import protocol
from persistkv.storage.host.server.channel import Channel
from persistkv.storage.host.server.publishing import ReportPublisher
from persistkv.storage.records import LoadReport, RequestEnd
from persistkv.storage.store.store import Store, StoredJob

logger = logging.getLogger(__name__)

_REPORTS = 64  # maximum number of requests that a status row lists


class JobState(enum.Enum):
    """State of a store or load job."""

    QUEUED = "queued"
    ACCEPTING = "accepting"
    """The store copies the blocks that it lacks, or makes packs of them."""
    WRITING = "writing"
    """Commits read the rows."""
    READING = "reading"
    """Reads fill the rows."""
    ANSWERED = "answered"
    DROPPED = "dropped"
    """The engine ended before the job began; it gets no answer."""


NEXT_STATES: Mapping[JobState, frozenset[JobState]] = {
    JobState.QUEUED: frozenset(
        {JobState.ACCEPTING, JobState.READING, JobState.DROPPED}
    ),
    JobState.ACCEPTING: frozenset({JobState.WRITING, JobState.ANSWERED}),
    JobState.WRITING: frozenset({JobState.ANSWERED}),
    JobState.READING: frozenset({JobState.ANSWERED}),
    JobState.ANSWERED: frozenset(),
    JobState.DROPPED: frozenset(),
}
"""The states that may follow each state."""
ROWS_IN_USE = frozenset({JobState.ACCEPTING, JobState.WRITING, JobState.READING})
"""The states in which the store may read or write the rows of a job."""
_WRITING = frozenset({JobState.WRITING})


@dataclass(eq=False)
class _Job:
    """A job of the engine."""

    message: protocol.StoreJob | protocol.LoadJob
    state: JobState = JobState.QUEUED


_QueuedWork: TypeAlias = _Job | RequestEnd | protocol.Flush
"""Work that keeps its order: store jobs, ends of requests and flushes."""


class Jobs:
    """Runs the jobs of an engine on its store, and answers them."""

    def __init__(
        self,
        store: Store,
        channel: Channel,
        publisher: ReportPublisher,
        tasks: asyncio.TaskGroup,
    ) -> None:
        """:param tasks: the group to which the tasks of jobs are added."""
        self._store = store
        self._channel = channel
        self._publisher = publisher
        self._tasks = tasks
        self.counts: Counter[JobState] = Counter()
        """Number of jobs in each state."""
        self._moved = asyncio.Event()
        """Set when a job has entered another state, for ``_wait_until_none``."""
        self.num_loads = 0
        """Load jobs that are not answered yet."""
        self.load_counts: Counter[str] = Counter()
        """Number of ``LoadReport`` messages by their reason."""
        self.load_reports: deque[LoadReport] = deque(maxlen=_REPORTS)
        """The reports of the last 64 of these messages."""
        self._queue: deque[_QueuedWork] = deque()
        """Work that ``run`` has not begun, in the order of arrival."""
        self._has_arrived = asyncio.Event()
        """Set when ``run`` has to look: the queue has work, or the engine ends."""
        # One load more than there are threads that read: the packs of the extra load are looked up
        # while the threads read.
        num_readers = store.view.threads.readers
        self._load_slots = asyncio.Semaphore(num_readers + 1)
        self._is_ending = False
        """Whether ``end`` was called: no further job begins."""

    @property
    def num_waiting(self) -> int:
        """Number of store jobs and ends of requests that have not begun."""
        return len(self._queue)

    def handle(self, message: Any) -> None:
        """Process a message from the engine about jobs; ignore other messages."""
        match message:
            case protocol.StoreJob():
                self.counts[JobState.QUEUED] += 1
                self._enqueue(_Job(message))
            case RequestEnd() | protocol.Flush():
                self._enqueue(message)
            case protocol.LoadJob():
                self.counts[JobState.QUEUED] += 1
                self.num_loads += 1
                self._tasks.create_task(self._load(_Job(message)))
            case protocol.Probe():
                # probe without a slot: loads that hang may keep all slots, and the probe must find
                # out when the medium is fast again
                self._tasks.create_task(self._probe(message))
            case protocol.Reported():
                self.load_counts[message.report.reason] += 1
                self.load_reports.append(message.report)

    def _enqueue(self, entry: _QueuedWork) -> None:
        """Queue work that keeps its order. Work that arrives after a flush waits for its end."""
        self._queue.append(entry)
        self._has_arrived.set()

    def _move(self, job: _Job, state: JobState) -> None:
        """Have a job enter the next state; raise HostError, a defect, if it may not."""
        if state not in NEXT_STATES[job.state]:
            raise HostError(f"a job that is {job.state.value} becomes {state.value}")
        self.counts[job.state] -= 1
        self.counts[state] += 1
        job.state = state
        self._moved.set()

    async def _wait_until_none(self, states: frozenset[JobState]) -> None:
        """Wait until no job is in one of these states."""
        while any(self.counts[state] for state in states):
            self._moved.clear()
            await self._moved.wait()

    async def run(self) -> None:
        """Pass the queued work to the store, in order, until the engine ends."""
        while not self._is_ending:
            if not self._queue:
                self._has_arrived.clear()
                await self._has_arrived.wait()
            elif not self._store.queue.has_room:
                # leave the work in this queue: the engine refuses new store jobs while many are
                # unanswered
                await self._store.queue.wait_for_room()
            else:
                entry = self._queue.popleft()
                await self._begin(entry)

    async def _begin(self, entry: _QueuedWork) -> None:
        """Begin queued work; return when the next one may begin."""
        match entry:
            case _Job():
                await self._store_blocks(entry)
            case RequestEnd():
                self._end_request(entry)
            case protocol.Flush():
                await self._flush(entry)

    # Stores

    async def _store_blocks(self, job: _Job) -> None:
        """Pass a job to the store. Answer it if its rows are free; otherwise a task does so
        later."""
        message = job.message
        assert isinstance(message, protocol.StoreJob)
        self._move(job, JobState.ACCEPTING)
        try:
            keys = message.keys.unpack()
            block_ids = array("I", message.block_ids)
            # an empty array: the depths are unknown
            depths = array("I", message.depths) or None
            accepted = await self._store.put(
                message.request, keys, block_ids, depths, message.tenant
            )
        except (ValueError, CorruptPackError) as error:
            # log the error as text, because a record with it would keep the rows mapped
            logger.error("store job %d is refused: %s", message.job_id, str(error))
            self._answer(job, failed=None)
            return
        # wait for the commits in another task, so that the next job begins meanwhile
        if accepted.writes:
            self._move(job, JobState.WRITING)
            self._tasks.create_task(self._finish_store(job, accepted))
        else:
            self._answer(job, accepted.lost)

    async def _finish_store(self, job: _Job, accepted: StoredJob) -> None:
        """Answer a store job when the commits do not read its rows any more."""
        lost = await self._store.finish(accepted)
        self._answer(job, lost)

    def _end_request(self, end: RequestEnd) -> None:
        """Pass the end of a request to the store; if it is invalid, report that the request is not
        stored."""
        try:
            self._store.end_request(end)
        except ValueError as error:
            why = str(error)
            logger.error("the end of request %s is refused: %s", end.request, why)
            # report the end as not whole, because the engine waits for the result of each end
            is_whole = False
            report = self._store.view.report
            report.persisted.append((end.request, is_whole))

    async def _flush(self, message: protocol.Flush) -> None:
        """Commit until no accepted work is left, then answer.

        Repeated, because blocks of a failed transaction can be stored again from the rows of
        another job.
        """
        # wait for store jobs only, because loads change nothing
        while self.counts[JobState.WRITING] or not self._store.queue.is_empty:
            await self._store.flush()
            await self._wait_until_none(_WRITING)
        await self._publisher.wait_until_sent()
        self._channel.send(protocol.Flushed(message.token))

    # Loads

    async def _load(self, job: _Job) -> None:
        """Run a load job when a slot is free; answer it at its deadline at the latest."""
        message = job.message
        assert isinstance(message, protocol.LoadJob)
        try:
            # wait no longer than the deadline, because the loads that have the slots may hang; None
            # waits for ever
            async with asyncio.timeout_at(message.deadline):
                await self._load_slots.acquire()
        except TimeoutError:
            self._drop_late(job)
        else:
            try:
                await self._read(job, message.deadline)
            finally:
                self._load_slots.release()
        self.num_loads -= 1  # ``handle`` has counted this load

    def _drop_late(self, job: _Job) -> None:
        """End a load whose deadline has passed before it began."""
        if self._is_ending:
            self._move(job, JobState.DROPPED)
            return
        # pass through this state although nothing is read, because only it may be followed by an
        # answer
        self._move(job, JobState.READING)
        self._answer(job, failed=None, is_late=True)

    async def _read(self, job: _Job, deadline: float | None) -> None:
        """Fill the rows of a load job, and answer it; drop it if the engine has ended."""
        if self._is_ending:
            self._move(job, JobState.DROPPED)
            return
        self._move(job, JobState.READING)
        message = job.message
        try:
            keys = message.keys.unpack()
            block_ids = array("I", message.block_ids)
            outcome = await self._store.read(keys, block_ids, deadline)
        except (ValueError, CorruptPackError) as error:
            logger.error("load job %d is refused: %s", message.job_id, str(error))
            self._answer(job, failed=None)
            return
        if outcome.failed:
            # Send the report before the answer, so that the engine stores the failed blocks again.
            # The lookup table may not tell their keys from those of held blocks with equal
            # fingerprints, so the report names them.
            self._publisher.send_report()
        self._answer(
            job,
            outcome.failed,
            num_bytes=outcome.raw_bytes,
            is_late=outcome.is_late,
        )

    async def _probe(self, message: protocol.Probe) -> None:
        """Read a few blocks, discard them, and answer how many bytes were read and how long that
        took, from the engine's message on. An engine that has stopped loading from a slow medium
        learns in this way when the medium is fast again."""
        num_bytes = 0
        try:
            keys = message.keys.unpack()
            outcome = await self._store.probe(keys, message.deadline)
            num_bytes = outcome.raw_bytes
        except (ValueError, CorruptPackError) as error:
            logger.error("a probe is refused: %s", str(error))
        seconds = time.monotonic() - message.begin
        self._channel.send(protocol.Probed(num_bytes, seconds))

    def _answer(
        self,
        job: _Job,
        failed: list[bytes] | None,
        num_bytes: int = 0,
        *,
        is_late: bool = False,
    ) -> None:
        """Answer a job: its rows are not in use any more.

        :param failed: keys whose blocks were not stored or loaded; None: all keys of the job.
        :param num_bytes: raw bytes of a load job that were loaded; 0 for a store job.
        :param is_late: whether the deadline of a load job passed before all its blocks were read.
        """
        packed = None if failed is None else PackedKeys.of(failed)
        job_id = job.message.job_id
        answer = protocol.JobDone(job_id, packed, num_bytes, is_late)
        # answer before the state changes: ``end`` waits for the change, and no answer may follow
        # ``Ended``
        self._channel.send(answer)
        self._move(job, JobState.ANSWERED)

    # The end

    async def end(self) -> None:
        """Drop the jobs that have not begun; return when no row is in use. Ends of requests are
        passed to the store."""
        self._is_ending = True
        # this wakes ``run``, which returns
        self._has_arrived.set()
        # refuse the rows first, so that no commit begins to read the rows of jobs that get no
        # answer
        self._store.refuse_rows()
        for entry in self._queue:
            if isinstance(entry, RequestEnd):
                self._end_request(entry)
            elif isinstance(entry, _Job):
                self._move(entry, JobState.DROPPED)
        self._queue.clear()
        await self._wait_until_none(ROWS_IN_USE)
