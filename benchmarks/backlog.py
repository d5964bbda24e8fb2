"""Loads of an engine while it merges commits that nobody has merged.

    nice python -m benchmarks.backlog [--commits 10000] [--latency 0.05]

The engine has a store in memory, whose calls take 50 ms, and loads one pack after the other in one
thread. The commits of a killed engine appear in the inbox; the background thread finds them in its
next list, within 75 s, and merges them.
"""

from __future__ import annotations

import argparse
import logging
import random
import time
from collections.abc import Sequence

from benchmarks.rig import percentile, show
from benchmarks.s3_fleet import IDENTITY, NAMES, pack_of
from persistkv.storage.backend import CommitBatch
from persistkv.storage.format.pack import PackTable
from persistkv.storage.shared import SharedBackend, SharedOptions
from persistkv.testing import FaultyBlobs, MemoryBlobs
from persistkv.testing.blobs import METHODS
from persistkv.testing.conformance.suite import read_pack
from persistkv.testing.samples import sample_pack

NAMESPACE = IDENTITY.digest
PACKS = 20
BLOCKS, BLOCK_BYTES = 16, 64 << 10  # 1 MiB per pack
LEAST_LOADS = 200
MOST_RATIO = 2.0
LIMIT_S = 600.0


def fill(server: MemoryBlobs) -> list[PackTable]:
    """Store the packs that are loaded; return their tables."""
    backend = SharedBackend(server.handle(), SharedOptions(cache=False))
    backend.open_namespace(IDENTITY)
    packs = [
        sample_pack(NAMESPACE, seed, blocks=BLOCKS, block_bytes=BLOCK_BYTES)
        for seed in range(PACKS)
    ]
    backend.commit(NAMESPACE, CommitBatch(packs))
    while inbox(server):
        time.sleep(0.1)
    backend.close()
    return [pack.table for pack in packs]


def leave_commits(server: MemoryBlobs, number: int) -> None:
    """Let an engine commit without a background thread, as one that is killed before each merge."""
    backend = SharedBackend(
        server.handle(), SharedOptions(cache=False), background=False
    )
    backend.open_namespace(IDENTITY)
    draw = random.Random(0)
    for _ in range(number):
        backend.commit(NAMESPACE, CommitBatch([pack_of(draw)]))
    backend.close()


def inbox(server: MemoryBlobs) -> int:
    return sum(1 for _ in server.list(NAMES.inbox))


def load(backend: SharedBackend, table: PackTable) -> float:
    """Return the seconds of one load."""
    begin = time.perf_counter()
    if read_pack(backend, NAMESPACE, table) is None:
        raise RuntimeError("a load was a miss")
    return time.perf_counter() - begin


def measure(commits: int, latency_s: float) -> Sequence[Sequence[str]]:
    server = MemoryBlobs()
    tables = fill(server)
    blobs = FaultyBlobs(server.handle())
    for method in METHODS:
        blobs.delay(method, latency_s)
    backend = SharedBackend(blobs, SharedOptions(cache=False))
    backend.open_namespace(IDENTITY)
    alone = [load(backend, tables[number % PACKS]) for number in range(LEAST_LOADS)]
    leave_commits(server, commits)
    first = inbox(server)
    during: list[float] = []
    began = time.perf_counter()
    started = began
    while inbox(server) and time.perf_counter() - began < LIMIT_S:
        if inbox(server) == first:  # it has not found them yet
            started = time.perf_counter()
            during.clear()
        during.append(load(backend, tables[len(during) % PACKS]))
    took = time.perf_counter() - started
    backend.close()
    ratio = percentile(during, 0.5) / percentile(alone, 0.5)
    verdict = "yes" if ratio <= MOST_RATIO else "NO"
    return [
        ["alone", f"{len(alone)}", *figures(alone), "", ""],
        [
            f"{first:,} commits, {inbox(server):,} left after {took:.0f} s",
            f"{len(during)}",
            *figures(during),
            f"{ratio:.2f}",
            f"<= {MOST_RATIO:g}: {verdict}",
        ],
    ]


def figures(seconds: Sequence[float]) -> list[str]:
    return [f"{1000 * percentile(seconds, share):.1f} ms" for share in (0.5, 0.99)]


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--commits", type=int, default=10_000)
    parser.add_argument("--latency", type=float, default=0.05, help="seconds per call")
    arguments = parser.parse_args()
    logging.disable(logging.WARNING)
    rows = measure(arguments.commits, arguments.latency)
    heads = ["", "loads", "median", "p99", "ratio of medians", "target"]
    show("Loads of 1 MiB while an engine merges", heads, rows)


if __name__ == "__main__":
    main()
