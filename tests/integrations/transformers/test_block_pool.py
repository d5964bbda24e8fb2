from __future__ import annotations

import random
from itertools import takewhile

from persistkv.integrations.transformers.block_pool import BlockPool


def names(*numbers):
    return [f"hash {number}".encode() for number in numbers]


def fill(pool, *numbers):
    blocks = pool.allocate(len(numbers))
    for block_id, block_hash in zip(blocks, names(*numbers), strict=True):
        pool.publish(block_id, block_hash)
    pool.release(blocks)
    return blocks


def acquire(pool, hashes):
    """Refer to the longest resident prefix."""
    return [pool.acquire(block_hash) for block_hash in takewhile(pool.holds, hashes)]


def test_knows_what_is_resident():
    pool = BlockPool(8)
    blocks = fill(pool, 1, 2, 3)
    assert [pool.holds(block_hash) for block_hash in names(1, 3, 9)] == [True, True, False]
    assert [pool.acquire(block_hash) for block_hash in names(1, 3, 9)] == [blocks[0], blocks[2], None]


def test_evicts_the_oldest_and_of_one_request_its_end():
    pool = BlockPool(4)
    fill(pool, 1, 2)
    fill(pool, 3, 4)
    pool.allocate(1)
    assert set(pool.resident()) == set(names(1, 3, 4))
    pool.allocate(2)
    assert set(pool.resident()) == set(names(3))


def test_does_not_evict_what_is_in_use():
    pool = BlockPool(4)
    fill(pool, 1, 2)
    held = acquire(pool, names(1, 2))
    assert pool.allocate(3) is None
    assert pool.num_available == 2
    pool.release(held)
    assert pool.allocate(4) is not None
    assert pool.resident() == {}


def test_shared_blocks_stay_until_the_last_release():
    pool = BlockPool(2)
    fill(pool, 1)
    first, second = acquire(pool, names(1)), acquire(pool, names(1))
    pool.release(first)
    assert pool.allocate(2) is None
    pool.release(second)
    assert pool.allocate(2) is not None


def test_of_two_blocks_with_one_hash_the_first_stays():
    pool = BlockPool(4)
    (first,) = fill(pool, 1)
    fill(pool, 1)
    assert pool.resident() == {names(1)[0]: first}
    assert pool.num_available == 4


def test_forgets_idle_blocks_only():
    pool = BlockPool(4)
    fill(pool, 1, 2)
    acquire(pool, names(1))
    pool.forget()
    assert list(pool.resident()) == names(1)
    assert pool.num_available == 3


def test_never_loses_or_doubles_a_block():
    random.seed(5)
    pool, held = BlockPool(16), []
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
