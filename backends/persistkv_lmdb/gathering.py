"""Gathered reads and writes: many buffers in one call, short transfers continued.

O_DIRECT asks for addresses, lengths and offsets that are multiples of 4 KiB.
"""

from __future__ import annotations

import errno
import mmap
import os
from collections.abc import Iterator, Sequence

import numpy as np

from persistkv.config import PAGE_BYTES
from persistkv.storage.codec import Buffer
from persistkv.storage.pack import align

_MOST_BUFFERS = 1024  # IOV_MAX
_BOUNCE_BYTES = 4 << 20  # 4 MiB


def is_aligned(view: memoryview) -> bool:
    """Whether O_DIRECT takes the buffer."""
    return not len(view) % PAGE_BYTES and starts_aligned(view)


def starts_aligned(view: memoryview) -> bool:
    """Whether the buffer begins at a multiple of 4 KiB; it may not be empty."""
    address: int = np.frombuffer(view, np.uint8).__array_interface__["data"][0]
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


def read_some(fd: int, buffers: Sequence[memoryview], offset: int, flags: int = 0, *, aligned: bool = False) -> int:
    """Read until all buffers are full, the file ends, or, with RWF_NOWAIT, the page cache has no more.

    :param aligned: as in ``write_all``.
    :returns: the bytes read.
    """
    total = 0
    rest = list(buffers)
    while rest:
        try:
            done = os.preadv(fd, rest[:_MOST_BUFFERS], offset + total, flags)
        except BlockingIOError:
            break
        done -= done % PAGE_BYTES if aligned else 0
        if not done:
            break
        total += done
        rest = behind(rest, done)
    return total


class Bounce:
    """Aligned memory that what is not aligned is copied through, allocated once and bounded."""

    def __init__(self) -> None:
        self._memory = memoryview(mmap.mmap(-1, _BOUNCE_BYTES))

    def aligned(self, stream: Iterator[Buffer]) -> Iterator[list[memoryview]]:
        """The stream's bytes in lists of aligned buffers, each to be written before the next is asked for.

        Aligned pieces come as they are. A stream whose length is no multiple of 4 KiB is filled up with zeros.
        """
        ready: list[memoryview] = []
        begun = filled = 0
        for piece in stream:
            rest = memoryview(piece).cast("B")
            while rest:
                if not filled % PAGE_BYTES and len(rest) >= PAGE_BYTES and starts_aligned(rest):
                    if begun < filled:
                        ready.append(self._memory[begun:filled])
                        begun = filled
                    whole = len(rest) - len(rest) % PAGE_BYTES
                    ready.append(rest[:whole])
                    rest = rest[whole:]
                else:
                    count = min(len(rest), _BOUNCE_BYTES - filled)
                    self._memory[filled : filled + count] = rest[:count]
                    filled += count
                    rest = rest[count:]
                if filled == _BOUNCE_BYTES or len(ready) >= _MOST_BUFFERS:
                    end = filled - filled % PAGE_BYTES
                    tail = bytes(self._memory[end:filled])
                    yield [*ready, self._memory[begun:end]] if begun < end else ready
                    self._memory[: len(tail)] = tail
                    ready, begun, filled = [], 0, len(tail)
        end = align(filled)
        self._memory[filled:end] = bytes(end - filled)
        yield [*ready, self._memory[begun:end]] if begun < end else ready
