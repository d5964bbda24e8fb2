"""Databases and rows of the LMDB environment. docs/format.md specifies every byte.

Keys start with the namespace id (16 bytes), so a namespace is one key range in each database.
"""

from __future__ import annotations

import math
import os
import struct
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

import lmdb

from persistkv.errors import CorruptStoreError
from persistkv.storage.catalog.rows import TABLES, Rows
from persistkv.storage.extensions import Policy
from persistkv.storage.format.codec import Buffer
from persistkv_lmdb.files import write_durably
from persistkv_lmdb.options import DEFAULT_CAPACITY, MAX_CAPACITY, MIN_CAPACITY, Placement

if TYPE_CHECKING:
    from lmdb import _Database

DATA_FILE, LOCK_FILE = "data.mdb", "lock.mdb"  # names given by LMDB
FORMAT_VERSION = 1
_CAPACITY_ROW = b"capacity"
_CAPACITY = struct.Struct("<Q")
_TTL_ROW = b"ttl"
_TTL = struct.Struct("<d")
_CATALOGUE_ROW = b"catalogue"
_PLACEMENT_ROW = b"placement"
_FORMAT_ROW = b"format"
_FORMAT = struct.Struct("<8sI")
_MAGIC = b"PKVLMDB1"

_META_PAGES = 2
_U32, _U64 = struct.Struct("=I"), struct.Struct("=Q")
_META_MAGIC = 0xBEEFC0DE
_PAGE_HEADERS = (16, 24)  # bytes, of LMDB 0.9 and 1.0
_PAGE_BYTES_AT, _LAST_PAGE_AT = 24, 120  # within a meta page, after its header
_META_BYTES = 160
_MOST_PAGE_BYTES = 64 << 10  # 64 KiB


class OtherReleaseError(CorruptStoreError):
    """The store was written by another release, in another format."""


class Databases(NamedTuple):
    """Named databases of an environment: those of ``persistkv.storage.catalog.rows``, and those of the allocator."""

    meta: _Database
    """In addition to the catalogue's rows: format → magic and version; capacity → u64; ttl → f64; placement → its name;
    catalogue → u64; space → the allocator's totals."""
    namespaces: _Database
    states: _Database
    packs: _Database
    pieces: _Database
    log: _Database
    manifests: _Database
    manifest_keys: _Database
    uses: _Database
    order: _Database
    chains: _Database
    links: _Database
    extents: _Database
    """namespace, pack id → extents of the payload, for packs whose payload is stored in extents."""
    segments: _Database
    """segment → number of its pages."""
    free: _Database
    """segment, first page → pages: the free extents, ordered by place."""
    sizes: _Database
    """pages, segment, first page → nothing: the free extents, ordered by size."""
    aging: _Database
    """number of the transaction that freed it, segment, first page → pages: extents that readers may still see."""


class Transaction(NamedTuple):
    """One running transaction. Buffers that it returns are in mapped pages and are invalid after it ends."""

    txn: lmdb.Transaction[memoryview]
    db: Databases

    @property
    def rows(self) -> LmdbRows:
        """The catalogue's rows."""
        return LmdbRows(self)


class LmdbRows(Rows):
    """The tables of the catalogue as named databases."""

    def __init__(self, transaction: Transaction) -> None:
        self._txn = transaction.txn
        self._db: dict[str, _Database] = {table: getattr(transaction.db, table) for table in TABLES}

    def get(self, table: str, key: bytes) -> Buffer | None:
        """See ``Rows``."""
        return self._txn.get(key, db=self._db[table])

    def put(self, table: str, key: bytes, value: Buffer) -> None:
        """See ``Rows``."""
        self._txn.put(key, value, db=self._db[table])

    def delete(self, table: str, key: bytes) -> bool:
        """See ``Rows``."""
        return self._txn.delete(key, db=self._db[table])

    def range(self, table: str, start: bytes) -> Iterator[tuple[Buffer, Buffer]]:
        """See ``Rows``."""
        cursor = self._txn.cursor(self._db[table])
        if cursor.set_range(start):
            yield from cursor.iternext()

    def first(self, table: str, start: bytes) -> bytes | None:
        """See ``Rows``; closes the cursor before it returns, because the caller may change rows next."""
        with self._txn.cursor(self._db[table]) as cursor:
            return bytes(cursor.key()) if cursor.set_range(start) else None


def rows(transaction: Transaction, db: _Database, prefix: bytes) -> Iterator[tuple[memoryview, memoryview]]:
    """Yield the rows whose keys start with ``prefix``."""
    cursor = transaction.txn.cursor(db)
    if cursor.set_range(prefix):
        for key, row in cursor.iternext():
            if key[: len(prefix)] != prefix:
                break
            yield key, row


def open_databases(env: lmdb.Environment, policy: Policy) -> Databases:
    """Open the databases of a store; create them in an empty environment that is open for writing.

    :param policy: recorded in a store that is created here.
    :raises CorruptStoreError: the environment has other content or another format; it was not changed.
    """
    if env.flags()["readonly"]:
        return _existing_databases(env, None)
    with env.begin(write=True, buffers=True) as txn:
        if txn.stat()["entries"]:
            return _existing_databases(env, txn)
        databases = Databases(*[env.open_db(name.encode(), txn=txn) for name in Databases._fields])
        txn.put(_FORMAT_ROW, _FORMAT.pack(_MAGIC, FORMAT_VERSION), db=databases.meta)
        transaction = Transaction(txn, databases)
        write_policy(transaction, policy)
        txn.put(_PLACEMENT_ROW, str(policy.placement).encode(), db=databases.meta)
        return databases


def _existing_databases(env: lmdb.Environment, txn: lmdb.Transaction[memoryview] | None) -> Databases:
    try:
        meta = env.open_db(Databases._fields[0].encode(), txn=txn, create=False)
        if txn is not None:
            _check_format(txn.get(_FORMAT_ROW, db=meta))
        else:
            with env.begin(buffers=True) as reading:
                _check_format(reading.get(_FORMAT_ROW, db=meta))
        return Databases(*[env.open_db(name.encode(), txn=txn, create=False) for name in Databases._fields])
    except (lmdb.NotFoundError, lmdb.IncompatibleError):
        raise CorruptStoreError("it is an LMDB environment of something else") from None


def _check_format(row: Buffer | None) -> None:
    if row is None or len(row) != _FORMAT.size or _FORMAT.unpack(row)[0] != _MAGIC:
        raise CorruptStoreError("it is an LMDB environment of something else")
    version = _FORMAT.unpack(row)[1]
    if version != FORMAT_VERSION:
        raise OtherReleaseError(f"its format is {version}; this release reads {FORMAT_VERSION}")


def used_bytes(transaction: Transaction) -> int:
    """Return the bytes of the pages in use, without free pages."""
    txn = transaction.txn
    stats = [txn.stat(), *map(txn.stat, transaction.db)]
    pages = sum(stat["branch_pages"] + stat["leaf_pages"] + stat["overflow_pages"] for stat in stats)
    return (_META_PAGES + pages) * stats[0]["psize"]


def read_capacity(transaction: Transaction) -> int:
    """Return the recorded capacity in bytes; the default if the row is missing or out of range."""
    row = transaction.txn.get(_CAPACITY_ROW, db=transaction.db.meta)
    capacity = _CAPACITY.unpack(row)[0] if row is not None and len(row) == _CAPACITY.size else 0
    return capacity if MIN_CAPACITY <= capacity <= MAX_CAPACITY else DEFAULT_CAPACITY


def read_ttl(transaction: Transaction) -> float | None:
    """Return the recorded ttl in seconds; None if there is none, or if the row is out of range."""
    row = transaction.txn.get(_TTL_ROW, db=transaction.db.meta)
    ttl_s = _TTL.unpack(row)[0] if row is not None and len(row) == _TTL.size else math.nan
    return ttl_s if 0 < ttl_s < math.inf else None


def read_policy(transaction: Transaction) -> Policy:
    """Return the recorded policy.

    :raises CorruptStoreError: the placement is unknown.
    """
    return Policy(read_capacity(transaction), read_ttl(transaction), read_placement(transaction).value)


def write_policy(transaction: Transaction, policy: Policy) -> None:
    """Record capacity and ttl; the placement is fixed at creation."""
    txn, meta = transaction.txn, transaction.db.meta
    txn.put(_CAPACITY_ROW, _CAPACITY.pack(policy.capacity), db=meta)
    if policy.ttl_s is None:
        txn.delete(_TTL_ROW, db=meta)
    else:
        txn.put(_TTL_ROW, _TTL.pack(policy.ttl_s), db=meta)


def read_placement(transaction: Transaction) -> Placement:
    """Return the placement of new packs.

    :raises CorruptStoreError: the recorded placement is missing or unknown.
    """
    row = transaction.txn.get(_PLACEMENT_ROW, db=transaction.db.meta)
    try:
        return Placement(bytes(row or b"").decode("ascii", "replace"))
    except ValueError:
        raise CorruptStoreError(f"its placement is {bytes(row or b'')!r}") from None


def read_catalogue_bytes(transaction: Transaction) -> int:
    """Return the recorded bound of ``data.mdb`` in bytes (placement ``extents``); 0: only its share of the capacity."""
    row = transaction.txn.get(_CATALOGUE_ROW, db=transaction.db.meta)
    return _CAPACITY.unpack(row)[0] if row is not None and len(row) == _CAPACITY.size else 0


def write_placement(transaction: Transaction, placement: Placement, catalogue_bytes: int) -> None:
    """Record the placement and the bound of ``data.mdb`` in bytes."""
    transaction.txn.put(_PLACEMENT_ROW, placement.value.encode(), db=transaction.db.meta)
    transaction.txn.put(_CATALOGUE_ROW, _CAPACITY.pack(catalogue_bytes), db=transaction.db.meta)


def is_cut_short(directory: Path) -> bool:
    """Return whether ``data.mdb`` ends before the last page that LMDB has allocated: reading it would raise SIGBUS.

    LMDB may have allocated pages at the end without ever writing them; ``inspect`` distinguishes this. Other processes
    may write meanwhile.
    """
    try:
        with (directory / DATA_FILE).open("rb") as file:
            found = [_end_of(file.read(_META_BYTES))]
            if found[0] is not None:
                file.seek(found[0][1])
                found.append(_end_of(file.read(_META_BYTES)))
            size = os.fstat(file.fileno()).st_size
    except OSError:  # opening it reports the reason
        return False
    return any(end is not None and end[0] > size for end in found)


def meta_bytes(directory: Path) -> int:
    """Return the length of LMDB's two meta pages at the start of ``data.mdb``; 0 if it does not start with them.

    :raises OSError: it cannot be read.
    """
    with (directory / DATA_FILE).open("rb") as file:
        found = _end_of(file.read(_META_BYTES))
    return 0 if found is None else 2 * found[1]


def disown(directory: Path, number: int, page_bytes: int) -> None:
    """Overwrite the meta page of transaction ``number`` with that of the transaction before it, numbered as older.

    The caller holds LMDB's write lock.

    :raises OSError: the disk failed; either version may be on disk.
    :raises CorruptStoreError: the pages are not those of these two transactions, for example because the files were
        replaced while they were open; nothing was written.
    """
    data = directory / DATA_FILE
    with data.open("rb") as file:
        pages = [bytearray(file.read(page_bytes)) for _ in range(2)]
    page = pages[1 - number % 2]
    header = next((size for size in _PAGE_HEADERS if page[size : size + _U32.size] == _U32.pack(_META_MAGIC)), None)
    at = 0 if header is None else header + _LAST_PAGE_AT + _U64.size
    told = [bytes(page[at : at + _U64.size]) for page in pages]
    if not at or told != [_U64.pack(number - (number + place) % 2) for place in range(2)]:
        raise CorruptStoreError(f"{data}: it does not begin with the pages of transactions {number - 1} and {number}")
    _U64.pack_into(page, at, max(number - 2, 0))
    write_durably(data, bytes(page[_U64.size :]), number % 2 * page_bytes + _U64.size)  # after the page's own number


def _end_of(page: bytes) -> tuple[int, int] | None:
    """Return the end of the last page according to a meta page, and the page size; None if it is no meta page."""
    for header in _PAGE_HEADERS:
        if len(page) == _META_BYTES and _U32.unpack_from(page, header)[0] == _META_MAGIC:
            page_bytes = _U32.unpack_from(page, header + _PAGE_BYTES_AT)[0]
            if 1 <= page_bytes <= _MOST_PAGE_BYTES:
                return (_U64.unpack_from(page, header + _LAST_PAGE_AT)[0] + 1) * page_bytes, page_bytes
    return None
