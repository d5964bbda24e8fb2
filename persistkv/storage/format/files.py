"""Atomic replacement of whole files."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterable
from pathlib import Path


def replace_file(target: Path, pieces: Iterable[bytes | bytearray | memoryview]) -> None:
    """Replace a file atomically: readers see the whole old or the whole new content. Missing directories are created.

    Only the user can access the file (mode 0600). It is not synced: after a power loss it may have the old content, the
    new content, or be empty.

    :raises OSError: the file cannot be written; the old file is unchanged.
    """
    target.parent.mkdir(parents=True, exist_ok=True)
    descriptor, name = tempfile.mkstemp(dir=target.parent, prefix=".", suffix=".tmp")
    try:
        with os.fdopen(descriptor, "wb") as file:
            file.writelines(pieces)
        os.replace(name, target)
    except BaseException:
        os.unlink(name)
        raise
