"""What the commands cost an engine that stores at full rate, and whether they work beside it.

A store that is full takes jobs of 32 MiB back to back, so that it evicts all the time. Periods with a command beside
it, run again and again, take turns with periods without; the figure is the throughput with, over the mean of the
periods without before and after. A command that ends with an error ends the measurement.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager

from benchmarks.rig import median_interval, show, touch_memory
from persistkv.config import parse_size
from persistkv.storage.host.client import StoreClient
from persistkv.storage.host.protocol import EndRequest
from persistkv.storage.keys import PackedKeys
from persistkv_tools.rig import Job, fresh_keys

JOB_BYTES = 32 << 20  # 32 MiB
BLOCK_BYTES = 64 << 10  # 64 KiB
TARGET = 0.05
COMMANDS = {
    "ls": ("ls",),
    "stat": ("stat",),
    "verify": ("verify", "--rate", "100MiB"),
    "prune": ("prune", "--older-than", "1d", "--yes"),
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--period-s", type=float, default=10.0)
    parser.add_argument("--rounds", type=int, default=9, help="periods with each command")
    parser.add_argument("--capacity", default="4GiB")
    parser.add_argument("--directory", help="on the disk to be measured; a temporary directory by default")
    arguments = parser.parse_args()
    touch_memory(0.4)
    rows = []
    with tempfile.TemporaryDirectory(dir=arguments.directory) as directory:
        url = f"lmdb://{directory}/store?capacity={arguments.capacity}"
        engine = Engine(url)
        engine.fill(2 * parse_size(arguments.capacity, name="--capacity"))
        for name, command in COMMANDS.items():
            ratios, runs = [], 0
            before = engine.rate(arguments.period_s)
            for _ in range(arguments.rounds):
                with beside([command[0], url, *command[1:]]) as counted:
                    during = engine.rate(arguments.period_s)
                after = engine.rate(arguments.period_s)
                ratios.append(during / ((before + after) / 2))
                before, runs = after, runs + counted[0]
            low, high = median_interval(ratios)
            slowed = 1 - sorted(ratios)[len(ratios) // 2]
            verdict = f"<= {TARGET:.0%}: {'yes' if slowed <= TARGET else 'NO'}"
            rows.append([name, f"{slowed:+.1%}", f"{1 - high:+.1%} to {1 - low:+.1%}", verdict, f"{runs}"])
        engine.close()
    columns = ["command", "slower by", "95 %", "target", "runs"]
    show("An engine that stores at full rate, beside a command", columns, rows)


class Engine:
    """Stores one job after the other, each a request."""

    def __init__(self, url: str) -> None:
        self._job = Job(JOB_BYTES // BLOCK_BYTES, JOB_BYTES)
        self._client: StoreClient = self._job.rig.client(url)
        self._client.open()
        self._number = 0

    def fill(self, num_bytes: int) -> None:
        """Store at least so much."""
        for _ in range(-(-num_bytes // JOB_BYTES)):
            self._store()

    def rate(self, seconds: float) -> float:
        """Bytes per second over so long."""
        begin = time.perf_counter()
        stored = 0
        while time.perf_counter() - begin < seconds:
            self._store()
            stored += JOB_BYTES
        return stored / (time.perf_counter() - begin)

    def _store(self) -> None:
        keys = fresh_keys(len(self._job.source))
        self._number += 1
        self._job.store(self._client, self._number, keys)
        request = f"request-{self._number}"
        self._client.end_request(EndRequest(request, request, (PackedKeys.of(keys),), len(keys), 1, True, {}))

    def close(self) -> None:
        """Let it end."""
        self._client.close()


@contextmanager
def beside(arguments: list[str]) -> Iterator[list[int]]:
    """Run a command again and again while the block runs; how often it ended, once the block is over.

    :raises RuntimeError: it ended with an error.
    """
    stop, counted, failed = threading.Event(), [0], []

    def run() -> None:
        while not stop.is_set():
            command = [sys.executable, "-m", "persistkv_tools", *arguments]
            done = subprocess.run(command, capture_output=True, text=True, check=False)
            if done.returncode or "Traceback" in done.stderr:
                failed.append(f"{' '.join(arguments)} ended with {done.returncode}: {done.stdout}{done.stderr}")
                return
            counted[0] += 1

    thread = threading.Thread(target=run)
    thread.start()
    try:
        yield counted
    finally:
        stop.set()
        thread.join()
    if failed:
        raise RuntimeError(failed[0])


if __name__ == "__main__":
    main()
