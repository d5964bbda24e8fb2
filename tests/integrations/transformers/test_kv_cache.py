from __future__ import annotations

import random
from itertools import takewhile

import pytest
import torch
from transformers.cache_utils import DynamicSlidingWindowLayer

from persistkv.integrations.transformers.kv_cache import (
    BlockPool,
    GroupPages,
    KVGroupGeometry,
    PagedKVCache,
    RequestCache,
)

CPU = torch.device("cpu")
FULL = KVGroupGeometry((0, 1, 2), 2, 8, None, torch.float32, CPU)
HYBRID = (
    KVGroupGeometry((0, 2), 2, 8, 4, torch.float32, CPU),
    KVGroupGeometry((1,), 1, 8, None, torch.float32, CPU),
)


@pytest.fixture
def pages() -> GroupPages:
    return GroupPages(FULL, num_blocks=8, block_size=4)


def filled_cache(num_tokens: int, capacity: int = 32) -> RequestCache:
    torch.manual_seed(1)
    cache = RequestCache((FULL,), capacity)
    for layer_idx in FULL.layers:
        cache.update(
            torch.randn(1, 2, num_tokens, 8),
            torch.randn(1, 2, num_tokens, 8),
            layer_idx,
        )
    return cache


def test_request_cache_update_appends_and_returns_all_tokens() -> None:
    cache = RequestCache((FULL,), 16)
    first, second = torch.randn(1, 2, 5, 8), torch.randn(1, 2, 1, 8)
    cache.update(first, -first, 1)
    keys, values = cache.update(second, -second, 1)
    assert torch.equal(keys, torch.cat([first, second], dim=2))
    assert torch.equal(values, -keys)
    assert (cache.get_seq_length(1), cache.get_seq_length(0)) == (6, 0)


@pytest.mark.parametrize("block_ids", [[0, 1, 2, 3], [7, 2, 3, 0], [3, 2, 1, 0]])
def test_group_pages_gather_returns_scattered_blocks(
    pages: GroupPages,
    block_ids: list[int],
) -> None:
    (buffer,) = filled_cache(18).buffers
    pages.scatter(buffer, [0, 1, 2, 3], block_ids)
    (other,) = RequestCache((FULL,), 20).buffers
    pages.gather(other, [0, 1, 2, 3], block_ids)
    assert torch.equal(other[:, :, :, :16], buffer[:, :, :, :16])


def test_group_pages_copy_touches_only_given_blocks(pages: GroupPages) -> None:
    (buffer,) = filled_cache(16).buffers
    pages.scatter(buffer, [1, 3], [5, 6])
    assert torch.equal(pages.pages[5], buffer[:, :, :, 4:8])
    assert torch.equal(pages.pages[6], buffer[:, :, :, 12:16])
    assert not pages.pages[[0, 1, 2, 3, 4, 7]].any()
    pages.scatter(buffer, [], [])
    other = torch.zeros_like(buffer)
    pages.gather(other, [2], [6])
    assert torch.equal(other[:, :, :, 8:12], buffer[:, :, :, 12:16])
    assert not other[:, :, :, :8].any()
    assert not other[:, :, :, 12:].any()


class TestRequestCacheSlidingWindow:
    def test_update_returns_only_tokens_inside_window(self) -> None:
        cache = RequestCache(HYBRID, 16)
        states = torch.randn(1, 2, 10, 8)
        assert cache.is_sliding == [True, False, True]
        for start, stop, first in ((0, 6, 0), (6, 7, 3), (7, 10, 4)):
            new = states[:, :, start:stop]
            assert cache.get_mask_sizes(stop - start, 0) == (stop - first, first)
            assert cache.get_mask_sizes(stop - start, 1) == (stop, 0)
            keys, values = cache.update(new, -new, 0)
            assert torch.equal(keys, states[:, :, first:stop])
            assert torch.equal(values, -keys)
            cache.update(new[:, :1], new[:, :1], 1)
            assert (cache.get_seq_length(0), cache.get_seq_length(1)) == (stop, stop)

    def test_update_matches_sliding_window_layer_of_transformers(self) -> None:
        torch.manual_seed(3)
        cache, reference = (
            RequestCache(HYBRID, 64),
            DynamicSlidingWindowLayer(sliding_window=4),
        )
        for count in (1, 1, 2, 1, 3, 9, 1, 1, 4, 5):
            new = torch.randn(1, 2, count, 8)
            assert cache.get_mask_sizes(count, 2) == reference.get_mask_sizes(count)
            returned = cache.update(new, new + 1, 2)
            assert all(map(torch.equal, returned, reference.update(new, new + 1)))
            assert cache.get_seq_length(2) == reference.get_seq_length()

    def test_update_keeps_tokens_outside_window_in_buffer(self) -> None:
        cache = RequestCache(HYBRID, 16)
        states = torch.randn(1, 2, 10, 8)
        cache.update(states, states, 2)
        assert torch.equal(cache.buffers[0][1, 0, :, :10], states[0])


def test_paged_kv_cache_canonical_tensors_alias_pages_as_bytes() -> None:
    torch.manual_seed(2)
    device = PagedKVCache(HYBRID, num_blocks=8, block_size=4)
    canonical = device.canonical()
    assert [
        [(ref.tensor_idx, ref.page_size_bytes) for ref in refs]
        for refs in canonical.group_data_refs
    ] == [
        [(0, 2 * 2 * 2 * 4 * 8 * 4)],
        [(1, 1 * 2 * 1 * 4 * 8 * 4)],
    ]
    for group, tensor in zip(device.groups, canonical.tensors, strict=True):
        group.pages.normal_()
        assert tensor.tensor.shape == (8, tensor.page_size_bytes)
        assert tensor.page_size_bytes == group.page_bytes
        assert tensor.tensor[3].numpy().tobytes() == group.pages[3].numpy().tobytes()
        tensor.tensor[0].zero_()
        assert not group.pages[0].any()


def hashes_of(*numbers: int) -> list[bytes]:
    return [f"hash {number}".encode() for number in numbers]


def fill_pool(pool: BlockPool, *numbers: int) -> list[int]:
    blocks = pool.allocate(len(numbers))
    assert blocks is not None
    for block_id, block_hash in zip(blocks, hashes_of(*numbers), strict=True):
        pool.publish(block_id, block_hash)
    pool.release(blocks)
    return blocks


def acquire(pool: BlockPool, hashes: list[bytes]) -> list[int]:
    """Acquire the longest resident prefix."""
    acquired = takewhile(
        lambda block_id: block_id is not None, map(pool.acquire, hashes)
    )
    return [block_id for block_id in acquired if block_id is not None]


def test_block_pool_holds_and_acquires_only_resident_hashes() -> None:
    pool = BlockPool(8)
    blocks = fill_pool(pool, 1, 2, 3)
    assert [pool.holds(block_hash) for block_hash in hashes_of(1, 3, 9)] == [
        True,
        True,
        False,
    ]
    assert [pool.acquire(block_hash) for block_hash in hashes_of(1, 3, 9)] == [
        blocks[0],
        blocks[2],
        None,
    ]


def test_block_pool_evicts_oldest_request_and_its_last_block_first() -> None:
    pool = BlockPool(4)
    fill_pool(pool, 1, 2)
    fill_pool(pool, 3, 4)
    pool.allocate(1)
    assert set(pool.resident()) == set(hashes_of(1, 3, 4))
    pool.allocate(2)
    assert set(pool.resident()) == set(hashes_of(3))


def test_block_pool_acquired_blocks_are_not_evicted() -> None:
    pool = BlockPool(4)
    fill_pool(pool, 1, 2)
    held = acquire(pool, hashes_of(1, 2))
    assert pool.allocate(3) is None
    assert pool.num_available == 2
    pool.release(held)
    assert pool.allocate(4) is not None
    assert pool.resident() == {}


def test_block_pool_shared_block_is_not_evicted_before_last_release() -> None:
    pool = BlockPool(2)
    fill_pool(pool, 1)
    first, second = acquire(pool, hashes_of(1)), acquire(pool, hashes_of(1))
    pool.release(first)
    assert pool.allocate(2) is None
    pool.release(second)
    assert pool.allocate(2) is not None


def test_block_pool_duplicate_hash_keeps_first_block() -> None:
    pool = BlockPool(4)
    (first,) = fill_pool(pool, 1)
    fill_pool(pool, 1)
    assert pool.resident() == {hashes_of(1)[0]: first}
    assert pool.num_available == 4


def test_block_pool_forget_drops_only_idle_blocks() -> None:
    pool = BlockPool(4)
    fill_pool(pool, 1, 2)
    acquire(pool, hashes_of(1))
    pool.forget()
    assert list(pool.resident()) == hashes_of(1)
    assert pool.num_available == 3


def test_block_pool_random_use_neither_leaks_nor_duplicates_blocks() -> None:
    random.seed(5)
    pool = BlockPool(16)
    held: list[list[int]] = []
    for _ in range(3000):
        if held and random.random() < 0.5:
            pool.release(held.pop(random.randrange(len(held))))
            continue
        chain = hashes_of(
            *(
                random.randrange(3) * 100 + depth
                for depth in range(random.randrange(1, 6))
            )
        )
        blocks = acquire(pool, chain)
        new = pool.allocate(len(chain) - len(blocks))
        for block_id, block_hash in zip(new or [], chain[len(blocks) :], strict=False):
            pool.publish(block_id, block_hash)
        held.append(blocks + (new or []))
        in_use = {block_id for request in held for block_id in request}
        assert pool.num_available == 16 - len(in_use)
        resident = pool.resident()
        assert len(set(resident.values())) == len(resident)
    for request in held:
        pool.release(request)
    assert pool.num_available == 16
