"""ARC: a scan does not evict reused blocks, and storing evicted blocks again changes the target
size."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from persistkv.base import OffloadKey, ReqContext
from persistkv.cpu.manager import CPUOffloadingManager
from persistkv.cpu.policies import ARCCachePolicy

MakeKeys = Callable[[int], list[OffloadKey]]


def store(
    manager: CPUOffloadingManager,
    keys: list[OffloadKey],
    context: ReqContext,
) -> list[OffloadKey]:
    output = manager.prepare_store(keys, context)
    assert output is not None
    manager.touch(keys, context)
    manager.complete_store(output.keys_to_store, context)
    return output.evicted_keys


def test_arc_scan_does_not_evict_reused_blocks(
    keys: MakeKeys,
    context: ReqContext,
) -> None:
    held = {}
    for policy in ("lru", "arc"):
        manager = CPUOffloadingManager(20, policy)
        popular = keys(10)
        store(manager, popular, context)
        manager.touch(popular, context)
        for _ in range(10):
            store(manager, keys(5), context)
        held[policy] = sum(manager.is_ready(key) for key in popular)
    assert held == {"lru": 0, "arc": 10}


def test_touch_block_being_written_is_not_second_use(keys: MakeKeys) -> None:
    refs = [-1, -1]
    policy = ARCCachePolicy(2, refs)
    first, second = keys(2)
    policy.insert([first, second], [0, 1])
    policy.touch([first])
    refs[:] = [0, 0]
    policy.touch([second])
    assert policy.evict(2) == [(first, 0), (second, 1)]


def test_evict_protected_blocks_in_both_lists_skipped_until_released(
    keys: MakeKeys,
) -> None:
    refs = [1, 1, 0]
    policy = ARCCachePolicy(3, refs)
    once, again, idle = keys(3)
    policy.insert([once], [0])
    policy.insert([again], [1])
    policy.touch([again])
    policy.insert([idle], [2])
    assert policy.evict(3) == [(idle, 2)]
    refs[:] = [0, 0, 0]
    policy.release([once, again])
    assert policy.evict(3) == [(once, 0), (again, 1)]


def test_insert_keys_evicted_before_adapts_target(keys: MakeKeys) -> None:
    refs = [0] * 4
    policy = ARCCachePolicy(4, refs)
    again = keys(2)
    policy.insert(again, [0, 1])
    policy.touch(again)
    lost = keys(2)
    policy.insert(lost, [2, 3])
    assert {key for key, _ in policy.evict(2)} == set(lost)
    policy.insert(lost, [2, 3])  # both were evicted too early: the target grows to 2
    assert [row for _, row in policy.evict(4)] == [1, 0, 3, 2]
    fresh = keys(2)
    policy.insert(fresh, [0, 1])
    # inserted into the second list, which lowers the target to 0
    policy.insert(again, [2, 3])
    assert {key for key, _ in policy.evict(2)} == set(fresh)


@pytest.mark.parametrize(("used_again", "limit"), [(False, 4), (True, 8)])
def test_evict_key_is_remembered_for_bounded_number_of_evictions(
    keys: MakeKeys,
    used_again: bool,
    limit: int,
) -> None:
    for evictions, remembered in ((limit - 1, True), (limit, False)):
        policy = ARCCachePolicy(4, [0] * 4)
        returning, *others = keys(1 + evictions)
        for key in (returning, *others):
            policy.insert([key], [0])
            policy.touch([key] if used_again else [])
            assert policy.evict(1) == [(key, 0)]
        policy.insert([returning], [0])
        fresh = keys(2)
        policy.insert(fresh, [1, 2])
        assert policy.evict(1) == [(fresh[1], 2) if remembered else (returning, 0)]


def test_clear_evicted_keys_are_forgotten(keys: MakeKeys) -> None:
    policy = ARCCachePolicy(4, [0] * 4)
    first = keys(2)
    policy.insert(first, [0, 1])
    policy.evict(2)
    policy.clear()
    policy.insert(first, [0, 1])
    policy.insert(keys(2), [2, 3])
    assert policy.evict(1) == [(first[1], 1)]
