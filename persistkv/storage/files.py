"""Files that are replaced as a whole."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterable
from pathlib import Path

from persistkv.storage.codec import Buffer


def replace_file(target: Path, pieces: Iterable[Buffer]) -> None:
    """Write a file of the user's alone (0600), in directories that are made where they lack; readers see the old one or
    the new one, whole. Not synced: after a power loss it may be either, or empty.

    :raises OSError: it cannot be written; the old file is there as it was.
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
