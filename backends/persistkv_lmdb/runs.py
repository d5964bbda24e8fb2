"""Where the parts of a payload lie in segment files, and what is transferred at once."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple

from persistkv.config import PAGE_BYTES
from persistkv_lmdb.gathering import MOST_BUFFERS, behind, front
from persistkv_lmdb.space import Extent

CALL_BYTES = 4 << 20
"""4 MiB: what is one call, of reads that are used as they come. Each end of one wakes a thread up, which beside a busy
engine waits for a processor: in calls of 2 MiB, jobs of 32 MiB took 16 to 18 ms there instead of 11 to 12."""


class Run(NamedTuple):
    """Consecutive bytes of one file."""

    segment: int
    offset: int
    length: int


class Call(NamedTuple):
    """What is read at once."""

    pieces: range
    """Their numbers."""
    run: Run
    buffers: Sequence[memoryview]


class Piece(NamedTuple):
    """A part of what is asked for that lies side by side in one file."""

    number: int
    """In a read, the piece's own, as in ``ReadSpan.pieces``; in a scan, that of its payload."""
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


def calls_of(run: Run, buffers: Sequence[memoryview], counts: Sequence[int]) -> Iterator[Call]:
    """A run, whose pieces have so many buffers each, in calls as long as disks like them."""
    first = first_buffer = buffer = length = 0
    offset = run.offset
    for piece, count in enumerate(counts):
        full = length >= CALL_BYTES or buffer + count - first_buffer > MOST_BUFFERS
        if length and full:
            yield Call(range(first, piece), Run(run.segment, offset, length), buffers[first_buffer:buffer])
            first, first_buffer, offset, length = piece, buffer, offset + length, 0
        length += sum(map(len, buffers[buffer : buffer + count]))
        buffer += count
    yield Call(range(first, len(counts)), Run(run.segment, offset, length), buffers[first_buffer:])


def pieces_of(call: Call, counts: Sequence[int]) -> Iterator[Piece]:
    """The pieces of a call."""
    offset, first = call.run.offset, 0
    for number in call.pieces:
        some = call.buffers[first : first + counts[number]]
        length = sum(map(len, some))
        yield Piece(number, Run(call.run.segment, offset, length), some)
        offset += length
        first += counts[number]


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
