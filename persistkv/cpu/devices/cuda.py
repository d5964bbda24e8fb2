"""Transfers of KV tensors on a CUDA device: one stream per direction, one batch of copies per tensor."""

from __future__ import annotations

import contextlib
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
    """Copies on a separate stream, which waits for the caller's current stream at each job.

    A store must see computed pages, and a load must not overwrite pages that a kernel reads: both wait for that stream.

    An error that breaks the device, such as a failed assertion in a kernel of the model, fails the jobs in flight. No
    copy runs after it, and no method of this class raises it: the engine gets the error from its own kernels.

    :param copier: by default the batched one if memory is pinned and a trial copy succeeds, else one copy at a time.
    """

    def __init__(self, memory: KVMemory, direction: Direction, copier: PageCopier | None = None) -> None:
        super().__init__(memory, direction)
        self._device = memory.pages[0].device
        self._stream = torch.cuda.Stream(self._device)  # type: ignore[no-untyped-call]
        self._jobs: deque[_Job] = deque()
        if copier is None:
            copier = choose_copier(self._device, all(rows.is_pinned() for rows in memory.rows))
        self._copier = copier

    def submit(self, job_id: int, copies: Sequence[PageCopies]) -> bool:
        batches = [self._batch(part) for part in copies]
        begin, end = _timing_event(), _timing_event()
        try:
            self._stream.wait_stream(torch.cuda.current_stream(self._device))
            with torch.cuda.device(self._device), torch.cuda.stream(self._stream), torch.inference_mode():
                begin.record(self._stream)
                for batch in batches:
                    self._copier.copy(batch, self._stream)
                end.record(self._stream)
        except (OSError, RuntimeError):
            logger.exception("%s job %d could not be started", self.direction.value, job_id)
            self.drain()  # enqueued copies must not access the rows after the job is reported as failed
            return False
        self._jobs.append(_Job(job_id, sum(part.num_bytes for part in copies), begin, end))
        return True

    def finished(self) -> list[TransferResult]:
        results = []
        while self._jobs:
            job = self._jobs[0]
            try:
                if not job.end.query():  # type: ignore[no-untyped-call]
                    break
                seconds = job.begin.elapsed_time(job.end) / 1e3
                results.append(TransferResult(job.job_id, success=True, num_bytes=job.num_bytes, seconds=seconds))
            except RuntimeError:
                logger.exception("%s job %d failed", self.direction.value, job.job_id)
                results.append(TransferResult(job.job_id, success=False))
            self._jobs.popleft()
        return results

    def wait(self, job_ids: set[int]) -> None:
        for job in self._jobs:
            if job.job_id in job_ids:
                with contextlib.suppress(RuntimeError):  # reported by ``finished``
                    job.end.synchronize()

    def drain(self) -> None:
        try:
            self._stream.synchronize()
        except RuntimeError:
            logger.exception("%s jobs failed", self.direction.value)

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
        registrations = row // memory.rows_per_registration if memory.rows_per_registration is not None else None
        return Batch.of_pages(targets, sources, part.page_bytes, target, source, registrations)


def _timing_event() -> torch.cuda.Event:
    return torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
