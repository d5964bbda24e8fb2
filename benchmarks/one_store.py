"""Engines that store on one local store, compared with the same engines on stores of their own in
the same run.

Each engine is a process with a host process, and stores jobs of 32 MiB one after the other; a job
ends when its blocks are visible, hence durable. All engines begin together. Rounds with one store
and with own stores take turns. Shown are the median and the 99th percentile of a job's time, and
the bytes per second of all engines together.
"""

from __future__ import annotations

import argparse
import multiprocessing
import tempfile
import time
from dataclasses import dataclass, field
from multiprocessing.connection import Connection
from multiprocessing.context import SpawnProcess

import numpy as np

from benchmarks.rig import show
from benchmarks.store_rig import Job, fresh_keys

JOB_BYTES = 32 << 20  # 32 MiB
WARM_UP = 2  # jobs of each engine that are not counted
TIMEOUT_S = 300.0


@dataclass
class Figures:
    """Times of one variant, over all rounds."""

    seconds: list[float] = field(default_factory=list)
    """Of each counted job."""
    rates: list[float] = field(default_factory=list)
    """Bytes per second of all engines together, in each round."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--engines", type=int, default=2)
    parser.add_argument(
        "--blocks", type=int, default=512, help="blocks of a job of 32 MiB"
    )
    parser.add_argument(
        "--jobs", type=int, default=30, help="jobs of each engine in a round"
    )
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument(
        "--directory",
        help="a directory on the disk to measure; default: the temporary directory",
    )
    arguments = parser.parse_args()
    measured = {"one store": Figures(), "own stores": Figures()}
    for _ in range(arguments.rounds):
        for variant, figures in measured.items():
            with tempfile.TemporaryDirectory(dir=arguments.directory) as directory:
                run_round(directory, variant == "one store", arguments, figures)
    columns = {
        name: (
            *(1000 * np.percentile(one.seconds, share) for share in (50, 99)),
            np.median(one.rates) / 1e9,
        )
        for name, one in measured.items()
    }
    ratios = tuple(
        one / own
        for one, own in zip(columns["one store"], columns["own stores"], strict=True)
    )
    rows = [
        (name, f"{median:.1f}", f"{p99:.1f}", f"{rate:.2f}")
        for name, (median, p99, rate) in {**columns, "one / own": ratios}.items()
    ]
    title = (
        f"{arguments.engines} engines, {arguments.rounds} rounds of {arguments.jobs} jobs "
        f"of 32 MiB each"
    )
    show(title, ["", "median ms", "p99 ms", "GB/s"], rows)


def run_round(
    directory: str,
    is_one: bool,
    arguments: argparse.Namespace,
    figures: Figures,
) -> None:
    """Run all engines once, and add their times to ``figures``."""
    context = multiprocessing.get_context("spawn")
    engines: list[tuple[SpawnProcess, Connection]] = []
    for number in range(arguments.engines):
        url = f"lmdb://{directory}/{'store' if is_one else number}?capacity=64GiB"
        ours, theirs = context.Pipe()
        process = context.Process(
            target=run_engine, args=(theirs, url, arguments.blocks, arguments.jobs)
        )
        process.start()
        engines.append((process, ours))
    for _, pipe in engines:
        receive(pipe)
    begin = time.perf_counter()
    for _, pipe in engines:
        pipe.send("begin")
    for _, pipe in engines:
        figures.seconds += receive(pipe)
    elapsed = time.perf_counter() - begin
    figures.rates.append(arguments.engines * arguments.jobs * JOB_BYTES / elapsed)
    for process, _ in engines:
        process.join()


def receive(pipe: Connection) -> list[float]:
    """Return the next message of an engine."""
    if not pipe.poll(TIMEOUT_S):
        raise TimeoutError(f"an engine did not answer in {TIMEOUT_S:g} s")
    message: list[float] = pipe.recv()
    return message


def run_engine(pipe: Connection, url: str, blocks: int, jobs: int) -> None:
    """Store jobs in this process once the pipe says so, and send the seconds of each."""
    job = Job(blocks, JOB_BYTES)
    client = job.rig.client(url)
    client.open()
    for number in range(WARM_UP):
        job.store(client, number, fresh_keys(blocks))
    pipe.send([])
    pipe.recv()
    pipe.send(
        [
            job.store(client, WARM_UP + number, fresh_keys(blocks))
            for number in range(jobs)
        ]
    )
    client.close()


if __name__ == "__main__":
    main()
