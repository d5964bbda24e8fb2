"""Applies the content of index objects to the rows of a replica."""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Sequence
from hashlib import blake2b

from persistkv.errors import CorruptPackError
from persistkv.storage.backend import CommitBatch, ManifestWrite
from persistkv.storage.catalog.order import TimedOrder
from persistkv.storage.catalog.rows import (
    LINKS,
    MANIFEST_KEYS,
    META,
    ORDER,
    PACKS,
    SEQUENCE,
    STATES,
    USES,
    NamespaceState,
    TableRows,
    Use,
    manifest_row,
    read_state,
)
from persistkv.storage.catalog.transaction import LOG_ENTRIES, CatalogTransaction
from persistkv.storage.format.manifest import RequestManifest, decode_manifest
from persistkv.storage.format.pack import (
    ID_BYTES,
    PackTable,
    encoded_length,
    table_head,
)
from persistkv.storage.format.pack_writer import PackCopy
from persistkv.storage.shared.format import (
    Delta,
    Dropped,
    ManifestEntry,
    PackEntry,
    Pin,
    Tombstone,
    split_ids,
)
from persistkv.storage.shared.replica.rows import (
    BLOBS,
    BYTES,
    BYTES_ROW,
    EARLY,
    KEYS,
    OVERHEAD_BYTES,
    TIME,
    TOMBSTONES,
    BlobRow,
    blob_row,
    read_bytes,
    read_version,
    shown_name,
    write_version,
)

logger = logging.getLogger(__name__)


class Application:
    """Applies deltas to the rows of a replica, within one transaction."""

    def __init__(self, rows: TableRows, namespace: bytes) -> None:
        self._rows = rows
        self._namespace = namespace
        self._order = TimedOrder(rows)
        self._catalogue = CatalogTransaction(rows, None, namespace, order=self._order)
        self._grown = 0

    def apply(self, delta: Delta) -> None:
        packs: Sequence[PackEntry] = delta.packs
        if len(packs) > LOG_ENTRIES:
            packs = self._add_many(packs)
        for entry in packs:
            self._add_pack(entry)
        for use in delta.uses:
            for pack_id in split_ids(use.packs):
                self._use(pack_id, use.time)
        for manifest in delta.manifests:
            self._write_request(manifest)
        for dropped in delta.dropped:
            self._drop_request(dropped)
        for pin in delta.pins:
            self._pin(pin)
        # last: an object may add and end the same pack
        for tombstone in delta.removed:
            self._end_blob(tombstone)
        self._catalogue.finish()
        if self._grown:
            total = max(0, read_bytes(self._rows) + self._grown)
            self._rows.put(META, BYTES_ROW, BYTES.pack(total))

    # Packs

    def _add_pack(self, entry: PackEntry) -> None:
        is_ended = self._rows.get(TOMBSTONES, entry.name) is not None
        if not is_ended and self._rows.get(BLOBS, entry.name) is None:
            self._add_blob(entry)
        self._use(entry.pack_id, entry.time)

    def _add_many(self, entries: Sequence[PackEntry]) -> list[PackEntry]:
        """Add the packs of which nothing is known, at a tenth of the time that each would take;
        return the others.

        They are not logged: the log is too short for them, so readers of changes get the whole
        catalogue.
        """
        new, others = self._split_new(entries)
        additions = _Additions(read_state(self._rows, self._namespace), self._order)
        for entry in new:
            if not additions.add(self._namespace, entry):
                others.append(entry)
        additions.write(self._rows, self._namespace)
        self._grown += additions.counted
        # it has read the state before
        self._catalogue = CatalogTransaction(
            self._rows, None, self._namespace, order=self._order
        )
        return others

    def _split_new(
        self, entries: Sequence[PackEntry]
    ) -> tuple[list[PackEntry], list[PackEntry]]:
        """Return the entries of packs of which neither the replica nor another entry knows
        anything, in the order of their names, and all others.
        """
        ids = Counter(entry.pack_id for entry in entries)
        known = self._known_ids(entries)
        new: list[PackEntry] = []
        others: list[PackEntry] = []
        for entry in sorted(entries, key=lambda entry: entry.name):
            is_new = ids[entry.pack_id] == 1 and entry.pack_id not in known
            (new if is_new else others).append(entry)
        return new, others

    def _known_ids(self, entries: Sequence[PackEntry]) -> set[bytes]:
        """Return the ids of the packs of which the replica knows anything."""
        keys = [self._namespace + entry.pack_id for entry in entries]
        known = {key[ID_BYTES:] for key in self._rows.existing(PACKS, keys)}
        ids = [entry.pack_id for entry in entries]
        known.update(self._rows.existing(EARLY, ids))
        names = [entry.name for entry in entries]
        ended = self._rows.existing(TOMBSTONES, names)
        known.update(name[:ID_BYTES] for name in ended)
        if self._rows.count(LINKS):
            for key in keys:
                if self._rows.has_prefix(LINKS, key):
                    known.add(key[ID_BYTES:])
        return known

    def _add_blob(self, entry: PackEntry) -> None:
        table = self._table_of(entry)
        if table is None:
            return
        length = encoded_length(table.codec, table.frame_count, table.keys)
        tags = entry.body[:-length]
        counted = table.payload_length + len(entry.body) + OVERHEAD_BYTES
        self._grown += counted

        row = BlobRow(counted, tags, b"")
        shown = shown_name(self._rows, entry.pack_id)
        if shown is not None and shown < entry.name:
            hidden = row._replace(table=entry.body[-length:])
            self._rows.put(BLOBS, entry.name, hidden.encode())
            return
        if shown is not None:
            self._hide(shown)
        self._rows.put(BLOBS, entry.name, row.encode())
        self._show(table)

    def _table_of(self, entry: PackEntry) -> PackTable | None:
        """Return the table of a pack; None, with a line in the log, if it is not readable."""
        try:
            table = PackTable.parse(entry.body)
        except CorruptPackError as error:
            text = "a pack in the index of %s is unreadable (%s)"
            logger.warning(text, self._namespace.hex(), error)
            return None
        if (table.namespace, table.pack_id) != (self._namespace, entry.pack_id):
            text = "the index of %s names a pack of another place"
            logger.warning(text, self._namespace.hex())
            return None
        return table

    def _show(self, table: PackTable) -> None:
        """Add a pack to the catalogue, with the last of its uses that arrived before it."""
        pack_id = table.pack_id
        early = self._rows.get(EARLY, pack_id)
        self._order.set_time(0.0 if early is None else TIME.unpack(early)[0])
        self._rows.delete(EARLY, pack_id)
        self._catalogue.add(CommitBatch([PackCopy(table, b"")]))

    def _hide(self, name: bytes) -> None:
        """Remove a pack from the catalogue, and keep the table with its blob."""
        pack_id = name[:ID_BYTES]
        key = self._namespace + pack_id
        encoded = bytes(self._rows.get(PACKS, key) or b"")[SEQUENCE.size :]
        row = blob_row(self._rows, name)
        self._rows.put(BLOBS, name, row._replace(table=encoded).encode())
        self._remove_from_catalogue(pack_id)

    def _remove_from_catalogue(self, pack_id: bytes) -> None:
        use = self._order.use(self._namespace + pack_id)
        if use is not None:  # another blob of this pack may come
            self._rows.put(EARLY, pack_id, TIME.pack(use.time))
        self._catalogue.discard(pack_id)

    def _use(self, pack_id: bytes, time: float) -> None:
        self._order.set_time(time)
        if self._order.touch(self._namespace + pack_id):
            return
        before = self._rows.get(EARLY, pack_id)
        if before is None or TIME.unpack(before)[0] < time:
            self._rows.put(EARLY, pack_id, TIME.pack(time))

    def _end_blob(self, tombstone: Tombstone) -> None:
        rows = self._rows
        name = tombstone.name
        before = rows.get(TOMBSTONES, name)
        if before is None or TIME.unpack(before)[0] < tombstone.time:
            rows.put(TOMBSTONES, name, TIME.pack(tombstone.time))
        if rows.get(BLOBS, name) is None:
            return

        pack_id = name[:ID_BYTES]
        was_shown = shown_name(rows, pack_id) == name
        self._grown -= blob_row(rows, name).counted
        rows.delete(BLOBS, name)
        if was_shown:
            self._remove_from_catalogue(pack_id)
            self._show_other(pack_id)

    def _show_other(self, pack_id: bytes) -> None:
        """Show another blob of a pack whose shown blob has ended, if there is one."""
        name = shown_name(self._rows, pack_id)
        if name is None:
            return
        row = blob_row(self._rows, name)
        self._rows.put(BLOBS, name, row._replace(table=b"").encode())
        self._show(PackTable.parse(row.table))

    # Requests

    def _write_request(self, entry: ManifestEntry) -> None:
        packs = split_ids(entry.packs)
        # also of an old version: uses do not depend on the order
        for pack_id in packs:
            self._use(pack_id, entry.time)
        before = read_version(self._rows, entry.digest)
        head = _content_digest(entry)
        if (entry.version, head) <= (before.written, before.head):
            return
        manifest = self._manifest_of(entry)
        if manifest is None:
            return
        time = max(before.time, entry.time)
        now = before._replace(written=entry.version, head=head, time=time)
        write_version(self._rows, entry.digest, now)
        if not now.is_alive:
            return

        row = manifest_row(self._namespace, manifest.id)
        self._forget_bytes(row)
        self._order.set_time(entry.time)
        write = ManifestWrite(manifest, (), packs)
        self._catalogue.add(CommitBatch(manifests=[write]))
        counted = len(entry.head) + len(entry.packs) + entry.length + OVERHEAD_BYTES
        place = KEYS.pack(entry.keys, entry.offset, entry.length, counted)
        self._rows.put(MANIFEST_KEYS, row, place)
        self._grown += counted
        self._catalogue.pin(row, now.is_pinned)

    def _manifest_of(self, entry: ManifestEntry) -> RequestManifest | None:
        """Return the manifest of a request; None, with a line in the log, if it is not readable."""
        try:
            manifest = decode_manifest(entry.head)
        except CorruptPackError as error:
            text = "a request in the index of %s is unreadable (%s)"
            logger.warning(text, self._namespace.hex(), error)
            return None
        row = manifest_row(self._namespace, manifest.id)
        if row[ID_BYTES:] != entry.digest:
            text = "the index of %s names a request by another id"
            logger.warning(text, self._namespace.hex())
            return None
        return manifest

    def _drop_request(self, dropped: Dropped) -> None:
        before = read_version(self._rows, dropped.digest)
        if dropped.version <= before.dropped:
            return
        time = max(before.time, dropped.time)
        now = before._replace(dropped=dropped.version, time=time)
        write_version(self._rows, dropped.digest, now)
        row = self._namespace + dropped.digest
        if now.is_alive:
            self._catalogue.pin(row, now.is_pinned)
        elif before.is_alive:
            self._forget_bytes(row)
            self._catalogue.drop_manifest(row)

    def _pin(self, pin: Pin) -> None:
        before = read_version(self._rows, pin.digest)
        if (pin.version, pin.pinned) <= (before.pin, before.pinned):
            return
        now = before._replace(pin=pin.version, pinned=pin.pinned)
        write_version(self._rows, pin.digest, now)
        if now.is_alive:
            self._catalogue.pin(self._namespace + pin.digest, now.is_pinned)

    def _forget_bytes(self, row: bytes) -> None:
        """Subtract the bytes of a request from the total."""
        place = self._rows.get(MANIFEST_KEYS, row)
        if place is not None and len(place) == KEYS.size:
            self._grown -= KEYS.unpack(place)[3]


def _content_digest(entry: ManifestEntry) -> bytes:
    """Return a digest of the content of a version of a request. Of two equal versions, the one with
    the greater digest counts."""
    place = KEYS.pack(entry.keys, entry.offset, entry.length, 0)
    content = b"".join([entry.head, entry.packs, entry.keys, place])
    return blake2b(content, digest_size=16).digest()


class _Additions:
    """Rows of new packs, and the totals with them.

    :param state: of the namespace; it is changed.
    """

    def __init__(self, state: NamespaceState, order: TimedOrder) -> None:
        self.counted = 0
        """Bytes that the blobs count for."""
        self._state = state
        self._order = order
        self._packs: list[tuple[bytes, bytes]] = []
        self._blobs: list[tuple[bytes, bytes]] = []
        self._uses: list[tuple[bytes, bytes]] = []
        self._places: list[tuple[bytes, bytes]] = []

    def add(self, namespace: bytes, entry: PackEntry) -> bool:
        """Add a pack; return False, and add nothing, if its table is not one of this pack."""
        head = table_head(entry.body)
        if head is None or (head.namespace, head.pack_id) != (namespace, entry.pack_id):
            return False
        state = self._state
        state.sequence += 1
        state.packs += 1
        state.blocks += head.block_count
        state.raw_bytes += head.raw_length
        state.stored_bytes += head.payload_length
        counted = head.payload_length + len(entry.body) + OVERHEAD_BYTES
        self.counted += counted

        key = namespace + entry.pack_id
        tags = entry.body[: head.start]
        encoded = entry.body[head.start :]
        self._packs.append((key, SEQUENCE.pack(state.sequence) + encoded))
        self._blobs.append((entry.name, BlobRow(counted, tags, b"").encode()))
        self._order.set_time(entry.time)
        use = Use(self._order.moment, entry.time, head.depth, 0, 0)
        self._uses.append((key, use.encode()))
        self._places.append((use.order_key(key), b""))
        return True

    def write(self, rows: TableRows, namespace: bytes) -> None:
        rows.put_many(PACKS, self._packs)
        rows.put_many(BLOBS, self._blobs)
        rows.put_many(USES, self._uses)
        rows.put_many(ORDER, sorted(self._places))
        rows.put(STATES, namespace, self._state.encode())
