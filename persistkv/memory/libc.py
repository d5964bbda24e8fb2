"""Access to memory by address, and calls that the mmap module lacks or does not release the GIL
for."""

from __future__ import annotations

import ctypes
import mmap
import os
from collections.abc import Sequence
from functools import cache

from persistkv.rounding import round_up

MADV_POPULATE_READ = 22  # Linux 5.14
MADV_POPULATE_WRITE = 23  # Linux 5.14
MADV_COLLAPSE = 25  # Linux 6.1

# constants of Linux that the modules mmap and os lack
_FALLOC_KEEP_SIZE = 1
_FALLOC_PUNCH_HOLE = 2
_MAP_FIXED = 0x10
_MAP_FAILED = ctypes.c_void_p(-1).value


def madvise(
    address: int,
    num_bytes: int,
    advice: int,
) -> int:
    """Call ``madvise`` with the GIL released; return 0, or the errno if the kernel refuses."""
    failed = _libc().madvise(address, num_bytes, advice)
    return ctypes.get_errno() if failed else 0


def map_shared(
    files: Sequence[tuple[int, int]],
    alignment: int,
) -> int:
    """Map files one after the other, shared and writable; return the address, or 0 if one cannot be
    mapped. Then no file stays mapped.

    :param files: descriptors, and the bytes to map from the start of each: whole pages, except for
        the last.
    """
    libc = _libc()
    num_bytes = sum(size for _, size in files)
    # Reserve addresses first, so that no other thread can map memory between the files. Reserve
    # more than the files need, because the reservation may begin at an unaligned address.
    no_access = 0
    no_file = -1
    private = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS
    reserved_bytes = num_bytes + alignment
    start = libc.mmap(None, reserved_bytes, no_access, private, no_file, 0)
    if start == _MAP_FAILED:
        return 0
    address = round_up(start, alignment)
    read_write = mmap.PROT_READ | mmap.PROT_WRITE
    shared = mmap.MAP_SHARED | _MAP_FIXED
    end = address
    for fd, size in files:
        mapped_at = libc.mmap(end, size, read_write, shared, fd, 0)
        if mapped_at != end:
            libc.munmap(start, reserved_bytes)
            return 0
        end += round_up(size, mmap.PAGESIZE)
    # release the reserved addresses before and after the files
    libc.munmap(start, address - start)
    libc.munmap(end, start + reserved_bytes - end)
    return address


def punch_hole(
    fd: int,
    offset: int,
    num_bytes: int,
) -> None:
    """Release the disk space of a byte range of a file, which then reads as zeros; the file keeps
    its length.

    :raises OSError: the file system supports no holes (``EOPNOTSUPP``), or the disk failed.
    """
    mode = _FALLOC_KEEP_SIZE | _FALLOC_PUNCH_HOLE
    failed = _libc().fallocate(fd, mode, offset, num_bytes)
    if failed:
        code = ctypes.get_errno()
        raise OSError(code, os.strerror(code))


def unmap(address: int, num_bytes: int) -> None:
    _libc().munmap(address, num_bytes)


def memory_at(address: int, num_bytes: int) -> memoryview:
    """Return a writable view of mapped memory. The caller must keep it mapped while references to
    the view exist."""
    array_type = ctypes.c_ubyte * num_bytes
    array = array_type.from_address(address)
    # a ctypes array has the format "<B"; bytes can be assigned only between views of one format
    return memoryview(array).cast("B")


def address_of(view: memoryview) -> int:
    """Return the address of a contiguous, non-empty view. The address is invalid once the memory is
    released."""
    # ctypes is five times as fast as NumPy, but refuses read-only memory
    if not view.readonly:
        first_byte = ctypes.c_char.from_buffer(view)
        return ctypes.addressof(first_byte)
    import numpy as np  # commands that write nothing do not need numpy

    array = np.frombuffer(view, np.uint8)
    address, _ = array.__array_interface__["data"]
    return int(address)


@cache
def _libc() -> ctypes.CDLL:
    """Return the C library, with the types of the functions that are called."""
    libc = ctypes.CDLL(None, use_errno=True)
    address = ctypes.c_void_p
    size = ctypes.c_size_t
    offset = ctypes.c_long
    number = ctypes.c_int
    # without a result type, an address would be cut to 32 bits
    libc.mmap.restype = address
    libc.mmap.argtypes = (address, size, number, number, number, offset)
    libc.munmap.argtypes = (address, size)
    libc.fallocate.argtypes = (number, number, offset, offset)
    libc.madvise.argtypes = (address, size, number)
    return libc
