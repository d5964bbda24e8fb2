"""What engines show of themselves: a file for each in the store's directory, outside of LMDB.

A row costs no transaction and no sync this way; it is not kept beyond a crash of the machine, nor counted.
"""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from persistkv.errors import StoreError

DIRECTORY = "status"
_SUFFIX = ".json"
_FORGOTTEN_S = 86_400.0  # a day: killed engines leave their files
_MOST_BYTES = 64 << 10  # 64 KiB: more than that is no row


def write_status(store: Path, engine: str, row: bytes) -> None:
    """Readers see the old row or the new one, whole.

    :raises StoreError: it cannot be written.
    """
    directory = store / DIRECTORY
    target = directory / f"{engine}{_SUFFIX}"
    beside = directory / f"{engine}.new"
    with _translated(directory):
        if not target.exists():
            directory.mkdir(0o700, exist_ok=True)
            _forget_old(directory)
        descriptor = os.open(beside, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o600)
        with open(descriptor, "wb") as file:
            file.write(row)
        os.replace(beside, target)


def remove_status(store: Path, engine: str) -> None:
    """Idempotent.

    :raises StoreError: it cannot be removed.
    """
    directory = store / DIRECTORY
    with _translated(directory):
        (directory / f"{engine}{_SUFFIX}").unlink(missing_ok=True)


def read_statuses(store: Path) -> dict[str, bytes]:
    """The rows of all engines, by name.

    :raises StoreError: they cannot be read.
    """
    directory = store / DIRECTORY
    found: dict[str, bytes] = {}
    with _translated(directory):
        for path in directory.glob(f"*{_SUFFIX}"):
            with suppress(FileNotFoundError), path.open("rb") as file:
                found[path.stem] = file.read(_MOST_BYTES)
    return found


def _forget_old(directory: Path) -> None:
    for path in directory.iterdir():
        with suppress(FileNotFoundError):
            if path.stat().st_mtime < time.time() - _FORGOTTEN_S:
                path.unlink()


@contextmanager
def _translated(directory: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise StoreError(f"{directory}: {error.strerror or error}") from error
