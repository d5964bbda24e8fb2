"""Opening of a store: integrity check after unclean shutdowns, stale readers, LMDB's environment,
damaged directories.

LMDB reads through a memory map, so a damaged environment can kill the process that opens it.
Invariants:

1. The guard file contains ``open`` from before the first writer opens the environment until the
   last one closes it. Each writer holds a shared lock on the file; the kernel drops the lock when
   the process exits. ``open`` without a lock means an unclean shutdown.
2. After an unclean shutdown, a child process checks the environment first (``fsck``), so damage
   kills the child and not the engine. After a clean shutdown there is no check.
3. An environment that passes the check is opened, regardless of how many processes died in it: an
   out-of-memory crash loop is no damage. An environment that fails the check is renamed, never
   changed or deleted, and only while no process has it open for writing.
4. Content that an unclean shutdown or a failed commit left is made durable before the next
   transaction, by the process that opens the store or by those that have it open. A second fsync
   after a failed one proves nothing, so the bytes that may be lost are *written* again: LMDB's two
   meta pages. Everything that either page references was durable before the page was written. As
   long as the disk refuses this write, no process writes, and nothing is renamed.
5. With an empty guard file the environment may belong to another program: it is not changed. The
   same applies to a store of another release.
6. If a store is refused, nothing stays open.
"""

from __future__ import annotations

import enum
import errno
import fcntl
import logging
import os
import shutil
import stat
import struct
import subprocess
import sys
import time
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import lmdb

from persistkv.errors import (
    CorruptStoreError,
    ProcessIdInUseError,
    StoreBusyError,
    StoreError,
)
from persistkv_lmdb import files
from persistkv_lmdb.layout import DATABASES
from persistkv_lmdb.repair.fsck import DAMAGE, inspect

logger = logging.getLogger(__name__)

# seconds to wait for another process that closes the store: it holds the guard for microseconds, or
# for the time of three syncs
CLOSING_PATIENCE_S = 5.0
# seconds between two attempts to lock the guard file during this wait
_CLOSING_NAP_S = 0.001
_ROW_BYTES = 32  # content of the guard file: a state, padded with spaces
_QUARANTINE_PREFIX = "damaged-"
_MAX_READERS = 512  # number of slots in LMDB's table of readers
_CLEARING_PATIENCE_S = 30.0  # seconds to wait for the child that clears stale readers
# offset in the guard file, behind its content, of the bytes that are locked for claims
_CLAIMS_AT = 1 << 20
# the C struct ``flock``: type, whence, start, length, process
_LOCK_REQUEST = struct.Struct("hhqqi4x")
_CLEARING_PROGRAM = """
import sys
sys.path[:] = {path!r}
import lmdb
with lmdb.open({store!r}, readonly=True, create=False, max_readers={readers}) as env:
    env.reader_check()
"""


class _GuardState(enum.StrEnum):
    """State in the guard file; the values are its content."""

    CLEAN = "clean"  # the last writer has closed the store
    # a writer has the store open, or the last one exited without closing it
    OPEN = "open"
    # a process could not read a row or a page of LMDB; closing the store keeps this state
    SUSPECT = "suspect"


class Guard:
    """One process's handle on a store's writer lock, and on its guard file, which records unclean
    shutdowns.

    ``open`` and ``close`` are not thread-safe.

    :raises StoreUnavailableError: the two files cannot be created or opened.
    """

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self._joined = False
        """Whether ``open`` has succeeded: this process holds a shared lock on the guard file."""
        with files.translated_at_open(directory):
            self.lock = files.WriterLock(directory)
            try:
                self._file = directory / files.GUARD_FILE
                self._fd = files.open_regular(self._file, os.O_RDWR | os.O_CREAT)
                self._id = files.file_id(self._fd)
            except BaseException:
                self.lock.close()
                raise

    def open(self, open_environment: Callable[[], None]) -> None:
        """Open the environment, after an integrity check if no other process has it open and a
        shutdown was unclean.

        :param open_environment: opens or creates the environment, and makes the names of new files
            durable. It must leave nothing open if it raises, and is called again after a damaged
            environment was quarantined. If this method fails after ``open_environment`` has
            returned, the caller must close the environment.
        :raises StoreBusyError: another process holds a lock for too long.
        :raises StoreUnavailableError: a damaged environment cannot be renamed, or the guard cannot
            be written.
        :raises StoreError: the writer lock cannot be written, or the last commit cannot be made
            durable.
        :raises CorruptStoreError: ``open_environment`` raised it, and the environment is another
            program's, passes the integrity check, or is open in another process.
        """
        with (
            self.lock.held(files.OPENING_PATIENCE_S),
            files.translated_at_open(self._directory),
        ):
            # granted if no process has the store open for writing
            is_alone = self._try_lock(fcntl.LOCK_EX)
            if is_alone:
                self._open_alone(open_environment)
                # remove the mark: the opening has made an interrupted commit durable, or
                # quarantined its catalogue
                self.lock.mark_commit(begun=False)
            else:
                # no check is possible, because other processes have the store open, and may write
                if self.lock.has_interrupted_commit:
                    self.recover()
                open_environment()
            self._join()

    @contextmanager
    def excluding_writers(self) -> Iterator[None]:
        """Exclude all other processes that write the store, within the ``with`` statement.
        Processes that want to open the store for writing stay excluded until ``close``.

        :raises StoreBusyError: another process has the store open for writing; the block does not
            run.
        """
        with self.lock.held(files.OPENING_PATIENCE_S):
            if not self._try_lock(fcntl.LOCK_EX):
                raise StoreBusyError(
                    f"{self._directory} is busy: another process has it open for writing; stop "
                    f"it first"
                )
            # The writer lock ends with the statement. The lock on the guard file stays, so that no
            # process opens the store before the caller has closed its files.
            yield

    def recover(self) -> None:
        """Make an interrupted commit durable before the next transaction. The caller must hold the
        writer lock.

        :raises ReplacedError: the store at the path, to which this would write, is another one. It
            may have replaced this one during the wait for the lock.
        :raises StoreError: the disk refuses the write.
        """
        if not self.is_current():
            raise files.ReplacedError(
                f"{self._directory}: an interrupted commit is not recovered, because files of the "
                f"store were removed or replaced"
            )
        # raise no StoreFullError, which would cause evictions that do not help
        with files.translated_io(self._directory, full=StoreError):
            self._sync_last_commit()
        self.lock.mark_commit(begun=False)

    def is_current(self) -> bool:
        """Return whether the lock file and the guard file are still those at their paths."""
        is_same_guard = self._id == files.file_id(self._file)
        return is_same_guard and self.lock.is_current()

    def claim(self, excluded: Collection[int]) -> int:
        """Claim a writer's number for as long as this process has the guard file open, and return
        it: the smallest number that is not excluded and that no living process has. The caller must
        hold the writer lock, so that no reservation under this number is being released meanwhile.

        :raises StoreError: the file system refuses the lock.
        """
        number = 0
        with files.translated_io(self._directory, full=StoreError):
            while number in excluded or not self._try_claim(number):
                number += 1
        return number

    def _try_claim(self, number: int) -> bool:
        """Claim a writer's number, by a lock on its byte; return False if another process has
        it."""
        request = _lock_request(number)
        try:
            fcntl.fcntl(self._fd, fcntl.F_OFD_SETLK, request)
        except (BlockingIOError, PermissionError):
            # systems report a conflicting lock as EAGAIN or as EACCES
            return False
        return True

    def is_claimed(self, number: int) -> bool:
        """Return whether another process that lives has claimed a writer's number."""
        request = _lock_request(number)
        # the kernel answers with the type F_UNLCK if the request would be granted
        with files.translated_io(self._directory, full=StoreError):
            answer = fcntl.fcntl(self._fd, fcntl.F_OFD_GETLK, request)
        lock_type, *_ = _LOCK_REQUEST.unpack(answer)
        return bool(lock_type != fcntl.F_UNLCK)

    def mark_suspect(self) -> None:
        """Have the store checked by the next process that opens it for writing while no other has
        it open. Ignore write errors.
        """
        with suppress(OSError):
            self._write_state(_GuardState.SUSPECT)

    def close(self) -> None:
        """Close the lock file and the guard file; idempotent.

        The last process that has the store open for writing records a clean shutdown, unless the
        store is suspect or an interrupted commit cannot be made durable.
        """
        # after a failed ``open``, leave the recorded state as it is
        is_open = self._joined and self._fd >= 0
        # the exclusive lock shows that this is the last process that has the store open
        if is_open and self._try_lock(fcntl.LOCK_EX):
            # after an error, the recorded state is not clean, and the next opening runs the check
            with suppress(OSError, StoreError):
                if self.lock.has_interrupted_commit:
                    self.recover()
                # leave the state SUSPECT as it is
                if self._read_state() is _GuardState.OPEN:
                    self._write_state(_GuardState.CLEAN)
        self.close_files()

    def close_files(self) -> None:
        """Close both files without recording a clean shutdown; idempotent. A forked child calls
        only this, because its parent has the store open."""
        self.lock.close()
        if self._fd >= 0:
            fd = self._fd
            self._fd = -1
            os.close(fd)

    def _open_alone(self, open_environment: Callable[[], None]) -> None:
        """Open the environment while this process excludes other writers: check it after an unclean
        shutdown, and create it if it is missing or was quarantined. On failure, restore the
        recorded state."""
        # None: persistkv has never opened a store here
        state_before = self._read_state()
        exists = (self._directory / files.DATA_FILE).exists()
        if exists and state_before is None:
            # This is another program's environment, which ``open_environment`` refuses, or a store
            # whose guard file was removed. In both cases, nothing may be renamed.
            open_environment()
            return
        was_unclean = state_before in (_GuardState.OPEN, _GuardState.SUSPECT)
        is_usable = self._quarantine_unusable(exists=exists, was_unclean=was_unclean)
        try:
            # record it before the environment is opened: if this process is killed, the next one
            # checks the store
            self._write_state(_GuardState.OPEN)
            # False: there is no environment, or it was quarantined
            is_open = is_usable and self._open_existing(open_environment)
            if not is_open:
                self._create_environment(open_environment)
        except BaseException:
            self._restore_state(state_before)
            raise

    def _quarantine_unusable(self, *, exists: bool, was_unclean: bool) -> bool:
        """Rename the store's files if they cannot be used; return whether there is an environment
        to open.

        :param exists: there is a ``data.mdb``.
        :param was_unclean: the last shutdown was unclean, so the environment must be checked.
        """
        if exists and was_unclean and not self._check_or_quarantine():
            return False
        # The segment files have lost their catalogue. A new one would let their packs be
        # overwritten.
        if _lacks_catalogue(self._directory):
            self._quarantine(f"its {files.DATA_FILE} is missing or empty")
            return False
        return exists

    def _restore_state(self, state: _GuardState | None) -> None:
        """Record a state again that ``_read_state`` returned earlier."""
        if state is None:
            os.ftruncate(self._fd, 0)
        else:
            self._write_state(state)

    def _check_or_quarantine(self) -> bool:
        """Check the environment after an unclean shutdown. If it is damaged, rename it and return
        False. Otherwise make its content durable and return True. An environment whose check did
        not complete counts as undamaged.
        """
        found = inspect(self._directory)
        if found.result in DAMAGE:
            self._quarantine(found.reason)
            return False
        logger.info(
            "%s: unclean shutdown, integrity check: %s", self._directory, found.reason
        )
        # a process that was killed may not have synced its last commit
        self._sync_last_commit()
        return True

    def _open_existing(self, open_environment: Callable[[], None]) -> bool:
        """Open the environment. Rename it and return False if it turns out to be damaged."""
        try:
            open_environment()
        except CorruptStoreError as error:
            if inspect(self._directory).result not in DAMAGE:
                raise
            self._quarantine(str(error))
            return False
        return True

    def _sync_last_commit(self) -> None:
        """Make durable the last commit and the names of new files, which a killed process may not
        have synced.

        :raises OSError: the disk refuses it.
        """
        with suppress(FileNotFoundError):
            files.rewrite_meta_pages(self._directory)
        for name in (".", files.SEGMENT_DIRECTORY):
            with suppress(FileNotFoundError):
                files.sync_directory(self._directory / name)

    def _create_environment(self, open_environment: Callable[[], None]) -> None:
        """Create the environment, and make the names of its directories durable."""
        # First, make the guard file durable: it shows that an interrupted creation is this
        # program's.
        os.fsync(self._fd)
        files.sync_directory(self._directory)
        # sync the parents, too: their creator may have been killed before it did
        for directory in self._directory.parents:
            with suppress(OSError):
                files.sync_directory(directory)
        try:
            open_environment()
        except BaseException:
            # A partial file, without the format row, would be refused for ever; a complete one
            # would be opened although its name may not be durable. This process holds the writer
            # lock, so no other one has written the file.
            with suppress(OSError):
                (self._directory / files.DATA_FILE).unlink()
            raise

    def _quarantine(self, reason: str) -> None:
        """Rename the files of the damaged environment into a new directory inside the store's.

        ``data.mdb`` is renamed last: after an interruption, the integrity check fails again and
        renames the rest.
        """
        store = self._directory
        size = 0  # bytes on disk of the renamed files
        target = quarantine_directory(store)
        keys = store / files.KEY_FILE
        # copy the keys: a rebuild of the renamed files needs them to open packs, and the new store
        # uses them, too
        if keys.exists():
            shutil.copy(keys, target / files.KEY_FILE)
        for name in (files.SEGMENT_DIRECTORY, files.LOCK_FILE, files.DATA_FILE):
            file = store / name
            if file.exists():
                size += _size(file)
                file.rename(target / name)
        files.sync_directory(target)
        files.sync_directory(store)
        message = (
            "the store in %s is damaged (%s): renamed its files (%d bytes) to %s and created an "
            "empty store. The renamed files count towards no capacity; persistkv prune lmdb://%s "
            "--quarantined deletes them. With placement extents, persistkv rebuild lmdb://%s finds "
            "their packs again"
        )
        logger.warning(message, store, reason, size, target, store, target)

    def _try_lock(self, kind: int) -> bool:
        """Try to lock the guard file without waiting; return whether that succeeded. A lock that
        this process has on the file is replaced.

        :param kind: ``LOCK_EX`` or ``LOCK_SH``.
        """
        try:
            fcntl.flock(self._fd, kind | fcntl.LOCK_NB)
        except BlockingIOError:
            return False
        return True

    def _join(self) -> None:
        """Take a shared lock on the guard file, for as long as the store is open, and record there
        that it is open."""
        # wait for a process that closes the store, and holds the exclusive lock for a short time
        deadline = time.monotonic() + CLOSING_PATIENCE_S
        while not self._try_lock(fcntl.LOCK_SH):
            if time.monotonic() >= deadline:
                raise StoreBusyError(
                    f"{self._directory} is busy: another process has been closing it for "
                    f"{CLOSING_PATIENCE_S} s"
                )
            time.sleep(_CLOSING_NAP_S)
        self._joined = True
        # read again, because a process that closed the store meanwhile has recorded a clean
        # shutdown
        is_recorded = self._read_state() in (_GuardState.OPEN, _GuardState.SUSPECT)
        if not is_recorded:
            self._write_state(_GuardState.OPEN)

    def _read_state(self) -> _GuardState | None:
        """Return the recorded state; None if persistkv never opened a store here. Unknown content
        counts as open."""
        row = os.pread(self._fd, _ROW_BYTES, 0)
        if not row:
            return None
        text = row.decode("ascii", "replace").strip()
        try:
            return _GuardState(text)
        except ValueError:
            return _GuardState.OPEN

    def _write_state(self, state: _GuardState) -> None:
        """Record a state, without a sync."""
        # padded to a fixed length, so that no part of a longer state remains
        line = state.value.ljust(_ROW_BYTES - 1) + "\n"
        os.pwrite(self._fd, line.encode(), 0)


def _lacks_catalogue(store: Path) -> bool:
    """Return whether a store has segment files with content, but no ``data.mdb`` or an empty one:
    packs that only a rebuild can list. Links do not count."""
    if files.has_catalogue(store):
        return False
    segments = store / files.SEGMENT_DIRECTORY
    for file in segments.glob("*.seg"):
        status = file.lstat()
        if stat.S_ISREG(status.st_mode) and status.st_size:
            return True
    return False


def _lock_request(number: int) -> bytes:
    """Return the argument of ``fcntl`` that locks the byte for a writer's number.

    The lock belongs to the open file, not to the process as those of LMDB do, so that closing
    another descriptor of the same file keeps it.
    """
    offset = _CLAIMS_AT + number
    length = 1
    process = 0  # 0 is required for locks of open files
    return _LOCK_REQUEST.pack(fcntl.F_WRLCK, os.SEEK_SET, offset, length, process)


def open_lmdb(path: Path, *, read_only: bool) -> lmdb.Environment:
    """Open an LMDB environment with the recorded map size, and clear stale readers with this
    process's PID.

    LMDB's reader table identifies processes by PID, and PIDs repeat across PID namespaces
    (containers). LMDB never checks whether the process that left a slot with its own PID is dead. A
    container that was killed during a read and restarted with the same PID would therefore keep the
    snapshot of that read alive for ever, and commits would find no free pages. A process with
    another PID does check, so a child process clears such slots. A live process with the same PID
    in another PID namespace excludes this one: LMDB locks a byte at the offset of the PID.

    :raises ProcessIdInUseError: a process in another PID namespace uses the store under this
        process's PID.
    :raises CorruptStoreError: ``data.mdb`` is shorter than it was and damaged; it was not changed.
    :raises lmdb.Error: the environment cannot be opened, also because of other damage.
    """
    if files.is_cut_short(path):
        found = inspect(path)
        if found.result in DAMAGE:
            raise CorruptStoreError(f"{path}: {found.reason}")
    env = _open_environment(path, read_only)
    if _has_reader_slot(env):
        # Nothing of this process reads, so the slot is stale, or a process in another PID namespace
        # has the same PID. Closing also releases LMDB's lock for this PID: the child detects
        # whether another process holds it, and leaves its slots alone.
        env.close()
        _clear_from_child(path)
        env = _open_environment(path, read_only)
    return env


def _has_reader_slot(env: lmdb.Environment) -> bool:
    """Return whether LMDB's reader table has a slot with the PID of this process, which has just
    opened the environment and not read yet."""
    lines = env.readers().splitlines()[1:]  # leave out the header
    for line in lines:
        pid, *_ = line.split()
        if int(pid) == os.getpid():
            return True
    return False


def _open_environment(path: Path, read_only: bool) -> lmdb.Environment:
    """Open an LMDB environment, and leave its readers as they are; errors as in ``open_lmdb``."""
    try:
        return lmdb.open(
            str(path),
            # 0: the size that the file records; ``Database.remap`` sets the bound
            map_size=0,
            readonly=read_only,
            mode=0o600,
            create=False,
            max_dbs=len(DATABASES),
            max_readers=_MAX_READERS,
            # no spare transactions, which keep their reader slots, even across a fork
            max_spare_txns=0,
        )
    except lmdb.LockError as error:
        # EAGAIN means that another process has the lock of this PID
        if error.code != errno.EAGAIN:
            raise
        raise ProcessIdInUseError(
            f"{path}: a process in another PID namespace (container) uses the store with the "
            f"same PID {os.getpid()}; start this process again to get another PID, or let the "
            f"containers share one PID namespace"
        ) from None


def _clear_from_child(store: Path) -> None:
    """Clear the stale readers of an environment in a child process. Failures are logged."""
    # LMDB clears the readers of dead processes, but none with the PID of the process that calls it
    program = _CLEARING_PROGRAM.format(
        path=sys.path, store=str(store), readers=_MAX_READERS
    )
    try:
        subprocess.run(
            [sys.executable, "-I", "-c", program],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            check=True,
            timeout=_CLEARING_PATIENCE_S,
        )
        logger.warning(
            "%s: cleared readers that an earlier process with PID %d left",
            store,
            os.getpid(),
        )
    except (OSError, subprocess.SubprocessError) as error:
        logger.warning(
            "%s: stale readers with this process's PID could not be cleared: %s",
            store,
            error,
        )


def quarantine_directory(store: Path) -> Path:
    """Create and return a directory inside the store's, for damaged files.

    :raises OSError: it cannot be created.
    """
    now = time.strftime("%Y%m%dT%H%M%SZ", time.gmtime())
    name = f"{_QUARANTINE_PREFIX}{now}"
    target = store / name
    number = 1
    # append a number to further names within the same second
    while target.exists():
        number += 1
        target = store / f"{name}-{number}"
    target.mkdir(0o700)
    return target


def quarantined(store: Path) -> dict[Path, int]:
    """Return the directories of a store's quarantined environments, oldest first, and the bytes on
    disk of each."""
    found = {}
    for entry in sorted(store.glob(f"{_QUARANTINE_PREFIX}*")):
        if entry.is_dir() and not entry.is_symlink():
            with suppress(OSError):  # another process is deleting it
                found[entry] = _size(entry)
    return found


def delete_quarantined(store: Path) -> int:
    """Delete the quarantined environments of a store, oldest first; return the bytes on disk that
    they took."""
    found = quarantined(store)
    for directory in found:
        with files.translated_io(directory):
            shutil.rmtree(directory)
    return sum(found.values())


def _size(path: Path) -> int:
    """Return the bytes on disk of a file, or of a directory with its content."""
    blocks = 0
    for entry in (path, *path.rglob("*")):
        blocks += entry.lstat().st_blocks
    return files.STAT_BLOCK_BYTES * blocks
