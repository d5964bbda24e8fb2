"""Payloads in LMDB itself (placement ``inline``), in pieces of at most 256 KiB.

In LMDB, a value takes contiguous pages, and a full, fragmented file has no contiguous room for
larger values.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator, Sequence

from persistkv.config import PAGE_BYTES
from persistkv.storage.catalogue import TableRows
from persistkv.storage.format.codec import Buffer
from persistkv_lmdb.layout import PIECES

# 256 KiB: small enough to find contiguous room in a store of a few MiB
PIECE_BYTES = 256 << 10
# index of a piece, big-endian: LMDB orders the pieces by it
_PIECE = struct.Struct(">I")


class InlinePayloads:
    """Payloads of packs as rows of the table ``PIECES`` within one transaction."""

    def __init__(self, rows: TableRows) -> None:
        self._rows = rows

    def write(self, name: bytes, stream: Iterator[Buffer]) -> None:
        """Write a payload as the pieces of the pack ``name`` (namespace and pack id). Errors of the
        stream are raised unchanged."""
        for index, piece in enumerate(_pieces(stream)):
            key = _piece_key(name, index)
            self._rows.put(PIECES, key, piece)

    def delete(self, name: bytes) -> None:
        """Delete a pack's payload, if it is inline."""
        pieces = self._rows.starting_with(PIECES, name)
        # collect the keys first: rows must not change during the iteration
        keys = [bytes(key) for key, _ in pieces]
        for key in keys:
            self._rows.delete(PIECES, key)


def _piece_key(name: bytes, index: int) -> bytes:
    return name + _PIECE.pack(index)


def _pieces(stream: Iterator[Buffer]) -> Iterator[Buffer]:
    """Cut a stream into pieces of ``PIECE_BYTES``, of which the last one may be shorter. Only
    pieces that span several buffers are copied."""
    begun: list[memoryview] = []  # the beginning of the next piece
    length = 0  # bytes of ``begun``
    for buffer in stream:
        rest = memoryview(buffer)
        while length + len(rest) >= PIECE_BYTES:
            missing = PIECE_BYTES - length
            end_of_piece = rest[:missing]
            if begun:
                yield b"".join([*begun, end_of_piece])
            else:
                yield end_of_piece
            rest = rest[missing:]
            begun = []
            length = 0
        if rest:
            begun.append(rest)
            length += len(rest)
    if begun:
        yield b"".join(begun)


def page_bytes(payload_length: int) -> int:
    """Return an upper bound on the bytes of the pages that the pieces of a payload take, LMDB's
    headers included."""
    # Count two pages for each piece: one for LMDB's header, and one because the last page may be
    # incomplete. The last piece may be shorter, so count one more than there are whole pieces.
    num_pieces = payload_length // PIECE_BYTES + 1
    return payload_length + 2 * num_pieces * PAGE_BYTES


def read_pieces(
    rows: TableRows,
    name: bytes,
    offset: int,
    buffers: Sequence[memoryview],
) -> bool:
    """Fill ``buffers``, one after the other, with the bytes of the pack ``name`` (namespace and
    pack id) from the byte ``offset`` on. Return False if the pack is absent or too short: the
    buffers then have undefined content.
    """
    # ``index`` is the piece with the next byte, ``start`` the place of this byte in it
    index, start = divmod(offset, PIECE_BYTES)
    piece = rows.get(PIECES, _piece_key(name, index))
    for buffer in buffers:
        rest = buffer.cast("B")
        while rest:
            if start == PIECE_BYTES:
                index += 1
                start = 0
                piece = rows.get(PIECES, _piece_key(name, index))
            # the pack is absent, or its payload ends before the buffers are full
            if piece is None or start >= len(piece):
                return False
            count = min(len(rest), len(piece) - start)
            rest[:count] = piece[start : start + count]
            rest = rest[count:]
            start += count
    return True
