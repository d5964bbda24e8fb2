"""Atomic replacement of whole files."""

from __future__ import annotations

import glob
import os
import tempfile
import time
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path

_LEFTOVER_S = 3600.0  # 1 h: age of a temporary file that no process writes any more


def replace_file(
    target: Path,
    pieces: Iterable[bytes | bytearray | memoryview],
) -> None:
    """Replace a file atomically: readers see the whole old or the whole new content. Missing
    directories are created.

    The file has mode 0600 and is not synced: after a power loss it may have the old content, the
    new content, or be empty. A process that is killed meanwhile leaves a file ``.NAME.*.tmp``,
    which a call after an hour deletes.

    :raises OSError: the file cannot be written; the old file is unchanged.
    """
    directory = target.parent
    directory.mkdir(parents=True, exist_ok=True)
    _delete_leftovers(target)
    # create the temporary file in the same directory, because a rename between file systems is not
    # atomic
    descriptor, name = tempfile.mkstemp(
        dir=directory, prefix=f".{target.name}.", suffix=".tmp"
    )
    try:
        with os.fdopen(descriptor, "wb") as file:
            file.writelines(pieces)
        os.replace(name, target)
    except BaseException:
        os.unlink(name)
        raise


def _delete_leftovers(target: Path) -> None:
    """Delete the temporary files that killed processes have left beside a file, because nothing
    else deletes them."""
    name = glob.escape(target.name)
    for leftover in target.parent.glob(f".{name}.*.tmp"):
        # another process may remove the file at the same time
        with suppress(FileNotFoundError):
            age_s = time.time() - leftover.stat().st_mtime
            if age_s > _LEFTOVER_S:
                leftover.unlink()
