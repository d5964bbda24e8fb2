"""The whole content of a replica as deltas: the parts of a base."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TypeVar

from msgspec.structs import replace

from persistkv.errors import CorruptPackError, CorruptStoreError
from persistkv.storage.catalogue.rows import (
    CHAINS,
    MANIFEST_KEYS,
    MANIFESTS,
    USES,
    Chain,
    TableRows,
    Use,
)
from persistkv.storage.format.manifest import decode_manifest
from persistkv.storage.format.pack import ID_BYTES, is_whole
from persistkv.storage.shared.format import (
    Delta,
    Dropped,
    ManifestEntry,
    PackEntry,
    Pin,
    Tombstone,
    UseEntry,
    decode_delta,
    encode,
)
from persistkv.storage.shared.replica.rows import (
    BLOBS,
    EARLY,
    TIME,
    TOMBSTONES,
    KeysRow,
    Version,
    decode_blob_row,
    read_versions,
    shown_table,
)

Entry = PackEntry | Tombstone | ManifestEntry | Dropped | Pin | UseEntry
T = TypeVar("T", bound=Entry)


def dump_deltas(
    rows: TableRows,
    namespace: bytes,
    part_bytes: int,
) -> Iterator[Delta]:
    """Iterate over the whole content, in deltas of at most ``part_bytes`` each; at least one. A
    delta with a single pack or request may be larger.
    """
    part: list[Entry] = []
    num_bytes = 0
    for entry in _entries(rows, namespace):
        length = len(encode(entry))
        if part and num_bytes + length > part_bytes:
            yield _checked_delta(part)
            part = []
            num_bytes = 0
        part.append(entry)
        num_bytes += length
    # yield the last part, which is an empty delta if the replica is empty
    yield _checked_delta(part)


def _checked_delta(entries: Sequence[Entry]) -> Delta:
    """Return the entries as a delta that readers accept.

    :raises CorruptStoreError: a number is out of range, because its row is damaged. Readers would
        refuse the whole part of the base.
    """
    delta = _delta(entries)
    # without the tables, which are most of the bytes and have checksums
    packs = [replace(entry, body=b"") for entry in delta.packs]
    numbers = replace(delta, packs=packs)
    try:
        decode_delta(encode(numbers))
    except CorruptPackError as error:
        raise CorruptStoreError(f"a row is damaged ({error})") from None
    return delta


def _delta(entries: Sequence[Entry]) -> Delta:
    """Return the entries as a delta, by kind."""
    return Delta(
        packs=_of(PackEntry, entries),
        uses=_of(UseEntry, entries),
        removed=_of(Tombstone, entries),
        manifests=_of(ManifestEntry, entries),
        dropped=_of(Dropped, entries),
        pins=_of(Pin, entries),
    )


def _of(
    kind: type[T],
    entries: Sequence[Entry],
) -> list[T]:
    """Return the entries of one kind."""
    return [entry for entry in entries if isinstance(entry, kind)]


def _entries(rows: TableRows, namespace: bytes) -> Iterator[Entry]:
    """Iterate over the whole content."""
    yield from _pack_entries(rows, namespace)
    for key, row in rows.range(TOMBSTONES, start=b""):
        name = bytes(key)
        (time,) = TIME.unpack(row)
        yield Tombstone(name, time)
    for digest, version in read_versions(rows):
        yield from _request_entries(rows, namespace, digest, version)
    # ``EARLY`` has the uses of packs that have not arrived, or that no blob holds at present
    for key, row in rows.range(EARLY, start=b""):
        pack_id = bytes(key)
        (time,) = TIME.unpack(row)
        yield UseEntry(time, pack_id)


def _request_entries(
    rows: TableRows,
    namespace: bytes,
    digest: bytes,
    version: Version,
) -> Iterator[Entry]:
    """Iterate over what describes a request: its deletion, pin and newest version."""
    if version.dropped:
        yield Dropped(digest, version.dropped, version.time)
    # leave out a pin that a later deletion covers
    if version.pin_version > version.dropped:
        yield Pin(digest, version.pin_version, version.was_pin)
    if version.is_alive:
        yield _manifest_entry(rows, namespace, digest, version.written)


def _manifest_entry(
    rows: TableRows,
    namespace: bytes,
    digest: bytes,
    version: int,
) -> ManifestEntry:
    """Return the content of a request that is not deleted.

    :raises CorruptStoreError: one of its rows is missing or damaged. Without the request, a base
        would remove it from the index.
    """
    name = namespace + digest
    head = bytes(rows.get(MANIFESTS, name) or b"")
    keys_row = rows.get(MANIFEST_KEYS, name)
    keys = KeysRow.decode(keys_row)
    chain_row = rows.get(CHAINS, name)
    chain = Chain.decode(chain_row)
    if keys is None or chain is None or not _is_head(head):
        raise CorruptStoreError(f"the rows of request {digest.hex()} are damaged")
    return ManifestEntry(
        digest=digest,
        version=version,
        time=chain.time,
        head=head,
        packs=b"".join(chain.packs),
        keys=keys.nonce,
        offset=keys.offset,
        length=keys.length,
        data_key=keys.data_key,
    )


def _is_head(data: bytes) -> bool:
    """Return whether these bytes are a valid head of a manifest."""
    try:
        decode_manifest(data)
    except CorruptPackError:
        return False
    return True


def _checked_table(table: bytes, pack_id: bytes) -> bytes:
    """Return the encoded table of a pack if its checksum is right.

    :raises CorruptStoreError: it is damaged. Readers of a base would skip the pack, the next base
        would lack it, and a sweep would delete its blob.
    """
    if not is_whole(table):
        raise CorruptStoreError(f"the row of pack {pack_id.hex()} is damaged")
    return table


def _pack_entries(rows: TableRows, namespace: bytes) -> Iterator[PackEntry]:
    """Iterate over all blobs of packs, each with the time of the pack's last use; 0 if the row of
    the use is missing or damaged.

    :raises CorruptStoreError: the table of a pack is missing or damaged.
    """
    for blob_name, row in rows.range(BLOBS, start=b""):
        pack_id = bytes(blob_name[:ID_BYTES])
        nonce = bytes(blob_name[ID_BYTES:])
        name = namespace + pack_id
        blob = decode_blob_row(bytes(row))
        # the row of the blob that the catalogue shows has no table: the catalogue has it
        table = _checked_table(blob.table or shown_table(rows, name), pack_id)
        use_row = rows.get(USES, name)
        use = Use.decode(use_row)
        time = 0.0 if use is None else use.time
        yield PackEntry(pack_id, nonce, table, time)
