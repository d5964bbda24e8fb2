"""Durability of acknowledged content after a killed writer or a disk error."""

from __future__ import annotations

import errno
import mmap
import os
import signal
import struct
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import lmdb
import pytest

from persistkv.errors import CorruptStoreError, StoreError, StoreFullError, StoreUnavailableError
from persistkv.storage.backend import CommitBatch
from persistkv.storage.identity import Identity
from persistkv.testing.conformance.suite import read_pack, tables
from persistkv.testing.samples import payload_of, sample_pack
from persistkv_lmdb import LmdbBackend, opening
from persistkv_lmdb.fsck import Verdict, inspect
from tests.backends.lmdb.conftest import Opener

DIES_IN_ITS_COMMIT = """
import os, signal, sys
from persistkv.config import StoreUrl
from persistkv.storage.backend import CommitBatch
from persistkv.testing.samples import sample_pack
from persistkv_lmdb import LmdbBackend
from persistkv_lmdb.files import WriterLock

backend = LmdbBackend.open(StoreUrl.parse(sys.argv[1]))
namespace = bytes.fromhex(sys.argv[2])
backend.commit(namespace, CommitBatch([sample_pack(namespace, 1)]))
mark = WriterLock.mark
WriterLock.mark = lambda lock, begun: mark(lock, begun=True) if begun else os.kill(os.getpid(), signal.SIGKILL)
backend.commit(namespace, CommitBatch([sample_pack(namespace, 2)]))
"""


def die_in_a_commit(path: Path, namespace: bytes) -> None:
    command = [sys.executable, "-c", DIES_IN_ITS_COMMIT, f"lmdb://{path}", namespace.hex()]
    assert subprocess.run(command, check=False).returncode == -signal.SIGKILL


@pytest.fixture
def synced(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Names of the calls that make content durable outside of LMDB's own commits."""
    kinds = []

    def noting(kind: str, sync: Callable[[Path], None]) -> Callable[[Path], None]:
        def noted(path: Path) -> None:
            kinds.append(kind)
            sync(path)

        return noted

    for kind in ("rewrite_meta_pages", "sync_directory"):
        monkeypatch.setattr(opening, kind, noting(kind, getattr(opening, kind)))
    return kinds


class Handle:
    """LMDB handle whose transactions fail to begin while ``panics`` is set."""

    def __init__(self, env: lmdb.Environment) -> None:
        self.env = env
        self.panics = False

    def __getattr__(self, name: str) -> Any:
        return getattr(self.env, name)

    def begin(self, **options: Any) -> Any:
        if self.panics:
            raise lmdb.PanicError("mdb_txn_begin")
        return self.env.begin(**options)


@pytest.fixture
def handles(monkeypatch: pytest.MonkeyPatch) -> list[Handle]:
    """LMDB handles that are opened after this fixture."""
    found, opens = [], lmdb.open

    def opened(*arguments: Any, **options: Any) -> Handle:
        found.append(Handle(opens(*arguments, **options)))
        return found[-1]

    monkeypatch.setattr(lmdb, "open", opened)
    return found


def fails(*_: object) -> None:
    raise OSError(errno.EIO, os.strerror(errno.EIO))


def test_what_a_killed_writer_left_is_synced_by_who_goes_on(
    backend: LmdbBackend, namespace: bytes, path: Path, synced: list[str]
) -> None:
    synced.clear()
    backend.commit(namespace, CommitBatch([sample_pack(namespace, 3)]))
    assert synced == [], "nobody was killed"
    die_in_a_commit(path, namespace)
    backend.commit(namespace, CommitBatch([sample_pack(namespace, 4)]))
    assert synced[0] == "rewrite_meta_pages"
    synced.clear()
    backend.commit(namespace, CommitBatch([sample_pack(namespace, 5)]))
    assert synced == [], "once is enough"
    assert len(tables(backend, namespace)) == 5


def test_what_a_killed_writer_left_is_synced_by_who_opens_or_closes(
    open_store: Opener, backend: LmdbBackend, namespace: bytes, path: Path, synced: list[str]
) -> None:
    die_in_a_commit(path, namespace)
    code = "import sys; from persistkv.storage import open_backend; open_backend(sys.argv[1])"
    assert (path / "writer.lock").read_bytes() == b"+"
    subprocess.run([sys.executable, "-c", code, f"lmdb://{path}"], check=True)  # in a second process
    assert (path / "writer.lock").read_bytes() == b"-"
    die_in_a_commit(path, namespace)
    synced.clear()
    backend.close()
    assert synced[0] == "rewrite_meta_pages"
    assert (path / "guard").read_text().split()[0] == "clean"
    assert len(tables(open_store(), namespace)) == 2


@pytest.fixture
def forgetful(monkeypatch: pytest.MonkeyPatch) -> tuple[list[bool], set[int]]:
    """Simulate a kernel that failed to write pages of ``data.mdb`` that a killed process left.

    Return the pending errors, one per failing fsync, and the numbers of the meta pages that are not durable. A lost
    page becomes durable only if it is rewritten before the next successful fsync.
    """
    errors: list[bool] = []
    written: list[int] = []
    lost = {0, 1}
    fsync, pwrite = os.fsync, os.pwrite

    def sync(fd: int) -> None:
        fsync(fd)
        if os.readlink(f"/proc/self/fd/{fd}").endswith("data.mdb"):
            if errors:
                errors.pop()
                written.clear()
                fails()
            lost.difference_update(written)

    def write(fd: int, content: bytes, offset: int) -> int:
        done = pwrite(fd, content, offset)
        if os.readlink(f"/proc/self/fd/{fd}").endswith("data.mdb"):
            written.extend(range(offset // mmap.PAGESIZE, (offset + done) // mmap.PAGESIZE))
        return done

    monkeypatch.setattr(os, "fsync", sync)
    monkeypatch.setattr(os, "pwrite", write)
    return errors, lost


def test_what_the_disk_lost_is_written_again(
    open_store: Opener, backend: LmdbBackend, namespace: bytes, path: Path, forgetful: tuple[list[bool], set[int]]
) -> None:
    """After EIO the kernel marks the lost pages as clean: a second fsync would succeed without writing them."""
    errors, lost = forgetful
    held = sample_pack(namespace, 3)
    backend.commit(namespace, CommitBatch([held]))
    die_in_a_commit(path, namespace)
    errors += [True, True]
    for _ in range(2):
        with pytest.raises(StoreError, match="Input/output error"):
            backend.commit(namespace, CommitBatch([sample_pack(namespace, 4)]))
        assert read_pack(backend, namespace, held.table) == payload_of(held)
    assert lost == {0, 1}
    backend.commit(namespace, CommitBatch([sample_pack(namespace, 4)]))
    assert lost == set()
    backend.close()
    assert len(tables(open_store(), namespace)) == 4
    assert not list(path.glob("damaged-*"))


def test_store_that_the_disk_does_not_take_is_kept_and_opens_later(
    open_store: Opener, backend: LmdbBackend, namespace: bytes, path: Path, forgetful: tuple[list[bool], set[int]]
) -> None:
    """The last writer was killed before its commit was durable. A failing disk is no reason to discard the store."""
    errors, lost = forgetful
    backend.close()
    die_in_a_commit(path, namespace)
    errors += [True] * 4
    for _ in range(4):  # repeated failures do not quarantine the store
        with pytest.raises(StoreUnavailableError, match="Input/output error"):
            open_store()
    assert lost == {0, 1}
    assert len(tables(open_store(), namespace)) == 2
    assert lost == set()
    assert not list(path.glob("damaged-*"))


def test_handle_recovers_from_a_failed_meta_page(handles: list[Handle], backend: LmdbBackend, namespace: bytes) -> None:
    handles[-1].panics = True
    backend.commit(namespace, CommitBatch([sample_pack(namespace, 1)]))
    assert backend.stats().packs == 1


def forge_a_commit(backend: LmdbBackend, handle: Handle, ahead: int = 1) -> int:
    """Write a meta page that LMDB's lock file does not know: the last transaction named there is the one before it.

    Return the transaction number of the page.
    """
    shared = backend.environment
    with shared.transaction() as transaction:
        number = transaction.txn.id() + ahead
    content = bytearray((shared.path / "data.mdb").read_bytes()[: 2 * mmap.PAGESIZE])
    known = content[(1 - number % 2) * mmap.PAGESIZE :][: mmap.PAGESIZE]
    struct.pack_into("=Q", known, 144, number)
    with (shared.path / "data.mdb").open("r+b") as file:
        file.seek(number % 2 * mmap.PAGESIZE + 8)
        file.write(known[8:])
    assert handle.info()["last_txnid"] == number
    return number


def test_commit_that_nobody_knows_of_is_taken_back(
    handles: list[Handle], backend: LmdbBackend, namespace: bytes, path: Path
) -> None:
    """The meta page is in the file, and LMDB's lock file still names the transaction before it."""
    shared = backend.environment
    held = sample_pack(namespace, 1)
    backend.commit(namespace, CommitBatch([held]))
    number = forge_a_commit(backend, handles[-1])
    with shared.transaction(write=True) as transaction:
        assert transaction.txn.id() == number
        assert handles[-1].info()["last_txnid"] == number - 1
    backend.commit(namespace, CommitBatch([sample_pack(namespace, 2)]))
    assert inspect(path).verdict is Verdict.FINE
    assert len(tables(backend, namespace)) == 2
    assert read_pack(backend, namespace, held.table) == payload_of(held)


@pytest.mark.parametrize("times", [1, 3])
def test_what_is_taken_back_is_durable_before_anything_is_written(
    handles: list[Handle],
    backend: LmdbBackend,
    namespace: bytes,
    path: Path,
    forgetful: tuple[list[bool], set[int]],
    times: int,
) -> None:
    """The disk fails ``times`` times. The kernel then marks the pages as clean, and LMDB would not write them again."""
    shared = backend.environment
    errors, lost = forgetful
    held = sample_pack(namespace, 1)
    backend.commit(namespace, CommitBatch([held]))
    number = forge_a_commit(backend, handles[-1])
    lost.clear()
    lost.add(number % 2)
    errors += [True] * times
    for _ in range(times):
        with pytest.raises(StoreError, match="Input/output error"):
            backend.commit(namespace, CommitBatch([sample_pack(namespace, 2)]))
    assert lost == {number % 2}
    with shared.transaction(write=True):
        assert lost == set()
    backend.commit(namespace, CommitBatch([sample_pack(namespace, 2)]))
    assert len(tables(backend, namespace)) == 2
    assert read_pack(backend, namespace, held.table) == payload_of(held)


def test_a_full_disk_does_not_evict_for_what_is_taken_back(
    handles: list[Handle], backend: LmdbBackend, namespace: bytes, monkeypatch: pytest.MonkeyPatch
) -> None:
    backend.commit(namespace, CommitBatch([sample_pack(namespace, 1)]))
    forge_a_commit(backend, handles[-1])

    def is_full(*_: object) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with monkeypatch.context() as patch:
        patch.setattr("persistkv_lmdb.files.disown", is_full)
        with pytest.raises(StoreError) as caught:
            backend.commit(namespace, CommitBatch([sample_pack(namespace, 2)]))
    assert not isinstance(caught.value, StoreFullError)
    assert len(tables(backend, namespace)) == 1


def test_pages_of_other_transactions_are_not_taken_back(
    handles: list[Handle], backend: LmdbBackend, namespace: bytes, path: Path
) -> None:
    backend.commit(namespace, CommitBatch([sample_pack(namespace, 1)]))
    forge_a_commit(backend, handles[-1], ahead=3)
    before = (path / "data.mdb").read_bytes()[: 2 * mmap.PAGESIZE]
    with pytest.raises(CorruptStoreError, match="does not begin with"):
        backend.commit(namespace, CommitBatch([sample_pack(namespace, 2)]))
    assert (path / "data.mdb").read_bytes()[: 2 * mmap.PAGESIZE] == before


@pytest.mark.parametrize("times", [1, 2, 5])
def test_handle_that_cannot_be_opened_again_is_tried_again(
    handles: list[Handle], backend: LmdbBackend, namespace: bytes, monkeypatch: pytest.MonkeyPatch, times: int
) -> None:
    held = sample_pack(namespace, 1)
    backend.commit(namespace, CommitBatch([held]))
    handles[-1].panics = True
    left = [True] * times

    def failing(*arguments: Any, **options: Any) -> Any:
        if left:
            left.pop()
            raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))
        return opens(*arguments, **options)

    opens = lmdb.open
    monkeypatch.setattr(lmdb, "open", failing)
    while left:
        with pytest.raises(StoreError):
            read_pack(backend, namespace, held.table)
    assert read_pack(backend, namespace, held.table) == payload_of(held)
    backend.commit(namespace, CommitBatch([sample_pack(namespace, 2)]))
    assert len(tables(backend, namespace)) == 2


def test_handle_reads_while_what_it_failed_to_commit_cannot_be_made_durable(
    handles: list[Handle], backend: LmdbBackend, namespace: bytes, path: Path, forgetful: tuple[list[bool], set[int]]
) -> None:
    """LMDB's handle is unusable after its last write failed, and is reopened."""
    errors, _ = forgetful
    held = sample_pack(namespace, 1)
    backend.commit(namespace, CommitBatch([held]))
    (path / "writer.lock").write_bytes(b"+")
    handles[-1].panics = True
    errors.append(True)
    assert read_pack(backend, namespace, held.table) == payload_of(held)
    assert errors, "a read asks nothing of the disk that it does not need"


def test_payload_whose_sync_failed_is_written_again(
    backend: LmdbBackend, namespace: bytes, path: Path, placement: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    if placement == "inline":
        pytest.skip("LMDB syncs its own")
    pack = sample_pack(namespace, 1)

    def lost(fd: int) -> None:
        size = os.fstat(fd).st_size
        os.pwrite(fd, bytes(size), 0)
        fails()

    with monkeypatch.context() as patch:
        patch.setattr(os, "fdatasync", lost)
        with pytest.raises(StoreError, match="Input/output error"):
            backend.commit(namespace, CommitBatch([pack]))
    assert tables(backend, namespace) == {}
    backend.commit(namespace, CommitBatch([pack]))
    assert read_pack(backend, namespace, pack.table) == payload_of(pack)


def test_file_is_published_only_once_its_name_is_durable(
    open_store: Opener,
    backend: LmdbBackend,
    namespace: bytes,
    path: Path,
    placement: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The fsync of the directory failed after the file was created."""
    if placement == "inline":
        pytest.skip("there are no files")
    failing = [True]
    synced = []
    fsync = os.fsync

    def once(fd: int) -> None:
        name = os.readlink(f"/proc/self/fd/{fd}")
        if name.endswith("segments") and failing:
            failing.clear()
            fails()
        synced.append(name)
        fsync(fd)

    monkeypatch.setattr(os, "fsync", once)
    with pytest.raises(StoreError):
        backend.commit(namespace, CommitBatch([sample_pack(namespace, 1)]))
    assert list((path / "segments").iterdir())
    backend.close()  # the reopened store knows as little about the file as another process
    open_store().commit(namespace, CommitBatch([sample_pack(namespace, 1)]))
    assert str(path / "segments") in synced


def test_guard_that_cannot_be_written_costs_no_commit(
    backend: LmdbBackend, namespace: bytes, monkeypatch: pytest.MonkeyPatch
) -> None:
    pwrite, refused = os.pwrite, []

    def refuses(fd: int, content: bytes, offset: int) -> int:
        if os.readlink(f"/proc/self/fd/{fd}").endswith("/guard"):
            refused.append(content)
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return pwrite(fd, content, offset)

    monkeypatch.setattr(os, "pwrite", refuses)
    backend.commit(namespace, CommitBatch([sample_pack(namespace, 1)]))
    assert len(tables(backend, namespace)) == 1
    backend.close()
    assert refused


def test_creation_whose_names_cannot_be_made_durable_is_undone(
    open_store: Opener, path: Path, identity: Identity, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nothing stays open, because LMDB allows one handle per process, and no files remain whose names may be lost."""
    fsync = os.fsync

    def fails_behind(fd: int) -> None:
        if os.readlink(f"/proc/self/fd/{fd}") == str(path) and (path / "data.mdb").exists():
            fails()
        fsync(fd)

    with monkeypatch.context() as patch:
        patch.setattr(os, "fsync", fails_behind)
        with pytest.raises(StoreUnavailableError, match="Input/output error") as caught:
            open_store()
    assert not (path / "data.mdb").exists()
    backend = open_store()  # while the error and the objects that it references are alive
    assert caught.value.__traceback__ is not None
    namespace = backend.open_namespace(identity).id
    backend.commit(namespace, CommitBatch([sample_pack(namespace, 1)]))
    assert len(tables(backend, namespace)) == 1
