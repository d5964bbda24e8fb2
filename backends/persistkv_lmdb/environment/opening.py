"""LMDB's environment of a store, as it is opened: what cannot be used is refused, and nothing of it stays open."""

from __future__ import annotations

from pathlib import Path
from typing import NamedTuple

import lmdb

from persistkv.errors import CorruptStoreError
from persistkv.storage.backend import Policy
from persistkv_lmdb.environment.errors import translated_at_open
from persistkv_lmdb.environment.reader_table import MAX_READERS, open_with_reader
from persistkv_lmdb.files import sync_directory
from persistkv_lmdb.layout import DATA_FILE, Databases, open_databases
from persistkv_lmdb.recovery.inspection import DAMAGE, inspect, is_cut_short


class Opened(NamedTuple):
    """An environment that is open: whoever has it closes it."""

    env: lmdb.Environment
    file_id: tuple[int, int] | None
    """See ``file_id``."""
    db: Databases


def open_environment(path: Path, policy: Policy, *, read_only: bool) -> Opened:
    """Open it; where there is none, make it and make its name durable.

    A map size of 0 takes the recorded one: who opens it sets what is wanted.

    :param policy: recorded in a store that is created.
    :raises ProcessIdInUseError: a process in another PID namespace uses the store under this process's PID.
    :raises StoreUnavailableError: it cannot be opened.
    :raises CorruptStoreError: it is damaged, or something else; it was not changed.
    """
    with translated_at_open(path):
        if is_cut_short(path) and (found := inspect(path)).verdict in DAMAGE:
            raise CorruptStoreError(f"{path}: {found.reason}")
        is_there = file_id(path) is not None
        env = open_with_reader(
            path,
            lambda: lmdb.open(
                str(path),
                map_size=0,
                readonly=read_only,
                mode=0o600,
                create=False,
                max_dbs=len(Databases._fields),
                max_readers=MAX_READERS,
                max_spare_txns=0,  # a spare one keeps its reader's slot, also across a fork
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
    """What tells a store's files from others', whatever their path; None where there are none yet."""
    try:
        status = (path / DATA_FILE).stat()
    except OSError:  # opening it says why
        return None
    return status.st_dev, status.st_ino
