"""The whole content of a replica as deltas: the parts of a base."""

from __future__ import annotations

from collections.abc import Iterator

import msgspec

from persistkv.storage.catalog.rows import (
    CHAINS,
    MANIFEST_KEYS,
    MANIFESTS,
    PACKS,
    SEQUENCE,
    USES,
    Chain,
    TableRows,
    Use,
)
from persistkv.storage.format.pack import ID_BYTES
from persistkv.storage.shared.format import (
    Delta,
    Dropped,
    ManifestEntry,
    PackEntry,
    Pin,
    Tombstone,
    UseEntry,
)
from persistkv.storage.shared.replica.rows import (
    BLOBS,
    EARLY,
    KEYS,
    TIME,
    TOMBSTONES,
    Version,
    decode_blob_row,
    read_versions,
)

# encoded in an index object, at most
_PACK_BYTES = 64  # of a pack, besides its table
_TOMBSTONE_BYTES = 48
_REQUEST_BYTES = 160  # of a request, besides its head and its packs
_USE_BYTES = 32


def dump_deltas(rows: TableRows, namespace: bytes, part_bytes: int) -> Iterator[Delta]:
    """Iterate over the whole content, in deltas of at most ``part_bytes`` each; at least one. A
    delta with a single pack, or with a request of up to 8 MiB, may be larger.
    """
    part = _Part()
    for entry in _pack_entries(rows, namespace):
        length = len(entry.body) + _PACK_BYTES
        if part.num_bytes and part.num_bytes + length > part_bytes:
            yield part.delta()
            part = _Part()
        part.packs.append(entry)
        part.num_bytes += length

    most = part_bytes * 2 // 3  # the rest is room for a request
    for name, row in rows.range(TOMBSTONES, b""):
        if part.num_bytes > most:
            yield part.delta()
            part = _Part()
        part.removed.append(Tombstone(bytes(name), TIME.unpack(row)[0]))
        part.num_bytes += _TOMBSTONE_BYTES

    for digest, version in read_versions(rows):
        if part.num_bytes > most:
            yield part.delta()
            part = _Part()
        part.add_request(digest, version, _manifest_entry(rows, namespace, digest))

    for pack_id, row in rows.range(EARLY, b""):
        if part.num_bytes > most:
            yield part.delta()
            part = _Part()
        part.uses.append(UseEntry(TIME.unpack(row)[0], bytes(pack_id)))
        part.num_bytes += _USE_BYTES
    yield part.delta()


class _Part:
    """A part that is being collected."""

    def __init__(self) -> None:
        self.num_bytes = 0
        """Encoded, at most."""
        self.packs: list[PackEntry] = []
        self.uses: list[UseEntry] = []
        self.removed: list[Tombstone] = []
        self._manifests: list[ManifestEntry] = []
        self._dropped: list[Dropped] = []
        self._pins: list[Pin] = []

    def add_request(
        self, digest: bytes, version: Version, entry: ManifestEntry | None
    ) -> None:
        """Add a request: its newest version, deletion and pin.

        :param entry: its content; None: there is none.
        """
        self.num_bytes += _REQUEST_BYTES
        if version.dropped:
            self._dropped.append(Dropped(digest, version.dropped, version.time))
        if version.pin > version.dropped:
            self._pins.append(Pin(digest, version.pin, version.pinned))
        if version.is_alive and entry is not None:
            entry = msgspec.structs.replace(entry, version=version.written)
            self._manifests.append(entry)
            self.num_bytes += len(entry.head) + len(entry.packs)

    def delta(self) -> Delta:
        return Delta(
            self.packs,
            self.uses,
            self.removed,
            self._manifests,
            self._dropped,
            self._pins,
        )


def _manifest_entry(
    rows: TableRows, namespace: bytes, digest: bytes
) -> ManifestEntry | None:
    """Return the content of a request, without its version; None: it is not held."""
    row = namespace + digest
    head = rows.get(MANIFESTS, row)
    place = rows.get(MANIFEST_KEYS, row)
    chain = Chain.decode(rows.get(CHAINS, row))
    if head is None or place is None or chain is None:
        return None
    nonce, offset, length, _ = KEYS.unpack(place)
    packs = b"".join(chain.packs)
    return ManifestEntry(
        digest, 0, chain.time, bytes(head), packs, nonce, offset, length
    )


def _pack_entries(rows: TableRows, namespace: bytes) -> Iterator[PackEntry]:
    """Iterate over all blobs of packs."""
    for name, value in rows.range(BLOBS, b""):
        pack_id = bytes(name[:ID_BYTES])
        nonce = bytes(name[ID_BYTES:])
        row = decode_blob_row(bytes(value))
        encoded = row.table
        if not encoded:  # the catalogue has it
            shown = rows.get(PACKS, namespace + pack_id) or b""
            encoded = bytes(shown)[SEQUENCE.size :]
        use = Use.decode(rows.get(USES, namespace + pack_id))
        time = 0.0 if use is None else use.time
        yield PackEntry(pack_id, nonce, encoded, time)
