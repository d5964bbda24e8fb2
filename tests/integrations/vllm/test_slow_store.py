"""Real vLLM engines whose store hangs while they serve: requests wait no longer than computing
takes, and the store is used again when it answers."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Iterator, Sequence
from typing import Any

import pytest

from tests.host_processes import host_processes
from tests.integrations.vllm.conftest import StartEngine, prompt, tier, wait_stored
from tests.integrations.vllm.engines import Engine
from tests.integrations.vllm.programs import Program

pytestmark = pytest.mark.vllm

PROMPTS = [prompt(number) for number in range(40)]
CACHED = 384  # tokens in whole blocks
TOKENS_PER_S = 200.0
COMPUTE_S = CACHED / TOKENS_PER_S
"""Expected time of a prefill. This small model computes faster, so a request whose load is
abandoned waits for the load alone."""
SLACK_S = 1.0  # of a machine with other work
RECOVERY_S = 30.0


@pytest.fixture(scope="module")
def expected(plain_engine: Engine) -> list[list[int]]:
    """Answers of an engine without a connector."""
    answers: list[list[int]] = plain_engine.generate(*PROMPTS)["tokens"]
    return answers


def fill(start_engine: StartEngine, url: str) -> None:
    """Store the contexts of all prompts."""
    writer = start_engine(tier(url))
    writer.generate(*PROMPTS)
    writer.close()
    wait_stored(url, len(PROMPTS))


def start_reader(start_engine: StartEngine, url: str) -> Engine:
    return start_engine(
        tier(url, load_policy="auto", prefill_tokens_per_s=TOKENS_PER_S)
    )


def measure(engine: Engine, prompts: Sequence[list[int]]) -> Any:
    """Answer prompts at the same time; return answers, cached tokens and seconds to the first
    token."""
    return engine.ask(do="measure", prompts=list(prompts), max_tokens=12)


def wait_recovered(
    engine: Engine, expected: list[list[int]], numbers: Iterator[int]
) -> None:
    """Serve one stored prompt after the other until one is loaded; each answer is right."""
    deadline = time.monotonic() + RECOVERY_S
    cached = 0
    while not cached:
        number = next(numbers)
        answer = measure(engine, [PROMPTS[number]])
        assert answer["tokens"] == [expected[number]]
        (cached,) = answer["cached"]
        assert cached or time.monotonic() < deadline
        time.sleep(1.0)


def test_engine_host_that_stops_during_loads_delays_requests_by_three_seconds(
    start_engine: StartEngine,
    url: str,
    expected: list[list[int]],
) -> None:
    fill(start_engine, url)
    engine = start_reader(start_engine, url)
    assert measure(engine, PROMPTS[:1])["cached"] == [CACHED]
    (host,) = host_processes()
    os.kill(host, signal.SIGSTOP)
    found = measure(engine, PROMPTS[1:4])
    assert found["cached"] == [0, 0, 0]
    assert found["tokens"] == expected[1:4]
    assert max(found["ttft"]) < COMPUTE_S + 3.0
    wait_recovered(engine, expected, iter(range(4, len(PROMPTS))))
    assert host not in host_processes(), "it could still write rows"


def test_engine_bucket_that_stalls_delays_one_request_by_its_computation(
    start_engine: StartEngine,
    s3_server: Program,
    bucket_url: str,
    expected: list[list[int]],
) -> None:
    """Requests after it are computed at once."""
    fill(start_engine, bucket_url)
    engine = start_reader(start_engine, bucket_url)
    numbers = iter(range(len(PROMPTS)))
    for _ in range(3):
        number = next(numbers)
        assert measure(engine, [PROMPTS[number]])["cached"] == [CACHED]
    os.kill(s3_server.pid, signal.SIGSTOP)
    seconds = []
    for _ in range(6):
        number = next(numbers)
        answer = measure(engine, [PROMPTS[number]])
        assert answer["tokens"] == [expected[number]]
        assert answer["cached"] == [0]
        seconds += answer["ttft"]
    assert seconds[0] < COMPUTE_S + SLACK_S
    assert max(seconds[1:]) < SLACK_S
    os.kill(s3_server.pid, signal.SIGCONT)
    wait_recovered(engine, expected, numbers)
