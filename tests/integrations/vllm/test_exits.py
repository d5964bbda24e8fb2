"""Every way in which a vLLM process ends; the next engine finds all blocks that the store had
accepted.

Each server ends during an answer: its blocks are staged and not yet committed. vLLM's engine core
survives a killed front end and runs until the end of the test.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from http.client import HTTPResponse

import pytest

from tests.integrations.vllm.conftest import (
    StartEngine,
    StartServer,
    prompt,
    tier,
    wait_stored,
)
from tests.integrations.vllm.engines import Engine
from tests.integrations.vllm.server import Server
from tests.integrations.vllm.tiny_model import TOKEN_BYTES

pytestmark = [pytest.mark.vllm, pytest.mark.slow]

EXITS: list[tuple[Callable[[Server], None], int]] = [
    (Server.kill_core, 0),
    (Server.kill_front_end, 0),
    (Server.kill_tree, 0),
    (Server.terminate, 0),
    (Server.terminate, 120),
]
"""Each way to end a server, and its ``--shutdown-timeout``."""
PROMPTS = [prompt(number) for number in range(len(EXITS))]
CACHED = 384  # tokens in whole blocks
ACCEPTED = "vllm:kv_offload_persistkv_store_bytes_total"


@pytest.fixture(scope="module")
def expected(plain_engine: Engine) -> list[list[int]]:
    """Answers of an engine without a connector."""
    answers: list[list[int]] = plain_engine.generate(*PROMPTS)["tokens"]
    return answers


@contextmanager
def accepted_request(server: Server, tokens: list[int]) -> Iterator[HTTPResponse]:
    """Running request whose prompt the store has accepted."""
    with server.running_request(tokens, 1600) as response:
        deadline = time.monotonic() + 120
        while server.metric(ACCEPTED) < CACHED * TOKEN_BYTES:
            assert time.monotonic() < deadline, server.metrics()
        yield response


def test_server_ended_during_answer_keeps_accepted_blocks(
    start_server: StartServer,
    start_engine: StartEngine,
    url: str,
    expected: list[list[int]],
) -> None:
    for number, (end, timeout_s) in enumerate(EXITS):
        server = start_server(tier(url), shutdown_timeout=timeout_s)
        with accepted_request(server, PROMPTS[number]) as response:
            if number:
                found = server.generate(PROMPTS[number - 1])
                assert found == {
                    "tokens": [expected[number - 1]],
                    "cached": [CACHED],
                }, EXITS[number - 1]
            assert server.metric("vllm:num_requests_running") == 1
            end(server)
            if timeout_s:
                # a draining server sends the whole answer; others wait for the end of the
                # connection
                response.read()
        assert server.wait(180), server.log[-6000:]
    engine = start_engine(tier(url))
    assert engine.generate(*PROMPTS) == {
        "tokens": expected,
        "cached": [CACHED] * len(PROMPTS),
    }


def test_llm_deleted_leaves_contexts_for_next_engine(
    start_engine: StartEngine,
    url: str,
    expected: list[list[int]],
) -> None:
    for number in (0, 1):  # without and with a process for the engine core
        engine = start_engine(
            tier(url), environment={"VLLM_ENABLE_V1_MULTIPROCESSING": str(number)}
        )
        cached = [CACHED] * number + [0]
        assert engine.generate(*PROMPTS[: number + 1]) == {
            "tokens": expected[: number + 1],
            "cached": cached,
        }
        engine.ask(do="delete")  # its process runs until the end of the test
    engine = start_engine(tier(url))
    assert engine.generate(*PROMPTS[:2]) == {
        "tokens": expected[:2],
        "cached": [CACHED] * 2,
    }
    wait_stored(url, 2)
