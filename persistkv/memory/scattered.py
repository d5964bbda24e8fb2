"""Blocks anywhere in memory, each in one or several regions: memory of callers that have no
rows."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Sequence

import numpy as np

from persistkv.config import PAGE_BYTES, GroupLayout, RowLayout
from persistkv.memory.rows import BlockMemory, ByteArray
from persistkv.rounding import round_up

Regions = Sequence[memoryview]
"""The bytes of one block: contiguous views of bytes, one after the other."""


class ScatteredBlocks(BlockMemory):
    """Blocks that are registered for the time of a job, each as a list of regions.

    A registered block keeps its memory alive.

    :param block_bytes: for each KV cache group, the bytes of one block.
    """

    def __init__(self, block_bytes: Sequence[int]) -> None:
        largest = max(block_bytes, default=1)
        groups = [GroupLayout(((0, size),)) for size in block_bytes]
        self.layout = RowLayout(round_up(largest, PAGE_BYTES), tuple(groups))
        self._regions: dict[int, Regions] = {}
        self._numbers = itertools.count()

    def add(self, blocks: Iterable[Regions]) -> list[int]:
        """Register blocks; return a new number for each, valid until ``remove``."""
        added = []
        for regions in blocks:
            number = next(self._numbers)
            self._regions[number] = regions
            added.append(number)
        return added

    def remove(self, block_ids: Iterable[int]) -> None:
        """Forget blocks. No call may use them any more."""
        for number in block_ids:
            del self._regions[number]

    def check(self, block_ids: Sequence[int]) -> None:
        for number in block_ids:
            if number not in self._regions:
                raise ValueError(f"block {number} is not registered")

    def pieces(self, group: int, block_ids: Sequence[int]) -> list[memoryview]:
        pieces: list[memoryview] = []
        for number in block_ids:
            pieces += self._regions[number]
        return pieces

    def gather(self, group: int, block_ids: Sequence[int]) -> ByteArray:
        size = self.layout.groups[group].block_bytes
        blocks = np.empty((len(block_ids), size), np.uint8)
        for block, number in zip(blocks, block_ids, strict=True):
            start = 0
            for region in self._regions[number]:
                stop = start + len(region)
                block[start:stop] = region
                start = stop
        return blocks

    def scatter(self, group: int, block_ids: Sequence[int], blocks: ByteArray) -> None:
        for block, number in zip(blocks, block_ids, strict=True):
            copy_out(block.data, self._regions[number])


def copy_out(block: memoryview, regions: Regions) -> None:
    """Copy the bytes of a block into its regions, which have as many bytes together."""
    start = 0
    for region in regions:
        stop = start + len(region)
        region[:] = block[start:stop]
        start = stop
