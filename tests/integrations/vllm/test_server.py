"""vLLM's OpenAI-compatible server, with all processes that it starts by default."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable

import pytest

from tests.host_processes import host_processes
from tests.integrations.vllm.conftest import (
    PREWARM,
    StartEngine,
    StartServer,
    prompt,
    stored_contexts,
    tier,
    wait_stored,
)
from tests.integrations.vllm.engines import Engine
from tests.integrations.vllm.programs import Program

pytestmark = pytest.mark.vllm

PROMPTS = [prompt(1), prompt(2)]


@pytest.fixture(scope="module")
def expected(plain_engine: Engine) -> list[list[int]]:
    """Answers of an engine without a connector."""
    answers: list[list[int]] = plain_engine.generate(*PROMPTS)["tokens"]
    return answers


def test_server_terminated_leaves_contexts_for_next_engine(
    start_server: StartServer,
    start_engine: StartEngine,
    url: str,
    expected: list[list[int]],
) -> None:
    server = start_server(tier(url))
    assert server.generate(*PROMPTS) == {"tokens": expected, "cached": [0, 0]}
    server.terminate()
    assert server.wait(180), server.log[-6000:]
    wait_stored(url, 2)
    engine = start_engine(tier(url))
    assert engine.generate(*PROMPTS) == {"tokens": expected, "cached": [384, 384]}


@pytest.mark.slow
def test_server_restart_hits_stored_and_misses_opted_out_request(
    start_server: StartServer,
    url: str,
    expected: list[list[int]],
) -> None:
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


def await_true(holds: Callable[[], bool], timeout_s: float = 60.0) -> None:
    deadline = time.monotonic() + timeout_s
    while not holds():
        assert time.monotonic() < deadline, "it never comes to that"
        time.sleep(0.5)


@pytest.mark.slow
def test_server_idle_host_killed_is_restarted_counted_and_logged(
    start_server: StartServer, url: str
) -> None:
    """Without a request after the kill."""
    prefix = "vllm:kv_offload_persistkv_"
    server = start_server(tier(url), new=True)
    await_true(lambda: f"{prefix}restarts_total{{" in server.metrics())
    assert server.metric(f"{prefix}restarts_total") == 0, "before the first request"
    assert server.metric(f"{prefix}open") == 1
    server.generate(*PROMPTS)
    wait_stored(url, 2)
    await_true(lambda: server.metric(f"{prefix}store_bytes_total") > 0)
    (host,) = host_processes()
    os.kill(host, signal.SIGKILL)
    await_true(lambda: server.metric(f"{prefix}restarts_total") == 1)
    await_true(lambda: server.metric(f"{prefix}open") == 1)
    log = server.log
    where = url.partition("?")[0]
    assert log.count(f"persistkv: the host process of {where} ended") == 1
    assert log.count(f"persistkv: {where} open, namespace") == 2


@pytest.mark.slow
def test_server_outage_of_bucket_is_logged_once_and_shown_by_gauges(
    start_server: StartServer,
    bucket_url: str,
    s3_server: Program,
) -> None:
    prefix = "vllm:kv_offload_persistkv_"
    server = start_server(tier(bucket_url, deadline="2s"), new=True)
    server.generate(PROMPTS[0])
    await_true(lambda: server.metric(f"{prefix}disk_bytes") > 1 << 18)
    s3_server.kill()
    filled = server.metric(f"{prefix}disk_bytes")
    server.generate(PROMPTS[1])
    await_true(lambda: server.metric(f"{prefix}breaker") > 0, 120)
    await_true(lambda: server.metric(f"{prefix}dropped_chunks_total") > 0, 120)
    assert server.metric(f"{prefix}disk_bytes") == filled
    assert server.metric(f"{prefix}open") == 1
    where = bucket_url.partition("?")[0]
    assert server.log.count(f"persistkv: {where} fails or is slow") == 1
