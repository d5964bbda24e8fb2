"""Vectored I/O: many buffers in one call, short transfers continued; what the page cache holds.

O_DIRECT asks for addresses, lengths and offsets that are multiples of 4 KiB.
"""

from __future__ import annotations

import ctypes
import errno
import mmap
import os
from collections.abc import Callable, Iterator, Sequence

from persistkv.config import PAGE_BYTES
from persistkv.libc import address_of
from persistkv.storage.codec import Buffer
from persistkv.storage.pack import align

MOST_BUFFERS = 1024  # of one call: IOV_MAX
_BOUNCE_BYTES = 4 << 20  # 4 MiB
_BATCH_BYTES = 32 << 20  # 32 MiB: the rest of a pack that was cut at fixed depths in one call
_FIRST_BYTES = 4 << 20
"""4 MiB: the disk is at work with them while the rest is gathered. It takes no longer for 4 and 28 MiB from two threads
than for 32 at once."""
_SECOND_BYTES = 8 << 20
"""8 MiB, where buffers are small: to gather 28 MiB of blocks of 64 KiB takes 1 to 2 ms, to write 4 takes 1.3."""
_SMALL_BYTES = 128 << 10  # 128 KiB a buffer, on average: rows that lie side by side are one

_CACHESTAT = 451  # Linux 6.5, the same number on all architectures


def starts_aligned(view: memoryview) -> bool:
    """Whether the buffer begins at a multiple of 4 KiB; it may not be empty."""
    return not address_of(view) % PAGE_BYTES


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


def is_aligned(buffers: Sequence[memoryview]) -> bool:
    """Whether all of them may be transferred past the page cache."""
    return all(not len(buffer) % PAGE_BYTES and starts_aligned(buffer) for buffer in buffers)


def write_all(fd: int, buffers: Sequence[memoryview], offset: int, unit: int = 1) -> None:
    """Write all bytes.

    :param unit: a short write is taken up again at a multiple of it.
    :raises OSError: some of them may have been written.
    """
    rest = list(buffers)
    while rest:
        done = os.pwritev(fd, rest[:MOST_BUFFERS], offset)
        done -= done % unit
        if not done:
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        rest = behind(rest, done)
        offset += done


def read_all(fd: int, buffers: Sequence[memoryview], offset: int, unit: int = 1) -> bool:
    """Fill the buffers; False: the file ends before, or something ends a call within a ``unit``."""
    rest = list(buffers)
    while rest:
        done = os.preadv(fd, rest[:MOST_BUFFERS], offset)
        if not done or done % unit:
            return False
        if len(rest) <= MOST_BUFFERS and done == sum(map(len, rest)):
            return True
        rest = behind(rest, done)
        offset += done
    return True


class _Range(ctypes.Structure):
    _fields_ = (("offset", ctypes.c_uint64), ("length", ctypes.c_uint64))


class _Pages(ctypes.Structure):
    _fields_ = tuple((name, ctypes.c_uint64) for name in ("cached", "dirty", "writing", "evicted", "recently_evicted"))


_syscall = ctypes.CDLL(None).syscall  # not PyDLL: it may walk many pages, and gives the GIL up meanwhile
_syscall.argtypes = (ctypes.c_long, ctypes.c_uint, ctypes.c_void_p, ctypes.c_void_p, ctypes.c_uint)


def is_cached(fd: int, offset: int, length: int) -> bool:
    """Whether all pages of a part of a file are in the page cache; False, too, where the kernel does not tell."""
    part, pages = _Range(offset, length), _Pages()
    if _syscall(_CACHESTAT, fd, ctypes.addressof(part), ctypes.addressof(pages), 0):
        return False
    return bool(pages.cached * PAGE_BYTES >= length)


class Bounce:
    """Aligned memory that what is not aligned is copied through, allocated once and bounded."""

    def __init__(self, settle: Callable[[], None]) -> None:
        """:param settle: waits until nobody uses lists that were handed out; called before memory is used again."""
        self._memory = memoryview(mmap.mmap(-1, _BOUNCE_BYTES))  # takes memory once it is used
        self._settle = settle
        self._lent = False

    def aligned(self, stream: Iterator[Buffer]) -> Iterator[list[memoryview]]:
        """The stream's bytes in lists of aligned buffers: a short one, then long ones. Where buffers are small, one of
        twice the first one's length comes between.

        Aligned pieces come as they are, and are valid as long as the stream's are. A stream whose length is no multiple
        of 4 KiB is filled up with zeros.

        :raises Exception: what ``settle`` raises.
        """
        batch, is_first = _Batch(self._lend, _FIRST_BYTES), True
        while (rest := batch.take(stream)) is not None:
            while rest:
                if batch.full:  # not as soon as it is: so the stream has run to its end before the last one
                    tail = memoryview(bytes(batch.close()))
                    yield batch.buffers
                    more = _SECOND_BYTES if is_first and batch.has_small_buffers else _BATCH_BYTES
                    batch, is_first = _Batch(self._lend, more), False
                    batch.add(tail)
                rest = batch.add(rest)
        tail = batch.close()
        batch.add(memoryview(bytes(tail) + bytes(align(len(tail)) - len(tail))))
        batch.close()
        if batch.buffers:
            yield batch.buffers

    def _lend(self) -> memoryview:
        """The memory, for one list."""
        if self._lent:
            self._settle()
        self._lent = True
        return self._memory


class _Batch:
    """Buffers of one write.

    :param lend: gives the memory that is copied to, once something is.
    :param most_bytes: how long it becomes, roughly.
    """

    def __init__(self, lend: Callable[[], memoryview], most_bytes: int) -> None:
        self.buffers: list[memoryview] = []
        self._lend = lend
        self._most_bytes = most_bytes
        self._memory = memoryview(b"")
        self._begun = self._filled = self._length = 0

    @property
    def full(self) -> bool:
        """Whether it is to be written now."""
        copied = self._filled > 0 and self._filled == len(self._memory)
        return copied or self._length >= self._most_bytes or len(self.buffers) >= MOST_BUFFERS - 1

    @property
    def has_small_buffers(self) -> bool:
        """Whether they are small on average, so that many are gathered for few bytes."""
        return self._length <= len(self.buffers) * _SMALL_BYTES

    def take(self, stream: Iterator[Buffer]) -> memoryview | None:
        """Take aligned pieces where they lie, quickly; the first that has to be added, None at the stream's end."""
        buffers, length = self.buffers, self._length
        most = MOST_BUFFERS - 1 if self._begun == self._filled else 0
        most_bytes = self._most_bytes
        try:
            for piece in stream:
                view = piece if type(piece) is memoryview and piece.format == "B" else memoryview(piece).cast("B")
                size = len(view)
                fits = len(buffers) < most and length + size <= most_bytes
                if not fits or not size or size % PAGE_BYTES or not starts_aligned(view):
                    return view
                buffers.append(view)
                length += size
            return None
        finally:
            self._length = length

    def add(self, piece: memoryview) -> memoryview:
        """Take as much as fits, aligned pages where they lie; what is left."""
        count = len(piece)
        if count >= PAGE_BYTES and not self._filled % PAGE_BYTES and starts_aligned(piece):
            if self._begun < self._filled:
                self.close()
            count = min(count - count % PAGE_BYTES, self._most_bytes)
            self.buffers.append(piece if count == len(piece) else piece[:count])
        elif count:
            self._memory = self._memory or self._lend()
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
