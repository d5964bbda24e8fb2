"""The lock that persistkv's writers take before LMDB's own, whose wait has no bound.

1. Who holds it holds LMDB's write lock next to nobody: a wait for that one is short.
2. It is the kernel's (flock): it ends with the process that holds it. A process that is stopped keeps it.
3. A wait ends within its bound. After a wait that was in vain, those that follow are short until one is not, so that
   a stopped process does not hold up all that the waiting one does beside writing.
4. Where its file is deleted, writers exclude each other by LMDB's lock alone until the file is made again.
5. Its file says whether a commit was begun and has not ended well. That is for other processes, and not kept beyond a
   crash of the machine.
"""

from __future__ import annotations

import fcntl
import os
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from persistkv.errors import StoreBusyError
from persistkv_lmdb.environment.errors import translated_io
from persistkv_lmdb.files import open_regular

FILE_NAME = "writer.lock"
PATIENCE_S = 10.0
"""Several times what a commit of 128 MiB takes on a slow disk."""
_SHORT_PATIENCE_S = 0.2
_FIRST_NAP_S = 0.000_2
_LONGEST_NAP_S = 0.005
_BEGUN, _ENDED = b"+", b"-"
_FLAGS = os.O_RDWR | os.O_CREAT


class WriterLock:
    """One store's lock, as one process has it. Thread-safe, and reentrant within a thread.

    :raises OSError: its file cannot be opened for writing.
    """

    def __init__(self, directory: Path) -> None:
        self._file = directory / FILE_NAME
        self._threads = threading.RLock()
        self._depth = 0
        self._in_vain = False
        self._fd = open_regular(self._file, _FLAGS)

    @contextmanager
    def held(
        self, patience_s: float | None = None, *, recover: Callable[[], None] | None = None
    ) -> Iterator[WriterLock]:
        """Hold it for the length of the block.

        :param patience_s: another bound on the wait than the lock's own.
        :param recover: called first, if the last commit was interrupted; the block does not run where it raises.
        :raises StoreBusyError: somebody else holds it, for longer than the bound; the block does not run.
        :raises StoreError: it cannot be locked; the block does not run.
        """
        if patience_s is None:
            patience_s = _SHORT_PATIENCE_S if self._in_vain else PATIENCE_S
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
        """Whether the last commit that was begun, by whomever, has not ended well. To be asked by the holder.

        :raises StoreError: its file does not read.
        """
        with translated_io(self._file.parent):
            return os.pread(self._fd, 1, 0) == _BEGUN

    def mark(self, *, begun: bool) -> None:
        """Say that a commit begins, or that all is well. For the holder.

        :raises StoreError: its file cannot be written.
        """
        with translated_io(self._file.parent):
            os.pwrite(self._fd, _BEGUN if begun else _ENDED, 0)

    def close(self) -> None:
        """Let go of the file; idempotent. In a fork, this leaves the parent's lock as it is."""
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
        """Open the file that lies there now, where ours was deleted; tells whether it did."""
        with suppress(OSError):  # the store's directory is gone, or may not be written any more: ours is as good
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
    """Who holds an exclusive flock on a file, as far as this process may know."""
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
