"""The tiering manager: cascades, promotions, policies, references and resets."""

from __future__ import annotations

import logging
import time
from collections.abc import Sequence
from functools import partial

import pytest

from persistkv.base import OffloadKey, OffloadPolicy, ReqContext
from persistkv.tiering.base import JobResult
from tests.tiering.conftest import Described, Keys, MakeStack, Stack
from tests.tiering.tiers import BlockLevelTier, RecordingTier

recording = partial(RecordingTier, simulate_async=True)
block_level = partial(BlockLevelTier, simulate_async=True)


def announce(stack: Stack, req: ReqContext) -> ReqContext:
    stack.manager.on_new_request(req)
    return req


def store_only_in_tiers(
    stack: Stack,
    names: Sequence[OffloadKey],
    req: ReqContext,
) -> None:
    """Store blocks, wait until the tiers have them, and empty the primary tier."""
    stack.store(names, announce(stack, req))
    stack.step()
    stack.clear_primary()


def test_complete_store_success_cascades_to_all_tiers(
    make_stack: MakeStack,
    keys: Keys,
    described: Described,
) -> None:
    stack = make_stack(8, recording, block_level)
    tiers = stack.tiers_of(RecordingTier)
    req = announce(stack, described("r"))
    names = keys(3)
    stack.store(names, req)
    assert [list(tier.stores[0].keys) for tier in tiers] == [
        names,
        names,
    ]
    assert stack.primary.prepare_store(keys(6), req) is None, (
        "rows that a cascade reads are protected"
    )
    stack.step()
    assert [len(tier.blocks) for tier in tiers] == [3, 3]
    assert stack.primary.prepare_store(keys(8), req) is not None, (
        "each tier released its own reference"
    )


def test_complete_store_failure_cascades_nothing(
    make_stack: MakeStack,
    keys: Keys,
    described: Described,
) -> None:
    stack = make_stack(8, recording)
    (tier,) = stack.tiers_of(RecordingTier)
    req = announce(stack, described("r"))
    names = keys(3)
    output = stack.manager.prepare_store(names, req)
    assert output is not None
    stack.manager.complete_store(output.keys_to_store, req, success=False)
    assert tier.stores == []
    assert stack.manager.lookup(names[0], req) is False


def test_manager_without_secondary_tiers_stores_and_loads(
    make_stack: MakeStack,
    keys: Keys,
    described: Described,
) -> None:
    stack = make_stack(4)
    req = described("r")
    assert stack.manager.on_new_request(req).policy is OffloadPolicy.BLOCK_LEVEL
    names = keys(2)
    stack.store(names, req)
    assert stack.promote(names, req) == [True, True]
    stack.check(names, stack.manager.prepare_load(names, req))
    stack.manager.complete_load(names, req)
    stack.manager.on_request_finished(req)
    assert not stack.manager.has_pending_work()


def test_promotion_three_groups_use_one_load_job(
    make_stack: MakeStack,
    keys: Keys,
    described: Described,
) -> None:
    stack = make_stack(16, recording)
    (tier,) = stack.tiers_of(RecordingTier)
    chains = [keys(3, group) for group in range(3)]
    everything = [key for chain in chains for key in chain]
    first = announce(stack, described("a", *chains))
    stack.store(everything, first)
    stack.step()
    stack.clear_primary()
    second = announce(stack, described("b", *chains))
    assert [stack.manager.lookup(key, second) for key in everything] == [None] * 9
    assert tier.loads == [], "submitted at the end of the step, not before"
    assert stack.promote(everything, second) == [True] * 9
    assert len(tier.loads) == 1
    assert sorted(tier.loads[0].keys) == sorted(everything)
    stack.check(everything, stack.manager.prepare_load(everything, second))
    stack.manager.complete_load(everything, second)


def test_promotion_wanted_by_two_requests_loads_block_once(
    make_stack: MakeStack,
    keys: Keys,
    described: Described,
) -> None:
    stack = make_stack(8, recording)
    (tier,) = stack.tiers_of(RecordingTier)
    names = keys(3)
    store_only_in_tiers(stack, names, described("a", names))
    requests = [announce(stack, described(name, names)) for name in "bc"]
    for req in requests:
        assert [stack.manager.lookup(key, req) for key in names] == [None] * 3
    for req in requests:
        assert stack.promote(names, req) == [True] * 3
    assert len(tier.loads) == 1
    assert stack.primary.prepare_store(keys(6), requests[0]) is None, "held for both"
    for left, req in enumerate(requests):
        stack.manager.prepare_load(names, req)
        stack.manager.complete_load(names, req)
        assert (stack.primary.num_free_or_evictable() == 8) is bool(left)


def test_manager_polls_tier_jobs_once_per_step(
    make_stack: MakeStack,
    keys: Keys,
    described: Described,
) -> None:
    stack = make_stack(8, recording)
    (tier,) = stack.tiers_of(RecordingTier)
    req = announce(stack, described("r"))
    stack.store(keys(2), req)
    for key in keys(50):
        stack.manager.lookup(key, req)
    assert tier.polls == 0
    stack.step()
    assert tier.polls == 1


def test_prepare_store_without_room_polls_tier_jobs_once_per_step(
    make_stack: MakeStack,
    keys: Keys,
    described: Described,
) -> None:
    stack = make_stack(4, recording)
    (tier,) = stack.tiers_of(RecordingTier)
    req = announce(stack, described("r"))
    stack.store(keys(4), req)
    tier.withholds_results = True
    for _ in range(6):
        assert stack.manager.prepare_store(keys(2), req) is None
    stack.step()
    assert tier.polls == 1
    tier.withholds_results = False
    assert stack.manager.prepare_store(keys(2), req) is not None, (
        "polled at the first need of the next step"
    )
    stack.step()
    assert tier.polls == 2


def test_promotion_failed_block_misses_and_is_not_retried(
    make_stack: MakeStack,
    keys: Keys,
    described: Described,
) -> None:
    stack = make_stack(8, recording)
    (tier,) = stack.tiers_of(RecordingTier)
    names = keys(4)
    store_only_in_tiers(stack, names, described("a", names))
    tier.unloadable = {names[2]}
    req = announce(stack, described("b", names))
    assert stack.promote(names, req) == [True, True, False, True]
    stack.step(3)
    assert stack.promote(names, req) == [True, True, False, True]
    assert len(tier.loads) == 1
    stack.manager.prepare_load(names[:2], req)
    stack.manager.complete_load(names[:2], req)
    stack.manager.on_request_finished(req)
    assert stack.primary.num_free_or_evictable() == 8, "its row was freed"
    assert stack.manager.stats.failed_promotions == 1


def test_promotion_too_large_loads_prefix_that_fits(
    make_stack: MakeStack,
    keys: Keys,
    described: Described,
) -> None:
    stack = make_stack(6, recording)
    chains = [keys(3, 0), keys(3, 1)]
    for chain in chains:
        stack.store(chain, announce(stack, described(f"a{chain[0][-1]}", *chains)))
        stack.step()
    stack.clear_primary()
    busy = announce(stack, described("busy"))
    taken = stack.primary.prepare_store(keys(2), busy)
    req = announce(stack, described("b", *chains))
    answers = stack.promote(chains[0] + chains[1], req)
    assert answers == [True, True, False, True, True, False], (
        "the same depth of each group"
    )
    assert taken is not None
    assert stack.manager.stats.declined_promotions == 2


def test_promotion_full_primary_waits_for_free_rows(
    make_stack: MakeStack,
    keys: Keys,
    described: Described,
) -> None:
    stack = make_stack(4, recording)
    names = keys(2)
    store_only_in_tiers(stack, names, described("a", names))
    busy = announce(stack, described("busy"))
    blocking = stack.primary.prepare_store(keys(4), busy)
    req = announce(stack, described("b", names))
    for _ in range(5):
        assert [stack.manager.lookup(key, req) for key in names] == [None, None]
        stack.step()
    assert blocking is not None
    stack.primary.complete_store(blocking.keys_to_store, busy, success=False)
    assert stack.promote(names, req) == [True, True]


def test_promotion_full_primary_past_room_wait_misses(
    make_stack: MakeStack,
    keys: Keys,
    described: Described,
) -> None:
    stack = make_stack(4, recording, room_wait_s=0.0)
    names = keys(2)
    store_only_in_tiers(stack, names, described("a", names))
    stack.primary.prepare_store(keys(4), announce(stack, described("busy")))
    assert stack.promote(names, announce(stack, described("b", names))) == [
        False,
        False,
    ]


def test_promotion_full_primary_by_default_misses_within_one_second(
    make_stack: MakeStack,
    keys: Keys,
    described: Described,
) -> None:
    stack = make_stack(4, recording)
    names = keys(2)
    store_only_in_tiers(stack, names, described("a", names))
    stack.primary.prepare_store(keys(4), announce(stack, described("busy")))
    req = announce(stack, described("b", names))
    began = time.monotonic()
    assert [stack.manager.lookup(key, req) for key in names] == [None, None]
    time.sleep(1)
    stack.step()
    assert stack.promote(names, req) == [False, False]
    assert time.monotonic() - began < 10


def test_promotion_full_primary_does_not_evict_own_prefix(
    make_stack: MakeStack,
    keys: Keys,
    described: Described,
) -> None:
    stack = make_stack(6, recording)
    names = keys(6)
    store_only_in_tiers(stack, names, described("a", names))
    first = announce(stack, described("b", names[:4]))
    assert stack.promote(names[:4], first) == [True] * 4
    stack.manager.on_request_finished(first)
    other = announce(stack, described("other"))
    # the primary tier is full now; the prefix is its oldest part
    stack.store(keys(2), other)
    stack.step()
    second = announce(stack, described("c", names))
    assert stack.promote(names, second) == [True] * 6


def test_promotion_after_promoted_prefix_uses_remaining_rows(
    make_stack: MakeStack,
    keys: Keys,
    described: Described,
) -> None:
    """The request already references its promoted blocks, so they are not subtracted twice from the
    available rows."""
    stack = make_stack(6, recording)
    names = keys(5)
    store_only_in_tiers(stack, names, described("a", names))
    req = announce(stack, described("b", names))
    assert stack.promote(names[:3], req) == [True] * 3
    assert stack.promote(names, req) == [True] * 5


def test_promotion_rows_are_held_until_loaded(
    make_stack: MakeStack,
    keys: Keys,
    described: Described,
) -> None:
    stack = make_stack(4, recording)
    names = keys(3)
    store_only_in_tiers(stack, names, described("a", names))
    req = announce(stack, described("b", names))
    assert stack.promote(names, req) == [True] * 3
    other = announce(stack, described("c"))
    assert stack.manager.prepare_store(keys(2), other) is None
    stack.check(names, stack.manager.prepare_load(names, req))
    stack.manager.complete_load(names, req)
    assert stack.manager.prepare_store(keys(2), other) is not None


@pytest.mark.parametrize("how", ["finished", "deadline"])
def test_promotion_rows_not_loaded_are_released(
    make_stack: MakeStack,
    keys: Keys,
    described: Described,
    how: str,
) -> None:
    stack = make_stack(4, recording, hold_s=30.0 if how == "finished" else 1e-9)
    names = keys(3)
    store_only_in_tiers(stack, names, described("a", names))
    req = announce(stack, described("b", names))
    for key in names:
        stack.manager.lookup(key, req)
    stack.step(3)
    if how == "finished":
        assert stack.primary.num_free_or_evictable() == 1
        stack.manager.on_request_finished(req)
    assert stack.primary.num_free_or_evictable() == 4
    assert stack.manager.stats.expired_holds == (0 if how == "finished" else 3)


@pytest.mark.parametrize("when", ["pending", "in flight"])
def test_promotion_request_cancelled_releases_rows(
    make_stack: MakeStack,
    keys: Keys,
    described: Described,
    when: str,
) -> None:
    stack = make_stack(4, recording)
    (tier,) = stack.tiers_of(RecordingTier)
    names = keys(3)
    store_only_in_tiers(stack, names, described("a", names))
    req = announce(stack, described("b", names))
    for key in names:
        stack.manager.lookup(key, req)
    if when == "in flight":
        stack.step()
    stack.manager.on_request_finished(req)
    stack.step(2)
    assert len(tier.loads) == (0 if when == "pending" else 1)
    assert stack.primary.num_free_or_evictable() == 4
    assert not stack.manager.has_pending_work()


def test_promotion_one_of_two_requests_cancelled_other_loads(
    make_stack: MakeStack,
    keys: Keys,
    described: Described,
) -> None:
    stack = make_stack(4, recording)
    names = keys(3)
    store_only_in_tiers(stack, names, described("a", names))
    gone, stays = (
        announce(stack, described("b", names)),
        announce(stack, described("c", names)),
    )
    for req in (gone, stays):
        for key in names:
            stack.manager.lookup(key, req)
    stack.manager.on_request_finished(gone)
    assert stack.promote(names, stays) == [True] * 3


def test_prepare_store_request_level_tier_receives_existing_blocks(
    make_stack: MakeStack,
    keys: Keys,
    described: Described,
) -> None:
    stack = make_stack(16, recording, block_level)
    prefix, suffix = keys(3), keys(2)
    stack.store(prefix, announce(stack, described("a", prefix)))
    stack.step()
    req = described("b", prefix + suffix)
    assert stack.manager.on_new_request(req).policy is OffloadPolicy.REQUEST_LEVEL
    stack.store(prefix + suffix, req)
    request_level, blocks_only = stack.tiers_of(RecordingTier)
    assert [list(job.keys) for job in request_level.stores] == [prefix, prefix, suffix]
    assert [list(job.keys) for job in blocks_only.stores] == [prefix, suffix]
    assert stack.primary.num_free_or_evictable() == 16 - 5, (
        "existing blocks are pinned while they are read"
    )
    stack.step()
    assert stack.primary.num_free_or_evictable() == 16


def test_prepare_store_block_level_tier_receives_new_blocks_only(
    make_stack: MakeStack,
    keys: Keys,
    described: Described,
) -> None:
    stack = make_stack(16, block_level)
    (tier,) = stack.tiers_of(RecordingTier)
    names = keys(3)
    for name in "ab":
        req = described(name, names)
        assert stack.manager.on_new_request(req).policy is OffloadPolicy.BLOCK_LEVEL
        stack.store(names, req)
    assert len(tier.stores) == 1


def test_on_request_finished_tiers_are_notified_after_last_store(
    make_stack: MakeStack,
    keys: Keys,
    described: Described,
) -> None:
    stack = make_stack(8, recording)
    (tier,) = stack.tiers_of(RecordingTier)
    req = announce(stack, described("r"))
    output = stack.manager.prepare_store(keys(2), req)
    stack.manager.on_request_finished(req)
    assert ("finished", "r") not in tier.calls
    assert output is not None
    stack.manager.complete_store(output.keys_to_store, req)
    assert tier.calls == [("new", "r"), ("finished", "r")]
    stack.manager.on_request_finished(req)
    assert tier.calls.count(("finished", "r")) == 1


def test_on_request_finished_waits_for_blocks_of_another_writer(
    make_stack: MakeStack,
    keys: Keys,
    described: Described,
) -> None:
    """Otherwise the manifest is written before all blocks are submitted, and names only a part of
    the context."""
    stack = make_stack(8, recording)
    (tier,) = stack.tiers_of(RecordingTier)
    names = keys(2)
    writer, other = (
        announce(stack, described("a", names)),
        announce(stack, described("b", names)),
    )
    output = stack.manager.prepare_store(names, writer)
    assert stack.new_keys(names, other) == []
    stack.manager.on_request_finished(other)
    assert ("finished", "b") not in tier.calls
    assert output is not None
    stack.manager.complete_store(output.keys_to_store, writer)
    assert tier.calls[-1] == ("finished", "b")
    assert [list(job.keys) for job in tier.stores] == [names]


def test_prepare_store_uses_rows_of_ended_cascades(
    make_stack: MakeStack,
    keys: Keys,
    described: Described,
) -> None:
    stack = make_stack(4, recording)
    (tier,) = stack.tiers_of(RecordingTier)
    req = announce(stack, described("r"))
    for _ in range(3):
        stack.store(keys(4), req)  # needs all rows, referenced by the previous cascade
        stack.step()
    assert [len(job.keys) for job in tier.stores] == [4, 4, 4]


def test_complete_store_readable_keys_are_ignored(
    make_stack: MakeStack,
    keys: Keys,
    described: Described,
) -> None:
    stack = make_stack(8, recording)
    (tier,) = stack.tiers_of(RecordingTier)
    req = announce(stack, described("r"))
    first, second = keys(2), keys(2)
    stack.store(first, req)
    output = stack.manager.prepare_store(second, req)
    stack.manager.on_request_finished(req)
    stack.manager.complete_store(first, req)
    assert ("finished", "r") not in tier.calls, "its second store is still in flight"
    assert output is not None
    stack.manager.complete_store([*first, *output.keys_to_store, *second], req)
    assert [list(job.keys) for job in tier.stores] == [first, second], (
        "each block cascades once"
    )
    assert tier.calls[-1] == ("finished", "r")
    stack.step(2)
    assert stack.primary.num_free_or_evictable() == 8


def test_cascade_above_share_is_submitted_once_room_is_free(
    make_stack: MakeStack,
    keys: Keys,
    described: Described,
) -> None:
    stack = make_stack(16, recording, block_level, cascade_share=0.5)
    tiers = stack.tiers_of(RecordingTier)
    for tier in tiers:
        tier.withholds_results = True
    req = announce(stack, described("r"))
    names = keys(8)
    for start in range(0, 8, 2):
        stack.store(names[start : start + 2], req)
    stack.manager.on_request_finished(req)
    stack.step()
    assert [[len(job.keys) for job in tier.stores] for tier in tiers] == [
        [2, 2],
        [2, 2],
    ]
    assert stack.primary.num_free_or_evictable() == 12, (
        "blocks whose cascade waits may be evicted"
    )
    assert ("finished", "r") not in tiers[0].calls, (
        "its last store was not submitted yet"
    )
    assert stack.manager.has_pending_work()
    for tier in tiers:
        tier.withholds_results = False
    stack.step(2)
    assert [set(tier.blocks) for tier in tiers] == [set(names)] * 2
    assert stack.manager.stats.dropped_cascades == 0
    assert tiers[0].calls.count(("finished", "r")) == 1
    assert not stack.manager.has_pending_work()


def test_cascade_above_share_evicted_while_it_waits_is_counted_and_ends_request(
    make_stack: MakeStack,
    keys: Keys,
    described: Described,
) -> None:
    stack = make_stack(8, recording, cascade_share=0.5)
    tier = stack.tiers_of(RecordingTier)[0]
    tier.withholds_results = True
    req, other = announce(stack, described("r")), announce(stack, described("other"))
    names = keys(6)
    stack.store(names[:3], req)
    stack.store(names[3:], req)
    stack.manager.on_request_finished(req)
    taken = stack.manager.prepare_store(keys(4), other)
    assert taken is not None
    assert len(taken.evicted_keys) == 2
    stack.step()
    tier.withholds_results = False
    stack.step(2)
    assert len(tier.blocks) == 4
    assert stack.manager.stats.dropped_cascades == 2
    assert tier.calls[-1] == ("finished", "r")


def test_cascades_above_share_wait_in_bounded_queue(
    make_stack: MakeStack,
    keys: Keys,
    described: Described,
) -> None:
    """A tier that never ends a job leaves no more blocks waiting than there are rows."""
    stack = make_stack(8, recording, cascade_share=0.25)
    tier = stack.tiers_of(RecordingTier)[0]
    tier.withholds_results = True
    req = announce(stack, described("r"))
    stack.store(keys(2), req)
    for _ in range(20):
        stack.store(keys(2), req)
        stack.step()
    assert stack.manager.stats.dropped_cascades == 20 * 2 - 8
    tier.withholds_results = False


def test_cascades_above_share_of_reset_cache_are_not_submitted(
    make_stack: MakeStack,
    keys: Keys,
    described: Described,
) -> None:
    stack = make_stack(8, recording, cascade_share=0.25)
    tier = stack.tiers_of(RecordingTier)[0]
    tier.withholds_results = True
    req = announce(stack, described("r"))
    first, second = keys(2), keys(2)
    stack.store(first, req)
    stack.store(second, req)
    stack.manager.on_request_finished(req)
    stack.manager.reset_cache()
    tier.withholds_results = False
    stack.step(2)
    assert [list(job.keys) for job in tier.stores] == [first]
    assert tier.calls[-1] == ("finished", "r")
    assert stack.primary.num_free_or_evictable() == 8


def test_cascades_above_share_are_submitted_by_shutdown(
    make_stack: MakeStack,
    keys: Keys,
    described: Described,
) -> None:
    stack = make_stack(8, recording, cascade_share=0.25)
    req = announce(stack, described("r"))
    names = keys(6)
    for start in range(0, 6, 2):
        stack.store(names[start : start + 2], req)
    stack.manager.on_request_finished(req)
    tier = stack.tiers_of(RecordingTier)[0]
    stack.manager.shutdown()
    assert [key for job in tier.stores for key in job.keys] == names
    assert ("finished", "r") in tier.calls


def test_manager_asks_tiers_in_order_and_touches_all(
    make_stack: MakeStack,
    keys: Keys,
    described: Described,
) -> None:
    stack = make_stack(8, recording, recording)
    tiers = stack.tiers_of(RecordingTier)
    names = keys(2)
    store_only_in_tiers(stack, names, described("a", names))
    del tiers[0].blocks[names[1]]
    req = announce(stack, described("b", names))
    assert stack.promote(names, req) == [True, True]
    assert [list(tier.loads[0].keys) for tier in tiers] == [
        [names[0]],
        [names[1]],
    ]
    stack.manager.touch(names, req)
    assert [tier.touched for tier in tiers] == [names, names]


def test_reset_cache_drops_blocks_and_frees_rows_as_jobs_end(
    make_stack: MakeStack,
    keys: Keys,
    described: Described,
) -> None:
    stack = make_stack(8, recording)
    tier = stack.tiers_of(RecordingTier)[0]
    names, others = keys(3), keys(2)
    req = announce(stack, described("a", names))
    stack.store(names, req)  # its cascade is in flight
    writing = stack.manager.prepare_store(others, req)
    stack.manager.reset_cache()
    assert (
        stack.promote(names + others, announce(stack, described("b", names)))
        == [False] * 5
    )
    assert writing is not None
    stack.manager.complete_store(writing.keys_to_store, req)
    assert [list(job.keys) for job in tier.stores] == [names], (
        "blocks computed before the reset are not cascaded"
    )
    stack.step()
    assert stack.primary.num_free_or_evictable() == 8


def test_reset_cache_during_promotion_frees_rows_and_tier_keeps_blocks(
    make_stack: MakeStack,
    keys: Keys,
    described: Described,
) -> None:
    stack = make_stack(8, recording)
    names = keys(3)
    store_only_in_tiers(stack, names, described("a", names))
    req = announce(stack, described("b", names))
    for key in names:
        stack.manager.lookup(key, req)
    stack.step()
    stack.manager.reset_cache(weights_changed=False)
    stack.step()
    assert stack.primary.num_free_or_evictable() == 8
    assert stack.promote(names, req) == [True] * 3, "the tier still has them"
    stack.check(names, stack.manager.prepare_load(names, req))
    stack.manager.complete_load(names, req)


def test_manager_repeated_job_result_is_logged_and_ignored(
    make_stack: MakeStack,
    keys: Keys,
    described: Described,
    caplog: pytest.LogCaptureFixture,
) -> None:
    stack = make_stack(8, recording)
    (tier,) = stack.tiers_of(RecordingTier)
    req = announce(stack, described("r"))
    stack.store(keys(2), req)
    stack.step()
    tier.completed_jobs = [JobResult(0, True)]
    with caplog.at_level(logging.ERROR):
        stack.step()
    assert "job 0, which is not in flight" in caplog.text
    assert stack.primary.num_free_or_evictable() == 8


def test_take_events_reports_stored_and_removed_keys(
    make_stack: MakeStack,
    keys: Keys,
    described: Described,
) -> None:
    stack = make_stack(2, recording)
    req = announce(stack, described("r"))
    first, second = keys(2), keys(2)
    stack.store(first, req)
    stack.step()
    stack.store(second, req)
    (removed, stored) = stack.step()
    assert (sorted(removed.keys), removed.medium, removed.removed) == (
        sorted(first),
        "CPU",
        True,
    )
    assert (stored.keys, stored.removed) == (second, False)
