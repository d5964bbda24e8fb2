"""Packs that the index does not name, and the tables at the ends of their blobs."""

from __future__ import annotations

from persistkv.storage.blobs import BlobInfo
from persistkv.storage.format.pack import TRAILER_BYTES
from persistkv.storage.shared.calls import Medium
from persistkv.storage.shared.format import MAX_OBJECT_BYTES, Names
from persistkv.storage.shared.replica import Replica

_TAIL_BYTES = 64 << 10  # 64 KiB: most tables are shorter, and are read with one call


def unnamed_packs(
    medium: Medium,
    names: Names,
    replica: Replica,
) -> dict[bytes, BlobInfo]:
    """Return the blobs of packs that a replica does not hold, by pack id and nonce.

    :raises StoreError: the medium or the replica failed.
    """
    blobs: dict[bytes, BlobInfo] = {}
    for info in medium.listed(names.packs):
        pack_name = names.pack_name(info.name)
        # the name is None if another program has written the blob
        if pack_name is not None:
            blobs[pack_name] = info
    for pack_name in replica.live_names(blobs):
        del blobs[pack_name]
    return blobs


def read_tail(medium: Medium, info: BlobInfo) -> bytes:
    """Return the table of a pack as stored behind its payload, with its trailer; other bytes if the
    blob is no pack.

    The trailer at the end of the blob contains the length of the table before it, so a large table
    needs a second read.

    :raises StoreError: the medium failed; ``BlobMissingError``: there is no such blob.
    """
    length = min(info.size, _TAIL_BYTES)
    start = info.size - length
    tail = medium.read(info.name, start, length)
    trailer = tail[-TRAILER_BYTES:]
    # the first field of the trailer is the length of the table without the trailer
    table_bytes = int.from_bytes(trailer[:8], "little") + TRAILER_BYTES
    most_bytes = min(info.size, MAX_OBJECT_BYTES)
    # a length above that of the blob, or above the limit of tables, is not the length of a table
    needs_second_read = length < table_bytes <= most_bytes
    if needs_second_read:
        table_start = info.size - table_bytes
        tail = medium.read(info.name, table_start, table_bytes)
    return bytes(tail[-table_bytes:])
