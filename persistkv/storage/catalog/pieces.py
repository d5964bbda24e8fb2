"""Payloads as rows of at most 256 KiB, for drivers that store them beside the catalogue.

In LMDB, a value takes pages that lie side by side; larger ones are not found in a file that is full and was written for
long.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator, Sequence

from persistkv.config import PAGE_BYTES
from persistkv.storage.catalog.rows import PIECES, Rows
from persistkv.storage.codec import Buffer

PIECE_BYTES = 256 << 10  # 256 KiB: short enough to find room side by side in a store of a few MiB
_INDEX = struct.Struct(">I")


class RowPayloads:
    """Payloads of one transaction, stored as rows; see ``Payloads``."""

    def __init__(self, rows: Rows) -> None:
        self._rows = rows

    def write(self, name: bytes, stream: Iterator[Buffer], at_most: int) -> None:
        """Write a payload in pieces."""
        index = filled = 0
        buffer = memoryview(bytearray(PIECE_BYTES))
        for part in stream:
            rest = memoryview(part)
            while rest:
                if not filled and len(rest) >= PIECE_BYTES:  # a whole piece is copied by the driver alone
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
        """Delete a payload, whatever its length."""
        for key in [bytes(key) for key, _ in self._rows.starting_with(PIECES, name)]:
            self._rows.delete(PIECES, key)


def page_bytes(payload_length: int) -> int:
    """At most what a payload takes in pages: LMDB puts a header before each piece."""
    return payload_length + PAGE_BYTES * (2 * (payload_length // PIECE_BYTES) + 2)


def read_pieces(rows: Rows, name: bytes, offset: int, buffers: Sequence[memoryview]) -> bool:
    """Fill ``buffers`` from ``offset`` on; return False if the payload does not reach so far.

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
