"""What is known of weight files that were hashed before, one small JSON file each under the user's cache directory.

An entry counts only while path, device, inode, size, mtime and ctime are what they were. A cache that cannot be read
or written is no cache: weights are hashed again.
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
_SETTLED_NS = 2_000_000_000  # 2 s: a file changed later than that may change again without a new time stamp


class TensorEntry(NamedTuple):
    """One tensor's share of a fingerprint."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    digest: str
    """xxh3-128 of its bytes, hexadecimal."""


class FileStamp(msgspec.Struct, frozen=True):
    """What tells that a file is the one that was hashed."""

    device: int
    inode: int
    size: int
    mtime_ns: int
    ctime_ns: int

    @classmethod
    def of(cls, descriptor: int) -> FileStamp:
        """The stamp of an open file."""
        found = os.fstat(descriptor)
        return cls(found.st_dev, found.st_ino, found.st_size, found.st_mtime_ns, found.st_ctime_ns)


class _Record(msgspec.Struct, frozen=True):
    version: int
    path: str
    stamp: FileStamp
    entries: list[TensorEntry]


def cache_directory() -> Path:
    """``persistkv/fingerprints`` under ``$XDG_CACHE_HOME``, or under ``~/.cache`` where that is not set."""
    root = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(root) / "persistkv" / "fingerprints"


def load_entries(path: Path, stamp: FileStamp) -> list[TensorEntry] | None:
    """What was remembered of this very file; None where nothing was, or it does not read."""
    try:
        record = msgspec.json.decode(_cache_file(path).read_bytes(), type=_Record)
    except (OSError, RuntimeError, msgspec.DecodeError):
        return None
    if (record.version, record.path, record.stamp) != (CACHE_VERSION, str(path.absolute()), stamp):
        return None
    return record.entries


def save_entries(path: Path, stamp: FileStamp, entries: Sequence[TensorEntry]) -> bool:
    """Remember a file's tensors; False where that is not possible, or its time stamps are too young to be relied on."""
    if time.time_ns() - max(stamp.mtime_ns, stamp.ctime_ns) < _SETTLED_NS:
        return False
    record = msgspec.json.encode(_Record(CACHE_VERSION, str(path.absolute()), stamp, list(entries)))
    try:
        replace_file(_cache_file(path), [record])
    except (OSError, RuntimeError):
        return False
    return True


def _cache_file(path: Path) -> Path:
    """:raises RuntimeError: where the user has no home directory."""
    return cache_directory() / (hashlib.sha256(os.fsencode(path.absolute())).hexdigest()[:32] + ".json")
