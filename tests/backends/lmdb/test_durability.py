"""Durability of acknowledged content after a killed writer or a disk error."""

from __future__ import annotations

import errno
import mmap
import os
import signal
import struct
import sys
from collections.abc import Callable
from pathlib import Path
from typing import ParamSpec, TypeVar

import lmdb
import pytest

from persistkv.errors import StoreError, StoreFullError, StoreUnavailableError
from persistkv.storage.backend import CommitBatch
from persistkv.storage.identity import Identity
from persistkv.testing.conformance.suite import read_pack, tables
from persistkv.testing.samples import payload_of, sample_pack
from persistkv_lmdb import LmdbBackend, files
from persistkv_lmdb.repair.fsck import CheckResult, inspect
from tests import forked
from tests.backends.lmdb.conftest import IDENTITY, Opener

P = ParamSpec("P")
T = TypeVar("T")
KILLED_IN_COMMIT = """
import os, signal, sys
from persistkv.config import StoreUrl
from persistkv.storage.backend import CommitBatch
from persistkv.testing.samples import sample_pack
from persistkv_lmdb import LmdbBackend
from persistkv_lmdb.files import WriterLock
from tests.backends.lmdb.conftest import IDENTITY

backend = LmdbBackend.open(StoreUrl.parse(sys.argv[1]))
namespace = backend.open_namespace(IDENTITY).id
backend.commit(namespace, CommitBatch([sample_pack(namespace, 1)]))
mark_commit = WriterLock.mark_commit
WriterLock.mark_commit = lambda lock, begun: mark_commit(lock, begun=True) if begun else os.kill(os.getpid(), signal.SIGKILL)
backend.commit(namespace, CommitBatch([sample_pack(namespace, 2)]))
"""


def kill_writer_in_commit(path: Path) -> None:
    command = [sys.executable, "-c", KILLED_IN_COMMIT, f"lmdb://{path}"]
    assert forked.run(command).returncode == -signal.SIGKILL


@pytest.fixture
def synced(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Names of the calls that make content durable outside of LMDB's own commits."""
    kinds = []

    def recording(kind: str, sync: Callable[[Path], None]) -> Callable[[Path], None]:
        def recorded(path: Path) -> None:
            kinds.append(kind)
            sync(path)

        return recorded

    for kind in ("rewrite_meta_pages", "sync_directory"):
        monkeypatch.setattr(files, kind, recording(kind, getattr(files, kind)))
    return kinds


class Handle:
    """LMDB handle whose transactions fail to begin while ``panics`` is set."""

    def __init__(self, env: lmdb.Environment) -> None:
        self.env = env
        self.panics = False

    def __getattr__(self, name: str) -> object:
        return getattr(self.env, name)

    def begin(
        self,
        *,
        write: bool = False,
        buffers: bool = False,
    ) -> lmdb.Transaction[bytes] | lmdb.Transaction[memoryview]:
        if self.panics:
            raise lmdb.PanicError("mdb_txn_begin")
        if buffers:
            return self.env.begin(write=write, buffers=True)
        return self.env.begin(write=write)


@pytest.fixture
def handles(monkeypatch: pytest.MonkeyPatch) -> list[Handle]:
    """LMDB handles that are opened after this fixture."""
    found: list[Handle] = []

    def noting(opens: Callable[P, lmdb.Environment]) -> Callable[P, Handle]:
        def opened(*arguments: P.args, **options: P.kwargs) -> Handle:
            found.append(Handle(opens(*arguments, **options)))
            return found[-1]

        return opened

    monkeypatch.setattr(lmdb, "open", noting(lmdb.open))
    return found


def raise_eio(*_: object) -> None:
    raise OSError(errno.EIO, os.strerror(errno.EIO))


def test_commit_after_killed_writer_syncs_its_pages_once(
    backend: LmdbBackend,
    namespace: bytes,
    path: Path,
    synced: list[str],
) -> None:
    synced.clear()
    backend.commit(namespace, CommitBatch([sample_pack(namespace, 3)]))
    assert synced == [], "no writer was killed yet"
    kill_writer_in_commit(path)
    backend.commit(namespace, CommitBatch([sample_pack(namespace, 4)]))
    assert synced[0] == "rewrite_meta_pages"
    synced.clear()
    backend.commit(namespace, CommitBatch([sample_pack(namespace, 5)]))
    assert synced == [], "the pages were synced again"
    assert len(tables(backend, namespace)) == 5


def test_open_or_close_after_killed_writer_syncs_its_pages(
    open_store: Opener,
    backend: LmdbBackend,
    namespace: bytes,
    path: Path,
    synced: list[str],
) -> None:
    kill_writer_in_commit(path)
    code = "import sys; from persistkv.storage import open_backend; open_backend(sys.argv[1])"
    assert (path / "writer.lock").read_bytes() == b"+"
    # in a second process
    forked.run([sys.executable, "-c", code, f"lmdb://{path}"], check=True)
    assert (path / "writer.lock").read_bytes() == b"-"
    kill_writer_in_commit(path)
    synced.clear()
    backend.close()
    assert synced[0] == "rewrite_meta_pages"
    assert (path / "guard").read_text().split()[0] == "clean"
    assert len(tables(open_store(), namespace)) == 2


@pytest.fixture
def lossy_disk(monkeypatch: pytest.MonkeyPatch) -> tuple[list[bool], set[int]]:
    """Simulate a kernel that failed to write pages of ``data.mdb`` that a killed process left.

    Return the pending errors, one per failing fsync, and the numbers of the meta pages that are not
    durable. A lost page becomes durable only if it is rewritten before the next successful fsync.
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
                raise_eio()
            lost.difference_update(written)

    def write(fd: int, content: bytes, offset: int) -> int:
        done = pwrite(fd, content, offset)
        if os.readlink(f"/proc/self/fd/{fd}").endswith("data.mdb"):
            written.extend(
                range(offset // mmap.PAGESIZE, (offset + done) // mmap.PAGESIZE)
            )
        return done

    monkeypatch.setattr(os, "fsync", sync)
    monkeypatch.setattr(os, "pwrite", write)
    return errors, lost


def test_commit_failed_sync_after_killed_writer_rewrites_meta_pages(
    open_store: Opener,
    backend: LmdbBackend,
    namespace: bytes,
    path: Path,
    lossy_disk: tuple[list[bool], set[int]],
) -> None:
    """After EIO the kernel marks the lost pages as clean: a second fsync would succeed without
    writing them."""
    errors, lost = lossy_disk
    held = sample_pack(namespace, 3)
    backend.commit(namespace, CommitBatch([held]))
    kill_writer_in_commit(path)
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


def test_open_failing_sync_raises_unavailable_and_later_succeeds(
    open_store: Opener,
    backend: LmdbBackend,
    namespace: bytes,
    path: Path,
    lossy_disk: tuple[list[bool], set[int]],
) -> None:
    """The last writer was killed before its commit was durable. A failing disk is no reason to
    discard the store."""
    errors, lost = lossy_disk
    backend.close()
    kill_writer_in_commit(path)
    errors += [True] * 4
    for _ in range(4):  # repeated failures do not quarantine the store
        with pytest.raises(StoreUnavailableError, match="Input/output error"):
            open_store()
    assert lost == {0, 1}
    assert len(tables(open_store(), namespace)) == 2
    assert lost == set()
    assert not list(path.glob("damaged-*"))


def test_commit_panicked_handle_reopens_it_and_succeeds(
    handles: list[Handle],
    backend: LmdbBackend,
    namespace: bytes,
) -> None:
    handles[-1].panics = True
    backend.commit(namespace, CommitBatch([sample_pack(namespace, 1)]))
    assert backend.stats().packs == 1


def forge_meta_page(backend: LmdbBackend, handle: Handle, ahead: int = 1) -> int:
    """Write a meta page whose transaction is ``ahead`` of the last one in LMDB's lock file.

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
    assert handle.env.info()["last_txnid"] == number
    return number


@pytest.mark.parametrize("ahead", [1, 3])
def test_transaction_meta_page_ahead_of_lock_file_is_adopted(
    handles: list[Handle],
    backend: LmdbBackend,
    namespace: bytes,
    path: Path,
    ahead: int,
) -> None:
    """The meta page is in the file, and LMDB's lock file still names the transaction before it."""
    shared = backend.environment
    held = sample_pack(namespace, 1)
    backend.commit(namespace, CommitBatch([held]))
    number = forge_meta_page(backend, handles[-1], ahead)
    with shared.transaction(write=True) as transaction:
        assert transaction.txn.id() == number + 1
    backend.commit(namespace, CommitBatch([sample_pack(namespace, 2)]))
    assert inspect(path).result is CheckResult.FINE
    assert len(tables(backend, namespace)) == 2
    assert read_pack(backend, namespace, held.table) == payload_of(held)


@pytest.mark.parametrize("times", [1, 3])
def test_commit_disk_fails_before_newer_snapshot_is_durable_raises(
    handles: list[Handle],
    backend: LmdbBackend,
    namespace: bytes,
    path: Path,
    lossy_disk: tuple[list[bool], set[int]],
    times: int,
) -> None:
    """The disk fails ``times`` times. The kernel then marks the pages as clean, and LMDB would not
    write them again."""
    shared = backend.environment
    errors, lost = lossy_disk
    held = sample_pack(namespace, 1)
    backend.commit(namespace, CommitBatch([held]))
    number = forge_meta_page(backend, handles[-1])
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


@pytest.mark.parametrize("times", [1, 2, 5])
def test_read_panicked_handle_failed_reopen_is_retried_by_next_read(
    handles: list[Handle],
    backend: LmdbBackend,
    namespace: bytes,
    monkeypatch: pytest.MonkeyPatch,
    times: int,
) -> None:
    held = sample_pack(namespace, 1)
    backend.commit(namespace, CommitBatch([held]))
    handles[-1].panics = True
    left = [True] * times

    def failing(opens: Callable[P, T]) -> Callable[P, T]:
        def opened(*arguments: P.args, **options: P.kwargs) -> T:
            if left:
                left.pop()
                raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))
            return opens(*arguments, **options)

        return opened

    monkeypatch.setattr(lmdb, "open", failing(lmdb.open))
    while left:
        with pytest.raises(StoreError):
            read_pack(backend, namespace, held.table)
    assert read_pack(backend, namespace, held.table) == payload_of(held)
    backend.commit(namespace, CommitBatch([sample_pack(namespace, 2)]))
    assert len(tables(backend, namespace)) == 2


def test_read_panicked_handle_succeeds_without_sync(
    handles: list[Handle],
    backend: LmdbBackend,
    namespace: bytes,
    path: Path,
    lossy_disk: tuple[list[bool], set[int]],
) -> None:
    """LMDB's handle is unusable after its last write failed, and is reopened."""
    errors, _ = lossy_disk
    held = sample_pack(namespace, 1)
    backend.commit(namespace, CommitBatch([held]))
    (path / "writer.lock").write_bytes(b"+")
    handles[-1].panics = True
    errors.append(True)
    assert read_pack(backend, namespace, held.table) == payload_of(held)
    assert errors, "a read called fsync"


def test_commit_failed_payload_sync_raises_and_retry_rewrites_payload(
    backend: LmdbBackend,
    namespace: bytes,
    path: Path,
    placement: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    if placement == "inline":
        pytest.skip("LMDB syncs inline payloads itself")
    pack = sample_pack(namespace, 1)

    def lost(fd: int) -> None:
        size = os.fstat(fd).st_size
        os.pwrite(fd, bytes(size), 0)
        raise_eio()

    with monkeypatch.context() as patch:
        patch.setattr(os, "fdatasync", lost)
        with pytest.raises(StoreError, match="Input/output error"):
            backend.commit(namespace, CommitBatch([pack]))
    assert tables(backend, namespace) == {}
    backend.commit(namespace, CommitBatch([pack]))
    assert read_pack(backend, namespace, pack.table) == payload_of(pack)


def test_commit_failed_directory_sync_raises_and_next_commit_syncs_it(
    open_store: Opener,
    backend: LmdbBackend,
    namespace: bytes,
    path: Path,
    placement: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The fsync of the directory failed after the file was created."""
    if placement == "inline":
        pytest.skip("inline payloads have no segment files")
    failing = [True]
    synced = []
    fsync = os.fsync

    def once(fd: int) -> None:
        name = os.readlink(f"/proc/self/fd/{fd}")
        if name.endswith("segments") and failing:
            failing.clear()
            raise_eio()
        synced.append(name)
        fsync(fd)

    monkeypatch.setattr(os, "fsync", once)
    with pytest.raises(StoreError):
        backend.commit(namespace, CommitBatch([sample_pack(namespace, 1)]))
    assert list((path / "segments").iterdir())
    # the reopened store cannot tell whether the name was synced, like another process
    backend.close()
    again = open_store()
    again.open_namespace(IDENTITY)
    again.commit(namespace, CommitBatch([sample_pack(namespace, 1)]))
    assert str(path / "segments") in synced


def test_commit_failing_guard_write_succeeds(
    backend: LmdbBackend,
    namespace: bytes,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    pwrite, refused = os.pwrite, []

    def refuse(fd: int, content: bytes, offset: int) -> int:
        if os.readlink(f"/proc/self/fd/{fd}").endswith("/guard"):
            refused.append(content)
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return pwrite(fd, content, offset)

    monkeypatch.setattr(os, "pwrite", refuse)
    backend.commit(namespace, CommitBatch([sample_pack(namespace, 1)]))
    assert len(tables(backend, namespace)) == 1
    backend.close()
    assert refused


def test_open_new_store_failed_directory_sync_removes_created_files(
    open_store: Opener,
    path: Path,
    identity: Identity,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """LMDB's only handle of this process is closed, and files are removed whose names a power loss
    could remove."""
    fsync = os.fsync

    def fail_after_data_file(fd: int) -> None:
        if (
            os.readlink(f"/proc/self/fd/{fd}") == str(path)
            and (path / "data.mdb").exists()
        ):
            raise_eio()
        fsync(fd)

    with monkeypatch.context() as patch:
        patch.setattr(os, "fsync", fail_after_data_file)
        with pytest.raises(StoreUnavailableError, match="Input/output error") as caught:
            open_store()
    assert not (path / "data.mdb").exists()
    # while the error and the objects that it references are alive
    backend = open_store()
    assert caught.value.__traceback__ is not None
    namespace = backend.open_namespace(identity).id
    backend.commit(namespace, CommitBatch([sample_pack(namespace, 1)]))
    assert len(tables(backend, namespace)) == 1


def test_commit_full_disk_without_segment_directory_refuses_only_packs(
    open_store: Opener,
    path: Path,
    identity: Identity,
    placement: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    if placement == "inline":
        pytest.skip("an inline store has no segments")
    mkdir = os.mkdir

    def refuse(
        name: str | Path,
        mode: int = 0o777,
        *,
        dir_fd: int | None = None,
    ) -> None:
        if name == "segments":
            raise OSError(errno.EDQUOT, os.strerror(errno.EDQUOT))
        mkdir(name, mode, dir_fd=dir_fd)

    backend = open_store()
    namespace = backend.open_namespace(identity).id
    pack = sample_pack(namespace, 1)
    with monkeypatch.context() as patch:
        patch.setattr(os, "mkdir", refuse)
        with pytest.raises(StoreFullError):
            backend.commit(namespace, CommitBatch([pack]))
        backend.commit(namespace, CommitBatch(touches=[pack.pack_id]))
    backend.commit(namespace, CommitBatch(touches=[pack.pack_id]))
    backend.close()
    assert (path / "guard").read_text().split()[0] == "clean"
