"""Time that a restarted engine waits for its store: opening 100,000 blocks after a clean shutdown.

    python -m benchmarks.open_store [--blocks 100000] [--per-pack 1000 100 20] [--key]

The host's work (read the index or the catalogue) and the engine's work (map the lookup table) are
timed together in the caller's process, which excludes all other costs. The start of a host process
is shown separately. ``--key``: also of stores with a key.
"""

from __future__ import annotations

import argparse
import os
import statistics
import tempfile
import time

from benchmarks.rig import show
from benchmarks.store_rig import Rig, finish, fresh_keys

TARGET_S = 0.15
KEY = "PERSISTKV_BENCHMARK_KEY"


def fill(rig: Rig, url: str, num_blocks: int, per_pack: int) -> None:
    """Store blocks, one job per pack, and close the store cleanly."""
    client = rig.client(url, "thread", max_age_s=1e9)
    client.open()
    for job in range(num_blocks // per_pack):
        keys = fresh_keys(per_pack)
        client.submit_store(
            job,
            f"request {job}",
            keys,
            range(per_pack),
            range(per_pack),
            per_pack * rig.block_bytes,
        )
        finish(client, job)
    client.close()


def open_once(rig: Rig, url: str, host: str) -> tuple[float, int]:
    """Return the seconds until the namespace is open, and the number of blocks that it holds."""
    client = rig.client(url, host)
    begin = time.perf_counter()
    client.open()
    seconds = time.perf_counter() - begin
    held = len(client)
    client.close()
    return seconds, held


def measure(
    rig: Rig,
    url: str,
    empty: str,
    runs: int,
) -> tuple[dict[str, list[float]], int]:
    """Return the seconds of openings by kind, and the number of blocks that the store holds."""
    opened: dict[str, list[float]] = {"store": [], "process": [], "start": []}
    held = 0
    for _ in range(runs):
        seconds, held = open_once(rig, url, "thread")
        opened["store"].append(seconds)
        opened["process"].append(open_once(rig, url, "process")[0])
        opened["start"].append(open_once(rig, empty, "process")[0])
    return opened, held


def row_of(name: str, opened: dict[str, list[float]]) -> list[str]:
    """Return the table row: medians, and whether the first one meets the target."""
    medians = [
        statistics.median(opened[kind]) for kind in ("store", "process", "start")
    ]
    store, process, start = [f"{median * 1e3:.0f} ms" for median in medians]
    verdict = "yes" if medians[0] < TARGET_S else "NO"
    return [name, store, verdict, process, start]


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--blocks", type=int, default=100_000)
    parser.add_argument(
        "--block-kib",
        type=int,
        default=4,
        help="small, so that the disk holds them; keys are what counts",
    )
    parser.add_argument("--per-pack", type=int, nargs="+", default=[1000, 100, 20])
    parser.add_argument("--runs", type=int, default=9)
    parser.add_argument("--key", action="store_true")
    arguments = parser.parse_args()
    os.environ[KEY] = "k" * 32
    options = {"": ""}
    if arguments.key:
        options[", with a key"] = f"&key_env={KEY}"
    rows = []
    for per_pack in arguments.per_pack:
        rig = Rig(per_pack, arguments.block_kib << 10)
        for name, option in options.items():
            with tempfile.TemporaryDirectory() as directory:
                url = f"lmdb://{directory}/store?capacity=16GiB{option}"
                fill(rig, url, arguments.blocks, per_pack)
                empty = f"lmdb://{directory}/empty"
                opened, held = measure(rig, url, empty, arguments.runs)
            rows.append(row_of(f"{held:,} in packs of {per_pack}{name}", opened))
    columns = [
        "blocks",
        "open",
        f"< {TARGET_S * 1e3:.0f} ms",
        "with a host process",
        "host process, empty store",
    ]
    show("Opening a store after a clean end", columns, rows)


if __name__ == "__main__":
    main()
