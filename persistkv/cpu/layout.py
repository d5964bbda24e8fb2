"""The geometry of rows, and the copies between pages of KV tensors and rows.

A row holds one block of one group. It has one cell per worker, which holds ``block_size_factor``
consecutive pages (sub-blocks) of each KV tensor. Tensors that no group uses together may overlap,
so a row is usually as wide as the widest group, not as the sum of all groups; tensors of several
groups can make it wider. In the head-sharded layout, the heads of all workers are in the order of
the model, so the bytes of a row are the same for all numbers of workers (``head_slices``).
Functions that take KV caches raise ConfigurationError if these or the factor are invalid.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import torch

from persistkv.base import (
    BlockIDsLoadStoreSpec,
    CanonicalKVCacheRef,
    CanonicalKVCaches,
    CanonicalKVCacheTensor,
    GPULoadStoreSpec,
    HeadSharding,
)
from persistkv.config import GroupLayout
from persistkv.errors import ConfigurationError
from persistkv.rounding import divide_up

IntArray = npt.NDArray[np.int64]


def cell_bytes(kv_caches: CanonicalKVCaches, block_size_factor: int) -> int:
    """Return the bytes of one worker's cell in a row, which is the ``cpu_page_size`` of
    ``SharedOffloadRegion``."""
    offsets = tensor_offsets(kv_caches, block_size_factor)
    ends = []
    for offset, tensor in zip(offsets, kv_caches.tensors, strict=True):
        num_bytes = tensor.page_size_bytes * block_size_factor
        ends.append(offset + num_bytes)
    # the last tensor need not have the largest end: tensors of different groups may overlap
    return max(ends)


def tensor_offsets(kv_caches: CanonicalKVCaches, block_size_factor: int) -> list[int]:
    """Return for each KV tensor the offset of its pages in a cell, in bytes: after those of the
    earlier tensors that share a KV cache group with it. Other tensors may overlap it.
    """
    check_kv_caches(kv_caches, block_size_factor)
    # for each tensor, the groups that use it
    groups_of: list[set[int]] = [set() for _ in kv_caches.tensors]
    for group, refs in enumerate(kv_caches.group_data_refs):
        for ref in refs:
            groups_of[ref.tensor_idx].add(group)
    # for each group, the end of its last tensor so far
    ends = [0] * len(kv_caches.group_data_refs)
    offsets = []
    for tensor, groups in zip(kv_caches.tensors, groups_of, strict=True):
        ends_before = [ends[group] for group in groups]
        offset = max(ends_before, default=0)
        offsets.append(offset)
        end = offset + tensor.page_size_bytes * block_size_factor
        for group in groups:
            ends[group] = end
    return offsets


@dataclass(frozen=True)
class HeadSlice:
    """Consecutive heads of one part of the pages of a KV tensor, and their place in the rows."""

    tensor_idx: int
    page_offset: int
    """Offset in bytes within a page."""
    num_bytes: int
    """Bytes of the slice in one page."""
    row_offset: int
    """Offset in bytes within a row, of ``block_size_factor * num_bytes`` bytes."""


def head_slices(
    kv_caches: CanonicalKVCaches,
    block_size_factor: int,
    rank: int,
    num_workers: int,
) -> list[HeadSlice]:
    """Return the slices of one worker's pages in the head-sharded layout, by tensor.

    A page consists of parts, and each part of heads (``HeadSharding``). For each tensor, a row
    holds the parts in order; in each part the heads of all workers; and for each head the bytes of
    all GPU blocks of the offloaded block.

    :raises ConfigurationError: a tensor does not state its heads, or they do not fit its pages.
    """
    slices = []
    offsets = tensor_offsets(kv_caches, block_size_factor)
    heads_of = heads_of_tensors(kv_caches)
    for index, tensor in enumerate(kv_caches.tensors):
        num_parts = heads_of[index].num_parts
        # With one GPU block per row, the heads of a worker are consecutive in a row as they are in
        # a page, so one slice holds all of them.
        slices_per_part = 1
        if block_size_factor > 1:
            slices_per_part = heads_of[index].num_heads
        slice_bytes = tensor.page_size_bytes // (num_parts * slices_per_part)
        slice_bytes_in_row = slice_bytes * block_size_factor
        # earlier tensors have the heads of all workers, too
        tensor_offset = offsets[index] * num_workers
        for part in range(num_parts):
            # in a row, each part has the slices of all workers, one worker after the other
            first_slice_in_page = part * slices_per_part
            first_slice_in_row = (part * num_workers + rank) * slices_per_part
            for position in range(slices_per_part):
                slice_in_page = first_slice_in_page + position
                slice_in_row = first_slice_in_row + position
                page_offset = slice_in_page * slice_bytes
                row_offset = tensor_offset + slice_in_row * slice_bytes_in_row
                slices.append(HeadSlice(index, page_offset, slice_bytes, row_offset))
    return slices


def heads_of_tensors(kv_caches: CanonicalKVCaches) -> list[HeadSharding]:
    """Return the positions of the heads in the pages of each KV tensor.

    :raises ConfigurationError: a tensor does not state them, they do not fit its pages, or a group
        uses only parts of pages.
    """
    stated = []  # heads of each tensor
    for index, tensor in enumerate(kv_caches.tensors):
        where = f"kv_caches.tensors[{index}].heads"
        stated.append(_checked_heads(where, tensor))
    for group, refs in enumerate(kv_caches.group_data_refs):
        for ref in refs:
            page = kv_caches.tensors[ref.tensor_idx].page_size_bytes
            if ref.page_size_bytes != page:
                where = f"kv_caches.group_data_refs[{group}].page_size_bytes"
                raise ConfigurationError(
                    where,
                    ref.page_size_bytes,
                    f"{page}, whole pages of head-sharded caches",
                )
    return stated


def _checked_heads(where: str, tensor: CanonicalKVCacheTensor) -> HeadSharding:
    """Return the positions of the heads in a tensor's pages; ``where`` names them in errors."""
    heads = tensor.heads
    if heads is None:
        raise ConfigurationError(
            where,
            None,
            "the positions of the heads, since the caches are head-sharded",
        )
    if heads.num_parts <= 0 or heads.num_heads <= 0:
        raise ConfigurationError(where, heads, "positive numbers")
    num_slices = heads.num_parts * heads.num_heads
    if tensor.page_size_bytes % num_slices:
        raise ConfigurationError(
            where, heads, f"a divisor of {tensor.page_size_bytes} bytes of a page"
        )
    return heads


def group_layouts(
    kv_caches: CanonicalKVCaches,
    block_size_factor: int,
    num_workers: int = 1,
    *,
    head_sharded: bool = False,
) -> tuple[GroupLayout, ...]:
    """Return for each KV cache group the byte ranges of a row that its blocks use, in the cells of
    all workers. A cell is the part of a row that one worker writes.

    :param head_sharded: see ``WorkerGeometry``.
    """
    if head_sharded:
        heads_of_tensors(kv_caches)  # this raises if the caches cannot be head-sharded
        # The heads of all workers follow each other, so the row is like the single cell of one
        # worker whose pages are so many times as long.
        num_cells = 1
        page_factor = num_workers
    else:
        num_cells = num_workers
        page_factor = 1
    offsets = tensor_offsets(kv_caches, block_size_factor)
    cell = cell_bytes(kv_caches, block_size_factor)
    layouts = []
    for refs in kv_caches.group_data_refs:
        ranges = []
        for number in range(num_cells):
            cell_offset = number * cell
            for ref in refs:
                tensor = kv_caches.tensors[ref.tensor_idx]
                page_bytes = tensor.page_size_bytes * page_factor
                first_page = cell_offset + offsets[ref.tensor_idx] * page_factor
                end = first_page + page_bytes * block_size_factor
                # a group may use only the start of each page
                used_bytes = ref.page_size_bytes * page_factor
                for page in range(first_page, end, page_bytes):
                    ranges.append((page, used_bytes))
        layouts.append(GroupLayout(_merged_ranges(ranges)))
    return tuple(layouts)


def check_kv_caches(kv_caches: CanonicalKVCaches, block_size_factor: int) -> None:
    """Check that the KV tensors are int8 pages on one device, and that each group refers to
    existing tensors and bytes.
    """
    if block_size_factor <= 0:
        raise ConfigurationError(
            "block_size_factor", block_size_factor, "a positive number of GPU blocks"
        )
    if not kv_caches.tensors:
        raise ConfigurationError(
            "kv_caches.tensors", [], "at least one KV cache tensor"
        )
    device = kv_caches.tensors[0].tensor.device
    for index, canonical in enumerate(kv_caches.tensors):
        _check_tensor(f"kv_caches.tensors[{index}]", canonical, device)
    for group, refs in enumerate(kv_caches.group_data_refs):
        where = f"kv_caches.group_data_refs[{group}]"
        if not refs:
            raise ConfigurationError(where, refs, "at least one tensor of the group")
        for ref in refs:
            _check_ref(where, ref, kv_caches.tensors)


def _check_ref(
    where: str,
    ref: CanonicalKVCacheRef,
    tensors: Sequence[CanonicalKVCacheTensor],
) -> None:
    """Raise ConfigurationError unless a group's reference names a tensor and bytes of its pages."""
    _check_number(
        f"{where}.tensor_idx",
        ref.tensor_idx,
        lowest=0,
        highest=len(tensors) - 1,
    )
    _check_number(
        f"{where}.page_size_bytes",
        ref.page_size_bytes,
        lowest=1,
        highest=tensors[ref.tensor_idx].page_size_bytes,
        unit=" bytes of the tensor's page",
    )


def _check_tensor(
    where: str,
    canonical: CanonicalKVCacheTensor,
    device: torch.device,
) -> None:
    """Raise ConfigurationError unless a tensor is a table of bytes on the device, a row per
    block."""
    tensor = canonical.tensor
    is_table = tensor.dim() == 2 and tensor.stride(1) == 1
    if tensor.dtype != torch.int8 or not is_table:
        given = f"{tensor.dtype} {tuple(tensor.shape)}"
        expected = "int8, shape (num_blocks, bytes), rows contiguous"
        raise ConfigurationError(where, given, expected)
    _check_number(
        f"{where}.page_size_bytes",
        canonical.page_size_bytes,
        lowest=1,
        highest=tensor.shape[1],
        unit=" bytes of a block",
    )
    if tensor.device != device:
        raise ConfigurationError(
            f"{where}.device", str(tensor.device), f"{device}, as the first tensor"
        )


def _check_number(
    field: str,
    value: int,
    *,
    lowest: int,
    highest: int,
    unit: str = "",
) -> None:
    """Raise ConfigurationError unless ``value`` is from ``lowest`` to ``highest``; ``unit`` ends
    the text of the error."""
    if not lowest <= value <= highest:
        raise ConfigurationError(field, value, f"{lowest} to {highest}{unit}")


def _merged_ranges(ranges: list[tuple[int, int]]) -> tuple[tuple[int, int], ...]:
    """Return the ranges (offset, length) in ascending order, with adjacent and overlapping ones
    merged."""
    merged: list[tuple[int, int]] = []
    last_end = -1  # less than every offset: nothing adjoins the first range
    for offset, length in sorted(ranges):
        end = offset + length
        if offset > last_end:
            merged.append((offset, length))
            last_end = end
        elif end > last_end:
            start, _ = merged[-1]
            merged[-1] = (start, end - start)
            last_end = end
    return tuple(merged)


@dataclass(frozen=True)
class KVMemory:
    """The memory that one worker copies between: pages of KV tensors and rows of the primary
    tier."""

    pages: tuple[torch.Tensor, ...]
    """For each KV tensor, its pages: int8, shape (num_gpu_blocks, page bytes), rows contiguous."""
    rows: tuple[torch.Tensor, ...]
    """For each KV tensor, its part of all rows: int8, shape (num_cpu_blocks, block_size_factor *
    page bytes)."""
    block_size_factor: int
    rows_per_registration: int | None = None
    """Consecutive rows that one call registers with CUDA, starting at row 0. None: all rows."""
    group_data_refs: Sequence[Sequence[CanonicalKVCacheRef]] = ()
    """As in ``CanonicalKVCaches``."""


@dataclass(frozen=True)
class PageCopies:
    """Pages of one KV tensor, and for each page the place in a row (sub-block) that it is copied to
    or from."""

    tensor_idx: int
    page_bytes: int
    """Bytes to copy of each page, from its start."""
    blocks: IntArray
    """Row indices of the KV tensor."""
    sub_blocks: IntArray
    """For each of ``blocks``, its place: row number times ``block_size_factor``, plus the position
    in the row."""

    @property
    def num_bytes(self) -> int:
        return self.page_bytes * len(self.blocks)


class _Pages(NamedTuple):
    """Pages of a KV tensor, or their starts."""

    tensor_idx: int
    page_bytes: int
    """Bytes of each page, from its start."""


class BlockPairs(NamedTuple):
    """GPU blocks of one KV cache group, and for each its place in a row."""

    blocks: IntArray
    sub_blocks: IntArray
    """See ``PageCopies.sub_blocks``."""


def plan_copies(
    gpu: GPULoadStoreSpec,
    cpu: BlockIDsLoadStoreSpec,
    memory: KVMemory,
) -> list[PageCopies]:
    """Plan a transfer: pair the GPU blocks of all groups with places in rows of the primary tier.

    The rows of group 0 are first, then those of group 1, and so on; a group has as many rows as its
    blocks need. The first block of a group may lie within a row: if it has the number ``i`` in the
    request, it is paired with place ``i % block_size_factor`` of the group's first row. Copies of
    several groups with the same tensor and page size are merged.

    :raises ValueError: a block or row does not exist, or their numbers do not match.
    """
    groups = memory.group_data_refs
    if len(gpu.group_sizes) != len(groups):
        raise ValueError(
            f"{len(gpu.group_sizes)} groups in {gpu}, the caches have {len(groups)}"
        )
    # check the rows before any address is computed from one; ``_pairs_by_pages`` checks the GPU
    # blocks
    rows = np.asarray(cpu.block_ids, np.int64)
    num_cpu_blocks = memory.rows[0].shape[0]
    _check_bounds("row", rows, num_cpu_blocks)
    pairs_by_group = _pair_blocks(gpu, rows, memory.block_size_factor)
    copies = []
    for pages, parts in _pairs_by_pages(memory, pairs_by_group).items():
        blocks = np.concatenate([part.blocks for part in parts])
        sub_blocks = np.concatenate([part.sub_blocks for part in parts])
        merged = PageCopies(pages.tensor_idx, pages.page_bytes, blocks, sub_blocks)
        copies.append(merged)
    return copies


def _pairs_by_pages(
    memory: KVMemory,
    pairs_by_group: Sequence[BlockPairs],
) -> dict[_Pages, list[BlockPairs]]:
    """Return for the pages to copy the pairs of the groups that use them: groups that share pages
    are copied together. Raise ValueError if a block does not exist."""
    pairs_by_pages: dict[_Pages, list[BlockPairs]] = {}
    for refs, pairs in zip(memory.group_data_refs, pairs_by_group, strict=True):
        if not len(pairs.blocks):
            continue
        for ref in refs:
            num_gpu_blocks = memory.pages[ref.tensor_idx].shape[0]
            _check_bounds("GPU block", pairs.blocks, num_gpu_blocks)
            pages = _Pages(ref.tensor_idx, ref.page_size_bytes)
            pairs_by_pages.setdefault(pages, []).append(pairs)
    return pairs_by_pages


def _pair_blocks(
    gpu: GPULoadStoreSpec,
    rows: IntArray,
    factor: int,
) -> list[BlockPairs]:
    """Return for each group its GPU blocks and their places in rows.

    :param rows: those of group 0, then those of group 1, and so on.
    :param factor: GPU blocks in a row.
    :raises ValueError: the groups need more rows, or fewer.
    """
    blocks = np.asarray(gpu.block_ids, np.int64)
    positions = np.arange(factor)
    pairs_by_group = []
    blocks_before = 0  # number of blocks of earlier groups
    rows_before = 0
    groups = zip(gpu.group_sizes, gpu.block_indices, strict=True)
    for num_blocks, first_index in groups:
        # the group's first block may be in the middle of its first row
        skipped = first_index % factor
        # a group without blocks has no row, wherever its first block would be
        num_rows = 0
        if num_blocks:
            num_rows = divide_up(skipped + num_blocks, factor)
        group_rows = rows[rows_before : rows_before + num_rows]
        # shape (rows, positions), flattened: all sub-blocks of the group's rows
        sub_blocks = group_rows[:, None] * factor + positions
        used_sub_blocks = sub_blocks.reshape(-1)[skipped : skipped + num_blocks]
        group_blocks = blocks[blocks_before : blocks_before + num_blocks]
        pairs_by_group.append(BlockPairs(group_blocks, used_sub_blocks))
        blocks_before += num_blocks
        rows_before += num_rows
    num_needed = rows_before
    if num_needed != len(rows):
        raise ValueError(
            f"{len(rows)} rows for {gpu}, which needs {num_needed} at {factor} GPU blocks a row"
        )
    return pairs_by_group


def compute_sub_block_ptrs(
    sub_blocks: IntArray,
    block_size_factor: int,
    tensor: torch.Tensor,
) -> IntArray:
    """Return the memory address of each sub-block of a tensor.

    :param sub_blocks: for each, its row of ``tensor`` times ``block_size_factor``, plus its
        position in the row. With a factor of 1 they are rows.
    :param tensor: int8, shape (rows, ``block_size_factor`` * bytes of a sub-block), rows
        contiguous, with or without gaps between them.
    """
    row, position = np.divmod(sub_blocks, block_size_factor)
    sub_block_bytes = tensor.shape[1] // block_size_factor
    row_offsets = row * tensor.stride(0)
    offsets = row_offsets + position * sub_block_bytes
    pointers: IntArray = tensor.data_ptr() + offsets
    return pointers


def consecutive_runs(*sides: IntArray) -> list[slice]:
    """Return the longest runs, as slices in order, in which each number of every array is the
    previous one plus 1."""
    num_ids = len(sides[0])
    if not num_ids:
        return []
    # for each number but the last: whether the next one begins a new run
    breaks_of_sides = [np.diff(ids) != 1 for ids in sides]
    is_break = np.logical_or.reduce(breaks_of_sides)
    begins = np.flatnonzero(is_break) + 1
    bounds = [0, *begins.tolist(), num_ids]
    return [slice(begin, end) for begin, end in pairwise(bounds)]


def _check_bounds(
    what: str,
    ids: IntArray,
    count: int,
) -> None:
    """Raise ValueError unless all ids are from 0 to ``count - 1``: other ids would become addresses
    outside the memory."""
    if not len(ids):
        return
    for extreme in (ids.min(), ids.max()):
        if not 0 <= extreme < count:
            raise ValueError(f"{what} {extreme} is not one of {count}")
