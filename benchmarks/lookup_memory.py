"""What a million blocks cost: a lookup, memory on both sides, opening the store.

Memory is the growth of a fresh process's anonymous pages. The engine's side is the persistent tier, public methods and
all; the store's side is its own process, without the engine's.
"""

from __future__ import annotations

import argparse
import json
import mmap
import os
import random
import subprocess
import sys
import tempfile
import time

from benchmarks.open_store import fill
from benchmarks.rig import anonymous_bytes, show
from benchmarks.store_rig import Rig, fresh_keys
from persistkv.base import OffloadKey, ReqContext
from persistkv.config import GroupLayout, OffloadingConfig, RowLayout
from persistkv.memory.rows import Rows
from persistkv.storage import open_backend
from persistkv.storage.identity import Identity
from persistkv.storage.records import StoreOptions
from persistkv.storage.store import Store
from persistkv.tiering.persistent import PersistentTier

MAX_LOOKUP_S = 0.5e-6
MAX_BLOCK_BYTES = 180
MAX_OPEN_S = 1.0
BLOCK_BYTES = 4096  # small, so that the disk holds them; keys are what counts
SAMPLE = 100_000


def measure_store(url: str) -> dict[str, float]:
    """Read the catalogue and build the index, in this process."""
    rows = Rows(memoryview(bytearray(BLOCK_BYTES)), RowLayout(BLOCK_BYTES, (GroupLayout(((0, BLOCK_BYTES),)),)))
    identity = Identity.of({"benchmark": BLOCK_BYTES})
    before = anonymous_bytes()
    begin = time.perf_counter()
    store = Store(open_backend(url), identity, rows, StoreOptions(), url=url)
    seconds = time.perf_counter() - begin
    held = len(store.index)
    memory = anonymous_bytes() - before
    store.close()
    return {"held": held, "bytes": memory / held, "open": seconds}


def measure_engine(url: str) -> dict[str, float]:
    """Open the tier, its store in a process of its own, and look blocks up."""
    fd = os.memfd_create("persistkv-benchmark")
    os.ftruncate(fd, 4096)
    layout = RowLayout(BLOCK_BYTES, (GroupLayout(((0, BLOCK_BYTES),)),))
    config = OffloadingConfig({"benchmark": BLOCK_BYTES}, 16, layout, 4096 // BLOCK_BYTES, fd)
    rows = memoryview(mmap.mmap(fd, 4096))
    before = anonymous_bytes()
    begin = time.perf_counter()
    tier = PersistentTier(config, rows, url=url)
    seconds = time.perf_counter() - begin
    held = tier.num_held_blocks
    memory = anonymous_bytes() - before
    request = ReqContext("r")
    names = [
        OffloadKey(bytes(bytearray(key))) for key in random.Random(0).sample(list(tier._client._replica.held), SAMPLE)
    ]
    names[::2] = map(OffloadKey, fresh_keys(len(names[::2])))
    begin = time.perf_counter()
    found = sum(bool(tier.lookup(name, request)) for name in names)
    lookup = (time.perf_counter() - begin) / len(names)
    assert found == len(names) // 2
    tier.shutdown()
    return {"held": held, "bytes": memory / held, "open": seconds, "lookup": lookup}


def in_a_fresh_process(side: str, url: str) -> dict[str, float]:
    """Measure one side."""
    command = [sys.executable, "-m", "benchmarks.lookup_memory", "--side", side, "--url", url]
    answer = subprocess.run(command, check=True, capture_output=True, text=True)
    return dict(json.loads(answer.stdout))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--blocks", type=int, default=1_000_000)
    parser.add_argument("--per-pack", type=int, nargs="+", default=[1000, 100, 20])
    parser.add_argument("--runs", type=int, default=3, help="the best one is shown")
    parser.add_argument("--directory", help="where the store is made; a temporary directory by default")
    parser.add_argument("--side", choices=("store", "engine"), help=argparse.SUPPRESS)
    parser.add_argument("--url", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.side:
        measured = measure_store(arguments.url) if arguments.side == "store" else measure_engine(arguments.url)
        print(json.dumps(measured))
        return
    lines = []
    for per_pack in arguments.per_pack:
        with tempfile.TemporaryDirectory(dir=arguments.directory) as directory:
            url = f"lmdb://{directory}/store?capacity=16GiB"
            fill(Rig(per_pack, BLOCK_BYTES), url, arguments.blocks, per_pack)
            best: dict[str, float] = {}
            for _ in range(arguments.runs):
                for side in ("store", "engine"):
                    for name, value in in_a_fresh_process(side, url).items():
                        best[f"{side} {name}"] = min(value, best.get(f"{side} {name}", value))
        lines.append(line(per_pack, best))
        print(*lines[-1], flush=True)
    columns = ["blocks", "lookup", "bytes a block: store's side", "engine's side", "open", "until the engine knows all"]
    show("What a million blocks cost", [*columns, "within bounds"], lines)
    print(f"bounds: {MAX_LOOKUP_S * 1e6} µs, {MAX_BLOCK_BYTES} bytes on each side, {MAX_OPEN_S:g} s to open")


def line(per_pack: int, best: dict[str, float]) -> list[str]:
    """A row of the table."""
    within = (
        best["engine lookup"] <= MAX_LOOKUP_S
        and max(best["store bytes"], best["engine bytes"]) <= MAX_BLOCK_BYTES
        and best["store open"] <= MAX_OPEN_S
    )
    return [
        f"{best['engine held']:,.0f} in packs of {per_pack}",
        f"{best['engine lookup'] * 1e6:.2f} µs",
        f"{best['store bytes']:.0f}",
        f"{best['engine bytes']:.0f}",
        f"{best['store open'] * 1e3:.0f} ms",
        f"{best['engine open'] * 1e3:.0f} ms",
        "yes" if within else "NO",
    ]


if __name__ == "__main__":
    main()
