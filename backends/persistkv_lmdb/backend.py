"""The LMDB driver. LMDB is the source of truth: beside it there are only files of payloads, which it says the use of.

1. One write transaction, synced, does all of a batch: packs, manifests, order of eviction, log of changes, totals; and
   evicts, so that the next one finds room. Only where a batch finds none, others before it evict for it.
2. A read takes one transaction, and fills the caller's buffers from files or mapped pages. No snapshot outlives a call:
   a reader that stays keeps pages and extents from being used again.
3. What mapped pages hold is copied before their transaction ends.
"""

from __future__ import annotations

import logging
import os
import stat
import time
from bisect import bisect_right
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

from persistkv.config import PAGE_BYTES, StoreUrl, convert_options
from persistkv.errors import (
    ConfigurationError,
    CorruptPackError,
    StoreError,
    StoreFullError,
    StoreUnavailableError,
)
from persistkv.storage.backend import (
    Backend,
    BackendStats,
    Capabilities,
    Changes,
    CommitBatch,
    CommitResult,
    CompactProgress,
    FreeSpace,
    Namespace,
    Policy,
    ReadSpan,
    RequestUse,
)
from persistkv.storage.identity import Identity
from persistkv.storage.manifest import ManifestKeys, RequestManifest, decode_manifest, decode_manifest_keys
from persistkv.storage.pack import ID_BYTES, PackTable, table_lengths
from persistkv_lmdb import sharing
from persistkv_lmdb.commit import manifests_of
from persistkv_lmdb.committing import Committing
from persistkv_lmdb.compacting import Compactor
from persistkv_lmdb.environment import STORE_DIRECTORIES, STORE_FILES, Environment
from persistkv_lmdb.errors import met_the_maps_end, translated_at_open
from persistkv_lmdb.layout import (
    ADDED,
    LOG_KEY,
    SEQUENCE,
    Chain,
    NamespaceState,
    Transaction,
    Use,
    cursor_sequence,
    decode_namespace,
    encode_namespace,
    manifest_row,
    pack_table,
    read_capacity,
    read_clock,
    read_policy,
    rows,
    used_bytes,
)
from persistkv_lmdb.options import LmdbOptions, Placement, Reads, check_policy
from persistkv_lmdb.payload import read_payload, scan_payloads
from persistkv_lmdb.quarantine import delete_quarantined, quarantined
from persistkv_lmdb.regular_files import check_store
from persistkv_lmdb.space import Space, first_place
from persistkv_lmdb.status_files import read_statuses, remove_status, write_status
from persistkv_lmdb.syncs import sync_directory

logger = logging.getLogger(__name__)

_MANIFESTS_AT_ONCE = 256
_PLACES_AT_ONCE = 4096


class LmdbBackend(Backend):
    """One handle on a store, used from one thread. Handles of one process on one store share its environment."""

    capabilities = Capabilities(placements=tuple(placement.value for placement in Placement), shows_status=True)
    status_interval_s = 2.0

    def __init__(self, shared: Environment, *, read_only: bool, reads: Reads = Reads.DIRECT) -> None:
        self._shared: Environment | None = shared
        self._path = shared.path
        self._read_only = read_only
        self.capabilities = replace(type(self).capabilities, writable=not read_only)
        self._cached = reads is Reads.CACHED

    @classmethod
    def open(cls, url: StoreUrl, *, read_only: bool = False) -> LmdbBackend:
        options = convert_options(LmdbOptions, url.options, where="lmdb")
        path = _store_path(url.location)
        _prepare_directory(path, read_only)
        backend = cls(
            sharing.acquire(path, options.policy, read_only=read_only), read_only=read_only, reads=options.reads
        )
        if not read_only and (differences := backend.policy().contradictions(options.given)):
            logger.warning(
                "%s: the URL says %s; the store keeps its recorded policy (persistkv set lmdb://%s changes it)",
                path,
                differences,
                path,
            )
        return backend

    @classmethod
    def new_capacity(cls, url: StoreUrl) -> int | None:
        return convert_options(LmdbOptions, url.options, where="lmdb").policy.capacity

    def namespaces(self) -> Iterator[Namespace]:
        with self._environment.transaction() as transaction:
            found = [decode_namespace(key, row) for key, row in rows(transaction, transaction.db.namespaces, b"")]
        return iter([namespace for namespace in found if namespace is not None])

    def open_namespace(self, identity: Identity) -> Namespace:
        name = identity.digest
        with self._environment.transaction() as transaction:
            if (found := _namespace(transaction, name)) is not None:
                self._environment.files.prepare()  # for an engine: commands open no namespace
                return found
        if self._read_only:
            raise StoreUnavailableError(f"{self._path} holds no namespace {name.hex()}, and is open read-only")
        with self._environment.transaction(write=True) as transaction:
            if (found := _namespace(transaction, name)) is not None:  # another process was faster
                return found
            txn, db = transaction
            created = Namespace(identity, time.time())
            txn.put(name, encode_namespace(created), db=db.namespaces)
            txn.put(name, NamespaceState(os.urandom(8)).encode(), db=db.states, overwrite=False)
            return created

    def commit(self, namespace: bytes, batch: CommitBatch) -> CommitResult:
        self._check_writable()
        if any(pack.namespace != namespace for pack in batch.packs):
            raise StoreError(f"a pack of another namespace than {namespace.hex()}")
        try:
            result = Committing(self._environment, namespace, batch).run()
        except StoreFullError as error:
            if met_the_maps_end(error):
                self._environment.suspect()
            raise
        return result

    def changes(self, namespace: bytes, cursor: bytes | None) -> Changes:
        with self._environment.transaction() as transaction:
            state = self._state(transaction, namespace)
            since = None if cursor is None else cursor_sequence(state, cursor)
            moved = None if since is None else _moved(transaction, namespace, since, state.sequence)
            if moved is None:
                return Changes(state.cursor, _tables(transaction, namespace), reset=True)
            came, went = moved
            found = [_table(transaction, namespace + pack_id) for pack_id in came]
        return Changes(state.cursor, [table for table in found if table is not None], went)

    def read(self, namespace: bytes, spans: Sequence[ReadSpan]) -> list[bool]:
        shared = self._environment
        with shared.transaction() as transaction:
            names = [namespace + span.pack_id for span in spans]
            return [
                read_payload(transaction, shared.files, name, span, cached=self._cached)
                for name, span in zip(names, spans, strict=True)
            ]

    def scan(self, namespace: bytes, spans: Sequence[ReadSpan]) -> list[bool]:
        shared = self._environment
        with shared.transaction() as transaction:
            names = [namespace + span.pack_id for span in spans]
            return scan_payloads(transaction, shared.files, names, spans)

    def scan_order(self, namespace: bytes, pack_ids: Sequence[bytes]) -> list[bytes]:
        places: list[tuple[int, int]] = []
        for start in range(0, len(pack_ids), _PLACES_AT_ONCE):
            with self._environment.transaction() as transaction:
                some = pack_ids[start : start + _PLACES_AT_ONCE]
                places += [first_place(transaction, namespace + pack_id) for pack_id in some]
        return [pack_ids[number] for number in sorted(range(len(places)), key=places.__getitem__)]

    def manifests(self, namespace: bytes) -> Iterator[RequestManifest]:
        start = namespace
        while start:
            with self._environment.transaction() as transaction:
                start, heads = _some_manifests(transaction, namespace, start)
            yield from heads

    def manifest_keys(self, namespace: bytes, manifest_id: str) -> ManifestKeys | None:
        with self._environment.transaction() as transaction:
            return _manifest_keys(transaction, namespace, manifest_id)

    def many_manifest_keys(self, namespace: bytes, manifest_ids: Sequence[str]) -> list[ManifestKeys | None]:
        found: list[ManifestKeys | None] = []
        for start in range(0, len(manifest_ids), _MANIFESTS_AT_ONCE):
            with self._environment.transaction() as transaction:
                some = manifest_ids[start : start + _MANIFESTS_AT_ONCE]
                found += [_manifest_keys(transaction, namespace, manifest_id) for manifest_id in some]
        return found

    def manifests_naming(self, namespace: bytes, packs: Sequence[bytes]) -> list[RequestManifest]:
        with self._environment.transaction() as transaction:
            names = dict.fromkeys(name for pack in packs for name in manifests_of(transaction, namespace + pack))
            found = [transaction.txn.get(name, db=transaction.db.manifests) for name in names]
            heads: list[RequestManifest] = []
            for row in found:
                with suppress(CorruptPackError):
                    heads += [] if row is None else [decode_manifest(row)]
            return heads

    def named_packs(self, namespace: bytes, manifest_id: str) -> list[PackTable] | None:
        with self._environment.transaction() as transaction:
            row = transaction.txn.get(manifest_row(namespace, manifest_id), db=transaction.db.chains)
            chain = Chain.decode(row)
            if chain is None:
                return None
            found = [_table(transaction, namespace + pack_id) for pack_id in chain.packs]
            return [table for table in found if table is not None]

    def uses(self, namespace: bytes, manifest_ids: Sequence[str]) -> list[RequestUse | None]:
        found: list[RequestUse | None] = []
        moments: dict[bytes, list[int]] = {}
        for start in range(0, len(manifest_ids), _MANIFESTS_AT_ONCE):
            with self._environment.transaction() as transaction:
                some = manifest_ids[start : start + _MANIFESTS_AT_ONCE]
                skew = read_clock(transaction)[1].skew
                found += [_request_use(transaction, manifest_row(namespace, name), moments, skew) for name in some]
        return found

    def stats(self) -> BackendStats:
        with self._environment.transaction() as transaction:
            states = [NamespaceState.decode(row) for _, row in rows(transaction, transaction.db.states, b"")]
            capacity = read_capacity(transaction)
        damaged = quarantined(self._path)
        return BackendStats(
            packs=sum(state.packs for state in states),
            blocks=sum(state.blocks for state in states),
            requests=sum(state.requests for state in states),
            raw_bytes=sum(state.raw_bytes for state in states),
            stored_bytes=sum(state.stored_bytes for state in states),
            disk_bytes=self._environment.disk_bytes(),
            capacity=capacity,
            quarantined=tuple(str(entry.directory) for entry in damaged),
            quarantined_bytes=sum(entry.num_bytes for entry in damaged),
        )

    def policy(self) -> Policy:
        with self._environment.transaction() as transaction:
            return read_policy(transaction)

    def set_policy(self, policy: Policy) -> None:
        self._check_writable()
        check_policy(policy)
        recorded = self.policy()
        if policy.placement != recorded.placement:
            expected = (
                f"{recorded.placement}, fixed when the store was created; `persistkv push` copies it into a new store"
            )
            raise ConfigurationError("placement", policy.placement, expected)
        self._environment.set_policy(policy)

    def delete_quarantined(self) -> int:
        self._check_writable()
        return sum(entry.num_bytes for entry in delete_quarantined(self._path))

    def free_space(self) -> FreeSpace:
        with self._environment.transaction() as transaction:
            space = Space(transaction)
            return FreeSpace(
                max(0, self._environment.file_bytes() - used_bytes(transaction)),
                (space.free + space.aging) * PAGE_BYTES,
                space.pieces(),
                space.largest() * PAGE_BYTES,
            )

    def compact(self) -> Iterator[CompactProgress]:
        self._check_writable()
        return Compactor(self._environment).run()

    def publish_status(self, engine: str, row: bytes | None) -> None:
        path = self._environment.path
        if self._read_only:
            raise StoreError(f"{path} is open read-only")
        if row is None:
            remove_status(path, engine)
        else:
            write_status(path, engine, row)

    def statuses(self) -> dict[str, bytes]:
        return read_statuses(self._environment.path)

    def _check_writable(self) -> None:
        if self._read_only:
            raise StoreError(f"{self._path} is open read-only")

    def close(self) -> None:
        if self._shared is not None:
            shared, self._shared = self._shared, None
            sharing.release(shared)

    @property
    def _environment(self) -> Environment:
        if self._shared is None:
            raise StoreError(f"{self._path} is closed")
        return self._shared

    def _state(self, transaction: Transaction, namespace: bytes) -> NamespaceState:
        row = transaction.txn.get(namespace, db=transaction.db.states)
        if row is None:
            raise StoreError(f"{self._path} holds no namespace {namespace.hex()}")
        return NamespaceState.decode(row)


def _store_path(location: str) -> Path:
    if "\0" in location:
        raise ConfigurationError("url", location, "a path without NUL")
    return Path(location).absolute()


def _prepare_directory(path: Path, read_only: bool) -> None:
    with translated_at_open(path):
        if not read_only:
            for directory in (*reversed(path.parents), path):
                if not directory.exists():
                    directory.mkdir(0o700, exist_ok=True)
                    sync_directory(directory.parent)
        if not stat.S_ISDIR(path.stat().st_mode):
            raise StoreUnavailableError(f"{path} is a file; a store is a directory")
        check_store(path, files=STORE_FILES, directories=STORE_DIRECTORIES, read_only=read_only)


def _namespace(transaction: Transaction, name: bytes) -> Namespace | None:
    row = transaction.txn.get(name, db=transaction.db.namespaces)
    return None if row is None else decode_namespace(name, row)


def _table(transaction: Transaction, name: bytes) -> PackTable | None:
    row = transaction.txn.get(name, db=transaction.db.packs)
    return None if row is None else pack_table(name, row)


def _tables(transaction: Transaction, namespace: bytes) -> list[PackTable]:
    found = [pack_table(key, row) for key, row in rows(transaction, transaction.db.packs, namespace)]
    return [table for table in found if table is not None]


def _moved(
    transaction: Transaction, namespace: bytes, since: int, until: int
) -> tuple[dict[bytes, None], list[bytes]] | None:
    """Ids of the packs that came and went after ``since``; None where the log does not reach back so far."""
    came: dict[bytes, None] = {}
    went: list[bytes] = []
    log = transaction.txn.cursor(transaction.db.log)
    for sequence in range(since + 1, until + 1):
        key = LOG_KEY.pack(namespace, sequence)
        if not log.set_key(key):
            return None
        entry = bytes(log.value())
        if entry[:1] == ADDED:
            came[entry[1:]] = None
        else:
            went.append(entry[1:])
    return came, went


def _manifest_keys(transaction: Transaction, namespace: bytes, manifest_id: str) -> ManifestKeys | None:
    row = transaction.txn.get(manifest_row(namespace, manifest_id), db=transaction.db.manifest_keys)
    try:
        return None if row is None else decode_manifest_keys(row)
    except CorruptPackError:
        return None


def _request_use(
    transaction: Transaction, name: bytes, moments: dict[bytes, list[int]], skew: float
) -> RequestUse | None:
    """:param moments: cache of the moments of the manifests that name a pack.
    :param skew: see ``StoreClock.skew``.
    """
    txn, db = transaction
    chain = Chain.decode(txn.get(name, db=db.chains))
    if chain is None:
        return None
    if not chain.packs:
        return RequestUse(chain.time + skew, False, 0, chain.pinned)
    last = name[:ID_BYTES] + chain.packs[-1]
    use = Use.decode(txn.get(last, db=db.uses))
    if use is None:
        return None
    if last not in moments:
        moments[last] = _moments(transaction, last)
    naming = moments[last]
    later = len(naming) - bisect_right(naming, chain.moment)
    lengths = [_pack_lengths(transaction, name[:ID_BYTES] + pack_id) for pack_id in chain.packs]
    raw, stored = (sum(length) for length in zip(*lengths, strict=True))
    reused = use.time > chain.time
    return RequestUse(use.time + skew, reused, max(0, len(naming) - 1), chain.pinned, later, raw, stored)


def _moments(transaction: Transaction, pack: bytes) -> list[int]:
    """When the manifests that name a pack were written, sorted."""
    txn, db = transaction
    names = [pack[:ID_BYTES] + bytes(key[len(pack) :]) for key, _ in rows(transaction, db.links, pack)]
    chains = [Chain.decode(txn.get(name, db=db.chains)) for name in names]
    return sorted(chain.moment for chain in chains if chain is not None)


def _pack_lengths(transaction: Transaction, name: bytes) -> tuple[int, int]:
    """Raw and payload bytes of a pack."""
    row = transaction.txn.get(name, db=transaction.db.packs)
    return (0, 0) if row is None else table_lengths(row[SEQUENCE.size :])


def _some_manifests(transaction: Transaction, namespace: bytes, start: bytes) -> tuple[bytes, list[RequestManifest]]:
    """Heads from ``start`` on, and where to go on; empty at the end."""
    heads: list[RequestManifest] = []
    cursor = transaction.txn.cursor(transaction.db.manifests)
    found = cursor.set_range(start)
    for _ in range(_MANIFESTS_AT_ONCE):
        if not found or cursor.key()[:ID_BYTES] != namespace:
            return b"", heads
        with suppress(CorruptPackError):
            heads.append(decode_manifest(cursor.value()))
        found = cursor.next()
    return (bytes(cursor.key()) if found else b""), heads
