"""Real vLLM engines with two tensor-parallel workers: restarts, kills on a busy machine, damaged
payloads, a bucket."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from tests.host_processes import kill_tree
from tests.integrations.vllm.conftest import (
    StartEngine,
    damage_payloads,
    prompt,
    tier,
    wait_stored,
)
from tests.integrations.vllm.engines import TWO_WORKERS, Engine

pytestmark = [pytest.mark.vllm, pytest.mark.slow, pytest.mark.timeout(7200)]

REPEATS = int(os.environ.get("PERSISTKV_REPEATS", "2"))
PROMPTS = [prompt(1), prompt(2)]
PROCESSES = {"VLLM_ENABLE_V1_MULTIPROCESSING": "1"}
"""The scheduler runs in a process of its own, as by default."""


@pytest.fixture
def start_two(start_engine: StartEngine) -> Callable[[str], Engine]:
    """Return a function that starts an engine with two workers on a store.

    Workers that spin on all cores can delay the opening of the store by more than the default
    limit.
    """
    options: dict[str, Any] = TWO_WORKERS | {
        "environment": TWO_WORKERS["environment"] | PROCESSES
    }
    return lambda url: start_engine(tier(url, open_timeout_s=600), **options)


@pytest.fixture(scope="module")
def expected(plain_engine: Engine) -> list[list[int]]:
    """Answers of an engine with one worker and without a connector."""
    answers: list[list[int]] = plain_engine.generate(*PROMPTS)["tokens"]
    return answers


@pytest.fixture
def busy() -> Iterator[None]:
    """Two processes in busy loops."""
    processes = [
        subprocess.Popen([sys.executable, "-c", "while True: pass"]) for _ in range(2)
    ]
    yield
    for process in processes:
        process.kill()
        process.wait()


@pytest.mark.usefixtures("busy")
def test_engine_two_workers_killed_process_tree_keeps_contexts(
    start_two: Callable[[str], Engine], url: str
) -> None:
    expected: list[list[int]] = []
    previous: list[list[int]] = []
    for number in range(REPEATS + 1):
        engine = start_two(url)
        if previous:
            assert engine.generate(*previous) == {
                "tokens": expected,
                "cached": [384] * 3,
            }, f"kill {number}"
        previous = [prompt(3 * number + some) for some in range(3)]
        found = engine.generate(*previous)
        assert found["cached"] == [0] * 3
        expected = found["tokens"]
        time.sleep(0.2)
        kill_tree(engine.pid)
        assert engine.wait(60)


def test_engine_two_workers_restarts_warm_and_misses_damaged_payloads(
    start_two: Callable[[str], Engine],
    url: str,
    expected: list[list[int]],
) -> None:
    ended = start_two(url)
    assert ended.generate(PROMPTS[0]) == {"tokens": expected[:1], "cached": [0]}
    ended.close()
    killed = start_two(url)
    assert killed.generate(*PROMPTS) == {"tokens": expected, "cached": [384, 0]}
    time.sleep(0.2)
    killed.kill()
    warm = start_two(url)
    assert warm.generate(*PROMPTS) == {"tokens": expected, "cached": [384, 384]}
    warm.close()
    damage_payloads(url)
    missing = start_two(url)
    assert missing.generate(*PROMPTS) == {"tokens": expected, "cached": [0, 0]}
    assert missing.metrics()["vllm:kv_offload_persistkv_load_failed_chunks"] > 0


def test_engine_two_workers_restarts_warm_from_bucket(
    start_two: Callable[[str], Engine], bucket_url: str, expected: list[list[int]]
) -> None:
    killed = start_two(bucket_url)
    assert killed.generate(*PROMPTS) == {"tokens": expected, "cached": [0, 0]}
    time.sleep(0.2)
    killed.kill()
    wait_stored(bucket_url, 2)
    warm = start_two(bucket_url)
    assert warm.generate(*PROMPTS) == {"tokens": expected, "cached": [384, 384]}
