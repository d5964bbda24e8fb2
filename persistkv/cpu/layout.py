"""The geometry of a row: one cell per worker, which holds ``block_size_factor`` consecutive pages of each KV tensor.

A row holds one block of one group. Tensors that no group uses together share the same offset, so a row is as wide as
the widest group, not as the sum of all groups.
"""

from __future__ import annotations

import torch

from persistkv.base import CanonicalKVCaches
from persistkv.config import GroupLayout
from persistkv.errors import ConfigurationError


def cell_bytes(kv_caches: CanonicalKVCaches, block_size_factor: int) -> int:
    """Return the bytes of one worker's cell in a row, the ``cpu_page_size`` of a region.

    :raises ConfigurationError: if the caches or the factor are invalid.
    """
    offsets = tensor_offsets(kv_caches, block_size_factor)
    sizes = [tensor.page_size_bytes * block_size_factor for tensor in kv_caches.tensors]
    return max(offset + size for offset, size in zip(offsets, sizes, strict=True))


def tensor_offsets(kv_caches: CanonicalKVCaches, block_size_factor: int) -> list[int]:
    """Return the offset of each tensor's pages in a cell: after earlier tensors that share a group with the tensor.

    :raises ConfigurationError: if the caches or the factor are invalid.
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


def group_layouts(
    kv_caches: CanonicalKVCaches, block_size_factor: int, num_workers: int = 1
) -> tuple[GroupLayout, ...]:
    """Return the bytes of a row that each KV cache group uses: its part of each page, in every worker's cell.

    :raises ConfigurationError: if the caches or the factor are invalid.
    """
    cell = cell_bytes(kv_caches, block_size_factor)
    sizes = [tensor.page_size_bytes for tensor in kv_caches.tensors]
    offsets = tensor_offsets(kv_caches, block_size_factor)
    layouts = []
    for refs in kv_caches.group_data_refs:
        ranges = [
            (worker * cell + offsets[ref.tensor_idx] + position * sizes[ref.tensor_idx], ref.page_size_bytes)
            for worker in range(num_workers)
            for ref in refs
            for position in range(block_size_factor)
        ]
        layouts.append(GroupLayout(_merged(ranges)))
    return tuple(layouts)


def check_kv_caches(kv_caches: CanonicalKVCaches, block_size_factor: int) -> None:
    """Check that tensors are pages of bytes on one device, and that groups refer to them within bounds.

    :raises ConfigurationError: if they are not; names the first invalid value.
    """
    if block_size_factor <= 0:
        raise ConfigurationError("block_size_factor", block_size_factor, "a positive number of GPU blocks")
    if not kv_caches.tensors:
        raise ConfigurationError("kv_caches.tensors", [], "at least one KV cache tensor")
    device = kv_caches.tensors[0].tensor.device
    for index, canonical in enumerate(kv_caches.tensors):
        where, tensor = f"kv_caches.tensors[{index}]", canonical.tensor
        if tensor.dtype != torch.int8 or tensor.dim() != 2 or tensor.stride(1) != 1:
            expected = "int8, shape (num_blocks, bytes), rows contiguous"
            raise ConfigurationError(where, f"{tensor.dtype} {tuple(tensor.shape)}", expected)
        if not 0 < canonical.page_size_bytes <= tensor.shape[1]:
            expected = f"1 to {tensor.shape[1]} bytes, which a block has"
            raise ConfigurationError(f"{where}.page_size_bytes", canonical.page_size_bytes, expected)
        if tensor.device != device:
            raise ConfigurationError(f"{where}.device", str(tensor.device), f"{device}, as the first tensor")
    _check_refs(kv_caches)


def _check_refs(kv_caches: CanonicalKVCaches) -> None:
    for group, refs in enumerate(kv_caches.group_data_refs):
        if not refs:
            raise ConfigurationError(f"kv_caches.group_data_refs[{group}]", refs, "at least one tensor of the group")
        for ref in refs:
            where = f"kv_caches.group_data_refs[{group}]"
            if not 0 <= ref.tensor_idx < len(kv_caches.tensors):
                expected = f"0 to {len(kv_caches.tensors) - 1}"
                raise ConfigurationError(f"{where}.tensor_idx", ref.tensor_idx, expected)
            page = kv_caches.tensors[ref.tensor_idx].page_size_bytes
            if not 0 < ref.page_size_bytes <= page:
                expected = f"1 to {page} bytes, the tensor's page"
                raise ConfigurationError(f"{where}.page_size_bytes", ref.page_size_bytes, expected)


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
