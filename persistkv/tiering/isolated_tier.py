"""A secondary tier as the tiering manager calls it."""

from __future__ import annotations

import logging
import math
from collections.abc import Sequence
from typing import cast

from persistkv.base import (
    OffloadingEvent,
    OffloadKey,
    OffloadPolicy,
    ReqContext,
    RequestOffloadingContext,
    StoredContext,
)
from persistkv.isolation import Isolation
from persistkv.tiering.base import JobMetadata, JobResult, SecondaryTierManager
from persistkv.tiering.load_cost import LoadDecision
from persistkv.tiering.prewarming import RecentContexts

logger = logging.getLogger(__name__)

_NOT_PROMOTED = "recently used contexts are not promoted"


class IsolatedTier:
    """Wrapper of a secondary tier that logs its exceptions; the results are then those of an empty
    tier.

    A tier is unusable, which means that lookups miss and that the manager submits no jobs to it,

    - after ``get_finished_jobs`` raised, until it succeeds, because rows of its jobs would stay
      reserved forever;
    - after a failed reset for changed weights, until a later one succeeds, because it may hold
      blocks of old weights.
    """

    def __init__(self, tier: SecondaryTierManager) -> None:
        self.tier = tier
        self.lists_contexts = isinstance(tier, RecentContexts)
        """Whether the tier can list recently used contexts (``ask_recent``)."""
        self.is_usable = True
        """Whether the tier gets lookups and jobs; see the class."""
        self.poll_failed = False
        """Whether the tier's last ``get_finished_jobs`` raised."""
        self._reset_failed = False
        """Whether the last ``reset_cache`` for changed weights raised."""
        self._isolation = Isolation(f"secondary tier {tier.get_tier_type()}")
        self._attempt = self._isolation.attempt
        """Calls a method of the tier; ``default`` is the result if the method raises."""
        own_lookup_prefix = type(tier).lookup_prefix
        self._has_lookup_prefix = (
            own_lookup_prefix is not SecondaryTierManager.lookup_prefix
        )
        """Whether the tier overrides ``lookup_prefix``."""

    # Lookup

    def lookup(self, key: OffloadKey, req_context: ReqContext) -> bool | None:
        """Return the tier's answer; False if it is unusable or raises."""
        if not self.is_usable:
            return False
        # ``attempt`` would be slower: this is the manager's hottest call, once per block and tier.
        try:
            return self.tier.lookup(key, req_context)
        except Exception as error:
            self._isolation.report("lookup", "the block is a miss", error)
            return False

    def num_held(self, keys: Sequence[OffloadKey], req_context: ReqContext) -> int:
        """Return how many of the keys, from the first on without a gap, the tier holds.

        0 also if the tier has no ``lookup_prefix`` of its own: the manager then calls ``lookup``
        for each key, which is as fast.
        """
        if not (self.is_usable and self._has_lookup_prefix):
            return 0
        return self._attempt(
            "lookup_prefix",
            self.tier.lookup_prefix,
            keys,
            req_context,
            default=0,
            consequence="its blocks are misses",
        )

    def touch(self, keys: Sequence[OffloadKey], req_context: ReqContext) -> None:
        self._attempt(
            "touch",
            self.tier.touch,
            keys,
            req_context,
            default=None,
            consequence="the use is not counted",
        )

    # Whether to load

    @property
    def load_deadline_s(self) -> float:
        return self.tier.load_deadline_s

    def expected_load_s(self, num_bytes: int) -> float | None:
        """Return the tier's estimate; see ``SecondaryTierManager``."""
        # a tier that raises is expected to take forever, so that nothing is loaded from it
        never: float | None = math.inf
        return self._attempt(
            "expected_load_s",
            self.tier.expected_load_s,
            num_bytes,
            default=never,
            consequence="its blocks are computed",
        )

    def on_load_declined(
        self,
        keys: Sequence[OffloadKey],
        req_context: ReqContext,
        decision: LoadDecision,
    ) -> None:
        with self._isolation.guard("on_load_declined", "the decision is not counted"):
            self.tier.on_load_declined(keys, req_context, decision)

    def on_faster_tier(self, keys: Sequence[OffloadKey]) -> None:
        with self._isolation.guard("on_faster_tier", "the tier is not tried again"):
            self.tier.on_faster_tier(keys)

    def on_load_abandoned(self, job_id: int) -> None:
        with self._isolation.guard("on_load_abandoned", "the load counts as ended"):
            self.tier.on_load_abandoned(job_id)

    def on_restored(self, keys: Sequence[OffloadKey], req_context: ReqContext) -> None:
        with self._isolation.guard("on_restored", "the blocks are not counted"):
            self.tier.on_restored(keys, req_context)

    # Jobs

    def submit(self, job: JobMetadata) -> bool:
        """Submit a load or store job to the tier. Return False if the tier raised: the job has
        failed."""
        call = "submit_load" if job.is_promotion else "submit_store"
        with self._isolation.guard(call, "the job failed") as guarded:
            if job.is_promotion:
                self.tier.submit_load(job)
            else:
                self.tier.submit_store(job)
        return not guarded.raised

    def finished_jobs(self) -> list[JobResult]:
        """Return the results of jobs that have ended. If the tier raises, it is unusable until a
        later call succeeds."""
        finished: list[JobResult] = []
        consequence = "its jobs fail, and it gets no others until a poll succeeds"
        with self._isolation.guard("get_finished_jobs", consequence) as guarded:
            # ``extend`` keeps the results of an iterator that raises
            finished.extend(self.tier.get_finished_jobs())
        self.poll_failed = guarded.raised
        # after a failed reset, the tier may hold blocks of old weights, whether this poll succeeds
        # or not
        self.is_usable = not (guarded.raised or self._reset_failed)
        return finished

    # Requests

    def on_new_request(self, req_context: ReqContext) -> OffloadPolicy:
        """Announce a request; return which of its blocks the tier must receive to store."""
        answer = self._attempt(
            "on_new_request",
            self.tier.on_new_request,
            req_context,
            default=RequestOffloadingContext(),
            consequence="the tier receives newly computed blocks only",
        )
        return answer.policy

    def on_request_finished(self, req_context: ReqContext) -> None:
        self._attempt(
            "on_request_finished",
            self.tier.on_request_finished,
            req_context,
            default=None,
            consequence="the tier may miss the end",
        )

    # The state of the tier

    def take_events(self) -> list[OffloadingEvent]:
        events: list[OffloadingEvent] = []
        with self._isolation.guard("take_events", "events of the tier may be missing"):
            events.extend(self.tier.take_events())
        return events

    def reset_cache(self, weights_changed: bool) -> None:
        """Reset the tier. If it raises although the weights changed, it is unusable until a later
        reset for changed weights succeeds."""
        consequence = "the tier keeps its state"
        if weights_changed:
            consequence = "the tier is not used until a reset succeeds"
        with self._isolation.guard("reset_cache", consequence) as guarded:
            self.tier.reset_cache(weights_changed)
        # without changed weights, blocks remain valid whether the reset succeeds or not
        if weights_changed:
            self._reset_failed = guarded.raised
            self.is_usable = not (guarded.raised or self.poll_failed)

    def ask_recent(self, max_blocks: int, *, prefetched: bool = False) -> bool:
        """See ``RecentContexts``, which the tier must implement."""
        tier = cast(RecentContexts, self.tier)
        return self._attempt(
            "ask_recent",
            tier.ask_recent,
            max_blocks,
            prefetched=prefetched,
            default=False,
            consequence=_NOT_PROMOTED,
        )

    def take_recent(self) -> list[StoredContext] | None:
        tier = cast(RecentContexts, self.tier)
        return self._attempt(
            "take_recent", tier.take_recent, default=None, consequence=_NOT_PROMOTED
        )

    def has_pending_work(self) -> bool:
        """Return whether the tier needs engine steps. An unusable one never does: an engine would
        step for it forever."""
        if not self.is_usable:
            return False
        return self._attempt(
            "has_pending_work",
            self.tier.has_pending_work,
            default=False,
            consequence="the tier is taken as idle",
        )

    def drain(self, timeout_s: float) -> bool:
        """Wait up to ``timeout_s`` seconds for the tier's jobs; return whether they have ended.
        False at once if no time is left."""
        if timeout_s <= 0:
            return False
        return self._attempt(
            "drain_jobs",
            self.tier.drain_jobs,
            timeout_s,
            default=False,
            consequence="its jobs may not have ended",
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
