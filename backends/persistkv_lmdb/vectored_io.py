"""Vectored I/O: many buffers per call, short transfers continued, aligned copies, and a query of the page cache.

O_DIRECT needs addresses, lengths and offsets that are multiples of 4 KiB.
"""

from __future__ import annotations

import ctypes
import errno
import mmap
import os
from collections.abc import Callable, Iterator, Sequence

from persistkv.config import PAGE_BYTES
from persistkv.memory.libc import address_of
from persistkv.storage.format.codec import Buffer
from persistkv.storage.format.pack import align

MOST_BUFFERS = 1024  # per call: IOV_MAX
_BOUNCE_BYTES = 4 << 20  # 4 MiB
_BATCH_BYTES = 32 << 20  # 32 MiB: for a pack cut at fixed depths, everything after the first batch
_FIRST_BYTES = 4 << 20
"""4 MiB: the disk writes the first batch while the rest is gathered. Writing 4 and 28 MiB from two threads takes no
longer than writing 32 MiB at once."""
_SECOND_BYTES = 8 << 20
"""8 MiB, if buffers are small: gathering 28 MiB of 64 KiB blocks takes 1 to 2 ms, writing 4 MiB takes 1.3 ms."""
_SMALL_BYTES = 128 << 10  # 128 KiB: mean length of a buffer; adjacent rows are one buffer

_CACHESTAT = 451  # Linux 6.5, the same number on all architectures


def starts_aligned(view: memoryview) -> bool:
    """Return whether the buffer, which must not be empty, starts at a multiple of 4 KiB."""
    return not address_of(view) % PAGE_BYTES


def front(buffers: Sequence[memoryview], count: int) -> list[memoryview]:
    """Return the first ``count`` bytes."""
    found = []
    for buffer in buffers:
        if count <= len(buffer):
            found.append(buffer[:count])
            break
        found.append(buffer)
        count -= len(buffer)
    return found


def behind(buffers: Sequence[memoryview], count: int) -> list[memoryview]:
    """Return everything after the first ``count`` bytes."""
    for index, buffer in enumerate(buffers):
        if count < len(buffer):
            return [buffer[count:], *buffers[index + 1 :]]
        count -= len(buffer)
    return []


def is_aligned(buffers: Sequence[memoryview]) -> bool:
    """Return whether O_DIRECT can transfer all buffers."""
    return all(not len(buffer) % PAGE_BYTES and starts_aligned(buffer) for buffer in buffers)


def write_all(fd: int, buffers: Sequence[memoryview], offset: int, unit: int = 1) -> None:
    """Write all bytes.

    :param unit: a short write is continued at a multiple of it.
    :raises OSError: some bytes may have been written.
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
    """Fill the buffers; return False if the file ends too early, or a call ends within a ``unit``."""
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


_syscall = ctypes.CDLL(None).syscall  # not PyDLL: it may visit many pages, and CDLL releases the GIL meanwhile
_syscall.argtypes = (ctypes.c_long, ctypes.c_uint, ctypes.c_void_p, ctypes.c_void_p, ctypes.c_uint)


def is_cached(fd: int, offset: int, length: int) -> bool:
    """Return whether the page cache holds all pages of a part of a file; False if the kernel cannot report it."""
    part, pages = _Range(offset, length), _Pages()
    if _syscall(_CACHESTAT, fd, ctypes.addressof(part), ctypes.addressof(pages), 0):
        return False
    return bool(pages.cached * PAGE_BYTES >= length)


class Bounce:
    """Aligned memory through which unaligned buffers are copied; allocated once and bounded."""

    def __init__(self, settle: Callable[[], None]) -> None:
        """:param settle: waits until earlier lists are no longer in use; called before the memory is reused."""
        self._memory = memoryview(mmap.mmap(-1, _BOUNCE_BYTES))  # backed by physical memory on first use
        self._settle = settle
        self._lent = False

    def aligned(self, stream: Iterator[Buffer]) -> Iterator[list[memoryview]]:
        """Yield the stream's bytes in lists of aligned buffers: a short list, then long ones.

        If buffers are small, the second list has twice the bytes of the first one. Aligned buffers are yielded as they
        are, and are valid as long as the stream's. The end of the stream is padded with zeros to a multiple of 4 KiB.

        :raises Exception: errors of ``settle``.
        """
        batch, is_first = _Batch(self._lend, _FIRST_BYTES), True
        while (rest := batch.take(stream)) is not None:
            while rest:
                if batch.full:  # checked late: so the stream is exhausted before the last list
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
        """Return the memory for one list; waits until the previous list is no longer in use."""
        if self._lent:
            self._settle()
        self._lent = True
        return self._memory


class _Batch:
    """Buffers of one write.

    :param lend: returns the memory for copies; called on the first copy.
    :param most_bytes: approximate maximum length.
    """

    def __init__(self, lend: Callable[[], memoryview], most_bytes: int) -> None:
        self.buffers: list[memoryview] = []
        self._lend = lend
        self._most_bytes = most_bytes
        self._memory = memoryview(b"")
        self._begun = self._filled = self._length = 0

    @property
    def full(self) -> bool:
        """Whether the batch must be written now."""
        copied = self._filled > 0 and self._filled == len(self._memory)
        return copied or self._length >= self._most_bytes or len(self.buffers) >= MOST_BUFFERS - 1

    @property
    def has_small_buffers(self) -> bool:
        """Whether buffers are small on average, so that a batch has many buffers for its bytes."""
        return self._length <= len(self.buffers) * _SMALL_BYTES

    def take(self, stream: Iterator[Buffer]) -> memoryview | None:
        """Add the stream's aligned buffers without copying; return the first that needs ``add``, None at the end."""
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
        """Add as much as fits, aligned pages without copying; return the remainder."""
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
        """List the bytes copied since the last aligned buffer, except a partial page at the end, which is returned."""
        end = self._filled - self._filled % PAGE_BYTES
        if self._begun < end:
            self.buffers.append(self._memory[self._begun : end])
        tail = self._memory[end : self._filled]
        self._begun = self._filled = end
        return tail
