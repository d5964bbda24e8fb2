"""What ``persistkv doctor`` finds about a shared directory."""

from __future__ import annotations

import errno
import os
from pathlib import Path

import pytest

from persistkv.config import StoreUrl
from persistkv.storage import mounts
from persistkv.storage.checks import Check, Level
from persistkv_dir import DirBackend


def examine(root: Path, options: str = "") -> dict[str, Check]:
    url = StoreUrl.parse(f"file://{root}{options}")
    return {check.check: check for check in DirBackend.check_medium(url)}


@pytest.fixture
def root(tmp_path: Path) -> Path:
    root = tmp_path / "kv"
    root.mkdir(0o700)
    return root


def mount(monkeypatch: pytest.MonkeyPatch, path: Path, kind: str) -> None:
    """Let a directory be on a file system of this type."""
    device = path.stat().st_dev
    table = path / "mountinfo"
    table.write_text(
        f"36 27 {os.major(device)}:{os.minor(device)} / /mnt rw - {kind} server:/export rw\n"
    )
    monkeypatch.setattr(mounts, "MOUNTS", table)


def test_check_intact_directory_is_ok_and_leaves_nothing(root: Path) -> None:
    found = examine(root)
    assert {
        "list",
        "missing object",
        "put",
        "read",
        "delete",
        "medium's clock",
        "directory",
    } <= found.keys()
    assert {check.level for name, check in found.items() if name != "file system"} == {
        Level.OK
    }
    assert list(root.iterdir()) == []


def test_check_absent_directory_is_not_created(tmp_path: Path) -> None:
    found = examine(tmp_path / "absent" / "kv")
    assert (found["directory"].level, "creates it" in found["directory"].todo) == (
        Level.NOTE,
        True,
    )
    assert "put" not in found
    assert list(tmp_path.iterdir()) == []


def test_check_read_only_writes_nothing(root: Path) -> None:
    found = examine(root, "?read_only=yes")
    assert found["list"].level is Level.OK
    assert "put" not in found


@pytest.mark.parametrize(
    ("kind", "level", "part"),
    [
        ("nfs4", Level.OK, "other hosts can mount it"),
        ("lustre", Level.OK, "other hosts can mount it"),
        ("fuse.ceph-fuse", Level.OK, "other hosts can mount it"),
        ("xfs", Level.NOTE, "only this host"),
        ("virtiofs", Level.NOTE, "not known"),
    ],
)
def test_check_file_system_says_whether_other_hosts_can_see_it(
    root: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    kind: str,
    level: Level,
    part: str,
) -> None:
    mount(monkeypatch, tmp_path, kind)
    found = examine(root)["file system"]
    assert found.level is level
    assert kind in found.found
    assert part in found.found


def test_check_mount_point_is_warning() -> None:
    found = examine(Path("/dev/shm"), "?read_only=yes")["mount point"]
    assert (found.level, found.todo) == (
        Level.WARNING,
        "name a directory in it, such as /dev/shm/kv",
    )


def test_check_directory_that_others_can_write_is_warning(root: Path) -> None:
    root.chmod(0o777)
    found = examine(root)["directory"]
    assert (found.level, "mode 0777" in found.found, found.todo) == (
        Level.WARNING,
        True,
        f"chmod go-w {root}",
    )


def test_check_directory_of_another_user_is_warning(root: Path) -> None:
    if os.geteuid():
        pytest.skip("only root can give a directory away")
    os.chown(root, 12345, -1)
    found = examine(root)["directory"]
    assert (found.level, "12345" in found.found) == (Level.WARNING, True)


def test_check_file_in_place_of_directory_is_problem(tmp_path: Path) -> None:
    file = tmp_path / "kv"
    file.write_bytes(b"")
    found = examine(file)
    assert (found["directory"].level, "list" in found) == (Level.PROBLEM, False)


def test_check_file_system_without_fsync_of_directories_is_problem(
    root: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """As some FUSE file systems. The failure is simulated."""
    fsync = os.fsync

    def refuse_directories(descriptor: int) -> None:
        if os.path.isdir(f"/proc/self/fd/{descriptor}"):
            raise OSError(errno.EINVAL, "Invalid argument")
        fsync(descriptor)

    monkeypatch.setattr(os, "fsync", refuse_directories)
    found = examine(root)["put"]
    assert found.level is Level.PROBLEM
    assert "EINVAL" in found.found
    assert found.todo
    assert list(root.iterdir()) == []
