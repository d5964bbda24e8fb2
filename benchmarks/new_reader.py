"""Opening of a large shared store by an engine that knows nothing of it, and by one whose replica
was kept: requests, CPU time and memory.

    nice python -m benchmarks.new_reader [--packs 100000 1000000] [--blocks 16]
        [--directory /var/tmp]

The index is what merges leave: a base in parts, ordered by pack id, and segments of falling size
with a quarter as many packs: more would make a base due. It is in memory, so requests take no time.
Reading all tables into the engine's own index is shown apart: a process that ended cleanly has kept
that index in a file, too. The memory is the growth of the process's anonymous and shared pages,
with that index, without the medium and the memory map of the replica.
"""

from __future__ import annotations

import argparse
import gc
import random
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

import msgspec

from benchmarks.rig import show
from benchmarks.s3_fleet import IDENTITY, pack_of
from persistkv.storage.backend import Namespace
from persistkv.storage.catalogue.rows import encode_namespace
from persistkv.storage.format.pack import ID_BYTES, PackedKeys, PackTable
from persistkv.storage.format.seal import PLAIN
from persistkv.storage.shared import SharedBackend, SharedOptions
from persistkv.storage.shared.format import (
    BASE_LEVEL,
    NO_NAMESPACE,
    NONCE_BYTES,
    Delta,
    Names,
    PackEntry,
    StoreNames,
    encode,
    seal_object,
)
from persistkv.storage.store.index import Index
from persistkv.testing import FaultyBlobs, MemoryBlobs

NAMESPACE = IDENTITY.digest
NAMES = Names(NAMESPACE)
STORE_NAMES = StoreNames()
NOW = 1_800_000_000.0
PART_BYTES = 28 << 20  # of a base
KEY_BYTES = 36
LEAST_SEGMENT = 8  # packs
MOST_REQUESTS, MOST_S = 60, 25.0
MOST_KEPT_REQUESTS, MOST_KEPT_S = 10, 3.0
MOST_BLOCK_BYTES = 64


class Opening(NamedTuple):
    """Cost of one opening."""

    requests: int
    cpu_s: float
    tables_s: float
    """CPU time of reading all tables into an index."""
    opened_bytes: int
    """Memory that the opened store takes."""
    indexed_bytes: int
    """The same with the index."""


def entries_of(number: int, blocks: int, draw: random.Random) -> Iterator[PackEntry]:
    """Yield entries of packs under random keys."""
    pack = pack_of(draw, blocks)
    b"".join(pack.stream())  # encodes it
    pattern = pack.table
    for age in range(number, 0, -1):
        keys = PackedKeys(draw.randbytes(KEY_BYTES * blocks), KEY_BYTES)
        table: PackTable = msgspec.structs.replace(
            pattern, pack_id=draw.randbytes(ID_BYTES), keys=keys
        )
        nonce = draw.randbytes(NONCE_BYTES)
        yield PackEntry(table.pack_id, nonce, table.encode(), NOW - 10.0 * age)


def fill(server: MemoryBlobs, packs: int, blocks: int) -> None:
    """Write the index of a store: a base, and segments that are each half as large as the one
    before."""
    draw = random.Random(packs)
    entries = entries_of(packs, blocks, draw)
    body = encode_namespace(Namespace(IDENTITY, NOW))
    put(server, STORE_NAMES.identity(NAMESPACE), body, NO_NAMESPACE)
    left = packs // 5
    parts: list[str] = []
    part: list[PackEntry] = []
    part_bytes = 0
    for entry in sorted(take(entries, packs - left), key=lambda entry: entry.name):
        part.append(entry)
        part_bytes += len(entry.body) + 64
        if part_bytes > PART_BYTES - (1 << 20):
            parts.append(write(server, BASE_LEVEL, Delta(packs=part), draw))
            part, part_bytes = [], 0
    # readers that have read all that the base includes need not read its parts
    before = NAMES.new_index(1, NOW, draw)
    last = Delta(packs=part, includes=[before], parts=parts)
    write(server, BASE_LEVEL + 1, last, draw)
    level = 1
    while left > LEAST_SEGMENT:
        # none exceeds what a merge may write
        size = min(left // 2, (24 << 20) // (len(part[0].body) + 64))
        write(server, level, Delta(packs=list(take(entries, size))), draw)
        left -= size
        level += 1
    write(server, level, Delta(packs=list(entries)), draw)


def take(entries: Iterator[PackEntry], number: int) -> Iterator[PackEntry]:
    for _ in range(number):
        yield next(entries)


def write(server: MemoryBlobs, level: int, delta: Delta, draw: random.Random) -> str:
    name = NAMES.new_index(level, NOW, draw)
    put(server, name, encode(delta), NAMESPACE)
    return name


def put(server: MemoryBlobs, name: str, body: bytes, namespace: bytes) -> None:
    server.put(name, [seal_object(name, body, PLAIN, namespace)])


def open_store(server: MemoryBlobs, cache: Path, packs: int, blocks: int) -> Opening:
    """Open the store, and end cleanly."""
    blobs = FaultyBlobs(server.handle())
    before = memory_bytes()
    began = time.process_time()
    options = SharedOptions(cache=str(cache))
    backend = SharedBackend(blobs, options, background=False)
    backend.open_namespace(IDENTITY)
    opened = time.process_time()
    opened_bytes = memory_bytes() - before
    requests = len(blobs.calls)
    index = Index()
    changes = backend.changes(NAMESPACE, None)
    index.reload(changes.added, changes.blocks)
    read = time.process_time()
    indexed_bytes = memory_bytes() - before
    found = len(index)
    index.close()
    backend.close()
    if found != packs * blocks:
        raise RuntimeError(f"{found} blocks were found")
    return Opening(requests, opened - began, read - opened, opened_bytes, indexed_bytes)


def memory_bytes() -> int:
    """Return the bytes of the anonymous and shared pages of this process."""
    gc.collect()
    lines = Path("/proc/self/status").read_text().splitlines()
    found = [line for line in lines if line.startswith(("RssAnon", "RssShmem"))]
    return sum(int(line.split()[1]) << 10 for line in found)


def measure(packs: int, blocks: int, directory: Path) -> Iterator[Sequence[str]]:
    server = MemoryBlobs(lambda: NOW)
    fill(server, packs, blocks)
    for name, most_requests, most_s in (
        ("new", MOST_REQUESTS, MOST_S),
        ("with its replica", MOST_KEPT_REQUESTS, MOST_KEPT_S),
    ):
        cost = open_store(server, directory, packs, blocks)
        is_met = cost.requests <= most_requests and cost.cpu_s <= most_s
        block_bytes = cost.indexed_bytes / (packs * blocks)
        is_small = block_bytes <= MOST_BLOCK_BYTES
        replica = sum(path.stat().st_size for path in directory.rglob("data.mdb"))
        yield (
            f"{packs:,}, {name}",
            f"{cost.requests}",
            f"{cost.cpu_s:.2f} s",
            f"<= {most_requests}, {most_s:g} s: {'yes' if is_met else 'NO'}",
            f"{cost.tables_s:.2f} s",
            f"{cost.opened_bytes >> 20} MiB",
            f"{block_bytes:.0f} bytes",
            f"<= {MOST_BLOCK_BYTES}: {'yes' if is_small else 'NO'}",
            f"{replica >> 20} MiB",
        )


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--packs", type=int, nargs="*", default=[100_000])
    parser.add_argument("--blocks", type=int, default=16, help="of each pack")
    parser.add_argument("--directory", default="/var/tmp", help="for the replicas")
    arguments = parser.parse_args()
    rows: list[Sequence[str]] = []
    for packs in arguments.packs:
        with tempfile.TemporaryDirectory(dir=arguments.directory) as name:
            rows += measure(packs, arguments.blocks, Path(name))
    heads = ["packs, reader", "requests", "CPU time", "target"]
    heads += ["all tables", "memory", "per block with an index", "target", "replica"]
    show(f"Opening of a shared store, packs of {arguments.blocks} blocks", heads, rows)


if __name__ == "__main__":
    main()
