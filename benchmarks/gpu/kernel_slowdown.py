"""Slowdown of kernels while the worker copies, and the throughput of the copies during the kernels.

A matrix product (limited by arithmetic) and a scaling of a large tensor (limited by memory) run
alone and then with stores, loads, or both in flight, in alternation. A thread keeps a few jobs in
flight while the kernels run; ``copies_gb_s`` is its throughput in that time.
"""

from __future__ import annotations

import statistics
import threading
import time
from collections.abc import Callable, Sequence

import numpy as np
import torch

from benchmarks.gpu.results import Results, parse
from benchmarks.gpu.rig import Worker, start_job, store_spec
from benchmarks.gpu.worker_copies import copiers
from persistkv.base import OffloadingHandler, TransferSpec

MAX_SLOWDOWN = 0.03
_IN_FLIGHT = 3  # jobs in each direction, so that the device always has one

Queue = list[tuple[OffloadingHandler, TransferSpec]]


def main(argv: Sequence[str] | None = None) -> None:
    arguments = parse(__doc__.splitlines()[0], argv)
    device, smoke = arguments.device, arguments.smoke
    results = Results("kernel slowdown", arguments)
    total, rounds = (1 << 20, 1) if smoke else (256 << 20, 3)
    kernels = make_kernels(device, smoke)
    for page in [16 << 10] if smoke else [64 << 10, 2 << 20]:
        worker = Worker(device, page, total)
        try:
            ways = copiers() if device.type == "cuda" else {"": None}
            for name, copier in ways.items():
                if copier is not None:
                    worker.use(copier)
                for kernel, run in kernels.items():
                    measure(worker, device, kernel, run, rounds, results, name)
        finally:
            worker.close()


def make_kernels(device: torch.device, smoke: bool) -> dict[str, Callable[[], None]]:
    """Return the kernels by name; each is some 100 ms of work on a large GPU."""
    size, elements = (64, 1 << 16) if smoke else (8192, 1 << 29)
    matrices = [
        torch.randn(size, size, device=device).to(torch.bfloat16) for _ in range(2)
    ]
    product = torch.empty_like(matrices[0])
    values = torch.randn(elements, device=device).to(torch.bfloat16)
    repeats = (2, 2) if smoke else (80, 200)

    def multiply() -> None:
        for _ in range(repeats[0]):
            torch.mm(*matrices, out=product)

    def scale() -> None:
        for _ in range(repeats[1]):
            values.mul_(1.0)

    return {"matrix product": multiply, "scaling": scale}


def measure(
    worker: Worker,
    device: torch.device,
    kernel: str,
    run: Callable[[], None],
    rounds: int,
    results: Results,
    copier: str,
) -> None:
    """Measure one kernel alone and with each kind of copies."""
    draw = np.random.default_rng(0)
    count = worker.num_blocks
    half = count // 2
    blocks, rows = draw.permutation(count).tolist(), draw.permutation(count).tolist()
    store = store_spec(blocks[:half], rows[:half])
    load = store_spec(blocks[half : 2 * half], rows[half : 2 * half])[::-1]
    queues: dict[str, Queue] = {
        "stores": [(worker.store, store)],
        "loads": [(worker.load, load)],
        "both": [(worker.store, store), (worker.load, load)],
    }
    timed(device, run)
    alone: list[float] = []
    beside: dict[str, list[float]] = {name: [] for name in queues}
    speeds: dict[str, list[float]] = {name: [] for name in queues}
    for _ in range(rounds):
        alone.append(timed(device, run))
        for name, queue in queues.items():
            with ContinuousCopies(device, queue) as copies:
                before, begin = copies.num_bytes, time.perf_counter()
                beside[name].append(timed(device, run))
                speeds[name].append(
                    (copies.num_bytes - before) / (time.perf_counter() - begin) / 1e9
                )
    for name in queues:
        results.add(
            ", ".join(
                filter(
                    None,
                    (
                        f"{kernel} beside {name}",
                        f"{worker.page_bytes >> 10} KiB pages",
                        copier,
                    ),
                )
            ),
            statistics.median(beside[name]) / statistics.median(alone) - 1,
            at_most=MAX_SLOWDOWN if copier in ("batch", "") else None,
            alone_ms=statistics.median(alone) * 1e3,
            copies_gb_s=statistics.median(speeds[name]),
        )


class ContinuousCopies:
    """Thread that copies without a pause from ``__enter__``, which returns once copies run, to
    ``__exit__``.

    The worker's streams wait for the thread's current stream, which has no kernels.
    """

    def __init__(self, device: torch.device, queue: Queue) -> None:
        self.num_bytes = 0
        """Bytes of the jobs that have ended."""
        self._device = device
        self._queue = queue
        self._stop = threading.Event()
        self._running = threading.Event()
        self._error: BaseException | None = None
        self._thread = threading.Thread(target=self._run)

    def __enter__(self) -> ContinuousCopies:
        self._thread.start()
        self._running.wait()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        self._thread.join()
        if self._error is not None:
            raise self._error

    def _run(self) -> None:
        on_gpu = self._device.type == "cuda"
        try:
            if not on_gpu:
                self._copy_until_stopped()
                return
            stream = torch.cuda.Stream(self._device)  # type: ignore[no-untyped-call]
            with torch.cuda.stream(stream):
                self._copy_until_stopped()
        except BaseException as error:
            self._error = error
        finally:
            self._running.set()

    def _copy_until_stopped(self) -> None:
        in_flight: dict[OffloadingHandler, set[int]] = {
            handler: set() for handler, _ in self._queue
        }
        job = 0
        while not self._stop.is_set():
            for handler, spec in self._queue:
                while len(in_flight[handler]) < _IN_FLIGHT:
                    job += 1
                    start_job(handler, job, spec)
                    in_flight[handler].add(job)
                self._collect(handler, in_flight[handler])
            if self.num_bytes:
                self._running.set()
            time.sleep(0.0001)
        for handler, jobs in in_flight.items():
            handler.wait(jobs)
            self._collect(handler, jobs)

    def _collect(self, handler: OffloadingHandler, jobs: set[int]) -> None:
        for result in handler.get_finished():
            if not result.success:
                raise RuntimeError("a transfer failed")
            jobs.discard(result.job_id)
            self.num_bytes += result.num_bytes


def timed(device: torch.device, run: Callable[[], None]) -> float:
    """Return the seconds that the kernels take on the device."""
    if device.type != "cuda":
        begin = time.perf_counter()
        run()
        return time.perf_counter() - begin
    begin_event, end_event = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
    begin_event.record()
    run()
    end_event.record()
    end_event.synchronize()
    return float(begin_event.elapsed_time(end_event)) / 1e3


if __name__ == "__main__":
    main()
