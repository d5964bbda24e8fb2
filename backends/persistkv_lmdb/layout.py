"""What lies where in the environment. Byte by byte in docs/format.md.

Keys begin with the namespace's id (16 bytes), so that a namespace is one range of each database.
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
from persistkv.storage.codec import Buffer
from persistkv.storage.extensions import Policy
from persistkv_lmdb.files import write_durably
from persistkv_lmdb.options import DEFAULT_CAPACITY, MAX_CAPACITY, MIN_CAPACITY, Placement

if TYPE_CHECKING:
    from lmdb import _Database

DATA_FILE, LOCK_FILE = "data.mdb", "lock.mdb"  # as LMDB names them
FORMAT_VERSION = 2
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
_PAGE_BYTES_AT, _LAST_PAGE_AT = 24, 120  # in a meta page, behind its header
_META_BYTES = 160
_MOST_PAGE_BYTES = 64 << 10  # 64 KiB


class OtherReleaseError(CorruptStoreError):
    """It is the store of another release."""


class Databases(NamedTuple):
    """The named databases of an environment: those of ``persistkv.storage.catalog.rows``, and the allocator's."""

    meta: _Database
    """Beside the catalogue's rows: format → magic and version; capacity → u64; ttl → f64; placement → its name;
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
    """namespace, pack id → where the payload lies, for a pack that lies in extents."""
    segments: _Database
    """segment → its pages."""
    free: _Database
    """segment, first page → pages: the free extents, by place."""
    sizes: _Database
    """pages, segment, first page → nothing: the same by size."""
    aging: _Database
    """transaction that freed it, segment, first page → pages: extents that readers may still see."""


class Transaction(NamedTuple):
    """One running transaction. What it hands out lies in mapped pages and dies with it."""

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
        """See ``Rows``; the cursor is closed at once, because the rows may change next."""
        with self._txn.cursor(self._db[table]) as cursor:
            return bytes(cursor.key()) if cursor.set_range(start) else None


def rows(transaction: Transaction, db: _Database, prefix: bytes) -> Iterator[tuple[memoryview, memoryview]]:
    """The rows whose keys begin with ``prefix``."""
    cursor = transaction.txn.cursor(db)
    if cursor.set_range(prefix):
        for key, row in cursor.iternext():
            if key[: len(prefix)] != prefix:
                break
            yield key, row


def open_databases(env: lmdb.Environment, policy: Policy) -> Databases:
    """Open the databases of a store; create them in an empty environment that is open for writing.

    :param policy: recorded in a store that is created here.

    :raises CorruptStoreError: something else lies there, or another format; it was not changed.
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
    """Bytes of the pages that hold something; freed ones, which are used again, left out."""
    txn = transaction.txn
    stats = [txn.stat(), *map(txn.stat, transaction.db)]
    pages = sum(stat["branch_pages"] + stat["leaf_pages"] + stat["overflow_pages"] for stat in stats)
    return (_META_PAGES + pages) * stats[0]["psize"]


def read_capacity(transaction: Transaction) -> int:
    """Return the recorded capacity in bytes; the default where the row is missing or out of range."""
    row = transaction.txn.get(_CAPACITY_ROW, db=transaction.db.meta)
    capacity = _CAPACITY.unpack(row)[0] if row is not None and len(row) == _CAPACITY.size else 0
    return capacity if MIN_CAPACITY <= capacity <= MAX_CAPACITY else DEFAULT_CAPACITY


def read_ttl(transaction: Transaction) -> float | None:
    """Return the recorded ttl in seconds; None where there is none, or where the row is out of range."""
    row = transaction.txn.get(_TTL_ROW, db=transaction.db.meta)
    ttl_s = _TTL.unpack(row)[0] if row is not None and len(row) == _TTL.size else math.nan
    return ttl_s if 0 < ttl_s < math.inf else None


def read_policy(transaction: Transaction) -> Policy:
    """Return the recorded policy.

    :raises CorruptStoreError: the placement is unknown.
    """
    return Policy(read_capacity(transaction), read_ttl(transaction), read_placement(transaction).value)


def write_policy(transaction: Transaction, policy: Policy) -> None:
    """Record capacity and ttl; the placement stays as it was at creation."""
    txn, meta = transaction.txn, transaction.db.meta
    txn.put(_CAPACITY_ROW, _CAPACITY.pack(policy.capacity), db=meta)
    if policy.ttl_s is None:
        txn.delete(_TTL_ROW, db=meta)
    else:
        txn.put(_TTL_ROW, _TTL.pack(policy.ttl_s), db=meta)


def read_placement(transaction: Transaction) -> Placement:
    """Where new packs go.

    :raises CorruptStoreError: nothing known is recorded.
    """
    row = transaction.txn.get(_PLACEMENT_ROW, db=transaction.db.meta)
    try:
        return Placement(bytes(row or b"").decode("ascii", "replace"))
    except ValueError:
        raise CorruptStoreError(f"its placement is {bytes(row or b'')!r}") from None


def read_catalogue_bytes(transaction: Transaction) -> int:
    """What ``data.mdb`` may take beside extents, where that is more than its share; else 0."""
    row = transaction.txn.get(_CATALOGUE_ROW, db=transaction.db.meta)
    return _CAPACITY.unpack(row)[0] if row is not None and len(row) == _CAPACITY.size else 0


def write_placement(transaction: Transaction, placement: Placement, catalogue_bytes: int) -> None:
    """Record both."""
    transaction.txn.put(_PLACEMENT_ROW, placement.value.encode(), db=transaction.db.meta)
    transaction.txn.put(_CATALOGUE_ROW, _CAPACITY.pack(catalogue_bytes), db=transaction.db.meta)


def is_cut_short(directory: Path) -> bool:
    """Whether ``data.mdb`` ends before the last page that LMDB has given out: who reads there is ended by SIGBUS.

    LMDB may have given out pages at the end and never written them: ``inspect`` tells. Others may write meanwhile.
    """
    try:
        with (directory / DATA_FILE).open("rb") as file:
            found = [_end_of(file.read(_META_BYTES))]
            if found[0] is not None:
                file.seek(found[0][1])
                found.append(_end_of(file.read(_META_BYTES)))
            size = os.fstat(file.fileno()).st_size
    except OSError:  # opening it says why
        return False
    return any(end is not None and end[0] > size for end in found)


def meta_bytes(directory: Path) -> int:
    """How long LMDB's two meta pages are, with which ``data.mdb`` begins; 0 where it does not begin so.

    :raises OSError: it cannot be read.
    """
    with (directory / DATA_FILE).open("rb") as file:
        found = _end_of(file.read(_META_BYTES))
    return 0 if found is None else 2 * found[1]


def disown(directory: Path, number: int, page_bytes: int) -> None:
    """Have the meta page of transaction ``number`` tell of what the one before it left, as an older one. The caller
    holds LMDB's lock for writing.

    :raises OSError: the disk failed; it may tell of either.
    :raises CorruptStoreError: the pages are not of these two, as where files were replaced under those that have them
        open; nothing was written.
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
    write_durably(data, bytes(page[_U64.size :]), number % 2 * page_bytes + _U64.size)  # behind the page's own number


def _end_of(page: bytes) -> tuple[int, int] | None:
    """Where the last page ends by a meta page, and how long a page is; None where it is no meta page."""
    for header in _PAGE_HEADERS:
        if len(page) == _META_BYTES and _U32.unpack_from(page, header)[0] == _META_MAGIC:
            page_bytes = _U32.unpack_from(page, header + _PAGE_BYTES_AT)[0]
            if 1 <= page_bytes <= _MOST_PAGE_BYTES:
                return (_U64.unpack_from(page, header + _LAST_PAGE_AT)[0] + 1) * page_bytes, page_bytes
    return None
