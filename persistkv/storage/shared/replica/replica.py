"""Replica of one namespace's index: the catalogue that a handle searches, in a private LMDB
environment.

1. ``apply`` adds the content of index objects. It commutes and is idempotent: the same objects in
   any order, each any number of times, give the same catalogue.
2. A pack can have several blobs, if engines have stored it at the same time. The catalogue shows
   the one with the smallest nonce; the others replace it when it ends. A tombstone ends one blob
   for good.
3. Of a request, the newest version counts. A deletion covers all versions up to its own, and their
   pins.
4. Uses and tombstones of unknown packs are kept: the pack may arrive later.
5. A replica is private to its process, and not synced. It is kept for the next process only after a
   clean end.
"""

from __future__ import annotations

import fcntl
import logging
import os
import shutil
import struct
import tempfile
import threading
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from hashlib import blake2b
from pathlib import Path
from typing import NamedTuple

import lmdb

from persistkv.errors import CorruptPackError, StoreError
from persistkv.storage.backend import CommitBatch, ManifestWrite
from persistkv.storage.catalog.catalogue import Catalogue
from persistkv.storage.catalog.order import TimedOrder
from persistkv.storage.catalog.rows import (
    CHAINS,
    GENERATION_BYTES,
    LINKS,
    MANIFEST_KEYS,
    MANIFESTS,
    META,
    ORDER,
    ORDER_KEY,
    PACK,
    PACKS,
    SEQUENCE,
    STATES,
    TABLES,
    USES,
    Chain,
    NamespaceState,
    TableRows,
    Use,
    manifest_row,
    pack_table,
    read_state,
)
from persistkv.storage.catalog.transaction import (
    LOG_ENTRIES,
    CatalogTransaction,
    kept_names,
)
from persistkv.storage.format.manifest import decode_manifest
from persistkv.storage.format.pack import (
    ID_BYTES,
    PackTable,
    encoded_length,
    table_head,
)
from persistkv.storage.format.pack_writer import NewPack, PackCopy
from persistkv.storage.shared.format import (
    NONCE_BYTES,
    Delta,
    Dropped,
    ManifestEntry,
    PackEntry,
    Pin,
    Tombstone,
    split_ids,
)
from persistkv.storage.shared.format import Use as UseEntry

logger = logging.getLogger(__name__)

# Tables in addition to the catalogue's. A *name* is pack id and nonce; a *digest* is that of a
# request's id. name → ``_BLOB``, tags, table. The table is left out for the blob that the catalogue
# shows
BLOBS = "blobs"
TOMBSTONES = "tombstones"  # name → time
EARLY = "early"  # pack id → time of the last use of a pack that is not held
VERSIONS = "versions"  # digest → ``_Version``
# name of an index object → 1 and the name of an object that includes it, or 0
CONTAINED = "contained"
_TABLES = (*TABLES, BLOBS, TOMBSTONES, EARLY, VERSIONS, CONTAINED)

_BLOB = struct.Struct("<QI")  # bytes that the blob counts for, bytes of the tags
_TIME = struct.Struct("<d")
_BYTES = struct.Struct("<q")
_VERSION = struct.Struct("<Q16sQQ?d")
# nonce of the blob with the keys, offset, length, bytes that the request counts for
_KEYS = struct.Struct("<16sQQQ")
_BYTES_ROW = b"bytes"
_KIND_ROW = b"kind"
_KIND = b"persistkv replica 1"

# of a request in an index object, without its head and its packs
_MOST_REQUEST_BYTES = 160
_OVERHEAD_BYTES = 256  # of a pack or request, for its rows in index objects
# 64 GiB of address space, 30 times an index of a million packs. A process has 128 TiB: room for the
# replicas of 2,000 namespaces; with 1 TiB each, the 138th could not be opened
MAP_BYTES = 64 << 30
_LEAST_MAP_BYTES = 1 << 30  # 1 GiB
_READERS = 126
# wait of ``close`` for transactions, which take milliseconds except that of a base
_CLOSE_S = 5.0
_MOST_REPLICAS = 64  # per namespace and machine


class _Version(NamedTuple):
    """What is known of a request: the newest version that was written, deleted and pinned; 0:
    none."""

    written: int = 0
    # digest of the written content: of two equal versions, the greater one counts
    head: bytes = bytes(16)
    dropped: int = 0
    pin: int = 0
    pinned: bool = False
    time: float = 0.0

    @property
    def is_alive(self) -> bool:
        return self.written > self.dropped

    @property
    def is_pinned(self) -> bool:
        return self.pinned and self.pin > self.dropped

    @property
    def newest(self) -> int:
        return max(self.written, self.dropped, self.pin)


class PackBlob(NamedTuple):
    """The blob that holds a pack."""

    nonce: bytes
    table: PackTable
    tags: bytes
    """Authentication tags; empty without a key."""


class KeysPlace(NamedTuple):
    """Place of a request's keys."""

    nonce: bytes
    offset: int
    length: int


@dataclass
class Removals:
    """Packs and requests that a commit or a merge removes."""

    packs: list[bytes] = field(default_factory=list)
    """Names of the blobs of removed packs."""
    manifests: list[bytes] = field(default_factory=list)
    """Digests of removed requests."""
    tables: list[PackTable] = field(default_factory=list)
    """Tables of the removed packs."""


class Plan(NamedTuple):
    """What a commit must upload and remove."""

    cursor: bytes
    missing: list[NewPack]
    removals: Removals
    pins: list[tuple[bytes, bool]]
    """(digest, pinned) of the requests that the batch pins or unpins, without those that are not
    held."""


class Replica:
    """Replica of the index of one namespace. Thread-safe.

    :param directory: of the LMDB environment; the replica is its only user.
    :param map_bytes: address space, halved until it fits.
    :raises StoreError: the directory cannot be used.
    """

    def __init__(
        self, directory: Path, namespace: bytes, map_bytes: int = MAP_BYTES
    ) -> None:
        self.namespace = namespace
        self._directory = directory
        self._closed = False
        self._running = 0  # transactions
        self._changed = threading.Condition()
        """Guards ``_closed`` and ``_running``: rows are views of a memory map, which closing
        removes."""
        try:
            self._env = _open(directory, map_bytes)
            with self._env.begin(write=True) as txn:
                self._databases = {
                    name: self._env.open_db(name.encode(), txn=txn) for name in _TABLES
                }
        except (lmdb.Error, OSError) as error:
            raise StoreError(
                f"{directory}: the replica of the index failed ({error})"
            ) from None
        self.catalogue = Catalogue(namespace, self.rows, self.disk_bytes)
        """Queries of what the replica shows."""
        self._prepare()
        self.includers: dict[str, str] = {}
        """Included objects of the index → the object that includes them and was applied last."""
        self.contained = self._read_contained()
        """Names of the index objects whose content the replica contains → whether another one
        includes them."""

    def _prepare(self) -> None:
        with self.rows() as rows:
            is_ready = rows.get(META, _KIND_ROW) == _KIND
            is_ready = is_ready and rows.get(STATES, self.namespace) is not None
        if is_ready:
            return
        with self.rows(write=True) as rows:
            state = NamespaceState(os.urandom(GENERATION_BYTES))
            rows.put(STATES, self.namespace, state.encode())
            rows.put(META, _KIND_ROW, _KIND)

    def _read_contained(self) -> dict[str, bool]:
        contained: dict[str, bool] = {}
        with self.rows() as rows:
            for key, value in rows.range(CONTAINED, b""):
                name, includer = bytes(key).decode(), bytes(value[1:]).decode()
                contained[name] = bool(includer)
                if includer:
                    self.includers[name] = includer
        return contained

    @contextmanager
    def rows(self, *, write: bool = False, abort: bool = False) -> Iterator[TableRows]:
        """Run a transaction, which is committed at the end of the ``with`` block, and rolled back
        if it raises.

        :param abort: roll it back in any case: the changes are only a plan.
        :raises StoreError: the replica is closed, or failed.
        """
        with self._changed:
            if self._closed:
                raise StoreError(f"{self._directory}: the replica is closed")
            self._running += 1
        try:
            txn = self._env.begin(write=write, buffers=True)
            try:
                yield TableRows(txn, self._databases)
            except BaseException:
                txn.abort()
                raise
            if abort:
                txn.abort()
            else:
                txn.commit()
        except lmdb.Error as error:
            raise StoreError(
                f"{self._directory}: the replica failed ({error})"
            ) from None
        finally:
            with self._changed:
                self._running -= 1
                self._changed.notify_all()

    def disk_bytes(self) -> int:
        """Return the bytes that the namespace takes on the medium: packs, and estimates of the
        rest."""
        with self.rows() as rows:
            return _read_bytes(rows)

    @property
    def cursor(self) -> bytes:
        with self.rows() as rows:
            return read_state(rows, self.namespace).cursor

    # Reading

    def blobs(self, pack_ids: Iterable[bytes]) -> dict[bytes, PackBlob]:
        """Return the blobs of these packs, by pack id, without packs that are not held."""
        found: dict[bytes, PackBlob] = {}
        with self.rows() as rows:
            for pack_id in pack_ids:
                key = self.namespace + pack_id
                row = rows.get(PACKS, key)
                table = pack_table(key, row)
                name = _shown(rows, pack_id)
                if table is None or name is None:
                    continue
                found[pack_id] = PackBlob(
                    name[ID_BYTES:], table, _blob_row(rows, name).tags
                )
        return found

    def live_names(self, names: Iterable[bytes]) -> set[bytes]:
        """Return those of the names that are held."""
        with self.rows() as rows:
            return {name for name in names if rows.get(BLOBS, name) is not None}

    def held(self, pack_ids: Iterable[bytes]) -> list[bytes]:
        """Return those of the packs that are held, in order."""
        with self.rows() as rows:
            return [
                pack_id
                for pack_id in pack_ids
                if rows.get(PACKS, self.namespace + pack_id) is not None
            ]

    def ended_names(self, names: Iterable[bytes]) -> set[bytes]:
        """Return those of the names that have a tombstone."""
        with self.rows() as rows:
            return {name for name in names if rows.get(TOMBSTONES, name) is not None}

    def keys_place(self, manifest_id: str) -> KeysPlace | None:
        """Return where the keys of a request are; None if it is not held."""
        with self.rows() as rows:
            row = rows.get(MANIFEST_KEYS, manifest_row(self.namespace, manifest_id))
            if row is None or len(row) != _KEYS.size:
                return None
            nonce, offset, length, _ = _KEYS.unpack(row)
        return KeysPlace(nonce, offset, length)

    def keys_nonces(self) -> set[bytes]:
        """Return the nonces of the blobs with the keys of held requests."""
        with self.rows() as rows:
            return {
                bytes(row[:NONCE_BYTES])
                for _, row in rows.starting_with(MANIFEST_KEYS, self.namespace)
            }

    def versions(self, digests: Iterable[bytes]) -> dict[bytes, int]:
        """Return the newest version of each request; 0 for unknown ones."""
        with self.rows() as rows:
            return {digest: _read_version(rows, digest).newest for digest in digests}

    def ages(self, points: int) -> list[tuple[float, int]]:
        """Return (time, bytes of the packs that were last used at this time or earlier), ascending,
        in at most ``points`` steps. Pinned packs do not count; the others count with their average
        size, so that only the keys of the eviction order are read: this takes about a second for a
        million packs.
        """
        moments: list[int] = []
        with self.rows() as rows:
            state = read_state(rows, self.namespace)
            for key, _ in rows.range(ORDER, b""):
                _, moment, _, kind, _ = ORDER_KEY.unpack(key)
                if kind == PACK:
                    moments.append(moment)
            total = _read_bytes(rows)
        # those of low priority come first in the order, whatever their age
        moments.sort()
        steps = min(points, len(moments))
        ages: list[tuple[float, int]] = []
        for number in range(1, steps + 1):
            last = len(moments) * number // steps
            ages.append(
                (
                    TimedOrder.time_of(moments[last - 1]),
                    total * last // max(1, state.packs),
                )
            )
        return ages

    # Plans

    def plan(self, batch: CommitBatch) -> Plan:
        """Return what a commit of the batch must upload and remove; change nothing."""
        with self.rows(write=True, abort=True) as rows:
            order = TimedOrder(rows)
            keep = kept_names(self.namespace, batch)
            transaction = CatalogTransaction(
                rows, None, self.namespace, keep, order=order
            )
            cursor = transaction.cursor
            if batch.deletions or batch.bad:
                transaction.remove(
                    CommitBatch(deletions=batch.deletions, bad=batch.bad)
                )
            missing: dict[bytes, NewPack] = {}
            for pack in transaction.missing(batch.packs):
                missing.setdefault(pack.pack_id, pack)
            written = {write.manifest.id for write in batch.manifests}
            pins: list[tuple[bytes, bool]] = []
            for manifest_id, pinned in batch.pins:
                row = manifest_row(self.namespace, manifest_id)
                if manifest_id in written or rows.get(MANIFESTS, row) is not None:
                    pins.append((row[ID_BYTES:], pinned))
            removals = _removals(rows, transaction)
            # if it has blobs, its row is damaged: the new blob replaces them
            for pack_id in missing:
                names = _names_of(rows, pack_id)
                removals.packs += [name for name in names if name not in removals.packs]
        return Plan(cursor, list(missing.values()), removals, pins)

    def plan_eviction(
        self, now: float, ttl_s: float | None, excess: int, horizon: float, at_most: int
    ) -> Removals:
        """Return expired content, and content to evict; change nothing.

        :param now: present time on the medium's clock; 0: nothing expires.
        :param ttl_s: content expires this many seconds after its last use; None: requests by their
            own ttl only.
        :param excess: bytes to free, least recently used content first.
        :param horizon: also evict everything that was last used before this time.
        :param at_most: maximum number of packs and requests that expire, and of those that are
            evicted.
        """
        with self.rows(write=True, abort=True) as rows:
            order = TimedOrder(rows)
            transaction = CatalogTransaction(rows, None, self.namespace, order=order)
            if now:
                order.set_time(now)
                transaction.expire(ttl_s, at_most)
            goal = _Goal(rows, order, transaction.removed, excess, horizon)
            transaction.evict(goal.is_met, at_most)
            return _removals(rows, transaction)

    # Changes

    def apply(self, objects: Iterable[tuple[str, Delta]]) -> tuple[bytes, bytes]:
        """Add the content of index objects to the catalogue, in one transaction.

        :param objects: name and content; an empty name: content that is in no object yet.
        :returns: the cursors (``Changes.cursor``) before and after.
        :raises StoreError: the replica failed; nothing was applied.
        """
        includers: dict[str, str] = {}  # name → its includer; empty: there is none
        with self.rows(write=True) as rows:
            before = read_state(rows, self.namespace).cursor
            for name, delta in objects:
                _Application(rows, self.namespace).apply(delta)
                if name:
                    includers.setdefault(name, self.includers.get(name, ""))
                includers.update(dict.fromkeys(delta.includes, name))
            self._put_includers(rows, includers)
            after = read_state(rows, self.namespace).cursor
        self._note_includers(includers)
        return before, after

    def _put_includers(self, rows: TableRows, includers: Mapping[str, str]) -> None:
        for name, includer in includers.items():
            rows.put(
                CONTAINED,
                name.encode(),
                b"\1" + includer.encode() if includer else b"\0",
            )

    def _note_includers(self, includers: Mapping[str, str]) -> None:
        for name, includer in includers.items():
            self.contained[name] = bool(includer)
            if includer:
                self.includers[name] = includer
            else:
                self.includers.pop(name, None)

    def mark_contained(self, names: Sequence[str]) -> None:
        """Record that the replica contains these objects, which were not read."""
        new = [name for name in names if name not in self.contained]
        if new:
            self.apply([(name, Delta()) for name in new])

    def mark_not_included(self, names: Sequence[str]) -> None:
        """Record that no object of the index includes these ones any more, whose content the
        replica contains."""
        if not names:
            return
        includers = dict.fromkeys(names, "")
        with self.rows(write=True) as rows:
            self._put_includers(rows, includers)
        self._note_includers(includers)

    def forget(self, names: Iterable[str]) -> None:
        """Forget the names of index objects that no longer exist. Their content stays."""
        with self.rows(write=True) as rows:
            for name in names:
                rows.delete(CONTAINED, name.encode())
                self.contained.pop(name, None)
                self.includers.pop(name, None)

    def purge(self, before: float) -> None:
        """Forget tombstones, deleted requests and uses of unknown packs that are older than
        ``before``."""
        with self.rows(write=True) as rows:
            for table in (TOMBSTONES, EARLY):
                old = [
                    bytes(key)
                    for key, row in rows.range(table, b"")
                    if _TIME.unpack(row)[0] < before
                ]
                for key in old:
                    rows.delete(table, key)
            for digest, version in list(_versions(rows)):
                if not version.is_alive and version.time < before:
                    rows.delete(VERSIONS, digest)

    # Bases

    def dump(self, part_bytes: int) -> Iterator[Delta]:
        """Iterate over the whole content, in deltas of at most ``part_bytes`` each; at least one. A
        delta with a single pack, or with a request of up to 8 MiB, may be larger.
        """
        part = _Part()
        with self.rows() as rows:
            for entry in _dumped_packs(rows, self.namespace):
                length = len(entry.body) + 64
                if part.length and part.length + length > part_bytes:
                    yield part.take()
                part.packs.append(entry)
                part.length += length
            most = part_bytes * 2 // 3  # the rest is room for a request
            for row, value in rows.range(TOMBSTONES, b""):
                if part.length > most:
                    yield part.take()
                part.removed.append(Tombstone(bytes(row), _TIME.unpack(value)[0]))
                part.length += 48
            for digest, version in _versions(rows):
                if part.length > most:
                    yield part.take()
                part.add_request(rows, self.namespace, digest, version)
            for row, value in rows.range(EARLY, b""):
                if part.length > most:
                    yield part.take()
                part.uses.append(UseEntry(_TIME.unpack(value)[0], bytes(row)))
                part.length += 32
        yield part.take()

    def close(self, *, keep: bool = False) -> None:
        """Close the environment when the transactions of other threads have ended. Later
        transactions raise.

        :param keep: complete the files, so that a later handle can use them.
        :raises StoreError: the files are not complete; or a thread did not end its transaction, and
            the environment stays open until the process ends.
        """
        with self._changed:
            if self._closed:
                return
            self._closed = True
            if not self._changed.wait_for(lambda: self._running == 0, _CLOSE_S):
                raise StoreError(f"{self._directory}: the replica is in use")
        try:
            if keep:
                self._env.sync(True)
        except lmdb.Error as error:
            raise StoreError(
                f"{self._directory}: the replica failed ({error})"
            ) from None
        finally:
            self._env.close()


class _Goal:
    """Goal of an eviction: bytes to free, and a time before which nothing was last used.

    :param removed: names of the packs that the transaction has removed; it grows.
    """

    def __init__(
        self,
        rows: TableRows,
        order: TimedOrder,
        removed: Sequence[bytes],
        excess: int,
        horizon: float,
    ) -> None:
        self._rows = rows
        self._order = order
        self._removed = removed
        self._excess = excess
        self._horizon = horizon
        self._counted = 0

    def is_met(self) -> bool:
        for pack in self._removed[self._counted :]:
            for name in _names_of(self._rows, pack[ID_BYTES:]):
                self._excess -= _blob_row(self._rows, name).counted
        self._counted = len(self._removed)
        if self._excess > 0:
            return False
        first = next(self._order.oldest(), None)
        return first is None or first[1].time >= self._horizon


class _Application:
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
        for tombstone in delta.removed:
            self._end_blob(tombstone)
        self._catalogue.finish()
        if self._grown:
            total = max(0, _read_bytes(self._rows) + self._grown)
            self._rows.put(META, _BYTES_ROW, _BYTES.pack(total))

    # Packs

    def _add_pack(self, entry: PackEntry) -> None:
        rows, name = self._rows, entry.name
        is_known = (
            rows.get(TOMBSTONES, name) is not None or rows.get(BLOBS, name) is not None
        )
        if not is_known:
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
        try:
            table = PackTable.parse(entry.body)
        except CorruptPackError as error:
            logger.warning(
                "a pack in the index of %s is unreadable (%s)",
                self._namespace.hex(),
                error,
            )
            return
        if (table.namespace, table.pack_id) != (self._namespace, entry.pack_id):
            logger.warning(
                "the index of %s names a pack of another place", self._namespace.hex()
            )
            return
        length = encoded_length(table.codec, table.frame_count, table.keys)
        tags, encoded = entry.body[:-length], entry.body[-length:]
        counted = table.payload_length + len(entry.body) + _OVERHEAD_BYTES
        self._grown += counted
        shown = _shown(self._rows, entry.pack_id)
        row = _BlobRow(counted, tags, b"")
        if shown is None:
            self._rows.put(BLOBS, entry.name, row.encode())
            self._show(table)
        elif entry.name < shown:
            self._hide(shown)
            self._rows.put(BLOBS, entry.name, row.encode())
            self._show(table)
        else:
            self._rows.put(BLOBS, entry.name, row._replace(table=encoded).encode())

    def _show(self, table: PackTable) -> None:
        """Add a pack to the catalogue, with the last of its uses that arrived before it."""
        pack_id = table.pack_id
        early = self._rows.get(EARLY, pack_id)
        self._order.set_time(0.0 if early is None else _TIME.unpack(early)[0])
        self._rows.delete(EARLY, pack_id)
        self._catalogue.add(CommitBatch([PackCopy(table, b"")]))

    def _hide(self, name: bytes) -> None:
        """Remove a pack from the catalogue, and keep the table with its blob."""
        pack_id = name[:ID_BYTES]
        key = self._namespace + pack_id
        encoded = bytes(self._rows.get(PACKS, key) or b"")[SEQUENCE.size :]
        row = _blob_row(self._rows, name)
        self._rows.put(BLOBS, name, row._replace(table=encoded).encode())
        self._remove_from_catalogue(pack_id)

    def _remove_from_catalogue(self, pack_id: bytes) -> None:
        use = self._order.use(self._namespace + pack_id)
        if use is not None:  # another blob of this pack may come
            self._rows.put(EARLY, pack_id, _TIME.pack(use.time))
        self._catalogue.discard(pack_id)

    def _use(self, pack_id: bytes, time: float) -> None:
        self._order.set_time(time)
        if self._order.touch(self._namespace + pack_id):
            return
        before = self._rows.get(EARLY, pack_id)
        if before is None or _TIME.unpack(before)[0] < time:
            self._rows.put(EARLY, pack_id, _TIME.pack(time))

    def _end_blob(self, tombstone: Tombstone) -> None:
        rows, name = self._rows, tombstone.name
        before = rows.get(TOMBSTONES, name)
        if before is None or _TIME.unpack(before)[0] < tombstone.time:
            rows.put(TOMBSTONES, name, _TIME.pack(tombstone.time))
        if rows.get(BLOBS, name) is None:
            return
        pack_id = name[:ID_BYTES]
        was_shown = _shown(rows, pack_id) == name
        self._grown -= _blob_row(rows, name).counted
        rows.delete(BLOBS, name)
        if not was_shown:
            return
        self._remove_from_catalogue(pack_id)
        following = _shown(rows, pack_id)
        if following is not None:
            row = _blob_row(rows, following)
            rows.put(BLOBS, following, row._replace(table=b"").encode())
            self._show(PackTable.parse(row.table))

    # Requests

    def _write_request(self, entry: ManifestEntry) -> None:
        rows = self._rows
        # also of an old version: uses do not depend on the order
        for pack_id in split_ids(entry.packs):
            self._use(pack_id, entry.time)
        before = _read_version(rows, entry.digest)
        content = (
            entry.head,
            entry.packs,
            entry.keys,
            _KEYS.pack(entry.keys, entry.offset, entry.length, 0),
        )
        head = blake2b(b"".join(content), digest_size=16).digest()
        if (entry.version, head) <= (before.written, before.head):
            return
        try:
            manifest = decode_manifest(entry.head)
        except CorruptPackError as error:
            logger.warning(
                "a request in the index of %s is unreadable (%s)",
                self._namespace.hex(),
                error,
            )
            return
        row = manifest_row(self._namespace, manifest.id)
        if row[ID_BYTES:] != entry.digest:
            logger.warning(
                "the index of %s names a request by another id", self._namespace.hex()
            )
            return
        time = max(before.time, entry.time)
        now = before._replace(written=entry.version, head=head, time=time)
        _write_version(rows, entry.digest, now)
        if not now.is_alive:
            return
        self._forget_bytes(row)
        self._order.set_time(entry.time)
        self._catalogue.add(
            CommitBatch(manifests=[ManifestWrite(manifest, (), split_ids(entry.packs))])
        )
        counted = len(entry.head) + len(entry.packs) + entry.length + _OVERHEAD_BYTES
        rows.put(
            MANIFEST_KEYS,
            row,
            _KEYS.pack(entry.keys, entry.offset, entry.length, counted),
        )
        self._grown += counted
        self._catalogue.pin(row, now.is_pinned)

    def _drop_request(self, dropped: Dropped) -> None:
        before = _read_version(self._rows, dropped.digest)
        if dropped.version <= before.dropped:
            return
        now = before._replace(
            dropped=dropped.version, time=max(before.time, dropped.time)
        )
        _write_version(self._rows, dropped.digest, now)
        row = self._namespace + dropped.digest
        if before.is_alive and not now.is_alive:
            self._forget_bytes(row)
            self._catalogue.drop_manifest(row)
        elif now.is_alive:
            self._catalogue.pin(row, now.is_pinned)

    def _pin(self, pin: Pin) -> None:
        before = _read_version(self._rows, pin.digest)
        if (pin.version, pin.pinned) <= (before.pin, before.pinned):
            return
        now = before._replace(pin=pin.version, pinned=pin.pinned)
        _write_version(self._rows, pin.digest, now)
        if now.is_alive:
            self._catalogue.pin(self._namespace + pin.digest, now.is_pinned)

    def _forget_bytes(self, row: bytes) -> None:
        """Subtract the bytes of a request from the total."""
        place = self._rows.get(MANIFEST_KEYS, row)
        if place is not None and len(place) == _KEYS.size:
            self._grown -= _KEYS.unpack(place)[3]


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
        counted = head.payload_length + len(entry.body) + _OVERHEAD_BYTES
        self.counted += counted

        key = namespace + entry.pack_id
        tags = entry.body[: head.start]
        encoded = entry.body[head.start :]
        self._packs.append((key, SEQUENCE.pack(state.sequence) + encoded))
        self._blobs.append((entry.name, _BlobRow(counted, tags, b"").encode()))
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


class _BlobRow(NamedTuple):
    """Value of a row in ``BLOBS``."""

    counted: int
    """Bytes that the blob counts for."""
    tags: bytes
    table: bytes
    """The encoded table; empty if the catalogue shows this blob, and has its table."""

    def encode(self) -> bytes:
        return _BLOB.pack(self.counted, len(self.tags)) + self.tags + self.table


class _Part:
    """A part of a base that is being collected."""

    def __init__(self) -> None:
        self.length = 0
        self.packs: list[PackEntry] = []
        self.uses: list[UseEntry] = []
        self.removed: list[Tombstone] = []
        self._manifests: list[ManifestEntry] = []
        self._dropped: list[Dropped] = []
        self._pins: list[Pin] = []

    def add_request(
        self, rows: TableRows, namespace: bytes, digest: bytes, version: _Version
    ) -> None:
        row = namespace + digest
        self.length += _MOST_REQUEST_BYTES
        if version.dropped:
            self._dropped.append(Dropped(digest, version.dropped, version.time))
        if version.pin > version.dropped:
            self._pins.append(Pin(digest, version.pin, version.pinned))
        head, place = rows.get(MANIFESTS, row), rows.get(MANIFEST_KEYS, row)
        chain = Chain.decode(rows.get(CHAINS, row))
        if not version.is_alive or head is None or place is None or chain is None:
            return
        nonce, offset, length, _ = _KEYS.unpack(place)
        entry = ManifestEntry(
            digest,
            version.written,
            chain.time,
            bytes(head),
            b"".join(chain.packs),
            nonce,
            offset,
            length,
        )
        self._manifests.append(entry)
        self.length += len(entry.head) + len(entry.packs)

    def take(self) -> Delta:
        """Return the collected content, and begin the next part."""
        delta = Delta(
            self.packs,
            self.uses,
            self.removed,
            self._manifests,
            self._dropped,
            self._pins,
        )
        self.__init__()  # type: ignore[misc]
        return delta


def _dumped_packs(rows: TableRows, namespace: bytes) -> Iterator[PackEntry]:
    """Iterate over all blobs of packs."""
    for name, value in rows.range(BLOBS, b""):
        pack_id, nonce = bytes(name[:ID_BYTES]), bytes(name[ID_BYTES:])
        row = _decode_blob_row(bytes(value))
        encoded = (
            row.table
            or bytes(rows.get(PACKS, namespace + pack_id) or b"")[SEQUENCE.size :]
        )
        use = Use.decode(rows.get(USES, namespace + pack_id))
        yield PackEntry(
            pack_id, nonce, row.tags + encoded, 0.0 if use is None else use.time
        )


def _removals(rows: TableRows, transaction: CatalogTransaction) -> Removals:
    removals = Removals(tables=list(transaction.evicted))
    for name in dict.fromkeys(transaction.removed):
        removals.packs += _names_of(rows, name[ID_BYTES:])
    for name in dict.fromkeys(transaction.dropped):
        removals.manifests.append(name[ID_BYTES:])
    return removals


def _names_of(rows: TableRows, pack_id: bytes) -> list[bytes]:
    """Return the names of all blobs of a pack."""
    return [bytes(name) for name, _ in rows.starting_with(BLOBS, pack_id)]


def _shown(rows: TableRows, pack_id: bytes) -> bytes | None:
    """Return the name of the blob that the catalogue shows for a pack: the smallest; None: there is
    none."""
    name = rows.first(BLOBS, pack_id)
    return name if name is not None and name.startswith(pack_id) else None


def _blob_row(rows: TableRows, name: bytes) -> _BlobRow:
    row = rows.get(BLOBS, name)
    return _BlobRow(0, b"", b"") if row is None else _decode_blob_row(bytes(row))


def _decode_blob_row(row: bytes) -> _BlobRow:
    counted, tags = _BLOB.unpack_from(row)
    end = _BLOB.size + tags
    return _BlobRow(counted, row[_BLOB.size : end], row[end:])


def _read_version(rows: TableRows, digest: bytes) -> _Version:
    row = rows.get(VERSIONS, digest)
    return _Version() if row is None else _Version._make(_VERSION.unpack(row))


def _write_version(rows: TableRows, digest: bytes, version: _Version) -> None:
    rows.put(VERSIONS, digest, _VERSION.pack(*version))


def _versions(rows: TableRows) -> Iterator[tuple[bytes, _Version]]:
    for digest, row in rows.range(VERSIONS, b""):
        yield bytes(digest), _Version._make(_VERSION.unpack(row))


def _read_bytes(rows: TableRows) -> int:
    row = rows.get(META, _BYTES_ROW)
    return 0 if row is None else int(_BYTES.unpack(row)[0])


def _open(directory: Path, size: int) -> lmdb.Environment:
    """Open the environment with the largest map that the address space allows, of ``size`` bytes at
    most."""
    while True:
        try:
            return lmdb.open(
                str(directory),
                map_size=size,
                max_dbs=len(_TABLES),
                max_readers=_READERS,
                sync=False,
                metasync=False,
            )
        except lmdb.MemoryError:
            if size <= _LEAST_MAP_BYTES:
                raise
            size //= 2


class ReplicaFolder:
    """Directory of a namespace's replicas on this machine: one for each process that has the store
    open.

    :param root: directory for all stores; None: a temporary directory that ends with this object.
    :param parts: parts of the path below ``root`` that identify the namespace.
    """

    def __init__(self, root: Path | None, parts: Sequence[str]) -> None:
        self._temporary: tempfile.TemporaryDirectory[str] | None = None
        if root is None:
            self._temporary = tempfile.TemporaryDirectory(prefix="persistkv-")
            root = Path(self._temporary.name)
        self._folder = root.joinpath(*parts)
        self._lock = -1
        self.path = self._folder
        """Directory of the opened replica."""

    def open(self, namespace: bytes) -> Replica:
        """Open the first replica that no process uses. One that did not end cleanly is begun anew.

        :raises StoreError: the directory cannot be used.
        """
        try:
            self._acquire()
            clean = self.path / "clean"
            if not clean.exists():
                self._clear()
            clean.unlink(missing_ok=True)
        except OSError as error:
            self._release()
            raise StoreError(
                f"{self._folder}: the replica of the index failed ({error})"
            ) from None
        return self._opened(namespace)

    def _opened(self, namespace: bytes) -> Replica:
        try:
            return Replica(self.path, namespace)
        except StoreError:
            with suppress(OSError):  # a damaged one is begun anew
                self._clear()
            return Replica(self.path, namespace)

    def close(self, replica: Replica, *, keep: bool) -> None:
        """Close the replica; ``keep`` it for the next process. Failures are only logged."""
        try:
            replica.close(keep=keep and self._temporary is None)
            if keep and self._temporary is None:
                (self.path / "clean").touch()
        except (StoreError, OSError) as error:
            logger.warning(
                "%s: the replica of the index is not kept (%s)", self.path, error
            )
        self._release()
        if self._temporary is not None:
            self._temporary.cleanup()

    def _acquire(self) -> None:
        self._folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        for number in range(_MOST_REPLICAS):
            lock = os.open(
                self._folder / f"{number}.lock",
                os.O_RDWR | os.O_CREAT | os.O_CLOEXEC,
                0o600,
            )
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                os.close(lock)
                continue
            self._lock, self.path = lock, self._folder / str(number)
            self.path.mkdir(exist_ok=True, mode=0o700)
            return
        raise OSError(f"{_MOST_REPLICAS} replicas are in use")

    def _clear(self) -> None:
        for path in self.path.iterdir():
            if path.is_dir() and not path.is_symlink():
                shutil.rmtree(path)
            else:
                path.unlink()

    def _release(self) -> None:
        if self._lock >= 0:
            os.close(self._lock)
            self._lock = -1
