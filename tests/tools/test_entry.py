"""Exits of a command and of its child process: damaged stores, signals, closed output."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import closing
from pathlib import Path

import pytest

from persistkv.config import StoreUrl
from persistkv.storage import open_backend
from tests.tools.conftest import Run
from tests.tools.contexts import Contexts
from tests.tools.signals import obey_ctrl_c


@pytest.fixture
def store(url: str) -> str:
    with closing(open_backend(url)) as backend:
        writer = Contexts(backend)
        for number in range(16):
            writer.add(f"r{number}", " ".join(f"{number}-{word}" for word in range(32)))
    return url


@pytest.mark.parametrize("command", [("stat",), ("ls",), ("verify",), ("show", "r3")])
def test_command_truncated_catalogue_exits_3(
    start: Run, store: str, command: tuple[str, ...]
) -> None:
    """The command opens the store in a child process, because reads of a truncated catalogue end
    with SIGBUS."""
    file = Path(StoreUrl.parse(store).location) / "data.mdb"
    os.truncate(file, 3 * 4096)
    done = start(command[0], store, *command[1:])
    assert done.returncode == 3, done.stderr
    assert done.stdout == ""
    assert done.stderr.startswith("persistkv: ")
    assert done.stderr.count("\n") == 1


@pytest.fixture
def slow(store: str, tmp_path: Path) -> Iterator[tuple[subprocess.Popen[str], int]]:
    """A long-running command, and its child process that does the work."""
    command = [
        sys.executable,
        "-m",
        "persistkv_tools",
        "verify",
        store,
        "--rate",
        "4KiB",
        "--resume",
        "state",
    ]
    process = subprocess.Popen(command, cwd=tmp_path, stderr=subprocess.PIPE, text=True)
    wait_until(lambda: (tmp_path / "state").exists() and children(process.pid))
    (child,) = children(process.pid)
    yield process, child
    process.kill()
    process.communicate(timeout=60)


def children(pid: int) -> list[int]:
    try:
        return [
            int(word)
            for word in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
        ]
    except FileNotFoundError:
        return []


def is_gone(pid: int) -> bool:
    try:
        return (
            Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "Z"
        )
    except (FileNotFoundError, ProcessLookupError):
        return True


def wait_until(holds: Callable[[], object]) -> None:
    deadline = time.monotonic() + 60
    while not holds():
        assert time.monotonic() < deadline
        time.sleep(0.02)


@pytest.mark.skipif(
    not Path(f"/proc/self/task/{os.getpid()}/children").exists(),
    reason="the kernel lists no children",
)
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGKILL])
def test_command_terminated_or_killed_ends_child_process(
    slow: tuple[subprocess.Popen[str], int], number: signal.Signals
) -> None:
    process, child = slow
    process.send_signal(number)
    assert process.wait(60) == -number
    wait_until(lambda: is_gone(child))


@pytest.mark.parametrize("options", [(), ("--json",)])
def test_ls_closed_output_exits_141_silently(
    store: str, options: tuple[str, ...]
) -> None:
    reader, writer = os.pipe()
    os.close(reader)
    command = [sys.executable, "-m", "persistkv_tools", "ls", store, *options]
    done = subprocess.run(
        command,
        stdout=writer,
        stderr=subprocess.PIPE,
        text=True,
        timeout=120,
        check=False,
    )
    os.close(writer)
    assert (done.returncode, done.stderr) == (141, "")


@pytest.mark.parametrize(
    ("arguments", "is_lowered"),
    [
        (["ls", "lmdb:///kv"], True),
        (["verify", "lmdb:///kv", "--rate", "1MiB"], True),
        # repair holds locks that engines wait for
        (["verify", "lmdb:///kv", "--repair"], False),
        (["prune", "lmdb:///kv", "--orphans"], False),
        (["prune", "lmdb:///kv", "--orphans", "--dry-run"], True),
        (["--help"], False),
        ([], False),
    ],
)
def test_lower_priority_applies_only_to_reading_commands(
    arguments: list[str], is_lowered: bool
) -> None:
    program = (
        f"import os, persistkv_tools.entry as s; s.lower_priority({arguments!r}); "
        f"print(os.nice(0))"
    )
    before = os.nice(0)
    done = subprocess.run(
        [sys.executable, "-c", program],
        capture_output=True,
        text=True,
        check=True,
        timeout=120,
    )
    assert (int(done.stdout) > before) == is_lowered


def test_command_interrupted_during_imports_ends_silently() -> None:
    program = """
import os, signal, sys
class CtrlC:
    def find_spec(self, name, path=None, target=None):
        if name == "rich":
            os.kill(os.getpid(), signal.SIGINT)
sys.meta_path.insert(0, CtrlC())
sys.argv = ["persistkv", "ls", "lmdb:///absent"]
from persistkv_tools.entry import main
main()
"""
    command = [sys.executable, "-c", program]
    done = subprocess.run(
        command,
        capture_output=True,
        text=True,
        check=False,
        timeout=120,
        preexec_fn=obey_ctrl_c,
    )
    assert (done.returncode, done.stdout, done.stderr) == (-signal.SIGINT, "", "")


def test_command_with_hanging_thread_exits_at_once() -> None:
    program = """
import sys, time
from concurrent.futures import ThreadPoolExecutor
from persistkv_tools import cli, entry

def interrupted(*, may_retry):
    ThreadPoolExecutor(1).submit(time.sleep, 3600)
    print("so far")
    sys.exit(130)

cli.main = interrupted
entry.main()
"""
    done = subprocess.run(
        [sys.executable, "-c", program],
        capture_output=True,
        text=True,
        check=False,
        timeout=60,
    )
    assert (done.returncode, done.stdout, done.stderr) == (130, "so far\n", "")
