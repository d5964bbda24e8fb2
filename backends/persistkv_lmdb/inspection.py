"""Has a process of its own look at an environment that may end whoever reads it.

``subprocess``, not ``multiprocessing``: the caller may be a daemonic process or have threads. It never imports torch.
"""

from __future__ import annotations

import enum
import logging
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import NamedTuple

logger = logging.getLogger(__name__)

_LEAST_S = 60.0
_BYTES_A_SECOND = 50e6  # far less than any disk reads the few bytes of each MiB that the walk asks for
_PROGRAM = "import sys; sys.path[:] = {path!r}; from persistkv_lmdb.walk import main; main({directory!r})"
_DEATHS_BY_DAMAGE = frozenset({signal.SIGBUS, signal.SIGSEGV, signal.SIGABRT, signal.SIGFPE, signal.SIGILL})


class Verdict(enum.Enum):
    """How a walk ended; the values are its exit codes."""

    FINE = 0
    UNKNOWN = 1
    """It could not be walked: no memory, no permission, killed. That says nothing about it."""
    DAMAGED = 3
    FOREIGN = 4
    """It reads well, and is something else's, or of another release's format."""


class Finding(NamedTuple):
    """What a look at an environment gave."""

    verdict: Verdict
    reason: str
    """For a person, one line."""


def inspect(directory: Path) -> Finding:
    """Walk the environment in a child, within a time that grows with its size. Nobody may write meanwhile."""
    try:
        size = (directory / "data.mdb").stat().st_size
    except OSError as error:
        return Finding(Verdict.UNKNOWN, str(error))
    limit_s = _LEAST_S + size / _BYTES_A_SECOND
    program = _PROGRAM.format(path=sys.path, directory=str(directory))
    try:
        done = subprocess.run(
            [sys.executable, "-c", program, "persistkv-walk"],
            stdin=subprocess.DEVNULL,
            capture_output=True,
            timeout=limit_s,
            check=False,
            env={**os.environ, "OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"},
        )
    except subprocess.TimeoutExpired:
        return Finding(Verdict.DAMAGED, f"a walk through it did not end within {limit_s:.0f} s")
    except OSError as error:
        return Finding(Verdict.UNKNOWN, f"no process to look at it can be started: {error}")
    return _finding(done)


def _finding(done: subprocess.CompletedProcess[bytes]) -> Finding:
    said = " ".join(done.stdout.decode("utf-8", "replace").split())[:500]
    if -done.returncode in _DEATHS_BY_DAMAGE:
        return Finding(Verdict.DAMAGED, f"a walk through it was ended by {signal.Signals(-done.returncode).name}")
    if done.returncode in (Verdict.FINE.value, Verdict.DAMAGED.value, Verdict.FOREIGN.value) and said:
        return Finding(Verdict(done.returncode), said)
    complaint = done.stderr.decode("utf-8", "replace").strip().rpartition("\n")[2]
    logger.warning("%s cannot be looked at: exit code %d, %s", "the store", done.returncode, complaint)
    return Finding(Verdict.UNKNOWN, f"the walk ended with exit code {done.returncode}")
