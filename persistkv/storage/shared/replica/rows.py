"""Rows of a replica: those of the catalogue's tables, and of tables of its own.

A *name* is pack id and nonce; a *digest* is that of a request's id.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator
from typing import NamedTuple

from persistkv.storage.catalogue.rows import (
    META,
    PACKS,
    SEQUENCE,
    TABLES,
    TableRows,
    manifest_row,
)
from persistkv.storage.format.codec import Buffer

# name of a blob → ``BlobRow``, without the table for the blob that the catalogue shows
BLOBS = "blobs"
TOMBSTONES = "tombstones"  # name of a blob → time of its tombstone
EARLY = "early"  # pack id → time of the last use of a pack that is not held
VERSIONS = "versions"  # digest → ``Version``
CONTAINED = "contained"  # name of an index object → its includer (``encode_includer``)
NO_INCLUDER = ""
REPLICA_TABLES = (*TABLES, BLOBS, TOMBSTONES, EARLY, VERSIONS, CONTAINED)

TIME = struct.Struct("<d")
_KEYS = struct.Struct("<16sQQQ8s")  # ``KeysRow``
BYTES = struct.Struct("<q")
# key in ``META`` of the number of bytes that the namespace takes on the medium
BYTES_ROW = b"bytes"
OVERHEAD_BYTES = 256  # bytes that a pack or request takes for its rows in index objects
_BLOB = struct.Struct("<Q")  # bytes that the blob counts for in the capacity
_VERSION = struct.Struct("<Q16sQQ?d")


class Version(NamedTuple):
    """State of a request: the newest version that was written, deleted and pinned; 0:
    none."""

    written: int = 0
    """Version of the newest write."""
    content_digest: bytes = bytes(16)
    """Digest of the written content: of two equal versions, the one with the greater digest
    counts."""
    dropped: int = 0
    """Version up to which the request is deleted."""
    pin_version: int = 0
    """Version of the last pin or unpin."""
    was_pin: bool = False
    """Whether ``pin_version`` was a pin; False: it was an unpin, or there is none."""
    time: float = 0.0
    """Time of the latest write or deletion, on the medium's clock."""

    @property
    def is_alive(self) -> bool:
        """Whether the request is shown: it was written after its last deletion."""
        return self.written > self.dropped

    @property
    def is_pinned(self) -> bool:
        """Whether it is pinned: a deletion also ends the pins before it."""
        return self.was_pin and self.pin_version > self.dropped

    @property
    def newest(self) -> int:
        return max(self.written, self.dropped, self.pin_version)


class BlobRow(NamedTuple):
    """Value of a row in ``BLOBS``."""

    counted: int
    """Bytes that the blob counts for in the capacity."""
    table: bytes
    """The encoded table; empty if the catalogue shows this blob, and has its table."""

    def encode(self) -> bytes:
        return _BLOB.pack(self.counted) + self.table


class KeysRow(NamedTuple):
    """Value of a row in ``MANIFEST_KEYS``: where the keys of a request are."""

    nonce: bytes
    """Random part of the name of their blob."""
    offset: int
    """Bytes before the sealed record in that blob."""
    length: int
    """Bytes of the sealed record in that blob."""
    counted: int
    """Bytes that the request counts for in the capacity."""
    data_key: bytes
    """Id of the data key that seals the keys."""

    def encode(self) -> bytes:
        return _KEYS.pack(*self)

    @classmethod
    def decode(cls, row: Buffer | None) -> KeysRow | None:
        """Decode a row; None: it is missing or damaged."""
        if row is None or len(row) != _KEYS.size:
            return None
        fields = _KEYS.unpack(row)
        return cls._make(fields)


def request_digest(manifest_id: str) -> bytes:
    """Return the digest by which a replica and index objects name a request: the key of its rows in
    the catalogue, without the namespace."""
    return manifest_row(b"", manifest_id)


def encode_includer(includer: str) -> bytes:
    """Return the value of a row in ``CONTAINED``; ``NO_INCLUDER``: no object includes this one."""
    if includer == NO_INCLUDER:
        return b"\0"
    # the first byte says that the name of an includer follows
    return b"\1" + includer.encode()


def decode_includer(row: Buffer) -> str:
    """Return the name of the includer in a row of ``CONTAINED``; ``NO_INCLUDER``: there is none."""
    return bytes(row[1:]).decode()


def shown_table(rows: TableRows, name: bytes) -> bytes:
    """Return the encoded table of a pack that the catalogue shows; empty if its row is missing.

    :param name: namespace and pack id.
    """
    row = rows.get(PACKS, name) or b""
    # the table follows the number of the change that added the pack
    return bytes(row)[SEQUENCE.size :]


def names_of(rows: TableRows, pack_id: bytes) -> list[bytes]:
    """Return the names of all blobs of a pack."""
    found = rows.starting_with(BLOBS, pack_id)
    return [bytes(name) for name, _ in found]


def shown_name(rows: TableRows, pack_id: bytes) -> bytes | None:
    """Return the name of the blob that the catalogue shows for a pack: the smallest; None: there is
    none."""
    # the first key from the pack id on may be the key of another pack
    name = rows.first(BLOBS, pack_id)
    if name is None or not name.startswith(pack_id):
        return None
    return name


def blob_row(rows: TableRows, name: bytes) -> BlobRow:
    """Return the row of a blob; an empty one if there is none."""
    row = rows.get(BLOBS, name)
    if row is None:
        return BlobRow(0, b"")
    return decode_blob_row(bytes(row))


def put_blob_row(
    rows: TableRows,
    name: bytes,
    row: BlobRow,
) -> None:
    rows.put(BLOBS, name, row.encode())


def decode_blob_row(row: bytes) -> BlobRow:
    (counted,) = _BLOB.unpack_from(row)
    return BlobRow(counted, row[_BLOB.size :])


def read_time(
    rows: TableRows,
    table: str,
    key: bytes,
) -> float | None:
    """Return the time in a row of ``TOMBSTONES`` or ``EARLY``; None: there is no such row."""
    row = rows.get(table, key)
    if row is None:
        return None
    (time,) = TIME.unpack(row)
    return float(time)


def write_later_time(
    rows: TableRows,
    table: str,
    key: bytes,
    time: float,
) -> None:
    """Write a time to a row of ``TOMBSTONES`` or ``EARLY``, unless it has a later one."""
    before = read_time(rows, table, key)
    if before is None or before < time:
        rows.put(table, key, TIME.pack(time))


def read_version(rows: TableRows, digest: bytes) -> Version:
    """Return the state of a request; ``Version()`` if the replica knows nothing of it."""
    row = rows.get(VERSIONS, digest)
    if row is None:
        return Version()
    fields = _VERSION.unpack(row)
    return Version._make(fields)


def write_version(
    rows: TableRows,
    digest: bytes,
    version: Version,
) -> None:
    row = _VERSION.pack(*version)
    rows.put(VERSIONS, digest, row)


def read_versions(rows: TableRows) -> Iterator[tuple[bytes, Version]]:
    """Iterate over the digests of all requests, with their states."""
    for digest, row in rows.range(VERSIONS, start=b""):
        fields = _VERSION.unpack(row)
        yield bytes(digest), Version._make(fields)


def read_bytes(rows: TableRows) -> int:
    """Return the bytes that the namespace takes on the medium."""
    row = rows.get(META, BYTES_ROW)
    if row is None:
        return 0
    (num_bytes,) = BYTES.unpack(row)
    return int(num_bytes)
