"""How ``staging_bytes``, the bound on all memory of a store's host beyond its index, is shared out.

Half of it holds copies: staged blocks, those that a transaction is writing included. A quarter is for what a
transaction writes, which its medium may hold until it ends (LMDB keeps changed pages in memory). The rest is left to
the scratch memory of reads, frames that are encoded ahead, messages, and the allocator.
"""

from __future__ import annotations

from typing import NamedTuple

from persistkv.storage.pack import MAX_PACK_BYTES

MIN_STAGING_BYTES = 64 << 20  # 64 MiB: below, packs would be cut too small to be read fast
BLOCKS_STAGED = 32  # blocks of the largest size that the bound has room for, so that each share has room for some
MAX_IO_THREADS = 8

_PART_BYTES = 4 << 20  # 4 MiB: half a millisecond of memory's speed, and it stays in the cache until it is verified


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
