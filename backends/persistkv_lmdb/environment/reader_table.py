"""LMDB's reader table identifies processes by PID, and PIDs repeat across PID namespaces (containers).

LMDB takes a slot with its own PID for its own: it never checks whether the process that left it is dead. So a container
that was killed during a read, and restarted with the same PID, would keep the snapshot of that read alive for ever, and
commits would find no free pages. A process with another PID can tell, so a child process clears such slots before this
process reads for the first time.

A live process with the same PID in another PID namespace excludes this one: LMDB locks a byte at the offset of the PID.
"""

from __future__ import annotations

import errno
import logging
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import lmdb

from persistkv.errors import ProcessIdInUseError

logger = logging.getLogger(__name__)

MAX_READERS = 512
_PATIENCE_S = 30.0
_PROGRAM = """
import sys
sys.path[:] = {path!r}
import lmdb
with lmdb.open({store!r}, readonly=True, create=False, max_readers={readers}) as env:
    env.reader_check()
"""


def open_with_reader(store: Path, open_it: Callable[[], lmdb.Environment]) -> lmdb.Environment:
    """Open an environment, and leave no stale slot of this process's PID in it.

    :param open_it: opens the environment; called a second time after stale slots were found.
    :raises ProcessIdInUseError: a live process in another PID namespace has the same PID.
    """
    env = _opened(store, open_it)
    if not _has_own_slot(env):
        return env
    env.close()  # with it goes the lock of this PID: the child sees whether another process holds it
    _clear_from_child(store)
    return _opened(store, open_it)


def _opened(store: Path, open_it: Callable[[], lmdb.Environment]) -> lmdb.Environment:
    try:
        return open_it()
    except lmdb.LockError as error:
        if error.code != errno.EAGAIN:
            raise
        raise ProcessIdInUseError(
            f"{store}: a process in another PID namespace (container) uses the store with the same PID {os.getpid()}; "
            "start this process again to get another PID, or let the containers share one PID namespace"
        ) from None


def _has_own_slot(env: lmdb.Environment) -> bool:
    """Whether the table names this process, which has not begun a transaction yet.

    LMDB's listing has a header line, then one line per slot in use, which begins with the PID.
    """
    pid = str(os.getpid())
    return any(line.split()[:1] == [pid] for line in env.readers().splitlines()[1:])


def _clear_from_child(store: Path) -> None:
    program = _PROGRAM.format(path=sys.path, store=str(store), readers=MAX_READERS)
    try:
        subprocess.run(
            [sys.executable, "-I", "-c", program],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            check=True,
            timeout=_PATIENCE_S,
        )
        logger.warning("%s: cleared readers that an earlier process with PID %d left", store, os.getpid())
    except (OSError, subprocess.SubprocessError) as error:
        logger.warning("%s: stale readers with this process's PID could not be cleared: %s", store, error)
