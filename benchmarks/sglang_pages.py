"""Pages of SGLang's host pools, stored and loaded with persistkv's backend and with SGLang's
``HiCacheFile``, in the same process.

Run it with a Python that has SGLang (`make setup-sglang`). Each round stores 32 MiB of new pages
and loads them, with both backends in changing order. persistkv syncs what it stores; the file
backend does not. ``load`` is from the disk: all files are synced, because dirty pages stay in the
page cache, and then dropped from it. ``load again`` follows it: the file backend reads from the
page cache, persistkv from the disk. Every loaded byte is compared.

``disk`` is the limit: the same regions of the pool appended with O_DIRECT and synced, and read with
O_DIRECT by two threads, which compute the checksums of what they have read.
"""

from __future__ import annotations

import argparse
import os
import statistics
import tempfile
import time
from collections import defaultdict
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch

from benchmarks.raw_disk import RawDisk, drop_page_cache
from benchmarks.rig import show
from persistkv.memory.libc import memory_at
from tests.integrations.sglang.host_pools import (
    HEAD_DIM,
    PAGE,
    create_storage,
    make_host_pool,
    page_indices,
    storage_config,
)
from tests.integrations.sglang.preparation import prepare

JOB_BYTES = 32 << 20  # 32 MiB
AT_ONCE = 128  # pages of a call, as in SGLang
OPERATIONS = ("store", "load", "load again")
DISK = "disk"
_DISK_THREADS = 2


class Case(NamedTuple):
    """A backend: it stores and loads pages with these keys at these indices of the pool."""

    store: Callable[[list[str], Any], bool]
    load: Callable[[list[str], Any], bool]
    close: Callable[[], object]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--kib", type=int, nargs="+", default=[64, 512, 2048])
    parser.add_argument("--runs", type=int, default=7)
    parser.add_argument("--directory", help="on the disk to be measured")
    arguments = parser.parse_args()
    prepare()
    rows = []
    for kib in arguments.kib:
        with tempfile.TemporaryDirectory(dir=arguments.directory) as directory:
            seconds = measure(Path(directory), kib << 10, arguments.runs)
        for operation in OPERATIONS:
            ours = statistics.median(seconds["persistkv", operation])
            theirs = statistics.median(seconds["file", operation])
            row = [f"{kib} KiB", operation, f"{ours * 1e3:.1f} ms"]
            row += [f"{theirs * 1e3:.1f} ms", f"{theirs / ours:.2f}"]
            if (DISK, operation) in seconds:
                disk = statistics.median(seconds[DISK, operation])
                row += [f"{disk * 1e3:.1f} ms", f"{theirs / disk:.2f}"]
            rows.append(row)
    load = os.getloadavg()[0]
    title = (
        f"SGLang: 32 MiB of pages, from cold files (load of the machine: {load:.1f})"
    )
    columns = ["page", "operation", "persistkv", "file", "file ÷ persistkv"]
    show(title, [*columns, "disk", "file ÷ disk"], rows)


def measure(
    directory: Path,
    page_bytes: int,
    runs: int,
) -> dict[tuple[str, str], list[float]]:
    """Return the seconds of each operation by (backend, operation)."""
    count = JOB_BYTES // page_bytes
    # K and V of a token in 16 bits, with one head
    layers = page_bytes // (2 * PAGE * HEAD_DIM * 2)
    pool = make_host_pool(2 * count, layers=layers, heads=1)
    pool.kv_buffer.view(torch.uint8).random_(0, 256)
    source = page_indices(0, count)
    target = page_indices(count, count)
    cases = _cases(directory, pool)
    disk = _raw_disk(directory / DISK, pool, source, target)
    names = list(cases)
    seconds: dict[tuple[str, str], list[float]] = defaultdict(list)
    for run in range(1 + runs):
        keys = [f"{run * count + page:064x}" for page in range(count)]
        first = run % len(names)
        written_s = disk.write_new()
        read_s = disk.read_cold_verified(run, _DISK_THREADS)
        if run:
            seconds[DISK, "store"].append(written_s)
            seconds[DISK, "load"].append(read_s)
        for name in names[first:] + names[:first]:
            begin = time.perf_counter()
            is_stored = cases[name].store(keys, source)
            stored_s = time.perf_counter() - begin
            os.sync()
            # without the catalogue, which is mapped
            drop_page_cache([directory / "store" / "segments", directory / "files"])
            load = partial(_load, cases[name], pool, keys, source, target)
            taken = [stored_s, load(), load()]
            if not is_stored:
                raise SystemExit(f"{name}: pages were not stored")
            if run:  # the first one warms up
                for operation, one in zip(OPERATIONS, taken, strict=True):
                    seconds[name, operation].append(one)
    disk.close()
    for case in cases.values():
        case.close()
    return seconds


def _load(case: Case, pool: Any, keys: list[str], source: Any, target: Any) -> float:
    """Load pages, which are stored from the indices ``source``; return the seconds."""
    pool.kv_buffer[:, target] = 0
    begin = time.perf_counter()
    is_loaded = case.load(keys, target)
    seconds = time.perf_counter() - begin
    numbers = pool.kv_buffer.view(torch.int16)
    if not is_loaded or not torch.equal(numbers[:, source], numbers[:, target]):
        raise SystemExit("pages were not loaded, or with other bytes")
    return seconds


def _raw_disk(directory: Path, pool: Any, source: Any, target: Any) -> RawDisk:
    """Return the disk without a store, for the regions of these pages."""
    directory.mkdir()
    rows = _regions(pool, source)
    targets = _regions(pool, target)
    return RawDisk(directory, rows, targets)


def _regions(pool: Any, indices: Any) -> list[memoryview]:
    addresses, sizes = pool.get_page_buffer_meta(indices)
    return [memory_at(*region) for region in zip(addresses, sizes, strict=True)]


def _cases(directory: Path, pool: Any) -> dict[str, Case]:
    from sglang.srt.mem_cache.hicache_storage import HiCacheFile

    options = {
        "url": f"lmdb://{directory}/store?capacity=8GiB",
        "weights": "bench",
        "attention_backend": "none",
        "timeout_s": 60.0,
    }
    config = storage_config(options, enable_storage_metrics=False)
    ours = create_storage(config, pool)
    theirs = HiCacheFile(config, str(directory / "files"))

    def store(keys: list[str], indices: Any) -> bool:
        return all(_in_batches(ours.batch_set_v1, keys, indices))

    def load(keys: list[str], indices: Any) -> bool:
        return all(_in_batches(ours.batch_get_v1, keys, indices))

    # the copies are SGLang's: its controller makes them for the file backend
    def store_files(keys: list[str], indices: Any) -> bool:
        starts = indices[::PAGE].tolist()
        return bool(
            theirs.batch_set(keys, [pool.get_data_page(start) for start in starts])
        )

    def load_files(keys: list[str], indices: Any) -> bool:
        pages = [pool.get_dummy_flat_data_page() for _ in keys]
        found = theirs.batch_get(keys, pages)
        for start, page in zip(indices[::PAGE].tolist(), found, strict=True):
            pool.set_from_flat_data_page(start, page)
        return True

    return {
        "persistkv": Case(store, load, ours.close),
        "file": Case(store_files, load_files, lambda: None),
    }


def _in_batches(
    call: Callable[[list[str], Any], list[bool]],
    keys: list[str],
    indices: Any,
) -> list[bool]:
    results: list[bool] = []
    for start in range(0, len(keys), AT_ONCE):
        some = keys[start : start + AT_ONCE]
        first = start * PAGE
        results += call(some, indices[first : first + len(some) * PAGE])
    return results


if __name__ == "__main__":
    main()
