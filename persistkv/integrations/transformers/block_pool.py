"""The device's blocks: free blocks, blocks in use, and idle blocks with the KV of earlier requests."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence


class BlockPool:
    """Reference counts of device blocks, with reuse by hash and LRU eviction of unreferenced blocks.

    Not thread-safe.

    :param num_blocks: blocks of the device cache.
    """

    def __init__(self, num_blocks: int) -> None:
        self.num_blocks = num_blocks
        self._free = list(range(num_blocks - 1, -1, -1))
        self._references = [0] * num_blocks
        self._by_hash: dict[bytes, int] = {}
        self._hashes: dict[int, bytes] = {}
        self._idle: OrderedDict[int, None] = OrderedDict()
        """Published blocks without references, in eviction order."""

    @property
    def num_available(self) -> int:
        """Number of blocks that ``allocate`` could return."""
        return len(self._free) + len(self._idle)

    @property
    def num_resident(self) -> int:
        """Number of published blocks, in use or not."""
        return len(self._by_hash)

    def resident(self) -> dict[bytes, int]:
        """Return a copy of the published blocks by hash."""
        return dict(self._by_hash)

    def holds(self, block_hash: bytes) -> bool:
        """Return whether a block of this hash is resident."""
        return block_hash in self._by_hash

    def acquire(self, block_hash: bytes) -> int | None:
        """Add a reference to the resident block of this hash and return the block; None if there is none."""
        block_id = self._by_hash.get(block_hash)
        if block_id is not None:
            self._idle.pop(block_id, None)
            self._references[block_id] += 1
        return block_id

    def allocate(self, count: int) -> list[int] | None:
        """Reference and return ``count`` blocks to write, evicting idle ones; None, with no effect, if too few."""
        if count > self.num_available:
            return None
        while len(self._free) < count:
            block_id, _ = self._idle.popitem(last=False)
            del self._by_hash[self._hashes.pop(block_id)]
            self._free.append(block_id)
        allocated = [self._free.pop() for _ in range(count)]
        for block_id in allocated:
            self._references[block_id] = 1
        return allocated

    def publish(self, block_id: int, block_hash: bytes) -> None:
        """Make a written block reusable; no effect if its hash is resident already."""
        if block_hash not in self._by_hash:
            self._by_hash[block_hash] = block_id
            self._hashes[block_id] = block_hash

    def release(self, block_ids: Sequence[int]) -> None:
        """Drop one reference to each block of a context, given in order. Its last blocks are evicted first."""
        for block_id in reversed(block_ids):
            self._references[block_id] -= 1
            if self._references[block_id]:
                continue
            if block_id in self._hashes:
                self._idle[block_id] = None
            else:
                self._free.append(block_id)

    def forget(self) -> None:
        """Free all idle blocks, so that no block of an earlier request is reused on the device."""
        for block_id in self._idle:
            del self._by_hash[self._hashes.pop(block_id)]
            self._free.append(block_id)
        self._idle.clear()
