"""Access to the primary tier's rows for storage: gather blocks, scatter blocks, and views for
direct I/O."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from persistkv.config import RowLayout

ByteArray = npt.NDArray[np.uint8]


class BlockMemory(ABC):
    """Memory with numbered places for blocks, which a store reads and fills. Any thread may call
    its methods."""

    layout: RowLayout
    """Bytes of a block of each KV cache group."""

    @abstractmethod
    def check(self, block_ids: Sequence[int]) -> None:
        """:raises ValueError: a place does not exist."""

    @abstractmethod
    def pieces(
        self,
        group: int,
        block_ids: Sequence[int],
    ) -> list[memoryview]:
        """Return writable views of the bytes of blocks of the group, in the order of ``block_ids``,
        which must not be empty. Bytes that are adjacent may be returned as one view.
        """

    def verified(self, group: int, block_ids: Sequence[int]) -> None:
        """Receive the notice that a thread has read blocks of the group into their places and
        verified them. No effect here; memory that copies blocks to a caller overrides this."""
        return

    @abstractmethod
    def gather(self, group: int, block_ids: Sequence[int]) -> ByteArray:
        """Return a copy of blocks of the group, as an array of shape (len(block_ids),
        block_bytes)."""

    @abstractmethod
    def scatter(
        self,
        group: int,
        block_ids: Sequence[int],
        blocks: ByteArray,
    ) -> None:
        """Copy ``blocks``, an array as ``gather`` returns it, into the places ``block_ids``."""


class Rows(BlockMemory):
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
        """All rows, shape (num_blocks, row_stride)."""
        self._bytes = buffer
        """The same memory as one sequence of bytes, of which ``places`` and ``pieces`` return
        views."""
        if buffer.ndim != 1 or buffer.format != "B":
            self._bytes = buffer.cast("B")

    def __len__(self) -> int:
        return len(self.array)

    def check(self, block_ids: Sequence[int]) -> None:
        """Raise ValueError if a row does not exist."""
        if not block_ids:
            return
        lowest = min(block_ids)
        highest = max(block_ids)
        num_rows = len(self.array)
        if lowest < 0 or highest >= num_rows:
            raise ValueError(
                f"rows {lowest} to {highest} do not exist: there are {num_rows} rows"
            )

    def places(self, group: int, block_id: int) -> list[memoryview]:
        """Return a writable view of each byte range that a block of the group uses in row
        ``block_id``."""
        row_start = block_id * self.layout.row_stride
        places = []
        for offset, size in self.layout.groups[group].ranges:
            start = row_start + offset
            end = start + size
            place = self._bytes[start:end]
            places.append(place)
        return places

    def pieces(
        self,
        group: int,
        block_ids: Sequence[int],
    ) -> list[memoryview]:
        """See ``BlockMemory``. If a block uses its whole row, consecutive rows are returned as one
        view."""
        stride = self.layout.row_stride
        whole_row = (0, stride)
        uses_whole_rows = self.layout.groups[group].ranges == (whole_row,)
        pieces = []
        if uses_whole_rows:
            for first_row, end_row in runs(block_ids):
                start = first_row * stride
                end = end_row * stride
                piece = self._bytes[start:end]
                pieces.append(piece)
            return pieces
        # unused bytes of the rows separate the blocks, so no view can have more than one
        for block_id in block_ids:
            pieces += self.places(group, block_id)
        return pieces

    def gather(self, group: int, block_ids: Sequence[int]) -> ByteArray:
        """Copy the byte ranges of each block out of its row, one range after the other."""
        ids = np.asarray(block_ids)
        parts = []
        for offset, size in self.layout.groups[group].ranges:
            stop = offset + size
            part: ByteArray = self.array[ids, offset:stop]
            parts.append(part)
        # a single part needs no second copy: the selection by ``ids`` has copied it already
        if len(parts) == 1:
            return parts[0]
        return np.concatenate(parts, axis=1)

    def scatter(
        self,
        group: int,
        block_ids: Sequence[int],
        blocks: ByteArray,
    ) -> None:
        """Copy each block into the byte ranges of its row; the other bytes of the row stay."""
        ids = np.asarray(block_ids)
        # offset within a block of ``blocks``, which has no gaps between its ranges
        start = 0
        for offset, size in self.layout.groups[group].ranges:
            stop = start + size
            part = blocks[:, start:stop]
            row_stop = offset + size
            self.array[ids, offset:row_stop] = part
            start = stop


def runs(numbers: Sequence[int]) -> list[tuple[int, int]]:
    """Return (first, last + 1) of each run of consecutive ascending numbers. ``numbers`` must not
    be empty."""
    found: list[tuple[int, int]] = []
    first = numbers[0]
    end = first  # the number that continues the run
    for number in numbers:
        continues_run = number == end
        if not continues_run:
            found.append((first, end))
            first = number
        end = number + 1
    found.append((first, end))
    return found


@dataclass(frozen=True)
class RowBlocks:
    """``BlockSource`` of blocks in memory of the caller, such as rows of the primary tier."""

    rows: BlockMemory
    group: int
    block_ids: Sequence[int]
    """Places of the blocks in ``rows``, in the order of the blocks."""

    def gather(self, start: int, stop: int) -> ByteArray:
        block_ids = self.block_ids[start:stop]
        return self.rows.gather(self.group, block_ids)

    def pieces(self, start: int, stop: int) -> list[memoryview]:
        block_ids = self.block_ids[start:stop]
        return self.rows.pieces(self.group, block_ids)


@dataclass(frozen=True)
class StagedBlocks:
    """``BlockSource`` of copies of blocks."""

    runs: Sequence[ByteArray]
    """Arrays of blocks in order, each of shape (number of blocks, block_bytes)."""

    def gather(self, start: int, stop: int) -> ByteArray:
        parts = self._parts(start, stop)
        # return a single part without a copy
        if len(parts) == 1:
            return parts[0]
        return np.concatenate(parts)

    def pieces(self, start: int, stop: int) -> list[memoryview]:
        parts = self._parts(start, stop)
        return [part.data.cast("B") for part in parts]

    def _parts(self, start: int, stop: int) -> list[ByteArray]:
        """Return the blocks ``start`` to ``stop`` - 1 as views: one view for each of ``runs`` that
        holds some of them."""
        parts = []
        run_start = 0  # index of the run's first block among all blocks
        for run in self.runs:
            begin = max(0, start - run_start)
            end = max(0, stop - run_start)
            part = run[begin:end]
            if len(part):
                parts.append(part)
            run_start += len(run)
        return parts
