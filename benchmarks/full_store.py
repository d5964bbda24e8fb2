"""Durable stores of 32 MiB jobs in a full local store, compared with raw overwriting in the same
run.

Each commit evicts what it needs. Raw writes are O_DIRECT + fdatasync over disk blocks that were
written before, because a full store reuses its space. A job ends when its blocks are visible, hence
durable. It is measured alone, and as a quarter of the time of four jobs that are submitted at once.
All operations alternate in changing order.
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
from collections import defaultdict
from collections.abc import Callable
from pathlib import Path

from benchmarks.raw_disk import RawDisk
from benchmarks.rig import show, touch_memory
from benchmarks.store_rig import Job, fresh_keys

JOB_BYTES = 32 << 20  # 32 MiB
CAPACITY = 1 << 30  # 1 GiB
IN_LINE = 4  # jobs that are submitted at once


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--blocks", type=int, nargs="+", default=[512, 64])
    parser.add_argument("--runs", type=int, default=20)
    parser.add_argument(
        "--directory",
        help="on the disk to be measured; a temporary directory by default",
    )
    arguments = parser.parse_args()
    touch_memory()
    rows = []
    for count in arguments.blocks:
        with tempfile.TemporaryDirectory(dir=arguments.directory) as directory:
            seconds = measure(
                Job(count, JOB_BYTES, IN_LINE), Path(directory), arguments.runs
            )
        raw = statistics.median(seconds["raw overwrite"])
        for name, values in seconds.items():
            median = statistics.median(values)
            rows.append(
                (
                    f"{count} x {JOB_BYTES // count >> 10} KiB: {name}",
                    f"{1000 * median:.1f}",
                    f"{raw / median:.2f}",
                )
            )
    show(
        "Durable stores in a full store of 1 GiB",
        ["32 MiB job", "median ms", "÷ raw overwrite"],
        rows,
    )


def measure(job: Job, directory: Path, runs: int) -> dict[str, list[float]]:
    """Fill a store; return the seconds of each operation by name."""
    (directory / "raw").mkdir()
    raw = RawDisk(directory / "raw", job.buffers(job.source), job.buffers(job.target))
    client = job.rig.client(f"lmdb://{directory}/store?capacity={CAPACITY}")
    client.open()
    filling = CAPACITY // JOB_BYTES + IN_LINE
    for number in range(filling):
        job.store(client, number, fresh_keys(len(job.source)))
    seconds: dict[str, list[float]] = defaultdict(list)
    turns: list[Callable[[int], None]] = [
        lambda run: seconds["raw overwrite"].append(raw.overwrite(run)),
        lambda run: seconds["store"].append(
            job.store(
                client, filling + run * (1 + IN_LINE), fresh_keys(len(job.source))
            )
        ),
        lambda run: seconds["store, four queued"].append(
            job.store_in_line(
                client,
                filling + run * (1 + IN_LINE) + 1,
                [fresh_keys(len(job.source)) for _ in range(IN_LINE)],
            )
            / IN_LINE
        ),
    ]
    for run in range(runs):
        for turn in turns[run % len(turns) :] + turns[: run % len(turns)]:
            turn(run)
    client.close()
    raw.close()
    return seconds


if __name__ == "__main__":
    main()
