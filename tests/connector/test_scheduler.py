from __future__ import annotations

import time
from collections.abc import Callable, Sequence

import pytest

from persistkv.base import (
    GPULoadStoreSpec,
    OffloadKey,
    OffloadPolicy,
    ReqContext,
    Retention,
    TransferResult,
)
from persistkv.connector.common import KVCacheGroupSpec
from persistkv.cpu.manager import CPUOffloadingManager
from persistkv.cpu.reuse_manager import FilterReusedOffloadingManager
from persistkv.errors import ConfigurationError
from tests.connector.conftest import (
    Fill,
    Finish,
    MakeKeys,
    WatchedManager,
    WatchedScheduler,
    load_specs,
    store_specs,
)

CONTEXT = ReqContext("request")


def groups(*block_sizes: int) -> list[KVCacheGroupSpec]:
    return [KVCacheGroupSpec(size) for size in block_sizes]


@pytest.fixture
def scheduler(make_manager: type[WatchedManager]) -> WatchedScheduler:
    return WatchedScheduler(make_manager(8), groups(4))


def begin(
    scheduler: WatchedScheduler,
    req_id: str,
    keys: Sequence[OffloadKey],
    num_tokens: int,
    group: int = 0,
) -> None:
    scheduler.on_new_request(req_id)
    scheduler.update_keys(req_id, group, keys, num_tokens)


class TestSchedulerMatch:
    def test_whole_prompt_stored_leaves_one_token_to_compute(
        self,
        scheduler: WatchedScheduler,
        make_keys: MakeKeys,
        fill: Fill,
    ) -> None:
        keys = make_keys(3)
        fill(scheduler, "first", keys, 4)
        begin(scheduler, "whole", keys, 12)
        begin(scheduler, "longer", keys, 13)
        assert scheduler.get_num_new_matched_tokens("whole", 0) == 8
        assert scheduler.get_num_new_matched_tokens("longer", 0) == 12

    def test_tokens_on_device_are_not_looked_up_or_counted(
        self,
        scheduler: WatchedScheduler,
        make_keys: MakeKeys,
        fill: Fill,
    ) -> None:
        keys = make_keys(4)
        fill(scheduler, "first", keys, 4)
        begin(scheduler, "second", keys, 17)
        assert scheduler.get_num_new_matched_tokens("second", 8) == 8
        assert scheduler.manager.looked_up == keys[2:]

    def test_missing_block_ends_match(
        self,
        scheduler: WatchedScheduler,
        make_keys: MakeKeys,
        fill: Fill,
    ) -> None:
        fill(scheduler, "first", make_keys(2), 4)
        fill(scheduler, "other", make_keys(1, start=3), 4)
        begin(scheduler, "second", make_keys(4), 17)
        assert scheduler.get_num_new_matched_tokens("second", 0) == 8

    def test_pending_blocks_return_none_and_rest_is_probed(
        self,
        scheduler: WatchedScheduler,
        make_keys: MakeKeys,
        fill: Fill,
    ) -> None:
        keys = make_keys(4)
        fill(scheduler, "first", keys, 4)
        scheduler.manager.late = {keys[1], keys[2]}
        begin(scheduler, "second", keys, 17)
        assert scheduler.get_num_new_matched_tokens("second", 0) is None
        assert scheduler.manager.looked_up == keys
        assert not scheduler.manager.touched
        scheduler.manager.late = set()
        assert scheduler.get_num_new_matched_tokens("second", 0) == 16
        assert scheduler.manager.touched == [keys]

    def test_give_up_waiting_matches_only_ready_blocks(
        self,
        scheduler: WatchedScheduler,
        make_keys: MakeKeys,
        fill: Fill,
    ) -> None:
        keys = make_keys(4)
        fill(scheduler, "first", keys, 4)
        scheduler.manager.late = {keys[2]}
        begin(scheduler, "second", keys, 17)
        assert scheduler.get_num_new_matched_tokens("second", 0) is None
        scheduler.give_up_waiting("second")
        assert scheduler.get_num_new_matched_tokens("second", 0) == 8
        assert scheduler.stats.late_lookups == 1

    def test_pending_block_ready_later_is_counted_as_promoted(
        self,
        scheduler: WatchedScheduler,
        make_keys: MakeKeys,
        fill: Fill,
    ) -> None:
        keys = make_keys(4)
        fill(scheduler, "first", keys, 4)
        scheduler.manager.late = {keys[1]}
        begin(scheduler, "second", keys, 17)
        assert scheduler.get_num_new_matched_tokens("second", 0) is None
        scheduler.manager.late = set()
        assert scheduler.get_num_new_matched_tokens("second", 0) == 16
        scheduler.update_state_after_alloc("second", [[0, 1, 2, 3]], 16)
        assert scheduler.num_promoted_tokens("second") == 4

    def test_two_groups_match_only_common_prefix(
        self,
        make_manager: type[WatchedManager],
        make_keys: MakeKeys,
        finish: Finish,
    ) -> None:
        scheduler = WatchedScheduler(make_manager(8), groups(4, 8))
        small, large = make_keys(4), make_keys(2, group=1)
        begin(scheduler, "first", small, 16)
        scheduler.update_keys("first", 1, large[:1], 16)
        scheduler.update_computed_tokens("first", 16, [[0, 1, 2, 3], [0, 1]])
        scheduler.update_connector_output(finish(scheduler.build_connector_meta()))
        begin(scheduler, "second", small, 17)
        scheduler.update_keys("second", 1, large, 17)
        assert scheduler.get_num_new_matched_tokens("second", 0) == 8

    def test_empty_or_unknown_prompt_matches_nothing(
        self,
        scheduler: WatchedScheduler,
        make_keys: MakeKeys,
    ) -> None:
        scheduler.on_new_request("empty")
        assert scheduler.get_num_new_matched_tokens("empty", 0) == 0
        begin(scheduler, "unknown", make_keys(2), 9)
        assert scheduler.get_num_new_matched_tokens("unknown", 0) == 0


class TestSchedulerLoad:
    def test_prefix_on_device_lists_later_rows_and_blocks_in_order(
        self,
        scheduler: WatchedScheduler,
        make_keys: MakeKeys,
        fill: Fill,
        finish: Finish,
    ) -> None:
        keys = make_keys(4)
        fill(scheduler, "first", keys, 4)
        begin(scheduler, "second", keys, 17)
        assert scheduler.get_num_new_matched_tokens("second", 4) == 12
        assert scheduler.update_state_after_alloc("second", [[9, 7, 5, 3]], 12) == 12
        metadata = scheduler.build_connector_meta()
        (load,) = metadata.loads
        source, target = load_specs(load)
        assert source.block_ids.tolist() == [
            scheduler.manager.get_block_id(key, CONTEXT) for key in keys[1:]
        ]
        assert (
            target.block_ids.tolist(),
            target.group_sizes,
            target.block_indices,
        ) == ([7, 5, 3], (3,), (1,))
        output = scheduler.update_connector_output(finish(metadata))
        assert output.loads["second"].success
        assert output.loads["second"].num_tokens == 12
        assert scheduler.stats.loaded_blocks == 3

    def test_unfinished_load_protects_its_rows_from_eviction(
        self,
        scheduler: WatchedScheduler,
        make_keys: MakeKeys,
        fill: Fill,
        finish: Finish,
    ) -> None:
        keys = make_keys(8)
        fill(scheduler, "first", keys, 4)
        begin(scheduler, "second", keys, 33)
        scheduler.get_num_new_matched_tokens("second", 0)
        scheduler.update_state_after_alloc("second", [list(range(8))], 32)
        fill(scheduler, "other", make_keys(8, chain="b"), 4)
        assert scheduler.stats.dropped_blocks == 8
        scheduler.update_connector_output(finish(scheduler.build_connector_meta()))
        fill(scheduler, "another", make_keys(8, chain="c"), 4)
        assert scheduler.stats.dropped_blocks == 8

    def test_prefix_ending_inside_row_loads_rest_of_row(
        self,
        make_manager: type[WatchedManager],
        make_keys: MakeKeys,
        fill: Fill,
    ) -> None:
        scheduler = WatchedScheduler(make_manager(8), groups(4), block_size_factor=4)
        keys = make_keys(2)
        fill(scheduler, "first", keys, 4, factor=4)
        begin(scheduler, "second", keys, 33)
        assert scheduler.get_num_new_matched_tokens("second", 24) == 8
        scheduler.update_state_after_alloc("second", [list(range(10, 18))], 8)
        (load,) = scheduler.build_connector_meta().loads
        source, target = load_specs(load)
        assert source.block_ids.tolist() == [
            scheduler.manager.get_block_id(keys[1], CONTEXT)
        ]
        assert (target.block_ids.tolist(), target.block_indices) == ([16, 17], (6,))

    def test_update_state_after_alloc_evicted_blocks_loads_nothing(
        self,
        scheduler: WatchedScheduler,
        make_keys: MakeKeys,
        fill: Fill,
    ) -> None:
        keys = make_keys(4)
        fill(scheduler, "first", keys, 4)
        begin(scheduler, "second", keys, 17)
        assert scheduler.get_num_new_matched_tokens("second", 0) == 16
        fill(scheduler, "other", make_keys(6, chain="b"), 4)
        assert scheduler.update_state_after_alloc("second", [[0, 1, 2, 3]], 16) == 0
        assert not scheduler.build_connector_meta().loads
        assert scheduler.stats.failed_loads == 1

    def test_failed_load_offers_recomputed_blocks_for_store(
        self,
        scheduler: WatchedScheduler,
        make_keys: MakeKeys,
        fill: Fill,
        finish: Finish,
    ) -> None:
        keys = make_keys(2)
        fill(scheduler, "first", keys, 4)
        begin(scheduler, "second", keys, 9)
        scheduler.get_num_new_matched_tokens("second", 0)
        scheduler.update_state_after_alloc("second", [[0, 1]], 8)
        output = scheduler.update_connector_output(
            finish(scheduler.build_connector_meta(), success=False)
        )
        assert not output.loads["second"].success
        assert scheduler.stats.failed_loads == 1
        scheduler.manager.offered.clear()
        scheduler.update_computed_tokens("second", 8, [[0, 1]])
        scheduler.build_connector_meta()
        assert scheduler.manager.offered == [keys]

    @pytest.mark.parametrize(
        ("tables", "tokens"), [([[0]], 8), ([[0, 1]], 6), ([[0], [1]], 4), ([], 4)]
    )
    def test_device_blocks_do_not_fit_tokens_raises(
        self,
        scheduler: WatchedScheduler,
        make_keys: MakeKeys,
        tables: list[list[int]],
        tokens: int,
    ) -> None:
        begin(scheduler, "request", make_keys(2), 9)
        with pytest.raises(ValueError, match="block"):
            scheduler.update_state_after_alloc("request", tables, tokens)


class TestSchedulerStore:
    def test_filled_blocks_are_offered_once(
        self,
        scheduler: WatchedScheduler,
        make_keys: MakeKeys,
        finish: Finish,
    ) -> None:
        keys = make_keys(3)
        begin(scheduler, "request", keys[:2], 9)
        scheduler.update_computed_tokens("request", 7, [[5, 6]])
        first = scheduler.build_connector_meta()
        scheduler.update_keys("request", 0, keys[2:], 12)
        scheduler.update_computed_tokens("request", 12, [[5, 6, 4]])
        second = scheduler.build_connector_meta()
        assert scheduler.manager.offered == [keys[:1], keys[1:]]
        sources = [store_specs(job)[0] for job in (*first.stores, *second.stores)]
        assert [
            (source.block_ids.tolist(), source.block_indices) for source in sources
        ] == [
            ([5], (0,)),
            ([6, 4], (1,)),
        ]
        assert all(isinstance(source, GPULoadStoreSpec) for source in sources)
        assert not scheduler.build_connector_meta().stores

    def test_held_blocks_are_not_copied(
        self,
        make_manager: type[WatchedManager],
        make_keys: MakeKeys,
        fill: Fill,
    ) -> None:
        scheduler = WatchedScheduler(make_manager(8), groups(4), block_size_factor=2)
        keys = make_keys(4)
        fill(scheduler, "first", keys[1:2], 4, factor=2)
        begin(scheduler, "second", keys, 32)
        scheduler.update_computed_tokens("second", 32, [list(range(10, 18))])
        (store,) = scheduler.build_connector_meta().stores
        source, target = store_specs(store)
        assert source.block_ids.tolist() == [10, 11, 14, 15, 16, 17]
        assert target.block_ids.tolist() == [
            scheduler.manager.get_block_id(keys[index], CONTEXT) for index in (0, 2, 3)
        ]

    @pytest.mark.parametrize(
        ("policy", "offered"),
        [
            (OffloadPolicy.BLOCK_LEVEL, slice(3, 4)),
            (OffloadPolicy.REQUEST_LEVEL, slice(0, 4)),
        ],
    )
    def test_prefix_hits_are_offered_only_by_request_level_policy(
        self,
        make_manager: type[WatchedManager],
        make_keys: MakeKeys,
        fill: Fill,
        finish: Finish,
        policy: OffloadPolicy,
        offered: slice,
    ) -> None:
        scheduler = WatchedScheduler(make_manager(8, policy), groups(4))
        keys = make_keys(4)
        fill(scheduler, "first", keys[:3], 4)
        scheduler.manager.offered.clear()
        begin(scheduler, "second", keys, 17)
        assert scheduler.get_num_new_matched_tokens("second", 4) == 8
        scheduler.update_state_after_alloc("second", [[0, 1, 2]], 8)
        scheduler.update_connector_output(finish(scheduler.build_connector_meta()))
        scheduler.update_computed_tokens("second", 17, [[0, 1, 2, 3]])
        scheduler.build_connector_meta()
        assert scheduler.manager.offered == [keys[offered]]

    def test_batch_larger_than_tier_stores_first_blocks(
        self,
        scheduler: WatchedScheduler,
        make_keys: MakeKeys,
        finish: Finish,
    ) -> None:
        keys = make_keys(20)
        begin(scheduler, "request", keys, 80)
        scheduler.update_computed_tokens("request", 80, [list(range(20))])
        metadata = scheduler.build_connector_meta()
        assert store_specs(metadata.stores[0])[0].block_ids.tolist() == [0, 1, 2, 3, 4]
        scheduler.update_connector_output(finish(metadata))
        assert (scheduler.stats.stored_blocks, scheduler.stats.dropped_blocks) == (
            5,
            15,
        )
        assert not scheduler.build_connector_meta().stores

    def test_request_level_without_room_offers_rest_again(
        self,
        make_manager: type[WatchedManager],
        make_keys: MakeKeys,
        finish: Finish,
    ) -> None:
        scheduler = WatchedScheduler(
            make_manager(8, OffloadPolicy.REQUEST_LEVEL), groups(4)
        )
        keys = make_keys(20)
        begin(scheduler, "request", keys, 80)
        scheduler.update_computed_tokens("request", 80, [list(range(20))])
        first = scheduler.build_connector_meta()
        assert store_specs(first.stores[0])[0].block_ids.tolist() == [0, 1, 2, 3, 4]
        assert not scheduler.build_connector_meta().stores, (
            "the blocks of a running request may have moved"
        )
        scheduler.update_connector_output(finish(first))
        scheduler.request_finished("request")
        sources: list[int] = []
        for _ in range(10):
            metadata = scheduler.build_connector_meta()
            for job in metadata.stores:
                sources += store_specs(job)[0].block_ids.tolist()
            assert not scheduler.manager.finished
            output = scheduler.update_connector_output(finish(metadata))
            if output.released:
                break
        assert sources == list(range(5, 20))
        assert (scheduler.stats.stored_blocks, scheduler.stats.dropped_blocks) == (
            20,
            0,
        )
        assert scheduler.manager.finished == ["request"]

    def test_request_level_two_groups_without_room_store_all_blocks(
        self,
        make_manager: type[WatchedManager],
        make_keys: MakeKeys,
        finish: Finish,
    ) -> None:
        scheduler = WatchedScheduler(
            make_manager(5, OffloadPolicy.REQUEST_LEVEL), groups(4, 8)
        )
        begin(scheduler, "request", make_keys(8), 32)
        scheduler.update_keys("request", 1, make_keys(4, group=1), 32)
        scheduler.update_computed_tokens(
            "request", 32, [list(range(8)), list(range(10, 14))]
        )
        scheduler.request_finished("request")
        sources: list[int] = []
        released: list[str] = []
        while not released:
            metadata = scheduler.build_connector_meta()
            for job in metadata.stores:
                sources += store_specs(job)[0].block_ids.tolist()
            released = scheduler.update_connector_output(finish(metadata)).released
        assert sorted(sources) == [*range(8), *range(10, 14)]
        assert scheduler.stats.dropped_blocks == 0

    def test_request_level_without_room_after_end_drops_rest_at_deadline(
        self,
        make_manager: type[WatchedManager],
        make_keys: MakeKeys,
    ) -> None:
        scheduler = WatchedScheduler(
            make_manager(4, OffloadPolicy.REQUEST_LEVEL), groups(4), store_wait_s=0.1
        )
        scheduler.manager.prepare_store(make_keys(4, chain="b"), CONTEXT)
        begin(scheduler, "request", make_keys(6), 24)
        scheduler.update_computed_tokens("request", 24, [list(range(6))])
        scheduler.request_finished("request")
        assert not scheduler.build_connector_meta().stores
        assert scheduler.update_connector_output([]).released == [], (
            "its device blocks are kept"
        )
        time.sleep(0.2)
        assert not scheduler.build_connector_meta().stores
        assert scheduler.update_connector_output([]).released == ["request"]
        assert scheduler.stats.dropped_blocks == 6

    def test_request_level_without_room_and_blocks_taken_stores_no_others(
        self,
        make_manager: type[WatchedManager],
        make_keys: MakeKeys,
        finish: Finish,
    ) -> None:
        """A request that was preempted before its refused blocks found room has no device
        blocks."""
        scheduler = WatchedScheduler(
            make_manager(8, OffloadPolicy.REQUEST_LEVEL), groups(4)
        )
        begin(scheduler, "request", make_keys(20), 80)
        scheduler.update_computed_tokens("request", 80, [list(range(20))])
        scheduler.update_connector_output(finish(scheduler.build_connector_meta()))
        scheduler.update_computed_tokens("request", 0, [[]])
        assert not scheduler.build_connector_meta().stores
        scheduler.request_finished("request")
        assert not scheduler.build_connector_meta().stores
        assert scheduler.update_connector_output([]).released == ["request"]

    def test_request_level_refused_block_that_left_window_is_dropped(
        self,
        make_manager: type[WatchedManager],
        make_keys: MakeKeys,
    ) -> None:
        spec = KVCacheGroupSpec(4, sliding_window=8)
        scheduler = WatchedScheduler(
            make_manager(4, OffloadPolicy.REQUEST_LEVEL), [spec]
        )
        taken = scheduler.manager.prepare_store(make_keys(4, chain="b"), CONTEXT)
        assert taken is not None
        begin(scheduler, "request", make_keys(4), 16)
        scheduler.update_computed_tokens("request", 12, [[0, 1, 2]])
        assert not scheduler.build_connector_meta().stores
        scheduler.manager.complete_store(taken.keys_to_store, CONTEXT)
        scheduler.update_computed_tokens("request", 16, [[None, 1, 2, 3]])
        (store,) = scheduler.build_connector_meta().stores
        assert store_specs(store)[0].block_ids.tolist() == [1, 2, 3]
        assert scheduler.stats.dropped_blocks == 1

    def test_failed_store_is_not_matched_later(
        self,
        scheduler: WatchedScheduler,
        make_keys: MakeKeys,
        finish: Finish,
    ) -> None:
        keys = make_keys(2)
        begin(scheduler, "request", keys, 9)
        scheduler.update_computed_tokens("request", 8, [[0, 1]])
        scheduler.update_connector_output(
            finish(scheduler.build_connector_meta(), success=False)
        )
        assert scheduler.stats.failed_stores == 1
        begin(scheduler, "second", keys, 9)
        assert scheduler.get_num_new_matched_tokens("second", 0) == 0

    def test_two_groups_are_stored_in_one_job(
        self,
        make_manager: type[WatchedManager],
        make_keys: MakeKeys,
    ) -> None:
        scheduler = WatchedScheduler(make_manager(8), groups(4, 8))
        begin(scheduler, "request", make_keys(3), 16)
        scheduler.update_keys("request", 1, make_keys(2, group=1), 16)
        scheduler.update_computed_tokens("request", 16, [[1, 2, 3, 4], [5, 6]])
        (store,) = scheduler.build_connector_meta().stores
        source = store_specs(store)[0]
        assert (
            source.block_ids.tolist(),
            source.group_sizes,
            source.block_indices,
        ) == (
            [1, 2, 3, 5, 6],
            (3, 2),
            (0, 0),
        )


class TestSchedulerRequestFinished:
    def test_pending_store_delays_release(
        self,
        scheduler: WatchedScheduler,
        make_keys: MakeKeys,
        finish: Finish,
    ) -> None:
        begin(scheduler, "request", make_keys(2), 9)
        scheduler.update_computed_tokens("request", 8, [[0, 1]])
        scheduler.request_finished("request")
        metadata = scheduler.build_connector_meta()
        assert scheduler.update_connector_output([]).released == []
        assert scheduler.manager.finished == []
        assert scheduler.update_connector_output(finish(metadata)).released == [
            "request"
        ]
        assert scheduler.manager.finished == ["request"]

    def test_nothing_stored_releases_at_next_output(
        self,
        scheduler: WatchedScheduler,
    ) -> None:
        scheduler.on_new_request("request")
        scheduler.request_finished("request")
        scheduler.build_connector_meta()
        assert scheduler.update_connector_output([]).released == ["request"]

    def test_pending_load_delays_release(
        self,
        scheduler: WatchedScheduler,
        make_keys: MakeKeys,
        fill: Fill,
        finish: Finish,
    ) -> None:
        keys = make_keys(2)
        fill(scheduler, "first", keys, 4)
        begin(scheduler, "second", keys, 9)
        scheduler.get_num_new_matched_tokens("second", 0)
        scheduler.update_state_after_alloc("second", [[0, 1]], 8)
        scheduler.request_finished("second")
        metadata = scheduler.build_connector_meta()
        assert scheduler.update_connector_output([]).released == []
        scheduler.update_connector_output(finish(metadata))
        scheduler.build_connector_meta()
        assert scheduler.update_connector_output([]).released == ["second"]

    def test_no_device_blocks_stores_nothing_and_releases(
        self,
        scheduler: WatchedScheduler,
        make_keys: MakeKeys,
    ) -> None:
        begin(scheduler, "request", make_keys(3), 13)
        scheduler.get_num_new_matched_tokens("request", 8)
        scheduler.request_finished("request")
        assert not scheduler.build_connector_meta().stores
        assert scheduler.update_connector_output([]).released == ["request"]

    def test_request_id_in_use_is_rejected_until_finished(
        self,
        scheduler: WatchedScheduler,
    ) -> None:
        scheduler.on_new_request("request")
        with pytest.raises(ValueError, match="already exists"):
            scheduler.on_new_request("request")
        scheduler.request_finished("request")
        scheduler.build_connector_meta()
        scheduler.on_new_request("request")

    def test_take_events_calls_manager_once(self, scheduler: WatchedScheduler) -> None:
        assert scheduler.take_events() == []
        assert scheduler.manager.steps == 1


@pytest.mark.parametrize(
    ("make", "field"),
    [
        (lambda manager: WatchedScheduler(manager, []), "groups"),
        (lambda manager: WatchedScheduler(manager, groups(4), 0), "block_size_factor"),
        (lambda manager: WatchedScheduler(manager, groups(4), 1, 0), "max_load_blocks"),
        (
            lambda manager: WatchedScheduler(manager, groups(4), 1, None, -1.0),
            "store_wait_s",
        ),
        (lambda manager: groups(4, -1), "block_size"),
        (lambda manager: KVCacheGroupSpec(4, sliding_window=0), "sliding_window"),
    ],
)
def test_scheduler_invalid_number_raises_and_names_field(
    make_manager: type[WatchedManager],
    make: Callable[[WatchedManager], object],
    field: str,
) -> None:
    with pytest.raises(ConfigurationError, match=field):
        make(make_manager(1))


def test_store_threshold_second_request_stores_whole_prompt(
    make_keys: MakeKeys,
) -> None:
    """Lookups end at the first miss, and the filter also counts the later blocks."""
    manager = FilterReusedOffloadingManager(CPUOffloadingManager(8), 2, 100)
    scheduler = WatchedScheduler(manager, groups(4))
    keys = make_keys(4)
    for req_id, stored in (("first", 0), ("second", 4)):
        begin(scheduler, req_id, keys, 16)
        assert scheduler.get_num_new_matched_tokens(req_id, 0) == 0
        scheduler.update_computed_tokens(req_id, 16, [[0, 1, 2, 3]])
        scheduler.request_finished(req_id)
        stores = scheduler.build_connector_meta().stores
        assert sum(len(store_specs(job)[0].block_ids) for job in stores) == stored
        scheduler.update_connector_output(
            [TransferResult(job.job_id, True) for job in stores]
        )
    begin(scheduler, "third", keys, 17)
    assert scheduler.get_num_new_matched_tokens("third", 0) == 16


def test_on_new_request_without_store_loads_and_stores_nothing(
    make_manager: type[WatchedManager],
    make_keys: MakeKeys,
    fill: Fill,
    finish: Finish,
) -> None:
    scheduler = WatchedScheduler(
        make_manager(8, OffloadPolicy.REQUEST_LEVEL), groups(4)
    )
    keys = make_keys(3)
    fill(scheduler, "first", keys[:2], 4)
    scheduler.manager.offered.clear()
    context = scheduler.on_new_request("second", store=False)
    assert context.description is None
    scheduler.update_keys("second", 0, keys, 13)
    assert scheduler.get_num_new_matched_tokens("second", 0) == 8
    scheduler.update_state_after_alloc("second", [[0, 1]], 8)
    assert (
        scheduler.update_connector_output(finish(scheduler.build_connector_meta()))
        .loads["second"]
        .success
    )
    scheduler.update_computed_tokens("second", 12, [[0, 1, 2]])
    scheduler.request_finished("second")
    assert not scheduler.build_connector_meta().stores
    assert scheduler.update_connector_output([]).released == ["second"]
    assert scheduler.manager.offered == []


def test_on_new_request_with_retention_is_in_description(
    scheduler: WatchedScheduler,
) -> None:
    kept = Retention(pin=True, ttl_s=60.0, priority="low")
    described = [
        scheduler.on_new_request("kept", retention=kept).description,
        scheduler.on_new_request("other").description,
    ]
    assert [description and description.retention for description in described] == [
        kept,
        Retention(),
    ]
