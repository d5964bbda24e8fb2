"""Memory of a store's host under a flood: more store jobs than the disk can write, and concurrent
loads.

Shown are the peak of the host's anonymous memory (RssAnon), less its value after opening and less
the growth of its index, against ``staging_bytes``; the dropped bytes; and the CPU time per
gigabyte.
"""

from __future__ import annotations

import argparse
import random
import tempfile
import time
from typing import NamedTuple

import numpy as np

from benchmarks.rig import anonymous_bytes, show
from benchmarks.store_rig import Rig, fresh_keys
from persistkv.config import parse_size
from persistkv.storage.host.client import StoreClient
from persistkv.storage.host.hosts import ProcessHost
from persistkv.storage.records import RequestEnd

INDEX_BYTES = 180  # upper bound per block; see benchmarks.lookup
LOADS = 4  # in flight
ROWS_BYTES = 256 << 20  # 256 MiB


class Flooded(NamedTuple):
    """Results of one flood."""

    anonymous_bytes: int
    stored_bytes: int
    dropped_bytes: int
    """Bytes that were refused by the client, or lost to a failed commit."""
    loaded_bytes: int
    cpu_seconds: float
    seconds: float


def flood(
    rig: Rig,
    url: str,
    *,
    codec: str,
    per_job: int,
    seconds: float,
    queue_bytes: int,
    staging_bytes: int,
) -> Flooded:
    """Submit store jobs of ``per_job`` blocks without a pause, and load stored blocks."""
    client = rig.client(
        url, codec=codec, staging_bytes=staging_bytes, max_queue_bytes=queue_bytes
    )
    client.open()
    before = host_bytes(client)
    sampled = before
    draw = random.Random(0)
    stored: list[list[bytes]] = []
    rows = len(rig.rows)
    job_bytes = per_job * rig.block_bytes
    job, begin = 0, time.perf_counter()
    loads: dict[int, int] = {}
    free = [
        rows // 2 + slot * per_job for slot in range(min(LOADS, rows // 2 // per_job))
    ]
    jobs: dict[int, list[bytes]] = {}
    loaded = 0
    while time.perf_counter() - begin < seconds:
        job += 1
        keys = jobs[job] = fresh_keys(per_job)
        first = draw.randrange(rows // 2 - per_job + 1)
        client.submit_store(
            job,
            f"request {job // 16}",
            keys,
            range(first, first + per_job),
            range(per_job),
            job_bytes,
        )
        if job % 16 == 0:
            chain = (keys,)
            client.end_request(
                RequestEnd(f"request {job // 16}", f"manifest {job}", chain, 16, 16)
            )
        if stored and free:
            job += 1
            loads[job] = free.pop()
            client.submit_load(
                job, draw.choice(stored), range(loads[job], loads[job] + per_job)
            )
        for outcome in client.poll():
            if outcome.job_id in loads:
                free.append(loads.pop(outcome.job_id))
                loaded += outcome.num_bytes
            else:
                keys = jobs.pop(outcome.job_id)
                stored += [] if outcome.failed or len(stored) > 1000 else [keys]
        sampled = (
            max(sampled, host_bytes(client) - INDEX_BYTES * len(client))
            if job % 8 == 0
            else sampled
        )
        if client.num_jobs * job_bytes > queue_bytes // 2:
            time.sleep(0.0005)  # refused jobs fail at once: sleep instead of spinning
    client.flush(600.0)
    stats = client.stats(60.0)
    assert stats.host is not None
    counters = stats.host.counters
    result = Flooded(
        sampled - before,
        counters.stored_raw_bytes,
        counters.dropped_bytes + stats.client.refused_bytes,
        loaded,
        stats.host.cpu_seconds,
        time.perf_counter() - begin,
    )
    client.close()
    return result


def host_bytes(client: StoreClient) -> int:
    """Return RssAnon of the client's host process."""
    host = client.host
    assert isinstance(host, ProcessHost)
    assert host.pid is not None
    return anonymous_bytes(host.pid)


def fill_with_values(rig: Rig) -> None:
    """Fill the rows with normally distributed bfloat16 values, so that codecs have something to
    compress."""
    values = np.random.default_rng(0).standard_normal(
        rig.rows.size // 2, dtype=np.float32
    )
    rig.rows.reshape(-1).view(np.uint16)[:] = values.view(np.uint32) >> 16


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seconds", type=float, default=20.0, help="of each flood")
    parser.add_argument("--staging", default="256MiB")
    parser.add_argument("--queue", default="1GiB")
    parser.add_argument("--block-kib", type=int, nargs="+", default=[64, 2048])
    parser.add_argument("--codecs", nargs="+", default=["raw", "planes"])
    parser.add_argument("--capacity", default="4GiB")
    parser.add_argument(
        "--directory", help="where the store is made; a temporary directory by default"
    )
    arguments = parser.parse_args()
    staging, queue = (
        parse_size(getattr(arguments, name), name=name) for name in ("staging", "queue")
    )
    lines = []
    for kib in arguments.block_kib:
        rig = Rig(ROWS_BYTES // (kib << 10), kib << 10)
        fill_with_values(rig)
        for codec in arguments.codecs:
            for job_bytes in (kib << 10, 32 << 20):
                per_job = max(1, job_bytes // (kib << 10))
                with tempfile.TemporaryDirectory(dir=arguments.directory) as directory:
                    url = f"lmdb://{directory}/store?capacity={arguments.capacity}"
                    shown = flood(
                        rig,
                        url,
                        codec=codec,
                        per_job=per_job,
                        seconds=arguments.seconds,
                        queue_bytes=queue,
                        staging_bytes=staging,
                    )
                lines.append(line(f"{codec}, {per_job} x {kib} KiB", shown, staging))
                print(*lines[-1], flush=True)
    columns = [
        "jobs",
        "host's memory",
        f"≤ {arguments.staging}",
        "stored",
        "dropped",
        "loaded",
        "CPU s/GB",
    ]
    show("A host under a flood", columns, lines)


def line(name: str, shown: Flooded, bound: int) -> list[str]:
    """Return a row of the table."""
    moved = shown.stored_bytes + shown.loaded_bytes
    return [
        name,
        f"{shown.anonymous_bytes / 2**20:.0f} MiB",
        "yes" if shown.anonymous_bytes <= bound else "NO",
        f"{shown.stored_bytes / shown.seconds / 1e9:.2f} GB/s",
        f"{shown.dropped_bytes / 1e9:.1f} GB",
        f"{shown.loaded_bytes / shown.seconds / 1e9:.2f} GB/s",
        f"{shown.cpu_seconds / max(1, moved) * 1e9:.2f}",
    ]


if __name__ == "__main__":
    main()
