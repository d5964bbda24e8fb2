"""What is promised is on the disk, also where the process that wrote it was killed before it was, or the disk fails."""

import errno
import os
import signal
import subprocess
import sys

import pytest

from persistkv.errors import StoreError, StoreUnavailableError
from persistkv.storage.backend import CommitBatch
from persistkv.testing.conformance.suite import read_pack, tables
from persistkv.testing.samples import payload_of, sample_pack
from persistkv_lmdb import guard, segments

DIES_IN_ITS_COMMIT = """
import os, signal, sys
from persistkv.config import StoreUrl
from persistkv.storage.backend import CommitBatch
from persistkv.testing.samples import sample_pack
from persistkv_lmdb import LmdbBackend

backend = LmdbBackend.open(StoreUrl.parse(sys.argv[1]))
namespace = bytes.fromhex(sys.argv[2])
backend.commit(namespace, CommitBatch([sample_pack(namespace, 1)]))
backend._environment._end_commit = lambda write: os.kill(os.getpid(), signal.SIGKILL)
backend.commit(namespace, CommitBatch([sample_pack(namespace, 2)]))
"""


def die_in_a_commit(path, namespace):
    command = [sys.executable, "-c", DIES_IN_ITS_COMMIT, f"lmdb://{path}", namespace.hex()]
    assert subprocess.run(command, check=False).returncode == -signal.SIGKILL


@pytest.fixture
def synced(monkeypatch):
    """Names of what is synced outside of LMDB's own commits."""
    names = []

    def noting(sync):
        def noted(path):
            names.append(path.name)
            sync(path)

        return noted

    for kind in ("sync_file", "sync_directory"):
        monkeypatch.setattr(guard, kind, noting(getattr(guard, kind)))
    return names


def fails(*_):
    raise OSError(errno.EIO, os.strerror(errno.EIO))


def test_what_a_killed_writer_left_is_synced_by_who_goes_on(backend, namespace, path, synced):
    synced.clear()
    backend.commit(namespace, CommitBatch([sample_pack(namespace, 3)]))
    assert synced == [], "nobody was killed"
    die_in_a_commit(path, namespace)
    backend.commit(namespace, CommitBatch([sample_pack(namespace, 4)]))
    assert synced[0] == "data.mdb"
    synced.clear()
    backend.commit(namespace, CommitBatch([sample_pack(namespace, 5)]))
    assert synced == [], "once is enough"
    assert len(tables(backend, namespace)) == 5


def test_what_a_killed_writer_left_is_synced_by_who_opens_or_closes(open_store, backend, namespace, path, synced):
    die_in_a_commit(path, namespace)
    code = "import sys; from persistkv.storage.registry import open_backend; open_backend(sys.argv[1])"
    assert (path / "writer.lock").read_bytes() == b"+"
    subprocess.run([sys.executable, "-c", code, f"lmdb://{path}"], check=True)  # beside us
    assert (path / "writer.lock").read_bytes() == b"-"
    die_in_a_commit(path, namespace)
    synced.clear()
    backend.close()
    assert synced[0] == "data.mdb"
    assert (path / "guard").read_text().split()[0] == "clean"
    assert len(tables(open_store(), namespace)) == 2


def test_what_the_disk_lost_is_not_asked_for_again(open_store, backend, namespace, path, monkeypatch, caplog):
    """After EIO the kernel forgets what it could not write: a second sync would succeed, and mean nothing."""
    held = sample_pack(namespace, 3)
    backend.commit(namespace, CommitBatch([held]))
    die_in_a_commit(path, namespace)
    with monkeypatch.context() as patch:
        patch.setattr(guard, "sync_file", fails)
        with pytest.raises(StoreError, match="Input/output error"):
            backend.commit(namespace, CommitBatch([sample_pack(namespace, 4)]))
    for _ in range(2):
        with pytest.raises(StoreError, match="the disk has lost"):
            backend.commit(namespace, CommitBatch([sample_pack(namespace, 4)]))
    assert read_pack(backend, namespace, held.table) == payload_of(held)
    backend.close()
    assert list(open_store().namespaces()) == []
    assert "the disk has lost" in caplog.text


def test_store_whose_last_commit_cannot_be_synced_is_moved_aside(open_store, backend, namespace, path, monkeypatch):
    backend.close()
    die_in_a_commit(path, namespace)
    monkeypatch.setattr(guard, "sync_file", fails)
    assert list(open_store().namespaces()) == []
    assert len(list(path.glob("damaged-*"))) == 1


def test_payload_whose_sync_failed_is_written_again(backend, namespace, path, placement, monkeypatch):
    if placement == "inline":
        pytest.skip("LMDB syncs its own")
    pack = sample_pack(namespace, 1)

    def lost(fd):
        size = os.fstat(fd).st_size
        os.pwrite(fd, bytes(size), 0)
        fails()

    with monkeypatch.context() as patch:
        patch.setattr(segments.os, "fdatasync", lost)
        with pytest.raises(StoreError, match="Input/output error"):
            backend.commit(namespace, CommitBatch([pack]))
    assert tables(backend, namespace) == {}
    backend.commit(namespace, CommitBatch([pack]))
    assert read_pack(backend, namespace, pack.table) == payload_of(pack)


def test_file_is_published_only_once_its_name_is_durable(backend, namespace, path, placement, monkeypatch):
    """Whoever made the file failed before that."""
    if placement == "inline":
        pytest.skip("there are no files")
    failing = [True]
    synced = []
    fsync = os.fsync

    def once(fd):
        name = os.readlink(f"/proc/self/fd/{fd}")
        if name.endswith("segments") and failing:
            failing.clear()
            fails()
        synced.append(name)
        fsync(fd)

    monkeypatch.setattr(segments.os, "fsync", once)
    with pytest.raises(StoreError):
        backend.commit(namespace, CommitBatch([sample_pack(namespace, 1)]))
    assert list((path / "segments").iterdir())
    backend._environment.files._unnamed = False  # as another process sees it
    backend.commit(namespace, CommitBatch([sample_pack(namespace, 1)]))
    assert str(path / "segments") in synced


def test_guard_that_cannot_be_written_costs_no_commit(backend, namespace, monkeypatch):
    full = OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    def refuses(*_):
        raise full

    monkeypatch.setattr(backend._environment._guard, "_write", refuses)
    backend.commit(namespace, CommitBatch([sample_pack(namespace, 1)]))
    assert len(tables(backend, namespace)) == 1
    backend.close()


def test_creation_whose_names_cannot_be_made_durable_is_undone(open_store, path, identity, monkeypatch):
    """All of it: LMDB refuses to open what this process has open still, and nobody syncs what is there already."""
    fsync = os.fsync

    def fails_behind(fd):
        if os.readlink(f"/proc/self/fd/{fd}") == str(path) and (path / "data.mdb").exists():
            fails()
        fsync(fd)

    with monkeypatch.context() as patch:
        patch.setattr(os, "fsync", fails_behind)
        with pytest.raises(StoreUnavailableError, match="Input/output error") as caught:
            open_store()
    assert not (path / "data.mdb").exists()
    backend = open_store()  # while that error, and all that it refers to, is there
    assert caught.value.__traceback__ is not None
    namespace = backend.open_namespace(identity).id
    backend.commit(namespace, CommitBatch([sample_pack(namespace, 1)]))
    assert len(tables(backend, namespace)) == 1
