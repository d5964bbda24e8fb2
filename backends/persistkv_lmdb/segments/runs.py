"""Where the parts of a payload lie in segment files, and what is transferred at once."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple

from persistkv.config import PAGE_BYTES
from persistkv_lmdb.segments.allocator import Extent
from persistkv_lmdb.segments.vectored_io import behind, front


class Run(NamedTuple):
    """Consecutive bytes of one file."""

    segment: int
    offset: int
    length: int


class Piece(NamedTuple):
    """A part of what is asked for that lies side by side in one file."""

    number: int
    """Of its payload, in a scan."""
    run: Run
    buffers: Sequence[memoryview]


def runs_of(extents: Sequence[Extent], offset: int, length: int) -> Iterator[Run]:
    """Where a part of a payload lies, as far as it lies anywhere."""
    for extent in extents:
        size = extent.pages * PAGE_BYTES
        if length and offset < size:
            count = min(length, size - offset)
            yield Run(extent.segment, extent.page * PAGE_BYTES + offset, count)
            length -= count
            offset = size
        offset -= size


def placed_pieces(
    number: int, extents: Sequence[Extent], offset: int, buffers: Sequence[memoryview]
) -> Iterator[Piece]:
    """What is to be read of a payload from ``offset`` on, as far as it lies anywhere.

    :param number: of the payload.
    """
    rest = [buffer.cast("B") for buffer in buffers if buffer.nbytes]
    for run in runs_of(extents, offset, sum(map(len, rest))):
        yield Piece(number, run, front(rest, run.length))
        rest = behind(rest, run.length)


def neighbours_of(pieces: Sequence[Piece]) -> Iterator[list[Piece]]:
    """Those that lie side by side, as far as they stand in that order."""
    together: list[Piece] = []
    end = (-1, 0)
    for piece in pieces:
        if together and (piece.run.segment, piece.run.offset) != end:
            yield together
            together = []
        together.append(piece)
        end = (piece.run.segment, piece.run.offset + piece.run.length)
    if together:
        yield together
