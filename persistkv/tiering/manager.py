"""The OffloadingManager that combines the primary tier with the secondary tiers behind it.

1. A stored block cascades to every secondary tier. Each cascade holds its own reference on the row.
   If the tier's share of the rows is in use, a cascade waits, without a reference, until earlier
   ones have ended.
2. If only a secondary tier holds a block, its lookup returns None (retry later) and the block is
   promoted: one job per tier and request, all groups together, submitted at the end of the step
   (``take_events``).
3. A row is readable only after its promotion was verified. A failed promotion frees the row and is
   a miss for the requests that waited for it.
4. Promoted rows stay referenced for the requests that waited for them until they are loaded, the
   request ends, or a deadline passes.
5. Request-level tiers receive a promoted block, for each request that waits for it or offered it,
   as soon as it is readable.
6. Recently used contexts may be promoted before a request looks them up, one context at a time.
7. A tier that raises affects no other tier, and its failed jobs are misses (``IsolatedTier``).
8. No call waits, except ``shutdown``.
"""

from __future__ import annotations

import itertools
import logging
import time
from collections import deque
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import cast

from persistkv.base import (
    LoadStoreSpec,
    OffloadingEvent,
    OffloadingManager,
    OffloadKey,
    OffloadPolicy,
    PrepareStoreOutput,
    ReqContext,
    RequestOffloadingContext,
)
from persistkv.cpu.manager import CPULoadStoreSpec, CPUPrimaryTierOffloadingManager
from persistkv.errors import ConfigurationError
from persistkv.tiering.base import JobMetadata, JobResult, SecondaryTierManager
from persistkv.tiering.isolated_tier import IsolatedTier
from persistkv.tiering.prewarming import Prewarming, RecentContexts

logger = logging.getLogger(__name__)

_DRAIN_S = 60.0
_PREWARM = ReqContext("prewarm")
"""Pseudo-request that owns the promotions of recently used contexts."""


@dataclass
class TieringStats:
    """Totals since the manager was created, in blocks."""

    cascaded_blocks: int = 0
    """Blocks submitted to secondary tiers for storing; a block counts once per tier and job."""
    dropped_cascades: int = 0
    """Blocks that were evicted or forgotten (``reset_cache``) while their cascade waited for
    earlier store jobs of the tier, or whose tier became unusable; a block counts once per tier and
    cascade."""
    failed_cascades: int = 0
    """Blocks submitted to a secondary tier that failed to store them."""
    promoted_blocks: int = 0
    """Blocks that a secondary tier loaded into rows of the primary tier."""
    failed_promotions: int = 0
    """Blocks whose load from a secondary tier failed."""
    declined_promotions: int = 0
    """Blocks not loaded from a secondary tier, because the primary tier had no row for them. A
    promotion for which it has no row at all waits up to ``room_wait_s`` seconds first."""
    expired_holds: int = 0
    """Promoted blocks that a waiting request did not load within ``hold_s`` seconds, per
    request."""


@dataclass
class _Promotion:
    """Blocks to load from one secondary tier for one request, all KV cache groups together; not
    submitted yet."""

    context: ReqContext
    keys: dict[OffloadKey, None] = field(default_factory=dict)
    """Ordered set of keys, in the order of their lookups."""
    since: float = field(default_factory=time.monotonic)
    """Time of creation. It bounds how long the promotion waits for rows."""


@dataclass
class _Job:
    """Job in flight of a secondary tier: a store (cascade) or load (promotion)."""

    tier: IsolatedTier
    data: JobMetadata
    epoch: int
    """Number of cache resets before the job was submitted."""


@dataclass
class _Request:
    """State of one request, from its first call until the tiers have received
    ``on_request_finished`` for it."""

    context: ReqContext
    request_level_tiers: list[IsolatedTier]
    """Tiers with ``OffloadPolicy.REQUEST_LEVEL``: they receive every block of the request,
    including prefix hits."""
    storing: int = 0
    """Number of blocks of the request that are being written to the primary tier."""
    num_waiting_cascades: int = 0
    """Cascades of the request that wait for earlier ones to end. The tiers receive them before
    ``on_request_finished``."""
    awaiting: set[OffloadKey] = field(default_factory=set)
    """Blocks that the request offered for storing while a promotion or another request was writing
    them. The tiers receive these blocks before ``on_request_finished``."""
    finished: bool = False
    missed: set[OffloadKey] = field(default_factory=set)
    """Blocks whose promotion failed or found no row: misses for this request, so that it does not
    retry forever."""
    held: set[OffloadKey] = field(default_factory=set)
    """Promoted blocks that stay referenced until the request loads them."""
    held_until: float = 0.0
    """``time.monotonic`` time at which ``held`` blocks are released."""
    received: dict[IsolatedTier, set[OffloadKey]] = field(default_factory=dict)
    """For each request-level tier, promoted blocks that it received before the request offered them
    for storing."""


@dataclass
class _Cascade:
    """Readable blocks to submit to one secondary tier for storing. Until then they may be
    evicted."""

    request: _Request | None
    """None: the request is not known."""
    context: ReqContext
    keys: list[OffloadKey]


class _WaitingCascades:
    """Queue of the cascades of one tier that are not submitted yet, oldest first."""

    def __init__(self) -> None:
        self.cascades: deque[_Cascade] = deque()
        self.num_blocks = 0

    def append(self, cascade: _Cascade) -> None:
        self.cascades.append(cascade)
        self.num_blocks += len(cascade.keys)

    def popleft(self) -> _Cascade:
        cascade = self.cascades.popleft()
        self.num_blocks -= len(cascade.keys)
        return cascade


class TieringOffloadingManager(OffloadingManager):
    """Manager of the primary tier and all secondary tiers. Not thread-safe: called from the
    scheduler's thread.

    :param primary_tier: owned by the manager, which shuts it down last.
    :param secondary_tiers: in the order of lookups; owned by the manager. May be empty.
    :param enable_events: whether ``take_events`` returns events. Call it in each step either way:
        it starts promotions.
    :param cascade_share: see ``TieringOffloadingOptions``, also for the parameters after it.
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
        room_wait_s: float = 0.5,
        prewarm_share: float = 0.0,
    ) -> None:
        if not 0 < cascade_share <= 1:
            raise ConfigurationError(
                "cascade_share", cascade_share, "a share above 0 and at most 1"
            )
        if hold_s <= 0:
            raise ConfigurationError("hold_s", hold_s, "a positive number of seconds")
        if room_wait_s < 0:
            raise ConfigurationError("room_wait_s", room_wait_s, "0 or more seconds")
        if not 0 <= prewarm_share <= 1:
            raise ConfigurationError(
                "prewarm_share", prewarm_share, "a share from 0 to 1"
            )
        self.primary_tier = primary_tier
        self.secondary_tiers = list(secondary_tiers)
        self.stats = TieringStats()
        self._tiers = [IsolatedTier(tier) for tier in self.secondary_tiers]
        self._enable_events = enable_events
        self._max_cascading = (
            primary_tier.num_blocks * cascade_share / max(1, len(self._tiers))
        )
        self._hold_s = hold_s
        self._room_wait_s = room_wait_s
        self._epoch = 0
        self._polled = False  # whether finished jobs were polled in this step
        self._job_ids = itertools.count()
        self._jobs: dict[int, _Job] = {}
        self._requests: dict[str, _Request] = {}
        self._pending: dict[tuple[IsolatedTier, str], _Promotion] = {}
        # requests by the promoted block that they wait for
        self._waiters: dict[OffloadKey, set[str]] = {}
        self._waiting = {tier: _WaitingCascades() for tier in self._tiers}
        # requests by the block in _Request.awaiting
        self._awaited: dict[OffloadKey, set[str]] = {}
        # blocks being promoted by a tier that cannot be polled
        self._lost: set[OffloadKey] = set()
        listing = [
            tier for tier in self._tiers if isinstance(tier.tier, RecentContexts)
        ]
        num_prewarmed = int(primary_tier.num_blocks * prewarm_share)
        self._prewarming = (
            Prewarming(listing[0], num_prewarmed) if prewarm_share and listing else None
        )

    # Lookup and promotion

    def lookup(self, key: OffloadKey, req_context: ReqContext) -> bool | None:
        return self._lookup(key, req_context, None)

    def is_held(self, key: OffloadKey) -> bool:
        return self.primary_tier.is_held(key)

    def lookup_prefix(
        self, keys: Sequence[OffloadKey], req_context: ReqContext
    ) -> list[bool | None]:
        """See ``OffloadingManager``. From the first key on that is not readable in the primary
        tier, one call probes each secondary tier for all keys, if the tier has its own
        ``lookup_prefix``.
        """
        answers: list[bool | None] = []
        tier_of: dict[OffloadKey, IsolatedTier] | None = None
        for number, key in enumerate(keys):
            if tier_of is None and not self.primary_tier.lookup(key, req_context):
                tier_of = {}
                if req_context.req_id not in self._requests:
                    self._begin(req_context)
                for tier in reversed(self._tiers):
                    if tier.is_usable:
                        held = tier.num_held(keys[number:], req_context)
                        tier_of.update(
                            dict.fromkeys(keys[number : number + held], tier)
                        )
            answer = self._lookup(key, req_context, tier_of)
            if answer is False:
                break
            answers.append(answer)
        return answers

    def _lookup(
        self,
        key: OffloadKey,
        req_context: ReqContext,
        tier_of: Mapping[OffloadKey, IsolatedTier] | None,
    ) -> bool | None:
        """Look up one block. If only a secondary tier holds it, queue its promotion and return
        None.

        :param tier_of: key → a tier that holds it, so that this tier need not be probed again.
        """
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
        known = tier_of.get(key) if tier_of else None
        for tier in self._tiers:
            answer = tier is known or (
                tier.lookup(key, req_context) if tier.is_usable else False
            )
            if answer:
                place = (tier, req_context.req_id)
                pending = self._pending.get(place)
                if pending is None:
                    pending = self._pending[place] = _Promotion(req_context)
                pending.keys[key] = None
                self._waiters[key] = {req_context.req_id}
            if answer or answer is None:
                return None
        return False

    def _submit_promotions(self) -> None:
        primary, pending = self.primary_tier, self._pending
        self._pending = {}
        for (tier, req_id), promotion in pending.items():
            keys, context, resident = (
                list(promotion.keys),
                promotion.context,
                list[OffloadKey](),
            )
            if not tier.is_usable:
                self._miss(keys)
                continue
            if (description := context.description) is not None:
                depths = {key: description.depth(key) or 0 for key in keys}
                # if the list is cut, each group keeps a prefix
                keys.sort(key=depths.__getitem__)
                # The request's blocks in the primary tier: its promotion must not evict its own
                # prefix.
                resident = [
                    key
                    for chain in description.group_keys
                    for key in chain
                    if primary.is_ready(key)
                ]
            room = primary.num_free_or_evictable() - primary.num_evictable_of(resident)
            if not room and time.monotonic() - promotion.since < self._room_wait_s:
                self._pending[tier, req_id] = promotion
                continue
            output = (
                primary.prepare_write(resident + keys[:room], context) if room else None
            )
            declined = keys[room:] if output is not None else keys
            self.stats.declined_promotions += len(declined)
            self._miss(declined)
            if output is None:
                continue
            for key in set(keys[:room]).difference(output.keys_to_store):
                del self._waiters[key]  # another job writes it to the primary tier
            if output.keys_to_store:
                self._submit(
                    tier,
                    output.keys_to_store,
                    output.store_spec,
                    context,
                    is_promotion=True,
                )

    def _prewarm(self, prewarming: Prewarming) -> None:
        """Queue the promotion of the next recently used context once all promotions of the previous
        one have ended."""
        is_idle = prewarming.ended and not prewarming.waits
        if (
            is_idle
            or any(req_id == _PREWARM.req_id for _, req_id in self._pending)
            or any(job.data.req_context is _PREWARM for job in self._jobs.values())
        ):
            return
        new = [
            key
            for key in prewarming.next_context() or ()
            if self.primary_tier.lookup(key, _PREWARM) is False
        ]
        for tier in self._tiers:
            held = [
                key
                for key in new
                if key not in self._waiters
                and tier.is_usable
                and tier.lookup(key, _PREWARM)
            ]
            if held:
                self._pending[tier, _PREWARM.req_id] = _Promotion(
                    _PREWARM, dict.fromkeys(held)
                )
                self._waiters.update((key, set()) for key in held)

    def _miss(self, keys: Iterable[OffloadKey]) -> None:
        """Make lookups of these blocks return False for the requests that wait for them."""
        for key in keys:
            for req_id in self._waiters.pop(key, ()):
                if request := self._requests.get(req_id):
                    request.missed.add(key)

    def _submit(
        self,
        tier: IsolatedTier,
        keys: list[OffloadKey],
        rows: LoadStoreSpec,
        context: ReqContext,
        *,
        is_promotion: bool,
    ) -> bool:
        """Submit a job to a tier, and return True. If the tier raises, finish the job as failed and
        return False."""
        block_ids = cast(CPULoadStoreSpec, rows).block_ids
        job = JobMetadata(next(self._job_ids), keys, block_ids, is_promotion, context)
        self._jobs[job.job_id] = _Job(tier, job, self._epoch)
        if tier.submit(job):
            return True
        self._finish(JobResult(job.job_id, success=False))
        return False

    def prepare_load(
        self, keys: Sequence[OffloadKey], req_context: ReqContext
    ) -> LoadStoreSpec:
        spec = self.primary_tier.prepare_load(keys, req_context)
        request = self._requests.get(req_context.req_id)
        if request is not None and request.held:
            self._release_held(request, request.held.intersection(keys))
        return spec

    def complete_load(
        self, keys: Sequence[OffloadKey], req_context: ReqContext
    ) -> None:
        self.primary_tier.complete_load(keys, req_context)

    def touch(self, keys: Sequence[OffloadKey], req_context: ReqContext) -> None:
        self.primary_tier.touch(keys, req_context)
        for tier in self._tiers:
            tier.touch(keys, req_context)

    def _release_held(self, request: _Request, keys: Collection[OffloadKey]) -> None:
        self.primary_tier.complete_read(list(keys), request.context)
        request.held = request.held.difference(keys)

    # Storing

    def prepare_store(
        self, keys: Sequence[OffloadKey], req_context: ReqContext
    ) -> PrepareStoreOutput | None:
        """See ``OffloadingManager``. Rows of tier jobs that had ended before the first call of a
        step can be allocated.

        Finished jobs are polled once per step, so a step without room does not poll at each call.
        """
        if self._jobs and not self._polled:
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
                self._cascade(
                    tier,
                    [key for key in ready if key not in received]
                    if received
                    else ready,
                    req_context,
                )
            for key in existing:
                if (
                    self.primary_tier.lookup(key, req_context) is None
                    and key not in self._lost
                ):
                    request.awaiting.add(key)
                    self._awaited.setdefault(key, set()).add(req_context.req_id)
        return output

    def complete_store(
        self, keys: Sequence[OffloadKey], req_context: ReqContext, success: bool = True
    ) -> None:
        written, orphaned = self.primary_tier.end_writes(keys, success)
        for tier in self._tiers if success else ():
            self._cascade(tier, written, req_context)
        request = self._requests.get(req_context.req_id)
        if request is not None:
            request.storing -= len(written) + len(orphaned)
            self._end_if_done(request)
        self._settle((*written, *orphaned))

    def _settle(self, keys: Sequence[OffloadKey]) -> None:
        """Blocks are no longer being written: end the requests that only awaited them."""
        for key in keys if self._awaited else ():
            for req_id in self._awaited.pop(key, ()):
                if request := self._requests.get(req_id):
                    request.awaiting.discard(key)
                    self._end_if_done(request)

    def _cascade(
        self, tier: IsolatedTier, ready: list[OffloadKey], req_context: ReqContext
    ) -> bool:
        """Submit readable blocks to a tier for storing, once the tier's share of the rows permits
        it. Return False if the tier gets no jobs.
        """
        if not ready or not tier.is_usable:
            return False
        request = self._requests.get(req_context.req_id)
        if request is not None:
            request.num_waiting_cascades += 1
        waiting = self._waiting[tier]
        waiting.append(_Cascade(request, req_context, ready))
        self._submit_cascades(tier)
        # Waiting blocks have no reference, so the primary tier holds at most so many of them.
        while waiting.num_blocks > self.primary_tier.num_blocks:
            self._drop_cascade(waiting.popleft())
        return True

    def _submit_cascades(self, tier: IsolatedTier) -> None:
        """Submit the tier's waiting cascades for which its share of the rows has room. Drop them if
        it gets no jobs."""
        waiting = self._waiting[tier]
        while waiting.cascades:
            if not tier.is_usable:
                self._drop_cascade(waiting.popleft())
                continue
            num_blocks = len(waiting.cascades[0].keys)
            if (
                tier.num_cascading
                and tier.num_cascading + num_blocks > self._max_cascading
            ):
                return
            cascade = waiting.popleft()
            held = [key for key in cascade.keys if self.primary_tier.is_ready(key)]
            self.stats.dropped_cascades += num_blocks - len(held)
            if held:
                spec = self.primary_tier.prepare_read(held, cascade.context)
                tier.num_cascading += len(held)
                self.stats.cascaded_blocks += len(held)
                self._submit(tier, held, spec, cascade.context, is_promotion=False)
            self._end_cascade(cascade)

    def _drop_cascade(self, cascade: _Cascade) -> None:
        self.stats.dropped_cascades += len(cascade.keys)
        self._end_cascade(cascade)

    def _end_cascade(self, cascade: _Cascade) -> None:
        """A cascade waits no longer: end the request if this was the last thing that it waited
        for."""
        request = cascade.request
        if request is not None:
            request.num_waiting_cascades -= 1
            self._end_if_done(request)

    # Requests

    def on_new_request(self, req_context: ReqContext) -> RequestOffloadingContext:
        request = self._requests.get(req_context.req_id) or self._begin(req_context)
        # the id is used again while stores of the finished request are in flight
        if request.finished:
            request.finished = False
            request.missed.clear()
        request.context = req_context
        wants_all = bool(request.request_level_tiers)
        return RequestOffloadingContext(
            OffloadPolicy.REQUEST_LEVEL if wants_all else OffloadPolicy.BLOCK_LEVEL
        )

    def _begin(self, req_context: ReqContext) -> _Request:
        """Create the state of a request, and announce the request to each tier before its first
        lookup or job there."""
        wanting = [
            tier
            for tier in self._tiers
            if tier.on_new_request(req_context) is OffloadPolicy.REQUEST_LEVEL
        ]
        request = self._requests[req_context.req_id] = _Request(req_context, wanting)
        return request

    def on_request_finished(self, req_context: ReqContext) -> None:
        """See ``OffloadingManager``. The secondary tiers receive the end when no block of the
        request is being written to the primary tier. Pending promotions that no other request waits
        for are dropped.
        """
        req_id = req_context.req_id
        request = self._requests.get(req_id)
        if request is None:
            return
        request.finished = True
        for place in [place for place in self._pending if place[1] == req_id]:
            promotion = self._pending[place]
            for key in list(promotion.keys):
                self._waiters[key].discard(req_id)
                if not self._waiters[key]:
                    del self._waiters[key], promotion.keys[key]
            if not promotion.keys:
                del self._pending[place]
        self._release_held(request, request.held)
        self._end_if_done(request)

    def _end_if_done(self, request: _Request) -> None:
        busy = request.storing or request.awaiting or request.num_waiting_cascades
        if request.finished and not busy:
            del self._requests[request.context.req_id]
            for tier in self._tiers:
                tier.on_request_finished(request.context)

    # The end of a step

    def take_events(self) -> list[OffloadingEvent]:
        if not self._polled:
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
            for result in tier.finished_jobs():
                self._finish(result)
            if tier.is_silent:
                self._lose_promotions(tier)
            self._submit_cascades(tier)

    def _lose_promotions(self, tier: IsolatedTier) -> None:
        """Treat the promotions of a tier that cannot be polled as misses. It may still write to
        their rows."""
        for job in self._jobs.values():
            if job.tier is tier and job.data.is_promotion and job.epoch == self._epoch:
                self._lost.update(job.data.keys)
                self._miss(job.data.keys)
                self._settle(job.data.keys)

    def _finish(self, result: JobResult) -> None:
        job = self._jobs.pop(result.job_id, None)
        if job is None:
            logger.error(
                "a secondary tier reported job %d, which is not in flight",
                result.job_id,
            )
            return
        keys, context = job.data.keys, job.data.req_context
        failed = set(result.failed_keys) if result.success else set(keys)
        if not job.data.is_promotion:
            job.tier.num_cascading -= len(keys)
            self.stats.failed_cascades += len(failed)
            self.primary_tier.complete_read(keys, context)
            return
        good = [key for key in keys if key not in failed]
        self.stats.promoted_blocks += len(good)
        self.stats.failed_promotions += len(failed)
        if failed:
            self.primary_tier.complete_write(
                [key for key in keys if key in failed], context, success=False
            )
        self.primary_tier.complete_write(good, context)
        self._lost.difference_update(keys)
        if job.epoch == self._epoch:
            self._miss(failed)
            self._deliver(job.tier, good)
        self._settle(keys)

    def _deliver(self, source: IsolatedTier, keys: Sequence[OffloadKey]) -> None:
        """Hold promoted blocks for the requests that wait for them, and pass the blocks to
        request-level tiers.

        Such a tier receives the blocks that the request has offered for storing and, unless it is
        the ``source`` that loaded them or the request does not store, those that the request waits
        for.
        """
        waited: dict[str, set[OffloadKey]] = {}
        for key in keys:
            for req_id in self._waiters.pop(key, ()):
                waited.setdefault(req_id, set()).add(key)
            for req_id in self._awaited.get(key, ()):
                waited.setdefault(req_id, set())
        for req_id, wanted in waited.items():
            request = self._requests.get(req_id)
            if request is None:
                continue
            if request.finished:
                wanted = set()
            for tier in request.request_level_tiers:
                takes_all = tier is not source and request.context.store
                due = [
                    key
                    for key in keys
                    if key in request.awaiting or (takes_all and key in wanted)
                ]
                if self._cascade(tier, due, request.context):
                    request.received.setdefault(tier, set()).update(due)
            if wanted:
                self.primary_tier.prepare_read(list(wanted), request.context)
                request.held |= wanted
                request.held_until = time.monotonic() + self._hold_s

    def _expire_holds(self) -> None:
        holding = [request for request in self._requests.values() if request.held]
        now = time.monotonic() if holding else 0.0
        for request in holding:
            if now >= request.held_until:
                self.stats.expired_holds += len(request.held)
                self._release_held(request, request.held)

    def has_pending_work(self) -> bool:
        if self._pending or not (self._prewarming is None or self._prewarming.ended):
            return True
        if any(job.tier.is_usable for job in self._jobs.values()):
            return True
        return any(tier.is_usable and tier.has_pending_work() for tier in self._tiers)

    def reset_cache(self, weights_changed: bool = True) -> None:
        for request in self._requests.values():
            self._release_held(request, request.held)
            request.received.clear()
        self._epoch += 1
        self._pending.clear()
        self._waiters.clear()
        for waiting in self._waiting.values():
            while waiting.cascades:
                self._drop_cascade(waiting.popleft())
        self._prewarming = None
        self.primary_tier.reset_cache(weights_changed)
        for tier in self._tiers:
            tier.reset_cache(weights_changed)

    def shutdown(self) -> None:
        """Shut down all tiers. Waits up to 60 s per tier for its jobs, because they use the primary
        tier's rows, and for cascades that wait for them.
        """
        try:
            for tier in self._tiers:
                deadline = time.monotonic() + _DRAIN_S
                while self._waiting[tier].cascades and tier.drain(
                    deadline - time.monotonic()
                ):
                    self._poll()
                tier.shutdown(max(0.0, deadline - time.monotonic()))
        finally:
            self.primary_tier.shutdown()
