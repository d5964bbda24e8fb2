"""Cost of ``BlockStore`` over the store's own path: durable stores and cold loads of 32 MiB jobs.

The store's own path is a ``BlockingStore`` on rows, as a tier in a thread has it: its blocks are
rows of one array. ``BlockStore`` takes the same memory as separate blocks, and as keys and values
that lie half a pool apart. The calls alternate on stores of the same kind; each store job has new
keys. All files are dropped from the page cache before each load. ``with deadline`` has
``timeout_s`` set, so that the bytes are copied once more. The target is a ratio of 1.1 for blocks
of 64 KiB without a deadline.

``disk`` is the limit: the same blocks appended with O_DIRECT and synced, and read with O_DIRECT by
two threads, which compute the checksums of what they have read.
"""

from __future__ import annotations

import argparse
import os
import statistics
import tempfile
import time
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from benchmarks.raw_disk import RawDisk, drop_page_cache
from benchmarks.rig import show, touch_memory
from persistkv import BlockIdentity, BlockStore
from persistkv.base import make_offload_key
from persistkv.config import GroupLayout, RowLayout
from persistkv.memory.pages import huge_memory
from persistkv.memory.rows import Rows
from persistkv.storage import open_backend
from persistkv.storage.identity import Identity
from persistkv.storage.records import RequestEnd, StoreOptions
from persistkv.storage.store.blocking import BlockingStore

JOB_BYTES = 32 << 20  # 32 MiB
WARM_UP = 2  # rounds that are not counted
DISK = "disk"
_DISK_THREADS = 2
Pool = npt.NDArray[np.uint8]


class Spent(NamedTuple):
    """Seconds that a call took."""

    elapsed: float
    cpu: float
    """Seconds on a CPU of all threads. Other processes hardly change it."""

    @classmethod
    def by(cls, call: Callable[[], None]) -> Spent:
        begin, cpu = time.perf_counter(), time.process_time()
        call()
        return cls(time.perf_counter() - begin, time.process_time() - cpu)

    @classmethod
    def told_by(cls, call: Callable[[], float]) -> Spent:
        """Return the seconds that ``call`` returns, and its time on CPUs."""
        cpu = time.process_time()
        return cls(call(), time.process_time() - cpu)


class Case(NamedTuple):
    """One way to store and load the blocks of a job."""

    store: Callable[[Sequence[bytes]], None]
    load: Callable[[Sequence[bytes]], None]
    target: Pool
    """Memory that ``load`` fills."""
    close: Callable[[], object]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--kib", type=int, nargs="+", default=[64, 512, 2048])
    parser.add_argument("--runs", type=int, default=15)
    parser.add_argument("--directory", help="on the disk to be measured")
    arguments = parser.parse_args()
    touch_memory()
    rows = []
    for kib in arguments.kib:
        with tempfile.TemporaryDirectory(dir=arguments.directory) as directory:
            seconds = measure(Path(directory), kib << 10, arguments.runs)
        rows += table(f"{kib} KiB", seconds)
    load = os.getloadavg()[0]
    title = f"BlockStore and the store's own path (load of the machine: {load:.1f})"
    columns = ["block", "32 MiB job", "", "median", "÷ own path", "CPU", "÷ own path"]
    show(title, columns, rows)


def table(
    block: str,
    seconds: Mapping[tuple[str, str], Sequence[Spent]],
) -> list[list[str]]:
    """Return a row for each operation and case."""
    medians: dict[tuple[str, str], Spent] = {}
    for case, spent in seconds.items():
        elapsed = statistics.median(one.elapsed for one in spent)
        medians[case] = Spent(elapsed, statistics.median(one.cpu for one in spent))
    rows: list[list[str]] = []
    for (name, operation), median in sorted(
        medians.items(), key=lambda item: item[0][1]
    ):
        own = medians["own path", operation]
        rows.append(
            [
                block,
                operation,
                name,
                f"{median.elapsed * 1e3:.1f} ms",
                f"{median.elapsed / own.elapsed:.2f}",
                f"{median.cpu * 1e3:.1f} ms",
                f"{median.cpu / own.cpu:.2f}",
            ]
        )
    return rows


def measure(
    directory: Path,
    block_bytes: int,
    runs: int,
) -> dict[tuple[str, str], list[Spent]]:
    """Return the time of each operation by (name of the case, operation)."""
    count = JOB_BYTES // block_bytes
    blocks = np.random.default_rng(0).integers(0, 256, (count, block_bytes), np.uint8)
    cases = {
        "own path": _own_path(directory / "own", blocks),
        "blocks": _block_store(directory / "blocks", blocks, list),
        "K and V apart": _block_store(directory / "apart", blocks, _halves),
        "with deadline": _block_store(
            directory / "deadline", blocks, list, timeout_s=60.0
        ),
    }
    disk = _raw_disk(directory / DISK, blocks)
    seconds: dict[tuple[str, str], list[Spent]] = defaultdict(list)
    names = list(cases)
    for run in range(WARM_UP + runs):
        stored = Spent.told_by(disk.write_new)
        read = partial(disk.read_cold_verified, run, _DISK_THREADS)
        loaded = Spent.told_by(read)
        if run >= WARM_UP:
            seconds[DISK, "store"].append(stored)
            seconds[DISK, "load"].append(loaded)
        keys = [f"{run} {number}".encode() for number in range(count)]
        first = run % len(names)
        for name in names[first:] + names[:first]:
            case = cases[name]
            stored = Spent.by(partial(case.store, keys))
            drop_page_cache([directory])
            case.target[:] = 0
            loaded = Spent.by(partial(case.load, keys))
            if not np.array_equal(case.target, blocks):
                raise SystemExit(f"{name}: other bytes were loaded")
            if run >= WARM_UP:
                seconds[name, "store"].append(stored)
                seconds[name, "load"].append(loaded)
    disk.close()
    for case in cases.values():
        case.close()
    return seconds


def _raw_disk(directory: Path, blocks: Pool) -> RawDisk:
    """Return the disk without a store, for blocks in the same memory and order."""
    directory.mkdir()
    source, target = _pool(*blocks.shape), _pool(*blocks.shape)
    source[:] = blocks
    order = _order(len(blocks))
    rows = [source[number].data for number in order]
    targets = [target[number].data for number in order]
    return RawDisk(directory, rows, targets)


def _pool(count: int, block_bytes: int) -> Pool:
    """Return memory for blocks in huge pages, as the primary tier has."""
    memory = memoryview(huge_memory(count * block_bytes))
    return np.frombuffer(memory, np.uint8).reshape(count, block_bytes)


def _halves(pool: Pool) -> list[list[Pool]]:
    """Return blocks whose keys are in the first half of the pool, and values in the other."""
    parts = pool.reshape(2, len(pool), -1)
    return [[parts[0, number], parts[1, number]] for number in range(len(pool))]


def _order(count: int) -> list[int]:
    """Return the order in which a job uses its blocks: as scattered as in an engine."""
    order = np.random.default_rng(1).permutation(count)
    return [int(number) for number in order]


def _url(directory: Path) -> str:
    return f"lmdb://{directory}?capacity=8GiB"


def _own_path(directory: Path, blocks: Pool) -> Case:
    count, block_bytes = blocks.shape
    layout = RowLayout(block_bytes, (GroupLayout(((0, block_bytes),)),))
    memory = memoryview(huge_memory(2 * blocks.nbytes))[: 2 * blocks.nbytes]
    rows = Rows(memory, layout)
    rows.array[:count] = blocks
    order = _order(count)
    identity = Identity.of({"benchmark": block_bytes})
    options = StoreOptions(adopt="never")
    url = _url(directory)
    store = BlockingStore(open_backend(url), identity, rows, options, url=url)

    def put(keys: Sequence[bytes]) -> None:
        full = [bytes(make_offload_key(key, 0)) for key in keys]
        request = full[0].hex()
        store.put(request, full, order, None)
        store.end_request(RequestEnd(request, request, (full,), count, 1))
        store.flush()

    def load(keys: Sequence[bytes]) -> None:
        full = [bytes(make_offload_key(key, 0)) for key in keys]
        if store.read(full, [count + row for row in order]):
            raise SystemExit("own path: blocks were not loaded")

    return Case(put, load, rows.array[count:], store.close)


def _block_store(
    directory: Path,
    blocks: Pool,
    divide: Callable[[Pool], list[Any]],
    timeout_s: float | None = None,
) -> Case:
    """:param divide: returns the memory of each block in a pool."""
    count, block_bytes = blocks.shape
    source, target = _pool(count, block_bytes), _pool(count, block_bytes)
    source[:] = blocks
    identity = BlockIdentity(
        model_name="benchmark",
        weights="name:benchmark",
        engine="benchmark",
        release="1",
        dtype="uint8",
        shapes=((block_bytes,),),
        layout="none",
        rank="0",
    )
    store = BlockStore.open(_url(directory), identity, [block_bytes])
    order = _order(count)
    divided = divide(source)
    from_blocks = [divided[number] for number in order]
    divided = divide(target)
    into_blocks = [divided[number] for number in order]

    def put(keys: Sequence[bytes]) -> None:
        stored = store.put(keys, from_blocks, timeout_s=timeout_s)
        if not all(stored):
            raise SystemExit("blocks were not stored")

    def load(keys: Sequence[bytes]) -> None:
        found = store.get(keys, into_blocks, timeout_s=timeout_s)
        if not all(found):
            raise SystemExit("blocks were not loaded")

    return Case(put, load, target, store.close)


if __name__ == "__main__":
    main()
