"""Host processes and process trees, found in /proc."""

from __future__ import annotations

import os
import signal
import uuid
from collections import defaultdict
from collections.abc import Container
from contextlib import suppress
from pathlib import Path

_RUN = "PERSISTKV_TEST_RUN"
"""Environment variable that marks the processes of one test run: other runs on the machine have
host processes too."""


def mark_run() -> None:
    """Mark this process and its future children as part of this test run."""
    os.environ[_RUN] = uuid.uuid4().hex


def process_ids() -> set[int]:
    """Return the PIDs of the live processes of the machine."""
    return {int(name) for name in os.listdir("/proc") if name.isdecimal()}


def host_processes(ignored: Container[int] = ()) -> set[int]:
    """Return the PIDs of the live host processes of this run, including those whose engine is
    dead.

    :param ignored: PIDs that are not looked at; looking at a process takes 30 times as long as
        listing it.
    """
    mark = f"{_RUN}={os.environ[_RUN]}".encode()
    found = set()
    for pid in process_ids():
        if pid not in ignored and _is_host(pid, mark):
            found.add(pid)
    return found


def _is_host(pid: int, mark: bytes) -> bool:
    directory = Path("/proc", str(pid))
    with suppress(OSError):  # the process has ended
        command = (directory / "cmdline").read_bytes()
        if command.endswith(b"\0persistkv-host\0"):
            return mark in (directory / "environ").read_bytes().split(b"\0")
    return False


def descendants(pid: int) -> list[int]:
    """Return the PIDs of the live descendants of a process."""
    children = defaultdict(list)
    for child in process_ids():
        with suppress(OSError):
            status = Path("/proc", str(child), "stat").read_text()
            parent = status.rpartition(")")[2].split()[1]
            children[int(parent)].append(child)
    found = [pid]
    for one in found:  # grows during the loop
        found += children[one]
    return found[1:]


def kill_tree(pid: int) -> None:
    """Kill a process and all its descendants."""
    for one in [pid, *descendants(pid)]:
        with suppress(ProcessLookupError):
            os.kill(one, signal.SIGKILL)
