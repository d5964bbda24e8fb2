"""The rows as the store's own process maps them."""

from __future__ import annotations

import ctypes
import mmap
import os
import threading

import numpy as np

_MADV_POPULATE_READ = 22  # Linux 5.14; the mmap module does not know it. Pages of /dev/shm become writable by it, too
_STEP_BYTES = 16 << 20  # 16 MiB: 2 ms, in which nothing else of this process's memory can be mapped


def map_rows(region_fd: int, region_bytes: int) -> mmap.mmap:
    """Map the rows through a descriptor of our own: the inherited one shares the engine's flock, and would keep it."""
    own = os.open(f"/proc/self/fd/{region_fd}", os.O_RDWR | os.O_CLOEXEC)
    os.close(region_fd)
    try:
        return mmap.mmap(own, region_bytes)
    finally:
        os.close(own)


def populate(region: mmap.mmap) -> None:
    """Enter the pages that the engine has allocated into this process's page table, in a thread of its own.

    Else the first job that uses a row does it: 32 MiB of rows took 10 ms, and the first promotion after a start is the
    one that counts. A gigabyte takes 0.1 s, and 2 MiB of page table that it takes anyhow.
    """
    threading.Thread(target=_populate, args=(region,), name="persistkv-populate", daemon=True).start()


def _populate(region: mmap.mmap) -> None:
    madvise = ctypes.CDLL(None).madvise  # not mmap.madvise, which holds the GIL
    madvise.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)
    address = np.frombuffer(region, np.uint8).ctypes.data
    for begin in range(0, len(region), _STEP_BYTES):
        if madvise(address + begin, min(_STEP_BYTES, len(region) - begin), _MADV_POPULATE_READ):
            return  # an older kernel: the first use of each row does it
