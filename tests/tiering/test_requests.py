"""Requests in the tiering manager: announced once, twice or not at all, and finished."""

from __future__ import annotations

from functools import partial

import pytest

from persistkv.base import OffloadKey, OffloadPolicy, ReqContext
from persistkv.cpu.reuse_manager import FilterReusedOffloadingManager
from tests.tiering.conftest import Described, Keys, MakeStack, Stack
from tests.tiering.tiers import BlockLevelTier, RecordingTier

recording = partial(RecordingTier, simulate_async=True)
block_level = partial(BlockLevelTier, simulate_async=True)


def store_only_in_tiers(stack: Stack, names: list[OffloadKey], req: ReqContext) -> None:
    """Store blocks, wait until the tiers have them, and empty the primary tier."""
    stack.manager.on_new_request(req)
    stack.store(names, req)
    stack.step()
    stack.manager.on_request_finished(req)
    stack.clear_primary()


def load(stack: Stack, names: list[OffloadKey], req: ReqContext) -> None:
    stack.check(names, stack.manager.prepare_load(names, req))
    stack.manager.complete_load(names, req)


def test_lookup_unannounced_request_is_promoted(
    make_stack: MakeStack,
    keys: Keys,
    described: Described,
) -> None:
    stack = make_stack(8, recording)
    (tier,) = stack.tiers_of(RecordingTier)
    names = keys(3)
    store_only_in_tiers(stack, names, described("a", names))
    req = described("b", names)
    assert stack.promote(names, req) == [True] * 3
    assert stack.primary.num_free_or_evictable() == 5, (
        "its rows stay referenced until it loads them"
    )
    load(stack, names, req)
    stack.manager.on_request_finished(req)
    assert stack.primary.num_free_or_evictable() == 8
    assert tier.calls[-2:] == [("new", "b"), ("finished", "b")]


def test_lookup_unannounced_request_joins_promotion_in_flight(
    make_stack: MakeStack,
    keys: Keys,
    described: Described,
) -> None:
    stack = make_stack(8, recording)
    (tier,) = stack.tiers_of(RecordingTier)
    names = keys(3)
    store_only_in_tiers(stack, names, described("a", names))
    announced, unannounced = described("b", names), described("c", names)
    stack.manager.on_new_request(announced)
    for req in (announced, unannounced):
        assert [stack.manager.lookup(key, req) for key in names] == [None] * 3
    assert stack.promote(names, unannounced) == [True] * 3
    stack.manager.on_request_finished(announced)
    assert stack.primary.num_free_or_evictable() == 5, (
        "held for the unannounced request alone"
    )
    load(stack, names, unannounced)
    assert len(tier.loads) == 1


def test_unannounced_request_is_announced_to_tiers_once(
    make_stack: MakeStack,
    keys: Keys,
    described: Described,
) -> None:
    stack = make_stack(8, recording)
    (tier,) = stack.tiers_of(RecordingTier)
    names = keys(2)
    req = described("r", names)
    assert stack.manager.lookup(names[0], req) is False
    stack.store(names, req)
    assert stack.manager.on_new_request(req).policy is OffloadPolicy.REQUEST_LEVEL
    stack.manager.on_request_finished(req)
    assert tier.calls == [("new", "r"), ("finished", "r")]


def test_unannounced_request_that_stores_ends_after_its_last_store(
    make_stack: MakeStack,
    keys: Keys,
    described: Described,
) -> None:
    stack = make_stack(8, recording)
    (tier,) = stack.tiers_of(RecordingTier)
    names = keys(2)
    req = described("r", names)
    output = stack.manager.prepare_store(names, req)
    stack.manager.on_request_finished(req)
    assert ("finished", "r") not in tier.calls
    assert output is not None
    stack.manager.complete_store(output.keys_to_store, req)
    assert tier.calls == [("new", "r"), ("finished", "r")]
    assert [list(job.keys) for job in tier.stores] == [names]


def test_on_new_request_twice_keeps_held_rows_and_leaks_none(
    make_stack: MakeStack,
    keys: Keys,
    described: Described,
) -> None:
    stack = make_stack(8, recording)
    (tier,) = stack.tiers_of(RecordingTier)
    names = keys(3)
    store_only_in_tiers(stack, names, described("a", names))
    req = described("b", names)
    stack.manager.on_new_request(req)
    assert stack.promote(names, req) == [True] * 3
    stack.manager.on_new_request(described("b", names))
    assert stack.primary.num_free_or_evictable() == 5, "its rows are still held"
    assert stack.manager.prepare_store(keys(6), described("other")) is None
    load(stack, names, req)
    stack.manager.on_request_finished(req)
    assert stack.primary.num_free_or_evictable() == 8
    assert tier.calls.count(("new", "b")) == tier.calls.count(("finished", "b")) == 1


@pytest.mark.parametrize("when", ["pending", "in flight"])
def test_on_new_request_twice_during_promotion_still_waits(
    make_stack: MakeStack,
    keys: Keys,
    described: Described,
    when: str,
) -> None:
    stack = make_stack(8, recording)
    (tier,) = stack.tiers_of(RecordingTier)
    names = keys(3)
    store_only_in_tiers(stack, names, described("a", names))
    req = described("b", names)
    stack.manager.on_new_request(req)
    for key in names:
        assert stack.manager.lookup(key, req) is None
    if when == "in flight":
        stack.step()
    stack.manager.on_new_request(req)
    assert stack.promote(names, req) == [True] * 3
    load(stack, names, req)
    stack.manager.on_request_finished(req)
    stack.step()
    assert stack.primary.num_free_or_evictable() == 8
    assert len(tier.loads) == 1


def test_on_new_request_twice_ends_with_newest_description(
    make_stack: MakeStack,
    keys: Keys,
    described: Described,
) -> None:
    stack = make_stack(8, recording)
    (tier,) = stack.tiers_of(RecordingTier)
    names = keys(2)
    stack.manager.lookup(names[0], described("r"))
    newest = described("r", names)
    stack.manager.on_new_request(newest)
    stack.manager.on_request_finished(newest)
    assert tier.ended[-1] is newest


def test_on_new_request_reused_id_during_stores_ends_once(
    make_stack: MakeStack,
    keys: Keys,
    described: Described,
) -> None:
    """The same id is used again before the stores of the first request have ended."""
    stack = make_stack(8, recording)
    (tier,) = stack.tiers_of(RecordingTier)
    first, second = keys(2), keys(2)
    req = described("r", first)
    stack.manager.on_new_request(req)
    output = stack.manager.prepare_store(first, req)
    stack.manager.on_request_finished(req)
    again = described("r", second)
    stack.manager.on_new_request(again)
    assert output is not None
    stack.manager.complete_store(output.keys_to_store, req)
    assert ("finished", "r") not in tier.calls, "the second request has not ended"
    stack.store(second, again)
    stack.manager.on_request_finished(again)
    assert tier.calls == [("new", "r"), ("finished", "r")]
    stack.step(2)
    assert stack.primary.num_free_or_evictable() == 8
    assert not stack.manager.has_pending_work()


def test_promoted_block_reaches_request_level_tiers_once_readable(
    make_stack: MakeStack,
    keys: Keys,
    described: Described,
) -> None:
    stack = make_stack(8, recording, recording)
    near, far = stack.tiers_of(RecordingTier)
    names = keys(3)
    store_only_in_tiers(stack, names, described("a", names))
    near.blocks.clear()
    near.stores.clear()
    far.stores.clear()
    req = described("b", names)
    stack.manager.on_new_request(req)
    assert [stack.manager.lookup(key, req) for key in names] == [None] * 3
    stack.step()
    assert near.stores == []
    stack.step()
    assert [(list(job.keys), job.req_context.req_id) for job in near.stores] == [
        (names, "b")
    ]
    assert far.stores == [], "it is the source"
    load(stack, names, req)
    assert stack.new_keys(names, req) == []
    assert len(near.stores) == 1, "not submitted again"
    assert [list(job.keys) for job in far.stores] == [names], (
        "it receives every block that the request offers"
    )
    stack.manager.on_request_finished(req)
    stack.step(2)
    assert set(near.blocks) == set(names)
    assert stack.primary.num_free_or_evictable() == 8


def test_promoted_block_offered_meanwhile_reaches_request_level_tiers(
    make_stack: MakeStack,
    keys: Keys,
    described: Described,
) -> None:
    """A request computes a block during another request's promotion of it, and ends before that
    promotion."""
    stack = make_stack(8, recording, recording)
    near, far = stack.tiers_of(RecordingTier)
    names = keys(3)
    store_only_in_tiers(stack, names, described("a", names))
    near.blocks.clear()
    near.stores.clear()
    far.stores.clear()
    waiting = described("b", names)
    stack.manager.on_new_request(waiting)
    for key in names:
        stack.manager.lookup(key, waiting)
    stack.step()
    far.withholds_results = True
    offering = described("c", names)
    stack.manager.on_new_request(offering)
    assert stack.new_keys(names, offering) == []
    stack.manager.on_request_finished(waiting)
    stack.manager.on_request_finished(offering)
    assert ("finished", "c") not in near.calls
    far.withholds_results = False
    stack.step(2)
    assert [(list(job.keys), job.req_context.req_id) for job in near.stores] == [
        (names, "c")
    ]
    assert near.calls[-1] == ("finished", "c")
    stack.step()
    assert set(near.blocks) == set(names)
    assert stack.primary.num_free_or_evictable() == 8


def test_promoted_block_does_not_reach_block_level_tiers(
    make_stack: MakeStack,
    keys: Keys,
    described: Described,
) -> None:
    stack = make_stack(8, block_level, recording)
    near, _ = stack.tiers_of(RecordingTier)
    names = keys(3)
    store_only_in_tiers(stack, names, described("a", names))
    near.blocks.clear()
    near.stores.clear()
    assert stack.promote(names, described("b", names)) == [True] * 3
    stack.step()
    assert near.stores == []


def test_promoted_block_of_request_without_stores_stays_in_its_tier(
    make_stack: MakeStack,
    keys: Keys,
    described: Described,
) -> None:
    stack = make_stack(8, recording, recording)
    near, _ = stack.tiers_of(RecordingTier)
    names = keys(3)
    store_only_in_tiers(stack, names, described("a", names))
    near.blocks.clear()
    near.stores.clear()
    req = ReqContext("b", store=False)
    assert stack.promote(names, req) == [True] * 3
    load(stack, names, req)
    stack.manager.on_request_finished(req)
    stack.step()
    assert near.stores == []


def test_store_threshold_held_blocks_reach_request_level_tiers(
    make_stack: MakeStack,
    keys: Keys,
    described: Described,
) -> None:
    """The blocks were promoted, so they are held although no request has looked them up often
    enough."""
    stack = make_stack(8, recording, recording)
    near, far = stack.tiers_of(RecordingTier)
    names = keys(4)
    store_only_in_tiers(stack, names, described("a", names))
    assert stack.promote(names, described("b", names)) == [True] * 4
    for tier in (near, far):
        tier.stores.clear()
    manager = FilterReusedOffloadingManager(stack.manager, store_threshold=3)
    new = keys(2)
    req = described("c", names + new)
    assert manager.on_new_request(req).policy is OffloadPolicy.REQUEST_LEVEL
    output = manager.prepare_store(names + new, req)
    assert output is not None
    assert output.keys_to_store == [], "the other blocks stay below the threshold"
    assert [[list(job.keys) for job in tier.stores] for tier in (near, far)] == [
        [names],
        [names],
    ]
