"""Prewarming: recently used contexts are promoted before a request looks them up."""

from __future__ import annotations

import time
from collections.abc import Callable
from functools import partial
from pathlib import Path

import pytest

from persistkv.base import OffloadKey, ReqContext, StoredContext
from persistkv.tenants import DEFAULT_TENANT
from persistkv.tiering.persistent import PersistentTier
from persistkv.tiering.prewarming import Prewarming
from tests.tiering.conftest import Described, Keys, MakeStack, Stack
from tests.tiering.tiers import RecordingTier


class FakeTier:
    """Tier whose readiness (``open``), hints and answer the test sets."""

    def __init__(self) -> None:
        self.open = False
        self.hints = 0
        """Number of questions for prefetched contexts that the tier accepts."""
        self.asked: list[tuple[int, bool]] = []
        self.answer: list[StoredContext] | None = None

    def ask_recent(self, max_blocks: int, *, prefetched: bool = False) -> bool:
        if not self.open or (prefetched and not self.hints):
            return False
        self.hints -= prefetched
        self.asked.append((max_blocks, prefetched))
        return True

    def take_recent(self) -> list[StoredContext] | None:
        answer, self.answer = self.answer, None
        return answer


def test_next_context_answered_tier_yields_contexts_one_by_one(keys: Keys) -> None:
    tier = FakeTier()
    contexts = [StoredContext("default", keys(3)), StoredContext("anna", keys(2))]
    prewarming = Prewarming(tier, 5)
    assert prewarming.next_context() is None
    tier.open = True
    assert prewarming.next_context() is None
    tier.answer = list(contexts)
    assert [prewarming.next_context() for _ in range(2)] == contexts
    assert not prewarming.recent_ended
    assert prewarming.next_context() is None
    assert prewarming.recent_ended
    assert not prewarming.waits
    assert tier.asked == [(5, False)]


def test_next_context_after_end_yields_prefetched_contexts(keys: Keys) -> None:
    tier = FakeTier()
    later = [StoredContext("default", keys(3)), StoredContext("anna", keys(2))]
    tier.open, tier.answer = True, []
    prewarming = Prewarming(tier, 5)
    assert prewarming.next_context() is None
    assert prewarming.recent_ended
    tier.hints = 1
    assert prewarming.next_context() is None
    assert prewarming.waits
    tier.answer = list(later)
    assert [prewarming.next_context() for _ in range(2)] == later
    assert prewarming.next_context() is None
    assert not prewarming.waits
    assert tier.asked == [(5, False), (5, True)]


def test_next_context_lost_answer_is_requested_again(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    now = time.monotonic()
    monkeypatch.setattr(time, "monotonic", lambda: now)
    tier = FakeTier()
    tier.open, tier.answer, tier.hints = True, [], 2
    prewarming = Prewarming(tier, 5)
    assert prewarming.next_context() is None
    for seconds, asked in ((1, 2), (59, 2), (2, 3)):
        now += seconds
        assert prewarming.next_context() is None
        assert len(tier.asked) == asked


def test_next_context_tier_not_ready_ends_after_timeout(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    prewarming = Prewarming(FakeTier(), 5)
    soon = time.monotonic() + 61
    monkeypatch.setattr(time, "monotonic", lambda: soon)
    assert prewarming.next_context() is None
    assert prewarming.recent_ended


def fill(
    stack: Stack, described: Described, name: str, chain: list[OffloadKey]
) -> None:
    req = described(name, chain)
    stack.manager.on_new_request(req)
    stack.store(chain, req)
    stack.manager.on_request_finished(req)
    assert stack.tiers_of(PersistentTier)[0].wait_persisted(name, 90)
    stack.step()


def two_contexts(
    make_stack: MakeStack,
    tier: Callable[..., PersistentTier],
    keys: Keys,
    described: Described,
) -> tuple[list[OffloadKey], list[OffloadKey]]:
    """Store two contexts of six blocks each and close the store; the second one was used last."""
    first, (old, new) = make_stack(16, tier), (keys(6), keys(6))
    fill(first, described, "old", old)
    fill(first, described, "new", new)
    first.manager.shutdown()
    return old, new


class UndecidedTier(RecordingTier):
    """Tier that asks to retry each lookup."""

    def lookup(self, key: OffloadKey, req_context: ReqContext) -> bool | None:
        return None


def test_prewarming_nearer_tier_asks_to_retry_promotes_from_the_next(
    make_stack: MakeStack,
    tmp_path: Path,
    keys: Keys,
    described: Described,
) -> None:
    """Prewarming looks each block up once, so a tier that does not know yet is passed over."""
    tier = partial(
        PersistentTier, url=f"lmdb://{tmp_path}/store", host="thread", max_age_s=0.01
    )
    two_contexts(make_stack, tier, keys, described)

    second = make_stack(16, UndecidedTier, tier, prewarm_share=0.5)
    deadline = time.monotonic() + 90
    while second.manager.has_pending_work():
        assert time.monotonic() < deadline
        second.step()
    assert second.manager.stats.promoted_blocks == 8


@pytest.mark.parametrize("host", ["thread", "process"])
def test_prewarming_restarted_stack_promotes_most_recent_context(
    make_stack: MakeStack,
    keys: Keys,
    described: Described,
    tmp_path: Path,
    host: str,
) -> None:
    tier = partial(
        PersistentTier, url=f"lmdb://{tmp_path}/store", host=host, max_age_s=0.01
    )
    old, new = two_contexts(make_stack, tier, keys, described)

    second = make_stack(16, tier, prewarm_share=0.5)
    deadline = time.monotonic() + 90
    while second.manager.has_pending_work():
        assert time.monotonic() < deadline
        second.step()
    asking = described("asking", new)
    second.manager.on_new_request(asking)
    assert [second.manager.lookup(key, asking) for key in new] == [True] * 6
    assert second.manager.stats.promoted_blocks == 8
    assert [second.manager.lookup(key, asking) for key in old] == [True] * 2 + [
        None
    ] * 4
    second.check(new, second.manager.prepare_load(new, asking))
    second.manager.complete_load(new, asking)


def test_prefetch_after_prewarming_has_ended_promotes_context(
    make_stack: MakeStack,
    keys: Keys,
    described: Described,
    tmp_path: Path,
) -> None:
    tier = partial(
        PersistentTier, url=f"lmdb://{tmp_path}/store", host="thread", max_age_s=0.01
    )
    old, _ = two_contexts(make_stack, tier, keys, described)
    stack = make_stack(16, tier, prewarm_share=0.5)
    deadline = time.monotonic() + 90
    while stack.manager.has_pending_work():
        assert time.monotonic() < deadline
        stack.step()

    stack.tiers_of(PersistentTier)[0].prefetch(StoredContext(DEFAULT_TENANT, old))
    asking = described("asking", old)
    while not all(stack.manager.primary_tier.is_ready(key) for key in old):
        assert time.monotonic() < deadline
        stack.step()
        time.sleep(0.001)
    stack.manager.on_new_request(asking)
    assert [stack.manager.lookup(key, asking) for key in old] == [True] * 6
