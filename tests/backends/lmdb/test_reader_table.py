"""Processes with the same PID in different PID namespaces, as in containers."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from persistkv.config import StoreUrl
from persistkv.storage.backend import CommitBatch
from persistkv.storage.format.pack_writer import PackWriter
from persistkv.testing.conformance.suite import tables
from persistkv.testing.samples import sample_pack
from persistkv_lmdb import LmdbBackend
from tests.backends.lmdb.conftest import Opener, stdout_of

IN_NAMESPACE = ["unshare", "--pid", "--fork", "--kill-child"]

pytestmark = pytest.mark.skipif(
    subprocess.run([*IN_NAMESPACE, "true"], capture_output=True, check=False).returncode
    != 0,
    reason="PID namespaces need privileges",
)

HOLD = """
import os, sys
from persistkv.config import StoreUrl
from persistkv_lmdb import LmdbBackend
assert os.getpid() == 1
backend = LmdbBackend.open(StoreUrl.parse(sys.argv[1]))
print("open", flush=True)
sys.stdin.read()
"""

READ = """
import lmdb, os, sys
assert os.getpid() == 1
env = lmdb.open(sys.argv[1], readonly=True, max_readers=512)
with env.begin():
    print("inside", flush=True)
    sys.stdin.read()
"""

OPEN = """
import os, sys
from persistkv.config import StoreUrl
from persistkv.errors import ProcessIdInUseError
from persistkv_lmdb import LmdbBackend
assert os.getpid() == 1
try:
    print(LmdbBackend.open(StoreUrl.parse(sys.argv[1]), read_only=sys.argv[2] == "True").stats().packs)
except ProcessIdInUseError as error:
    print("in use:", error)
"""


@pytest.fixture
def placement() -> str:
    """The one placement of the tests: payloads are in the pages that readers hold."""
    return "inline"


@contextmanager
def in_pid_namespace(program: str, *arguments: str) -> Iterator[subprocess.Popen[str]]:
    """A process with PID 1 in its own PID namespace, killed at the end of the block."""
    command = [*IN_NAMESPACE, sys.executable, "-c", program, *arguments]
    with subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as process:
        try:
            yield process
        finally:
            process.kill()


@pytest.mark.parametrize("read_only", [False, True])
def test_open_live_process_with_same_pid_raises_with_reason(
    path: Path,
    closed_pack: PackWriter,
    read_only: bool,
) -> None:
    with in_pid_namespace(HOLD, f"lmdb://{path}") as holder:
        assert stdout_of(holder).readline() == "open\n"
        with in_pid_namespace(OPEN, f"lmdb://{path}", str(read_only)) as other:
            said = stdout_of(other).readline()
    assert said.startswith("in use:")
    assert "PID namespace" in said


@pytest.mark.parametrize("read_only", [False, True])
def test_open_after_killed_reader_with_same_pid_clears_its_slot(
    path: Path,
    open_store: Opener,
    closed_pack: PackWriter,
    read_only: bool,
) -> None:
    """The slot of the killed reader would prevent the reuse of all pages that later commits
    free."""
    backend = open_store()
    with in_pid_namespace(READ, str(path)) as reader:
        assert stdout_of(reader).readline() == "inside\n"
    with in_pid_namespace(OPEN, f"lmdb://{path}", str(read_only)) as restarted:
        assert stdout_of(restarted).readline() == "1\n"
        before = backend.stats().disk_bytes
        for seed in range(60):
            pack = sample_pack(
                closed_pack.namespace, 100 + seed, blocks=4, block_bytes=1 << 16
            )
            backend.commit(pack.namespace, CommitBatch([pack]))
            backend.commit(pack.namespace, CommitBatch(deletions=[pack.pack_id]))
    assert set(tables(backend, closed_pack.namespace)) == {closed_pack.pack_id}
    assert backend.stats().disk_bytes < before + (8 << 20)


def test_open_live_process_with_other_pid_succeeds(
    path: Path,
    closed_pack: PackWriter,
) -> None:
    """Processes with another PID can still open the store."""
    with in_pid_namespace(HOLD, f"lmdb://{path}") as holder:
        assert stdout_of(holder).readline() == "open\n"
        backend = LmdbBackend.open(StoreUrl.parse(f"lmdb://{path}"))
        assert os.getpid() != 1
        assert len(tables(backend, closed_pack.namespace)) == 1
        backend.close()


COMMAND = """
import os, sys
from persistkv_tools.entry import main
assert os.getpid() == 1
sys.argv[1:] = ["stat", sys.argv[1]]
main()
"""

HOLD_PID_2 = """
import os, sys
child = os.fork()
if child:
    assert child == 2
    os.waitpid(child, 0)
    sys.exit()
from persistkv.config import StoreUrl
from persistkv_lmdb import LmdbBackend
backend = LmdbBackend.open(StoreUrl.parse(sys.argv[1]))
print("open", flush=True)
sys.stdin.read()
"""


def test_command_pid_in_use_runs_in_child_with_other_pid(
    path: Path,
    closed_pack: PackWriter,
) -> None:
    """Commands run in a child process, which has PID 2 in a fresh container."""
    with in_pid_namespace(HOLD_PID_2, f"lmdb://{path}") as holder:
        assert stdout_of(holder).readline() == "open\n"
        with in_pid_namespace(COMMAND, f"lmdb://{path}") as command:
            output = stdout_of(command).read()
            assert command.wait(60) == 0
    assert "requests" in output
