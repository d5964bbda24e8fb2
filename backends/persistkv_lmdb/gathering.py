"""Gathered reads and writes: many buffers in one call, short transfers continued.

O_DIRECT asks for addresses, lengths and offsets that are multiples of 4 KiB.
"""

from __future__ import annotations

import ctypes
import errno
import itertools
import mmap
import os
from collections.abc import Iterator, Sequence

import numpy as np

from persistkv.config import PAGE_BYTES
from persistkv.storage.codec import Buffer
from persistkv.storage.pack import align

_MOST_BUFFERS = 1024  # IOV_MAX
_BOUNCE_BYTES = 4 << 20  # 4 MiB
_BATCH_BYTES = 16 << 20  # 16 MiB: few enough turns of two threads, and the next one is hashed while one is written


def starts_aligned(view: memoryview) -> bool:
    """Whether the buffer begins at a multiple of 4 KiB; it may not be empty."""
    if view.readonly:
        address: int = np.frombuffer(view, np.uint8).__array_interface__["data"][0]
    else:  # five times as fast
        address = ctypes.addressof(ctypes.c_char.from_buffer(view))
    return not address % PAGE_BYTES


def front(buffers: Sequence[memoryview], count: int) -> list[memoryview]:
    """The first ``count`` bytes."""
    found = []
    for buffer in buffers:
        if count <= len(buffer):
            found.append(buffer[:count])
            break
        found.append(buffer)
        count -= len(buffer)
    return found


def behind(buffers: Sequence[memoryview], count: int) -> list[memoryview]:
    """All but the first ``count`` bytes."""
    for index, buffer in enumerate(buffers):
        if count < len(buffer):
            return [buffer[count:], *buffers[index + 1 :]]
        count -= len(buffer)
    return []


def write_all(fd: int, buffers: Sequence[memoryview], offset: int, *, aligned: bool) -> None:
    """Write all bytes.

    :param aligned: a short write is taken up again at a multiple of 4 KiB.
    :raises OSError: some of them may have been written.
    """
    rest = list(buffers)
    while rest:
        done = os.pwritev(fd, rest[:_MOST_BUFFERS], offset)
        done -= done % PAGE_BYTES if aligned else 0
        if not done:
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        rest = behind(rest, done)
        offset += done


def read_all(fd: int, buffers: Sequence[memoryview], offset: int) -> bool:
    """Fill the buffers; False: the file ends before."""
    rest = list(buffers)
    while rest:
        done = os.preadv(fd, rest[:_MOST_BUFFERS], offset)
        if not done:
            return False
        rest = behind(rest, done)
        offset += done
    return True


class Bounce:
    """Aligned memory that what is not aligned is copied through, allocated once and bounded."""

    def __init__(self) -> None:
        self._memory = memoryview(mmap.mmap(-1, 2 * _BOUNCE_BYTES))  # takes memory once it is used

    def aligned(self, stream: Iterator[Buffer]) -> Iterator[list[memoryview]]:
        """The stream's bytes in lists of aligned buffers. What one holds is valid until the next but one is asked for.

        Aligned pieces come as they are. A stream whose length is no multiple of 4 KiB is filled up with zeros.
        """
        halves = itertools.cycle((self._memory[:_BOUNCE_BYTES], self._memory[_BOUNCE_BYTES:]))
        batch = _Batch(next(halves))
        for piece in stream:
            rest = memoryview(piece).cast("B")
            while rest:
                rest = batch.add(rest)
                if batch.full:
                    tail = batch.close()
                    yield batch.buffers
                    batch = _Batch(next(halves))
                    batch.add(tail)
        tail = batch.close()
        batch.add(memoryview(bytes(tail) + bytes(align(len(tail)) - len(tail))))
        batch.close()
        yield batch.buffers


class _Batch:
    """Buffers of one write.

    :param memory: what is copied is copied there.
    """

    def __init__(self, memory: memoryview) -> None:
        self.buffers: list[memoryview] = []
        self._memory = memory
        self._begun = self._filled = self._length = 0

    @property
    def full(self) -> bool:
        """Whether it is to be written now."""
        return (
            self._filled == len(self._memory) or self._length >= _BATCH_BYTES or len(self.buffers) >= _MOST_BUFFERS - 1
        )

    def add(self, piece: memoryview) -> memoryview:
        """Take as much as fits, aligned pages where they lie; what is left."""
        aligned = len(piece) >= PAGE_BYTES and not self._filled % PAGE_BYTES and starts_aligned(piece)
        count = min(len(piece) - len(piece) % PAGE_BYTES, _BATCH_BYTES) if aligned else len(piece)
        if aligned:
            self.close()
            self.buffers.append(piece[:count])
        else:
            count = min(count, len(self._memory) - self._filled)
            self._memory[self._filled : self._filled + count] = piece[:count]
            self._filled += count
        self._length += count
        return piece[count:]

    def close(self) -> memoryview:
        """List what was copied since the last aligned piece; the part of a page at its end, which is not listed."""
        end = self._filled - self._filled % PAGE_BYTES
        if self._begun < end:
            self.buffers.append(self._memory[self._begun : end])
        tail = self._memory[end : self._filled]
        self._begun = self._filled = end
        return tail
