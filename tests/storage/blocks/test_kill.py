"""Nothing that was acknowledged is lost when the process is killed, and usage stays exact."""

from __future__ import annotations

import random
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest

from persistkv import BlockStore
from tests import forked
from tests.storage.blocks.conftest import identity
from tests.storage.blocks.writer_program import blocks_of, keys_of

BLOCK_BYTES = 32 << 10  # 32 KiB
BLOCKS = 16


def kill_a_writer(url: str, first: int, after_s: float) -> list[int]:
    """Start a writer and kill it ``after_s`` seconds after its first acknowledgement; return the
    puts that it acknowledged."""
    arguments = [url, str(first), str(BLOCK_BYTES), str(BLOCKS)]
    with forked.Popen(
        [sys.executable, "-m", "tests.storage.blocks.writer_program", *arguments],
        stdout=subprocess.PIPE,
        cwd=Path(__file__).parents[3],
    ) as writer:
        assert writer.stdout is not None
        line = writer.stdout.readline()
        time.sleep(after_s)
        writer.kill()
        lines = (line + writer.stdout.read()).split(b"\n")
    # a kill can cut the last line
    return [int(line) for line in lines[:-1]]


def check(url: str, acknowledged: list[int]) -> int:
    """Read every acknowledged block; return the bytes that the namespace uses."""
    with BlockStore.open(url, identity(), [BLOCK_BYTES]) as store:
        for put in acknowledged:
            into = np.zeros((BLOCKS, BLOCK_BYTES), np.uint8)
            assert store.get(keys_of(put, BLOCKS), list(into)) == [True] * BLOCKS
            assert np.array_equal(into, blocks_of(put, BLOCKS, BLOCK_BYTES))
        usage = store.usage()
        # without evictions, whole puts are held: those acknowledged, and some more
        num_blocks = len(store.stored_blocks())
        assert num_blocks % BLOCKS == 0
        assert usage.namespace_bytes == num_blocks * BLOCK_BYTES
        assert usage.capacity is None or usage.disk_bytes <= usage.capacity
        return num_blocks


@pytest.mark.parametrize("scheme", ["lmdb", "file"])
@pytest.mark.parametrize(
    "kills", [3, pytest.param(25, marks=[pytest.mark.slow, pytest.mark.timeout(600)])]
)
def test_killed_writer_loses_no_acknowledged_put(
    scheme: str,
    kills: int,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    url = f"{scheme}://{tmp_path}/store?capacity=4GiB"
    chance = random.Random(kills)
    acknowledged: list[int] = []
    for _ in range(kills):
        first = max(acknowledged, default=-1) + 2  # the last put may be durable, too
        acknowledged += kill_a_writer(url, first, chance.random() / 8)
        held = check(url, acknowledged[-4:])
        assert len(acknowledged) * BLOCKS <= held
        assert held <= (len(acknowledged) + kills) * BLOCKS
    check(url, acknowledged)
