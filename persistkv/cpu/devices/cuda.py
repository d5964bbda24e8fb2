"""Transfers of KV tensors on a CUDA device: one stream per direction, one batch of copies per
tensor.

A batch is one call of the driver, or one copy at a time if the driver is older or memory is not
pinned.
"""

from __future__ import annotations

import contextlib
import ctypes
import logging
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch

from persistkv.base import TransferResult
from persistkv.cpu.devices.base import CopyEngine, Direction
from persistkv.cpu.layout import IntArray, KVMemory, PageCopies, compute_sub_block_ptrs

SOURCE_IN_STREAM_ORDER = 1
"""``CU_MEMCPY_SRC_ACCESS_ORDER_STREAM``: a store must read pages after the kernels that compute
them."""

# The symbol of CUDA 12.8, which later drivers keep. CUDA 13 added _v2, which does not report the
# failed copy.
_FUNCTION = "cuMemcpyBatchAsync"
# the index that is reported if an error does not belong to one copy
_NO_COPY = ctypes.c_size_t(-1).value

logger = logging.getLogger(__name__)


class _StreamJob(NamedTuple):
    """Job whose copies are enqueued on the stream."""

    job_id: int
    num_bytes: int
    begin: torch.cuda.Event
    """Recorded before the first copy."""
    end: torch.cuda.Event
    """Recorded after the last copy."""


class CUDACopyEngine(CopyEngine):
    """Copies on a separate stream, which waits for the caller's current stream at each job.

    A store must see computed pages, and a load must not overwrite pages that a kernel reads: both
    wait for that stream. An error that breaks the device, such as a failed assertion in a kernel of
    the model, fails the jobs in flight. No copy runs after it, and no method of this class raises
    it: the engine gets the error from its own kernels.
    """

    def __init__(
        self,
        memory: KVMemory,
        direction: Direction,
        copier: PageCopier | None = None,
    ) -> None:
        super().__init__(memory, direction)
        self._device = memory.pages[0].device
        self._stream = torch.cuda.Stream(self._device)  # type: ignore[no-untyped-call]
        self._jobs: deque[_StreamJob] = deque()
        """Jobs that are not reported yet, in order of submission."""
        # tests give a copier; by default, use the fastest that works
        if copier is None:
            pinned = all(rows.is_pinned() for rows in memory.rows)
            copier = choose_copier(self._device, pinned)
        self._copier = copier

    def submit(self, job_id: int, copies: Sequence[PageCopies]) -> bool:
        """Enqueue the copies on this direction's stream, behind the caller's current stream, and
        return without waiting."""
        batches = [self._batch(part) for part in copies]
        begin = _timing_event()
        end = _timing_event()
        try:
            self._stream.wait_stream(torch.cuda.current_stream(self._device))
            with (
                torch.cuda.device(self._device),
                torch.cuda.stream(self._stream),
                torch.inference_mode(),
            ):
                begin.record(self._stream)
                for batch in batches:
                    self._copier.copy(batch, self._stream)
                end.record(self._stream)
        except (OSError, RuntimeError):
            logger.exception(
                "%s job %d could not be started", self.direction.value, job_id
            )
            # wait, because enqueued copies must not access the rows after the job is reported as
            # failed
            self._synchronize()
            return False
        num_bytes = sum(part.num_bytes for part in copies)
        self._jobs.append(_StreamJob(job_id, num_bytes, begin, end))
        return True

    def get_finished(self) -> list[TransferResult]:
        """Return the results of the jobs whose copies have ended, in order of submission. A job
        fails if the device reports an error."""
        results = []
        while self._jobs:
            job = self._jobs[0]
            try:
                # later jobs have not ended either, because one stream runs them in order
                if not job.end.query():  # type: ignore[no-untyped-call]
                    break
                # ``elapsed_time`` is in milliseconds
                seconds = job.begin.elapsed_time(job.end) / 1e3
                result = TransferResult(
                    job.job_id,
                    success=True,
                    num_bytes=job.num_bytes,
                    seconds=seconds,
                )
            except RuntimeError:
                logger.exception("%s job %d failed", self.direction.value, job.job_id)
                result = TransferResult(job.job_id, success=False)
            results.append(result)
            self._jobs.popleft()
        return results

    def wait(self, job_ids: set[int]) -> None:
        for job in self._jobs:
            if job.job_id in job_ids:
                with contextlib.suppress(RuntimeError):  # reported by ``get_finished``
                    job.end.synchronize()

    def shutdown(self) -> None:
        if self.memory.rows:  # not twice: the stream may have another owner then
            self._synchronize()
        self._jobs.clear()
        super().shutdown()

    def _synchronize(self) -> None:
        """Wait until the stream's copies have ended; log an error of the device."""
        try:
            self._stream.synchronize()
        except RuntimeError:
            logger.exception("%s jobs failed", self.direction.value)

    def _batch(self, part: PageCopies) -> CopyBatch:
        """Return the addresses of the copies of one tensor."""
        factor = self.memory.block_size_factor
        rows_per_registration = self.memory.rows_per_registration
        pages = self.memory.pages[part.tensor_idx]
        rows = self.memory.rows[part.tensor_idx]
        page_ptrs = compute_sub_block_ptrs(part.blocks, 1, pages)
        row_ptrs = compute_sub_block_ptrs(part.sub_blocks, factor, rows)
        # rows are registered with CUDA in ranges; for each copy, the number of the range of its row
        registrations = None
        if rows_per_registration is not None:
            row_numbers = part.sub_blocks // factor
            registrations = row_numbers // rows_per_registration
        if self.direction is Direction.STORE:
            return CopyBatch.of_pages(
                targets=row_ptrs,
                sources=page_ptrs,
                page_bytes=part.page_bytes,
                target=rows,
                source=pages,
                registrations=registrations,
            )
        return CopyBatch.of_pages(
            targets=page_ptrs,
            sources=row_ptrs,
            page_bytes=part.page_bytes,
            target=pages,
            source=rows,
            registrations=registrations,
        )


def _timing_event() -> torch.cuda.Event:
    return torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]


@dataclass(frozen=True)
class CopyBatch:
    """A batch of memory copies between two tensors; copies that are adjacent on both sides are
    merged.

    For each copy: memory addresses of its destination and its source (in CPU or GPU memory), and
    its bytes.
    """

    targets: IntArray
    sources: IntArray
    sizes: IntArray
    target: torch.Tensor
    """Tensor that contains all destinations: int8, two-dimensional."""
    source: torch.Tensor
    """Tensor that contains all sources: int8, two-dimensional."""

    @classmethod
    def of_pages(
        cls,
        targets: IntArray,
        sources: IntArray,
        page_bytes: int,
        target: torch.Tensor,
        source: torch.Tensor,
        registrations: IntArray | None = None,
    ) -> CopyBatch:
        """Return a batch of copies of ``page_bytes`` bytes each, of which adjacent ones are merged.

        :param registrations: for each copy, the number of the registration with CUDA that holds its
            host memory. Copies of different registrations are not merged: CUDA refuses a copy that
            touches two. None: there is only one.
        """
        # whether copy i + 1 begins where copy i ends
        continues = np.diff(targets) == page_bytes
        continues &= np.diff(sources) == page_bytes
        if registrations is not None:
            continues &= np.diff(registrations) == 0
        # the first copy continues no other
        is_first = np.concatenate(([True], ~continues))
        begins = np.flatnonzero(is_first)
        num_pages = np.diff(begins, append=len(targets))
        sizes = num_pages * page_bytes
        return cls(targets[begins], sources[begins], sizes, target, source)


class PageCopier(ABC):
    """Runs a batch on a stream."""

    @abstractmethod
    def copy(self, batch: CopyBatch, stream: torch.cuda.Stream) -> None:
        """Enqueue the copies of a batch. The device and the stream must be the current ones.

        :raises RuntimeError: if CUDA refuses a copy; the copies before it may run.
        """


class MemoryLocation(ctypes.Structure):
    """C structure ``CUmemLocation`` of the CUDA driver."""

    _fields_ = (("type", ctypes.c_int), ("id", ctypes.c_int))


class CopyAttributes(ctypes.Structure):
    """C structure ``CUmemcpyAttributes`` of the CUDA driver."""

    _fields_ = (
        ("source_access_order", ctypes.c_int),
        ("source_hint", MemoryLocation),
        ("target_hint", MemoryLocation),
        ("flags", ctypes.c_uint),
    )


class DriverBatchCopier(PageCopier):
    """Copier that enqueues a whole batch with one call of the driver's ``cuMemcpyBatchAsync``. CPU
    memory must be pinned.

    It is called through ctypes with arrays of addresses. cuda-bindings takes lists; their
    conversion takes time per page and holds the GIL. The driver reads the arrays during the call.

    :raises OSError: if there is no driver.
    :raises AttributeError: if the driver is older than the function.
    """

    def __init__(self, library: str = "libcuda.so.1") -> None:
        driver = ctypes.CDLL(library)
        self._function = getattr(driver, _FUNCTION)
        pointer = ctypes.c_void_p
        count = ctypes.c_size_t
        self._function.argtypes = (
            pointer,  # targets
            pointer,  # sources
            pointer,  # sizes
            count,  # copies
            pointer,  # attributes
            pointer,  # first copy of each attribute
            count,  # attributes
            pointer,  # failed copy
            pointer,  # stream
        )
        self._function.restype = ctypes.c_int

    def copy(self, batch: CopyBatch, stream: torch.cuda.Stream) -> None:
        """Enqueue all copies with one call. If CUDA refuses, the error names the failed copy."""
        # one set of attributes, which applies from copy 0 on: to all copies
        attributes = CopyAttributes(source_access_order=SOURCE_IN_STREAM_ORDER)
        num_attributes = 1
        first_copy = ctypes.c_size_t(0)
        failed = ctypes.c_size_t(_NO_COPY)
        code = self._function(
            batch.targets.ctypes.data,
            batch.sources.ctypes.data,
            batch.sizes.ctypes.data,
            len(batch.sizes),
            ctypes.byref(attributes),
            ctypes.byref(first_copy),
            num_attributes,
            ctypes.byref(failed),
            stream.cuda_stream,
        )
        if code:
            where = f"{len(batch.sizes)} copies"
            # ``_NO_COPY`` is larger than any index
            number = failed.value
            if number < len(batch.sizes):
                size = batch.sizes[number]
                source = batch.sources[number]
                target = batch.targets[number]
                where = (
                    f"copy {number} of {where}, {size} bytes "
                    f"from {source:#x} to {target:#x}"
                )
            raise RuntimeError(f"{_FUNCTION} failed with error {code}: {where}")


class TorchCopier(PageCopier):
    """Copier that enqueues each copy of the batch with a call of torch's ``copy_``; memory need not
    be pinned."""

    def copy(self, batch: CopyBatch, stream: torch.cuda.Stream) -> None:
        """Enqueue one copy after the other. torch does so on the current stream, which is
        ``stream``."""
        target = _flat(batch.target)
        source = _flat(batch.source)
        # turn addresses into indices of bytes
        target_offsets = batch.targets - target.data_ptr()
        source_offsets = batch.sources - source.data_ptr()
        # slices need plain integers
        target_starts = target_offsets.tolist()
        source_starts = source_offsets.tolist()
        sizes = batch.sizes.tolist()
        copies = zip(target_starts, source_starts, sizes, strict=True)
        for target_start, source_start, size in copies:
            target_part = target[target_start : target_start + size]
            source_part = source[source_start : source_start + size]
            target_part.copy_(source_part, non_blocking=True)


def choose_copier(device: torch.device, pinned: bool) -> PageCopier:
    """Return a ``DriverBatchCopier`` if all CPU memory is pinned and a trial copy succeeds, else a
    ``TorchCopier``."""
    if pinned:
        try:
            copier = DriverBatchCopier()
            _check_copier(copier, device)
            return copier
        # there is no driver, it lacks the function, or the trial has failed
        except (OSError, AttributeError, RuntimeError) as error:
            logger.info("no batched copies, one at a time instead: %s", error)
    return TorchCopier()


def _check_copier(copier: PageCopier, device: torch.device) -> None:
    """Copy some bytes to the device and back; raise RuntimeError if that fails or changes them."""
    stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
    num_bytes = 64
    shape = (1, num_bytes)
    numbers = torch.arange(num_bytes, dtype=torch.int8)
    sent = numbers.view(shape).pin_memory()
    received = torch.zeros(shape, dtype=torch.int8).pin_memory()
    with torch.cuda.device(device), torch.cuda.stream(stream):
        on_device = torch.zeros(shape, dtype=torch.int8, device=device)
        there_and_back = ((sent, on_device), (on_device, received))
        for source, target in there_and_back:
            targets = np.array([target.data_ptr()], np.int64)
            sources = np.array([source.data_ptr()], np.int64)
            batch = CopyBatch.of_pages(targets, sources, num_bytes, target, source)
            copier.copy(batch, stream)
        stream.synchronize()
    if not torch.equal(sent, received):
        raise RuntimeError(f"{_FUNCTION} lost bytes")


def _flat(tensor: torch.Tensor) -> torch.Tensor:
    """Return all bytes from the tensor's first to its last, including gaps between its rows."""
    num_rows, row_bytes = tensor.shape
    last_row = (num_rows - 1) * tensor.stride(0)
    length = last_row + row_bytes
    return tensor.as_strided((length,), (1,))
