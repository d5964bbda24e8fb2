"""Slowdown of an engine that stores at full rate while commands run, and success of these commands.

A full store takes jobs of 32 MiB back to back, so that it evicts all the time. Short periods with a
concurrent command alternate with periods without; the figure is the median of the throughput with
the command, relative to the mean of the periods directly before and after. The command starts every
``--every-s`` seconds, as under ``watch``, or, with 0, as soon as its last run has ended. The end of
a period interrupts the current run (Ctrl-C). After the periods, each command runs once to its end
while the engine stores. A failing command ends the measurement.

``computing`` is no command: a process that only uses a processor, in the lowest scheduling class
(SCHED_IDLE). Its cost for the engine is the cost of any concurrent work on this machine.
"""

from __future__ import annotations

import argparse
import signal
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress

from benchmarks.rig import median_interval, show, touch_memory
from benchmarks.store_rig import Job, fresh_keys
from persistkv.config import parse_size
from persistkv.storage.host.client import StoreClient
from persistkv.storage.records import RequestEnd

JOB_BYTES = 32 << 20  # 32 MiB
BLOCK_BYTES = 64 << 10  # 64 KiB
TARGET = 0.05
INTERRUPTED = 130  # exit code after Ctrl-C
_NAP_S = 0.01
_STARTED_S = 2.0
PERSISTKV = (sys.executable, "-m", "persistkv_tools")
COMPUTING = (
    "import os; os.sched_setscheduler(0, os.SCHED_IDLE, os.sched_param(0))\nfor _ in "
    "range(10**8): pass"
)
URL = "URL"
COMMANDS = {
    "ls": (*PERSISTKV, "ls", URL),
    "stat": (*PERSISTKV, "stat", URL),
    "verify": (*PERSISTKV, "verify", URL),
    "prune": (*PERSISTKV, "prune", URL, "--older-than", "1d", "--yes"),
    "computing": (sys.executable, "-c", COMPUTING),
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument(
        "--commands", nargs="+", choices=COMMANDS, default=list(COMMANDS)
    )
    parser.add_argument("--period-s", type=float, default=4.5)
    parser.add_argument(
        "--rounds", type=int, default=6, help="periods with each command"
    )
    parser.add_argument(
        "--every-s", type=float, default=5.0, help="between two starts of a command"
    )
    parser.add_argument("--capacity", default="1GiB")
    parser.add_argument(
        "--directory",
        help="on the disk to be measured; a temporary directory by default",
    )
    arguments = parser.parse_args()
    touch_memory(0.4)
    rows = []
    with tempfile.TemporaryDirectory(dir=arguments.directory) as directory:
        url = f"lmdb://{directory}/store?capacity={arguments.capacity}"
        engine = Engine(url)
        engine.fill(2 * parse_size(arguments.capacity, name="--capacity"))
        for name in arguments.commands:
            command = Command(
                [url if word == URL else word for word in COMMANDS[name]],
                arguments.every_s,
            )
            slowed = measure(engine, command, arguments.rounds, arguments.period_s)
            whole_s = run_whole(engine, command)
            rows.append([*row(name, slowed), str(command.begun), f"{whole_s:.1f} s"])
        engine.close()
    columns = [
        "command",
        "slower by",
        "95 %",
        f"<= {TARGET:.0%}",
        "runs",
        "a whole run",
    ]
    show("An engine that stores at full rate, beside a command", columns, rows)


def measure(
    engine: Engine,
    command: Command,
    rounds: int,
    period_s: float,
) -> list[float]:
    """Return by which share the engine was slower in each period with the command."""
    slowed = []
    before = engine.rate(period_s)
    for _ in range(rounds):
        with command.again_and_again():
            during = engine.rate(period_s)
        after = engine.rate(period_s)
        slowed.append(1 - during / ((before + after) / 2))
        before = after
    return slowed


def run_whole(engine: Engine, command: Command) -> float:
    """Return the seconds of a complete run of the command while the engine stores."""
    begin = time.perf_counter()
    process = command.start()
    while process.poll() is None:
        engine.rate(0.0)
    command.check(process)
    return time.perf_counter() - begin


def row(name: str, slowed: Sequence[float]) -> list[str]:
    """Return the cells of a command."""
    median = statistics.median(slowed)
    low, high = median_interval(slowed)
    return [
        name,
        f"{median:+.1%}",
        f"{low:+.1%} to {high:+.1%}",
        "yes" if median <= TARGET else "NO",
    ]


class Engine:
    """Engine that stores one job after the other, each as a request."""

    def __init__(self, url: str) -> None:
        self._job = Job(JOB_BYTES // BLOCK_BYTES, JOB_BYTES)
        self._client: StoreClient = self._job.rig.client(url)
        self._client.open()
        self._number = 0

    def fill(self, num_bytes: int) -> None:
        """Store at least ``num_bytes``."""
        for _ in range(-(-num_bytes // JOB_BYTES)):
            self._store()

    def rate(self, seconds: float) -> float:
        """Return the stored bytes per second over ``seconds``; store one job at least."""
        begin = time.perf_counter()
        stored = 0
        while not stored or time.perf_counter() - begin < seconds:
            self._store()
            stored += JOB_BYTES
        return stored / (time.perf_counter() - begin)

    def _store(self) -> None:
        keys = fresh_keys(len(self._job.source))
        self._number += 1
        self._job.store(self._client, self._number, keys)
        request = f"request-{self._number}"
        self._client.end_request(RequestEnd(request, request, (keys,), len(keys), 1))

    def close(self) -> None:
        """Close the client."""
        self._client.close()


class Command:
    """A command line that runs as a user runs it, in a process each time.

    :param arguments: arguments, starting with the executable.
    :param every_s: seconds between two starts; 0: a run starts as soon as the previous one has
        ended.
    """

    def __init__(self, arguments: list[str], every_s: float) -> None:
        self.begun = 0
        """Number of runs."""
        self._arguments = arguments
        self._every_s = every_s

    @contextmanager
    def again_and_again(self) -> Iterator[None]:
        """Run the command repeatedly during the block; interrupt the run that is in progress at its
        end.

        :raises RuntimeError: a run failed.
        """
        stop, failed = threading.Event(), []

        def run() -> None:
            try:
                while not stop.is_set():
                    self._run_until(stop)
            except RuntimeError as error:
                failed.append(error)

        thread = threading.Thread(target=run)
        thread.start()
        try:
            yield
        finally:
            stop.set()
            thread.join()
        for error in failed:
            raise error

    def _run_until(self, stop: threading.Event) -> None:
        due = time.monotonic() + self._every_s
        process = self.start()
        while process.poll() is None:
            if stop.wait(_NAP_S):
                # interrupted during start-up, Python prints an error
                with suppress(subprocess.TimeoutExpired):
                    process.wait(_STARTED_S)
                process.send_signal(signal.SIGINT)
                break
        self.check(process)
        stop.wait(max(0.0, due - time.monotonic()))

    def start(self) -> subprocess.Popen[str]:
        """Start a process that runs the command."""
        self.begun += 1
        return subprocess.Popen(
            self._arguments,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            # background jobs of a shell ignore SIGINT
            preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
        )

    def check(self, process: subprocess.Popen[str]) -> None:
        """Wait for the process to end.

        :raises RuntimeError: it failed.
        """
        said, complained = process.communicate()
        ends = (0, INTERRUPTED, -signal.SIGINT)
        if process.returncode not in ends or (
            process.returncode == 0 and "Traceback" in complained
        ):
            raise RuntimeError(
                f"{' '.join(self._arguments)} ended with {process.returncode}: {said}{complained}"
            )


if __name__ == "__main__":
    main()
