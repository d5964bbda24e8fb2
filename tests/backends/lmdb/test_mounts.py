"""Stores on file systems that other hosts may write are refused. The table of mounts is
simulated."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from persistkv.errors import ConfigurationError
from persistkv.storage import mounts
from persistkv.storage.format.pack_writer import PackWriter
from persistkv.storage.identity import Identity
from persistkv.testing.conformance.suite import tables
from tests.backends.lmdb.conftest import Opener

OTHER = "22 27 0:21 / /proc rw,nosuid - proc proc rw"


def mount(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, kind: str) -> None:
    """Let the directory of the test be on a file system of this type."""
    device = tmp_path.stat().st_dev
    line = (
        f"36 27 {os.major(device)}:{os.minor(device)} / /mnt/kv rw,noatime shared:1 - "
        f"{kind} server:/export rw"
    )
    table = tmp_path / "mountinfo"
    table.write_text(f"{OTHER}\n{line}\n")
    monkeypatch.setattr(mounts, "MOUNTS", table)


@pytest.mark.parametrize(
    "kind", ["nfs4", "cifs", "9p", "lustre", "fuse.sshfs", "fuse.mount-s3", "ceph"]
)
def test_open_on_remote_file_system_is_refused_and_creates_nothing(
    open_store: Opener,
    path: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    kind: str,
) -> None:
    mount(monkeypatch, tmp_path, kind)
    for location in (path, path / "below" / "it"):
        with pytest.raises(
            ConfigurationError, match=rf"on {kind}, where LMDB's locks .*s3://"
        ) as refused:
            open_store(location=location)
        assert str(location) in str(refused.value)
    assert not path.exists()


@pytest.mark.parametrize(
    "kind",
    [
        "ext4",
        "xfs",
        "overlay",
        "tmpfs",
        "fuse.fuse-overlayfs",
        "virtiofs",
        "unheard-of",
    ],
)
def test_open_on_local_or_unknown_file_system_creates_store(
    open_store: Opener,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    kind: str,
) -> None:
    mount(monkeypatch, tmp_path, kind)
    open_store().open_namespace(Identity.of({"weights": "abc"}))


@pytest.mark.parametrize("content", ["", "nonsense\n\n - \n", None])
def test_open_without_readable_mounts_creates_store(
    open_store: Opener,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    content: str | None,
) -> None:
    table = tmp_path / "mountinfo"
    if content is not None:
        table.write_text(content)
    monkeypatch.setattr(mounts, "MOUNTS", table)
    open_store().open_namespace(Identity.of({"weights": "abc"}))


def test_open_on_remote_file_system_mounted_read_only_reads_store(
    open_store: Opener,
    closed_pack: PackWriter,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The read-only mount is simulated, too; ``test_read_only`` mounts one."""
    mount(monkeypatch, tmp_path, "nfs4")
    statvfs = os.statvfs

    def read_only(where: Path) -> os.statvfs_result:
        found = list(statvfs(where))
        found[8] |= os.ST_RDONLY
        return os.statvfs_result(found)

    monkeypatch.setattr(os, "statvfs", read_only)
    reader = open_store(read_only=True)
    assert set(tables(reader, closed_pack.namespace)) == {closed_pack.pack_id}
