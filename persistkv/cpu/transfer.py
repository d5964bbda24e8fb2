"""Plans of transfers: for each KV tensor, pairs of its pages and sub-blocks of rows."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch

from persistkv.base import BlockIDsLoadStoreSpec, CanonicalKVCaches, GPULoadStoreSpec

IntArray = npt.NDArray[np.int64]


@dataclass(frozen=True)
class KVMemory:
    """The two sides of all transfers of one worker."""

    pages: tuple[torch.Tensor, ...]
    """The engine's side, per KV tensor: int8, shape (num_gpu_blocks, page bytes), rows contiguous."""
    rows: tuple[torch.Tensor, ...]
    """The primary tier's side, per KV tensor: int8, shape (num_cpu_blocks, block_size_factor * page bytes)."""
    block_size_factor: int
    """GPU blocks in one offloaded block."""
    rows_per_registration: int | None = None
    """Consecutive rows that one call registers with CUDA, starting at row 0. None: all rows."""


@dataclass(frozen=True)
class PageCopies:
    """Pages of one KV tensor and the sub-blocks that they are copied to or from, one to one."""

    tensor_idx: int
    page_bytes: int
    """Bytes to copy of each page, from its start."""
    blocks: IntArray
    """Blocks of the KV tensor."""
    sub_blocks: IntArray
    """Row times ``block_size_factor``, plus the position in the row."""

    @property
    def num_bytes(self) -> int:
        return self.page_bytes * len(self.blocks)


def plan_copies(
    gpu: GPULoadStoreSpec, cpu: BlockIDsLoadStoreSpec, kv_caches: CanonicalKVCaches, memory: KVMemory
) -> list[PageCopies]:
    """Pair the GPU blocks of all groups with places in the rows.

    A group uses as many rows as its blocks need. Its first block is paired with sub-block
    ``block_indices % block_size_factor`` of its first row. The rows of group 0 are first. Copies of several groups with
    the same tensor and page size are merged.

    :raises ValueError: if groups, rows or numbers of blocks do not fit the caches.
    """
    if len(gpu.group_sizes) != len(kv_caches.group_data_refs):
        raise ValueError(f"{len(gpu.group_sizes)} groups in {gpu}, the caches have {len(kv_caches.group_data_refs)}")
    factor = memory.block_size_factor
    blocks = np.asarray(gpu.block_ids, np.int64)
    rows = np.asarray(cpu.block_ids, np.int64)
    _check_bounds("row", rows, memory.rows[0].shape[0])
    parts: dict[tuple[int, int], list[tuple[IntArray, IntArray]]] = {}
    first_block = first_row = 0
    for size, index, refs in zip(gpu.group_sizes, gpu.block_indices, kv_caches.group_data_refs, strict=True):
        skip = index % factor
        num_rows = -(-(skip + size) // factor) if size else 0
        group_blocks = blocks[first_block : first_block + size]
        group_rows = rows[first_row : first_row + num_rows]
        if len(group_rows) < num_rows:
            break
        sub_blocks = (group_rows[:, None] * factor + np.arange(factor)).reshape(-1)[skip : skip + size]
        first_block, first_row = first_block + size, first_row + num_rows
        for ref in refs if size else ():
            _check_bounds("GPU block", group_blocks, memory.pages[ref.tensor_idx].shape[0])
            parts.setdefault((ref.tensor_idx, ref.page_size_bytes), []).append((group_blocks, sub_blocks))
    if first_block != len(blocks) or first_row != len(rows):
        raise ValueError(f"{cpu} does not have the rows for {gpu} at {factor} GPU blocks a row")
    return [
        PageCopies(tensor_idx, page_bytes, np.concatenate([b for b, _ in pairs]), np.concatenate([s for _, s in pairs]))
        for (tensor_idx, page_bytes), pairs in parts.items()
    ]


def compute_sub_block_ptrs(
    block_ids: Sequence[int] | IntArray,
    block_size_factor: int,
    output: IntArray,
    tensor: torch.Tensor,
    skip_count: int = 0,
) -> None:
    """Fill ``output`` with the byte addresses of consecutive sub-blocks of the rows ``block_ids``.

    :param block_ids: rows of ``tensor``, in the order wanted.
    :param block_size_factor: sub-blocks in a row.
    :param output: int64, one entry for each address wanted; may end before the last sub-block.
    :param tensor: int8, shape (rows, bytes); there may be gaps between its rows.
    :param skip_count: sub-blocks to skip at the begin of the first rows.
    :raises ValueError: if the rows cannot be cut evenly or have too few sub-blocks.
    """
    row_bytes = tensor.shape[1]
    if row_bytes % block_size_factor:
        raise ValueError(f"rows of {row_bytes} bytes do not divide into {block_size_factor} sub-blocks")
    available = len(block_ids) * block_size_factor - skip_count
    if skip_count < 0 or len(output) > available:
        raise ValueError(f"{len(block_ids)} rows have {available} sub-blocks after {skip_count}, not {len(output)}")
    ids = np.asarray(block_ids, np.int64)
    _check_bounds("row", ids, tensor.shape[0])
    begins = tensor.data_ptr() + ids * tensor.stride(0)
    positions = np.arange(block_size_factor, dtype=np.int64) * (row_bytes // block_size_factor)
    output[:] = (begins[:, None] + positions).reshape(-1)[skip_count : skip_count + len(output)]


def _check_bounds(what: str, ids: IntArray, count: int) -> None:
    """Raise ValueError if a number is out of range: a wrong one would become an address outside the memory."""
    if len(ids) and (ids.min() < 0 or ids.max() >= count):
        raise ValueError(f"{what} {ids.min() if ids.min() < 0 else ids.max()} is not one of {count}")
