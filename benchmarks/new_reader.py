"""Opening of a large shared store by an engine that knows nothing of it, and by one whose replica
was kept: requests, CPU time and memory.

    nice python -m benchmarks.new_reader [--packs 100000 1000000] [--blocks 16]
        [--directory /var/tmp]

The index is what merges leave: a base in parts, ordered by pack id, and segments of falling size
with a quarter as many packs: more would make a base due. It is in memory, so requests take no time.
Reading all tables for the engine's own index is shown apart: a process that ended cleanly has kept
that index in a file, too. The memory is that of the private pages of the process, without the
medium and the memory map of the replica.
"""

from __future__ import annotations

import argparse
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
from persistkv.storage.catalog.rows import encode_namespace
from persistkv.storage.format.authentication import Authenticator
from persistkv.storage.format.pack import ID_BYTES, PackedKeys, PackTable
from persistkv.storage.shared import SharedBackend, SharedOptions
from persistkv.storage.shared.format import (
    BASE_LEVEL,
    NO_NAMESPACE,
    NONCE_BYTES,
    Delta,
    Names,
    PackEntry,
    StoreNames,
    encode_delta,
    seal,
)
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


class Opening(NamedTuple):
    """Cost of one opening."""

    requests: int
    cpu_s: float
    tables_s: float
    """CPU time of reading all tables."""
    grown_bytes: int
    """Private memory that the opened store takes."""


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
    put(server, name, encode_delta(delta), NAMESPACE)
    return name


def put(server: MemoryBlobs, name: str, body: bytes, namespace: bytes) -> None:
    server.put(name, [seal(name, body, Authenticator(), namespace)])


def open_store(server: MemoryBlobs, cache: Path, packs: int) -> Opening:
    """Open the store, and end cleanly."""
    blobs = FaultyBlobs(server.handle())
    private = private_bytes()
    began = time.process_time()
    options = SharedOptions(cache=str(cache))
    backend = SharedBackend(blobs, options, background=False)
    backend.open_namespace(IDENTITY)
    opened = time.process_time()
    grown = private_bytes() - private
    requests = len(blobs.calls)
    found = sum(1 for _ in backend.changes(NAMESPACE, None).added)
    read = time.process_time()
    backend.close()
    if found != packs:
        raise RuntimeError(f"{found} packs were found")
    return Opening(requests, opened - began, read - opened, grown)


def private_bytes() -> int:
    """Return the anonymous memory of this process."""
    status = Path("/proc/self/status").read_text()
    (line,) = [line for line in status.splitlines() if line.startswith("RssAnon")]
    return int(line.split()[1]) << 10


def measure(packs: int, blocks: int, directory: Path) -> Iterator[Sequence[str]]:
    server = MemoryBlobs(lambda: NOW)
    fill(server, packs, blocks)
    for name, most_requests, most_s in (
        ("new", MOST_REQUESTS, MOST_S),
        ("with its replica", MOST_KEPT_REQUESTS, MOST_KEPT_S),
    ):
        cost = open_store(server, directory, packs)
        is_met = cost.requests <= most_requests and cost.cpu_s <= most_s
        replica = sum(path.stat().st_size for path in directory.rglob("data.mdb"))
        yield (
            f"{packs:,}, {name}",
            f"{cost.requests}",
            f"{cost.cpu_s:.2f} s",
            f"<= {most_requests}, {most_s:g} s: {'yes' if is_met else 'NO'}",
            f"{cost.tables_s:.2f} s",
            f"{cost.grown_bytes >> 20} MiB",
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
    heads += ["all tables", "private memory", "replica"]
    show(f"Opening of a shared store, packs of {arguments.blocks} blocks", heads, rows)


if __name__ == "__main__":
    main()
