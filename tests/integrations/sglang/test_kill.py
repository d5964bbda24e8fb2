"""A prefix that was stored before a kill is read whole by a new process; faults cause no wrong
pages."""

from __future__ import annotations

import random
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.integrations.sglang.conftest import (
    PAGES,
    Open,
    fill,
    indices,
    is_equal,
    make_pool,
    page_keys,
    pages_of,
)
from tests.integrations.sglang.preparation import HAS_SGLANG
from tests.integrations.sglang.writer_program import BATCH, batch_keys, open_storage


def kill_a_writer(url: str, first: int, after_s: float) -> list[int]:
    """Start a writer and kill it ``after_s`` seconds after its first acknowledgement; return the
    batches that it acknowledged."""
    with subprocess.Popen(
        [
            sys.executable,
            "-W",
            "ignore",
            "-m",
            "tests.integrations.sglang.writer_program",
            url,
            str(first),
        ],
        stdout=subprocess.PIPE,
        cwd=Path(__file__).parents[3],
    ) as writer:
        assert writer.stdout is not None
        line = writer.stdout.readline()
        time.sleep(after_s)
        writer.kill()
        lines = (line + writer.stdout.read()).split(b"\n")
    # a kill can cut the last line, and another process may print
    return [int(line) for line in lines[:-1] if line.isdigit()]


@pytest.mark.timeout(600)
@pytest.mark.parametrize(
    "kills", [(0.1,), pytest.param((0.05, 0.1, 0.2, 0.4), marks=pytest.mark.slow)]
)
def test_acknowledged_pages_survive_kills(
    tmp_path: Path, kills: tuple[float, ...]
) -> None:
    url = f"lmdb://{tmp_path}/store?capacity=1GiB"
    acknowledged: list[int] = []
    for after_s in kills:
        first = max(acknowledged, default=-1) + 2
        acknowledged += kill_a_writer(url, first, after_s)
    assert len(acknowledged) >= len(kills)
    expected, pool = make_pool(), make_pool()
    backend = open_storage(url, pool)
    try:
        for batch in acknowledged:
            fill(expected, batch)
            keys = batch_keys(batch)
            assert backend.batch_exists(keys) == BATCH
            assert backend.batch_get_v1(keys, indices(0, BATCH)) == [True] * BATCH
            assert is_equal(pages_of(pool, 0, BATCH), pages_of(expected, 0, BATCH))
    finally:
        backend.close()


@pytest.mark.skipif(not HAS_SGLANG, reason="SGLang is not installed")
@pytest.mark.parametrize(
    "operations",
    [2_000, pytest.param(20_000, marks=[pytest.mark.slow, pytest.mark.timeout(3600)])],
)
def test_fault_injector_causes_no_wrong_pages(
    open_backend: Open, monkeypatch: pytest.MonkeyPatch, operations: int
) -> None:
    """SGLang's injector fails and delays calls; stores are closed and opened in between."""
    monkeypatch.setenv("SGLANG_TEST_HICACHE_BACKEND_RANDOM_FAILURE", "0.1")
    monkeypatch.setenv("SGLANG_TEST_HICACHE_BACKEND_RANDOM_DELAY", "0.0001")
    chance = random.Random(operations)
    content, pool = make_pool(), make_pool()
    fill(content, 9)
    keys = page_keys(range(PAGES))
    backend = open_backend(pool)
    wrong = loaded = 0
    for _ in range(operations):
        first = chance.randrange(PAGES)
        count = min(chance.randrange(1, 5), PAGES - first)
        some, places = keys[first : first + count], indices(first, count)
        action = chance.random()
        if action < 0.3:
            pool.kv_buffer.copy_(content.kv_buffer)
            backend.batch_set_v1(some, places)
        elif action < 0.9:
            pool.kv_buffer.zero_()
            for page, is_found in enumerate(backend.batch_get_v1(some, places), first):
                loaded += is_found
                wrong += is_found and not is_equal(
                    pages_of(pool, page, 1), pages_of(content, page, 1)
                )
        elif action < 0.99:
            backend.batch_exists(some)
        else:
            backend.close()
            backend = open_backend(pool)
    assert loaded > operations / 10
    assert wrong == 0
