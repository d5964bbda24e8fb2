"""Applies the content of index objects to the rows of a replica, by the rules at the top of
``replica``.

The order of the objects does not matter, nor how often each is applied, because each kind of
content is merged by a union or a maximum:

1. A blob of a pack is held if the blob has arrived and its tombstone has not: a tombstone that
   arrives first is recorded, and the blob is then refused. Of the held blobs of a pack, the
   catalogue shows the one with the smallest name; the others keep their tables (``BLOBS``).
2. Of the uses of a pack, the latest counts. Before the pack arrives, and between two blobs of it,
   its time is kept in ``EARLY``.
3. A request has three versions (``Version``), of its last write, deletion and pin. Each is the
   greatest that arrived. Whether the request is shown and pinned is computed from the three.
4. Equal versions occur if two engines write at the same time. Of two writes, the one with the
   greater digest of its content counts, and of a pin and an unpin, the pin.
"""

from __future__ import annotations

import logging
import struct
from collections import Counter, defaultdict
from collections.abc import Sequence
from hashlib import blake2b

from persistkv.errors import CorruptPackError
from persistkv.storage.backend import CommitBatch, ManifestWrite
from persistkv.storage.catalogue.order import TimedOrder
from persistkv.storage.catalogue.quotas import Quotas, TenantTotals
from persistkv.storage.catalogue.rows import (
    LINKS,
    MANIFEST_KEYS,
    META,
    NO_PRIORITY,
    ORDER,
    PACKS,
    SEQUENCE,
    STATES,
    TENANT_ORDER,
    USES,
    NamespaceState,
    TableRows,
    Use,
    manifest_row,
    read_state,
)
from persistkv.storage.catalogue.transaction import LOG_ENTRIES, CatalogTransaction
from persistkv.storage.format.manifest import RequestManifest, decode_manifest
from persistkv.storage.format.pack import (
    ID_BYTES,
    PackTable,
    TableHead,
    is_whole,
    table_head,
)
from persistkv.storage.format.pack_writer import PlacedPack
from persistkv.storage.shared.forgetting.records import ForgottenTenants
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
    OVERHEAD_BYTES,
    TIME,
    TOMBSTONES,
    BlobRow,
    KeysRow,
    Version,
    blob_row,
    put_blob_row,
    read_bytes,
    read_time,
    read_version,
    request_digest,
    shown_name,
    shown_table,
    write_later_time,
    write_version,
)
from persistkv.tenants import DEFAULT_TENANT, tenant_digest

# place of a request's keys, for ``_content_digest``: blob of the keys, offset, length, and always 0
_PLACE = struct.Struct("<16sQQQ")

logger = logging.getLogger(__name__)


class Application:
    """Applies deltas to the rows of a replica, within one transaction.

    :param forgotten: content of these tenants is refused.
    """

    def __init__(
        self,
        rows: TableRows,
        namespace: bytes,
        forgotten: ForgottenTenants,
    ) -> None:
        self._rows = rows
        self._forgotten = forgotten
        self._namespace = namespace
        self._order = TimedOrder(rows)
        """Eviction order of the catalogue: ``set_time`` sets the time of the uses that follow."""
        self._catalogue = self._new_transaction()
        """Changes the rows that queries show."""
        self._growth_bytes = 0
        """Bytes by which the present delta has made the namespace larger, as the capacity counts
        them. ``apply`` adds them to the total at its end."""

    def _new_transaction(self) -> CatalogTransaction:
        """Return a transaction on the rows of the catalogue. It writes no payloads: these are in
        blobs on the medium."""
        return CatalogTransaction(
            self._rows,
            payloads=None,
            namespace=self._namespace,
            order=self._order,
        )

    def apply(self, delta: Delta) -> None:
        """Apply the content of one object."""
        packs: Sequence[PackEntry] = delta.packs
        # the change log is too short for so many packs (an object may have the whole index), so add
        # them the fast way, without it
        if len(packs) > LOG_ENTRIES:
            packs = self._add_many(packs)
        for entry in packs:
            self._add_pack(entry)
        for use in delta.uses:
            for pack_id in split_ids(use.packs):
                self._record_use(pack_id, use.time)
        for manifest in delta.manifests:
            self._write_request(manifest)
        for dropped in delta.dropped:
            self._drop_request(dropped)
        for pin in delta.pins:
            self._apply_pin(pin)
        # apply tombstones last, because an object may add and end the same pack
        for tombstone in delta.removed:
            self._end_blob(tombstone)
        self._catalogue.finish()
        self._count_bytes()

    def _count_bytes(self) -> None:
        """Add the bytes of this delta to the total of the namespace."""
        if not self._growth_bytes:
            return
        before = read_bytes(self._rows)
        # keep the total from becoming negative if rows are damaged
        total = max(0, before + self._growth_bytes)
        self._rows.put(META, BYTES_ROW, BYTES.pack(total))

    # Packs

    def _add_pack(self, entry: PackEntry) -> None:
        """Add a pack, unless this blob of it is known or has ended, and count its use."""
        rows = self._rows
        is_ended = rows.get(TOMBSTONES, entry.name) is not None
        is_held = rows.get(BLOBS, entry.name) is not None
        if not is_ended and not is_held:
            self._add_blob(entry)
        # record the use even if the blob is not added: another blob may hold the pack, now or later
        self._record_use(entry.pack_id, entry.time)

    def _add_many(self, entries: Sequence[PackEntry]) -> list[PackEntry]:
        """Add the packs of which nothing is known, at a tenth of the time that each would take;
        return the others for ``_add_pack``: something is known of them, or they are damaged or
        forgotten.

        The added ones are not logged: the log is too short for them, so readers of changes get the
        whole catalogue.
        """
        new, others = self._split_new(entries)
        state = read_state(self._rows, self._namespace)
        additions = _Additions(self._namespace, state, self._order, self._forgotten)
        for entry in new:
            is_added = additions.add(entry)
            if not is_added:
                others.append(entry)
        additions.write(self._rows)
        self._growth_bytes += additions.counted
        # begin another transaction: the old one has read totals without these packs, and would
        # overwrite the new totals
        self._catalogue = self._new_transaction()
        return others

    def _split_new(
        self,
        entries: Sequence[PackEntry],
    ) -> tuple[list[PackEntry], list[PackEntry]]:
        """Return two lists in the order of names: the entries of packs that the replica does not
        know and that have one entry, and all others.
        """
        num_entries = Counter(entry.pack_id for entry in entries)
        known = self._known_ids(entries)
        new: list[PackEntry] = []
        others: list[PackEntry] = []
        in_order = sorted(entries, key=lambda entry: entry.name)
        for entry in in_order:
            has_one_blob = num_entries[entry.pack_id] == 1
            if has_one_blob and entry.pack_id not in known:
                new.append(entry)
            else:
                others.append(entry)
        return new, others

    def _known_ids(self, entries: Sequence[PackEntry]) -> set[bytes]:
        """Return the ids of the packs of which the replica knows anything."""
        rows = self._rows
        pack_ids = [entry.pack_id for entry in entries]
        pack_names = [self._namespace + pack_id for pack_id in pack_ids]
        blob_names = [entry.name for entry in entries]

        # add packs whose uses have arrived before the packs themselves
        known = set(rows.existing(EARLY, pack_ids))
        ended_blobs = rows.existing(TOMBSTONES, blob_names)
        known.update(name[:ID_BYTES] for name in ended_blobs)
        held_packs = rows.existing(PACKS, pack_names)
        known.update(name[ID_BYTES:] for name in held_packs)
        known.update(self._ids_in_requests(pack_names))
        return known

    def _ids_in_requests(self, pack_names: Sequence[bytes]) -> set[bytes]:
        """Return the ids of those packs that a request names. The name of a pack is the id of its
        namespace, then its own."""
        rows = self._rows
        # a new replica has no requests, and needs no search for each pack
        if not rows.count(LINKS):
            return set()
        return {name[ID_BYTES:] for name in pack_names if rows.has_prefix(LINKS, name)}

    def _add_blob(self, entry: PackEntry) -> None:
        """Add a blob of a pack that may have others. The catalogue shows the one with the smallest
        name; a hidden one keeps its table, to be shown when those before it end. A blob with an
        unreadable table is logged and skipped."""
        table = self._table_of(entry)
        if table is None:
            return
        counted = table.payload_length + len(entry.body) + OVERHEAD_BYTES
        self._growth_bytes += counted

        rows = self._rows
        shown = shown_name(rows, entry.pack_id)
        is_hidden = shown is not None and shown < entry.name
        if is_hidden:
            row = BlobRow(counted, entry.body)
            put_blob_row(rows, entry.name, row)
            return
        if shown is not None:
            self._hide(shown)
        # leave the table out, because the catalogue has it now
        row = BlobRow(counted, b"")
        put_blob_row(rows, entry.name, row)
        self._show(table)

    def _table_of(self, entry: PackEntry) -> PackTable | None:
        """Return the table of a pack. None: its tenant is forgotten; or it is not readable, which
        is logged."""
        try:
            table = PackTable.parse(entry.body)
        except CorruptPackError as error:
            text = "a pack in the index of %s is unreadable (%s)"
            logger.warning(text, self._namespace.hex(), error)
            return None
        has_other_namespace = table.namespace != self._namespace
        has_other_id = table.pack_id != entry.pack_id
        if has_other_namespace or has_other_id:
            text = "the index of %s names a pack of another place"
            logger.warning(text, self._namespace.hex())
            return None
        if self._forgotten.covers(table.tenant, table.data_key, entry.time):
            return None
        return table

    def _show(self, table: PackTable) -> None:
        """Add a pack to the catalogue, with the last of its uses that arrived before it."""
        rows = self._rows
        pack_id = table.pack_id
        last_use = read_time(rows, EARLY, pack_id)
        rows.delete(EARLY, pack_id)
        if last_use is None:
            # begin with time 0: ``_add_pack`` records the use at the time of the entry next
            last_use = 0.0
        # set the time at which the catalogue lists the pack as used
        self._order.set_time(last_use)
        batch = CommitBatch([PlacedPack(table)])
        self._catalogue.add(batch)

    def _hide(self, name: bytes) -> None:
        """Remove a pack from the catalogue, and keep the table with its blob ``name``."""
        rows = self._rows
        pack_id = name[:ID_BYTES]
        table = shown_table(rows, self._namespace + pack_id)
        shown = blob_row(rows, name)
        hidden = shown._replace(table=table)
        put_blob_row(rows, name, hidden)
        self._remove_from_catalogue(pack_id)

    def _remove_from_catalogue(self, pack_id: bytes) -> None:
        """Remove a pack from the catalogue; keep the time of its last use, for another blob of it
        that is held or may arrive."""
        use = self._order.use(self._namespace + pack_id)
        # a pack that the catalogue does not list has its time in ``EARLY``
        if use is not None:
            row = TIME.pack(use.time)
            self._rows.put(EARLY, pack_id, row)
        self._catalogue.discard(pack_id)

    def _record_use(self, pack_id: bytes, time: float) -> None:
        """Record a use of a pack, also if the pack arrives later."""
        self._order.set_time(time)
        # ``touch`` returns False if the catalogue does not list the pack
        is_held = self._order.touch(self._namespace + pack_id)
        if not is_held:
            write_later_time(self._rows, EARLY, pack_id, time)

    def _end_blob(self, tombstone: Tombstone) -> None:
        """Remove a blob of a pack for good; if another blob holds the pack, show that one."""
        rows = self._rows
        name = tombstone.name
        # record the tombstone even if the blob is not held, so that it is refused when it arrives
        write_later_time(rows, TOMBSTONES, name, tombstone.time)
        if rows.get(BLOBS, name) is None:
            return

        pack_id = name[:ID_BYTES]
        # find the shown blob before the row of this one is deleted
        was_shown = shown_name(rows, pack_id) == name
        self._growth_bytes -= blob_row(rows, name).counted
        rows.delete(BLOBS, name)
        if was_shown:
            self._remove_from_catalogue(pack_id)
            self._show_other(pack_id)

    def _show_other(self, pack_id: bytes) -> None:
        """Show another blob of a pack whose shown blob has ended, if there is one."""
        successor = shown_name(self._rows, pack_id)
        if successor is None:
            return
        hidden = blob_row(self._rows, successor)
        table = PackTable.parse(hidden.table)
        # the catalogue has the table from now on
        shown = hidden._replace(table=b"")
        put_blob_row(self._rows, successor, shown)
        self._show(table)

    # Requests

    def _write_request(self, entry: ManifestEntry) -> None:
        """Write a request, unless a newer version of it is known. One that was dropped later is not
        shown."""
        packs = split_ids(entry.packs)
        # record the uses even of an old version: replicas must agree in any order of arrival
        for pack_id in packs:
            self._record_use(pack_id, entry.time)
        before = read_version(self._rows, entry.digest)
        content_digest = _content_digest(entry)
        # of equal versions, the greater digest counts, so that all replicas choose the same one
        held_write = (before.written, before.content_digest)
        this_write = (entry.version, content_digest)
        if this_write <= held_write:
            return
        manifest = self._manifest_of(entry)
        # a damaged or forgotten entry is handled as if it had not arrived
        if manifest is None:
            return
        updated = before._replace(
            written=entry.version,
            content_digest=content_digest,
            time=max(before.time, entry.time),
        )
        write_version(self._rows, entry.digest, updated)
        # show the request only if no later deletion is known
        if updated.is_alive:
            write = ManifestWrite(manifest, (), packs)
            self._show_request(entry, write, updated)

    def _show_request(
        self,
        entry: ManifestEntry,
        write: ManifestWrite,
        version: Version,
    ) -> None:
        """Write a request to the catalogue, in place of its earlier version."""
        name = manifest_row(self._namespace, write.manifest.id)
        self._subtract_request(name)
        # set the time at which the catalogue lists the request as written
        self._order.set_time(entry.time)
        batch = CommitBatch(manifests=[write])
        self._catalogue.add(batch)
        # replace the row that ``add`` wrote without keys, which are in a blob
        self._write_place(name, entry)
        self._catalogue.pin(name, version.is_pinned)

    def _write_place(self, name: bytes, entry: ManifestEntry) -> None:
        """Write where the keys of a request are, and count its bytes."""
        index_bytes = len(entry.head) + len(entry.packs) + OVERHEAD_BYTES
        row = KeysRow(
            nonce=entry.keys,
            offset=entry.offset,
            length=entry.length,
            counted=index_bytes + entry.length,
            data_key=entry.data_key,
        )
        self._rows.put(MANIFEST_KEYS, name, row.encode())
        self._growth_bytes += row.counted

    def _manifest_of(self, entry: ManifestEntry) -> RequestManifest | None:
        """Return the manifest of a request. None: its tenant is forgotten; or it is not readable,
        which is logged."""
        try:
            manifest = decode_manifest(entry.head)
        except CorruptPackError as error:
            text = "a request in the index of %s is unreadable (%s)"
            logger.warning(text, self._namespace.hex(), error)
            return None
        if request_digest(manifest.id) != entry.digest:
            text = "the index of %s names a request by another id"
            logger.warning(text, self._namespace.hex())
            return None
        if self._forgotten.covers(manifest.tenant, entry.data_key, entry.time):
            return None
        return manifest

    def _drop_request(self, dropped: Dropped) -> None:
        """Drop a request up to a version; a later version of it stays."""
        before = read_version(self._rows, dropped.digest)
        if dropped.version <= before.dropped:
            return
        time = max(before.time, dropped.time)
        updated = before._replace(dropped=dropped.version, time=time)
        write_version(self._rows, dropped.digest, updated)
        name = self._namespace + dropped.digest
        if updated.is_alive:
            # a later version of the request stays, but the deletion may end its pin
            self._catalogue.pin(name, updated.is_pinned)
        elif before.is_alive:
            self._subtract_request(name)
            self._catalogue.drop_manifest(name)

    def _apply_pin(self, pin: Pin) -> None:
        """Pin or unpin a request, unless a later pin is known."""
        before = read_version(self._rows, pin.digest)
        # of a pin and an unpin with equal versions, the pin counts, because True is greater
        held_pin = (before.pin_version, before.was_pin)
        this_pin = (pin.version, pin.pinned)
        if this_pin <= held_pin:
            return
        updated = before._replace(pin_version=pin.version, was_pin=pin.pinned)
        write_version(self._rows, pin.digest, updated)
        if updated.is_alive:
            name = self._namespace + pin.digest
            # The request may have been deleted after this pin, and written again since: then
            # ``is_pinned`` is false, because the deletion has ended the pin.
            self._catalogue.pin(name, updated.is_pinned)

    def _subtract_request(self, name: bytes) -> None:
        """Subtract the bytes of a request from the total, if it is held."""
        row = self._rows.get(MANIFEST_KEYS, name)
        keys = KeysRow.decode(row)
        if keys is not None:
            self._growth_bytes -= keys.counted


def _content_digest(entry: ManifestEntry) -> bytes:
    """Return a digest of the content of a version of a request. Two engines may write equal
    versions at the same time: then the one with the greater digest counts, in all replicas."""
    place = _PLACE.pack(entry.keys, entry.offset, entry.length, 0)
    content = b"".join([entry.head, entry.packs, entry.keys, place])
    return blake2b(content, digest_size=16).digest()


class _Additions:
    """Rows of new packs, and the totals with them, which ``write`` writes at once, sorted. Only for
    packs of which nothing is known: neither uses, nor other blobs, nor requests that name them.

    :param state: totals of the namespace; ``add`` changes them.
    :param forgotten: content of these tenants is not added.
    """

    def __init__(
        self,
        namespace: bytes,
        state: NamespaceState,
        order: TimedOrder,
        forgotten: ForgottenTenants,
    ) -> None:
        self._namespace = namespace
        self._forgotten = forgotten
        self.counted = 0
        """Bytes that the blobs count for in the capacity."""
        self._state = state
        self._order = order
        self._new: defaultdict[str, list[tuple[bytes, bytes]]] = defaultdict(list)
        """New rows, as (key, value), by table."""
        self._tenants: dict[str, TenantTotals] = {}
        """Totals of the new packs of each tenant except the default one."""

    def add(self, entry: PackEntry) -> bool:
        """Add a pack; return False, and add nothing, if its table is damaged or not one of this
        pack, or its tenant is forgotten."""
        head = table_head(entry.body)
        if head is None or not is_whole(entry.body):
            return False
        is_of_namespace = head.namespace == self._namespace
        is_of_pack = head.pack_id == entry.pack_id
        if not (is_of_namespace and is_of_pack):
            return False
        if self._forgotten.covers(head.tenant, head.data_key, entry.time):
            return False
        counted = head.payload_length + len(entry.body) + OVERHEAD_BYTES
        self.counted += counted
        # the rows contain the number of this change, which ``_count`` assigns
        self._count(head)
        self._add_rows(entry, head, counted)
        return True

    def _add_rows(
        self,
        entry: PackEntry,
        head: TableHead,
        counted: int,
    ) -> None:
        """Add the rows of a pack in each table.

        :param counted: bytes that the blob counts for in the capacity.
        """
        new = self._new
        name = self._namespace + entry.pack_id
        sequence = SEQUENCE.pack(self._state.sequence)
        pack_row = sequence + entry.body
        new[PACKS].append((name, pack_row))
        # leave the table out, because the catalogue has it
        blob = BlobRow(counted, b"")
        new[BLOBS].append((entry.name, blob.encode()))
        use = self._use_of(head, entry.time)
        new[USES].append((name, use.encode()))
        order_key = use.order_key(name)
        new[ORDER].append((order_key, b""))
        if use.tenant:
            tenant_key = use.tenant + order_key
            new[TENANT_ORDER].append((tenant_key, b""))

    def _count(self, head: TableHead) -> None:
        """Add a pack to the totals of the namespace and of its tenant."""
        state = self._state
        state.sequence += 1
        state.packs += 1
        state.blocks += head.block_count
        state.raw_bytes += head.raw_length
        state.stored_bytes += head.payload_length
        if head.tenant != DEFAULT_TENANT:
            new = TenantTotals(head.tenant)
            totals = self._tenants.setdefault(head.tenant, new)
            totals.packs += 1
            totals.stored_bytes += head.payload_length

    def _use_of(self, head: TableHead, time: float) -> Use:
        """Return the last use of a new pack, which is neither pinned nor named by a request."""
        tenant = b""
        if head.tenant != DEFAULT_TENANT:
            tenant = tenant_digest(head.tenant)
        order = self._order
        # this sets ``moment``, the number of this time in the order
        order.set_time(time)
        return Use(
            moment=order.moment,
            time=time,
            depth=head.depth,
            pins=0,
            priority=NO_PRIORITY,
            tenant=tenant,
        )

    def write(self, rows: TableRows) -> None:
        """Write the rows of all added packs, and the totals."""
        for table, new in self._new.items():
            # LMDB adds rows faster if they are in the order of the table
            new.sort()
            rows.put_many(table, new)
        rows.put(STATES, self._namespace, self._state.encode())
        quotas = Quotas(rows)
        for tenant, added in self._tenants.items():
            totals = quotas.of(tenant)
            totals.packs += added.packs
            totals.stored_bytes += added.stored_bytes
        quotas.finish()
