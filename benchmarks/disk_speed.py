"""Durable stores and promotions of 32 MiB jobs, compared with raw disk I/O of the same bytes in the
same run.

A store job ends when its blocks are visible, hence durable. It is measured alone, and as a quarter
of the time of four jobs that are submitted at once, as a busy engine does: these share
transactions, and one is planned while another is written. There are two raw writes for comparison,
both O_DIRECT + fdatasync: to the end of a growing file, and over disk blocks that were allocated
and written before. The target is a ratio to the growing file, because the writes of a store that is
not full are new to the file system, too. The ratio to overwriting is also shown: it is the bound
for a full store that reuses its space.

A warm promotion (``reads=cached``, and all files were read before, because a store itself writes
past the page cache) is compared with preadv into the same buffers from the page cache plus the xxh3
of each MiB.
A cold promotion (all files are dropped from the page cache, which is checked) is compared with the
faster of two raw cold reads: O_DIRECT, or through the page cache. Cold promotions are also measured
as four jobs that are submitted at once, against raw reads of as many bytes, one after the other:
the disk serves other jobs while one prepares its first read or processes its last one.

Another figure for cold promotions, without a target, is that of a verifying reader without a store:
two threads, preadv past the page cache, and the xxh3 of each MiB. It separates the cost of
verification from the cost of the store.

Rows are shuffled, as an engine's are, and are in huge pages, as the primary tier's are. Loaded
bytes are compared with the stored ones and cleared. Raw cold reads use the same rows, which are
cleared as well: a read into recently filled memory is faster.
"""

from __future__ import annotations

import argparse
import random
import statistics
import tempfile
import time
from collections import defaultdict
from collections.abc import Callable
from functools import partial
from pathlib import Path

from benchmarks.raw_disk import RawDisk, drop_page_cache, fill_page_cache
from benchmarks.rig import show, touch_memory
from benchmarks.store_rig import Job, fresh_keys
from persistkv.storage.host.client import StoreClient

JOB_BYTES = 32 << 20  # 32 MiB
STORE_TARGET = 0.75
WARM_TARGET = 0.8
COLD_TARGET = 0.9
# before a cold read: a new host maps the rows meanwhile, as it does while an engine loads its model
PAUSE_S = 0.2
IN_LINE = 4  # jobs that are submitted at once, so that work is always queued
FIRST_IN_LINE = 1 << 20  # id of the first of these jobs
VERIFYING_THREADS = 2  # as many as the read threads of a store
WARM_UP = 2  # rounds that are not counted

Seconds = dict[str, list[float]]
Stored = list[list[bytes]]
"""Keys of the single job, then of each of the ``IN_LINE`` jobs."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--blocks", type=int, nargs="+", default=[512, 64, 16])
    parser.add_argument("--runs", type=int, default=15)
    parser.add_argument(
        "--loads", type=int, default=4, help="warm ones, for each store"
    )
    parser.add_argument("--hosts", nargs="+", default=["process", "thread"])
    parser.add_argument(
        "--options",
        nargs="+",
        default=[""],
        help="variants of the URL, e.g. placement=extents",
    )
    parser.add_argument(
        "--raw-threads",
        type=int,
        default=1,
        help="of the raw warm read: as many as the store uses",
    )
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
                Job(count, JOB_BYTES, IN_LINE), Path(directory), arguments
            )
        rows += table(f"{count} x {JOB_BYTES // count >> 10} KiB", seconds, arguments)
    columns = [
        "32 MiB job",
        "median",
        "GB/s",
        "÷ raw",
        "target",
        "÷ overwrite, verified",
    ]
    show("At the disk's speed: durable store, promotion warm and cold", columns, rows)


def measure(job: Job, directory: Path, arguments: argparse.Namespace) -> Seconds:
    """Return the seconds of each operation by name; all operations alternate in changing order."""
    (directory / "raw").mkdir()
    raw = RawDisk(directory / "raw", job.buffers(job.source), job.buffers(job.target))
    stores = {
        name_of(host, options): (directory / f"{number}-{host}", host, options)
        for number, options in enumerate(arguments.options)
        for host in arguments.hosts
    }
    seconds: Seconds = defaultdict(list)
    stored = warm(job, raw, stores, seconds, arguments)
    cold(job, raw, stores, seconds, stored)
    raw.close()
    return seconds


def warm(
    job: Job,
    raw: RawDisk,
    stores: dict[str, tuple[Path, str, str]],
    seconds: Seconds,
    arguments: argparse.Namespace,
) -> list[Stored]:
    """Measure stores and warm loads; return the keys that each round stored."""
    clients = {
        name: open_client(job, *store, reads="cached") for name, store in stores.items()
    }
    stored = []
    for run in range(arguments.runs + WARM_UP):
        keys = [fresh_keys(len(job.source)) for _ in range(1 + IN_LINE)]
        taken = warm_round(
            job,
            raw,
            clients,
            {name: store[0] for name, store in stores.items()},
            run,
            keys,
            arguments,
        )
        if run >= WARM_UP:
            stored.append(keys)
            for name, values in taken.items():
                seconds[name] += values
    for client in clients.values():
        client.close()
    return stored


def warm_round(
    job: Job,
    raw: RawDisk,
    clients: dict[str, StoreClient],
    paths: dict[str, Path],
    run: int,
    keys: Stored,
    arguments: argparse.Namespace,
) -> Seconds:
    """Run each operation once, in an order that depends on the round."""
    taken: Seconds = defaultdict(list)

    alone, *line = keys

    def use(name: str, client: StoreClient) -> None:
        taken[f"store, {IN_LINE} in line, {name}"].append(
            job.store_in_line(client, FIRST_IN_LINE + IN_LINE * run, line) / IN_LINE
        )
        taken[f"store, {name}"].append(job.store(client, run, alone))
        fill_page_cache([paths[name]])
        taken[f"warm, {name}"] += [
            job.load(client, run, alone) for _ in range(arguments.loads)
        ]

    turns: list[Callable[[], None]] = [
        lambda: taken["raw new"].append(raw.write_new()),
        lambda: taken["raw overwrite"].append(raw.overwrite(run)),
        lambda: taken["raw warm"].append(raw.read_warm(arguments.raw_threads)),
        *(partial(use, name, client) for name, client in clients.items()),
    ]
    random.Random(run).shuffle(turns)
    for turn in turns:
        turn()
    return taken


def cold(
    job: Job,
    raw: RawDisk,
    stores: dict[str, tuple[Path, str, str]],
    seconds: Seconds,
    stored: list[Stored],
) -> None:
    """Measure loads by new clients; of the store, the page cache has only what opening read.

    Each read starts after a pause, because a disk that has just been read from answers faster.
    """

    targets = [job.buffers(rows) for rows in job.targets]

    def read_raw(run: int, jobs: int, read: Callable[..., float]) -> float:
        time.sleep(PAUSE_S)
        taken = read(run, into=targets[:jobs]) / jobs
        job.clear()
        return taken

    def load(run: int, jobs: int, store: tuple[Path, str, str]) -> float:
        drop_page_cache([store[0]])
        client = open_client(job, *store)
        time.sleep(PAUSE_S)
        alone, *line = stored[run]
        taken = job.load_in_line(client, run, line if jobs > 1 else [alone]) / jobs
        client.close()
        return taken

    turns: dict[str, Callable[[int], float]] = {}
    for jobs, line in ((1, ""), (IN_LINE, f" {IN_LINE} in line,")):
        for name, read in (
            ("O_DIRECT", partial(raw.read_cold, direct=True)),
            ("buffered", partial(raw.read_cold, direct=False)),
            ("verified", partial(raw.read_cold_verified, threads=VERIFYING_THREADS)),
        ):
            turns[f"raw cold,{line} {name}"] = partial(read_raw, jobs=jobs, read=read)
        for name, store in stores.items():
            turns[f"cold,{line} {name}"] = partial(load, jobs=jobs, store=store)
    for run in range(len(stored)):
        for name in random.Random(run).sample(list(turns), len(turns)):
            seconds[name].append(turns[name](run))


def open_client(
    job: Job,
    path: Path,
    host: str,
    options: str,
    *,
    reads: str = "direct",
) -> StoreClient:
    """Return an open client."""
    url = f"lmdb://{path}?capacity=32GiB&reads={reads}"
    if options:
        url += f"&{options}"
    client = job.rig.client(url, host)
    client.open()
    return client


def name_of(host: str, options: str) -> str:
    """Return the name of a store in the table."""
    return f"{host} {options}".rstrip()


def table(
    size: str,
    seconds: Seconds,
    arguments: argparse.Namespace,
) -> list[list[str]]:
    """Return the rows of one block size."""
    median = {name: statistics.median(values) for name, values in seconds.items()}
    line = f" {IN_LINE} in line,"
    cold, cold_in_line = (
        min(median[f"raw cold,{some} O_DIRECT"], median[f"raw cold,{some} buffered"])
        for some in ("", line)
    )
    yardsticks = {
        "store": (median["raw new"], STORE_TARGET),
        "warm": (median["raw warm"], WARM_TARGET),
        "cold,": (cold, COLD_TARGET),
        f"cold,{line}": (cold_in_line, COLD_TARGET),
    }
    rows = []
    for name in sorted(median, key=lambda name: (order_of(name), name)):
        row = [
            f"{size}: {name}",
            f"{median[name] * 1e3:.1f} ms",
            f"{JOB_BYTES / median[name] / 1e9:.2f}",
        ]
        kind = max(
            (kind for kind in yardsticks if name.startswith(kind)),
            key=len,
            default=None,
        )
        if kind is not None:
            base, target = yardsticks[kind]
            ratio = base / median[name]
            row += [
                f"{ratio:.2f}",
                f">= {target}: {'yes' if ratio >= target else 'NO'}",
            ]
            if kind == "store":
                row.append(f"{median['raw overwrite'] / median[name]:.2f}")
            elif kind.startswith("cold"):
                row.append(f"{median[f'raw {kind} verified'] / median[name]:.2f}")
        rows.append(row)
    return rows


def order_of(name: str) -> int:
    """Return the sort key: stores first, then warm, then cold operations, each after its raw
    yardsticks."""
    order = (
        "raw new",
        "raw overwrite",
        "store",
        "raw warm",
        "warm",
        "raw cold",
        "cold",
    )
    return next(place for place, start in enumerate(order) if name.startswith(start))


if __name__ == "__main__":
    main()
