"""The host's memory stays below its bound under a flood of jobs (``benchmarks.flood`` is the large
form)."""

from __future__ import annotations

import time
from pathlib import Path

import numpy as np
import pytest

from persistkv.storage.host.client import StoreClient
from tests.storage.host.hosted import Hosted

BLOCK = 64 << 10
BOUND = 64 << 20
TOTAL = 160 << 20


def anonymous_bytes(client: StoreClient) -> int:
    status = Path(f"/proc/{client.host.pid}/status").read_text()  # type: ignore[attr-defined]
    return (
        int(
            next(
                line for line in status.splitlines() if line.startswith("RssAnon")
            ).split()[1]
        )
        << 10
    )


@pytest.mark.parametrize(
    ("codec", "per_job"), [("raw", 1), ("raw", 128), ("planes", 16)]
)
@pytest.mark.parametrize("durability", ["commit", "interval:1h"])
def test_host_memory_under_job_flood_stays_below_staging_bytes(
    hosted: Hosted,
    tmp_path: Path,
    codec: str,
    per_job: int,
    durability: str,
) -> None:
    hosted.array[:, 1::2] = np.random.default_rng(1).integers(
        60, 64, hosted.array[:, 1::2].shape
    )
    client = hosted.connect(
        f"lmdb://{tmp_path}/store?capacity=128MiB",
        codec=codec,
        staging_bytes=BOUND,
        durability=durability,
        max_queue_bytes=1 << 40,
    )
    client.open()
    before = most = anonymous_bytes(client)
    jobs = TOTAL // (per_job * BLOCK)
    for job in range(jobs):
        keys = [
            number.to_bytes(32, "little") + bytes(4)
            for number in range(job * per_job, (job + 1) * per_job)
        ]
        first = job * per_job % (128 - per_job + 1)
        client.submit_store(
            job,
            f"r{job // 8}",
            keys,
            range(first, first + per_job),
            None,
            per_job * BLOCK,
        )
    deadline = time.monotonic() + 120
    while client.num_jobs:
        assert time.monotonic() < deadline
        client.poll()
        most = max(most, anonymous_bytes(client))
        time.sleep(0.001)
    assert client.flush(60)
    most = max(most, anonymous_bytes(client))
    stats = client.stats(60)
    assert stats.host is not None
    assert stats.host.counters.stored_blocks == jobs * per_job, (
        "no block was dropped: jobs without room waited"
    )
    assert most - before <= BOUND, f"{(most - before) >> 20} MiB"
