"""How long a commit holds the writer lock of a full local store of many packs: the time that other
engines wait.

``python -m benchmarks.lock_hold --packs 1000000`` fills a store with packs of one page each. Then
it commits usual batches, which evict as much as they add, and large packs, each of which evicts
hundreds of small ones. The reference is a raw write of one page with a sync, because a transaction
ends with two of them. The processor time under the lock does not depend on the disk and on other
processes: ``--directory /dev/shm`` leaves little else.
"""

from __future__ import annotations

import argparse
import os
import statistics
import tempfile
import time
from collections import defaultdict
from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any
from unittest import mock

from benchmarks.rig import show
from persistkv.config import PAGE_BYTES
from persistkv.storage import open_backend
from persistkv.storage.backend import Backend, CommitBatch
from persistkv.storage.identity import Identity
from persistkv.testing.samples import sample_pack
from persistkv_lmdb.files import WriterLock

IDENTITY = Identity.of({"benchmark": "lock_hold"})
AT_ONCE = 1000  # packs of a commit while the store is filled
USUAL = 16  # packs of a usual commit
LARGE_BLOCKS = 512  # of one page each: 2 MiB
BYTES_A_PACK = 2 * PAGE_BYTES  # of the capacity: its page, and its rows


class Holds:
    """Times for which this process has held the writer lock."""

    def __init__(self) -> None:
        self.kind = "filling"
        self.seconds: dict[str, list[float]] = defaultdict(list)
        self.cpu_seconds: dict[str, list[float]] = defaultdict(list)
        self._real = WriterLock.held

    @contextmanager
    def held(self, lock: WriterLock, *arguments: Any, **named: Any) -> Iterator[None]:
        """Hold the lock as ``WriterLock.held`` does, and record the time."""
        with self._real(lock, *arguments, **named):
            begin, cpu_begin = time.perf_counter(), time.thread_time()
            try:
                yield
            finally:
                self.cpu_seconds[self.kind].append(time.thread_time() - cpu_begin)
                self.seconds[self.kind].append(time.perf_counter() - begin)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--packs", type=int, default=100_000, help="packs in the full store"
    )
    parser.add_argument(
        "--commits", type=int, default=200, help="measured commits of each kind"
    )
    parser.add_argument(
        "--directory",
        help="on the disk to be measured; a temporary directory by default",
    )
    arguments = parser.parse_args()
    holds = Holds()
    with tempfile.TemporaryDirectory(dir=arguments.directory) as directory:
        raw = [_raw_sync(Path(directory)) for _ in range(arguments.commits)]
        url = f"lmdb://{directory}/store?capacity={arguments.packs * BYTES_A_PACK}"
        with (
            mock.patch.object(
                WriterLock,
                "held",
                lambda lock, *some, **more: holds.held(lock, *some, **more),
            ),
            closing(open_backend(url)) as backend,
        ):
            measure(backend, holds, arguments.packs, arguments.commits)
            packs = backend.stats().packs
    rows = [("raw write of a page, synced", *_of(raw))]
    for kind, seconds in holds.seconds.items():
        rows.append((kind, *_of(seconds)))
        rows.append(("  processor time", *_of(holds.cpu_seconds[kind])))
    show(
        f"Time under the writer lock, {packs:,} packs",
        ["per transaction", "median ms", "p99", "longest"],
        rows,
    )


def measure(backend: Backend, holds: Holds, packs: int, commits: int) -> None:
    """Fill the store, then commit."""
    namespace = backend.open_namespace(IDENTITY).id
    number = 0
    is_full = False
    while not is_full:
        batch = [
            sample_pack(namespace, number + more, blocks=1, block_bytes=512)
            for more in range(AT_ONCE)
        ]
        is_full = bool(backend.commit(namespace, CommitBatch(batch)).evicted)
        number += AT_ONCE
    for kind, blocks, count, turns in (
        (f"commit of {USUAL} packs", 1, USUAL, commits),
        (
            f"pack of {LARGE_BLOCKS} pages",
            LARGE_BLOCKS,
            1,
            min(commits, packs // (4 * LARGE_BLOCKS)),
        ),
    ):
        holds.kind = "filling"
        measured = 0
        while measured < turns:
            batch = [
                sample_pack(namespace, number + place, blocks=blocks, block_bytes=4096)
                for place in range(count)
            ]
            number += count
            evicted = backend.commit(namespace, CommitBatch(batch)).evicted
            if holds.kind == kind:
                measured += 1
            elif len(evicted) >= count:
                # the store is full again, and commits of this size are expected
                holds.kind = kind


def _raw_sync(directory: Path) -> float:
    with open(directory / "raw", "ab", buffering=0) as file:
        begin = time.perf_counter()
        os.pwrite(file.fileno(), bytes(PAGE_BYTES), 0)
        os.fdatasync(file.fileno())
        return time.perf_counter() - begin


def _of(seconds: list[float]) -> tuple[str, str, str]:
    ordered = sorted(seconds)
    found = (statistics.median(ordered), ordered[int(0.99 * len(ordered))], ordered[-1])
    return (
        f"{1000 * found[0]:.2f}",
        f"{1000 * found[1]:.2f}",
        f"{1000 * found[2]:.2f}",
    )


if __name__ == "__main__":
    main()
