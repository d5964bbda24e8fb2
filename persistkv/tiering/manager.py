"""The primary tier and what lies behind it, as one OffloadingManager.

1. A block that a store completed cascades to every secondary tier, each with a reference of its own on the row.
2. A block that only a secondary tier holds is a *retry later*, and is promoted: one job per tier and request, all
   groups together, submitted at the end of the step (``take_events``).
3. A row is readable only after its promotion was verified; a failed one frees it, and is a miss for who asked.
4. Promoted rows stay referenced for the requests that wanted them until they load them, end, or a deadline passes.
5. What was used last may be promoted before anyone asks: one context at a time, and whoever asks for it waits for it.
6. Nothing here waits, but ``shutdown``.
"""

from __future__ import annotations

import itertools
import logging
import time
from collections.abc import Iterable, Sequence

from persistkv.base import (
    BlockIDsLoadStoreSpec,
    LoadStoreSpec,
    OffloadingEvent,
    OffloadingManager,
    OffloadKey,
    OffloadPolicy,
    PrepareStoreOutput,
    ReqContext,
    RequestOffloadingContext,
)
from persistkv.cpu.primary import CPUPrimaryTierOffloadingManager
from persistkv.errors import ConfigurationError
from persistkv.tiering.base import JobMetadata, JobResult, SecondaryTierManager
from persistkv.tiering.prewarming import Prewarming, RecentContexts
from persistkv.tiering.promotion import PendingPromotion, TieringRequest, TieringStats, TierJob

logger = logging.getLogger(__name__)

_DRAIN_S = 60.0
_PREWARM = ReqContext("prewarm")
"""Whom promotions are for that no request asked for."""


class TieringOffloadingManager(OffloadingManager):
    """See the top of this file. Not thread-safe: the scheduler's thread calls it.

    :param primary_tier: owned from here on, and shut down last.
    :param secondary_tiers: asked in this order; owned from here on. There may be none.
    :param enable_events: whether ``take_events`` hands over what came and went; the step ends either way.
    :param cascade_share: part of the primary tier's rows that cascades may keep from eviction, shared by the tiers
        evenly. A single job may be larger where its tier has no other.
    :param hold_s: seconds that promoted rows wait for their request, and a promotion for room.
    :param prewarm_share: part of the primary tier's rows to fill, in the first steps, with the contexts used last, as
        the first tier that knows them tells.
    :raises ConfigurationError: where a number is out of range.
    """

    def __init__(
        self,
        primary_tier: CPUPrimaryTierOffloadingManager,
        secondary_tiers: Sequence[SecondaryTierManager] = (),
        enable_events: bool = False,
        *,
        cascade_share: float = 0.5,
        hold_s: float = 30.0,
        prewarm_share: float = 0.0,
    ) -> None:
        if not 0 < cascade_share <= 1:
            raise ConfigurationError("cascade_share", cascade_share, "a share above 0 and at most 1")
        if hold_s <= 0:
            raise ConfigurationError("hold_s", hold_s, "a positive number of seconds")
        if not 0 <= prewarm_share <= 1:
            raise ConfigurationError("prewarm_share", prewarm_share, "a share from 0 to 1")
        self.primary_tier = primary_tier
        self.secondary_tiers = list(secondary_tiers)
        self.stats = TieringStats()
        self._enable_events = enable_events
        self._max_cascading = primary_tier.num_blocks * cascade_share / max(1, len(self.secondary_tiers))
        self._hold_s = hold_s
        self._cascading = dict.fromkeys(self.secondary_tiers, 0)
        self._epoch = 0
        self._job_ids = itertools.count()
        self._jobs: dict[int, TierJob] = {}
        self._requests: dict[str, TieringRequest] = {}
        self._pending: dict[tuple[int, str], PendingPromotion] = {}
        self._waiters: dict[OffloadKey, set[str]] = {}
        self._awaited: dict[OffloadKey, set[str]] = {}
        knowing = next((tier for tier in self.secondary_tiers if isinstance(tier, RecentContexts)), None)
        self._prewarming: Prewarming | None = None
        if knowing is not None and prewarm_share:
            self._prewarming = Prewarming(knowing, int(primary_tier.num_blocks * prewarm_share))

    # Lookup and promotion

    def lookup(self, key: OffloadKey, req_context: ReqContext) -> bool | None:
        answer = self.primary_tier.lookup(key, req_context)
        if answer:
            return True
        waiters = self._waiters.get(key)
        if waiters is not None:
            waiters.add(req_context.req_id)
            return None
        if answer is None:
            return None
        return self._lookup_behind(key, req_context)

    def _lookup_behind(self, key: OffloadKey, req_context: ReqContext) -> bool | None:
        request = self._requests.get(req_context.req_id)
        if request is None or key in request.missed:
            return False
        for number, tier in enumerate(self.secondary_tiers):
            answer = tier.lookup(key, req_context)
            if answer:
                self._want(number, tier, key, req_context)
                return None
            if answer is None:
                return None
        return False

    def _want(self, number: int, tier: SecondaryTierManager, key: OffloadKey, req_context: ReqContext) -> None:
        place = (number, req_context.req_id)
        pending = self._pending.get(place)
        if pending is None:
            pending = self._pending[place] = PendingPromotion(tier, req_context, since=time.monotonic())
        pending.keys[key] = None
        self._waiters[key] = {req_context.req_id}

    def _submit_promotions(self) -> None:
        pending, self._pending = self._pending, {}
        for place, promotion in pending.items():
            keys, resident = promotion.in_prefix_order(), self._resident(promotion.req_context)
            spared = self.primary_tier.num_evictable_of(resident)
            room = self.primary_tier.num_free_or_evictable() - spared
            if not room and time.monotonic() - promotion.since < self._hold_s:
                self._pending[place] = promotion
                continue
            self._decline(keys[room:])
            if room:
                self._submit_promotion(promotion, keys[:room], resident)

    def _prewarm(self, prewarming: Prewarming) -> None:
        """Queue the next of the contexts that were used last, once nothing of the one before is on its way."""
        if not prewarming.is_due or self._prewarm_waits():
            return
        keys = prewarming.next_context()
        new = [
            key for key in keys or () if self.primary_tier.lookup(key, _PREWARM) is False and key not in self._waiters
        ]
        for number, tier in enumerate(self.secondary_tiers):
            held = [key for key in new if key not in self._waiters and tier.lookup(key, _PREWARM)]
            if held:
                since = time.monotonic()
                self._pending[number, _PREWARM.req_id] = PendingPromotion(tier, _PREWARM, dict.fromkeys(held), since)
                self._waiters.update((key, set()) for key in held)

    def _prewarm_waits(self) -> bool:
        if any(place[1] == _PREWARM.req_id for place in self._pending):
            return True
        return any(job.req_context is _PREWARM for job in self._jobs.values())

    def _resident(self, req_context: ReqContext) -> list[OffloadKey]:
        """What the request finds in the primary tier already: its promotion must not evict its own prefix."""
        if req_context.description is None:
            return []
        is_ready = self.primary_tier.is_ready
        return [key for chain in req_context.description.group_keys for key in chain if is_ready(key)]

    def _submit_promotion(
        self, promotion: PendingPromotion, keys: list[OffloadKey], resident: list[OffloadKey]
    ) -> None:
        output = self.primary_tier.prepare_write(resident + keys, promotion.req_context)
        if output is None:
            self._decline(keys)
            return
        for key in set(keys).difference(output.keys_to_store):
            del self._waiters[key]  # somebody else writes it to the primary tier by now
        if output.keys_to_store:
            job = TierJob(promotion.tier, output.keys_to_store, True, promotion.req_context, self._epoch)
            promotion.tier.submit_load(self._job(job, output.store_spec))

    def _decline(self, keys: Iterable[OffloadKey]) -> None:
        """No row can be had: a miss for those who wait, who go on with the prefix that they got."""
        for key in keys:
            self.stats.declined_promotions += 1
            self._miss(key)

    def _miss(self, key: OffloadKey) -> None:
        for req_id in self._waiters.pop(key, ()):
            if request := self._requests.get(req_id):
                request.missed.add(key)

    def _job(self, job: TierJob, spec: LoadStoreSpec) -> JobMetadata:
        job_id = next(self._job_ids)
        self._jobs[job_id] = job
        return JobMetadata(job_id, job.keys, _block_ids(spec), job.is_promotion, job.req_context)

    # Loading

    def prepare_load(self, keys: Sequence[OffloadKey], req_context: ReqContext) -> LoadStoreSpec:
        spec = self.primary_tier.prepare_load(keys, req_context)
        request = self._requests.get(req_context.req_id)
        if request is not None and request.held:
            self._let_go(request, request.held.intersection(keys))
        return spec

    def complete_load(self, keys: Sequence[OffloadKey], req_context: ReqContext) -> None:
        self.primary_tier.complete_load(keys, req_context)

    def touch(self, keys: Sequence[OffloadKey], req_context: ReqContext) -> None:
        self.primary_tier.touch(keys, req_context)
        for tier in self.secondary_tiers:
            tier.touch(keys, req_context)

    def _let_go(self, request: TieringRequest, keys: set[OffloadKey]) -> None:
        self.primary_tier.complete_read(list(keys), request.context)
        request.held -= keys

    # Storing

    def prepare_store(self, keys: Sequence[OffloadKey], req_context: ReqContext) -> PrepareStoreOutput | None:
        output = self.primary_tier.prepare_store(keys, req_context)
        if output is None:
            return None
        request = self._requests.get(req_context.req_id)
        if request is not None:
            request.storing += len(output.keys_to_store)
            if request.request_level_tiers and len(output.keys_to_store) < len(keys):
                new = set(output.keys_to_store)
                existing = [key for key in keys if key not in new]
                self._cascade(existing, request.request_level_tiers, req_context)
                self._await_others(request, existing)
        return output

    def _await_others(self, request: TieringRequest, keys: Sequence[OffloadKey]) -> None:
        for key in keys:
            if self.primary_tier.lookup(key, request.context) is None:
                request.awaiting.add(key)
                self._awaited.setdefault(key, set()).add(request.context.req_id)

    def _settle(self, keys: Sequence[OffloadKey]) -> None:
        """Blocks are written, or failed: requests that counted on their writer may end now."""
        for key in keys if self._awaited else ():
            for req_id in self._awaited.pop(key, ()):
                if request := self._requests.get(req_id):
                    request.awaiting.discard(key)
                    self._end_if_done(request)

    def complete_store(self, keys: Sequence[OffloadKey], req_context: ReqContext, success: bool = True) -> None:
        self.primary_tier.complete_store(keys, req_context, success)
        if success:
            self._cascade(keys, self.secondary_tiers, req_context)
        request = self._requests.get(req_context.req_id)
        if request is not None:
            request.storing -= len(keys)
            self._end_if_done(request)
        self._settle(keys)

    def _cascade(
        self, keys: Sequence[OffloadKey], tiers: Sequence[SecondaryTierManager], req_context: ReqContext
    ) -> None:
        """Hand readable blocks on; those of an earlier epoch, or evicted meanwhile, are passed over."""
        is_ready = self.primary_tier.is_ready
        ready = [key for key in keys if is_ready(key)]
        for tier in tiers if ready else ():
            if self._cascading[tier] and self._cascading[tier] + len(ready) > self._max_cascading:
                self.stats.dropped_cascades += len(ready)
                continue
            spec = self.primary_tier.prepare_read(ready, req_context)
            self._cascading[tier] += len(ready)
            self.stats.cascaded_blocks += len(ready)
            tier.submit_store(self._job(TierJob(tier, ready, False, req_context, self._epoch), spec))

    # Requests

    def on_new_request(self, req_context: ReqContext) -> RequestOffloadingContext:
        wanting = [
            tier
            for tier in self.secondary_tiers
            if tier.on_new_request(req_context).policy is OffloadPolicy.REQUEST_LEVEL
        ]
        self._requests[req_context.req_id] = TieringRequest(req_context, wanting)
        return RequestOffloadingContext(OffloadPolicy.REQUEST_LEVEL if wanting else OffloadPolicy.BLOCK_LEVEL)

    def on_request_finished(self, req_context: ReqContext) -> None:
        request = self._requests.get(req_context.req_id)
        if request is None:
            return
        request.finished = True
        self._cancel_promotions(request)
        self._let_go(request, set(request.held))
        self._end_if_done(request)

    def _cancel_promotions(self, request: TieringRequest) -> None:
        """Blocks that nobody else waits for are not asked for; those another request waits for stay pending."""
        req_id = request.context.req_id
        for place in [place for place in self._pending if place[1] == req_id]:
            promotion = self._pending[place]
            for key in list(promotion.keys):
                waiters = self._waiters[key]
                waiters.discard(req_id)
                if not waiters:
                    del self._waiters[key], promotion.keys[key]
            if not promotion.keys:
                del self._pending[place]

    def _end_if_done(self, request: TieringRequest) -> None:
        if request.finished and not request.storing and not request.awaiting:
            del self._requests[request.context.req_id]
            for tier in self.secondary_tiers:
                tier.on_request_finished(request.context)

    # The end of a step

    def take_events(self) -> list[OffloadingEvent]:
        for tier in self.secondary_tiers:
            for result in tier.get_finished_jobs():
                self._finish(result)
        self._expire_holds()
        if self._prewarming is not None:
            self._prewarm(self._prewarming)
        if self._pending:
            self._submit_promotions()
        events = list(self.primary_tier.take_events())
        for tier in self.secondary_tiers:
            events += tier.take_events()
        return events if self._enable_events else []

    def _finish(self, result: JobResult) -> None:
        job = self._jobs.pop(result.job_id, None)
        if job is None:
            logger.error("a tier answered job %d, which is not in flight", result.job_id)
            return
        failed = set(result.failed_keys) if result.success else set(job.keys)
        if job.is_promotion:
            self._finish_promotion(job, failed)
        else:
            self._cascading[job.tier] -= len(job.keys)
            self.stats.failed_cascades += len(failed)
            self.primary_tier.complete_read(job.keys, job.req_context)

    def _finish_promotion(self, job: TierJob, failed: set[OffloadKey]) -> None:
        good = [key for key in job.keys if key not in failed]
        self.stats.promoted_blocks += len(good)
        self.stats.failed_promotions += len(failed)
        if failed:
            self.primary_tier.complete_write([key for key in job.keys if key in failed], job.req_context, success=False)
        self.primary_tier.complete_write(good, job.req_context)
        self._settle(job.keys)
        if job.epoch != self._epoch:
            return
        for key in failed:
            self._miss(key)
        self._hold(good)

    def _hold(self, keys: Sequence[OffloadKey]) -> None:
        """Reference promoted rows for each request that waits for them."""
        by_request: dict[str, list[OffloadKey]] = {}
        for key in keys:
            for req_id in self._waiters.pop(key, ()):
                by_request.setdefault(req_id, []).append(key)
        for req_id, wanted in by_request.items():
            request = self._requests.get(req_id)
            if request is not None and not request.finished:
                self.primary_tier.prepare_read(wanted, request.context)
                request.held.update(wanted)
                request.held_until = time.monotonic() + self._hold_s

    def _expire_holds(self) -> None:
        now = None
        for request in self._requests.values():
            if request.held:
                now = time.monotonic() if now is None else now
                if now >= request.held_until:
                    self.stats.expired_holds += len(request.held)
                    self._let_go(request, set(request.held))

    # The whole

    def has_pending_work(self) -> bool:
        """Whether the engine should go on taking steps although no request runs."""
        if self._jobs or self._pending or not (self._prewarming is None or self._prewarming.ended):
            return True
        return any(tier.has_pending_work() for tier in self.secondary_tiers)

    def reset_cache(self, weights_changed: bool = True) -> None:
        for request in self._requests.values():
            self._let_go(request, set(request.held))
        self._epoch += 1
        self._pending.clear()
        self._waiters.clear()
        self._prewarming = None
        self.primary_tier.reset_cache(weights_changed)
        for tier in self.secondary_tiers:
            tier.reset_cache(weights_changed)

    def shutdown(self) -> None:
        """End the tiers in order, the primary one last. Waits for their jobs, which read and write its rows."""
        for tier in self.secondary_tiers:
            if not tier.drain_jobs(_DRAIN_S):
                logger.warning("tier %s did not end its jobs in %.0f s", tier.get_tier_type(), _DRAIN_S)
            tier.shutdown()
        self.primary_tier.shutdown()


def _block_ids(spec: LoadStoreSpec) -> list[int]:
    if not isinstance(spec, BlockIDsLoadStoreSpec):
        raise TypeError(f"the primary tier answered with {spec!r}, which names no rows")
    return spec.block_ids
