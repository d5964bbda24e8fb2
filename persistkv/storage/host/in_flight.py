"""Jobs and ends of requests that an engine has sent to its host, and their results.

Each submitted job has exactly one outcome:

=============  ===================================  ===============================
state          next event                           outcome
=============  ===================================  ===============================
not submitted  queue full, or the store not open    refused: its rows were not used
not submitted  sent to the host                     none yet: in flight
in flight      the host answers                     the host's result
in flight      the host is known to be dead         refused: all of its keys failed
=============  ===================================  ===============================
"""

from __future__ import annotations

import math
import time
from collections.abc import Sequence
from typing import NamedTuple

from persistkv.storage.host import protocol
from persistkv.storage.records import RequestEnd

# 32 MiB: maximum memory of ends of requests, which the host keeps until it writes their manifests
_MOST_ENDING_BYTES = 32 << 20


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
    is_late: bool = False
    """Whether a load job was not finished at its deadline, or its host was killed."""


class _SentJob(NamedTuple):
    """A job that the host has not answered."""

    keys: Sequence[bytes]
    num_bytes: int
    """Raw bytes of a store job; 0 for a load job."""
    is_load: bool
    begin: float
    """``time.monotonic`` time of the submission."""
    deadline: float = math.inf
    """``time.monotonic`` time at which a load should have ended; infinite: none."""


def _stored_bytes(job: _SentJob, num_failed: int) -> int:
    """Estimate the raw bytes of a store job without those of its failed keys. The estimate is in
    proportion to the keys, because the sizes of single blocks are not known here."""
    num_keys = len(job.keys)
    if not num_keys:
        return 0
    return job.num_bytes * (num_keys - num_failed) // num_keys


class InFlight:
    """Jobs that the host has not answered yet, and results that the engine has not taken yet."""

    def __init__(self, max_queue_bytes: int) -> None:
        """:param max_queue_bytes: bound on the raw bytes of store jobs in flight."""
        self._max_queue_bytes = max_queue_bytes
        self._jobs: dict[int, _SentJob] = {}
        """Store and load jobs that the host has not answered, by id."""
        self.queued_bytes = 0
        """Raw bytes of the store jobs in flight."""
        self.num_loads = 0
        """Number of load jobs that the host has not answered."""
        self._ends: dict[str, int] = {}
        """Bytes of the request ends in flight, by request id; ends with the same id add up."""
        self._end_bytes = 0
        """Sum of ``_ends``."""
        self.outcomes: list[JobOutcome] = []
        """Outcomes of jobs, until they are taken; also of those that were not sent."""
        self.persisted: dict[str, bool] = {}
        """Results of request ends, until they are taken: whether all blocks of the request are
        durable."""

    @property
    def num_jobs(self) -> int:
        """Number of jobs that the host has not answered."""
        return len(self._jobs)

    @property
    def owes(self) -> bool:
        """Whether the host has to answer a job or the end of a request."""
        return bool(self._jobs or self._ends)

    # Jobs

    def fits_store(self, num_bytes: int) -> bool:
        """Return whether the queue has room for a store job. A job that exceeds the bound fits an
        empty queue."""
        if not self.queued_bytes:
            return True
        return self.queued_bytes + num_bytes <= self._max_queue_bytes

    def add_store(
        self,
        job_id: int,
        keys: Sequence[bytes],
        num_bytes: int,
    ) -> None:
        """Add a store job that is sent to the host."""
        self._jobs[job_id] = _SentJob(
            keys, num_bytes, is_load=False, begin=time.monotonic()
        )
        self.queued_bytes += num_bytes

    def add_load(
        self,
        job_id: int,
        keys: Sequence[bytes],
        deadline: float | None,
    ) -> None:
        """Add a load job that is sent to the host."""
        self._jobs[job_id] = _SentJob(
            keys,
            num_bytes=0,
            is_load=True,
            begin=time.monotonic(),
            deadline=math.inf if deadline is None else deadline,
        )
        self.num_loads += 1

    def earliest_deadline(self) -> float:
        """Return the earliest deadline of the loads in flight, a ``time.monotonic`` time; infinite
        if there is none."""
        if not self.num_loads:
            return math.inf
        return min(job.deadline for job in self._jobs.values())

    def answer_job(self, answer: protocol.JobDone) -> None:
        """Add the outcome of a job that the host has answered."""
        # unpack first, because it may raise: the job then stays in flight until the host is dead
        failed = None if answer.failed is None else answer.failed.unpack()
        job = self._jobs.pop(answer.job_id, None)
        # only a defective host answers a job that it does not have
        if job is None:
            return
        if failed is None:
            failed = list(job.keys)
        if job.is_load:
            self.num_loads -= 1
            num_bytes = answer.num_bytes
        else:
            self.queued_bytes -= job.num_bytes
            num_bytes = _stored_bytes(job, num_failed=len(failed))
        outcome = JobOutcome(
            answer.job_id,
            failed,
            refused=False,
            num_bytes=num_bytes,
            seconds=max(0.0, answer.ended_at - job.begin),
            is_late=answer.is_late,
        )
        self.outcomes.append(outcome)

    # Ends of requests

    def fits_end(self, end: RequestEnd) -> bool:
        """Return whether the queue has room for the end of a request."""
        if not self._end_bytes:
            return True
        return self._end_bytes + end.num_bytes <= _MOST_ENDING_BYTES

    def add_end(self, end: RequestEnd) -> None:
        """Add the end of a request that is sent to the host."""
        num_bytes = end.num_bytes
        # an earlier end with this id may be in flight; one answer ends both
        sent_bytes = self._ends.get(end.request, 0)
        self._ends[end.request] = sent_bytes + num_bytes
        self._end_bytes += num_bytes

    def answer_end(self, request: str, whole: bool) -> None:
        """Record whether all blocks of a request are durable."""
        self._end_bytes -= self._ends.pop(request, 0)
        self.persisted[request] = whole

    # The end of the host

    def fail_all(self) -> int:
        """Fail all jobs and request ends in flight, because the host is dead and no longer uses
        rows; return the number of jobs."""
        now = time.monotonic()
        for job_id, job in self._jobs.items():
            outcome = JobOutcome(
                job_id,
                failed=list(job.keys),
                refused=True,
                num_bytes=0,
                seconds=now - job.begin,
                # a load counts as late: its read may hang, and may be why the host was killed
                is_late=job.is_load,
            )
            self.outcomes.append(outcome)
        self.persisted.update(dict.fromkeys(self._ends, False))
        num_jobs = len(self._jobs)
        self._jobs.clear()
        self._ends.clear()
        self.queued_bytes = 0
        self._end_bytes = 0
        self.num_loads = 0
        return num_jobs
