"""Host processes and process trees, found in /proc."""

from __future__ import annotations

import os
import signal
import uuid
from collections import defaultdict
from contextlib import suppress
from pathlib import Path

_RUN = "PERSISTKV_TEST_RUN"
"""Environment variable that marks the processes of one test run: other runs on the machine have
host processes too."""


def mark_run() -> None:
    """Mark this process and its future children as part of this test run."""
    os.environ[_RUN] = uuid.uuid4().hex


def host_processes() -> set[int]:
    """Return the PIDs of the live host processes of this run, including those whose engine is
    dead."""
    mark = f"{_RUN}={os.environ[_RUN]}".encode()
    found = set()
    for directory in Path("/proc").iterdir():
        if directory.name.isdecimal():
            with suppress(OSError):  # the process has ended
                if (directory / "cmdline").read_bytes().endswith(
                    b"\0persistkv-host\0"
                ) and mark in (directory / "environ").read_bytes().split(b"\0"):
                    found.add(int(directory.name))
    return found


def descendants(pid: int) -> list[int]:
    """Return the PIDs of the live descendants of a process."""
    children = defaultdict(list)
    for directory in Path("/proc").iterdir():
        if directory.name.isdecimal():
            with suppress(OSError):
                parent = (directory / "stat").read_text().rpartition(")")[2].split()[1]
                children[int(parent)].append(int(directory.name))
    found = [pid]
    for one in found:  # grows during the loop
        found += children[one]
    return found[1:]


def kill_tree(pid: int) -> None:
    """Kill a process and all its descendants."""
    for one in [pid, *descendants(pid)]:
        with suppress(ProcessLookupError):
            os.kill(one, signal.SIGKILL)
