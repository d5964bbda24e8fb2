"""Options in the URL of a shared store."""

from __future__ import annotations

import logging
import os
from pathlib import Path

import pytest

from persistkv.errors import ConfigurationError
from persistkv.storage import mounts, open_backend
from persistkv.storage.identity import Identity


@pytest.mark.parametrize("place", ["s3://bucket/p", "file:///mnt/kv"])
def test_open_mistyped_option_raises_and_names_options_of_every_store(
    place: str,
) -> None:
    with pytest.raises(
        ConfigurationError,
        match=r"option capcity.* one of .*capacity, .*refresh, .*ttl",
    ):
        open_backend(f"{place}?capcity=1GiB")


def mount(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, kind: str) -> None:
    """Let the file system of the tests be of this type."""
    device = tmp_path.stat().st_dev
    table = tmp_path / "mountinfo"
    table.write_text(
        f"36 27 {os.major(device)}:{os.minor(device)} / /home rw - {kind} server:/export rw\n"
    )
    monkeypatch.setattr(mounts, "MOUNTS", table)


@pytest.mark.parametrize("option", ["", "?cache={home}/given"])
def test_open_cache_on_network_file_system_uses_temporary_directory_and_logs_it_once(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    option: str,
) -> None:
    mount(monkeypatch, tmp_path, "nfs4")
    home = tmp_path / "home"
    monkeypatch.setenv("XDG_CACHE_HOME", str(home))
    with caplog.at_level(logging.WARNING, "persistkv"):
        backend = open_backend(f"file://{tmp_path}/store{option.format(home=home)}")
        for number in range(2):
            backend.open_namespace(Identity.of({"number": number}))
        backend.close()
    assert not home.exists()
    (line,) = [
        record.getMessage()
        for record in caplog.records
        if "nfs4" in record.getMessage()
    ]
    assert str(home) in line
    assert "cache=" in line


def test_open_cache_on_local_file_system_keeps_replica_there(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    mount(monkeypatch, tmp_path, "ext4")
    home = tmp_path / "home"
    monkeypatch.setenv("XDG_CACHE_HOME", str(home))
    backend = open_backend(f"file://{tmp_path}/store")
    backend.open_namespace(Identity.of({}))
    backend.close()
    assert list(home.rglob("data.mdb"))
