"""The tiers behind an engine, and the offloading part of the engine's step between two forward
passes."""

from __future__ import annotations

import time
import uuid
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from typing import Any, cast

from persistkv.base import CanonicalKVCaches
from persistkv.connector.common import LoadProgress
from persistkv.connector.scheduler import BlockTable, OffloadingConnectorScheduler
from persistkv.connector.worker import OffloadingConnectorWorker
from persistkv.cpu.layout import cell_bytes, group_layouts
from persistkv.cpu.shared_offload_region import remove_leftover_regions
from persistkv.cpu.spec import WorkerGeometry
from persistkv.integrations.transformers.kv_cache import PagedKVCache
from persistkv.storage.store.savings import MEASURED_TOKENS
from persistkv.tiering.load_cost import Reason
from persistkv.tiering.manager import TieringOffloadingManager
from persistkv.tiering.persistent import REMEMBERED_ENDS, PersistentTier
from persistkv.tiering.spec import TieringOffloadingSpec

_PREWARM_S = 60.0  # seconds: longest wait for the promotions of ``prewarm``
# seconds between two polls: far below the time of a forward pass, far above the time of a poll
_POLL_S = 0.0005


class Tiers:
    """Primary tier and persistent tiers, with the connector's scheduler and worker over them.
    Called from one thread.

    :ivar persistent: the persistent tiers, in the order of the stores' URLs.
    :ivar num_blocks: number of rows of the primary tier; a row holds one block.
    :ivar running: for each request that has begun and not ended, by id, the number of device blocks
        of each group that it may use.
    """

    def __init__(
        self,
        paged_cache: PagedKVCache,
        identity: Mapping[str, Any],
        urls: Sequence[str],
        *,
        cpu_bytes: int,
        lookup_deadline_s: float,
        prewarm_share: float = 0.0,
        prefill_tokens_per_s: float | None = None,
        **options: Any,
    ) -> None:
        """Build the tiers behind a paged cache. If one part cannot be built, the others are
        released.

        :param options: options of ``PersistentTier``. They and the other parameters are those of
            ``Engine.open``.
        :raises ConfigurationError: if the primary tier is too small for one block, or an option is
            invalid.
        """
        # Remove the files of killed engines, which would keep their memory for ever: file names are
        # unique per engine, so no later engine replaces them.
        remove_leftover_regions()
        common = {
            "type": PersistentTier.get_tier_type(),
            "unique_request_ids": True,  # the engine draws them as UUIDs
            **options,
        }
        config: dict[str, Any] = {
            "cpu_bytes_to_use": cpu_bytes,
            "prewarm_share": prewarm_share,
            "prefill_tokens_per_s": prefill_tokens_per_s,
            "secondary_tiers": [{**common, "url": url} for url in urls],
        }
        caches = paged_cache.canonical()
        spec = _tiering_spec(config, paged_cache, caches, identity)
        self.num_blocks = spec.num_blocks
        try:
            # without the option ``store_threshold``, this is the manager of ``make_manager``
            manager = cast(TieringOffloadingManager, spec.get_manager())
            self._worker = OffloadingConnectorWorker(list(spec.get_handlers(caches)))
            self.scheduler = OffloadingConnectorScheduler(
                manager, paged_cache.specs(), max_load_blocks=spec.num_blocks
            )
        except BaseException:
            spec.shutdown()
            raise
        self._tiering = manager
        # all tiers of the configuration above are of this type
        self.persistent = cast(list[PersistentTier], manager.secondary_tiers)
        self._lookup_deadline_s = lookup_deadline_s
        self._on_released: dict[str, Callable[[], None]] = {}
        """By request id, the function to call when the device blocks of the ended request are no
        longer read. A request is here from its begin to this call."""
        self.running: dict[str, int] = {}
        self._known: dict[str, None] = {}
        """Ids of the requests that ``persisted`` can be asked about, oldest first: as many as
        persistent tiers remember the results of."""
        self._ended: deque[str] = deque()
        """Ids of ended requests whose end the next ``step`` reports to the scheduler. Any thread
        appends to it without a lock."""

    def prewarm(self) -> None:
        """Wait up to one minute for the promotions that the option ``prewarm_share`` asks for."""
        deadline = time.monotonic() + _PREWARM_S
        while self._tiering.has_pending_work() and time.monotonic() < deadline:
            self.step()
            time.sleep(_POLL_S)

    def begin(
        self,
        req_id: str,
        on_released: Callable[[], None],
        num_blocks: int,
    ) -> None:
        """Register a request of the scheduler that may use ``num_blocks`` device blocks of each
        group; ``on_released`` is called when they are no longer read after its end."""
        self._on_released[req_id] = on_released
        self.running[req_id] = num_blocks
        # ``persisted`` answers for the last requests that have begun
        self._known[req_id] = None
        if len(self._known) > REMEMBERED_ENDS:
            oldest = next(iter(self._known))
            del self._known[oldest]

    def end(self, req_id: str) -> bool:
        """End a request; the next ``step`` reports the end to the scheduler. May be called from any
        thread at any time, also within another method: the finalizer of a stream calls it. Return
        False if the request is not running.
        """
        if self.running.pop(req_id, None) is None:
            return False
        self._ended.append(req_id)
        return True

    def step(self, *, wait: bool = False) -> dict[str, LoadProgress]:
        """Start planned transfers between device and primary tier, process finished ones, and end
        the connector's step.

        :param wait: wait until all transfers have ended; False: only for the loads that this step
            starts.
        :returns: results of the loads that ended since the last step, failed ones included, by
            request id.
        """
        while self._ended:
            self.scheduler.request_finished(self._ended.popleft())
        metadata = self.scheduler.build_connector_meta()
        self._worker.start(metadata)
        if wait:
            self._worker.wait_all()
        else:
            self._worker.wait(job.job_id for job in metadata.loads)
        finished = self._worker.get_finished()
        output = self.scheduler.update_connector_output(finished)
        # take the events and discard them: they would pile up in the tiers, and have no use here
        self.scheduler.take_events()
        for req_id in output.released:
            on_released = self._on_released.pop(req_id)
            on_released()
        return output.loads

    def match(self, req_id: str, num_computed_tokens: int) -> int:
        """Return how many tokens after the first ``num_computed_tokens`` can be loaded from the
        tiers. Wait for promotions up to the lookup deadline; after it, count only blocks that are
        ready.
        """
        deadline = time.monotonic() + self._lookup_deadline_s
        while True:
            matched = self.scheduler.get_num_new_matched_tokens(
                req_id, num_computed_tokens
            )
            if matched is not None:
                return matched
            # None: some blocks are still being promoted
            if time.monotonic() >= deadline:
                # from now on, the scheduler never returns None for this request
                self.scheduler.give_up_waiting(req_id)
            else:
                self.step()
                time.sleep(_POLL_S)

    def load(
        self,
        req_id: str,
        tables: Sequence[BlockTable],
        num_tokens: int,
    ) -> LoadProgress:
        """Load ``num_tokens``, a result of ``match``, into the device blocks of ``tables``, and
        wait for the load. If it fails, the content of the device blocks is undefined.
        """
        num_to_load = self.scheduler.update_state_after_alloc(
            req_id, tables, num_tokens
        )
        # nothing was matched, or blocks were evicted since then: the engine computes the tokens
        if not num_to_load:
            return LoadProgress(success=True, num_tokens=0, num_bytes=0)
        # a step waits for the loads that it starts, so the first step usually has the result
        loads = self.step()
        while req_id not in loads:
            time.sleep(_POLL_S)
            loads = self.step()
        return loads[req_id]

    def record_prefill(
        self,
        start: int,
        stop: int,
        seconds: float,
    ) -> None:
        """Record how long the prefill of the tokens from ``start`` to ``stop - 1`` took: for the
        choice between a load and a prefill, for ``prefill_s``, and for the savings that stores
        record. Prefills of less than 64 tokens are ignored: they do not show the speed of long
        prefills."""
        num_tokens = stop - start
        if num_tokens < MEASURED_TOKENS:
            return
        self._tiering.load_chooser.prefill.observe(start, stop, seconds)
        for tier in self.persistent:
            tier.record_prefill(num_tokens, seconds)

    def prefill_s(self, start: int, stop: int) -> float | None:
        """Return the expected seconds of a prefill of the tokens from ``start`` to ``stop - 1``: at
        the speed with which loads are compared, or else at the speed that earlier engines have
        recorded in the stores. None: neither speed is known."""
        if start == stop:
            return 0.0
        expected_s = self._tiering.load_chooser.prefill.expected_s(start, stop)
        if expected_s is not None:
            return expected_s
        # sums of tokens and seconds, as recorded in each store
        all_tokens = 0
        all_s = 0.0
        for tier in self.persistent:
            num_tokens, seconds = tier.client.prefill
            all_tokens += num_tokens
            all_s += seconds
        if not all_tokens:
            return None
        return (stop - start) * all_s / all_tokens

    def load_reasons(self) -> dict[str, int]:
        """Return for each ``Reason`` the number of requests for which it was the outcome; with
        several stores, the number of their parts."""
        counts = dict.fromkeys(map(str, Reason), 0)
        for tier in self.persistent:
            for reason, count in tier.load_counts.items():
                counts[reason] += count
        return counts

    def load_reason(self, req_id: str) -> str | None:
        """See ``RequestStats.load_reason``."""
        return self._tiering.load_reason(req_id)

    def drain(self, deadline: float) -> bool:
        """Repeat ``step`` until the transfers of all ended requests, and those of running ones that
        have begun, have ended. Return False if ``deadline``, a ``time.monotonic`` time, passed
        first.
        """
        self.step(wait=True)
        while self._has_unreleased():
            if time.monotonic() >= deadline:
                return False
            # A store that found no room in the primary tier is planned again in the next step. Room
            # appears when the secondary tiers have taken earlier blocks.
            time.sleep(_POLL_S)
            self.step(wait=True)
        return True

    def _has_unreleased(self) -> bool:
        """Return whether the device blocks of an ended request are still read."""
        return any(req_id not in self.running for req_id in self._on_released)

    def knows(self, req_id: str) -> bool:
        """Return whether ``persisted`` can be called: for the last 4,096 requests."""
        return req_id in self._known

    def persisted(self, req_id: str) -> bool | None:
        """Return whether the whole context of a finished request is durable in every store; None:
        not known yet."""
        # one store that has dropped a part is enough, even if other stores have no result yet
        results = [tier.persisted(req_id) for tier in self.persistent]
        if not results or False in results:
            return False
        if None in results:
            return None
        return True

    def flush(self, timeout_s: float) -> bool:
        """Wait until all submitted blocks are durable or dropped in every store. Return False if
        the timeout passed first, or a store is not open.
        """
        deadline = time.monotonic() + timeout_s
        if not self.drain(deadline):
            return False
        flushed = True
        # flush each store, also after a store that is not in time
        for tier in self.persistent:
            left_s = max(deadline - time.monotonic(), 0.0)
            if not tier.client.flush(left_s):
                flushed = False
        return flushed

    def end_all(self) -> None:
        """End all running requests, as ``end`` does."""
        for req_id in list(self.running):
            self.end(req_id)

    def close(self) -> None:
        """Wait for transfers, then release the worker, then the primary tier, whose rows the worker
        copies."""
        try:
            self._worker.shutdown()
        finally:
            self.scheduler.shutdown()


def _tiering_spec(
    config: dict[str, Any],
    paged_cache: PagedKVCache,
    caches: CanonicalKVCaches,
    identity: Mapping[str, Any],
) -> TieringOffloadingSpec:
    """Return the specification of tiers whose primary tier holds one device block in each row."""
    device_blocks_per_row = 1
    return TieringOffloadingSpec(
        extra_config=config,
        geometry=WorkerGeometry(
            instance_id=uuid.uuid4().hex,
            gpu_block_size=paged_cache.block_size,
            gpu_block_bytes=cell_bytes(caches, device_blocks_per_row),
        ),
        identity=identity,
        group_layouts=group_layouts(caches, device_blocks_per_row),
        windows=tuple(group.sliding_window for group in paged_cache.specs()),
    )
