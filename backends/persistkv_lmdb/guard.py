"""Knows how a store's writers ended, and looks before the next one trusts what they left.

LMDB reads through a memory map: a damaged environment can end the process that opens it. So:

1. From before it is opened for writing until its last writer closes it, the store's guard file says ``open``, and each
   writer holds a shared lock on that file, which ends with its process. ``open``, and no lock: its end was not clean.
2. After such an end a process of its own looks at the environment first (``inspection``): whatever that one meets, this
   one lives. Where the end was clean, nobody looks.
3. What is damaged is moved aside, never changed, and only while nobody alive has it open for writing.
4. Where three processes in a row died while they opened it or wrote, before any of them had committed, it is moved
   aside although nothing is found: no damage ends processes for ever. Other ends, however many, do not count.
5. What such an end left, or a commit that failed, is made durable before anybody promises anything of it or writes over
   what it freed: by the next to open the store, and by those that have it open, before their next transaction. To ask
   the disk again after it has lost something proves nothing, so what may be lost is *written* again. That is LMDB's two
   meta pages: all that either of them names was durable before it was written, and what neither names is nobody's.
   As long as the disk refuses, nobody writes, and nothing is moved.
6. An empty guard file says nothing: what lies beside it may be somebody else's, and is left as it is. So is another
   release's store, whatever the guard says.
"""

from __future__ import annotations

import fcntl
import logging
import os
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, suppress
from pathlib import Path
from typing import NamedTuple

from persistkv.errors import CorruptStoreError, StoreBusyError, StoreError
from persistkv_lmdb.aside import move_aside
from persistkv_lmdb.errors import translated_at_open
from persistkv_lmdb.inspection import DAMAGE, inspect, meta_bytes
from persistkv_lmdb.layout import DATA_FILE
from persistkv_lmdb.syncs import sync_directory, write_again
from persistkv_lmdb.writer_lock import WriterLock

logger = logging.getLogger(__name__)

FILE_NAME = "guard"
OPENING_PATIENCE_S = 30.0
"""For the lock for writing: another process may hold it while it looks at what was left."""
_CLEAN, _OPEN, _SUSPECT = "clean", "open", "suspect"
_ROW_BYTES = 32
_MAX_DEATHS = 3
_PATIENCE_S = 5.0  # for another process that closes: it holds the lock alone for microseconds, or three syncs
_NAP_S = 0.001


class _State(NamedTuple):
    word: str
    """``clean``, ``open``, or ``suspect``: open, and LMDB or a row of it did not read."""
    deaths: int = 0
    """Processes in a row that died while they opened it or in a write transaction, before any had committed."""


class Guard:
    """One process's part in a store that it has open for writing. Thread-safe, but for ``open`` and ``close``."""

    def __init__(self, directory: Path) -> None:
        """Nothing is looked at yet.

        :raises StoreUnavailableError: its files cannot be made or opened.
        """
        self._directory = directory
        self._joined = self._proven = False
        self._deaths = 0
        with translated_at_open(directory):
            self._writer_lock = WriterLock(directory)
            try:
                self._fd = os.open(directory / FILE_NAME, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
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
                self._recover()
                opened()
            self._share()

    @contextmanager
    def writing(self) -> Iterator[None]:
        """The lock for writing, for the length of the block.

        :raises StoreBusyError: another process holds it for too long; the block does not run.
        :raises StoreError: what a commit left that did not end cannot be made durable; the block does not run, and the
            next one tries again.
        """
        with self._writer_lock.held():
            self._recover()
            if self._proven:
                yield
                return
            self._set_deaths(self._deaths + 1)
            try:
                yield
            finally:
                self._set_deaths(self._deaths)

    def excluding_writers(self) -> AbstractContextManager[None]:
        """The same for a block that writes nothing: what a commit left that did not end stays as it is.

        :raises StoreBusyError: another process holds it for too long; the block does not run.
        """
        return self._writer_lock.held()

    def begin_commit(self) -> None:
        """LMDB is to be asked to commit: if this process is killed in there, or it fails, the next one finds out."""
        self._writer_lock.mark(begun=True)

    def end_commit(self) -> None:
        """It is durable. Where that cannot be said, the next transaction syncs what is durable."""
        with suppress(StoreError):
            self._writer_lock.mark(begun=False)

    def _recover(self) -> None:
        """Make durable what a commit left that did not end: LMDB shows it once the next transaction begins."""
        if not self._writer_lock.interrupted:
            return
        try:
            self._write_what_was_left()
        except OSError as error:  # a full disk, too: to evict would not help
            raise StoreError(f"{self._directory}: {error.strerror or error}") from error
        self._writer_lock.mark(begun=False)

    def committed(self) -> None:
        """A commit succeeded: whatever ends this process, the store can be written."""
        if not self._proven:
            self._proven, self._deaths = True, 0
            self._set_deaths(0)

    def suspect(self) -> None:
        """Something of it did not read: the next one to open it while nobody has it open is to look first."""
        with suppress(OSError):
            self._write(_State(_SUSPECT, self._deaths))

    def close(self) -> None:
        """Leave; the last one to leave ends it cleanly. Idempotent."""
        if self._joined and self._fd >= 0 and self._locked(fcntl.LOCK_EX):
            with suppress(OSError, StoreError):  # it is looked at by the next to open it
                self._recover()
                state = self._read()
                if state is not None and state.word == _OPEN:
                    self._write(_State(_CLEAN))
        self.forget()

    def forget(self) -> None:
        """Let go of the files without a word: what a fork's child does with its parent's."""
        self._writer_lock.close()
        if self._fd >= 0:
            fd, self._fd = self._fd, -1
            os.close(fd)

    # Opening

    def _open_alone(self, opened: Callable[[], None]) -> None:
        """Nobody alive has it open for writing, and nobody can open it meanwhile."""
        before = self._read()
        self._deaths = self._look(before)
        if before is None and self._exists():
            opened()
            return
        try:
            self._write(_State(_OPEN, self._deaths + 1))
            try:
                self._create_or_open(opened)
            except CorruptStoreError as error:
                if inspect(self._directory).verdict not in DAMAGE:
                    raise
                self._move_aside(str(error))
                self._create_or_open(opened)
        except BaseException:
            self._restore(before)
            raise
        self._set_deaths(self._deaths)

    def _look(self, before: _State | None) -> int:
        """Move aside what is not to be opened.

        :returns: ``deaths`` of what is there now.
        """
        if before is None or before.word == _CLEAN or not self._exists():
            return 0
        if (reason := self._damage(before)) is not None:
            self._move_aside(reason)
            return 0
        return before.deaths

    def _damage(self, before: _State) -> str | None:
        """Why it is to be moved aside; None: it is good, and what was left is durable.

        :raises OSError: it is good, and the disk does not take it now.
        """
        if before.deaths >= _MAX_DEATHS:
            return f"{before.deaths} processes in a row died while they opened it or wrote"
        found = inspect(self._directory)
        if found.verdict in DAMAGE:
            return found.reason
        logger.info("%s was not closed; it was looked at: %s", self._directory, found.reason)
        self._write_what_was_left()
        return None

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

    def _move_aside(self, reason: str) -> None:
        where, size, gone = move_aside(self._directory)
        logger.warning(
            "the store in %s is damaged (%s): its files (%d bytes) are now in %s, and an empty one is made. They count "
            "towards no capacity: delete them once nobody wants to look at them%s",
            self._directory,
            reason,
            size,
            where,
            f"; those from before were deleted: {', '.join(gone)}" if gone else "",
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
        state = self._read()
        if state is None or state.word == _CLEAN:
            self._write(_State(_OPEN))

    def _set_deaths(self, deaths: int) -> None:
        """Where it cannot be written, nobody counts."""
        with suppress(OSError):
            state = self._read()
            if state is None or state.deaths != deaths:
                self._write(_State(_OPEN if state is None else state.word, deaths))

    def _read(self) -> _State | None:
        """None: nothing of ours was ever opened here. What does not read says that it was not closed."""
        row = os.pread(self._fd, _ROW_BYTES, 0)
        if not row:
            return None
        word, _, deaths = row.decode("ascii", "replace").strip().partition(" ")
        if word not in (_CLEAN, _OPEN, _SUSPECT) or not (deaths.isascii() and deaths.isdigit()):
            return _State(_OPEN)
        return _State(word, int(deaths))

    def _write(self, state: _State) -> None:
        os.pwrite(self._fd, f"{state.word} {state.deaths}".ljust(_ROW_BYTES - 1).encode() + b"\n", 0)

    def _restore(self, before: _State | None) -> None:
        if before is None:
            os.ftruncate(self._fd, 0)
        else:
            self._write(before)
