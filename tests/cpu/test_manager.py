"""Managers of the CPU tier: allocation, protection, eviction and events of rows, alone and against
a model."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable

import numpy as np
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from persistkv.base import OffloadingEvent, OffloadKey, ReqContext
from persistkv.cpu.manager import (
    CPULoadStoreSpec,
    CPUOffloadingManager,
    CPUPrimaryTierOffloadingManager,
)
from persistkv.cpu.shared_offload_region import SharedOffloadRegion
from persistkv.errors import RegionError

MakeKeys = Callable[[int], list[OffloadKey]]


@pytest.fixture(params=["lru", "arc"])
def manager(request: pytest.FixtureRequest) -> CPUOffloadingManager:
    return CPUOffloadingManager(4, request.param, enable_events=True)


def store(
    manager: CPUOffloadingManager,
    keys: list[OffloadKey],
    context: ReqContext,
) -> list[OffloadKey]:
    """Store blocks that must fit; return the evicted keys."""
    output = manager.prepare_store(keys, context)
    assert output is not None
    manager.complete_store(output.keys_to_store, context)
    return output.evicted_keys


def test_manager_unfinished_store_is_not_readable_until_completed(
    manager: CPUOffloadingManager,
    keys: MakeKeys,
    context: ReqContext,
) -> None:
    (key,) = keys(1)
    assert manager.lookup(key, context) is False
    output = manager.prepare_store([key], context)
    assert output is not None
    assert manager.lookup(key, context) is None
    assert not manager.is_ready(key)
    with pytest.raises(KeyError, match="being written"):
        manager.prepare_load([key], context)
    manager.complete_store([key], context)
    assert manager.lookup(key, context) is True
    assert manager.is_ready(key)
    spec = manager.prepare_load([key], context)
    assert isinstance(spec, CPULoadStoreSpec)
    assert isinstance(output.store_spec, CPULoadStoreSpec)
    assert (
        spec.block_ids.tolist()
        == output.store_spec.block_ids.tolist()
        == [manager.get_block_id(key, context)]
    )


def test_prepare_store_held_or_repeated_keys_are_skipped(
    manager: CPUOffloadingManager,
    keys: MakeKeys,
    context: ReqContext,
) -> None:
    first, second, third = keys(3)
    store(manager, [first], context)
    output = manager.prepare_store([third, first, second, third], context)
    assert output is not None
    assert output.keys_to_store == [third, second]
    assert isinstance(output.store_spec, CPULoadStoreSpec)
    assert len(set(output.store_spec.block_ids.tolist())) == 2
    again = manager.prepare_store([second, first], context)
    assert again is not None
    assert (again.keys_to_store, again.evicted_keys) == ([], [])


def test_prepare_store_too_few_evictable_rows_evicts_nothing(
    manager: CPUOffloadingManager,
    keys: MakeKeys,
    context: ReqContext,
) -> None:
    held = keys(4)
    store(manager, held, context)
    manager.prepare_load(held[:2], context)
    assert manager.num_free_or_evictable() == 2
    assert manager.prepare_store(keys(3), context) is None
    assert manager.prepare_store(keys(5), context) is None
    assert all(manager.is_ready(key) for key in held)
    assert set(store(manager, keys(2), context)) == set(held[2:])


def test_prepare_store_held_key_in_batch_is_not_evicted(
    manager: CPUOffloadingManager,
    keys: MakeKeys,
    context: ReqContext,
) -> None:
    held = keys(4)
    store(manager, held, context)
    assert manager.prepare_store([*held[2:], *keys(3)], context) is None
    assert set(store(manager, [*held[2:], *keys(2)], context)) == set(held[:2])
    assert all(manager.is_ready(key) for key in held[2:])


def test_complete_load_block_read_twice_stays_protected_until_last(
    manager: CPUOffloadingManager,
    keys: MakeKeys,
    context: ReqContext,
) -> None:
    held = keys(4)
    store(manager, held, context)
    manager.prepare_load([held[0], held[0], held[1]], context)
    manager.complete_load([held[0]], context)
    assert manager.num_free_or_evictable() == 2
    manager.complete_load([held[0], held[1]], context)
    assert manager.num_free_or_evictable() == 4
    with pytest.raises(KeyError, match="not being read"):
        manager.complete_load([held[1]], context)
    with pytest.raises(KeyError, match="not being read"):
        manager.complete_load([held[2], *held[1:2]], context)
    assert manager.num_free_or_evictable() == 4


def test_manager_wrong_key_raises_and_changes_nothing(
    manager: CPUOffloadingManager,
    keys: MakeKeys,
    context: ReqContext,
) -> None:
    held, writing = keys(2), keys(1)
    store(manager, held, context)
    manager.prepare_store(writing, context)
    with pytest.raises(KeyError, match="not held"):
        manager.complete_store([*writing, *keys(1)], context)
    assert manager.lookup(writing[0], context) is None
    manager.complete_store(writing, context, success=False)
    with pytest.raises(KeyError, match="not held"):
        manager.prepare_load([held[0], *keys(1)], context)
    manager.prepare_load([held[0]], context)
    with pytest.raises(KeyError, match="not being read"):
        manager.complete_load([held[0], held[1]], context)
    manager.complete_load([held[0]], context)
    assert manager.num_free_or_evictable() == 4


@pytest.mark.parametrize("success", [True, False])
def test_complete_store_readable_keys_are_ignored(
    manager: CPUOffloadingManager,
    keys: MakeKeys,
    context: ReqContext,
    success: bool,
) -> None:
    idle, read, writing = keys(1), keys(1), keys(1)
    store(manager, idle + read, context)
    manager.prepare_load(read, context)
    manager.prepare_store(writing, context)
    manager.take_events()
    manager.complete_store(idle + writing + read + writing, context, success)
    assert [manager.lookup(key, context) for key in idle + read + writing] == [
        True,
        True,
        success,
    ]
    assert [event.keys for event in manager.take_events()] == (
        [writing] if success else []
    )
    assert manager.num_free_or_evictable() == 3, (
        "only the block that is being read is protected"
    )
    manager.complete_load(read, context)
    assert manager.num_free_or_evictable() == 4


def test_complete_store_failed_drops_blocks_without_events(
    manager: CPUOffloadingManager,
    keys: MakeKeys,
    context: ReqContext,
) -> None:
    held, failing = keys(2), keys(2)
    store(manager, held, context)
    list(manager.take_events())
    manager.prepare_store(failing, context)
    manager.complete_store(failing, context, success=False)
    assert [manager.lookup(key, context) for key in failing] == [False, False]
    assert manager.take_events() == []
    assert manager.num_free_or_evictable() == 4
    assert store(manager, failing, context) == []


def test_touch_prefix_and_suffix_evicts_suffix_first(
    manager: CPUOffloadingManager,
    keys: MakeKeys,
    context: ReqContext,
) -> None:
    prefix, suffix = keys(2), keys(2)
    store(manager, prefix, context)
    store(manager, suffix, context)
    manager.touch(prefix + suffix, context)
    assert store(manager, keys(1), context) == [suffix[1]]
    assert store(manager, keys(1), context)[0] != prefix[0]
    assert manager.is_ready(prefix[0])


def test_complete_store_after_touch_keeps_suffix_first_to_evict(
    keys: MakeKeys,
    context: ReqContext,
) -> None:
    manager = CPUOffloadingManager(3)
    prefix, suffix = keys(1), keys(1)
    store(manager, prefix, context)
    manager.prepare_store(suffix, context)
    manager.touch(prefix + suffix, context)
    manager.complete_store(suffix, context)
    assert store(manager, keys(2), context) == suffix


def test_complete_store_after_touch_counts_use_of_block_being_written(
    keys: MakeKeys,
    context: ReqContext,
) -> None:
    manager = CPUOffloadingManager(2)
    (written,), (other,) = keys(1), keys(1)
    manager.prepare_store([written], context)
    store(manager, [other], context)
    manager.touch([written], context)
    manager.complete_store([written], context)
    assert store(manager, keys(1), context) == [other]


def test_prepare_load_without_touch_keeps_eviction_order(
    keys: MakeKeys,
    context: ReqContext,
) -> None:
    """A secondary tier that reads a suffix late must not keep the suffix longer than its prefix."""
    manager = CPUOffloadingManager(2)
    old, new = keys(1), keys(1)
    store(manager, old, context)
    store(manager, new, context)
    manager.prepare_load(old, context)
    manager.complete_load(old, context)
    assert store(manager, keys(1), context) == old


def test_touch_block_that_an_eviction_skipped_makes_it_the_last_to_evict(
    keys: MakeKeys,
    context: ReqContext,
) -> None:
    manager = CPUOffloadingManager(3)
    read, second, third = keys(1), keys(1), keys(1)
    for block in (read, second, third):
        store(manager, block, context)
    manager.prepare_load(read, context)
    assert store(manager, keys(1), context) == second
    manager.touch(read, context)
    manager.complete_load(read, context)
    assert store(manager, keys(1), context) == third


def test_prepare_store_blocks_that_evictions_skipped_are_evicted_by_last_use(
    keys: MakeKeys,
    context: ReqContext,
) -> None:
    manager = CPUOffloadingManager(3)
    first, second, third = keys(1), keys(1), keys(1)
    for block in (first, second, third):
        store(manager, block, context)
    manager.prepare_load(first, context)
    assert store(manager, keys(1), context) == second
    manager.complete_load(first, context)
    manager.touch(first, context)
    manager.prepare_load(third + first, context)
    # both are skipped again, the one that was used later as the second one
    store(manager, keys(1), context)
    store(manager, keys(1), context)
    manager.complete_load(third + first, context)
    assert store(manager, keys(1), context) == third


def test_take_events_store_and_eviction_are_returned_once(
    manager: CPUOffloadingManager,
    keys: MakeKeys,
    context: ReqContext,
) -> None:
    held = keys(4)
    store(manager, held, context)
    evicted = store(manager, keys(1), context)
    stored, removed, _ = manager.take_events()
    assert stored == OffloadingEvent(held, "CPU", removed=False)
    assert removed == OffloadingEvent(evicted, "CPU", removed=True)
    assert manager.take_events() == []


def test_take_events_not_enabled_returns_nothing(
    keys: MakeKeys,
    context: ReqContext,
) -> None:
    manager = CPUOffloadingManager(1)
    store(manager, keys(1), context)
    assert manager.take_events() == []


def test_reset_cache_rows_in_use_miss_at_once_and_free_on_completion(
    manager: CPUOffloadingManager,
    keys: MakeKeys,
    context: ReqContext,
) -> None:
    read, written, idle = keys(1), keys(1), keys(1)
    store(manager, read + idle, context)
    manager.prepare_load(read * 2, context)
    manager.prepare_store(written, context)
    list(manager.take_events())
    manager.reset_cache()
    assert [manager.lookup(key, context) for key in read + written + idle] == [
        False
    ] * 3
    (event,) = manager.take_events()
    assert (set(event.keys), event.removed) == ({*read, *idle}, True)
    assert manager.num_free_or_evictable() == 2
    manager.complete_load(read, context)
    assert manager.num_free_or_evictable() == 2
    manager.complete_load(read, context)
    manager.complete_store(written, context)
    assert manager.num_free_or_evictable() == 4
    assert [manager.lookup(key, context) for key in read + written] == [False] * 2
    assert manager.take_events() == []


def test_prepare_store_key_in_use_since_before_reset_is_skipped(
    manager: CPUOffloadingManager,
    keys: MakeKeys,
    context: ReqContext,
) -> None:
    written, other = keys(1), keys(1)
    manager.prepare_store(written, context)
    manager.reset_cache()
    output = manager.prepare_store(written + other, context)
    assert output is not None
    assert output.keys_to_store == other
    manager.complete_store(written + other, context)
    assert [manager.lookup(key, context) for key in written + other] == [False, True]
    store(manager, written, context)
    assert manager.is_ready(written[0])


def test_reset_cache_wrong_completions_afterwards_raise(
    manager: CPUOffloadingManager,
    keys: MakeKeys,
    context: ReqContext,
) -> None:
    read, written = keys(1), keys(1)
    store(manager, read, context)
    manager.prepare_load(read, context)
    manager.prepare_store(written, context)
    manager.reset_cache()
    for wrong in (read * 2, written):
        with pytest.raises(KeyError):
            manager.complete_load(wrong, context)
    with pytest.raises(KeyError):
        manager.complete_store(read, context)
    assert manager.num_free_or_evictable() == 2
    manager.complete_load(read, context)
    manager.complete_store(written, context, success=False)
    assert manager.num_free_or_evictable() == 4


KEYS = [OffloadKey(bytes([number])) for number in range(12)]
CONTEXT = ReqContext("model")
some_keys = st.lists(st.sampled_from(KEYS), max_size=5)


class ManagerMachine(RuleBasedStateMachine):
    """Random calls of the manager, compared with sets and counters: owners of rows, and rows that
    can be evicted."""

    policy = "lru"
    num_blocks = 6

    def __init__(self) -> None:
        super().__init__()
        self.manager = CPUOffloadingManager(self.num_blocks, self.policy)
        self.ready: dict[OffloadKey, int] = {}
        self.writing: dict[OffloadKey, int] = {}
        self.reads: Counter[OffloadKey] = Counter()
        # row, uses left: -1 for a write
        self.earlier: dict[OffloadKey, tuple[int, int]] = {}
        self.order: list[OffloadKey] = []  # LRU, coldest first

    def evictable(self) -> int:
        return sum(not self.reads[key] for key in self.ready)

    def free(self) -> int:
        return self.num_blocks - len(self.ready) - len(self.writing) - len(self.earlier)

    def use(self, keys: list[OffloadKey]) -> None:
        for key in reversed(keys):
            if key in self.order:
                self.order.remove(key)
                self.order.append(key)

    @rule(keys=some_keys)
    def prepare_store(self, keys: list[OffloadKey]) -> None:
        held = self.ready.keys() | self.writing.keys()
        wanted = [
            key
            for key in dict.fromkeys(keys)
            if key not in held and key not in self.earlier
        ]
        spared = {key for key in keys if key in self.ready and not self.reads[key]}
        missing = len(wanted) - self.free()
        output = self.manager.prepare_store(keys, CONTEXT)
        if missing > self.evictable() - len(spared):
            assert output is None or not wanted
            return
        assert output is not None
        assert isinstance(output.store_spec, CPULoadStoreSpec)
        assert output.keys_to_store == wanted
        assert len(output.evicted_keys) == max(0, missing)
        for key in output.evicted_keys:
            assert key in self.ready
            assert not self.reads[key]
            assert key not in spared
            del self.ready[key]
        if self.policy == "lru":
            candidates = [
                key
                for key in self.order
                if key in self.ready or key in output.evicted_keys
            ]
            candidates = [
                key for key in candidates if not self.reads[key] and key not in spared
            ]
            assert output.evicted_keys == candidates[: len(output.evicted_keys)]
        self.order = [
            key for key in self.order if key not in output.evicted_keys
        ] + wanted[::-1]
        self.writing.update(
            zip(wanted, output.store_spec.block_ids.tolist(), strict=True)
        )

    @rule(keys=some_keys, success=st.booleans())
    def complete_store(self, keys: list[OffloadKey], success: bool) -> None:
        writing = [
            key
            for key in keys
            if key in self.writing or self.earlier.get(key, (0, 0))[1] == -1
        ]
        self.manager.complete_store(
            [key for key in keys if key in writing or key in self.ready],
            CONTEXT,
            success,
        )
        for key in set(writing):
            if key in self.earlier:
                del self.earlier[key]
            elif success:
                self.ready[key] = self.writing.pop(key)
            else:
                del self.writing[key]
                self.order.remove(key)

    @rule(keys=some_keys)
    def prepare_load(self, keys: list[OffloadKey]) -> None:
        readable = [key for key in keys if key in self.ready]
        spec = self.manager.prepare_load(readable, CONTEXT)
        assert spec.block_ids.tolist() == [self.ready[key] for key in readable]
        self.reads.update(readable)

    @rule(keys=some_keys)
    def complete_load(self, keys: list[OffloadKey]) -> None:
        left = self.reads + Counter(
            {key: uses for key, (_, uses) in self.earlier.items() if uses > 0}
        )
        ending = []
        for key in keys:
            if left[key]:
                left[key] -= 1
                ending.append(key)
        self.manager.complete_load(ending, CONTEXT)
        for key in ending:
            if key in self.earlier:
                row, uses = self.earlier.pop(key)
                if uses > 1:
                    self.earlier[key] = (row, uses - 1)
            else:
                self.reads[key] -= 1

    @rule(keys=some_keys)
    def touch(self, keys: list[OffloadKey]) -> None:
        self.manager.touch(keys, CONTEXT)
        self.use(keys)

    @precondition(lambda self: len(self.order) > 3)
    @rule()
    def reset(self) -> None:
        self.manager.reset_cache()
        self.earlier.update({key: (row, -1) for key, row in self.writing.items()})
        self.earlier.update(
            {
                key: (row, self.reads[key])
                for key, row in self.ready.items()
                if self.reads[key]
            }
        )
        self.ready, self.writing, self.order = {}, {}, []
        self.reads.clear()

    @invariant()
    def lookups_agree(self) -> None:
        for key in KEYS:
            expected = (
                True if key in self.ready else None if key in self.writing else False
            )
            assert self.manager.lookup(key, CONTEXT) is expected
            assert self.manager.is_ready(key) is (expected is True)

    @invariant()
    def rows_have_one_owner(self) -> None:
        rows = [
            *self.ready.values(),
            *self.writing.values(),
            *(row for row, _ in self.earlier.values()),
        ]
        assert len(rows) == len(set(rows))
        assert all(0 <= row < self.num_blocks for row in rows)
        assert self.manager.num_free_or_evictable() == self.free() + self.evictable()


class ARCManagerMachine(ManagerMachine):
    policy = "arc"


LIMITS = settings(max_examples=30, stateful_step_count=60, deadline=None)
TestLRUManager = ManagerMachine.TestCase
TestLRUManager.settings = LIMITS
TestARCManager = ARCManagerMachine.TestCase
TestARCManager.settings = LIMITS


# Methods of the primary tier for other tiers


@pytest.fixture
def region(shared_memory: str) -> SharedOffloadRegion:
    return SharedOffloadRegion("engine", 4, None, 1, 4096, directory=shared_memory)


def test_primary_tier_written_row_is_read_through_view(
    region: SharedOffloadRegion,
    keys: MakeKeys,
    context: ReqContext,
) -> None:
    manager = CPUPrimaryTierOffloadingManager(region)
    held = keys(2)
    output = manager.prepare_write(held, context)
    assert output is not None
    assert isinstance(output.store_spec, CPULoadStoreSpec)
    view = manager.get_kv_memoryview()
    assert manager.get_kv_memoryview() is view
    np.asarray(view)[output.store_spec.block_ids[1]] = 3
    manager.complete_write(held, context)
    row = manager.prepare_read(held[1:], context).block_ids[0]
    assert row == manager.get_block_id(held[1], context)
    assert view[row, 4095] == 3
    manager.complete_read(held[1:], context)
    with pytest.raises(KeyError, match="not held"):
        manager.get_block_id(keys(1)[0], context)
    manager.shutdown()


def test_primary_tier_shutdown_twice_releases_view_and_region(
    region: SharedOffloadRegion,
) -> None:
    manager = CPUPrimaryTierOffloadingManager(region)
    view = manager.get_kv_memoryview()
    manager.shutdown()
    manager.shutdown()
    with pytest.raises(ValueError, match="released"):
        view[0, 0]
    with pytest.raises(RegionError, match="cleaned up"):
        manager.get_kv_memoryview()


def test_primary_tier_shutdown_view_in_use_warns_and_keeps_memory(
    region: SharedOffloadRegion,
    caplog: pytest.LogCaptureFixture,
) -> None:
    manager = CPUPrimaryTierOffloadingManager(region)
    array = np.asarray(manager.get_kv_memoryview())
    manager.shutdown()
    assert "still in use" in caplog.text
    assert array.sum() == 0
