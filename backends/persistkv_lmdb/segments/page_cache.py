"""What of a file the kernel holds in memory."""

from __future__ import annotations

import ctypes

from persistkv.config import PAGE_BYTES

_CACHESTAT = 451  # Linux 6.5, the same number on all architectures


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
