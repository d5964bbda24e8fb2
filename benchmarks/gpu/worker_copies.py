"""Throughput of the worker's stores and loads, as ratios to one large copy of pinned memory.

Pages of 16 KiB to 2 MiB in four KV tensors, with GPU blocks and rows in order, blocks shuffled, or
both shuffled; each direction alone, and both at the same time. Three page sizes are also measured
with each way to submit copies. Times are those of the caller, from submission to end;
``device_share`` is the part of them in which the device copied.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from benchmarks.gpu.results import Results, parse
from benchmarks.gpu.rig import (
    PinnedCopies,
    Worker,
    medians_of_interleaved,
    run_job,
    start_job,
    store_spec,
)
from persistkv.cpu.devices.cuda import (
    DriverBatchCopier,
    PageCopier,
    TorchCopier,
)

ORDERS = ("in order", "blocks shuffled", "both shuffled")


def target(page_bytes: int) -> float | None:
    """Return the lowest ratio wanted for a page size; None if there is no target."""
    if page_bytes >= 512 << 10:
        return 0.9
    return 0.8 if page_bytes >= 64 << 10 else None


def main(argv: Sequence[str] | None = None) -> None:
    arguments = parse(__doc__.splitlines()[0], argv)
    device, smoke = arguments.device, arguments.smoke
    results = Results("worker copies", arguments)
    total, rounds = (1 << 20, 1) if smoke else (512 << 20, 7)
    pages = (
        [4 << 10, 16 << 10]
        if smoke
        else [size << 10 for size in (16, 32, 64, 128, 256, 512, 1024, 2048)]
    )
    for page in pages:
        worker = Worker(device, page, total)
        try:
            pinned = PinnedCopies(device, worker.num_blocks * worker.block_bytes)
            halves = PinnedCopies(device, worker.num_blocks // 2 * worker.block_bytes)
            for order in ORDERS:
                measure(worker, pinned, halves, order, rounds, results)
            if device.type == "cuda" and page >> 10 in (16, 64, 512):
                for name, copier in copiers().items():
                    worker.use(copier)
                    measure(
                        worker, pinned, None, "both shuffled", rounds, results, name
                    )
        finally:
            worker.close()


def copiers() -> dict[str, PageCopier]:
    """Return the ways to submit copies to the driver, by name."""
    return {
        "batch": DriverBatchCopier(),
        "one at a time": TorchCopier(),
    }


def measure(
    worker: Worker,
    pinned: PinnedCopies,
    halves: PinnedCopies | None,
    order: str,
    rounds: int,
    results: Results,
    copier: str = "",
) -> None:
    """Measure one page size and order: each direction, and both at once if there are ``halves``."""
    count = worker.num_blocks
    blocks = _numbers(count, 1, order != "in order")
    rows = _numbers(count, 2, order == "both shuffled")
    store = store_spec(blocks, rows)
    half = count // 2
    store_half = store_spec(blocks[:half], rows[:half])
    load_half = store_spec(blocks[half : 2 * half], rows[half : 2 * half])[::-1]
    on_device: dict[str, list[float]] = {"store": [], "load": []}

    def both() -> None:
        start_job(worker.store, 0, store_half)
        start_job(worker.load, 0, load_half)
        for handler in (worker.store, worker.load):
            handler.wait({0})
            if not all(result.success for result in handler.get_finished()):
                raise RuntimeError("a transfer failed")

    steps = {
        "pinned store": pinned.store,
        "store": lambda: on_device["store"].append(run_job(worker.store, store)),
        "pinned load": pinned.load,
        "load": lambda: on_device["load"].append(run_job(worker.load, store[::-1])),
    }
    if halves is not None:
        steps |= {"pinned both": halves.both, "both": both}
    seconds = medians_of_interleaved(steps, rounds)
    total = count * worker.block_bytes
    for name in ("store", "load", "both") if halves is not None else ("store", "load"):
        moved = 2 * half * worker.block_bytes if name == "both" else total
        values = {
            "gb_s": moved / seconds[name] / 1e9,
            "pinned_gb_s": moved / seconds[f"pinned {name}"] / 1e9,
        }
        if name in on_device:
            values["device_share"] = (
                float(np.median(on_device[name][1:])) / seconds[name]
            )
        results.add(
            ", ".join(
                filter(
                    None, (name, f"{worker.page_bytes >> 10} KiB pages", order, copier)
                )
            ),
            seconds[f"pinned {name}"] / seconds[name],
            at_least=None if copier else target(worker.page_bytes),
            is_pinned=worker.is_pinned,
            **values,
        )


def _numbers(count: int, seed: int, shuffled: bool) -> list[int]:
    numbers: list[int] = (
        np.random.default_rng(seed).permutation(count).tolist()
        if shuffled
        else list(range(count))
    )
    return numbers


if __name__ == "__main__":
    main()
