"""Detects unclean shutdowns of a store and checks its integrity before the next writer opens it.

LMDB reads through a memory map, so a damaged environment can kill the process that opens it. Invariants:

1. The guard file says ``open`` from before the first writer opens the environment until the last one closes it. Each
   writer holds a shared lock on the file; the kernel drops the lock when the process exits. ``open`` without a lock
   means an unclean shutdown.
2. After an unclean shutdown, a child process checks the environment first (``fsck``), so damage kills the child
   and not the engine. After a clean shutdown there is no check.
3. An environment that passes the check is opened, regardless of how many processes died in it: an out-of-memory crash
   loop is no damage. An environment that fails the check is renamed, never changed or deleted, and only while no
   process has it open for writing.
4. Whatever an unclean shutdown or a failed commit left is made durable before the next transaction, by the process that
   opens the store or by those that have it open. A second fsync after a failed one proves nothing, so the bytes that
   may be lost are *written* again: LMDB's two meta pages. Everything that either page references was durable before the
   page was written. As long as the disk refuses this write, no process writes, and nothing is renamed.
5. With an empty guard file the environment may belong to another program: it is left alone. So is a store of another
   release.
"""

from __future__ import annotations

import enum
import fcntl
import logging
import os
import time
from collections.abc import Callable
from contextlib import AbstractContextManager, suppress
from pathlib import Path

from persistkv.errors import CorruptStoreError, StoreBusyError, StoreError
from persistkv_lmdb.environment.errors import translated_at_open
from persistkv_lmdb.environment.writer_lock import WriterLock
from persistkv_lmdb.files import open_regular, sync_directory, write_again
from persistkv_lmdb.layout import DATA_FILE, meta_bytes
from persistkv_lmdb.recovery.fsck import DAMAGE, inspect
from persistkv_lmdb.recovery.quarantine import quarantine

logger = logging.getLogger(__name__)

FILE_NAME = "guard"
OPENING_PATIENCE_S = 30.0
"""For the lock for writing: another process may hold it while it looks at what was left."""
_ROW_BYTES = 32
_PATIENCE_S = 5.0  # for another process that closes: it holds the lock alone for microseconds, or three syncs
_NAP_S = 0.001


class _State(str, enum.Enum):
    """What the guard file says; the values are its content."""

    CLEAN = "clean"
    OPEN = "open"
    SUSPECT = "suspect"
    """Open, and LMDB or one of its rows could not be read."""


class Guard:
    """One process's part in a store that it has open for writing. Thread-safe, but for ``open`` and ``close``."""

    def __init__(self, directory: Path) -> None:
        """Nothing is looked at yet.

        :raises StoreUnavailableError: its files cannot be made or opened.
        """
        self._directory = directory
        self._joined = False
        with translated_at_open(directory):
            self._writer_lock = WriterLock(directory)
            try:
                self._fd = open_regular(directory / FILE_NAME, os.O_RDWR | os.O_CREAT)
            except BaseException:
                self._writer_lock.close()
                raise

    def open(self, opened: Callable[[], None]) -> None:
        """Open the environment, where nobody else alive has it open only after a look at how that ended.

        :param opened: opens it, and makes the names of the files that it makes durable; leaves nothing open where it
            raises. Called again where what it met was ours, damaged, and is moved aside. Where this fails after it has
            returned, what it opened is the caller's to close.
        :raises StoreBusyError: another process keeps it from being written.
        :raises StoreUnavailableError: what is damaged cannot be moved aside, or the guard not be written.
        :raises StoreError: the lock for writing cannot be, or what a process that was killed left not be made durable.
        :raises CorruptStoreError: by ``opened``: not ours, not damaged, or somebody alive has it open.
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
        """The lock for writing, for the length of the block, which marks in it that it commits.

        :raises StoreBusyError: another process holds it for too long; the block does not run.
        :raises StoreError: what a commit left that did not end cannot be made durable; the block does not run, and the
            next one tries again.
        """
        return self._writer_lock.held(recover=self._recover)

    def excluding_writers(self) -> AbstractContextManager[WriterLock]:
        """The same for a block that writes nothing: what a commit left that did not end stays as it is.

        :raises StoreBusyError: another process holds it for too long; the block does not run.
        """
        return self._writer_lock.held()

    def _recover(self) -> None:
        """Make durable what a commit left that did not end: LMDB shows it once the next transaction begins."""
        try:
            self._write_what_was_left()
        except OSError as error:  # a full disk, too: to evict would not help
            raise StoreError(f"{self._directory}: {error.strerror or error}") from error
        self._writer_lock.mark(begun=False)

    def suspect(self) -> None:
        """Something of it did not read: the next one to open it while nobody has it open is to look first."""
        with suppress(OSError):
            self._write(_State.SUSPECT)

    def close(self) -> None:
        """Leave; the last one to leave ends it cleanly. Idempotent."""
        if self._joined and self._fd >= 0 and self._locked(fcntl.LOCK_EX):
            with suppress(OSError, StoreError):  # it is looked at by the next to open it
                if self._writer_lock.interrupted:
                    self._recover()
                if self._read() is _State.OPEN:
                    self._write(_State.CLEAN)
        self.forget()

    def forget(self) -> None:
        """Let go of the files without a word: what a fork's child does with its parent's."""
        self._writer_lock.close()
        if self._fd >= 0:
            fd, self._fd = self._fd, -1
            os.close(fd)

    # Opening

    def _open_alone(self, opened: Callable[[], None]) -> None:
        """Open while no other process has the store open for writing, nor can open it."""
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
        """Rename an environment that fails the integrity check; make durable what is left in one that passes.

        :raises OSError: it passes, and the disk refuses the write.
        """
        found = inspect(self._directory)
        if found.verdict in DAMAGE:
            self._quarantine(found.reason)
            return
        logger.info("%s: unclean shutdown, integrity check: %s", self._directory, found.reason)
        self._write_what_was_left()

    def _write_what_was_left(self) -> None:
        """A process that was killed may have left a commit that reads and is not durable yet, or a new file's name.

        :raises OSError: the disk does not take it now.
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
        os.fsync(self._fd)  # first: it tells a creation that a power loss cut short from somebody else's files
        sync_directory(self._directory)
        for directory in self._directory.parents:  # whoever made them may have been killed before he did
            with suppress(OSError):
                sync_directory(directory)
        try:
            opened()
        except BaseException:
            # Half of a file that nothing marks as ours would be refused for ever, and nobody would sync the name of a
            # whole one. No other process has written it: that takes the lock that is held here.
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
        """Show that this process lives, and that the store is open: another's last close may have said otherwise."""
        deadline = time.monotonic() + _PATIENCE_S
        while not self._locked(fcntl.LOCK_SH):
            if time.monotonic() >= deadline:
                raise StoreBusyError(
                    f"{self._directory} is busy: another process has been closing it for {_PATIENCE_S} s"
                )
            time.sleep(_NAP_S)
        self._joined = True
        if self._read() in (None, _State.CLEAN):
            self._write(_State.OPEN)

    def _read(self) -> _State | None:
        """None: no persistkv process ever opened a store here. Content that is not a state counts as open."""
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
