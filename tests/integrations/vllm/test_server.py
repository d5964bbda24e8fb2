"""vLLM's OpenAI-compatible server, with all processes that it starts by default."""

from __future__ import annotations

import pytest

from tests.integrations.vllm.conftest import (
    PREWARM,
    prompt,
    stored_contexts,
    tier,
    wait_stored,
)

pytestmark = pytest.mark.vllm

PROMPTS = [prompt(1), prompt(2)]


@pytest.fixture(scope="module")
def expected(plain_engine):
    """Answers of an engine without a connector."""
    return plain_engine.generate(*PROMPTS)["tokens"]


def test_server_terminated_leaves_contexts_for_next_engine(
    start_server, start_engine, url, expected
):
    server = start_server(tier(url))
    assert server.generate(*PROMPTS) == {"tokens": expected, "cached": [0, 0]}
    server.terminate()
    assert server.wait(180), server.log[-6000:]
    wait_stored(url, 2)
    engine = start_engine(tier(url))
    assert engine.generate(*PROMPTS) == {"tokens": expected, "cached": [384, 384]}


@pytest.mark.slow
def test_server_restart_hits_stored_and_misses_opted_out_request(
    start_server, url, expected
):
    first = start_server(tier(url), new=True)
    first.generate(PROMPTS[0], params={"persistkv": False})
    first.generate(PROMPTS[1])
    assert "vllm:kv_offload_persistkv_open{" in first.metrics()
    first.terminate()
    assert first.wait(180), first.log[-6000:]
    wait_stored(url, 1)
    assert stored_contexts(url) == 1
    second = start_server(tier(url), PREWARM, new=True)
    assert second.generate(*PROMPTS) == {"tokens": expected, "cached": [0, 384]}
