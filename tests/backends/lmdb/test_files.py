"""A directory prepared by another user: links and FIFOs in it are never followed, and never
block."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import pytest

from persistkv.errors import StoreError, StoreUnavailableError
from persistkv.storage.backend import CommitBatch
from persistkv.storage.format.pack_writer import PackWriter
from persistkv.storage.identity import Identity
from persistkv.testing.conformance.suite import tables
from persistkv.testing.samples import sample_pack
from tests import forked
from tests.backends.lmdb.conftest import Opener

NOBODY = 65534


@pytest.fixture
def placement() -> str:
    return "extents"


@pytest.fixture
def victim(tmp_path: Path) -> Iterator[Path]:
    """A file outside of the store that must not change."""
    found = tmp_path / "victim"
    found.write_bytes(b"precious" * 1000)
    yield found
    assert found.read_bytes() == b"precious" * 1000


def link(path: Path, target: Path) -> None:
    if path.is_dir():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)
    path.parent.mkdir(parents=True, exist_ok=True)
    path.symlink_to(target)


@pytest.mark.parametrize("read_only", [False, True])
@pytest.mark.parametrize("name", ["data.mdb", "lock.mdb", "guard", "writer.lock"])
def test_open_linked_file_is_refused(
    open_store: Opener,
    path: Path,
    closed_pack: PackWriter,
    victim: Path,
    name: str,
    read_only: bool,
) -> None:
    link(path / name, victim)
    with pytest.raises(StoreUnavailableError, match=f"{name} is a symbolic link"):
        open_store(read_only=read_only)


@pytest.mark.parametrize("name", ["segments", "status"])
def test_open_linked_directory_is_refused(
    open_store: Opener,
    path: Path,
    closed_pack: PackWriter,
    tmp_path: Path,
    name: str,
) -> None:
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    link(path / name, elsewhere)
    with pytest.raises(StoreUnavailableError, match=f"{name} is a symbolic link"):
        open_store()
    assert list(elsewhere.iterdir()) == []


def test_commit_linked_segment_raises_and_leaves_target_unchanged(
    open_store: Opener,
    path: Path,
    identity: Identity,
    victim: Path,
) -> None:
    link(path / "segments" / "00000000.seg", victim)
    backend = open_store()
    namespace = backend.open_namespace(identity).id
    with pytest.raises(StoreError, match="is a symbolic link"):
        backend.commit(namespace, CommitBatch([sample_pack(namespace, 1)]))


@pytest.mark.parametrize("name", ["data.mdb", "guard", "writer.lock"])
def test_open_fifo_is_refused_at_once(
    open_store: Opener,
    path: Path,
    closed_pack: PackWriter,
    name: str,
) -> None:
    (path / name).unlink()
    os.mkfifo(path / name)
    with pytest.raises(StoreUnavailableError, match=f"{name} is no regular file"):
        open_store()


def test_statuses_fifo_is_skipped(
    open_store: Opener,
    path: Path,
    closed_pack: PackWriter,
) -> None:
    backend = open_store()
    backend.publish_status("engine", b"row")
    os.mkfifo(path / "status" / "pipe.json")
    (path / "status" / "linked.json").symlink_to("/etc/passwd")
    found = []
    reader = threading.Thread(
        target=lambda: found.append(backend.statuses()), daemon=True
    )
    reader.start()
    reader.join(20)
    assert found == [{"engine": b"row"}]


@pytest.mark.skipif(
    os.geteuid() != 0, reason="only root can give files to another user"
)
def test_open_directory_of_other_user_is_refused_for_writing(
    open_store: Opener,
    path: Path,
    closed_pack: PackWriter,
) -> None:
    os.chown(path, NOBODY, NOBODY)
    with pytest.raises(StoreUnavailableError, match=f"belongs to user {NOBODY}"):
        open_store()
    assert len(tables(open_store(read_only=True), closed_pack.namespace)) == 1


@pytest.mark.parametrize(
    "command",
    [["stat"], ["verify"], ["top", "--count", "1"]],
    ids=lambda command: command[0],
)
def test_command_fifo_in_status_directory_does_not_block(
    path: Path,
    closed_pack: PackWriter,
    command: list[str],
) -> None:
    (path / "status").mkdir(exist_ok=True)
    os.mkfifo(path / "status" / "pipe.json")
    name, *options = command
    started = [
        sys.executable,
        "-m",
        "persistkv_tools",
        name,
        f"lmdb://{path}",
        *options,
    ]
    with forked.Popen(
        started, stdout=subprocess.PIPE, stderr=subprocess.PIPE
    ) as process:
        try:
            process.communicate(timeout=60)
        except subprocess.TimeoutExpired:
            with suppress(ProcessLookupError):
                process.send_signal(signal.SIGKILL)
            pytest.fail("a FIFO blocked the command")
    assert process.returncode == 0
