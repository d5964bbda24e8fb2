"""Execution of a function in a forked process, whose crash or hang does not harm the parent.

The parent must have no LMDB environment open and no threads.
"""

from __future__ import annotations

import json
import os
import signal
import time
import traceback
from collections.abc import Callable
from typing import NamedTuple


class Outcome(NamedTuple):
    """Result of a forked process."""

    kind: str
    """Given by the function, or ``raised``, ``hung``, or the name of a signal."""
    total: int = 0
    detail: str = ""


def run_in_fork(work: Callable[[], Outcome], patience_s: float) -> Outcome:
    """Run the function in a fork. Kill the fork after ``patience_s`` seconds."""
    reading, writing = os.pipe()
    child = os.fork()
    if not child:
        os.close(reading)
        _run(work, writing)
    os.close(writing)
    with os.fdopen(reading, "rb") as pipe:
        status = _wait(child, patience_s)
        output = pipe.read()
    if status is None:
        return Outcome("hung")
    if os.WIFSIGNALED(status):
        return Outcome(signal.Signals(os.WTERMSIG(status)).name)
    return Outcome(*json.loads(output))


def _run(work: Callable[[], Outcome], writing: int) -> None:
    try:
        outcome = work()
    except BaseException:
        outcome = Outcome("raised", detail=traceback.format_exc()[-20_000:])
    os.write(writing, json.dumps(outcome).encode())
    os._exit(0)


def _wait(child: int, patience_s: float) -> int | None:
    """Return the exit status, or None if the process had to be killed."""
    deadline = time.monotonic() + patience_s
    while time.monotonic() < deadline:
        ended, status = os.waitpid(child, os.WNOHANG)
        if ended:
            return status
        time.sleep(0.002)
    os.kill(child, signal.SIGKILL)
    os.waitpid(child, 0)
    return None
