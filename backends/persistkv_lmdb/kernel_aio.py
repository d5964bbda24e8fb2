"""The kernel's asynchronous I/O (AIO): reads that one thread begins, and is told the end of.

1. The kernel writes into the buffers of a read until it has ended. Whoever began some waits for all, or closes the
   queue: that waits, too. So does the kernel when a process ends, but where somebody holds its memory (who just reads
   ``/proc/PID/maps``) he waits in its place, and the process may be gone before: its owner is to allow for that.
2. What describes a read (iocb, iovec) is the kernel's for the length of the call that begins it only.
"""

from __future__ import annotations

import ctypes
import errno
import os
import platform
import struct
from collections.abc import Sequence
from typing import NamedTuple

DEPTH = 8  # reads in flight at most; the system has so many for all (fs.aio-max-nr)

_SETUP, _DESTROY, _SUBMIT, _GET_EVENTS = range(4)
_NUMBERS = {"x86_64": (206, 207, 209, 208), "aarch64": (0, 1, 2, 4)}.get(platform.machine())
_PREADV = 7
_IOCB = struct.Struct("=QIIHhIQQqQII")  # where the order of key and flags depends on the byte order, both are 0
_IOVEC = struct.Struct("@PN")
_EVENT = struct.Struct("=QQqq")

_syscall = ctypes.CDLL(None, use_errno=True).syscall  # which gives the GIL up: each of them may wait
_syscall.restype = ctypes.c_long


class Read(NamedTuple):
    """One read."""

    number: int
    """By which its end is told."""
    fd: int
    buffers: Sequence[memoryview]
    """Writable; the kernel takes 1,024 at most."""
    offset: int
    length: int
    """Of all buffers together."""


class Ended(NamedTuple):
    """What came of a read."""

    number: int
    result: int
    """Bytes, or a negative errno."""


class Queue:
    """Reads in flight, of one thread at a time."""

    def __init__(self) -> None:
        """:raises OSError: the kernel has no AIO, gives no more of it, or may not be asked."""
        self.in_flight = 0
        self._context = ctypes.c_ulong(0)
        self._events = ctypes.create_string_buffer(DEPTH * _EVENT.size)
        self._call(_SETUP, DEPTH, ctypes.byref(self._context))

    def begin(self, read: Read) -> None:
        """Begin one more.

        :raises OSError: it was not begun: EAGAIN where there is no room for it, else it cannot be.
        :raises TypeError: a buffer is read-only; it was not begun.
        """
        number, fd, buffers, offset, _ = read
        vectors = ctypes.create_string_buffer(len(buffers) * _IOVEC.size)
        place = 0
        for buffer in buffers:
            _IOVEC.pack_into(vectors, place, _address(buffer), len(buffer))
            place += _IOVEC.size
        fields = (number, 0, 0, _PREADV, 0, fd, ctypes.addressof(vectors), len(buffers), offset, 0, 0, 0)
        control = ctypes.create_string_buffer(_IOCB.pack(*fields), _IOCB.size)
        pointer = ctypes.c_void_p(ctypes.addressof(control))
        if not self._call(_SUBMIT, self._context, ctypes.c_long(1), ctypes.byref(pointer)):
            raise OSError(errno.EAGAIN, os.strerror(errno.EAGAIN))
        self.in_flight += 1

    def wait(self) -> list[Ended]:
        """Those that ended since the last call, once there is one; none where none is in flight."""
        if not self.in_flight:
            return []
        least, most = ctypes.c_long(1), ctypes.c_long(DEPTH)
        count = 0
        while not count:
            try:
                count = self._call(_GET_EVENTS, self._context, least, most, self._events, None)
            except InterruptedError:
                continue
        self.in_flight -= count
        found = _EVENT.iter_unpack(self._events.raw[: count * _EVENT.size])
        return [Ended(number, result) for number, _, result, _ in found]

    def close(self) -> None:
        """Give it back to the kernel, which first waits until all in flight has ended, however many that are."""
        self._call(_DESTROY, self._context)

    @staticmethod
    def _call(which: int, *arguments: object) -> int:
        if _NUMBERS is None:
            raise OSError(errno.ENOSYS, os.strerror(errno.ENOSYS))
        done = int(_syscall(ctypes.c_long(_NUMBERS[which]), *arguments))
        if done < 0:
            code = ctypes.get_errno()
            raise OSError(code, os.strerror(code))
        return done


def _address(buffer: memoryview) -> int:
    """:raises TypeError: the buffer is read-only, which the kernel would not see."""
    return ctypes.addressof(ctypes.c_char.from_buffer(buffer))
