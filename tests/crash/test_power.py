"""A short run with power losses (``make powerloss`` is a longer run), and tests of the simulated
disk."""

import random
import re
from pathlib import Path

import pytest

from tests.crash.disk import (
    ALLOCATE,
    CREATE,
    FAILED,
    MKDIR,
    PUNCH,
    RESIZE,
    SYNC,
    SYNCED_WRITE,
    WRITE,
    Disk,
    Record,
)
from tests.crash.running import run_module

FILE = Path("directory/file")
PAGE = 4096


@pytest.mark.slow
@pytest.mark.timeout(170)
@pytest.mark.usefixtures("recorder")
def test_power_losses_keep_acknowledged_packs() -> None:
    lines = run_module("power", "--cuts", 4, "--seed", 2, "--seconds", 75)
    assert [line.split(":")[0] for line in lines] == ["inline", "extents"]
    for line in lines:
        numbers = re.fullmatch(
            r"\w+: (\d+) power losses, (\d+) packs compared: 0 lost, 0 wrong", line
        )
        assert numbers is not None, line
        assert min(map(int, numbers.groups())) > 0, "no power loss or no pack"


def disk_of(*records: tuple[int, Path, int, int, bytes]) -> Disk:
    disk = Disk()
    for op, path, offset, length, data in [
        (MKDIR, FILE.parent, 0, 0, b""),
        (CREATE, FILE, 0, 0, b""),
        (SYNC, FILE.parent, 0, 0, b""),
        (SYNC, Path("."), 0, 0, b""),
        *records,
    ]:
        disk.replay(Record(op, path, offset, length, memoryview(data)))
    return disk


def contents_after_loss(disk: Disk, tmp_path: Path) -> set[bytes | None]:
    """Return the contents that the file may have after a power loss; None if the file is
    missing."""
    found: set[bytes | None] = set()
    for seed in range(200):
        disk.rebuild(tmp_path / str(seed), random.Random(seed))
        file = tmp_path / str(seed) / FILE
        found.add(file.read_bytes() if file.exists() else None)
    return found


def write(content: bytes, offset: int = 0) -> tuple[int, Path, int, int, bytes]:
    return WRITE, FILE, offset, len(content), content


SYNCED = (SYNC, FILE, 0, 0, b"")


def test_disk_synced_write_survives_power_loss(tmp_path: Path) -> None:
    assert contents_after_loss(disk_of(write(b"a" * PAGE), SYNCED), tmp_path) == {
        b"a" * PAGE
    }


def test_disk_synchronous_write_survives_but_pending_write_may_not(
    tmp_path: Path,
) -> None:
    disk = disk_of(
        write(b"a" * 2 * PAGE),
        SYNCED,
        write(b"b" * PAGE, PAGE),
        (SYNCED_WRITE, FILE, 0, PAGE, b"c" * PAGE),
    )
    found = contents_after_loss(disk, tmp_path)
    assert {content[:PAGE] for content in found if content} == {b"c" * PAGE}
    assert {b"a" * PAGE, b"b" * PAGE} < {
        content[PAGE:] for content in found if content
    }, "torn pages are also possible"


def test_disk_unsynced_writes_survive_in_any_combination(tmp_path: Path) -> None:
    disk = disk_of(
        (ALLOCATE, FILE, 0, 2 * PAGE, b""),
        SYNCED,
        write(b"a" * PAGE),
        write(b"b" * PAGE, PAGE),
    )
    found = contents_after_loss(disk, tmp_path)
    assert {
        bytes(2 * PAGE),
        b"a" * PAGE + bytes(PAGE),
        bytes(PAGE) + b"b" * PAGE,
    } <= found


def test_disk_unsynced_length_may_be_old_or_new(tmp_path: Path) -> None:
    found = contents_after_loss(
        disk_of(write(b"a" * PAGE), SYNCED, (RESIZE, FILE, 0, 0, b"")), tmp_path
    )
    assert {b"a" * PAGE, b""} <= found
    assert {len(content) for content in found if content is not None} == {0, PAGE}


def test_disk_punched_pages_may_be_zeros_or_old_and_end_at_file_length(
    tmp_path: Path,
) -> None:
    disk = disk_of(write(b"a" * 2 * PAGE), SYNCED, (PUNCH, FILE, PAGE, 4 * PAGE, b""))
    found = contents_after_loss(disk, tmp_path)
    assert {b"a" * 2 * PAGE, b"a" * PAGE + bytes(PAGE)} <= found
    assert {len(content) for content in found if content} == {2 * PAGE}


FAILED_SYNC = (FAILED, FILE, SYNC, 0, b"")


def test_disk_write_of_failed_sync_may_be_lost_after_later_sync(tmp_path: Path) -> None:
    old, new = b"a" * PAGE, b"b" * PAGE
    found = contents_after_loss(
        disk_of(write(old), SYNCED, write(new), FAILED_SYNC, SYNCED), tmp_path
    )
    assert {old, new} <= found


def test_disk_rewrite_after_failed_sync_survives_power_loss(tmp_path: Path) -> None:
    new = b"b" * PAGE
    disk = disk_of(
        write(b"a" * PAGE), SYNCED, write(new), FAILED_SYNC, write(new), SYNCED
    )
    assert contents_after_loss(disk, tmp_path) == {new}


def test_disk_new_file_may_be_missing_until_directory_sync(tmp_path: Path) -> None:
    disk = Disk()
    other = Path("file")
    for op, path in [(CREATE, other), (SYNC, other)]:
        disk.replay(Record(op, path, 0, 0, memoryview(b"")))
    for seed in range(50):
        disk.rebuild(tmp_path / str(seed), random.Random(seed))
    assert {(tmp_path / str(seed) / other).exists() for seed in range(50)} == {
        False,
        True,
    }
    disk.replay(Record(SYNC, Path("."), 0, 0, memoryview(b"")))
    for seed in range(50, 100):
        disk.rebuild(tmp_path / str(seed), random.Random(seed))
        assert (tmp_path / str(seed) / other).exists()
