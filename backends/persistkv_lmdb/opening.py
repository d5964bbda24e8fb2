"""Opening of a store's LMDB environment. If the store is refused, nothing stays open.

LMDB's reader table identifies processes by PID, and PIDs repeat across PID namespaces (containers).

LMDB treats a slot with its own PID as its own and never checks whether the process that left it is dead. A container
that was killed during a read and restarted with the same PID would therefore keep the snapshot of that read alive for
ever, and commits would find no free pages. A process with another PID does check, so a child process clears such slots
before this process reads for the first time.

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
from typing import NamedTuple

import lmdb

from persistkv.errors import CorruptStoreError, ProcessIdInUseError
from persistkv.storage.extensions import Policy
from persistkv_lmdb.errors import translated_at_open
from persistkv_lmdb.files import sync_directory
from persistkv_lmdb.fsck import DAMAGE, inspect
from persistkv_lmdb.layout import DATA_FILE, Databases, is_cut_short, open_databases

logger = logging.getLogger(__name__)

_MAX_READERS = 512
_PATIENCE_S = 30.0
_PROGRAM = """
import sys
sys.path[:] = {path!r}
import lmdb
with lmdb.open({store!r}, readonly=True, create=False, max_readers={readers}) as env:
    env.reader_check()
"""


class Opened(NamedTuple):
    """An open environment; the caller must close it."""

    env: lmdb.Environment
    file_id: tuple[int, int] | None
    """See ``file_id``."""
    db: Databases


def open_environment(path: Path, policy: Policy, *, read_only: bool) -> Opened:
    """Open the environment; if there is none, create it and make its name durable.

    Its map has the recorded size; the caller changes it.

    :param policy: recorded if the store is created.
    :raises ProcessIdInUseError: a process in another PID namespace uses the store under this process's PID.
    :raises StoreUnavailableError: it cannot be opened.
    :raises CorruptStoreError: it is damaged, or not a persistkv store; it was not changed.
    """
    with translated_at_open(path):
        if is_cut_short(path) and (found := inspect(path)).verdict in DAMAGE:
            raise CorruptStoreError(f"{path}: {found.reason}")
        is_there = file_id(path) is not None
        env = _open_with_reader(
            path,
            lambda: lmdb.open(
                str(path),
                map_size=0,
                readonly=read_only,
                mode=0o600,
                create=False,
                max_dbs=len(Databases._fields),
                max_readers=_MAX_READERS,
                max_spare_txns=0,  # a spare transaction keeps its reader slot, even across a fork
            ),
        )
        try:
            env.reader_check()
            opened = Opened(env, file_id(path), open_databases(env, policy))
            if not is_there:
                sync_directory(path)
        except BaseException:
            env.close()
            raise
        return opened


def file_id(path: Path) -> tuple[int, int] | None:
    """Return device and inode of ``data.mdb``, the same for every path to a store; None if there is none."""
    try:
        status = (path / DATA_FILE).stat()
    except OSError:  # opening it reports the reason
        return None
    return status.st_dev, status.st_ino


def _open_with_reader(store: Path, open_it: Callable[[], lmdb.Environment]) -> lmdb.Environment:
    """Open an environment, and clear stale reader slots of this process's PID.

    :param open_it: opens the environment; called a second time after stale slots were found.
    :raises ProcessIdInUseError: a live process in another PID namespace has the same PID.
    """
    env = _opened(store, open_it)
    if not _has_own_slot(env):
        return env
    env.close()  # also releases the lock of this PID: the child detects whether another process holds it
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
    """Return whether the reader table lists this process, before its first transaction.

    LMDB's listing has a header line, then one line per slot in use, which starts with the PID.
    """
    pid = str(os.getpid())
    return any(line.split()[:1] == [pid] for line in env.readers().splitlines()[1:])


def _clear_from_child(store: Path) -> None:
    program = _PROGRAM.format(path=sys.path, store=str(store), readers=_MAX_READERS)
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
