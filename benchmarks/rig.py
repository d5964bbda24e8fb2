"""Helpers shared by the benchmarks: percentiles, bootstrap intervals, tables, memory warm-up."""

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
    """Touch free memory once, so that the page cache grows into pages that the machine already
    backs.

    In a virtual machine the first access to a page faults into the hypervisor. Measured here:
    appending and syncing 32 MiB took 86 ms in memory that was never used, and 20 ms in memory that
    was. Machines with a long uptime have already used theirs.

    :param share: fraction of the free memory.
    """
    memory = mmap.mmap(-1, int(psutil.virtual_memory().free * share))
    memory.madvise(mmap.MADV_HUGEPAGE)
    np.frombuffer(memory, dtype=np.uint8)[:: mmap.PAGESIZE] = 1


def percentile(values: Sequence[float], share: float) -> float:
    """Return the percentile of the values; ``share`` is between 0 and 1."""
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, int(len(ordered) * share))]


def median_interval(
    values: Sequence[float],
    confidence: float = 0.95,
    resamples: int = 10_000,
) -> tuple[float, float]:
    """Return a bootstrap confidence interval of the median; the seed is fixed."""
    return nested_median_interval([values], confidence, resamples)


def nested_median_interval(
    groups: Sequence[Sequence[float]],
    confidence: float = 0.95,
    resamples: int = 10_000,
) -> tuple[float, float]:
    """Return a bootstrap confidence interval of the median of all values; the seed is fixed.

    For values whose errors correlate within a group: each resample draws groups, and then values of
    each drawn group.
    """
    draw = random.Random(0)
    medians = sorted(
        statistics.median(
            [
                value
                for group in draw.choices(groups, k=len(groups))
                for value in draw.choices(group, k=len(group))
            ]
        )
        for _ in range(resamples)
    )
    tail = (1 - confidence) / 2
    return medians[int(resamples * tail)], medians[int(resamples * (1 - tail)) - 1]


def ratio_interval(
    values: Sequence[float],
    base: Sequence[float],
    resamples: int = 2_000,
) -> tuple[float, float]:
    """Return a bootstrap confidence interval (95 %) of the ratio of two medians; the seed is
    fixed."""
    draw = random.Random(0)
    medians = [
        [statistics.median(draw.choices(part, k=len(part))) for part in (values, base)]
        for _ in range(resamples)
    ]
    ratios = sorted(value / held for value, held in medians)
    return ratios[resamples // 40], ratios[-resamples // 40 - 1]


def anonymous_bytes(pid: int | None = None) -> int:
    """Return RssAnon of a process, by default of this one after a garbage collection."""
    if pid is None:
        gc.collect()
    with open(f"/proc/{pid or 'self'}/status") as status:
        line = next(line for line in status if line.startswith("RssAnon"))
    return int(line.split()[1]) << 10


def show(title: str, columns: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
    """Print a table, with the machine as its caption."""
    table = Table(title=title, caption=machine())
    for number, column in enumerate(columns):
        table.add_column(column, justify="left" if number == 0 else "right")
    for row in rows:
        table.add_row(*row)
    Console(width=120).print(table)


def show_markdown(
    title: str,
    columns: Sequence[str],
    rows: Sequence[Sequence[str]],
) -> None:
    """Print a Markdown table, followed by the machine."""
    print(f"\n{title}:\n")
    for row in (columns, ["---"] + ["---:"] * (len(columns) - 1), *rows):
        print(f"| {' | '.join(row)} |")
    print(f"\n{machine()}")


def machine() -> str:
    """Return processor, kernel and Python version in one line."""
    with open("/proc/cpuinfo") as info:
        model = next(
            (
                line.split(":")[1].strip()
                for line in info
                if line.startswith("model name")
            ),
            "?",
        )
    return (
        f"{os.cpu_count()} × {model}, Linux {platform.release()}, Python "
        f"{platform.python_version()}"
    )
