"""Cache of weight file hashes: one small JSON file per weight file, under the user's cache directory.

An entry is valid only while path, device, inode, size, mtime and ctime are unchanged. If the cache cannot be read or
written, weights are hashed again.
"""

from __future__ import annotations

import hashlib
import os
import time
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import msgspec

from persistkv.storage.files import replace_file

CACHE_VERSION = 1
_SETTLED_NS = 2_000_000_000  # 2 s: a more recently changed file may change again without a new time stamp


class TensorEntry(NamedTuple):
    """One tensor's contribution to a fingerprint."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    digest: str
    """xxh3-128 of the tensor's bytes, hexadecimal."""


class FileStamp(msgspec.Struct, frozen=True):
    """File attributes that change if the file is replaced or modified."""

    device: int
    inode: int
    size: int
    mtime_ns: int
    ctime_ns: int

    @classmethod
    def of(cls, descriptor: int) -> FileStamp:
        """Return the stamp of an open file."""
        found = os.fstat(descriptor)
        return cls(found.st_dev, found.st_ino, found.st_size, found.st_mtime_ns, found.st_ctime_ns)


class _Record(msgspec.Struct, frozen=True):
    version: int
    path: str
    stamp: FileStamp
    entries: list[TensorEntry]


def cache_directory() -> Path:
    """Return ``persistkv/fingerprints`` under ``$XDG_CACHE_HOME``, or under ``~/.cache`` if that is not set.

    :raises RuntimeError: the user has no home directory.
    """
    root = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(root) / "persistkv" / "fingerprints"


def load_entries(path: Path, stamp: FileStamp) -> list[TensorEntry] | None:
    """Return the cached tensors of a file; None if the file changed, or if no readable entry exists."""
    try:
        record = msgspec.json.decode(_cache_file(path).read_bytes(), type=_Record)
    except (OSError, RuntimeError, msgspec.DecodeError):
        return None
    if (record.version, record.path, record.stamp) != (CACHE_VERSION, str(path.absolute()), stamp):
        return None
    return record.entries


def save_entries(path: Path, stamp: FileStamp, entries: Sequence[TensorEntry]) -> bool:
    """Cache a file's tensors. Return False if the cache cannot be written, or if the file changed less than 2 s ago."""
    if time.time_ns() - max(stamp.mtime_ns, stamp.ctime_ns) < _SETTLED_NS:
        return False
    record = msgspec.json.encode(_Record(CACHE_VERSION, str(path.absolute()), stamp, list(entries)))
    try:
        replace_file(_cache_file(path), [record])
    except (OSError, RuntimeError):
        return False
    return True


def _cache_file(path: Path) -> Path:
    """:raises RuntimeError: the user has no home directory."""
    return cache_directory() / (hashlib.sha256(os.fsencode(path.absolute())).hexdigest()[:32] + ".json")
