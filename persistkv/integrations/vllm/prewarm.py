"""Promotion of recently used contexts of a store before a request looks them up.

vLLM promotes chunks that are looked up, and a tier cannot look up its own chunks. However, a tier
may serve external requests, for which it looks up chunks of the *other* tiers. This tier holds no
chunks, and looks up the most recently used contexts: vLLM's manager promotes them as for a request,
and may evict them at any time.
"""

from __future__ import annotations

import time
from collections.abc import Iterable
from typing import Any

import msgspec
from vllm.v1.kv_offload.base import (
    LookupResult,
    OffloadKey,
    OffloadPolicy,
    ReqContext,
    RequestOffloadingContext,
)
from vllm.v1.kv_offload.tiering.base import (
    JobResult,
    ParentManager,
    SecondaryTierManager,
    TransferJob,
)

from persistkv.base import REQUEST_PARAMETER
from persistkv.config import convert_options
from persistkv.errors import ConfigurationError
from persistkv.integrations.vllm.tier import engine_stores, key_length
from persistkv.tenants import engine_key
from persistkv.tiering.prewarming import Prewarming

_WHERE = "secondary tier persistkv-prewarm"
_PATIENCE_S = 30.0  # maximum seconds for one context, which may find no room
_ON_ITS_WAY = (LookupResult.RETRY, LookupResult.HIT_PENDING)
"""Results of lookups of chunks whose promotion has not ended."""


class PrewarmOptions(msgspec.Struct, frozen=True, kw_only=True):
    """Options of the tier ``persistkv-prewarm``."""

    share: float = 0.5
    """Part of the primary tier to fill, above 0 and at most 1."""

    def __post_init__(self) -> None:
        if not 0 < self.share <= 1:
            raise ConfigurationError(
                f"{_WHERE} option share", self.share, "a share above 0 and at most 1"
            )


# vLLM is not installed where types are checked.
class PersistKVPrewarm(SecondaryTierManager):  # type: ignore[misc]
    """Secondary tier that stores nothing: it promotes recently used contexts, listed by the first
    ``persistkv`` tier.

    Enabled by ``{"type": "persistkv-prewarm", "share": 0.5}`` in ``secondary_tiers``, after the
    ``persistkv`` tiers.

    :raises ConfigurationError: an option is invalid, or no ``persistkv`` tier is before this one.
    """

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
        self.options = convert_options(PrewarmOptions, options, where=_WHERE)
        stores = engine_stores(offloading_spec)
        if not stores:
            raise ConfigurationError(
                "secondary_tiers", tier_type, "a persistkv tier before it"
            )
        self._store = stores[0]
        """The store that lists the contexts."""
        self._key_bytes = key_length()
        """Length of vLLM's keys, which ``engine_key`` gets back from longer keys of a tenant."""
        num_chunks = int(len(primary_kv_view) * self.options.share)
        self._prewarming = Prewarming(self._store, num_chunks)
        """Chooses the contexts to promote."""
        self._num_contexts = 0
        """Number of contexts so far; makes the ids of their requests unique."""
        self._context: ReqContext | None = None
        """The request in whose name a context is being promoted; None: no context is."""
        self._keys: list[OffloadKey] = []
        """Keys of the context's chunks that are not promoted yet."""
        self._gives_up_at = 0.0
        """Monotonic time at which the promotion of the context is given up."""
        self._passed_over: list[JobResult] = []
        """Results of store jobs, which have stored nothing, for the next ``get_finished_jobs``."""

    def serve_external_requests(self, parent: ParentManager) -> None:
        """Begin or continue the promotion of one context; vLLM calls it in its steps.

        The context is promoted as a request of this tier's own, which ends when all its chunks have
        arrived or are missing, or after 30 s.
        """
        if self._context is None:
            self._begin_context(parent)
        # there is no context to promote
        if self._context is None:
            return
        # the first lookup of a chunk queues its promotion, later ones tell whether it has ended
        promoting = []
        for key in self._keys:
            result = parent.lookup(key, self._context)
            if result in _ON_ITS_WAY:
                promoting.append(key)
        self._keys = promoting
        is_overdue = time.monotonic() > self._gives_up_at
        if not self._keys or is_overdue:
            parent.on_request_finished(self._context)
            self._context = None

    def _begin_context(self, parent: ParentManager) -> None:
        """Begin a request for the next context, if there is one."""
        found = self._prewarming.next_context()
        if found is None:
            return
        self._num_contexts += 1
        # vLLM passes its own keys to all tiers. The tiers of this package convert them to the keys
        # of their stores, by the tenant in the parameters.
        req_id = f"{self.tier_type}-{self._num_contexts}"
        options: dict[str, str | None] = {"tenant": found.tenant}
        # after a change, a request must name the present weights to use the store
        watch = self._store.watch
        if not watch.is_initial:
            options["weights"] = watch.weights
        self._context = ReqContext(req_id, {REQUEST_PARAMETER: options})
        self._keys = [engine_key(key, self._key_bytes) for key in found.keys]
        self._gives_up_at = time.monotonic() + _PATIENCE_S
        parent.on_new_request(self._context)

    def has_pending_work(self) -> bool:
        is_promoting = self._context is not None
        if is_promoting or self._passed_over:
            return True
        # recently used contexts are left: they are promoted at the start
        if not self._prewarming.recent_ended:
            return True
        # contexts of prefetches may be left: not asked for yet, or not promoted yet
        return self._store.prefetch_waits or self._prewarming.waits

    # Methods of a tier that holds no chunks

    def lookup(self, key: OffloadKey, req_context: ReqContext) -> LookupResult:
        return LookupResult.MISS

    def submit_store(self, job_metadata: TransferJob) -> None:
        """Report success without storing anything."""
        result = JobResult(job_metadata.job_id, success=True, transfer_bytes=0)
        self._passed_over.append(result)

    def submit_load(self, job_metadata: TransferJob) -> None:
        raise NotImplementedError("nothing was ever found here")

    def get_finished_jobs(self) -> Iterable[JobResult]:
        passed_over = self._passed_over
        self._passed_over = []
        return passed_over

    def on_new_request(self, req_context: ReqContext) -> RequestOffloadingContext:
        return RequestOffloadingContext(OffloadPolicy.CHUNK_LEVEL)

    def drain_jobs(self) -> None:
        """Do nothing: store jobs end when they are submitted, and there are no loads."""
