"""The LMDB environment of a store, one per process, and the size of its map.

1. LMDB's locks belong to the process, so a process opens a store once; all handles on the same
   files share it.
2. A remap (another process grew the map, or the capacity changed) frees memory that transactions
   read. It waits until no transaction runs in this process, and new transactions wait for it, for a
   bounded time.
3. An environment must not be used after a fork: calls in the child raise.
4. Opening for writing and every write transaction hold persistkv's own writer lock, and wait for it
   a bounded time.
5. The files at the path are compared with the open ones before each transaction, and after each
   commit. If a user removed or replaced some, the transaction raises, and the handle opens what is
   at the path now: nothing is written into, or read from, files that no later opening finds.
6. LMDB's lock file names the last transaction for all processes. If ``data.mdb`` holds another one
   (a failed commit that could not be undone, or files of two stores), the lock file is removed.
   Each process then opens a new one.
7. One commit of this process at a time writes payloads, into extents that LMDB records as reserved
   for the process.
8. The memory map bounds ``data.mdb``. Its size follows from the recorded capacity and placement,
   and a write transaction begins only when the map has that size.
9. With placement ``extents``, the segment files get what ``data.mdb`` leaves of the capacity, less
   an amount by which it may grow in one transaction. When it grows, packs are evicted, and holes
   are punched in the segment files.
"""

from __future__ import annotations

import os
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, nullcontext, suppress
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

import lmdb

from persistkv.config import PAGE_BYTES
from persistkv.errors import StoreBusyError, StoreError, StoreFullError
from persistkv.storage.backend import Namespace
from persistkv.storage.catalog.order import read_clock, write_clock
from persistkv.storage.catalog.rows import STATES, TableRows
from persistkv.storage.policy import Policy
from persistkv_lmdb import files
from persistkv_lmdb.allocator import Allocator, Payloads, read_reserved, read_space
from persistkv_lmdb.files import ReplacedError
from persistkv_lmdb.layout import (
    INLINE,
    create_databases,
    open_databases,
    read_capacity,
    read_placement,
)
from persistkv_lmdb.opening import Guard, open_lmdb
from persistkv_lmdb.recovery import RecoveryFiles
from persistkv_lmdb.segments import SegmentFiles

if TYPE_CHECKING:
    from lmdb import _Database

# 64 KiB: upper bound for lock.mdb (512 readers) and the guard file
LOCK_FILE_BYTES = 64 << 10
MIN_CATALOGUE = 1 << 20  # 1 MiB: twice the pages of a few transactions
# 2 MiB: pages that a commit rewrites, and those of the last two, not reusable yet
CATALOGUE_AHEAD = 2 << 20
_CATALOGUE_SHARE = 4  # ``data.mdb`` takes at most 1/4 of the capacity
_GROWTH_SHARE, _SMALL_GROWTH_SHARE, _LEAST_GROWTH, _MOST_GROWTH = (
    256,
    32,
    1 << 20,
    64 << 20,
)
"""Bytes by which ``data.mdb`` may grow in one transaction: 1/256 of the capacity, 1 MiB to 64 MiB;
in a store of less than 32 MiB, 1/32."""
# 1 MiB by which files may exceed their recorded space: file systems count metadata, too
_UNPUNCHED_BYTES = 1 << 20
_PINNED_SHARE, _MOST_PINNED = 16, 64 << 20
"""Bytes by which a stopped reader may let ``data.mdb`` grow: 1/16 of the capacity, at most 64
MiB."""
# a reader with an older snapshot counts as stopped: reads take about 20 ms
_PINNED_TRANSACTIONS = 100
_MIN_HEADROOM = 256 << 10  # 256 KiB
_MAX_HEADROOM = 64 << 20  # 64 MiB
_BEGIN_ATTEMPTS = 8
_POLL_S = 0.002
_COURTESY_S = 0.05
"""Maximum wait, in seconds, of new transactions for a pending remap, which overlapping transactions
could otherwise delay for ever. Bounded: a thread inside a transaction may begin another one while
the remap waits for that thread."""
# wait for the writer lock when a store is closed, or a namespace has ended
_RETURN_PATIENCE_S = 0.2
# remembered: with varying sizes, one commit in so many exceeds those before it, and waits for space
_COMMITS = 16


class Shares(NamedTuple):
    """Division of the capacity, from values that LMDB records."""

    capacity: int
    """Capacity of the store in bytes."""
    inline: bool
    """Whether payloads are stored in ``data.mdb``."""
    catalogue_bytes: int
    """Bound of ``data.mdb`` in bytes."""

    @property
    def growth_bytes(self) -> int:
        """Bytes by which ``data.mdb`` may grow in one transaction of the usual size."""
        least = min(_LEAST_GROWTH, self.capacity // _SMALL_GROWTH_SHARE)
        return min(max(self.capacity // _GROWTH_SHARE, least), _MOST_GROWTH)


def _read_shares(transaction: TableRows) -> Shares:
    capacity, inline = read_capacity(transaction), read_placement(transaction) == INLINE
    share = (
        capacity
        if inline
        else max(capacity // _CATALOGUE_SHARE, min(MIN_CATALOGUE, capacity // 4 * 3))
    )
    return Shares(
        capacity, inline, (share - LOCK_FILE_BYTES) // PAGE_BYTES * PAGE_BYTES
    )


class Environment:
    """LMDB environment and segment files of a store, open and shared by all handles of the process.
    Thread-safe.

    :param policy: recorded if the store is created; an existing store keeps its own.
    :raises StoreUnavailableError: the store cannot be opened.
    :raises StoreBusyError: another process holds a lock of the store for too long.
    :raises CorruptStoreError: the directory holds something else, which was not changed.
    """

    def __init__(self, path: Path, policy: Policy, *, read_only: bool) -> None:
        self.path = path
        self.read_only = read_only
        self.handles = 0
        self.opened: dict[bytes, Namespace] = {}
        """Namespaces that the handles have opened, by id: the identities of those that a commit
        begins."""
        self.process = os.getpid()
        self._databases: Mapping[str, _Database] = {}
        self._payloads: Payloads | None = None
        self.taken: deque[int] = deque(maxlen=_COMMITS)
        """Bytes that recent commits of this process took in the segments: an estimate for the next
        ones."""
        self._map_lock = _MapLock()
        self._writing = threading.Lock()
        self.writer: int | None = None
        """Number under which LMDB records the reservation of this process; None before
        ``claim_writer``."""
        # a wait for readers with a snapshot of this transaction, or of an older one, timed out
        self._stuck = 0
        self._is_open = False
        self._is_closed = False
        self._ids: Sequence[tuple[int, int] | None] = ()  # of the open files of LMDB
        self.shares = Shares(0, False, 0)  # valid within a write transaction
        # present bound of ``data.mdb``; valid within a write transaction
        self.map_bytes = 0
        self._guard = None if read_only else Guard(path)
        self._policy = policy
        with ExitStack() as undone:  # undoes each step if a later one fails
            if self._guard is not None:
                undone.callback(self._guard.close)
            # the guard closes after LMDB, and its own close may fail
            undone.callback(self._close_lmdb)
            if self._guard is None:
                self._open()
            else:
                self._guard.open(self._open)
            with files.translated_at_open(path):
                self.files = SegmentFiles(path, read_only=read_only)
            undone.callback(self.files.close)
            if not read_only:
                with self._suspect_on_error(), files.translated(path):
                    self._remap()
            undone.pop_all()

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
        # before the writer lock, whose file must not be created among other files
        self._check_current()
        guard = self._guard if write else None
        locked = (
            nullcontext() if guard is None else guard.lock.held(recover=guard.recover)
        )
        with self._suspect_on_error(), locked, files.translated(self.path):
            for _ in range(_BEGIN_ATTEMPTS):
                with self._map_lock.shared():
                    self._check_current()
                    begun = self._begin(write)
                    if isinstance(begun, lmdb.Transaction):
                        with begun:
                            try:
                                yield TableRows(begun, self._databases)
                                payloads = self._payloads if write else None
                                if payloads is not None:
                                    payloads.allocator.finish()
                                    self.files.sync_growth()
                                if guard is not None:
                                    guard.lock.mark(begun=True)
                            finally:
                                if write:
                                    self._payloads = None
                        if payloads is not None:
                            self.files.punch(payloads.holes)
                        if guard is not None:
                            # the next transaction then syncs again
                            with suppress(StoreError):
                                guard.lock.mark(begun=False)
                            self._check_current()
                        return
                begun()
        raise StoreError(
            f"{self.path}: no transaction could begin in {_BEGIN_ATTEMPTS} attempts"
        )

    @cached_property
    def recovery(self) -> RecoveryFiles:
        """Files for a rebuild. Changing them needs the writer lock."""
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

    def claim_writer(self) -> int:
        """Claim the number of this process if it has none yet, and return it.

        Call this within a write transaction, after ``release_reserved``: a dead process may have
        had the number.

        :raises StoreError: the store is open read-only, or the file system refuses the lock.
        """
        if self.writer is None:
            if self._guard is None:
                raise StoreError(f"{self.path} is open read-only")
            self.writer = self._guard.claim()
        return self.writer

    def release_reserved(self, transaction: TableRows, *, own: bool = False) -> None:
        """Release the reservations of dead processes in a write transaction; ``own``: also that of
        this process."""
        allocator, guard = self.payloads(transaction).allocator, self._guard
        for writer in allocator.writers():
            is_dead = (
                writer != self.writer
                and guard is not None
                and not guard.is_claimed(writer)
            )
            if is_dead or (own and writer == self.writer):
                allocator.release(writer)

    def payloads(self, transaction: TableRows) -> Payloads:
        """Return the payload storage of the running write transaction, the same object on each
        call.

        :raises StoreFullError: a segment file was lost or truncated, and the disk has no space to
            replace it.
        """
        if self._payloads is None:
            limit = self._segment_limit_bytes(transaction)
            payloads = Payloads(
                transaction, self.files, limit, inline=self.shares.inline
            )
            self._fit_files(payloads.allocator)
            payloads.shrink(limit)
            self._payloads = payloads
        return self._payloads

    def _fit_files(self, allocator: Allocator) -> None:
        """Give the segment files the recorded lengths and holes: an aborted transaction may have
        let them grow or have filled a hole, and a process that was killed after its commit may not
        have punched one.
        """
        segments = allocator.segments()
        on_disk = self.files.fit(segments)
        has_holes = sum(segments.values()) > allocator.total
        if has_holes and on_disk > allocator.total * PAGE_BYTES + _UNPUNCHED_BYTES:
            self.files.punch(allocator.holes())

    def _segment_limit_bytes(self, transaction: TableRows) -> int:
        """Return the bound on the disk space of all segments: what ``data.mdb``, after the growth
        of one transaction, leaves of the capacity, or of a smaller disk.
        """
        held, segments = self.file_bytes(), read_space(transaction).total * PAGE_BYTES
        disk = held + segments + files.free_disk_bytes(self.path)
        whole = min(self.shares.capacity - LOCK_FILE_BYTES, disk)
        return max(0, whole - min(self.map_bytes, held + self.shares.growth_bytes))

    def limit_bytes(self, *, as_it_is: bool = False) -> int:
        """Return the bound on the used bytes of ``data.mdb`` after a commit that adds content: the
        catalogue's or the disk's, less a reserve for deletions, because LMDB writes new pages to
        free old ones.

        :param as_it_is: assume that the file cannot grow: a quota may prevent it, or free pages are
            fragmented.
        """
        file = self.file_bytes()
        disk = file if as_it_is else file + files.growth_bytes(self.path)
        bound = min(self.shares.catalogue_bytes, disk)
        return bound - _headroom_bytes(bound)

    def file_bytes(self) -> int:
        """Return the bytes of ``data.mdb`` up to the last page that LMDB has ever used."""
        return int((self._env.info()["last_pgno"] + 1) * self._env.stat()["psize"])

    def wait_for_readers(self, number: int, timeout_s: float) -> bool:
        """Wait until no reader of any process has a snapshot before transaction ``number``; return
        False on timeout, or at once if a reader that caused an earlier timeout still runs.
        """
        deadline = time.monotonic() + timeout_s
        while (oldest := self._oldest_snapshot(number)) < number:
            if oldest <= self._stuck or time.monotonic() > deadline:
                self._stuck = max(self._stuck, oldest)
                return False
            time.sleep(_POLL_S)
        return True

    def clear_readers(self) -> None:
        """Remove the readers of dead processes: LMDB keeps the pages that they saw."""
        self._env.reader_check()

    def oldest_reader(self) -> tuple[int, int] | None:
        """Return the process of the reader with the oldest snapshot, of those that live, and the
        number of its transaction; None if no process reads.
        """
        self.clear_readers()
        found: list[tuple[int, int]] = []
        # a header, then process, thread and transaction of a reader
        for line in self._env.readers().splitlines()[1:]:
            process, _, number = line.split()
            if number.isdecimal():  # ``-``: an idle one
                found.append((int(number), int(process)))
        return min(found)[::-1] if found else None

    def check_growth(self, used: int) -> None:
        """Refuse a commit if a stopped reader has made ``data.mdb`` grow far beyond the ``used``
        bytes of its content.

        :raises StoreFullError: that is the case; the error names the reader's process.
        """
        if self.file_bytes() <= 2 * used + min(
            self.shares.capacity // _PINNED_SHARE, _MOST_PINNED
        ):
            return
        reader = self.oldest_reader()
        if (
            reader is not None
            and reader[1] < self._env.info()["last_txnid"] - _PINNED_TRANSACTIONS
        ):
            raise self.pinned_error(*reader)

    def pinned_error(self, process: int, number: int) -> StoreFullError:
        """Return the error of a commit that finds no free page because a process reads an old
        transaction."""
        kept = (
            f"process {process} reads the state of transaction {number}, so the catalogue "
            f"cannot reuse pages"
        )
        return StoreFullError(
            f"{self.path}: {kept}: stop it, or continue it if it is stopped"
        )

    def _oldest_snapshot(self, newest: int) -> int:
        """Return the number of the oldest transaction that a reader of any process may see, at most
        ``newest``."""
        reader = self.oldest_reader()
        return newest if reader is None else min(newest, reader[1])

    def age(self) -> int:
        """Commit a transaction without changes; return its number. The next one can reuse pages
        that the previous one freed.
        """
        with self.transaction(write=True) as transaction:
            write_clock(transaction, *read_clock(transaction))
            return int(transaction.txn.id())

    def make_writable(self) -> None:
        """Reopen a read-only environment for writing; handles stay valid. If that fails, it stays
        open for reading."""
        guard = Guard(self.path)
        try:
            guard.open(lambda: self._reopen(False))
        except BaseException:
            try:
                if not self._env.flags()["readonly"]:  # the guard failed after it
                    self._reopen(self.read_only)
            finally:
                guard.close()
            raise
        with self._map_lock.exclusive():
            self.files.make_writable()
            self._guard, self.read_only = guard, False

    def is_current(self) -> bool:
        """Return whether the open files are those at the store's path."""
        if self._is_closed or self._ids != _ids_at(self.path):
            return False
        return self.files.is_current() and (
            self._guard is None or self._guard.is_current()
        )

    def _check_current(self) -> None:
        if not self.is_current():
            raise ReplacedError(
                f"{self.path}: files of the store were removed or replaced while it was open"
            )

    def index_file(self, namespace: bytes) -> Path:
        """Return the path of the file in which an engine saves its index of a namespace."""
        return self.path / f"{files.INDEX_PREFIX}{namespace.hex()}"

    def forget_namespaces(self, namespaces: Sequence[bytes]) -> None:
        """Delete the files of namespaces that have lost their last content, unless they have begun
        again. Errors are ignored, because these files alone are harmless.
        """
        if not namespaces or self._guard is None:
            return
        with suppress(StoreError, OSError), self._guard.lock.held(_RETURN_PATIENCE_S):
            with self.transaction() as rows:
                ended = [name for name in namespaces if rows.get(STATES, name) is None]
            self.recovery.forget(ended)
            for name in ended:
                self.index_file(name).unlink(missing_ok=True)

    def suspect(self) -> None:
        """Have the store checked when it is next opened for writing, see ``Guard.suspect``."""
        if self._guard is not None:
            self._guard.suspect()

    def close(self) -> None:
        """Close the environment after the running transactions; idempotent. In a forked child this
        does nothing.

        :raises StoreBusyError: a transaction has been running for more than 10 s; the environment
            stays open.
        """
        if self.process != os.getpid() or self._is_closed:
            return
        self._return_reserved()
        with self._map_lock.exclusive(files.WRITING_PATIENCE_S):
            self._is_closed = True
            self._close_lmdb()
            self.files.close()
        if self._guard is not None:
            self._guard.close()

    def _return_reserved(self) -> None:
        """Release the reservation of this process, unless the lock is busy: later writers release
        it as well."""
        if (
            self.writer is None
            or self._guard is None
            or not self._writing.acquire(timeout=_RETURN_PATIENCE_S)
        ):
            return
        try:
            with suppress(StoreError), self._guard.lock.held(_RETURN_PATIENCE_S):
                with self.transaction() as transaction:
                    if not read_reserved(transaction, self.writer):
                        return
                with self.transaction(write=True) as transaction:
                    self.payloads(transaction).allocator.release(self.writer)
        finally:
            self._writing.release()

    def forget(self) -> None:
        """Close the lock files in a forked child, without releasing the locks of its parent."""
        if self._guard is not None:
            self._guard.forget()

    @contextmanager
    def _suspect_on_error(self) -> Iterator[None]:
        """Mark the store as possibly damaged if the ``with`` block raises a ``StoreError`` other
        than busy, full or replaced.
        """
        try:
            yield
        except (StoreBusyError, StoreFullError, ReplacedError):
            raise
        except StoreError:  # LMDB reports a damaged page with many different errors
            self.suspect()
            raise

    def _open(self, read_only: bool | None = None) -> None:
        """Open ``data.mdb`` and its databases; leave nothing open on failure. None: with the mode
        of this object."""
        read_only = self.read_only if read_only is None else read_only
        with files.translated_at_open(self.path):
            exists = files.file_id(self.path / files.DATA_FILE) is not None
            env = open_lmdb(self.path, read_only=read_only)
            if not read_only and not _has_its_lock_file(env):
                env.close()
                # other processes notice it before their next transaction
                (self.path / files.LOCK_FILE).unlink()
                env = open_lmdb(self.path, read_only=read_only)
            try:
                env.reader_check()
                self._ids = _ids_at(self.path)
                if read_only:
                    self._databases = open_databases(env)
                else:
                    with env.begin(write=True, buffers=True) as txn:
                        self._databases = create_databases(env, txn, self._policy)
                if not exists:
                    files.sync_directory(self.path)
            except BaseException:
                env.close()
                raise
            self._env = env
            self._is_open = True

    def _close_lmdb(self) -> None:
        if self._is_open:
            self._env.close()
            self._is_open = False

    def _reopen(self, read_only: bool) -> None:
        with self._map_lock.exclusive():
            self._close_lmdb()
            try:
                self._open(read_only)
            except BaseException:
                self._open()  # if that fails, too, the next transaction retries
                self._fit_map()
                raise
            self._fit_map()

    def _fit_map(self) -> None:
        """Set the map size to the recorded bound of ``data.mdb``, or to the file's size plus a
        reserve for deletions if larger.
        """
        self._env.set_mapsize(0)  # adopts the size that other processes have written
        with self._env.begin(buffers=True) as txn:
            shares = _read_shares(TableRows(txn, self._databases))
        allowed, held = shares.catalogue_bytes, self.file_bytes()
        self.map_bytes = allowed if held <= allowed else held + _headroom_bytes(held)
        self._env.set_mapsize(self.map_bytes)
        self.shares = shares

    def _begin(self, write: bool) -> lmdb.Transaction[memoryview] | Callable[[], None]:
        """Begin an LMDB transaction. If LMDB must be remapped or reopened first, return a function
        for that, to be called without the map lock.
        """
        if not self._is_open:
            return self._revive
        try:
            begun = self._env.begin(write=write, buffers=True)
        except lmdb.MapResizedError:
            return self._remap
        except lmdb.PanicError:
            # LMDB could not write one of its pages: the files are intact, the handle is not
            return self._revive
        if not write:
            return begun
        try:
            is_next = self._env.info()["last_txnid"] == begun.id() - 1
            fits = _read_shares(TableRows(begun, self._databases)) == self.shares
        except BaseException:
            begun.abort()  # not left to garbage collection: it holds LMDB's write lock
            raise
        if is_next and fits:
            return begun
        begun.abort()
        return self._remap if is_next else self._adopt

    def _remap(self) -> None:
        with self._map_lock.exclusive():
            self._fit_map()

    def _revive(self) -> None:
        with nullcontext() if self._guard is None else self._guard.lock.held():
            self._reopen(self.read_only)

    def _adopt(self) -> None:
        """Continue from the newest snapshot in ``data.mdb``, which LMDB's lock file does not
        know."""
        if self._guard is None:
            raise StoreError(f"{self.path} is open read-only")
        with self._guard.lock.held():
            self._guard.recover()
            self._reopen(False)


class _MapLock:
    """Shared/exclusive lock: transactions share the memory map, and a remap excludes them.
    Thread-safe."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._inside = 0
        self._wanted = 0

    @contextmanager
    def shared(self) -> Iterator[None]:
        """Hold the lock shared, after an exclusive holder, and at most 50 ms after threads that
        want to be one."""
        with self._changed:
            self._changed.wait_for(lambda: not self._wanted, _COURTESY_S)
            self._inside += 1
        try:
            yield
        finally:
            with self._changed:
                self._inside -= 1
                self._changed.notify_all()

    @contextmanager
    def exclusive(self, patience_s: float | None = None) -> Iterator[None]:
        """Hold the lock exclusively, after waiting until no thread holds it shared, which the
        calling one must not.

        :param patience_s: maximum wait in seconds; None: unbounded.
        :raises StoreBusyError: a thread has held it for longer; the block does not run.
        """
        with self._changed:
            self._wanted += 1
            try:
                if not self._changed.wait_for(lambda: not self._inside, patience_s):
                    raise StoreBusyError(
                        f"another thread of this process has used the store for {patience_s} s"
                    )
                yield
            finally:
                self._wanted -= 1
                self._changed.notify_all()


def _headroom_bytes(file: int) -> int:
    return (
        min(max(file // 64, _MIN_HEADROOM), _MAX_HEADROOM, file // 4)
        // PAGE_BYTES
        * PAGE_BYTES
    )


def _ids_at(path: Path) -> list[tuple[int, int] | None]:
    return [files.file_id(path / name) for name in (files.DATA_FILE, files.LOCK_FILE)]


def _has_its_lock_file(env: lmdb.Environment) -> bool:
    """Return whether LMDB's lock file names the newest transaction in ``data.mdb`` as the last one.
    The caller holds the writer lock.
    """
    begun = env.begin(write=True)
    try:
        return bool(env.info()["last_txnid"] == begun.id() - 1)
    finally:
        begun.abort()


class _Slot(NamedTuple):
    """The lock for opening and closing the environments of one store directory, and the open ones:
    at most one of them is current.
    """

    lock: threading.Lock
    environments: list[Environment]


class Environments:
    """Registry of the environments that this process has open, normally one per directory.
    Thread-safe.

    One thread at a time opens, reopens or closes an environment. The wait for another thread is
    bounded and per store: opening may take long, because of an integrity check or a stopped process
    that holds a lock.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()  # never held during I/O
        self._slots: dict[tuple[int, int], _Slot] = {}
        os.register_at_fork(after_in_child=self._forget)

    def acquire(self, path: Path, policy: Policy, *, read_only: bool) -> Environment:
        """Return the process's environment of a store, opened if necessary; errors as in
        ``Environment``."""
        with files.translated_at_open(path):
            status = path.stat()
        with self._lock:
            slot = self._slots.setdefault(
                (status.st_dev, status.st_ino), _Slot(threading.Lock(), [])
            )
        patience_s = files.OPENING_PATIENCE_S
        if not slot.lock.acquire(timeout=patience_s):
            raise StoreBusyError(
                f"{path} is busy: another thread of this process has been opening it for more "
                f"than {patience_s:g} s"
            )
        try:
            for environment in list(slot.environments):
                # before another opening: LMDB opens a file once per process
                if not environment.is_current():
                    environment.close()
                    slot.environments.remove(environment)
            found = next(iter(slot.environments), None)
            if found is None:
                found = Environment(path, policy, read_only=read_only)
                slot.environments.append(found)
            elif found.read_only and not read_only:
                found.make_writable()
            found.handles += 1
            return found
        finally:
            slot.lock.release()

    def release(self, environment: Environment) -> None:
        """Release one use of an environment that ``acquire`` returned; the release of the last use
        closes it."""
        with self._lock:
            found = [
                slot
                for slot in self._slots.values()
                if environment in slot.environments
            ]
        for slot in found:  # one, or none in a fork
            with slot.lock:
                environment.handles -= 1
                if not environment.handles:
                    slot.environments.remove(environment)
                    environment.close()

    def _forget(self) -> None:
        """Reset the registry in a forked child: another thread of the parent may have held a
        lock."""
        self._lock = threading.Lock()
        for slot in self._slots.values():
            for environment in slot.environments:
                environment.forget()
        self._slots = {}


# State of the process: LMDB refuses to open an environment twice in one process.
ENVIRONMENTS = Environments()
