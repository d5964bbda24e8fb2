"""Where a group's bytes lie in a row."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from persistkv.base import CanonicalKVCacheRef, CanonicalKVCaches, CanonicalKVCacheTensor
from persistkv.cpu.layout import cell_bytes, check_kv_caches, group_layouts, tensor_offsets
from persistkv.errors import ConfigurationError


def caches(pages: list[int], groups: list[list[tuple[int, int]]]) -> CanonicalKVCaches:
    tensors = [CanonicalKVCacheTensor(torch.zeros((2, page), dtype=torch.int8), page) for page in pages]
    return CanonicalKVCaches(tensors, [[CanonicalKVCacheRef(*ref) for ref in refs] for refs in groups])


def test_a_cell_is_as_wide_as_the_widest_group() -> None:
    assert cell_bytes(caches([100, 40], [[(0, 100), (1, 40)]]), 3) == 420
    assert cell_bytes(caches([100, 40], [[(0, 100)], [(1, 40)]]), 3) == 300


@given(
    pages=st.lists(st.integers(1, 9), min_size=1, max_size=5),
    groups=st.lists(st.sets(st.integers(0, 4), min_size=1), min_size=1, max_size=4),
    factor=st.integers(1, 3),
)
def test_tensors_of_one_group_never_overlap(pages: list[int], groups: list[set[int]], factor: int) -> None:
    refs = [[(index % len(pages), pages[index % len(pages)]) for index in group] for group in groups]
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
        (1, 2, [((0, 100), (140, 100)), ((0, 60), (100, 100), (240, 40)), ((100, 40), (240, 40))]),
    ],
)
def test_valid_ranges(factor: int, workers: int, expected: list[tuple[tuple[int, int], ...]]) -> None:
    kv_caches = caches([100, 40], [[(0, 100)], [(1, 40), (0, 60)], [(1, 40)]])
    layouts = group_layouts(kv_caches, factor, workers)
    assert [layout.ranges for layout in layouts] == expected
    refs = kv_caches.group_data_refs
    assert [layout.block_bytes for layout in layouts] == [
        workers * factor * sum(ref.page_size_bytes for ref in group) for group in refs
    ]


def test_ranges_that_touch_are_one() -> None:
    (layout,) = group_layouts(caches([64, 64, 32], [[(0, 64), (1, 64), (2, 32)]]), 4, 2)
    assert layout.ranges == ((0, 2 * 4 * 160),)


def test_a_tensor_named_twice_counts_once() -> None:
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
def test_what_cannot_be_names_the_field(pages: list[int], groups: list[list[tuple[int, int]]], field: str) -> None:
    with pytest.raises(ConfigurationError) as caught:
        check_kv_caches(caches(pages, groups), 1)
    assert caught.value.field == field


@pytest.mark.parametrize(
    ("tensor", "page", "field"),
    [
        (torch.zeros((2, 8), dtype=torch.float32), 8, "kv_caches.tensors[0]"),
        (torch.zeros(8, dtype=torch.int8), 8, "kv_caches.tensors[0]"),
        (torch.zeros((2, 8), dtype=torch.int8).T, 2, "kv_caches.tensors[0]"),
        (torch.zeros((2, 8), dtype=torch.int8), 9, "kv_caches.tensors[0].page_size_bytes"),
    ],
)
def test_tensors_must_be_pages_of_bytes(tensor: torch.Tensor, page: int, field: str) -> None:
    with pytest.raises(ConfigurationError) as caught:
        check_kv_caches(CanonicalKVCaches([CanonicalKVCacheTensor(tensor, page)], [[CanonicalKVCacheRef(0, 1)]]), 1)
    assert caught.value.field == field


def test_the_factor_is_positive() -> None:
    with pytest.raises(ConfigurationError, match="block_size_factor: 0"):
        cell_bytes(caches([64], [[(0, 64)]]), 0)
