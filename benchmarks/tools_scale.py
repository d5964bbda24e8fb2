"""Commands on large stores: 1,000,000 blocks of 4 KiB in 20,000 requests, and 65,536 of 64 KiB in
1,024 requests.

The first store has as many blocks and requests as a large store, at a size that fits a small disk:
its packs have 200 KiB. The second has blocks and packs (4 MiB) of the size that engines make, and
is the relevant one for ``verify``. Half of the requests share a prefix with an earlier one, as
conversations do; each request adds its own blocks in its own pack. The commands run as a user runs
them, each in a process; time and peak memory are those of that process, including the start of the
interpreter. ``verify`` reads a store without writers and with an empty page cache. It is compared
with a plain read of the same files in calls of 8 MiB, through the page cache and past it; the
faster of the two counts.
"""

from __future__ import annotations

import argparse
import os
import random
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from contextlib import closing
from pathlib import Path

import numpy as np

from benchmarks.raw_disk import drop_page_cache
from benchmarks.rig import show
from persistkv.config import parse_size
from persistkv.memory.rows import StagedBlocks
from persistkv.storage import open_backend
from persistkv.storage.backend import CommitBatch, ManifestWrite
from persistkv.storage.format.codec import RawCodec
from persistkv.storage.format.manifest import RequestManifest
from persistkv.storage.format.pack import PackedKeys
from persistkv.storage.format.pack_writer import PackWriter, Section
from persistkv.storage.identity import Identity

TARGETS = {"stat": 2.0, "ls": 1.0, "show": 1.0}  # seconds
MEMORY_TARGET = 500 << 20  # 500 MiB
VERIFY_TARGET = 0.7
READ_BYTES = 8 << 20
AT_ONCE = 200  # requests in a commit
SHARED = 0.5  # share of the requests that begin with blocks of an earlier one
TOKENS_PER_BLOCK = 16

_MEASURED = """
import resource, subprocess, sys, time
begin = time.perf_counter()
code = subprocess.call(sys.argv[1:], stdout=subprocess.DEVNULL)
print(time.perf_counter() - begin, resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss, code)
"""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument(
        "--blocks", type=int, help="instead of both stores, one of so many blocks"
    )
    parser.add_argument("--requests", type=int, default=20_000)
    parser.add_argument("--block-size", default="4KiB")
    parser.add_argument("--runs", type=int, default=5)
    parser.add_argument(
        "--options",
        default="",
        help="further options of the URL, e.g. placement=inline",
    )
    parser.add_argument(
        "--directory",
        help="on the disk to be measured; a temporary directory by default",
    )
    arguments = parser.parse_args()
    stores = [(1_000_000, 20_000, "4KiB"), (65_536, 1_024, "64KiB")]
    if arguments.blocks is not None:
        stores = [(arguments.blocks, arguments.requests, arguments.block_size)]
    for blocks, requests, block_size in stores:
        with tempfile.TemporaryDirectory(dir=arguments.directory) as directory:
            measure(
                Path(directory) / "store",
                arguments.options,
                blocks,
                requests,
                block_size,
                arguments.runs,
            )


def measure(
    store: Path,
    options: str,
    blocks: int,
    requests: int,
    block_size: str,
    runs: int,
) -> None:
    """Make a store, and print the figures of the commands on it."""
    url = f"lmdb://{store}?capacity=256GiB" + f"&{options}" * bool(options)
    begin = time.perf_counter()
    request = fill(url, requests, blocks, parse_size(block_size, name="--block-size"))
    made = f"made in {time.perf_counter() - begin:.0f} s"
    rows = [*commands(url, request, runs), verify(url, store, runs)]
    title = f"{blocks:,} blocks of {block_size} in {requests:,} requests, {made}"
    show(title, ["command", "median", "target", "peak memory", "<= 500 MiB"], rows)


def fill(url: str, requests: int, blocks: int, block_bytes: int) -> str:
    """Fill the store; return the id of a request in its middle.

    Half of the requests begin with the first blocks of an earlier one, as many as they add; packs
    hold new blocks only.
    """
    draw = random.Random(0)
    own = blocks // requests
    source = StagedBlocks(
        [np.random.default_rng(0).integers(0, 256, (own, block_bytes), dtype=np.uint8)]
    )
    with closing(open_backend(url)) as backend:
        namespace = backend.open_namespace(Identity.of({"benchmark": "tools scale"})).id
        chains: list[list[bytes]] = []
        packs_of: list[list[bytes]] = []
        for start in range(0, requests, AT_ONCE):
            packs, manifests = [], []
            for number in range(start, min(start + AT_ONCE, requests)):
                prefix, named = [], []
                if chains and draw.random() < SHARED:
                    parent = draw.randrange(len(chains))
                    prefix, named = chains[parent][:own], packs_of[parent][:1]
                keys = [draw.randbytes(32) + bytes(4) for _ in range(own)]
                pack = PackWriter(
                    namespace,
                    RawCodec(),
                    [Section(0, block_bytes, keys, source, len(prefix))],
                )
                packs.append(pack)
                chains.append(prefix + keys)
                packs_of.append([*named, pack.pack_id])
                manifests.append(
                    _manifest(number, chains[-1], packs_of[-1], block_bytes)
                )
            backend.commit(namespace, CommitBatch(packs, manifests))
    return f"request-{requests // 2:06d}"


def _manifest(
    number: int,
    chain: list[bytes],
    packs: list[bytes],
    block_bytes: int,
) -> ManifestWrite:
    manifest = RequestManifest(
        id=f"request-{number:06d}",
        created=time.time() - 10.0 * number,
        tokens=len(chain) * TOKENS_PER_BLOCK,
        group_blocks=(len(chain),),
        raw_bytes=len(chain) * block_bytes,
        labels={"user": f"user-{number % 97}"},
    )
    return ManifestWrite(manifest, (PackedKeys.of(chain),), packs)


def commands(url: str, request: str, runs: int) -> list[list[str]]:
    """Return the rows: time and peak memory of each read-only command."""
    rows = []
    for arguments in (
        ["stat", url],
        ["ls", url],
        ["ls", url, "--sort", "size"],
        ["show", url, request],
    ):
        taken = [measured(arguments) for _ in range(runs)]
        seconds, peak = (
            statistics.median(s for s, _ in taken),
            max(memory for _, memory in taken),
        )
        name = " ".join(part for part in arguments if part != url)
        target = TARGETS[arguments[0]]
        verdict = f"<= {target:g} s: {'yes' if seconds <= target else 'NO'}"
        rows.append([name, f"{seconds:.2f} s", verdict, *_memory(peak)])
    return rows


def measured(arguments: list[str]) -> tuple[float, int]:
    """Run a command; return its seconds, and its peak memory in bytes.

    :raises RuntimeError: the command failed.
    """
    command = [
        sys.executable,
        "-c",
        _MEASURED,
        sys.executable,
        "-m",
        "persistkv_tools",
        *arguments,
    ]
    seconds, kib, code = subprocess.run(
        command, check=True, capture_output=True, text=True
    ).stdout.split()
    if code != "0":
        raise RuntimeError(f"persistkv {' '.join(arguments)} ended with {code}")
    return float(seconds), int(kib) << 10


def verify(url: str, store: Path, runs: int) -> list[str]:
    """Return the row of ``verify``, in alternation with raw reads, each with an empty page
    cache."""
    files = [file for file in store.rglob("*") if file.is_file()]
    size = sum(512 * file.stat().st_blocks for file in files)
    verified, raw, peak = [], [], 0
    reads: list[Callable[[], float]] = [
        lambda: read(files, 0),
        lambda: read(files, os.O_DIRECT),
    ]
    for _ in range(runs):
        drop_page_cache([store])
        seconds, memory = measured(["verify", url])
        verified.append(seconds)
        peak = max(peak, memory)
        fastest = []
        for call in reads:
            drop_page_cache([store])
            fastest.append(call())
        raw.append(min(fastest))
    ratio = statistics.median(raw) / statistics.median(verified)
    name = f"verify, {size / 1e9:.1f} GB; raw read {statistics.median(raw):.2f} s"
    verdict = f"÷ raw {ratio:.2f}, >= {VERIFY_TARGET}: {'yes' if ratio >= VERIFY_TARGET else 'NO'}"
    return [name, f"{statistics.median(verified):.2f} s", verdict, *_memory(peak)]


def read(files: list[Path], flags: int) -> float:
    """Return the seconds to read all of these files, one after the other."""
    buffer = np.empty(READ_BYTES + 4096, dtype=np.uint8)
    offset = -buffer.ctypes.data % 4096
    target = buffer[offset : offset + READ_BYTES].data
    begin = time.perf_counter()
    for file in files:
        fd = os.open(file, os.O_RDONLY | flags)
        try:
            while os.readv(fd, [target]) == READ_BYTES:
                pass
        finally:
            os.close(fd)
    return time.perf_counter() - begin


def _memory(peak: int) -> list[str]:
    return [f"{peak >> 20} MiB", "yes" if peak <= MEMORY_TARGET else "NO"]


if __name__ == "__main__":
    main()
