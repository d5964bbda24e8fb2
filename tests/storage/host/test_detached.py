"""The host process outlives its engine and exits within a bounded time."""

from __future__ import annotations

import os
import pty
import random
import signal
import subprocess
import sys
import termios
import textwrap
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path

import pytest

from persistkv.errors import HostError
from persistkv.storage.host import supervisor
from persistkv.storage.host.client import StoreClient
from persistkv.storage.host.hosts import ProcessHost
from persistkv.storage.host.in_flight import JobOutcome
from persistkv.storage.host.supervisor import State
from tests.host_processes import host_processes, kill_tree
from tests.storage.host.engine_program import content
from tests.storage.host.hosted import Hosted
from tests.storage.host.jobs import (
    BLOCK,
    ENGINE_AS_INIT,
    KINDS,
    end,
    make_keys,
    pid_of,
    wait_for,
)

ROOT = Path(__file__).parents[3]
PROGRAM = "tests.storage.host.engine_program"
FOR_ENGINE = (
    signal.SIGINT,
    signal.SIGTERM,
    signal.SIGHUP,
    signal.SIGTSTP,
    signal.SIGTTIN,
    signal.SIGTTOU,
)
"""Signals of terminals and shells, which are meant for the engine."""
SLOW_REPEATS = int(os.environ.get("PERSISTKV_REPEATS", "20"))


@contextmanager
def engine(url: str, first: int, sizes: str) -> Iterator[tuple[int, int]]:
    """Run an engine until its jobs are answered; yield its PID and the PID of its host process."""
    command = [sys.executable, "-m", PROGRAM, url, str(first), sizes]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT), *sys.path])}
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, cwd=ROOT, env=environment, process_group=0
    ) as process:
        try:
            assert process.stdout is not None
            yield process.pid, int(process.stdout.readline())
        finally:
            kill_tree(process.pid)


LEADER = """
import fcntl, signal, subprocess, sys, termios
for number in (signal.SIGINT, signal.SIGHUP):  # ignored in tests that run in the background
    signal.signal(number, signal.SIG_DFL)
fcntl.ioctl(0, termios.TIOCSCTTY, 0)
subprocess.run([sys.executable, "-m", *sys.argv[1:]])
"""
"""Leader of a session with a terminal: makes its standard input the terminal, then runs a module in
the foreground."""


@contextmanager
def engine_in_terminal(
    url: str,
    first: int,
    sizes: str,
) -> Iterator[tuple[int, int, int]]:
    """Run an engine in the foreground of a new terminal until its jobs are answered. Yield the PID
    of the session's leader, the PID of the host process, and the terminal's other end, which the
    caller may close.

    The terminal stops background processes that write to it.
    """
    master, slave = pty.openpty()
    settings = termios.tcgetattr(slave)
    settings[3] |= termios.TOSTOP
    termios.tcsetattr(slave, termios.TCSANOW, settings)
    command = [sys.executable, "-c", LEADER, PROGRAM, url, str(first), sizes]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT), *sys.path])}
    with subprocess.Popen(
        command,
        stdin=slave,
        stdout=subprocess.PIPE,
        stderr=slave,
        cwd=ROOT,
        env=environment,
        start_new_session=True,
    ) as process:
        os.close(slave)
        try:
            assert process.stdout is not None
            yield process.pid, int(process.stdout.readline()), master
        finally:
            kill_tree(process.pid)
            with suppress(OSError):
                os.close(master)


def wait_until(condition: Callable[[], bool], timeout_s: float = 60.0) -> None:
    deadline = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.005)


def status(pid: int) -> dict[str, str]:
    lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    return {
        name: value.strip()
        for name, _, value in (line.partition(":") for line in lines)
    }


def test_host_process_has_own_group_in_engine_session_and_own_signals(
    tmp_path: Path,
) -> None:
    with engine(f"lmdb://{tmp_path}/store", 0, "1") as (pid, host):
        found = status(host)
        ignored = int(found["SigIgn"], 16)
        assert not any(
            ignored >> (number - 1) & 1 for number in (signal.SIGALRM, signal.SIGCHLD)
        )
        assert all(ignored >> (number - 1) & 1 for number in FOR_ENGINE)
        assert int(found["SigBlk"], 16) == 0
        assert int(found["PPid"]) != pid
        assert os.getsid(host) == os.getsid(pid), (
            "autogroups: it shares the engine's part of the CPU time"
        )
        assert os.getpgid(host) not in (os.getpgid(pid), os.getpgid(0))
        assert (
            os.sched_getaffinity(host)
            == os.sched_getaffinity(0)
            > os.sched_getaffinity(pid)
            or os.cpu_count() == 1
        )
        assert os.readlink(f"/proc/{host}/cwd") == "/"
        limits = Path(f"/proc/{host}/limits").read_text().splitlines()
        soft, hard = next(
            line for line in limits if line.startswith("Max open files")
        ).split()[3:5]
        assert soft == hard


def kill_and_verify(hosted: Hosted, tmp_path: Path, repeats: int) -> None:
    """Kill engines with their process trees; each time, the next engine must find all accepted
    blocks."""
    chance = random.Random(repeats)
    url = f"lmdb://{tmp_path}/store?capacity=1GiB"
    first = 0
    for _ in range(repeats):
        sizes = [chance.choice([1, 3, 30, 70]) for _ in range(chance.randint(1, 3))]
        with engine(url, first, ",".join(map(str, sizes))) as (pid, host):
            kill_tree(pid)
        verify(hosted, url, first, sum(sizes), host)
        first += sum(sizes)


def verify(hosted: Hosted, url: str, first: int, count: int, host: int) -> None:
    """Check that another engine finds all accepted blocks of a killed one, and that the killed
    one's host has exited.

    The blocks are not committed before the kill, so they are found only if the host survives it.
    """
    client = hosted.connect(url, refresh_s=0.05)
    client.open()
    keys = make_keys(count, first)
    wait_until(lambda: client.poll() == [] and all(map(client.contains, keys)))
    for start in range(0, len(keys), 100):
        part = keys[start : start + 100]
        client.submit_load(start, part, range(len(part)))
        assert hosted.finish(client, start).failed == []
        for row in range(len(part)):
            assert hosted.array[row].tobytes() == content(first + start + row)
    assert client.close()
    wait_until(lambda: host not in host_processes())


def test_accepted_blocks_survive_killed_process_tree(
    hosted: Hosted,
    tmp_path: Path,
) -> None:
    kill_and_verify(hosted, tmp_path, 3)


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM, signal.SIGHUP])
def test_accepted_blocks_survive_killed_process_group(
    hosted: Hosted,
    tmp_path: Path,
    number: signal.Signals,
) -> None:
    url = f"lmdb://{tmp_path}/store"
    with engine(url, 0, "3") as (pid, host):
        os.killpg(os.getpgid(pid), number)
    verify(hosted, url, 0, 3, host)


@pytest.mark.parametrize("end", ["leader", "terminal", "interrupt"])
def test_accepted_blocks_survive_end_of_terminal(
    hosted: Hosted,
    tmp_path: Path,
    end: str,
) -> None:
    """The leader of the session is killed, the terminal hangs up, or its user presses Ctrl-C."""
    url = f"lmdb://{tmp_path}/store"
    with engine_in_terminal(url, 0, "3") as (leader, host, terminal):
        match end:
            case "leader":
                os.kill(leader, signal.SIGKILL)
            case "terminal":
                os.close(terminal)
            case "interrupt":
                os.write(terminal, b"\x03")
        verify(hosted, url, 0, 3, host)


@pytest.mark.slow
@pytest.mark.timeout(3600)
def test_accepted_blocks_survive_many_killed_process_trees(
    hosted: Hosted,
    tmp_path: Path,
) -> None:
    kill_and_verify(hosted, tmp_path, SLOW_REPEATS)


def wait_until_answered(client: StoreClient, hosted: Hosted, held: list[bytes]) -> None:
    """Wait for a host that answers."""
    while True:
        # a host that was just killed may still count as OPEN
        wait_for(client, State.OPEN)
        client.submit_load(6, held, range(len(held)))
        if not hosted.finish(client, 6).failed:
            return


def end_and_reuse(
    hosted: Hosted,
    tmp_path: Path,
    side: str,
    repeats: int,
    kind: str = "process",
) -> None:
    """End one side during transfers, then reuse the free rows; no transfer may read or write them
    afterwards."""
    chance = random.Random(repeats)
    url = f"lmdb://{tmp_path}/store?capacity=256MiB"
    client = hosted.connect(url, kind)
    client.open()
    held = make_keys(64)
    hosted.array[:64] = 1
    client.submit_store(0, "a", held, range(64), None, 64 * BLOCK)
    assert hosted.finish(client, 0).failed == []
    assert client.flush(60)
    for number in range(repeats):
        if client.state is State.CLOSED:
            client = hosted.connect(url, kind)
            client.open()
        wait_until_answered(client, hosted, held[:1])
        hosted.array[64:] = 2
        client.submit_load(1, held, range(64))
        client.submit_store(
            2, "b", make_keys(64, 1000 + 64 * number), range(64, 128), None, 64 * BLOCK
        )
        client.submit_load(3, held, range(64))
        time.sleep(chance.random() * 0.02)
        if side == "engine":
            client.close(chance.choice([0.0, 1.0]))
            assert {outcome.job_id for outcome in client.poll()} == {1, 2, 3}
        else:
            os.kill(pid_of(hosted), signal.SIGKILL)
            left = {1, 2, 3}
            while left:
                left -= {outcome.job_id for outcome in client.poll()}
        hosted.array[:] = 3
        time.sleep(0.02)
        assert (hosted.array == 3).all(), "a row was written after it was free"
    if client.state is State.CLOSED:
        client = hosted.connect(url, kind)
        client.open()
    wait_until_answered(client, hosted, held[:1])
    client.submit_load(4, held, range(64))
    assert hosted.finish(client, 4).failed == []
    assert (hosted.array[:64] == 1).all()
    later = [key for key in make_keys(64 * repeats, 1000) if client.contains(key)][:64]
    client.submit_load(5, later, range(len(later)))
    assert hosted.finish(client, 5).failed == []
    assert (hosted.array[: len(later)] == 2).all(), "a row was read after it was free"


@pytest.mark.parametrize("side", ["engine", "host"])
def test_rows_are_unused_after_engine_close_or_host_kill(
    hosted: Hosted,
    tmp_path: Path,
    side: str,
) -> None:
    end_and_reuse(hosted, tmp_path, side, 4)


def test_rows_are_unused_after_thread_host_close(
    hosted: Hosted, tmp_path: Path
) -> None:
    end_and_reuse(hosted, tmp_path, "engine", 4, "thread")


@pytest.mark.slow
@pytest.mark.timeout(7200)
@pytest.mark.parametrize("side", ["engine", "host"])
def test_rows_are_unused_after_many_engine_closes_or_host_kills(
    hosted: Hosted,
    tmp_path: Path,
    side: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    # otherwise each restart waits up to 30 s
    monkeypatch.setattr(supervisor, "HEALTHY_S", 0.0)
    end_and_reuse(hosted, tmp_path, side, SLOW_REPEATS)


@pytest.mark.parametrize("kind", KINDS)
def test_close_without_time_to_flush_keeps_accepted_blocks(
    hosted: Hosted,
    tmp_path: Path,
    kind: str,
) -> None:
    url = f"lmdb://{tmp_path}/store"
    client = hosted.connect(url, kind, max_age_s=1e6)
    client.open()
    client.submit_store(1, "a", make_keys(3), range(3), None, 3 * BLOCK)
    hosted.finish(client, 1)
    client.end_request(end("a", make_keys(3)))
    client.close(0.0)
    again = hosted.connect(url, refresh_s=0.05)
    again.open()
    wait_until(lambda: again.poll() == [] and all(map(again.contains, make_keys(3))))


def test_open_with_too_short_region_raises(hosted: Hosted, tmp_path: Path) -> None:
    """The host process dies before it replies; it and its replacements are dead when the call
    returns."""
    template = hosted.connect(f"lmdb://{tmp_path}/store")
    os.ftruncate(hosted.fd, BLOCK)
    host = ProcessHost((hosted.fd,), len(hosted.memory))
    client = StoreClient(host, template.supervisor.hello, max_queue_bytes=1 << 30)
    with pytest.raises(HostError, match="died while it opened"):
        client.open()
    wait_until(lambda: not host_processes(), 5)
    os.ftruncate(hosted.fd, len(hosted.memory))


def test_region_truncated_in_use_fails_jobs_and_host_restarts(
    hosted: Hosted,
    tmp_path: Path,
) -> None:
    client = hosted.connect(f"lmdb://{tmp_path}/store")
    client.open()
    held = make_keys(64)
    client.submit_store(1, "a", held, range(64), None, 64 * BLOCK)
    assert hosted.finish(client, 1).failed == []
    expected = hosted.array[:64].copy()
    os.ftruncate(hosted.fd, 0)
    client.submit_load(2, held, range(64))
    loaded = hosted.finish(client, 2)
    assert sorted(loaded.failed) == sorted(held)
    client.submit_store(3, "b", make_keys(64, 64), range(64), None, 64 * BLOCK)
    stored = hosted.finish(client, 3)
    assert stored.refused, "it was ended by SIGBUS"
    found = client.contains(held[0])
    assert not found
    os.ftruncate(hosted.fd, len(hosted.memory))
    wait_until_answered(client, hosted, held[:1])
    client.submit_load(4, held, range(64))
    assert hosted.finish(client, 4).failed == []
    assert (hosted.array[:64] == expected).all()


@pytest.fixture
def full_region(tmp_path: Path) -> Iterator[int]:
    """Sparse file of 128 blocks on a tmpfs with room for 64; its first 64 blocks are allocated."""
    directory = tmp_path / "shm"
    directory.mkdir()
    size = f"size={64 * BLOCK}"
    if subprocess.run(
        ["mount", "-t", "tmpfs", "-o", size, "none", directory], capture_output=True
    ).returncode:
        pytest.skip("mounting a tmpfs needs privileges")
    fd = os.open(directory / "rows", os.O_RDWR | os.O_CREAT)
    try:
        os.ftruncate(fd, 128 * BLOCK)
        os.posix_fallocate(fd, 0, 64 * BLOCK)
        yield fd
    finally:
        os.close(fd)
        subprocess.run(["umount", "--lazy", directory], check=True)


def test_region_on_full_tmpfs_fails_jobs_and_host_restarts(
    hosted: Hosted,
    tmp_path: Path,
    full_region: int,
) -> None:
    hello = hosted.connect(f"lmdb://{tmp_path}/store").supervisor.hello
    client = StoreClient(
        ProcessHost((full_region,), 128 * BLOCK), hello, max_queue_bytes=1 << 30
    )
    hosted.clients.append(client)
    client.open()
    held = make_keys(64)
    client.submit_store(1, "a", held, range(64), None, 64 * BLOCK)
    assert hosted.finish(client, 1).failed == []
    client.submit_load(2, held, range(64, 128))
    loaded = hosted.finish(client, 2)
    assert sorted(loaded.failed) == sorted(held), "a system call found the fault"
    for job in (3, 4):
        client.submit_store(
            job, "b", make_keys(64, 64), range(64, 128), None, 64 * BLOCK
        )
        stored = hosted.finish(client, job)
        assert stored.refused, "it was ended by SIGBUS"
        wait_for(client, State.OPEN)
    assert client.counters.restarts == 2
    client.submit_load(5, held, range(64))
    assert hosted.finish(client, 5).failed == []


HANGING_DRIVER = """
    import fcntl, time
    from pathlib import Path
    from persistkv.storage.backend import Backend
    from persistkv.testing import FaultyBackend
    from persistkv_lmdb import LmdbBackend

    class HangingBackend(Backend):
        @classmethod
        def open(cls, url, *, read_only=False):
            store = Path(url.location)

            def hang(call):
                if store.with_suffix(".hang-" + call).exists():
                    with open(store / "writer.lock", "r+") as lock:
                        if call == "commit":
                            fcntl.flock(lock, fcntl.LOCK_EX)
                        time.sleep(600)

            backend = FaultyBackend.of(LmdbBackend.open(url, read_only=read_only))
            for call in ("read", "commit"):
                backend.before(call, lambda *_, call=call: hang(call))
            return backend

    for name in HangingBackend.__abstractmethods__:
        setattr(HangingBackend, name, None)
"""


@pytest.fixture
def hanging(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[str], None]:
    """Install a driver for LMDB whose calls hang once a file exists; return a function that creates
    this file."""
    installed = tmp_path / "site" / "hanging-1.dist-info"
    installed.mkdir(parents=True)
    (installed / "METADATA").write_text(
        "Metadata-Version: 2.1\nName: hanging\nVersion: 1\n"
    )
    (installed / "entry_points.txt").write_text(
        "[persistkv.backends]\nhanging = hanging_driver:HangingBackend\n"
    )
    (tmp_path / "site" / "hanging_driver.py").write_text(
        textwrap.dedent(HANGING_DRIVER)
    )
    monkeypatch.syspath_prepend(tmp_path / "site")
    return lambda call: (tmp_path / f"store.hang-{call}").touch()


def hanging_store(hosted: Hosted, tmp_path: Path) -> StoreClient:
    """Return a client of the driver that can hang, after it stored 64 blocks and staged 3."""
    client: StoreClient = hosted.connect(f"hanging://{tmp_path}/store", max_age_s=1e6)
    client.open()
    client.submit_store(1, "a", make_keys(64), range(64), None, 64 * BLOCK)
    client.submit_store(2, "a", make_keys(3, 64), range(64, 67), None, 3 * BLOCK)
    assert hosted.finish(client, 2).failed == []
    return client


def abandon(client: StoreClient) -> None:
    """Leave the host of a client alone, as the death of the engine does."""
    client.idle.stop()
    client.supervisor.connection.close()


def test_watchdog_hung_read_kills_host_without_stalling_engine(
    hosted: Hosted,
    tmp_path: Path,
    hanging: Callable[[str], None],
    caplog: pytest.LogCaptureFixture,
) -> None:
    client = hosted.connect(f"hanging://{tmp_path}/store", watchdog_s=0.3)
    client.open()
    held = make_keys(64)
    client.submit_store(1, "a", held, range(64), None, 64 * BLOCK)
    assert hosted.finish(client, 1).failed == []
    hanging("read")
    before = hosted.array.copy()
    client.submit_load(2, held, range(64, 128))
    longest = 0.0
    outcomes: Sequence[JobOutcome] = []
    while not outcomes:
        begin = time.perf_counter()
        outcomes = client.poll()
        longest = max(longest, time.perf_counter() - begin)
        time.sleep(0.001)
    assert outcomes[0].refused
    assert longest < 1, "the engine stalled"
    assert "has not ended for" in caplog.text
    assert (hosted.array == before).all()
    wait_for(client, State.OPEN)


def test_load_with_hung_read_kills_host_after_deadline(
    hosted: Hosted,
    tmp_path: Path,
    hanging: Callable[[str], None],
    caplog: pytest.LogCaptureFixture,
) -> None:
    """With the default watchdog. No row is written after the load has failed."""
    client = hosted.connect(f"hanging://{tmp_path}/store")
    client.open()
    held = make_keys(64)
    client.submit_store(1, "a", held, range(64), None, 64 * BLOCK)
    assert hosted.finish(client, 1).failed == []
    hanging("read")
    before = hosted.array.copy()
    pid = pid_of(hosted)
    client.submit_load(2, held, range(64, 128), time.monotonic() + 0.1)
    outcome = hosted.finish(client, 2, timeout_s=30)
    assert outcome.refused
    assert outcome.is_late
    assert pid not in host_processes()
    assert "after the deadline of its load" in caplog.text
    wait_for(client, State.OPEN)
    assert (hosted.array == before).all()


def test_load_behind_hung_ones_fails_at_its_deadline(
    hosted: Hosted,
    tmp_path: Path,
    hanging: Callable[[str], None],
) -> None:
    """The host answers it: none of its rows is in use."""
    client = hosted.connect(f"hanging://{tmp_path}/store")
    client.open()
    held = make_keys(8)
    client.submit_store(1, "a", held, range(8), None, 8 * BLOCK)
    client.end_request(end("a", held))
    assert client.flush(60)
    hosted.finish(client, 1)
    hanging("read")
    for job in range(2, 6):
        client.submit_load(job, held, range(8 * job, 8 * job + 8))
    client.submit_load(6, held, range(8), time.monotonic() + 0.2)
    outcome = hosted.finish(client, 6, timeout_s=30)
    assert (outcome.failed, outcome.refused) == (held, False)
    assert outcome.is_late
    assert client.num_jobs == 4
    client.supervisor.mark_lost()  # or its end would wait for the reads


@pytest.mark.slow
def test_orphan_host_with_hung_read_commits_accepted_blocks(
    hosted: Hosted,
    tmp_path: Path,
    hanging: Callable[[str], None],
) -> None:
    client = hanging_store(hosted, tmp_path)
    assert client.flush(60)
    client.submit_store(3, "b", make_keys(3, 100), range(100, 103), None, 3 * BLOCK)
    assert hosted.finish(client, 3).failed == []
    hanging("read")
    client.submit_load(4, make_keys(64), range(64))
    time.sleep(0.2)
    pid = pid_of(hosted)
    os.kill(pid, signal.SIGSTOP)
    abandon(client)
    begin = time.monotonic()
    again = hosted.connect(f"lmdb://{tmp_path}/store", "thread")
    again.open()
    assert not any(map(again.contains, make_keys(3, 100)))
    os.kill(pid, signal.SIGCONT)
    # before the alarm, which ends the orphan after 20 s
    wait_until(
        lambda: again.poll() == [] and all(map(again.contains, make_keys(3, 100))), 15
    )
    wait_until(lambda: pid not in host_processes(), 30)
    assert time.monotonic() - begin < 25


@pytest.mark.slow
def test_open_succeeds_after_alarm_ends_hung_orphan_host(
    hosted: Hosted,
    tmp_path: Path,
    hanging: Callable[[str], None],
) -> None:
    """The orphan holds the store's write lock."""
    client = hanging_store(hosted, tmp_path)
    wait_until(lambda: client.poll() == [] and client.contains(make_keys(1)[0]))
    hanging("commit")
    orphan = pid_of(hosted)
    abandon(client)
    begin = time.monotonic()
    again = hosted.connect(f"lmdb://{tmp_path}/store")
    again.open()
    assert 10 < time.monotonic() - begin < 30
    assert orphan not in host_processes()
    again.submit_load(1, make_keys(64), range(64))
    assert hosted.finish(again, 1).failed == []


AS_INIT = (
    ENGINE_AS_INIT
    + """
import os, signal
from persistkv.storage.host.supervisor import State
os.kill(client.host.pid, signal.SIGKILL)
while client.state is State.OPEN:
    client.poll()
while client.state is not State.OPEN:
    client.poll()
assert client.close()
try:
    left = os.waitpid(-1, os.WNOHANG)
except ChildProcessError:
    left = None
print(left)
"""
)


@pytest.mark.skipif(
    subprocess.run(
        ["unshare", "--pid", "--fork", "true"], capture_output=True, check=False
    ).returncode
    != 0,
    reason="PID namespaces need privileges",
)
def test_engine_as_pid_1_reaps_host_processes(tmp_path: Path) -> None:
    command = [
        "unshare",
        "--pid",
        "--fork",
        "--kill-child",
        sys.executable,
        "-c",
        AS_INIT,
    ]
    ended = subprocess.run(
        [*command, f"lmdb://{tmp_path}/store"],
        capture_output=True,
        text=True,
        check=True,
    )
    assert ended.stdout == "None\n"
