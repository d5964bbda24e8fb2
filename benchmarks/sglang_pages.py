"""Pages of SGLang's host pools, stored and loaded with persistkv's backend and with SGLang's
``HiCacheFile``, in the same process.

Run it with a Python that has SGLang (`make setup-sglang`). Each round stores 32 MiB of new pages
and loads them, with both backends in changing order. All files are dropped from the page cache
before a load. persistkv syncs what it stores; the file backend does not. Every loaded byte is
compared.
"""

from __future__ import annotations

import argparse
import os
import statistics
import tempfile
import time
from collections import defaultdict
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import torch

from benchmarks.raw_disk import drop_page_cache
from benchmarks.rig import show
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
        for operation in ("store", "load"):
            ours = statistics.median(seconds["persistkv", operation])
            theirs = statistics.median(seconds["file", operation])
            row = [f"{kib} KiB", operation, f"{ours * 1e3:.1f} ms"]
            rows.append([*row, f"{theirs * 1e3:.1f} ms", f"{theirs / ours:.2f}"])
    load = os.getloadavg()[0]
    title = (
        f"SGLang: 32 MiB of pages, from cold files (load of the machine: {load:.1f})"
    )
    show(title, ["page", "operation", "persistkv", "file", "file ÷ persistkv"], rows)


def measure(
    directory: Path, page_bytes: int, runs: int
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
    names = list(cases)
    seconds: dict[tuple[str, str], list[float]] = defaultdict(list)
    for run in range(1 + runs):
        keys = [f"{run * count + page:064x}" for page in range(count)]
        first = run % len(names)
        for name in names[first:] + names[:first]:
            begin = time.perf_counter()
            is_stored = cases[name].store(keys, source)
            stored = time.perf_counter()
            # without the catalogue, which is mapped
            drop_page_cache([directory / "store" / "segments", directory / "files"])
            pool.kv_buffer[:, target] = 0
            before_load = time.perf_counter()
            is_loaded = cases[name].load(keys, target)
            loaded = time.perf_counter()
            numbers = pool.kv_buffer.view(torch.int16)
            if not torch.equal(numbers[:, source], numbers[:, target]):
                raise SystemExit(f"{name}: other bytes were loaded")
            if not (is_stored and is_loaded):
                raise SystemExit(f"{name}: pages were not stored or not loaded")
            if run:  # the first one warms up
                seconds[name, "store"].append(stored - begin)
                seconds[name, "load"].append(loaded - before_load)
    for case in cases.values():
        case.close()
    return seconds


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
    call: Callable[[list[str], Any], list[bool]], keys: list[str], indices: Any
) -> list[bool]:
    results: list[bool] = []
    for start in range(0, len(keys), AT_ONCE):
        some = keys[start : start + AT_ONCE]
        first = start * PAGE
        results += call(some, indices[first : first + len(some) * PAGE])
    return results


if __name__ == "__main__":
    main()
