"""Makes memory resident before it is used. The first access to a shared page takes many times as long as a copy."""

from __future__ import annotations

import errno
import logging
import mmap
import os
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import numpy as np

from persistkv.memory.libc import MADV_POPULATE_WRITE, address_of, madvise

_CHUNK_BYTES = 64 << 20  # 64 MiB, the work of one thread at a time
_MAX_THREADS = 16

logger = logging.getLogger(__name__)


def prefault(memory: memoryview, first: int, length: int, stride: int) -> None:
    """Make ``length`` bytes at ``first``, and again every ``stride`` bytes, resident in this process, in parallel.

    It changes no bytes, so other processes may write at the same time. If the kernel does not support it, the pages are
    read instead, which suffices for allocated memory. The time taken is logged.

    :param memory: one-dimensional, writable, page-aligned.
    """
    started = time.monotonic()
    address = address_of(memory)
    chunks = list(_chunks(len(memory), first, length, stride))
    with ThreadPoolExecutor(min(_MAX_THREADS, os.cpu_count() or 1, len(chunks)), "persistkv-prefault") as pool:
        results = list(pool.map(lambda chunk: _populate(address, chunk), chunks))
        remaining = [chunk for chunk, problem in zip(chunks, results, strict=True) if problem]
        list(pool.map(lambda chunk: _read_pages(memory, chunk), remaining))
    if remaining:
        reason = errno.errorcode.get(max(results), "unknown")
        logger.info("MADV_POPULATE_WRITE was not possible (%s); pages were read instead", reason)
    logger.info("prefaulted %d MiB in %.2f s", _covered(chunks) >> 20, time.monotonic() - started)


Spans = list[tuple[int, int]]
"""(first byte, byte after the last), page-aligned, ascending, not overlapping"""


def _chunks(total: int, first: int, length: int, stride: int) -> Iterator[Spans]:
    """Yield the whole pages that cover the requested ranges, in chunks of similar size."""
    chunk: Spans = []
    size = 0
    for begin, end in _page_spans(total, first, length, stride):
        for part in range(begin, end, _CHUNK_BYTES):
            chunk.append((part, min(part + _CHUNK_BYTES, end)))
            size += chunk[-1][1] - part
            if size >= _CHUNK_BYTES:
                yield chunk
                chunk, size = [], 0
    if chunk:
        yield chunk


def _page_spans(total: int, first: int, length: int, stride: int) -> Iterator[tuple[int, int]]:
    begin = end = 0
    for offset in range(first, total, stride):
        next_begin = max(offset - offset % mmap.PAGESIZE, end)
        next_end = min(-(-(offset + length) // mmap.PAGESIZE) * mmap.PAGESIZE, total)
        if next_begin > end:
            if end > begin:
                yield begin, end
            begin = next_begin
        end = max(end, next_end)
    if end > begin:
        yield begin, end


def _covered(chunks: list[Spans]) -> int:
    return sum(end - begin for chunk in chunks for begin, end in chunk)


def _populate(address: int, spans: Spans) -> int:
    """Return 0, or the errno of the first span that the kernel refused."""
    for begin, end in spans:
        if problem := madvise(address + begin, end - begin, MADV_POPULATE_WRITE):
            return problem
    return 0


def _read_pages(memory: memoryview, spans: Spans) -> None:
    pages = np.frombuffer(memory, np.uint8)
    for begin, end in spans:
        pages[begin : end : mmap.PAGESIZE].max()
