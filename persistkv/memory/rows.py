"""Access to the primary tier's rows for storage: gather blocks, scatter blocks, and views for
direct I/O."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from persistkv.config import RowLayout

ByteArray = npt.NDArray[np.uint8]


class Rows:
    """Memory of the primary tier as a byte array of shape (num_blocks, row_stride); row i holds
    block i.

    References its buffer, which must be writable and contiguous: delete this object before the
    memory is unmapped.

    :raises ValueError: the buffer's size is not a multiple of the row stride.
    """

    def __init__(self, buffer: memoryview, layout: RowLayout) -> None:
        flat = np.frombuffer(buffer, dtype=np.uint8)
        if flat.size % layout.row_stride:
            raise ValueError(
                f"{flat.size} bytes are no multiple of the row stride {layout.row_stride}"
            )
        self.layout = layout
        self.array: ByteArray = flat.reshape(-1, layout.row_stride)
        is_flat = buffer.ndim == 1 and buffer.format == "B"
        self._flat = buffer if is_flat else buffer.cast("B")

    def __len__(self) -> int:
        return len(self.array)

    def check(self, block_ids: Sequence[int]) -> None:
        """:raises ValueError: a row does not exist."""
        if block_ids and not 0 <= min(block_ids) <= max(block_ids) < len(self):
            raise ValueError(
                f"rows {min(block_ids)} to {max(block_ids)} do not exist: there are "
                f"{len(self)} rows"
            )

    def places(self, group: int, block_id: int) -> list[memoryview]:
        """Return a writable view of each byte range that a block of the group uses in row
        ``block_id``."""
        base = block_id * self.layout.row_stride
        places = []
        for offset, size in self.layout.groups[group].ranges:
            start = base + offset
            places.append(self._flat[start : start + size])
        return places

    def pieces(self, group: int, block_ids: Sequence[int]) -> list[memoryview]:
        """Return writable views of the bytes that blocks of the group use in their rows, in the
        order of ``block_ids``, which must not be empty. If a block uses its whole row, consecutive
        rows are returned as one view.
        """
        stride = self.layout.row_stride
        pieces = []
        if self.layout.groups[group].ranges == ((0, stride),):
            for first, end in runs(block_ids):
                pieces.append(self._flat[first * stride : end * stride])
        else:
            for block_id in block_ids:
                pieces += self.places(group, block_id)
        return pieces

    def gather(self, group: int, block_ids: Sequence[int]) -> ByteArray:
        """Return a copy of blocks of the group, as an array of shape (len(block_ids),
        block_bytes)."""
        ids = np.asarray(block_ids)
        ranges = self.layout.groups[group].ranges
        parts = [self.array[ids, offset : offset + size] for offset, size in ranges]
        return parts[0] if len(parts) == 1 else np.concatenate(parts, axis=1)

    def scatter(self, group: int, block_ids: Sequence[int], blocks: ByteArray) -> None:
        """Copy ``blocks``, an array as ``gather`` returns it, into the rows ``block_ids``."""
        ids = np.asarray(block_ids)
        start = 0
        for offset, size in self.layout.groups[group].ranges:
            self.array[ids, offset : offset + size] = blocks[:, start : start + size]
            start += size


def runs(numbers: Sequence[int]) -> list[tuple[int, int]]:
    """Return (first, last + 1) of each run of consecutive ascending numbers. ``numbers`` must not
    be empty."""
    found: list[tuple[int, int]] = []
    first = end = numbers[0]
    for number in numbers:
        if number != end:
            found.append((first, end))
            first = number
        end = number + 1
    return [*found, (first, end)]


@dataclass(frozen=True)
class RowBlocks:
    """``BlockSource`` of blocks in rows of the primary tier."""

    rows: Rows
    group: int
    block_ids: Sequence[int]

    def gather(self, start: int, stop: int) -> ByteArray:
        return self.rows.gather(self.group, self.block_ids[start:stop])

    def pieces(self, start: int, stop: int) -> list[memoryview]:
        return self.rows.pieces(self.group, self.block_ids[start:stop])


@dataclass(frozen=True)
class StagedBlocks:
    """``BlockSource`` of copies of blocks."""

    runs: Sequence[ByteArray]
    """Arrays of blocks in order, each of shape (number of blocks, block_bytes)."""

    def gather(self, start: int, stop: int) -> ByteArray:
        parts = self._parts(start, stop)
        return parts[0] if len(parts) == 1 else np.concatenate(parts)

    def pieces(self, start: int, stop: int) -> list[memoryview]:
        return [part.data.cast("B") for part in self._parts(start, stop)]

    def _parts(self, start: int, stop: int) -> list[ByteArray]:
        parts = []
        first = 0  # index of the run's first block
        for run in self.runs:
            part = run[max(0, start - first) : max(0, stop - first)]
            if len(part):
                parts.append(part)
            first += len(run)
        return parts
