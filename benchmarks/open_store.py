"""Time that a restarted engine waits for its store: opening 100,000 blocks after a clean shutdown.

The host's work (read the catalogue, build the index) and the engine's work (map the lookup table)
are timed together in the caller's process, which excludes all other costs. The start of a host
process is shown separately.
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
import time

from benchmarks.rig import show
from benchmarks.store_rig import Rig, finish, fresh_keys

TARGET_S = 0.15


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


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--blocks", type=int, default=100_000)
    parser.add_argument(
        "--block-kib",
        type=int,
        default=4,
        help="small, so that the disk holds them; keys are what counts",
    )
    parser.add_argument("--per-pack", type=int, nargs="+", default=[1000, 100, 20])
    parser.add_argument("--runs", type=int, default=9)
    arguments = parser.parse_args()
    rows = []
    for per_pack in arguments.per_pack:
        rig = Rig(per_pack, arguments.block_kib << 10)
        with tempfile.TemporaryDirectory() as directory:
            url = f"lmdb://{directory}/store?capacity=16GiB"
            fill(rig, url, arguments.blocks, per_pack)
            empty = f"lmdb://{directory}/empty"
            opened: dict[str, list[float]] = {"store": [], "process": [], "start": []}
            for _ in range(arguments.runs):
                seconds, held = open_once(rig, url, "thread")
                opened["store"].append(seconds)
                opened["process"].append(open_once(rig, url, "process")[0])
                opened["start"].append(open_once(rig, empty, "process")[0])
        store, process, start = (
            statistics.median(opened[name]) for name in ("store", "process", "start")
        )
        verdict = "yes" if store < TARGET_S else "NO"
        milliseconds = [f"{value * 1e3:.0f} ms" for value in (store, process, start)]
        rows.append(
            [
                f"{held:,} in packs of {per_pack}",
                milliseconds[0],
                verdict,
                *milliseconds[1:],
            ]
        )
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
