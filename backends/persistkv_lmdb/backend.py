"""The LMDB driver. LMDB is the source of truth; the other files hold payloads, whose use LMDB records.

1. One synced write transaction applies a batch: packs, manifests, eviction order, change log, totals. It also evicts,
   so that the next batch fits. Only if a batch does not fit, separate transactions before it evict.
2. A read uses one transaction, and fills the caller's buffers from files or mapped pages. No snapshot outlives a call:
   a long-lived reader prevents the reuse of pages and extents.
3. Content of mapped pages is copied before their transaction ends.
"""

from __future__ import annotations

import logging
import stat
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

from persistkv.config import PAGE_BYTES, StoreUrl, convert_options
from persistkv.errors import (
    ConfigurationError,
    StoreError,
    StoreFullError,
    StoreUnavailableError,
)
from persistkv.storage.backend import Capabilities, CommitBatch, CommitResult, Namespace, ReadSpan
from persistkv.storage.catalog import CatalogBackend, Rows
from persistkv.storage.catalog.backend import check_batch
from persistkv.storage.catalog.pieces import read_pieces
from persistkv.storage.extensions import BackendStats, CompactProgress, FreeSpace, Policy
from persistkv.storage.identity import Identity
from persistkv_lmdb.allocator import Allocator, first_place, read_extents
from persistkv_lmdb.commit import BatchCommit
from persistkv_lmdb.compaction import Compactor
from persistkv_lmdb.environment import STORE_DIRECTORIES, STORE_FILES, Environment
from persistkv_lmdb.errors import met_the_maps_end, translated_at_open
from persistkv_lmdb.files import check_store, sync_directory
from persistkv_lmdb.fsck import find_faults
from persistkv_lmdb.layout import (
    read_policy,
    used_bytes,
)
from persistkv_lmdb.options import LmdbOptions, Placement, Reads, check_policy
from persistkv_lmdb.quarantine import delete_quarantined, quarantined
from persistkv_lmdb.registry import ENVIRONMENTS
from persistkv_lmdb.status_files import read_statuses, remove_status, write_status

logger = logging.getLogger(__name__)

_PLACES_AT_ONCE = 4096


class LmdbBackend(CatalogBackend):
    """Handle on a store, used from one thread. Handles of one process on the same store share its environment."""

    capabilities = Capabilities(placements=tuple(placement.value for placement in Placement))
    status_interval_s: float | None = 2.0

    def __init__(self, shared: Environment, *, read_only: bool, reads: Reads = Reads.DIRECT) -> None:
        self._shared: Environment | None = shared
        self._path = shared.path
        self._read_only = read_only
        self.capabilities = replace(type(self).capabilities, writable=not read_only)
        self._cached = reads is Reads.CACHED

    @property
    def environment(self) -> Environment:
        """The store's environment, shared by all handles of the process.

        :raises StoreError: the handle is closed.
        """
        if self._shared is None:
            raise StoreError(f"{self._path} is closed")
        return self._shared

    @classmethod
    def open(cls, url: StoreUrl, *, read_only: bool = False) -> LmdbBackend:
        options = convert_options(LmdbOptions, url.options, where="lmdb")
        path = _store_path(url.location)
        _prepare_directory(path, read_only)
        backend = cls(
            ENVIRONMENTS.acquire(path, options.policy, read_only=read_only), read_only=read_only, reads=options.reads
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
    def new_policy(cls, url: StoreUrl) -> Policy:
        return convert_options(LmdbOptions, url.options, where="lmdb").policy

    def open_namespace(self, identity: Identity) -> Namespace:
        namespace = super().open_namespace(identity)
        self.environment.files.prepare()  # only engines open namespaces; commands do not need it
        return namespace

    @contextmanager
    def rows(self, *, write: bool = False) -> Iterator[Rows]:
        if write:
            self._check_writable()
        with self.environment.transaction(write=write) as transaction:
            yield transaction.rows

    def commit(self, namespace: bytes, batch: CommitBatch) -> CommitResult:
        self._check_writable()
        check_batch(namespace, batch)
        try:
            return BatchCommit(self.environment, namespace, batch).run()
        except StoreFullError as error:
            if met_the_maps_end(error):
                self.environment.suspect()
            raise

    def read(self, namespace: bytes, spans: Sequence[ReadSpan]) -> list[bool]:
        filled = []
        environment = self.environment
        with environment.transaction() as transaction:
            for span in spans:
                name = namespace + span.pack_id
                extents = read_extents(transaction, name)
                if extents is None:
                    filled.append(read_pieces(transaction.rows, name, span.offset, span.buffers))
                else:
                    read = environment.files.read(extents, span.offset, span.buffers, cached=self._cached)
                    filled.append(read)
        return filled

    def scan(self, namespace: bytes, spans: Sequence[ReadSpan]) -> list[bool]:
        environment = self.environment
        with environment.transaction() as transaction:
            names = [namespace + span.pack_id for span in spans]
            places = [read_extents(transaction, name) for name in names]
            wanted = [(at, span.offset, span.buffers) for at, span in zip(places, spans, strict=True) if at]
            scanned = iter(environment.files.scan(wanted))
            return [
                next(scanned) if at else at is None and read_pieces(transaction.rows, name, span.offset, span.buffers)
                for at, name, span in zip(places, names, spans, strict=True)
            ]

    def scan_order(self, namespace: bytes, pack_ids: Sequence[bytes]) -> list[bytes]:
        places: list[tuple[int, int]] = []
        for start in range(0, len(pack_ids), _PLACES_AT_ONCE):
            with self.environment.transaction() as transaction:
                some = pack_ids[start : start + _PLACES_AT_ONCE]
                places += [first_place(transaction, namespace + pack_id) for pack_id in some]
        return [pack_ids[number] for number in sorted(range(len(places)), key=places.__getitem__)]

    def stats(self) -> BackendStats:
        damaged = quarantined(self._path)
        return replace(
            super().stats(),
            capacity=self.policy().capacity,
            quarantined=tuple(str(entry.directory) for entry in damaged),
            quarantined_bytes=sum(entry.num_bytes for entry in damaged),
        )

    def disk_bytes(self) -> int:
        return self.environment.disk_bytes()

    def policy(self) -> Policy:
        with self.environment.transaction() as transaction:
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
        self.environment.set_policy(policy)

    def delete_quarantined(self) -> int:
        self._check_writable()
        return sum(entry.num_bytes for entry in delete_quarantined(self._path))

    def free_space(self) -> FreeSpace:
        with self.environment.transaction() as transaction:
            allocator = Allocator(transaction)
            return FreeSpace(
                max(0, self.environment.file_bytes() - used_bytes(transaction)),
                (allocator.free + allocator.aging) * PAGE_BYTES,
                allocator.pieces(),
                allocator.largest() * PAGE_BYTES,
            )

    def compact(self) -> Iterator[CompactProgress]:
        self._check_writable()
        return Compactor(self.environment).run()

    def find_faults(self) -> list[str]:
        """Compare extents with files, rows with each other and totals with a recount; return one line per fault."""
        environment = self.environment
        with environment.transaction() as transaction:
            return find_faults(transaction, environment.files.lengths())

    def publish_status(self, engine: str, row: bytes | None) -> None:
        path = self.environment.path
        if self._read_only:
            raise StoreError(f"{path} is open read-only")
        if row is None:
            remove_status(path, engine)
        else:
            write_status(path, engine, row)

    def statuses(self) -> dict[str, bytes]:
        return read_statuses(self.environment.path)

    def _check_writable(self) -> None:
        if self._read_only:
            raise StoreError(f"{self._path} is open read-only")

    def close(self) -> None:
        if self._shared is not None:
            shared, self._shared = self._shared, None
            ENVIRONMENTS.release(shared)


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
