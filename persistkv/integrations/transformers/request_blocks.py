"""A request's device blocks, of all KV cache groups."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

from persistkv.connector.matching import GroupBlocks, longest_match
from persistkv.integrations.transformers.block_pool import BlockPool
from persistkv.integrations.transformers.kv_cache import GroupPages, PagedKVCache, RequestCache

Allocate = Callable[[BlockPool, int], list[int]]
"""Returns blocks of a pool to write, or raises."""


class RequestBlocks:
    """The block tables of one request, and the copies between their blocks and its cache.

    Blocks in the tables stay referenced until ``release``. After a call that raised, the tables can still be released.

    :ivar tables: for each group, the device blocks of the context's full blocks, in order. None: the block was outside
        of the sliding window when the request began, so the request never had it.
    """

    def __init__(self, device: PagedKVCache, allocate: Allocate) -> None:
        self._device = device
        self._allocate = allocate
        self.tables: list[list[int | None]] = [[] for _ in device.groups]

    @property
    def num_blocks(self) -> int:
        """Number of blocks of the context, the same in each group."""
        return len(self.tables[0])

    def acquire_resident(self, hashes: Sequence[bytes], limit: int) -> int:
        """Reference the device's blocks of the longest prefix that all groups can serve.

        :param hashes: hashes of the context's full blocks.
        :param limit: maximum length in tokens.
        :returns: length of the prefix in tokens.
        """
        groups = [GroupBlocks(group.blocks, hashes, group.pool.holds) for group in self._device.groups]
        num_tokens = longest_match(groups, self._device.block_size, 0, limit)
        for group, table in self._groups():
            needed = group.blocks.device_blocks(num_tokens)
            table += [None] * needed.start
            table += [group.pool.acquire(hashes[position]) for position in needed]
        return num_tokens

    def make_room(self, needed: Sequence[range]) -> None:
        """Append blocks to write.

        :param needed: for each group, the positions of the blocks. Table entries before them are filled with None.
        """
        for (group, table), positions in zip(self._groups(), needed, strict=True):
            table += [None] * (positions.start - len(table))
            table += self._allocate(group.pool, len(positions))

    def truncate(self, num_blocks: int) -> None:
        """Release all blocks of the context after the first ``num_blocks``."""
        for group, table in self._groups():
            group.pool.release(_there(table[num_blocks:]))
            del table[num_blocks:]

    def publish(self, hashes: Sequence[bytes], first: int) -> None:
        """Make the written blocks from position ``first`` on reusable."""
        for group, table in self._groups():
            for block_id, block_hash in zip(table[first:], hashes[first : len(table)], strict=True):
                if block_id is not None:
                    group.pool.publish(block_id, block_hash)

    def gather(self, cache: RequestCache) -> None:
        """Fill a request's cache with the blocks that its next token attends to."""
        num_tokens = self.num_blocks * self._device.block_size
        for (group, table), buffer in zip(self._groups(), cache.buffers, strict=True):
            needed = group.blocks.device_blocks(num_tokens)
            group.gather(buffer, needed, _there(table[needed.start :]))
        cache.set_length(num_tokens)

    def keep(self, cache: RequestCache, hashes: Sequence[bytes], num_blocks: int) -> None:
        """Copy blocks that became full to pages, and publish them.

        A block that is resident already is referenced, not written, so that all requests use the same bytes.

        :param num_blocks: full blocks of the context now.
        """
        first = self.num_blocks
        for (group, table), buffer in zip(self._groups(), cache.buffers, strict=True):
            written: dict[int, int] = {}
            for position in range(first, num_blocks):
                block_id = group.pool.acquire(hashes[position])
                if block_id is None:
                    (block_id,) = self._allocate(group.pool, 1)
                    written[position] = block_id
                table.append(block_id)
            group.scatter(buffer, list(written), list(written.values()))
        self.publish(hashes, first)

    def release(self) -> None:
        """Release all blocks."""
        self.truncate(0)

    def _groups(self) -> Iterable[tuple[GroupPages, list[int | None]]]:
        return zip(self._device.groups, self.tables, strict=True)


def _there(table: Iterable[int | None]) -> list[int]:
    return [block_id for block_id in table if block_id is not None]
