"""Real vLLM engines with two tensor-parallel workers, killed with their whole process tree on a loaded machine."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Iterator

import pytest

from tests.host_processes import kill_tree
from tests.integrations.vllm.conftest import prompt, tier

pytestmark = [pytest.mark.vllm, pytest.mark.slow, pytest.mark.timeout(7200)]

REPEATS = int(os.environ.get("PERSISTKV_REPEATS", "2"))
PROMPTS = 3
TWO_WORKERS = {"tensor_parallel_size": 2, "distributed_executor_backend": "mp"}
ENVIRONMENT = {"VLLM_ENABLE_V1_MULTIPROCESSING": "1", "VLLM_CPU_OMP_THREADS_BIND": "0|1"}


@pytest.fixture
def busy() -> Iterator[None]:
    """Two processes that take all the CPU time they get."""
    processes = [subprocess.Popen([sys.executable, "-c", "while True: pass"]) for _ in range(2)]
    yield
    for process in processes:
        process.kill()
        process.wait()


def test_accepted_contexts_survive_the_death_of_the_process_tree(start_engine, url, busy):
    expected: list[list[int]] = []
    previous: list[list[int]] = []
    for number in range(REPEATS + 1):
        engine = start_engine(tier(url), command=[sys.executable], environment=ENVIRONMENT, **TWO_WORKERS)
        if previous:
            assert engine.generate(*previous) == {"tokens": expected, "cached": [384] * PROMPTS}, f"kill {number}"
        previous = [prompt(PROMPTS * number + some) for some in range(PROMPTS)]
        found = engine.generate(*previous)
        assert found["cached"] == [0] * PROMPTS
        expected = found["tokens"]
        time.sleep(0.2)
        kill_tree(engine.pid)
        assert engine.wait(60)
