"""Pairing blocks with rows, and the addresses of sub-blocks."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from persistkv.base import CanonicalKVCacheRef, CanonicalKVCaches, CanonicalKVCacheTensor, GPULoadStoreSpec
from persistkv.cpu.layout import KVMemory, plan_copies, row_addresses
from persistkv.cpu.manager import CPULoadStoreSpec


def setting(factor: int) -> tuple[CanonicalKVCaches, KVMemory]:
    """Two tensors of 8 blocks, 6 rows; group 0 uses both tensors, group 1 half of the second's pages."""
    tensors = [CanonicalKVCacheTensor(torch.zeros((8, page), dtype=torch.int8), page) for page in (16, 32)]
    refs = [[CanonicalKVCacheRef(0, 16), CanonicalKVCacheRef(1, 32)], [CanonicalKVCacheRef(1, 16)]]
    rows = tuple(torch.zeros((6, factor * page), dtype=torch.int8) for page in (16, 32))
    return CanonicalKVCaches(tensors, refs), KVMemory(tuple(tensor.tensor for tensor in tensors), rows, factor)


def plan(
    factor: int, blocks: list[int], sizes: list[int], indices: list[int], rows: list[int]
) -> dict[tuple[int, int], list[tuple[int, int]]]:
    copies = plan_copies(GPULoadStoreSpec(blocks, sizes, indices), CPULoadStoreSpec(rows), *setting(factor))
    return {
        (part.tensor_idx, part.page_bytes): list(zip(part.blocks.tolist(), part.sub_blocks.tolist(), strict=True))
        for part in copies
    }


def test_each_group_touches_the_tensors_it_names() -> None:
    pairs = plan(1, [4, 5, 6], [2, 1], [0, 0], [3, 1, 2])
    assert pairs == {(0, 16): [(4, 3), (5, 1)], (1, 32): [(4, 3), (5, 1)], (1, 16): [(6, 2)]}


def test_an_unaligned_first_block_skips_into_its_row() -> None:
    pairs = plan(4, [7, 0, 1, 2, 5], [4, 1], [7, 2], [2, 0, 5])
    assert pairs[0, 16] == [(7, 2 * 4 + 3), (0, 0), (1, 1), (2, 2)]
    assert pairs[1, 16] == [(5, 5 * 4 + 2)]


def test_a_group_without_blocks_takes_no_row() -> None:
    assert plan(2, [3], [0, 1], [1, 1], [4]) == {(1, 16): [(3, 9)]}
    assert plan(2, [], [0, 0], [0, 0], []) == {}


@pytest.mark.parametrize(
    ("blocks", "sizes", "indices", "rows", "problem"),
    [
        ([1, 2], [1, 1], [0, 0], [1], "does not have the rows"),
        ([1, 2], [1, 1], [0, 0], [1, 2, 3], "does not have the rows"),
        ([1, 2], [2, 0], [1, 0], [1], "does not have the rows"),
        ([1], [1], [0], [1], "1 groups"),
        ([8], [1, 0], [0, 0], [1], "GPU block 8 is not one of 8"),
        ([-1], [1, 0], [0, 0], [1], "GPU block -1 is not one of 8"),
        ([1], [1, 0], [0, 0], [6], "row 6 is not one of 6"),
        ([1], [1, 0], [0, 0], [-1], "row -1 is not one of 6"),
    ],
)
def test_what_does_not_fit_is_refused(
    blocks: list[int], sizes: list[int], indices: list[int], rows: list[int], problem: str
) -> None:
    with pytest.raises(ValueError, match=problem):
        plan(2, blocks, sizes, indices, rows)


def test_row_addresses_of_a_tensor_with_gaps() -> None:
    storage = torch.zeros((5, 100), dtype=torch.int8)
    found = row_addresses(np.array([4, 0]), storage[:, 10:70])
    assert found.tolist() == [storage.data_ptr() + 410, storage.data_ptr() + 10]


@pytest.mark.parametrize("row", [-1, 2])
def test_row_addresses_of_a_row_that_does_not_exist_raises(row: int) -> None:
    with pytest.raises(ValueError, match=f"row {row} is not one of 2"):
        row_addresses(np.array([0, row]), torch.zeros((2, 8), dtype=torch.int8))
