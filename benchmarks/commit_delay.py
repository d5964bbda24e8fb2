"""Time from the submission of a store job to its durability, next to workers that compute on every
core.

Tensor-parallel workers on CPUs, and spinning threads of GPU workers, leave no core idle. The host
process then runs only when the kernel takes a core from one of them. How soon depends on its
scheduling class and niceness, which this benchmark changes from outside: one store per class, in
turns of random order, without and with one computing process per core. A Python thread, the
scheduler, polls about once a millisecond meanwhile, and works in between if the machine is loaded.
Its own delays are shown, too: a class that serves the store sooner may preempt the engine.

The kernel's autogroups give each session the same share of a core; the host process is in its
engine's. Control groups, hence containers, have no autogroups: to measure that case, run this
command in a control group.
"""

from __future__ import annotations

import argparse
import itertools
import os
import random
import subprocess
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager
from typing import NamedTuple

from benchmarks.rig import percentile, show, touch_memory
from benchmarks.scheduler_loop import Scheduler
from benchmarks.store_rig import Rig, fresh_keys
from persistkv.errors import StoreError
from persistkv.storage.host.client import StoreClient
from persistkv.storage.host.hosts import ProcessHost
from persistkv.storage.records import RequestEnd

BLOCK_BYTES = 64 << 10  # 64 KiB
_PAUSE_S = 0.02  # between jobs
_TIMEOUT_S = 60.0


class Priority(NamedTuple):
    """Scheduling class and niceness of a host process."""

    policy: int
    nice: int = 0


PRIORITIES = {
    "batch": Priority(os.SCHED_BATCH),
    "other": Priority(os.SCHED_OTHER),
    "batch+5": Priority(os.SCHED_BATCH, 5),
    "other+5": Priority(os.SCHED_OTHER, 5),
    "other-5": Priority(os.SCHED_OTHER, -5),
}
"""Choices by name. Lowering the niceness needs a privilege that engines in containers do not
have."""


class Sample(NamedTuple):
    """One job."""

    seconds: float
    """From the submission until all its blocks are visible, hence durable."""
    waits: list[float]
    """Seconds of each of the scheduler's calls into the store."""
    turns: list[float]
    """Seconds between the scheduler's polls."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument(
        "--priorities",
        nargs="+",
        choices=PRIORITIES,
        default=["batch", "other", "batch+5"],
    )
    parser.add_argument(
        "--blocks",
        type=int,
        nargs="+",
        default=[16, 512],
        help=f"of {BLOCK_BYTES >> 10} KiB, in a job",
    )
    parser.add_argument("--runs", type=int, default=200, help="jobs of each kind")
    arguments = parser.parse_args()
    touch_memory()
    rows = [
        row
        for count in arguments.blocks
        for row in measure(count, arguments.priorities, arguments.runs)
    ]
    columns = [
        "job",
        "class",
        "machine",
        "durable p50",
        "p90",
        "p99",
        "max",
        "call p99",
        "turn p99",
    ]
    show(
        f"From submission to durability, with {os.cpu_count()} cores idle or computing",
        columns,
        rows,
    )


def measure(count: int, names: list[str], runs: int) -> list[list[str]]:
    """Measure jobs of ``count`` blocks with each priority, on an idle and a loaded machine, in
    turns."""
    rig = Rig(count, BLOCK_BYTES)
    samples: dict[tuple[str, bool], list[Sample]] = defaultdict(list)
    numbers = itertools.count()
    with tempfile.TemporaryDirectory() as directory:
        clients = {
            name: rig.client(f"lmdb://{directory}/{name}?capacity=2GiB")
            for name in names
        }
        for client in clients.values():
            client.open()
        for run in range(-2, runs, 10):
            for loaded in (False, True):
                with computing_processes(loaded * (os.cpu_count() or 1)):
                    turns = [
                        (name, number)
                        for name in names
                        for number in range(run, min(run + 10, runs))
                    ]
                    random.Random(run).shuffle(turns)
                    for name, number in turns:
                        prioritize(clients[name], PRIORITIES[name])
                        sample = store(clients[name], next(numbers), count, loaded)
                        if number >= 0:
                            samples[name, loaded].append(sample)
        for client in clients.values():
            client.close()
    size = f"{count} x {BLOCK_BYTES >> 10} KiB"
    return [
        row_of(size, name, loaded, samples[name, loaded])
        for name in names
        for loaded in (False, True)
    ]


@contextmanager
def computing_processes(count: int) -> Iterator[None]:
    """Processes that take all the CPU time that they get."""
    processes = [
        subprocess.Popen([sys.executable, "-c", "while True: pass"])
        for _ in range(count)
    ]
    try:
        yield
    finally:
        for process in processes:
            process.kill()
            process.wait()


def prioritize(client: StoreClient, priority: Priority) -> None:
    """Set the priority of all threads of a client's host process; new ones inherit it."""
    host = client.host
    assert isinstance(host, ProcessHost)
    assert host.pid is not None
    for thread in map(int, os.listdir(f"/proc/{host.pid}/task")):
        os.sched_setscheduler(thread, priority.policy, os.sched_param(0))
        os.setpriority(os.PRIO_PROCESS, thread, priority.nice)


def store(client: StoreClient, number: int, count: int, loaded: bool) -> Sample:
    """Store one request of one job."""
    keys = fresh_keys(count)
    request = f"request {number}"
    scheduler = Scheduler(loaded)
    polls: list[float] = []
    begin = time.perf_counter()
    client.submit_store(
        number, request, keys, range(count), range(count), count * BLOCK_BYTES
    )
    client.end_request(RequestEnd(request, request, (keys,), count, 1))
    scheduler.waits.append(time.perf_counter() - begin)

    def is_durable() -> bool:
        polls.append(time.perf_counter())
        failed = [key for outcome in client.poll() for key in outcome.failed]
        if failed or polls[-1] - begin > _TIMEOUT_S:
            raise StoreError(
                f"{len(failed)} of {count} blocks failed, the others are not durable"
            )
        return client.contains(keys[-1]) and all(map(client.contains, keys))

    scheduler.run(is_durable)
    seconds = time.perf_counter() - begin
    time.sleep(_PAUSE_S)
    return Sample(
        seconds,
        scheduler.waits,
        [after - before for before, after in itertools.pairwise(polls)],
    )


def row_of(size: str, name: str, loaded: bool, samples: list[Sample]) -> list[str]:
    """Return the table row of one priority on an idle or loaded machine."""
    seconds = [sample.seconds for sample in samples]
    calls = [wait for sample in samples for wait in sample.waits]
    turns = [turn for sample in samples for turn in sample.turns]
    values = [percentile(seconds, share) for share in (0.5, 0.9, 0.99, 1.0)]
    values += [percentile(calls, 0.99), percentile(turns, 0.99)]
    return [
        size,
        name,
        "loaded" if loaded else "idle",
        *(f"{value * 1e3:.1f} ms" for value in values),
    ]


if __name__ == "__main__":
    main()
