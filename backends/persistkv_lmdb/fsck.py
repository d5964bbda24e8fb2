"""Integrity check of an environment, in a child process, because damage may kill the process that reads it.

The check first verifies the pages without LMDB (``lmdb.verify``: page tree, free list, counts), so that cycles and
truncated files are reported instead of crashing. Then it reads the rows as the driver does. An invalid row is no damage
if the driver skips it and treats its content as a miss; it is damage if the driver depends on it.

The child is started by ``subprocess``, not ``multiprocessing``: the caller may be a daemonic process or have threads.
It never imports torch.
"""

from __future__ import annotations

import ctypes
import enum
import logging
import os
import resource
import signal
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator
from contextlib import suppress
from itertools import groupby, pairwise
from pathlib import Path
from typing import NamedTuple, NoReturn

import lmdb
from lmdb import verify

from persistkv.config import PAGE_BYTES
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
from persistkv.storage.format.manifest import decode_manifest, decode_manifest_keys
from persistkv.storage.format.pack import ID_BYTES
from persistkv_lmdb.allocator import Allocator, Extent, decode_extents
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

logger = logging.getLogger(__name__)

_LEAST_CPU_S = 60
_BYTES_A_SECOND = 50_000_000  # of processor time: far below the speed of the check, which reads part of each MiB
_PATIENCE = 20  # wall clock time as a multiple of the processor time: a slow disk is no damage
_PROGRAM = "import sys; sys.path[:] = {path!r}; from persistkv_lmdb.fsck import main; main({directory!r}, {parent})"
_DEATHS_BY_DAMAGE = frozenset(
    {signal.SIGBUS, signal.SIGSEGV, signal.SIGABRT, signal.SIGFPE, signal.SIGILL, signal.SIGXCPU}
)
_PR_SET_PDEATHSIG = 1


class Verdict(enum.Enum):
    """Result of a check; the values are the exit codes of the child."""

    FINE = 0
    UNKNOWN = 1
    """The check did not complete: no memory, no permission, killed. The environment may be valid or damaged."""
    DAMAGED = 3
    FOREIGN = 4
    """It is valid, in another release's format."""
    UNRECOGNISED = 5
    """Its pages are valid, but not those of a store: it is another program's, or the marker of a store is damaged."""


DAMAGE = frozenset({Verdict.DAMAGED, Verdict.UNRECOGNISED})
"""Verdicts that mean damage if a process of ours had the environment open: it was a store then."""
_SAID = frozenset(verdict.value for verdict in Verdict if verdict is not Verdict.UNKNOWN)


class Finding(NamedTuple):
    """Verdict on an environment, with a reason."""

    verdict: Verdict
    reason: str
    """Human-readable, one line."""


def inspect(directory: Path) -> Finding:
    """Check the environment in a child process; no process may write meanwhile.

    The processor time of the child is limited in proportion to the file's size: exceeding it means a cycle.
    """
    try:
        size = (directory / DATA_FILE).stat().st_size
    except OSError as error:
        return Finding(Verdict.UNKNOWN, str(error))
    limit_s = _LEAST_CPU_S + size // _BYTES_A_SECOND
    try:
        child = subprocess.Popen(
            [
                sys.executable,
                "-c",
                _PROGRAM.format(path=sys.path, directory=str(directory), parent=os.getpid()),
                "persistkv-walk",
            ],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            env={**os.environ, "OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"},
        )
    except OSError as error:
        return Finding(Verdict.UNKNOWN, f"no process to look at it can be started: {error}")
    with child:
        with suppress(OSError, ValueError):  # it has ended, or has a lower limit
            resource.prlimit(child.pid, resource.RLIMIT_CPU, (limit_s, limit_s + _LEAST_CPU_S))
        try:
            said, complained = child.communicate(timeout=_PATIENCE * limit_s)
        except subprocess.TimeoutExpired:
            child.kill()
            return Finding(Verdict.UNKNOWN, f"a walk through it did not end within {_PATIENCE * limit_s} s")
    return _finding(directory, child.returncode, said.decode("utf-8", "replace"), complained.decode("utf-8", "replace"))


def _finding(directory: Path, code: int, output: str, errors: str) -> Finding:
    said = " ".join(output.split())[:500]
    if -code in _DEATHS_BY_DAMAGE:
        return Finding(Verdict.DAMAGED, f"a walk through it was ended by {signal.Signals(-code).name}")
    if code in _SAID and said:
        return Finding(Verdict(code), said)
    complaint = errors.strip().rpartition("\n")[2]
    logger.warning("%s cannot be looked at: exit code %d, %s", directory, code, complaint)
    return Finding(Verdict.UNKNOWN, f"the walk ended with exit code {code}")


class _DamageError(Exception):
    """Damage that makes the store unusable."""


def main(directory: str, parent: int) -> NoReturn:
    """Check the environment, write one line of findings to standard output, and exit with the verdict.

    :param parent: PID of the process that started this one.
    """
    end_with(parent)
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    verdict, reason = examine(Path(directory))
    sys.stdout.write(reason + "\n")
    sys.stdout.flush()
    os._exit(verdict.value)  # skips LMDB's own cleanup, which may hit damage that the check did not


def end_with(parent: int) -> None:
    """Have the kernel kill this process when its parent dies: a process killed while it opens a store is restarted, and
    starts another check.
    """
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:  # it died before the call
        os._exit(Verdict.UNKNOWN.value)


def examine(directory: Path) -> tuple[Verdict, str]:
    """Return the verdict and one line about it. No process may write meanwhile."""
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
    """Check of all rows of a snapshot."""

    def __init__(self, transaction: Transaction) -> None:
        self._transaction = transaction
        self._txn, self._db = transaction
        self._unreadable: Counter[str] = Counter()

    def examine(self) -> str:
        """Return one line of findings.

        :raises _DamageError: a row on which the driver depends is invalid.
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
        """Check the allocator: a page that is allocated twice would be overwritten."""
        try:
            fault = next(_space_faults(self._transaction), None)
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
        self._unreadable += Counter()  # removes zero counts

    def _touch_pieces(self) -> None:
        for _, row in rows(self._transaction, self._db.pieces, b""):
            bytes(row[:1])

    def _compare(self, states: dict[bytes, NamespaceState], counted: dict[bytes, NamespaceState]) -> None:
        for name, state in states.items():
            there = counted[name]
            said = (state.packs, state.blocks, state.requests, state.raw_bytes, state.stored_bytes)
            if said != (there.packs, there.blocks, there.requests, there.raw_bytes, there.stored_bytes):
                raise _DamageError(f"the totals of namespace {name.hex()} are not those of its rows")


def find_faults(transaction: Transaction, lengths: dict[int, int]) -> list[str]:
    """Compare extents with files, rows with each other and totals with a recount of the whole catalogue.

    :param lengths: bytes of each segment file.
    :returns: one line per fault, caused by damage or by a defect of this driver.
    """
    try:
        segments = Allocator(transaction).segments()
        found = [*_space_faults(transaction), *_pack_faults(transaction), *_total_faults(transaction)]
    except CorruptStoreError as error:
        return [str(error)]
    for segment, pages in segments.items():
        if lengths.get(segment, 0) < pages * PAGE_BYTES:
            found.append(f"segment {segment} has {pages} pages, its file {lengths.get(segment, 0)} bytes")
    return found


def _space_faults(transaction: Transaction) -> Iterator[str]:
    """Check that each page of each segment belongs to one extent, and that indices and totals agree."""
    allocator = Allocator(transaction)
    segments = allocator.segments()
    free = list(allocator.free_extents())
    aging = [extent for _, extent in allocator.aging_extents()]
    used = [extent for _, row in rows(transaction, transaction.db.extents, b"") for extent in decode_extents(row)]
    if sorted(allocator.free_sizes()) != free:
        yield "the free extents by size are not those by place"
    ends = dict.fromkeys(segments, 0)
    for segment, extents in groupby(sorted([*free, *aging, *used]), key=lambda extent: extent.segment):
        for extent in extents:
            if extent.page != ends.get(segment) or not extent.pages:
                yield f"{extent} does not follow page {ends.get(segment)}"
            ends[segment] = extent.end
    if ends != segments:
        yield f"extents end at {ends}, segments at {segments}"
    for one, other in pairwise(free):
        if (one.segment, one.end) == (other.segment, other.page):
            yield f"{one} and {other} touch"
    counted = (sum(segments.values()), _pages(free), _pages(aging))
    if counted != (allocator.total, allocator.free, allocator.aging):
        yield f"the totals of the space are {(allocator.total, allocator.free, allocator.aging)}; counted: {counted}"


def _pack_faults(transaction: Transaction) -> Iterator[str]:
    """Check that each pack has one payload of its length, and that each payload belongs to a pack."""
    extents = {bytes(key): _pages(decode_extents(row)) for key, row in rows(transaction, transaction.db.extents, b"")}
    pieces: Counter[bytes] = Counter()
    for key, row in rows(transaction, transaction.db.pieces, b""):
        pieces[bytes(key[:-4])] += len(row)
    for key, row in rows(transaction, transaction.db.packs, b""):
        name, table = bytes(key), pack_table(key, row)
        lengths = [length for length in (PAGE_BYTES * extents.pop(name, 0), pieces.pop(name, 0)) if length]
        if table is not None and lengths != ([table.payload_length] if table.payload_length else []):
            yield f"pack {name.hex()} of {table.payload_length} bytes has payloads of {lengths}"
    for name in {*extents, *pieces}:
        yield f"a payload belongs to {name.hex()}, which is no pack"


def _total_faults(transaction: Transaction) -> Iterator[str]:
    """Compare the totals of each namespace with its rows."""
    for key, row in rows(transaction, transaction.db.states, b""):
        recorded, counted = NamespaceState.decode(row), NamespaceState(b"")
        for name, pack in rows(transaction, transaction.db.packs, bytes(key)):
            if (table := pack_table(name, pack)) is not None:
                counted.count(table, 1)
        counted.requests = sum(1 for _ in rows(transaction, transaction.db.manifests, bytes(key)))
        counted.generation, counted.sequence = recorded.generation, recorded.sequence
        if counted != recorded:
            yield f"namespace {bytes(key).hex()}: {recorded}; counted: {counted}"


def _pages(extents: list[Extent]) -> int:
    return sum(extent.pages for extent in extents)
