"""Has a process of its own look at an environment that may end whoever reads it.

``subprocess``, not ``multiprocessing``: the caller may be a daemonic process or have threads. It never imports torch.
"""

from __future__ import annotations

import enum
import logging
import os
import resource
import signal
import struct
import subprocess
import sys
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

from persistkv.errors import CorruptStoreError
from persistkv_lmdb.files import write_durably
from persistkv_lmdb.layout import DATA_FILE

logger = logging.getLogger(__name__)

_LEAST_CPU_S = 60
_BYTES_A_SECOND = 50_000_000  # of processor time: far fewer than the walk gets through, a few of each MiB
_PATIENCE = 20  # times that, by the clock: a slow disk is no damage
_PROGRAM = (
    "import sys; sys.path[:] = {path!r}; from persistkv_lmdb.recovery.walk import main; main({directory!r}, {parent})"
)
_DEATHS_BY_DAMAGE = frozenset(
    {signal.SIGBUS, signal.SIGSEGV, signal.SIGABRT, signal.SIGFPE, signal.SIGILL, signal.SIGXCPU}
)


_U32, _U64 = struct.Struct("=I"), struct.Struct("=Q")
_MAGIC = 0xBEEFC0DE
_PAGE_HEADERS = (16, 24)  # bytes, of LMDB 0.9 and 1.0
_PAGE_BYTES_AT, _LAST_PAGE_AT = 24, 120  # in a meta page, behind its header
_META_BYTES = 160
_MOST_PAGE_BYTES = 64 << 10  # 64 KiB


class Verdict(enum.Enum):
    """How a walk ended; the values are its exit codes."""

    FINE = 0
    UNKNOWN = 1
    """It could not be walked: no memory, no permission, killed. That says nothing about it."""
    DAMAGED = 3
    FOREIGN = 4
    """It reads well, and is of another release's format."""
    UNRECOGNISED = 5
    """It reads well, but not as a store: it is something else's, or what a store is told by is damaged."""


DAMAGE = frozenset({Verdict.DAMAGED, Verdict.UNRECOGNISED})
"""Of what a process of ours had open: it was a store then."""
_SAID = frozenset(verdict.value for verdict in Verdict if verdict is not Verdict.UNKNOWN)


class Finding(NamedTuple):
    """What a look at an environment gave."""

    verdict: Verdict
    reason: str
    """For a person, one line."""


def is_cut_short(directory: Path) -> bool:
    """Whether ``data.mdb`` ends before the last page that LMDB has given out: who reads there is ended by SIGBUS.

    LMDB may have given out pages at the end and never written them: ``inspect`` tells. Others may write meanwhile.
    """
    try:
        with (directory / DATA_FILE).open("rb") as file:
            found = [_end_of(file.read(_META_BYTES))]
            if found[0] is not None:
                file.seek(found[0][1])
                found.append(_end_of(file.read(_META_BYTES)))
            size = os.fstat(file.fileno()).st_size
    except OSError:  # opening it says why
        return False
    return any(end is not None and end[0] > size for end in found)


def meta_bytes(directory: Path) -> int:
    """How long LMDB's two meta pages are, with which ``data.mdb`` begins; 0 where it does not begin so.

    :raises OSError: it cannot be read.
    """
    with (directory / DATA_FILE).open("rb") as file:
        found = _end_of(file.read(_META_BYTES))
    return 0 if found is None else 2 * found[1]


def disown(directory: Path, number: int, page_bytes: int) -> None:
    """Have the meta page of transaction ``number`` tell of what the one before it left, as an older one. The caller
    holds LMDB's lock for writing.

    :raises OSError: the disk failed; it may tell of either.
    :raises CorruptStoreError: the pages are not of these two, as where files were replaced under those that have them
        open; nothing was written.
    """
    data = directory / DATA_FILE
    with data.open("rb") as file:
        pages = [bytearray(file.read(page_bytes)) for _ in range(2)]
    page = pages[1 - number % 2]
    header = next((size for size in _PAGE_HEADERS if page[size : size + _U32.size] == _U32.pack(_MAGIC)), None)
    at = 0 if header is None else header + _LAST_PAGE_AT + _U64.size
    told = [bytes(page[at : at + _U64.size]) for page in pages]
    if not at or told != [_U64.pack(number - (number + place) % 2) for place in range(2)]:
        raise CorruptStoreError(f"{data}: it does not begin with the pages of transactions {number - 1} and {number}")
    _U64.pack_into(page, at, max(number - 2, 0))
    write_durably(data, bytes(page[_U64.size :]), number % 2 * page_bytes + _U64.size)  # behind the page's own number


def _end_of(page: bytes) -> tuple[int, int] | None:
    """Where the last page ends by a meta page, and how long a page is; None where it is no meta page."""
    for header in _PAGE_HEADERS:
        if len(page) == _META_BYTES and _U32.unpack_from(page, header)[0] == _MAGIC:
            page_bytes = _U32.unpack_from(page, header + _PAGE_BYTES_AT)[0]
            if 1 <= page_bytes <= _MOST_PAGE_BYTES:
                return (_U64.unpack_from(page, header + _LAST_PAGE_AT)[0] + 1) * page_bytes, page_bytes
    return None


def inspect(directory: Path) -> Finding:
    """Walk the environment in a child, which gets an amount of processor time that grows with its size: what takes more
    goes in circles. Nobody may write meanwhile.
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
