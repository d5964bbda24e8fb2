"""The rows as the store's own process maps and readies them."""

from __future__ import annotations

import os
import threading

from persistkv.huge_pages import collapse, map_aligned
from persistkv.libc import MADV_POPULATE_READ, madvise, memory_at

_STEP_BYTES = 16 << 20  # 16 MiB: 2 ms, in which nothing else of this process's memory can be mapped


def map_rows(region_fd: int, region_bytes: int) -> memoryview:
    """Map the rows as long as this process lives, and ready them in a thread of its own.

    :param region_fd: inherited, and closed here: it shares the engine's flock, and would keep it.
    :raises OSError: they cannot be mapped.
    """
    own = os.open(f"/proc/self/fd/{region_fd}", os.O_RDWR | os.O_CLOEXEC)
    os.close(region_fd)
    try:
        address = map_aligned(own, region_bytes)
    finally:
        os.close(own)
    threading.Thread(target=_ready, args=(address, region_bytes), name="persistkv-rows", daemon=True).start()
    return memory_at(address, region_bytes)


def _ready(address: int, num_bytes: int) -> None:
    """Huge pages where the engine did not see to them, and then all that there is entered into our page table.

    Else the first job that uses a row does it: 32 MiB of rows took 10 ms, and the first promotion after a start is the
    one that counts. A gigabyte of small pages takes 0.1 s, and 2 MiB of page table that it takes anyhow.
    """
    collapse(address, num_bytes, threads=1)
    for begin in range(0, num_bytes, _STEP_BYTES):
        # pages of /dev/shm become writable by it, too
        if madvise(address + begin, min(_STEP_BYTES, num_bytes - begin), MADV_POPULATE_READ):
            return  # an older kernel: the first use of each row does it
