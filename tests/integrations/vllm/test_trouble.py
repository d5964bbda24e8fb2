"""Real vLLM engines, and what can go wrong behind them or beside them."""

from __future__ import annotations

import time
from pathlib import Path

import pytest

from tests.integrations.vllm.conftest import SHORT, prompt, stored_contexts, tier, wait_stored

pytestmark = pytest.mark.vllm

PREFIX = "vllm:kv_offload_persistkv_"
PROMPTS = [prompt(1), prompt(2)]


@pytest.fixture(scope="module")
def expected(plain_engine):
    """What an engine without any connector answers."""
    return plain_engine.generate(*PROMPTS)["tokens"]


def test_damaged_payloads_are_misses(start_engine, url, expected):
    filling = start_engine(tier(url))
    filling.generate(*PROMPTS)
    filling.close()
    wait_stored(url, 2)
    damaged = list(Path(url.partition("?")[0].removeprefix("lmdb://")).glob("segments/*"))
    assert damaged
    for file in damaged:
        with file.open("r+b") as opened:
            for offset in range(64, file.stat().st_size, 4096):
                opened.seek(offset)
                opened.write(b"damage")
    engine = start_engine(tier(url))
    assert engine.generate(*PROMPTS) == {"tokens": expected, "cached": [0, 0]}
    assert engine.ask("metrics")[f"{PREFIX}load_failed_chunks"] > 0


def test_a_wrong_option_stops_the_start_and_is_named(start_engine, url):
    with pytest.raises(RuntimeError, match="secondary tier persistkv option capasity"):
        start_engine(tier(url, capasity="1GiB"))


def test_two_engines_share_one_store(start_engine, url, expected):
    first, second = start_engine(tier(url)), start_engine(tier(url))
    assert first.generate(PROMPTS[0])["cached"] == [0]
    first.generate(SHORT)
    wait_stored(url, 1)
    deadline = time.monotonic() + 120
    while not second.ask("metrics").get(f"{PREFIX}held_chunks"):
        assert time.monotonic() < deadline
        second.generate(SHORT)  # each of its steps takes news
    assert second.generate(PROMPTS[0]) == {"tokens": expected[:1], "cached": [384]}


def test_requests_opt_out_and_metrics_tell_of_both_directions(start_engine, url, expected):
    filling = start_engine(tier(url))
    filling.generate(PROMPTS[0], params={"persistkv": False})
    filling.generate(PROMPTS[1])
    filling.close()
    assert stored_contexts(url) == 1
    engine = start_engine(tier(url))
    assert engine.generate(*PROMPTS) == {"tokens": expected, "cached": [0, 384]}
    metrics = engine.ask("metrics")
    assert metrics[f"{PREFIX}lookup_hits"] >= 12
    assert metrics[f"{PREFIX}load_bytes"] > 0
    assert metrics[f"{PREFIX}store_bytes"] > 0
    assert metrics[f"{PREFIX}open"] == 1
