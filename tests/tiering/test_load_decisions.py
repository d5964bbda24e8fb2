"""Decisions of the manager: what is loaded from secondary tiers, and what the engine computes."""

from __future__ import annotations

import itertools
import math
import os
import signal
import threading
import time
from collections.abc import Iterable, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Unpack

import pytest

from persistkv.base import OffloadKey, ReqContext
from persistkv.config import OffloadingConfig
from persistkv.cpu.spec import WorkerGeometry
from persistkv.errors import ConfigurationError
from persistkv.storage.backend import ReadSpan
from persistkv.tiering.load_cost import LoadDecision, Reason
from persistkv.tiering.persistent import PersistentTier
from persistkv_dir.blobs import DirBlobs
from persistkv_lmdb import LmdbBackend
from tests.host_processes import host_processes
from tests.tiering.conftest import (
    GROUPS,
    Described,
    Keys,
    MakeStack,
    MakeTier,
    ManagerOptions,
    Stack,
    context,
    persistent,
)
from tests.tiering.tiers import RecordingTier

BLOCK_BYTES = GROUPS[0].block_bytes
TOKENS_PER_S = 160.0  # ten blocks


class TimedTier(RecordingTier):
    """Tier that expects its loads to take ``block_s`` per block."""

    block_s = 0.0

    def __init__(
        self,
        config: OffloadingConfig,
        primary_kv_view: memoryview,
        max_blocks: int = 1000,
        simulate_async: bool = False,
    ) -> None:
        super().__init__(config, primary_kv_view, max_blocks, simulate_async)
        self.declined: list[tuple[list[OffloadKey], LoadDecision]] = []
        self.abandoned: list[int] = []
        self.passed_over: list[list[OffloadKey]] = []

    def lookup_prefix(self, keys: Sequence[OffloadKey], req_context: ReqContext) -> int:
        return super().lookup_prefix(keys, req_context)

    def expected_load_s(self, num_bytes: int) -> float | None:
        return self.block_s * num_bytes / BLOCK_BYTES

    def on_load_declined(
        self,
        keys: Sequence[OffloadKey],
        req_context: ReqContext,
        decision: LoadDecision,
    ) -> None:
        self.declined.append((list(keys), decision))

    def on_faster_tier(self, keys: Sequence[OffloadKey]) -> None:
        self.passed_over.append(list(keys))

    def on_load_abandoned(self, job_id: int) -> None:
        self.abandoned.append(job_id)


def warm_stack(
    make_stack: MakeStack,
    keys: Sequence[OffloadKey],
    described: Described,
    *tiers: MakeTier,
    **options: Unpack[ManagerOptions],
) -> Stack:
    """Return a stack whose secondary tiers hold the blocks of ``keys``; the primary tier is
    empty."""
    stack = make_stack(32, *tiers, prefill_tokens_per_s=TOKENS_PER_S, **options)
    req = described("cold", keys)
    stack.manager.on_new_request(req)
    stack.store(keys, req)
    stack.step(3)
    stack.manager.on_request_finished(req)
    stack.clear_primary()
    return stack


def lookup(
    stack: Stack, req: ReqContext, keys: Sequence[OffloadKey]
) -> list[bool | None]:
    return stack.manager.lookup_prefix(keys, req)


@pytest.mark.parametrize("block_s", [0.05, 0.2])
def test_lookup_prefix_loads_what_is_faster_than_computing(
    make_stack: MakeStack,
    keys: Keys,
    described: Described,
    block_s: float,
) -> None:
    names = keys(8)
    stack = warm_stack(make_stack, names, described, TimedTier)
    (tier,) = stack.tiers_of(TimedTier)
    tier.block_s = block_s
    req = described("warm", names)
    stack.manager.on_new_request(req)
    answers = lookup(stack, req, names)
    stack.step(3)
    if block_s < 0.1:
        assert answers == [None] * 8
        assert [list(job.keys) for job in tier.loads] == [names]
        assert stack.manager.load_reason("warm") is Reason.LOADED
        decision = tier.loads[0].decision
        assert decision is not None
        assert (decision.load_s, decision.compute_s) == (pytest.approx(0.4), 0.8)
        assert tier.declined == []
    else:
        assert answers == []
        assert tier.loads == []
        assert stack.manager.load_reason("warm") is Reason.TOO_SLOW
        ((declined, decision),) = tier.declined
        assert declined == names
        assert decision is not None
        assert (decision.load_s, decision.compute_s) == (pytest.approx(1.6), 0.8)
    assert lookup(stack, req, names) == ([True] * 8 if block_s < 0.1 else [])


def test_lookup_prefix_declined_request_asks_no_second_time(
    make_stack: MakeStack,
    keys: Keys,
    described: Described,
) -> None:
    """A request is not delayed by a load that it did not need at its beginning."""
    names = keys(8)
    stack = warm_stack(make_stack, names, described, TimedTier)
    (tier,) = stack.tiers_of(TimedTier)
    tier.block_s = 1.0
    req = described("warm", names)
    stack.manager.on_new_request(req)
    assert lookup(stack, req, names) == []
    tier.block_s = 0.0
    assert lookup(stack, req, names) == []
    assert len(tier.declined) == 1
    other = described("other", names)
    stack.manager.on_new_request(other)
    assert lookup(stack, other, names) == [None] * 8


def test_lookup_prefix_declined_request_loads_no_other_group(
    make_stack: MakeStack,
    keys: Keys,
) -> None:
    """A load under the refusal's deadline, 0 s, would be abandoned, and the store taken for
    stalled."""
    chains = keys(8), keys(8, 1)
    stack = warm_stack(
        make_stack,
        [*chains[0], *chains[1]],
        lambda req_id, _: context(req_id, *chains),
        TimedTier,
    )
    (tier,) = stack.tiers_of(TimedTier)
    tier.block_s = 1.0
    req = context("warm", *chains)
    stack.manager.on_new_request(req)
    assert [lookup(stack, req, chain) for chain in chains] == [[], []]
    assert [stack.manager.lookup(chain[1], req) for chain in chains] == [False, False]
    stack.step(3)
    assert tier.loads == []
    assert len(tier.declined) == 1


def test_lookup_prefix_fastest_tier_loads_what_both_hold(
    make_stack: MakeStack,
    keys: Keys,
    described: Described,
) -> None:
    names = keys(8)
    stack = warm_stack(make_stack, names, described, TimedTier, TimedTier)
    near, far = stack.tiers_of(TimedTier)
    near.block_s, far.block_s = 0.09, 0.01
    req = described("warm", names)
    stack.manager.on_new_request(req)
    assert lookup(stack, req, names) == [None] * 8
    stack.step(3)
    assert [list(job.keys) for job in far.loads] == [names]
    assert near.loads == []
    assert near.passed_over == [names]
    near.block_s = 0.005
    stack.manager.on_request_finished(req)
    stack.clear_primary()
    again = described("again", names)
    stack.manager.on_new_request(again)
    assert lookup(stack, again, names) == [None] * 8
    stack.step(3)
    assert [list(job.keys) for job in near.loads] == [names]
    assert far.passed_over == [], "a far tier is expected to be slower"


def test_lookup_prefix_near_tier_loads_without_slow_far_one(
    make_stack: MakeStack,
    keys: Keys,
    described: Described,
) -> None:
    names = keys(8)
    stack = warm_stack(make_stack, names, described, TimedTier, TimedTier)
    near, far = stack.tiers_of(TimedTier)
    for key in names[4:]:
        del near.blocks[key]
    near.block_s, far.block_s = 0.01, 10.0
    req = described("warm", names)
    stack.manager.on_new_request(req)
    assert lookup(stack, req, names) == [None] * 4
    stack.step(3)
    assert [list(job.keys) for job in near.loads] == [names[:4]]
    assert far.loads == []
    assert [declined for declined, _ in far.declined] == [names[4:]]


def test_lookup_prefix_unknown_speed_loads_everything(
    make_stack: MakeStack,
    keys: Keys,
    described: Described,
) -> None:
    names = keys(4)
    stack = warm_stack(make_stack, names, described, TimedTier)
    unknown = make_stack(16, TimedTier)
    unknown.tiers_of(TimedTier)[0].blocks.update(stack.tiers_of(TimedTier)[0].blocks)
    unknown.tiers_of(TimedTier)[0].block_s = 1e6
    req = described("warm", names)
    unknown.manager.on_new_request(req)
    assert lookup(unknown, req, names) == [None] * 4


def test_lookup_prefix_tier_without_estimates_loads_without_deadline(
    make_stack: MakeStack,
    keys: Keys,
    described: Described,
) -> None:
    class Simple(RecordingTier):
        def lookup_prefix(
            self,
            keys: Sequence[OffloadKey],
            req_context: ReqContext,
        ) -> int:
            return super().lookup_prefix(keys, req_context)

    names = keys(4)
    stack = warm_stack(make_stack, names, described, Simple)
    req = described("warm", names)
    stack.manager.on_new_request(req)
    assert lookup(stack, req, names) == [None] * 4
    stack.step()
    assert stack.tiers_of(RecordingTier)[0].loads[0].deadline is None


def test_lookup_prefix_tier_that_raises_is_computed(
    make_stack: MakeStack,
    keys: Keys,
    described: Described,
) -> None:
    class Broken(TimedTier):
        def expected_load_s(self, num_bytes: int) -> float:
            raise OSError("no")

    names = keys(4)
    stack = warm_stack(make_stack, names, described, Broken)
    req = described("warm", names)
    stack.manager.on_new_request(req)
    assert lookup(stack, req, names) == []


def test_promotion_beyond_deadline_is_miss_and_keeps_its_rows(
    make_stack: MakeStack,
    keys: Keys,
    described: Described,
) -> None:
    names = keys(8)
    stack = warm_stack(make_stack, names, described, TimedTier)
    (tier,) = stack.tiers_of(TimedTier)
    tier.load_deadline_s = 0.05
    tier.withholds_results = True
    req = described("warm", names)
    stack.manager.on_new_request(req)
    assert lookup(stack, req, names) == [None] * 8
    stack.step()
    deadline = time.monotonic() + 60
    while lookup(stack, req, names):
        assert time.monotonic() < deadline
        stack.step()
    assert stack.manager.load_reason("warm") is Reason.DEADLINE
    assert stack.primary.num_free_or_evictable() == 32 - 8, "it may still write them"
    assert tier.loads[0].deadline is not None
    assert tier.abandoned == [tier.loads[0].job_id]
    tier.withholds_results = False
    stack.step(2)
    assert stack.primary.num_free_or_evictable() == 32
    assert lookup(stack, req, names) == [True] * 8, "the blocks arrived late"


def test_on_new_request_reused_id_decides_again(
    make_stack: MakeStack,
    keys: Keys,
    described: Described,
) -> None:
    """The id is used again while a block of the first request is being written."""
    names = keys(8)
    stack = warm_stack(make_stack, names, described, TimedTier)
    (tier,) = stack.tiers_of(TimedTier)
    tier.block_s = 1.0
    first = described("twice", names)
    stack.manager.on_new_request(first)
    assert lookup(stack, first, names) == []
    written = keys(9)[8:]
    assert stack.manager.prepare_store(written, first) is not None
    stack.manager.on_request_finished(first)

    tier.block_s = 0.0
    second = described("twice", names)
    stack.manager.on_new_request(second)
    assert stack.manager.load_reason("twice") is None
    assert lookup(stack, second, names) == [None] * 8
    stack.step(3)
    decision = tier.loads[0].decision
    assert decision is not None
    assert decision.num_runs == 1
    assert stack.manager.load_reason("twice") is Reason.LOADED
    assert lookup(stack, second, names) == [True] * 8
    stack.manager.complete_store(written, first)


@pytest.mark.parametrize("value", [0, -1, math.nan, math.inf])
def test_prefill_speed_out_of_range_raises(value: float) -> None:
    from persistkv.tiering.spec import TieringOffloadingSpec

    with pytest.raises(ConfigurationError, match="prefill_tokens_per_s"):
        TieringOffloadingSpec(
            extra_config={"cpu_bytes_to_use": 1 << 20, "prefill_tokens_per_s": value},
            geometry=WorkerGeometry(
                instance_id="test", gpu_block_size=16, gpu_block_bytes=3000
            ),
        )


def store_blocks(
    make_stack: MakeStack,
    names: list[OffloadKey],
    req: ReqContext,
    *tiers: MakeTier,
) -> Stack:
    """Return a stack with persistent tiers that hold the blocks; the primary tier is empty."""
    stack = make_stack(32, *tiers)
    stack.manager.on_new_request(req)
    stack.store(names, req)
    stack.manager.on_request_finished(req)
    for tier in stack.tiers_of(PersistentTier):
        assert tier.wait_persisted(req.req_id, 90)
    stack.step()
    stack.clear_primary()
    return stack


def test_persistent_tier_stopped_host_is_computed_then_tried_again(
    make_stack: MakeStack,
    keys: Keys,
    described: Described,
    tmp_path: Path,
) -> None:
    """The store counts as stalled until a probe of its next host process ends."""
    names = keys(8)
    tier = partial(PersistentTier, url=f"lmdb://{tmp_path}/store")
    stack = store_blocks(make_stack, names, described("cold", names), tier)
    (store,) = stack.tiers_of(PersistentTier)
    stack.manager.load_chooser.prefill.observe(0, 1000, 1000.0)
    (pid,) = host_processes()
    os.kill(pid, signal.SIGSTOP)
    req = described("warm", names)
    stack.manager.on_new_request(req)
    assert stack.promote(names, req) == [False] * 8
    assert stack.manager.load_reason("warm") is Reason.DEADLINE
    deadline = time.monotonic() + 90
    while pid in host_processes():
        assert time.monotonic() < deadline
        stack.step()
    number = 0
    while store.load_counts[Reason.LOADED] == 0:
        assert time.monotonic() < deadline, store.load_counts
        number += 1
        again = described(f"again-{number}", names)
        stack.manager.on_new_request(again)
        while None in lookup(stack, again, names):
            stack.step()
        stack.step()
        stack.manager.on_request_finished(again)
        time.sleep(0.01)
    assert store.load_counts[Reason.DEADLINE] == 1
    assert store.load_counts[Reason.TOO_SLOW] > 0


@pytest.mark.parametrize("policy", ["auto", "always", "never"])
def test_persistent_tier_load_policy_decides(
    make_stack: MakeStack,
    keys: Keys,
    described: Described,
    tmp_path: Path,
    policy: str,
) -> None:
    names = keys(8)
    tier = partial(
        PersistentTier,
        url=f"lmdb://{tmp_path}/store",
        host="thread",
        load_policy=policy,
    )
    stack = store_blocks(make_stack, names, described("cold", names), tier)
    (store,) = stack.tiers_of(PersistentTier)
    # computing takes no time, so no load is faster
    stack.manager.load_chooser.prefill.observe(0, 1000, 1e-9)
    for req_id in ("first", "second"):
        req = described(req_id, names)
        stack.manager.on_new_request(req)
        answers = lookup(stack, req, names)
        while None in answers:
            stack.step()
            answers = lookup(stack, req, names)
        stack.manager.on_request_finished(req)
        while stack.manager.has_pending_work():
            stack.step()  # a load that was abandoned
        stack.clear_primary()
    counts = store.load_counts
    if policy == "always":
        assert counts[Reason.LOADED] == 2
    elif policy == "never":
        assert sum(counts.values()) == 0
    else:
        # nothing is known of the store before the first load
        assert counts[Reason.DEADLINE] + counts[Reason.LOADED] == 1
        assert counts[Reason.TOO_SLOW] + counts[Reason.TOO_SHORT] == 1


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("load_policy", "often"),
        ("load_deadline_s", 0),
        ("load_deadline_s", math.nan),
        ("max_age_s", math.nan),
    ],
)
def test_persistent_tier_invalid_load_option_raises(
    make_stack: MakeStack,
    tmp_path: Path,
    name: str,
    value: object,
) -> None:
    options: dict[str, object] = {"url": f"lmdb://{tmp_path}/store", name: value}
    tier = persistent(**options)
    with pytest.raises(ConfigurationError, match=name):
        make_stack(4, tier)


def test_persistent_tier_late_read_counts_as_the_manager_says(
    make_stack: MakeStack,
    keys: Keys,
    described: Described,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A read that was in progress at the deadline brings all blocks, after the request has given
    up."""
    names = keys(8)
    tier = partial(
        PersistentTier,
        url=f"lmdb://{tmp_path}/store",
        host="thread",
        load_deadline_s=0.1,
    )
    stack = store_blocks(make_stack, names, described("cold", names), tier)
    (store,) = stack.tiers_of(PersistentTier)
    goes_on = threading.Event()
    read = LmdbBackend.read

    def late_read(
        backend: LmdbBackend,
        namespace: bytes,
        spans: Sequence[ReadSpan],
    ) -> list[bool]:
        assert goes_on.wait(60)
        return read(backend, namespace, spans)

    monkeypatch.setattr(LmdbBackend, "read", late_read)
    req = described("warm", names)
    stack.manager.on_new_request(req)
    assert stack.promote(names, req) == [False] * 8
    assert stack.manager.load_reason("warm") is Reason.DEADLINE
    goes_on.set()
    deadline = time.monotonic() + 60
    while not sum(store.load_counts.values()):
        assert time.monotonic() < deadline
        stack.step()
    assert store.load_counts[Reason.DEADLINE] == 1
    assert sum(store.load_counts.values()) == 1


@pytest.mark.parametrize(
    ("windows", "num_second"),
    [((), 8), ((None, 32, None), 2), ((None, 1, None), 1)],
)
def test_lookup_prefix_counts_the_bytes_of_all_groups(
    make_stack: MakeStack,
    keys: Keys,
    windows: tuple[int | None, ...],
    num_second: int,
) -> None:
    """The decision about the first group applies to the others."""
    num_bytes = 8 * GROUPS[0].block_bytes + num_second * GROUPS[1].block_bytes
    num_blocks = num_bytes / BLOCK_BYTES
    chains = keys(8), keys(8, 1)

    def make_tier(config: OffloadingConfig, view: memoryview) -> TimedTier:
        return TimedTier(replace(config, windows=windows), view)

    stack = warm_stack(
        make_stack,
        [*chains[0], *chains[1]],
        lambda req_id, _: context(req_id, *chains),
        make_tier,
    )
    (tier,) = stack.tiers_of(TimedTier)
    tier.block_s = 0.9 * 0.8 / num_blocks  # of 0.8 s for computing
    req = context("warm", *chains)
    stack.manager.on_new_request(req)
    assert lookup(stack, req, chains[0]) == [None] * 8
    stack.step(3)
    decision = tier.loads[0].decision
    assert decision is not None
    assert decision.load_s == pytest.approx(0.72)
    stack.manager.on_request_finished(req)
    stack.clear_primary()
    tier.block_s = 1.1 * 0.8 / num_blocks
    again = context("again", *chains)
    stack.manager.on_new_request(again)
    assert lookup(stack, again, chains[0]) == []


def test_lookup_prefix_tier_without_end_is_too_slow(
    make_stack: MakeStack,
    keys: Keys,
    described: Described,
) -> None:
    names = keys(2)
    stack = warm_stack(make_stack, names, described, TimedTier)
    (tier,) = stack.tiers_of(TimedTier)
    tier.block_s = math.inf
    req = described("warm", names)
    stack.manager.on_new_request(req)
    assert lookup(stack, req, names) == []
    assert stack.manager.load_reason("warm") is Reason.TOO_SLOW


def test_persistent_tiers_earlier_store_loads_again_after_stall(
    make_stack: MakeStack,
    keys: Keys,
    described: Described,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Meanwhile, a later store loads all that both hold, and the earlier one declines nothing."""
    names = keys(8)
    near = partial(
        PersistentTier,
        url=f"file://{tmp_path}/near",
        host="thread",
        load_deadline_s=0.2,
    )
    far = partial(PersistentTier, url=f"lmdb://{tmp_path}/far", host="thread")
    stack = store_blocks(make_stack, names, described("cold", names), near, far)
    near_store, far_store = stack.tiers_of(PersistentTier)
    stack.manager.load_chooser.prefill.observe(0, 1000, 1000.0)
    goes_on = threading.Event()
    read_near, read_far = DirBlobs.read, LmdbBackend.read

    def hanging_read(
        blobs: DirBlobs,
        name: str,
        offset: int,
        length: int,
        buffers: Iterable[memoryview],
    ) -> int:
        assert "/packs/" not in name or goes_on.wait(60)
        return read_near(blobs, name, offset, length, buffers)

    def slow_read(
        backend: LmdbBackend,
        namespace: bytes,
        spans: Sequence[ReadSpan],
    ) -> list[bool]:
        time.sleep(0.5)
        return read_far(backend, namespace, spans)

    monkeypatch.setattr(DirBlobs, "read", hanging_read)
    monkeypatch.setattr(LmdbBackend, "read", slow_read)
    deadline = time.monotonic() + 60
    numbers = itertools.count()

    def serve() -> None:
        req = described(f"warm-{next(numbers)}", names)
        stack.manager.on_new_request(req)
        while None in lookup(stack, req, names):
            assert time.monotonic() < deadline
            stack.step()
            time.sleep(0.001)
        stack.manager.on_request_finished(req)
        stack.clear_primary()

    serve()
    assert near_store.load_counts[Reason.DEADLINE] == 1
    serve()
    assert far_store.load_counts[Reason.LOADED] == 1
    goes_on.set()
    while not near_store.load_counts[Reason.LOADED]:
        serve()
