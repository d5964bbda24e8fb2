"""A persistkv store in one SQLite file: the driver.

1. A transaction of the catalogue is one SQL transaction: atomic, and durable on return (``synchronous = EXTRA``).
2. Each table of the catalogue is an SQL table of keys and values; payloads are rows, too.
3. Each transaction opens its own connection, so any number of threads can read.
"""

from __future__ import annotations

import sqlite3
from collections.abc import Iterator
from contextlib import closing, contextmanager
from dataclasses import replace
from pathlib import Path

import msgspec

from persistkv.config import PAGE_BYTES, StoreUrl, convert_options, parse_duration, parse_size
from persistkv.errors import (
    ConfigurationError,
    CorruptStoreError,
    StoreBusyError,
    StoreError,
    StoreFullError,
    StoreUnavailableError,
)
from persistkv.storage.backend import Capabilities
from persistkv.storage.catalog import TABLES, RowBackend, Rows
from persistkv.storage.format.codec import Buffer

APPLICATION_ID = 0x504B5653  # "PKVS": `PRAGMA application_id` of a store
VERSION = 1
_WAIT_S = 30.0  # for a transaction of another process
_LEAST_CAPACITY = 1 << 20  # 1 MiB
_SPARE_PAGES = 32  # kept free by writes, so that deletions have room

_KINDS = (  # by text, because sqlite3 has error codes only since Python 3.11
    ("unable to open database file", StoreUnavailableError),
    ("database is locked", StoreBusyError),
    ("database or disk is full", StoreFullError),
    ("file is not a database", CorruptStoreError),
    ("database disk image is malformed", CorruptStoreError),
    ("", StoreError),
)


class SqliteOptions(msgspec.Struct, frozen=True):
    """Options of a URL such as ``sqlite:///var/cache/kv.db?capacity=10GiB``."""

    capacity: str | None = None
    """Bound on the bytes of the file, 1MiB or more; None: no bound."""
    ttl: str | None = None
    """Time after its last use until content expires, a duration such as ``7d``; None: never."""


class SqliteRows(Rows):
    """The rows of one SQL transaction."""

    def __init__(self, db: sqlite3.Connection) -> None:
        self._db = db

    def get(self, table: str, key: bytes) -> Buffer | None:
        """See ``Rows``."""
        row = self._db.execute(f"SELECT value FROM '{table}' WHERE key = ?", (key,)).fetchone()
        return None if row is None else bytes(row[0])

    def put(self, table: str, key: bytes, value: Buffer) -> None:
        """See ``Rows``."""
        write = f"INSERT INTO '{table}' VALUES (?, ?) ON CONFLICT (key) DO UPDATE SET value = excluded.value"
        self._db.execute(write, (key, value))

    def delete(self, table: str, key: bytes) -> bool:
        """See ``Rows``."""
        return self._db.execute(f"DELETE FROM '{table}' WHERE key = ?", (key,)).rowcount > 0

    def range(self, table: str, start: bytes) -> Iterator[tuple[Buffer, Buffer]]:
        """See ``Rows``."""
        yield from self._db.execute(f"SELECT key, value FROM '{table}' WHERE key >= ? ORDER BY key", (start,))

    def pragma(self, name: str) -> int:
        """Return the value of a numeric pragma."""
        return int(self._db.execute(f"PRAGMA {name}").fetchone()[0])


class SqliteBackend(RowBackend):
    """One open file."""

    capabilities = Capabilities(persistent=True, shared=True)

    def __init__(self, path: str, *, read_only: bool, capacity: int | None, ttl_s: float | None) -> None:
        self.capabilities = replace(type(self).capabilities, writable=not read_only)
        self.capacity = capacity
        self.ttl_s = ttl_s
        self._path = path
        self._closed = False
        with self._transaction("ro" if read_only else "rwc", write=not read_only) as db:
            _create_or_check(db, path, may_create=not read_only)

    @classmethod
    def open(cls, url: StoreUrl, *, read_only: bool = False) -> SqliteBackend:
        options = convert_options(SqliteOptions, url.options, where="sqlite")
        capacity = None if options.capacity is None else parse_size(options.capacity, name="sqlite option capacity")
        if capacity is not None and capacity < _LEAST_CAPACITY:
            raise ConfigurationError("sqlite option capacity", options.capacity, "1MiB or more")
        ttl_s = None if options.ttl is None else parse_duration(options.ttl, name="sqlite option ttl")
        return cls(url.location, read_only=read_only, capacity=capacity, ttl_s=ttl_s)

    @contextmanager
    def rows(self, *, write: bool = False) -> Iterator[SqliteRows]:
        if self._closed:
            raise StoreError(f"{self._path} is closed")
        if write and not self.capabilities.writable:
            raise StoreError(f"{self._path} is open read-only")
        with self._transaction("rw" if self.capabilities.writable else "ro", write=write) as db:
            yield SqliteRows(db)

    def has_room(self, rows: Rows, num_bytes: int) -> bool:
        assert isinstance(rows, SqliteRows)
        used = rows.pragma("page_count") - rows.pragma("freelist_count") + _SPARE_PAGES
        need = num_bytes // PAGE_BYTES * 17 // 16 + 1  # 1/16 more, for the inner pages of SQLite's trees
        return used + need <= rows.pragma("max_page_count")

    def disk_bytes(self) -> int:
        with self.rows() as rows:
            return rows.pragma("page_count") * PAGE_BYTES

    def close(self) -> None:
        self._closed = True

    @contextmanager
    def _transaction(self, mode: str, *, write: bool) -> Iterator[sqlite3.Connection]:
        uri = f"{Path(self._path).absolute().as_uri()}?mode={mode}"
        with (
            _translated(self._path),
            closing(sqlite3.connect(uri, uri=True, timeout=_WAIT_S, isolation_level=None)) as db,
        ):
            db.execute(f"PRAGMA page_size = {PAGE_BYTES}")
            db.execute("PRAGMA synchronous = EXTRA")
            if self.capacity is not None:
                db.execute(f"PRAGMA max_page_count = {self.capacity // PAGE_BYTES}")
            db.execute("BEGIN IMMEDIATE" if write else "BEGIN")
            yield db  # an error closes the connection, which rolls back
            db.execute("COMMIT")


def _create_or_check(db: sqlite3.Connection, path: str, *, may_create: bool) -> None:
    """Create the tables in an empty file; check that any other file is a store of this version.

    :raises CorruptStoreError: it is not; the file was not changed.
    """
    empty = not db.execute("SELECT count(*) FROM sqlite_master").fetchone()[0]
    if empty and may_create:
        for table in TABLES:
            db.execute(f"CREATE TABLE '{table}' (key BLOB PRIMARY KEY, value BLOB NOT NULL)")
        db.execute(f"PRAGMA application_id = {APPLICATION_ID}")
        db.execute(f"PRAGMA user_version = {VERSION}")
    if db.execute("PRAGMA application_id").fetchone()[0] != APPLICATION_ID:
        raise CorruptStoreError(f"{path} holds something else than a store")
    if (version := db.execute("PRAGMA user_version").fetchone()[0]) != VERSION:
        raise CorruptStoreError(f"{path} is of format {version}; this release reads {VERSION}")


@contextmanager
def _translated(path: str) -> Iterator[None]:
    """Raise SQLite's errors as ``StoreError``s."""
    try:
        yield
    except sqlite3.Error as error:
        kind = next(kind for text, kind in _KINDS if text in str(error))
        raise kind(f"{path}: {error}") from error
