"""Savings that the persistent tier records: blocks that requests used instead of computing them."""

from __future__ import annotations

import time
from collections.abc import Iterable, Sequence
from contextlib import closing
from functools import partial
from pathlib import Path

import numpy as np
import pytest

from persistkv.base import OffloadKey, ReqContext
from persistkv.storage import open_backend
from persistkv.storage.store.savings import read_savings
from persistkv.tiering.base import JobResult
from persistkv.tiering.persistent import PersistentTier
from tests.tiering.conftest import Described, Keys, MakeStack, Stack

BLOCK_TOKENS = 16


class WithholdingTier(PersistentTier):
    """Persistent tier whose results arrive late: only while ``withholds_results`` is not set."""

    withholds_results = False

    def get_finished_jobs(self) -> list[JobResult]:
        return [] if self.withholds_results else super().get_finished_jobs()


@pytest.fixture
def url(tmp_path: Path) -> str:
    return f"lmdb://{tmp_path}/store"


@pytest.fixture
def names(keys: Keys) -> list[OffloadKey]:
    return keys(8)


@pytest.fixture
def stack(
    make_stack: MakeStack,
    described: Described,
    names: list[OffloadKey],
    url: str,
) -> Stack:
    """Return a stack whose store holds the blocks of ``names``; the primary tier is empty."""
    made = make_stack(32, partial(WithholdingTier, url=url, host="thread"))
    cold = described("cold", names)
    made.manager.on_new_request(cold)
    made.store(names, cold)
    made.manager.on_request_finished(cold)
    assert made.tiers_of(PersistentTier)[0].wait_persisted("cold", 90)
    made.step()
    made.clear_primary()
    return made


def begin(
    stack: Stack, req: ReqContext, names: Sequence[OffloadKey]
) -> list[bool | None]:
    """Begin a request, and return the first answers to its lookups."""
    stack.manager.on_new_request(req)
    answers = stack.manager.lookup_prefix(names, req)
    stack.step()
    return answers


def load(stack: Stack, req: ReqContext, names: Sequence[OffloadKey]) -> None:
    """Load blocks to the device, as a request does that does not compute them."""
    stack.check(names, stack.manager.prepare_load(names, req))
    stack.manager.complete_load(names, req)


def saved(stack: Stack, url: str, ended: Iterable[ReqContext]) -> tuple[int, int]:
    """End requests and the engine; return the recorded requests and tokens."""
    for req in ended:
        stack.manager.on_request_finished(req)
    stack.rows = np.empty((0, 0), np.uint8)
    stack.manager.shutdown()
    with closing(open_backend(url, read_only=True)) as backend:
        totals = read_savings(backend)
    requests = sum(total.requests for total in totals)
    return requests, sum(total.tokens for total in totals)


def test_blocks_that_two_requests_waited_for_save_tokens_of_both(
    stack: Stack,
    described: Described,
    names: list[OffloadKey],
    url: str,
) -> None:
    first, second = described("first", names), described("second", names[:4])
    assert begin(stack, first, names) == [None] * 8
    assert begin(stack, second, names[:4]) == [None] * 4
    assert stack.promote(names, first) == [True] * 8
    load(stack, first, names)
    load(stack, second, names[:4])
    assert saved(stack, url, [first, second]) == (2, 12 * BLOCK_TOKENS)


def test_blocks_that_arrive_after_their_deadline_save_nothing(
    stack: Stack,
    described: Described,
    names: list[OffloadKey],
    url: str,
) -> None:
    (tier,) = stack.tiers_of(WithholdingTier)
    tier.load_deadline_s = 0.05
    tier.withholds_results = True
    req = described("warm", names)
    assert begin(stack, req, names) == [None] * 8
    deadline = time.monotonic() + 60
    while stack.manager.lookup_prefix(names, req):
        assert time.monotonic() < deadline
        stack.step()
    # the request computes its blocks, and then the result arrives
    tier.withholds_results = False
    while stack.primary.num_free_or_evictable() < 32:
        assert time.monotonic() < deadline
        stack.step()
    assert saved(stack, url, [req]) == (0, 0)


def test_blocks_that_request_did_not_wait_for_save_nothing(
    stack: Stack,
    described: Described,
    names: list[OffloadKey],
    url: str,
) -> None:
    """The engine has a deadline of its own, after which it computes the whole prompt."""
    req = described("warm", names)
    assert begin(stack, req, names) == [None] * 8
    assert stack.promote(names, req) == [True] * 8
    assert saved(stack, url, [req]) == (0, 0)


def test_request_without_stores_saves_tokens(
    stack: Stack,
    names: list[OffloadKey],
    url: str,
) -> None:
    req = ReqContext("reader", store=False)
    assert begin(stack, req, names) == [None] * 8
    assert stack.promote(names, req) == [True] * 8
    load(stack, req, names)
    assert saved(stack, url, [req]) == (1, 8 * BLOCK_TOKENS)
