"""How ``staging_bytes``, the bound on all memory of a store's host beyond its index, is shared out.

Half of it holds copies: staged blocks, those that a transaction is writing included. A quarter is for what a
transaction writes, which its medium may hold until it ends (LMDB keeps changed pages in memory). The rest is left to
the scratch memory of reads, frames that are encoded ahead, messages, and the allocator.
"""

from __future__ import annotations

import ctypes
import gc
from collections.abc import Iterator
from contextlib import contextmanager
from typing import NamedTuple

from persistkv.storage.pack import MAX_PACK_BYTES

MIN_STAGING_BYTES = 64 << 20  # 64 MiB: below, packs would be cut too small to be read fast
BLOCKS_STAGED = 32  # blocks of the largest size that the bound has room for, so that each share has room for some
MAX_IO_THREADS = 8

_PART_BYTES = 2 << 20
"""2 MiB: it stays in the cache until it is verified; with 4 MiB, cold reads of two threads took a fifth longer."""


class MemoryShares(NamedTuple):
    """Bytes for each use."""

    staged: int
    """Copies of blocks, waiting or being written."""
    ends: int
    """Keys of requests that ended and whose manifest is not written yet."""
    transaction: int
    """Raw bytes of the packs in one transaction, and of one pack."""
    part: int
    """Stored bytes that one call of the backend reads."""

    @classmethod
    def of(cls, bound: int) -> MemoryShares:
        """Shares of a bound."""
        return cls(
            bound // 2, bound // 16, min(MAX_PACK_BYTES, bound // 4), min(_PART_BYTES, bound // (8 * MAX_IO_THREADS))
        )


@contextmanager
def no_collections() -> Iterator[None]:
    """Keep the garbage collector from looking again and again at many objects that are made to stay."""
    collects = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if collects:
            gc.enable()


def keep_out_of_collections() -> None:
    """What there is now is there to stay: the garbage collector is not to look at it any more.

    For a process of our own. Without this, the first job after a start met a full collection: 2 to 5 ms.
    """
    gc.collect()
    gc.freeze()


def give_back() -> None:
    """Have the C library return freed memory to the system, where it can: it keeps what lies between other objects."""
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim is not None:
        trim(0)
