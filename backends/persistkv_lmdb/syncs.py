"""Making durable what no transaction makes durable."""

from __future__ import annotations

import os
from pathlib import Path

from persistkv_lmdb.segments.vectored_io import write_all


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
    with path.open("rb") as file:
        held = file.read(count)
    write_durably(path, held, 0)


def write_durably(path: Path, content: bytes, offset: int) -> None:
    """Write part of a file, and make it durable. Nobody else may be writing it.

    :raises OSError: the disk failed; some of it may be written.
    """
    fd = os.open(path, os.O_RDWR | os.O_CLOEXEC)
    try:
        if content:
            write_all(fd, [memoryview(content)], offset)
        os.fsync(fd)
    finally:
        os.close(fd)
