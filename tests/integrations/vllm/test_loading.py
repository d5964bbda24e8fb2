"""Decisions about loads and the measured speed of prefills, with the values of vLLM that they
use."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from persistkv.base import OffloadKey, make_offload_key
from persistkv.integrations.vllm.loading import (
    StepMeter,
    StoreLoads,
    WaitingChunks,
    shared_prefill,
)
from persistkv.tenants import tenant_key
from persistkv.tiering.load_cost import PrefillSpeed, Reason

CHUNK_TOKENS, HASH_TOKENS, CHUNK_BYTES = 32, 16, 1000
HASHES = [bytes([number]) * 32 for number in range(64)]


def key_of(chunk: int) -> OffloadKey:
    last_hash = (chunk + 1) * CHUNK_TOKENS // HASH_TOKENS - 1
    return make_offload_key(HASHES[last_hash], 0)


class Tier:
    """A store that holds the first chunks of the context."""

    def __init__(
        self,
        num_held: int,
        chunk_s: float | None,
        tenant: str = "default",
    ) -> None:
        self._held = {tenant_key(tenant, key_of(chunk)) for chunk in range(num_held)}
        self._chunk_s = chunk_s
        group = SimpleNamespace(block_bytes=CHUNK_BYTES)
        layout = SimpleNamespace(groups=[group])
        self.config = SimpleNamespace(layout=layout, windows=())

    def holds(self, key: OffloadKey) -> bool:
        return key in self._held

    def expected_load_s(self, num_bytes: int) -> float | None:
        if self._chunk_s is None:
            return None
        return self._chunk_s * num_bytes / CHUNK_BYTES


def prefix_loads() -> StoreLoads:
    """Return the decisions of an engine that computes a chunk in 32 ms."""
    offloading = SimpleNamespace(
        cache=SimpleNamespace(tokens_per_hash=HASH_TOKENS),
        groups=[SimpleNamespace(group_id=0)],
    )
    return StoreLoads(offloading, [CHUNK_TOKENS], PrefillSpeed(1000))


def chunks_from(
    first: int,
    num_tokens: int = 1000,
    tenant: str | None = None,
) -> WaitingChunks:
    request = SimpleNamespace(block_hashes=HASHES, num_tokens=num_tokens)
    end = (first + 1) * CHUNK_TOKENS
    return prefix_loads().chunks(request, tenant, key_of(first), end)


def decide(
    *tiers: Any,
    first: int = 0,
    num_tokens: int = 1000,
    tenant: str | None = None,
) -> Any:
    """Return the decision of the first tier."""
    chunks = chunks_from(first, num_tokens, tenant)
    return prefix_loads().decide(tiers, tiers[0], chunks)


def test_decide_compares_prefix_that_store_holds() -> None:
    decision = decide(Tier(10, 0.01))
    assert decision.num_runs == 1
    assert (decision.load_s, decision.compute_s) == (pytest.approx(0.1), 0.32)


def test_decide_slow_store_is_declined() -> None:
    decision = decide(Tier(10, 0.05))
    assert (decision.num_runs, decision.reason) == (0, Reason.TOO_SLOW)


def test_decide_begins_at_first_chunk_that_is_not_there() -> None:
    decision = decide(Tier(10, 0.01), first=7)
    assert decision.load_s == pytest.approx(0.03)
    assert decision.compute_s == pytest.approx(0.096)


def test_decide_last_token_is_computed() -> None:
    assert decide(Tier(10, 0.01), num_tokens=64).load_s == pytest.approx(0.01)
    assert decide(Tier(10, 0.01), num_tokens=65).load_s == pytest.approx(0.02)


def test_decide_faster_store_of_same_prefix_loads() -> None:
    assert decide(Tier(10, 0.02), Tier(10, 0.01)) is None
    assert decide(Tier(10, 0.01), Tier(10, 0.02)).num_runs == 1
    assert decide(Tier(10, 0.02), Tier(9, 0.01)).num_runs == 1, "it holds less"


def test_decide_store_that_is_not_compared_loads() -> None:
    assert decide(Tier(10, None), Tier(10, 0.001)).num_runs == 1


def test_held_by_are_held_chunks_of_request() -> None:
    ten: Any = Tier(10, 0.01)
    assert chunks_from(0).held_by(ten, 128) == [key_of(chunk) for chunk in range(10)]
    assert chunks_from(7).held_by(ten, 128) == [key_of(7), key_of(8), key_of(9)]
    assert chunks_from(7).held_by(ten, 2) == [key_of(7), key_of(8)]
    assert chunks_from(7).held_by(ten, 1) == [key_of(7)]
    longer: Any = Tier(32, 0.01)
    all_of_it = chunks_from(0).held_by(longer, 128)
    assert len(all_of_it) == 1000 // CHUNK_TOKENS, "the last chunk is not full"


def test_decide_and_held_by_count_chunks_of_tenant_only() -> None:
    own: Any = Tier(10, 0.01, "anna")
    faster, other = Tier(10, 0.001, "anna"), Tier(10, 0.001, "berta")
    assert decide(own, tenant="anna").load_s == pytest.approx(0.1)
    assert decide(own, faster, tenant="anna") is None
    assert decide(own, other, tenant="anna").num_runs == 1
    assert chunks_from(0, tenant="anna").held_by(own, 3) == [
        tenant_key("anna", key_of(chunk)) for chunk in range(3)
    ]


class Clock:
    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


def test_step_meter_stores_show_tokens_of_step_before() -> None:
    clock, prefill = Clock(), PrefillSpeed()
    recorded = []
    meter = StepMeter(prefill, lambda *measured: recorded.append(measured), clock)
    meter.end_schedule(is_busy=True)
    clock.now += 2.0  # the step that computes 1,000 tokens
    meter.end_schedule(is_busy=True)
    meter.add("a", 0, 400)
    meter.add("a", 400, 800)
    meter.add("b", 0, 200)
    clock.now += 0.1
    meter.end_schedule(is_busy=True)
    assert prefill.expected_s(0, 1000) == pytest.approx(2.0)
    assert recorded == [(1000, 2.0)]


def test_step_meter_ignores_decoding_and_pauses() -> None:
    clock, prefill = Clock(), PrefillSpeed()
    recorded = []
    meter = StepMeter(prefill, lambda *measured: recorded.append(measured), clock)

    def step(num_tokens: int, seconds: float) -> None:
        meter.end_schedule(is_busy=True)
        clock.now += seconds
        meter.end_schedule(is_busy=True)
        meter.add("a", 0, num_tokens)
        meter.end_schedule(is_busy=True)

    step(16, 0.1)
    assert prefill.expected_s(0, 1000) is None
    step(1000, 60.0)
    assert prefill.expected_s(0, 1000) is None
    step(1000, 1.0)
    step(1000, 10.0)  # paused for 9 s
    assert prefill.expected_s(0, 1000) == pytest.approx(1.0)
    assert recorded == [(1000, 1.0)]


def test_step_meter_wait_for_next_request_is_no_computation() -> None:
    clock, prefill = Clock(), PrefillSpeed()
    meter = StepMeter(prefill, lambda *measured: None, clock)
    meter.end_schedule(is_busy=False)
    clock.now += 4.0  # the only step of an answer, and a wait
    meter.end_schedule(is_busy=False)
    meter.add("a", 0, 1000)
    clock.now += 1.0  # the step of the next request
    meter.end_schedule(is_busy=True)
    assert prefill.expected_s(0, 1000) is None
    meter.add("b", 0, 1000)
    clock.now += 0.1
    meter.end_schedule(is_busy=True)
    assert prefill.expected_s(0, 1000) == pytest.approx(1.0)


def test_shared_prefill_is_one_per_engine() -> None:
    spec = SimpleNamespace()
    assert shared_prefill(spec, None) is shared_prefill(spec, 5.0)
