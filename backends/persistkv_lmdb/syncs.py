"""Making durable what no transaction makes durable."""

from __future__ import annotations

import os
from pathlib import Path

from persistkv_lmdb.gathering import write_all


def sync_directory(path: Path) -> None:
    """Make durable which files are in a directory.

    :raises OSError: it cannot be read, or the disk failed.
    """
    fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


def write_again(path: Path, count: int) -> None:
    """Make durable what the first ``count`` bytes of a file read as, also where the disk failed to take them before.

    The kernel then holds them and takes them for written: a sync alone succeeds, and does nothing. Nobody else may be
    writing them.

    :raises OSError: they cannot be read or written, or the disk failed; what they read as is the same.
    """
    fd = os.open(path, os.O_RDWR | os.O_CLOEXEC)
    try:
        if held := os.pread(fd, count, 0):
            write_all(fd, [memoryview(held)], 0)
        os.fsync(fd)
    finally:
        os.close(fd)
