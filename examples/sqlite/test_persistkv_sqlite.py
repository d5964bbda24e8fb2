"""The medium in a SQLite file against the conformance suite of media, and its own errors."""

from __future__ import annotations

import os
import signal
import sqlite3
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from persistkv.config import StoreUrl
from persistkv.errors import ConfigurationError
from persistkv.storage.blobs import (
    BlobMissingError,
    Blobs,
    RefusedError,
    UnavailableError,
)
from persistkv.testing import BlobsConformance
from persistkv.testing.conformance.blobs import RawBlobs
from persistkv_sqlite import SqliteBackend, SqliteBlobs


class RawSqlite(RawBlobs):
    """The rows of the file, without the code under test."""

    def __init__(self, path: Path) -> None:
        self.path = path
        SqliteBlobs(path).delete([])  # creates the file

    def get(self, name: str) -> bytes:
        ((data,),) = self._run("SELECT data FROM persistkv WHERE name = ?", name)
        assert isinstance(data, bytes)
        return data

    def put(self, name: str, data: bytes) -> None:
        self._run("REPLACE INTO persistkv VALUES (?, unixepoch(), ?)", name, data)

    def names(self) -> Sequence[str]:
        return [str(name) for (name,) in self._run("SELECT name FROM persistkv")]

    def _run(self, statement: str, *values: object) -> list[tuple[object]]:
        with closing(sqlite3.connect(self.path, timeout=60)) as db, db:
            db.execute("PRAGMA synchronous = OFF")
            return db.execute(statement, values).fetchall()


@pytest.fixture
def path() -> Iterator[Path]:
    """A file in memory: hundreds of synced commits to a disk would take long."""
    with tempfile.TemporaryDirectory(
        prefix="persistkv-sqlite-", dir="/dev/shm"
    ) as name:
        yield Path(name, "kv.db")


class TestSqliteBlobs(BlobsConformance):
    @pytest.fixture
    def opener(self, path: Path) -> Callable[[], Blobs]:
        return partial(SqliteBlobs, path)

    @pytest.fixture
    def raw(self, path: Path) -> RawSqlite:
        return RawSqlite(path)


@pytest.fixture
def blobs(path: Path) -> Iterator[SqliteBlobs]:
    with closing(SqliteBlobs(path)) as blobs:
        yield blobs


def read(blobs: Blobs, name: str) -> bytes:
    data = bytearray(100)
    return bytes(data[: blobs.read(name, 0, len(data), [memoryview(data)])])


def test_read_replaced_blob_gives_the_old_one_to_its_end(blobs: SqliteBlobs) -> None:
    blobs.put("a", [bytes(1 << 20)])

    def buffers() -> Iterator[memoryview]:
        yield memoryview(first)
        blobs.put("a", [b"new"])
        blobs.delete(["a"])
        yield memoryview(rest)

    first, rest = bytearray(1000), bytearray((1 << 20) - 1000)
    assert blobs.read("a", 0, 1 << 20, buffers()) == 1 << 20
    with pytest.raises(BlobMissingError):
        read(blobs, "a")


def test_put_while_another_process_writes_waits_and_fails_as_unavailable(
    path: Path,
) -> None:
    with (
        closing(SqliteBlobs(path, wait_s=0.2)) as blobs,
        closing(sqlite3.connect(path)) as other,
    ):
        blobs.put("a", [b"old"])
        other.execute("BEGIN IMMEDIATE")
        with pytest.raises(UnavailableError, match="database is locked"):
            blobs.put("a", [b"new"])
        assert read(blobs, "a") == b"old"
        other.rollback()
        blobs.put("a", [b"new"])
        assert read(blobs, "a") == b"new"


def test_put_to_full_file_is_refused_and_leaves_old_blob(
    blobs: SqliteBlobs,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    connect = sqlite3.connect

    def connect_to_full_file(*arguments: Any, **options: Any) -> sqlite3.Connection:
        db: sqlite3.Connection = connect(*arguments, **options)
        db.execute("PRAGMA max_page_count = 100")
        return db

    blobs.put("a", [b"old"])
    with monkeypatch.context() as patched:
        patched.setattr(sqlite3, "connect", connect_to_full_file)
        with pytest.raises(RefusedError, match="full"):
            blobs.put("a", [bytes(1 << 20)])
    assert read(blobs, "a") == b"old"


def test_read_only_handle_reads_and_refuses_writes(
    blobs: SqliteBlobs,
    path: Path,
) -> None:
    blobs.put("a", [b"data"])
    with closing(SqliteBlobs(path, read_only=True)) as reader:
        assert read(reader, "a") == b"data"
        with pytest.raises(RefusedError, match="readonly"):
            reader.put("a", [b"new"])
        with pytest.raises(RefusedError, match="readonly"):
            reader.delete(["a"])
        assert [info.name for info in reader.list("")] == ["a"]


@pytest.mark.parametrize("read_only", [False, True])
def test_missing_directory_is_refused_and_not_created(
    path: Path,
    read_only: bool,
) -> None:
    with (
        closing(
            SqliteBlobs(path.parent / "no" / "kv.db", read_only=read_only)
        ) as blobs,
        pytest.raises(RefusedError, match="unable to open"),
    ):
        list(blobs.list(""))
    assert list(path.parent.iterdir()) == []


def test_file_of_another_kind_is_refused_and_unchanged(path: Path) -> None:
    path.write_text("no database" * 1000)
    with (
        closing(SqliteBlobs(path)) as blobs,
        pytest.raises(RefusedError, match="not a database"),
    ):
        blobs.put("a", [b"data"])
    assert path.read_text() == "no database" * 1000


def test_first_calls_at_the_same_time_create_one_file(path: Path) -> None:
    for attempt in range(10):
        file = path.with_name(f"{attempt}.db")

        def list_and_put(number: int, file: Path = file) -> None:
            with closing(SqliteBlobs(file)) as blobs:
                list(blobs.list(""))
                blobs.put(f"{number}", [b"data"])

        with ThreadPoolExecutor(16) as threads:
            list(threads.map(list_and_put, range(16)))
        with closing(SqliteBlobs(file)) as blobs:
            assert len(list(blobs.list(""))) == 16


KILLED = """
import os, signal, sys
from pathlib import Path
from persistkv_sqlite import SqliteBlobs

blobs = SqliteBlobs(Path(sys.argv[1]))
for number in range(20):
    blobs.put(f"a/{number}", [bytes(100_000)])
os.kill(os.getpid(), signal.SIGKILL)
"""


def test_put_of_killed_process_remains(path: Path, blobs: SqliteBlobs) -> None:
    search = os.pathsep.join([str(Path(__file__).parent), *sys.path])
    command = [sys.executable, "-c", KILLED, str(path)]
    environment = {**os.environ, "PYTHONPATH": search}
    done = subprocess.run(command, env=environment, timeout=60, check=False)
    assert done.returncode == -signal.SIGKILL
    assert {info.size for info in blobs.list("a/")} == {100_000}
    assert len(list(blobs.list("a/"))) == 20


def test_backend_unknown_option_raises_and_creates_no_file(path: Path) -> None:
    with pytest.raises(ConfigurationError, match="size"):
        SqliteBackend.open(StoreUrl.parse(f"sqlite://{path}?size=1GiB"))
    assert not path.exists()
