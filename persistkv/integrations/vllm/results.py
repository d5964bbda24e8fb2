"""Results of a tier's jobs, as vLLM expects them."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from vllm.v1.kv_offload.tiering.base import JobResult

from persistkv.base import OffloadKey
from persistkv.integrations.vllm.metrics import MetricsReader
from persistkv.integrations.vllm.requests import LiveRequest
from persistkv.tiering.base import JobResult as TierResult


class JobResults:
    """Results of one tier's jobs: those that the store reports, and those of store jobs that were
    not submitted to it. Counts them in the metrics, and makes chunks that failed to load misses for
    their request."""

    def __init__(self, metrics: MetricsReader) -> None:
        self._metrics = metrics
        self._loads: dict[int, tuple[LiveRequest, Sequence[OffloadKey]]] = {}
        self._passed_over: list[JobResult] = []

    @property
    def has_passed_over(self) -> bool:
        """Whether ``translate`` has results without the store's."""
        return bool(self._passed_over)

    def begin_load(
        self, job_id: int, request: LiveRequest, keys: Sequence[OffloadKey]
    ) -> None:
        """Register a load that is submitted now."""
        self._loads[job_id] = (request, keys)

    def pass_over(self, job_id: int) -> None:
        """Add the result of a store job that is not submitted: success."""
        self._passed_over.append(JobResult(job_id, True, transfer_bytes=0))

    def translate(self, results: Iterable[TierResult]) -> list[JobResult]:
        """Return all results since the last call, with ``results``, which the store reports now."""
        finished, self._passed_over = self._passed_over, []
        for result in results:
            finished.append(self._translate(result))
        return finished

    def _translate(self, result: TierResult) -> JobResult:
        success = result.success and not result.failed_keys
        good: list[OffloadKey] | None = None
        observed = self._metrics.observed
        load = self._loads.pop(result.job_id, None)
        if load is not None:
            request, keys = load
            failed = set(result.failed_keys if result.success else keys)
            request.end_load(keys, failed)
            if not success:
                good = [key for key in keys if key not in failed]
            observed.load_bytes += result.num_bytes
            observed.load_seconds += result.seconds
            observed.load_failed_chunks += len(failed)
        else:
            observed.store_seconds += result.seconds
        return JobResult(result.job_id, success, good, result.seconds, result.num_bytes)
