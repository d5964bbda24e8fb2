"""Raw I/O of the disk and the page cache without a store: the yardstick of ``disk_speed``."""

from __future__ import annotations

import ctypes
import errno
import mmap
import os
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path

import numpy as np
import numpy.typing as npt
import xxhash

from persistkv.memory.libc import address_of

FRAME_BYTES = 1 << 20  # 1 MiB: range of one checksum
_CALL_BYTES = 4 << 20  # 4 MiB: size of a read call that is followed by verification
_MAX_BUFFERS = 1024  # of one system call
_SLOTS = 8  # capacity of the preallocated file, in jobs


class RawDisk:
    """Writes and reads of one job's bytes, each call timed separately.

    :param rows: source buffers, page-aligned, one per block.
    :param targets: target buffers, page-aligned, one per block.
    """

    def __init__(
        self,
        directory: Path,
        rows: Sequence[memoryview],
        targets: Sequence[memoryview],
    ) -> None:
        self._rows, self._targets = rows, targets
        self._num_bytes = sum(map(len, rows))
        self._growing = _open(directory / "growing", os.O_DIRECT)
        self._preallocated = _open(directory / "preallocated", os.O_DIRECT)
        os.posix_fallocate(self._preallocated, 0, _SLOTS * self._num_bytes)
        self._buffered = _open(directory / "preallocated", 0)
        self._paths = [directory / "preallocated"]
        self._written = 0
        for slot in range(_SLOTS):
            transfer(os.pwritev, self._preallocated, rows, slot * self._num_bytes)
        os.fsync(self._preallocated)

    def write_new(self) -> float:
        """Append with O_DIRECT, then fdatasync; return the seconds.

        The file system allocates blocks, and commits the new length of the file.
        """
        begin = time.perf_counter()
        transfer(os.pwritev, self._growing, self._rows, self._written)
        os.fdatasync(self._growing)
        seconds = time.perf_counter() - begin
        self._written += self._num_bytes
        return seconds

    def overwrite(self, run: int) -> float:
        """Overwrite written disk blocks with O_DIRECT, then fdatasync; return the seconds."""
        begin = time.perf_counter()
        transfer(
            os.pwritev, self._preallocated, self._rows, run % _SLOTS * self._num_bytes
        )
        os.fdatasync(self._preallocated)
        return time.perf_counter() - begin

    def read_warm(self, threads: int) -> float:
        """Read from the page cache and compute the xxh3 of each frame; return the seconds."""
        transfer(os.preadv, self._buffered, self._targets, 0)  # fills the page cache
        block = self._num_bytes // len(self._targets)

        def read(part: npt.NDArray[np.int64]) -> None:
            buffers = [self._targets[number] for number in part]
            transfer(os.preadv, self._buffered, buffers, int(part[0]) * block)
            checksums(buffers)

        return self._share(read, threads)

    def read_cold(
        self,
        run: int,
        *,
        direct: bool,
        into: Sequence[Sequence[memoryview]] = (),
    ) -> float:
        """Read with an empty page cache, past it (``direct``) or through it; return the seconds.

        :param into: targets of each of several jobs, read one after the other; by default the own
            targets, once.
        """
        drop_page_cache(self._paths)
        fd = self._preallocated if direct else self._buffered
        begin = time.perf_counter()
        for slot, targets in enumerate(into or [self._targets], run):
            transfer(os.preadv, fd, targets, slot % _SLOTS * self._num_bytes)
        return time.perf_counter() - begin

    def read_cold_verified(
        self,
        run: int,
        threads: int,
        into: Sequence[Sequence[memoryview]] = (),
    ) -> float:
        """Read past an empty page cache and compute the xxh3 of each frame; return the seconds.

        :param threads: they share each job; each one verifies the 4 MiB of a call before its next
            read.
        :param into: as in ``read_cold``.
        """
        drop_page_cache(self._paths)
        jobs = list(enumerate(into or [self._targets], run))
        block = self._num_bytes // len(self._targets)
        step = max(1, _CALL_BYTES // block)

        def read(part: npt.NDArray[np.int64]) -> None:
            for slot, targets in jobs:
                for start in range(0, len(part), step):
                    numbers = part[start : start + step]
                    buffers = [targets[number] for number in numbers]
                    offset = slot % _SLOTS * self._num_bytes + int(numbers[0]) * block
                    transfer(os.preadv, self._preallocated, buffers, offset)
                    checksums(buffers)

        return self._share(read, threads)

    def _share(
        self,
        read: Callable[[npt.NDArray[np.int64]], None],
        threads: int,
    ) -> float:
        """Return the seconds that the threads take, each with its part of the targets' numbers.

        All threads run before the clock starts.
        """
        parts = np.array_split(np.arange(len(self._targets)), threads)
        if threads == 1:
            begin = time.perf_counter()
            read(parts[0])
            return time.perf_counter() - begin
        with ThreadPoolExecutor(threads) as pool:
            list(pool.map(time.sleep, [0.01] * threads))
            begin = time.perf_counter()
            list(pool.map(read, parts))
            return time.perf_counter() - begin

    def close(self) -> None:
        """Close the files."""
        for fd in (self._growing, self._preallocated, self._buffered):
            os.close(fd)


def checksums(buffers: Sequence[memoryview]) -> list[int]:
    """Return the xxh3 of each frame: of consecutive blocks of 1 MiB together, or of one larger
    block."""
    found: list[int] = []
    digest, size = xxhash.xxh3_64(), 0
    for buffer in buffers:
        digest.update(buffer)
        size += len(buffer)
        if size >= FRAME_BYTES:
            found.append(digest.intdigest())
            digest, size = xxhash.xxh3_64(), 0
    return found


def fill_page_cache(paths: Sequence[Path]) -> None:
    """Read all files below the directories, to fill the page cache with as much as it holds."""
    buffer = bytearray(8 << 20)
    for file in [file for path in paths for file in path.rglob("*") if file.is_file()]:
        # a status file is replaced
        with suppress(FileNotFoundError), file.open("rb", buffering=0) as stream:
            while stream.readinto(buffer):
                pass


def _open(path: Path, flags: int) -> int:
    return os.open(path, os.O_RDWR | os.O_CREAT | flags, 0o600)


def transfer(
    call: Callable[[int, Sequence[memoryview], int], int],
    fd: int,
    buffers: Sequence[memoryview],
    offset: int,
) -> None:
    """Transfer buffers from or to byte ``offset`` of a file, in as few calls of preadv or pwritev
    as possible.

    :raises OSError: a call transferred fewer bytes.
    """
    for start in range(0, len(buffers), _MAX_BUFFERS):
        part = buffers[start : start + _MAX_BUFFERS]
        wanted = sum(map(len, part))
        if (done := call(fd, part, offset)) != wanted:
            raise OSError(errno.EIO, f"{done} of {wanted} bytes")
        offset += wanted


def drop_page_cache(paths: Sequence[Path]) -> None:
    """Remove files, and all files below directories, from the page cache. No process may have them
    mapped.

    :raises OSError: more than 1 MiB of a file, and more than 1 % of it, stays in the page cache.
    """
    for file in (
        below for path in paths for below in (path, *path.rglob("*")) if below.is_file()
    ):
        with file.open("rb") as opened:
            for _ in range(2):
                os.posix_fadvise(opened.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
                if _resident_bytes(opened.fileno()) <= max(
                    file.stat().st_size // 100, 1 << 20
                ):
                    break
                # dirty pages stay; only then, because each fsync flushes the disk
                os.fsync(opened.fileno())
            else:
                raise OSError(
                    errno.EBUSY,
                    f"{file} stays in the page cache: another process uses it",
                )


def _resident_bytes(fd: int) -> int:
    size = os.fstat(fd).st_size
    if not size:
        return 0
    with mmap.mmap(fd, size, prot=mmap.PROT_READ) as memory:
        pages = np.zeros(-(-size // mmap.PAGESIZE), dtype=np.uint8)
        address, libc = (
            address_of(memoryview(memory)),
            ctypes.CDLL(None, use_errno=True),
        )
        if libc.mincore(
            ctypes.c_void_p(address),
            ctypes.c_size_t(size),
            ctypes.c_void_p(pages.ctypes.data),
        ):
            raise OSError(ctypes.get_errno(), "mincore")
    return int(np.count_nonzero(pages & 1)) * mmap.PAGESIZE
