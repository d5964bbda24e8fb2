"""The boundary: what LMDB and the operating system raise becomes a ``StoreError`` here and nowhere else."""

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
"""What Python makes of a row whose length, as a damaged page tells it, cannot be."""
FULL_CODES = frozenset({errno.ENOSPC, errno.EDQUOT, errno.EFBIG})
_NEARLY_FULL = 64 << 20  # 64 MiB: a pack's raw bytes


@contextmanager
def translated(path: Path) -> Iterator[None]:
    """Raise LMDB's errors as ours, naming the store; our own and those of a pack's stream pass."""
    try:
        yield
    except lmdb.Error as error:
        raise _kind(error, path)(f"{path}: {_reason(error)}") from error
    except _NO_ROW as error:
        raise CorruptStoreError(f"{path}: a row does not read: {error}") from error


@contextmanager
def translated_at_open(path: Path) -> Iterator[None]:
    """The same for what goes wrong before a store is open: whatever is not damage makes it unavailable."""
    try:
        yield
    except lmdb.Error as error:
        kind = CorruptStoreError if isinstance(error, _CORRUPT) else StoreUnavailableError
        raise kind(f"{path}: {_reason(error)}") from error
    except OSError as error:
        raise StoreUnavailableError(f"{path}: {error.strerror or error}") from error


@contextmanager
def translated_io(path: Path) -> Iterator[None]:
    """Raise what the operating system says of files beside LMDB's as ours."""
    try:
        yield
    except OSError as error:
        kind = StoreFullError if error.errno in FULL_CODES else StoreError
        raise kind(f"{path}: {error.strerror or error}") from error


def met_the_maps_end(error: StoreFullError) -> bool:
    """Whether LMDB found no page where the driver had counted on some: damage, or pages that lie too scattered."""
    return isinstance(error.__cause__, lmdb.MapFullError)


def _kind(error: lmdb.Error, path: Path) -> type[StoreError]:
    if isinstance(error, _FULL) or error.code in FULL_CODES:
        return StoreFullError
    if error.code == errno.EIO and free_disk_bytes(path) < _NEARLY_FULL:  # what LMDB calls a write that a full disk cut
        return StoreFullError
    return CorruptStoreError if isinstance(error, _CORRUPT) else StoreError


def _reason(error: lmdb.Error) -> str:
    """LMDB's words, or py-lmdb's where it is the one who objects."""
    return error.reason if error.code else str(error)


def free_disk_bytes(path: Path) -> int:
    """What the store's file may grow by: what the file system has, and the process's limit of file sizes."""
    longest, _ = resource.getrlimit(resource.RLIMIT_FSIZE)
    try:
        status = os.statvfs(path)
        free = status.f_bavail * status.f_frsize
        if longest != resource.RLIM_INFINITY:
            free = min(free, max(0, longest - (path / DATA_FILE).stat().st_size))
    except OSError:  # moved away: nothing to tell by
        return _NEARLY_FULL
    return free
