"""Throughput of the worker's copies, compared with one flat copy of the same bytes.

A job of two KV cache groups with different page sizes is stored and loaded through the handlers,
interleaved with the flat copy; the figure is the ratio of median throughputs. There are three
orders: GPU blocks and rows in order, as a fresh engine allocates them; GPU blocks shuffled, as an
old paged allocator may leave them; or both shuffled, the worst case.

    python -m benchmarks.worker_copy [--device cuda] [--mib 256] [--pairs 9] [--json]
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
import uuid
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass

import numpy as np
import torch

from persistkv.base import (
    CanonicalKVCacheRef,
    CanonicalKVCaches,
    CanonicalKVCacheTensor,
    GPULoadStoreSpec,
)
from persistkv.cpu.gpu_worker import CpuGpuOffloadingHandlers
from persistkv.cpu.layout import cell_bytes
from persistkv.cpu.manager import CPULoadStoreSpec
from persistkv.cpu.shared_offload_region import SharedOffloadRegion

_TENSORS_PER_GROUP = 4


@dataclass(frozen=True)
class Result:
    """Median throughputs of one geometry."""

    page_kib: int
    """Page size of the first group; that of the second group is half of it, at least 16 KiB."""
    shuffled: str
    flat_gb_s: float
    store_gb_s: float
    load_gb_s: float
    store_ratio: float
    load_ratio: float


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--mib", type=int, default=256)
    parser.add_argument("--pairs", type=int, default=9)
    parser.add_argument(
        "--page-kib", type=int, nargs="+", default=[16, 64, 256, 512, 1024]
    )
    parser.add_argument("--json", action="store_true")
    arguments = parser.parse_args()
    results = [
        measure(
            torch.device(arguments.device),
            page << 10,
            arguments.mib << 20,
            arguments.pairs,
            shuffled,
        )
        for page in arguments.page_kib
        for shuffled in ("none", "gpu", "both")
    ]
    if arguments.json:
        print(
            json.dumps(
                {
                    "device": arguments.device,
                    "results": [asdict(result) for result in results],
                }
            )
        )
        return
    print(
        f"{'page KiB':>8} {'shuffled':>9} {'flat GB/s':>10} {'store':>7} {'load':>7}   "
        f"store/flat  load/flat"
    )
    for r in results:
        print(
            f"{r.page_kib:8} {r.shuffled:>9} {r.flat_gb_s:10.1f} {r.store_gb_s:7.1f} "
            f"{r.load_gb_s:7.1f}"
            f"   {r.store_ratio:10.2f} {r.load_ratio:10.2f}"
        )


def measure(
    device: torch.device,
    page: int,
    total: int,
    pairs: int,
    shuffled: str,
) -> Result:
    """Store and load one job of about ``total`` bytes, and copy as many flat, ``pairs`` times each
    in alternation."""
    kv_caches, per_group = _caches(device, page, total)
    num_rows = sum(per_group)
    gpu = GPULoadStoreSpec(_order(num_rows, 1, shuffled != "none"), per_group, [0, 0])
    cpu = CPULoadStoreSpec(_order(num_rows, 2, shuffled == "both"))
    with _region(kv_caches, num_rows) as region:
        handlers = CpuGpuOffloadingHandlers(kv_caches, 1, region)
        store, load = handlers.gpu_to_cpu_handler, handlers.cpu_to_gpu_handler
        job_bytes = _num_bytes(kv_caches, gpu)
        steps: dict[str, Callable[[], None]] = {
            "flat": _flat_copy(device, job_bytes),
            "store": lambda: _finish(
                store.transfer_async(0, (gpu, cpu)),
                lambda: store.wait({0}),
                store.get_finished,
            ),
            "load": lambda: _finish(
                load.transfer_async(0, (cpu, gpu)),
                lambda: load.wait({0}),
                load.get_finished,
            ),
        }
        seconds = _interleaved(steps, pairs)
        handlers.shutdown()
    speed = {name: job_bytes / value / 1e9 for name, value in seconds.items()}
    return Result(
        page >> 10,
        shuffled,
        speed["flat"],
        speed["store"],
        speed["load"],
        speed["store"] / speed["flat"],
        speed["load"] / speed["flat"],
    )


def _caches(
    device: torch.device,
    page: int,
    total: int,
) -> tuple[CanonicalKVCaches, list[int]]:
    pages = (page, max(page // 2, 16 << 10))
    per_group = [total // 2 // (size * _TENSORS_PER_GROUP) for size in pages]
    num_blocks = sum(per_group)
    tensors: list[CanonicalKVCacheTensor] = []
    refs: list[list[CanonicalKVCacheRef]] = []
    for size in pages:
        refs.append(
            [
                CanonicalKVCacheRef(len(tensors) + index, size)
                for index in range(_TENSORS_PER_GROUP)
            ]
        )
        for _ in range(_TENSORS_PER_GROUP):
            data = torch.randint(
                -128, 128, (num_blocks, size), dtype=torch.int8, device=device
            )
            tensors.append(CanonicalKVCacheTensor(data, size))
    return CanonicalKVCaches(tensors, refs), per_group


def _order(count: int, seed: int, shuffled: bool) -> list[int]:
    order: list[int] = (
        np.random.default_rng(seed).permutation(count).tolist()
        if shuffled
        else list(range(count))
    )
    return order


@contextmanager
def _region(
    kv_caches: CanonicalKVCaches,
    num_rows: int,
) -> Iterator[SharedOffloadRegion]:
    cell = cell_bytes(kv_caches, 1)
    region = SharedOffloadRegion(f"bench-{uuid.uuid4().hex}", num_rows, 0, 1, cell)
    try:
        yield region
    finally:
        region.cleanup()


def _num_bytes(kv_caches: CanonicalKVCaches, gpu: GPULoadStoreSpec) -> int:
    return sum(
        size * ref.page_size_bytes
        for size, refs in zip(gpu.group_sizes, kv_caches.group_data_refs, strict=True)
        for ref in refs
    )


def _flat_copy(device: torch.device, size: int) -> Callable[[], None]:
    on_gpu = device.type == "cuda"
    source = torch.randint(-128, 128, (size,), dtype=torch.int8, device=device)
    target = torch.ones(size, dtype=torch.int8, pin_memory=on_gpu)

    def copy() -> None:
        target.copy_(source, non_blocking=True)
        if on_gpu:
            torch.cuda.synchronize(device)

    return copy


def _finish(
    started: bool,
    wait: Callable[[], None],
    get_finished: Callable[[], object],
) -> None:
    if not started:
        raise RuntimeError("the transfer could not be started")
    wait()
    get_finished()


def _interleaved(steps: dict[str, Callable[[], None]], pairs: int) -> dict[str, float]:
    seconds: dict[str, list[float]] = {name: [] for name in steps}
    for step in steps.values():
        step()
    for _ in range(pairs):
        for name, step in steps.items():
            started = time.perf_counter()
            step()
            seconds[name].append(time.perf_counter() - started)
    return {name: statistics.median(values) for name, values in seconds.items()}


if __name__ == "__main__":
    main()
