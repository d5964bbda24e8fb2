"""Making durable what no transaction makes durable."""

from __future__ import annotations

import os
from pathlib import Path


def sync_directory(path: Path) -> None:
    """Make durable which files are in a directory.

    :raises OSError: it cannot be read, or the disk failed.
    """
    sync_file(path)


def sync_file(path: Path) -> None:
    """Make durable what a file holds, whoever wrote it.

    :raises OSError: it cannot be read, or the disk failed.
    """
    fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)
