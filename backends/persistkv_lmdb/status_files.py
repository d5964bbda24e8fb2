"""Published status of engines: one file per engine in the store's directory, outside of LMDB.

Publishing a status needs no transaction and no sync. A status may be lost in a machine crash, and does not count
towards the capacity.
"""

from __future__ import annotations

import os
import time
from contextlib import suppress
from pathlib import Path

from persistkv.storage.format.files import replace_file
from persistkv_lmdb.environment.errors import translated_io
from persistkv_lmdb.files import open_regular

DIRECTORY = "status"
_SUFFIX = ".json"
_FORGOTTEN_S = 86_400.0  # one day: killed engines leave their files
_MOST_BYTES = 64 << 10  # 64 KiB: longer files are truncated when read


def write_status(store: Path, engine: str, row: bytes) -> None:
    """Replace the status of an engine; readers see the complete old or new row.

    :raises StoreError: it cannot be written.
    """
    directory = store / DIRECTORY
    target = directory / f"{engine}{_SUFFIX}"
    with translated_io(directory):
        if not target.exists():
            directory.mkdir(0o700, exist_ok=True)
            _forget_old(directory)
        replace_file(target, [row])


def remove_status(store: Path, engine: str) -> None:
    """Remove the status of an engine. Idempotent.

    :raises StoreError: it cannot be removed.
    """
    directory = store / DIRECTORY
    with translated_io(directory):
        (directory / f"{engine}{_SUFFIX}").unlink(missing_ok=True)


def read_statuses(store: Path) -> dict[str, bytes]:
    """Return the status rows of all engines, by engine name.

    :raises StoreError: they cannot be read.
    """
    directory = store / DIRECTORY
    found: dict[str, bytes] = {}
    with translated_io(directory):
        for path in directory.glob(f"*{_SUFFIX}"):
            try:
                descriptor = open_regular(path, os.O_RDONLY)
            except OSError:  # removed meanwhile, or a link or FIFO, which engines never create
                continue
            with os.fdopen(descriptor, "rb") as file:
                found[path.stem] = file.read(_MOST_BYTES)
    return found


def _forget_old(directory: Path) -> None:
    for path in directory.iterdir():
        with suppress(FileNotFoundError):
            if path.stat().st_mtime < time.time() - _FORGOTTEN_S:
                path.unlink()
