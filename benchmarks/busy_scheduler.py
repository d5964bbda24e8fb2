"""A 32 MiB store and load beside an idle and a busy scheduler, and how long the scheduler's own loop waits.

The scheduler is one Python thread that works in short bursts and polls the store about once a millisecond, as an
engine's step loop does. ``ProcessHost`` and ``ThreadHost`` take turns in one run.
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
import time
from collections import defaultdict

from benchmarks.rig import Rig, fresh_keys, percentile, show, touch_memory
from persistkv.storage.host.client import StoreClient

JOB_BYTES = 32 << 20  # 32 MiB
MAX_RATIO = 1.3
MAX_GAP_S = 0.002


class Scheduler:
    """The loop. ``waits`` collects what each turn spent in calls of persistkv, in seconds."""

    def __init__(self, busy: bool) -> None:
        self.busy = busy
        self.waits: list[float] = []
        self.gaps: list[float] = []

    def run(self, client: StoreClient, job_id: int) -> float:
        """Take turns until the job has ended; seconds that it took."""
        begin = last = time.perf_counter()
        while True:
            if self.busy:
                work(0.0002)
            else:
                time.sleep(0.0002)
            now = time.perf_counter()
            if now - last < 0.001:
                continue
            self.gaps.append(now - last - 0.001)
            ended = any(outcome.job_id == job_id for outcome in client.poll())
            last = time.perf_counter()
            self.waits.append(last - now)
            if ended:
                return last - begin


def work(seconds: float) -> None:
    """Hold the GIL, in Python."""
    end = time.perf_counter() + seconds
    while time.perf_counter() < end:
        sum(range(100))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--blocks", type=int, nargs="+", default=[512, 64, 16])
    parser.add_argument("--runs", type=int, default=15)
    parser.add_argument("--loads", type=int, default=6, help="for each store: loads are short")
    arguments = parser.parse_args()
    touch_memory()
    rows = [row for count in arguments.blocks for row in measure(count, arguments.runs, arguments.loads)]
    columns = ["32 MiB job", "idle", "busy", "busy / idle", f"<= {MAX_RATIO}"]
    columns += ["wait p99 (busy)", "max", f"p99 <= {MAX_GAP_S * 1e3:.0f} ms"]
    show("Jobs beside a scheduler, and what its loop waits for persistkv", columns, rows)


def measure(count: int, runs: int, loads: int) -> list[list[str]]:
    """One size of blocks: store and load, both hosts, idle and busy, interleaved."""
    rig = Rig(2 * count, JOB_BYTES // count)
    seconds: dict[tuple[str, str, bool], list[float]] = defaultdict(list)
    waits: dict[tuple[str, str, bool], list[float]] = defaultdict(list)
    with tempfile.TemporaryDirectory() as directory:
        clients = {
            host: rig.client(f"lmdb://{directory}/{host}?capacity=16GiB", host) for host in ("process", "thread")
        }
        for client in clients.values():
            client.open()
        for run in range(runs + 2):
            for busy in (False, True):
                for host, client in clients.items():
                    keys = fresh_keys(count)
                    for operation in ("store", *["load"] * loads):
                        scheduler = Scheduler(busy)
                        begin = time.perf_counter()
                        submit(client, operation, keys, run)
                        scheduler.waits.append(time.perf_counter() - begin)
                        taken = scheduler.run(client, run)
                        if run >= 2:
                            seconds[operation, host, busy].append(taken)
                            waits[operation, host, busy] += scheduler.waits
        for client in clients.values():
            client.close()
    return [
        row_of(f"{count} x {rig.block_bytes >> 10} KiB", operation, host, seconds, waits)
        for operation in ("store", "load")
        for host in ("process", "thread")
    ]


def submit(client: StoreClient, operation: str, keys: list[bytes], job_id: int) -> None:
    """Hand a job over."""
    if operation == "store":
        client.submit_store(job_id, "request", keys, range(len(keys)), None, JOB_BYTES)
    else:
        client.submit_load(job_id, keys, range(len(keys), 2 * len(keys)))


def row_of(
    size: str,
    operation: str,
    host: str,
    seconds: dict[tuple[str, str, bool], list[float]],
    waits: dict[tuple[str, str, bool], list[float]],
) -> list[str]:
    """Medians, their ratio, and the scheduler's waits."""
    idle, busy = (statistics.median(seconds[operation, host, flag]) for flag in (False, True))
    spent = waits[operation, host, True]
    p99 = percentile(spent, 0.99)
    return [
        f"{operation}, {size}, {host}",
        f"{idle * 1e3:.1f} ms",
        f"{busy * 1e3:.1f} ms",
        f"{busy / idle:.2f}",
        "yes" if busy / idle <= MAX_RATIO else "NO",
        f"{p99 * 1e3:.2f} ms",
        f"{max(spent) * 1e3:.2f} ms",
        "yes" if p99 <= MAX_GAP_S else "NO",
    ]


if __name__ == "__main__":
    main()
