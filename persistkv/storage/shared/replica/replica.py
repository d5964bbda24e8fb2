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
5. Content of forgotten tenants is refused: it never arrives, whatever object has it.
6. A replica is private to its process, and not synced. It is kept for the next process only after a
   clean end.
"""

from __future__ import annotations

import os
import struct
import threading
from collections.abc import Generator, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple

import lmdb

from persistkv.errors import CorruptStoreError, StoreError
from persistkv.storage.backend import CommitBatch
from persistkv.storage.catalogue.catalogue import Catalogue
from persistkv.storage.catalogue.order import TimedOrder
from persistkv.storage.catalogue.quotas import (
    Quotas,
    TenantTotals,
    read_tenants,
    with_default,
)
from persistkv.storage.catalogue.rows import (
    GENERATION_BYTES,
    MANIFEST_KEYS,
    MANIFESTS,
    META,
    ORDER,
    ORDER_KEY,
    PACK,
    PACKS,
    SEALED_TABLES,
    STATES,
    TENANT_ORDER,
    NamespaceState,
    TableRows,
    manifest_row,
    pack_table,
    read_state,
)
from persistkv.storage.catalogue.transaction import CatalogTransaction, kept_names
from persistkv.storage.format.codec import Buffer
from persistkv.storage.format.pack import ID_BYTES, PackTable
from persistkv.storage.format.pack_writer import NewPack
from persistkv.storage.format.seal import PLAIN, Seal
from persistkv.storage.shared.forgetting.records import ForgottenTenants
from persistkv.storage.shared.format import NONCE_BYTES, Delta, Dropped, Tombstone
from persistkv.storage.shared.replica.application import Application
from persistkv.storage.shared.replica.dump import dump_deltas
from persistkv.storage.shared.replica.forgotten_rows import ForgottenRows
from persistkv.storage.shared.replica.limits import Limits, evict
from persistkv.storage.shared.replica.rows import (
    BLOBS,
    CONTAINED,
    EARLY,
    NO_INCLUDER,
    REPLICA_TABLES,
    TIME,
    TOMBSTONES,
    VERSIONS,
    KeysRow,
    decode_includer,
    encode_includer,
    names_of,
    read_bytes,
    read_version,
    read_versions,
    request_digest,
    shown_name,
)
from persistkv.tenants import TAG_BYTES

_SEALED_TABLES = SEALED_TABLES | {BLOBS}
# row of ``META`` with the format of the replica, which ``_prepare`` writes
_KIND_ROW = b"kind"
_KIND = b"persistkv replica 1"

# 64 GiB of address space, which is 30 times an index of a million packs. A process has 128 TiB,
# enough for the replicas of 2,000 namespaces.
MAP_BYTES = 64 << 30
# 1 GiB: minimum of the same, if the process may not have more
_LEAST_MAP_BYTES = 1 << 30
_READERS = 126
# in place of a name in ``Replica.apply``: the content is in no index object yet
NO_OBJECT = ""
# maximum number of packs or requests that one transaction removes
_FORGOTTEN_AT_ONCE = 256
# seconds for which ``close`` waits for transactions, which usually take milliseconds
_CLOSE_S = 5.0


class PackBlob(NamedTuple):
    """The blob that holds a pack."""

    nonce: bytes
    """Random part of the blob's name, behind the pack id."""
    table: PackTable
    """Table of the pack."""


class KeysPlace(NamedTuple):
    """Place of a request's keys."""

    nonce: bytes
    """Random part of the name of their blob."""
    offset: int
    """Bytes before the sealed record in that blob."""
    length: int
    """Bytes of the sealed record in that blob."""
    data_key: bytes
    """Id of the data key that seals the keys; ``PLAIN_KEY``: none does."""


@dataclass
class Removals:
    """Packs and requests that a commit or a merge removes."""

    packs: list[bytes] = field(default_factory=list)
    """Names of the blobs of removed packs."""
    manifests: list[bytes] = field(default_factory=list)
    """Digests of removed requests."""
    tables: list[PackTable] = field(default_factory=list)
    """Tables of the removed packs."""
    key_blobs: list[bytes] = field(default_factory=list)
    """Nonces of the blobs that have only keys of removed requests; known of forgotten tenants
    only."""


class CommitPlan(NamedTuple):
    """Packs to upload and content to remove in a commit."""

    cursor: bytes
    """Position in the changes of the namespace (``Changes.cursor``) before the commit."""
    missing: list[NewPack]
    """Packs to upload: those of the batch that are not held, or whose rows are damaged."""
    removals: Removals
    """Content that the batch deletes, and damaged blobs that ``missing`` replaces."""
    pins: list[tuple[bytes, bool]]
    """(digest, pinned) of the requests that the batch pins or unpins, without those that are not
    held."""


class Replica:
    """Replica of the index of one namespace. Thread-safe.

    :param directory: directory of the LMDB environment, which only the replica uses.
    :param namespace: id of the namespace.
    :param seal: seal of the rows.
    :param forgotten: content of these tenants is refused; more may be added later. None: no content
        is refused.
    :param map_bytes: bytes of address space for the memory map, halved until they fit.
    :raises StoreError: the directory cannot be used.
    """

    def __init__(
        self,
        directory: Path,
        namespace: bytes,
        seal: Seal = PLAIN,
        forgotten: ForgottenTenants | None = None,
        map_bytes: int = MAP_BYTES,
    ) -> None:
        self.namespace = namespace
        self._seal = seal
        self._forgotten = forgotten or ForgottenTenants()
        self._num_applied_records = 0
        """Number of the records of forgotten tenants whose content ``remove_forgotten`` has
        removed."""
        self.has_traces = False
        """Whether its free pages may have content of forgotten tenants: then it is not kept for the
        next process."""
        self.is_damaged = False
        """Whether a row was found damaged: then it is not kept for the next process, either."""
        self._directory = directory
        self._closed = False
        self._running = 0
        """Number of transactions that run, in any thread."""
        self._changed = threading.Condition()
        """Guards ``_closed`` and ``_running``: rows are views of a memory map, which closing
        removes."""
        self._databases: dict[str, lmdb._Database] = {}
        try:
            self._env = _open(directory, map_bytes)
            with self._env.begin(write=True) as txn:
                for name in REPLICA_TABLES:
                    database = self._env.open_db(name.encode(), txn=txn)
                    self._databases[name] = database
        except (lmdb.Error, OSError) as error:
            raise StoreError(
                f"{directory}: the replica of the index failed ({error})"
            ) from None
        self.catalogue = Catalogue(namespace, self.rows)
        """Queries of what the replica shows."""
        self._prepare()
        self.contained = self._read_contained()
        """Names of the index objects whose content the replica contains → the object that includes
        it and was applied last; ``NO_INCLUDER``: none includes it."""

    def _prepare(self) -> None:
        """Write the rows that a new replica begins with, unless they are there."""
        with self.rows() as rows:
            kind = rows.get(META, _KIND_ROW)
            state_row = rows.get(STATES, self.namespace)
            is_ready = kind == _KIND and state_row is not None
        if is_ready:
            return
        with self.rows(write=True) as rows:
            state = NamespaceState(os.urandom(GENERATION_BYTES))
            rows.put(STATES, self.namespace, state.encode())
            rows.put(META, _KIND_ROW, _KIND)

    def _read_contained(self) -> dict[str, str]:
        """Return the names of contained objects, and which object includes each."""
        contained: dict[str, str] = {}
        with self.rows() as rows:
            for key, row in rows.range(CONTAINED, start=b""):
                name = bytes(key).decode()
                contained[name] = decode_includer(row)
        return contained

    @contextmanager
    def rows(
        self,
        *,
        write: bool = False,
        abort: bool = False,
    ) -> Iterator[TableRows]:
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
                # Seal with the data key of the store, not with those of tenants: when the key of a
                # tenant is destroyed, its rows must still open, because totals are computed from
                # them.
                yield TableRows(
                    txn, self._databases, self._seal, _SEALED_TABLES, of_tenants=False
                )
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
            return read_bytes(rows)

    # Reading

    def blobs(self, pack_ids: Iterable[bytes]) -> dict[bytes, PackBlob]:
        """Return the blobs of these packs, by pack id, without packs that are not held."""
        found: dict[bytes, PackBlob] = {}
        with self.rows() as rows:
            for pack_id in pack_ids:
                key = self.namespace + pack_id
                table = pack_table(key, rows.get(PACKS, key))
                name = shown_name(rows, pack_id)
                if table is not None and name is not None:
                    nonce = name[ID_BYTES:]
                    found[pack_id] = PackBlob(nonce, table)
        return found

    def live_names(self, names: Iterable[bytes]) -> set[bytes]:
        """Return those of the blobs that are held; ``names``: pack id and nonce of each."""
        return self._existing(BLOBS, names)

    def held(self, pack_ids: Iterable[bytes]) -> list[bytes]:
        """Return the ids of those packs that are held, in the given order."""
        with self.rows() as rows:
            found: list[bytes] = []
            for pack_id in pack_ids:
                if rows.get(PACKS, self.namespace + pack_id) is not None:
                    found.append(pack_id)
        return found

    def ended_names(self, names: Iterable[bytes]) -> set[bytes]:
        """Return those of the blobs that have a tombstone; ``names`` as in ``live_names``."""
        return self._existing(TOMBSTONES, names)

    def _existing(
        self,
        table: str,
        keys: Iterable[bytes],
    ) -> set[bytes]:
        """Return those of the keys that have a row in a table."""
        with self.rows() as rows:
            return {key for key in keys if rows.get(table, key) is not None}

    def keys_place(self, manifest_id: str) -> KeysPlace | None:
        """Return where the keys of a request are; None if it is not held."""
        key = manifest_row(self.namespace, manifest_id)
        with self.rows() as rows:
            row = rows.get(MANIFEST_KEYS, key)
            keys = KeysRow.decode(row)
        if keys is None:
            return None
        return KeysPlace(keys.nonce, keys.offset, keys.length, keys.data_key)

    def keys_nonces(self) -> set[bytes]:
        """Return the nonces of the blobs with the keys of held requests."""
        with self.rows() as rows:
            places = rows.starting_with(MANIFEST_KEYS, self.namespace)
            return {bytes(row[:NONCE_BYTES]) for _, row in places}

    def versions(self, digests: Iterable[bytes]) -> dict[bytes, int]:
        """Return the newest version of each request; 0 for unknown ones."""
        found: dict[bytes, int] = {}
        with self.rows() as rows:
            for digest in digests:
                version = read_version(rows, digest)
                found[digest] = version.newest
        return found

    def ages(self, points: int) -> list[tuple[float, int]]:
        """Return (time, bytes of the packs that were last used at this time or earlier), ascending,
        in at most ``points`` steps. Pinned packs do not count; the others count with their average
        size, so that only the keys of the eviction order are read: this takes about a second for a
        million packs.
        """
        with self.rows() as rows:
            # count all packs and bytes, pinned ones included, for the average size
            packs = read_state(rows, self.namespace).packs
            total = read_bytes(rows)
            order = rows.range(ORDER, start=b"")
            moments = _moments(key for key, _ in order)
        return _age_steps(moments, points, total, packs)

    def tenant_ages(
        self,
        tenant: bytes,
        points: int,
    ) -> list[tuple[float, int]]:
        """Return what ``ages`` returns, for the packs of one tenant; ``tenant``: digest of its
        name."""
        with self.rows() as rows:
            totals = Quotas(rows).of_digest(tenant)
            # each key is the digest, followed by a key as in ``ORDER``
            keys = rows.starting_with(TENANT_ORDER, tenant)
            moments = _moments(key[TAG_BYTES:] for key, _ in keys)
        if totals is None:
            return []
        return _age_steps(moments, points, totals.stored_bytes, totals.packs)

    def tenants(self) -> list[TenantTotals]:
        """Return the totals of all tenants in this namespace, without quotas."""
        with self.rows() as rows:
            state = read_state(rows, self.namespace)
            found = list(read_tenants(rows))
        return with_default(found, state.packs, state.stored_bytes)

    def tenant_bytes(self, tenant: bytes) -> int:
        """Return the payload bytes of a tenant's packs; ``tenant``: digest of its name."""
        with self.rows() as rows:
            totals = Quotas(rows).of_digest(tenant)
        return 0 if totals is None else totals.stored_bytes

    def has_evictable(self, tenant: bytes) -> bool:
        """Return whether a tenant has packs that may be evicted; ``tenant``: digest of its name."""
        with self.rows() as rows:
            return rows.has_prefix(TENANT_ORDER, tenant)

    # Plans

    def plan(self, batch: CommitBatch) -> CommitPlan:
        """Return the packs that a commit of the batch must upload and remove; change nothing."""
        # Try the removals out and roll them back: the replica changes when the index object of the
        # commit is applied.
        with self.rows(write=True, abort=True) as rows:
            transaction = CatalogTransaction(
                rows,
                payloads=None,
                namespace=self.namespace,
                keep=kept_names(self.namespace, batch),
                order=TimedOrder(rows),
            )
            # read the cursor before the removals, which advance it
            cursor = transaction.cursor
            # leave out the touches, which would write rows for nothing, and all that is added
            deletions = CommitBatch(
                deletions=batch.deletions,
                bad=batch.bad,
                manifest_deletions=batch.manifest_deletions,
            )
            transaction.remove(deletions)
            # find missing packs after the removals: a bad pack that the batch also writes is
            # missing now
            missing: dict[bytes, NewPack] = {}
            for pack in transaction.missing(batch.packs):
                # keep only the first one, because a batch may have a pack twice
                missing.setdefault(pack.pack_id, pack)
            pins = self._held_pins(rows, batch)
            removals = _removals(rows, transaction)
            # the new blobs of missing packs replace the damaged ones
            blobs_to_remove = [*removals.packs, *_blobs_of(rows, missing)]
            # name each blob once: those of bad packs are in both lists
            removals.packs = list(dict.fromkeys(blobs_to_remove))
        packs_to_upload = list(missing.values())
        return CommitPlan(cursor, packs_to_upload, removals, pins)

    def _held_pins(
        self,
        rows: TableRows,
        batch: CommitBatch,
    ) -> list[tuple[bytes, bool]]:
        """Return (digest, pinned) of the requests that a batch pins or unpins, and that are held or
        that it writes."""
        written = {write.manifest.id for write in batch.manifests}
        pins: list[tuple[bytes, bool]] = []
        for manifest_id, pinned in batch.pins:
            digest = request_digest(manifest_id)
            is_held = rows.get(MANIFESTS, self.namespace + digest) is not None
            if is_held or manifest_id in written:
                pins.append((digest, pinned))
        return pins

    def plan_eviction(
        self,
        limits: Limits,
        now: float,
        at_most: int,
    ) -> Removals:
        """Return expired content, and content to evict; change nothing.

        :param now: present time on the medium's clock; 0: nothing expires.
        :param at_most: maximum number of packs and requests that expire. The same maximum holds for
            those that are evicted from each tenant with a quota, and for those that are evicted to
            reach the capacity.
        """
        # Try the evictions out and roll them back: the replica changes when the index object that
        # records them is applied.
        with self.rows(write=True, abort=True) as rows:
            order = TimedOrder(rows)
            transaction = CatalogTransaction(
                rows, payloads=None, namespace=self.namespace, order=order
            )
            # remove expired content first, which may leave nothing to evict
            if now:
                # ``expire`` measures ages from the time of the order
                order.set_time(now)
                transaction.expire(limits.ttl_s, at_most)
            evict(transaction, rows, order, limits, at_most)
            return _removals(rows, transaction)

    def tombstones(self, removals: Removals, time: float) -> Delta:
        """Return a delta that removes packs and requests: packs for good, requests up to the newest
        version that is known here."""
        removed = [Tombstone(name, time) for name in removals.packs]
        dropped: list[Dropped] = []
        versions = self.versions(removals.manifests)
        for digest, version in versions.items():
            # the version is 0 if the request is unknown here, so there is nothing to delete
            if version:
                dropped.append(Dropped(digest, version, time))
        return Delta(removed=removed, dropped=dropped)

    # Changes

    def apply(self, objects: Iterable[tuple[str, Delta]]) -> tuple[bytes, bytes]:
        """Add the content of index objects to the catalogue, in one transaction.

        :param objects: name and content; ``NO_OBJECT``: content that is in none yet.
        :returns: the cursors (``Changes.cursor``) before and after.
        :raises StoreError: the replica failed; nothing was applied.
        """
        # objects that count as contained from now on → the object that includes each
        includers: dict[str, str] = {}
        with self.rows(write=True) as rows:
            cursor_before = read_state(rows, self.namespace).cursor
            for name, delta in objects:
                application = Application(rows, self.namespace, self._forgotten)
                application.apply(delta)
                # keep the includer that an earlier delta, or an earlier call, has named
                if name != NO_OBJECT and name not in includers:
                    includers[name] = self.contained.get(name, NO_INCLUDER)
                # The delta has the content of the objects that it includes, so they are not read
                # any more. Of several includers, record the last one.
                for included in delta.includes:
                    includers[included] = name
            self._put_includers(rows, includers)
            cursor_after = read_state(rows, self.namespace).cursor
        # change ``contained`` only after the transaction, which may fail
        self.contained.update(includers)
        return cursor_before, cursor_after

    def _put_includers(
        self,
        rows: TableRows,
        includers: Mapping[str, str],
    ) -> None:
        """Write the rows of contained objects, each with its includer."""
        for name, includer in includers.items():
            rows.put(CONTAINED, name.encode(), encode_includer(includer))

    def is_included(self, name: str) -> bool:
        """Return whether the replica contains an object of the index that another one includes."""
        return self.contained.get(name, NO_INCLUDER) != NO_INCLUDER

    def is_unincluded(self, name: str) -> bool:
        """Return whether the replica contains an object of the index that no other one includes."""
        return self.contained.get(name) == NO_INCLUDER

    def mark_contained(self, names: Sequence[str]) -> None:
        """Record that the replica contains these objects, which were not read."""
        new = [name for name in names if name not in self.contained]
        if new:
            nothing = Delta()
            self.apply([(name, nothing) for name in new])

    def mark_not_included(self, names: Sequence[str]) -> None:
        """Record that contained objects are no longer included: their includers have vanished from
        the index."""
        if not names:
            return
        includers = dict.fromkeys(names, NO_INCLUDER)
        with self.rows(write=True) as rows:
            self._put_includers(rows, includers)
        self.contained.update(includers)

    def forget(self, names: Iterable[str]) -> None:
        """Forget the names of index objects that no longer exist. Their content stays."""
        with self.rows(write=True) as rows:
            for name in names:
                rows.delete(CONTAINED, name.encode())
                self.contained.pop(name, None)

    def content_of(self, forgotten: ForgottenTenants) -> Removals:
        """Return the packs and requests of forgotten tenants in the replica."""
        found = Removals()
        # nonces of the blobs with keys of forgotten requests
        key_blobs: set[bytes] = set()
        # nonces of the blobs with keys of other requests, which must be kept: one blob has the keys
        # of all requests of a commit
        kept_key_blobs: set[bytes] = set()
        with self.rows() as rows:
            search = ForgottenRows(rows, self.namespace, forgotten)
            for table in search.packs():
                found.tables.append(table)
                found.packs += names_of(rows, table.pack_id)
            for request in search.requests():
                if request.is_forgotten:
                    found.manifests.append(request.digest)
                    key_blobs.add(request.nonce)
                else:
                    kept_key_blobs.add(request.nonce)
        found.key_blobs = sorted(key_blobs - kept_key_blobs)
        return found

    def remove_forgotten(self) -> None:
        """Remove the content of tenants that were forgotten since the last call.

        :raises StoreError: the replica failed; some may be removed.
        """
        # records are only added, so their number shows whether there are new ones
        num_records = len(self._forgotten.records)
        if num_records == self._num_applied_records:
            return
        content = self.content_of(self._forgotten)
        if content.tables or content.manifests:
            self.has_traces = True
        removals = self.tombstones(content, self._forgotten.time)
        packs = removals.removed
        requests = removals.dropped
        # remove the content in several transactions, because commits wait while one runs
        num_entries = max(len(packs), len(requests))
        for start in range(0, num_entries, _FORGOTTEN_AT_ONCE):
            end = start + _FORGOTTEN_AT_ONCE
            part = Delta(
                removed=packs[start:end],
                dropped=requests[start:end],
            )
            # write no object: other replicas refuse the content by the same records
            self.apply([(NO_OBJECT, part)])
        self._num_applied_records = num_records

    def purge(self, before: float) -> None:
        """Forget tombstones, deleted requests and uses of unknown packs that are older than
        ``before``."""
        with self.rows(write=True) as rows:
            _purge_times(rows, TOMBSTONES, before)
            _purge_times(rows, EARLY, before)
            versions = list(read_versions(rows))
            for digest, version in versions:
                is_old = version.time < before
                if is_old and not version.is_alive:
                    rows.delete(VERSIONS, digest)

    def dump(self, part_bytes: int) -> Generator[Delta]:
        """Iterate over the whole content, in deltas of at most ``part_bytes`` each; at least one. A
        delta with a single pack or request may be larger. Close the iterator, which holds a
        transaction.

        :raises CorruptStoreError: a row of a pack or request is damaged; ``is_damaged`` is set.
        """
        try:
            with self.rows() as rows:
                yield from dump_deltas(rows, self.namespace, part_bytes)
        except (CorruptStoreError, struct.error) as error:
            self.is_damaged = True
            # ``struct.error``: a row has another length
            raise CorruptStoreError(
                f"replica of the index in {self._directory}: {error}. The next opening of the "
                f"store reads the index anew"
            ) from None

    def close(self, *, keep: bool = False) -> None:
        """Close the environment when the transactions of other threads have ended. Later
        transactions raise.

        :param keep: sync the files, so that a later handle can use them.
        :raises StoreError: the files are not complete; or a thread did not end its transaction, and
            the environment stays open until the process ends.
        """
        with self._changed:
            if self._closed:
                return
            self._closed = True
            has_ended = self._changed.wait_for(lambda: self._running == 0, _CLOSE_S)
            if not has_ended:
                raise StoreError(f"{self._directory}: the replica is in use")
        try:
            # sync now, because commits are not synced (``_open``)
            if keep:
                self._env.sync(True)
        except lmdb.Error as error:
            raise StoreError(
                f"{self._directory}: the replica failed ({error})"
            ) from None
        finally:
            self._env.close()


def _moments(keys: Iterable[Buffer]) -> list[int]:
    """Return when the packs in keys of the eviction order (``ORDER_KEY``) were last used,
    ascending. A moment is a time in microseconds (``TimedOrder``)."""
    moments: list[int] = []
    for key in keys:
        _, moment, _, kind, _ = ORDER_KEY.unpack(key)
        # count packs only
        if kind == PACK:
            moments.append(moment)
    # sort by time: packs of low priority come first in the order, whatever their age
    moments.sort()
    return moments


def _age_steps(
    moments: Sequence[int],
    points: int,
    num_bytes: int,
    packs: int,
) -> list[tuple[float, int]]:
    """Return when the packs that may be evicted were last used: at most ``points`` pairs (time of
    the last use, bytes of the packs that were not used later), both ascending.

    The bytes are estimates: each pack counts with the average size of all packs, pinned ones
    included, because the eviction order has no sizes.

    :param moments: when each pack that is not pinned was last used, ascending (``_moments``).
    :param num_bytes: bytes of all packs, pinned ones included.
    :param packs: number of these packs.
    """
    # make steps with about the same number of packs each
    num_steps = min(points, len(moments))
    ages: list[tuple[float, int]] = []
    for step in range(1, num_steps + 1):
        # number of packs up to this step
        num_packs = len(moments) * step // num_steps
        last_moment = moments[num_packs - 1]
        time = TimedOrder.time_of(last_moment)
        bytes_so_far = num_bytes * num_packs // max(1, packs)
        ages.append((time, bytes_so_far))
    return ages


def _purge_times(
    rows: TableRows,
    table: str,
    before: float,
) -> None:
    """Delete the rows with times earlier than ``before``. The values of the table are times."""
    old: list[bytes] = []
    for key, row in rows.range(table, start=b""):
        (time,) = TIME.unpack(row)
        if time < before:
            old.append(bytes(key))
    for key in old:
        rows.delete(table, key)


def _removals(rows: TableRows, transaction: CatalogTransaction) -> Removals:
    """Return the packs and requests that a transaction has removed, under their names in index
    objects.

    The catalogue names a pack by namespace and pack id, and a request by namespace and digest; the
    index of one namespace leaves out the namespace (the first ``ID_BYTES``), and names each blob of
    a pack.
    """
    # name each pack once, although the transaction lists it for each removal
    removed_packs = dict.fromkeys(transaction.removed)
    removed_requests = dict.fromkeys(transaction.dropped)
    # tables of the removed packs, without damaged ones
    tables = list(transaction.evicted)

    removals = Removals(tables=tables)
    for name in removed_packs:
        pack_id = name[ID_BYTES:]
        removals.packs += names_of(rows, pack_id)
    for name in removed_requests:
        digest = name[ID_BYTES:]
        removals.manifests.append(digest)
    return removals


def _blobs_of(rows: TableRows, missing: Iterable[bytes]) -> list[bytes]:
    """Return the names of the blobs of missing packs. A pack that has one counts as missing because
    its row in the catalogue is damaged: the commit uploads another blob in place of these."""
    found: list[bytes] = []
    for pack_id in missing:
        found += names_of(rows, pack_id)
    return found


def _open(directory: Path, size: int) -> lmdb.Environment:
    """Open the environment with the largest map that the address space allows, of ``size`` bytes at
    most."""
    while True:
        try:
            return lmdb.open(
                str(directory),
                map_size=size,
                max_dbs=len(REPLICA_TABLES),
                max_readers=_READERS,
                # do not sync commits: a replica that did not end cleanly is not used again
                sync=False,
                metasync=False,
            )
        except lmdb.MemoryError:
            if size <= _LEAST_MAP_BYTES:
                raise
            size //= 2
