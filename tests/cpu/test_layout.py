"""Geometry of rows, and copies between pages and rows."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from persistkv.base import (
    CanonicalKVCacheRef,
    CanonicalKVCaches,
    CanonicalKVCacheTensor,
    GPULoadStoreSpec,
    HeadSharding,
)
from persistkv.cpu.layout import (
    KVMemory,
    cell_bytes,
    check_kv_caches,
    compute_sub_block_ptrs,
    group_layouts,
    head_slices,
    plan_copies,
    tensor_offsets,
)
from persistkv.cpu.manager import CPULoadStoreSpec
from persistkv.errors import ConfigurationError


def caches(pages: list[int], groups: list[list[tuple[int, int]]]) -> CanonicalKVCaches:
    tensors = [
        CanonicalKVCacheTensor(torch.zeros((2, page), dtype=torch.int8), page)
        for page in pages
    ]
    return CanonicalKVCaches(
        tensors, [[CanonicalKVCacheRef(*ref) for ref in refs] for refs in groups]
    )


def test_cell_bytes_several_groups_returns_size_of_widest() -> None:
    assert cell_bytes(caches([100, 40], [[(0, 100), (1, 40)]]), 3) == 420
    assert cell_bytes(caches([100, 40], [[(0, 100)], [(1, 40)]]), 3) == 300


@given(
    pages=st.lists(st.integers(1, 9), min_size=1, max_size=5),
    groups=st.lists(st.sets(st.integers(0, 4), min_size=1), min_size=1, max_size=4),
    factor=st.integers(1, 3),
)
def test_tensor_offsets_tensors_of_one_group_do_not_overlap(
    pages: list[int],
    groups: list[set[int]],
    factor: int,
) -> None:
    refs = [
        [(index % len(pages), pages[index % len(pages)]) for index in group]
        for group in groups
    ]
    kv_caches = caches(pages, refs)
    offsets, cell = tensor_offsets(kv_caches, factor), cell_bytes(kv_caches, factor)
    for group in refs:
        used = [
            byte
            for index in {ref[0] for ref in group}
            for byte in range(offsets[index], offsets[index] + pages[index] * factor)
        ]
        assert len(used) == len(set(used))
        assert max(used) < cell <= sum(pages) * factor


@pytest.mark.parametrize(
    ("factor", "workers", "expected"),
    [
        (1, 1, [((0, 100),), ((0, 60), (100, 40)), ((100, 40),)]),
        (2, 1, [((0, 200),), ((0, 60), (100, 60), (200, 80)), ((200, 80),)]),
        (
            1,
            2,
            [
                ((0, 100), (140, 100)),
                ((0, 60), (100, 100), (240, 40)),
                ((100, 40), (240, 40)),
            ],
        ),
    ],
)
def test_group_layouts_mixed_groups_return_ranges_and_block_bytes(
    factor: int,
    workers: int,
    expected: list[tuple[tuple[int, int], ...]],
) -> None:
    kv_caches = caches([100, 40], [[(0, 100)], [(1, 40), (0, 60)], [(1, 40)]])
    layouts = group_layouts(kv_caches, factor, workers)
    assert [layout.ranges for layout in layouts] == expected
    refs = kv_caches.group_data_refs
    assert [layout.block_bytes for layout in layouts] == [
        workers * factor * sum(ref.page_size_bytes for ref in group) for group in refs
    ]


def test_group_layouts_adjacent_ranges_are_merged() -> None:
    (layout,) = group_layouts(caches([64, 64, 32], [[(0, 64), (1, 64), (2, 32)]]), 4, 2)
    assert layout.ranges == ((0, 2 * 4 * 160),)


def test_group_layouts_tensor_listed_twice_counts_once() -> None:
    (layout,) = group_layouts(caches([64], [[(0, 64), (0, 32)]]), 1)
    assert layout.ranges == ((0, 64),)


@pytest.mark.parametrize(
    ("pages", "groups", "field"),
    [
        ([], [], "kv_caches.tensors"),
        ([64], [[]], "kv_caches.group_data_refs[0]"),
        ([64], [[(0, 64)], [(1, 64)]], "kv_caches.group_data_refs[1].tensor_idx"),
        ([64], [[(-1, 64)]], "kv_caches.group_data_refs[0].tensor_idx"),
        ([64], [[(0, 65)]], "kv_caches.group_data_refs[0].page_size_bytes"),
        ([64], [[(0, 0)]], "kv_caches.group_data_refs[0].page_size_bytes"),
    ],
)
def test_check_kv_caches_invalid_reference_raises_and_names_field(
    pages: list[int],
    groups: list[list[tuple[int, int]]],
    field: str,
) -> None:
    with pytest.raises(ConfigurationError) as caught:
        check_kv_caches(caches(pages, groups), 1)
    assert caught.value.field == field


@pytest.mark.parametrize(
    ("tensor", "page", "field"),
    [
        (torch.zeros((2, 8), dtype=torch.float32), 8, "kv_caches.tensors[0]"),
        (torch.zeros(8, dtype=torch.int8), 8, "kv_caches.tensors[0]"),
        (torch.zeros((2, 8), dtype=torch.int8).T, 2, "kv_caches.tensors[0]"),
        (
            torch.zeros((2, 8), dtype=torch.int8),
            9,
            "kv_caches.tensors[0].page_size_bytes",
        ),
    ],
)
def test_check_kv_caches_tensor_without_byte_pages_raises(
    tensor: torch.Tensor,
    page: int,
    field: str,
) -> None:
    with pytest.raises(ConfigurationError) as caught:
        check_kv_caches(
            CanonicalKVCaches(
                [CanonicalKVCacheTensor(tensor, page)], [[CanonicalKVCacheRef(0, 1)]]
            ),
            1,
        )
    assert caught.value.field == field


def test_cell_bytes_zero_factor_raises() -> None:
    with pytest.raises(ConfigurationError, match="block_size_factor: 0"):
        cell_bytes(caches([64], [[(0, 64)]]), 0)


# Copies between pages and rows


def make_memory(factor: int) -> KVMemory:
    """Return two tensors of 8 blocks, and 6 rows; group 0 uses both tensors, group 1 half of the
    second's pages."""
    tensors = [
        CanonicalKVCacheTensor(torch.zeros((8, page), dtype=torch.int8), page)
        for page in (16, 32)
    ]
    refs = [
        [CanonicalKVCacheRef(0, 16), CanonicalKVCacheRef(1, 32)],
        [CanonicalKVCacheRef(1, 16)],
    ]
    rows = tuple(torch.zeros((6, factor * page), dtype=torch.int8) for page in (16, 32))
    return KVMemory(
        tuple(tensor.tensor for tensor in tensors), rows, factor, group_data_refs=refs
    )


def plan(
    factor: int,
    blocks: list[int],
    sizes: list[int],
    indices: list[int],
    rows: list[int],
) -> dict[tuple[int, int], list[tuple[int, int]]]:
    copies = plan_copies(
        GPULoadStoreSpec(blocks, sizes, indices),
        CPULoadStoreSpec(rows),
        make_memory(factor),
    )
    return {
        (part.tensor_idx, part.page_bytes): list(
            zip(part.blocks.tolist(), part.sub_blocks.tolist(), strict=True)
        )
        for part in copies
    }


def test_plan_copies_two_groups_copy_only_their_tensors() -> None:
    pairs = plan(1, [4, 5, 6], [2, 1], [0, 0], [3, 1, 2])
    assert pairs == {
        (0, 16): [(4, 3), (5, 1)],
        (1, 32): [(4, 3), (5, 1)],
        (1, 16): [(6, 2)],
    }


def test_plan_copies_unaligned_first_block_starts_inside_row() -> None:
    pairs = plan(4, [7, 0, 1, 2, 5], [4, 1], [7, 2], [2, 0, 5])
    assert pairs[0, 16] == [(7, 2 * 4 + 3), (0, 0), (1, 1), (2, 2)]
    assert pairs[1, 16] == [(5, 5 * 4 + 2)]


def test_plan_copies_group_without_blocks_uses_no_row() -> None:
    assert plan(2, [3], [0, 1], [1, 1], [4]) == {(1, 16): [(3, 9)]}
    assert plan(2, [], [0, 0], [0, 0], []) == {}


@pytest.mark.parametrize(
    ("blocks", "sizes", "indices", "rows", "problem"),
    [
        ([1, 2], [1, 1], [0, 0], [1], "rows for .*, which needs 2 at"),
        ([1, 2], [1, 1], [0, 0], [1, 2, 3], "rows for .*, which needs 2 at"),
        ([1, 2], [2, 0], [1, 0], [1], "rows for .*, which needs 2 at"),
        ([1], [1], [0], [1], "1 groups"),
        ([8], [1, 0], [0, 0], [1], "GPU block 8 is not one of 8"),
        ([-1], [1, 0], [0, 0], [1], "GPU block -1 is not one of 8"),
        ([1], [1, 0], [0, 0], [6], "row 6 is not one of 6"),
        ([1], [1, 0], [0, 0], [-1], "row -1 is not one of 6"),
    ],
)
def test_plan_copies_mismatched_blocks_or_rows_raises(
    blocks: list[int],
    sizes: list[int],
    indices: list[int],
    rows: list[int],
    problem: str,
) -> None:
    with pytest.raises(ValueError, match=problem):
        plan(2, blocks, sizes, indices, rows)


@pytest.mark.parametrize("gap", [0, 5])
def test_compute_sub_block_ptrs_returns_addresses_of_sub_blocks(gap: int) -> None:
    factor, page = 3, 4
    whole = torch.arange(5 * (factor * page + gap), dtype=torch.int8).view(5, -1)
    rows = whole[:, : factor * page]
    sub_blocks = np.array([4 * factor + 2, 1 * factor, 0])
    offsets = compute_sub_block_ptrs(sub_blocks, factor, rows) - rows.data_ptr()
    stride = factor * page + gap
    assert offsets.tolist() == [4 * stride + 2 * page, stride, 0]
    assert compute_sub_block_ptrs(np.array([2]), 1, rows).tolist() == [
        rows[2].data_ptr()
    ]


def sharded(
    pages: list[int],
    heads: HeadSharding | None,
    used: int | None = None,
) -> CanonicalKVCaches:
    tensors = [
        CanonicalKVCacheTensor(torch.zeros((2, page), dtype=torch.int8), page, heads)
        for page in pages
    ]
    refs = [
        CanonicalKVCacheRef(index, used or page) for index, page in enumerate(pages)
    ]
    return CanonicalKVCaches(tensors, [refs])


@given(
    layers=st.integers(1, 3),
    parts=st.integers(1, 4),
    heads=st.integers(1, 3),
    head_bytes=st.integers(1, 4),
    workers=st.integers(1, 4),
    factor=st.integers(1, 3),
)
def test_head_slices_of_all_workers_are_those_of_one_worker_with_all_heads(
    layers: int,
    parts: int,
    heads: int,
    head_bytes: int,
    workers: int,
    factor: int,
) -> None:
    """Each byte of a page, by its part, head of the model and offset in the head, has one place for
    all numbers."""

    def places(num_workers: int) -> dict[tuple[int, int, int, int], int]:
        per_worker = heads * workers // num_workers
        page = parts * per_worker * head_bytes
        kv_caches = sharded([page] * layers, HeadSharding(parts, per_worker))
        found = {}
        for rank in range(num_workers):
            for piece in head_slices(kv_caches, factor, rank, num_workers):
                for byte in range(piece.num_bytes):
                    number, within = divmod(piece.page_offset + byte, head_bytes)
                    part, head = divmod(number, per_worker)
                    place = (piece.tensor_idx, part, rank * per_worker + head, within)
                    found[place] = piece.row_offset + byte
        return found

    shared = places(workers)
    assert shared == places(1)
    assert (
        len(set(shared.values()))
        == len(shared)
        == layers * parts * heads * workers * head_bytes
    )


def test_group_layouts_head_sharded_are_equal_for_all_numbers_of_workers() -> None:
    layouts = []
    for workers in (1, 2, 4):
        kv_caches = sharded(
            [96 // workers, 32 // workers], HeadSharding(2, 4 // workers)
        )
        layouts.append(group_layouts(kv_caches, 3, workers, head_sharded=True))
    assert layouts == [layouts[0]] * 3
    assert layouts[0][0].ranges == ((0, 3 * 128),)


@pytest.mark.parametrize(
    ("heads", "used", "message"),
    [
        (None, None, "heads: None .* head-sharded"),
        (HeadSharding(2, 3), None, "a divisor of 16 bytes"),
        (HeadSharding(0, 2), None, "positive numbers"),
        (HeadSharding(2, 2), 8, "whole pages"),
    ],
)
def test_head_slices_of_caches_that_do_not_fit_raise(
    heads: HeadSharding | None,
    used: int | None,
    message: str,
) -> None:
    with pytest.raises(ConfigurationError, match=message):
        head_slices(sharded([16], heads, used), 1, 0, 2)
