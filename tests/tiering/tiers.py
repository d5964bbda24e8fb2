"""Tiers that record their calls."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from persistkv.base import (
    OffloadingEvent,
    OffloadKey,
    OffloadPolicy,
    ReqContext,
    RequestOffloadingContext,
)
from persistkv.config import OffloadingConfig
from persistkv.tiering.base import JobMetadata, JobResult
from persistkv.tiering.example import ExampleSecondaryTier


class RecordingTier(ExampleSecondaryTier):
    """Tier that records its calls, asks for every block of a request, and fails loads of
    ``unloadable`` keys.

    It reports no finished jobs while ``withholds_results`` is set.
    """

    policy = OffloadPolicy.REQUEST_LEVEL

    def __init__(
        self,
        config: OffloadingConfig,
        primary_kv_view: memoryview,
        max_blocks: int = 1000,
        simulate_async: bool = False,
    ) -> None:
        super().__init__(config, primary_kv_view, max_blocks, simulate_async)
        self.stores: list[JobMetadata] = []
        self.loads: list[JobMetadata] = []
        self.calls: list[tuple[str, str]] = []
        self.ended: list[ReqContext] = []
        self.touched: list[OffloadKey] = []
        self.unloadable: set[OffloadKey] = set()
        self.polls = 0
        self.withholds_results = False

    def submit_store(self, job_metadata: JobMetadata) -> None:
        self.stores.append(job_metadata)
        super().submit_store(job_metadata)

    def submit_load(self, job_metadata: JobMetadata) -> None:
        self.loads.append(job_metadata)
        for key in self.unloadable.intersection(job_metadata.keys):
            del self.blocks[key]
        super().submit_load(job_metadata)

    def lookup(self, key: OffloadKey, req_context: ReqContext) -> bool | None:
        return key in self.unloadable or super().lookup(key, req_context)

    def get_finished_jobs(self) -> Iterable[JobResult]:
        self.polls += 1
        return [] if self.withholds_results else super().get_finished_jobs()

    def touch(self, keys: Sequence[OffloadKey], req_context: ReqContext) -> None:
        self.touched += keys

    def on_new_request(self, req_context: ReqContext) -> RequestOffloadingContext:
        self.calls.append(("new", req_context.req_id))
        return RequestOffloadingContext(self.policy)

    def on_request_finished(self, req_context: ReqContext) -> None:
        self.calls.append(("finished", req_context.req_id))
        self.ended.append(req_context)

    def drain_jobs(self, timeout_s: float) -> bool:
        self.calls.append(("drain_jobs", ""))
        return super().drain_jobs(timeout_s)

    def shutdown(self) -> None:
        self.calls.append(("shutdown", ""))
        super().shutdown()


class BlockLevelTier(RecordingTier):
    policy = OffloadPolicy.BLOCK_LEVEL


class RaisingTier(RecordingTier):
    """Tier that raises ``error`` in the calls named by ``failing``; shutdown releases the rows
    first."""

    def __init__(
        self,
        config: OffloadingConfig,
        primary_kv_view: memoryview,
        max_blocks: int = 1000,
        simulate_async: bool = False,
    ) -> None:
        super().__init__(config, primary_kv_view, max_blocks, simulate_async)
        self.failing: set[str] = set()
        self.error: type[BaseException] = OSError

    def _check(self, call: str) -> None:
        if call in self.failing:
            raise self.error(call)

    def lookup(self, key: OffloadKey, req_context: ReqContext) -> bool | None:
        self._check("lookup")
        return super().lookup(key, req_context)

    def submit_store(self, job_metadata: JobMetadata) -> None:
        self._check("submit_store")
        super().submit_store(job_metadata)

    def submit_load(self, job_metadata: JobMetadata) -> None:
        self._check("submit_load")
        super().submit_load(job_metadata)

    def get_finished_jobs(self) -> Iterable[JobResult]:
        self._check("get_finished_jobs")
        return super().get_finished_jobs()

    def touch(self, keys: Sequence[OffloadKey], req_context: ReqContext) -> None:
        self._check("touch")
        super().touch(keys, req_context)

    def on_new_request(self, req_context: ReqContext) -> RequestOffloadingContext:
        self._check("on_new_request")
        return super().on_new_request(req_context)

    def on_request_finished(self, req_context: ReqContext) -> None:
        self._check("on_request_finished")
        super().on_request_finished(req_context)

    def take_events(self) -> Iterable[OffloadingEvent]:
        self._check("take_events")
        return super().take_events()

    def reset_cache(self, weights_changed: bool) -> None:
        self._check("reset_cache")
        super().reset_cache(weights_changed)

    def has_pending_work(self) -> bool:
        self._check("has_pending_work")
        return super().has_pending_work()

    def drain_jobs(self, timeout_s: float) -> bool:
        drained = super().drain_jobs(timeout_s)
        self._check("drain_jobs")
        return drained

    def shutdown(self) -> None:
        super().shutdown()
        self._check("shutdown")
