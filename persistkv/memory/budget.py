"""Memory budget of a host process: the division of ``staging_bytes``, which bounds all its memory
except the index.

The medium may keep the data of one transaction in memory until it ends (LMDB keeps changed pages).
The rest is for read buffers, frames that are encoded ahead, messages and the allocator.
"""

from __future__ import annotations

import ctypes
import gc
import os
from collections.abc import Iterator
from contextlib import contextmanager
from typing import NamedTuple

from persistkv.config import MAX_PACK_BYTES

# 64 MiB: minimum of ``staging_bytes``, because the packs of a smaller budget could not be read fast
MIN_STAGING_BYTES = 64 << 20
# number of blocks that ``staging_bytes`` must hold, each as large as those of the largest group
BLOCKS_STAGED = 32
MAX_IO_THREADS = 8  # maximum number of threads that read, verify and decode

_MANY_CORES = 8  # number of cores from which on more threads are the default

_PART_BYTES = 2 << 20
"""Maximum of ``MemoryShares.part``, 2 MiB: a part of this size stays in the CPU cache from its read
to its verification. With 4 MiB, cold reads with two threads took 20 % longer."""


class MemoryShares(NamedTuple):
    """Memory limits in bytes, one per use. Together with the parts of all reading threads, they are
    15/16 of the budget at most; the rest is for messages and the allocator."""

    staged: int
    """Raw bytes of staged blocks, which wait to be written or are being written."""
    ends: int
    """Keys of ended requests whose manifests are not written yet."""
    transaction: int
    """Raw bytes of all packs in one transaction, and of one pack."""
    part: int
    """Stored bytes that one part of a load job reads into buffers instead of directly into rows."""

    @classmethod
    def of(cls, bound: int) -> MemoryShares:
        """Return the limits for a budget of ``bound`` bytes, the value of ``staging_bytes``."""
        # share for the medium's copy of the data that a transaction writes
        transaction = bound // 4
        # share for two transactions: the blocks of one are written while those of the next arrive
        staged = bound // 2
        # share of all reading threads together
        buffers = bound // 8
        return cls(
            staged=staged,
            ends=bound // 16,
            transaction=min(MAX_PACK_BYTES, transaction),
            part=min(_PART_BYTES, buffers // MAX_IO_THREADS),
        )


def default_io_threads() -> int:
    """Return the default of ``io_threads``: 4 on a machine with 8 cores or more, otherwise 2.

    On a virtual disk with 16 cores, contexts of 2 GiB were restored to a GPU at 0.74, 0.89 and 0.91
    times the throughput of the disk with 2, 4 and 8 threads (``benchmarks.gpu.restore``). Fewer
    cores are left to the engine.
    """
    num_cores = os.cpu_count() or 1
    return 4 if num_cores >= _MANY_CORES else 2


@contextmanager
def no_collections() -> Iterator[None]:
    """Disable garbage collection while many long-lived objects are created: each collection would
    scan them again."""
    collects = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if collects:
            gc.enable()


def keep_out_of_collections() -> None:
    """Exclude all present objects from garbage collection, for the rest of the process: a full
    collection delays the first job after a start by 2 to 5 ms.
    """
    gc.collect()
    gc.freeze()


def trim_heap() -> None:
    """Return freed memory to the operating system with ``malloc_trim``, if the C library has it."""
    c_library = ctypes.CDLL(None)
    malloc_trim = getattr(c_library, "malloc_trim", None)
    if malloc_trim is not None:
        malloc_trim(0)
