"""A secondary tier as the tiering manager calls it."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from functools import partial
from typing import cast

from persistkv.base import OffloadingEvent, OffloadKey, OffloadPolicy, ReqContext
from persistkv.isolation import Isolation
from persistkv.tiering.base import JobMetadata, JobResult, SecondaryTierManager
from persistkv.tiering.prewarming import RecentContexts

logger = logging.getLogger(__name__)


class IsolatedTier:
    """Wrapper of a secondary tier that logs its exceptions; the results are then those of an empty
    tier.

    A tier is unusable, which means that it gets no lookups and no jobs,

    - after ``get_finished_jobs`` raised, until it succeeds, because rows of its jobs would stay
      reserved forever;
    - after a failed reset for changed weights, until a later one succeeds, because it may hold
      blocks of old weights.
    """

    def __init__(self, tier: SecondaryTierManager) -> None:
        self.tier = tier
        self._isolation = Isolation(f"secondary tier {tier.get_tier_type()}")
        self._attempt = self._isolation.attempt
        self.num_cascading = 0
        """Blocks that the tier's store jobs in flight keep from eviction; updated by the
        manager."""
        self.is_usable = True
        self.is_silent = False
        """Whether the tier's last ``get_finished_jobs`` raised."""
        self._is_stale = False

    def lookup(self, key: OffloadKey, req_context: ReqContext) -> bool | None:
        try:
            return self.tier.lookup(key, req_context)
        except Exception as error:
            self._isolation.report("lookup", "the block is a miss", error)
            return False

    def num_held(self, keys: Sequence[OffloadKey], req_context: ReqContext) -> int:
        """Return the tier's ``lookup_prefix``; 0 if it does not override it: single lookups are
        then as fast."""
        if type(self.tier).lookup_prefix is SecondaryTierManager.lookup_prefix:
            return 0
        return self._attempt(
            "lookup_prefix",
            "its blocks are misses",
            0,
            self.tier.lookup_prefix,
            keys,
            req_context,
        )

    def touch(self, keys: Sequence[OffloadKey], req_context: ReqContext) -> None:
        self._attempt(
            "touch", "the use is not counted", None, self.tier.touch, keys, req_context
        )

    def submit(self, job: JobMetadata) -> bool:
        """Submit a load or store job to the tier. Return False if the tier raised: the job has
        failed."""
        submit = self.tier.submit_load if job.is_promotion else self.tier.submit_store
        with self._isolation.guard(
            "submit_load" if job.is_promotion else "submit_store", "the job failed"
        ) as guard:
            submit(job)
        return not guard.raised

    def finished_jobs(self) -> list[JobResult]:
        finished: list[JobResult] = []
        consequence = "its jobs fail, and it gets no others until a poll succeeds"
        with self._isolation.guard("get_finished_jobs", consequence) as guard:
            # keeps the results of an iterator that raises
            finished.extend(self.tier.get_finished_jobs())
        self.is_silent = guard.raised
        self.is_usable = not (self.is_silent or self._is_stale)
        return finished

    def on_new_request(self, req_context: ReqContext) -> OffloadPolicy:
        return self._attempt(
            "on_new_request",
            "the tier receives newly computed blocks only",
            OffloadPolicy.BLOCK_LEVEL,
            lambda: self.tier.on_new_request(req_context).policy,
        )

    def on_request_finished(self, req_context: ReqContext) -> None:
        self._attempt(
            "on_request_finished",
            "the tier may miss the end",
            None,
            self.tier.on_request_finished,
            req_context,
        )

    def take_events(self) -> list[OffloadingEvent]:
        events: list[OffloadingEvent] = []
        with self._isolation.guard("take_events", "events of the tier may be missing"):
            events.extend(self.tier.take_events())
        return events

    def reset_cache(self, weights_changed: bool) -> None:
        consequence = (
            "the tier is not used until a reset succeeds"
            if weights_changed
            else "the tier keeps its state"
        )
        with self._isolation.guard("reset_cache", consequence) as guard:
            self.tier.reset_cache(weights_changed)
        if weights_changed:
            self._is_stale = guard.raised
            self.is_usable = not (self.is_silent or self._is_stale)

    def ask_recent(self, max_blocks: int, *, prefetched: bool = False) -> bool:
        """See ``RecentContexts``, which the tier must implement."""
        ask = partial(
            cast(RecentContexts, self.tier).ask_recent,
            max_blocks,
            prefetched=prefetched,
        )
        return self._attempt(
            "ask_recent", "recently used contexts are not promoted", False, ask
        )

    def take_recent(self) -> list[list[OffloadKey]] | None:
        take = cast(RecentContexts, self.tier).take_recent
        return self._attempt(
            "take_recent", "recently used contexts are not promoted", None, take
        )

    def has_pending_work(self) -> bool:
        return self._attempt(
            "has_pending_work",
            "the tier is taken as idle",
            False,
            self.tier.has_pending_work,
        )

    def drain(self, timeout_s: float) -> bool:
        """Wait up to ``timeout_s`` seconds for the tier's jobs; return whether they have ended."""
        consequence = "its jobs may not have ended"
        return timeout_s > 0 and self._attempt(
            "drain_jobs", consequence, False, self.tier.drain_jobs, timeout_s
        )

    def shutdown(self, drain_s: float) -> None:
        """Wait up to ``drain_s`` seconds for the tier's jobs, then shut the tier down, even if they
        have not ended."""
        with self._isolation.guard(
            "drain_jobs", "shutting down without waiting for its jobs"
        ):
            if not self.tier.drain_jobs(drain_s):
                logger.warning(
                    "jobs of tier %s did not end within %.0f s",
                    self.tier.get_tier_type(),
                    drain_s,
                )
        with self._isolation.guard("shutdown", "its resources may not be released"):
            self.tier.shutdown()
