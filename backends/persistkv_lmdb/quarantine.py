"""Directories of damaged environments. They are renamed within the store's own directory, so no disk needs a copy.

They are kept until an explicit command deletes them, and do not count towards the capacity.
"""

from __future__ import annotations

import shutil
import time
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

from persistkv_lmdb.errors import translated_io
from persistkv_lmdb.files import sync_directory
from persistkv_lmdb.layout import DATA_FILE, LOCK_FILE

PREFIX = "damaged-"
_FILES = ("segments", LOCK_FILE, DATA_FILE)


class Quarantined(NamedTuple):
    """One damaged environment."""

    directory: Path
    num_bytes: int
    """Bytes on disk."""


def quarantine(store: Path) -> Quarantined:
    """Rename the files of an environment that no process writes. The store's directory then holds no environment.

    ``data.mdb`` is renamed last: after an interruption, the integrity check fails again and renames the rest.

    :raises OSError: the files cannot be renamed.
    """
    target = _new_directory(store)
    size = 0
    for name in _FILES:
        file = store / name
        if file.exists():
            size += _size(file)
            file.rename(target / name)
    sync_directory(target)
    sync_directory(store)
    return Quarantined(target, size)


def quarantined(store: Path) -> list[Quarantined]:
    """The damaged environments of a store, oldest first."""
    found = []
    for entry in sorted(store.glob(f"{PREFIX}*")):
        if entry.is_dir() and not entry.is_symlink():
            with suppress(OSError):  # another process is deleting it
                found.append(Quarantined(entry, _size(entry)))
    return found


def delete_quarantined(store: Path) -> list[Quarantined]:
    """Delete the damaged environments of a store; return those that were deleted.

    :raises StoreError: one cannot be deleted; those before it have been deleted.
    """
    found = quarantined(store)
    for entry in found:
        with translated_io(entry.directory):
            shutil.rmtree(entry.directory)
    return found


def _size(path: Path) -> int:
    return sum(512 * entry.lstat().st_blocks for entry in (path, *path.rglob("*")))


def _new_directory(store: Path) -> Path:
    stamp = time.strftime("%Y%m%dT%H%M%SZ", time.gmtime())
    for suffix in ("", *(f"-{number}" for number in range(2, 100))):
        target = store / f"{PREFIX}{stamp}{suffix}"
        try:
            target.mkdir(0o700)
        except FileExistsError:
            continue
        return target
    raise FileExistsError(f"{store / PREFIX}{stamp}")
