"""Whether a store adds up: free and used extents against the files, rows against each other, totals against a recount.

It reads the whole catalogue in one transaction. What it finds is damage, or a fault of this driver.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from itertools import groupby, pairwise

from persistkv.config import PAGE_BYTES
from persistkv.errors import CorruptStoreError
from persistkv.storage.catalog.records import NamespaceState, pack_table
from persistkv_lmdb.environment.environment import Environment
from persistkv_lmdb.layout import Transaction, rows
from persistkv_lmdb.segments.allocator import Extent, Space, decode_extents


def find_faults(environment: Environment) -> list[str]:
    """What is wrong, a line each."""
    with environment.transaction() as transaction:
        try:
            segments = Space(transaction).segments()
            found = [*space_faults(transaction), *_pack_faults(transaction), *_total_faults(transaction)]
        except CorruptStoreError as error:
            return [str(error)]
        lengths = environment.files.lengths()
    for segment, pages in segments.items():
        if lengths.get(segment, 0) < pages * PAGE_BYTES:
            found.append(f"segment {segment} has {pages} pages, its file {lengths.get(segment, 0)} bytes")
    return found


def space_faults(transaction: Transaction) -> Iterator[str]:
    """Each page of each segment belongs to one extent, and the indices and totals agree."""
    space = Space(transaction)
    segments = space.segments()
    free = list(space.free_extents())
    aging = [extent for _, extent in space.aging_extents()]
    used = [extent for _, row in rows(transaction, transaction.db.extents, b"") for extent in decode_extents(row)]
    if sorted(space.free_sizes()) != free:
        yield "the free extents by size are not those by place"
    ends = dict.fromkeys(segments, 0)
    for segment, extents in groupby(sorted([*free, *aging, *used]), key=lambda extent: extent.segment):
        for extent in extents:
            if extent.page != ends.get(segment) or not extent.pages:
                yield f"{extent} does not follow page {ends.get(segment)}"
            ends[segment] = extent.end
    if ends != segments:
        yield f"extents end at {ends}, segments at {segments}"
    for one, other in pairwise(free):
        if (one.segment, one.end) == (other.segment, other.page):
            yield f"{one} and {other} touch"
    counted = (sum(segments.values()), _pages(free), _pages(aging))
    if counted != (space.total, space.free, space.aging):
        yield f"the totals of the space are {(space.total, space.free, space.aging)}; counted: {counted}"


def _pack_faults(transaction: Transaction) -> Iterator[str]:
    """Each pack has one payload, of its length, and each payload a pack."""
    extents = {bytes(key): _pages(decode_extents(row)) for key, row in rows(transaction, transaction.db.extents, b"")}
    pieces: Counter[bytes] = Counter()
    for key, row in rows(transaction, transaction.db.pieces, b""):
        pieces[bytes(key[:-4])] += len(row)
    for key, row in rows(transaction, transaction.db.packs, b""):
        name, table = bytes(key), pack_table(key, row)
        lengths = [length for length in (PAGE_BYTES * extents.pop(name, 0), pieces.pop(name, 0)) if length]
        if table is not None and lengths != ([table.payload_length] if table.payload_length else []):
            yield f"pack {name.hex()} of {table.payload_length} bytes has payloads of {lengths}"
    for name in {*extents, *pieces}:
        yield f"a payload belongs to {name.hex()}, which is no pack"


def _total_faults(transaction: Transaction) -> Iterator[str]:
    """The totals of each namespace are those of its rows."""
    for key, row in rows(transaction, transaction.db.states, b""):
        recorded, counted = NamespaceState.decode(row), NamespaceState(b"")
        for name, pack in rows(transaction, transaction.db.packs, bytes(key)):
            if (table := pack_table(name, pack)) is not None:
                counted.count(table, 1)
        counted.requests = sum(1 for _ in rows(transaction, transaction.db.manifests, bytes(key)))
        counted.generation, counted.sequence = recorded.generation, recorded.sequence
        if counted != recorded:
            yield f"namespace {bytes(key).hex()}: {recorded}; counted: {counted}"


def _pages(extents: list[Extent]) -> int:
    return sum(extent.pages for extent in extents)
