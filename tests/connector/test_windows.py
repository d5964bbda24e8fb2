"""The scheduler with sliding-window groups: lookups, promotions, loads and stores."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import pytest

from persistkv.base import OffloadKey, OffloadPolicy, ReqContext
from persistkv.connector.common import ConnectorMetadata, KVCacheGroupSpec
from tests.connector.conftest import (
    Finish,
    MakeKeys,
    WatchedManager,
    WatchedScheduler,
    load_specs,
    store_specs,
)

MakeScheduler = Callable[..., WatchedScheduler]
Begin = Callable[..., list[list[OffloadKey]]]

CONTEXT = ReqContext("request")

BLOCK = 4
# 2 blocks before the next token
FULL, SLIDING = KVCacheGroupSpec(BLOCK), KVCacheGroupSpec(BLOCK, sliding_window=9)


@pytest.fixture
def make_scheduler(make_manager: type[WatchedManager]) -> MakeScheduler:
    def make(
        num_blocks: int = 64,
        policy: OffloadPolicy = OffloadPolicy.BLOCK_LEVEL,
        groups: Sequence[KVCacheGroupSpec] = (FULL, SLIDING),
        max_load_blocks: int | None = None,
    ) -> WatchedScheduler:
        return WatchedScheduler(
            make_manager(num_blocks, policy), groups, max_load_blocks=max_load_blocks
        )

    return make


@pytest.fixture
def begin(make_keys: MakeKeys) -> Begin:
    """Start a request whose groups have blocks of one size; return the keys of each group."""

    def run(
        scheduler: WatchedScheduler,
        req_id: str,
        num_tokens: int,
        num_groups: int = 2,
        chain: str = "a",
    ) -> list[list[OffloadKey]]:
        scheduler.on_new_request(req_id)
        chains = [
            make_keys(num_tokens // BLOCK, group, chain=chain)
            for group in range(num_groups)
        ]
        for group, keys in enumerate(chains):
            scheduler.update_keys(req_id, group, keys, num_tokens)
        return chains

    return run


@pytest.fixture
def store(begin: Begin, finish: Finish) -> Begin:
    """Compute and store a context of ``num_blocks`` blocks; return the keys of each group."""

    def run(
        scheduler: WatchedScheduler,
        req_id: str,
        num_blocks: int,
        num_groups: int = 2,
        chain: str = "a",
    ) -> list[list[OffloadKey]]:
        chains = begin(scheduler, req_id, num_blocks * BLOCK, num_groups, chain)
        scheduler.update_computed_tokens(
            req_id, num_blocks * BLOCK, [list(range(num_blocks))] * num_groups
        )
        scheduler.request_finished(req_id)
        scheduler.update_connector_output(finish(scheduler.build_connector_meta()))
        scheduler.manager.offered.clear()
        return chains

    return run


def load_all(
    scheduler: WatchedScheduler,
    req_id: str,
    local: int = 0,
) -> tuple[int, list[list[int | None]], ConnectorMetadata]:
    """Match a request and allocate the device blocks that its load needs.

    The number of a device block is its position plus 100 times its group.

    :returns: matched tokens, block table of each group, and the metadata of the step.
    """
    matched = scheduler.get_num_new_matched_tokens(req_id, local)
    assert matched is not None
    tables = [
        [
            group * 100 + position if position in needed else None
            for position in range(needed.stop)
        ]
        for group, needed in enumerate(scheduler.needed_device_blocks(req_id, matched))
    ]
    assert scheduler.update_state_after_alloc(req_id, tables, matched) == matched
    return matched, tables, scheduler.build_connector_meta()


class TestSlidingWindowMatch:
    def test_looks_up_only_blocks_in_window(
        self,
        make_scheduler: MakeScheduler,
        store: Begin,
        begin: Begin,
    ) -> None:
        scheduler = make_scheduler()
        full, sliding = store(scheduler, "first", 8)
        begin(scheduler, "second", 33)
        assert scheduler.get_num_new_matched_tokens("second", 0) == 32
        assert scheduler.manager.looked_up == [*full, sliding[7], sliding[6]]
        assert scheduler.manager.touched == [[*full, *sliding[6:]]]

    def test_missing_block_in_window_shortens_match(
        self,
        make_scheduler: MakeScheduler,
        store: Begin,
        begin: Begin,
    ) -> None:
        scheduler = make_scheduler()
        _, sliding = store(scheduler, "first", 8)
        begin(scheduler, "second", 33)
        scheduler.manager.missing.add(sliding[6])
        assert scheduler.get_num_new_matched_tokens("second", 0) == 24

    def test_pending_blocks_are_all_probed_in_one_step(
        self,
        make_scheduler: MakeScheduler,
        store: Begin,
        begin: Begin,
    ) -> None:
        scheduler = make_scheduler()
        full, sliding = store(scheduler, "first", 8)
        scheduler.manager.late = {*full[3:], *sliding}
        begin(scheduler, "second", 33)
        assert scheduler.get_num_new_matched_tokens("second", 0) is None
        asked = set(scheduler.manager.looked_up)
        assert asked == {*full, *sliding[6:]}
        scheduler.manager.late = set(sliding[:6])
        assert scheduler.get_num_new_matched_tokens("second", 0) == 32
        assert set(scheduler.manager.looked_up) == asked

    def test_pending_block_after_missing_one_does_not_delay_match(
        self,
        make_scheduler: MakeScheduler,
        store: Begin,
        begin: Begin,
    ) -> None:
        scheduler = make_scheduler()
        full, sliding = store(scheduler, "first", 8)
        scheduler.manager.late = {full[7], sliding[7]}
        scheduler.manager.missing.add(sliding[6])
        begin(scheduler, "second", 33)
        assert scheduler.get_num_new_matched_tokens("second", 0) == 24

    def test_give_up_waiting_pending_window_shortens_match(
        self,
        make_scheduler: MakeScheduler,
        store: Begin,
        begin: Begin,
    ) -> None:
        scheduler = make_scheduler()
        _, sliding = store(scheduler, "first", 8)
        scheduler.manager.late = {sliding[5]}
        begin(scheduler, "second", 29)
        assert scheduler.get_num_new_matched_tokens("second", 0) is None
        scheduler.give_up_waiting("second")
        assert scheduler.get_num_new_matched_tokens("second", 0) == 20

    def test_max_load_blocks_limits_match_and_lookups(
        self,
        make_scheduler: MakeScheduler,
        store: Begin,
        begin: Begin,
    ) -> None:
        scheduler = make_scheduler(max_load_blocks=7)
        full, sliding = store(scheduler, "first", 8)
        begin(scheduler, "second", 33)
        assert scheduler.get_num_new_matched_tokens("second", 0) == 20
        assert scheduler.manager.looked_up == [*full[:5], sliding[4], sliding[3]]

    def test_only_sliding_groups_skip_blocks_before_window(
        self,
        make_scheduler: MakeScheduler,
        store: Begin,
        begin: Begin,
    ) -> None:
        scheduler = make_scheduler(groups=(SLIDING,))
        (sliding,) = store(scheduler, "first", 8, num_groups=1)
        scheduler.manager.late = set(sliding)
        begin(scheduler, "second", 33, num_groups=1)
        assert scheduler.get_num_new_matched_tokens("second", 0) is None
        assert scheduler.manager.looked_up == [sliding[7], sliding[6]]
        scheduler.manager.late = set()
        matched, _, metadata = load_all(scheduler, "second")
        assert (matched, load_specs(metadata.loads[0])[1].block_ids.tolist()) == (
            32,
            [6, 7],
        )
        assert scheduler.num_promoted_tokens("second") == 32


class TestSlidingWindowLoad:
    def test_loads_only_blocks_in_window(
        self,
        make_scheduler: MakeScheduler,
        store: Begin,
        begin: Begin,
        finish: Finish,
    ) -> None:
        scheduler = make_scheduler()
        full, sliding = store(scheduler, "first", 8)
        begin(scheduler, "second", 33)
        matched, _, metadata = load_all(scheduler, "second")
        source, target = load_specs(metadata.loads[0])
        assert matched == 32
        assert target.block_ids.tolist() == [*range(8), 106, 107]
        assert (target.group_sizes, target.block_indices) == ((8, 2), (0, 6))
        rows = [
            scheduler.manager.get_block_id(key, CONTEXT)
            for key in (*full, *sliding[6:])
        ]
        assert source.block_ids.tolist() == rows
        assert (
            scheduler.update_connector_output(finish(metadata))
            .loads["second"]
            .num_tokens
            == 32
        )

    def test_tokens_on_device_are_not_loaded(
        self,
        make_scheduler: MakeScheduler,
        store: Begin,
        begin: Begin,
    ) -> None:
        scheduler = make_scheduler()
        store(scheduler, "first", 8)
        begin(scheduler, "second", 33)
        matched, _, metadata = load_all(scheduler, "second", local=28)
        target = load_specs(metadata.loads[0])[1]
        assert (matched, target.block_ids.tolist(), target.block_indices) == (
            4,
            [7, 107],
            (7, 7),
        )

    def test_window_starting_inside_row_loads_rest_of_row(
        self,
        make_manager: type[WatchedManager],
        make_keys: MakeKeys,
        finish: Finish,
    ) -> None:
        scheduler = WatchedScheduler(
            make_manager(16), (FULL, SLIDING), block_size_factor=4
        )
        keys = [make_keys(2, group) for group in range(2)]
        for req_id in ("first", "second"):
            scheduler.on_new_request(req_id)
            for group in range(2):
                scheduler.update_keys(req_id, group, keys[group], 33)
            if req_id == "first":
                scheduler.update_computed_tokens(req_id, 32, [list(range(8))] * 2)
                scheduler.update_connector_output(
                    finish(scheduler.build_connector_meta())
                )
        _, _, metadata = load_all(scheduler, "second")
        source, target = load_specs(metadata.loads[0])
        assert (target.group_sizes, target.block_indices) == ((8, 2), (0, 6))
        rows = [
            scheduler.manager.get_block_id(key, CONTEXT)
            for key in (*keys[0], keys[1][1])
        ]
        assert source.block_ids.tolist() == rows

    def test_tables_without_window_blocks_raise(
        self,
        make_scheduler: MakeScheduler,
        store: Begin,
        begin: Begin,
    ) -> None:
        scheduler = make_scheduler()
        store(scheduler, "first", 8)
        begin(scheduler, "second", 33)
        scheduler.get_num_new_matched_tokens("second", 0)
        with pytest.raises(ValueError, match="group 1 has no device blocks"):
            scheduler.update_state_after_alloc(
                "second", [list(range(8)), [*[None] * 7, 7]], 32
            )
        with pytest.raises(ValueError, match="group 0 has no device blocks"):
            scheduler.update_state_after_alloc(
                "second", [[None, *range(7)], list(range(8))], 32
            )


class TestSlidingWindowStore:
    def test_blocks_missing_on_device_are_not_offered(
        self,
        make_scheduler: MakeScheduler,
        begin: Begin,
    ) -> None:
        scheduler = make_scheduler()
        full, sliding = begin(scheduler, "request", 20)
        scheduler.update_computed_tokens(
            "request", 20, [[0, 1, 2, 3, 4], [None, None, 7, 8, 9]]
        )
        (stored,) = scheduler.build_connector_meta().stores
        source = store_specs(stored)[0]
        assert scheduler.manager.offered == [[*full, *sliding[2:]]]
        assert source.block_ids.tolist() == [0, 1, 2, 3, 4, 7, 8, 9]
        assert (source.group_sizes, source.block_indices) == ((5, 3), (0, 2))

    def test_row_with_missing_device_block_is_not_offered(
        self,
        make_manager: type[WatchedManager],
        make_keys: MakeKeys,
    ) -> None:
        scheduler = WatchedScheduler(make_manager(16), (SLIDING,), block_size_factor=2)
        keys = make_keys(3)
        scheduler.on_new_request("request")
        scheduler.update_keys("request", 0, keys, 24)
        scheduler.update_computed_tokens("request", 24, [[None, 1, 2, 3, 4, 5]])
        (stored,) = scheduler.build_connector_meta().stores
        assert scheduler.manager.offered == [keys[1:]]
        assert (
            store_specs(stored)[0].block_ids.tolist(),
            store_specs(stored)[0].block_indices,
        ) == ([2, 3, 4, 5], (2,))

    @pytest.mark.parametrize("policy", OffloadPolicy)
    def test_prefix_hits_request_level_policy_offers_those_in_window(
        self,
        make_scheduler: MakeScheduler,
        store: Begin,
        begin: Begin,
        finish: Finish,
        policy: OffloadPolicy,
    ) -> None:
        scheduler = make_scheduler(policy=policy)
        full, sliding = store(scheduler, "first", 8)
        full, sliding = begin(scheduler, "second", 37)
        _, tables, metadata = load_all(scheduler, "second")
        scheduler.update_connector_output(finish(metadata))
        scheduler.update_computed_tokens(
            "second", 36, [[*table, 50 + group] for group, table in enumerate(tables)]
        )
        scheduler.build_connector_meta()
        request_level = policy is OffloadPolicy.REQUEST_LEVEL
        first_full, first_sliding = (0, 6) if request_level else (8, 8)
        assert scheduler.manager.offered == [
            [*full[first_full:], *sliding[first_sliding:]]
        ]

    def test_batch_larger_than_tier_stores_first_blocks_of_each_group(
        self,
        make_scheduler: MakeScheduler,
        begin: Begin,
        finish: Finish,
    ) -> None:
        scheduler = make_scheduler(num_blocks=9)
        full, sliding = begin(scheduler, "request", 32)
        scheduler.update_computed_tokens("request", 32, [list(range(8))] * 2)
        metadata = scheduler.build_connector_meta()
        assert scheduler.manager.offered[-1] == [*full[:4], *sliding[:4]]
        scheduler.update_connector_output(finish(metadata))
        assert (scheduler.stats.stored_blocks, scheduler.stats.dropped_blocks) == (8, 8)
        begin(scheduler, "second", 33)
        assert scheduler.get_num_new_matched_tokens("second", 0) == 16


def test_scheduler_three_groups_load_in_one_job(
    make_scheduler: MakeScheduler,
    store: Begin,
    begin: Begin,
) -> None:
    scheduler = make_scheduler(
        groups=(FULL, SLIDING, KVCacheGroupSpec(BLOCK, sliding_window=2))
    )
    store(scheduler, "first", 8, num_groups=3)
    begin(scheduler, "second", 33, num_groups=3)
    _, _, metadata = load_all(scheduler, "second")
    (load,) = metadata.loads
    assert (load_specs(load)[1].group_sizes, load_specs(load)[1].block_indices) == (
        (8, 2, 1),
        (0, 6, 7),
    )


def test_scheduler_window_of_one_token_loads_no_blocks(
    make_scheduler: MakeScheduler,
    store: Begin,
    begin: Begin,
) -> None:
    scheduler = make_scheduler(groups=(FULL, KVCacheGroupSpec(BLOCK, sliding_window=1)))
    full, _ = store(scheduler, "first", 8)
    begin(scheduler, "second", 33)
    matched, _, metadata = load_all(scheduler, "second")
    assert (matched, scheduler.manager.looked_up) == (32, full)
    assert load_specs(metadata.loads[0])[1].group_sizes == (8, 0)
