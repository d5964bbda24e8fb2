"""Where a damaged store's files go: a directory within the store's own, so that a rename is enough and no disk fills
twice. One is kept, the newest."""

from __future__ import annotations

import shutil
import time
from contextlib import suppress
from pathlib import Path

from persistkv_lmdb.layout import DATA_FILE, LOCK_FILE
from persistkv_lmdb.syncs import sync_directory

PREFIX = "damaged-"
_FILES = ("segments", LOCK_FILE, DATA_FILE)


def move_aside(directory: Path) -> tuple[Path, int, list[str]]:
    """Move the files of an environment that nobody writes. It is gone for whoever opens the store from then on.

    ``data.mdb`` moves last: where this is interrupted, the rest of it is found damaged again.

    :returns: where they are now, the bytes that they take on disk, and the names of those of earlier times, which are
        deleted.
    :raises OSError: they cannot be moved.
    """
    earlier = sorted(entry.name for entry in directory.iterdir() if entry.name.startswith(PREFIX))
    target = _new_directory(directory)
    size = 0
    for name in _FILES:
        file = directory / name
        if file.exists():
            size += _size(file)
            file.rename(target / name)
    sync_directory(target)
    sync_directory(directory)
    for name in earlier:
        shutil.rmtree(directory / name, ignore_errors=True)
    return target, size, earlier


def found_aside(directory: Path) -> dict[Path, int]:
    """What was moved aside and is still there, each with the bytes that it takes on disk."""
    found = {}
    for entry in sorted(entry for entry in directory.glob(f"{PREFIX}*") if entry.is_dir()):
        with suppress(OSError):  # it is deleted just now
            found[entry] = _size(entry)
    return found


def _size(path: Path) -> int:
    return sum(512 * entry.stat().st_blocks for entry in (path, *path.rglob("*")))


def _new_directory(directory: Path) -> Path:
    stamp = time.strftime("%Y%m%dT%H%M%SZ", time.gmtime())
    for suffix in ("", *(f"-{number}" for number in range(2, 100))):
        target = directory / f"{PREFIX}{stamp}{suffix}"
        try:
            target.mkdir(0o700)
        except FileExistsError:
            continue
        return target
    raise FileExistsError(f"{directory / PREFIX}{stamp}")
