"""Access to memory by address, and calls that the mmap module lacks or does not release the GIL
for."""

from __future__ import annotations

import ctypes
import mmap
import os
from collections.abc import Sequence
from functools import cache

MADV_POPULATE_READ = 22  # Linux 5.14
MADV_POPULATE_WRITE = 23  # Linux 5.14
MADV_COLLAPSE = 25  # Linux 6.1

_FALLOC_KEEP_SIZE = 1
_FALLOC_PUNCH_HOLE = 2
_MAP_FIXED = 0x10
_MAP_FAILED = ctypes.c_void_p(-1).value


def madvise(address: int, num_bytes: int, advice: int) -> int:
    """Call ``madvise`` with the GIL released; return 0, or the errno if the kernel refuses."""
    return ctypes.get_errno() if _libc().madvise(address, num_bytes, advice) else 0


def map_shared(files: Sequence[tuple[int, int]], alignment: int) -> int:
    """Map files one after the other, shared and writable; return the address, or 0 if one cannot be
    mapped. Then no file stays mapped.

    :param files: descriptors, and the bytes to map from the start of each: whole pages, except for
        the last.
    """
    libc = _libc()
    num_bytes = sum(size for _, size in files)
    # Reserve more addresses than needed, map the files within, and give back both ends: no other
    # thread can take addresses in between.
    reserved = num_bytes + alignment
    flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS
    start = libc.mmap(None, reserved, 0, flags, -1, 0)
    if start == _MAP_FAILED:
        return 0
    address = -(-start // alignment) * alignment
    access = mmap.PROT_READ | mmap.PROT_WRITE
    flags = mmap.MAP_SHARED | _MAP_FIXED
    end = address
    for fd, size in files:
        if libc.mmap(end, size, access, flags, fd, 0) != end:
            libc.munmap(start, reserved)
            return 0
        end += -(-size // mmap.PAGESIZE) * mmap.PAGESIZE
    libc.munmap(start, address - start)
    libc.munmap(end, start + reserved - end)
    return int(address)


def punch_hole(fd: int, offset: int, num_bytes: int) -> None:
    """Release the disk space of a byte range of a file, which then reads as zeros; the file keeps
    its length.

    :raises OSError: the file system supports no holes (``EOPNOTSUPP``), or the disk failed.
    """
    mode = _FALLOC_KEEP_SIZE | _FALLOC_PUNCH_HOLE
    if _libc().fallocate(fd, mode, offset, num_bytes):
        code = ctypes.get_errno()
        raise OSError(code, os.strerror(code))


def unmap(address: int, num_bytes: int) -> None:
    _libc().munmap(address, num_bytes)


def memory_at(address: int, num_bytes: int) -> memoryview:
    """Return a writable view of mapped memory. The caller must keep it mapped while references to
    the view exist."""
    return memoryview((ctypes.c_ubyte * num_bytes).from_address(address)).cast("B")


def address_of(view: memoryview) -> int:
    """Return the address of a contiguous, non-empty view. The address is invalid once the memory is
    released."""
    if not view.readonly:  # five times as fast
        return ctypes.addressof(ctypes.c_char.from_buffer(view))
    import numpy as np  # commands that write nothing do not need numpy

    return int(np.frombuffer(view, np.uint8).__array_interface__["data"][0])


@cache
def _libc() -> ctypes.CDLL:
    libc = ctypes.CDLL(None, use_errno=True)
    libc.mmap.restype = ctypes.c_void_p
    libc.mmap.argtypes = (
        ctypes.c_void_p,
        ctypes.c_size_t,
        ctypes.c_int,
        ctypes.c_int,
        ctypes.c_int,
        ctypes.c_long,
    )
    libc.munmap.argtypes = (ctypes.c_void_p, ctypes.c_size_t)
    libc.fallocate.argtypes = (ctypes.c_int, ctypes.c_int, ctypes.c_long, ctypes.c_long)
    libc.madvise.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)
    return libc
