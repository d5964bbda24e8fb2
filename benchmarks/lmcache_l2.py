"""LMCache's own benchmark of second levels, ``bench l2``, with persistkv and with LMCache's ``fs``
and ``fs_native`` adapters, in the same run.

Each round starts LMCache anew for each adapter, in changing order, with an empty store: LMCache
skips stores of keys that are held. It verifies every byte that it loads.

persistkv syncs what it stores; the others do not. ``fs_native`` therefore runs a second time with a
preloaded library that syncs each file before it is closed. ``disk`` is what the disk takes for the
same bytes: appended with O_DIRECT and synced, and read with O_DIRECT, with one call each. LMCache's
memory is in small pages by default, as that of ``disk, small pages``; persistkv's adapter asks the
kernel for huge pages.
"""

from __future__ import annotations

import argparse
import json
import mmap
import os
import re
import statistics
import subprocess
import tempfile
from collections import defaultdict
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import MappingProxyType

from benchmarks.raw_disk import RawDisk
from benchmarks.rig import show
from persistkv.memory.pages import huge_memory

OPERATIONS = ("Store", "Load")
JOB_KIB = 32 << 10  # 32 MiB
ROUNDS = 4  # of one run of LMCache
DISK = "disk"
SYNCED = "fs_native, synced"
SMALL_PAGES = "disk, small pages"
NAMES = ("persistkv", "fs", "fs_native", SYNCED, DISK, SMALL_PAGES)
_SYNC_SOURCE = Path(__file__).with_name("sync_on_close.c")
_QUIET = {"LMCACHE_TRACK_USAGE": "false", "DO_NOT_TRACK": "1"}
_MEDIAN = re.compile(r"Duration p50 \(ms\): +([\d.]+)")
_SUCCESS = re.compile(r"Total success: +(\d+)")
_TOTAL = re.compile(r"Total keys: +(\d+)")

Medians = dict[tuple[str, str], list[float]]
"""Medians in ms of each round, by (adapter, operation)."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--lmcache-python", default=".venv-lmcache/bin/python")
    parser.add_argument("--kib", type=int, nargs="+", default=[64, 512, 2048])
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--directory", help="on the disk to be measured")
    arguments = parser.parse_args()
    rows = []
    for kib in arguments.kib:
        medians = measure(
            kib, arguments.rounds, arguments.lmcache_python, arguments.directory
        )
        for (name, operation), found in sorted(medians.items(), key=str):
            ours = statistics.median(medians["persistkv", operation])
            median = statistics.median(found)
            row = [f"{kib} KiB", operation, name]
            row += [f"{median:.1f} ms", f"{min(found):.1f} ms", f"{median / ours:.2f}"]
            rows.append(row)
    load = os.getloadavg()[0]
    title = f"LMCache's bench l2 on jobs of 32 MiB (load of the machine: {load:.1f})"
    headings = ["object", "operation", "adapter", "median", "fastest", "÷ persistkv"]
    show(title, headings, rows)


def adapters(directory: Path) -> dict[str, dict[str, object]]:
    """Return the configuration of each adapter on an empty directory."""
    return {
        "persistkv": {
            "type": "plugin",
            "module_path": "persistkv.integrations.lmcache.adapter",
            "class_name": "PersistKVL2Adapter",
            "adapter_params": {
                "url": f"lmdb://{directory}/store?capacity=4GiB",
                "models": {"bench-model": "name:bench"},
                "engine": "bench",
            },
        },
        "fs": {"type": "fs", "base_path": str(directory), "use_odirect": True},
        "fs_native": _fs_native(directory),
        SYNCED: _fs_native(directory),
    }


def _fs_native(directory: Path) -> dict[str, object]:
    return {
        "type": "fs_native",
        "base_path": str(directory),
        "use_odirect": True,
        "num_workers": 4,
    }


def measure(kib: int, rounds: int, python: str, parent: str | None) -> Medians:
    """Return the medians of each round."""
    medians: Medians = defaultdict(list)
    with tempfile.TemporaryDirectory() as built:
        library = build_sync(Path(built))
        for number in range(rounds):
            first = number % len(NAMES)
            for name in NAMES[first:] + NAMES[:first]:
                with tempfile.TemporaryDirectory(dir=parent) as directory:
                    if name in (DISK, SMALL_PAGES):
                        found = run_disk(Path(directory), kib, huge=name == DISK)
                    else:
                        configuration = adapters(Path(directory).resolve())[name]
                        preload = str(library) if name == SYNCED else ""
                        found = run(python, configuration, kib, preload)
                for operation, median in found.items():
                    medians[name, operation].append(median)
    return medians


def build_sync(directory: Path) -> Path:
    """Compile the library that syncs files before they are closed."""
    library = directory / "sync_on_close.so"
    command = ["cc", "-O1", "-shared", "-fPIC", "-o", str(library)]
    subprocess.run([*command, str(_SYNC_SOURCE), "-ldl"], check=True)
    return library


def run_disk(directory: Path, kib: int, *, huge: bool) -> dict[str, float]:
    """Write and read as many bytes without a store; return the median of each operation in ms."""
    source = _objects(kib, huge=huge)
    target = _objects(kib, huge=huge)
    disk = RawDisk(directory, source, target)
    try:
        stores = [disk.write_new() for _ in range(1 + ROUNDS)]
        loads = [disk.read_cold(slot, direct=True) for slot in range(1 + ROUNDS)]
    finally:
        disk.close()
    # the first one warms up
    seconds = {"Store": stores[1:], "Load": loads[1:]}
    return {name: statistics.median(found) * 1e3 for name, found in seconds.items()}


def _objects(kib: int, *, huge: bool) -> list[memoryview]:
    """Return aligned memory for the objects of a job."""
    num_bytes = JOB_KIB << 10
    memory = memoryview(huge_memory(num_bytes) if huge else mmap.mmap(-1, num_bytes))
    starts = range(0, JOB_KIB << 10, kib << 10)
    return [memory[start : start + (kib << 10)] for start in starts]


def run(
    python: str,
    configuration: dict[str, object],
    kib: int,
    preload: str,
) -> dict[str, float]:
    """Run ``bench l2``; return the median of each operation in ms."""
    environment = {"LD_PRELOAD": preload} if preload else {}
    output = bench_l2(
        python,
        configuration,
        kib,
        JOB_KIB // kib,
        rounds=ROUNDS,
        environment=environment,
    )
    found: dict[str, float] = {}
    for operation in OPERATIONS:
        median = _MEDIAN.search(_part(output, operation))
        if median is None:
            raise SystemExit(output)
        found[operation] = float(median[1])
    return found


def bench_l2(
    python: str,
    configuration: dict[str, object],
    kib: int,
    num_keys: int,
    *,
    rounds: int,
    options: Sequence[str] = (),
    environment: Mapping[str, str] = MappingProxyType({}),
) -> str:
    """Run ``bench l2``, which verifies all loaded bytes; return its output. All keys must be stored
    and loaded.

    :param python: Python that has LMCache.
    :param configuration: of the adapter.
    :param num_keys: objects of one task.
    """
    arguments = ["bench", "l2", "--l2-adapter", json.dumps(configuration)]
    arguments += ["--rounds", str(rounds), "--num-keys", str(num_keys)]
    arguments += ["--data-size-kb", str(kib), "--l1-align-bytes", "4096"]
    arguments += ["--no-skip-verify", "--lookup-max-hit-rate", "1"]
    done = subprocess.run(
        [python, "-m", "lmcache.cli.main", *arguments, *options],
        capture_output=True,
        text=True,
        timeout=580,
        check=False,
        env={**os.environ, **_QUIET, **environment},
    )
    output = done.stdout + done.stderr
    for operation in OPERATIONS:
        part = _part(output, operation)
        success = _SUCCESS.search(part)
        total = _TOTAL.search(part)
        if success is None or total is None or success[1] != total[1]:
            raise SystemExit(f"{operation}: not all keys\n{output}")
    return output


def _part(output: str, operation: str) -> str:
    """Return the output from the results of an operation on."""
    return output.partition(f" {operation} -")[2]


if __name__ == "__main__":
    main()
