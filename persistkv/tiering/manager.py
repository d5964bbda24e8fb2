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
7. A request loads a prefix from secondary tiers only if that is expected to be faster than
   computing it (``load_cost``). A promotion that exceeds its deadline is a miss at once; its rows
   stay reserved until the tier no longer writes them.
8. A tier that raises affects no other tier, and its failed jobs are misses (``IsolatedTier``).
9. No call waits, except ``shutdown``.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, cast

from persistkv.base import (
    LoadStoreSpec,
    OffloadingEvent,
    OffloadingManager,
    OffloadKey,
    OffloadPolicy,
    PrepareStoreOutput,
    ReqContext,
    RequestDescription,
    RequestOffloadingContext,
    get_offload_group_idx,
)
from persistkv.cpu.manager import CPULoadStoreSpec, CPUPrimaryTierOffloadingManager
from persistkv.tenants import DEFAULT_TENANT
from persistkv.tiering.base import JobResult, SecondaryTierManager
from persistkv.tiering.cascades import Cascade, CascadeQueue
from persistkv.tiering.isolated_tier import IsolatedTier
from persistkv.tiering.jobs import JobsInFlight, TierJob
from persistkv.tiering.load_cost import (
    LoadChooser,
    LoadDecision,
    PrefillSpeed,
    Reason,
)
from persistkv.tiering.load_runs import (
    GroupSize,
    TierRun,
    assign_runs,
    loads_of_runs,
)
from persistkv.tiering.prewarming import Prewarming
from persistkv.tiering.promotions import Promotion, PromotionQueue
from persistkv.tiering.requests import TieredRequest

if TYPE_CHECKING:
    from persistkv.tiering.spec import TieringOffloadingOptions

logger = logging.getLogger(__name__)

_DRAIN_S = 60.0  # seconds in which each tier may drain at shutdown
# Pseudo-request that owns the promotions of recently used contexts. It names a tenant, because a
# tier that requires one refuses other requests. Keys of different tenants differ, so the promoted
# contexts may be those of any tenant.
_PREWARM = ReqContext("prewarm", tenant=DEFAULT_TENANT)


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


class TieringOffloadingManager(OffloadingManager):
    """Manager of the primary tier and all secondary tiers: looks blocks up in each, promotes them
    from secondary tiers to the primary one, and cascades them the other way. Not thread-safe:
    called from the scheduler's thread.

    :param primary_tier: owned by the manager, which shuts it down last.
    :param tiers: the secondary tiers in the order of lookups; owned by the manager. May be empty.
    :param options: the manager uses ``cascade_share``, ``hold_s``, ``room_wait_s``,
        ``prewarm_share``, ``prefill_tokens_per_s`` and ``enable_events``. Call ``take_events`` in
        each step whether ``enable_events`` is set or not: it starts promotions.
    """

    def __init__(
        self,
        primary_tier: CPUPrimaryTierOffloadingManager,
        tiers: Sequence[SecondaryTierManager],
        options: TieringOffloadingOptions,
    ) -> None:
        self.primary_tier = primary_tier
        self.secondary_tiers = list(tiers)
        self.stats = TieringStats()
        self._tiers = [IsolatedTier(tier) for tier in self.secondary_tiers]
        """``secondary_tiers``, each in a wrapper that logs its exceptions."""
        self._options = options
        self.load_chooser = LoadChooser(PrefillSpeed(options.prefill_tokens_per_s))
        """Decides which blocks requests load. The engine reports its speed of computing to
        ``load_chooser.prefill``."""

        self._requests: dict[str, TieredRequest] = {}
        """Requests by id, until the tiers have received their end."""
        self._awaiting_write: dict[OffloadKey, set[str]] = {}
        """By block, the ids of the requests that have it in ``TieredRequest.awaited_writes``."""
        self._promotions = PromotionQueue()
        # Each tier has a share of its own: one that hangs must not stop the cascades to the others.
        num_shares = max(1, len(self._tiers))
        share = primary_tier.num_blocks * options.cascade_share / num_shares
        self._cascades = {tier: CascadeQueue(share) for tier in self._tiers}
        self._jobs = JobsInFlight()
        # While there is no room, each call of ``prepare_store`` in a step would poll again.
        self._polled_in_step = False
        """Whether the tiers' finished jobs were polled in this step."""

        self._prewarming: Prewarming | None = None
        """None: prewarming is not set, no tier lists contexts, or the cache was reset."""
        listing_tiers = [tier for tier in self._tiers if tier.lists_contexts]
        if options.prewarm_share and listing_tiers:
            num_blocks = int(primary_tier.num_blocks * options.prewarm_share)
            self._prewarming = Prewarming(listing_tiers[0], num_blocks)

    # Lookup

    def lookup(self, key: OffloadKey, req_context: ReqContext) -> bool | None:
        return self._lookup(key, req_context, {})

    def is_held(self, key: OffloadKey) -> bool:
        return self.primary_tier.is_held(key)

    def lookup_prefix(
        self,
        keys: Sequence[OffloadKey],
        req_context: ReqContext,
    ) -> list[bool | None]:
        """See ``OffloadingManager``. From the first key on that is not readable in the primary
        tier, one call probes each secondary tier for all keys, if the tier has its own
        ``lookup_prefix``.
        """
        answers: list[bool | None] = []
        for key in keys:
            if not self.primary_tier.lookup(key, req_context):
                break
            answers.append(True)

        others = keys[len(answers) :]
        if not others:
            return answers
        holders = self._holders(others, req_context)
        for key in others:
            answer = self._lookup(key, req_context, holders)
            if answer is False:
                break
            answers.append(answer)
        return answers

    def _holders(
        self,
        keys: Sequence[OffloadKey],
        req_context: ReqContext,
    ) -> dict[OffloadKey, IsolatedTier]:
        """Return, for each key in a prefix that secondary tiers hold, the tier to load it from.

        The first call for a request that finds held blocks also decides how many of them it loads.
        The result also contains the declined blocks: the first of them is a miss for the request
        (``missed``), which ends the lookup of the prefix.
        """
        # a tier must know the request before its first lookup
        request = self._announced_request(req_context)
        held = self._num_held_by_tier(keys, req_context)
        if not held:
            return {}
        # all keys of a prefix are of one group, and all tiers have the same configuration
        group = get_offload_group_idx(keys[0])
        first_tier = next(iter(held))
        config = first_tier.tier.config
        block_bytes = config.layout.groups[group].block_bytes
        runs = assign_runs(held, block_bytes)
        if request.decision is None:
            self._decide_load(request, keys, runs)
            _tell_slower_tiers(held, keys, runs)
        holders: dict[OffloadKey, IsolatedTier] = {}
        for run in runs:
            keys_of_run = keys[run.start : run.stop]
            holders.update(dict.fromkeys(keys_of_run, run.tier))
        return holders

    def _num_held_by_tier(
        self,
        keys: Sequence[OffloadKey],
        req_context: ReqContext,
    ) -> dict[IsolatedTier, int]:
        """Return how many of the keys, from the first on without a gap, each tier holds: in the
        order of lookups, without the tiers that hold none."""
        held: dict[IsolatedTier, int] = {}
        for tier in self._tiers:
            num_held = tier.num_held(keys, req_context)
            if num_held:
                held[tier] = num_held
        return held

    def _decide_load(
        self,
        request: TieredRequest,
        keys: Sequence[OffloadKey],
        runs: Sequence[TierRun],
    ) -> None:
        """Decide how many runs of keys the request loads, from the first one on. The first key of
        the next run becomes a miss, which ends the lookup of the prefix. Without a decision, the
        request loads all runs."""
        # Blocks of the prefix are being loaded for other requests, at no further cost: wait for
        # them, and decide nothing.
        waiters = self._promotions.waiters
        if waiters and not waiters.keys().isdisjoint(keys):
            return
        first_key = keys[0]
        block_size = self.secondary_tiers[0].config.block_size
        start = block_size * _depth_of(first_key, request.context.description)
        sizes = self._group_sizes(request, get_offload_group_idx(first_key))
        loads = loads_of_runs(runs, sizes, block_size, start)
        decision = self.load_chooser.choose(loads, start)
        request.decision = decision
        # if the request loads some runs, the reason is recorded at the end of their load
        if not decision.num_runs:
            request.load_reason = decision.reason
        if decision.num_runs < len(runs):
            declined = runs[decision.num_runs]
            declined_keys = keys[declined.start : declined.stop]
            request.missed.add(declined_keys[0])
            declined.tier.on_load_declined(declined_keys, request.context, decision)

    def _group_sizes(self, request: TieredRequest, group: int) -> list[GroupSize]:
        """Return the sizes of the KV cache groups that a request uses.

        :param group: the group that was looked up first, which the request certainly uses. The
            other groups are looked up after it, and the decision applies to them, too.
        """
        # all tiers have the same configuration
        config = self.secondary_tiers[0].config
        description = request.context.description
        sizes = []
        for number, layout in enumerate(config.layout.groups):
            is_used = number == group
            # only a description tells whether the request uses another group
            if description is not None and description.group_keys[number]:
                is_used = True
            if not is_used:
                continue
            window = config.windows[number] if config.windows else None
            size = GroupSize(config.block_size, layout.block_bytes, window)
            sizes.append(size)
        return sizes

    def load_reason(self, req_id: str) -> Reason | None:
        """Return what became of the blocks that secondary tiers held for an unfinished request;
        None: they held none, or their load has not ended."""
        request = self._requests.get(req_id)
        return None if request is None else request.load_reason

    def _lookup(
        self,
        key: OffloadKey,
        req_context: ReqContext,
        holders: Mapping[OffloadKey, IsolatedTier],
    ) -> bool | None:
        """Look up one block. If only a secondary tier holds it, queue its promotion and return
        None.

        :param holders: key → a tier that holds it, so that this tier need not be probed again.
        """
        in_primary = self.primary_tier.lookup(key, req_context)
        if in_primary:
            return True
        request = self._announced_request(req_context)

        # A block has waiters while its promotion is queued or in flight. When the promotion has
        # ended, the block is held in the primary tier for each of them.
        waiters = self._promotions.waiters.get(key)
        if waiters is not None:
            waiters.add(req_context.req_id)
            return None
        # the block has no waiters: a store is writing it, or a promotion that was given up
        if in_primary is None:
            # a promotion that was given up may never end, so the engine computes the block
            is_lost = key in self._promotions.lost
            return False if is_lost else None
        # a declined request loads no block of any group, at any depth
        if key in request.missed or request.is_declined:
            return False

        return self._lookup_secondary(key, req_context, holders.get(key))

    def _lookup_secondary(
        self,
        key: OffloadKey,
        req_context: ReqContext,
        holder: IsolatedTier | None,
    ) -> bool | None:
        """Queue the promotion of a block from the first tier that holds it.

        :param holder: a tier that is known to hold the block; None: look it up in each tier.
        :returns: None: the block is promoted, or a tier asks to retry; False: no tier holds it.
        """
        if holder is not None:
            self._promotions.add(holder, key, req_context)
            return None
        for tier in self._tiers:
            is_held = tier.lookup(key, req_context)
            if is_held:
                self._promotions.add(tier, key, req_context)
                return None
            if is_held is None:
                return None
        return False

    # Promotion

    def _submit_promotions(self) -> None:
        """Submit the queued promotions, except those that wait for rows."""
        for promotion in self._promotions.take_queued():
            if not promotion.tier.is_usable:
                self._make_misses(promotion.keys)
            elif not self._submit_promotion(promotion):
                self._promotions.put_back(promotion)

    def _submit_promotion(self, promotion: Promotion) -> bool:
        """Allocate rows for a promotion and submit its job, with as many blocks as there are rows.
        Its other blocks are misses.

        :returns: False if there is no row, and the promotion may still wait for one.
        """
        primary = self.primary_tier
        keys = promotion.keys_by_depth()
        # The promotion must not evict the request's own prefix, without which it is useless.
        prefix = self._readable_blocks(promotion.context)
        num_rows = primary.num_free_or_evictable() - primary.num_evictable_of(prefix)
        # if there are not enough rows, take the first blocks of the request
        fitting = keys[:num_rows]
        output = None
        if num_rows:
            # the blocks of the prefix have rows already: name them, so that they are not evicted
            output = primary.prepare_write(prefix + fitting, promotion.context)
        if output is None:
            if self._may_wait_for_row(promotion):
                return False
            self._decline_promotion(keys)
            return True

        self._decline_promotion(keys[num_rows:])
        allocated = set(output.keys_to_store)
        for key in fitting:
            # A block got no row if a store or another promotion has begun to write it since the
            # lookup. Its requests look it up again.
            if key not in allocated:
                del self._promotions.waiters[key]
        if allocated:
            self._submit_load(promotion, output)
        return True

    def _may_wait_for_row(self, promotion: Promotion) -> bool:
        """Return whether a promotion that found no row is tried again in the next step: the engine
        must not wait longer for the blocks than it needs to compute them."""
        load_limit_s = self._load_limit_s(promotion.tier, promotion.context)
        most_s = min(self._options.room_wait_s, load_limit_s)
        waited_s = time.monotonic() - promotion.created_at
        return waited_s < most_s

    def _submit_load(self, promotion: Promotion, output: PrepareStoreOutput) -> None:
        """Submit the load of the blocks of a promotion that have got rows.

        :param output: the rows, and the keys of their blocks.
        """
        context = promotion.context
        job = self._jobs.add_promotion(
            promotion.tier,
            output.keys_to_store,
            cast(CPULoadStoreSpec, output.store_spec),
            context,
            limit_s=self._load_limit_s(promotion.tier, context),
            decision=self._decision_of(context),
        )
        self._submit_job(job)

    def _readable_blocks(self, context: ReqContext) -> list[OffloadKey]:
        """Return the request's blocks in the primary tier; none if it has no description."""
        readable: list[OffloadKey] = []
        if context.description is not None:
            for keys in context.description.group_keys:
                readable += filter(self.primary_tier.is_ready, keys)
        return readable

    def _decline_promotion(self, keys: Sequence[OffloadKey]) -> None:
        """Count blocks for whose promotion the primary tier has no rows, and make them misses."""
        self.stats.declined_promotions += len(keys)
        self._make_misses(keys)

    def _make_misses(self, keys: Iterable[OffloadKey]) -> None:
        """Make lookups of these blocks return False for the requests that wait for them."""
        for key in keys:
            for req_id in self._promotions.take_waiters(key):
                request = self._requests.get(req_id)
                if request is not None:
                    request.missed.add(key)

    def _prewarm(self, prewarming: Prewarming) -> None:
        """Queue the promotion of the next context, recently used or prefetched, once all promotions
        of the previous one have ended."""
        is_queued = self._promotions.has_queued(_PREWARM.req_id)
        # wait, because the previous context is being promoted
        if is_queued or self._jobs.has_jobs_of(_PREWARM):
            return
        context = prewarming.next_context()
        if context is None:
            return
        for key in context.keys:
            is_absent = self.primary_tier.lookup(key, _PREWARM) is False
            if is_absent and key not in self._promotions.waiters:
                self._queue_prewarmed(key)

    def _queue_prewarmed(self, key: OffloadKey) -> None:
        """Queue the promotion of a block from the first tier that holds it, if one does. A tier
        that asks to retry is passed over, because prewarming looks each block up only once."""
        for tier in self._tiers:
            if tier.lookup(key, _PREWARM):
                self._promotions.add(tier, key, _PREWARM)
                return

    # Loads

    def prepare_load(
        self,
        keys: Sequence[OffloadKey],
        req_context: ReqContext,
    ) -> LoadStoreSpec:
        """Prepare a load from the primary tier. The holds on promoted blocks end, because the load
        protects them now."""
        spec = self.primary_tier.prepare_load(keys, req_context)
        request = self._requests.get(req_context.req_id)
        if request is not None and request.held:
            promoted = [key for key in keys if key in request.held]
            # report it at the load, because a request may have computed a block that was promoted
            # too late
            self._report_restored(request, promoted)
            # the load references the rows now
            self._release_held(request, promoted)
        return spec

    def _report_restored(
        self,
        request: TieredRequest,
        keys: Sequence[OffloadKey],
    ) -> None:
        """Report to the tiers which of their blocks the request loads."""
        by_tier: dict[IsolatedTier, list[OffloadKey]] = {}
        for key in keys:
            source = request.held[key]
            by_tier.setdefault(source, []).append(key)
        for tier, restored in by_tier.items():
            tier.on_restored(restored, request.context)

    def complete_load(
        self,
        keys: Sequence[OffloadKey],
        req_context: ReqContext,
    ) -> None:
        self.primary_tier.complete_load(keys, req_context)

    def touch(self, keys: Sequence[OffloadKey], req_context: ReqContext) -> None:
        self.primary_tier.touch(keys, req_context)
        for tier in self._tiers:
            tier.touch(keys, req_context)

    def _hold(
        self,
        request: TieredRequest,
        keys: set[OffloadKey],
        source: IsolatedTier,
    ) -> None:
        """Keep readable blocks that ``source`` has loaded from eviction until the request loads
        them."""
        self.primary_tier.prepare_read(list(keys), request.context)
        request.held.update(dict.fromkeys(keys, source))
        request.held_until = time.monotonic() + self._options.hold_s

    def _release_held(
        self,
        request: TieredRequest,
        keys: Collection[OffloadKey],
    ) -> None:
        """Allow the eviction of blocks that ``_hold`` kept for a request."""
        # a copy, because ``keys`` may be ``request.held`` itself
        released = list(keys)
        self.primary_tier.complete_read(released, request.context)
        for key in released:
            del request.held[key]

    def _expire_holds(self) -> None:
        """Release the blocks of requests that the engine did not schedule again in time."""
        holding = [request for request in self._requests.values() if request.held]
        if not holding:
            return
        now = time.monotonic()
        for request in holding:
            if now >= request.held_until:
                self.stats.expired_holds += len(request.held)
                self._release_held(request, request.held)

    # Stores and cascades

    def prepare_store(
        self,
        keys: Sequence[OffloadKey],
        req_context: ReqContext,
    ) -> PrepareStoreOutput | None:
        """See ``OffloadingManager``.

        The first call of a step ends the finished jobs of the tiers, so that their rows can be
        allocated. The others do not: in a step without room, each call would poll again.
        """
        if self._jobs and not self._polled_in_step:
            self._poll_tiers()
        output = self.primary_tier.prepare_store(keys, req_context)
        if output is None:
            return None
        request = self._announced_request(req_context)
        request.num_being_written += len(output.keys_to_store)
        # the remaining keys are prefix hits, which only request-level tiers receive
        if request.request_level_tiers and len(output.keys_to_store) < len(keys):
            new = set(output.keys_to_store)
            hits = [key for key in keys if key not in new]
            self._cascade_hits(request, hits, req_context)
        return output

    def _cascade_hits(
        self,
        request: TieredRequest,
        keys: Sequence[OffloadKey],
        req_context: ReqContext,
    ) -> None:
        """Cascade the prefix hits of a request to its request-level tiers: now those that are
        readable, at the end of their writes the others."""
        readable = []
        for key in keys:
            in_primary = self.primary_tier.lookup(key, req_context)
            if in_primary:
                readable.append(key)
            # None: the block is being written. Do not wait for a lost promotion, which may never
            # end.
            elif in_primary is None and key not in self._promotions.lost:
                request.awaited_writes.add(key)
                awaiting = self._awaiting_write.setdefault(key, set())
                awaiting.add(req_context.req_id)
        for tier in request.request_level_tiers:
            new_to_tier = request.not_received(tier, readable)
            self._cascade(tier, new_to_tier, req_context)

    def complete_store(
        self,
        keys: Sequence[OffloadKey],
        req_context: ReqContext,
        success: bool = True,
    ) -> None:
        """End writes to the primary tier. If they succeeded, cascade the written blocks to all
        secondary tiers."""
        ended = self.primary_tier.end_writes(keys, success)
        # Cascade no orphaned block: it became a miss by a ``reset_cache`` during its write.
        if success:
            for tier in self._tiers:
                self._cascade(tier, ended.written, req_context)
        request = self._requests.get(req_context.req_id)
        if request is not None:
            # neither written nor orphaned blocks are being written any more
            request.num_being_written -= len(ended.written) + len(ended.orphaned)
            self._end_if_done(request)
        self._end_awaited_writes(ended.written)
        self._end_awaited_writes(ended.orphaned)

    def _end_awaited_writes(self, keys: Iterable[OffloadKey]) -> None:
        """Note that blocks are no longer being written, and end the finished requests that waited
        only for that."""
        if not self._awaiting_write:
            return
        for key in keys:
            for req_id in self._awaiting_write.pop(key, ()):
                request = self._requests.get(req_id)
                if request is not None:
                    request.awaited_writes.discard(key)
                    self._end_if_done(request)

    def _cascade(
        self,
        tier: IsolatedTier,
        readable: list[OffloadKey],
        req_context: ReqContext,
    ) -> bool:
        """Submit readable blocks to a tier for storing, once the tier's share of the rows permits
        it. Return False if there is no block, or the tier gets no jobs.
        """
        if not readable or not tier.is_usable:
            return False
        request = self._requests.get(req_context.req_id)
        if request is not None:
            request.num_waiting_cascades += 1
        queue = self._cascades[tier]
        queue.append(Cascade(request, req_context, readable))
        self._submit_cascades(tier)
        # Waiting blocks have no reference. If more blocks wait than there are rows, some of the
        # oldest ones have been evicted: their cascades are dropped, which bounds the queue.
        while queue.num_waiting_blocks > self.primary_tier.num_blocks:
            self._drop_cascade(queue.popleft())
        return True

    def _submit_cascades(self, tier: IsolatedTier) -> None:
        """Submit the tier's waiting cascades for which its share of the rows has room. Drop them if
        it gets no jobs."""
        # A cascade that does not fit waits instead of being dropped: without it, the context that a
        # request-level tier stores would have a gap.
        queue = self._cascades[tier]
        while queue.waiting:
            if not tier.is_usable:
                self._drop_cascade(queue.popleft())
            elif queue.has_room:
                self._submit_cascade(tier, queue.popleft())
            else:
                return

    def _submit_cascade(self, tier: IsolatedTier, cascade: Cascade) -> None:
        """Submit those blocks of a cascade that were not evicted while it waited: until now, it has
        had no references on their rows."""
        keys = list(filter(self.primary_tier.is_ready, cascade.keys))
        num_evicted = len(cascade.keys) - len(keys)
        self.stats.dropped_cascades += num_evicted
        if keys:
            rows = self.primary_tier.prepare_read(keys, cascade.context)
            self.stats.cascaded_blocks += len(keys)
            self._cascades[tier].num_submitted_blocks += len(keys)
            job = self._jobs.add_cascade(tier, keys, rows, cascade.context)
            self._submit_job(job)
        # end it after the submission: the tier receives a request's end after its last store job
        self._end_cascade(cascade)

    def _drop_cascade(self, cascade: Cascade) -> None:
        """Count a waiting cascade as dropped: its tier does not store these blocks."""
        self.stats.dropped_cascades += len(cascade.keys)
        self._end_cascade(cascade)

    def _end_cascade(self, cascade: Cascade) -> None:
        """Count a cascade of a request as submitted or dropped, and end the request if nothing else
        is outstanding."""
        request = cascade.request
        if request is not None:
            request.num_waiting_cascades -= 1
            self._end_if_done(request)

    # Jobs

    def _submit_job(self, job: TierJob) -> None:
        """Submit a job to its tier. If the tier raises, end the job as failed."""
        if not job.tier.submit(job.data):
            self._end_job(JobResult(job.data.job_id, success=False))

    def _load_limit_s(self, tier: IsolatedTier, context: ReqContext) -> float:
        """Return the seconds after which a load for this request is abandoned."""
        limit_s = tier.load_deadline_s
        decision = self._decision_of(context)
        if decision is not None:
            limit_s = min(limit_s, decision.deadline_s)
        return limit_s

    def _decision_of(self, context: ReqContext) -> LoadDecision | None:
        """Return the load decision for a request; None: there is none."""
        request = self._requests.get(context.req_id)
        return None if request is None else request.decision

    def _give_up_promotion(self, job: TierJob) -> None:
        """Make the blocks of a promotion misses, although its end has not been reported. Its tier
        may still write the rows."""
        keys = job.data.keys
        job.tier.on_load_abandoned(job.data.job_id)
        self._promotions.lost.update(keys)
        self._set_load_reason(job, Reason.DEADLINE)
        self._make_misses(keys)
        self._end_awaited_writes(keys)

    def _set_load_reason(self, job: TierJob, reason: Reason) -> None:
        """Record what became of the blocks that a request loads. A deadline stays recorded, also
        if the load ends later."""
        request = self._requests.get(job.data.req_context.req_id)
        if request is not None and request.load_reason is not Reason.DEADLINE:
            request.load_reason = reason

    def _poll_tiers(self) -> None:
        """End the finished jobs of all tiers, and submit the waiting cascades for which this makes
        room."""
        self._polled_in_step = True
        for tier in self._tiers:
            for result in tier.finished_jobs():
                self._end_job(result)
            # requests must not wait for jobs of this tier: their ends are unknown until a poll
            # succeeds
            if tier.poll_failed:
                for job in self._jobs.promotions_of(tier):
                    self._give_up_promotion(job)
            self._submit_cascades(tier)

    def _end_job(self, result: JobResult) -> None:
        """Process the result of a job of a secondary tier."""
        job = self._jobs.take_ended(result.job_id)
        if job is None:
            logger.error(
                "a secondary tier reported job %d, which is not in flight",
                result.job_id,
            )
            return
        keys = job.data.keys
        failed_keys = result.failed_keys if result.success else keys
        failed = set(failed_keys)
        if job.data.is_promotion:
            reason = Reason.DEADLINE if result.is_late else Reason.LOADED
            self._set_load_reason(job, reason)
            self._end_promotion(job, failed)
        else:
            self.stats.failed_cascades += len(failed)
            self._cascades[job.tier].num_submitted_blocks -= len(keys)
            # release the references on the job's rows, which ``_submit_cascade`` has taken
            self.primary_tier.complete_read(keys, job.data.req_context)

    def _end_promotion(self, job: TierJob, failed: set[OffloadKey]) -> None:
        """Process the result of a load from a secondary tier: its blocks are readable now, or
        misses."""
        keys = job.data.keys
        context = job.data.req_context
        loaded = [key for key in keys if key not in failed]
        self.stats.promoted_blocks += len(loaded)
        self.stats.failed_promotions += len(failed)
        if failed:
            not_loaded = [key for key in keys if key in failed]
            self.primary_tier.complete_write(not_loaded, context, success=False)
        self.primary_tier.complete_write(loaded, context)
        # the rows are readable or free now, so lookups treat the blocks like all other blocks
        self._promotions.lost.difference_update(keys)
        # after a reset, no request waits for the blocks of the job
        if not job.is_reset:
            self._make_misses(failed)
            self._deliver_promoted(job.tier, loaded)
        # do this last: it ends finished requests, whose tiers must have received the delivered
        # blocks
        self._end_awaited_writes(keys)

    def _deliver_promoted(
        self,
        source: IsolatedTier,
        keys: Sequence[OffloadKey],
    ) -> None:
        """Hold promoted blocks for the requests that wait for them. Pass the blocks to the
        request-level tiers of these requests, and of those that have offered them for storing.

        :param source: the tier that loaded the blocks.
        """
        # the result includes requests that only offered the blocks for storing, and wait for none
        waited_for_by_request = self._take_waiters(keys)
        for req_id, waited_for in waited_for_by_request.items():
            request = self._requests.get(req_id)
            if request is None:
                continue
            # a finished request loads nothing more, but its tiers still receive the offered blocks
            wanted = set() if request.finished else waited_for
            self._cascade_promoted(request, keys, wanted, source)
            if wanted:
                self._hold(request, wanted, source)

    def _take_waiters(self, keys: Sequence[OffloadKey]) -> dict[str, set[OffloadKey]]:
        """Remove the waiters of these blocks. Return, for each request, the blocks that it waited
        for; an empty set for a request that only offered blocks for storing (``awaited_writes``).
        """
        waited_for: dict[str, set[OffloadKey]] = {}
        for key in keys:
            for req_id in self._promotions.take_waiters(key):
                waited_for.setdefault(req_id, set()).add(key)
            for req_id in self._awaiting_write.get(key, ()):
                waited_for.setdefault(req_id, set())
        return waited_for

    def _cascade_promoted(
        self,
        request: TieredRequest,
        keys: Sequence[OffloadKey],
        wanted: set[OffloadKey],
        source: IsolatedTier,
    ) -> None:
        """Pass promoted blocks to the request-level tiers of a request: those that it has offered
        for storing, and those that it waits for (``wanted``).

        The blocks that it waits for are not passed to the tier that has loaded them, ``source``,
        nor to any tier if the request stores nothing (``ReqContext.store``).
        """
        offered = request.awaited_writes
        for tier in request.request_level_tiers:
            receives_wanted = tier is not source and request.context.store
            due = offered | wanted if receives_wanted else offered
            cascaded = [key for key in keys if key in due]
            # record the blocks, so that a later store of the request does not pass them on again
            if self._cascade(tier, cascaded, request.context):
                received = request.received.setdefault(tier, set())
                received.update(cascaded)

    # Requests

    def on_new_request(self, req_context: ReqContext) -> RequestOffloadingContext:
        """Announce a request to all tiers. If any of them is request-level, the engine must offer
        every block of the request."""
        request = self._announced_request(req_context)
        # the id is used again while stores of its finished request are in flight
        if request.finished:
            request.reopen()
            # the blocks of the former request are another tenant's
            if request.context.tenant != req_context.tenant:
                self._forget_awaited_writes(request)
        request.context = req_context
        policy = OffloadPolicy.BLOCK_LEVEL
        if request.request_level_tiers:
            policy = OffloadPolicy.REQUEST_LEVEL
        return RequestOffloadingContext(policy)

    def _announced_request(self, req_context: ReqContext) -> TieredRequest:
        """Return the state of a request. If it is unknown, announce the request to each tier, which
        must know it before its first lookup or job there."""
        request = self._requests.get(req_context.req_id)
        if request is None:
            request_level_tiers = []
            for tier in self._tiers:
                if tier.on_new_request(req_context) is OffloadPolicy.REQUEST_LEVEL:
                    request_level_tiers.append(tier)
            request = TieredRequest(req_context, request_level_tiers)
            self._requests[req_context.req_id] = request
        return request

    def _forget_awaited_writes(self, request: TieredRequest) -> None:
        """Forget the blocks that a request has offered for storing and that are still being
        written. Called when another tenant uses its id again: the tiers would store the blocks as
        those of the new tenant.
        """
        for key in request.awaited_writes:
            awaiting = self._awaiting_write[key]
            awaiting.discard(request.context.req_id)
            if not awaiting:
                del self._awaiting_write[key]
        request.awaited_writes.clear()
        # the tiers have received these blocks as the former tenant's
        request.received.clear()

    def on_request_finished(self, req_context: ReqContext) -> None:
        """See ``OffloadingManager``. The secondary tiers receive the end when no block of the
        request is being written to the primary tier. Pending promotions that no other request waits
        for are dropped.
        """
        request = self._requests.get(req_context.req_id)
        if request is None:
            return
        request.finished = True
        self._promotions.abandon(req_context.req_id)
        self._release_held(request, request.held)
        # while blocks are being written, this does nothing; ``complete_store`` and ``_end_job`` try
        # again
        self._end_if_done(request)

    def _end_if_done(self, request: TieredRequest) -> None:
        """Forget a finished request, and report its end to the tiers, unless a block of it is being
        written or waits for its cascade."""
        has_blocks = (
            request.num_being_written
            or request.awaited_writes
            or request.num_waiting_cascades
        )
        if request.finished and not has_blocks:
            del self._requests[request.context.req_id]
            for tier in self._tiers:
                tier.on_request_finished(request.context)

    # The end of a step

    def take_events(self) -> list[OffloadingEvent]:
        """End a step: process results of the tiers, abandon late loads, release expired holds and
        submit promotions; then return the events of all tiers."""
        # a call of ``prepare_store`` may have polled in this step already
        if not self._polled_in_step:
            self._poll_tiers()
        self._polled_in_step = False  # the next step begins
        for job in self._jobs.take_late():
            self._give_up_promotion(job)
        self._expire_holds()
        if self._prewarming is not None:
            self._prewarm(self._prewarming)
        # promotions wait for the end of the step: all of its lookups share a job per tier and
        # request
        if self._promotions.queued:
            self._submit_promotions()

        events = list(self.primary_tier.take_events())
        for tier in self._tiers:
            # take them even if no caller wants them, because the tier would collect them for ever
            events += tier.take_events()
        return events if self._options.enable_events else []

    def has_pending_work(self) -> bool:
        """Return whether work is in progress that needs engine steps even if no request runs."""
        if self._promotions.queued:
            return True
        if self._prewarming is not None and not self._prewarming.recent_ended:
            return True
        # Jobs of a tier that cannot be polled may never end; an engine must not step for them.
        if self._jobs.can_end():
            return True
        return any(tier.has_pending_work() for tier in self._tiers)

    def reset_cache(self, weights_changed: bool = True) -> None:
        """Forget all blocks, waiting cascades and promotions. Jobs in flight continue to use their
        rows, but no request waits for them. Secondary tiers forget their blocks only if
        ``weights_changed``."""
        for request in self._requests.values():
            self._release_held(request, request.held)
            request.received.clear()
        self._jobs.reset()
        self._promotions.clear()
        for queue in self._cascades.values():
            while queue.waiting:
                self._drop_cascade(queue.popleft())
        # prewarming is for the start of an engine; its blocks may be invalid now
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
                while self._cascades[tier].waiting:
                    # each drain ends jobs, which makes room for the next cascades
                    if not tier.drain(deadline - time.monotonic()):
                        break
                    self._poll_tiers()
                left_s = max(0.0, deadline - time.monotonic())
                tier.shutdown(left_s)
        finally:
            self.primary_tier.shutdown()


def _depth_of(key: OffloadKey, description: RequestDescription | None) -> int:
    """Return the number of a request's blocks before the block with this key; 0 if the description
    does not contain it or is None, as if the request began with the block."""
    depth = None if description is None else description.depth(key)
    return depth or 0


def _tell_slower_tiers(
    held: Mapping[IsolatedTier, int],
    keys: Sequence[OffloadKey],
    runs: Sequence[TierRun],
) -> None:
    """Call ``on_faster_tier`` of tiers whose blocks a later tier loads, because it is faster now.
    Such a tier loads nothing, so that it must find out by itself when it is faster again.

    :param held: for each tier, in the order of lookups, how many of the first keys it holds.
    :param runs: result of ``assign_runs`` for ``held``.
    """
    # ``assign_runs`` chooses the first of equally fast tiers. So a tier that precedes the tier of a
    # run, and holds the keys of the run, is slower.
    tiers = list(held)
    for run in runs:
        slower_tiers = tiers[: tiers.index(run.tier)]
        for tier in slower_tiers:
            if held[tier] >= run.stop:
                tier.on_faster_tier(keys[run.start : run.stop])
