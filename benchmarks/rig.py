"""What the measurements share: a client on rows of shared memory, percentiles, tables, intervals."""

from __future__ import annotations

import mmap
import os
import platform
import random
import statistics
import time
from collections.abc import Callable, Sequence

import numpy as np
import numpy.typing as npt
import psutil
from rich.console import Console
from rich.table import Table

from persistkv.config import GroupLayout, RowLayout
from persistkv.storage.host.answers import JobOutcome
from persistkv.storage.host.client import StoreClient
from persistkv.storage.host.launch import Host, InlineHost, ProcessHost, ThreadHost
from persistkv.storage.host.protocol import Hello
from persistkv.storage.identity import Identity
from persistkv.storage.records import StoreOptions


class Rig:
    """Rows in shared memory and clients that use them.

    :param block_bytes: bytes of a row, one block.
    """

    def __init__(self, num_rows: int, block_bytes: int) -> None:
        self.block_bytes = block_bytes
        self._fd = os.memfd_create("persistkv-benchmark")
        os.ftruncate(self._fd, num_rows * block_bytes)
        self._memory = mmap.mmap(self._fd, num_rows * block_bytes)
        self.rows: npt.NDArray[np.uint8] = np.frombuffer(self._memory, dtype=np.uint8).reshape(num_rows, block_bytes)
        self.rows[:] = np.random.default_rng(0).integers(0, 256, self.rows.shape, dtype=np.uint8)

    def client(
        self, url: str, host: str = "process", *, max_queue_bytes: int = 8 << 30, **options: object
    ) -> StoreClient:
        """A client that is not open yet."""
        hosts: dict[str, Callable[[], Host]] = {
            "process": lambda: ProcessHost(self._fd, len(self._memory)),
            "thread": lambda: ThreadHost(memoryview(self._memory)),
            "inline": lambda: InlineHost(memoryview(self._memory)),
        }
        layout = RowLayout(self.block_bytes, (GroupLayout(((0, self.block_bytes),)),))
        identity = Identity.of({"benchmark": self.block_bytes}).encode()
        hello = Hello(url, identity, layout, StoreOptions(**options))  # type: ignore[arg-type]
        return StoreClient(hosts[host](), hello, max_queue_bytes=max_queue_bytes)


def touch_memory(share: float = 0.7) -> None:
    """Have free memory touched once, so that page cache grows into pages that the machine has already.

    In a virtual machine the first touch of a page goes to the hypervisor: here, 32 MiB of appended and synced writes
    took 86 ms on memory that was never used, and 20 ms on memory that was. Machines that run for long have used theirs.
    """
    memory = mmap.mmap(-1, int(psutil.virtual_memory().free * share))
    memory.madvise(mmap.MADV_HUGEPAGE)
    np.frombuffer(memory, dtype=np.uint8)[:: mmap.PAGESIZE] = 1


def fresh_keys(count: int) -> list[bytes]:
    """Keys that no run has seen."""
    words = os.urandom(32 * count)
    return [words[start : start + 32] + bytes(4) for start in range(0, len(words), 32)]


def finish(client: StoreClient, job_id: int, timeout_s: float = 120.0) -> JobOutcome:
    """Poll, asleep between, until the job has ended."""
    deadline = time.monotonic() + timeout_s
    while time.monotonic() < deadline:
        for outcome in client.poll():
            if outcome.job_id == job_id:
                return outcome
        time.sleep(0.0002)
    raise TimeoutError(f"job {job_id} did not end in {timeout_s} s")


def percentile(values: Sequence[float], share: float) -> float:
    """The value below which this share of the values lies."""
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, int(len(ordered) * share))]


def median_interval(values: Sequence[float], confidence: float = 0.95, resamples: int = 10_000) -> tuple[float, float]:
    """Bootstrap interval of the median, with a fixed seed."""
    draw = random.Random(0)
    medians = sorted(statistics.median(draw.choices(values, k=len(values))) for _ in range(resamples))
    tail = (1 - confidence) / 2
    return medians[int(resamples * tail)], medians[int(resamples * (1 - tail)) - 1]


def show(title: str, columns: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
    """Print a table, and the machine that it was measured on."""
    table = Table(title=title, caption=machine())
    for number, column in enumerate(columns):
        table.add_column(column, justify="left" if number == 0 else "right")
    for row in rows:
        table.add_row(*row)
    Console(width=120).print(table)


def machine() -> str:
    """The machine in a line."""
    with open("/proc/cpuinfo") as info:
        model = next((line.split(":")[1].strip() for line in info if line.startswith("model name")), "?")
    return f"{os.cpu_count()} × {model}, Linux {platform.release()}, Python {platform.python_version()}"
