"""The shortest correct secondary tier: copies of blocks in this process's memory. A starting point
for other tiers."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable, Sequence

from persistkv.base import (
    OffloadKey,
    ReqContext,
    RequestOffloadingContext,
    get_offload_group_idx,
)
from persistkv.config import OffloadingConfig
from persistkv.errors import ConfigurationError
from persistkv.tiering.base import JobMetadata, JobResult, SecondaryTierManager


class ExampleSecondaryTier(SecondaryTierManager):
    """Keeps up to ``max_blocks`` blocks; evicts the least recently used.

    :param simulate_async: run each job in the next ``get_finished_jobs`` instead of in the call
        that submits it, as a tier with real I/O does.
    :raises ConfigurationError: ``max_blocks`` is not positive.
    """

    def __init__(
        self,
        config: OffloadingConfig,
        primary_kv_view: memoryview,
        max_blocks: int = 1000,
        simulate_async: bool = False,
    ) -> None:
        super().__init__(config, primary_kv_view)
        if max_blocks <= 0:
            raise ConfigurationError(
                "tier example option max_blocks",
                max_blocks,
                "a positive number of blocks",
            )
        self.max_blocks = max_blocks
        self.simulate_async = simulate_async
        self.blocks: OrderedDict[OffloadKey, bytes] = OrderedDict()
        """Held blocks, least recently used first; the valid bytes of each block's group."""
        self.pending_jobs: list[JobMetadata] = []
        """Submitted jobs that have not run yet."""
        self.completed_jobs: list[JobResult] = []
        """Results that ``get_finished_jobs`` has not returned yet."""
        self._flat = primary_kv_view.cast("B")
        """The bytes of all rows, one row after the other."""

    @staticmethod
    def get_tier_type() -> str:
        return "example"

    def lookup(self, key: OffloadKey, req_context: ReqContext) -> bool | None:
        return key in self.blocks

    def submit_store(self, job_metadata: JobMetadata) -> None:
        self._submit(job_metadata)

    def submit_load(self, job_metadata: JobMetadata) -> None:
        self._submit(job_metadata)

    def get_finished_jobs(self) -> Iterable[JobResult]:
        self._run_pending()
        completed = self.completed_jobs
        self.completed_jobs = []
        return completed

    def touch(self, keys: Sequence[OffloadKey], req_context: ReqContext) -> None:
        # reversed, so that the first block of a prefix is evicted last
        for key in reversed(keys):
            if key in self.blocks:
                self.blocks.move_to_end(key)

    def on_new_request(self, req_context: ReqContext) -> RequestOffloadingContext:
        return RequestOffloadingContext()

    def reset_cache(self, weights_changed: bool) -> None:
        if weights_changed:
            # run the pending stores first: later, they would add blocks of the old weights
            self._run_pending()
            self.blocks.clear()

    def has_pending_work(self) -> bool:
        return bool(self.pending_jobs or self.completed_jobs)

    def drain_jobs(self, timeout_s: float) -> bool:
        self._run_pending()
        return True

    def shutdown(self) -> None:
        self.pending_jobs.clear()
        self.blocks.clear()
        # release the view: as long as it exists, the owner of the rows cannot unmap them
        self._flat.release()

    def _submit(self, job: JobMetadata) -> None:
        """Queue a job, and run it at once unless ``simulate_async`` is set."""
        if len(job.keys) != len(job.block_ids):
            raise ValueError(
                f"job {job.job_id} has {len(job.keys)} keys and {len(job.block_ids)} rows"
            )
        self.pending_jobs.append(job)
        if not self.simulate_async:
            self._run_pending()

    def _run_pending(self) -> None:
        """Run the submitted jobs in their order, and keep their results for
        ``get_finished_jobs``."""
        pending = self.pending_jobs
        self.pending_jobs = []
        for job in pending:
            run = self._load if job.is_promotion else self._store
            failed = run(job)
            result = JobResult(job.job_id, success=True, failed_keys=failed)
            self.completed_jobs.append(result)

    def _store(self, job: JobMetadata) -> list[OffloadKey]:
        """Copy the blocks that are not held yet, and return the keys of those for which there was
        no room. To make room, evict blocks of other jobs only."""
        own = set(job.keys)
        declined = []
        rows = job.block_ids.tolist()
        for key, row in zip(job.keys, rows, strict=True):
            if key in self.blocks:
                self.blocks.move_to_end(key)
                continue
            is_full = len(self.blocks) == self.max_blocks
            if is_full and not self._evict(own):
                declined.append(key)
                continue
            ranges = self._ranges(key, row)
            self.blocks[key] = b"".join(ranges)
        return declined

    def _evict(self, spared: set[OffloadKey]) -> bool:
        """Evict the least recently used block that is not spared; return whether there was one."""
        for key in self.blocks:
            if key not in spared:
                del self.blocks[key]
                return True
        return False

    def _load(self, job: JobMetadata) -> list[OffloadKey]:
        """Copy held blocks into the rows; return the keys of blocks that are not held."""
        failed = []
        rows = job.block_ids.tolist()
        for key, row in zip(job.keys, rows, strict=True):
            block = self.blocks.get(key)
            if block is None:
                failed.append(key)
                continue
            self.blocks.move_to_end(key)
            start = 0  # offset within the block, which has no gaps between its ranges
            for view in self._ranges(key, row):
                end = start + len(view)
                view[:] = block[start:end]
                start = end
        return failed

    def _ranges(self, key: OffloadKey, row: int) -> list[memoryview]:
        """Return writable views of the bytes that the block uses in its row."""
        layout = self.config.layout
        group = layout.groups[get_offload_group_idx(key)]
        row_start = row * layout.row_stride
        views = []
        for offset, size in group.ranges:
            start = row_start + offset
            views.append(self._flat[start : start + size])
        return views
