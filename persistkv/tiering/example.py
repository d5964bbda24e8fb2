"""The shortest correct secondary tier: copies of blocks in this process's memory. Copy it to write your own."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable, Sequence

from persistkv.base import OffloadKey, ReqContext, RequestOffloadingContext, get_offload_group_idx
from persistkv.config import OffloadingConfig
from persistkv.errors import ConfigurationError
from persistkv.tiering.base import JobMetadata, JobResult, SecondaryTierManager


class ExampleSecondaryTier(SecondaryTierManager):
    """Keeps the bytes of ``max_blocks`` blocks, least recently used ones going first.

    :param max_blocks: blocks it holds at most.
    :param simulate_async: end a job not when it is submitted but at the next ``get_finished_jobs``, as a tier that does
        I/O would.
    :raises ConfigurationError: where ``max_blocks`` is not positive.
    """

    def __init__(
        self,
        config: OffloadingConfig,
        primary_kv_view: memoryview,
        max_blocks: int = 1024,
        simulate_async: bool = False,
    ) -> None:
        super().__init__(config, primary_kv_view)
        if max_blocks <= 0:
            raise ConfigurationError("tier example option max_blocks", max_blocks, "a positive number of blocks")
        self.max_blocks = max_blocks
        self.simulate_async = simulate_async
        self.blocks: OrderedDict[OffloadKey, bytes] = OrderedDict()
        """Held blocks, the least recently used first; of each row, the valid bytes of the block's group."""
        self.pending_jobs: list[JobMetadata] = []
        """Submitted and not run yet."""
        self.completed_jobs: list[JobResult] = []
        """Run and not handed over yet."""
        self._flat = primary_kv_view.cast("B")

    @staticmethod
    def get_tier_type() -> str:
        return "example"

    def get_num_blocks(self) -> int:
        """Blocks held."""
        return len(self.blocks)

    def lookup(self, key: OffloadKey, req_context: ReqContext) -> bool | None:
        return key in self.blocks

    def submit_store(self, job: JobMetadata) -> None:
        self._submit(job)

    def submit_load(self, job: JobMetadata) -> None:
        self._submit(job)

    def get_finished_jobs(self) -> Iterable[JobResult]:
        self._run_pending()
        completed, self.completed_jobs = self.completed_jobs, []
        return completed

    def touch(self, keys: Sequence[OffloadKey], req_context: ReqContext) -> None:
        for key in reversed(keys):  # so that the first of a prefix is the last to go
            if key in self.blocks:
                self.blocks.move_to_end(key)

    def on_new_request(self, req_context: ReqContext) -> RequestOffloadingContext:
        return RequestOffloadingContext()

    def reset_cache(self, weights_changed: bool) -> None:
        if weights_changed:
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
        self._flat.release()

    def _submit(self, job: JobMetadata) -> None:
        self.pending_jobs.append(job)
        if not self.simulate_async:
            self._run_pending()

    def _run_pending(self) -> None:
        pending, self.pending_jobs = self.pending_jobs, []
        for job in pending:
            failed = self._load(job) if job.is_promotion else self._store(job)
            self.completed_jobs.append(JobResult(job.job_id, True, failed))

    def _store(self, job: JobMetadata) -> list[OffloadKey]:
        """Keep what fits beside the other blocks of the same job; the rest is declined."""
        own = set(job.keys)
        declined = []
        for key, row in zip(job.keys, job.block_ids, strict=True):
            if key not in self.blocks and not self._make_room(own):
                declined.append(key)
                continue
            self.blocks[key] = b"".join(self._ranges(key, row))
            self.blocks.move_to_end(key)
        return declined

    def _make_room(self, protected: set[OffloadKey]) -> bool:
        if len(self.blocks) < self.max_blocks:
            return True
        victim = next((key for key in self.blocks if key not in protected), None)
        if victim is None:
            return False
        del self.blocks[victim]
        return True

    def _load(self, job: JobMetadata) -> list[OffloadKey]:
        failed = []
        for key, row in zip(job.keys, job.block_ids, strict=True):
            block = self.blocks.get(key)
            if block is None:
                failed.append(key)
                continue
            self.blocks.move_to_end(key)
            start = 0
            for place in self._ranges(key, row):
                place[:] = block[start : start + len(place)]
                start += len(place)
        return failed

    def _ranges(self, key: OffloadKey, row: int) -> list[memoryview]:
        """What of a row belongs to the block: the rest is stale, or another group's."""
        layout = self.config.layout
        base = row * layout.row_stride
        group = layout.groups[get_offload_group_idx(key)]
        return [self._flat[base + offset : base + offset + size] for offset, size in group.ranges]
