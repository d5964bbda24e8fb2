"""Huge pages for memory that disks are read into and written from: the primary tier's, and scratch memory.

A transfer past the page cache goes straight between a disk and rows, cut where physical memory is: 2 MiB of small pages
are 512 addresses for the disk, a huge page is one. On a virtual disk 32 MiB were written in 16 ms from small pages and
in 7 ms from huge ones, and read in 33 and 13 ms.
"""

from __future__ import annotations

import errno
import mmap
import os
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress

from persistkv import libc

HUGE_PAGE_BYTES = 2 << 20  # 2 MiB, on x86-64, and on AArch64 with small pages of 4 KiB

_STEP_BYTES = 16 << 20  # 16 MiB: 10 ms
_MAX_THREADS = 8


def use_huge_pages(fd: int, num_bytes: int, *, threads: int = _MAX_THREADS) -> bool:
    """Put what a file of shared memory holds into huge pages, for all who map it. No byte changes.

    Others may use the memory meanwhile. What is registered with CUDA, or a transfer is going to or from, stays where it
    is: call it before. Half a gigabyte takes a thread 0.3 s, and 0.3 ms if it lies in huge pages already.

    :param fd: writable; of memory that is allocated.
    :returns: whether all whole huge pages of the file are some now. The kernel may be too old, or have no memory that
        lies side by side; then some or all of it is as it was.
    """
    whole = num_bytes - num_bytes % HUGE_PAGE_BYTES
    with _mapped(fd, whole) as address:
        return not whole or (address != 0 and collapse(address, whole, threads=threads))


def collapse(address: int, num_bytes: int, *, threads: int = _MAX_THREADS) -> bool:
    """As ``use_huge_pages``, where the memory is mapped: our page table then has one entry for each, too.

    :param address: a multiple of a huge page; what is no whole huge page behind it stays as it is.
    """
    whole = num_bytes - num_bytes % HUGE_PAGE_BYTES
    steps = [(address + begin, min(_STEP_BYTES, whole - begin)) for begin in range(0, whole, _STEP_BYTES)]
    with ThreadPoolExecutor(min(threads, os.cpu_count() or 1)) as pool:
        # where the first cannot be, none can: ask no more
        return not steps or (_collapse(steps[0]) and all(pool.map(_collapse, steps[1:])))


def map_aligned(fd: int, num_bytes: int) -> int:
    """Map a file, shared and writable, as long as this process lives, to a multiple of a huge page: ``mmap.mmap`` does
    not see to it, and a huge page that is mapped to other addresses is 512 entries of a page table, which each transfer
    and each checksum looks up. To read and verify 32 MiB took 4.5 ms of processor time so, and 2.1 ms like this.

    :returns: the address.
    :raises OSError: it cannot be mapped, or is smaller (what lies behind its end would kill who uses it).
            Nothing stays mapped then.
    """
    if (size := os.fstat(fd).st_size) < num_bytes:
        raise OSError(errno.EINVAL, f"{num_bytes} bytes are to be mapped of a file of {size}")
    reserved = num_bytes + HUGE_PAGE_BYTES
    somewhere = libc.reserve(reserved)
    address = _aligned(somewhere)
    if not somewhere or not libc.map_at(address, num_bytes, fd):
        if somewhere:
            libc.unmap(somewhere, reserved)
        raise OSError(errno.ENOMEM, f"{num_bytes} bytes of shared memory cannot be mapped")
    return address


def huge_memory(num_bytes: int) -> mmap.mmap:
    """Memory of this process alone, zeroed, page-aligned, in huge pages where the kernel gives some.

    :returns: at least so many bytes, whole huge pages.
    """
    whole = -(-max(num_bytes, 1) // HUGE_PAGE_BYTES) * HUGE_PAGE_BYTES
    memory = mmap.mmap(-1, whole, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    with suppress(OSError):  # a kernel without them
        memory.madvise(mmap.MADV_HUGEPAGE)
    return memory


def _collapse(step: tuple[int, int]) -> bool:
    return not libc.madvise(*step, libc.MADV_COLLAPSE)


@contextmanager
def _mapped(fd: int, num_bytes: int) -> Iterator[int]:
    """Where the file is mapped meanwhile, at a multiple of a huge page; 0: it cannot be."""
    reserved = num_bytes + HUGE_PAGE_BYTES
    somewhere = libc.reserve(reserved)
    if not somewhere:
        yield 0
        return
    address = _aligned(somewhere)
    try:
        yield address if num_bytes and libc.map_at(address, num_bytes, fd) else 0
    finally:
        libc.unmap(somewhere, reserved)


def _aligned(address: int) -> int:
    return -(-address // HUGE_PAGE_BYTES) * HUGE_PAGE_BYTES
