"""What was used last is promoted before anyone asks for it."""

from __future__ import annotations

import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from persistkv.base import OffloadKey, ReqContext
from persistkv.errors import ConfigurationError
from persistkv.tiering.persistent import PersistentTier
from persistkv.tiering.prewarming import Prewarming

Keys = Callable[..., list[OffloadKey]]
MakeStack = Callable[..., Any]
Described = Callable[..., ReqContext]


class Answering:
    """A tier that answers when it is told to."""

    def __init__(self) -> None:
        self.open = False
        self.asked: list[int] = []
        self.answer: list[list[OffloadKey]] | None = None

    def ask_recent(self, max_blocks: int) -> bool:
        if self.open:
            self.asked.append(max_blocks)
        return self.open

    def take_recent(self) -> list[list[OffloadKey]] | None:
        answer, self.answer = self.answer, None
        return answer


def test_contexts_come_one_by_one_once_they_are_known(keys: Keys) -> None:
    tier, contexts = Answering(), [keys(3), keys(2)]
    prewarming = Prewarming(tier, 5)
    assert prewarming.next_context() is None
    tier.open = True
    assert prewarming.next_context() is None
    tier.answer = list(contexts)
    assert [prewarming.next_context() for _ in range(2)] == contexts
    assert not prewarming.ended
    assert prewarming.next_context() is None
    assert prewarming.ended
    assert tier.asked == [5]


def test_a_tier_that_does_not_answer_is_not_waited_for_for_ever(monkeypatch: pytest.MonkeyPatch) -> None:
    prewarming = Prewarming(Answering(), 5)
    soon = time.monotonic() + 61
    monkeypatch.setattr(time, "monotonic", lambda: soon)
    assert prewarming.next_context() is None
    assert prewarming.ended


def fill(stack: Any, described: Described, name: str, chain: list[OffloadKey]) -> None:
    req = described(name, chain)
    stack.manager.on_new_request(req)
    stack.store(chain, req)
    stack.manager.on_request_finished(req)
    assert stack.tiers[0].wait_persisted(name, 90)
    stack.step()


@pytest.mark.parametrize("host", ["inline", "process"])
def test_a_restarted_stack_promotes_what_was_used_last(
    make_stack: MakeStack, keys: Keys, described: Described, tmp_path: Path, host: str
) -> None:
    tier = partial(PersistentTier, url=f"lmdb://{tmp_path}/store", host=host, max_age_s=0.01)
    first, (old, new) = make_stack(16, tier), (keys(6), keys(6))
    fill(first, described, "old", old)
    fill(first, described, "new", new)
    first.manager.shutdown()

    second = make_stack(16, tier, prewarm_share=0.5)
    deadline = time.monotonic() + 90
    while second.manager.has_pending_work():
        assert time.monotonic() < deadline
        second.step()
    asking = described("asking", new)
    second.manager.on_new_request(asking)
    assert [second.manager.lookup(key, asking) for key in new] == [True] * 6
    assert second.manager.stats.promoted_blocks == 8
    assert [second.manager.lookup(key, asking) for key in old] == [True] * 2 + [None] * 4
    second.check(new, second.manager.prepare_load(new, asking))
    second.manager.complete_load(new, asking)


def test_a_share_must_be_one(make_stack: MakeStack) -> None:
    with pytest.raises(ConfigurationError, match="prewarm_share"):
        make_stack(4, prewarm_share=1.5)
