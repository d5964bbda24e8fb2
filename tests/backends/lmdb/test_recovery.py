"""Identities and erasures, which a rebuild reads beside the segment files."""

from __future__ import annotations

import errno
import os
from pathlib import Path

import pytest

from persistkv.errors import StoreError
from persistkv_lmdb import recovery
from persistkv_lmdb.recovery import RecoveryFiles

ROW = b"content of the row"
GENERATION = bytes(8)


def name(number: int) -> bytes:
    return number.to_bytes(32, "big")


@pytest.fixture
def files(tmp_path: Path) -> RecoveryFiles:
    (tmp_path / "segments").mkdir()
    return RecoveryFiles(tmp_path)


def test_erasures_of_a_new_store_cover_nothing(files: RecoveryFiles) -> None:
    files.write_identity(bytes(16), ROW, GENERATION)
    found = files.erasures()
    assert found.last == 0
    assert not found.covers(name(1), 0)


def test_erasure_covers_only_packs_of_its_name_that_were_written_before(
    files: RecoveryFiles,
) -> None:
    files.record_erasure([name(1), name(2)], 1)
    files.record_erasure([name(1)], 2)
    found = files.erasures()
    assert found.last == 2
    assert found.covers(name(1), 1)
    assert not found.covers(name(1), 2)
    assert found.covers(name(2), 0)
    assert not found.covers(name(2), 1)
    assert not found.covers(name(3), 0)


def test_erase_after_a_part_of_a_record_continues(
    files: RecoveryFiles,
    tmp_path: Path,
) -> None:
    files.record_erasure([name(1)], 1)
    with (tmp_path / "segments" / "erased").open("ab") as file:
        file.write(b"part")
    files.record_erasure([name(2)], 2)
    found = files.erasures()
    assert found.covers(name(1), 0)
    assert found.covers(name(2), 1)


def test_erasures_with_an_impossible_number_are_skipped(
    files: RecoveryFiles,
    tmp_path: Path,
) -> None:
    files.record_erasure([name(1)], 1)
    with (tmp_path / "segments" / "erased").open("ab") as file:
        file.write(b"\xff" * 16)
    found = files.erasures()
    assert found.last == 1
    assert found.covers(name(1), 0)
    assert not found.covers(name(2), 0)


def test_erase_into_a_link_raises_and_leaves_its_target_unchanged(
    files: RecoveryFiles,
    tmp_path: Path,
) -> None:
    victim = tmp_path / "victim"
    victim.write_bytes(b"content " * 100)
    (tmp_path / "segments" / "erased").symlink_to(victim)
    with pytest.raises(StoreError, match="symbolic link"):
        files.record_erasure([name(1)], 1)
    files.write_identity(bytes(16), ROW, GENERATION)
    assert victim.read_bytes() == b"content " * 100


def test_erase_and_erasures_of_a_fifo_raise_at_once(
    files: RecoveryFiles,
    tmp_path: Path,
) -> None:
    os.mkfifo(tmp_path / "segments" / "erased")
    with pytest.raises(StoreError, match="no regular file"):
        files.record_erasure([name(1)], 1)
    files.write_identity(bytes(16), ROW, GENERATION)
    with pytest.raises(OSError, match="no regular file"):
        files.erasures()


def test_erase_beyond_the_limit_covers_all_older_packs(
    files: RecoveryFiles,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(recovery, "MOST_ERASED_BYTES", 10 * 16)
    for number in range(1, 29):
        files.record_erasure([name(number)], number)
        assert (tmp_path / "segments" / "erased").stat().st_size <= 10 * 16
    found = files.erasures()
    assert found.last == 28
    for number in range(1, 29):
        assert found.covers(name(number), number - 1)
    assert found.covers(name(1000), 10)
    assert not found.covers(name(1000), 27)


def test_erase_on_a_full_disk_covers_all_packs(
    files: RecoveryFiles,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    files.write_identity(bytes(16), ROW, GENERATION)
    write = os.pwrite

    def full(fd: int, content: bytes, offset: int) -> int:
        if offset >= 16:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return write(fd, content, offset)

    monkeypatch.setattr(os, "pwrite", full)
    files.record_erasure([name(1)], 5)
    found = files.erasures()
    assert found.covers(name(1), 4)
    assert found.covers(name(2), 4)
    assert not found.covers(name(2), 5)
    assert (tmp_path / "segments" / "erased").stat().st_size == 16


def test_erase_without_segments_does_nothing(tmp_path: Path) -> None:
    RecoveryFiles(tmp_path).record_erasure([name(1)], 1)
    assert list(tmp_path.iterdir()) == []


def test_describe_of_a_namespace_that_began_again_writes_its_identity(
    files: RecoveryFiles,
    tmp_path: Path,
) -> None:
    namespace = bytes(range(16))
    path = tmp_path / "segments" / f"{namespace.hex()}.identity"
    files.write_identity(namespace, ROW, GENERATION)
    assert path.read_bytes() == ROW
    files.delete_identities([namespace])
    assert not path.exists()
    files.write_identity(namespace, ROW, b"another ")
    assert path.read_bytes() == ROW
