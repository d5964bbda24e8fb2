"""Rows of the primary tier as the storage side sees them: gather blocks out of them, hand out places to fill."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from persistkv.config import RowLayout
from persistkv.storage.arrays import ByteArray


class Rows:
    """A shared (num_blocks, row_stride) byte array and the layout of what lies in its rows.

    Holds the buffer it was made of: drop it before the mapping is closed.
    """

    def __init__(self, buffer: memoryview, layout: RowLayout) -> None:
        """Wrap a writable, contiguous buffer.

        :raises ValueError: where its size is no multiple of the row stride.
        """
        flat = np.frombuffer(buffer, dtype=np.uint8)
        if flat.size % layout.row_stride:
            raise ValueError(f"{flat.size} bytes are no multiple of the row stride {layout.row_stride}")
        self.layout = layout
        self.array: ByteArray = flat.reshape(-1, layout.row_stride)
        self._flat = buffer.cast("B") if buffer.ndim != 1 or buffer.format != "B" else buffer

    def __len__(self) -> int:
        return len(self.array)

    def check(self, block_ids: Sequence[int]) -> None:
        """Refuse rows that are not there.

        :raises ValueError: naming the row.
        """
        if block_ids and not 0 <= min(block_ids) <= max(block_ids) < len(self):
            raise ValueError(f"rows {min(block_ids)} to {max(block_ids)} do not lie within {len(self)}")

    def places(self, group: int, block_id: int) -> list[memoryview]:
        """The valid byte ranges of one block of the group, writable, in order."""
        base = block_id * self.layout.row_stride
        return [self._flat[base + offset : base + offset + size] for offset, size in self.layout.groups[group].ranges]

    def pieces(self, group: int, block_ids: Sequence[int]) -> list[memoryview]:
        """The valid byte ranges of these blocks, in order; rows that are valid as a whole are joined."""
        layout, stride = self.layout.groups[group], self.layout.row_stride
        if layout.ranges == ((0, stride),):
            return [self._flat[first * stride : end * stride] for first, end in runs(block_ids)]
        return [place for block_id in block_ids for place in self.places(group, block_id)]

    def gather(self, group: int, block_ids: Sequence[int]) -> ByteArray:
        """Blocks side by side, (n, block_bytes), contiguous: the rows themselves where they lie so, else a copy."""
        layout = self.layout.groups[group]
        first, count = block_ids[0], len(block_ids)
        offset, length = layout.ranges[0]
        whole_row = length == self.layout.row_stride
        if (whole_row or count == 1) and len(layout.ranges) == 1 and _consecutive(block_ids):
            return self.array[first : first + count, offset : offset + length]
        if len(layout.ranges) == 1:
            return self.array[np.asarray(block_ids), offset : offset + length]
        ids = np.asarray(block_ids)
        return np.concatenate([self.array[ids, start : start + size] for start, size in layout.ranges], axis=1)

    def scatter(self, group: int, block_ids: Sequence[int], blocks: ByteArray) -> None:
        """Write blocks, (n, block_bytes), into rows."""
        ids = np.asarray(block_ids)
        start = 0
        for offset, size in self.layout.groups[group].ranges:
            self.array[ids, offset : offset + size] = blocks[:, start : start + size]
            start += size


def runs(numbers: Sequence[int]) -> list[tuple[int, int]]:
    """First and end of each run of consecutive numbers, of which there is one at least."""
    found: list[tuple[int, int]] = []
    first = end = numbers[0]
    for number in numbers:
        if number != end:
            found.append((first, end))
            first = number
        end = number + 1
    return [*found, (first, end)]


def _consecutive(block_ids: Sequence[int]) -> bool:
    first = block_ids[0]
    return block_ids[-1] - first == len(block_ids) - 1 and list(block_ids) == list(range(first, first + len(block_ids)))


@dataclass(frozen=True)
class RowBlocks:
    """Blocks that lie in rows: a pack written straight from the primary tier."""

    rows: Rows
    group: int
    block_ids: Sequence[int]

    def gather(self, start: int, stop: int) -> ByteArray:
        """Blocks ``start`` to ``stop``."""
        return self.rows.gather(self.group, self.block_ids[start:stop])

    def pieces(self, start: int, stop: int) -> list[memoryview]:
        """The same, where they lie."""
        return self.rows.pieces(self.group, self.block_ids[start:stop])


@dataclass(frozen=True)
class StagedBlocks:
    """Blocks that were copied out of their rows, in runs of one or more."""

    runs: Sequence[ByteArray]
    """Each of shape (n, block_bytes)."""

    def gather(self, start: int, stop: int) -> ByteArray:
        """Blocks ``start`` to ``stop`` of all runs together."""
        parts = self._parts(start, stop)
        return parts[0] if len(parts) == 1 else np.concatenate(parts)

    def pieces(self, start: int, stop: int) -> list[memoryview]:
        """The same, where they lie."""
        return [part.data.cast("B") for part in self._parts(start, stop)]

    def _parts(self, start: int, stop: int) -> list[ByteArray]:
        parts, position = [], 0
        for run in self.runs:
            part = run[max(0, start - position) : max(0, stop - position)]
            if len(part):
                parts.append(part)
            position += len(run)
        return parts
