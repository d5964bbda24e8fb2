"""Detects unclean shutdowns of a store and checks its integrity before the next writer opens it.

LMDB reads through a memory map, so a damaged environment can kill the process that opens it. Invariants:

1. The guard file contains ``open`` from before the first writer opens the environment until the last one closes it.
   Each writer holds a shared lock on the file; the kernel drops the lock when the process exits. ``open`` without a
   lock means an unclean shutdown.
2. After an unclean shutdown, a child process checks the environment first (``fsck``), so damage kills the child
   and not the engine. After a clean shutdown there is no check.
3. An environment that passes the check is opened, regardless of how many processes died in it: an out-of-memory crash
   loop is no damage. An environment that fails the check is renamed, never changed or deleted, and only while no
   process has it open for writing.
4. Content that an unclean shutdown or a failed commit left is made durable before the next transaction, by the process
   that opens the store or by those that have it open. A second fsync after a failed one proves nothing, so the bytes
   that may be lost are *written* again: LMDB's two meta pages. Everything that either page references was durable
   before the page was written. As long as the disk refuses this write, no process writes, and nothing is renamed.
5. With an empty guard file the environment may belong to another program: it is not changed. The same applies to a
   store of another release.
"""

from __future__ import annotations

import enum
import fcntl
import logging
import os
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, suppress
from pathlib import Path

from persistkv.errors import CorruptStoreError, StoreBusyError, StoreError
from persistkv_lmdb.errors import translated_at_open, translated_io
from persistkv_lmdb.files import open_regular, sync_directory, write_again
from persistkv_lmdb.fsck import DAMAGE, inspect
from persistkv_lmdb.layout import DATA_FILE, meta_bytes
from persistkv_lmdb.quarantine import quarantine

logger = logging.getLogger(__name__)

GUARD_FILE, WRITER_LOCK_FILE = "guard", "writer.lock"
OPENING_PATIENCE_S = 30.0
"""Maximum wait for the writer lock when a store is opened: the holder may be checking its integrity."""
WRITING_PATIENCE_S = 10.0
"""Maximum wait for the writer lock in a transaction: several times a commit of 128 MiB to a slow disk."""
_SHORT_PATIENCE_S = 0.2
_CLOSING_PATIENCE_S = 5.0  # for another process that closes: it holds the guard for microseconds, or for three syncs
_CLOSING_NAP_S = 0.001
_FIRST_NAP_S = 0.000_2
_LONGEST_NAP_S = 0.005
_ROW_BYTES = 32
_BEGUN, _ENDED = b"+", b"-"
_FLAGS = os.O_RDWR | os.O_CREAT


class _State(str, enum.Enum):
    """State in the guard file; the values are its content."""

    CLEAN = "clean"
    OPEN = "open"
    SUSPECT = "suspect"
    """Open, and LMDB or a row could not be read."""


class Guard:
    """One process's handle on guard file and writer lock of a store. ``open`` and ``close`` are not thread-safe."""

    def __init__(self, directory: Path) -> None:
        """:raises StoreUnavailableError: the files cannot be created or opened."""
        self._directory = directory
        self._joined = False
        with translated_at_open(directory):
            self._writer_lock = WriterLock(directory)
            try:
                self._fd = open_regular(directory / GUARD_FILE, _FLAGS)
            except BaseException:
                self._writer_lock.close()
                raise

    def open(self, opened: Callable[[], None]) -> None:
        """Open the environment, after an integrity check if no other process has it open and a shutdown was unclean.

        :param opened: opens it, and makes the names of new files durable; leaves nothing open if it raises. Called
            again after a damaged environment was quarantined. If this method fails after ``opened`` has returned, the
            caller must close the environment.
        :raises StoreBusyError: another process holds a lock for too long.
        :raises StoreUnavailableError: a damaged environment cannot be renamed, or the guard cannot be written.
        :raises StoreError: the writer lock cannot be written, or the last commit cannot be made durable.
        :raises CorruptStoreError: by ``opened``: the environment is another program's, undamaged, or open in another
            process.
        """
        with self._writer_lock.held(OPENING_PATIENCE_S), translated_at_open(self._directory):
            if self._locked(fcntl.LOCK_EX):
                self._open_alone(opened)
                self._writer_lock.mark(begun=False)
            else:
                if self._writer_lock.interrupted:
                    self._recover()
                opened()
            self._share()

    def writing(self) -> AbstractContextManager[WriterLock]:
        """Hold the writer lock for the length of the block, which records its commit in the lock's file.

        :raises StoreBusyError: another process holds it for too long; the block does not run.
        :raises StoreError: an interrupted commit cannot be made durable; the block does not run, and the next call
            retries.
        """
        return self._writer_lock.held(recover=self._recover)

    def excluding_writers(self) -> AbstractContextManager[WriterLock]:
        """Hold the writer lock for a block that writes nothing; an interrupted commit is not recovered.

        :raises StoreBusyError: another process holds it for too long; the block does not run.
        """
        return self._writer_lock.held()

    def _recover(self) -> None:
        """Make an interrupted commit durable, before the next transaction makes LMDB show it."""
        try:
            self._write_what_was_left()
        except OSError as error:  # also ENOSPC: eviction would not help
            raise StoreError(f"{self._directory}: {error.strerror or error}") from error
        self._writer_lock.mark(begun=False)

    def suspect(self) -> None:
        """Request an integrity check at the next opening that finds no process with the store open."""
        with suppress(OSError):
            self._write(_State.SUSPECT)

    def close(self) -> None:
        """Close the files; the last process to do so records a clean shutdown. Idempotent."""
        if self._joined and self._fd >= 0 and self._locked(fcntl.LOCK_EX):
            with suppress(OSError, StoreError):  # the next opening runs the check
                if self._writer_lock.interrupted:
                    self._recover()
                if self._read() is _State.OPEN:
                    self._write(_State.CLEAN)
        self.forget()

    def forget(self) -> None:
        """Close the files without recording a shutdown, as a forked child does with those of its parent."""
        self._writer_lock.close()
        if self._fd >= 0:
            fd, self._fd = self._fd, -1
            os.close(fd)

    # Opening

    def _open_alone(self, opened: Callable[[], None]) -> None:
        """Open the environment while this process excludes all other writers."""
        before = self._read()
        if before in (_State.OPEN, _State.SUSPECT) and self._exists():
            self._check()
        if before is None and self._exists():
            opened()
            return
        try:
            self._write(_State.OPEN)
            try:
                self._create_or_open(opened)
            except CorruptStoreError as error:
                if inspect(self._directory).verdict not in DAMAGE:
                    raise
                self._quarantine(str(error))
                self._create_or_open(opened)
        except BaseException:
            self._restore(before)
            raise

    def _check(self) -> None:
        """Rename an environment that fails the integrity check; make the content of one that passes durable.

        :raises OSError: it passes, and the disk refuses the write.
        """
        found = inspect(self._directory)
        if found.verdict in DAMAGE:
            self._quarantine(found.reason)
            return
        logger.info("%s: unclean shutdown, integrity check: %s", self._directory, found.reason)
        self._write_what_was_left()

    def _write_what_was_left(self) -> None:
        """Make durable the last commit and the names of new files, which a killed process may not have synced.

        :raises OSError: the disk refuses it.
        """
        with suppress(FileNotFoundError):
            write_again(self._directory / DATA_FILE, meta_bytes(self._directory))
        for name in (".", "segments"):
            with suppress(FileNotFoundError):
                sync_directory(self._directory / name)

    def _create_or_open(self, opened: Callable[[], None]) -> None:
        if self._exists():
            opened()
            return
        os.fsync(self._fd)  # first: it marks an interrupted creation as this program's
        sync_directory(self._directory)
        for directory in self._directory.parents:  # their creator may have been killed before it synced them
            with suppress(OSError):
                sync_directory(directory)
        try:
            opened()
        except BaseException:
            # An unmarked partial file would be refused for ever, and the name of a complete one never be synced. No
            # other process has written it, because this one holds the writer lock.
            with suppress(OSError):
                (self._directory / DATA_FILE).unlink()
            raise

    def _exists(self) -> bool:
        return (self._directory / DATA_FILE).exists()

    def _quarantine(self, reason: str) -> None:
        renamed = quarantine(self._directory)
        logger.warning(
            "the store in %s is damaged (%s): renamed its files (%d bytes) to %s and created an empty store. The "
            "renamed files count towards no capacity; persistkv prune lmdb://%s --quarantined deletes them",
            self._directory,
            reason,
            renamed.num_bytes,
            renamed.directory,
            self._directory,
        )

    # The file

    def _locked(self, kind: int) -> bool:
        try:
            fcntl.flock(self._fd, kind | fcntl.LOCK_NB)
        except BlockingIOError:
            return False
        return True

    def _share(self) -> None:
        """Take the shared lock and record that the store is open: another process may have recorded the opposite."""
        deadline = time.monotonic() + _CLOSING_PATIENCE_S
        while not self._locked(fcntl.LOCK_SH):
            if time.monotonic() >= deadline:
                raise StoreBusyError(
                    f"{self._directory} is busy: another process has been closing it for {_CLOSING_PATIENCE_S} s"
                )
            time.sleep(_CLOSING_NAP_S)
        self._joined = True
        if self._read() in (None, _State.CLEAN):
            self._write(_State.OPEN)

    def _read(self) -> _State | None:
        """Return the recorded state; None if persistkv never opened a store here. Unknown content counts as open."""
        row = os.pread(self._fd, _ROW_BYTES, 0)
        if not row:
            return None
        try:
            return _State(row.decode("ascii", "replace").strip())
        except ValueError:
            return _State.OPEN

    def _write(self, state: _State) -> None:
        os.pwrite(self._fd, state.value.ljust(_ROW_BYTES - 1).encode() + b"\n", 0)

    def _restore(self, before: _State | None) -> None:
        if before is None:
            os.ftruncate(self._fd, 0)
        else:
            self._write(before)


class WriterLock:
    """Lock that writers take before LMDB's own, which has no timeout. Thread-safe, and reentrant within a thread.

    1. Its holder waits for LMDB's write lock for a short time only, because no other persistkv process contends.
    2. It is a flock: the kernel drops it when the process exits. A stopped process keeps it.
    3. Waits are bounded. After a timeout, waits are short until one succeeds, so that a stopped process does not delay
       the other work of the waiting process.
    4. If its file is deleted, writers exclude each other by LMDB's lock alone until the file is created again.
    5. Its file records, for other processes, whether a commit was started and not completed; a machine crash may lose
       this record.

    :raises OSError: its file cannot be opened for writing.
    """

    def __init__(self, directory: Path) -> None:
        self._file = directory / WRITER_LOCK_FILE
        self._threads = threading.RLock()
        self._depth = 0
        self._in_vain = False
        self._fd = open_regular(self._file, _FLAGS)

    @contextmanager
    def held(
        self, patience_s: float | None = None, *, recover: Callable[[], None] | None = None
    ) -> Iterator[WriterLock]:
        """Hold the lock for the length of the block.

        :param patience_s: maximum wait; None: the default.
        :param recover: called first if the last commit was interrupted; if it raises, the block does not run.
        :raises StoreBusyError: another thread or process holds it for longer than the maximum; the block does not run.
        :raises StoreError: it cannot be locked; the block does not run.
        """
        if patience_s is None:
            patience_s = _SHORT_PATIENCE_S if self._in_vain else WRITING_PATIENCE_S
        deadline = time.monotonic() + patience_s
        if not self._threads.acquire(timeout=patience_s):
            raise self._busy("another thread of this process", patience_s)
        try:
            if not self._depth:
                with translated_io(self._file.parent):
                    self._lock(deadline, patience_s)
            self._depth += 1
            try:
                if recover is not None:
                    with translated_io(self._file.parent):
                        interrupted = os.pread(self._fd, 1, 0) == _BEGUN
                    if interrupted:
                        recover()
                yield self
            finally:
                self._depth -= 1
                if not self._depth:
                    fcntl.flock(self._fd, fcntl.LOCK_UN)
        finally:
            self._threads.release()

    @property
    def interrupted(self) -> bool:
        """Whether the last commit that any process started did not complete. The caller must hold the lock.

        :raises StoreError: its file cannot be read.
        """
        with translated_io(self._file.parent):
            return os.pread(self._fd, 1, 0) == _BEGUN

    def mark(self, *, begun: bool) -> None:
        """Record that a commit starts, or that it has completed. The caller must hold the lock.

        :raises StoreError: its file cannot be written.
        """
        with translated_io(self._file.parent):
            os.pwrite(self._fd, _BEGUN if begun else _ENDED, 0)

    def close(self) -> None:
        """Close the file; idempotent. In a forked child, the parent keeps its lock."""
        if self._fd >= 0:
            fd, self._fd = self._fd, -1
            os.close(fd)

    def _lock(self, deadline: float, patience_s: float) -> None:
        self._follow()
        nap_s = _FIRST_NAP_S
        while True:
            try:
                fcntl.flock(self._fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                if time.monotonic() >= deadline:
                    self._in_vain = True
                    raise self._busy(self._holder(), patience_s) from None
                time.sleep(nap_s)
                nap_s = min(2 * nap_s, _LONGEST_NAP_S)
                continue
            if not self._follow():
                self._in_vain = False
                return

    def _follow(self) -> bool:
        """Reopen the lock file if it was replaced or deleted; return whether it was."""
        with suppress(OSError):  # the store's directory is gone or read-only: the present file remains in use
            if not _same(os.fstat(self._fd), self._file):
                fd = open_regular(self._file, _FLAGS)
                os.close(self._fd)
                self._fd = fd
                return True
        return False

    def _holder(self) -> str:
        pid = _holder_pid(os.fstat(self._fd))
        return "another process" if pid is None else f"process {pid}"

    def _busy(self, holder: str, patience_s: float) -> StoreBusyError:
        return StoreBusyError(
            f"{self._file.parent} is busy: {holder} has held its lock for writing for more than {patience_s:g} s"
        )


def _same(held: os.stat_result, file: Path) -> bool:
    try:
        return os.path.samestat(held, file.stat())
    except FileNotFoundError:
        return False


def _holder_pid(held: os.stat_result) -> int | None:
    """Return the PID of the process that holds an exclusive flock on a file; None if the kernel does not name it."""
    place = f"{os.major(held.st_dev):02x}:{os.minor(held.st_dev):02x}:{held.st_ino}"
    try:
        locks = Path("/proc/locks").read_text(encoding="ascii")
    except OSError:
        return None
    for line in locks.splitlines():
        fields = line.split()
        if len(fields) == 8 and fields[1] == "FLOCK" and fields[3] == "WRITE" and fields[5] == place:
            return int(fields[4]) if int(fields[4]) > 0 else None
    return None
