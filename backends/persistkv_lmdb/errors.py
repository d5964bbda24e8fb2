"""Translation of errors of LMDB and of the operating system into ``StoreError``, all in this file."""

from __future__ import annotations

import errno
import os
import resource
import struct
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import lmdb

from persistkv.errors import CorruptStoreError, StoreError, StoreFullError, StoreUnavailableError
from persistkv_lmdb.layout import DATA_FILE

_FULL = (lmdb.MapFullError, lmdb.DiskError, lmdb.TxnFullError)
_CORRUPT = (
    lmdb.CorruptedError,
    lmdb.PageNotFoundError,
    lmdb.InvalidError,
    lmdb.VersionMismatchError,
    lmdb.IncompatibleError,
    lmdb.NotFoundError,
)
_NO_ROW = (struct.error, OverflowError, SystemError, MemoryError)
"""Errors that Python raises for a row whose length, taken from a damaged page, is impossible."""
FULL_CODES = frozenset({errno.ENOSPC, errno.EDQUOT, errno.EFBIG})
_NEARLY_FULL = 64 << 20  # 64 MiB: a pack's raw bytes


@contextmanager
def translated(path: Path) -> Iterator[None]:
    """Translate LMDB's errors, and name the store; ``StoreError`` and errors of a pack's stream pass unchanged."""
    try:
        yield
    except lmdb.Error as error:
        raise _kind(error, path)(f"{path}: {_reason(error)}") from error
    except _NO_ROW as error:
        raise CorruptStoreError(f"{path}: a row does not read: {error}") from error


@contextmanager
def translated_at_open(path: Path) -> Iterator[None]:
    """Translate errors raised while a store is opened: errors other than damage become ``StoreUnavailableError``."""
    try:
        yield
    except lmdb.Error as error:
        kind = CorruptStoreError if isinstance(error, _CORRUPT) else StoreUnavailableError
        raise kind(f"{path}: {_reason(error)}") from error
    except OSError as error:
        raise StoreUnavailableError(f"{path}: {error.strerror or error}") from error


@contextmanager
def translated_io(path: Path) -> Iterator[None]:
    """Translate errors of the operating system on files other than LMDB's."""
    try:
        yield
    except OSError as error:
        kind = StoreFullError if error.errno in FULL_CODES else StoreError
        raise kind(f"{path}: {error.strerror or error}") from error


def met_the_maps_end(error: StoreFullError) -> bool:
    """Return whether LMDB found no page although the driver expected free ones: damage, or fragmented pages."""
    return isinstance(error.__cause__, lmdb.MapFullError)


def _kind(error: lmdb.Error, path: Path) -> type[StoreError]:
    if isinstance(error, _FULL) or error.code in FULL_CODES:
        return StoreFullError
    if error.code == errno.EIO and free_disk_bytes(path) < _NEARLY_FULL:  # reported for writes cut by a full disk
        return StoreFullError
    return CorruptStoreError if isinstance(error, _CORRUPT) else StoreError


def _reason(error: lmdb.Error) -> str:
    """Return LMDB's message, or py-lmdb's if py-lmdb raised the error."""
    return error.reason if error.code else str(error)


def free_disk_bytes(path: Path) -> int:
    """Return the bytes by which the store's file may grow: free disk space, within the process's file size limit."""
    longest, _ = resource.getrlimit(resource.RLIMIT_FSIZE)
    try:
        status = os.statvfs(path)
        free = status.f_bavail * status.f_frsize
        if longest != resource.RLIM_INFINITY:
            free = min(free, max(0, longest - (path / DATA_FILE).stat().st_size))
    except OSError:  # the file was moved away: unknown
        return _NEARLY_FULL
    return free
