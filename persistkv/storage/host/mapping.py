"""The rows as the store's own process maps and readies them."""

from __future__ import annotations

import mmap
import os
import threading

import numpy as np

from persistkv.huge_pages import use_huge_pages
from persistkv.libc import MADV_POPULATE_READ, madvise

_STEP_BYTES = 16 << 20  # 16 MiB: 2 ms, in which nothing else of this process's memory can be mapped


def map_rows(region_fd: int, region_bytes: int) -> mmap.mmap:
    """Map the rows, and ready them in a thread of its own.

    :param region_fd: inherited, and closed here: it shares the engine's flock, and would keep it.
    """
    own = os.open(f"/proc/self/fd/{region_fd}", os.O_RDWR | os.O_CLOEXEC)
    os.close(region_fd)
    try:
        region = mmap.mmap(own, region_bytes)
    except BaseException:
        os.close(own)
        raise
    threading.Thread(target=_ready, args=(region, own), name="persistkv-rows", daemon=True).start()
    return region


def _ready(region: mmap.mmap, fd: int) -> None:
    """Huge pages where the engine did not see to them, and then all that there is entered into our page table.

    Else the first job that uses a row does it: 32 MiB of rows took 10 ms, and the first promotion after a start is the
    one that counts. A gigabyte takes 0.1 s, and 2 MiB of page table that it takes anyhow.
    """
    try:
        use_huge_pages(fd, len(region), threads=1)
    finally:
        os.close(fd)
    address = np.frombuffer(region, np.uint8).ctypes.data
    for begin in range(0, len(region), _STEP_BYTES):
        # pages of /dev/shm become writable by it, too
        if madvise(address + begin, min(_STEP_BYTES, len(region) - begin), MADV_POPULATE_READ):
            return  # an older kernel: the first use of each row does it
