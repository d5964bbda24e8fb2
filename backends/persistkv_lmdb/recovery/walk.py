"""The program that looks at an environment: every page and row of it, read-only. What it meets may end it.

First the pages, without LMDB (``lmdb.verify``: page tree, free list, counts), so that cycles and cut files are found
instead of met. Then the rows, as the driver reads them. Rows that do not read are no damage of the store, where the
driver passes over them and what they stand for is a miss; those that nothing can be done without are.
"""

from __future__ import annotations

import ctypes
import os
import resource
import signal
import sys
from collections import Counter
from pathlib import Path
from typing import NoReturn

import lmdb
from lmdb import verify

from persistkv.errors import CorruptPackError, CorruptStoreError
from persistkv.storage.catalog.records import (
    ORDER_KEY,
    Chain,
    NamespaceState,
    Use,
    decode_namespace,
    pack_table,
    read_clock,
)
from persistkv.storage.manifest import decode_manifest, decode_manifest_keys
from persistkv.storage.pack import ID_BYTES
from persistkv_lmdb.layout import (
    DATA_FILE,
    Databases,
    OtherReleaseError,
    Transaction,
    open_databases,
    read_placement,
    rows,
)
from persistkv_lmdb.options import LmdbOptions
from persistkv_lmdb.recovery.check import space_faults
from persistkv_lmdb.recovery.inspection import Verdict


class _DamageError(Exception):
    """What makes the store unusable."""


_PR_SET_PDEATHSIG = 1


def main(directory: str, parent: int) -> NoReturn:
    """Look, say what there is in one line on standard output, and exit with the verdict.

    :param parent: the process that asks.
    """
    end_with(parent)
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    verdict, reason = examine(Path(directory))
    sys.stdout.write(reason + "\n")
    sys.stdout.flush()
    os._exit(verdict.value)  # without LMDB's own end, which may meet what the walk has not


def end_with(parent: int) -> None:
    """Have the kernel end this process when the one that started it dies: a store's process that is killed while it
    opens is started again, and looks anew.
    """
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:  # it died before that
        os._exit(Verdict.UNKNOWN.value)


def examine(directory: Path) -> tuple[Verdict, str]:
    """What there is, and a line about it. Nobody may write meanwhile."""
    data = directory / DATA_FILE
    if not data.exists() or not data.stat().st_size:
        return Verdict.FINE, "it is empty"
    try:
        problems: list[str] = verify.verify(str(data))  # type: ignore[no-untyped-call]
    except verify.VerifyError as error:
        problems = [str(error)]
    if problems:
        more = f" (and {len(problems) - 1} more)" if len(problems) > 1 else ""
        return Verdict.DAMAGED, f"{problems[0]}{more}"
    return _examine_rows(directory)


def _examine_rows(directory: Path) -> tuple[Verdict, str]:
    try:
        with lmdb.open(
            str(directory), readonly=True, lock=False, create=False, max_dbs=len(Databases._fields), max_spare_txns=0
        ) as env:
            if not env.stat()["entries"]:
                return Verdict.FINE, "it is empty"
            try:
                databases = open_databases(env, LmdbOptions().policy)
            except OtherReleaseError as error:
                return Verdict.FOREIGN, str(error)
            except CorruptStoreError as error:
                return Verdict.UNRECOGNISED, str(error)
            with env.begin(buffers=True) as txn:
                return Verdict.FINE, _Rows(Transaction(txn, databases)).examine()
    except (_DamageError, lmdb.Error) as error:
        return Verdict.DAMAGED, str(error)


class _Rows:
    """All rows of a snapshot."""

    def __init__(self, transaction: Transaction) -> None:
        self._transaction = transaction
        self._txn, self._db = transaction
        self._unreadable: Counter[str] = Counter()

    def examine(self) -> str:
        """What there is, in a line.

        :raises _DamageError: what the driver cannot do without does not read.
        """
        self._examine_meta()
        self._examine_space()
        states = self._states()
        counted = {name: NamespaceState(b"") for name in states}
        self._count_packs(counted)
        self._count_manifests(counted)
        self._examine_order()
        self._touch_pieces()
        if not self._unreadable:
            self._compare(states, counted)
        bad = ", ".join(f"{count} rows of {name}" for name, count in sorted(self._unreadable.items()))
        found = f"{sum(state.packs for state in counted.values())} packs in {len(states)} namespaces"
        return f"{found}; {bad} do not read" if bad else found

    def _examine_meta(self) -> None:
        try:
            read_clock(self._transaction.rows)
            read_placement(self._transaction)
        except CorruptStoreError as error:
            raise _DamageError(str(error)) from None

    def _examine_space(self) -> None:
        """What is given out twice would be written over."""
        try:
            fault = next(space_faults(self._transaction), None)
        except CorruptStoreError as error:
            fault = str(error)
        if fault is not None:
            raise _DamageError(fault)

    def _states(self) -> dict[bytes, NamespaceState]:
        states: dict[bytes, NamespaceState] = {}
        for key, row in rows(self._transaction, self._db.states, b""):
            try:
                states[bytes(key)] = NamespaceState.decode(row)
            except CorruptStoreError as error:
                raise _DamageError(str(error)) from None
        for key, row in rows(self._transaction, self._db.namespaces, b""):
            if decode_namespace(key, row) is None:
                self._unreadable["namespaces"] += 1
            elif bytes(key) not in states:
                raise _DamageError(f"namespace {bytes(key).hex()} has no totals")
        return states

    def _count_packs(self, counted: dict[bytes, NamespaceState]) -> None:
        for key, row in rows(self._transaction, self._db.packs, b""):
            table = pack_table(key, row)
            if table is None or table.namespace not in counted:
                self._unreadable["packs"] += 1
            else:
                counted[table.namespace].count(table, 1)
            if Use.decode(self._txn.get(key, db=self._db.uses)) is None:
                self._unreadable["uses"] += 1

    def _count_manifests(self, counted: dict[bytes, NamespaceState]) -> None:
        for key, row in rows(self._transaction, self._db.manifests, b""):
            namespace = bytes(key[:ID_BYTES])
            if namespace in counted:
                counted[namespace].requests += 1
            try:
                decode_manifest(row)
            except CorruptPackError:
                self._unreadable["manifests"] += 1
            try:
                decode_manifest_keys(self._txn.get(key, b"", db=self._db.manifest_keys))
            except CorruptPackError:
                self._unreadable["manifest_keys"] += 1
            if Chain.decode(self._txn.get(key, db=self._db.chains)) is None:
                self._unreadable["chains"] += 1

    def _examine_order(self) -> None:
        for key, _ in rows(self._transaction, self._db.order, b""):
            self._unreadable["order"] += len(key) != ORDER_KEY.size
        self._unreadable += Counter()  # those that count nothing go

    def _touch_pieces(self) -> None:
        for _, row in rows(self._transaction, self._db.pieces, b""):
            bytes(row[:1])

    def _compare(self, states: dict[bytes, NamespaceState], counted: dict[bytes, NamespaceState]) -> None:
        for name, state in states.items():
            there = counted[name]
            said = (state.packs, state.blocks, state.requests, state.raw_bytes, state.stored_bytes)
            if said != (there.packs, there.blocks, there.requests, there.raw_bytes, there.stored_bytes):
                raise _DamageError(f"the totals of namespace {name.hex()} are not those of its rows")


if __name__ == "__main__":
    main(sys.argv[1], os.getppid())
