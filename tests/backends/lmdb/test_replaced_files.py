"""Files of a store that a user removes or replaces while engines have it open: they continue with
those at the path.

An acknowledged commit is in the store that a later opening finds, and no engine harms the store of
another one.
"""

from __future__ import annotations

import os
import shutil
import signal
import sys
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from persistkv.errors import StoreError
from persistkv.storage.backend import CommitBatch
from persistkv.testing.conformance.suite import check_totals, read_pack, tables
from persistkv.testing.samples import payload_of, sample_pack
from persistkv_lmdb import LmdbBackend, files
from persistkv_lmdb.files import WriterLock
from tests import forked
from tests.backends.lmdb.conftest import IDENTITY, Opener
from tests.backends.lmdb.consistency import find_faults
from tests.backends.lmdb.test_two_processes import OtherProcess, commit, other, start

__all__ = ["other", "start"]  # fixtures

Start = Callable[..., OtherProcess]


def empty(directory: Path) -> None:
    for entry in directory.iterdir():
        if entry.is_dir():
            shutil.rmtree(entry)
        else:
            entry.unlink()


def check_holds(backend: LmdbBackend, namespace: bytes, seeds: list[int]) -> None:
    """Check that the store has these packs with the right bytes, and no fault."""
    found = tables(backend, namespace)
    for seed in seeds:
        pack = sample_pack(namespace, seed)
        assert pack.pack_id in found, f"pack {seed} was lost"
        assert read_pack(backend, namespace, found[pack.pack_id]) == payload_of(pack)
    assert find_faults(backend) == []
    check_totals(backend)


def check_reopened(
    open_store: Opener,
    path: Path,
    namespace: bytes,
    seeds: list[int],
) -> None:
    """Check what a new process finds at the path."""
    command = [sys.executable, "-m", "persistkv_tools", "verify", f"lmdb://{path}"]
    verified = forked.run(command, capture_output=True, text=True)
    assert verified.returncode == 0, verified.stdout + verified.stderr
    backend = open_store()
    check_holds(backend, namespace, seeds)
    assert not list(path.glob("damaged-*"))


@pytest.mark.parametrize("how", ["emptied", "removed", "moved"])
def test_commit_directory_emptied_and_used_by_new_engine_keeps_its_blocks(
    open_store: Opener,
    path: Path,
    backend: LmdbBackend,
    namespace: bytes,
    start: Start,
    how: str,
) -> None:
    for seed in range(4):
        commit(backend, namespace, seed)
    if how == "emptied":
        empty(path)
    elif how == "removed":
        shutil.rmtree(path)
    else:
        path.rename(path.with_name("elsewhere"))
    new = start()
    assert new.receive() == "open"
    held = [10, *range(20, 30)]
    commit(backend, namespace, held[0])
    for seed in held[1:]:
        assert new.request(f"commit {seed}") == "committed"
    commit(backend, namespace, 11)
    assert new.request("read 11") == "right"
    assert new.request("commit 31") == "committed"
    check_holds(backend, namespace, [*held, 11, 31])
    assert sample_pack(namespace, 0).pack_id not in tables(backend, namespace)
    backend.close()
    new.process.kill()
    new.process.wait()
    check_reopened(open_store, path, namespace, [*held, 11, 31])


def test_commit_store_replaced_during_wait_recovers_in_no_other_store(
    open_store: Opener,
    path: Path,
    backend: LmdbBackend,
    namespace: bytes,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The commit waits for a writer whose own commit is interrupted. A recovery would write to the
    meta pages of the store that is at the path by then, without its lock."""
    commit(backend, namespace, 0)
    replacement = tmp_path / "replacement"
    open_store(location=replacement).close()
    recovered: list[Path] = []
    monkeypatch.setattr(files, "rewrite_meta_pages", recovered.append)

    writer = WriterLock(path)
    with ThreadPoolExecutor(1) as pool:
        with writer.held():
            writer.mark_commit(begun=True)
            waiting = pool.submit(commit, backend, namespace, 1)
            time.sleep(0.5)  # for the commit to wait
            path.rename(tmp_path / "elsewhere")
            replacement.rename(path)
        waiting.result(timeout=30)
    writer.close()

    assert recovered == []
    check_holds(backend, namespace, [1])


def test_commit_after_new_engine_filled_emptied_directory_truncates_nothing(
    open_store: Opener,
    path: Path,
    backend: LmdbBackend,
    namespace: bytes,
) -> None:
    for seed in range(2):
        commit(backend, namespace, seed)
    empty(path)
    code = """
import sys
from persistkv.config import StoreUrl
from persistkv.storage.backend import CommitBatch
from persistkv.testing.samples import sample_pack
from persistkv_lmdb import LmdbBackend
from tests.backends.lmdb.conftest import IDENTITY
backend = LmdbBackend.open(StoreUrl.parse(sys.argv[1]))
namespace = backend.open_namespace(IDENTITY).id
for seed in range(20, 60):
    backend.commit(namespace, CommitBatch([sample_pack(namespace, seed, blocks=9, block_bytes=1 << 14)]))
backend.close()
"""
    forked.run([sys.executable, "-c", code, f"lmdb://{path}"], check=True)
    commit(backend, namespace, 1)
    found = tables(backend, namespace)
    for seed in range(20, 60):
        pack = sample_pack(namespace, seed, blocks=9, block_bytes=1 << 14)
        assert read_pack(backend, namespace, found[pack.pack_id]) == payload_of(pack)
    backend.close()
    check_reopened(open_store, path, namespace, [1])


def test_read_emptied_directory_is_miss_and_changes_are_reset(
    path: Path,
    backend: LmdbBackend,
    namespace: bytes,
) -> None:
    old = commit(backend, namespace, 1)
    cursor = backend.changes(namespace, None).cursor
    empty(path)
    changes = backend.changes(namespace, cursor)
    assert changes.reset
    assert list(changes.added) == []
    assert read_pack(backend, namespace, old) is None


def test_commit_seen_position_of_replaced_store_is_stale(
    path: Path,
    backend: LmdbBackend,
    namespace: bytes,
) -> None:
    commit(backend, namespace, 1)
    cursor = backend.changes(namespace, None).cursor
    empty(path)
    result = backend.commit(
        namespace, CommitBatch([sample_pack(namespace, 2)], seen=cursor)
    )
    assert result.stale
    assert tables(backend, namespace) == {}


@pytest.mark.parametrize(
    "name", ["lock.mdb", "writer.lock", "guard", "segments", "data.mdb"]
)
def test_commit_file_removed_under_two_engines_loses_no_commit(
    open_store: Opener,
    path: Path,
    backend: LmdbBackend,
    namespace: bytes,
    other: OtherProcess,
    name: str,
) -> None:
    commit(backend, namespace, 1)
    assert other.request("commit 2") == "committed"
    target = path / name
    if target.is_dir():
        shutil.rmtree(target)
    else:
        target.unlink(missing_ok=True)
    committed = []
    for seed in range(10, 20, 2):
        assert other.request(f"commit {seed}") == "committed"
        commit(backend, namespace, seed + 1)
        committed += [seed, seed + 1]
    if name not in ("segments", "data.mdb"):
        committed += [1, 2]
    for seed in committed:
        assert other.request(f"read {seed}") == "right"
    check_holds(backend, namespace, committed)
    backend.close()
    other.process.kill()
    other.process.wait()
    if name != "segments":
        check_reopened(open_store, path, namespace, committed)
    else:
        check_holds(open_store(), namespace, committed)


def test_commit_lock_file_removed_and_new_engine_used_it_keeps_all_commits(
    open_store: Opener,
    path: Path,
    backend: LmdbBackend,
    namespace: bytes,
    start: Start,
) -> None:
    commit(backend, namespace, 1)
    (path / "lock.mdb").unlink()
    new = start()
    assert new.receive() == "open"
    for seed in range(2, 8):
        assert new.request(f"commit {seed}") == "committed"
    commit(backend, namespace, 8)
    assert new.request("commit 9") == "committed"
    commit(backend, namespace, 10)
    new.process.kill()
    new.process.wait()
    check_holds(backend, namespace, list(range(1, 11)))
    backend.close()
    check_reopened(open_store, path, namespace, list(range(1, 11)))


@pytest.mark.parametrize(
    "how", ["emptied", "data.mdb", "lock.mdb", "segments", "moved"]
)
def test_commit_files_removed_during_transaction_is_found_later_if_acknowledged(
    open_store: Opener,
    path: Path,
    backend: LmdbBackend,
    namespace: bytes,
    other: OtherProcess,
    how: str,
) -> None:
    commit(backend, namespace, 1)
    other.stop_in_transaction(2)
    if how == "emptied":
        empty(path)
    elif how == "moved":
        path.rename(path.with_name("elsewhere"))
    elif how == "segments":
        shutil.rmtree(path / how, ignore_errors=True)
    else:
        (path / how).unlink()
    os.kill(other.pid, signal.SIGCONT)
    answer = other.receive()
    while answer == "inside":  # the attempt in the store at the path stops, too
        os.waitpid(other.pid, os.WUNTRACED)
        os.kill(other.pid, signal.SIGCONT)
        answer = other.receive()
    other.process.kill()
    other.process.wait()
    assert answer == "committed"
    check_holds(backend, namespace, [2])
    commit(backend, namespace, 3)
    check_holds(backend, namespace, [2, 3])
    backend.close()
    check_holds(open_store(), namespace, [2, 3])


def test_commit_other_store_moved_to_path_joins_it(
    open_store: Opener,
    path: Path,
    tmp_path: Path,
    backend: LmdbBackend,
    namespace: bytes,
) -> None:
    another = open_store(location=tmp_path / "another")
    another.open_namespace(IDENTITY)
    for seed in range(20, 30):
        commit(another, namespace, seed)
    another.close()
    for seed in range(3):
        commit(backend, namespace, seed)
    empty(path)
    for entry in (tmp_path / "another").iterdir():
        entry.rename(path / entry.name)
    commit(backend, namespace, 5)
    backend.close()
    check_reopened(open_store, path, namespace, [5, *range(20, 30)])


def test_transaction_directory_replaced_by_other_files_raises_and_leaves_them(
    path: Path,
    backend: LmdbBackend,
    namespace: bytes,
) -> None:
    commit(backend, namespace, 1)
    empty(path)
    (path / "notes.txt").write_text("mine")
    for _ in range(2):
        with pytest.raises(StoreError, match=r"other files \(notes.txt\)"):
            commit(backend, namespace, 2)
        with pytest.raises(StoreError, match=r"other files \(notes.txt\)"):
            tables(backend, namespace)
    assert [entry.name for entry in path.iterdir()] == ["notes.txt"]
    (path / "notes.txt").unlink()
    commit(backend, namespace, 3)
    check_holds(backend, namespace, [3])


def test_commit_segment_removed_and_created_again_after_writing_writes_again(
    path: Path,
    backend: LmdbBackend,
    namespace: bytes,
    other: OtherProcess,
    placement: str,
) -> None:
    """The other process has written its payload and not committed it, when another one notices the
    removal."""
    if placement == "inline":
        pytest.skip("inline payloads have no segment files")
    commit(backend, namespace, 1)
    other.stop("stop-written 2")
    (path / "segments" / "00000000.seg").unlink()
    commit(backend, namespace, 3)
    assert (path / "segments" / "00000000.seg").exists()
    os.kill(other.pid, signal.SIGCONT)
    assert other.receive() == "committed"
    check_holds(backend, namespace, [2, 3])


def test_commit_segment_file_removed_is_not_written(
    open_store: Opener,
    path: Path,
    backend: LmdbBackend,
    namespace: bytes,
    placement: str,
) -> None:
    if placement == "inline":
        pytest.skip("inline payloads have no segment files")
    commit(backend, namespace, 1)
    (path / "segments" / "00000000.seg").unlink()
    commit(backend, namespace, 2)
    backend.close()
    check_holds(open_store(), namespace, [2])
