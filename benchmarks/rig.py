"""What the measurements share: percentiles, tables, intervals, warm memory."""

from __future__ import annotations

import gc
import mmap
import os
import platform
import random
import statistics
from collections.abc import Sequence

import numpy as np
import psutil
from rich.console import Console
from rich.table import Table


def touch_memory(share: float = 0.7) -> None:
    """Have free memory touched once, so that page cache grows into pages that the machine has already.

    In a virtual machine the first touch of a page goes to the hypervisor: here, 32 MiB of appended and synced writes
    took 86 ms on memory that was never used, and 20 ms on memory that was. Machines that run for long have used theirs.
    """
    memory = mmap.mmap(-1, int(psutil.virtual_memory().free * share))
    memory.madvise(mmap.MADV_HUGEPAGE)
    np.frombuffer(memory, dtype=np.uint8)[:: mmap.PAGESIZE] = 1


def percentile(values: Sequence[float], share: float) -> float:
    """The value below which this share of the values lies."""
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, int(len(ordered) * share))]


def median_interval(values: Sequence[float], confidence: float = 0.95, resamples: int = 10_000) -> tuple[float, float]:
    """Bootstrap interval of the median, with a fixed seed."""
    return nested_median_interval([values], confidence, resamples)


def nested_median_interval(
    groups: Sequence[Sequence[float]], confidence: float = 0.95, resamples: int = 10_000
) -> tuple[float, float]:
    """The same of the median of all values, where those of one group may share an error: groups are drawn, and then
    values of each.
    """
    draw = random.Random(0)
    medians = sorted(
        statistics.median(
            [value for group in draw.choices(groups, k=len(groups)) for value in draw.choices(group, k=len(group))]
        )
        for _ in range(resamples)
    )
    tail = (1 - confidence) / 2
    return medians[int(resamples * tail)], medians[int(resamples * (1 - tail)) - 1]


def ratio_interval(values: Sequence[float], base: Sequence[float], resamples: int = 2_000) -> tuple[float, float]:
    """Bootstrap interval (95 %) of the ratio of two medians, with a fixed seed."""
    draw = random.Random(0)
    medians = [
        [statistics.median(draw.choices(part, k=len(part))) for part in (values, base)] for _ in range(resamples)
    ]
    ratios = sorted(value / held for value, held in medians)
    return ratios[resamples // 40], ratios[-resamples // 40 - 1]


def anonymous_bytes(pid: int | None = None) -> int:
    """RssAnon of a process, without what this one could give back."""
    if pid is None:
        gc.collect()
    with open(f"/proc/{pid or 'self'}/status") as status:
        line = next(line for line in status if line.startswith("RssAnon"))
    return int(line.split()[1]) << 10


def show(title: str, columns: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
    """Print a table, and the machine that it was measured on."""
    table = Table(title=title, caption=machine())
    for number, column in enumerate(columns):
        table.add_column(column, justify="left" if number == 0 else "right")
    for row in rows:
        table.add_row(*row)
    Console(width=120).print(table)


def show_markdown(title: str, columns: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
    """Print a table as a page of documentation has it, and the machine that it was measured on."""
    print(f"\n{title}:\n")
    for row in (columns, ["---"] + ["---:"] * (len(columns) - 1), *rows):
        print(f"| {' | '.join(row)} |")
    print(f"\n{machine()}")


def machine() -> str:
    """The machine in a line."""
    with open("/proc/cpuinfo") as info:
        model = next((line.split(":")[1].strip() for line in info if line.startswith("model name")), "?")
    return f"{os.cpu_count()} × {model}, Linux {platform.release()}, Python {platform.python_version()}"
