"""What was handed to the store's side and is not answered yet: jobs, and the ends of requests.

1. Each job ends exactly once: refused here, answered, or lost with the store's side.
2. Both queues are bounded in bytes; what comes past a bound is refused, unless it is alone.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import NamedTuple

from persistkv.storage.host.answers import ClientCounters, JobOutcome

_MOST_ENDING_BYTES = 16 << 20  # 16 MiB of keys in ends of requests: their manifests wait in the store's memory


class _Flight(NamedTuple):
    keys: Sequence[bytes]
    num_bytes: int
    begin: float
    is_store: bool


class Flights:
    """See the top of this file."""

    def __init__(self, counters: ClientCounters, max_queue_bytes: int) -> None:
        """:param max_queue_bytes: bound on the raw bytes of store jobs."""
        self._counters = counters
        self._max_queue_bytes = max_queue_bytes
        self._jobs: dict[int, _Flight] = {}
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
        self._jobs[job_id] = _Flight(keys, num_bytes, time.monotonic(), is_store)
        self._queued_bytes += num_bytes

    def refuse(self, job_id: int, keys: Sequence[bytes], num_bytes: int) -> None:
        """A job is not sent."""
        self._counters.refused_jobs += 1
        self._counters.refused_bytes += num_bytes
        self._outcomes.append(JobOutcome(job_id, list(keys), True, 0, 0.0))

    def end(self, job_id: int, failed: list[bytes], loaded_bytes: int) -> None:
        """A job was answered; an answer to none is passed over."""
        flight = self._jobs.pop(job_id, None)
        if flight is None:
            return
        self._queued_bytes -= flight.num_bytes
        num_bytes = loaded_bytes
        if flight.is_store:
            num_bytes = flight.num_bytes * (len(flight.keys) - len(failed)) // max(1, len(flight.keys))
        self._outcomes.append(JobOutcome(job_id, failed, False, num_bytes, time.monotonic() - flight.begin))

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

    def end_end(self, request: str, whole: bool) -> None:
        """The end of a request was dealt with."""
        self._ending_bytes -= self._ending.pop(request, 0)
        self._persisted[request] = whole

    def lose_all(self) -> None:
        """The store's side is dead: the rows of its jobs are free, what it did not report never happened."""
        self._counters.lost_jobs += len(self._jobs)
        now = time.monotonic()
        for job_id, flight in self._jobs.items():
            self._outcomes.append(JobOutcome(job_id, list(flight.keys), True, 0, now - flight.begin))
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
