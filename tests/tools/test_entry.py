"""What ends the command, and what becomes of it."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from contextlib import closing
from pathlib import Path

import pytest

from persistkv.config import StoreUrl
from persistkv.storage.registry import open_backend
from tests.tools.contexts import Contexts


@pytest.fixture
def store(url):
    with closing(open_backend(url)) as backend:
        writer = Contexts(backend)
        for number in range(16):
            writer.add(f"r{number}", " ".join(f"{number}-{word}" for word in range(32)))
    return url


@pytest.mark.parametrize("command", [("stat",), ("ls",), ("verify",), ("show", "r3")])
def test_a_catalogue_that_was_cut_is_an_error_of_the_store(start, store, command):
    """Without a process of its own the command would be ended by SIGBUS."""
    file = Path(StoreUrl.parse(store).location) / "data.mdb"
    os.truncate(file, 3 * 4096)
    done = start(command[0], store, *command[1:])
    assert done.returncode == 3, done.stderr
    assert done.stdout == ""
    assert done.stderr.startswith("persistkv: ")
    assert done.stderr.count("\n") == 1


@pytest.fixture
def slow(store, tmp_path):
    """A command that takes long, and the process that does the work."""
    command = [sys.executable, "-m", "persistkv_tools", "verify", store, "--rate", "4KiB", "--resume", "state"]
    process = subprocess.Popen(command, cwd=tmp_path, stderr=subprocess.PIPE, text=True)
    wait_until(lambda: (tmp_path / "state").exists() and children(process.pid))
    (child,) = children(process.pid)
    yield process, child
    process.kill()
    process.communicate(timeout=60)


def children(pid: int) -> list[int]:
    try:
        return [int(word) for word in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]
    except FileNotFoundError:
        return []


def is_gone(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "Z"
    except (FileNotFoundError, ProcessLookupError):
        return True


def wait_until(holds) -> None:
    deadline = time.monotonic() + 60
    while not holds():
        assert time.monotonic() < deadline
        time.sleep(0.02)


@pytest.mark.skipif(not Path(f"/proc/self/task/{os.getpid()}/children").exists(), reason="the kernel tells no children")
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGKILL])
def test_who_ends_it_ends_what_works_for_it(slow, number):
    process, child = slow
    process.send_signal(number)
    assert process.wait(60) == -number
    wait_until(lambda: is_gone(child))
