"""Jobs of secondary tiers that are in flight, with the deadlines of their loads."""

from __future__ import annotations

import itertools
import math
import time
from collections.abc import Sequence
from dataclasses import dataclass

from persistkv.base import OffloadKey, ReqContext
from persistkv.cpu.manager import CPULoadStoreSpec
from persistkv.tiering.base import JobMetadata
from persistkv.tiering.isolated_tier import IsolatedTier
from persistkv.tiering.load_cost import LoadDecision

# A tier that stops a load at its deadline still reports the blocks that are loaded. It has a tenth
# of the load's time limit for this, and 20 ms.
_ANSWER_SHARE = 0.1
_ANSWER_S = 0.02


@dataclass
class TierJob:
    """Job in flight of a secondary tier: a store (cascade) or load (promotion)."""

    tier: IsolatedTier
    data: JobMetadata
    is_reset: bool = False
    """Whether the cache was reset after the submission. The job still uses its rows, but no request
    waits for its blocks."""
    give_up_at: float = math.inf
    """``time.monotonic`` time at which requests no longer wait for a promotion."""


class JobsInFlight:
    """Jobs that secondary tiers have not reported as ended, in the order of their submission."""

    def __init__(self) -> None:
        self._job_ids = itertools.count()
        self._jobs: dict[int, TierJob] = {}
        """By job id."""

    def __len__(self) -> int:
        return len(self._jobs)

    def add_cascade(
        self,
        tier: IsolatedTier,
        keys: list[OffloadKey],
        rows: CPULoadStoreSpec,
        context: ReqContext,
    ) -> TierJob:
        """Add a job that stores readable rows."""
        job_id = next(self._job_ids)
        data = JobMetadata(
            job_id,
            keys,
            rows.block_ids,
            is_promotion=False,
            req_context=context,
        )
        return self._add(TierJob(tier, data))

    def add_promotion(
        self,
        tier: IsolatedTier,
        keys: list[OffloadKey],
        rows: CPULoadStoreSpec,
        context: ReqContext,
        *,
        limit_s: float,
        decision: LoadDecision | None,
    ) -> TierJob:
        """Add a job that loads blocks into rows.

        :param limit_s: seconds after which the load is abandoned; may be infinite.
        :param decision: why the request loads the blocks; None: it was not decided.
        """
        deadline = None
        give_up_at = math.inf
        if math.isfinite(limit_s):
            deadline = time.monotonic() + limit_s
            # time for the tier's report of the blocks that were loaded at the deadline
            answer_s = _ANSWER_S + _ANSWER_SHARE * limit_s
            give_up_at = deadline + answer_s
        job_id = next(self._job_ids)
        data = JobMetadata(
            job_id,
            keys,
            rows.block_ids,
            is_promotion=True,
            req_context=context,
            deadline=deadline,
            decision=decision,
        )
        return self._add(TierJob(tier, data, give_up_at=give_up_at))

    def _add(self, job: TierJob) -> TierJob:
        self._jobs[job.data.job_id] = job
        return job

    def take_ended(self, job_id: int) -> TierJob | None:
        """Remove a job that has ended and return it; None: it is not in flight."""
        return self._jobs.pop(job_id, None)

    def take_late(self) -> Sequence[TierJob]:
        """Return the promotions whose deadline has passed, each once. They stay in flight.

        Other jobs have no deadline, and no request waits for a job that was reset.
        """
        now = time.monotonic()
        late = []
        for job in self._jobs.values():
            if now >= job.give_up_at and not job.is_reset:
                # a later call must not return the job again
                job.give_up_at = math.inf
                late.append(job)
        return late

    def promotions_of(self, tier: IsolatedTier) -> Sequence[TierJob]:
        """Return the promotions of a tier that requests may wait for."""
        promotions = []
        for job in self._jobs.values():
            if job.tier is tier and job.data.is_promotion and not job.is_reset:
                promotions.append(job)
        return promotions

    def has_jobs_of(self, context: ReqContext) -> bool:
        return any(job.data.req_context is context for job in self._jobs.values())

    def can_end(self) -> bool:
        """Return whether a job is in flight whose tier can be polled."""
        return any(job.tier.is_usable for job in self._jobs.values())

    def reset(self) -> None:
        """Detach the jobs in flight from the requests: the cache was reset."""
        for job in self._jobs.values():
            job.is_reset = True
