"""Transfers where the KV tensors lie on a CUDA device: one stream a direction, one batch of copies a tensor."""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch

from persistkv.base import TransferResult
from persistkv.cpu.devices.base import CopyEngine, Direction
from persistkv.cpu.devices.cuda_batch import Batch, PageCopier, choose_copier
from persistkv.cpu.transfer import KVMemory, PageCopies, compute_sub_block_ptrs

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class _Job:
    job_id: int
    num_bytes: int
    begin: torch.cuda.Event
    end: torch.cuda.Event


class CUDACopyEngine(CopyEngine):
    """A stream of its own, which joins the caller's current stream at each job.

    A store must see what was computed, a load must not overwrite what is still read, so both wait for that stream.
    """

    def __init__(self, memory: KVMemory, direction: Direction) -> None:
        super().__init__(memory, direction)
        self._device = memory.pages[0].device
        self._stream = torch.cuda.Stream(self._device)  # type: ignore[no-untyped-call]
        self._jobs: deque[_Job] = deque()
        self._copier: PageCopier = choose_copier(self._device, all(rows.is_pinned() for rows in memory.rows))

    def submit(self, job_id: int, copies: Sequence[PageCopies]) -> bool:
        batches = [self._batch(part) for part in copies]
        begin, end = _timing_event(), _timing_event()
        self._stream.wait_stream(torch.cuda.current_stream(self._device))
        with torch.cuda.device(self._device), torch.cuda.stream(self._stream), torch.inference_mode():
            begin.record(self._stream)
            try:
                for batch in batches:
                    self._copier.copy(batch, self._stream)
            except (OSError, RuntimeError):
                logger.exception("%s job %d could not be started", self.direction.value, job_id)
                self._stream.synchronize()  # no copy may touch a row once the job is given up
                return False
            end.record(self._stream)
        self._jobs.append(_Job(job_id, sum(part.num_bytes for part in copies), begin, end))
        return True

    def finished(self) -> list[TransferResult]:
        results = []
        while self._jobs and self._jobs[0].end.query():  # type: ignore[no-untyped-call]
            job = self._jobs.popleft()
            seconds = job.begin.elapsed_time(job.end) / 1e3
            results.append(TransferResult(job.job_id, success=True, num_bytes=job.num_bytes, seconds=seconds))
        return results

    def wait(self, job_ids: set[int]) -> None:
        for job in self._jobs:
            if job.job_id in job_ids:
                job.end.synchronize()

    def drain(self) -> None:
        self._stream.synchronize()

    def _batch(self, part: PageCopies) -> Batch:
        memory = self.memory
        pages, rows = memory.pages[part.tensor_idx], memory.rows[part.tensor_idx]
        page_ptrs = np.empty(len(part.blocks), np.int64)
        compute_sub_block_ptrs(part.blocks, 1, page_ptrs, pages)
        row, position = np.divmod(part.sub_blocks, memory.block_size_factor)
        row_ptrs = np.empty(len(row), np.int64)
        compute_sub_block_ptrs(row, 1, row_ptrs, rows)
        row_ptrs += position * (rows.shape[1] // memory.block_size_factor)
        sides = (row_ptrs, page_ptrs, rows, pages)
        targets, sources, target, source = (
            sides if self.direction is Direction.STORE else (page_ptrs, row_ptrs, pages, rows)
        )
        return Batch.of_pages(targets, sources, part.page_bytes, target, source)


def _timing_event() -> torch.cuda.Event:
    return torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
