"""Payloads as rows of at most 256 KiB, for drivers that store payloads in the same rows as the catalogue.

In LMDB, a value takes contiguous pages. A full, fragmented file has no contiguous room for larger values.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator, Sequence

from persistkv.config import PAGE_BYTES
from persistkv.storage.catalog.rows import PIECES, Rows
from persistkv.storage.format.codec import Buffer

PIECE_BYTES = 256 << 10  # 256 KiB: small enough to find contiguous room in a store of a few MiB
_INDEX = struct.Struct(">I")


class RowPayloads:
    """Payloads of one transaction, stored as rows; implements ``Payloads``."""

    def __init__(self, rows: Rows) -> None:
        self._rows = rows

    def write(self, name: bytes, stream: Iterator[Buffer], at_most: int) -> None:
        """Write a payload in pieces."""
        index = filled = 0
        buffer = memoryview(bytearray(PIECE_BYTES))
        for part in stream:
            rest = memoryview(part)
            while rest:
                if not filled and len(rest) >= PIECE_BYTES:  # the driver gets a whole piece without a copy here
                    piece, rest = rest[:PIECE_BYTES], rest[PIECE_BYTES:]
                else:
                    count = min(len(rest), PIECE_BYTES - filled)
                    buffer[filled : filled + count] = rest[:count]
                    filled, rest = filled + count, rest[count:]
                    if filled < PIECE_BYTES:
                        break
                    piece, filled = buffer, 0
                self._rows.put(PIECES, name + _INDEX.pack(index), piece)
                index += 1
        if filled:
            self._rows.put(PIECES, name + _INDEX.pack(index), buffer[:filled])

    def delete(self, name: bytes, length: int) -> None:
        """Delete all pieces of a payload; ``length`` is not used."""
        for key in [bytes(key) for key, _ in self._rows.starting_with(PIECES, name)]:
            self._rows.delete(PIECES, key)


def page_bytes(payload_length: int) -> int:
    """Return an upper bound on the bytes of the pages that a payload takes; LMDB adds a header to each piece."""
    return payload_length + PAGE_BYTES * (2 * (payload_length // PIECE_BYTES) + 2)


def read_pieces(rows: Rows, name: bytes, offset: int, buffers: Sequence[memoryview]) -> bool:
    """Fill ``buffers`` with the payload's bytes from ``offset`` on.

    Return False if the payload is absent or too short; the content of the buffers is then undefined.

    :param name: namespace and pack id.
    """
    index, start = divmod(offset, PIECE_BYTES)
    piece = rows.get(PIECES, name + _INDEX.pack(index))
    for buffer in buffers:
        rest = buffer.cast("B")
        while rest:
            if start == PIECE_BYTES:
                index, start = index + 1, 0
                piece = rows.get(PIECES, name + _INDEX.pack(index))
            if piece is None or start >= len(piece):
                return False
            count = min(len(rest), len(piece) - start)
            rest[:count] = piece[start : start + count]
            start, rest = start + count, rest[count:]
    return True
