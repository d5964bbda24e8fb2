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

import numpy as np
import numpy.typing as npt
import torch

from persistkv.base import (
    BlockIDsLoadStoreSpec,
    CanonicalKVCacheRef,
    CanonicalKVCaches,
    GPULoadStoreSpec,
    HeadSharding,
)
from persistkv.config import GroupLayout
from persistkv.errors import ConfigurationError

IntArray = npt.NDArray[np.int64]


def cell_bytes(kv_caches: CanonicalKVCaches, block_size_factor: int) -> int:
    """Return the bytes of one worker's cell in a row, which is the ``cpu_page_size`` of
    ``SharedOffloadRegion``."""
    offsets = tensor_offsets(kv_caches, block_size_factor)
    pages = zip(offsets, kv_caches.tensors, strict=True)
    return max(
        offset + tensor.page_size_bytes * block_size_factor for offset, tensor in pages
    )


def tensor_offsets(kv_caches: CanonicalKVCaches, block_size_factor: int) -> list[int]:
    """Return for each KV tensor the offset of its pages in a cell, in bytes: after those of the
    earlier tensors that share a KV cache group with it. Other tensors may overlap it.
    """
    check_kv_caches(kv_caches, block_size_factor)
    users = [{ref.tensor_idx for ref in refs} for refs in kv_caches.group_data_refs]
    ends = [0] * len(users)
    offsets = []
    for index, tensor in enumerate(kv_caches.tensors):
        groups = [group for group, used in enumerate(users) if index in used]
        offsets.append(max((ends[group] for group in groups), default=0))
        for group in groups:
            ends[group] = offsets[-1] + tensor.page_size_bytes * block_size_factor
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
    kv_caches: CanonicalKVCaches, block_size_factor: int, rank: int, num_workers: int
) -> list[HeadSlice]:
    """Return the slices of one worker's pages in the head-sharded layout, by tensor.

    For each tensor a row holds the parts of its pages in order, for each part the heads of all
    workers, and for each head the bytes of all GPU blocks of the offloaded block.

    :raises ConfigurationError: a tensor does not state its heads, or they do not fit its pages.
    """
    slices = []
    offsets = tensor_offsets(kv_caches, block_size_factor)
    tensors = zip(kv_caches.tensors, heads_of_tensors(kv_caches), offsets, strict=True)
    for index, (tensor, heads, offset) in enumerate(tensors):
        # With one GPU block per row, the heads of a worker are consecutive in a row as they are in
        # a page.
        slices_per_part = 1 if block_size_factor == 1 else heads.num_heads
        size = tensor.page_size_bytes // (heads.num_parts * slices_per_part)
        for number in range(heads.num_parts * slices_per_part):
            part, position = divmod(number, slices_per_part)
            place = (part * num_workers + rank) * slices_per_part + position
            row_offset = offset * num_workers + place * size * block_size_factor
            slices.append(HeadSlice(index, number * size, size, row_offset))
    return slices


def heads_of_tensors(kv_caches: CanonicalKVCaches) -> list[HeadSharding]:
    """Return the positions of the heads in the pages of each KV tensor.

    :raises ConfigurationError: a tensor does not state them, they do not fit its pages, or a group
        uses only parts of pages.
    """
    stated = []
    for index, tensor in enumerate(kv_caches.tensors):
        where, heads = f"kv_caches.tensors[{index}].heads", tensor.heads
        if heads is None:
            raise ConfigurationError(
                where,
                None,
                "the positions of the heads, since the caches are head-sharded",
            )
        if heads.num_parts <= 0 or heads.num_heads <= 0:
            raise ConfigurationError(where, heads, "positive numbers")
        if tensor.page_size_bytes % (heads.num_parts * heads.num_heads):
            raise ConfigurationError(
                where, heads, f"a divisor of {tensor.page_size_bytes} bytes of a page"
            )
        stated.append(heads)
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


def group_layouts(
    kv_caches: CanonicalKVCaches,
    block_size_factor: int,
    num_workers: int = 1,
    *,
    head_sharded: bool = False,
) -> tuple[GroupLayout, ...]:
    """Return for each KV cache group the byte ranges of a row that its blocks use, in the cells of
    all workers.

    :param head_sharded: see ``WorkerGeometry``.
    """
    if head_sharded:
        heads_of_tensors(kv_caches)  # raises if the caches cannot be head-sharded
        offsets = tensor_offsets(kv_caches, block_size_factor)
        sizes = [
            tensor.page_size_bytes * block_size_factor for tensor in kv_caches.tensors
        ]
        shared = []
        for refs in kv_caches.group_data_refs:
            used = {ref.tensor_idx for ref in refs}
            ranges = [
                (offsets[index] * num_workers, sizes[index] * num_workers)
                for index in used
            ]
            shared.append(GroupLayout(_merged(ranges)))
        return tuple(shared)
    cell, offsets = (
        cell_bytes(kv_caches, block_size_factor),
        tensor_offsets(kv_caches, block_size_factor),
    )
    layouts = []
    for refs in kv_caches.group_data_refs:
        ranges = []
        for worker in range(num_workers):
            for ref in refs:
                first, page = (
                    worker * cell + offsets[ref.tensor_idx],
                    kv_caches.tensors[ref.tensor_idx].page_size_bytes,
                )
                ranges += [
                    (first + position * page, ref.page_size_bytes)
                    for position in range(block_size_factor)
                ]
        layouts.append(GroupLayout(_merged(ranges)))
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
        where, tensor = f"kv_caches.tensors[{index}]", canonical.tensor
        if tensor.dtype != torch.int8 or tensor.dim() != 2 or tensor.stride(1) != 1:
            expected = "int8, shape (num_blocks, bytes), rows contiguous"
            raise ConfigurationError(
                where, f"{tensor.dtype} {tuple(tensor.shape)}", expected
            )
        _check_number(
            f"{where}.page_size_bytes",
            canonical.page_size_bytes,
            1,
            tensor.shape[1],
            " bytes of a block",
        )
        if tensor.device != device:
            raise ConfigurationError(
                f"{where}.device", str(tensor.device), f"{device}, as the first tensor"
            )
    for group, refs in enumerate(kv_caches.group_data_refs):
        where = f"kv_caches.group_data_refs[{group}]"
        if not refs:
            raise ConfigurationError(where, refs, "at least one tensor of the group")
        for ref in refs:
            _check_number(
                f"{where}.tensor_idx", ref.tensor_idx, 0, len(kv_caches.tensors) - 1
            )
            page = kv_caches.tensors[ref.tensor_idx].page_size_bytes
            _check_number(
                f"{where}.page_size_bytes",
                ref.page_size_bytes,
                1,
                page,
                " bytes of the tensor's page",
            )


def _check_number(
    field: str, value: int, lowest: int, highest: int, unit: str = ""
) -> None:
    if not lowest <= value <= highest:
        raise ConfigurationError(field, value, f"{lowest} to {highest}{unit}")


def _merged(ranges: list[tuple[int, int]]) -> tuple[tuple[int, int], ...]:
    """Return the ranges in ascending order, with adjacent and overlapping ones merged."""
    merged: list[tuple[int, int]] = []
    for offset, length in sorted(ranges):
        if merged and offset <= sum(merged[-1]):
            start = merged[-1][0]
            merged[-1] = (start, max(sum(merged[-1]), offset + length) - start)
        else:
            merged.append((offset, length))
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


def plan_copies(
    gpu: GPULoadStoreSpec, cpu: BlockIDsLoadStoreSpec, memory: KVMemory
) -> list[PageCopies]:
    """Plan a transfer: pair the GPU blocks of all groups with places in rows of the primary tier.

    A group uses as many rows as its blocks need. Its first block is paired with sub-block
    ``block_indices % block_size_factor`` of its first row. The rows of group 0 are first. Copies of
    several groups with the same tensor and page size are merged. Raise ValueError if a block or row
    does not exist, or if their numbers do not match.
    """
    groups = memory.group_data_refs
    if len(gpu.group_sizes) != len(groups):
        raise ValueError(
            f"{len(gpu.group_sizes)} groups in {gpu}, the caches have {len(groups)}"
        )
    factor = memory.block_size_factor
    blocks = np.asarray(gpu.block_ids, np.int64)
    rows = np.asarray(cpu.block_ids, np.int64)
    _check_bounds("row", rows, memory.rows[0].shape[0])
    parts: dict[tuple[int, int], list[tuple[IntArray, IntArray]]] = {}
    first_block = first_row = 0
    for size, index, refs in zip(
        gpu.group_sizes, gpu.block_indices, groups, strict=True
    ):
        skip = index % factor
        num_rows = -(-(skip + size) // factor) if size else 0
        group_blocks = blocks[first_block : first_block + size]
        group_rows = rows[first_row : first_row + num_rows]
        if len(group_rows) < num_rows:
            break
        sub_blocks = (group_rows[:, None] * factor + np.arange(factor)).reshape(-1)[
            skip : skip + size
        ]
        first_block, first_row = first_block + size, first_row + num_rows
        for ref in refs if size else ():
            _check_bounds(
                "GPU block", group_blocks, memory.pages[ref.tensor_idx].shape[0]
            )
            parts.setdefault((ref.tensor_idx, ref.page_size_bytes), []).append(
                (group_blocks, sub_blocks)
            )
    if first_block != len(blocks) or first_row != len(rows):
        raise ValueError(
            f"{cpu} does not have the rows for {gpu} at {factor} GPU blocks a row"
        )
    return [
        PageCopies(
            tensor_idx,
            page_bytes,
            np.concatenate([b for b, _ in pairs]),
            np.concatenate([s for _, s in pairs]),
        )
        for (tensor_idx, page_bytes), pairs in parts.items()
    ]


def compute_sub_block_ptrs(
    sub_blocks: IntArray, block_size_factor: int, tensor: torch.Tensor
) -> IntArray:
    """Return the memory address of each sub-block of a tensor.

    :param sub_blocks: for each, its row of ``tensor`` times ``block_size_factor``, plus its
        position in the row. With a factor of 1 they are rows.
    :param tensor: int8, shape (rows, ``block_size_factor`` * bytes of a sub-block), rows
        contiguous, with or without gaps between them.
    """
    row, position = np.divmod(sub_blocks, block_size_factor)
    sub_block_bytes = tensor.shape[1] // block_size_factor
    pointers: IntArray = (
        tensor.data_ptr() + row * tensor.stride(0) + position * sub_block_bytes
    )
    return pointers


def consecutive_runs(*sides: IntArray) -> list[slice]:
    """Return the longest runs, as slices in order, in which each number of every array is the
    previous one plus 1."""
    breaks = np.logical_or.reduce([np.diff(ids) != 1 for ids in sides])
    begins = [0, *(np.flatnonzero(breaks) + 1).tolist(), len(sides[0])]
    return [slice(begin, end) for begin, end in pairwise(begins) if begin < end]


def _check_bounds(what: str, ids: IntArray, count: int) -> None:
    """Refuse other ids than 0 to ``count - 1``: they would become addresses outside the memory."""
    if len(ids) and (ids.min() < 0 or ids.max() >= count):
        raise ValueError(
            f"{what} {ids.min() if ids.min() < 0 else ids.max()} is not one of {count}"
        )
