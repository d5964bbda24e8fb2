"""A ``Backend`` over ordered rows: a driver adds transactions, payload storage and a check for free room."""

from __future__ import annotations

import os
import time
from abc import abstractmethod
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import replace

from persistkv.errors import StoreError, StoreFullError, StoreUnavailableError
from persistkv.storage.backend import Changes, CommitBatch, CommitResult, Namespace, ReadSpan
from persistkv.storage.catalog.pieces import RowPayloads, read_pieces
from persistkv.storage.catalog.queries import (
    UseQueries,
    find_chain,
    find_changes,
    find_manifest_keys,
    find_manifests,
    find_manifests_naming,
    find_namespace,
    find_tables,
)
from persistkv.storage.catalog.records import NamespaceState, decode_namespace, encode_namespace
from persistkv.storage.catalog.rows import NAMESPACES, STATES, Rows
from persistkv.storage.catalog.transaction import (
    CatalogTransaction,
    Evicted,
    kept_names,
    rows_bound,
)
from persistkv.storage.extensions import BackendStats, InspectableBackend, RequestUse
from persistkv.storage.format.manifest import ManifestKeys, RequestManifest
from persistkv.storage.format.pack import PackTable
from persistkv.storage.identity import Identity

_AT_ONCE = 256  # manifests or tables per read transaction
_EXPIRED_AT_ONCE = 128  # packs and manifests that one commit expires, at less than 1 ms each


class CatalogBackend(InspectableBackend):
    """Base class of drivers over ordered rows. It lacks ``open``, ``commit``, ``read`` and ``close``."""

    @abstractmethod
    def rows(self, *, write: bool = False) -> AbstractContextManager[Rows]:
        """Run a transaction: committed at the end of the block, rolled back if the block raises.

        Read transactions may run in any thread, concurrently with each other and with a write transaction, and do not
        wait for them: a commit may encode packs in the threads that read.

        :raises StoreError: the store is closed, the medium failed, or ``write`` on a store that is open read-only.
        """

    @abstractmethod
    def disk_bytes(self) -> int:
        """Return the bytes that the store takes on the medium."""

    def namespaces(self) -> Iterator[Namespace]:
        with self.rows() as rows:
            found = [decode_namespace(key, row) for key, row in rows.range(NAMESPACES, b"")]
        return iter([namespace for namespace in found if namespace is not None])

    def open_namespace(self, identity: Identity) -> Namespace:
        name = identity.digest
        with self.rows() as rows:
            if (found := find_namespace(rows, name)) is not None:
                return found
        if not self.capabilities.writable:
            raise StoreUnavailableError(f"the store holds no namespace {name.hex()}, and is open read-only")
        with self.rows(write=True) as rows:
            if (found := find_namespace(rows, name)) is not None:  # another process has created it meanwhile
                return found
            created = Namespace(identity, time.time())
            rows.put(NAMESPACES, name, encode_namespace(created))
            if rows.get(STATES, name) is None:
                rows.put(STATES, name, NamespaceState(os.urandom(8)).encode())
            return created

    def changes(self, namespace: bytes, cursor: bytes | None) -> Changes:
        with self.rows() as rows:
            return find_changes(rows, namespace, cursor)

    def manifests(self, namespace: bytes) -> Iterator[RequestManifest]:
        start = namespace
        while start:
            with self.rows() as rows:
                start, heads = find_manifests(rows, namespace, start, _AT_ONCE)
            yield from heads

    def manifest_keys(self, namespace: bytes, manifest_ids: Sequence[str]) -> list[ManifestKeys | None]:
        found: list[ManifestKeys | None] = []
        for start in range(0, len(manifest_ids), _AT_ONCE):
            with self.rows() as rows:
                some = manifest_ids[start : start + _AT_ONCE]
                found += [find_manifest_keys(rows, namespace, manifest_id) for manifest_id in some]
        return found

    def manifests_naming(self, namespace: bytes, packs: Sequence[bytes]) -> list[RequestManifest]:
        with self.rows() as rows:
            return find_manifests_naming(rows, namespace, packs)

    def chain(self, namespace: bytes, manifest_id: str) -> list[bytes] | None:
        with self.rows() as rows:
            return find_chain(rows, namespace, manifest_id)

    def tables(self, namespace: bytes, pack_ids: Sequence[bytes]) -> list[PackTable]:
        found: list[PackTable] = []
        for start in range(0, len(pack_ids), _AT_ONCE):
            with self.rows() as rows:
                found += find_tables(rows, namespace, pack_ids[start : start + _AT_ONCE])
        return found

    def uses(self, namespace: bytes, manifest_ids: Sequence[str]) -> list[RequestUse | None]:
        queries = UseQueries(namespace)
        found: list[RequestUse | None] = []
        for start in range(0, len(manifest_ids), _AT_ONCE):
            with self.rows() as rows:
                found += queries.find(rows, manifest_ids[start : start + _AT_ONCE])
        return found

    def stats(self) -> BackendStats:
        with self.rows() as rows:
            states = [NamespaceState.decode(row) for _, row in rows.range(STATES, b"")]
        return BackendStats(
            packs=sum(state.packs for state in states),
            blocks=sum(state.blocks for state in states),
            requests=sum(state.requests for state in states),
            raw_bytes=sum(state.raw_bytes for state in states),
            stored_bytes=sum(state.stored_bytes for state in states),
            disk_bytes=self.disk_bytes(),
            capacity=None,
        )


class RowBackend(CatalogBackend):
    """Base class of drivers that store payloads as rows, and whose transactions can reuse the room that they freed."""

    capacity: int | None = None
    """Bound of the store in bytes; None: unbounded."""
    ttl_s: float | None = None
    """Seconds from their last use until packs and requests expire; None: they never expire."""

    @abstractmethod
    def has_room(self, rows: Rows, num_bytes: int) -> bool:
        """Return whether a write transaction may add ``num_bytes``. Called only if the store has a capacity."""

    def commit(self, namespace: bytes, batch: CommitBatch) -> CommitResult:
        check_batch(namespace, batch)
        with self.rows(write=True) as rows:
            transaction = CatalogTransaction(rows, RowPayloads(rows), namespace, kept_names(namespace, batch))
            if batch.seen is not None and batch.seen != transaction.cursor:
                return CommitResult(batch.seen, stale=True)
            transaction.remove(batch)
            if self.ttl_s is not None:
                transaction.expire(self.ttl_s, _EXPIRED_AT_ONCE)
            self._make_room(rows, transaction, batch)
            transaction.add(batch)
            transaction.finish()
            return CommitResult(transaction.cursor, transaction.evicted)

    def _make_room(self, rows: Rows, transaction: CatalogTransaction, batch: CommitBatch) -> None:
        missing = transaction.missing(batch.packs)
        if self.capacity is None or not (missing or batch.manifests):
            return
        need = sum(pack.payload_bound for pack in missing) + rows_bound(missing, batch.manifests)
        if transaction.evict(_Room(self, rows, need), at_most=1 << 62) is not Evicted.ENOUGH:
            raise StoreFullError(f"{need} bytes do not fit a capacity of {self.capacity}")

    def read(self, namespace: bytes, spans: Sequence[ReadSpan]) -> list[bool]:
        with self.rows() as rows:
            return [read_pieces(rows, namespace + span.pack_id, span.offset, span.buffers) for span in spans]

    def stats(self) -> BackendStats:
        return replace(super().stats(), capacity=self.capacity)


class _Room:
    """Goal of eviction: enough room for a batch."""

    def __init__(self, backend: RowBackend, rows: Rows, need: int) -> None:
        self._backend = backend
        self._rows = rows
        self._need = need

    def met(self) -> bool:
        """See ``Goal``."""
        return self._backend.has_room(self._rows, self._need)

    def helps(self, pack: bytes) -> bool:
        """See ``Goal``; every pack frees room."""
        return True


def check_batch(namespace: bytes, batch: CommitBatch) -> None:
    """Check that all packs belong to the namespace.

    :raises StoreError: a pack belongs to another namespace.
    """
    if any(pack.namespace != namespace for pack in batch.packs):
        raise StoreError(f"a pack of another namespace than {namespace.hex()}")
