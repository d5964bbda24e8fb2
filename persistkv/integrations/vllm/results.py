"""Results of a tier's jobs, as vLLM expects them."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import NamedTuple

from vllm.v1.kv_offload.tiering.base import JobResult

from persistkv.base import OffloadKey
from persistkv.integrations.vllm.metrics import MetricsReader
from persistkv.integrations.vllm.requests import LiveRequest
from persistkv.tenants import engine_key
from persistkv.tiering.base import JobResult as TierResult


class _LoadJob(NamedTuple):
    """A load in flight."""

    request: LiveRequest
    keys: Sequence[OffloadKey]
    """The engine's keys of its chunks."""


class JobResults:
    """Results of one tier's jobs: those that the store reports, and those of store jobs that were
    not submitted to it. Adds the reported ones to the metrics, and makes chunks that failed to load
    misses for their request."""

    def __init__(self, metrics: MetricsReader) -> None:
        self._metrics = metrics
        self._loads: dict[int, _LoadJob] = {}
        """Loads in flight by job id. A job that is not in it is a store."""
        self._passed_over: list[JobResult] = []
        """Results of store jobs that were not submitted, for the next ``translate``."""

    @property
    def has_passed_over(self) -> bool:
        """Whether ``translate`` has results to return even if the store reports none."""
        return bool(self._passed_over)

    def begin_load(
        self,
        job_id: int,
        request: LiveRequest,
        keys: Sequence[OffloadKey],
    ) -> None:
        """Register a load that is submitted now."""
        self._loads[job_id] = _LoadJob(request, keys)

    def pass_over(self, job_id: int) -> None:
        """Add the result of a store job that the tier does not submit on purpose: success, with 0
        bytes."""
        result = JobResult(job_id, success=True, transfer_bytes=0)
        self._passed_over.append(result)

    def translate(self, results: Iterable[TierResult]) -> list[JobResult]:
        """Return all results since the last call.

        :param results: those that the store reports now.
        """
        finished = self._passed_over
        self._passed_over = []
        for result in results:
            load = self._loads.pop(result.job_id, None)
            if load is None:
                finished.append(self._end_store(result))
            else:
                finished.append(self._end_load(load, result))
        return finished

    def _end_store(self, result: TierResult) -> JobResult:
        """Return the result of a store job as vLLM expects it."""
        self._metrics.observed.store_seconds += result.seconds
        success = result.success and not result.failed_keys
        return JobResult(
            result.job_id,
            success,
            transfer_time=result.seconds,
            transfer_bytes=result.num_bytes,
        )

    def _end_load(self, load: _LoadJob, result: TierResult) -> JobResult:
        """Return the result of a load job as vLLM expects it, and pass it on to the request and the
        metrics."""
        failed = _failed_keys(load, result)
        load.request.loads.end(load.keys, failed)
        is_complete = result.success and not failed
        # None means to vLLM that all keys of the job were loaded
        successful_keys = None
        if not is_complete:
            successful_keys = [key for key in load.keys if key not in failed]
        observed = self._metrics.observed
        observed.load_bytes += result.num_bytes
        observed.load_seconds += result.seconds
        observed.load_failed_chunks += len(failed)
        return JobResult(
            result.job_id,
            is_complete,
            successful_keys,
            transfer_time=result.seconds,
            transfer_bytes=result.num_bytes,
        )


def _failed_keys(load: _LoadJob, result: TierResult) -> set[OffloadKey]:
    """Return the engine's keys of the chunks that a load has not brought."""
    # a job that has failed as a whole does not list its keys
    if not result.success:
        return set(load.keys)
    # the store reports its own keys, which are longer if the request names a tenant
    key_bytes = len(load.keys[0]) if load.keys else 0
    return {engine_key(key, key_bytes) for key in result.failed_keys}
