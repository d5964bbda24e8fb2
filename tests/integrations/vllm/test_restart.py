"""Restarts of real vLLM engines: later engines reuse the stored contexts."""

from __future__ import annotations

import sys
import time
from contextlib import closing
from pathlib import Path

import pytest

from persistkv.storage import open_backend
from persistkv.storage.store.savings import Savings, read_savings
from tests.integrations.vllm.conftest import (
    PREWARM,
    SHORT,
    StartEngine,
    prompt,
    tier,
    wait_stored,
)
from tests.integrations.vllm.engines import Engine
from tests.integrations.vllm.tiny_model import TOKEN_BYTES, make_model

pytestmark = pytest.mark.vllm

PROMPTS = [prompt(1), prompt(2), prompt(3, 250)]


@pytest.fixture(scope="module")
def expected(plain_engine: Engine) -> list[list[int]]:
    """Answers of an engine without a connector."""
    answers: list[list[int]] = plain_engine.generate(*PROMPTS)["tokens"]
    return answers


def savings(url: str) -> Savings:
    """Return the savings of the only namespace of a store."""
    with closing(open_backend(url, read_only=True)) as backend:
        (saved,) = read_savings(backend)
    return saved


def test_engine_restart_after_kill_and_after_exit_starts_warm(
    start_engine: StartEngine,
    url: str,
    expected: list[list[int]],
) -> None:
    killed = start_engine(tier(url))
    assert killed.generate(*PROMPTS[:2]) == {"tokens": expected[:2], "cached": [0, 0]}
    killed.generate(SHORT)
    wait_stored(url, 2)
    killed.kill()
    # shares only the store with the first
    ended = start_engine(tier(url), command=[sys.executable])
    assert ended.generate(*PROMPTS) == {"tokens": expected, "cached": [384, 384, 0]}
    ended.close()
    last = start_engine(tier(url))
    assert last.generate(*PROMPTS) == {"tokens": expected, "cached": [384, 384, 224]}
    assert "in a thread" not in last.log  # the store runs in a host process
    assert "persistkv: tier persistkv raised" not in killed.log + ended.log + last.log
    last.close()
    # the hosts write it when they end, after their engines
    deadline = time.monotonic() + 60
    while (saved := savings(url)).requests < 5 and time.monotonic() < deadline:
        time.sleep(0.2)
    assert (saved.requests, saved.tokens) == (5, 4 * 384 + 224)
    assert saved.prefill_tokens > 0


@pytest.mark.parametrize("tokens_per_s", [1.0, 1e12])
def test_engine_loads_only_what_is_faster_than_computing(
    start_engine: StartEngine,
    url: str,
    expected: list[list[int]],
    tokens_per_s: float,
) -> None:
    writer = start_engine(tier(url))
    assert writer.generate(*PROMPTS[:2])["tokens"] == expected[:2]
    writer.generate(SHORT)
    writer.close()
    wait_stored(url, 2)
    options = {"load_policy": "auto", "prefill_tokens_per_s": tokens_per_s}
    reader = start_engine(tier(url, **options))
    found = reader.generate(*PROMPTS[:2])
    assert found["tokens"] == expected[:2]
    assert found["cached"] == ([384, 384] if tokens_per_s == 1.0 else [0, 0])
    reader.close()


@pytest.mark.parametrize("is_asynchronous", [False, True])
def test_engine_measured_prefills_are_those_of_steps(
    start_engine: StartEngine,
    url: str,
    is_asynchronous: bool,
) -> None:
    """Neither the wait after an answer of one token, which has a single step, nor the schedule that
    does not wait for the step before."""
    options = {}
    if is_asynchronous:
        # with the default executor, a schedule on a CPU waits all the same
        options = {"async_scheduling": True, "distributed_executor_backend": "mp"}
    engine = start_engine(tier(url), **options)
    seconds = []
    for seed in range(16):
        begin = time.monotonic()
        engine.generate(prompt(100 + seed), max_tokens=4 if seed < 4 else 1)
        seconds.append(time.monotonic() - begin)
        engine.ask(do="rest", seconds=3 * seconds[-1] if seed >= 4 else 0.0)
    engine.close()
    wait_stored(url, 15)
    saved = savings(url)
    assert saved.prefill_tokens >= 3 * 384
    assert (
        min(seconds) * saved.prefill_tokens / 384 / 4 < saved.prefill_s < sum(seconds)
    )


def test_engine_changed_model_misses_and_answers_correctly(
    start_engine: StartEngine,
    url: str,
    tmp_path: Path,
    expected: list[list[int]],
) -> None:
    checkpoint = make_model(tmp_path / "changing")
    writer = start_engine(tier(url), checkpoint=checkpoint)
    assert writer.generate(*PROMPTS)["tokens"] == expected
    writer.close()
    wait_stored(url, 3)
    for change in ({"seed": 1}, {"rope_theta": 500000.0}):
        make_model(checkpoint, **change)
        plain = start_engine(checkpoint=checkpoint)
        right = plain.generate(*PROMPTS)
        plain.close()
        other = start_engine(tier(url), checkpoint=checkpoint)
        assert other.generate(*PROMPTS) == right, change
        other.close()
        assert right["tokens"] != expected, change
    make_model(checkpoint)
    other = start_engine(tier(url), checkpoint=checkpoint, dtype="bfloat16")
    assert other.generate(*PROMPTS)["cached"] == [0, 0, 0]


def test_engine_restart_two_blocks_per_chunk_starts_warm(
    start_engine: StartEngine, url: str, expected: list[list[int]]
) -> None:
    options = {"extra": {"block_size": 64}}
    writer = start_engine(tier(url), **options)
    writer.generate(*PROMPTS)
    writer.close()
    wait_stored(url, 3)
    warm = start_engine(tier(url), **options)
    assert warm.generate(*PROMPTS) == {"tokens": expected, "cached": [384, 384, 192]}


def test_prewarm_promotes_recent_contexts_before_their_requests(
    start_engine: StartEngine,
    url: str,
    expected: list[list[int]],
) -> None:
    loaded = "vllm:kv_offload_persistkv_load_bytes"
    writer = start_engine(tier(url))
    writer.generate(*PROMPTS)
    writer.close()
    wait_stored(url, 3)
    warm = start_engine(tier(url), PREWARM)
    deadline = time.monotonic() + 120
    while warm.metrics().get(loaded, 0) < (384 + 384 + 224) * TOKEN_BYTES:
        assert time.monotonic() < deadline, warm.metrics()
        warm.generate(SHORT)  # each step promotes some blocks
    before = warm.metrics()[loaded]
    assert warm.generate(*PROMPTS) == {"tokens": expected, "cached": [384, 384, 224]}
    assert warm.metrics()[loaded] == before


def test_prefetch_token_ids_promotes_context_evicted_from_cpu_tier(
    start_engine: StartEngine, url: str
) -> None:
    first, *others = (prompt(seed) for seed in range(4))
    extra = {"block_size": 64, "cpu_bytes_to_use": 1000 * TOKEN_BYTES}
    engine = start_engine(tier(url), PREWARM, extra=extra)
    for number, tokens in enumerate([first, *others]):
        engine.generate(tokens)
        engine.generate(SHORT)
        wait_stored(url, number + 1)
    loaded = "vllm:kv_offload_persistkv_load_bytes"
    before = engine.metrics().get(loaded, 0.0)
    engine.generate(
        SHORT, params={"persistkv": {"store": False, "prefetch": {"token_ids": first}}}
    )
    deadline = time.monotonic() + 60
    while (after := engine.metrics().get(loaded, 0.0)) == before:
        assert time.monotonic() < deadline, "nothing was promoted"
        engine.generate(SHORT)
        time.sleep(0.2)
    assert after - before >= 64 * TOKEN_BYTES
