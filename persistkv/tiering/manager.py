"""One OffloadingManager for the primary tier and the secondary tiers behind it.

1. A stored block cascades to every secondary tier. Each cascade holds its own reference on the row.
2. A block that only a secondary tier holds is a *retry later* and is promoted: one job per tier and request, all groups
   together, submitted at the end of the step (``take_events``).
3. A row is readable only after its promotion was verified. A failed promotion frees the row and is a miss for the
   requests that waited for it.
4. Promoted rows stay referenced for the requests that waited for them until they are loaded, the request ends, or a
   deadline passes.
5. Request-level tiers receive a promoted block, for each request that waits for it or offered it, as soon as it is
   readable.
6. Recently used contexts may be promoted before a request looks them up, one context at a time.
7. A tier that raises affects no other tier, and its failed jobs are misses (``IsolatedTier``).
8. No call waits, except ``shutdown``.
"""

from __future__ import annotations

import itertools
import logging
import time
from collections.abc import Iterable, Sequence

import numpy as np
import numpy.typing as npt

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
from persistkv.cpu.manager import CPUPrimaryTierOffloadingManager
from persistkv.errors import ConfigurationError
from persistkv.tiering.base import JobMetadata, JobResult, SecondaryTierManager
from persistkv.tiering.isolated_tier import IsolatedTier
from persistkv.tiering.prewarming import Prewarming, RecentContexts
from persistkv.tiering.promotion import PendingPromotion, TieringRequest, TieringStats, TierJob

logger = logging.getLogger(__name__)

_DRAIN_S = 60.0
_PREWARM = ReqContext("prewarm")
"""Pseudo-request that owns the promotions of recently used contexts."""


class TieringOffloadingManager(OffloadingManager):
    """Manager of all tiers; the module docstring lists its rules. Not thread-safe: called by the scheduler.

    :param primary_tier: owned by the manager, which shuts it down last.
    :param secondary_tiers: in the order of lookups; owned by the manager. May be empty.
    :param enable_events: whether ``take_events`` returns events; it ends the step either way.
    :param cascade_share: part of the primary tier's rows that cascades may keep from eviction, divided evenly among the
        tiers. A job may exceed it if its tier has no other job.
    :param hold_s: seconds that promoted rows wait for their request, and that a promotion waits for rows.
    :param prewarm_share: part of the primary tier's rows to fill, in the first steps, with the most recently used
        contexts of the first tier that lists them.
    :raises ConfigurationError: a number is out of range.
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
        self._tiers = [IsolatedTier(tier) for tier in self.secondary_tiers]
        self._usable_tiers = self._tiers
        self._enable_events = enable_events
        self._max_cascading = primary_tier.num_blocks * cascade_share / max(1, len(self._tiers))
        self._hold_s = hold_s
        self._epoch = 0
        self._polled = False  # whether finished jobs were polled in this step
        self._job_ids = itertools.count()
        self._jobs: dict[int, TierJob] = {}
        self._requests: dict[str, TieringRequest] = {}
        self._pending: dict[tuple[IsolatedTier, str], PendingPromotion] = {}
        self._waiters: dict[OffloadKey, set[str]] = {}  # requests by the promoted block that they wait for
        self._awaited: dict[OffloadKey, set[str]] = {}  # requests by the block in TieringRequest.awaiting
        self._lost: set[OffloadKey] = set()  # blocks being promoted by a tier that cannot be polled
        self._prewarming: Prewarming | None = None
        for tier in self._tiers if prewarm_share else ():
            if isinstance(tier.tier, RecentContexts):
                self._prewarming = Prewarming(tier, int(primary_tier.num_blocks * prewarm_share))
                break

    # Lookup and promotion

    def lookup(self, key: OffloadKey, req_context: ReqContext) -> bool | None:
        answer = self.primary_tier.lookup(key, req_context)
        if answer:
            return True
        request = self._requests.get(req_context.req_id) or self._begin(req_context)
        waiters = self._waiters.get(key)
        if waiters is not None:
            waiters.add(req_context.req_id)
            return None
        if answer is None:
            return False if key in self._lost else None
        if key in request.missed:
            return False
        for tier in self._usable_tiers:
            answer = tier.lookup(key, req_context)
            if answer:
                self._want(tier, key, req_context)
                return None
            if answer is None:
                return None
        return False

    def _want(self, tier: IsolatedTier, key: OffloadKey, req_context: ReqContext) -> None:
        place = (tier, req_context.req_id)
        pending = self._pending.get(place)
        if pending is None:
            pending = self._pending[place] = PendingPromotion(tier, req_context, since=time.monotonic())
        pending.keys[key] = None
        self._waiters[key] = {req_context.req_id}

    def _submit_promotions(self) -> None:
        pending, self._pending = self._pending, {}
        for place, promotion in pending.items():
            if not promotion.tier.is_usable:
                for key in promotion.keys:
                    self._miss(key)
                continue
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
        """Queue the next recently used context once all promotions of the previous one have ended."""
        if not prewarming.is_due or self._is_prewarming():
            return
        keys = prewarming.next_context()
        new = [
            key for key in keys or () if self.primary_tier.lookup(key, _PREWARM) is False and key not in self._waiters
        ]
        for tier in self._usable_tiers:
            held = [key for key in new if key not in self._waiters and tier.lookup(key, _PREWARM)]
            if held:
                since = time.monotonic()
                self._pending[tier, _PREWARM.req_id] = PendingPromotion(tier, _PREWARM, dict.fromkeys(held), since)
                self._waiters.update((key, set()) for key in held)

    def _is_prewarming(self) -> bool:
        if any(place[1] == _PREWARM.req_id for place in self._pending):
            return True
        return any(job.req_context is _PREWARM for job in self._jobs.values())

    def _resident(self, req_context: ReqContext) -> list[OffloadKey]:
        """Return the request's blocks in the primary tier: its promotion must not evict its own prefix."""
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
            del self._waiters[key]  # another job writes it to the primary tier
        if output.keys_to_store:
            job = TierJob(promotion.tier, output.keys_to_store, True, promotion.req_context, self._epoch)
            self._submit(job, output.store_spec)

    def _decline(self, keys: Iterable[OffloadKey]) -> None:
        """Count blocks without a row as misses; the requests use the prefix before them."""
        for key in keys:
            self.stats.declined_promotions += 1
            self._miss(key)

    def _miss(self, key: OffloadKey) -> None:
        for req_id in self._waiters.pop(key, ()):
            if request := self._requests.get(req_id):
                request.missed.add(key)

    def _submit(self, job: TierJob, spec: LoadStoreSpec) -> bool:
        """Submit a job. If the tier raises, finish the job as failed and return False."""
        job_id = next(self._job_ids)
        self._jobs[job_id] = job
        if job.tier.submit(JobMetadata(job_id, job.keys, _block_ids(spec), job.is_promotion, job.req_context)):
            return True
        self._finish(JobResult(job_id, success=False))
        return False

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
        for tier in self._tiers:
            tier.touch(keys, req_context)

    def _let_go(self, request: TieringRequest, keys: set[OffloadKey]) -> None:
        self.primary_tier.complete_read(list(keys), request.context)
        request.held -= keys

    # Storing

    def prepare_store(self, keys: Sequence[OffloadKey], req_context: ReqContext) -> PrepareStoreOutput | None:
        """See ``OffloadingManager``. Rows of jobs that have ended since the last call are available."""
        if self._jobs and (not self._polled or len(keys) > self.primary_tier.num_free_or_evictable()):
            self._poll()
        output = self.primary_tier.prepare_store(keys, req_context)
        if output is None:
            return None
        request = self._requests.get(req_context.req_id) or self._begin(req_context)
        request.storing += len(output.keys_to_store)
        if request.request_level_tiers and len(output.keys_to_store) < len(keys):
            new = set(output.keys_to_store)
            existing = [key for key in keys if key not in new]
            ready = [key for key in existing if self.primary_tier.is_ready(key)]
            for tier in request.request_level_tiers:
                received = request.received.get(tier)
                self._cascade(tier, [key for key in ready if key not in received] if received else ready, req_context)
            self._await_others(request, existing)
        return output

    def _await_others(self, request: TieringRequest, keys: Sequence[OffloadKey]) -> None:
        for key in keys:
            if self.primary_tier.lookup(key, request.context) is None and key not in self._lost:
                request.awaiting.add(key)
                self._awaited.setdefault(key, set()).add(request.context.req_id)

    def _settle(self, keys: Sequence[OffloadKey]) -> None:
        """End the wait of requests for the writers of these blocks, successful or not."""
        for key in keys if self._awaited else ():
            for req_id in self._awaited.pop(key, ()):
                if request := self._requests.get(req_id):
                    request.awaiting.discard(key)
                    self._end_if_done(request)

    def complete_store(self, keys: Sequence[OffloadKey], req_context: ReqContext, success: bool = True) -> None:
        written, orphaned = self.primary_tier.end_writes(keys, success)
        for tier in self._tiers if success else ():
            self._cascade(tier, written, req_context)
        request = self._requests.get(req_context.req_id)
        if request is not None:
            request.storing -= len(written) + len(orphaned)
            self._end_if_done(request)
        self._settle(written)
        self._settle(orphaned)

    def _cascade(self, tier: IsolatedTier, ready: list[OffloadKey], req_context: ReqContext) -> bool:
        """Submit readable blocks to a tier, unless its cascades hold their share of the rows.

        :returns: whether the tier accepted the job.
        """
        if not ready or not tier.is_usable:
            return False
        if tier.num_cascading and tier.num_cascading + len(ready) > self._max_cascading:
            self.stats.dropped_cascades += len(ready)
            return False
        spec = self.primary_tier.prepare_read(ready, req_context)
        tier.num_cascading += len(ready)
        self.stats.cascaded_blocks += len(ready)
        return self._submit(TierJob(tier, ready, False, req_context, self._epoch), spec)

    # Requests

    def on_new_request(self, req_context: ReqContext) -> RequestOffloadingContext:
        request = self._requests.get(req_context.req_id)
        if request is None:
            request = self._begin(req_context)
        elif request.finished:  # the id is used again while stores of the finished request are in flight
            request.finished = False
            request.missed.clear()
        request.context = req_context
        wants_all = bool(request.request_level_tiers)
        return RequestOffloadingContext(OffloadPolicy.REQUEST_LEVEL if wants_all else OffloadPolicy.BLOCK_LEVEL)

    def _begin(self, req_context: ReqContext) -> TieringRequest:
        """Announce a request to the tiers, as their contract requires before its first lookup or job."""
        wanting = [tier for tier in self._tiers if tier.on_new_request(req_context) is OffloadPolicy.REQUEST_LEVEL]
        request = self._requests[req_context.req_id] = TieringRequest(req_context, wanting)
        return request

    def on_request_finished(self, req_context: ReqContext) -> None:
        request = self._requests.get(req_context.req_id)
        if request is None:
            return
        request.finished = True
        self._cancel_promotions(request)
        self._let_go(request, set(request.held))
        self._end_if_done(request)

    def _cancel_promotions(self, request: TieringRequest) -> None:
        """Drop the pending blocks that no other request waits for."""
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
            for tier in self._tiers:
                tier.on_request_finished(request.context)

    # The end of a step

    def take_events(self) -> list[OffloadingEvent]:
        self._poll()
        self._polled = False
        self._expire_holds()
        if self._prewarming is not None:
            self._prewarm(self._prewarming)
        if self._pending:
            self._submit_promotions()
        events = list(self.primary_tier.take_events())
        for tier in self._tiers:
            events += tier.take_events()
        return events if self._enable_events else []

    def _poll(self) -> None:
        self._polled = True
        for tier in self._tiers:
            was_silent = tier.is_silent
            for result in tier.finished_jobs():
                self._finish(result)
            if tier.is_silent:
                self._lose_promotions(tier)
            if tier.is_silent is not was_silent:
                self._usable_tiers = [tier for tier in self._tiers if tier.is_usable]

    def _lose_promotions(self, tier: IsolatedTier) -> None:
        """Stop waiting for the promotions of a tier that cannot be polled.

        Their blocks are misses, and nothing is stored in their place: the tier may still write to the rows.
        """
        for job in self._jobs.values():
            if job.tier is tier and job.is_promotion and job.epoch == self._epoch:
                self._lost.update(job.keys)
                for key in job.keys:
                    self._miss(key)
                self._settle(job.keys)

    def _finish(self, result: JobResult) -> None:
        job = self._jobs.pop(result.job_id, None)
        if job is None:
            logger.error("a secondary tier reported job %d, which is not in flight", result.job_id)
            return
        failed = set(result.failed_keys) if result.success else set(job.keys)
        if job.is_promotion:
            self._finish_promotion(job, failed)
        else:
            job.tier.num_cascading -= len(job.keys)
            self.stats.failed_cascades += len(failed)
            self.primary_tier.complete_read(job.keys, job.req_context)

    def _finish_promotion(self, job: TierJob, failed: set[OffloadKey]) -> None:
        good = [key for key in job.keys if key not in failed]
        self.stats.promoted_blocks += len(good)
        self.stats.failed_promotions += len(failed)
        if failed:
            self.primary_tier.complete_write([key for key in job.keys if key in failed], job.req_context, success=False)
        self.primary_tier.complete_write(good, job.req_context)
        self._lost.difference_update(job.keys)
        if job.epoch == self._epoch:
            for key in failed:
                self._miss(key)
            self._cascade_promoted(job.tier, good)
            self._hold(good)
        self._settle(job.keys)

    def _cascade_promoted(self, source: IsolatedTier, keys: Sequence[OffloadKey]) -> None:
        """Submit promoted blocks to request-level tiers, for the requests that offered them or wait for them.

        The tier that a block was loaded from receives it only if the request offered it.
        """
        if len(self._tiers) == 1 and not self._awaited:
            return
        by_request: dict[str, list[OffloadKey]] = {}
        for key in keys:
            for req_id in self._waiters.get(key, set()) | self._awaited.get(key, set()):
                by_request.setdefault(req_id, []).append(key)
        for req_id, promoted in by_request.items():
            request = self._requests.get(req_id)
            if request is None:
                continue
            waits = request.context.store and not request.finished
            for tier in request.request_level_tiers:
                due = promoted
                if tier is source or not waits:
                    due = [key for key in promoted if key in request.awaiting]
                if self._cascade(tier, due, request.context):
                    request.received.setdefault(tier, set()).update(due)

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

    # All tiers

    def has_pending_work(self) -> bool:
        """Return whether the engine should continue to take steps while no request runs."""
        if self._pending or not (self._prewarming is None or self._prewarming.ended):
            return True
        if any(job.tier.is_usable for job in self._jobs.values()):
            return True
        return any(tier.has_pending_work() for tier in self._usable_tiers)

    def reset_cache(self, weights_changed: bool = True) -> None:
        for request in self._requests.values():
            self._let_go(request, set(request.held))
            request.received.clear()
        self._epoch += 1
        self._pending.clear()
        self._waiters.clear()
        self._prewarming = None
        self.primary_tier.reset_cache(weights_changed)
        for tier in self._tiers:
            tier.reset_cache(weights_changed)
        self._usable_tiers = [tier for tier in self._tiers if tier.is_usable]

    def shutdown(self) -> None:
        """Shut the tiers down in order, the primary tier last. Waits for their jobs, which use its rows."""
        try:
            for tier in self._tiers:
                tier.shutdown(_DRAIN_S)
        finally:
            self.primary_tier.shutdown()


def _block_ids(spec: LoadStoreSpec) -> npt.NDArray[np.int64]:
    if not isinstance(spec, BlockIDsLoadStoreSpec):
        raise TypeError(f"the primary tier returned {spec!r} instead of a list of rows")
    return spec.block_ids
