"""Index at scale: memory per block, opening, lookups, and pauses while the lookup table is
replaced.

The first opening reads the catalogue, the next one the file in which the first one saved its index.

Memory is the growth, from an empty to a full store, of the anonymous and shared pages of engine and
host process (``Pss_Anon`` and ``Pss_Shmem``: shared pages count in proportion). Blocks have 4 KiB,
so that they fit the disk; only the number of keys matters.
"""

from __future__ import annotations

import argparse
import gc
import json
import mmap
import os
import random
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np

from benchmarks.open_store import fill
from benchmarks.rig import show
from benchmarks.store_rig import Rig, fresh_keys
from persistkv.base import OffloadKey, ReqContext
from persistkv.config import GroupLayout, OffloadingConfig, RowLayout, StoreUrl
from persistkv.storage import open_backend
from persistkv.storage.format.pack import PackedKeys, PackTable
from persistkv.storage.host.hosts import ProcessHost
from persistkv.storage.identity import Identity
from persistkv.storage.store.index import Index
from persistkv.storage.store.lookup_table import LookupTable
from persistkv.tiering.persistent import PersistentTier

MAX_BLOCK_BYTES = 64
MAX_OPEN_S = 0.8  # for a million blocks
MAX_RATIO = 3.0
MAX_PREFIX_S = 0.25e-6
MAX_PAUSES_S = (0.020, 0.005)
BLOCK_BYTES = 4096
SAMPLE = 100_000
PREFIX = 4096


def shared_and_anonymous(pid: int) -> int:
    """Return the bytes of a process's anonymous and shared-memory pages; shared pages count in
    proportion."""
    gc.collect()
    with open(f"/proc/{pid}/smaps_rollup") as lines:
        return sum(
            int(line.split()[1]) << 10
            for line in lines
            if line.startswith(("Pss_Anon", "Pss_Shmem"))
        )


def open_tier(url: str) -> tuple[PersistentTier, float]:
    """Open the tier with its host process; return it, and the seconds until every key is known."""
    fd = os.memfd_create("persistkv-benchmark")
    os.ftruncate(fd, BLOCK_BYTES)
    layout = RowLayout(BLOCK_BYTES, (GroupLayout(((0, BLOCK_BYTES),)),))
    config = OffloadingConfig({"benchmark": BLOCK_BYTES}, 16, layout, 1, (fd,))
    begin = time.perf_counter()
    tier = PersistentTier(config, memoryview(mmap.mmap(fd, BLOCK_BYTES)), url=url)
    return tier, time.perf_counter() - begin


def memory_of(tier: PersistentTier) -> int:
    """Return the memory of engine and host process in bytes."""
    host = tier.client.host
    assert isinstance(host, ProcessHost)
    assert host.pid is not None
    return shared_and_anonymous(os.getpid()) + shared_and_anonymous(host.pid)


def measure(url: str, empty: str) -> dict[str, float]:
    """Open an empty and a full store in this process; measure memory, opening and lookups."""
    tier, start = open_tier(empty)
    base = memory_of(tier)
    tier.shutdown()
    tier, seconds = open_tier(url)
    held = len(tier.client)
    memory = memory_of(tier) - base
    backend = open_backend(url, read_only=True)
    tables = backend.changes(Identity.of({"benchmark": BLOCK_BYTES}).digest, None).added
    keys = [
        OffloadKey(bytes(bytearray(key)))
        for table in tables
        for key in table.keys.unpack()
    ]
    backend.close()
    assert len(keys) == held
    request = ReqContext("r")
    names = random.Random(0).sample(keys, min(SAMPLE, len(keys)))
    names[::2] = map(OffloadKey, fresh_keys(len(names[::2])))
    known = set(keys)
    probe, lookup = [], []
    for _ in range(9):
        probe.append(seconds_of(known.__contains__, names))
        lookup.append(seconds_of(lambda key: tier.lookup(key, request), names))
    prefixes = [
        keys[start : start + PREFIX]
        for start in range(0, min(len(keys), 50 * PREFIX) - PREFIX, PREFIX)
    ]
    begin = time.perf_counter()
    assert all(tier.lookup_prefix(prefix, request) == PREFIX for prefix in prefixes)
    prefix = (time.perf_counter() - begin) / len(prefixes) / PREFIX
    tier.shutdown()
    again = open_again(url)
    ratio = statistics.median(lookup) / statistics.median(probe)
    return {
        "held": held,
        "bytes": memory / held,
        "open": seconds,
        "again": again,
        "start": start,
        "ratio": ratio,
        "prefix": prefix,
    }


def open_again(url: str) -> float:
    """Return the seconds of an opening that loads the index from its file."""
    deadline = time.monotonic() + 60
    # the host process writes it after the engine closed
    while not index_files(url) and time.monotonic() < deadline:
        time.sleep(0.1)
    tier, seconds = open_tier(url)
    tier.shutdown()
    return seconds


def index_files(url: str) -> list[Path]:
    return list(Path(StoreUrl.parse(url).location).glob("index-*"))


def seconds_of(
    probe: Callable[[OffloadKey], object],
    names: Sequence[OffloadKey],
) -> float:
    """Return the mean seconds of a probe."""
    begin = time.perf_counter()
    for name in names:
        probe(name)
    return (time.perf_counter() - begin) / len(names)


def pauses(blocks: int, per_pack: int) -> tuple[float, float]:
    """Return the longest step, in seconds, of the host and of the engine while a full table is
    replaced."""
    data = (
        np.random.default_rng(0)
        .integers(0, 256, (blocks, 36), dtype=np.uint8)
        .tobytes()
    )
    size = per_pack * 36
    tables = [
        PackTable(
            bytes(16),
            number.to_bytes(16, "big"),
            "raw",
            0,
            0,
            b"",
            PackedKeys(data[start : start + size], 36),
        )
        for number, start in enumerate(range(0, len(data), size))
    ]
    index, reader = Index(), LookupTable()
    index.reload(tables)
    reader.map(*index.share())
    version, number, host, engine = index.version, 0, [0.0], [0.0]
    gc.freeze()
    while index.version == version or index.replacing or reader.release_some():
        if index.version == version:
            keys = PackedKeys.of(fresh_keys(per_pack))
            table = PackTable(
                bytes(16), b"new" + number.to_bytes(13, "big"), "raw", 0, 0, b"", keys
            )
            number += 1
            host.append(timed(lambda table=table: index.add([table])))  # type: ignore[misc]
        if number % 100 == 0:  # another process removed packs
            some = [tables.pop() for _ in range(10)]
            gone = {table.pack_id: table.keys.fingerprints for table in some}
            host.append(timed(lambda gone=gone: index.remove(gone)))  # type: ignore[misc]
        host.append(timed(index.replace_some))
        if index.version != version and len(engine) == 1:
            engine.append(timed(lambda: reader.map(*index.share())))
            index.release_retired()
        engine.append(timed(reader.release_some))
    index.close()
    return max(host), max(engine)


def timed(call: Callable[[], object]) -> float:
    """Return the seconds of a call."""
    begin = time.perf_counter()
    call()
    return time.perf_counter() - begin


def in_a_fresh_process(url: str, empty: str) -> dict[str, float]:
    for path in index_files(url):
        path.unlink()
    command = [
        sys.executable,
        "-m",
        "benchmarks.lookup",
        "--url",
        url,
        "--empty",
        empty,
    ]
    answer = subprocess.run(command, check=True, capture_output=True, text=True)
    return dict(json.loads(answer.stdout))


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--blocks", type=int, nargs="+", default=[1_000_000])
    parser.add_argument("--per-pack", type=int, nargs="+", default=[20, 512])
    parser.add_argument("--runs", type=int, default=3, help="the median is shown")
    parser.add_argument(
        "--directory",
        help="where the stores are made; a temporary directory by default",
    )
    parser.add_argument(
        "--no-pauses",
        action="store_true",
        help="leave out the replacement of the table",
    )
    parser.add_argument("--url", help=argparse.SUPPRESS)
    parser.add_argument("--empty", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.url:
        print(json.dumps(measure(arguments.url, arguments.empty)))
        return
    lines = []
    for blocks in arguments.blocks:
        for per_pack in arguments.per_pack:
            with tempfile.TemporaryDirectory(dir=arguments.directory) as directory:
                url = (
                    f"lmdb://{directory}/store?capacity={blocks * BLOCK_BYTES * 3 // 2}"
                )
                fill(Rig(per_pack, BLOCK_BYTES), url, blocks, per_pack)
                empty = f"lmdb://{directory}/empty?capacity=64MiB"
                runs = [in_a_fresh_process(url, empty) for _ in range(arguments.runs)]
            found = {
                name: statistics.median(run[name] for run in runs) for name in runs[0]
            }
            host, engine = (
                (0.0, 0.0) if arguments.no_pauses else pauses(blocks, per_pack)
            )
            lines.append(
                [
                    f"{found['held']:,.0f} in packs of {per_pack}",
                    f"{found['bytes']:.1f}",
                    f"{found['open']:.2f} s ({found['start']:.2f} s if empty)",
                    f"{found['again']:.2f} s",
                    f"{found['ratio']:.2f}",
                    f"{found['prefix'] * 1e9:.0f} ns",
                    f"{host * 1e3:.1f} and {engine * 1e3:.1f} ms",
                ]
            )
            print(*lines[-1], flush=True)
    columns = [
        "blocks",
        "bytes a block",
        "opening",
        "again",
        "lookup ÷ set",
        "key of a prefix",
        "pauses",
    ]
    show("Index and lookup table", columns, lines)
    print(
        f"targets: {MAX_BLOCK_BYTES} bytes, {MAX_OPEN_S:g} s for a million blocks, {MAX_RATIO:g}, "
        f"{MAX_PREFIX_S * 1e9:.0f} ns, {MAX_PAUSES_S[0] * 1e3:g} and {MAX_PAUSES_S[1] * 1e3:g} ms"
    )


if __name__ == "__main__":
    main()
