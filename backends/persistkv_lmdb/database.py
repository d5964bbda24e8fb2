"""``data.mdb`` of a store: its LMDB environment, the size of its memory map, and its readers.

1. The memory map bounds ``data.mdb``. Its size follows from the recorded capacity and placement,
   and a write transaction begins only when the map has that size. No estimate can replace this
   bound: free pages may be fragmented, or a stopped reader may see them.
2. A remap (another process grew the map, or the capacity changed) frees memory that transactions
   read. It waits until no transaction runs in this process, and new transactions wait for it, for a
   bounded time.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import lmdb

from persistkv.config import PAGE_BYTES
from persistkv.errors import StoreBusyError, StoreFullError
from persistkv.rounding import round_down
from persistkv.storage.catalogue.rows import TableRows
from persistkv.storage.format.seal import PLAIN, Seal
from persistkv.storage.policy import Policy
from persistkv_lmdb import files
from persistkv_lmdb.keys import KeyFile
from persistkv_lmdb.layout import (
    INLINE,
    create_databases,
    open_databases,
    read_capacity,
    read_keyring,
    read_placement,
    write_keyring,
)
from persistkv_lmdb.opening import open_lmdb

if TYPE_CHECKING:
    from lmdb import _Database

# 64 KiB: bound of the size of lock.mdb (512 readers) and the guard file, which count as used
# capacity
LOCK_FILE_BYTES = 64 << 10
# 1 MiB: minimum of the catalogue, twice the pages of a few transactions
MIN_CATALOGUE = 1 << 20
# 2 MiB: pages that a commit rewrites, and those of the last two commits, which are not reusable yet
REWRITTEN_BYTES = 2 << 20
_CATALOGUE_SHARE = 4  # 1/4: maximum share of the capacity that ``data.mdb`` takes
# 1/256: maximum share of the capacity by which ``data.mdb`` grows in one transaction. The maximum
# is 64 MiB in a large store, 1 MiB in a store of less than 256 MiB, and 1/32 in one of less than 32
# MiB.
_GROWTH_SHARE = 256
_SMALL_GROWTH_SHARE = 32
_LEAST_GROWTH = 1 << 20  # 1 MiB
_MOST_GROWTH = 64 << 20  # 64 MiB
# 1/16: share of the capacity, at most 64 MiB, by which a stopped reader may let ``data.mdb`` grow
_PINNED_SHARE = 16
_MOST_PINNED = 64 << 20  # 64 MiB
# number of transactions after which a reader with an older snapshot counts as stopped: reads take
# 20 ms
_PINNED_TRANSACTIONS = 100
# bounds of the reserve for deletions (``_headroom_bytes``)
_MIN_HEADROOM = 256 << 10  # 256 KiB
_MAX_HEADROOM = 64 << 20  # 64 MiB
_POLL_S = 0.002  # seconds between two reads of the table of readers
_COURTESY_S = 0.05
"""Maximum wait, in seconds, of new transactions for a pending remap, which overlapping transactions
could otherwise delay for ever. Bounded: a thread inside a transaction may begin another one while
the remap waits for that thread."""


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
        share = max(self.capacity // _GROWTH_SHARE, least)
        return min(share, _MOST_GROWTH)


def _read_shares(rows: TableRows) -> Shares:
    """Return the division of the recorded capacity: inline payloads leave all of it to
    ``data.mdb``."""
    capacity = read_capacity(rows)
    inline = read_placement(rows) == INLINE
    share = capacity
    if not inline:
        usual_share = capacity // _CATALOGUE_SHARE
        # in a small store, this is too little: take more, but leave a quarter to the segments
        three_quarters = capacity // 4 * 3
        least_share = min(MIN_CATALOGUE, three_quarters)
        share = max(usual_share, least_share)
    # ``lock.mdb`` and the guard file take a part of the catalogue's share
    catalogue_bytes = round_down(share - LOCK_FILE_BYTES, PAGE_BYTES)
    return Shares(capacity, inline, catalogue_bytes)


class MapLock:
    """Shared/exclusive lock: transactions share the memory map, and a remap excludes them.
    Thread-safe."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        """Notified when one of the two numbers below falls."""
        self._inside = 0
        """Number of shared holds; a thread may have several."""
        self._num_exclusive = 0
        """Number of threads that wait for the exclusive lock, or hold it."""

    @contextmanager
    def shared(self) -> Iterator[None]:
        """Hold the lock shared. Wait until no thread holds it exclusively, and at most 50 ms
        (``_COURTESY_S``) for threads that wait for the exclusive lock."""
        # an exclusive holder keeps this condition's lock during its whole block
        with self._changed:
            if self._num_exclusive:
                self._changed.wait_for(lambda: not self._num_exclusive, _COURTESY_S)
            self._inside += 1
        try:
            yield
        finally:
            with self._changed:
                self._inside -= 1
                self._changed.notify_all()

    @contextmanager
    def exclusive(self, patience_s: float | None = None) -> Iterator[None]:
        """Hold the lock exclusively, after waiting until no thread holds it shared. The calling
        thread must not hold it shared.

        :param patience_s: maximum wait in seconds; None: unbounded.
        :raises StoreBusyError: a thread has held it for longer; the block does not run.
        """
        with self._changed:
            self._num_exclusive += 1
            try:
                # the condition's lock is free during this wait, and held during the block
                is_free = self._changed.wait_for(lambda: not self._inside, patience_s)
                if not is_free:
                    raise StoreBusyError(
                        f"another thread of this process has used the store for {patience_s} s"
                    )
                yield
            finally:
                self._num_exclusive -= 1
                self._changed.notify_all()


class OtherTransactionError(Exception):
    """``data.mdb`` holds another last transaction than LMDB's lock file names."""


class Reader(NamedTuple):
    """A process that reads. Readers are ordered by their snapshots."""

    number: int
    """Number of the transaction whose state its snapshot shows."""
    process: int
    """Id of the process."""


class Database:
    """LMDB environment of the store in the directory ``path``, opened by ``open``. Transactions
    hold ``map_lock`` shared.

    :param policy: recorded if the store is created; an existing store keeps its own.
    :param keys: data keys of the store.
    """

    def __init__(
        self,
        path: Path,
        policy: Policy,
        keys: KeyFile,
    ) -> None:
        self._path = path
        self._policy = policy
        self.keys = keys
        self._keyring_id: str | None = None
        """Id of the keyring whose keys ``seal`` uses; empty: the store has no key; None: it was not
        opened yet."""
        self.seal: Seal = PLAIN
        """Seals rows and packs; valid while the environment is open."""
        self.map_lock = MapLock()
        self.is_open = False
        self._env: lmdb.Environment
        """LMDB's environment; set by ``open``, and usable while ``is_open``."""
        self._databases: Mapping[str, _Database] = {}
        """LMDB's database of each table, by name."""
        self._file_ids: Sequence[files.FileId | None] = ()
        """Ids of the open files, to notice other files in their place."""
        self.shares = Shares(capacity=0, inline=False, catalogue_bytes=0)
        """Division of the capacity, as the last remap found it; valid within a write transaction,
        because ``begin`` compares it."""
        self.map_bytes = 0
        """Present bound of ``data.mdb`` in bytes; valid within a write transaction."""
        self._stuck_snapshot = 0
        """Number of the newest transaction for whose reader a wait has timed out; 0: no wait has.
        ``wait_for_readers`` does not wait again for readers of this or older transactions."""

    # Opening

    def open(self, *, read_only: bool) -> None:
        """Open ``data.mdb`` and its databases; leave nothing open on failure.

        :raises StoreUnavailableError: it cannot be opened.
        :raises CorruptStoreError: it is damaged, or something else, and was not changed.
        :raises ConfigurationError: the user's key is not that of the store.
        """
        with files.translated_at_open(self._path):
            exists = files.file_id(self._path / files.DATA_FILE) is not None
            env = open_lmdb(self._path, read_only=read_only)
            if not read_only and not _agrees_with_lock_file(env):
                env.close()
                env = self._open_with_new_lock_file()
            try:
                env.reader_check()  # remove the readers of dead processes
                self._file_ids = self._ids_at_path()
                if read_only:
                    self._databases = open_databases(env)
                else:
                    self._create_databases(env)
                self._load_keys(env)
                # make the names of the new files durable
                if not exists:
                    files.sync_directory(self._path)
            except BaseException:
                env.close()
                raise
            self._env = env
            self.is_open = True

    def _open_with_new_lock_file(self) -> lmdb.Environment:
        """Delete LMDB's lock file, and open the environment: LMDB makes a new one from
        ``data.mdb``. Other processes notice the other file before their next transaction
        (``is_current``)."""
        (self._path / files.LOCK_FILE).unlink()
        return open_lmdb(self._path, read_only=False)

    def _load_keys(self, env: lmdb.Environment) -> None:
        """Set the seal to that of the keyring that the catalogue names."""
        with env.begin(buffers=True) as txn:
            keyring_id = read_keyring(TableRows(txn, self._databases))
        # If the environment is opened again, keep the keys: the key file may have been wrapped with
        # another key of the user meanwhile, which this process does not have.
        if keyring_id == self._keyring_id:
            return
        self.seal = self.keys.open_seal(keyring_id)
        self._keyring_id = keyring_id

    def _create_databases(self, env: lmdb.Environment) -> None:
        """Open the databases of a store for writing; create them in an empty environment."""
        with env.begin(write=True, buffers=True) as txn:
            is_new = not txn.stat()["entries"]
            self._databases = create_databases(env, txn, self._policy)
            if is_new:
                # make the key file durable before the row that names its keyring: without the keys,
                # the store could never be read
                keyring_id = self.keys.prepare_keyring(create=True)
                write_keyring(TableRows(txn, self._databases), keyring_id)

    def close(self) -> None:
        """Close the environment; no transaction may be running. Idempotent."""
        if self.is_open:
            self._env.close()
            self.is_open = False

    def reopen(self, *, read_only: bool) -> None:
        """Open the environment again, after the running transactions. If that fails, the next
        transaction retries."""
        with self.map_lock.exclusive():
            self.close()
            self.open(read_only=read_only)
            self._set_map_size()

    def is_current(self) -> bool:
        """Return whether the open files are those at the store's path."""
        return self._file_ids == self._ids_at_path()

    def _ids_at_path(self) -> list[files.FileId | None]:
        """Return the ids of the two files that are at the path now, in the order of ``_file_ids``;
        None for a missing one."""
        names = (files.DATA_FILE, files.LOCK_FILE)
        return [files.file_id(f"{self._path}/{name}") for name in names]

    # Transactions

    def begin(self, *, write: bool) -> lmdb.Transaction[memoryview]:
        """Begin an LMDB transaction, while ``map_lock`` is held.

        :raises lmdb.MapResizedError: ``remap`` is needed first: another process has let the file
            grow, or has changed the capacity.
        :raises lmdb.PanicError: ``reopen`` is needed first, because LMDB failed to write a page.
        :raises OtherTransactionError: LMDB's lock file names another last transaction than
            ``data.mdb``. First, the one in ``data.mdb`` must be made durable (``Guard.recover``),
            then ``reopen`` replaces the lock file.
        """
        begun = self._env.begin(write=write, buffers=True)
        if not write:
            return begun
        try:
            if not _has_next_number(self._env, begun):
                raise OtherTransactionError
            # another process has recorded another capacity: the map must get its new size
            recorded_shares = _read_shares(self.rows(begun))
            if recorded_shares != self.shares:
                raise lmdb.MapResizedError("the capacity has changed")
        except BaseException:
            # abort at once, and not when it is garbage-collected: it holds LMDB's write lock
            begun.abort()
            raise
        return begun

    def rows(self, txn: lmdb.Transaction[memoryview]) -> TableRows:
        """Return the rows that a transaction sees."""
        return TableRows(txn, self._databases, self.seal)

    def remap(self) -> None:
        """Adapt the size of the map, after the running transactions."""
        with self.map_lock.exclusive():
            self._set_map_size()

    def _set_map_size(self) -> None:
        """Set the map size to the recorded bound of ``data.mdb``. If the file is larger than that,
        because the capacity was lowered, set it to the file's size plus a reserve for deletions.
        The caller excludes transactions of this process.
        """
        self._env.set_mapsize(0)  # 0 adopts the size that other processes have written
        with self._env.begin(buffers=True) as txn:
            shares = _read_shares(self.rows(txn))
        self.map_bytes = shares.catalogue_bytes
        present_bytes = self.file_bytes()
        if present_bytes > self.map_bytes:
            self.map_bytes = present_bytes + _headroom_bytes(present_bytes)
        self._env.set_mapsize(self.map_bytes)
        self.shares = shares

    # Size

    def file_bytes(self) -> int:
        """Return the bytes of ``data.mdb`` up to the last page that LMDB has ever used."""
        num_pages = self._env.info()["last_pgno"] + 1  # pages are numbered from 0
        page_bytes = self._env.stat()["psize"]
        return int(num_pages * page_bytes)

    def limit_bytes(self, *, without_growth: bool) -> int:
        """Return the bound on the used bytes of ``data.mdb`` after a commit that adds content: the
        catalogue's or the disk's, less a reserve for deletions, because LMDB writes new pages to
        free old ones.

        :param without_growth: assume that the file cannot grow: a quota may prevent it, or free
            pages are fragmented.
        """
        bound = self.file_bytes()
        if not without_growth:
            bound += files.growth_bytes(self._path)
        bound = min(bound, self.shares.catalogue_bytes)
        return bound - _headroom_bytes(bound)

    def check_growth(self, transaction: TableRows) -> None:
        """Refuse a commit if a stopped reader has made ``data.mdb`` grow far beyond the bytes of
        its content.

        :raises StoreFullError: that is the case; the error names the reader's process.
        """
        allowance = min(self.shares.capacity // _PINNED_SHARE, _MOST_PINNED)
        file_bytes = self.file_bytes()
        # usually, the file is small, whatever it holds: do not spend time on counting the content
        if file_bytes <= allowance:
            return
        # usually, up to half of the file is free pages, which evictions leave for later commits
        usual_bytes = 2 * transaction.used_bytes()
        if file_bytes <= allowance + usual_bytes:
            return
        oldest_recent = self._env.info()["last_txnid"] - _PINNED_TRANSACTIONS
        reader = self.oldest_reader()
        # a reader with a recent snapshot will soon end, so the growth has another cause
        if reader is not None and reader.number < oldest_recent:
            raise self.pinned_error(reader)

    # Readers

    def clear_readers(self) -> None:
        """Remove the readers of dead processes: LMDB keeps the pages that they saw."""
        self._env.reader_check()

    def oldest_reader(self) -> Reader | None:
        """Return the reader with the oldest snapshot, of those that live; None if no process
        reads."""
        self.clear_readers()
        found: list[Reader] = []
        lines = self._env.readers().splitlines()[1:]  # leave out the header
        for line in lines:
            process, _, number = line.split()  # the second field is the thread
            if number.isdecimal():  # ``-`` stands for an idle reader
                found.append(Reader(int(number), int(process)))
        return min(found, default=None)

    def wait_for_readers(self, number: int, timeout_s: float) -> bool:
        """Wait until no reader of any process has a snapshot before transaction ``number``; return
        False on timeout, or at once if a reader that caused an earlier timeout still runs.
        """
        # Without this wait, a read of 20 ms would make commits of a full store with inline payloads
        # fail: LMDB reuses no page that a snapshot needs.
        deadline = time.monotonic() + timeout_s
        while True:
            reader = self.oldest_reader()
            if reader is None or reader.number >= number:
                return True
            has_timed_out_before = reader.number <= self._stuck_snapshot
            if has_timed_out_before or time.monotonic() > deadline:
                self._stuck_snapshot = max(self._stuck_snapshot, reader.number)
                return False
            time.sleep(_POLL_S)

    def pinned_error(self, reader: Reader) -> StoreFullError:
        """Return the error of a commit that finds no free page because a process reads an old
        transaction."""
        return StoreFullError(
            f"{self._path}: process {reader.process} reads the state of transaction "
            f"{reader.number}, so the catalogue cannot reuse pages: stop it, or continue it if it "
            f"is stopped"
        )


def _headroom_bytes(file_bytes: int) -> int:
    """Return the reserve for deletions in a ``data.mdb`` of ``file_bytes``: LMDB writes new pages
    to free old ones."""
    share = max(file_bytes // 64, _MIN_HEADROOM)
    share = min(share, _MAX_HEADROOM, file_bytes // 4)
    return round_down(share, PAGE_BYTES)


def _agrees_with_lock_file(env: lmdb.Environment) -> bool:
    """Return whether LMDB's lock file names the newest transaction in ``data.mdb`` as the last one.
    The caller holds the writer lock.
    """
    # begin a write transaction, because its number follows the one in the lock file; aborted, it
    # leaves no trace
    begun = env.begin(write=True)
    try:
        return _has_next_number(env, begun)
    finally:
        begun.abort()


def _has_next_number(
    env: lmdb.Environment,
    begun: lmdb.Transaction[Any],
) -> bool:
    """Return whether the number of a write transaction is one more than that of the last commit.
    Otherwise, LMDB's lock file and ``data.mdb`` name different commits as the last one."""
    # LMDB takes one of the two numbers from the lock file, and the other one from data.mdb
    last = env.info()["last_txnid"]
    return bool(begun.id() == last + 1)
