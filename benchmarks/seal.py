"""Stores and loads of 32 MiB in an LMDB store with a key, compared with one without.

    python -m benchmarks.seal [--directory DIR] [--rounds 20]

The stores alternate. A load reads what was stored last, past the page cache.
"""

from __future__ import annotations

import argparse
import os
import statistics
import tempfile
import time
from pathlib import Path

from benchmarks.rig import show
from persistkv.config import GroupLayout, RowLayout
from persistkv.memory.pages import huge_memory
from persistkv.memory.rows import Rows
from persistkv.storage import open_backend
from persistkv.storage.blocking import BlockingStore
from persistkv.storage.identity import Identity
from persistkv.storage.records import StoreOptions

BLOCK_BYTES = 64 << 10  # 64 KiB
JOB_BYTES = 32 << 20  # 32 MiB
NUM_BLOCKS = JOB_BYTES // BLOCK_BYTES
LAYOUT = RowLayout(BLOCK_BYTES, (GroupLayout(((0, BLOCK_BYTES),)),))
KEY = "PERSISTKV_BENCHMARK_KEY"


class Rig:
    """An open store, and the durations of its jobs in seconds."""

    def __init__(self, url: str) -> None:
        memory = memoryview(huge_memory(JOB_BYTES))
        memory[:] = os.urandom(JOB_BYTES)
        self._rows = Rows(memory, LAYOUT)
        identity = Identity.of({"benchmark": "seal"})
        self._store = BlockingStore(
            open_backend(url), identity, self._rows, StoreOptions(), url=url
        )
        self.stores: list[float] = []
        self.loads: list[float] = []

    def run(self, number: int) -> None:
        """Store a job, and load it."""
        keys = [os.urandom(32) + bytes(4) for _ in range(NUM_BLOCKS)]
        begin = time.perf_counter()
        self._store.put(f"r{number}", keys, range(NUM_BLOCKS), None)
        self._store.flush()
        stored = time.perf_counter()
        missed = self._store.read(keys, range(NUM_BLOCKS))
        loaded = time.perf_counter()
        if missed:
            raise SystemExit(f"{len(missed)} blocks are missing")
        # the first round warms up
        if number:
            self.stores.append(stored - begin)
            self.loads.append(loaded - stored)

    def close(self) -> None:
        self._store.close()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--directory", type=Path, default=Path(tempfile.gettempdir()))
    parser.add_argument("--rounds", type=int, default=20)
    arguments = parser.parse_args()
    os.environ[KEY] = "k" * 32
    with tempfile.TemporaryDirectory(dir=arguments.directory) as directory:
        place = f"lmdb://{directory}"
        plain = Rig(f"{place}/plain?capacity=1GiB")
        sealed = Rig(f"{place}/sealed?capacity=1GiB&key_env={KEY}")
        for number in range(arguments.rounds + 1):
            plain.run(number)
            sealed.run(number)
        plain.close()
        sealed.close()
    rows = []
    for name, without, with_key in (
        ("store", plain.stores, sealed.stores),
        ("load", plain.loads, sealed.loads),
    ):
        before = statistics.median(without)
        after = statistics.median(with_key)
        ratio = after / before
        rows.append([name, f"{before * 1e3:.1f}", f"{after * 1e3:.1f}", f"{ratio:.2f}"])
    title = f"32 MiB jobs, ms: medians of {arguments.rounds}"
    show(title, ["", "plain", "with a key", "ratio"], rows)


if __name__ == "__main__":
    main()
