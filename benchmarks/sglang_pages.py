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

from benchmarks.raw_disk import drop_page_cache
from benchmarks.rig import show
from tests.integrations.sglang.preparation import prepare

JOB_BYTES = 32 << 20  # 32 MiB
PAGE_TOKENS = 16
HEAD_DIM = 128
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
    import torch

    count = JOB_BYTES // page_bytes
    # K and V of a token in 16 bits, with one head
    layers = page_bytes // (2 * PAGE_TOKENS * HEAD_DIM * 2)
    pool = _pool(2 * count * PAGE_TOKENS, layers)
    pool.kv_buffer.view(torch.uint8).random_(0, 256)
    source = torch.arange(count * PAGE_TOKENS)
    target = source + count * PAGE_TOKENS
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
            drop_page_cache([directory])
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


def _pool(tokens: int, layers: int) -> Any:
    import torch
    from sglang.srt.mem_cache.memory_pool import MHATokenToKVPool
    from sglang.srt.mem_cache.pool_host.mha import MHATokenToKVPoolHost

    device_pool = MHATokenToKVPool(
        tokens // 2,
        PAGE_TOKENS,
        torch.bfloat16,
        1,
        HEAD_DIM,
        layers,
        "cpu",
        False,
        start_layer=0,
        end_layer=layers - 1,
        enable_alt_stream=False,
    )
    return MHATokenToKVPoolHost(
        device_pool.get_device_pool_infos()[0].buffer_info,
        2.0,
        0,
        PAGE_TOKENS,
        "page_first",
        pin_memory=False,
        device="cpu",
        allocator_type="shm",
        device_capacity_tokens=device_pool.size,
        start_layer=0,
        end_layer=layers - 1,
    )


def _cases(directory: Path, pool: Any) -> dict[str, Case]:
    from sglang.srt.mem_cache.hicache_storage import HiCacheFile, HiCacheStorageConfig

    from persistkv.integrations.sglang.backend import PersistKVStorage

    options = {
        "url": f"lmdb://{directory}/store?capacity=8GiB",
        "weights": "bench",
        "attention_backend": "none",
        "timeout_s": 60.0,
    }
    config = HiCacheStorageConfig(
        tp_rank=0,
        tp_size=1,
        pp_rank=0,
        pp_size=1,
        attn_cp_rank=0,
        attn_cp_size=1,
        is_mla_model=False,
        enable_storage_metrics=False,
        is_page_first_layout=True,
        model_name="bench",
        extra_config={"interface_v1": 1, "persistkv": options},
    )
    ours = PersistKVStorage(config)
    ours.register_mem_pool_host(pool)
    theirs = HiCacheFile(config, str(directory / "files"))

    def store(keys: list[str], indices: Any) -> bool:
        return all(_in_batches(ours.batch_set_v1, keys, indices))

    def load(keys: list[str], indices: Any) -> bool:
        return all(_in_batches(ours.batch_get_v1, keys, indices))

    # the copies are SGLang's: its controller makes them for the file backend
    def store_files(keys: list[str], indices: Any) -> bool:
        starts = indices[::PAGE_TOKENS].tolist()
        return bool(
            theirs.batch_set(keys, [pool.get_data_page(start) for start in starts])
        )

    def load_files(keys: list[str], indices: Any) -> bool:
        pages = [pool.get_dummy_flat_data_page() for _ in keys]
        found = theirs.batch_get(keys, pages)
        for start, page in zip(indices[::PAGE_TOKENS].tolist(), found, strict=True):
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
        first = start * PAGE_TOKENS
        results += call(some, indices[first : first + len(some) * PAGE_TOKENS])
    return results


if __name__ == "__main__":
    main()
