"""A plain file as the medium with which ``persistkv bench`` compares a store on a local disk."""

from __future__ import annotations

import errno
import os
from collections.abc import Sequence
from pathlib import Path

import xxhash

from persistkv.storage.backend import PlainMedium


class PlainFile(PlainMedium):
    """A file that is written and read with O_DIRECT, as segments of a store are. The
    caller removes it. All calls raise OSError if the disk fails."""

    def __init__(self, path: Path) -> None:
        flags = os.O_RDWR | os.O_CREAT | os.O_DIRECT | os.O_CLOEXEC
        self._file = os.open(path, flags, 0o600)
        """File descriptor."""
        self._end = 0
        """Length of the file in bytes."""

    def write(self, buffers: Sequence[memoryview]) -> None:
        num_bytes = sum(map(len, buffers))
        # on a disk that becomes full, a write may be short without raising an error
        if os.pwritev(self._file, buffers, self._end) != num_bytes:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        os.fdatasync(self._file)
        self._end += num_bytes

    def read(self, buffers: Sequence[memoryview]) -> None:
        num_bytes = sum(map(len, buffers))
        # the last write has as many bytes, and is at the end of the file
        os.preadv(self._file, buffers, self._end - num_bytes)
        for buffer in buffers:  # compute checksums, as a load from a store does
            xxhash.xxh3_64_intdigest(buffer)

    def close(self) -> None:
        os.close(self._file)
