"""Memory of calls with a deadline.

The store uses memory of a pool, in huge pages, however long a disk hangs. The thread that writes a
block's frame, or has verified it, copies the block between this memory and the caller's, while
other threads transfer other blocks. From the deadline on, the caller's memory is not accessed.
"""

from __future__ import annotations

import errno
import mmap
import threading
from collections.abc import Sequence

from persistkv.memory.pool import BufferPool
from persistkv.memory.regions import Regions, copy_in, copy_out


class TimedBlocks:
    """Blocks of one size in memory of a pool, one after the other, and in the caller's memory.
    Thread-safe."""

    def __init__(
        self,
        pool: BufferPool,
        blocks: Sequence[Regions],
        block_bytes: int,
    ) -> None:
        """Take memory of the pool for the blocks.

        :param blocks: the caller's memory, in use until ``revoke``.
        :param block_bytes: bytes of each block.
        :raises OSError: no memory is left.
        """
        self.block_bytes = block_bytes
        num_bytes = len(blocks) * block_bytes
        self._pool = pool
        self._buffer: mmap.mmap = pool.take(num_bytes)
        self._memory = memoryview(self._buffer)[:num_bytes]
        """The first ``num_bytes`` of the buffer, which may be larger."""
        self._lock = threading.Lock()
        self._caller_blocks: Sequence[Regions] | None = blocks
        """The caller's memory; None from the deadline on: it must not be accessed any more."""
        self._is_copied = [False] * len(blocks)
        """For each block, whether it was copied between the two memories."""

    def __len__(self) -> int:
        return len(self._is_copied)

    def part(self, first: int, count: int) -> memoryview:
        """Return the pool's memory of ``count`` blocks from number ``first`` on."""
        start = first * self.block_bytes
        stop = start + count * self.block_bytes
        return self._memory[start:stop]

    def verified(self, number: int) -> None:
        """Receive the notice that the store has read and verified a block. No effect here;
        ``BlocksToLoad`` copies the block."""
        return

    def revoke(self) -> list[bool]:
        """End the use of the caller's memory; return for each block whether it was copied. If
        another thread is copying a block, wait for the end of this copy."""
        with self._lock:
            self._caller_blocks = None
        return self._is_copied

    def release(self) -> None:
        """Return the memory to the pool. Nothing may use it any more."""
        self._pool.give_back(self._buffer)


class BlocksToStore(TimedBlocks):
    """Blocks that are copied from the caller's memory when they are first used."""

    def part(self, first: int, count: int) -> memoryview:
        """Return the pool's memory of ``count`` blocks from number ``first`` on; first copy to it
        those that are used for the first time.

        :raises OSError: a block was not copied before the deadline.
        """
        with self._lock:
            for number in range(first, first + count):
                if not self._is_copied[number]:
                    self._copy(number)
        return super().part(first, count)

    def _copy(self, number: int) -> None:
        """Copy a block from the caller's memory into the pool's. The lock must be held."""
        if self._caller_blocks is None:
            raise OSError(errno.ECANCELED, "the deadline of the call has passed")
        # use ``part`` of the superclass, because the one of this class would call ``_copy`` again
        target = super().part(number, count=1)
        copy_in(self._caller_blocks[number], target)
        self._is_copied[number] = True


class BlocksToLoad(TimedBlocks):
    """Blocks that are copied to the caller's memory when they are verified."""

    def verified(self, number: int) -> None:
        """Copy a block to the caller's memory, unless the deadline has passed."""
        with self._lock:
            if self._caller_blocks is None:
                return
            block = self.part(number, count=1)
            copy_out(block, self._caller_blocks[number])
            self._is_copied[number] = True
