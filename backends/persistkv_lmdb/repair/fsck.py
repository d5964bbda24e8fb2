"""Integrity check of an environment, in a child process, because damage may kill the process that
reads it.

The check first verifies the pages without LMDB (``lmdb.verify``: page tree, free list, counts), so
that cycles and truncated files are reported instead of crashing. Then it decodes the rows without
which the driver cannot write: clock, totals, space. Other invalid rows are no damage: the driver
skips them and treats their content as a miss.

The child is started by ``subprocess``, not ``multiprocessing``: the caller may be a daemonic
process or have threads. It never imports torch.
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
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path
from typing import NamedTuple, NoReturn

import lmdb
from lmdb import verify

from persistkv.errors import CorruptStoreError
from persistkv.storage.catalogue.order import read_clock
from persistkv.storage.catalogue.rows import (
    PACKS,
    STATES,
    NamespaceState,
    TableRows,
)
from persistkv_lmdb.files import DATA_FILE, has_catalogue
from persistkv_lmdb.layout import (
    DATABASES,
    EXTENTS,
    OtherReleaseError,
    open_databases,
    read_placement,
)
from persistkv_lmdb.payloads.allocator import (
    Allocator,
    decode_extents,
    pages_of,
    read_reserved,
)
from persistkv_lmdb.payloads.segments import Extent

logger = logging.getLogger(__name__)

PATIENCE_S = 1200.0  # 20 minutes: minimum patience with a check
# For each so many bytes of the file, the patience is one second longer. The check is much faster,
# because it reads a part of each MiB.
_BYTES_A_SECOND = 2_500_000
PROGRAM = (
    "import sys; sys.path[:] = {path!r}; from persistkv_lmdb.repair.fsck import main; "
    "main({directory!r}, {parent})"
)
# signals that end a process which reads damaged pages; others, as SIGKILL, have other causes
_DEATHS_BY_DAMAGE = (
    signal.SIGBUS,
    signal.SIGSEGV,
    signal.SIGABRT,
    signal.SIGFPE,
    signal.SIGILL,
)
# operation of ``prctl``: sets the signal that this process gets when its parent dies
_PR_SET_PDEATHSIG = 1


class CheckResult(enum.Enum):
    """Result of a check; the values are the exit codes of the child process that ``inspect``
    starts."""

    FINE = 0
    UNKNOWN = 1
    """The check did not complete: no memory, no permission, killed. The environment may be valid or
    damaged."""
    DAMAGED = 3
    FOREIGN = 4
    """The store is valid, but in the format of another release."""
    UNRECOGNISED = 5
    """The pages are valid, but not those of a store: another program's, or the store's marker is
    damaged."""


# Results that mean damage, if persistkv opened the environment before: one that is not recognised
# was a store then.
DAMAGE = (CheckResult.DAMAGED, CheckResult.UNRECOGNISED)
# exit codes of a check that completed
_COMPLETED = frozenset(
    result.value for result in CheckResult if result is not CheckResult.UNKNOWN
)


class Finding(NamedTuple):
    """Result of a check, with a reason of one line."""

    result: CheckResult
    reason: str


def inspect(directory: Path) -> Finding:
    """Check the environment in a child process, and return the finding; no process may write
    meanwhile.

    If the check cannot start, or does not end in a time that grows with the file, the result is
    ``UNKNOWN``.
    """
    try:
        size = (directory / DATA_FILE).stat().st_size
    except OSError as error:
        return Finding(CheckResult.UNKNOWN, str(error))
    # bound the check, because the writers of the store wait for its end
    patience_s = PATIENCE_S + size // _BYTES_A_SECOND
    try:
        child = _start_check(directory)
    except OSError as error:
        return Finding(
            CheckResult.UNKNOWN, f"the integrity check could not be started: {error}"
        )
    with child:
        try:
            output, errors = child.communicate(timeout=patience_s)
        except subprocess.TimeoutExpired:
            child.kill()
            return Finding(
                CheckResult.UNKNOWN,
                f"a walk through it did not end within {patience_s} s",
            )
    return _finding_of(directory, child.returncode, output, errors)


def _start_check(directory: Path) -> subprocess.Popen[bytes]:
    """Start the child process that checks an environment.

    :raises OSError: it cannot be started.
    """
    program = PROGRAM.format(
        path=sys.path, directory=str(directory), parent=os.getpid()
    )
    # The child ends when its parent, this process, dies (``end_with``). Its last argument only
    # names it in process lists. The numeric libraries that it imports need one thread only.
    return subprocess.Popen(
        [sys.executable, "-c", program, "persistkv-walk"],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        env={**os.environ, "OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"},
    )


def _finding_of(
    directory: Path,
    code: int,
    output: bytes,
    errors: bytes,
) -> Finding:
    """Return the finding of a child process that has ended.

    :param code: its exit code, or the negative number of the signal that ended it.
    """
    if -code in _DEATHS_BY_DAMAGE:
        name = signal.Signals(-code).name
        return Finding(CheckResult.DAMAGED, f"a walk through it was ended by {name}")
    # one line of at most 500 characters, whatever a damaged page contains
    words = output.decode("utf-8", "replace").split()
    reason = " ".join(words)[:500]
    # a check that completed has always written its reason
    if code in _COMPLETED and reason:
        return Finding(CheckResult(code), reason)
    lines = errors.decode("utf-8", "replace").strip().split("\n")
    logger.warning(
        "%s: the integrity check did not complete: exit code %d, %s",
        directory,
        code,
        lines[-1],
    )
    return Finding(CheckResult.UNKNOWN, f"the walk ended with exit code {code}")


def main(directory: str, parent: int) -> NoReturn:
    """Check the environment in the child of the process ``parent``: write the reason of the finding
    as one line, and exit with the value of its result."""
    end_with(parent)
    # leave no core file if damage crashes this process
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    result, reason = examine(Path(directory))
    sys.stdout.write(reason + "\n")
    sys.stdout.flush()
    # skip LMDB's own cleanup, which may hit damage that the check did not
    os._exit(result.value)


def end_with(parent: int) -> None:
    """Have the kernel kill this process when its parent dies, and exit if it is dead: a parent that
    is killed and restarted while it opens a store would run two checks at once.
    """
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:  # the parent died before the call
        os._exit(CheckResult.UNKNOWN.value)


def examine(directory: Path) -> Finding:
    """Check the environment in this process. No process may write meanwhile."""
    if not has_catalogue(directory):
        return Finding(CheckResult.FINE, "it is empty")
    # check first without LMDB, which would crash on damaged pages
    try:
        data = str(directory / DATA_FILE)
        problems: list[str] = verify.verify(data)  # type: ignore[no-untyped-call]
    except verify.VerifyError as error:
        problems = [str(error)]
    if problems:
        more = f" (and {len(problems) - 1} more)" if len(problems) > 1 else ""
        return Finding(CheckResult.DAMAGED, f"{problems[0]}{more}")
    try:
        # no locks are needed, because no process writes during the check
        with lmdb.open(
            str(directory),
            readonly=True,
            lock=False,
            create=False,
            max_dbs=len(DATABASES),
            max_spare_txns=0,
        ) as env:
            return _examine_databases(env)
    except (CorruptStoreError, lmdb.Error) as error:
        return Finding(CheckResult.DAMAGED, str(error))


def _examine_databases(env: lmdb.Environment) -> Finding:
    """Check the databases of a catalogue, and the rows in them on which the driver depends.

    :raises CorruptStoreError: such a row is invalid.
    """
    # without any entry, the creation was interrupted before its first commit
    if not env.stat()["entries"]:
        return Finding(CheckResult.FINE, "it is empty")
    try:
        databases = open_databases(env)
    except OtherReleaseError as error:
        return Finding(CheckResult.FOREIGN, str(error))
    except CorruptStoreError as error:
        return Finding(CheckResult.UNRECOGNISED, str(error))
    with env.begin(buffers=True) as txn:
        return Finding(CheckResult.FINE, _examine_rows(TableRows(txn, databases)))


def _examine_rows(rows: TableRows) -> str:
    """Check the rows of a snapshot on which the driver depends; return one line of findings.

    :raises CorruptStoreError: such a row is invalid.
    """
    # each of these raises if its row is invalid
    read_clock(rows)
    read_placement(rows)
    for _, row in rows.starting_with(STATES, prefix=b""):
        NamespaceState.decode(row)
    # each fault is fatal: a page that is in two extents would be overwritten
    for fault in space_faults(rows):
        raise CorruptStoreError(fault)
    # ``verify`` reads only the first page of a value that takes several. Reading its last byte
    # raises SIGBUS if the file ends before, which ends this child.
    for table in DATABASES:
        for _, row in rows.starting_with(table, prefix=b""):
            bytes(row[-1:])
    return f"{rows.count(PACKS)} packs in {rows.count(STATES)} namespaces"


def space_faults(transaction: TableRows) -> Iterator[str]:
    """Yield a line per fault: a page that is not in exactly one extent, or indices or totals that
    do not agree.

    Each page of a segment belongs to a pack, to a reservation of a writer, to a free extent, or to
    a hole. Holes are ranges of a segment file without disk space. They are part of its length, and
    so of ``segments``, but the recorded total counts only pages with disk space.
    """
    allocator = Allocator(transaction)
    segments = allocator.segments()
    free = list(allocator.free_extents())
    holes = list(allocator.holes())
    reserved: list[Extent] = []
    for writer in allocator.writers():
        reserved += read_reserved(transaction, writer)
    used: list[Extent] = []  # extents of packs
    for _, row in transaction.starting_with(EXTENTS, prefix=b""):
        used += decode_extents(row)
    # both tables of free extents, by size and by place, must list the same ones
    if sorted(allocator.free_sizes()) != free:
        yield "the free extents by size are not those by place"
    all_extents = [*free, *reserved, *used, *holes]
    yield from _misplaced(all_extents, segments)
    # neighbours should have been merged
    for one, other in pairwise(free):
        if one.touches(other):
            yield f"{one} and {other} touch"
    # number of pages with disk space
    total = sum(segments.values()) - pages_of(holes)
    counted = (total, pages_of(free), pages_of(reserved))
    recorded = (allocator.total, allocator.free, allocator.reserved)
    if counted != recorded:
        yield f"the totals of the space are {recorded}; counted: {counted}"


def _misplaced(
    extents: list[Extent],
    segments: dict[int, int],
) -> Iterator[str]:
    """Yield a line for each extent that does not begin where the one before ends (a gap or an
    overlap), is empty, or is in no segment; and one if extents do not fill all segments.

    :param segments: pages of each segment, by number.
    """
    # end of the last extent, by segment
    ends = dict.fromkeys(segments, 0)
    for extent in sorted(extents):
        end = ends.get(extent.segment)
        if extent.page != end or not extent.pages:
            yield f"{extent} does not follow page {end}"
        ends[extent.segment] = extent.end
    if ends != segments:
        yield f"extents end at {ends}, segments at {segments}"
