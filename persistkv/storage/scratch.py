"""Memory for bytes that are on their way from a medium to rows; used again and again.

Page-aligned, as reads past the page cache ask for. A lease belongs to one thread, the pool to all.
"""

from __future__ import annotations

import mmap
from collections.abc import Iterator
from contextlib import contextmanager

from persistkv.config import PAGE_BYTES
from persistkv.huge_pages import huge_memory
from persistkv.storage.pack import align


class Scratch:
    """Buffers of one size: as many as were ever lent at once."""

    def __init__(self, num_bytes: int) -> None:
        """Nothing is allocated yet."""
        self._num_bytes = align(max(num_bytes, PAGE_BYTES))
        self._free: list[mmap.mmap] = []

    @contextmanager
    def lend(self) -> Iterator[Lease]:
        """A buffer for the length of the block; what was taken of it may not be used after that. Thread-safe."""
        try:
            buffer = self._free.pop()
        except IndexError:
            buffer = huge_memory(self._num_bytes)
        try:
            yield Lease(memoryview(buffer))
        finally:
            self._free.append(buffer)


class Lease:
    """Hands out one buffer piece by piece, side by side."""

    def __init__(self, buffer: memoryview) -> None:
        self._rest = buffer

    def take(self, num_bytes: int) -> memoryview:
        """So many bytes, from a page's begin on; allocated for once where they do not fit: a block larger than most."""
        taken = align(num_bytes)
        if taken > len(self._rest):
            return memoryview(mmap.mmap(-1, max(taken, PAGE_BYTES)))[:num_bytes]
        piece, self._rest = self._rest[:num_bytes], self._rest[taken:]
        return piece
