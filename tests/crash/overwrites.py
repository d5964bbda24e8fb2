"""Engines read what another one evicts and overwrites: ``python -m tests.crash.overwrites --seconds
600``.

The writer fills a small store again and again, so that extents get new content at once. Readers
load whole ranges of requests without pause, the oldest included, with an index that is a little
old. Each block that they load must have its own content, and no pack may count as damaged: a reader
whose pack is overwritten sees a miss. The readers are stopped again and again, also in the middle
of a read, for longer than the writer takes to overwrite what they read.

The writer drops nothing, except with ``placement=inline``: there a reader that is stopped in a read
keeps the pages of its snapshot. Once it continues, blocks must be stored again.
"""

from __future__ import annotations

import argparse
import mmap
import random
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import numpy.typing as npt

from persistkv.config import GroupLayout, RowLayout
from persistkv.memory.rows import Rows
from persistkv.storage import open_backend
from persistkv.storage.identity import Identity
from persistkv.storage.records import StoreOptions
from persistkv.storage.store.blocking import BlockingStore
from persistkv.testing.conformance.suite import check_totals

IDENTITY = Identity.of({"test": "overwrites"})
BLOCK_BYTES = 32 << 10  # 32 KiB
BLOCKS = 64  # of a request: 2 MiB
CAPACITY = "32MiB"
# requests that a reader loads in one call, which takes longer than an eviction and a write
_AT_ONCE = 8
# the range begins at most so many requests before the newest: about as many as the store holds
_WINDOW = 16
_REFRESHES = 0.3  # share of the loads before which a reader reads the news
_STOP_S, _PAUSE_S = 1.0, 0.05
_PATIENCE_S = 120.0
_RECOVERY_S = 30.0  # after the last stop of a reader, a request is stored


def keys_of(request: int) -> list[bytes]:
    """Return the keys of a request's blocks."""
    return [
        (BLOCKS * request + block).to_bytes(32, "big") + bytes(4)
        for block in range(BLOCKS)
    ]


def content_of(request: int) -> npt.NDArray[np.uint64]:
    """Return the content of a request's blocks, a row for each."""
    numbers = np.arange(BLOCKS * request, BLOCKS * (request + 1), dtype=np.uint64)
    content = np.empty((BLOCKS, BLOCK_BYTES // 8), np.uint64)
    content[:] = np.arange(BLOCK_BYTES // 8, dtype=np.uint64)
    content += numbers[:, None] * np.uint64(0x9E3779B97F4A7C15)
    return content


def open_rows(url: str) -> tuple[BlockingStore, npt.NDArray[np.uint64]]:
    """Open the store with memory for several requests, as an engine does."""
    memory = memoryview(mmap.mmap(-1, _AT_ONCE * BLOCKS * BLOCK_BYTES))
    rows = Rows(memory, RowLayout(BLOCK_BYTES, (GroupLayout(((0, BLOCK_BYTES),)),)))
    store = BlockingStore(open_backend(url), IDENTITY, rows, StoreOptions(), url=url)
    return store, np.frombuffer(memory, np.uint64).reshape(
        _AT_ONCE * BLOCKS, BLOCK_BYTES // 8
    )


def write(url: str, newest: Path, seconds: float) -> None:
    """Store one request after the other, and write the number of the last one to ``newest``."""
    store, rows = open_rows(url)
    end, request = time.monotonic() + seconds, 0
    counters = store.counters

    def write_next() -> bool:
        """Store a request; return whether nothing of it was dropped."""
        nonlocal request
        request += 1
        before = counters.dropped_blocks
        rows[:BLOCKS] = content_of(request)
        store.put(f"r{request}", keys_of(request), range(BLOCKS), range(BLOCKS))
        store.flush()
        newest.write_text(str(request))
        store.work()
        return counters.dropped_blocks == before

    while time.monotonic() < end:
        is_stored = write_next()
        assert is_stored or "placement=inline" in url, (
            f"{counters.dropped_blocks} blocks were dropped"
        )
    while not write_next():
        assert time.monotonic() < end + _RECOVERY_S, (
            "no request is stored although all readers continue"
        )
    store.close()
    print(request, counters.evicted_blocks)


def read(url: str, newest: Path, seconds: float, seed: int) -> None:
    """Load requests until the time has passed."""
    store, rows = open_rows(url)
    draw = np.random.default_rng(seed)
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        last = int(newest.read_text() or 0) if newest.exists() else 0
        if draw.random() < _REFRESHES:
            store.refresh()
        if last < _WINDOW:
            time.sleep(0.01)
            continue
        first = last - int(draw.integers(_AT_ONCE, _WINDOW + 1))
        rows[:] = 0
        keys = [
            key
            for request in range(first, first + _AT_ONCE)
            for key in keys_of(request)
        ]
        failed = set(store.read(keys, range(len(keys))))
        for number in range(_AT_ONCE):
            right = content_of(first + number)
            for block, key in enumerate(keys[BLOCKS * number : BLOCKS * (number + 1)]):
                row = rows[BLOCKS * number + block]
                assert key in failed or (row == right[block]).all(), (
                    f"wrong bytes of request {first + number}"
                )
    store.refresh()
    counters = store.counters
    damaged = counters.verification_failures
    store.close()
    assert not damaged, f"{damaged} overwritten frames counted as damaged"
    print(counters.loaded_blocks, counters.missed_blocks)


def stop_some(processes: Sequence[subprocess.Popen[bytes]], seconds: float) -> None:
    """Stop one process after the other for a moment, until the time has passed."""
    draw = random.Random(len(processes))
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        process = draw.choice(processes)
        process.send_signal(signal.SIGSTOP)
        time.sleep(_STOP_S)
        process.send_signal(signal.SIGCONT)
        time.sleep(draw.uniform(0, _PAUSE_S))


def run(
    directory: Path,
    seconds: float,
    readers: int,
    placement: str,
) -> list[list[int]]:
    """Run one writer and several readers.

    :returns: requests and evicted blocks of the writer, then loaded and missed blocks of each
        reader.
    """
    url, newest = (
        f"lmdb://{directory}/store?capacity={CAPACITY}&placement={placement}",
        directory / "newest",
    )
    open_backend(url).close()
    roles: Sequence[Sequence[object]] = [
        ("write",),
        *(("read", seed) for seed in range(readers)),
    ]
    command = [
        sys.executable,
        "-m",
        "tests.crash.overwrites",
        "--seconds",
        str(seconds),
        "--store",
        url,
    ]
    command += ["--newest", str(newest), "--role"]
    pipe = subprocess.PIPE
    processes = [
        subprocess.Popen([*command, *map(str, role)], stdout=pipe, stderr=pipe)
        for role in roles
    ]
    found = []
    try:
        stop_some(processes[1:], seconds)
        for process in processes:
            output, errors = process.communicate(timeout=seconds + _PATIENCE_S)
            assert process.returncode == 0, errors.decode()
            found.append(list(map(int, output.split())))
    finally:
        for process in processes:
            process.kill()
            process.communicate()
    backend = open_backend(url)
    check_totals(backend)
    backend.close()
    return found


def main() -> None:
    """Run for both placements, or as one of the processes."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--seconds", type=float, default=60.0, help="for each placement"
    )
    parser.add_argument("--readers", type=int, default=4)
    for name, kind in (("--store", str), ("--newest", Path)):
        parser.add_argument(name, type=kind, help=argparse.SUPPRESS)
    parser.add_argument("--role", nargs="+", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.role:
        role, *seeds = arguments.role
        if role == "write":
            write(arguments.store, arguments.newest, arguments.seconds)
        else:
            read(arguments.store, arguments.newest, arguments.seconds, int(seeds[0]))
        return
    for placement in ("extents", "inline"):
        with tempfile.TemporaryDirectory() as directory:
            (requests, evicted), *found = run(
                Path(directory), arguments.seconds, arguments.readers, placement
            )
        loaded, missed = (sum(counts) for counts in zip(*found, strict=True))
        done = (
            f"{requests} requests written, {evicted} blocks evicted, {loaded} loaded, "
            f"{missed} missed"
        )
        print(f"{placement}: {done}; 0 wrong, 0 counted as damaged")


if __name__ == "__main__":
    main()
