"""Transfers of KV tensors in CPU memory: one thread, and as few copy calls as possible.

Each call releases the GIL while it copies, and may wait milliseconds to reacquire it from a busy scheduler. Therefore
the number of calls must not grow with the number of pages. One call copies a run that is contiguous on both sides, or a
run that is contiguous on one side and scattered on the other. Jobs are sorted and cut into such runs. Pages that are
scattered on both sides are copied through a buffer.
"""

from __future__ import annotations

import logging
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent import futures
from typing import Any

import numpy as np
import torch

from persistkv.base import TransferResult
from persistkv.cpu.devices.base import CopyEngine, Direction
from persistkv.cpu.layout import IntArray, KVMemory, PageCopies, consecutive_runs

BUFFER_BYTES = 8 << 20  # 8 MiB: small enough to stay in the last-level cache between the write and the read
FEW_RUNS = 8  # up to this many calls are cheaper than a copy through the buffer
# The cost of torch's loops is per element, so pages are copied as wide elements. Nothing is computed, so all bit
# patterns are preserved. Element-wise loops are fastest with the widest type; page copies are slow with complex types.
WIDE = (torch.int64, torch.int32, torch.int16)
WIDEST = (torch.complex128, *WIDE)
_MANY_ELEMENTS = 1 << 15  # from here on, index_select copies each page with all threads and waits for them each time

Index = tuple[torch.Tensor, ...]

logger = logging.getLogger(__name__)


class CPUCopyEngine(CopyEngine):
    """Copies between CPU tensors on one thread, or on the caller's. torch splits large copies over its own threads."""

    def __init__(self, memory: KVMemory, direction: Direction, *, in_place: bool = False) -> None:
        """:param in_place: True: ``submit`` copies on the caller's thread and returns when the copies have ended.
        False: a separate thread copies. If the engine polls without a pause, that thread may wait a thousand times as
        long for the GIL as its copy takes, because its wait restarts whenever another thread briefly releases the GIL.
        """
        super().__init__(memory, direction)
        self._copies = _InPlace() if in_place else futures.ThreadPoolExecutor(1, f"persistkv-{direction.value}")
        self._jobs: deque[tuple[int, futures.Future[TransferResult]]] = deque()
        self._buffer: torch.Tensor | None = None

    def submit(self, job_id: int, copies: Sequence[PageCopies]) -> bool:
        self._jobs.append((job_id, self._copies.submit(self._run, job_id, copies)))
        return True

    def finished(self) -> list[TransferResult]:
        results = []
        while self._jobs and self._jobs[0][1].done():
            results.append(self._jobs.popleft()[1].result())
        return results

    def wait(self, job_ids: set[int]) -> None:
        futures.wait([future for job_id, future in self._jobs if job_id in job_ids])

    def drain(self) -> None:
        self._copies.shutdown(wait=True)

    def _run(self, job_id: int, copies: Sequence[PageCopies]) -> TransferResult:
        started = time.perf_counter()
        try:
            # Tensors that the engine created in inference mode can only be written in that mode.
            with torch.inference_mode():
                for part in copies:
                    self._copy(part)
        except Exception:
            logger.exception("%s job %d failed", self.direction.value, job_id)
            return TransferResult(job_id, success=False, seconds=time.perf_counter() - started)
        num_bytes = sum(part.num_bytes for part in copies)
        return TransferResult(job_id, success=True, num_bytes=num_bytes, seconds=time.perf_counter() - started)

    def _copy(self, part: PageCopies) -> None:
        factor = self.memory.block_size_factor
        rows = self.memory.rows[part.tensor_idx]
        pages = self.memory.pages[part.tensor_idx][:, : part.page_bytes]
        rows = rows.view(len(rows), factor, -1)[:, :, : part.page_bytes]
        most_runs = max(FEW_RUNS, 2 * -(-part.num_bytes // BUFFER_BYTES))
        order = _in_order(part.sub_blocks)
        blocks, sub_blocks = part.blocks[order], part.sub_blocks[order]
        if len(runs := consecutive_runs(sub_blocks, blocks)) <= most_runs:
            for run in runs:
                first = int(blocks[run.start])
                for begin, end, rectangle in _rectangles(sub_blocks[run], rows):
                    self._move(pages[first + begin : first + end].view(rectangle.shape), None, rectangle, None)
            return
        if len(runs := consecutive_runs(sub_blocks)) <= most_runs:
            for run in runs:
                for begin, end, rectangle in _rectangles(sub_blocks[run], rows):
                    index = torch.from_numpy(blocks[run.start + begin : run.start + end])
                    if rectangle.shape[1] == 1:
                        rectangle = rectangle[:, 0]
                    self._move(pages, (index.view(rectangle.shape[:-1]),), rectangle, None)
            return
        order = _in_order(part.blocks)
        in_order, scattered = part.blocks[order], part.sub_blocks[order]
        if len(runs := consecutive_runs(in_order)) <= most_runs:
            for run in runs:
                first = int(in_order[run.start])
                self._move(pages[first : first + run.stop - run.start], None, rows, _row_index(scattered[run], rows))
            return
        self._copy_buffered(pages, rows, blocks, sub_blocks)

    def _move(self, pages: torch.Tensor, page_index: Index | None, rows: torch.Tensor, row_index: Index | None) -> None:
        """Copy between pages and rows in the engine's direction. None as an index selects all of its tensor, in order;
        at most one index may be given.
        """
        stores = self.direction is Direction.STORE
        source, source_index, target, target_index = (
            (pages, page_index, rows, row_index) if stores else (rows, row_index, pages, page_index)
        )
        if source_index is not None:
            _gather(source, source_index, target)
        elif target_index is not None:
            _scatter(source, target, target_index)
        else:
            _copy(source, target)

    def _copy_buffered(self, pages: torch.Tensor, rows: torch.Tensor, blocks: IntArray, sub_blocks: IntArray) -> None:
        """Copy between pages ``blocks`` and the places ``sub_blocks`` (see ``PageCopies``) through a buffer.

        Each part of up to 8 MiB is gathered into the buffer, and then scattered from it.
        """
        page_bytes = pages.shape[1]
        step = max(1, BUFFER_BYTES // page_bytes)
        if self._buffer is None or len(self._buffer) < step * page_bytes:
            self._buffer = torch.empty(max(BUFFER_BYTES, page_bytes), dtype=torch.int8)
        buffer = self._buffer[: step * page_bytes].view(step, page_bytes)
        for begin in range(0, len(blocks), step):
            page_index = (torch.from_numpy(blocks[begin : begin + step]),)
            row_index = _row_index(sub_blocks[begin : begin + step], rows)
            part = buffer[: len(page_index[0])]
            sides: list[tuple[torch.Tensor, Index]] = [(pages, page_index), (rows, row_index)]
            source, target = sides if self.direction is Direction.STORE else reversed(sides)
            _gather(*source, part)
            _scatter(part, *target)


class _InPlace(futures.Executor):
    """Executor that runs each submitted call within ``submit``, on the caller's thread; the calls must not raise."""

    def submit(self, fn: Callable[..., Any], /, *args: Any, **kwargs: Any) -> futures.Future[Any]:
        future: futures.Future[Any] = futures.Future()
        future.set_result(fn(*args, **kwargs))
        return future


def _copy(source: torch.Tensor, target: torch.Tensor) -> None:
    """Perform ``target[...] = source``, both of shape (rows, GPU blocks, page bytes)."""
    source, target = widened(WIDE, source, target)
    if source.shape[1] == 1 and source.shape[2] < _MANY_ELEMENTS:
        # Measured 5 to 10 % faster than copy_ if rows have gaps, which they have as soon as there is a second tensor.
        torch.index_select(source[:, 0], 0, torch.arange(len(source)), out=target[:, 0])
    else:
        target.copy_(source)


def _gather(source: torch.Tensor, index: Index, out: torch.Tensor) -> None:
    """Perform ``out[...] = source[index]`` without an intermediate copy."""
    wide_source, wide_out = widened(WIDE, source, out)
    if len(index) == 1 and index[0].dim() == 1 and wide_out.shape[-1] < _MANY_ELEMENTS:
        torch.index_select(wide_source, 0, index[0], out=wide_out)
    else:
        source, out = widened(WIDEST, source, out)
        torch.ops.aten.index.Tensor_out(source, index, out=out)


def _scatter(source: torch.Tensor, target: torch.Tensor, index: Index) -> None:
    """Perform ``target[index] = source``."""
    source, target = widened(WIDEST, source, target)
    if len(index) == 1 and index[0].dim() == 1:
        target.index_copy_(0, index[0], source)
    else:
        target.index_put_(index, source)


def _row_index(sub_blocks: IntArray, rows: torch.Tensor) -> Index:
    row, position = np.divmod(sub_blocks, rows.shape[1])
    return torch.from_numpy(row), torch.from_numpy(position)


def _in_order(ids: IntArray) -> slice | IntArray:
    """Return an index that sorts the numbers in ascending order: a full slice, without a copy, if they are sorted."""
    return slice(None) if bool((ids[1:] > ids[:-1]).all()) else np.argsort(ids, kind="stable")


def _rectangles(sub_blocks: IntArray, rows: torch.Tensor) -> Iterator[tuple[int, int, torch.Tensor]]:
    """Cut consecutive sub-blocks into a part of the first row, whole rows, and a part of the last row.

    :returns: for each, its begin and end within ``sub_blocks``, and its bytes, shape (rows, GPU blocks, page bytes).
    """
    first, count, factor = int(sub_blocks[0]), len(sub_blocks), rows.shape[1]
    done = 0
    while done < count:
        row, position = divmod(first + done, factor)
        whole_rows = (count - done) // factor
        if position == 0 and whole_rows:
            end = done + whole_rows * factor
            yield done, end, rows[row : row + whole_rows]
        else:
            end = min(count, done + factor - position)
            yield done, end, rows[row : row + 1, position : position + end - done]
        done = end


def widened(types: Sequence[torch.dtype], *tensors: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """Return views of byte tensors in the first of ``types`` whose size divides all addresses, strides and last
    dimensions. If there is no such type, return the tensors unchanged.
    """
    for dtype in types:
        if all(
            tensor.data_ptr() % dtype.itemsize == 0
            and tensor.storage_offset() % dtype.itemsize == 0
            and tensor.shape[-1] % dtype.itemsize == 0
            and all(stride % dtype.itemsize == 0 for stride in tensor.stride()[:-1])
            for tensor in tensors
        ):
            return tuple(tensor.view(dtype) for tensor in tensors)
    return tensors
