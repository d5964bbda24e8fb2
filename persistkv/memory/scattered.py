"""Blocks anywhere in memory, each in one or several regions: memory of callers that have no
rows."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import NamedTuple

import numpy as np

from persistkv.config import PAGE_BYTES, GroupLayout, RowLayout
from persistkv.memory.regions import Regions, copy_in, copy_out
from persistkv.memory.rows import BlockMemory, ByteArray
from persistkv.memory.timed import TimedBlocks
from persistkv.rounding import round_up


class _BlockRun(NamedTuple):
    """Blocks of a call with a deadline."""

    blocks: TimedBlocks
    first_number: int
    """Number of the first block in ``ScatteredBlocks``; the other blocks have the next numbers."""

    def part(self, number: int, count: int) -> memoryview:
        """Return the bytes of ``count`` blocks from block ``number`` on."""
        index = number - self.first_number
        return self.blocks.part(index, count)


class ScatteredBlocks(BlockMemory):
    """Blocks that are registered under numbers for the time of a job: each as a list of regions,
    or, for a call with a deadline, all together as ``TimedBlocks``.

    A registered block keeps its memory alive. One thread at a time may call ``add``, ``add_timed``
    and ``remove``.

    :param block_bytes: for each KV cache group, the bytes of one block.
    """

    def __init__(self, block_bytes: Sequence[int]) -> None:
        # a layout needs rows in which each block fits, although no rows exist
        largest = max(block_bytes, default=1)
        row_stride = round_up(largest, PAGE_BYTES)
        groups = map(GroupLayout.of_bytes, block_bytes)
        self.layout = RowLayout(row_stride, tuple(groups))
        self._places: dict[int, Regions | _BlockRun] = {}
        """By number of a block, its regions, or the blocks of the call that it is part of."""
        self._next = 0
        """Number of the next block; no number is used twice."""

    def add(self, blocks: Sequence[Regions]) -> range:
        """Register blocks; return a new number for each, valid until ``remove``."""
        numbers = self._new_numbers(len(blocks))
        placed = zip(numbers, blocks, strict=True)
        self._places.update(placed)
        return numbers

    def add_timed(self, blocks: TimedBlocks) -> range:
        """Register the blocks of a call with a deadline; return a new number for each, valid until
        ``remove``. ``pieces`` returns adjacent ones as one view."""
        numbers = self._new_numbers(len(blocks))
        run = _BlockRun(blocks, numbers.start)
        # share one object between all blocks, because hundreds of new objects would start the
        # garbage collector
        placed = dict.fromkeys(numbers, run)
        self._places.update(placed)
        return numbers

    def _new_numbers(self, count: int) -> range:
        """Reserve consecutive numbers for blocks."""
        first = self._next
        self._next += count
        return range(first, self._next)

    def remove(self, block_ids: Iterable[int]) -> None:
        """Forget blocks. No call may use them any more."""
        for number in block_ids:
            del self._places[number]

    def check(self, block_ids: Sequence[int]) -> None:
        for number in block_ids:
            if number not in self._places:
                raise ValueError(f"block {number} is not registered")

    def pieces(
        self,
        group: int,
        block_ids: Sequence[int],
    ) -> list[memoryview]:
        """Return the regions of the blocks in order; one view for adjacent blocks of one call with
        a deadline."""
        first = block_ids[0]
        last = block_ids[-1]
        place = self._places[first]
        # a call has consecutive numbers, so all numbers between two of its blocks are of this call
        are_of_one_call = place is self._places[last]
        if isinstance(place, _BlockRun) and are_of_one_call:
            adjacent = range(first, last + 1)
            if list(block_ids) == list(adjacent):
                piece = place.part(first, len(block_ids))
                return [piece]
        pieces: list[memoryview] = []
        for number in block_ids:
            pieces += self._regions(number)
        return pieces

    def verified(self, group: int, block_ids: Sequence[int]) -> None:
        for number in block_ids:
            place = self._places[number]
            # other blocks were read into the caller's memory directly
            if isinstance(place, _BlockRun):
                index = number - place.first_number
                place.blocks.verified(index)

    def gather(self, group: int, block_ids: Sequence[int]) -> ByteArray:
        """Copy the regions of the blocks into a new array, one row for each block."""
        block_bytes = self.layout.groups[group].block_bytes
        shape = (len(block_ids), block_bytes)
        blocks = np.empty(shape, np.uint8)
        pieces = self.pieces(group, block_ids)
        all_bytes = blocks.data.cast("B")
        copy_in(pieces, all_bytes)
        return blocks

    def scatter(
        self,
        group: int,
        block_ids: Sequence[int],
        blocks: ByteArray,
    ) -> None:
        for block, number in zip(blocks, block_ids, strict=True):
            regions = self._regions(number)
            copy_out(block.data, regions)

    def _regions(self, number: int) -> Regions:
        """Return the regions of a block; one region for a block of a call with a deadline."""
        place = self._places[number]
        if isinstance(place, _BlockRun):
            block = place.part(number, count=1)
            return [block]
        return place
