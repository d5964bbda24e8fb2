"""Huge pages for memory that is used in disk I/O (the primary tier's rows, scratch memory), and
resident pages.

Direct I/O transfers bytes between a disk and rows without the page cache, in physically contiguous
parts: 2 MiB of small pages are 512 addresses for the disk, a huge page is one. On a virtual disk,
writing 32 MiB took 16 ms from small pages and 7 ms from huge pages; reading took 33 and 13 ms.
"""

from __future__ import annotations

import errno
import logging
import mmap
import os
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress

from persistkv.memory import libc
from persistkv.rounding import round_up

HUGE_PAGE_BYTES = 2 << 20  # 2 MiB, on x86-64, and on AArch64 with small pages of 4 KiB

_STEP_BYTES = 16 << 20  # 16 MiB: bytes that one call collapses, which takes 10 ms
_MAX_THREADS = 8
_PREFAULT_BYTES = 64 << 20  # 64 MiB: bytes that one call makes resident
_MAX_PREFAULT_THREADS = 16

logger = logging.getLogger(__name__)


def use_huge_pages(fds: Sequence[int], num_bytes: int) -> bool:
    """Move the content of shared memory files into huge pages, for all processes that map it. No
    byte changes.

    The memory may be used during the call. Memory that is registered with CUDA or in use by a
    transfer cannot be moved, so call this before. Half a gigabyte takes one thread 0.3 s, or 0.3 ms
    if it is in huge pages already.

    :param fds: writable descriptors of the files.
    :param num_bytes: size of all files together.
    :returns: whether the memory is in huge pages now. If False, all or part of it is unchanged: the
        files cannot be mapped, or the kernel is too old or has too little contiguous memory.
    """
    # leave out the bytes at the end that do not fill a huge page
    whole = num_bytes - num_bytes % HUGE_PAGE_BYTES
    if not whole:
        return True
    try:
        address = map_aligned(fds, whole)
    except OSError:
        return False
    try:
        return collapse(address, whole)
    finally:
        libc.unmap(address, whole)


def collapse(
    address: int,
    num_bytes: int,
    *,
    threads: int = _MAX_THREADS,
) -> bool:
    """Move mapped memory into huge pages, for all processes that map it and in this process's page
    table.

    :param address: a multiple of ``HUGE_PAGE_BYTES``. A last part that is smaller than a huge page
        is unchanged.
    :param threads: maximum number of threads that move pages.
    :returns: whether the memory is in huge pages now. If False, the kernel is too old or has too
        little contiguous memory; then all or part of the memory is unchanged.
    """
    whole = num_bytes - num_bytes % HUGE_PAGE_BYTES
    steps = []
    for begin in range(0, whole, _STEP_BYTES):
        size = min(_STEP_BYTES, whole - begin)
        steps.append((address + begin, size))
    if not steps:
        return True
    # if the kernel refuses the first step, it would refuse all of them, so do not try the others
    if not _collapse(steps[0]):
        return False
    others = steps[1:]
    num_cpus = os.cpu_count() or 1
    threads = min(threads, num_cpus)
    with ThreadPoolExecutor(threads) as pool:
        collapsed = pool.map(_collapse, others)
        return all(collapsed)


def map_aligned(fds: Sequence[int], num_bytes: int) -> int:
    """Map files one after the other, shared and writable, until ``unmap``. Return the address, a
    multiple of ``HUGE_PAGE_BYTES``.

    ``mmap.mmap`` does not align. A huge page at an unaligned address takes 512 entries of the page
    table, which slows down each transfer and checksum: reading and verifying 32 MiB took 4.5 ms of
    processor time, and 2.1 ms if aligned.

    :param fds: writable descriptors; every file is mapped completely, except that the last one may
        be longer.
    :raises OSError: the files cannot be mapped, are smaller than ``num_bytes`` (an access after the
        end would kill the process), or one before the last is not whole pages. Nothing stays mapped
        then.
    """
    files = []
    missing = num_bytes  # bytes that are not in the files so far
    for fd in fds:
        file_bytes = os.fstat(fd).st_size
        size = min(file_bytes, missing)
        if size:
            files.append((fd, size))
        missing -= size
        # refuse a partial page before another file: files can be mapped at whole pages only
        if missing and size % mmap.PAGESIZE:
            raise OSError(
                errno.EINVAL,
                f"a file of {size} bytes, which is not whole pages, precedes another one",
            )
    if missing:
        raise OSError(
            errno.EINVAL,
            f"{num_bytes} bytes are to be mapped of files of {num_bytes - missing}",
        )
    address = libc.map_shared(files, HUGE_PAGE_BYTES)
    if not address:
        raise OSError(
            errno.ENOMEM, f"{num_bytes} bytes of shared memory cannot be mapped"
        )
    return address


def huge_memory(num_bytes: int) -> mmap.mmap:
    """Allocate at least ``num_bytes`` of private, zeroed memory, in huge pages if the kernel has
    some free."""
    least = max(num_bytes, 1)
    whole_pages = round_up(least, HUGE_PAGE_BYTES)
    private = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS
    memory = mmap.mmap(-1, whole_pages, flags=private)
    with suppress(OSError):  # the kernel may lack huge pages
        memory.madvise(mmap.MADV_HUGEPAGE)
    return memory


def prefer_huge_pages(address: int, num_bytes: int) -> bool:
    """Have the kernel back memory with huge pages when it is first accessed. No byte changes, and
    pages that are resident already stay as they are.

    :param address: of mapped memory, which may begin and end within a page.
    :returns: False: the kernel refuses, or the memory contains no whole page.
    """
    # leave out partial pages at both ends, because the kernel takes whole pages only
    first_page = round_up(address, mmap.PAGESIZE)
    end = address + num_bytes
    pages_end = end - end % mmap.PAGESIZE
    if pages_end <= first_page:
        return False
    code = libc.madvise(first_page, pages_end - first_page, mmap.MADV_HUGEPAGE)
    return code == 0


def prefault(
    memory: memoryview,
    first: int,
    length: int,
    stride: int,
) -> None:
    """Make ``length`` bytes at ``first``, and again every ``stride`` bytes, resident in this
    process, in parallel.

    The first access to a shared page takes many times as long as a copy. No byte changes, so other
    processes may write at the same time. If the kernel does not support it, the pages are read
    instead, which suffices for allocated memory.

    :param memory: one-dimensional, writable, page-aligned, not empty.
    """
    import numpy as np  # other users of this module do not need numpy

    started = time.monotonic()
    address = libc.address_of(memory)
    array = np.frombuffer(memory, np.uint8)
    spans = _page_spans(len(memory), first, length, stride)
    parts = _prefault_parts(spans)

    def populate(part: tuple[int, int]) -> int:
        """Make a part resident; return 0, or the errno if its pages were read instead."""
        begin, end = part
        start = address + begin
        size = end - begin
        code = libc.madvise(start, size, libc.MADV_POPULATE_WRITE)
        if code:
            # ``max`` reads one byte of each page, which makes it resident; its result has no use
            one_byte_of_each_page = array[begin : end : mmap.PAGESIZE]
            one_byte_of_each_page.max()
        return code

    num_cpus = os.cpu_count() or 1
    threads = min(_MAX_PREFAULT_THREADS, num_cpus, len(parts))
    with ThreadPoolExecutor(threads, "persistkv-prefault") as pool:
        codes = pool.map(populate, parts)
        code = max(codes)  # errno of a part whose pages were read instead; 0: none were
    if code:
        reason = errno.errorcode.get(code, "unknown")
        logger.info(
            "MADV_POPULATE_WRITE was not possible (%s); pages were read instead", reason
        )
    num_bytes = sum(end - begin for begin, end in spans)
    seconds = time.monotonic() - started
    logger.info("prefaulted %d MiB in %.2f s", num_bytes >> 20, seconds)


def _prefault_parts(spans: Sequence[tuple[int, int]]) -> list[tuple[int, int]]:
    """Divide spans of ``_page_spans`` into parts of ``_PREFAULT_BYTES`` at most."""
    parts = []
    for begin, end in spans:
        for part_begin in range(begin, end, _PREFAULT_BYTES):
            part_end = min(part_begin + _PREFAULT_BYTES, end)
            parts.append((part_begin, part_end))
    return parts


def _page_spans(
    size: int,
    first: int,
    length: int,
    stride: int,
) -> list[tuple[int, int]]:
    """Return the whole pages, in memory of ``size`` bytes, that hold ``length`` bytes at ``first``,
    and again every ``stride`` bytes: first byte, and byte after the last, of spans that do not
    overlap.
    """
    page = mmap.PAGESIZE
    spans: list[tuple[int, int]] = []
    for offset in range(first, size, stride):
        begin = offset - offset % page
        end = round_up(offset + length, page)
        end = min(end, size)
        if spans:
            last_begin, last_end = spans[-1]
            # join a span with the last one if they share a page or are adjacent
            if begin <= last_end:
                spans[-1] = (last_begin, end)
                continue
        spans.append((begin, end))
    return spans


def _collapse(step: tuple[int, int]) -> bool:
    """Collapse one step, an address and a number of bytes; return whether the kernel did."""
    address, num_bytes = step
    code = libc.madvise(address, num_bytes, libc.MADV_COLLAPSE)
    return code == 0
