"""A pack's payload as LMDB values of at most 256 KiB.

Each takes pages that lie side by side; larger ones do not find them in a file that is full and was written for long.
"""

from __future__ import annotations

import struct
from collections.abc import Iterable, Sequence

from persistkv.config import PAGE_BYTES
from persistkv.storage.codec import Buffer
from persistkv_lmdb.layout import Transaction

PIECE_BYTES = 256 << 10  # 256 KiB: short enough to find room side by side in a store of a few MiB
_INDEX = struct.Struct(">I")


def page_bytes(payload_length: int) -> int:
    """At most what a payload takes in the file: LMDB puts a header before each piece."""
    return payload_length + PAGE_BYTES * (2 * (payload_length // PIECE_BYTES) + 2)


def write_pieces(transaction: Transaction, name: bytes, stream: Iterable[Buffer]) -> None:
    """Cut a payload and write it.

    :param name: namespace and pack id.
    """
    txn, pieces = transaction.txn, transaction.db.pieces
    index = filled = 0
    buffer = memoryview(bytearray(PIECE_BYTES))
    for chunk in stream:
        rest = memoryview(chunk)
        while rest:
            if not filled and len(rest) >= PIECE_BYTES:  # a whole piece: LMDB copies it from where it lies
                piece, rest = rest[:PIECE_BYTES], rest[PIECE_BYTES:]
            else:
                count = min(len(rest), PIECE_BYTES - filled)
                buffer[filled : filled + count] = rest[:count]
                filled, rest = filled + count, rest[count:]
                if filled < PIECE_BYTES:
                    break
                piece, filled = buffer, 0
            txn.put(name + _INDEX.pack(index), piece, db=pieces)
            index += 1
    if filled:
        txn.put(name + _INDEX.pack(index), buffer[:filled], db=pieces)


def delete_pieces(transaction: Transaction, name: bytes) -> None:
    """Delete a payload, whatever its length."""
    with transaction.txn.cursor(transaction.db.pieces) as cursor:
        found = cursor.set_range(name)
        while found and cursor.key()[: len(name)] == name:
            found = cursor.delete()


def read_pieces(transaction: Transaction, name: bytes, offset: int, buffers: Sequence[memoryview]) -> bool:
    """Fill ``buffers`` from ``offset`` on, straight from mapped pages; False: not all of that is there."""
    txn, pieces = transaction.txn, transaction.db.pieces
    index, start = divmod(offset, PIECE_BYTES)
    piece = txn.get(name + _INDEX.pack(index), db=pieces)
    for buffer in buffers:
        rest = buffer.cast("B")
        while rest:
            if start == PIECE_BYTES:
                index, start = index + 1, 0
                piece = txn.get(name + _INDEX.pack(index), db=pieces)
            if piece is None or start >= len(piece):
                return False
            count = min(len(rest), len(piece) - start)
            rest[:count] = piece[start : start + count]
            start, rest = start + count, rest[count:]
    return True
