"""Real vLLM engines with damaged or full stores, invalid options, or a second engine on the same
store."""

from __future__ import annotations

import shutil
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.integrations.vllm.conftest import (
    PREWARM,
    SHORT,
    StartEngine,
    damage_payloads,
    prompt,
    stored_contexts,
    tier,
    wait_loaded,
    wait_stored,
)
from tests.integrations.vllm.engines import Engine

pytestmark = pytest.mark.vllm

PREFIX = "vllm:kv_offload_persistkv_"
PROMPTS = [prompt(1), prompt(2)]


@pytest.fixture(scope="module")
def expected(plain_engine: Engine) -> list[list[int]]:
    """Answers of an engine without a connector."""
    answers: list[list[int]] = plain_engine.generate(*PROMPTS)["tokens"]
    return answers


def test_engine_damaged_payloads_misses_and_answers_correctly(
    start_engine: StartEngine,
    url: str,
    expected: list[list[int]],
) -> None:
    writer = start_engine(tier(url))
    writer.generate(*PROMPTS)
    writer.close()
    wait_stored(url, 2)
    damage_payloads(url)
    engine = start_engine(tier(url))
    assert engine.generate(*PROMPTS) == {"tokens": expected, "cached": [0, 0]}
    assert engine.metrics()[f"{PREFIX}load_failed_chunks"] > 0


def test_engine_corrupt_store_starts_cold_and_stores_again(
    start_engine: StartEngine,
    url: str,
    tmp_path: Path,
    expected: list[list[int]],
) -> None:
    store = tmp_path / "store"
    writer = start_engine(tier(url))
    writer.generate(*PROMPTS)
    writer.close()
    garbage = bytes(range(256)) * 256
    for name in ("data.mdb", "segments/garbage", "notes.txt"):
        (store / name).write_bytes(garbage)
    first = start_engine(tier(url))
    assert first.generate(*PROMPTS) == {"tokens": expected, "cached": [0, 0]}
    first.close()
    (quarantined,) = store.glob("damaged-*")
    assert (quarantined / "data.mdb").read_bytes() == garbage
    assert (store / "notes.txt").read_bytes() == garbage, (
        "a file that is not the store's"
    )
    wait_stored(url, 2)
    second = start_engine(tier(url))
    assert second.generate(*PROMPTS) == {"tokens": expected, "cached": [384, 384]}


@pytest.mark.slow
def test_engine_full_disk_answers_correctly_and_keeps_store_open(
    start_engine: StartEngine,
    plain_engine: Engine,
    tmp_path: Path,
) -> None:
    disk = tmp_path / "disk"
    disk.mkdir()
    mounted = 'mount -t tmpfs -o size=8m tmpfs "$0" && exec "$@"'
    command = ["unshare", "-rm", "sh", "-c", mounted, str(disk)]
    if (
        not shutil.which("unshare")
        or subprocess.run([*command, "true"], capture_output=True).returncode
    ):
        pytest.skip("cannot mount a private file system")
    engine = start_engine(
        tier(f"lmdb://{disk}/store?capacity=1GiB"), command=[*command, sys.executable]
    )
    prompts = [prompt(number, 1500) for number in range(20, 40)]  # 30 MB of KV
    assert (
        engine.generate(*prompts)["tokens"] == plain_engine.generate(*prompts)["tokens"]
    )
    assert engine.metrics()[f"{PREFIX}open"] == 1


@pytest.mark.slow
def test_engine_default_processes_prewarm_before_first_request(
    start_engine: StartEngine,
    url: str,
    expected: list[list[int]],
) -> None:
    options = {
        "environment": {"VLLM_ENABLE_V1_MULTIPROCESSING": "1"},
        "command": [sys.executable],
    }
    killed = start_engine(tier(url), **options)
    assert killed.generate(*PROMPTS) == {"tokens": expected, "cached": [0, 0]}
    wait_stored(url, 2)
    killed.kill()
    warm = start_engine(tier(url), PREWARM, **options)
    wait_loaded(url, 24)  # before the first request
    assert warm.generate(*PROMPTS) == {"tokens": expected, "cached": [384, 384]}


def test_engine_unknown_option_fails_start_naming_it(
    start_engine: StartEngine, url: str
) -> None:
    with pytest.raises(RuntimeError, match="secondary tier persistkv option capasity"):
        start_engine(tier(url, capasity="1GiB"))


def test_engine_second_on_same_store_hits_contexts_of_first(
    start_engine: StartEngine,
    url: str,
    expected: list[list[int]],
) -> None:
    first, second = start_engine(tier(url)), start_engine(tier(url))
    assert first.generate(PROMPTS[0])["cached"] == [0]
    first.generate(SHORT)
    wait_stored(url, 1)
    deadline = time.monotonic() + 120
    while not second.metrics().get(f"{PREFIX}held_chunks"):
        assert time.monotonic() < deadline
        second.generate(SHORT)  # each step applies store events
    assert second.generate(PROMPTS[0]) == {"tokens": expected[:1], "cached": [384]}


def test_engine_opted_out_request_misses_and_metrics_count_transfers(
    start_engine: StartEngine,
    url: str,
    expected: list[list[int]],
) -> None:
    writer = start_engine(tier(url))
    writer.generate(PROMPTS[0], params={"persistkv": False})
    writer.generate(PROMPTS[1])
    writer.close()
    assert stored_contexts(url) == 1
    engine = start_engine(
        tier(url, backpressure={"backpressure_cls": "EMABackpressureDetector"})
    )
    assert engine.generate(*PROMPTS) == {"tokens": expected, "cached": [0, 384]}
    metrics = engine.metrics()
    assert "vllm:kv_offload_tiering_backpressure_store_latency_ema" in metrics
    assert metrics[f"{PREFIX}lookup_hits"] >= 12
    assert metrics[f"{PREFIX}load_bytes"] > 0
    assert metrics[f"{PREFIX}open"] == 1
    deadline = time.monotonic() + 120
    while not engine.metrics()[f"{PREFIX}store_bytes"]:  # when they are written
        assert time.monotonic() < deadline
        engine.generate(SHORT)  # each step reports what has changed
