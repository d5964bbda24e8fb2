"""A persistkv store in one SQLite file: the driver.

1. One SQL transaction does all that a commit does, so what SQLite promises of one holds of the other: all or nothing,
   and on disk when it returns (``synchronous = EXTRA``).
2. Each call but ``manifests`` is one transaction, too: what it hands out was true at one moment.
3. ``read`` opens a connection of its own, so that any number of threads may call it.
"""

from __future__ import annotations

import os
import sqlite3
import time
from collections.abc import Iterable, Iterator, Sequence
from contextlib import closing, contextmanager, suppress
from dataclasses import replace
from pathlib import Path

import msgspec

from persistkv.config import PAGE_BYTES, StoreUrl, convert_options, parse_duration, parse_size
from persistkv.errors import (
    ConfigurationError,
    CorruptPackError,
    CorruptStoreError,
    StoreBusyError,
    StoreError,
    StoreFullError,
    StoreUnavailableError,
)
from persistkv.storage.backend import (
    Backend,
    BackendStats,
    Capabilities,
    Changes,
    CommitBatch,
    CommitResult,
    Namespace,
    ReadSpan,
)
from persistkv.storage.identity import Identity
from persistkv.storage.manifest import ManifestKeys, RequestManifest, decode_manifest, decode_manifest_keys
from persistkv.storage.pack import PackTable
from persistkv_sqlite.commit import Commit, readable
from persistkv_sqlite.schema import PIECE_BYTES, create_or_check

_WAIT_S = 30.0  # for another process's transaction
_LEAST_CAPACITY = 1 << 20  # 1 MiB
_PAGE_OF_MANIFESTS = 100
_GENERATION_BYTES = 8

_KINDS = (  # by text: sqlite3 gives codes from Python 3.11 on only
    ("unable to open database file", StoreUnavailableError),
    ("database is locked", StoreBusyError),
    ("database or disk is full", StoreFullError),
    ("file is not a database", CorruptStoreError),
    ("database disk image is malformed", CorruptStoreError),
    ("", StoreError),
)


class SqliteOptions(msgspec.Struct, frozen=True):
    """What a URL such as ``sqlite:///var/cache/kv.db?capacity=10GiB`` may set."""

    capacity: str | None = None
    """Bound on the bytes of the file, 1MiB or more; None: no bound."""
    ttl: str | None = None
    """How long what nobody uses is kept, a duration such as ``7d``; None: as long as there is room."""


class SqliteBackend(Backend):
    """One open file."""

    capabilities = Capabilities(persistent=True, shared=True)

    def __init__(self, path: str, *, read_only: bool, capacity: int | None, ttl_s: float | None) -> None:
        self._path = path
        self._read_only = read_only
        self.capabilities = replace(type(self).capabilities, writable=not read_only)
        self._capacity = capacity
        self._ttl_s = ttl_s
        self._closed = False
        with _translated(path):
            self._db = self._connect("ro" if read_only else "rwc")
        try:
            with self._transaction(writes=not read_only) as db:
                create_or_check(db, path, may_create=not read_only)
        except BaseException:
            self.close()
            raise

    @classmethod
    def open(cls, url: StoreUrl, *, read_only: bool = False) -> SqliteBackend:
        options = convert_options(SqliteOptions, url.options, where="sqlite")
        capacity = None if options.capacity is None else parse_size(options.capacity, name="sqlite option capacity")
        if capacity is not None and capacity < _LEAST_CAPACITY:
            raise ConfigurationError("sqlite option capacity", options.capacity, "1MiB or more")
        ttl_s = None if options.ttl is None else parse_duration(options.ttl, name="sqlite option ttl")
        return cls(url.location, read_only=read_only, capacity=capacity, ttl_s=ttl_s)

    def namespaces(self) -> Iterator[Namespace]:
        with self._transaction() as db:
            rows = db.execute("SELECT id, identity, created FROM namespaces").fetchall()
        return iter([space for row in rows for space in _namespaces(*row)])

    def open_namespace(self, identity: Identity) -> Namespace:
        held = {space.id: space for space in self.namespaces()}
        if identity.digest in held:
            return held[identity.digest]
        if self._read_only:
            raise StoreUnavailableError(f"{self._path} has no namespace {identity.digest.hex()}, and is open read-only")
        row = identity.digest, time.time(), identity.encode(), os.urandom(_GENERATION_BYTES)
        with self._transaction(writes=True) as db:
            heal = "ON CONFLICT (id) DO UPDATE SET identity = excluded.identity"
            db.execute(f"INSERT INTO namespaces VALUES (?, ?, ?, ?, 0) {heal}", row)
        return next(space for space in self.namespaces() if space.id == identity.digest)

    def commit(self, namespace: bytes, batch: CommitBatch) -> CommitResult:
        if any(pack.namespace != namespace for pack in batch.packs):
            raise StoreError(f"a pack of another namespace than {namespace.hex()}")
        with self._transaction(writes=True) as db:
            if batch.seen is not None and batch.seen != self._cursor(db, namespace):
                return CommitResult(batch.seen, stale=True)
            commit = Commit(db, namespace, batch)
            commit.run(None if self._capacity is None else self._capacity // PAGE_BYTES, self._ttl_s)
            return CommitResult(self._cursor(db, namespace), commit.evicted)

    def changes(self, namespace: bytes, cursor: bytes | None) -> Changes:
        with self._transaction() as db:
            now = self._cursor(db, namespace)
            since = self._since(db, now, cursor)
            if since is None:
                rows = db.execute("SELECT packed FROM packs WHERE namespace = ?", (namespace,)).fetchall()
                return Changes(now, _tables(rows), reset=True)
            log = "SELECT pack, came FROM changes WHERE namespace = ? AND number > ? ORDER BY number"
            moved = db.execute(log, (namespace, since)).fetchall()
            came = dict.fromkeys(pack_id for pack_id, came in moved if came)
            find = "SELECT packed FROM packs WHERE namespace = ? AND id = ?"
            rows = [row for pack_id in came for row in db.execute(find, (namespace, pack_id))]
            return Changes(now, _tables(rows), [pack_id for pack_id, came in moved if not came])

    def read(self, namespace: bytes, spans: Sequence[ReadSpan]) -> list[bool]:
        if self._closed:
            raise StoreError(f"{self._path} is closed")
        with _translated(self._path), closing(self._connect("ro" if self._read_only else "rw")) as db:
            db.execute("BEGIN")
            return [_fill(db, namespace, span) for span in spans]

    def manifests(self, namespace: bytes) -> Iterator[RequestManifest]:
        number = 0
        find = "SELECT number, head FROM manifests WHERE namespace = ? AND number > ? ORDER BY number LIMIT ?"
        while True:
            with self._transaction() as db:
                rows = db.execute(find, (namespace, number, _PAGE_OF_MANIFESTS)).fetchall()
            if not rows:
                return
            yield from _heads([head for _, head in rows])
            number = rows[-1][0]

    def manifest_keys(self, namespace: bytes, manifest_id: str) -> ManifestKeys | None:
        with self._transaction() as db:
            find = "SELECT keys FROM manifests WHERE namespace = ? AND id = ?"
            row = db.execute(find, (namespace, manifest_id)).fetchone()
        try:
            return None if row is None else decode_manifest_keys(row[0])
        except CorruptPackError:
            return None

    def manifests_naming(self, namespace: bytes, packs: Sequence[bytes]) -> list[RequestManifest]:
        find = """SELECT number, head FROM manifests WHERE number IN (
            SELECT manifest FROM links JOIN packs ON packs.number = pack WHERE packs.namespace = ? AND packs.id = ?
        )"""
        with self._transaction() as db:
            found = {number: head for pack in packs for number, head in db.execute(find, (namespace, pack))}
        return list(_heads(found.values()))

    def stats(self) -> BackendStats:
        with self._transaction() as db:
            find = "SELECT packs, blocks, requests, raw_bytes, stored_bytes FROM state"
            packs, blocks, requests, raw_bytes, stored_bytes = db.execute(find).fetchone()
            (pages,) = db.execute("PRAGMA page_count").fetchone()
        return BackendStats(packs, blocks, requests, raw_bytes, stored_bytes, pages * PAGE_BYTES, self._capacity)

    def close(self) -> None:
        self._closed = True
        self._db.close()

    def _connect(self, mode: str) -> sqlite3.Connection:
        uri = f"{Path(self._path).absolute().as_uri()}?mode={mode}"
        db = sqlite3.connect(uri, uri=True, timeout=_WAIT_S, isolation_level=None, check_same_thread=False)
        try:
            db.execute(f"PRAGMA page_size = {PAGE_BYTES}")
            db.execute("PRAGMA synchronous = EXTRA")
            if self._capacity is not None:
                db.execute(f"PRAGMA max_page_count = {self._capacity // PAGE_BYTES}")
        except BaseException:
            db.close()
            raise
        return db

    @contextmanager
    def _transaction(self, *, writes: bool = False) -> Iterator[sqlite3.Connection]:
        db = self._db
        with _translated(self._path):
            db.execute("BEGIN IMMEDIATE" if writes else "BEGIN")
            try:
                yield db
                db.execute("COMMIT")
            except BaseException:
                if db.in_transaction:  # SQLite ends it by itself where the disk is full
                    db.execute("ROLLBACK")
                raise

    def _cursor(self, db: sqlite3.Connection, namespace: bytes) -> bytes:
        row = db.execute("SELECT generation, changed FROM namespaces WHERE id = ?", (namespace,)).fetchone()
        if row is None:
            raise StoreError(f"{self._path} has no namespace {namespace.hex()}")
        return bytes(row[0]) + int(row[1]).to_bytes(8, "big")

    def _since(self, db: sqlite3.Connection, now: bytes, cursor: bytes | None) -> int | None:
        """The number behind which the log tells all that a cursor has not seen; None where it does not reach back."""
        if cursor is None or len(cursor) != len(now) or cursor[:_GENERATION_BYTES] != now[:_GENERATION_BYTES]:
            return None
        since, changed = (int.from_bytes(place[_GENERATION_BYTES:], "big") for place in (cursor, now))
        (oldest,) = db.execute("SELECT coalesce(min(number), 1) FROM changes").fetchone()
        return since if since == changed or oldest - 1 <= since < changed else None


def _namespaces(name: bytes, identity: bytes, created: float) -> list[Namespace]:
    """What a row says; nothing where it does not read."""
    try:
        space = Namespace(Identity.decode(identity), created)
    except ValueError:
        return []
    return [space] if space.id == name else []


def _heads(rows: Iterable[bytes]) -> Iterator[RequestManifest]:
    for row in rows:
        with suppress(CorruptPackError):
            yield decode_manifest(row)


def _tables(rows: Sequence[tuple[bytes]]) -> list[PackTable]:
    return [table for (packed,) in rows for table in readable(packed)]


def _fill(db: sqlite3.Connection, namespace: bytes, span: ReadSpan) -> bool:
    find = "SELECT number, stored_bytes FROM packs WHERE namespace = ? AND id = ?"
    row = db.execute(find, (namespace, span.pack_id)).fetchone()
    length = sum(buffer.nbytes for buffer in span.buffers)
    if row is None or span.offset + length > row[1]:
        return False
    first, last = span.offset // PIECE_BYTES, (span.offset + length) // PIECE_BYTES
    pieces = db.execute(
        "SELECT data FROM pieces WHERE pack = ? AND number BETWEEN ? AND ? ORDER BY number", (row[0], first, last)
    )
    data = memoryview(b"".join(piece for (piece,) in pieces))[span.offset - first * PIECE_BYTES :]
    if len(data) < length:
        return False
    for buffer in span.buffers:
        buffer.cast("B")[:] = data[: buffer.nbytes]
        data = data[buffer.nbytes :]
    return True


@contextmanager
def _translated(path: str) -> Iterator[None]:
    """The one place that knows SQLite's errors."""
    try:
        yield
    except sqlite3.Error as error:
        kind = next(kind for text, kind in _KINDS if text in str(error))
        raise kind(f"{path}: {error}") from error
