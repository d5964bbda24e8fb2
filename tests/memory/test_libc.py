from __future__ import annotations

import errno
import mmap
import os

import numpy as np
import pytest

from persistkv.memory import libc


def test_madvise_invalid_arguments_return_errno() -> None:
    memory = mmap.mmap(-1, mmap.PAGESIZE)
    address = libc.address_of(memoryview(memory))
    assert libc.madvise(address, mmap.PAGESIZE, mmap.MADV_NORMAL) == 0
    assert libc.madvise(address, mmap.PAGESIZE, 9999) == errno.EINVAL
    assert libc.madvise(address + 1, mmap.PAGESIZE, mmap.MADV_NORMAL) == errno.EINVAL


@pytest.mark.parametrize("alignment", [mmap.PAGESIZE, 64 * mmap.PAGESIZE])
def test_map_shared_file_is_aligned_and_mapped_until_unmap(alignment: int) -> None:
    fd = os.memfd_create("test")
    os.truncate(fd, mmap.PAGESIZE)
    address = libc.map_shared([(fd, mmap.PAGESIZE)], alignment)
    assert address
    assert not address % alignment
    libc.memory_at(address, 1)[:] = b"x"
    assert os.pread(fd, 1, 0) == b"x"
    libc.unmap(address, mmap.PAGESIZE)
    assert libc.madvise(address, mmap.PAGESIZE, mmap.MADV_WILLNEED) == errno.ENOMEM
    os.close(fd)


def test_map_shared_beyond_address_space_returns_0() -> None:
    fd = os.memfd_create("test")
    assert libc.map_shared([(fd, 1 << 62)], mmap.PAGESIZE) == 0
    os.close(fd)


@pytest.mark.parametrize("writable", [True, False])
def test_memory_at_address_of_view_shares_its_bytes(writable: bool) -> None:
    memory = memoryview(mmap.mmap(-1, 4 * mmap.PAGESIZE))
    rows = memory[mmap.PAGESIZE :].cast("b", (3, mmap.PAGESIZE))
    address = libc.address_of(rows if writable else rows.toreadonly())
    assert address == np.frombuffer(memory, np.uint8).ctypes.data + mmap.PAGESIZE
    found = libc.memory_at(address, 3 * mmap.PAGESIZE)
    assert (found.format, found.shape) == ("B", (3 * mmap.PAGESIZE,))
    found[:2] = b"ab"
    assert bytes(memory[mmap.PAGESIZE :][:3]) == b"ab\0"
