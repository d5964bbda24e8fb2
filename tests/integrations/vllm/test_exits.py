"""Every way in which a vLLM process ends; the next engine finds all blocks that the store had accepted.

The servers are ended in the middle of an answer: their blocks are staged and not yet committed.
"""

from __future__ import annotations

import os
import select
import time
from collections.abc import Callable
from typing import Any

import pytest

from tests.integrations.vllm.conftest import StartEngine, StartServer, prompt, stored_contexts, tier, wait_stored
from tests.integrations.vllm.engines import Engine
from tests.integrations.vllm.server import Server
from tests.integrations.vllm.tiny_model import TOKEN_BYTES

pytestmark = [pytest.mark.vllm, pytest.mark.slow]

PROMPT = prompt(1)
CACHED = 384  # tokens in whole blocks
ACCEPTED = "vllm:kv_offload_persistkv_store_bytes_total"


@pytest.fixture(scope="module")
def expected(plain_engine: Engine) -> Any:
    """Answer of an engine without a connector."""
    return plain_engine.generate(PROMPT)["tokens"]


def end_during_answer(server: Server, end: Callable[[Server], None]) -> None:
    """End the server while it answers, after the store has accepted the prompt; wait until its processes have ended."""
    core = os.pidfd_open(server.engine_core())
    with server.running_request(PROMPT, 1600):
        deadline = time.monotonic() + 120
        while server.metric(ACCEPTED) < CACHED * TOKEN_BYTES:
            assert time.monotonic() < deadline, server.metrics()
        assert server.metric("vllm:num_requests_running") == 1
        end(server)
        assert server.wait(180), server.log[-6000:]
    assert select.select([core], [], [], 60)[0], "the engine core still runs"
    os.close(core)


@pytest.mark.parametrize("end", [Server.kill_core, Server.kill_front_end, Server.kill_tree, Server.terminate])
def test_server_ended_at_once_leaves_accepted_blocks(
    start_server: StartServer, start_engine: StartEngine, url: str, expected: Any, end: Callable[[Server], None]
) -> None:
    end_during_answer(start_server(tier(url), shutdown_timeout=0), end)
    engine = start_engine(tier(url))
    assert engine.generate(PROMPT) == {"tokens": expected, "cached": [CACHED]}


def test_server_with_shutdown_timeout_completes_answer_and_context(
    start_server: StartServer, start_engine: StartEngine, url: str, expected: Any
) -> None:
    end_during_answer(start_server(tier(url), shutdown_timeout=120), Server.terminate)
    assert stored_contexts(url) == 1
    engine = start_engine(tier(url))
    assert engine.generate(PROMPT) == {"tokens": expected, "cached": [CACHED]}


@pytest.mark.parametrize("processes", ["0", "1"])
def test_deleted_llm_leaves_its_contexts(start_engine: StartEngine, url: str, expected: Any, processes: str) -> None:
    deleting = start_engine(tier(url), environment={"VLLM_ENABLE_V1_MULTIPROCESSING": processes})
    assert deleting.generate(PROMPT) == {"tokens": expected, "cached": [0]}
    deleting.ask(do="delete")
    engine = start_engine(tier(url))  # the process of the deleted one still runs
    assert engine.generate(PROMPT) == {"tokens": expected, "cached": [CACHED]}
    wait_stored(url, 1)
