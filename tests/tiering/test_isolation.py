"""A secondary tier that raises affects no other component."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Sequence
from functools import partial

import pytest

from persistkv.base import OffloadKey, OffloadPolicy, ReqContext
from persistkv.tiering.base import SecondaryTierManager
from persistkv.tiering.prewarming import RecentContexts
from tests.tiering.conftest import Described, Keys, MakeStack, Stack
from tests.tiering.tiers import RaisingTier, RecordingTier

raising_tier = partial(RaisingTier, simulate_async=True)
recording_tier = partial(RecordingTier, simulate_async=True)


def announce(stack: Stack, req: ReqContext) -> ReqContext:
    stack.manager.on_new_request(req)
    return req


def store_only_in_tiers(stack: Stack, names: list[OffloadKey], req: ReqContext) -> None:
    """Store blocks, wait until the tiers have them, and empty the primary tier."""
    stack.store(names, announce(stack, req))
    stack.step()
    stack.manager.on_request_finished(req)
    stack.clear_primary()


def faulty_and_other(stack: Stack) -> tuple[RaisingTier, RecordingTier]:
    """Return the tier of two that raises, and the one that does not, in any order."""
    one, two = stack.tiers_of(RecordingTier)
    faulty, other = (one, two) if isinstance(one, RaisingTier) else (two, one)
    assert isinstance(faulty, RaisingTier)
    assert not isinstance(other, RaisingTier)
    return faulty, other


@pytest.mark.parametrize("call", ["drain_jobs", "shutdown"])
def test_manager_shutdown_tier_raises_other_tiers_and_region_are_released(
    make_stack: MakeStack,
    keys: Keys,
    described: Described,
    caplog: pytest.LogCaptureFixture,
    call: str,
) -> None:
    stack = make_stack(8, raising_tier, recording_tier)
    faulty, other = faulty_and_other(stack)
    path = stack.primary.mmap_region.mmap_path
    stack.store(keys(2), announce(stack, described("r")))
    faulty.failing.add(call)
    stack.manager.shutdown()
    assert f"secondary tier example raised in {call}" in caplog.text
    assert faulty.calls[-2:] == [("drain_jobs", ""), ("shutdown", "")]
    assert other.calls[-2:] == [("drain_jobs", ""), ("shutdown", "")]
    assert not os.path.exists(path)


@pytest.mark.parametrize(
    "order", [(raising_tier, recording_tier), (recording_tier, raising_tier)]
)
def test_complete_store_submit_store_raises_other_tier_stores(
    make_stack: MakeStack,
    keys: Keys,
    described: Described,
    caplog: pytest.LogCaptureFixture,
    order: Sequence[Callable[..., SecondaryTierManager]],
) -> None:
    stack = make_stack(8, *order)
    faulty, other = faulty_and_other(stack)
    faulty.failing.add("submit_store")
    names = keys(3)
    stack.store(names, announce(stack, described("r")))
    stack.step()
    assert set(other.blocks) == set(names)
    assert "raised in submit_store: the job failed" in caplog.text
    assert stack.manager.stats.failed_cascades == 3
    assert stack.primary.num_free_or_evictable() == 8, (
        "the failed job no longer references its rows"
    )
    assert not stack.manager.has_pending_work()


def test_promotion_submit_load_raises_misses(
    make_stack: MakeStack,
    keys: Keys,
    described: Described,
    caplog: pytest.LogCaptureFixture,
) -> None:
    stack = make_stack(8, raising_tier, recording_tier)
    faulty, other = faulty_and_other(stack)
    lost, found = keys(2), keys(2)
    store_only_in_tiers(stack, lost + found, described("a", lost + found))
    for key in lost:
        del other.blocks[key]
    for key in found:
        del faulty.blocks[key]
    faulty.failing.add("submit_load")
    req = announce(stack, described("b", lost + found))
    assert stack.promote(lost + found, req) == [False, False, True, True]
    stack.check(found, stack.manager.prepare_load(found, req))
    stack.manager.complete_load(found, req)
    assert "raised in submit_load: the job failed" in caplog.text
    assert stack.manager.stats.failed_promotions == 2
    stack.manager.on_request_finished(req)
    stack.step(2)
    assert stack.primary.num_free_or_evictable() == 8


def test_lookup_tier_raises_next_tier_is_asked(
    make_stack: MakeStack,
    keys: Keys,
    described: Described,
    caplog: pytest.LogCaptureFixture,
) -> None:
    stack = make_stack(8, raising_tier, recording_tier)
    names = keys(3)
    store_only_in_tiers(stack, names, described("a", names))
    faulty, other = faulty_and_other(stack)
    faulty.failing.add("lookup")
    assert stack.promote(names, announce(stack, described("b", names))) == [True] * 3
    assert len(other.loads) == 1
    assert caplog.text.count("raised in lookup") == 1, "one report for many lookups"


def test_take_events_tier_raises_other_tier_is_polled_and_reports(
    make_stack: MakeStack,
    keys: Keys,
    described: Described,
    caplog: pytest.LogCaptureFixture,
) -> None:
    stack = make_stack(8, raising_tier, recording_tier)
    faulty, other = faulty_and_other(stack)
    faulty.failing.update({"get_finished_jobs", "take_events"})
    names = keys(3)
    stack.store(names, announce(stack, described("r")))
    events = stack.step()
    assert [event.medium for event in events] == ["CPU"]
    assert set(other.blocks) == set(names)
    assert "raised in get_finished_jobs" in caplog.text
    assert "raised in take_events" in caplog.text
    assert stack.primary.num_free_or_evictable() == 5, (
        "the tier may still read its rows"
    )
    faulty.failing.clear()
    stack.step()
    assert stack.primary.num_free_or_evictable() == 8


def test_promotion_tier_cannot_be_polled_requests_stop_waiting(
    make_stack: MakeStack,
    keys: Keys,
    described: Described,
) -> None:
    stack = make_stack(8, raising_tier)
    (faulty,) = stack.tiers_of(RaisingTier)
    names = keys(3)
    store_only_in_tiers(stack, names, described("a", names))
    req = announce(stack, described("b", names))
    for key in names:
        assert stack.manager.lookup(key, req) is None
    stack.step()
    faulty.withholds_results = True  # the promotion stays in flight
    offering = announce(stack, described("c", names))
    assert stack.new_keys(names, offering) == []
    faulty.failing.add("get_finished_jobs")
    assert stack.promote(names, req) == [False] * 3
    assert stack.promote(names, announce(stack, described("d", names))) == [False] * 3
    assert stack.primary.num_free_or_evictable() == 5, (
        "the tier may still write to its rows"
    )
    assert not stack.manager.has_pending_work()
    stack.manager.on_request_finished(offering)
    assert ("finished", "c") in faulty.calls, (
        "the end does not wait for a tier that cannot be polled"
    )
    faulty.failing.clear()
    faulty.withholds_results = False
    stack.step()
    assert stack.primary.num_free_or_evictable() == 8
    later = announce(stack, described("e", names))
    assert stack.promote(names, later) == [True] * 3
    stack.check(names, stack.manager.prepare_load(names, later))
    stack.manager.complete_load(names, later)


def test_manager_tier_cannot_be_polled_gets_no_jobs(
    make_stack: MakeStack,
    keys: Keys,
    described: Described,
) -> None:
    stack = make_stack(8, raising_tier)
    (faulty,) = stack.tiers_of(RaisingTier)
    names = keys(2)
    store_only_in_tiers(stack, names, described("a", names))
    jobs = len(faulty.stores)
    waiting = announce(stack, described("b", names))
    stack.manager.lookup(names[0], waiting)
    faulty.failing.add("get_finished_jobs")
    stack.step()
    assert faulty.loads == []
    assert stack.manager.lookup(names[0], waiting) is False
    stack.store(keys(2), announce(stack, described("c")))
    assert len(faulty.stores) == jobs
    faulty.failing.clear()
    stack.step()
    assert stack.promote(names, announce(stack, described("d", names))) == [True] * 2


@pytest.mark.parametrize(
    "call", ["on_new_request", "on_request_finished", "touch", "has_pending_work"]
)
def test_manager_tier_raises_in_notification_others_are_notified(
    make_stack: MakeStack,
    keys: Keys,
    described: Described,
    caplog: pytest.LogCaptureFixture,
    call: str,
) -> None:
    stack = make_stack(8, raising_tier, recording_tier)
    faulty, other = faulty_and_other(stack)
    faulty.failing.add(call)
    req = described("r")
    assert stack.manager.on_new_request(req).policy is OffloadPolicy.REQUEST_LEVEL
    names = keys(2)
    stack.store(names, req)
    stack.manager.touch(names, req)
    stack.step()
    assert not stack.manager.has_pending_work()
    stack.manager.on_request_finished(req)
    assert other.touched == names
    assert other.calls[:2] == [("new", "r"), ("finished", "r")]
    assert f"raised in {call}" in caplog.text


def test_reset_cache_tier_raises_old_weights_are_not_served(
    make_stack: MakeStack,
    keys: Keys,
    described: Described,
    caplog: pytest.LogCaptureFixture,
) -> None:
    stack = make_stack(8, raising_tier, recording_tier)
    faulty, other = faulty_and_other(stack)
    names = keys(2)
    store_only_in_tiers(stack, names, described("a", names))
    faulty.failing.add("reset_cache")
    stack.manager.reset_cache(weights_changed=True)
    assert "raised in reset_cache" in caplog.text
    assert other.blocks == {}
    faulty.failing.clear()
    stack.step()
    assert stack.promote(names, announce(stack, described("b", names))) == [False] * 2
    stack.manager.reset_cache(weights_changed=True)
    stack.store(names, announce(stack, described("c", names)))
    assert len(faulty.stores) == 2, "the tier is used again after a reset that succeeds"


class RaisingContexts(RaisingTier):
    """Tier that offers the interface of recent contexts, and raises in its methods."""

    def ask_recent(self, max_blocks: int, *, prefetched: bool = False) -> bool:
        raise OSError("ask_recent")

    def take_recent(self) -> list[list[OffloadKey]] | None:
        raise OSError("take_recent")


def test_prewarming_tier_raises_steps_continue(
    make_stack: MakeStack,
    caplog: pytest.LogCaptureFixture,
) -> None:
    stack = make_stack(8, RaisingContexts, prewarm_share=0.5)
    (tier,) = stack.tiers
    assert isinstance(tier, RecentContexts)
    stack.step(3)
    assert "raised in ask_recent" in caplog.text


def test_manager_tier_raises_in_each_step_is_reported_once(
    make_stack: MakeStack,
    caplog: pytest.LogCaptureFixture,
) -> None:
    stack = make_stack(8, raising_tier)
    (tier,) = stack.tiers_of(RaisingTier)
    tier.failing.add("get_finished_jobs")
    with caplog.at_level(logging.ERROR):
        stack.step(50)
    assert caplog.text.count("raised in get_finished_jobs") == 1


def test_manager_keyboard_interrupt_in_tier_is_raised(
    make_stack: MakeStack,
    keys: Keys,
    described: Described,
) -> None:
    stack = make_stack(8, raising_tier)
    (tier,) = stack.tiers_of(RaisingTier)
    tier.failing.add("submit_store")
    tier.error = KeyboardInterrupt
    req = announce(stack, described("r"))
    with pytest.raises(KeyboardInterrupt):
        stack.store(keys(1), req)
    tier.failing.clear()


def test_has_pending_work_method_without_name_raises_counts_as_idle(
    make_stack: MakeStack,
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A tier may give out partial functions as methods, which have no ``__name__``."""

    def fail(reason: str) -> bool:
        raise OSError(reason)

    stack = make_stack(4, recording_tier)
    (tier,) = stack.tiers
    monkeypatch.setattr(tier, "has_pending_work", partial(fail, "no"))
    assert not stack.manager.has_pending_work()
    assert "the tier is taken as idle" in caplog.text


def test_has_pending_work_raises_while_repr_raises_too_counts_as_idle(
    make_stack: MakeStack,
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A tier whose construction failed half-way may not have a text, either."""

    class HalfBuilt:
        def __call__(self) -> bool:
            raise OSError("no")

        def __repr__(self) -> str:
            raise AttributeError("name")

    stack = make_stack(4, recording_tier)
    (tier,) = stack.tiers
    monkeypatch.setattr(tier, "has_pending_work", HalfBuilt())
    assert not stack.manager.has_pending_work()
    assert "the tier is taken as idle" in caplog.text
