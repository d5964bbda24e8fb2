"""Databases and rows of the LMDB environment, and the last pages of packs in segment files.
docs/format.md specifies every byte.

Keys start with the namespace id (16 bytes), so a namespace is one key range in each database.

**Trailers.** In a segment file, a pack's payload is followed by its table and a trailer, from which
``rebuild`` finds the pack. Readers do not use them: the catalogue's row is the truth. The table
ends where the trailer begins, the trailer ends with a page, and zeros fill the space before the
table. A trailer names its own place: a copy of it, in the payload of another pack or in another
segment, is not valid.
"""

from __future__ import annotations

import math
import os
import struct
import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING, NamedTuple

import lmdb
import xxhash

from persistkv.config import PAGE_BYTES
from persistkv.errors import CorruptStoreError
from persistkv.rounding import divide_up
from persistkv.storage.catalogue.quotas import read_quotas
from persistkv.storage.catalogue.rows import META, TABLES, TableRows
from persistkv.storage.format.codec import Buffer
from persistkv.storage.format.pack import TRAILER_BYTES as TABLE_TRAILER_BYTES
from persistkv.storage.format.pack import PackTable
from persistkv.storage.format.seal import Seal
from persistkv.storage.policy import Policy
from persistkv_lmdb.payloads.segments import Extent

if TYPE_CHECKING:
    from lmdb import _Database

FORMAT_VERSION = 1
DEFAULT_CAPACITY = 10 << 30  # 10 GiB
_MIN_CAPACITY = 1 << 20  # 1 MiB
_MAX_CAPACITY = 64 << 40  # 64 TiB: half of the address space of a process on x86-64

# Databases of payloads, in addition to those of ``persistkv.storage.catalogue.rows``.
# namespace, pack id, u32 big-endian → at most 256 KiB of a payload that is inline
PIECES = "pieces"
# namespace, pack id → extents (page ranges of segment files) of a payload that is not inline
EXTENTS = "extents"
SEGMENTS = "segments"  # number of a segment file → number of its 4 KiB pages
FREE = "free"  # free extents by place: segment, first page → number of pages
# extents without disk space, by place: segment, first page → number of pages
HOLES = "holes"
SIZES = "sizes"  # free extents by size: number of pages, segment, first page → empty
# number of a writer → extents that it has reserved, in the order in which it uses them
RESERVED = "reserved"
DATABASES = (*TABLES, PIECES, EXTENTS, SEGMENTS, FREE, SIZES, HOLES, RESERVED)

# Rows of ``meta``, in addition to the catalogue's: key and shape.
_FORMAT_ROW = b"format"
_FORMAT = struct.Struct("<8sI")  # ``_MAGIC``, ``FORMAT_VERSION``
_MAGIC = b"PKVLMDB1"
_FOREIGN = "it is an LMDB environment of something else"
_CAPACITY_ROW = b"capacity"
_NUMBER = struct.Struct("<Q")  # capacity in bytes, or number of the last erasure
_TTL_ROW = b"ttl"
_TTL = struct.Struct("<d")  # seconds
_PLACEMENT_ROW = b"placement"
INLINE = "inline"  # placement of payloads as values in LMDB
# both placements; with ``extents``, payloads are in segment files, and LMDB holds their page ranges
PLACEMENTS = (INLINE, "extents")
_ERASURES_ROW = b"erasures"
_KEYRING_ROW = b"keyring"
# prefix of keys; the digest of a tenant's name and random bytes follow → number of the writer that
# forgets the tenant
_REFUSED = b"refused"
# key of the counts of pages in the segment files: pages with disk space, free pages, reserved pages
SPACE_ROW = b"space"


# number of random bytes in the key of a refusal, because two commands may forget the same tenant at
# once
_REFUSAL_BYTES = 8
WRITER = struct.Struct(">I")
"""Number of a writer, that is, of a process that reserves extents (``Guard.claim``)."""
# fields of a trailer: segment, first page and pages of the last extent, number of extents, last
# erasure
_FIELDS = struct.Struct("<IIIIQ")
# end of a trailer: checksum, ``_PACK_TRAILER_MAGIC``
_END = struct.Struct("<Q8s")
_PACK_TRAILER_MAGIC = b"PKVXTNT1"
_PACK_TRAILER_BYTES = _FIELDS.size + _END.size
# number of 8-byte words in a page; the last word may be a trailer's magic number
_PAGE_WORDS = PAGE_BYTES // 8


class OtherReleaseError(CorruptStoreError):
    """The store was written by another release, in another format."""


def create_databases(
    env: lmdb.Environment,
    txn: lmdb.Transaction[memoryview],
    policy: Policy,
) -> dict[str, _Database]:
    """Open the databases of a store in a write transaction; in an empty environment, create them
    and record ``policy``.

    :raises CorruptStoreError: the environment has other content or another format; it was not
        changed.
    """
    if txn.stat()["entries"]:
        return open_databases(env, txn)
    databases = {}
    for name in DATABASES:
        databases[name] = env.open_db(name.encode(), txn=txn)
    transaction = TableRows(txn, databases)
    transaction.put(META, _FORMAT_ROW, _FORMAT.pack(_MAGIC, FORMAT_VERSION))
    write_policy(transaction, policy)
    # write the placement here, because later policies, which ``write_policy`` records, do not
    # change it
    transaction.put(META, _PLACEMENT_ROW, str(policy.placement).encode())
    return databases


def open_databases(
    env: lmdb.Environment,
    txn: lmdb.Transaction[memoryview] | None = None,
) -> dict[str, _Database]:
    """Open the databases of an existing store, in a write transaction or, without one, read-only.

    :raises CorruptStoreError: the environment has other content or another format; it was not
        changed.
    """
    databases = {}
    try:
        # check the format first, because another one may have other databases
        meta = env.open_db(META.encode(), txn=txn, create=False)
        if txn is None:
            with env.begin(buffers=True) as reading:
                _check_format(reading.get(_FORMAT_ROW, db=meta))
        else:
            _check_format(txn.get(_FORMAT_ROW, db=meta))
        for name in DATABASES:
            databases[name] = env.open_db(name.encode(), txn=txn, create=False)
    except (lmdb.NotFoundError, lmdb.IncompatibleError):
        raise CorruptStoreError(_FOREIGN) from None
    return databases


def _check_format(row: Buffer | None) -> None:
    """Raise a CorruptStoreError unless the row names this format."""
    if row is None or len(row) != _FORMAT.size:
        raise CorruptStoreError(_FOREIGN)
    magic, version = _FORMAT.unpack(row)
    if magic != _MAGIC:
        raise CorruptStoreError(_FOREIGN)
    if version != FORMAT_VERSION:
        raise OtherReleaseError(
            f"its format is {version}; this release reads {FORMAT_VERSION}"
        )


def is_capacity(num_bytes: int | None) -> bool:
    """Return whether a store can have this capacity: 1 MiB to 64 TiB."""
    return num_bytes is not None and _MIN_CAPACITY <= num_bytes <= _MAX_CAPACITY


def read_capacity(rows: TableRows) -> int:
    """Return the recorded capacity in bytes; the default if the row is missing or out of range."""
    capacity = int(_read_number(rows, _CAPACITY_ROW, _NUMBER))
    return capacity if is_capacity(capacity) else DEFAULT_CAPACITY


def read_policy(rows: TableRows) -> Policy:
    """Return the recorded policy. An invalid capacity is read as the default, an invalid ttl as
    None.

    :raises CorruptStoreError: the recorded placement is missing or unknown.
    """
    return Policy(
        capacity=read_capacity(rows),
        ttl_s=read_ttl(rows),
        placement=read_placement(rows),
        quotas=read_quotas(rows),
    )


def read_ttl(rows: TableRows) -> float | None:
    """Return the recorded ttl in seconds; None if there is none, or if the row is out of range."""
    ttl_s = _read_number(rows, _TTL_ROW, _TTL)
    return ttl_s if 0 < ttl_s < math.inf else None


def write_policy(rows: TableRows, policy: Policy) -> None:
    """Record the capacity and ttl of a policy. Its placement is fixed at creation, and
    ``write_quotas`` records its quotas."""
    rows.put(META, _CAPACITY_ROW, _NUMBER.pack(policy.capacity))
    if policy.ttl_s is None:
        rows.delete(META, _TTL_ROW)
    else:
        rows.put(META, _TTL_ROW, _TTL.pack(policy.ttl_s))


def read_placement(rows: TableRows) -> str:
    """Return the store's placement, one of ``PLACEMENTS``.

    :raises CorruptStoreError: the row is missing or unknown.
    """
    row = bytes(rows.get(META, _PLACEMENT_ROW) or b"")
    placement = row.decode("ascii", "replace")
    if placement not in PLACEMENTS:
        raise CorruptStoreError(f"its placement is {row!r}")
    return placement


def read_keyring(rows: TableRows) -> str:
    """Return the id of the keyring whose keys seal the store; empty: it has no key."""
    row = bytes(rows.get(META, _KEYRING_ROW) or b"")
    return row.decode("ascii", "replace")


def write_keyring(rows: TableRows, keyring_id: str) -> None:
    """Record the keyring of a new store; empty: it has no key."""
    if keyring_id:
        rows.put(META, _KEYRING_ROW, keyring_id.encode())


def read_last_erasure(rows: TableRows) -> int:
    """Return the number of the last erasure (see ``recovery``); 0 if there is none."""
    return int(_read_number(rows, _ERASURES_ROW, _NUMBER))


def write_last_erasure(rows: TableRows, number: int) -> None:
    rows.put(META, _ERASURES_ROW, _NUMBER.pack(number))


def _read_number(
    rows: TableRows,
    name: bytes,
    shape: struct.Struct,
) -> float:
    """Return the number that a row of ``META`` holds; 0 if the row is missing or has another
    length."""
    row = rows.get(META, name)
    if row is None or len(row) != shape.size:
        return 0
    number: float
    (number,) = shape.unpack(row)
    return number


def write_refusal(
    rows: TableRows,
    tenant: str,
    writer: int,
) -> bytes:
    """Record that a writer forgets a tenant; return the key in ``META`` of the record. While it is
    there and the writer lives, no content of the tenant is stored."""
    name = rows.tenant_digest(tenant) + os.urandom(_REFUSAL_BYTES)
    key = _REFUSED + name
    rows.put(META, key, WRITER.pack(writer))
    return key


def read_refusals(
    rows: TableRows,
    tenant: str | None = None,
) -> dict[bytes, int]:
    """Return the refusals of a tenant's content (``write_refusal``), also those of dead processes.

    :param tenant: None: of all tenants.
    :returns: key of the row in ``META`` → number of the writer that forgets the tenant.
    """
    prefix = _REFUSED
    if tenant is not None:
        prefix += rows.tenant_digest(tenant)
    refusals: dict[bytes, int] = {}
    for key, row in rows.starting_with(META, prefix):
        refusals[bytes(key)] = int.from_bytes(row, "big")
    return refusals


class Trailer(NamedTuple):
    """Place of a pack in the segment files."""

    extent: Extent
    """The last extent of the pack."""
    num_extents: int
    """Number of the pack's extents."""
    last_erasure: int
    """Number of the last erasure when the pack was written; see ``recovery``."""
    tail_length: int
    """Bytes from the beginning of the pack's table to the end of the trailer."""


def tail_pages(table_length: int) -> int:
    """Return the number of pages that an encoded table and a trailer take."""
    return divide_up(table_length + _PACK_TRAILER_BYTES, PAGE_BYTES)


def encode_tail(
    tail: memoryview,
    encoded_table: bytes,
    extents: Sequence[Extent],
    last_erasure: int,
) -> None:
    """Write the encoded table of a pack and its trailer to the end of ``tail``, its last pages.

    :param encoded_table: the table with the table's own trailer (length, checksum, magic number).
    :param extents: all extents of the pack.
    :param last_erasure: number of the last erasure before the pack is written.
    """
    last_extent = extents[-1]
    fields = _FIELDS.pack(*last_extent, len(extents), last_erasure)
    # the trailer's checksum covers that of the table, so it is valid for this table only
    table_trailer = encoded_table[-TABLE_TRAILER_BYTES:]
    checksum = _trailer_checksum(table_trailer, fields)
    end = _END.pack(checksum, _PACK_TRAILER_MAGIC)
    content = encoded_table + fields + end
    start = len(tail) - len(content)
    tail[start:] = content


def find_trailers(pages: memoryview) -> list[int]:
    """Return the indices of the pages that end with the magic number of a trailer. ``pages`` are
    whole pages."""
    # compare the last word of each page only, because a rebuild searches all pages of a store
    last_words = pages.cast("Q")[_PAGE_WORDS - 1 :: _PAGE_WORDS]
    magic = int.from_bytes(_PACK_TRAILER_MAGIC, sys.byteorder)
    return [number for number, word in enumerate(last_words) if word == magic]


def decode_trailer(
    page: memoryview,
    segment: int,
    page_number: int,
) -> Trailer | None:
    """Return the trailer at the end of a page; None if it is not valid.

    :param segment: number of the segment.
    :param page_number: number of the page in the segment.
    """
    # the page ends with the table's own trailer, then the fields, checksum and magic number
    trailer_start = len(page) - _PACK_TRAILER_BYTES
    table_trailer_start = trailer_start - TABLE_TRAILER_BYTES
    table_trailer = page[table_trailer_start:trailer_start]
    trailer = bytes(page[trailer_start:])
    fields = trailer[: _FIELDS.size]
    checksum, magic = _END.unpack(trailer[_FIELDS.size :])
    if magic != _PACK_TRAILER_MAGIC:
        return None
    if checksum != _trailer_checksum(table_trailer, fields):
        return None
    own_segment, first_page, num_pages, num_extents, last_erasure = _FIELDS.unpack(
        fields
    )
    extent = Extent(own_segment, first_page, num_pages)
    # a copy of a trailer is not valid at another place
    is_here = extent.segment == segment and extent.end == page_number + 1
    # check the fields, too: a payload may happen to contain a trailer with a valid checksum
    is_possible = num_extents > 0 and 0 < extent.pages <= extent.end
    if not is_here or not is_possible:
        return None
    # the table's own trailer begins with the length of the table
    table_length = int.from_bytes(table_trailer[:8], "little")
    tail_length = table_length + TABLE_TRAILER_BYTES + _PACK_TRAILER_BYTES
    return Trailer(extent, num_extents, last_erasure, tail_length)


def decode_table(tail: memoryview, seal: Seal) -> PackTable:
    """Return the table in the last ``Trailer.tail_length`` bytes of a pack.

    :raises CorruptPackError: it is malformed, or sealed with another key.
    """
    return seal.decode_table(tail[:-_PACK_TRAILER_BYTES])


def _trailer_checksum(table_trailer: Buffer, fields: bytes) -> int:
    """Return the checksum of a trailer: over the end of the table before it, and its own fields."""
    return xxhash.xxh3_64_intdigest(bytes(table_trailer) + fields)
