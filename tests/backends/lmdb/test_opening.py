"""Files of a new store, and stores or directories that are refused."""

from __future__ import annotations

import errno
import os
import stat
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import lmdb
import pytest

from persistkv.errors import (
    ConfigurationError,
    CorruptStoreError,
    StoreUnavailableError,
)
from persistkv.storage.backend import CommitBatch
from persistkv.storage.identity import Identity
from persistkv.testing.samples import sample_pack
from tests import forked
from tests.backends.lmdb.conftest import Opener

AS_ORDINARY_USER = """
import os, sys
from persistkv.config import StoreUrl
from persistkv.errors import StoreUnavailableError
from persistkv_lmdb import LmdbBackend

if os.getuid() == 0:
    os.setgroups([])
    os.setgid(65534)
    os.setuid(65534)
try:
    LmdbBackend.open(StoreUrl.parse(sys.argv[1]), read_only=len(sys.argv) > 2)
except StoreUnavailableError as error:
    print(error)
"""

FILES = ("data.mdb", "guard", "lock.mdb", "writer.lock")


def mode(path: Path) -> int:
    return stat.S_IMODE(path.stat().st_mode)


def is_one_line(caught: pytest.ExceptionInfo[Exception]) -> bool:
    return "\n" not in str(caught.value)


def test_open_new_store_creates_private_files_and_directories(
    open_store: Opener,
    tmp_path: Path,
) -> None:
    old = os.umask(0)
    try:
        open_store(location=tmp_path / "made" / "here" / "store")
    finally:
        os.umask(old)
    store = tmp_path / "made" / "here" / "store"
    assert [
        mode(directory) for directory in (store.parent.parent, store.parent, store)
    ] == [0o700] * 3
    assert {entry.name: mode(entry) for entry in store.iterdir()} == dict.fromkeys(
        FILES, 0o600
    )


def test_open_relative_path_raises_with_suggested_absolute_url(
    open_store: Opener,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(
        ConfigurationError, match=f"lmdb:///rel/store .* lmdb://{tmp_path}/rel/store"
    ):
        open_store(location="rel/store")
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("read_only", [False, True])
def test_open_directory_with_other_files_raises_and_creates_nothing(
    open_store: Opener,
    path: Path,
    read_only: bool,
) -> None:
    path.mkdir()
    (path / "notes.txt").touch()
    with pytest.raises(
        StoreUnavailableError, match=r"other files \(notes.txt\) and no store"
    ) as caught:
        open_store(read_only=read_only)
    assert is_one_line(caught)
    assert [entry.name for entry in path.iterdir()] == ["notes.txt"]


def test_open_directory_with_lost_and_found_creates_store(
    open_store: Opener,
    path: Path,
) -> None:
    (path / "lost+found").mkdir(parents=True)
    open_store()
    assert (path / "data.mdb").exists()


def test_open_store_with_files_added_later_succeeds(
    open_store: Opener,
    path: Path,
) -> None:
    open_store().close()
    (path / "notes.txt").touch()
    open_store()


@pytest.mark.parametrize("read_only", [False, True])
def test_open_path_is_or_is_below_file_raises(
    open_store: Opener,
    path: Path,
    read_only: bool,
) -> None:
    path.write_text("mine")
    with pytest.raises(StoreUnavailableError, match="is a file") as caught:
        open_store(read_only=read_only)
    assert is_one_line(caught)
    with pytest.raises(StoreUnavailableError, match="Not a directory"):
        open_store(location=path / "below", read_only=read_only)
    assert path.read_text() == "mine"


@pytest.mark.parametrize("made", [False, True])
def test_open_read_only_without_store_raises_and_creates_nothing(
    open_store: Opener,
    path: Path,
    made: bool,
) -> None:
    if made:
        path.mkdir()
    with pytest.raises(StoreUnavailableError, match=r"No such file|no store"):
        open_store(read_only=True)
    assert path.exists() == made
    assert not made or not list(path.iterdir())


@pytest.fixture
def shared_directory() -> Iterator[Path]:
    """A directory that every user may enter, unlike pytest's own directories."""
    with tempfile.TemporaryDirectory() as name:
        Path(name).chmod(0o755)
        yield Path(name)


def open_as_ordinary_user(path: Path, *flags: str) -> str:
    """Open the store as an ordinary user and return the output. Root drops its privileges, as it
    passes every check."""
    command = [sys.executable, "-c", AS_ORDINARY_USER, f"lmdb://{path}", *flags]
    done = forked.run(command, capture_output=True, text=True, check=True)
    return str(done.stdout)


@pytest.mark.parametrize("flags", [[], ["read-only"]])
def test_open_store_of_other_user_raises_permission_denied(
    open_store: Opener,
    shared_directory: Path,
    flags: list[str],
) -> None:
    store = shared_directory / "store"
    open_store(location=store).close()
    if os.getuid():  # not root: remove the access of the current user
        store.chmod(0)
    assert open_as_ordinary_user(store, *flags) == f"{store}: Permission denied\n"


@pytest.mark.parametrize("flags", [[], ["read-only"]])
def test_open_store_with_unwritable_files_raises_permission_denied(
    open_store: Opener,
    shared_directory: Path,
    flags: list[str],
) -> None:
    store = shared_directory / "store"
    open_store(location=store).close()
    store.chmod(0o755)
    for entry in store.iterdir():
        entry.chmod(0o444)
    assert open_as_ordinary_user(store, *flags) == f"{store}: Permission denied\n"


def test_open_directory_cannot_be_created_raises_permission_denied(
    shared_directory: Path,
) -> None:
    if not os.getuid():
        assert (
            open_as_ordinary_user(shared_directory / "new")
            == f"{shared_directory}/new: Permission denied\n"
        )
    shared_directory.chmod(0o555)
    assert (
        open_as_ordinary_user(shared_directory / "new")
        == f"{shared_directory}/new: Permission denied\n"
    )
    assert not (shared_directory / "new").exists()


@pytest.mark.parametrize("read_only", [False, True])
@pytest.mark.parametrize("database", [None, b"meta", b"other"])
def test_open_foreign_environment_raises_and_leaves_it_unchanged(
    open_store: Opener,
    path: Path,
    database: bytes | None,
    read_only: bool,
) -> None:
    with lmdb.open(str(path), max_dbs=2) as env, env.begin(write=True) as txn:
        txn.put(
            b"key",
            b"value",
            db=None if database is None else env.open_db(database, txn=txn),
        )
    before = (path / "data.mdb").read_bytes()
    with pytest.raises(CorruptStoreError, match="something else") as caught:
        open_store(read_only=read_only)
    assert is_one_line(caught)
    assert (path / "data.mdb").read_bytes() == before


def test_open_foreign_row_named_meta_raises(open_store: Opener, path: Path) -> None:
    with lmdb.open(str(path)) as env, env.begin(write=True) as txn:
        txn.put(b"meta", b"value")
    with pytest.raises(CorruptStoreError, match="something else"):
        open_store()


@pytest.mark.parametrize("read_only", [False, True])
@pytest.mark.parametrize("content", [b"not LMDB" * 1000, b"x"])
def test_open_data_file_not_lmdb_raises_and_leaves_it_unchanged(
    open_store: Opener,
    path: Path,
    content: bytes,
    read_only: bool,
) -> None:
    path.mkdir()
    (path / "data.mdb").write_bytes(content)
    with pytest.raises((CorruptStoreError, StoreUnavailableError)) as caught:
        open_store(read_only=read_only)
    assert is_one_line(caught)
    assert str(path) in str(caught.value)
    assert (path / "data.mdb").read_bytes() == content


@pytest.mark.parametrize("read_only", [False, True])
def test_open_newer_format_raises_and_leaves_it_unchanged(
    open_store: Opener,
    path: Path,
    read_only: bool,
) -> None:
    open_store().close()
    with lmdb.open(str(path), max_dbs=32) as env, env.begin(write=True) as txn:
        meta = env.open_db(b"meta", txn=txn)
        row = txn.get(b"format", db=meta)
        assert row is not None
        txn.put(b"format", row[:8] + b"\x03\0\0\0", db=meta)
    before = (path / "data.mdb").read_bytes()
    with pytest.raises(CorruptStoreError, match="format is 3; this release reads 1"):
        open_store(read_only=read_only)
    assert (path / "data.mdb").read_bytes() == before


def test_open_interrupted_creation_completes_it(
    open_store: Opener,
    path: Path,
    identity: Identity,
) -> None:
    lmdb.open(str(path)).close()  # an environment without rows
    backend = open_store()
    namespace = backend.open_namespace(identity).id
    backend.commit(namespace, CommitBatch([sample_pack(namespace, 1)]))
    assert backend.stats().packs == 1


def test_open_new_store_full_disk_removes_data_file(
    open_store: Opener,
    path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def fill_the_disk(directory: Path, **_: object) -> None:
        (path / "data.mdb").write_bytes(bytes(4096))  # a new environment has two pages
        error = lmdb.DiskError("mdb_env_open")
        vars(error).update(code=errno.ENOSPC, reason=os.strerror(errno.ENOSPC))
        raise error

    with monkeypatch.context() as patch:
        patch.setattr(lmdb, "open", fill_the_disk)
        with pytest.raises(StoreUnavailableError, match="No space left"):
            open_store()
    assert not (path / "data.mdb").exists()
    assert list(open_store().namespaces()) == []


def test_changes_damaged_namespace_state_raises(
    open_store: Opener,
    path: Path,
    identity: Identity,
) -> None:
    backend = open_store()
    namespace = backend.open_namespace(identity).id
    backend.close()
    with lmdb.open(str(path), max_dbs=32) as env, env.begin(write=True) as txn:
        txn.put(namespace, b"short", db=env.open_db(b"states", txn=txn))
    backend = open_store()
    with pytest.raises(CorruptStoreError, match="state"):
        backend.changes(namespace, None)


@pytest.mark.parametrize(
    "row",
    [
        b"",
        bytes(8) + b'{"weights":"other"}',
        bytes(8) + b"\xff",
        bytes(8) + b'{"a":' + b"[" * 100_000,
    ],
)
def test_open_namespace_damaged_row_rewrites_it_and_keeps_packs(
    open_store: Opener,
    path: Path,
    identity: Identity,
    row: bytes,
) -> None:
    backend = open_store()
    namespace = backend.open_namespace(identity).id
    pack = sample_pack(namespace, 1)
    backend.commit(namespace, CommitBatch([pack]))
    backend.close()
    with lmdb.open(str(path), max_dbs=32) as env, env.begin(write=True) as txn:
        txn.put(namespace, row, db=env.open_db(b"namespaces", txn=txn))
    backend = open_store()
    assert list(backend.namespaces()) == []
    assert backend.open_namespace(identity).identity == identity
    assert list(backend.changes(namespace, None).added) == [pack.table]


def test_changes_table_under_other_pack_id_is_omitted(
    open_store: Opener,
    path: Path,
    identity: Identity,
) -> None:
    backend = open_store()
    namespace = backend.open_namespace(identity).id
    packs = [sample_pack(namespace, seed) for seed in range(2)]
    backend.commit(namespace, CommitBatch(packs))
    backend.close()
    with lmdb.open(str(path), max_dbs=32) as env, env.begin(write=True) as txn:
        rows = env.open_db(b"packs", txn=txn)
        row = txn.get(namespace + packs[1].pack_id, db=rows)
        assert row is not None
        txn.put(namespace + packs[0].pack_id, row, db=rows)
    assert list(open_store().changes(namespace, None).added) == [packs[1].table]
