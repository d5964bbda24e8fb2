"""LMDB store and vLLM's own ``fs`` tier, live on the same disk: 32 MiB jobs, stores and cold loads.

vLLM's tier runs in its own virtual environment (``make setup-vllm``) and is driven through the
public interface of secondary tiers. Each tier is polled by the same loop, idle or busy with Python,
in the process that owns the tier; the tiers alternate in changing order. The page cache is dropped
before each load. **vLLM's store is not synced, persistkv's is**: the time until vLLM's files are
synced, too, is shown separately. vLLM's lookup, which reads the disk, is not in the figures.

CPU time is that of the tier's own threads or process. It excludes, on both sides, the thread that
submits and polls, and the kernel's write-back of vLLM's files from its page cache.
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
import subprocess
import sys
import tempfile
import time
from abc import ABC, abstractmethod
from collections import defaultdict
from pathlib import Path

import numpy as np

from benchmarks.raw_disk import drop_page_cache
from benchmarks.rig import show, touch_memory
from benchmarks.scheduler_loop import Scheduler
from benchmarks.store_rig import Rig, fresh_keys
from persistkv.storage.host.client import StoreClient

JOB_BYTES = 32 << 20  # 32 MiB
TARGETS = {
    (64 << 10, "store"): 3.0,
    (64 << 10, "load"): 3.0,
    (2 << 20, "store"): 1.5,
    (2 << 20, "load"): 1.2,
}
WARM_UP = 2  # rounds that are not counted
STORE_CPU, LOAD_CPU = "processor, store", "processor, load"

Seconds = dict[tuple[str, str, bool], list[float]]
"""Seconds by contender, operation, and whether the scheduler was busy."""


class Contender(ABC):
    """A tier that stores one job of new blocks, then loads it with a cold page cache."""

    def __init__(self, path: Path) -> None:
        path.mkdir()
        self.path = path

    @abstractmethod
    def store(self, busy: bool) -> dict[str, float]:
        """Store new blocks; return seconds by operation."""

    @abstractmethod
    def load(self, busy: bool) -> dict[str, float]:
        """Drop the page cache, then load the blocks of the latest store; return seconds by
        operation."""

    @abstractmethod
    def close(self) -> None:
        """Close the tier."""


class Ours(Contender):
    """persistkv's store in its host process."""

    def __init__(self, path: Path, count: int, options: str) -> None:
        super().__init__(path)
        self._rig = Rig(2 * count, JOB_BYTES // count)
        order = np.random.default_rng(0).permutation(count)
        self._source, self._target = (
            [int(row) for row in order],
            [int(row) + count for row in order],
        )
        self._url = f"lmdb://{path}/store?capacity=32GiB" + f"&{options}" * bool(
            options
        )
        self._client = self._open()
        self._keys: list[bytes] = []

    def _open(self) -> StoreClient:
        client = self._rig.client(self._url)
        client.open()
        return client

    def store(self, busy: bool) -> dict[str, float]:
        self._keys = fresh_keys(len(self._source))
        cpu, begin = self._cpu(), time.perf_counter()
        self._client.submit_store(
            1, "request", self._keys, self._source, range(len(self._keys)), JOB_BYTES
        )
        Scheduler(busy).run(self._ended)
        # published with the end of the job, or shortly after
        while not self._client.contains(self._keys[-1]):
            self._client.poll()
        return {"store": time.perf_counter() - begin, STORE_CPU: self._cpu() - cpu}

    def load(self, busy: bool) -> dict[str, float]:
        self._client.close()  # the host process maps the pages that must be dropped
        drop_page_cache([self.path])
        self._client = self._open()
        half = len(self._source)
        self._rig.rows[half:] = 0
        cpu, begin = self._cpu(), time.perf_counter()
        self._client.submit_load(2, self._keys, self._target)
        Scheduler(busy).run(self._ended)
        seconds = time.perf_counter() - begin
        if not np.array_equal(self._rig.rows[half:], self._rig.rows[:half]):
            raise RuntimeError("what was loaded is not what was stored")
        return {"load": seconds, LOAD_CPU: self._cpu() - cpu}

    def _cpu(self) -> float:
        """Return the CPU seconds of the host process, once it is idle."""
        seconds = -1.0
        while (now := self._cpu_now()) > seconds + 0.001:
            seconds = now
            time.sleep(0.02)
        return now

    def _cpu_now(self) -> float:
        totals = self._client.stats().host
        if totals is None:
            raise RuntimeError("the store does not answer")
        return totals.cpu_seconds

    def _ended(self) -> bool:
        outcomes = self._client.poll()
        if any(outcome.failed for outcome in outcomes):
            raise RuntimeError("the store failed")
        return bool(outcomes)

    def close(self) -> None:
        self._client.close()


class VllmFs(Contender):
    """vLLM's tier, in its own virtual environment."""

    def __init__(self, path: Path, count: int, python: Path, threads: int) -> None:
        super().__init__(path)
        command = [
            str(python),
            "-m",
            "benchmarks.vllm_fs_worker",
            str(path),
            str(count),
            str(JOB_BYTES // count),
            str(threads),
        ]
        self._log = (path.parent / f"{path.name}.log").open("w+")
        self._process = subprocess.Popen(
            command,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._log,
            text=True,
        )
        self.version = self._answer()["version"]

    def _answer(self) -> dict[str, float]:
        line = self._process.stdout.readline() if self._process.stdout else ""
        if not line:
            self._log.seek(0)
            raise RuntimeError(f"vLLM's side ended:\n{self._log.read()[-4000:]}")
        answer: dict[str, float] = json.loads(line)
        return answer

    def _ask(self, *, store: bool, busy: bool) -> dict[str, float]:
        if self._process.stdin:
            print(
                json.dumps({"store": store, "busy": busy}),
                file=self._process.stdin,
                flush=True,
            )
        answer = self._answer()
        if not answer.pop("right"):
            raise RuntimeError("what vLLM's tier loaded is not what it stored")
        return answer

    def store(self, busy: bool) -> dict[str, float]:
        answer = self._ask(store=True, busy=busy)
        return {
            "store": answer["seconds"],
            "store and sync": answer["synced"],
            STORE_CPU: answer["cpu"],
        }

    def load(self, busy: bool) -> dict[str, float]:
        drop_page_cache([self.path])
        answer = self._ask(store=False, busy=busy)
        return {"load": answer["seconds"], LOAD_CPU: answer["cpu"]}

    def close(self) -> None:
        self._process.communicate(timeout=60)
        self._log.close()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument(
        "--vllm-python", type=Path, default=Path(".venv-vllm-0.32.0/bin/python")
    )
    parser.add_argument("--blocks", type=int, nargs="+", default=[512, 64, 16])
    parser.add_argument("--runs", type=int, default=15)
    parser.add_argument(
        "--fs-threads",
        type=int,
        nargs="+",
        default=[1],
        help="I/O threads of vLLM's tier; 32: its own default",
    )
    parser.add_argument(
        "--options",
        nargs="+",
        default=[""],
        help="variants of our URL, e.g. placement=extents",
    )
    parser.add_argument(
        "--directory",
        help="on the disk to be measured; a temporary directory by default",
    )
    arguments = parser.parse_args()
    if not arguments.vllm_python.exists():
        sys.exit(
            f"{arguments.vllm_python} is not there: make setup-vllm, or --vllm-python PATH"
        )
    touch_memory()
    rows = []
    for count in arguments.blocks:
        with tempfile.TemporaryDirectory(dir=arguments.directory) as directory:
            seconds = measure(count, Path(directory), arguments)
        rows += table(count, seconds, arguments)
    columns = ["32 MiB job", "ours", "vLLM's fs", "fs ÷ ours", "target"]
    show("Beside vLLM's fs tier, whose stores are not synced", columns, rows)


def measure(count: int, directory: Path, arguments: argparse.Namespace) -> Seconds:
    """Return the seconds of all contenders, which alternate in changing order."""
    contenders: dict[str, Contender] = {
        our_name(options): Ours(directory / f"ours{number}", count, options)
        for number, options in enumerate(arguments.options)
    }
    for threads in arguments.fs_threads:
        contenders[fs_name(threads)] = VllmFs(
            directory / f"fs{threads}", count, arguments.vllm_python, threads
        )
    seconds: Seconds = defaultdict(list)
    for run in range(arguments.runs + WARM_UP):
        for busy in (False, True):
            for name in random.Random(run).sample(list(contenders), len(contenders)):
                taken = contenders[name].store(busy) | contenders[name].load(busy)
                if run >= WARM_UP:
                    for operation, value in taken.items():
                        seconds[name, operation, busy].append(value)
    for contender in contenders.values():
        contender.close()
    return seconds


def our_name(options: str) -> str:
    """Return the name of a persistkv variant in the table."""
    return f"lmdb {options}".rstrip()


def fs_name(threads: int) -> str:
    """Return the name of an ``fs`` variant in the table."""
    return f"fs, {threads} thread{'s' * (threads > 1)}"


def table(
    count: int,
    seconds: Seconds,
    arguments: argparse.Namespace,
) -> list[list[str]]:
    """Return the rows of one block size: each persistkv variant against each ``fs`` variant."""
    size = JOB_BYTES // count
    rows = []
    for options in arguments.options:
        for threads in arguments.fs_threads:
            for operation, theirs_too in (
                ("store", "store"),
                ("store", "store and sync"),
                ("load", "load"),
            ):
                for busy in (False, True):
                    ours = statistics.median(
                        seconds[our_name(options), operation, busy]
                    )
                    theirs = statistics.median(
                        seconds[fs_name(threads), theirs_too, busy]
                    )
                    target = TARGETS.get((size, theirs_too))
                    met = (
                        "yes"
                        if target is not None and theirs / ours >= target
                        else "NO"
                    )
                    rows.append(
                        [
                            f"{count} x {size >> 10} KiB: {theirs_too}, "
                            f"{'busy' if busy else 'idle'}"
                            + f" ({our_name(options)}; {fs_name(threads)})",
                            f"{ours * 1e3:.1f} ms",
                            f"{theirs * 1e3:.1f} ms",
                            f"{theirs / ours:.2f}",
                            "" if target is None else f">= {target}: {met}",
                        ]
                    )
            rows += [
                cpu_row(count, operation, seconds, options, threads)
                for operation in (STORE_CPU, LOAD_CPU)
            ]
    return rows


def cpu_row(
    count: int,
    operation: str,
    seconds: Seconds,
    options: str,
    threads: int,
) -> list[str]:
    """Return the row: CPU seconds per gigabyte, with the scheduler idle."""
    ours, theirs = (
        statistics.mean(seconds[name, operation, False]) / (JOB_BYTES / 1e9)
        for name in (our_name(options), fs_name(threads))
    )
    what = (
        f"{count} x {JOB_BYTES // count >> 10} KiB: {operation} ({our_name(options)}; "
        f"{fs_name(threads)})"
    )
    return [what, f"{ours:.2f} s/GB", f"{theirs:.2f} s/GB", f"{theirs / ours:.2f}", ""]


if __name__ == "__main__":
    main()
