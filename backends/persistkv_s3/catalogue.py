"""Local catalogue of one namespace: a SQLite file, to which every engine applies the same feed.

1. The file is a cache. It is kept between runs and validated against the head; a damaged or foreign file is replaced.
2. A feed object is applied in one transaction, together with its position. If processes share the file, one of them
   applies it.
3. Commits that the feed does not contain yet are applied as *pending*, with an undo log. They are undone before a feed
   object is applied, and the remaining ones are applied again afterwards. So the state without them depends on the feed
   alone: of several objects for one pack, all engines keep the same one. Rejected commits just disappear.
4. A pack is removed together with the nonce of its object; under another nonce it stays.
"""

from __future__ import annotations

import os
import sqlite3
import struct
from collections import deque
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import NamedTuple

import msgspec

from persistkv.config import PAGE_BYTES
from persistkv.errors import CorruptPackError, CorruptStoreError, StoreBusyError, StoreError, StoreFullError
from persistkv.storage.backend import CommitBatch, ManifestWrite
from persistkv.storage.catalog import LOG_ENTRIES, TABLES, Catalog, CatalogTransaction, Rows
from persistkv.storage.catalog.order import Reading, StoreClock, next_expiry, read_clock, write_clock
from persistkv.storage.catalog.rows import (
    ADDED,
    CHAINS,
    LOG,
    LOG_KEY,
    MANIFEST,
    MANIFEST_KEYS,
    MANIFESTS,
    META,
    ORDER,
    ORDER_KEY,
    PACKS,
    PIECES,
    REMOVED,
    STATES,
    USES,
    Chain,
    NamespaceState,
    Use,
    encode_change,
    manifest_row,
    pack_table,
)
from persistkv.storage.catalog.transaction import kept_names
from persistkv.storage.format.codec import Buffer
from persistkv.storage.format.manifest import decode_manifest
from persistkv.storage.format.pack import ID_BYTES, PackTable
from persistkv.storage.format.pack_writer import NewPack, PackCopy
from persistkv_s3.feed.format import (
    NONCE_BYTES,
    Dump,
    Entry,
    Feed,
    PackRow,
    pack_name,
    seal,
    split_ids,
    tags_before,
    unseal,
)

APPLICATION_ID = 0x504B5333  # "PKS3"
VERSION = 1
_WAIT_S = 60.0  # for another thread's transaction, which may load a snapshot

# Tables besides those of ``storage/catalog``; docs/format.md has their rows.
OBJECTS, UNDO, WRITERS, GARBAGE, KEY_OBJECTS = "objects", "undo", "writers", "garbage", "key_objects"
PENDING = "pending"
"""Commits that are not in the feed yet: u64 big-endian row number → writer id, u64 number of the commit, f64 time at
which it was applied here, sealed commit."""
_TABLES = (*(name for name in TABLES if name != PIECES), OBJECTS, PENDING, UNDO, WRITERS, GARBAGE, KEY_OBJECTS)
_DUMPED = tuple(name for name in _TABLES if name not in (LOG, META, PENDING))
_DUMPED_META = (b"clock", b"bytes")
_OBJECT = struct.Struct(f"<{NONCE_BYTES}sQ")
_WRITER = struct.Struct("<Qd")
_NUMBER = struct.Struct(">Q")
_PENDING = struct.Struct("<16sQd")
_KEYS = struct.Struct("<QQQ")
_BYTES = struct.Struct("<Q")
_TIME = struct.Struct(">d")
_MISSING_OBJECT = b"\xff" * 16  # writer of pending commits that remove packs without objects
_POSITION_ROW, _BYTES_ROW, _STORE_ROW = b"feed", b"bytes", b"store"


class Position(msgspec.Struct, frozen=True, array_like=True):
    """Position in the feed: fields of the last feed object that a catalogue has applied (see ``Feed``)."""

    generation: bytes = b""
    """Empty: no feed object was applied."""
    position: int = 0
    term: bytes = b""
    time: float = 0.0
    damaged: bool = False
    """Whether a feed object, or a part of the snapshot from which the catalogue was last loaded, was unreadable: the
    catalogue may lack packs."""


# Made at import: msgspec 0.22 crashes if two threads are the first to decode a type.
_DECODE_POSITION = msgspec.msgpack.Decoder(Position).decode
_DECODE_BEFORE = msgspec.msgpack.Decoder(tuple[str, bytes, bytes | None]).decode
"""Decodes a row of ``UNDO``: table, key and value (None: no row) before a pending commit changed the row."""


class PackObject(NamedTuple):
    """A pack of the catalogue and the object that holds its bytes."""

    table: PackTable
    nonce: bytes
    """Random id of the upload, part of the object's name."""
    tags: bytes
    """Authentication tags of the pack's frames and table, see ``authentication``; empty without a key."""


class Plan(NamedTuple):
    """Effects that the batch of a commit would have on the catalogue."""

    cursor: bytes
    """Cursor of the log of changes before the commit."""
    missing: list[NewPack]
    """Packs of the batch to upload: the store does not hold them, or their tables are damaged."""
    gone: list[tuple[bytes, bytes]]
    """(pack id, nonce) of the pack objects that the commit removes or replaces."""
    removed: list[PackTable]
    """Tables of the packs that the commit removes."""
    pins: list[tuple[str, bool]]
    """(manifest id, True to pin or False to unpin), for manifests that exist or that the batch writes."""


class LocalRows(Rows):
    """Table rows of the catalogue within one SQL transaction."""

    def __init__(self, db: sqlite3.Connection) -> None:
        self.db = db
        self.dropped: list[bytes] = []
        """Digests of the ids of manifests that were deleted."""
        self.garbage_at: float | None = None
        """Removal time to record for objects passed to ``discard``; None: ``discard`` does nothing."""
        self.undoable = False
        """Whether changes are recorded in the undo log."""
        self.changed: dict[bytes, tuple[bytes, Buffer | None]] | None = None
        """Namespace and pack id → nonce and row of ``PACKS`` before the pack's first change; with it, ``_log_changes``
        writes the log of changes at the end. None: log rows are written at once."""

    def get(self, table: str, key: bytes) -> Buffer | None:
        row = self.db.execute(f"SELECT value FROM '{table}' WHERE key = ?", (key,)).fetchone()
        return None if row is None else bytes(row[0])

    def put(self, table: str, key: bytes, value: Buffer) -> None:
        self._write(table, key, value)

    def delete(self, table: str, key: bytes) -> bool:
        if table == MANIFEST_KEYS and (row := self.get(MANIFEST_KEYS, key)) is not None and len(row) >= _KEYS.size:
            name = bytes(row[_KEYS.size :])
            self.count_bytes(-_KEYS.unpack_from(row)[2])
            self.delete(KEY_OBJECTS, name + b"\0" + key[ID_BYTES:])
            if next(self.starting_with(KEY_OBJECTS, name + b"\0"), None) is None:
                self.discard(name.decode("ascii", "replace"))
        found = self._write(table, key, None)
        if found and table == MANIFESTS:
            self.dropped.append(key[ID_BYTES:])
        return found

    def range(self, table: str, start: bytes) -> Iterator[tuple[Buffer, Buffer]]:
        yield from self.db.execute(f"SELECT key, value FROM '{table}' WHERE key >= ? ORDER BY key", (start,))

    def _write(self, table: str, key: bytes, value: Buffer | None) -> bool:
        """Save a row for undo and for the log of changes; then write or, with None, delete it. Return whether it was
        changed.
        """
        if self.changed is not None:
            if table == LOG:
                return False
            if table in (OBJECTS, PACKS) and key not in self.changed:
                self.changed[key] = _nonce(self, key), self.get(PACKS, key)
        if self.undoable and table != LOG:
            before = self.get(table, key)
            self.append(UNDO, msgspec.msgpack.encode((table, key, None if before is None else bytes(before))))
        if value is None:
            return self.db.execute(f"DELETE FROM '{table}' WHERE key = ?", (key,)).rowcount > 0
        self.db.execute(f"INSERT OR REPLACE INTO '{table}' VALUES (?, ?)", (key, value))
        return True

    def append(self, table: str, value: Buffer) -> None:
        """Append a row to a table whose keys are row numbers; its key is the greatest number plus 1."""
        last = self.db.execute(f"SELECT max(key) FROM '{table}'").fetchone()[0]
        number = 0 if last is None else _NUMBER.unpack(last)[0] + 1
        self.db.execute(f"INSERT INTO '{table}' VALUES (?, ?)", (_NUMBER.pack(number), value))

    def undo(self) -> None:
        """Undo the changes of pending commits."""
        for table, key, before in reversed(list(_undo_log(self))):
            self._write(table, key, before)
        self.db.execute(f"DELETE FROM '{UNDO}'")

    def discard(self, name: str) -> None:
        """Record an object of the bucket as garbage, to be deleted later; do nothing if ``garbage_at`` is None."""
        if self.garbage_at is not None:
            self.put(GARBAGE, _TIME.pack(self.garbage_at) + name.encode(), b"")

    def count_bytes(self, change: int) -> None:
        """Add ``change``, which may be negative, to ``num_bytes``."""
        self.put(META, _BYTES_ROW, _BYTES.pack(max(0, self.num_bytes + change)))

    @property
    def num_bytes(self) -> int:
        """Total size in bytes of the namespace's packs, pack tables and manifests in the bucket."""
        row = self.get(META, _BYTES_ROW)
        return 0 if row is None else int(_BYTES.unpack(row)[0])

    @property
    def position(self) -> Position:
        row = self.get(META, _POSITION_ROW)
        return Position() if row is None else _DECODE_POSITION(row)

    @position.setter
    def position(self, position: Position) -> None:
        self.put(META, _POSITION_ROW, msgspec.msgpack.encode(position))


class _Objects:
    """``Payloads`` of one transaction: records which object holds the bytes of a pack."""

    def __init__(self, rows: LocalRows) -> None:
        self._rows = rows
        self.rows_of: dict[bytes, PackRow] = {}
        self.deleted: list[tuple[bytes, bytes]] = []

    def write(self, name: bytes, stream: Iterator[Buffer], at_most: int) -> None:
        row = self.rows_of[name]
        size = at_most + 2 * len(row.body)
        self._rows.put(OBJECTS, name, _OBJECT.pack(row.nonce, size) + tags_before(row.body))
        self._rows.count_bytes(size)

    def delete(self, name: bytes) -> None:
        row = self._rows.get(OBJECTS, name)
        if row is not None:
            nonce, size = _OBJECT.unpack_from(row)
            self._rows.delete(OBJECTS, name)
            self._rows.count_bytes(-size)
            self.deleted.append((name[ID_BYTES:], nonce))


class Catalogue(Catalog):
    """Local catalogue of one namespace, see the top of this file. Thread-safe. Times are seconds since the epoch by the
    server's clock; each parameter ``at`` is the present time.

    :param path: SQLite file, in an existing directory; created if missing, replaced if damaged or foreign.
    """

    def __init__(self, path: Path, namespace: bytes) -> None:
        self.path = path
        self._namespace = namespace
        self._idle: deque[sqlite3.Connection] = deque()
        self._closed = False
        try:
            self._create_or_check()
        except (StoreError, sqlite3.Error, msgspec.DecodeError, struct.error):
            self._release()
            self._delete_file()
            self._create_or_check()

    def _create_or_check(self) -> None:
        with self.rows(write=True) as rows:
            if not rows.db.execute("SELECT count(*) FROM sqlite_master").fetchone()[0]:
                for table in _TABLES:
                    columns = "(key BLOB PRIMARY KEY, value BLOB NOT NULL) WITHOUT ROWID"
                    rows.db.execute(f"CREATE TABLE '{table}' {columns}")
                rows.db.execute(f"PRAGMA application_id = {APPLICATION_ID}")
                rows.db.execute(f"PRAGMA user_version = {VERSION}")
                rows.put(STATES, self._namespace, _new_state().encode())
                write_clock(rows, 0, StoreClock(0.0, Reading.now()))  # the feed and the server have the time
            found = [rows.db.execute(f"PRAGMA {name}").fetchone()[0] for name in ("application_id", "user_version")]
            state = rows.get(STATES, self._namespace)
            if found != [APPLICATION_ID, VERSION] or state is None:
                raise StoreError(f"{self.path} is not the catalogue of this namespace")
            NamespaceState.decode(state)
            read_clock(rows)
            _ = rows.position, rows.num_bytes

    def _delete_file(self) -> None:
        for suffix in ("", "-wal", "-shm"):
            Path(f"{self.path}{suffix}").unlink(missing_ok=True)

    @contextmanager
    def rows(self, *, write: bool = False, rollback: bool = False) -> Iterator[LocalRows]:
        """Run an SQL transaction on the file, as ``Catalog.rows`` does; with ``rollback``, never commit it.

        :raises StoreError: the catalogue is closed, or SQLite failed. A file that SQLite reports as damaged is deleted.
        """
        if self._closed:
            raise StoreError("the store is closed")
        try:
            db = self._idle.pop() if self._idle else self._connect()
        except sqlite3.Error as error:
            raise StoreError(f"{self.path}: {error}") from error
        try:
            db.execute("BEGIN IMMEDIATE" if write else "BEGIN")
            yield LocalRows(db)
            db.execute("ROLLBACK" if rollback else "COMMIT")
        except sqlite3.Error as error:
            db.close()
            raise self._translated(error) from error
        except BaseException:
            with suppress(sqlite3.Error):
                db.execute("ROLLBACK")
            self._return_connection(db)
            raise
        self._return_connection(db)

    def _connect(self) -> sqlite3.Connection:
        db = sqlite3.connect(self.path, timeout=_WAIT_S, isolation_level=None, check_same_thread=False)
        db.execute(f"PRAGMA page_size = {PAGE_BYTES}")
        db.execute("PRAGMA journal_mode = WAL")
        db.execute("PRAGMA synchronous = NORMAL")
        return db

    def _translated(self, error: sqlite3.Error) -> StoreError:
        text = str(error)
        if "malformed" in text or "not a database" in text:
            self._delete_file()  # the next opening creates another one
        kind = StoreBusyError if "locked" in text else StoreFullError if "full" in text else StoreError
        return kind(f"{self.path}: {text}")

    def _return_connection(self, db: sqlite3.Connection) -> None:
        self._idle.append(db)
        if self._closed:
            self._release()

    def _release(self) -> None:
        while self._idle:
            self._idle.pop().close()

    def close(self) -> None:
        """Release the file; idempotent."""
        self._closed = True
        self._release()

    # Content

    @property
    def position(self) -> Position:
        """Position up to which the feed was applied."""
        with self.rows() as rows:
            return rows.position

    def disk_bytes(self) -> int:
        """Return the bytes of the namespace's packs, pack tables and manifests in the bucket."""
        with self.rows() as rows:
            return rows.num_bytes

    def objects(self, pack_ids: Iterable[bytes]) -> dict[bytes, PackObject]:
        """Return packs by id, without those that the catalogue lacks or whose table is unreadable."""
        found: dict[bytes, PackObject] = {}
        with self.rows() as rows:
            for pack_id in pack_ids:
                name = self._namespace + pack_id
                table, held = pack_table(name, rows.get(PACKS, name)), rows.get(OBJECTS, name)
                if table is not None and held is not None:
                    found[pack_id] = PackObject(table, _OBJECT.unpack_from(held)[0], bytes(held[_OBJECT.size :]))
        return found

    def keys_place(self, manifest_id: str) -> tuple[str, int, int] | None:
        """Return where a manifest's keys are: name of the object, byte offset and length. None: missing or damaged."""
        with self.rows() as rows:
            row = rows.get(MANIFEST_KEYS, manifest_row(self._namespace, manifest_id))
        if row is None or len(row) < _KEYS.size:
            return None
        offset, length, _ = _KEYS.unpack_from(row)
        return bytes(row[_KEYS.size :]).decode("ascii", "replace"), offset, length

    def merged(self) -> dict[bytes, int]:
        """Return, by writer id, the number of the writer's last commit that the feed has merged."""
        with self.rows() as rows:
            return {bytes(writer): _WRITER.unpack(row)[0] for writer, row in rows.range(WRITERS, b"")}

    def merged_number(self, writer: bytes) -> int:
        """Return the number of a writer's last commit that the feed has merged; 0: none."""
        with self.rows() as rows:
            return _merged_number(rows, writer)

    def retention(self) -> tuple[int, float, float]:
        """Return the total bytes, the time of the oldest use of a pack or manifest that may be evicted (0: there is
        none), and the earliest time at which a manifest expires by its own ttl (infinity: never).
        """
        with self.rows() as rows:
            return rows.num_bytes, _oldest(rows), next_expiry(rows)

    def garbage(self, until: float, at_most: int) -> list[tuple[float, str]]:
        """Return (removal time, name) of the objects that the feed removed at ``until`` or earlier, oldest first:
        ``at_most``, and those with the same time as the last one.
        """
        found: list[tuple[float, str]] = []
        with self.rows() as rows:
            for key, _ in rows.range(GARBAGE, b""):
                time, name = _TIME.unpack_from(key)[0], bytes(key[_TIME.size :]).decode("ascii", "replace")
                if time > until or (len(found) >= at_most and time != found[-1][0]):
                    break
                found.append((time, name))
        return found

    def names_pack(self, pack_id: bytes, nonce: bytes) -> bool:
        """Return whether the catalogue, with or without the pending commits, refers to this object of a pack."""
        name = self._namespace + pack_id
        with self.rows() as rows:
            undone = [value for table, key, value in _undo_log(rows) if (table, key) == (OBJECTS, name)]
            return nonce in (_nonce(rows, name), *(value[:NONCE_BYTES] for value in undone if value is not None))

    def names_keys(self, name: str) -> bool:
        """Return whether a manifest, with or without the pending commits, has its keys in the object ``name``."""
        prefix = name.encode() + b"\0"
        with self.rows() as rows:
            if next(rows.starting_with(KEY_OBJECTS, prefix), None) is not None:
                return True
            return any(table == KEY_OBJECTS and key.startswith(prefix) for table, key, _ in _undo_log(rows))

    # Changes

    def plan(self, batch: CommitBatch) -> Plan:
        """Return the effects that the batch of a commit would have, without changing the catalogue."""
        with self.rows(write=bool(batch.deletions or batch.bad), rollback=True) as rows:
            cursor = _cursor(rows, self._namespace)
            objects = _Objects(rows)
            transaction = CatalogTransaction(rows, objects, self._namespace, kept_names(self._namespace, batch), at=0.0)
            if batch.deletions or batch.bad:
                transaction.remove(CommitBatch(deletions=batch.deletions, bad=batch.bad))
            missing = list({pack.pack_id: pack for pack in reversed(transaction.missing(batch.packs))}.values())[::-1]
            damaged = [(pack.pack_id, _nonce(rows, self._namespace + pack.pack_id)) for pack in missing]
            gone = [*objects.deleted, *((pack_id, nonce) for pack_id, nonce in damaged if nonce)]
            written = {write.manifest.id for write in batch.manifests}
            pins = [
                (name, pinned)
                for name, pinned in batch.pins
                if name in written or rows.get(MANIFESTS, manifest_row(self._namespace, name)) is not None
            ]
            return Plan(cursor, missing, gone, transaction.evicted, pins)

    def plan_eviction(
        self, at: float, ttl_s: float | None, excess: int, until: float, at_most: int
    ) -> tuple[list[tuple[bytes, bytes]], list[bytes]]:
        """Return expired packs and manifests, and those to evict to free ``excess`` bytes; change nothing.

        :param ttl_s: content expires this many seconds after its last use; None: manifests by their own ttl only.
        :param until: eviction for ``excess`` also ends when nothing evictable was used at this time or earlier.
        :param at_most: maximum number of expired packs and manifests; also the maximum number of evicted ones.
        :returns: (pack id, nonce) of the packs, and digests of the ids of the manifests.
        """
        with self.rows(write=True, rollback=True) as rows:
            rows.undo()
            objects = _Objects(rows)
            transaction = CatalogTransaction(rows, objects, self._namespace, at=at)
            transaction.expire(ttl_s, at_most)
            target = rows.num_bytes - excess

            def is_enough() -> bool:
                return rows.num_bytes <= target or _oldest(rows) > until

            transaction.evict(is_enough, at_most)
            return objects.deleted, rows.dropped

    def apply_pending(self, entry: Entry, at: float) -> tuple[bytes, bytes]:
        """Apply a commit that is not in the feed, unless it is already applied; return the cursors before and after."""
        with self.rows(write=True) as rows:
            before = _cursor(rows, self._namespace)
            known = any(
                _PENDING.unpack_from(row)[:2] == (entry.writer, entry.number) for _, row in rows.range(PENDING, b"")
            )
            if not known and _merged_number(rows, entry.writer) < entry.number:
                rows.append(PENDING, _PENDING.pack(entry.writer, entry.number, at) + seal(entry))
                self._apply(rows, entry, at, undoable=True)
            return before, _cursor(rows, self._namespace)

    def apply_feed(self, feed: Feed) -> None:
        """Apply a feed object if it directly follows ``position``; otherwise do nothing."""
        with self.rows(write=True) as rows:
            if feed.position != rows.position.position + 1:
                return
            rows.changed = {}
            sequence = _state(rows, self._namespace).sequence
            rows.undo()
            rows.garbage_at = feed.time
            for entry in feed.entries:
                self._apply(rows, entry, feed.time)
            for writer, number in feed.merged.items():
                rows.put(WRITERS, writer, _WRITER.pack(number, feed.time))
            for name in feed.retired:
                rows.discard(name)
            if feed.collected:
                rows.db.execute(f"DELETE FROM '{GARBAGE}' WHERE key < ?", (_TIME.pack(feed.collected) + b"\xff",))
            damaged = rows.position.damaged
            rows.position = Position(feed.generation, feed.position, feed.term, feed.time, damaged)
            rows.garbage_at = None
            self._reapply(rows)
            self._log_changes(rows, sequence)

    def _reapply(self, rows: LocalRows) -> None:
        """Apply pending commits again after a feed object; delete merged ones and removals that the feed has made."""
        for key, value in list(rows.range(PENDING, b"")):
            entry, at = unseal(value[_PENDING.size :], Entry), _PENDING.unpack_from(value)[2]
            held = any(_nonce(rows, self._namespace + pack_id) == nonce for pack_id, nonce in entry.gone)
            if (entry.writer == _MISSING_OBJECT and not held) or entry.number <= _merged_number(rows, entry.writer):
                rows.delete(PENDING, bytes(key))
            else:
                self._apply(rows, entry, at, undoable=True)

    def _log_changes(self, rows: LocalRows, sequence: int) -> None:
        """Log each pack whose object was added, removed or replaced, and delete the oldest log rows.

        :param sequence: number of the last log row before these changes.
        """
        changed, rows.changed = rows.changed or {}, None
        for name, (before, row) in changed.items():
            after, changes = _nonce(rows, name), []
            if before != after and before:
                changes.append(encode_change(REMOVED, name[ID_BYTES:], pack_table(name, row)))
            if before != after and after:
                changes.append(encode_change(ADDED, name[ID_BYTES:]))
            for change in changes:
                sequence += 1
                rows.put(LOG, LOG_KEY.pack(self._namespace, sequence), change)
        oldest = LOG_KEY.pack(self._namespace, max(0, sequence - LOG_ENTRIES + 1))
        rows.db.execute(f"DELETE FROM '{LOG}' WHERE key < ?", (oldest,))
        state = _state(rows, self._namespace)
        state.sequence = sequence
        rows.put(STATES, self._namespace, state.encode())

    def skip_to(self, position: Position) -> None:
        """Advance the position past feed objects that are unreadable or in a snapshot; never move it backwards."""
        with self.rows(write=True) as rows:
            if position.position >= rows.position.position:
                rows.position = position

    def drop(self, pack_id: bytes, nonce: bytes, at: float) -> None:
        """Remove a pack whose object is missing, if it is held under this nonce.

        The removal is a pending commit, applied again after each feed object until the feed has removed the pack, too.
        """
        with self.rows() as rows:
            if _nonce(rows, self._namespace + pack_id) != nonce:
                return
        number = int.from_bytes(nonce[:5], "big")  # unique
        entry = Entry(writer=_MISSING_OBJECT, number=number + 1, time=at, gone=[(pack_id, nonce)])
        self.apply_pending(entry, at)

    def lost(self) -> list[tuple[bytes, bytes]]:
        """Return (pack id, nonce) of the dropped packs that the feed has not removed yet, of all users of the file."""
        with self.rows() as rows:
            pending = [bytes(row) for _, row in rows.range(PENDING, b"")]
        dropped = [row for row in pending if row.startswith(_MISSING_OBJECT)]
        entries = [unseal(row[_PENDING.size :], Entry) for row in dropped]
        return [gone for entry in entries for gone in entry.gone]

    def is_of(self, store: bytes) -> bool:
        """Return whether the catalogue belongs to this store (``Head.store``); a new catalogue is assigned to it."""
        with self.rows() as rows:
            row = rows.get(META, _STORE_ROW)
        if row is None:
            with self.rows(write=True) as rows:
                rows.put(META, _STORE_ROW, store)
        return row in (None, store)

    def load(self, dumps: Iterable[Dump], position: Position, store: bytes) -> None:
        """Replace the whole catalogue by dumped table rows; all earlier cursors become invalid.

        :raises CorruptStoreError: essential rows are invalid; the catalogue is unchanged.
        """
        with self.rows(write=True) as rows:
            for table in _TABLES:
                rows.db.execute(f"DELETE FROM '{table}'")
            write_clock(rows, 0, StoreClock(0.0, Reading.now()))
            for dump in dumps:
                for table, some in dump.tables.items():
                    if table in _DUMPED or table == META:
                        rows.db.executemany(f"INSERT OR REPLACE INTO '{table}' VALUES (?, ?)", some)
            rows.undo()
            row = rows.get(STATES, self._namespace)
            state = _new_state() if row is None else NamespaceState.decode(row)
            state.generation = _new_state().generation
            rows.put(STATES, self._namespace, state.encode())
            read_clock(rows)
            if (row := rows.get(META, _BYTES_ROW)) is not None and len(row) != _BYTES.size:
                raise CorruptStoreError(f"bytes of the namespace: {len(row)} bytes instead of {_BYTES.size}")
            rows.put(META, _STORE_ROW, store)
            rows.position = position

    def dump(self, segment_bytes: int) -> Iterator[tuple[Position, Dump]]:
        """Yield the table rows for a snapshot in portions of about ``segment_bytes``, each with ``position``."""
        with self.rows() as rows:
            position, length = rows.position, 0
            meta = [(key, bytes(row)) for key in _DUMPED_META if (row := rows.get(META, key)) is not None]
            tables: dict[str, list[tuple[bytes, bytes]]] = {META: meta}
            for table in _DUMPED:
                for key, value in rows.range(table, b""):
                    tables.setdefault(table, []).append((bytes(key), bytes(value)))
                    length += len(key) + len(value)
                    if length >= segment_bytes:
                        yield position, Dump(tables)
                        tables, length = {}, 0
            yield position, Dump(tables)

    def _apply(self, rows: LocalRows, entry: Entry, at: float, *, undoable: bool = False) -> None:
        rows.undoable = undoable
        objects = _Objects(rows)
        for joined in entry.uses[:-1]:
            earlier = CatalogTransaction(rows, objects, self._namespace, at=at)
            earlier.remove(CommitBatch(touches=split_ids(joined)))
            earlier.finish()
        transaction = CatalogTransaction(rows, objects, self._namespace, at=at)
        packs, manifests = list(self._packs(entry)), list(self._manifests(entry))
        writes = [write for write, _ in manifests]
        touches = split_ids(entry.uses[-1]) if entry.uses else []
        bad = [pack_id for pack_id, nonce in entry.gone if _nonce(rows, self._namespace + pack_id) == nonce]
        transaction.remove(CommitBatch([pack for pack, _ in packs], writes, bad=bad, touches=touches))
        for pack_id, nonce in entry.gone:
            rows.discard(pack_name(pack_id, nonce))
        transaction.drop_manifests(self._namespace + digest for digest in entry.manifests_gone)
        for pack, row in packs:
            held = _nonce(rows, self._namespace + row.pack_id)
            objects.rows_of[self._namespace + row.pack_id] = row
            transaction.add(CommitBatch([pack]))
            if held and held != row.nonce:  # of several objects for a pack, the first stays
                rows.discard(pack_name(row.pack_id, row.nonce))
        transaction.add(CommitBatch(manifests=writes, pins=entry.pins))
        for write, value in manifests:
            name = manifest_row(self._namespace, write.manifest.id)
            rows.put(MANIFEST_KEYS, name, value)
            rows.put(KEY_OBJECTS, bytes(value[_KEYS.size :]) + b"\0" + name[ID_BYTES:], b"")
            rows.count_bytes(_KEYS.unpack_from(value)[2])
        transaction.finish()
        rows.undoable = False

    def _manifests(self, entry: Entry) -> Iterator[tuple[ManifestWrite, bytes]]:
        for row in entry.manifests:
            with suppress(CorruptPackError):
                write = ManifestWrite(decode_manifest(row.head), (), split_ids(row.packs))
                size = len(row.head) + row.length + len(row.packs)
                yield write, _KEYS.pack(row.offset, row.length, size) + row.keys.encode()

    def _packs(self, entry: Entry) -> Iterator[tuple[NewPack, PackRow]]:
        for row in entry.packs:
            with suppress(CorruptPackError):
                table = PackTable.parse(row.body)
                if (table.namespace, table.pack_id) == (self._namespace, row.pack_id):
                    yield PackCopy(table, b""), row


def _new_state() -> NamespaceState:
    return NamespaceState(os.urandom(8))


def _state(rows: Rows, namespace: bytes) -> NamespaceState:
    row = rows.get(STATES, namespace)
    if row is None:
        raise StoreError(f"the catalogue of {namespace.hex()} has no state")
    return NamespaceState.decode(row)


def _cursor(rows: Rows, namespace: bytes) -> bytes:
    return _state(rows, namespace).cursor


def _merged_number(rows: Rows, writer: bytes) -> int:
    row = rows.get(WRITERS, writer)
    return 0 if row is None else int(_WRITER.unpack(row)[0])


def _undo_log(rows: Rows) -> Iterator[tuple[str, bytes, bytes | None]]:
    """Yield the undo log; skip invalid rows, which a snapshot in an untrusted bucket may contain."""
    for _, value in rows.range(UNDO, b""):
        try:
            table, key, before = _DECODE_BEFORE(value)
        except (msgspec.DecodeError, UnicodeDecodeError):
            continue
        if table in _DUMPED or (table == META and key in _DUMPED_META):
            yield table, key, before


def _nonce(rows: Rows, name: bytes) -> bytes:
    """Return the nonce of the object that holds a pack (namespace and pack id); empty if the pack is not held."""
    row = rows.get(OBJECTS, name)
    return b"" if row is None else bytes(row[:NONCE_BYTES])


def _oldest(rows: Rows) -> float:
    """Return the time of the oldest use of a pack or manifest that may be evicted; 0: there is none. Writes nothing."""
    times = list[float]()
    for low in (True, False):
        for key, _ in rows.starting_with(ORDER, bytes([not low])):
            _, _, _, kind, name = ORDER_KEY.unpack(key)
            row = Chain.decode(rows.get(CHAINS, name)) if kind == MANIFEST else Use.decode(rows.get(USES, name))
            if row is not None:
                times.append(row.time)
                break
    return min(times, default=0.0)
