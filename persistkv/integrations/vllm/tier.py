"""Secondary tier for vLLM: an adapter that translates between vLLM's interface and
``PersistentTier``.

| vLLM | persistkv |
|---|---|
| ``LookupResult.HIT``, ``MISS`` | ``True``, ``False`` |
| ``TransferJob.chunk_ids`` | ``JobMetadata.block_ids`` |
| ``JobResult.successful_keys`` | ``JobResult.failed_keys``: all other keys |
| positions of keys, as requests grow | ``RequestDescription`` |
| keys | keys of the request's tenant (``persistkv.tenants``) |

vLLM makes one call at a time, in 0.33 also from its second thread. Only the constructor,
``drain_jobs`` and ``shutdown`` wait.
"""

from __future__ import annotations

import dataclasses
import logging
import math
import time
from collections.abc import Collection, Iterable, Sequence
from functools import partial
from typing import Any

import numpy as np
from vllm import SamplingParams
from vllm.utils.hashing import get_hash_fn_by_name
from vllm.v1.core.kv_cache_utils import get_request_block_hasher
from vllm.v1.kv_offload.base import (
    Locality,
    LookupResult,
    Medium,
    OffloadingEvent,
    OffloadingMetricMetadata,
    OffloadKey,
    OffloadPolicy,
    ReqContext,
    RequestOffloadingContext,
    ScheduleEndContext,
)
from vllm.v1.kv_offload.tiering.base import JobResult, SecondaryTierManager, TransferJob
from vllm.v1.request import Request

from persistkv import base as ours
from persistkv.config import GroupLayout, NumberLayout, OffloadingConfig, RowLayout
from persistkv.integrations.request_options import RequestOptions
from persistkv.integrations.vllm.identity import (
    SharedLayout,
    engine_facts,
    engine_identity,
    find_executor,
    find_kv_cache_config,
    find_scheduler,
    find_vllm_config,
    has_no_kv,
    has_random_hashes,
    shared_layout,
)
from persistkv.integrations.vllm.loading import (
    StepMeter,
    StoreLoads,
    WaitingChunks,
    chunk_key,
    group_windows,
    shared_prefill,
)
from persistkv.integrations.vllm.logs import use_vllm_logging
from persistkv.integrations.vllm.metrics import MetricsReader, metric_definitions
from persistkv.integrations.vllm.numbers import by_group_index, number_layout
from persistkv.integrations.vllm.options import VllmTierOptions, vllm_options
from persistkv.integrations.vllm.regions import close_region, open_region
from persistkv.integrations.vllm.requests import (
    GivenOptions,
    LiveRequest,
    Prefetch,
    request_options,
)
from persistkv.integrations.vllm.results import JobResults
from persistkv.integrations.vllm.wake import StepRequests, find_wake
from persistkv.integrations.vllm.weights.guarded_tier import GuardedTier
from persistkv.integrations.vllm.weights.watch import WeightsWatch, attach_watch
from persistkv.isolation import Isolation
from persistkv.storage import BACKENDS
from persistkv.storage.host.client import StoreClient
from persistkv.storage.identity import Identity
from persistkv.tenants import DEFAULT_TENANT, engine_key, tenant_key
from persistkv.tiering.base import JobMetadata
from persistkv.tiering.load_cost import Reason
from persistkv.tiering.persistent import NO_TENANT, PersistentTier
from persistkv.tiering.probing import PROBED_KEYS

logger = logging.getLogger(__name__)

_TYPES = ("persistkv", "persistkv-prewarm", "PersistKVTier", "PersistKVPrewarm")
"""Values of ``type`` in ``secondary_tiers`` that mean a tier of this package."""
_DRAIN_S = 60.0  # seconds between two warnings that jobs have not ended
_INVALID = "its options are invalid"
"""Why a request is refused, in a log line."""

CONFIG_INFO = ("store", "namespace", "codec", "durability", "policy", "host")
"""Names of the labels of vLLM's metric ``kv_offload_config_info`` that this tier sets."""


# vLLM is not installed where types are checked.
class PersistKVTier(SecondaryTierManager):  # type: ignore[misc]
    """Secondary tier that keeps vLLM's KV in a store; enabled by an entry of ``secondary_tiers``
    such as ``{"type": "persistkv", "url": "lmdb:///var/cache/kv"}``. The options are those of
    ``VllmTierOptions``.

    :raises ConfigurationError: an option is invalid; the error names it.
    :raises IdentityMismatchError: ``strict_identity`` is set and the store contains only other
        identities.
    :raises StoreError: ``required`` is set and the store cannot be opened.
    """

    medium = Medium.STORAGE

    def __init__(
        self,
        offloading_spec: Any,
        primary_kv_view: memoryview,
        tier_type: str,
        backpressure_detector: Any = None,
        **options: Any,
    ) -> None:
        super().__init__(
            offloading_spec, primary_kv_view, tier_type, backpressure_detector
        )
        self.options = vllm_options(options)
        scheme = self.options.scheme
        backend = BACKENDS.get(scheme)
        # a backend may be another package's, with a logger of its own
        backend_package, _, _ = backend.__module__.partition(".")
        use_vllm_logging("persistkv", backend_package)
        self.locality = _locality(self.options, is_remote=backend.capabilities.remote)
        self._stores = engine_stores(offloading_spec)
        """All stores of the engine, this one included: each entry of ``secondary_tiers`` is one."""
        self._isolation = Isolation("tier persistkv")
        """Logs errors of side tasks, such as measurements, which must not fail a request."""
        self._metrics = MetricsReader(scheme)
        self._steps = StepRequests(find_wake())
        """Requests for steps in which an idle engine exports metrics and events."""
        offloading = offloading_spec.config

        # decisions whether loads are worth their time, by the measured speed of the engine
        group_tokens = _chunk_tokens(offloading)
        prefill = shared_prefill(offloading_spec, self.options.prefill_tokens_per_s)
        self._meter = StepMeter(prefill, self._record_prefill)
        """Measures the speed of the engine's prefills."""
        self._store_loads = StoreLoads(offloading, group_tokens, prefill)

        # the store
        engine = find_vllm_config()
        algorithm = engine.cache_config.prefix_caching_hash_algo
        self._context_keys = partial(_context_keys, offloading, algorithm)
        """Returns vLLM's keys of a prompt's chunks, for prefetches."""
        self._key_bytes = key_length()
        """Length of vLLM's keys, which ``engine_key`` gets back from longer keys of a tenant."""
        self._region_fds: tuple[int, ...] = ()
        """Descriptors of the files behind the primary tier, for the store's process; closed by
        ``shutdown``."""
        if self.options.host == "process":
            self._region_fds = open_region(primary_kv_view)
        try:
            self._guard = self._open_store(engine, offloading_spec, primary_kv_view)
        except BaseException:
            close_region(self._region_fds)
            raise
        self._stores.append(self._guard)

        # requests
        labels = {"model": str(offloading.model.name), **self.options.labels}
        self._new_request = partial(
            LiveRequest, group_tokens=group_tokens, labels=labels
        )
        self._requests: dict[str, LiveRequest] = {}
        """Unfinished requests by id."""
        self._results = JobResults(self._metrics)

    def _open_store(
        self,
        engine: Any,
        spec: Any,
        rows: memoryview,
    ) -> GuardedTier:
        """Open the store under the identity of the engine, and watch the workers' weights."""
        config = self._tier_config(engine, spec, rows)
        watch = attach_watch(
            spec,
            find_executor(),
            self.options.weights,
            is_only_source=is_only_source(engine),
        )
        # this is called now, and again whenever a request names new weights
        make_tier = partial(self._make_tier, config, rows, watch)
        return GuardedTier(make_tier, watch)

    def _make_tier(
        self,
        config: OffloadingConfig,
        rows: memoryview,
        watch: WeightsWatch,
        weights: str | None,
    ) -> PersistentTier:
        """Open the store; ``weights`` is a name that a request has given, None: the weights at the
        engine's start."""
        options = self.options.tier_options
        if weights is not None:
            identity = {**config.identity, "weights": f"named:{weights}"}
            config = dataclasses.replace(config, identity=identity)
            # the namespace of the new weights may not exist yet, which must not be an error
            options = {**options, "strict_identity": False}
        tier = PersistentTier(config, rows, **options)
        client = tier.client
        # the client calls it while the engine takes no steps
        client.idle.callback = partial(self._request_step, client, watch)
        return tier

    @property
    def _tier(self) -> PersistentTier:
        """The persistent tier of the present weights. Another thread uses it while
        ``_guard.is_opening``."""
        return self._guard.tier

    def _tiers_in_use(self) -> list[PersistentTier]:
        """Return the tiers of all stores of the engine that serve the present weights."""
        return [store.tier for store in self._stores if store.is_in_use]

    def _tier_config(
        self,
        engine: Any,
        spec: Any,
        rows: memoryview,
    ) -> OffloadingConfig:
        """Return the configuration of the persistent tier: identity, layout and number of rows."""
        offloading = spec.config
        # warn once for all stores of the engine
        if not self._stores:
            _check_primary_size(engine, offloading, rows)
        shared = shared_layout(spec)
        _report_reuse(engine, offloading, shared)
        facts = engine_facts()
        identity = engine_identity(
            engine,
            offloading,
            facts,
            shared=shared,
            weights=self.options.weights,
            adapters=self.options.adapters,
        )
        kv_cache = find_kv_cache_config()
        numbers = None
        # The canary compares numbers that this engine computes with stored ones of another release.
        # With KV from other connectors, the canary cannot tell which numbers were computed.
        if self.options.adopt == "canary" and is_only_source(engine):
            device = str(facts["device"])
            numbers = number_layout(engine, spec, kv_cache, device=device)
        first_group = offloading.groups[0]
        return OffloadingConfig(
            identity,
            block_size=first_group.tokens_per_block * offloading.cache.blocks_per_chunk,
            layout=_row_layout(offloading, rows, shared, numbers),
            num_blocks=len(rows),
            region_fds=self._region_fds,
            enable_events=bool(offloading.enable_kv_cache_events),
            windows=group_windows(offloading, kv_cache),
        )

    # Lookups and jobs

    def lookup(self, key: OffloadKey, req_context: ReqContext) -> LookupResult:
        """Return whether the request loads the chunk of a key: the store holds it, and loading is
        expected to be worth it. Answers at once, from the index in memory.

        A request that began with other model weights than the present ones (``epoch``) finds
        nothing.
        """
        request = self._requests.get(req_context.req_id)
        # Usually, this finds the request without a call: vLLM asks for each chunk in each step.
        # Another context of the same id may be that of a new request, which ``_request`` decides.
        if request is None or request.source is not req_context:
            request = self._request(req_context)
        if not request.options.load:
            return LookupResult.MISS
        store_key = key
        if request.tenant_keys is not None:
            store_key = request.tenant_keys[key]
        is_held = self._guard.holds(store_key, request.epoch)
        if is_held and self._loads_key(request, key):
            self._metrics.observed.lookup_hits += 1
            return LookupResult.HIT
        self._metrics.observed.lookup_misses += 1
        return LookupResult.MISS

    def _loads_key(self, request: LiveRequest, key: OffloadKey) -> bool:
        """Return whether the request loads a chunk that the store holds."""
        loads = request.loads
        if loads.has_failed(key) or loads.are_declined:
            return False
        # the load was decided at an earlier chunk, and not declined
        is_accepted = loads.decision is not None
        if is_accepted or self.options.load_policy == "always":
            return True
        end = request.position(key)
        engine_request = _find_request(request.req_id)
        # a prewarmed context has neither a position nor a request in vLLM, and is always loaded
        if end is None or engine_request is None:
            return True
        with self._isolation.guard("decide", "the chunks are loaded"):
            tenant = request.options.tenant
            chunks = self._store_loads.chunks(engine_request, tenant, key, end)
            self._decide_load(request, chunks)
        return not loads.are_declined

    def _decide_load(self, request: LiveRequest, chunks: WaitingChunks) -> None:
        """Decide whether the request loads its chunks; report to the store if it does not."""
        loads = request.loads
        decision = self._store_loads.decide(self._tiers_in_use(), self._tier, chunks)
        # keep the decision, because vLLM asks for each chunk, and again in each step
        loads.decision = decision
        # without a decision, a faster store of the engine loads the chunks
        loads.are_elsewhere = decision is None
        if not loads.are_declined:
            return
        # look up more than the first key only if a probe is due, which may read their chunks:
        # otherwise the tier ignores them
        most = PROBED_KEYS if self._tier.is_probe_due else 1
        keys = chunks.held_by(self._tier, most)
        if decision is None:
            self._tier.on_faster_tier(keys)
        else:
            self._tier.on_load_declined(keys, request.context, decision)

    def _count_computed(
        self,
        request: LiveRequest,
        keys: Sequence[OffloadKey],
    ) -> None:
        """Count the tokens of a request that the engine has computed: those up to the last of the
        chunks with these keys, which it stores now."""
        start = request.loads.first_unmeasured
        # None until the first schedule of the request has ended
        if start is None:
            return
        stop = start
        # the keys of one group suffice, because all groups cover the same tokens
        group_suffix = keys[0][-ours.GROUP_INDEX_BYTES :]
        for key in keys:
            if not key.endswith(group_suffix):
                continue
            end = request.position(key)
            if end is not None:
                stop = max(stop, end)
        # ``stop`` is still ``start`` if these chunks were counted before, or were not computed
        if stop > start:
            self._meter.add(request.req_id, start, stop)
            request.loads.first_unmeasured = stop

    def _record_prefill(self, num_tokens: int, seconds: float) -> None:
        if not self._guard.is_opening:
            self._tier.record_prefill(num_tokens, seconds)

    def on_schedule_end(self, context: ScheduleEndContext) -> None:
        """Note the time of the step, from which the engine's speed is computed."""
        # this remains if the check fails: the time of the step is then not used
        is_busy = False
        with self._isolation.guard("measure", "the speed of prefills is not measured"):
            is_busy = self._has_earlier_request()
            for req_id in context.new_req_ids:
                self._begin_measuring(req_id)
        self._meter.end_schedule(is_busy)

    def _has_earlier_request(self) -> bool:
        """Return whether a request of an earlier step is still running. If none is, the engine may
        have been idle until a new one arrived.

        ``_requests`` may still have requests that have ended: an engine that becomes idle reports
        the ends of its last ones when a new one arrives.
        """
        scheduler = find_scheduler()
        if scheduler is None:
            return False
        for req_id, request in self._requests.items():
            # ``_begin_measuring`` sets the number at the end of the request's first schedule
            is_new = request.loads.first_unmeasured is None
            if is_new:
                continue
            running = scheduler.requests.get(req_id)
            if running is not None and not running.is_finished():
                return True
        return False

    def _begin_measuring(self, req_id: str) -> None:
        """Note the number of tokens that a request need not compute, in the step in which it is
        scheduled for the first time: vLLM drops the number with the first token of the answer."""
        request = self._requests.get(req_id)
        running = _find_request(req_id)
        if request is None or running is None or running.prefill_stats is None:
            return
        num_cached = running.prefill_stats.num_cached_tokens
        # computing begins at the token with this index
        request.loads.first_unmeasured = num_cached

    def submit_store(self, job_metadata: TransferJob) -> None:
        """Store the chunks of a job. If its request must not be stored, report the job as done
        without storing them."""
        request = self._request(job_metadata.req_context)
        keys = list(job_metadata.keys)
        with self._isolation.guard("measure", "the speed of prefills is not measured"):
            if keys:
                self._count_computed(request, keys)
        is_detached = self._guard.follow_weights()
        if is_detached or not request.must_store(keys, self.options.min_tokens):
            self._results.pass_over(job_metadata.job_id)
            return
        store_keys = request.store_keys(keys)
        request.add_stored(keys, store_keys)
        job = _job(job_metadata, store_keys, request.context)
        self._guard.submit_store(job, request.epoch)

    def submit_load(self, job_metadata: TransferJob) -> None:
        """Load the chunks of a job into the primary tier."""
        request = self._request(job_metadata.req_context)
        keys = list(job_metadata.keys)
        store_keys = request.store_keys(keys)
        self._results.begin_load(job_metadata.job_id, request, keys)
        # The other stores must not take these blocks for computed ones: they compare computed
        # blocks with stored ones of another release, to prove that both releases compute the same.
        for store in self._stores:
            if store is not self._guard:
                store.loaded_elsewhere(store_keys)
        job = _job(job_metadata, store_keys, request.context)
        # a load that takes much longer than the decision assumed is abandoned
        decision = request.loads.decision
        if decision is not None and math.isfinite(decision.deadline_s):
            deadline = time.monotonic() + decision.deadline_s
            job = dataclasses.replace(job, deadline=deadline, decision=decision)
        self._guard.submit_load(job, request.epoch)

    def get_finished_jobs(self) -> Iterable[JobResult]:
        return self._results.translate(self._guard.get_finished_jobs())

    def touch(
        self,
        keys: Collection[OffloadKey],
        req_context: ReqContext,
    ) -> None:
        """Record a use of chunks, for the order of eviction; not for a request that may neither
        load nor store."""
        request = self._request(req_context)
        options = request.options
        if options.load or options.store:
            store_keys = request.store_keys(list(keys))
            self._guard.touch(store_keys, request.context)

    def has_pending_work(self) -> bool:
        """Return whether an engine without requests should take a step: for results of jobs, or for
        metrics and events (``_request_step``)."""
        if self._results.has_passed_over or self._steps.is_waiting:
            return True
        return self._guard.has_pending_work()

    def drain_jobs(self) -> None:
        """Wait until all jobs have ended. vLLM calls it when its caches are reset, often because
        the weights change: so the workers are asked to compare theirs with earlier samples."""
        while not self._guard.drain_jobs(_DRAIN_S):
            logger.warning("still waiting for jobs of the store to end")
        self._guard.watch.require_comparison()
        # No KV of earlier weights is left: vLLM's prefix cache is empty now, and its primary tier
        # is after this call.
        if has_no_kv(find_scheduler()):
            self._guard.watch.on_no_kv()

    # Requests

    def on_new_request(self, req_context: ReqContext) -> RequestOffloadingContext:
        stores = self._request(req_context).options.store
        if stores and self.options.policy == "request":
            return RequestOffloadingContext(OffloadPolicy.REQUEST_LEVEL)
        return RequestOffloadingContext(OffloadPolicy.CHUNK_LEVEL)

    def _request(self, context: ReqContext) -> LiveRequest:
        """Return the record of a request; begin it at its first call.

        Compare the identities of the context objects first (``source``): parsing options is costly.
        """
        request = self._requests.get(context.req_id)
        if request is not None and request.source is context:
            return request
        given = _options_of(context)
        if request is not None:
            if request.is_of(given):
                return request
            # a new request has the id: end the earlier one, because the blocks of two tenants must
            # not be mixed
            self._end_request(request)
        request = self._begin_request(context, given)
        self._requests[context.req_id] = request
        return request

    def _begin_request(self, context: ReqContext, given: GivenOptions) -> LiveRequest:
        """Return a new request, which may use the store as its options say; begin the prefetches
        that they ask for."""
        options = given.options
        tenant = options.tenant
        # the epoch is None if the weights have changed, or if the request expects other weights
        epoch = self._guard.begin_request(options.weights)
        is_refused = self._report_if_refused(context.req_id, given)
        uses_store = epoch is not None and not is_refused
        if not uses_store:
            options = RequestOptions(store=False, load=False, tenant=tenant)
        # If the engine has several stores, the first of their adapters handles prefetches, so that
        # each is done once.
        if uses_store and self._guard is self._stores[0]:
            for prefetch in given.prefetches:
                self._prefetch(prefetch, tenant or DEFAULT_TENANT)
        request = self._new_request(
            context.req_id, options, context.get_offload_key_position
        )
        request.source = context
        request.is_refused = given.is_refused
        request.epoch = epoch
        return request

    def _report_if_refused(self, req_id: str, given: GivenOptions) -> bool:
        """Return whether a request that begins neither uses nor fills the store: its options are
        invalid, or it names no tenant although one is required. If so, count it."""
        context = ours.ReqContext(req_id, tenant=given.options.tenant)
        is_refused = given.is_refused or self._tier.refuses(context)
        if not is_refused:
            return False
        # the tier counts the refusal, but must not be used while a tier of other weights is opened
        if not self._guard.is_opening:
            why = _INVALID if given.is_refused else NO_TENANT
            self._tier.report_refused(context, why)
        return True

    def _prefetch(self, prefetch: Prefetch, tenant: str) -> None:
        """Queue contexts of a tenant for the tier ``persistkv-prewarm`` to promote.

        Token ids name one context: the blocks of it that any store holds are promoted. An id or
        labels name contexts of this store, which searches for them.
        """
        if not prefetch.token_ids:
            choice = prefetch.choice(tenant)
            self._tier.prefetch(choice)
            return
        with self._isolation.guard("prefetch", "the context is not promoted"):
            keys = self._context_keys(prefetch.token_ids, prefetch.cache_salt)
            own_keys = [tenant_key(tenant, key) for key in keys]
            held = [key for key in own_keys if self._is_stored(key)]
            if held:
                context = ours.StoredContext(tenant, held)
                self._tier.prefetch(context)

    def _is_stored(self, key: OffloadKey) -> bool:
        """Return whether any of the engine's stores holds a block."""
        return any(tier.holds(key) for tier in self._tiers_in_use())

    def on_request_finished(self, req_context: ReqContext) -> None:
        """End the request of a context, unless another tenant's request has its id by now."""
        request = self._requests.get(req_context.req_id)
        if request is None:
            return
        # compare identities first, because parsing the options of a context is costly
        is_same_context = request.source is req_context
        is_own = is_same_context or request.is_of(_options_of(req_context))
        # keep a newer request that has the same id: the earlier one has ended already
        if not is_own:
            return
        del self._requests[req_context.req_id]
        self._end_request(request)

    def _end_request(self, request: LiveRequest) -> None:
        """Report which blocks the request restored, and end its context in the store if it has
        any."""
        restored = request.loads.restored
        if restored:
            self._guard.on_restored(restored, request.context, request.epoch)
        if request.has_stored:
            # the persistent tier also reports the restored blocks when a context ends
            self._guard.on_request_finished(request.end(), request.epoch)
        elif not self._guard.is_opening:
            self._tier.report_restored(request.context)

    # The rest

    def _request_step(self, client: StoreClient, watch: WeightsWatch) -> None:
        """Have an idle engine export what changed: events, or metrics. Called in another thread."""
        # a step of sleeping workers would touch memory that they have released
        if watch.is_asleep:
            return
        stats = client.glance()
        held_chunks = len(client)
        if client.has_events or self._metrics.is_outdated(stats, held_chunks):
            self._steps.request()

    def take_events(self) -> Iterable[OffloadingEvent]:
        """Return the chunks that were stored in the store, or removed from it, since the last
        call."""
        if self._guard.is_opening:
            return []
        events = []
        for event in self._tier.take_events():
            # an event without keys says that earlier events were lost, which vLLM cannot express
            if not event.keys:
                continue
            keys = [engine_key(key, self._key_bytes) for key in event.keys]
            translated = OffloadingEvent(
                keys,
                Medium.STORAGE,
                event.removed,
                self.locality,
                self.tier_type,
                # vLLM then keeps the list of a stored chunk's blocks, to name all of them when it
                # is removed: the key is the hash of the last block alone
                removal_expected=not event.removed,
            )
            events.append(translated)
        return events

    @classmethod
    def build_metric_definitions(
        cls,
        extra_config: dict[str, Any],
    ) -> dict[str, OffloadingMetricMetadata]:
        return metric_definitions()

    @classmethod
    def config_info_keys(cls, tier_config: dict[str, Any]) -> tuple[str, ...]:
        return CONFIG_INFO

    def config_info(self) -> dict[str, str]:
        """Return the values of ``CONFIG_INFO``; the namespace is ``none`` while weights that have
        changed keep the store out of use."""
        options = self.options
        namespace = "none"
        if self._guard.is_in_use:
            identity = Identity.of(self._tier.config.identity)
            namespace = identity.digest.hex()
        # in the order of ``CONFIG_INFO``
        values = (
            options.scheme,
            namespace,
            options.codec,
            options.durability,
            options.policy,
            self._tier.client.host.name,
        )
        return dict(zip(CONFIG_INFO, values, strict=True))

    def get_stats(self) -> Any:
        """Return vLLM's metrics object with the growth of the counters; None: it is too early for
        another reading."""
        self._steps.note_step()
        observed = self._metrics.observed
        observed.changed_weights_chunks = self._guard.dropped_blocks
        counts = self._tier.load_counts
        observed.requests_loaded = counts[Reason.LOADED]
        observed.requests_too_slow = counts[Reason.TOO_SLOW]
        observed.requests_too_short = counts[Reason.TOO_SHORT]
        observed.requests_deadline = counts[Reason.DEADLINE]
        observed.requests_refused = counts[Reason.REFUSED]
        # while a tier is being opened, only the opening thread may use its client
        if self._guard.is_opening:
            return None
        now = time.monotonic()
        if not self._metrics.is_due(now):
            return None
        client = self._tier.client
        held_chunks = len(client)
        return self._metrics.read(client.glance(), held_chunks)

    def shutdown(self) -> None:
        """End unfinished requests, and wait until the store's process has committed all blocks and
        ended; idempotent.

        The store lists the part of each unfinished request that was stored. After a minute, a
        process that still uses rows is killed, and its uncommitted blocks are lost; one that only
        commits continues for a bounded time.
        """
        # vLLM ends no requests when it stops
        for request in self._requests.values():
            with self._isolation.guard(
                "on_request_finished", "the context of a request is not listed"
            ):
                self._end_request(request)
        self._requests.clear()
        with self._isolation.guard("shutdown", "its resources may not be released"):
            self._guard.shutdown()
        # the list stays in the spec, with which an engine may build its tiers again
        if self._guard in self._stores:
            self._stores.remove(self._guard)
        fds = self._region_fds
        self._region_fds = ()
        close_region(fds)


def _locality(options: VllmTierOptions, *, is_remote: bool) -> Locality:
    """Return the locality of the store in vLLM's events: the option, or that of the backend."""
    if options.locality is not None:
        return Locality(options.locality)
    return Locality("REMOTE" if is_remote else "LOCAL")


def _options_of(context: ReqContext) -> GivenOptions:
    """Return the options in a request's parameters and hints; costly, because it parses them."""
    hints = () if context.kv_hints is None else context.kv_hints.actions
    return request_options(context.req_id, context.kv_transfer_params, hints)


def _job(
    job: TransferJob,
    keys: list[OffloadKey],
    context: ours.ReqContext,
) -> JobMetadata:
    """Return vLLM's job as one of the persistent tier; ``keys`` are those of the store, in the
    order of the job's."""
    rows = np.array(job.chunk_ids, np.int64)
    return JobMetadata(job.job_id, keys, rows, job.is_promotion, context)


def _chunk_tokens(offloading: Any) -> tuple[int, ...]:
    """Return the tokens of one chunk for each group index that a key may have."""
    blocks_per_chunk = offloading.cache.blocks_per_chunk
    tokens = {}
    for group in offloading.groups:
        tokens[group.group_id] = group.tokens_per_block * blocks_per_chunk
    return by_group_index(tokens)


def _row_layout(
    offloading: Any,
    rows: memoryview,
    shared: SharedLayout | None,
    numbers: NumberLayout | None,
) -> RowLayout:
    """Return the layout of the primary tier's rows."""
    stride = rows.nbytes // len(rows)
    used_bytes = stride if shared is None else shared.num_bytes
    # A tier does not know the offsets of workers' cells and groups' tensors, so each group uses the
    # whole row.
    group = GroupLayout.of_bytes(used_bytes)
    num_groups = len(_chunk_tokens(offloading))
    return RowLayout(stride, (group,) * num_groups, numbers)


def _report_reuse(
    engine: Any,
    offloading: Any,
    shared: SharedLayout | None,
) -> None:
    """Log which later engines will not find this engine's blocks."""
    algorithm = engine.cache_config.prefix_caching_hash_algo
    if has_random_hashes(algorithm):
        logger.warning(
            "block hashes are random (prefix_caching_hash_algo=%s, no PYTHONHASHSEED): no "
            "stored block will be found after a restart. Set PYTHONHASHSEED=0, or use the "
            "algorithm sha256",
            algorithm,
        )
    if shared is None and offloading.parallel.world_size > 1:
        logger.info(
            "the layout of KV depends on the parallel sizes: engines with other sizes do "
            "not share this one's contexts. If the model allows it, "
            '"canonical_layout": true in kv_connector_extra_config of all of them makes it '
            "independent"
        )


def _check_primary_size(
    engine: Any,
    offloading: Any,
    rows: memoryview,
) -> None:
    """Warn if the longest request does not fit the primary tier, through which all transfers
    pass."""
    max_tokens = engine.model_config.max_model_len
    # use the group with the smallest chunks, which needs the most of them
    chunk_tokens = min(_chunk_tokens(offloading))
    num_chunks = len(rows)
    needed_chunks = max_tokens // chunk_tokens
    if num_chunks >= needed_chunks:
        return
    chunk_bytes = rows.nbytes // max(1, num_chunks)
    logger.warning(
        "cpu_bytes_to_use is too small: %d chunks, %d tokens. A request of max_model_len, %d "
        "tokens, needs %d chunks: set it to %d bytes or more. Contexts that do not fit are "
        "stored and loaded in part, or not at all",
        num_chunks,
        num_chunks * chunk_tokens,
        max_tokens,
        needed_chunks,
        needed_chunks * chunk_bytes,
    )


def _find_request(req_id: str) -> Any:
    """Return vLLM's ``Request`` of this id; None if no scheduler calls, or if it has no such
    request."""
    scheduler = find_scheduler()
    return None if scheduler is None else scheduler.requests.get(req_id)


def is_only_source(engine: Any) -> bool:
    """Return whether all KV that the engine (a ``VllmConfig``) does not compute comes from tiers of
    this package."""
    transfer = getattr(engine, "kv_transfer_config", None)
    if transfer is None or transfer.kv_connector != "OffloadingConnector":
        return False
    extra_config = transfer.kv_connector_extra_config or {}
    tiers = extra_config.get("secondary_tiers") or ()
    return all(tier.get("type") in _TYPES for tier in tiers)


def engine_stores(offloading_spec: Any) -> list[GuardedTier]:
    """Return this engine's stores in the order of construction: a shared list, kept in the spec."""
    stores: list[GuardedTier] = vars(offloading_spec).setdefault(
        "_persistkv_stores", []
    )
    return stores


def key_length() -> int:
    """Return the length of the keys of the engine that is being built."""
    algorithm = find_vllm_config().cache_config.prefix_caching_hash_algo
    hash_function = get_hash_fn_by_name(algorithm)
    # all keys have the same length, whatever is hashed and whichever group it is
    return len(ours.make_offload_key(hash_function(b""), 0))


def _context_keys(
    offloading: Any,
    hash_algorithm: str,
    token_ids: Sequence[int],
    cache_salt: str | None,
) -> list[ours.OffloadKey]:
    """Return the keys of a context's full chunks, one KV cache group after the other, each in
    token order. A request with this prompt has them, without LoRA and without multimodal inputs.

    Takes as long as the hashing of the prompt. Runs in the engine's process, where vLLM has drawn
    the seed of its hashes.
    """
    hash_tokens = offloading.cache.tokens_per_hash
    hash_function = get_hash_fn_by_name(hash_algorithm)
    # this request is never scheduled: only its block hashes are used
    request = Request(
        request_id="persistkv-prefetch",
        prompt_token_ids=list(token_ids),
        sampling_params=SamplingParams(max_tokens=1),
        pooling_params=None,
        cache_salt=cache_salt,
        block_hasher=get_request_block_hasher(hash_tokens, hash_function),
    )
    keys = []
    for group in offloading.groups:
        chunk_tokens = group.tokens_per_block * offloading.cache.blocks_per_chunk
        for end in range(chunk_tokens, len(token_ids) + 1, chunk_tokens):
            key = chunk_key(request, end, group.group_id, hash_tokens)
            keys.append(key)
    return keys
