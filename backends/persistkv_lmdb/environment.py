"""A store that this process has open: its LMDB environment and segment files, one for all handles.

1. LMDB's locks belong to the process, so a process opens a store once; all handles on the same
   files share it.
2. An environment must not be used after a fork: calls in the child raise.
3. Opening for writing and every write transaction hold persistkv's own writer lock, and wait for it
   a bounded time.
4. The files at the path are compared with the open ones before each transaction, and after each
   commit. If a user removed or replaced some, the transaction raises, and the handle opens those at
   the path now: nothing is written into, or read from, files that no later opening finds.
5. LMDB's lock file names the last transaction for all processes. If ``data.mdb`` holds another one
   (a failed commit that could not be undone, or files of two stores), the lock file is removed.
   Each process then opens a new one.
6. One commit of this process at a time writes payloads, into extents that LMDB records as reserved
   for the process.
7. With placement ``extents``, the segment files get what ``data.mdb`` leaves of the capacity, less
   an amount by which it may grow in one transaction. When it grows, packs are evicted, and holes
   are punched in the segment files.
"""

from __future__ import annotations

import os
import threading
from collections import deque
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from contextlib import (
    AbstractContextManager,
    ExitStack,
    contextmanager,
    nullcontext,
    suppress,
)
from dataclasses import dataclass, field
from functools import cached_property, partial
from pathlib import Path

import lmdb

from persistkv.config import PAGE_BYTES
from persistkv.errors import (
    QuotaExceededError,
    StoreBusyError,
    StoreError,
    StoreFullError,
    TenantForgottenError,
)
from persistkv.storage.backend import Namespace
from persistkv.storage.catalogue.order import read_clock, write_clock
from persistkv.storage.catalogue.rows import META, STATES, TableRows
from persistkv.storage.policy import Policy
from persistkv_lmdb import files
from persistkv_lmdb.database import (
    LOCK_FILE_BYTES,
    Database,
    OtherTransactionError,
)
from persistkv_lmdb.files import ReplacedError
from persistkv_lmdb.keys import KeyFile
from persistkv_lmdb.layout import (
    read_keyring,
    read_last_erasure,
    read_refusals,
    write_last_erasure,
    write_refusal,
)
from persistkv_lmdb.opening import Guard
from persistkv_lmdb.payloads.allocator import (
    Allocator,
    ExtentPayloads,
    read_space,
)
from persistkv_lmdb.payloads.segments import SegmentFiles
from persistkv_lmdb.recovery import RecoveryFiles

# 1 MiB by which files may exceed their recorded space: file systems count metadata, too
_UNPUNCHED_BYTES = 1 << 20
# maximum number of attempts to begin a transaction: each may have to remap or reopen LMDB first
_BEGIN_ATTEMPTS = 8
_NO_DAMAGE = (
    StoreBusyError,
    StoreFullError,
    ReplacedError,
    QuotaExceededError,
    TenantForgottenError,
)
"""Errors that do not mean possible damage: after any other one, the store is checked at its next
opening."""
# seconds to wait for the writer lock when a namespace has ended
_DELETION_PATIENCE_S = 0.2
# Number of commits whose sizes are remembered. With varying sizes, one commit in so many exceeds
# all remembered ones, and must reserve space in a transaction of its own.
_COMMITS = 16
# a call that remaps or reopens LMDB, and holds the map lock exclusively for that
_Repair = Callable[[], None]


class Environment:
    """LMDB environment and segment files of a store, open and shared by all handles of the process.
    Thread-safe.

    :param policy: recorded if the store is created; an existing store keeps its own.
    :param keys: data keys of the store.
    :raises StoreUnavailableError: the store cannot be opened.
    :raises StoreBusyError: another process holds a lock of the store for too long.
    :raises CorruptStoreError: the directory holds something else, which was not changed.
    """

    def __init__(
        self,
        path: Path,
        policy: Policy,
        keys: KeyFile,
        *,
        read_only: bool,
    ) -> None:
        self.path = path
        self.read_only = read_only
        self.handles = 0
        """Number of handles that use this object (``Environments``); the last one closes it."""
        self.opened_namespaces: dict[bytes, Namespace] = {}
        """Namespaces that the handles have opened, by id. A commit that adds the first content of
        one writes its identity from here."""
        self.process = os.getpid()
        """Id of the process that opened the store: a forked child must not use it."""
        self._payloads: ExtentPayloads | None = None
        """Payload storage of the running write transaction, from its first call of
        ``prepare_payloads`` on; otherwise None."""
        self.recent_commit_bytes: deque[int] = deque(maxlen=_COMMITS)
        """Bytes that recent commits of this process took in the segments: an estimate for the next
        ones."""
        self._writing = threading.Lock()
        """Held by the thread that commits, from the reservation to its last transaction."""
        self.writer: int | None = None
        """Number under which LMDB records the reservation of this process; None before
        ``claim_writer``."""
        self.is_closed = False
        """Whether ``close`` was called: handles that still have this object open another one."""
        self._guard = None if read_only else Guard(path)
        """Writer lock and guard file of the store; None: it is open read-only."""
        self.database = Database(path, policy, keys)
        self.files: SegmentFiles
        """Segment files; set by ``_open``."""
        self._open()

    def _open(self) -> None:
        """Open the catalogue and the segment files; on failure, leave nothing open."""
        with ExitStack() as on_failure:  # undoes all steps so far if one fails
            if self._guard is not None:
                on_failure.callback(self._guard.close)
            # Register this after the guard: callbacks run in reverse order, and the guard records a
            # clean shutdown only after LMDB has closed.
            on_failure.callback(self.database.close)
            open_database = partial(self.database.open, read_only=self.read_only)
            if self._guard is None:
                open_database()
            else:
                self._guard.open(open_database)
            with files.translated_at_open(self.path):
                self.files = SegmentFiles(self.path, read_only=self.read_only)
            on_failure.callback(self.files.close)
            # LMDB was opened with the map size that its file records: set the one that follows from
            # the recorded capacity
            if not self.read_only:
                with self._suspect_on_error(), files.translated(self.path):
                    self.database.remap()
            on_failure.pop_all()

    @contextmanager
    def transaction(self, *, write: bool = False) -> Iterator[TableRows]:
        """Run a transaction. A write transaction is committed durably when the ``with`` block ends.
        It is aborted if the block raises or the commit fails.

        :raises StoreFullError: the changes do not fit.
        :raises StoreBusyError: another process has held the writer lock for too long.
        :raises ReplacedError: the files at the path are others; raised before the block runs, or by
            a commit that went into files that were replaced meanwhile.
        :raises StoreError: any other failure, including use in a fork of the process that opened
            the store.
        """
        if self.process != os.getpid():
            raise StoreError(
                f"{self.path} was opened by process {self.process}; open it again after a fork"
            )
        guard = self._guard if write else None
        lock: AbstractContextManager[None] = nullcontext()
        if guard is not None:
            # ``held`` calls ``recover`` if the last commit failed or its process was killed
            lock = guard.lock.held(recover=guard.recover)
        with self._suspect_on_error(), lock, files.translated(self.path):
            # read the keys again: another process may have made keys that seal rows, or destroyed
            # some
            if self.database.seal.encrypts:
                self.database.keys.refresh()
            for _ in range(_BEGIN_ATTEMPTS):
                with self.database.map_lock.shared():
                    # check again, because another process may have replaced the files during the
                    # waits
                    self._check_current()
                    # a transaction, or a repair without which none can begin
                    begun = self._begin_or_repair(write)
                    if isinstance(begun, lmdb.Transaction):
                        running: AbstractContextManager[object] = begun
                        if guard is not None:
                            running = self._committed(begun, guard)
                        with running:
                            yield self.database.rows(begun)
                        return
                # Remap or reopen LMDB, and try again. This is outside of the ``with`` block,
                # because the repair waits until no thread holds the map lock shared.
                repair = begun
                repair()
        raise StoreError(
            f"{self.path}: no transaction could begin in {_BEGIN_ATTEMPTS} attempts"
        )

    @contextmanager
    def _committed(
        self,
        begun: lmdb.Transaction[memoryview],
        guard: Guard,
    ) -> Iterator[None]:
        """Commit a write transaction durably after the ``with`` block, or abort it if that
        raises. The caller holds the writer lock.

        During the commit, the file of the writer lock has a mark that a commit has begun. If the
        commit fails or the process is killed, the mark stays, and the next writer first makes
        durable what may have been committed (``Guard.recover``).

        :raises ReplacedError: the commit went into files that are no longer at the path.
        """
        payloads: ExtentPayloads | None = None
        # leaving this block commits durably
        with begun:
            try:
                yield
                payloads = self._payloads
                if payloads is not None:
                    payloads.allocator.finish()
                    # sync the growth before the rows that count on this space are durable
                    self.files.sync_growth()
                guard.lock.mark_commit(begun=True)
            finally:
                self._payloads = None
        # punch holes only now: until the commit is durable, the catalogue on disk may list packs in
        # these pages
        if payloads is not None:
            self.files.punch(payloads.holes)
        # if the mark cannot be removed, the next transaction calls ``recover``, which is harmless
        with suppress(StoreError):
            guard.lock.mark_commit(begun=False)
        self._check_current()

    @cached_property
    def recovery(self) -> RecoveryFiles:
        """Files that only a rebuild reads: identities and erasures. Changing them needs the writer
        lock."""
        return RecoveryFiles(self.path)

    @contextmanager
    def writing(self) -> Iterator[None]:
        """Exclude other commits of this process within the ``with`` statement.

        :raises StoreBusyError: another thread has been committing for more than 10 s; the block
            does not run.
        """
        if not self._writing.acquire(timeout=files.WRITING_PATIENCE_S):
            raise StoreBusyError(
                f"{self.path} is busy: another thread of this process has been writing for "
                f"more than "
                f"{files.WRITING_PATIENCE_S:g} s"
            )
        try:
            yield
        finally:
            self._writing.release()

    def claim_writer(self, transaction: TableRows) -> int:
        """Claim the number of this process if it has none yet, and return it.

        Call this within a write transaction, after ``release_reserved``: the number may be that of
        a dead process, whose reservation must be released before this process reserves under it.

        :raises StoreError: the store is open read-only, or the file system refuses the lock.
        """
        if self.writer is None:
            if self._guard is None:
                raise StoreError(f"{self.path} is open read-only")
            # A refusal of a dead process (``refuse_tenant``) names its number. It would be valid
            # again if this process took the same number.
            refusing_writers = read_refusals(transaction).values()
            self.writer = self._guard.claim(excluded=refusing_writers)
        return self.writer

    def release_reserved(
        self, transaction: TableRows, *, include_own: bool = False
    ) -> None:
        """Within a write transaction, make the extents free that dead processes have reserved.

        :param include_own: also those of this process, which must not be writing into them.
        """
        allocator = self.prepare_payloads(transaction).allocator
        for writer in allocator.writers():
            is_own = writer == self.writer
            may_release = include_own if is_own else self._is_dead(writer)
            if may_release:
                allocator.release(writer)

    def refuse_tenant(self, transaction: TableRows, tenant: str) -> bytes:
        """Refuse content of a tenant in all processes, as long as this one lives; return the key of
        the row in ``META`` that refuses it, whose deletion ends the refusal. Delete the rows with
        which dead processes refused tenants."""
        # release first: the claimed number may be that of a dead process, whose reservation would
        # then count as this process's
        self.release_reserved(transaction)
        own_number = self.claim_writer(transaction)
        for key, writer in read_refusals(transaction).items():
            if self._is_dead(writer):
                transaction.delete(META, key)
        return write_refusal(transaction, tenant, own_number)

    def check_not_being_forgotten(
        self, transaction: TableRows, tenants: Iterable[str]
    ) -> None:
        """Raise a TenantForgottenError if a living process is forgetting any of these tenants."""
        refused: list[str] = []
        for tenant in tenants:
            writers = read_refusals(transaction, tenant).values()
            is_refused = any(not self._is_dead(writer) for writer in writers)
            if is_refused:
                refused.append(tenant)
        if refused:
            raise TenantForgottenError(refused)

    def _is_dead(self, writer: int) -> bool:
        """Return whether no process has a writer's number any more: it closed the store or died.
        In a store that is open read-only, all count as alive."""
        if writer == self.writer or self._guard is None:
            return False
        return not self._guard.is_claimed(writer)

    def prepare_payloads(self, transaction: TableRows) -> ExtentPayloads:
        """Return the payload storage of the running write transaction, the same object on each
        call. The first call adapts the segment files to what LMDB records.

        :raises StoreFullError: a segment file was lost or truncated, and the disk has no space to
            replace it.
        """
        if self._payloads is None:
            limit = self._segment_limit_bytes(transaction)
            inline = self.database.shares.inline
            payloads = ExtentPayloads(transaction, self.files, limit, inline=inline)
            self._adjust_files(payloads.allocator)
            # return space beyond the limit: the catalogue may have grown, or the capacity was
            # lowered
            payloads.shrink(limit)
            self._payloads = payloads
        return self._payloads

    def _adjust_files(self, allocator: Allocator) -> None:
        """Give the segment files the recorded lengths and holes.

        An aborted transaction may have let files grow, or have filled a hole. A process that was
        killed after its commit may not have punched a hole, and a rebuild has punched none.
        """
        disk_bytes = self.files.adjust_lengths(allocator.segments())
        # Punch all holes again only if the files take much more than is recorded, because it takes
        # time.
        expected_bytes = allocator.total * PAGE_BYTES
        is_too_large = disk_bytes > expected_bytes + _UNPUNCHED_BYTES
        if is_too_large and self.files.punches:
            self.files.punch(allocator.holes())

    def _segment_limit_bytes(self, transaction: TableRows) -> int:
        """Return the bound on the disk space of all segments: what ``data.mdb``, after the growth
        of one transaction, leaves of the capacity, or of a smaller disk."""
        shares = self.database.shares
        catalogue = self.database.file_bytes()
        segments = read_space(transaction).total * PAGE_BYTES
        free = files.free_disk_bytes(self.path)
        # all bytes that the store could take on the disk
        disk = catalogue + segments + free
        available = min(shares.capacity - LOCK_FILE_BYTES, disk)
        # Other files have filled the disk, except for the space that is reserved for root. The
        # catalogue cannot grow, even if segments return space, which goes to the reserve first.
        if files.has_only_reserved_space(self.path):
            return max(0, available - catalogue)
        # the memory map bounds the catalogue, too
        grown_catalogue = catalogue + shares.growth_bytes
        largest_catalogue = min(grown_catalogue, self.database.map_bytes)
        return max(0, available - largest_catalogue)

    def record_erasure(self, transaction: TableRows, names: Collection[bytes]) -> None:
        """Record that a rebuild must not find these packs, which the write transaction deletes.

        :param names: namespace and pack id of each.
        :raises StoreError: it cannot be recorded durably.
        """
        # a store with inline payloads cannot be rebuilt, so it needs no record
        if names and not self.database.shares.inline:
            number = read_last_erasure(transaction) + 1
            # Write the file first: if the transaction fails, the record covers packs that are still
            # held. A rebuild may then lose them, but it never finds deleted ones.
            self.recovery.record_erasure(names, number)
            write_last_erasure(transaction, number)

    def commit_nothing(self) -> int:
        """Commit a transaction without changes, so that the next transaction can reuse the pages
        that the last one freed.

        :returns: number of the transaction before the empty one: the pages that it freed are
            reusable once no reader has an older snapshot.
        """
        with self.transaction(write=True) as transaction:
            # LMDB commits a transaction only if it puts a row: put the row of the clock unchanged
            moment, clock = read_clock(transaction)
            write_clock(transaction, moment, clock)
            own_number = transaction.txn.id()
        return own_number - 1

    def is_current(self) -> bool:
        """Return whether the environment is open, and its files are those at the store's path."""
        if self.is_closed or not self.database.is_current():
            return False
        # the guard holds the lock file; None: the environment is open for reading only
        if self._guard is not None and not self._guard.is_current():
            return False
        return self.files.is_current()

    def serves(self, *, read_only: bool) -> bool:
        """Return whether a new handle, which only reads if ``read_only``, can share this
        environment."""
        # a handle that writes needs an environment that is open for writing
        has_mode = read_only or not self.read_only
        return has_mode and self.is_current()

    def _check_current(self) -> None:
        """Raise a ReplacedError if the open files are no longer those at the path."""
        if not self.is_current():
            raise ReplacedError(
                f"{self.path}: files of the store were removed or replaced while it was open"
            )

    def index_file(self, namespace: bytes) -> Path:
        """Return the path of the file in which an engine saves its index of a namespace."""
        return self.path / f"{files.INDEX_PREFIX}{namespace.hex()}"

    def delete_files_of(self, namespaces: Sequence[bytes]) -> None:
        """Delete the files of namespaces that have lost their last content, unless they have begun
        again. Errors are ignored, because these files alone are harmless.
        """
        # without a guard, the environment is open for reading only
        if not namespaces or self._guard is None:
            return
        with suppress(StoreError, OSError), self._guard.lock.held(_DELETION_PATIENCE_S):
            # with the writer lock held, no namespace can begin again until its files are deleted
            ended: list[bytes] = []
            with self.transaction() as rows:
                for name in namespaces:
                    if rows.get(STATES, name) is None:
                        ended.append(name)
            self.recovery.delete_identities(ended)
            for name in ended:
                self.index_file(name).unlink(missing_ok=True)

    def mark_suspect(self) -> None:
        """Have the store checked when it is next opened for writing while no process has it open,
        see ``Guard.mark_suspect``."""
        if self._guard is not None:
            self._guard.mark_suspect()

    def close(self) -> None:
        """Close the environment after the running transactions; idempotent. In a forked child this
        does nothing.

        :raises StoreBusyError: a transaction has been running for more than 10 s; the environment
            stays open.
        """
        if self.process != os.getpid() or self.is_closed:
            return
        # a running transaction reads the map, which closing removes
        with self.database.map_lock.exclusive(files.WRITING_PATIENCE_S):
            self.is_closed = True
            self.database.close()
            self.files.close()
        if self._guard is not None:
            self._guard.close()

    def close_after_fork(self) -> None:
        """Close the lock files in a forked child, without releasing the locks of its parent."""
        if self._guard is not None:
            self._guard.close_files()

    @contextmanager
    def _suspect_on_error(self) -> Iterator[None]:
        """Mark the store as possibly damaged if the ``with`` block raises a ``StoreError`` other
        than ``_NO_DAMAGE``."""
        try:
            yield
        except _NO_DAMAGE:
            raise
        except StoreError:  # LMDB reports a damaged page with many different errors
            self.mark_suspect()
            raise

    def _begin_or_repair(self, write: bool) -> lmdb.Transaction[memoryview] | _Repair:
        """Begin an LMDB transaction, while the caller holds the map lock shared; or return what
        must be done first. The caller then releases the lock, does that, and tries again.
        """
        database = self.database
        # an earlier reopening has closed LMDB and failed to open it
        if not database.is_open:
            return self._reopen
        try:
            return database.begin(write=write)
        except lmdb.MapResizedError:
            return database.remap
        except lmdb.PanicError:
            # LMDB failed to write a page earlier: the files are intact, but the open environment
            # refuses all further transactions
            return self._reopen
        except OtherTransactionError:
            # a failed commit could not be undone, or files of two stores were mixed
            return partial(self._reopen, recovers=True)

    def _reopen(self, *, recovers: bool = False) -> None:
        """Open LMDB again, after an earlier opening failed or an error made its handle unusable.

        :param recovers: first make the newest snapshot in ``data.mdb`` durable, because LMDB's lock
            file names another last transaction. The opening then replaces the lock file by one that
            names this snapshot.
        """
        if self._guard is None:
            self.database.reopen(read_only=True)
            return
        # The opening may remove LMDB's lock file, which only a holder of the writer lock may do. A
        # write transaction holds that lock already and acquires it a second time here: the lock is
        # reentrant within a thread. A read transaction acquires it only here.
        with self._guard.lock.held():
            if recovers:
                self._guard.recover()
            self.database.reopen(read_only=False)


@dataclass
class _Slot:
    """The open environment of one store directory (None: it is not open), and the lock for opening
    and closing it."""

    lock: threading.Lock = field(default_factory=threading.Lock)
    environment: Environment | None = None


class Environments:
    """Registry of the environments that this process has open, normally one per directory.
    Thread-safe.

    One thread at a time opens, reopens or closes an environment. The wait for another thread is
    bounded and per store: opening may take long, because of an integrity check or a stopped process
    that holds a lock.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()  # protects ``_slots``; never held during I/O
        self._slots: dict[tuple[int, int], _Slot] = {}
        """By device and inode of the store's directory, so that all paths to it share one."""
        os.register_at_fork(after_in_child=self._reset_after_fork)

    def acquire(
        self,
        path: Path,
        policy: Policy,
        keys: KeyFile,
        *,
        read_only: bool,
    ) -> Environment:
        """Return the process's environment of a store, opened if necessary; errors as in
        ``Environment``."""
        with files.translated_at_open(path):
            status = path.stat()
        directory = (status.st_dev, status.st_ino)
        with self._lock:
            slot = self._slots.setdefault(directory, _Slot())
        patience_s = files.OPENING_PATIENCE_S
        if not slot.lock.acquire(timeout=patience_s):
            raise StoreBusyError(
                f"{path} is busy: another thread of this process has been opening it for more "
                f"than {patience_s:g} s"
            )
        try:
            self._close_unusable(slot, read_only=read_only)
            shared = slot.environment
            if shared is None:
                shared = Environment(path, policy, keys, read_only=read_only)
                slot.environment = shared
            else:
                # check the key of this handle, because earlier handles may have been opened with
                # another key
                with shared.transaction() as rows:
                    keys.open_seal(read_keyring(rows))
            shared.handles += 1
            return shared
        finally:
            slot.lock.release()

    def _close_unusable(self, slot: _Slot, *, read_only: bool) -> None:
        """Close the environment in a slot, if there is one, unless a new handle can share it. The
        caller holds the slot's lock.

        It must be closed before the next one is opened, because LMDB opens a file only once per
        process. Handles that still use it find it closed, and acquire the next one
        (``LmdbBackend._follow_replacement``).
        """
        shared = slot.environment
        if shared is not None and not shared.serves(read_only=read_only):
            shared.close()
            slot.environment = None

    def release(self, environment: Environment) -> None:
        """Release one use of an environment that ``acquire`` returned; the release of the last use
        closes it."""
        slot = self._slot_of(environment)
        # there is no slot after a fork, or after ``acquire`` has closed it to open the next
        # environment
        if slot is None:
            return
        with slot.lock:
            environment.handles -= 1
            if environment.handles:
                return
            environment.close()
            # compare, because ``acquire`` may have put the next environment in its place before
            # this thread got the lock
            if slot.environment is environment:
                slot.environment = None

    def _slot_of(self, environment: Environment) -> _Slot | None:
        """Return the slot that an environment is in; None: it is in none."""
        with self._lock:
            for slot in self._slots.values():
                if slot.environment is environment:
                    return slot
        return None

    def _reset_after_fork(self) -> None:
        """Reset the registry in a forked child: another thread of the parent may have held a
        lock."""
        self._lock = threading.Lock()
        for slot in self._slots.values():
            if slot.environment is not None:
                slot.environment.close_after_fork()
        self._slots = {}


# State of the process: LMDB refuses to open an environment twice in one process.
ENVIRONMENTS = Environments()
