"""Forgetting of a tenant.

1. Its packs and requests are deleted in short transactions, while engines use the store.
2. Its data keys are destroyed in a write transaction that finds no row of it any more, so no other
   process commits in between: a row that no key opens would spoil the totals. They seal all rows,
   tables and payloads of the tenant, so what is left of these in free pages and extents, in damaged
   stores and in copies can never be read.
3. Entries of the log with fingerprints of the tenant's keys are deleted in the same transaction:
   readers that have not seen them yet read the whole catalogue.
4. In a store without a key, the space of deleted packs is returned to the file system instead.
5. Saved indexes, which have fingerprints of the keys of all tenants, are deleted: they are caches.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from itertools import islice

from persistkv.errors import StoreError
from persistkv.storage.catalog import CatalogTransaction, TableRows
from persistkv.storage.catalog.rows import (
    LOG,
    MANIFEST_KEYS,
    MANIFESTS,
    PACKS,
    SEQUENCE,
    decoded,
)
from persistkv.storage.forgetting import Forgotten
from persistkv.storage.format.codec import Buffer
from persistkv.storage.format.keys import KEY_ID_BYTES
from persistkv.storage.format.manifest import decode_manifest
from persistkv.storage.format.pack import ID_BYTES, table_head
from persistkv_lmdb.commit import release_free
from persistkv_lmdb.environment import Environment
from persistkv_lmdb.files import INDEX_PREFIX
from persistkv_lmdb.layout import read_erasures, write_erasures
from persistkv_lmdb.room import Room

_ROUNDS = 20  # of deletions, while engines store content of the tenant
_AT_ONCE = 32  # packs or requests that one transaction deletes: other engines wait
_ROWS_AT_ONCE = 4_096  # per read transaction


class Forgetting:
    """Forgets one tenant; used once."""

    def __init__(self, environment: Environment, tenant: str) -> None:
        self._environment = environment
        self._keys = environment.database.keys
        self._has_key = environment.database.seal.encrypts
        self._tenant = tenant
        self._packs = 0
        self._requests = 0
        self._stored_bytes = 0

    def run(self) -> Forgotten:
        """Delete the content, then destroy the keys.

        :raises StoreError: engines store content of the tenant all the time; or a transaction
            failed.
        """
        key_ids = None
        for _ in range(_ROUNDS):
            self._delete_all()
            key_ids = self._destroy()
            if key_ids is not None:
                break
        if key_ids is None:
            raise StoreError(
                f"{self._environment.path}: engines store content of the tenant all the time: end "
                f"its requests, and repeat the command"
            )
        for file in self._environment.path.glob(f"{INDEX_PREFIX}*"):
            file.unlink(missing_ok=True)
        if not self._has_key:
            release_free(self._environment)
        return Forgotten(
            self._tenant,
            time.time(),
            tuple(key_id.hex() for key_id in key_ids),
            self._packs,
            self._requests,
            self._stored_bytes,
        )

    # Content

    def _delete_all(self) -> None:
        """Delete the requests of the tenant, then the packs that these name."""
        for table in (MANIFESTS, MANIFEST_KEYS, PACKS):
            names = list(self._names(table))
            for start in range(0, len(names), _AT_ONCE):
                self._delete(table, names[start : start + _AT_ONCE])

    def _delete(self, table: str, names: Sequence[bytes]) -> None:
        """Delete packs or requests in one transaction."""
        environment = self._environment
        with environment.transaction(write=True) as rows:
            environment.release_reserved(rows)
            room = Room(environment, rows)
            ended: list[bytes] = []
            for name in names:
                namespace = name[:ID_BYTES]
                change = CatalogTransaction(
                    rows, room.payloads, namespace, opened=environment.opened
                )
                if table == PACKS:
                    change.discard(name[ID_BYTES:])
                else:
                    change.drop_manifest(name)
                change.finish()
                self._count(change)
                ended += change.ended
            if table == PACKS:
                self._erase(rows, names)
        environment.forget_namespaces(ended)

    def _count(self, change: CatalogTransaction) -> None:
        self._packs += len(change.removed)
        self._requests += len(change.dropped)
        self._stored_bytes += sum(table.payload_length for table in change.evicted)

    def _erase(self, rows: TableRows, names: Sequence[bytes]) -> None:
        """Record that a rebuild must not find these packs."""
        if self._environment.database.shares.inline:
            return
        number = read_erasures(rows) + 1
        self._environment.recovery.erase(set(names), number)
        write_erasures(rows, number)

    # Keys

    def _destroy(self) -> list[bytes] | None:
        """Destroy the data keys of the tenant; None: content of it was stored meanwhile."""
        with self._environment.transaction(write=True) as rows:
            for table in (PACKS, MANIFESTS, MANIFEST_KEYS):
                own = (key for key, row in self._rows(rows, table, b"") if row)
                if next(own, None) is not None:
                    return None
            for key in self._log_entries(rows):
                rows.delete(LOG, key)
            return self._keys.destroy(self._tenant)

    def _log_entries(self, rows: TableRows) -> list[bytes]:
        """Return the keys of the log's entries that may have fingerprints of the tenant's keys."""
        if not self._has_key and not self._packs:
            return []
        entries = self._rows(rows, LOG, b"")
        return [key for key, is_own in entries if is_own]

    # Rows

    def _names(self, table: str) -> Iterator[bytes]:
        """Yield the keys of a table's rows that belong to the tenant, a bounded number of rows per
        transaction."""
        start = b""
        while True:
            with self._environment.transaction() as rows:
                page = list(islice(self._rows(rows, table, start), _ROWS_AT_ONCE))
            yield from (key for key, is_own in page if is_own)
            if len(page) < _ROWS_AT_ONCE:
                return
            last_key, _ = page[-1]
            # the smallest key that follows the last one
            start = last_key + b"\0"

    def _rows(
        self, rows: TableRows, table: str, start: bytes
    ) -> Iterator[tuple[bytes, bool]]:
        """Yield the keys of a table from ``start`` on, and whether each row belongs to the tenant.
        In a store with a key, that depends on the key that seals the row, which also a damaged one
        shows."""
        if not self._has_key:
            is_own = _OWNERS[table]
            for key, row in rows.range(table, start):
                yield bytes(key), is_own(row, self._tenant)
            return
        own = self._keys.ids_of(self._tenant)
        with rows.cursor(table) as cursor:
            if not cursor.set_range(start):
                return
            for key, row in cursor.iternext():
                yield bytes(key), bytes(row[:KEY_ID_BYTES]) in own


def _is_pack_of(row: Buffer, tenant: str) -> bool:
    head = table_head(bytes(row[SEQUENCE.size :]))
    return head is not None and head.tenant == tenant


def _is_manifest_of(row: Buffer, tenant: str) -> bool:
    manifest = decoded(decode_manifest, row)
    return manifest is not None and manifest.tenant == tenant


def _is_unknown(row: Buffer, tenant: str) -> bool:
    """Return False: without a head, nothing shows whose keys of a request these are."""
    return False


def _may_be_of(row: Buffer, tenant: str) -> bool:
    """Return True: the log does not show whose pack was removed."""
    return True


_OWNERS: dict[str, Callable[[Buffer, str], bool]] = {
    PACKS: _is_pack_of,
    MANIFESTS: _is_manifest_of,
    MANIFEST_KEYS: _is_unknown,
    LOG: _may_be_of,
}
