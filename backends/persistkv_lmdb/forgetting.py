"""Forgetting of a tenant, in short transactions, while engines use the store.

1. First, the store refuses new content of the tenant: each commit checks this in its transaction.
   The refusal ends with the command, also if that is killed.
2. Its requests and packs are deleted.
3. Entries of the log with fingerprints of the tenant's keys are deleted: readers that have not seen
   them yet read the whole catalogue.
4. Its data keys are destroyed when no row of the tenant is left: a row that no key opens would
   spoil the totals. The keys seal all rows, tables and payloads of the tenant, so that remains in
   free pages and extents, in damaged stores and in copies can never be read.
5. In a store without a key, the space of deleted packs is returned to the file system instead.
6. Saved indexes, which have fingerprints of the keys of all tenants, are deleted: they are caches.

If the command is killed, it can be repeated: the rows that are left name the tenant's keys, which
are destroyed last.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import islice

from persistkv.storage.catalogue import CatalogTransaction, Payloads, TableRows
from persistkv.storage.catalogue.rows import (
    LOG,
    MANIFEST_KEYS,
    MANIFESTS,
    META,
    PACKS,
    SEQUENCE,
    decoded,
)
from persistkv.storage.forgetting import Forgotten
from persistkv.storage.format.codec import Buffer
from persistkv.storage.format.keys import KEY_ID_BYTES
from persistkv.storage.format.manifest import decode_manifest
from persistkv.storage.format.pack import ID_BYTES, table_head
from persistkv_lmdb.commit import let_others_run, release_free
from persistkv_lmdb.environment import Environment
from persistkv_lmdb.files import INDEX_PREFIX

# seconds of deletions in one transaction, during which other engines wait
_DELETIONS_S = 0.003
_ROWS_AT_ONCE = 4_096  # number of rows in one read transaction


class LmdbForgetting:
    """Deletion of all content and keys of one tenant, in the order that the module's docstring
    explains; used once."""

    def __init__(self, environment: Environment, tenant: str) -> None:
        self._environment = environment
        self._keys = environment.database.keys
        self._has_key = environment.database.seal.encrypts
        """Whether the store has a key, and rows are sealed with the keys of their tenants."""
        self._tenant = tenant
        # packs, requests and bytes of payloads that were deleted so far, for the report
        self._packs = 0
        self._requests = 0
        self._stored_bytes = 0

    def run(self) -> Forgotten:
        """Delete the content, then destroy the keys.

        :raises StoreError: a transaction failed; the deletions of earlier ones stay in effect.
        """
        environment = self._environment
        with self._refusing_content():
            # Deleting a manifest deletes its rows in the first two tables. The second one may hold
            # rows whose manifest is damaged.
            for table in (MANIFESTS, MANIFEST_KEYS, PACKS):
                self._delete_all(table)
            # Delete entries of the log last, because the deletions add some. Without a key, an
            # entry does not show its tenant, so all entries are deleted, if the tenant had packs.
            may_have_entries = self._has_key or self._packs > 0
            if may_have_entries:
                self._delete_all(LOG)
            # the transaction writes no row, but holds the writer lock
            with environment.transaction(write=True):
                key_ids = self._keys.destroy(self._tenant)
        # Delete the indexes that engines have saved: they have fingerprints of the tenant's keys.
        # Engines save new ones.
        for file in environment.path.glob(f"{INDEX_PREFIX}*"):
            file.unlink(missing_ok=True)
        # no key was destroyed that makes the deleted packs unreadable, so return their space
        if not self._has_key:
            release_free(environment)
        return Forgotten(
            tenant=self._tenant,
            time=time.time(),
            key_ids=tuple(key_id.hex() for key_id in key_ids),
            packs=self._packs,
            requests=self._requests,
            stored_bytes=self._stored_bytes,
        )

    @contextmanager
    def _refusing_content(self) -> Iterator[None]:
        """Refuse new content of the tenant within the ``with`` statement, in all processes. If this
        process is killed, the refusal ends, too: it names a writer that is dead then."""
        environment = self._environment
        with environment.transaction(write=True) as rows:
            refusal = environment.refuse_tenant(rows, self._tenant)
        try:
            yield
        finally:
            with environment.transaction(write=True) as rows:
                rows.delete(META, refusal)

    # Content

    def _delete_all(self, table: str) -> None:
        """Delete the rows of a table that belong to the tenant, and what belongs to them."""
        # collect all keys first, because the deletions change the table that is searched
        keys = list(self._keys_of_tenant(table))
        next_keys = iter(keys)
        while self._delete_some(table, next_keys):
            let_others_run()

    def _delete_some(self, table: str, names: Iterator[bytes]) -> bool:
        """Delete rows in one short transaction; return whether there were any.

        :param names: keys of the rows. The transaction takes as many as it can delete in
            ``_DELETIONS_S``, and leaves the others to the next one.
        """
        environment = self._environment
        deleted: list[bytes] = []
        ended_namespaces: list[bytes] = []
        with environment.transaction(write=True) as rows:
            payloads = environment.prepare_payloads(rows)
            deadline = time.monotonic() + _DELETIONS_S
            for name in names:
                ended_namespaces += self._delete_row(rows, payloads, table, name)
                deleted.append(name)
                if time.monotonic() > deadline:
                    break
            # erase the packs, so that a rebuild does not find them in the segments
            if table == PACKS:
                environment.record_erasure(rows, set(deleted))
        environment.delete_files_of(ended_namespaces)
        return bool(deleted)

    def _delete_row(
        self,
        rows: TableRows,
        payloads: Payloads,
        table: str,
        name: bytes,
    ) -> list[bytes]:
        """Delete a row, and for a pack or manifest all that belongs to it; return the namespaces
        that end with it.

        :param name: key of the row.
        """
        if table == LOG:
            rows.delete(LOG, name)
            return []
        namespace = name[:ID_BYTES]
        opened = self._environment.opened_namespaces
        change = CatalogTransaction(rows, payloads, namespace, opened=opened)
        if table == PACKS:
            # delete the pack only: manifests of the tenant that name it are deleted already
            change.discard(name[ID_BYTES:])
        else:
            change.drop_manifest(name)
        change.finish()
        self._packs += len(change.removed)
        self._requests += len(change.dropped)
        for pack_table in change.evicted:
            self._stored_bytes += pack_table.payload_length
        return change.ended

    # Rows

    def _keys_of_tenant(self, table: str) -> Iterator[bytes]:
        """Yield the keys of a table's rows that belong to the tenant, a bounded number of rows per
        transaction."""
        start = b""
        while True:
            with self._environment.transaction() as rows:
                following = self._scan_rows(rows, table, start)
                page = list(islice(following, _ROWS_AT_ONCE))
            # yield after the transaction, so that no snapshot is held while the caller deletes
            for key, is_own in page:
                if is_own:
                    yield key
            if len(page) < _ROWS_AT_ONCE:
                return
            last_key, _ = page[-1]
            # the smallest key that follows the last one
            start = last_key + b"\0"

    def _scan_rows(
        self,
        rows: TableRows,
        table: str,
        start: bytes,
    ) -> Iterator[tuple[bytes, bool]]:
        """Yield the keys of a table from ``start`` on, and whether each row belongs to the
        tenant."""
        # None: the store has no key, and the rows themselves name the tenant
        own_keys = self._keys.ids_of(self._tenant) if self._has_key else None
        # use a cursor: ``TableRows.range`` would open sealed rows, which is not needed here
        with rows.cursor(table) as cursor:
            if not cursor.set_range(start):
                return
            for key, row in cursor.iternext():
                if own_keys is None:
                    is_own = _is_of_tenant(self._tenant, table, row)
                else:
                    # a sealed row begins with the id of its key, which a damaged row shows, too
                    is_own = bytes(row[:KEY_ID_BYTES]) in own_keys
                yield bytes(key), is_own


def _is_of_tenant(
    tenant: str,
    table: str,
    row: Buffer,
) -> bool:
    """Return whether a row of a store without a key belongs to a tenant: the row is not sealed, so
    its content shows the tenant."""
    if table == PACKS:
        # the pack's table follows a sequence number
        head = table_head(bytes(row[SEQUENCE.size :]))
        return head is not None and head.tenant == tenant
    if table == MANIFESTS:
        manifest = decoded(decode_manifest, row)
        return manifest is not None and manifest.tenant == tenant
    # The log does not show whose packs its entries name: all of them go. A row of
    # ``MANIFEST_KEYS`` without its manifest does not show its tenant, and stays.
    return table == LOG
