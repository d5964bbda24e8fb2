"""The LMDB environment of a store, one per process.

1. LMDB's locks belong to the process, so a process opens a store once; all handles on the same files share it.
2. A remap (another process grew the map, or the capacity changed) frees memory that transactions read. It waits until
   no transaction runs in this process, and new transactions wait for it, for a bounded time.
3. An environment must not be used after a fork: calls in the child raise.
4. Opening for writing and every write transaction hold persistkv's own writer lock, and wait for it a bounded time.
"""

from __future__ import annotations

import os
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, nullcontext, suppress
from functools import partial
from pathlib import Path

import lmdb

from persistkv.config import PAGE_BYTES
from persistkv.errors import StoreBusyError, StoreError, StoreFullError
from persistkv.storage.catalog.records import read_clock, write_clock
from persistkv.storage.extensions import Policy
from persistkv.storage.format.pack import align
from persistkv_lmdb.allocator import recorded_bytes
from persistkv_lmdb.capacity import LOCK_FILE_BYTES, Shares, read_shares, wanted_catalogue_bytes
from persistkv_lmdb.errors import free_disk_bytes, translated, translated_at_open
from persistkv_lmdb.guard import GUARD_FILE, WRITER_LOCK_FILE, Guard, WriterLock
from persistkv_lmdb.layout import (
    DATA_FILE,
    LOCK_FILE,
    Transaction,
    disown,
    write_placement,
    write_policy,
)
from persistkv_lmdb.opening import open_environment
from persistkv_lmdb.options import Placement
from persistkv_lmdb.payloads import Payloads
from persistkv_lmdb.segments import DIRECTORY as SEGMENT_DIRECTORY
from persistkv_lmdb.segments import SegmentFiles
from persistkv_lmdb.status_files import DIRECTORY as STATUS_DIRECTORY

STORE_FILES = (DATA_FILE, LOCK_FILE, GUARD_FILE, WRITER_LOCK_FILE)
STORE_DIRECTORIES = (SEGMENT_DIRECTORY, STATUS_DIRECTORY)
_MIN_HEADROOM = 256 << 10  # 256 KiB
_MAX_HEADROOM = 64 << 20  # 64 MiB
_BEGIN_ATTEMPTS = 8
_POLL_S = 0.002
_COURTESY_S = 0.05
"""Maximum wait of new transactions for a pending remap, which overlapping transactions could otherwise delay for ever.
It is bounded because a thread inside a transaction may begin another one while the remap waits for that thread."""
_COMMITS = 16  # remembered: with varying sizes, one commit in so many exceeds those before it, and waits for space


class Environment:
    """An open environment. Thread-safe.

    :param policy: recorded if the store is created; an existing store keeps its own.
    :raises StoreUnavailableError: it cannot be opened.
    :raises CorruptStoreError: the directory holds something else, which was not changed.
    """

    def __init__(self, path: Path, policy: Policy, *, read_only: bool) -> None:
        self.path = path
        self.read_only = read_only
        self.handles = 0
        self.process = os.getpid()
        self._freed = (0, 0)
        self._taken: deque[int] = deque(maxlen=_COMMITS)
        self._map_lock = _MapLock()
        self._stuck = 0
        """A wait for snapshots up to this transaction has timed out."""
        self._is_open = False
        self._fitted: Shares | None = None
        self._map_bytes = 0
        self._guard = None if read_only else Guard(path)
        self._policy = policy
        with ExitStack() as undone:  # undoes each step if a later one fails
            undone.callback(self._leave)
            undone.callback(self._close_lmdb)  # the guard closes after LMDB, and its own close may fail
            if self._guard is None:
                self._open()
            else:
                self._guard.open(self._open)
            with translated_at_open(path):
                self.files = SegmentFiles(path, read_only=read_only)
            undone.callback(self.files.close)
            if not read_only:
                with self._suspecting(), translated(path):
                    self._remap()
            undone.pop_all()

    @contextmanager
    def transaction(self, *, write: bool = False) -> Iterator[Transaction]:
        """Run a transaction: committed at the end of the block, aborted if the block raises.

        :raises StoreFullError: it does not fit.
        :raises StoreBusyError: another process has held the writer lock for too long.
        :raises StoreError: any other failure, including use in a fork of the process that opened the store.
        """
        if self.process != os.getpid():
            raise StoreError(f"{self.path} was opened by process {self.process}; open it again after a fork")
        guard = self._guard if write else None
        with self._suspecting(), nullcontext() if guard is None else guard.writing() as lock, translated(self.path):
            for _ in range(_BEGIN_ATTEMPTS):
                with self._map_lock.shared():
                    begun = self._begin(lock, write)
                    if isinstance(begun, lmdb.Transaction):
                        with begun:
                            try:
                                yield Transaction(begun, self._db)
                                if lock is not None:
                                    lock.mark(begun=True)
                            except BaseException:
                                if write:  # the next transaction may take the extents that are being written
                                    self.files.abandon()
                                raise
                        if lock is not None:
                            with suppress(StoreError):  # the next transaction then syncs again
                                lock.mark(begun=False)
                        return
                begun()
        raise StoreError(f"{self.path}: no transaction could begin in {_BEGIN_ATTEMPTS} attempts")

    @property
    def _shares(self) -> Shares:
        """The policy at the last write transaction."""
        if self._fitted is None:
            raise StoreError(f"{self.path} is open read-only")
        return self._fitted

    @property
    def placement(self) -> Placement:
        """Placement of new packs. Valid within a write transaction."""
        return self._shares.placement

    @property
    def capacity(self) -> int:
        """Capacity of the store in bytes on disk, all files included. Valid within a write transaction."""
        return self._shares.capacity

    def set_policy(self, policy: Policy) -> None:
        """Record another capacity and ttl, and apply them. Content is kept even if it exceeds the new capacity."""
        with self.transaction(write=True) as transaction:
            write_policy(transaction, policy)
        with translated(self.path):
            self._remap()

    def limit_bytes(self, *, as_it_is: bool = False) -> int:
        """Return the bound on ``used_bytes`` after a commit that adds content.

        It is the catalogue's bound or what the disk allows, less a reserve for deletions: LMDB writes new pages to free
        old ones.

        :param as_it_is: calculate as if the file could not grow: a quota may prevent it, or free pages are fragmented.
        """
        file = self.file_bytes()
        disk = file if as_it_is else file + free_disk_bytes(self.path)
        bound = self._shares.catalogue_bytes
        return min(bound, disk) - _headroom_bytes(min(bound, disk))

    def widen_catalogue(self, transaction: Transaction, need: int, segments: int) -> int:
        """Raise the catalogue's bound from the next transaction on, if the segments leave enough of the capacity.

        :param need: bytes that the catalogue lacks.
        :param segments: bytes of all segments, including those that this transaction adds.
        :returns: the increase in bytes; 0: the capacity has no space for it.
        """
        room = self.capacity - LOCK_FILE_BYTES - self._map_bytes - segments
        wanted = wanted_catalogue_bytes(transaction, self.capacity) - self._map_bytes
        more = align(max(need, min(wanted, room // PAGE_BYTES * PAGE_BYTES)))
        if more > room:
            return 0
        write_placement(transaction, self.placement, self._map_bytes + more)
        return more

    def _segment_limit_bytes(self, transaction: Transaction) -> int:
        """Return the bound on the bytes of all segments: the capacity or disk space that the catalogue leaves.

        The expected size of the catalogue limits the growth of segments; they shrink only for its present size.
        """
        held, segments = self.file_bytes(), recorded_bytes(transaction)
        disk = LOCK_FILE_BYTES + held + segments + free_disk_bytes(self.path)
        whole, catalogue = (self.capacity, self._map_bytes) if disk >= self.capacity else (disk, held)
        left = max(0, whole - LOCK_FILE_BYTES - catalogue)
        return min(left, max(segments, whole - LOCK_FILE_BYTES - wanted_catalogue_bytes(transaction, whole)))

    def payloads(self, transaction: Transaction) -> Payloads:
        """Return the payloads of a write transaction, with extents that no reader can see any more made free.

        :raises StoreFullError: a segment file was lost or truncated, and the disk has no space to replace it.
        """
        payloads = Payloads(transaction, self.placement, self.files, self._segment_limit_bytes(transaction))
        self.files.fit(payloads.allocator.segments())  # may be left over from an aborted transaction of a dead process
        if payloads.allocator.aging:
            payloads.allocator.ripen(self._oldest_snapshot(transaction.txn.id() - 1))
        inline = self.placement is Placement.INLINE
        payloads.shrink(0 if inline else self.capacity - LOCK_FILE_BYTES - self._map_bytes)
        return payloads

    def wait_for_readers(self, number: int, timeout_s: float) -> bool:
        """Wait until every snapshot includes transaction ``number``; return False after a timeout.

        A reader that caused a timeout is not waited for again.
        """
        deadline = time.monotonic() + timeout_s
        while (oldest := self._oldest_snapshot(number)) < number:
            if oldest <= self._stuck or time.monotonic() > deadline:
                self._stuck = max(self._stuck, oldest)
                return False
            time.sleep(_POLL_S)
        return True

    def _oldest_snapshot(self, newest: int) -> int:
        """Return the last transaction that the oldest snapshot of any process includes; ``newest`` without readers."""
        found = self._oldest_listed(newest)
        if found < newest:
            self._env.reader_check()  # removes the readers of dead processes
            found = self._oldest_listed(newest)
        return found

    def _oldest_listed(self, newest: int) -> int:
        """Parse LMDB's reader list: process, thread and transaction per line; ``-`` for an idle reader."""
        numbers = [line.split()[-1] for line in self._env.readers().splitlines()[1:]]
        return min([newest, *(int(number) for number in numbers if number.isdecimal())])

    def pending_bytes(self, transaction: Transaction) -> int:
        """Return the bytes that the previous transaction freed: LMDB reuses them in the next one."""
        before, freed = self._freed
        return freed if before == transaction.txn.id() - 1 else 0

    def note_freed(self, transaction: Transaction, freed: int) -> None:
        """Record the bytes that a transaction frees if it commits, for ``pending_bytes``."""
        self._freed = transaction.txn.id(), freed

    def note_taken(self, payload: int) -> None:
        """Record the bytes that a commit takes in the segments, for ``taken_lately``."""
        self._taken.append(payload)

    def taken_lately(self) -> int:
        """Return the most bytes that a recent commit of this process took in the segments: an estimate for the next."""
        return max(self._taken, default=0)

    def age(self) -> int:
        """Commit an empty transaction, so that the next one can reuse pages that the one before this freed.

        :returns: its transaction number.
        """
        with self.transaction(write=True) as transaction:
            write_clock(transaction.rows, *read_clock(transaction.rows))
            return int(transaction.txn.id())

    def make_writable(self) -> None:
        """Reopen for writing; handles stay valid. If that fails, the environment stays open for reading."""
        guard = Guard(self.path)
        try:
            guard.open(partial(self._reopen, False))
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

    def suspect(self) -> None:
        """Request an integrity check at the next opening that finds no process with the store open."""
        if self._guard is not None:
            self._guard.suspect()

    def disk_bytes(self) -> int:
        """Return the bytes that the file system has allocated to the store."""
        catalogue = sum(_allocated_bytes(self.path / name) for name in STORE_FILES)
        return catalogue + sum(self.files.lengths().values())

    def close(self) -> None:
        """Close the environment; no transaction may be running. In a forked child this does nothing."""
        if self.process == os.getpid():
            self._close_lmdb()
            self.files.close()
            self._leave()

    def forget(self) -> None:
        """Release the parent's locks in a forked child."""
        if self._guard is not None:
            self._guard.forget()

    def _leave(self) -> None:
        if self._guard is not None:
            self._guard.close()

    @contextmanager
    def _suspecting(self) -> Iterator[None]:
        """Request an integrity check at the next opening if the block fails in a way that may be damage."""
        try:
            yield
        except (StoreBusyError, StoreFullError):
            raise
        except StoreError:  # LMDB reports a damaged page with many different errors
            self.suspect()
            raise

    def _open(self, read_only: bool | None = None) -> None:
        read_only = self.read_only if read_only is None else read_only
        self._env, self.file_id, self._db = open_environment(self.path, self._policy, read_only=read_only)
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
        """Set the map to the recorded bound; if the file exceeds it, to the file plus a reserve for deletions."""
        self._env.set_mapsize(0)  # adopts the size that other processes have written
        with self._env.begin(buffers=True) as txn:
            shares = read_shares(Transaction(txn, self._db))
        allowed, held = shares.catalogue_bytes, self.file_bytes()
        self._map_bytes = allowed if held <= allowed else held + _headroom_bytes(held)
        self._env.set_mapsize(self._map_bytes)
        self._fitted = shares

    def file_bytes(self) -> int:
        """Return the bytes of ``data.mdb`` up to the last page that LMDB has ever used."""
        return int((self._env.info()["last_pgno"] + 1) * self._env.stat()["psize"])

    def _begin(self, lock: WriterLock | None, write: bool) -> lmdb.Transaction[memoryview] | Callable[[], None]:
        """Return a transaction, or a function to call without the map lock before one can begin."""
        if not self._is_open:
            return self._revive
        try:
            begun = self._env.begin(write=write, buffers=True)
        except lmdb.MapResizedError:
            return self._remap
        except lmdb.PanicError:  # LMDB could not write one of its pages: the files are intact, the handle is not
            return self._revive
        try:
            if lock is not None:
                self._take_back(begun, lock)
            fits = not write or read_shares(Transaction(begun, self._db)) == self._fitted
        except BaseException:
            begun.abort()  # not left to garbage collection: it holds LMDB's write lock
            raise
        if fits:
            return begun
        begun.abort()
        return self._remap

    def _take_back(self, begun: lmdb.Transaction[memoryview], lock: WriterLock) -> None:
        """Remove a snapshot that LMDB does not know.

        If the last write of a commit failed, and LMDB's attempt to undo it failed, too, the file holds such a snapshot.
        Open handles continue from the previous snapshot and overwrite its pages, so no later opening may use it. Until
        the removal is durable it counts as an interrupted commit, which the next writer makes durable.
        """
        if self._env.info()["last_txnid"] < begun.id():
            return
        lock.mark(begun=True)
        try:
            disown(self.path, begun.id(), int(self._env.stat()["psize"]))
        except OSError as error:  # including a full disk: evicting would not help
            raise StoreError(f"{self.path}: {error.strerror or error}") from error
        with suppress(StoreError):
            lock.mark(begun=False)

    def _remap(self) -> None:
        with self._map_lock.exclusive():
            self._fit_map()

    def _revive(self) -> None:
        with nullcontext() if self._guard is None else self._guard.excluding_writers():
            self._reopen(self.read_only)


class _MapLock:
    """Shared/exclusive lock: transactions share the memory map, and a remap excludes them. Thread-safe."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._inside = 0
        self._wanted = 0

    @contextmanager
    def shared(self) -> Iterator[None]:
        """Hold the lock shared for the length of the block."""
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
    def exclusive(self) -> Iterator[None]:
        """Hold the lock exclusively for the length of the block; must not be called while holding it shared."""
        with self._changed:
            self._wanted += 1
            try:
                self._changed.wait_for(lambda: not self._inside)
                yield
            finally:
                self._wanted -= 1
                self._changed.notify_all()


def _headroom_bytes(file: int) -> int:
    return min(max(file // 64, _MIN_HEADROOM), _MAX_HEADROOM, file // 4) // PAGE_BYTES * PAGE_BYTES


def _allocated_bytes(path: Path) -> int:
    """Return the allocated bytes of a file, without holes and without preallocation beyond its end."""
    try:
        status = path.stat()
    except FileNotFoundError:  # no lock file on a read-only file system
        return 0
    return min(status.st_size, 512 * status.st_blocks)
