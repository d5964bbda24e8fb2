"""Transfers of KV tensors in CPU memory: one thread, and as few copy calls as possible.

Each call releases the GIL while it copies, and may wait milliseconds to reacquire it from a busy
scheduler. Therefore the number of calls must not grow with the number of pages. Jobs are sorted by
their places in rows. One call copies a run of consecutive places. If there are many short runs,
pages are copied through a buffer.
"""

from __future__ import annotations

import logging
import math
import time
from collections import deque
from collections.abc import Iterator, Sequence
from concurrent import futures

import numpy as np
import torch

from persistkv.base import TransferResult
from persistkv.cpu.devices.base import CopyEngine, Direction
from persistkv.cpu.layout import (
    BlockPairs,
    IntArray,
    KVMemory,
    PageCopies,
    consecutive_runs,
)
from persistkv.rounding import divide_up

# 8 MiB: size of the buffer, which stays in the last-level cache between the write and the read
BUFFER_BYTES = 8 << 20
# number of calls up to which they are cheaper than a copy through the buffer
FEW_RUNS = 8
# The cost of torch's loops is per element, so pages are copied as wide elements. Nothing is
# computed, so all bit patterns are preserved.
WIDE = (torch.complex128, torch.int64, torch.int32, torch.int16)

IndexTensors = tuple[torch.Tensor, ...]
"""For each indexed dimension, the indices of the elements."""

logger = logging.getLogger(__name__)


class CPUCopyEngine(CopyEngine):
    """Copies between CPU tensors on one thread, or on the caller's. torch splits large copies over
    its own threads."""

    def __init__(self, memory: KVMemory, direction: Direction) -> None:
        super().__init__(memory, direction)
        # one thread, so that jobs end in order of submission
        self._thread = futures.ThreadPoolExecutor(
            max_workers=1,
            thread_name_prefix=f"persistkv-{direction.value}",
        )
        self._jobs: deque[tuple[int, futures.Future[TransferResult]]] = deque()
        """Ids and results of the jobs that are not reported yet, in order of submission."""
        self._buffer: torch.Tensor | None = None
        """Buffer of ``_copy_buffered``; None: not allocated yet."""

    def submit(self, job_id: int, copies: Sequence[PageCopies]) -> bool:
        future = self._thread.submit(self.copy_now, job_id, copies)
        self._jobs.append((job_id, future))
        return True

    def get_finished(self) -> list[TransferResult]:
        """Return the results of the jobs that have ended, in order of submission."""
        results = []
        while self._jobs:
            _, future = self._jobs[0]
            # stop at the first job that runs: jobs end in order of submission
            if not future.done():
                break
            results.append(future.result())
            self._jobs.popleft()
        return results

    def wait(self, job_ids: set[int]) -> None:
        awaited = [future for job_id, future in self._jobs if job_id in job_ids]
        futures.wait(awaited)

    def shutdown(self) -> None:
        self._thread.shutdown(wait=True)
        self._jobs.clear()
        super().shutdown()

    def copy_now(self, job_id: int, copies: Sequence[PageCopies]) -> TransferResult:
        """Copy on the caller's thread, and return when the copies have ended.

        If the engine polls without a pause, the thread of ``submit`` may wait a thousand times as
        long for the GIL as its copy takes, because its wait restarts whenever another thread
        briefly releases the GIL.
        """
        started = time.perf_counter()
        success = True
        try:
            # Tensors that the engine created in inference mode can only be written in that mode.
            with torch.inference_mode():
                for part in copies:
                    self._copy(part)
        except Exception:
            logger.exception("%s job %d failed", self.direction.value, job_id)
            success = False
        num_bytes = 0
        if success:
            num_bytes = sum(part.num_bytes for part in copies)
        seconds = time.perf_counter() - started
        return TransferResult(job_id, success, num_bytes, seconds)

    def _copy(self, part: PageCopies) -> None:
        """Copy the bytes of one tensor. There are three ways, of which the first that takes few
        calls is used: by runs of consecutive places in rows, by runs of consecutive pages, through
        the buffer."""
        all_rows = self.memory.rows[part.tensor_idx]
        all_pages = self.memory.pages[part.tensor_idx]
        blocks_per_row = self.memory.block_size_factor
        whole_sub_blocks = all_rows.view(len(all_rows), blocks_per_row, -1)
        # shape (rows, GPU blocks in a row, bytes to copy)
        rows = whole_sub_blocks[:, :, : part.page_bytes]
        # shape (GPU blocks, bytes to copy)
        pages = all_pages[:, : part.page_bytes]

        blocks, sub_blocks = _sorted_by_place(part)
        # each run takes one call; the buffer takes two calls for each part of its size
        buffered_calls = 2 * divide_up(part.num_bytes, BUFFER_BYTES)
        max_runs = max(FEW_RUNS, buffered_calls)
        row_runs = consecutive_runs(sub_blocks)
        if len(row_runs) <= max_runs:
            for run in row_runs:
                self._copy_row_run(pages, rows, blocks[run], sub_blocks[run])
            return
        # An engine that allocates fresh blocks gets consecutive pages, although the rows are
        # fragmented: in the order of pages, runs are longer.
        page_order = np.argsort(blocks, kind="stable")
        blocks_by_page = blocks[page_order]
        sub_blocks_by_page = sub_blocks[page_order]
        page_runs = consecutive_runs(blocks_by_page)
        if len(page_runs) <= max_runs:
            for run in page_runs:
                run_blocks = blocks_by_page[run]
                run_sub_blocks = sub_blocks_by_page[run]
                self._copy_page_run(pages, rows, run_blocks, run_sub_blocks)
            return
        self._copy_buffered(pages, rows, blocks, sub_blocks)

    def _copy_row_run(
        self,
        pages: torch.Tensor,
        rows: torch.Tensor,
        blocks: IntArray,
        sub_blocks: IntArray,
    ) -> None:
        """Copy between any pages and consecutive places in rows.

        :param blocks: numbers of the pages.
        :param sub_blocks: for each page, its place in the rows; each is the previous one plus 1.
        """
        is_store = self.direction is Direction.STORE
        for begin, end, rectangle in _rectangles(sub_blocks, rows):
            index = torch.from_numpy(blocks[begin:end])
            index = index.view(rectangle.shape[:2])
            _copy_indexed(pages, (index,), rectangle, gathers=is_store)

    def _copy_page_run(
        self,
        pages: torch.Tensor,
        rows: torch.Tensor,
        blocks: IntArray,
        sub_blocks: IntArray,
    ) -> None:
        """Copy between consecutive pages and any places in rows.

        :param blocks: numbers of the pages, which are consecutive.
        :param sub_blocks: for each page, its place in the rows.
        """
        is_load = self.direction is Direction.LOAD
        first = int(blocks[0])
        run = pages[first : first + len(blocks)]
        index = _row_index(sub_blocks, rows)
        _copy_indexed(rows, index, run, gathers=is_load)

    def _copy_buffered(
        self,
        pages: torch.Tensor,
        rows: torch.Tensor,
        blocks: IntArray,
        sub_blocks: IntArray,
    ) -> None:
        """Copy between any pages and any places in rows: gather each part of up to 8 MiB into a
        buffer, and scatter it from there. torch has no copy that takes indices on both sides."""
        page_bytes = pages.shape[1]
        pages_per_part = max(1, BUFFER_BYTES // page_bytes)
        part_bytes = pages_per_part * page_bytes
        if self._buffer is None or len(self._buffer) < part_bytes:
            # room for at least one page, which may be larger than 8 MiB
            size = max(BUFFER_BYTES, page_bytes)
            self._buffer = torch.empty(size, dtype=torch.int8)
        buffer = self._buffer[:part_bytes].view(pages_per_part, page_bytes)
        for begin in range(0, len(blocks), pages_per_part):
            end = begin + pages_per_part
            page_index = torch.from_numpy(blocks[begin:end])
            row_index = _row_index(sub_blocks[begin:end], rows)
            part = buffer[: len(page_index)]
            # a store copies from pages to rows, a load from rows to pages
            if self.direction is Direction.STORE:
                _gather(pages, (page_index,), part)
                _scatter(part, rows, row_index)
            else:
                _gather(rows, row_index, part)
                _scatter(part, pages, (page_index,))


def _sorted_by_place(part: PageCopies) -> BlockPairs:
    """Return the pages to copy and their places in rows, in the order of the places."""
    places = part.sub_blocks
    ascends = places[1:] > places[:-1]
    if ascends.all():
        return BlockPairs(part.blocks, places)
    order = np.argsort(places, kind="stable")
    return BlockPairs(part.blocks[order], places[order])


def _row_index(sub_blocks: IntArray, rows: torch.Tensor) -> IndexTensors:
    """Return the row number of each sub-block, and its position within the row."""
    blocks_per_row = rows.shape[1]
    row, position = np.divmod(sub_blocks, blocks_per_row)
    return torch.from_numpy(row), torch.from_numpy(position)


def _copy_indexed(
    indexed: torch.Tensor,
    index: IndexTensors,
    plain: torch.Tensor,
    *,
    gathers: bool,
) -> None:
    """Copy ``indexed[index]`` to ``plain`` if ``gathers``, else the other way."""
    if gathers:
        _gather(indexed, index, plain)
    else:
        _scatter(plain, indexed, index)


def _gather(
    source: torch.Tensor,
    index: IndexTensors,
    out: torch.Tensor,
) -> None:
    """Perform ``out[...] = source[index]`` without an intermediate copy."""
    source, out = widened(source, out)
    torch.ops.aten.index.Tensor_out(source, index, out=out)


def _scatter(
    source: torch.Tensor,
    target: torch.Tensor,
    index: IndexTensors,
) -> None:
    """Perform ``target[index] = source``."""
    source, target = widened(source, target)
    target.index_put_(index, source)


def _rectangles(
    sub_blocks: IntArray,
    rows: torch.Tensor,
) -> Iterator[tuple[int, int, torch.Tensor]]:
    """Cut consecutive sub-blocks into a part of the first row, whole rows, and a part of the last
    row.

    :returns: for each, its begin and end within ``sub_blocks``, and its bytes, shape (rows, GPU
        blocks, page bytes).
    """
    first = int(sub_blocks[0])
    count = len(sub_blocks)
    blocks_per_row = rows.shape[1]
    begin = 0
    while begin < count:
        row, position = divmod(first + begin, blocks_per_row)
        num_rows = (count - begin) // blocks_per_row
        if position == 0 and num_rows:
            # take whole rows
            end = begin + num_rows * blocks_per_row
            yield begin, end, rows[row : row + num_rows]
        else:
            # take a part of one row, up to its end at most
            num_left = count - begin
            end_position = min(position + num_left, blocks_per_row)
            end = begin + end_position - position
            yield begin, end, rows[row : row + 1, position:end_position]
        begin = end


def widened(*tensors: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """Return views of byte tensors in the first type of ``WIDE`` whose size divides all addresses,
    strides and last dimensions. If there is no such type, return the tensors unchanged.
    """
    # in bytes, as an element of the tensors is a byte
    distances: list[int] = []
    for tensor in tensors:
        distances.append(tensor.data_ptr())
        # ``view`` refuses a wider type whose size does not divide it
        distances.append(int(tensor.storage_offset()))
        distances.append(tensor.shape[-1])
        distances += tensor.stride()[:-1]
    divisor = math.gcd(*distances)
    # try the widest type first
    for dtype in WIDE:
        if divisor % dtype.itemsize == 0:
            return tuple(tensor.view(dtype) for tensor in tensors)
    return tensors
