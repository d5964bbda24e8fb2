"""A shared store in one SQLite file: a medium and its driver, the example of docs/extending.md.

1. A blob is a row. A call is a transaction on a connection of its own, so any thread may call.
2. Commits are durable: ``EXTRA`` syncs the write-ahead log. With this log, reads do not wait.
"""

from __future__ import annotations

import sqlite3
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import closing, contextmanager, suppress
from pathlib import Path

from persistkv.config import StoreUrl
from persistkv.errors import ConfigurationError, StoreError
from persistkv.storage import blobs as medium
from persistkv.storage.blobs import Blobs
from persistkv.storage.format.codec import Buffer
from persistkv.storage.shared import SharedBackend

_TABLE = "persistkv (name TEXT PRIMARY KEY, time REAL NOT NULL, data BLOB NOT NULL)"
_LIST = "SELECT name, length(data), time FROM persistkv WHERE name > ? AND name < ? ORDER BY name"
_TRANSIENT = {sqlite3.SQLITE_BUSY, sqlite3.SQLITE_IOERR, sqlite3.SQLITE_PROTOCOL}


class SqliteBlobs(Blobs):
    """Blobs in the file ``path``; ``wait_s``: seconds to wait for another writer."""

    def __init__(
        self,
        path: Path,
        *,
        read_only: bool = False,
        wait_s: float = 30.0,
    ) -> None:
        self._uri = f"{path.absolute().as_uri()}?mode={'ro' if read_only else 'rwc'}"
        self._wait_s = wait_s
        self._closed = False

    def put(self, name: str, pieces: Sequence[Buffer]) -> float:
        medium.check_name(name)
        data = b"".join(pieces)
        with self._transaction("BEGIN IMMEDIATE") as db:
            db.execute(
                "REPLACE INTO persistkv VALUES (?, ?, ?)", [name, time.time(), data]
            )
        return time.time()

    def read(
        self,
        name: str,
        offset: int,
        length: int,
        buffers: Iterable[memoryview],
    ) -> int:
        medium.check_name(name)
        with self._transaction() as db:
            row = db.execute(
                "SELECT rowid FROM persistkv WHERE name = ?", [name]
            ).fetchone()
            if row is None:
                raise medium.BlobMissingError(f"{self._uri}: {name} does not exist")
            with db.blobopen("persistkv", "data", row[0], readonly=True) as blob:
                start = min(offset, len(blob))
                blob.seek(start)
                for buffer in buffers:
                    part = blob.read(buffer.nbytes)
                    buffer.cast("B")[: len(part)] = part
                    if len(part) < buffer.nbytes:
                        break
                return blob.tell() - start

    def delete(self, names: Sequence[str]) -> None:
        for name in names:
            medium.check_name(name)
        with self._transaction("BEGIN IMMEDIATE") as db:
            db.executemany(
                "DELETE FROM persistkv WHERE name = ?", [[name] for name in names]
            )

    def list(self, prefix: str, after: str = "") -> Iterator[medium.BlobInfo]:
        medium.check_prefix(prefix)
        # ASCII: 0 follows /, and ~ follows all names
        end = prefix[:-1] + "0" if prefix else "~"
        with self._transaction() as db:
            rows = db.execute(_LIST, [max(prefix, after), end]).fetchall()
        return map(medium.BlobInfo._make, rows)

    def close(self) -> None:
        self._closed = True

    @contextmanager
    def _transaction(self, begin: str = "BEGIN") -> Iterator[sqlite3.Connection]:
        if self._closed:
            raise StoreError(f"{self._uri} is closed")
        try:
            db = sqlite3.connect(
                self._uri, self._wait_s, isolation_level=None, uri=True
            )
            with closing(db):  # after an error, this rolls back
                # another connection sets the mode
                with suppress(sqlite3.OperationalError):
                    db.executescript(
                        "PRAGMA synchronous = EXTRA; PRAGMA journal_mode = WAL"
                    )
                db.execute(begin)
                db.execute(f"CREATE TABLE IF NOT EXISTS {_TABLE}")
                yield db
                db.execute("COMMIT")
        except sqlite3.Error as error:
            is_transient = error.sqlite_errorcode & 0xFF in _TRANSIENT
            kind = medium.UnavailableError if is_transient else medium.RefusedError
            raise kind(f"{self._uri}: {error}") from error


class SqliteBackend(SharedBackend):
    """Shared store in a SQLite file, such as ``sqlite:///var/cache/kv.db``."""

    @classmethod
    def open_blobs(
        cls,
        url: StoreUrl,
        options: Mapping[str, str],
        *,
        read_only: bool,
    ) -> Blobs:
        if options:
            raise ConfigurationError(
                "sqlite options", " ".join(options), "those of shared stores"
            )
        return SqliteBlobs(Path(url.location), read_only=read_only)
