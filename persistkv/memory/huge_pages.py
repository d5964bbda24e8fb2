"""Huge pages for memory that is used in disk I/O: the primary tier's rows and scratch memory.

Direct I/O transfers bytes between a disk and rows without the page cache, in physically contiguous parts: 2 MiB of
small pages are 512 addresses for the disk, a huge page is one. On a virtual disk, writing 32 MiB took 16 ms from small
pages and 7 ms from huge pages; reading took 33 and 13 ms.
"""

from __future__ import annotations

import errno
import mmap
import os
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress

from persistkv.memory import libc

HUGE_PAGE_BYTES = 2 << 20  # 2 MiB, on x86-64, and on AArch64 with small pages of 4 KiB

_STEP_BYTES = 16 << 20  # 16 MiB: 10 ms
_MAX_THREADS = 8


def use_huge_pages(fd: int, num_bytes: int, *, threads: int = _MAX_THREADS) -> bool:
    """Move the content of a shared memory file into huge pages, for all processes that map it. No byte changes.

    The memory may be used during the call. Memory that is registered with CUDA or in use by a transfer cannot be moved,
    so call this before. Half a gigabyte takes one thread 0.3 s, or 0.3 ms if it is in huge pages already.

    :param fd: writable descriptor of a file whose memory is allocated.
    :returns: whether the file is in huge pages now, except for a last part that is smaller than one. If False, the
        kernel is too old or has too little contiguous memory; then all or part of the file is unchanged.
    """
    whole = num_bytes - num_bytes % HUGE_PAGE_BYTES
    with _mapped(fd, whole) as address:
        return not whole or (address != 0 and collapse(address, whole, threads=threads))


def collapse(address: int, num_bytes: int, *, threads: int = _MAX_THREADS) -> bool:
    """As ``use_huge_pages``, for mapped memory: the page table of this process then has one entry per huge page, too.

    :param address: a multiple of ``HUGE_PAGE_BYTES``. A last part that is smaller than a huge page is unchanged.
    """
    whole = num_bytes - num_bytes % HUGE_PAGE_BYTES
    steps = [(address + begin, min(_STEP_BYTES, whole - begin)) for begin in range(0, whole, _STEP_BYTES)]
    with ThreadPoolExecutor(min(threads, os.cpu_count() or 1)) as pool:
        # if the first step fails, all would: skip the others
        return not steps or (_collapse(steps[0]) and all(pool.map(_collapse, steps[1:])))


def map_aligned(fd: int, num_bytes: int) -> int:
    """Map a file, shared and writable, for the life of this process, to a multiple of ``HUGE_PAGE_BYTES``.

    ``mmap.mmap`` does not align. A huge page at an unaligned address takes 512 entries of the page table, which slows
    down each transfer and checksum: reading and verifying 32 MiB took 4.5 ms of processor time, and 2.1 ms if aligned.

    :returns: the address.
    :raises OSError: the file cannot be mapped, or is smaller than ``num_bytes`` (an access after its end would kill the
        process). Nothing stays mapped then.
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
    """Allocate private memory, zeroed and page-aligned, in huge pages if the kernel has some.

    :returns: at least ``num_bytes`` bytes, a multiple of ``HUGE_PAGE_BYTES``.
    """
    whole = -(-max(num_bytes, 1) // HUGE_PAGE_BYTES) * HUGE_PAGE_BYTES
    memory = mmap.mmap(-1, whole, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    with suppress(OSError):  # a kernel without huge pages
        memory.madvise(mmap.MADV_HUGEPAGE)
    return memory


def _collapse(step: tuple[int, int]) -> bool:
    return not libc.madvise(*step, libc.MADV_COLLAPSE)


@contextmanager
def _mapped(fd: int, num_bytes: int) -> Iterator[int]:
    """Map the file for the block and yield its address, a multiple of ``HUGE_PAGE_BYTES``; 0 if it cannot be mapped."""
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
