"""A prefix that was stored before a kill is read whole by a new process; faults cause no wrong
pages."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.integrations.sglang.conftest import (
    fill,
    is_equal,
    make_pool,
    pages_of,
)
from tests.integrations.sglang.host_pools import page_indices
from tests.integrations.sglang.preparation import HAS_SGLANG
from tests.integrations.sglang.writer_program import BATCH, batch_keys, open_storage

ROOT = Path(__file__).parents[3]


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
        cwd=ROOT,
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
    tmp_path: Path,
    kills: tuple[float, ...],
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
            assert backend.batch_get_v1(keys, page_indices(0, BATCH)) == [True] * BATCH
            assert is_equal(pages_of(pool, 0, BATCH), pages_of(expected, 0, BATCH))
    finally:
        backend.close()


@pytest.mark.skipif(not HAS_SGLANG, reason="SGLang is not installed")
@pytest.mark.timeout(3600)
@pytest.mark.parametrize(
    "operations", [2_000, pytest.param(100_000, marks=pytest.mark.slow)]
)
def test_faults_and_kills_cause_no_wrong_pages(tmp_path: Path, operations: int) -> None:
    url = f"lmdb://{tmp_path}/store?capacity=16MiB"
    command = [
        sys.executable,
        "-W",
        "ignore",
        "-m",
        "tests.integrations.sglang.fault_program",
        url,
        str(operations),
        "1",
    ]
    run = subprocess.run(command, stdout=subprocess.PIPE, cwd=ROOT, check=True)
    # SGLang prints, too
    tally = json.loads(run.stdout.splitlines()[-1])
    assert tally["operations"] >= operations
    assert tally["loaded"] > operations / 10
    assert tally["kills"] > 0
    assert tally["wrong"] == 0
