"""Stores and loads of 32 MiB in an LMDB store with a key, compared with one without.

    python -m benchmarks.seal [--directory DIR] [--rounds 20]

The stores take turns, each first in every other round. A load reads the job that was stored last,
past the page cache. For reference: the time of AES-256-GCM itself in one thread, and of the
checksum that it replaces.
"""

from __future__ import annotations

import argparse
import os
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import xxhash

from benchmarks.rig import ratio_interval, show
from persistkv.config import GroupLayout, RowLayout
from persistkv.memory.pages import huge_memory
from persistkv.memory.rows import Rows
from persistkv.storage import open_backend
from persistkv.storage.format.keys import gcm
from persistkv.storage.format.pack import FRAME_BYTES
from persistkv.storage.identity import Identity
from persistkv.storage.records import StoreOptions
from persistkv.storage.store.blocking import BlockingStore

BLOCK_BYTES = 64 << 10  # 64 KiB
JOB_BYTES = 32 << 20  # 32 MiB
NUM_BLOCKS = JOB_BYTES // BLOCK_BYTES
LAYOUT = RowLayout(BLOCK_BYTES, (GroupLayout(((0, BLOCK_BYTES),)),))
KEY = "PERSISTKV_BENCHMARK_KEY"
TARGET = 1.1


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
        """Store a job, and load it. Round 0 warms up, and is not counted."""
        keys = [os.urandom(32) + bytes(4) for _ in range(NUM_BLOCKS)]
        begin = time.perf_counter()
        self._store.put(f"r{number}", keys, range(NUM_BLOCKS), None)
        self._store.flush()
        stored = time.perf_counter()
        missed = self._store.read(keys, range(NUM_BLOCKS))
        loaded = time.perf_counter()
        if missed:
            raise SystemExit(f"{len(missed)} blocks are missing")
        if number:
            self.stores.append(stored - begin)
            self.loads.append(loaded - stored)

    def close(self) -> None:
        self._store.close()


class Reference:
    """The library's own time for a job, in frames of 1 MiB.

    :param name: of the row.
    :param work: seals a frame.
    """

    def __init__(self, name: str, work: Callable[[memoryview], object]) -> None:
        self.name = name
        self._work = work
        self._memory = memoryview(huge_memory(JOB_BYTES))
        self._memory[:] = os.urandom(JOB_BYTES)
        self.seconds: list[float] = []

    def run(self) -> None:
        begin = time.perf_counter()
        for start in range(0, JOB_BYTES, FRAME_BYTES):
            self._work(self._memory[start : start + FRAME_BYTES])
        self.seconds.append(time.perf_counter() - begin)


def decrypt_in_place(frame: memoryview) -> None:
    decryptor = gcm(bytes(32), bytes(12), bytes(16)).decryptor()
    decryptor.update_into(frame, frame)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--directory", type=Path, default=Path(tempfile.gettempdir()))
    parser.add_argument("--rounds", type=int, default=20)
    arguments = parser.parse_args()
    os.environ[KEY] = "k" * 32
    references = [
        Reference("AES-256-GCM in place, one thread", decrypt_in_place),
        Reference("xxh3-128, one thread", xxhash.xxh3_128_digest),
    ]
    with tempfile.TemporaryDirectory(dir=arguments.directory) as directory:
        place = f"lmdb://{directory}"
        plain = Rig(f"{place}/plain?capacity=1GiB")
        sealed = Rig(f"{place}/sealed?capacity=1GiB&key_env={KEY}")
        for number in range(arguments.rounds + 1):
            rigs = [plain, sealed]
            if number % 2:
                rigs.reverse()
            for rig in rigs:
                rig.run(number)
            for reference in references:
                reference.run()
        plain.close()
        sealed.close()
    rows = [
        row_of("store", plain.stores, sealed.stores),
        row_of("load", plain.loads, sealed.loads),
    ]
    for reference in references:
        median = statistics.median(reference.seconds)
        rows.append([reference.name, f"{median * 1e3:.1f}", "", "", ""])
    title = f"32 MiB jobs, ms: medians of {arguments.rounds}"
    columns = ["", "plain", "with a key", "ratio", f"95 %, target {TARGET}"]
    show(title, columns, rows)


def row_of(name: str, plain: list[float], sealed: list[float]) -> list[str]:
    """Return the table row: medians in ms, their ratio and its interval."""
    before = statistics.median(plain)
    after = statistics.median(sealed)
    low, high = ratio_interval(sealed, plain)
    ratio = f"{after / before:.2f}"
    interval = f"{low:.2f} to {high:.2f}"
    return [name, f"{before * 1e3:.1f}", f"{after * 1e3:.1f}", ratio, interval]


if __name__ == "__main__":
    main()
