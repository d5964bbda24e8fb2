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


def filled(num_tokens: int, capacity: int = 32) -> RequestCache:
    torch.manual_seed(1)
    cache = RequestCache((FULL,), capacity)
    for layer_idx in FULL.layers:
        cache.update(torch.randn(1, 2, num_tokens, 8), torch.randn(1, 2, num_tokens, 8), layer_idx)
    return cache


def test_update_appends_and_returns_everything() -> None:
    cache = RequestCache((FULL,), 16)
    first, second = torch.randn(1, 2, 5, 8), torch.randn(1, 2, 1, 8)
    cache.update(first, -first, 1)
    keys, values = cache.update(second, -second, 1)
    assert torch.equal(keys, torch.cat([first, second], dim=2))
    assert torch.equal(values, -keys)
    assert (cache.get_seq_length(1), cache.get_seq_length(0)) == (6, 0)


@pytest.mark.parametrize("block_ids", [[0, 1, 2, 3], [7, 2, 3, 0], [3, 2, 1, 0]])
def test_what_is_scattered_is_gathered(pages: GroupPages, block_ids: list[int]) -> None:
    (buffer,) = filled(18).buffers
    pages.scatter(buffer, [0, 1, 2, 3], block_ids)
    (other,) = RequestCache((FULL,), 20).buffers
    pages.gather(other, [0, 1, 2, 3], block_ids)
    assert torch.equal(other[:, :, :, :16], buffer[:, :, :, :16])


def test_copies_only_the_blocks_named(pages: GroupPages) -> None:
    (buffer,) = filled(16).buffers
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


class TestSlidingWindow:
    def test_shows_what_a_new_token_attends_to(self) -> None:
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

    def test_behaves_as_the_layer_of_transformers(self) -> None:
        torch.manual_seed(3)
        cache, theirs = RequestCache(HYBRID, 64), DynamicSlidingWindowLayer(sliding_window=4)
        for count in (1, 1, 2, 1, 3, 9, 1, 1, 4, 5):
            new = torch.randn(1, 2, count, 8)
            assert cache.get_mask_sizes(count, 2) == theirs.get_mask_sizes(count)
            ours = cache.update(new, new + 1, 2)
            assert all(map(torch.equal, ours, theirs.update(new, new + 1)))
            assert cache.get_seq_length(2) == theirs.get_seq_length()

    def test_keeps_what_it_does_not_show(self) -> None:
        cache = RequestCache(HYBRID, 16)
        states = torch.randn(1, 2, 10, 8)
        cache.update(states, states, 2)
        assert torch.equal(cache.buffers[0][1, 0, :, :10], states[0])


def test_workers_see_each_page_as_its_bytes() -> None:
    torch.manual_seed(2)
    device = PagedKVCache(HYBRID, num_blocks=8, block_size=4)
    canonical = device.canonical()
    assert [[(ref.tensor_idx, ref.page_size_bytes) for ref in refs] for refs in canonical.group_data_refs] == [
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


def names(*numbers: int) -> list[bytes]:
    return [f"hash {number}".encode() for number in numbers]


def fill(pool: BlockPool, *numbers: int) -> list[int]:
    blocks = pool.allocate(len(numbers))
    assert blocks is not None
    for block_id, block_hash in zip(blocks, names(*numbers), strict=True):
        pool.publish(block_id, block_hash)
    pool.release(blocks)
    return blocks


def acquire(pool: BlockPool, hashes: list[bytes]) -> list[int]:
    """Acquire the longest resident prefix."""
    acquired = takewhile(lambda block_id: block_id is not None, map(pool.acquire, hashes))
    return [block_id for block_id in acquired if block_id is not None]


def test_knows_what_is_resident() -> None:
    pool = BlockPool(8)
    blocks = fill(pool, 1, 2, 3)
    assert [pool.holds(block_hash) for block_hash in names(1, 3, 9)] == [True, True, False]
    assert [pool.acquire(block_hash) for block_hash in names(1, 3, 9)] == [blocks[0], blocks[2], None]


def test_evicts_the_oldest_and_of_one_request_its_end() -> None:
    pool = BlockPool(4)
    fill(pool, 1, 2)
    fill(pool, 3, 4)
    pool.allocate(1)
    assert set(pool.resident()) == set(names(1, 3, 4))
    pool.allocate(2)
    assert set(pool.resident()) == set(names(3))


def test_does_not_evict_what_is_in_use() -> None:
    pool = BlockPool(4)
    fill(pool, 1, 2)
    held = acquire(pool, names(1, 2))
    assert pool.allocate(3) is None
    assert pool.num_available == 2
    pool.release(held)
    assert pool.allocate(4) is not None
    assert pool.resident() == {}


def test_shared_blocks_stay_until_the_last_release() -> None:
    pool = BlockPool(2)
    fill(pool, 1)
    first, second = acquire(pool, names(1)), acquire(pool, names(1))
    pool.release(first)
    assert pool.allocate(2) is None
    pool.release(second)
    assert pool.allocate(2) is not None


def test_of_two_blocks_with_one_hash_the_first_stays() -> None:
    pool = BlockPool(4)
    (first,) = fill(pool, 1)
    fill(pool, 1)
    assert pool.resident() == {names(1)[0]: first}
    assert pool.num_available == 4


def test_forgets_idle_blocks_only() -> None:
    pool = BlockPool(4)
    fill(pool, 1, 2)
    acquire(pool, names(1))
    pool.forget()
    assert list(pool.resident()) == names(1)
    assert pool.num_available == 3


def test_never_loses_or_doubles_a_block() -> None:
    random.seed(5)
    pool = BlockPool(16)
    held: list[list[int]] = []
    for _ in range(3000):
        if held and random.random() < 0.5:
            pool.release(held.pop(random.randrange(len(held))))
            continue
        chain = names(*(random.randrange(3) * 100 + depth for depth in range(random.randrange(1, 6))))
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
