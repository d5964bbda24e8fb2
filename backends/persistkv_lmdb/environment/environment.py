"""The one LMDB environment that a process has of each store.

1. LMDB's locks belong to the process, so a store is opened once in it; all handles on the same files share that.
2. Remapping (another process grew the map, a new capacity) frees the memory that transactions read: it waits until none
   runs in this process, and new ones wait for it, up to a bound.
3. An environment does not cross a fork: the child is refused.
4. Opening for writing, and each write transaction, run under persistkv's own lock for writing, whose wait is bounded.
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
from persistkv.storage.pack import align
from persistkv_lmdb.capacity import LOCK_FILE_BYTES, Shares, read_shares, wanted_catalogue_bytes
from persistkv_lmdb.environment.errors import free_disk_bytes, translated, translated_at_open
from persistkv_lmdb.environment.opening import open_environment
from persistkv_lmdb.layout import (
    DATA_FILE,
    LOCK_FILE,
    Transaction,
    disown,
    write_placement,
    write_policy,
)
from persistkv_lmdb.options import Placement
from persistkv_lmdb.recovery.guard import GUARD_FILE, WRITER_LOCK_FILE, Guard, WriterLock
from persistkv_lmdb.segments.allocator import recorded_bytes
from persistkv_lmdb.segments.payloads import Payloads
from persistkv_lmdb.segments.segment_files import DIRECTORY as SEGMENT_DIRECTORY
from persistkv_lmdb.segments.segment_files import SegmentFiles
from persistkv_lmdb.status_files import DIRECTORY as STATUS_DIRECTORY

STORE_FILES = (DATA_FILE, LOCK_FILE, GUARD_FILE, WRITER_LOCK_FILE)
STORE_DIRECTORIES = (SEGMENT_DIRECTORY, STATUS_DIRECTORY)
_MIN_HEADROOM = 256 << 10  # 256 KiB
_MAX_HEADROOM = 64 << 20  # 64 MiB
_BEGIN_ATTEMPTS = 8
_POLL_S = 0.002
_COURTESY_S = 0.05
"""Time that new transactions let a waiting remap go first: otherwise they could follow each other for ever. Bounded,
because a thread inside may begin another transaction, and the remap waits for that thread."""
_COMMITS = 16  # that are remembered: of many sizes, one in so many is larger than those before it, and waits for room


class Environment:
    """An open environment. Thread-safe.

    :param policy: recorded in a store that is created; an existing store keeps its own.
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
        """Snapshots up to this transaction were waited for in vain."""
        self._is_open = False
        self._fitted: Shares | None = None
        self._map_bytes = 0
        self._guard = None if read_only else Guard(path)
        self._policy = policy
        with ExitStack() as undone:  # where this fails, however far it came
            undone.callback(self._leave)
            undone.callback(self._close_lmdb)  # the guard has its say after LMDB, and may fail in that
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
        """Run a transaction: committed at the end of the block, undone where the block raises.

        :raises StoreFullError: it does not fit.
        :raises StoreBusyError: another process has held the lock for writing for too long.
        :raises StoreError: anything else, also in a fork of the process that opened the store.
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
                            with suppress(StoreError):  # the next transaction then syncs once more
                                lock.mark(begun=False)
                        return
                begun()
        raise StoreError(f"{self.path}: no transaction could begin in {_BEGIN_ATTEMPTS} attempts")

    @property
    def _shares(self) -> Shares:
        """The policy as of the last write transaction."""
        if self._fitted is None:
            raise StoreError(f"{self.path} is open read-only")
        return self._fitted

    @property
    def placement(self) -> Placement:
        """Where new packs go. Valid within a write transaction."""
        return self._shares.placement

    @property
    def capacity(self) -> int:
        """Bytes on disk, everything counted. Valid within a write transaction."""
        return self._shares.capacity

    def set_policy(self, policy: Policy) -> None:
        """Record another capacity and ttl, and apply them. Content is kept even where it exceeds the new capacity."""
        with self.transaction(write=True) as transaction:
            write_policy(transaction, policy)
        with translated(self.path):
            self._remap()

    def limit_bytes(self, *, as_it_is: bool = False) -> int:
        """What ``used_bytes`` may be after a commit that adds something: the capacity, or what the disk has, less the
        share that is kept for deletions, because LMDB writes new pages to free old ones.

        :param as_it_is: as if the file could not grow: a quota may say so, or pages that lie too scattered.
        """
        file = self.file_bytes()
        disk = file if as_it_is else file + free_disk_bytes(self.path)
        bound = self._shares.catalogue_bytes
        return min(bound, disk) - _headroom_bytes(min(bound, disk))

    def widen_catalogue(self, transaction: Transaction, need: int, segments: int) -> int:
        """Let the catalogue have more from the next transaction on, where the segments leave so much of the capacity.

        :param need: bytes that it lacks.
        :param segments: bytes of all segments, with what this transaction adds.
        :returns: by how much; 0: it is not there.
        """
        room = self.capacity - LOCK_FILE_BYTES - self._map_bytes - segments
        wanted = wanted_catalogue_bytes(transaction, self.capacity) - self._map_bytes
        more = align(max(need, min(wanted, room // PAGE_BYTES * PAGE_BYTES)))
        if more > room:
            return 0
        write_placement(transaction, self.placement, self._map_bytes + more)
        return more

    def _segment_limit_bytes(self, transaction: Transaction) -> int:
        """What all segments may have together: what the catalogue leaves of the capacity, or of what the disk has.

        What the catalogue will want stops them from growing; they give back no more than what it has already.
        """
        held, segments = self.file_bytes(), recorded_bytes(transaction)
        disk = LOCK_FILE_BYTES + held + segments + free_disk_bytes(self.path)
        whole, catalogue = (self.capacity, self._map_bytes) if disk >= self.capacity else (disk, held)
        left = max(0, whole - LOCK_FILE_BYTES - catalogue)
        return min(left, max(segments, whole - LOCK_FILE_BYTES - wanted_catalogue_bytes(transaction, whole)))

    def payloads(self, transaction: Transaction) -> Payloads:
        """The payloads of a write transaction; what no reader sees any more is free in it.

        :raises StoreFullError: a file was lost or cut, and there is no room for it.
        """
        payloads = Payloads(transaction, self.placement, self.files, self._segment_limit_bytes(transaction))
        self.files.fit(payloads.allocator.segments())  # a transaction may have been undone, of a process that is gone
        if payloads.allocator.aging:
            payloads.allocator.ripen(self._oldest_snapshot(transaction.txn.id() - 1))
        inline = self.placement is Placement.INLINE
        payloads.shrink(0 if inline else self.capacity - LOCK_FILE_BYTES - self._map_bytes)
        return payloads

    def wait_for_readers(self, number: int, timeout_s: float) -> bool:
        """Wait until all snapshots see transaction ``number``; False: timed out. The same reader is waited for once."""
        deadline = time.monotonic() + timeout_s
        while (oldest := self._oldest_snapshot(number)) < number:
            if oldest <= self._stuck or time.monotonic() > deadline:
                self._stuck = max(self._stuck, oldest)
                return False
            time.sleep(_POLL_S)
        return True

    def _oldest_snapshot(self, newest: int) -> int:
        """The transaction that the oldest snapshot of any process sees last; ``newest`` where there is no reader."""
        found = self._oldest_listed(newest)
        if found < newest:
            self._env.reader_check()  # forgets the readers of processes that died
            found = self._oldest_listed(newest)
        return found

    def _oldest_listed(self, newest: int) -> int:
        """LMDB's lines are process, thread and transaction; ``-`` where a reader is idle."""
        numbers = [line.split()[-1] for line in self._env.readers().splitlines()[1:]]
        return min([newest, *(int(number) for number in numbers if number.isdecimal())])

    def pending_bytes(self, transaction: Transaction) -> int:
        """Bytes that the previous transaction freed: LMDB reuses them in the next one."""
        before, freed = self._freed
        return freed if before == transaction.txn.id() - 1 else 0

    def note_freed(self, transaction: Transaction, freed: int) -> None:
        """Record the bytes that a transaction frees if it commits, for ``pending_bytes``."""
        self._freed = transaction.txn.id(), freed

    def note_taken(self, payload: int) -> None:
        """Record the bytes that a commit takes in the segments, for ``taken_lately``."""
        self._taken.append(payload)

    def taken_lately(self) -> int:
        """The most that one of the last commits of this process took in the segments: the next one may, too."""
        return max(self._taken, default=0)

    def age(self) -> int:
        """Commit a transaction that does nothing, so that the next one may use what the one before this freed.

        :returns: its number.
        """
        with self.transaction(write=True) as transaction:
            write_clock(transaction.rows, *read_clock(transaction.rows))
            return int(transaction.txn.id())

    def make_writable(self) -> None:
        """Open again for writing; the handles on it do not notice. Where that fails, it stays open for reading."""
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
        """Have the store checked when it is opened next while no process has it open."""
        if self._guard is not None:
            self._guard.suspect()

    def disk_bytes(self) -> int:
        """Bytes that the file system gives to the store."""
        catalogue = sum(_allocated_bytes(self.path / name) for name in STORE_FILES)
        return catalogue + sum(self.files.lengths().values())

    def close(self) -> None:
        """Close it; no transaction may run. In a forked child this does nothing."""
        if self.process == os.getpid():
            self._close_lmdb()
            self.files.close()
            self._leave()

    def forget(self) -> None:
        """In a forked child: keep none of the parent's locks alive."""
        if self._guard is not None:
            self._guard.forget()

    def _leave(self) -> None:
        if self._guard is not None:
            self._guard.close()

    @contextmanager
    def _suspecting(self) -> Iterator[None]:
        """Have the store checked at the next opening if the block fails in a way that may be damage."""
        try:
            yield
        except (StoreBusyError, StoreFullError):
            raise
        except StoreError:  # LMDB has many words for a damaged page
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
                self._open()  # where that fails too, the next transaction tries again
                self._fit_map()
                raise
            self._fit_map()

    def _fit_map(self) -> None:
        """Map as much as the capacity allows; where others have written more already, that and room to delete it."""
        self._env.set_mapsize(0)  # as much as others have written
        with self._env.begin(buffers=True) as txn:
            shares = read_shares(Transaction(txn, self._db))
        allowed, held = shares.catalogue_bytes, self.file_bytes()
        self._map_bytes = allowed if held <= allowed else held + _headroom_bytes(held)
        self._env.set_mapsize(self._map_bytes)
        self._fitted = shares

    def file_bytes(self) -> int:
        """Bytes of ``data.mdb`` that LMDB has used once."""
        return int((self._env.info()["last_pgno"] + 1) * self._env.stat()["psize"])

    def _begin(self, lock: WriterLock | None, write: bool) -> lmdb.Transaction[memoryview] | Callable[[], None]:
        """Return a transaction, or a function to call without the map lock before one can begin."""
        if not self._is_open:
            return self._revive
        try:
            begun = self._env.begin(write=write, buffers=True)
        except lmdb.MapResizedError:
            return self._remap
        except lmdb.PanicError:  # a page of LMDB's own could not be written: the files are right, the handle is not
            return self._revive
        try:
            if lock is not None:
                self._take_back(begun, lock)
            fits = not write or read_shares(Transaction(begun, self._db)) == self._fitted
        except BaseException:
            begun.abort()  # not when the error is forgotten: it holds the lock for writing
            raise
        if fits:
            return begun
        begun.abort()
        return self._remap

    def _take_back(self, begun: lmdb.Transaction[memoryview], lock: WriterLock) -> None:
        """Remove a snapshot that LMDB does not know.

        If a commit's last write failed, and LMDB's attempt to undo it too, the file holds such a snapshot. Open handles
        go on from the one before and overwrite its pages, so no later opening may find it. Until the removal is durable
        it counts as an interrupted commit, which the next writer makes durable.
        """
        if self._env.info()["last_txnid"] < begun.id():
            return
        lock.mark(begun=True)
        try:
            disown(self.path, begun.id(), int(self._env.stat()["psize"]))
        except OSError as error:  # a full disk, too: to evict would not help
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
        """Hold it shared for the length of the block."""
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
        """Hold it alone for the length of the block; not from within a shared one."""
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
    """Allocated bytes, without holes and without space reserved behind the end."""
    try:
        status = path.stat()
    except FileNotFoundError:  # no lock file on a read-only file system
        return 0
    return min(status.st_size, 512 * status.st_blocks)
