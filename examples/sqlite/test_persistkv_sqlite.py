"""The example backend against the conformance suite, and its own options and errors."""

from __future__ import annotations

import hashlib
import sqlite3
import tempfile
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import pytest

from persistkv.config import StoreUrl
from persistkv.errors import ConfigurationError, CorruptStoreError
from persistkv.testing.conformance import BackendConformance, RawKind, RawStore
from persistkv_sqlite import SqliteBackend
from persistkv_sqlite.backend import VERSION

TABLE_OF = {
    RawKind.PAYLOAD: "pieces",
    RawKind.TABLE: "packs",
    RawKind.MANIFEST: "manifests",
    RawKind.MANIFEST_KEYS: "manifest_keys",
}


class RawSqlite(RawStore):
    """The database file, accessed without the driver."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def get(self, kind: RawKind, namespace: bytes, name: bytes) -> bytes:
        return b"".join(data for _, data in self._rows(kind, namespace, name))

    def put(self, kind: RawKind, namespace: bytes, name: bytes, data: bytes) -> None:
        with closing(sqlite3.connect(self.path)) as db, db:
            for key, held in self._rows(kind, namespace, name):
                db.execute(f"UPDATE {TABLE_OF[kind]} SET value = ? WHERE key = ?", (data[: len(held)], key))
                data = data[len(held) :]

    def _rows(self, kind: RawKind, namespace: bytes, name: bytes) -> list[tuple[bytes, bytes]]:
        if kind in (RawKind.MANIFEST, RawKind.MANIFEST_KEYS):
            name = hashlib.blake2b(name, digest_size=16).digest()
        prefix = namespace + name
        with closing(sqlite3.connect(self.path)) as db:
            find = f"SELECT key, value FROM {TABLE_OF[kind]} WHERE substr(key, 1, ?) = ? ORDER BY key"
            return db.execute(find, (len(prefix), prefix)).fetchall()


@pytest.fixture
def directory() -> Iterator[Path]:
    """A directory in memory: hundreds of synced commits to a disk would take long."""
    with tempfile.TemporaryDirectory(prefix="persistkv-sqlite-", dir="/dev/shm") as name:
        yield Path(name)


class TestSqliteBackend(BackendConformance):
    driver = SqliteBackend

    @pytest.fixture
    def url(self, directory: Path) -> str:
        return f"sqlite://{directory}/kv.db?capacity=256MiB"

    @pytest.fixture
    def small_url(self, directory: Path) -> str:
        return f"sqlite://{directory}/small.db?capacity=4MiB"

    @pytest.fixture
    def raw(self, directory: Path) -> RawSqlite:
        return RawSqlite(directory / "kv.db")


def open_file(path: Path, options: str = "") -> SqliteBackend:
    return SqliteBackend.open(StoreUrl.parse(f"sqlite://{path}{options}"))


def test_open_file_without_store_raises_and_leaves_it_unchanged(tmp_path: Path) -> None:
    text, other, newer = (tmp_path / name for name in ("text", "other", "newer"))
    text.write_text("no database" * 1000)
    with closing(sqlite3.connect(other)) as db, db:
        db.execute("CREATE TABLE notes (text)")
    open_file(newer).close()
    with closing(sqlite3.connect(newer)) as db, db:
        db.execute(f"PRAGMA user_version = {VERSION + 1}")
    for path in (text, other, newer):
        before = path.read_bytes()
        with pytest.raises(CorruptStoreError, match=path.name):
            open_file(path)
        assert path.read_bytes() == before


def test_open_capacity_below_minimum_raises_and_creates_no_file(tmp_path: Path) -> None:
    with pytest.raises(ConfigurationError, match="1MiB or more"):
        open_file(tmp_path / "kv.db", "?capacity=5KiB")
    assert not list(tmp_path.iterdir())
