"""Atomic replacement of whole files."""

from __future__ import annotations

import glob
import os
import tempfile
import time
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path

_LEFT_S = 3600.0


def replace_file(
    target: Path, pieces: Iterable[bytes | bytearray | memoryview]
) -> None:
    """Replace a file atomically: readers see the whole old or the whole new content. Missing
    directories are created.

    The file has mode 0600 and is not synced: after a power loss it may have the old content, the
    new content, or be empty. A process that is killed meanwhile leaves a file ``.NAME.*.tmp``,
    which a call after an hour deletes.

    :raises OSError: the file cannot be written; the old file is unchanged.
    """
    target.parent.mkdir(parents=True, exist_ok=True)
    for left in target.parent.glob(f".{glob.escape(target.name)}.*.tmp"):
        with suppress(FileNotFoundError):
            if time.time() - left.stat().st_mtime > _LEFT_S:
                left.unlink()
    descriptor, name = tempfile.mkstemp(
        dir=target.parent, prefix=f".{target.name}.", suffix=".tmp"
    )
    try:
        with os.fdopen(descriptor, "wb") as file:
            file.writelines(pieces)
        os.replace(name, target)
    except BaseException:
        os.unlink(name)
        raise
