"""vLLM's OpenAI-compatible server, with all processes that it starts by default."""

from __future__ import annotations

import sys

import pytest

from tests.integrations.vllm import server as serving
from tests.integrations.vllm.conftest import PREWARM, prompt, stored_contexts, tier, wait_stored
from tests.integrations.vllm.engines import ENVIRONMENT
from tests.integrations.vllm.programs import new_process

pytestmark = pytest.mark.vllm

PROMPTS = [prompt(1), prompt(2)]


@pytest.fixture(scope="module")
def expected(plain_engine):
    """Answers of an engine without a connector."""
    return plain_engine.generate(*PROMPTS)["tokens"]


@pytest.fixture
def start_server(zygote, model, tmp_path):
    """Return a function that starts servers; kill the remaining servers after the test."""
    servers = []

    def start(*tiers, new=False):
        connector = {"spec_name": "PersistKVSpec", "cpu_bytes_to_use": 64 << 20, "secondary_tiers": list(tiers)}
        sock = tmp_path / f"{len(servers)}.sock"
        arguments = serving.server_arguments(model, sock, connector)
        environment = serving.ENVIRONMENT | {"XDG_CACHE_HOME": str(tmp_path / "cache")}
        if new:
            spawn = new_process([sys.executable, "-m", serving.PROGRAM, *arguments], ENVIRONMENT | environment)
        else:
            spawn = zygote.fork(serving.PROGRAM, arguments, environment)
        servers.append(serving.Server(spawn, tmp_path / "server.log", sock))
        return servers[-1]

    yield start
    for server in servers:
        server.release()


def test_a_server_that_is_terminated_leaves_its_contexts_to_the_next_engine(start_server, start_engine, url, expected):
    server = start_server(tier(url))
    assert server.generate(*PROMPTS) == {"tokens": expected, "cached": [0, 0]}
    server.terminate()
    assert server.wait(180), server.log[-6000:]
    wait_stored(url, 2)
    engine = start_engine(tier(url))
    assert engine.generate(*PROMPTS) == {"tokens": expected, "cached": [384, 384]}


@pytest.mark.slow
def test_a_server_starts_warm(start_server, url, expected):
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
