"""What lies in the database file.

One row of ``state``; totals in it are kept by triggers, so that they are exact whatever a transaction does. A pack's
payload is cut into ``pieces``, because SQLite reads a value from its begin.
"""

from __future__ import annotations

import sqlite3

from persistkv.errors import CorruptStoreError

APPLICATION_ID = 0x504B5653  # "PKVS": what `PRAGMA application_id` of our files says
VERSION = 2
PIECE_BYTES = 1 << 20  # 1 MiB

_SCHEMA = (
    """CREATE TABLE state (
        moment INTEGER NOT NULL,      -- number of the last commit that used something
        time REAL NOT NULL,           -- of that commit, seconds since the epoch; never goes back
        packs INTEGER NOT NULL, blocks INTEGER NOT NULL, requests INTEGER NOT NULL,
        raw_bytes INTEGER NOT NULL, stored_bytes INTEGER NOT NULL
    )""",
    "INSERT INTO state VALUES (0, 0, 0, 0, 0, 0, 0)",
    """CREATE TABLE namespaces (
        id BLOB PRIMARY KEY,
        created REAL NOT NULL,
        identity BLOB NOT NULL,       -- canonical JSON
        generation BLOB NOT NULL,     -- 8 random bytes: a cursor of another file of this name is not taken for ours
        changed INTEGER NOT NULL      -- number of its last row in changes; 0: it has none
    )""",
    """CREATE TABLE packs (
        number INTEGER PRIMARY KEY,
        namespace BLOB NOT NULL, id BLOB NOT NULL,
        packed BLOB NOT NULL,         -- PackTable.encode()
        blocks INTEGER NOT NULL, raw_bytes INTEGER NOT NULL, stored_bytes INTEGER NOT NULL,
        place INTEGER NOT NULL,       -- in the order of eviction
        used REAL NOT NULL, depth INTEGER NOT NULL,
        UNIQUE (namespace, id)
    )""",
    """CREATE TABLE pieces (
        pack INTEGER NOT NULL, number INTEGER NOT NULL, data BLOB NOT NULL,
        UNIQUE (pack, number)
    )""",
    """CREATE TABLE manifests (
        number INTEGER PRIMARY KEY,
        namespace BLOB NOT NULL, id TEXT NOT NULL,
        head BLOB NOT NULL, keys BLOB NOT NULL,
        place INTEGER NOT NULL, used REAL NOT NULL,
        ordered INTEGER NOT NULL, pinned INTEGER NOT NULL,
        UNIQUE (namespace, id)
    )""",
    """CREATE TABLE links (            -- which packs a manifest names, the begin of the context first
        manifest INTEGER NOT NULL, position INTEGER NOT NULL, pack INTEGER NOT NULL,
        PRIMARY KEY (manifest, position)
    ) WITHOUT ROWID""",
    "CREATE INDEX links_of_pack ON links (pack)",
    """CREATE TABLE changes (          -- packs that came and went
        number INTEGER PRIMARY KEY, namespace BLOB NOT NULL, pack BLOB NOT NULL, came INTEGER NOT NULL
    )""",
    """CREATE TRIGGER pack_came AFTER INSERT ON packs BEGIN
        UPDATE state SET packs = packs + 1, blocks = blocks + NEW.blocks,
            raw_bytes = raw_bytes + NEW.raw_bytes, stored_bytes = stored_bytes + NEW.stored_bytes;
    END""",
    """CREATE TRIGGER pack_went AFTER DELETE ON packs BEGIN
        DELETE FROM pieces WHERE pack = OLD.number;
        UPDATE state SET packs = packs - 1, blocks = blocks - OLD.blocks,
            raw_bytes = raw_bytes - OLD.raw_bytes, stored_bytes = stored_bytes - OLD.stored_bytes;
    END""",
    """CREATE TRIGGER manifest_came AFTER INSERT ON manifests BEGIN
        UPDATE state SET requests = requests + 1;
    END""",
    """CREATE TRIGGER manifest_went AFTER DELETE ON manifests BEGIN
        DELETE FROM links WHERE manifest = OLD.number;
        UPDATE state SET requests = requests - 1;
    END""",
    f"PRAGMA application_id = {APPLICATION_ID}",
    f"PRAGMA user_version = {VERSION}",
)


def create_or_check(db: sqlite3.Connection, path: str, *, may_create: bool) -> None:
    """Make the tables in an empty file; see that those of any other are ours. To be called in a transaction.

    :raises CorruptStoreError: they are not, or of a newer version.
    """
    empty = not db.execute("SELECT count(*) FROM sqlite_master").fetchone()[0]
    if empty and may_create:
        for statement in _SCHEMA:
            db.execute(statement)
    found = db.execute("PRAGMA application_id").fetchone()[0], db.execute("PRAGMA user_version").fetchone()[0]
    if found[0] != APPLICATION_ID:
        raise CorruptStoreError(f"{path} holds something else than a store")
    if found[1] != VERSION:
        raise CorruptStoreError(f"{path} is of format {found[1]}; this release reads {VERSION}")
