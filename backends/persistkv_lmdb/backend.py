"""The LMDB driver. LMDB is the source of truth; the segment files hold payloads, whose extents LMDB
records.

1. One synced write transaction applies a batch: packs, manifests, eviction order, change log,
   totals. It also evicts, so that the next batch fits. If a batch itself does not fit, separate
   transactions evict first.
2. A read uses one transaction, and fills the caller's buffers from files or mapped pages. No
   snapshot outlives a call: a long-lived reader prevents the reuse of pages and extents.
3. Content of mapped pages is copied before their transaction ends.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import replace
from pathlib import Path
from typing import Literal

from persistkv.config import (
    PAGE_BYTES,
    StoreUrl,
    convert_options,
    parse_duration,
    parse_size,
)
from persistkv.errors import (
    ConfigurationError,
    CorruptPackError,
    StoreError,
    StoreFullError,
    TenantForgottenError,
)
from persistkv.storage.backend import (
    Backend,
    Capabilities,
    CommitBatch,
    CommitResult,
    Namespace,
    ReadSpan,
)
from persistkv.storage.catalogue import Catalogue
from persistkv.storage.catalogue.catalogue import check_batch, tenants_of, totals
from persistkv.storage.catalogue.quotas import (
    TenantTotals,
    read_tenants,
    with_default,
    write_quotas,
)
from persistkv.storage.catalogue.rows import (
    META,
    NAMESPACES,
    PACKS,
    SEQUENCE,
    STATES,
    NamespaceState,
    TableRows,
    decode_namespace,
    encode_namespace,
    note_row,
)
from persistkv.storage.forgetting import Forgotten
from persistkv.storage.format.files import replace_file
from persistkv.storage.format.keys import StoreKey
from persistkv.storage.format.pack import table_lengths
from persistkv.storage.format.seal import Seal
from persistkv.storage.identity import Identity
from persistkv.storage.key_options import KeyOptions
from persistkv.storage.mounts import existing_parent, remote_type
from persistkv.storage.policy import Policy
from persistkv.storage.stats import BackendStats, FreeSpace, Rebuilt
from persistkv.tenants import check_tenant
from persistkv_lmdb import files
from persistkv_lmdb.commit import BatchCommit, StaleError, enforce_policy, release_free
from persistkv_lmdb.environment import ENVIRONMENTS, Environment
from persistkv_lmdb.files import ReplacedError
from persistkv_lmdb.forgetting import LmdbForgetting
from persistkv_lmdb.keys import KeyFile
from persistkv_lmdb.layout import (
    DEFAULT_CAPACITY,
    is_capacity,
    read_capacity,
    read_policy,
    write_policy,
)
from persistkv_lmdb.opening import delete_quarantined, quarantined
from persistkv_lmdb.payloads.allocator import Allocator, read_extents
from persistkv_lmdb.payloads.inline import read_pieces
from persistkv_lmdb.repair.rebuild import rebuild

logger = logging.getLogger(__name__)

# maximum number of times that one operation begins again because the store's files were replaced
_REPLACEMENTS = 4
_STATUS_SUFFIX = ".json"
# one day: age at which a status file is deleted, because killed engines leave theirs
_STATUS_FORGOTTEN_S = 86_400.0
_STATUS_BYTES = 64 << 10  # 64 KiB: longer files are truncated when read


class LmdbOptions(KeyOptions, frozen=True):
    """Options in the URL of a store."""

    capacity: str | None = None
    """Bound on the bytes on disk of a new store, a size such as ``100GiB``. None: 10 GiB. An
    existing store keeps its recorded capacity, ttl and placement."""
    ttl: str | None = None
    """Time after its last use until content of a new store expires, a duration such as ``7d``.
    None: never."""
    placement: Literal["extents", "inline"] | None = None
    """Where a new store puts payloads. None: ``extents``."""
    reads: Literal["direct", "cached"] = "direct"
    """How payloads in extents are read. ``direct``: with O_DIRECT where possible, at the disk's
    speed. ``cached``: through the page cache, so that repeated reads spare a slow disk."""
    read_only: bool = False
    """True: the store is opened for reading, and none of its content is written."""

    def __post_init__(self) -> None:
        """Validate the options; raise ConfigurationError."""
        super().__post_init__()
        # also raises if capacity or ttl cannot be parsed
        capacity = self.given.capacity
        if capacity is not None and not is_capacity(capacity):
            raise ConfigurationError(
                "lmdb option capacity", self.capacity, "a size from 1MiB to 64TiB"
            )

    @property
    def given(self) -> Policy:
        """Policy that the URL states: capacity in bytes, ttl in seconds, placement; None for each
        that it omits.

        :raises ConfigurationError: capacity is not a valid size, or ttl not a valid duration.
        """
        capacity = None
        ttl_s = None
        if self.capacity is not None:
            capacity = parse_size(self.capacity, name="lmdb option capacity")
        if self.ttl is not None:
            ttl_s = parse_duration(self.ttl, name="lmdb option ttl")
        return Policy(capacity, ttl_s, self.placement)

    @property
    def policy(self) -> Policy:
        """Policy of a store that is created with these options, with defaults."""
        given = self.given
        capacity = given.capacity or DEFAULT_CAPACITY
        placement = given.placement or "extents"
        return replace(given, capacity=capacity, placement=placement)


class LmdbBackend(Backend):
    """Handle on a store. Handles of one process on the same store share its LMDB environment.

    Any thread may call ``read``, ``scan`` and ``tables``; only one thread at a time may call the
    other methods.
    """

    status_interval_s: float | None = 2.0
    """As in ``Backend``: seconds between two statuses of an engine; None for a read-only handle."""

    def __init__(
        self,
        shared: Environment,
        policy: Policy,
        keys: KeyFile,
        *,
        read_only: bool,
        direct: bool,
    ) -> None:
        self._shared: Environment | None = shared
        """Environment that this handle has acquired; None: the handle is closed."""
        self._path = shared.path
        self._policy = policy
        """Policy of a store that is created in place of a removed one."""
        self._keys = keys
        """Keys for an environment that this handle opens. A shared one has those of the handle that
        opened it."""
        self._forgotten = dict(shared.database.keys.forgotten)
        """``KeyFile.forgotten`` as far as the caller knows: a tenant that was forgotten since makes
        ``commit`` raise once."""
        self._following = threading.RLock()
        """Held by the thread that replaces ``_shared`` (``_follow_replacement``)."""
        self._read_only = read_only
        self.capabilities = Capabilities(writable=not read_only)
        # an engine writes its status to a file of the store, which a read-only handle must not do
        if read_only:
            self.status_interval_s = None
        self._direct = direct
        """Whether payloads are read with O_DIRECT where possible."""

    @property
    def seal(self) -> Seal:
        return self.environment.database.seal

    @property
    def environment(self) -> Environment:
        """The store's LMDB environment, shared by all handles of the process.

        :raises StoreError: the handle is closed.
        """
        if self._shared is None:
            raise StoreError(f"{self._path} is closed")
        return self._shared

    def _writable(self) -> Environment:
        """Return the environment.

        :raises StoreError: the store is open read-only, or closed.
        """
        if self._read_only:
            raise StoreError(f"{self._path} is open read-only")
        return self.environment

    @classmethod
    def open(cls, url: StoreUrl, *, read_only: bool = False) -> LmdbBackend:
        """As in ``Backend``. On a read-only file system, the store is opened for reading, with a
        warning."""
        options = convert_options(LmdbOptions, url.options, where="lmdb")
        path = _path_of(url)
        keys = KeyFile(path, options.store_key())
        read_only = read_only or options.read_only
        # check this before anything is created in the directory
        _refuse_remote(path)
        files.prepare_directory(path, read_only=read_only)
        if not read_only and files.is_on_read_only_file_system(path):
            logger.warning(
                "%s is on a read-only file system: opened for reading, new content is dropped",
                path,
            )
            read_only = True
        shared = ENVIRONMENTS.acquire(path, options.policy, keys, read_only=read_only)
        backend = cls(
            shared,
            options.policy,
            keys,
            read_only=read_only,
            direct=options.reads == "direct",
        )
        if not read_only:
            backend._report_differences(options.given)
        return backend

    def _report_differences(self, given: Policy) -> None:
        """Log a warning if the policy that the URL gives differs from the recorded one."""
        differences = self.policy().contradictions(given)
        if differences:
            message = (
                "%s: the URL says %s; the store keeps its recorded policy (persistkv set "
                "lmdb://%s changes it)"
            )
            logger.warning(message, self._path, differences, self._path)

    @classmethod
    def rebuild(
        cls,
        url: StoreUrl,
        progress: Callable[[int, int], None],
    ) -> Rebuilt | None:
        """As in ``Backend``. The policy of the URL applies to the new catalogue: the recorded one
        is lost."""
        options = convert_options(LmdbOptions, url.options, where="lmdb")
        path = _path_of(url)
        _refuse_remote(path)
        keys = KeyFile(path, options.store_key())
        # the rebuilt store has payloads in extents, because inline payloads cannot be rebuilt
        policy = replace(options.given, placement="extents")
        return rebuild(path, policy, keys, progress)

    @classmethod
    def new_policy(cls, url: StoreUrl) -> Policy:
        return convert_options(LmdbOptions, url.options, where="lmdb").policy

    @contextmanager
    def rows(self, *, write: bool = False) -> Iterator[TableRows]:
        """Run a transaction; yield its rows. See ``Environment.transaction``."""
        with self._transaction(write=write) as (_, transaction):
            yield transaction

    @contextmanager
    def _transaction(
        self,
        *,
        write: bool = False,
    ) -> Iterator[tuple[Environment, TableRows]]:
        """Run a transaction of the store that is at the path now, as ``Environment.transaction``.
        Yield its environment and the transaction.

        Files that were replaced before the transaction begins are followed. If a commit finds that
        it went into replaced files, its ReplacedError is raised: the block cannot run again.
        """
        for _ in range(_REPLACEMENTS):
            environment = self._writable() if write else self.environment
            # begin the transaction before the caller's block runs, so that a ReplacedError of the
            # block is not caught here
            with ExitStack() as entered:
                try:
                    transaction = entered.enter_context(
                        environment.transaction(write=write)
                    )
                except ReplacedError:
                    self._follow_replacement(environment)
                    continue
                yield environment, transaction
                return
        raise self._keeps_changing()

    def _follow_replacement(self, replaced: Environment) -> None:
        """Open the store that is at the path now, in place of ``replaced``, and take over the
        namespaces that were opened.

        :raises StoreError: it cannot be opened; the next transaction tries again.
        """
        with self._following:
            # nothing is left to do: another thread has followed, or has closed this handle
            if self._shared is not replaced:
                return
            # Another handle has closed the environment to open the same files again, for example
            # for writing: no file was replaced, so there is no warning.
            was_closed = replaced.is_closed
            files.prepare_directory(self._path, read_only=self._read_only)
            self._shared = ENVIRONMENTS.acquire(
                self._path, self._policy, self._keys, read_only=self._read_only
            )
            self._shared.opened_namespaces.update(replaced.opened_namespaces)
            if not was_closed:
                message = (
                    "%s: files of the store were removed or replaced while it was open; "
                    "continuing with those there now"
                )
                logger.warning(message, self._path)
            ENVIRONMENTS.release(replaced)

    def _keeps_changing(self) -> StoreError:
        """Return the error of an operation that has followed replaced files too often."""
        return StoreError(
            f"{self._path}: files of the store were replaced {_REPLACEMENTS} times in one operation"
        )

    def rotate_key(self, key: StoreKey) -> None:
        """As in ``Backend``: replace the key file by one that is wrapped with ``key``."""
        environment = self._writable()
        # the transaction writes no row: it holds the writer lock, which changes of keys need
        with environment.transaction(write=True), files.translated_io(self._path):
            self._keys.rotate(key)

    def forget(self, tenant: str) -> Forgotten:
        """As in ``Backend``, in short transactions between those of engines."""
        check_tenant("tenant", tenant)
        environment = self._writable()
        with files.translated_io(self._path):
            return LmdbForgetting(environment, tenant).run()

    # Namespaces. They have rows only while they have content: the commit that adds the first pack
    # or manifest writes them, and the one that removes the last deletes them.

    def namespaces(self) -> Iterator[Namespace]:
        """As in ``Backend``. All are read at once: no transaction stays open during the
        iteration."""
        namespaces: list[Namespace] = []
        with self.rows() as rows:
            for key, row in rows.range(NAMESPACES, start=b""):
                namespace = decode_namespace(key, row)
                # None: the row is damaged
                if namespace is not None:
                    namespaces.append(namespace)
        return iter(namespaces)

    def catalogue(self, namespace: bytes) -> Catalogue:
        return Catalogue(namespace, self.rows)

    def open_namespace(self, identity: Identity) -> Namespace:
        """Return the namespace of an identity: as recorded, as opened before, or a new one. Nothing
        is written until a commit adds content, except in place of a missing or damaged row."""
        name = identity.digest
        with self.rows() as rows:
            recorded = decode_namespace(name, rows.get(NAMESPACES, name))
            has_content = rows.get(STATES, name) is not None
        namespace = recorded
        if namespace is None:
            # the namespace was opened before, and has had no content since
            namespace = self.environment.opened_namespaces.get(name)
        if namespace is None:
            namespace = Namespace(identity, time.time())
        # replace such a row here: otherwise, only the commit of the first content writes it
        lacks_valid_row = has_content and recorded is None
        if lacks_valid_row and self.capabilities.writable:
            with self.rows(write=True) as rows:
                rows.put(NAMESPACES, name, encode_namespace(namespace))
        # remember the namespace for the commit that adds its first content and writes its row
        self.environment.opened_namespaces[name] = namespace
        return namespace

    def note(self, namespace: bytes, name: str) -> bytes | None:
        """Return the content of a note about a namespace; None: there is no such note, or the keys
        of the store do not open it."""
        key = note_row(namespace, name)
        with self.rows() as rows:
            found = rows.get(META, key)
            content = None if found is None else bytes(found)
        if content is None or not self.seal.encrypts:
            return content
        # the table ``META`` is not sealed, so open the note here
        try:
            return self.seal.opened(key, content)
        except CorruptPackError:
            return None

    def note_names(self, namespace: bytes) -> list[str]:
        """Return the names of the notes about a namespace."""
        prefix = note_row(namespace, "")
        names: list[str] = []
        with self.rows() as rows:
            for key, _ in rows.starting_with(META, prefix):
                name = bytes(key[len(prefix) :])
                names.append(name.decode())
        return names

    def put_note(
        self,
        namespace: bytes,
        name: str,
        content: bytes | None,
    ) -> None:
        """Write a note about a namespace, durably and sealed if the store has a key; None: delete
        it."""
        key = note_row(namespace, name)
        if content is not None and self.seal.encrypts:
            content = self.seal.sealed(key, content)
        with self.rows(write=True) as rows:
            if content is None:
                rows.delete(META, key)
            else:
                rows.put(META, key, content)

    # Content

    def commit(self, namespace: bytes, batch: CommitBatch) -> CommitResult:
        """As in ``Backend``. If the files of the store were removed or replaced, the batch is
        committed to those that are there now."""
        for _ in range(_REPLACEMENTS):
            environment = self._writable()
            # check in each attempt: if the store was replaced, the present one has other keys
            check_batch(namespace, batch, environment.database.seal)
            try:
                self._make_keys(environment, batch)
                return self._commit(environment, namespace, batch)
            except TenantForgottenError as error:
                # The caller drops the content of these tenants that it has accepted so far, and
                # may commit newer content. Note how often each tenant was forgotten: later batches
                # of this handle are refused only if a tenant has been forgotten more often.
                times_forgotten = environment.database.keys.forgotten
                for name in error.tenants:
                    self._forgotten[name] = times_forgotten.get(name, 0)
                raise
            except ReplacedError:
                self._follow_replacement(environment)
                # the next attempt must read the payloads from the beginning
                for pack in batch.packs:
                    pack.restart()
        raise self._keeps_changing()

    def _make_keys(self, environment: Environment, batch: CommitBatch) -> None:
        """Make the data keys of tenants of the batch that have none, durably, before their first
        packs. A store without a key lacks none.

        :raises TenantForgottenError: a key is lacking because its tenant was forgotten.
        """
        tenants = tenants_of(batch)
        if not environment.database.seal.lacking(tenants):
            return
        keys = environment.database.keys
        # the transaction writes no row: it holds the writer lock, which changes of keys need
        with environment.transaction(write=True), files.translated_io(self._path):
            keys.check_not_forgotten(tenants, self._forgotten)
            keys.make_missing(tenants)

    def _commit(
        self,
        environment: Environment,
        namespace: bytes,
        batch: CommitBatch,
    ) -> CommitResult:
        """Commit a batch to the store's present files, in one transaction, or after an eviction if
        there is no room.

        :raises ReplacedError: the files are no longer at the path; nothing is acknowledged. Other
            errors as in ``Backend.commit``.
        """
        commit = BatchCommit(environment, namespace, batch, self._forgotten)
        try:
            with environment.writing():
                try:
                    return commit.write()
                except StoreFullError:
                    return commit.write_after_eviction()
        except CorruptPackError:
            # The key of a tenant may have been destroyed while it sealed a pack: then the tenant
            # was forgotten, which ``check_not_forgotten`` raises.
            tenants = tenants_of(batch)
            environment.database.keys.check_not_forgotten(tenants, self._forgotten)
            raise
        except StaleError:
            # report no evictions: the caller now reads all changes since ``seen``, which include
            # those that this commit made
            return CommitResult(batch.seen or b"", stale=True)
        except StoreFullError as error:
            if not files.map_is_full(error):
                raise
            # LMDB found no page although the driver expected free ones: a reader may hold them
            reader = environment.database.oldest_reader()
            if reader is None:  # no reader: the database is fragmented, or damaged
                environment.mark_suspect()
                raise
            raise environment.database.pinned_error(reader) from None

    def read(
        self,
        namespace: bytes,
        spans: Sequence[ReadSpan],
    ) -> list[bool]:
        """Fill the buffers of spans with stored bytes, unverified; return for each span whether it
        was filled. If another process deletes a pack meanwhile, its extents may be overwritten: the
        caller's verification finds that."""
        filled: list[bool] = []
        with self._transaction() as (environment, rows):
            for span in spans:
                name = namespace + span.pack_id
                extents = read_extents(rows, name)
                # the payload is inline, or the pack is not held
                if extents is None:
                    is_filled = read_pieces(rows, name, span.offset, span.buffers)
                elif _ends_within_payload(rows, name, span):
                    is_filled = environment.files.read(
                        extents, span.offset, span.buffers, direct=self._direct
                    )
                else:
                    is_filled = False
                filled.append(is_filled)
        return filled

    def stats(self) -> BackendStats:
        """Return the totals over all namespaces, and the size of quarantined directories."""
        damaged = quarantined(self._path)
        with self.rows() as rows:
            states = _states(rows)
            capacity = read_capacity(rows)
        stats = totals(states, self.disk_bytes(), capacity)
        return replace(
            stats,
            quarantined=tuple(map(str, damaged)),
            quarantined_bytes=sum(damaged.values()),
        )

    def tenants(self) -> list[TenantTotals]:
        """Return the totals of each tenant with packs or a quota, by name."""
        with self.rows() as rows:
            states = _states(rows)
            tenants = list(read_tenants(rows))
        # the default tenant has no row: it has the rest of the whole store
        packs = sum(state.packs for state in states)
        stored_bytes = sum(state.stored_bytes for state in states)
        return with_default(tenants, packs, stored_bytes)

    def disk_bytes(self) -> int:
        """Return the bytes on disk of the segments and of the store's other files, without status
        files, saved indexes and quarantined directories."""
        # read the lengths in a transaction, because its begin follows files that were replaced
        with self._transaction() as (environment, _):
            total = sum(environment.files.lengths().values())
        for name in files.STORE_FILES:
            # a read-only file system has no lock file
            with suppress(FileNotFoundError):
                status = (self._path / name).stat()
                total += files.allocated_bytes(status)
        return total

    def index_file(self, namespace: bytes) -> Path:
        return self.environment.index_file(namespace)

    def policy(self) -> Policy:
        with self.rows() as transaction:
            return read_policy(transaction)

    def set_policy(self, policy: Policy) -> None:
        """Record another capacity and ttl, and other quotas; then evict what exceeds them, and
        return the disk space. The placement must be the recorded one."""
        self._writable()  # raises if the store is open read-only
        if not is_capacity(policy.capacity):
            raise ConfigurationError(
                "capacity", policy.capacity, "a size from 1MiB to 64TiB"
            )
        recorded = self.policy()
        if policy.placement != recorded.placement:
            expected = (
                f"{recorded.placement}, fixed when the store was created; `persistkv "
                f"copy` copies it into a new store"
            )
            raise ConfigurationError("placement", policy.placement, expected)
        with self.rows(write=True) as transaction:
            write_policy(transaction, policy)
            write_quotas(transaction, policy.quotas)
        enforce_policy(self.environment)

    def delete_quarantined(self) -> int:
        self._writable()  # raises if the store is open read-only
        return delete_quarantined(self._path)

    def free_space(self) -> FreeSpace:
        """Return the free space within ``data.mdb``, and that in the segments with its number of
        extents and the largest one."""
        with self._transaction() as (environment, transaction):
            allocator = Allocator(transaction)
            unused = environment.database.file_bytes() - transaction.used_bytes()
            return FreeSpace(
                catalogue_bytes=max(0, unused),
                payload_bytes=allocator.free * PAGE_BYTES,
                pieces=allocator.num_free_extents(),
                largest_bytes=allocator.largest() * PAGE_BYTES,
            )

    def release_free(self) -> int:
        """Return the free space of the segments to the file system; return the bytes by which the
        store shrank."""
        environment = self._writable()
        before = self.disk_bytes()
        release_free(environment)
        return max(0, before - self.disk_bytes())

    def publish_status(self, engine: str, row: bytes | None) -> None:
        """As in ``Backend``. The file is not synced, and its bytes do not count towards the
        capacity. Creating an engine's file deletes those that other engines last wrote over a day
        ago.
        """
        directory = self._writable().path / files.STATUS_DIRECTORY
        target = directory / f"{engine}{_STATUS_SUFFIX}"
        with files.translated_io(directory):
            if row is None:
                target.unlink(missing_ok=True)
                return
            if not target.exists():
                directory.mkdir(0o700, exist_ok=True)
                _delete_old_statuses(directory)
            replace_file(target, [row])

    def statuses(self) -> dict[str, bytes]:
        """Return the status rows of all engines, by name, at most 64 KiB of each."""
        directory = self.environment.path / files.STATUS_DIRECTORY
        found: dict[str, bytes] = {}
        with files.translated_io(directory):
            for path in directory.glob(f"*{_STATUS_SUFFIX}"):
                # A file that raises an error was removed meanwhile, or is a link or FIFO, which
                # engines never create: skip it.
                with suppress(OSError):
                    found[path.stem] = files.read_regular(path, _STATUS_BYTES)
        return found

    def close(self) -> None:
        """Release the environment, which the last handle of the process closes; idempotent."""
        # drop the reference first: a handle counts as closed even if closing the environment fails
        shared = self._shared
        self._shared = None
        if shared is not None:
            ENVIRONMENTS.release(shared)


def _states(rows: TableRows) -> list[NamespaceState]:
    """Return the totals of all namespaces."""
    states: list[NamespaceState] = []
    for _, row in rows.range(STATES, start=b""):
        states.append(NamespaceState.decode(row))
    return states


def _delete_old_statuses(directory: Path) -> None:
    """Delete the status files that killed engines left over a day ago."""
    oldest = time.time() - _STATUS_FORGOTTEN_S
    for path in directory.iterdir():
        # another engine may delete the file at the same time
        with suppress(FileNotFoundError):
            if path.stat().st_mtime < oldest:
                path.unlink()


def _path_of(url: StoreUrl) -> Path:
    """Return the directory that a URL names; raise ConfigurationError unless it is absolute."""
    if "\0" in url.location:
        raise ConfigurationError("url", url.location, "a path without NUL")
    path = Path(url.location)
    if not path.is_absolute():
        expected = (
            f"an absolute path: lmdb:///{url.location} (three slashes), or "
            f"lmdb://{path.absolute()}"
        )
        raise ConfigurationError("url", f"lmdb://{url.location}", expected)
    return path


def _ends_within_payload(
    rows: TableRows,
    name: bytes,
    span: ReadSpan,
) -> bool:
    """Return whether a span ends within the payload of its pack. The pack's extents are longer:
    they end with its table and a trailer."""
    row = rows.get(PACKS, name)
    if row is None:
        return False
    _, payload_length = table_lengths(row[SEQUENCE.size :])
    span_bytes = sum(buffer.nbytes for buffer in span.buffers)
    end = span.offset + span_bytes
    return end <= payload_length


def _refuse_remote(store: Path) -> None:
    """Raise a ConfigurationError if other hosts may write the file system that a store is on, or
    will be on."""
    with files.translated_at_open(store):
        existing = existing_parent(store)
        kind = remote_type(existing)
    if kind is not None and not files.is_on_read_only_file_system(existing):
        expected = (
            f"a directory on a local disk; this one is on {kind}, where LMDB's locks and memory "
            f"map do not work. Hosts share a directory or a bucket instead (file://PATH, "
            f"s3://BUCKET/PREFIX); a file system that is mounted read-only is read"
        )
        raise ConfigurationError("url", f"lmdb://{store}", expected)
