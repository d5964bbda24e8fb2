"""The engine's side, with each host: jobs, ends, deaths, bounds."""

from __future__ import annotations

import logging
import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from persistkv.config import GroupLayout, RowLayout
from persistkv.errors import ConfigurationError, HostError, IdentityMismatchError, StoreUnavailableError
from persistkv.storage.backend import CommitBatch
from persistkv.storage.host.client import State, StoreClient
from persistkv.storage.host.connection import Connection, SocketConnection
from persistkv.storage.host.launch import InlineHost, ProcessHost
from persistkv.storage.host.protocol import (
    EndRequest,
    Hello,
    JobDone,
    Opened,
    Ping,
    Pong,
    Stored,
    ToEngine,
    ToStore,
    Touch,
)
from persistkv.storage.keys import PackedKeys
from persistkv.storage.records import StoreOptions

KINDS = ["process", "thread", "inline"]
BLOCK = 64 << 10


def names(count: int, start: int = 0) -> list[bytes]:
    return [number.to_bytes(32, "little") + bytes(4) for number in range(start, start + count)]


def end(request: str, keys: list[bytes]) -> EndRequest:
    return EndRequest(request, f"m-{request}", (PackedKeys.of(keys),), 16 * len(keys), 16, True, {})


def pid_of(hosted: Any) -> int:
    host = hosted.hosts[-1]
    assert isinstance(host, ProcessHost)
    assert host.pid is not None
    return host.pid


def wait_for(client: StoreClient, state: State, timeout_s: float = 20.0) -> None:
    deadline = time.monotonic() + timeout_s
    while client.state is not state:
        assert time.monotonic() < deadline, f"still {client.state}"
        client.poll()
        time.sleep(0.001)


@pytest.mark.parametrize("kind", KINDS)
def test_store_load_and_reopen(hosted: Any, tmp_path: Path, kind: str) -> None:
    url = f"lmdb://{tmp_path}/store"
    client = hosted.connect(url, kind)
    client.open()
    large, small = names(70), names(3, 100)
    client.submit_store(1, "a", large, range(70), range(70), 70 * BLOCK)
    assert hosted.finish(client, 1).failed == []
    client.submit_store(2, "a", small, [100, 101, 102], [70, 71, 72], 3 * BLOCK)
    outcome = hosted.finish(client, 2)
    assert (outcome.failed, outcome.refused, outcome.num_bytes) == ([], False, 3 * BLOCK)
    client.end_request(end("a", large + small))
    assert client.flush(20)
    assert client.take_persisted() == {"a": True}
    assert sorted(client.take_stored()) == sorted(large + small)
    assert client.close()

    before = hosted.array.copy()
    hosted.array[:] = 0
    again = hosted.connect(url, kind)
    again.open()
    assert all(map(again.contains, large + small))
    assert again.take_stored() == [], "what opening found is no news"
    again.submit_load(7, [*large, b"x" * 32 + bytes(4), *small], range(74))
    outcome = hosted.finish(again, 7)
    assert (outcome.failed, outcome.num_bytes) == ([b"x" * 32 + bytes(4)], 73 * BLOCK)
    assert (hosted.array[:70] == before[:70]).all()
    assert (hosted.array[71:74] == before[100:103]).all()
    stats = again.stats()
    assert stats.host is not None
    assert stats.host.held_blocks == 73
    assert stats.host.counters.missed_blocks == 1


@pytest.mark.parametrize("kind", KINDS)
def test_errors_at_open_arrive_as_what_they_are(hosted: Any, tmp_path: Path, kind: str) -> None:
    with pytest.raises(ConfigurationError, match=r"url scheme: 'nope' is not valid; expected one of .*lmdb"):
        hosted.connect("nope:///x", kind).open()
    with pytest.raises(ConfigurationError, match="capacity"):
        hosted.connect(f"lmdb://{tmp_path}/a?capacity=-1", kind).open()
    with pytest.raises(ConfigurationError, match="codec"):
        hosted.connect(f"lmdb://{tmp_path}/a", kind, codec="none").open()
    (tmp_path / "file").write_text("in the way")
    with pytest.raises(StoreUnavailableError, match="file"):
        hosted.connect(f"lmdb://{tmp_path}/file", kind).open()
    hosted.connect(f"lmdb://{tmp_path}/b", kind).open()
    with pytest.raises(IdentityMismatchError, match="weights: 'other' here, 'w' stored") as caught:
        hosted.connect(f"lmdb://{tmp_path}/b", kind, identity={"weights": "other"}, strict_identity=True).open()
    assert caught.value.differences[0].field == "weights"


def test_a_notice_reaches_the_engine_once(hosted: Any, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    url = f"lmdb://{tmp_path}/store"
    hosted.connect(url).open()
    client = hosted.connect(url, identity={"weights": "v2"})
    with caplog.at_level(logging.WARNING):
        client.open()
    assert len(client.notices) == 1
    assert "weights: 'v2' here, 'w' stored" in client.notices[0]
    assert caplog.text.count("nearest namespace differs") == 1


def test_the_queue_is_bounded_in_bytes(hosted: Any, tmp_path: Path) -> None:
    client = hosted.connect(f"lmdb://{tmp_path}/store", max_queue_bytes=80 * BLOCK)
    client.open()
    os.kill(pid_of(hosted), signal.SIGSTOP)
    client.submit_store(1, "a", names(70), range(70), None, 70 * BLOCK)
    client.submit_store(2, "a", names(20, 70), range(70, 90), None, 20 * BLOCK)
    (refused,) = client.poll()
    assert (refused.job_id, refused.refused, len(refused.failed)) == (2, True, 20)
    assert client.counters.refused_bytes == 20 * BLOCK
    os.kill(pid_of(hosted), signal.SIGCONT)
    assert hosted.finish(client, 1).failed == []
    client.submit_store(3, "a", names(20, 70), range(70, 90), None, 20 * BLOCK)
    assert hosted.finish(client, 3).failed == []


def test_a_job_larger_than_the_queue_goes_alone(hosted: Any, tmp_path: Path) -> None:
    client = hosted.connect(f"lmdb://{tmp_path}/store", max_queue_bytes=BLOCK)
    client.open()
    client.submit_store(1, "a", names(70), range(70), None, 70 * BLOCK)
    client.submit_store(2, "a", names(1, 70), [70], None, BLOCK)
    assert hosted.finish(client, 2).refused
    assert hosted.finish(client, 1).failed == []


def test_a_bad_job_leaves_nothing_behind(hosted: Any) -> None:
    client = hosted.connect("memory://x", "inline")
    client.open()
    with pytest.raises(ValueError, match="keys have 0"):
        client.submit_store(1, "a", [b""], [0], None, BLOCK)
    assert not client.has_pending_work


def test_signals_to_the_host_are_the_engines_affair(hosted: Any, tmp_path: Path) -> None:
    """A supervisor ends all processes of a unit at once; what was taken is committed all the same."""
    url = f"lmdb://{tmp_path}/store"
    client = hosted.connect(url, max_age_s=1e6)
    client.open()
    client.submit_store(1, "a", names(2), [0, 1], None, 2 * BLOCK)
    hosted.finish(client, 1)
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        os.kill(pid_of(hosted), number)
    assert client.close()
    again = hosted.connect(url, "inline")
    again.open()
    assert all(map(again.contains, names(2)))


def test_a_forked_child_does_not_keep_the_host(hosted: Any, tmp_path: Path) -> None:
    client = hosted.connect(f"lmdb://{tmp_path}/store")
    client.open()
    child = os.fork()
    if child == 0:
        time.sleep(30)
        os._exit(0)
    try:
        begin = time.monotonic()
        assert client.close(timeout_s=20)
        assert time.monotonic() - begin < 15
    finally:
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)


def test_a_host_that_answers_slowly_is_not_killed() -> None:
    """Its oldest job is older than the watchdog's time, but it is at work: it answers others."""
    ours, theirs = socket.socketpair()
    host = SocketConnection(theirs, ToStore)

    class Slow(InlineHost):
        restartable = True

        def start(self) -> SocketConnection:
            return SocketConnection(ours, ToEngine)

    layout = RowLayout(4096, (GroupLayout(((0, 4096),)),))
    hello = Hello("memory://x", b"{}", layout, StoreOptions())
    client = StoreClient(Slow(memoryview(b"")), hello, max_queue_bytes=1 << 30, watchdog_s=0.3)
    host.send(Opened(b"n" * 16, ""))
    client.open()
    for job in range(8):
        client.submit_store(job, "a", names(1, job), [0], None, 4096)
    for job in range(1, 8):
        time.sleep(0.1)
        host.send(JobDone(job, PackedKeys(), 0, 0.0))
        assert [outcome.job_id for outcome in client.poll()] == [job]
    time.sleep(0.4)
    client.poll()
    assert client.state is State.OPEN, "asked whether it is alive"
    assert [type(message) for message in host.receive_rest()][-1] is Ping
    host.send(Pong(2.0))
    client.poll()
    time.sleep(0.4)
    client.poll()
    assert client.state is State.OPEN, "its loop is alive, its medium is slow"
    time.sleep(0.4)
    client.poll()
    assert client.state is not State.OPEN, "silent for longer than the watchdog waits"
    host.close()
    client.close()


def test_a_stopped_host_is_found_out_by_an_end_alone(hosted: Any, tmp_path: Path) -> None:
    client = hosted.connect(f"lmdb://{tmp_path}/store", watchdog_s=0.2)
    client.open()
    os.kill(pid_of(hosted), signal.SIGSTOP)
    client.end_request(end("a", names(2)))
    wait_for(client, State.DOWN)
    assert client.take_persisted() == {"a": False}


def test_events_after_a_restart_tell_what_is_there(hosted: Any, tmp_path: Path) -> None:
    client = hosted.connect(f"lmdb://{tmp_path}/store")
    client.open()
    client.submit_store(1, "a", names(70), range(70), None, 70 * BLOCK)
    hosted.finish(client, 1)
    assert client.flush(20)
    assert sorted(client.take_stored()) == sorted(names(70))
    os.kill(pid_of(hosted), signal.SIGKILL)
    wait_for(client, State.DOWN)
    assert sorted(client.take_removed()) == sorted(names(70))
    while client.state is not State.OPEN:
        assert not client.contains(names(1)[0]), "found while no job would be taken"
        client.poll()
    assert sorted(client.take_stored()) == sorted(names(70))


def test_what_nobody_heard_of_before_it_went_only_went(hosted: Any, tmp_path: Path) -> None:
    """Stored and removed keys are taken one after the other: a key in both would be taken for one that is there."""
    client = hosted.connect(f"lmdb://{tmp_path}/store")
    client.open()
    client.submit_store(1, "a", names(70), range(70), None, 70 * BLOCK)
    assert client.flush(20)
    os.kill(pid_of(hosted), signal.SIGKILL)
    wait_for(client, State.DOWN)
    assert client.take_stored() == []
    assert sorted(client.take_removed()) == sorted(names(70))


def test_what_makes_no_sense_ends_the_host_not_the_engine(hosted: Any) -> None:
    client = hosted.connect("memory://x", "inline")
    client.open()
    client._connection._answers.append(Stored(PackedKeys(b"abc", 2)))
    client.poll()
    assert client.state is not State.OPEN


def test_nothing_waits_for_a_stopped_host(hosted: Any, tmp_path: Path) -> None:
    """Thousands of messages to a process that reads none: the engine's side keeps them, and never blocks on them."""
    client = hosted.connect(f"lmdb://{tmp_path}/store", max_queue_bytes=1 << 40)
    client.open()
    os.kill(pid_of(hosted), signal.SIGSTOP)
    for job in range(3000):
        client.submit_store(job, "a", names(128, 128 * job), range(128), None, 128 * BLOCK)
        assert client.poll() == []
    os.kill(pid_of(hosted), signal.SIGKILL)
    os.kill(pid_of(hosted), signal.SIGCONT)
    lost: set[int] = set()
    while len(lost) < 3000:
        lost.update(outcome.job_id for outcome in client.poll() if outcome.refused)
    assert client.counters.lost_jobs == 3000


def test_a_killed_host_fails_its_jobs_and_comes_back(hosted: Any, tmp_path: Path) -> None:
    client = hosted.connect(f"lmdb://{tmp_path}/store")
    client.open()
    durable = names(70)
    client.submit_store(1, "a", durable, range(70), None, 70 * BLOCK)
    hosted.finish(client, 1)
    first_pid = pid_of(hosted)
    os.kill(first_pid, signal.SIGSTOP)
    client.submit_load(2, durable, range(70))
    client.submit_store(3, "b", names(20, 70), range(70, 90), None, 20 * BLOCK)
    client.end_request(end("b", names(20, 70)))
    os.kill(first_pid, signal.SIGKILL)
    outcomes = {2: hosted.finish(client, 2)}
    assert outcomes[2].refused
    assert set(outcomes[2].failed) == set(durable)
    assert not client.contains(durable[0]), "lookups miss while nothing is open"
    assert client.take_persisted() == {"b": False}
    assert sorted(client.take_removed()) == sorted(durable)
    client.submit_load(4, durable, range(70))
    assert hosted.finish(client, 4).refused
    wait_for(client, State.OPEN)
    assert pid_of(hosted) != first_pid
    assert all(map(client.contains, durable))
    client.submit_load(5, durable, range(70))
    assert hosted.finish(client, 5).failed == []
    assert client.counters.restarts == 1


@pytest.mark.parametrize("seed", range(6))
def test_kill_in_the_middle_of_work(hosted: Any, tmp_path: Path, seed: int) -> None:
    """Whatever the moment: each job is answered once, and what a store has is what was put."""
    client = hosted.connect(f"lmdb://{tmp_path}/store")
    client.open()
    content = hosted.array.copy()
    jobs = {}
    for job in range(8):
        keys = names(16, 16 * job)
        jobs[job] = keys
        client.submit_store(job, "a", keys, range(16 * job, 16 * job + 16), None, 16 * BLOCK)
    time.sleep(0.004 * seed)
    os.kill(pid_of(hosted), signal.SIGKILL)
    answered: list[int] = []
    while len(answered) < len(jobs):
        answered += [outcome.job_id for outcome in client.poll()]
    assert sorted(answered) == sorted(jobs)
    wait_for(client, State.OPEN)
    for job, keys in jobs.items():
        held = [client.contains(key) for key in keys]
        if any(held):
            client.submit_load(100 + job, keys, range(16))
            failed = set(hosted.finish(client, 100 + job).failed)
            for row, key in enumerate(keys):
                assert (key in failed) is not held[row]
                if held[row]:
                    assert (hosted.array[row] == content[16 * job + row]).all()
            hosted.array[:] = content


def test_a_silent_host_is_killed_by_the_watchdog(hosted: Any, tmp_path: Path) -> None:
    client = hosted.connect(f"lmdb://{tmp_path}/store", watchdog_s=0.2)
    client.open()
    os.kill(pid_of(hosted), signal.SIGSTOP)
    client.submit_load(1, names(1), [0])
    assert hosted.finish(client, 1).refused
    wait_for(client, State.OPEN)


def test_a_host_outlives_a_killed_engine_until_it_has_committed(tmp_path: Path, hosted: Any) -> None:
    """The engine is killed right after it handed a job over: the job is committed all the same."""
    url = f"lmdb://{tmp_path}/store"
    program = f"""
import os, signal, mmap
from persistkv.config import GroupLayout, RowLayout
from persistkv.storage.host.client import StoreClient
from persistkv.storage.host.launch import InlineHost, ProcessHost
from persistkv.storage.host.protocol import EndRequest, Hello
from persistkv.storage.identity import Identity
from persistkv.storage.keys import PackedKeys
from persistkv.storage.records import StoreOptions
from persistkv.storage.records import StoreOptions
fd = os.memfd_create("rows")
os.ftruncate(fd, 128 * {BLOCK})
memory = mmap.mmap(fd, 128 * {BLOCK})
for row in range(128):
    memory[row * {BLOCK}:(row + 1) * {BLOCK}] = bytes((row,)) * {BLOCK}
host = ProcessHost(fd, 128 * {BLOCK})
hello = Hello({url!r}, Identity.of({{"weights": "w"}}).encode(),
              RowLayout({BLOCK}, (GroupLayout(((0, {BLOCK}),)),)), StoreOptions())
client = StoreClient(host, hello, max_queue_bytes=1 << 30)
client.open()
if os.fork() == 0:  # a forked child keeps the engine's end of the socket open
    import time
    time.sleep(30)
    os._exit(0)
keys = [number.to_bytes(32, "little") + bytes(4) for number in range(128)]
client.submit_store(1, "a", keys, range(128), None, 128 * {BLOCK})
client.end_request(EndRequest("a", "m-a", (PackedKeys.of(keys),), 2048, 16, True, {{}}))
print(host.pid, flush=True)
os.kill(os.getpid(), signal.SIGKILL)
"""
    engine = subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE, start_new_session=True)
    assert engine.stdout is not None
    try:
        host_pid = int(engine.stdout.readline())
        assert engine.wait(20) == -signal.SIGKILL
        deadline = time.monotonic() + 20
        while Path(f"/proc/{host_pid}/cmdline").exists() and Path(f"/proc/{host_pid}/cmdline").read_bytes():
            assert time.monotonic() < deadline, "the host does not end"
            time.sleep(0.01)
    finally:
        os.killpg(engine.pid, signal.SIGKILL)
        engine.stdout.close()
    client = hosted.connect(url)
    client.open()
    assert len(client) == 128
    client.submit_load(1, names(128), range(128))
    assert hosted.finish(client, 1).failed == []
    assert all((hosted.array[row] == row).all() for row in range(128))


def test_use_after_fork_is_refused(hosted: Any, tmp_path: Path) -> None:
    client = hosted.connect(f"lmdb://{tmp_path}/store")
    client.open()
    child = os.fork()
    if child == 0:
        try:
            client.poll()
        except HostError:
            os._exit(7)
        os._exit(1)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 7
    assert client.flush(10)


def test_the_host_process_imports_no_torch(hosted: Any, tmp_path: Path) -> None:
    client = hosted.connect(f"lmdb://{tmp_path}/store", codec="zstd")
    client.open()
    client.submit_store(1, "a", names(70), range(70), None, 70 * BLOCK)
    hosted.finish(client, 1)
    maps = Path(f"/proc/{pid_of(hosted)}/maps").read_text()
    assert "lmdb" in maps
    assert "torch" not in maps


def test_closing_waits_for_what_was_given(hosted: Any, tmp_path: Path) -> None:
    url = f"lmdb://{tmp_path}/store"
    client = hosted.connect(url)
    client.open()
    client.submit_store(1, "a", names(128), range(128), None, 128 * BLOCK)
    assert client.close()
    assert client.close(), "closing is idempotent"
    again = hosted.connect(url, "inline")
    again.open()
    assert len(again) == 128


def test_uses_are_said_in_bounded_messages(hosted: Any, tmp_path: Path) -> None:
    client = hosted.connect(f"lmdb://{tmp_path}/store?capacity=64MiB", "inline", max_age_s=0.0)
    client.touch(names(3))  # nothing is open yet
    client.open()
    held = names(100)
    client.submit_store(1, "a", held, range(100), range(100), 100 * BLOCK)
    hosted.finish(client, 1)
    assert client.flush(20)
    sent: list[int] = []
    send = client._send

    def count(message: Any) -> None:
        if isinstance(message, Touch):
            sent.append(len(message.keys))
        send(message)

    client._send = count  # type: ignore[method-assign]
    client.touch([*held, *names(50, 1000)])
    client.touch(held[:10])
    client.touch(names(70_000, 2000))  # too many at once: passed over
    client.poll()
    client.poll()
    assert sent == [100], "what is held, once"


class DyingHost(ProcessHost):
    """Dies while it opens, the first few times: as one does that finds a damaged environment."""

    deaths = 0
    started = 0

    def start(self) -> Connection:
        connection = super().start()
        self.started += 1
        if self.deaths:
            self.deaths -= 1
            self.kill()
        return connection


@pytest.mark.parametrize("deaths", [1, 2, 3])
def test_a_host_that_dies_while_it_opens_is_started_again(hosted: Any, tmp_path: Path, deaths: int) -> None:
    template = hosted.connect(f"lmdb://{tmp_path}/store")
    host = DyingHost(hosted.fd, len(hosted.memory))
    host.deaths = deaths
    client = StoreClient(host, template._hello, max_queue_bytes=1 << 30)
    hosted.clients.append(client)
    if deaths < 3:
        client.open()
        assert client.flush(20)
    else:
        with pytest.raises(HostError, match="died while it opened"):
            client.open()
        assert host.dead()
    assert host.started == min(deaths + 1, 3)


def test_what_the_engine_does_not_take_is_let_go_of_and_told_anew(hosted: Any, tmp_path: Path) -> None:
    """An engine idles while another process fills the store: its host keeps a bounded amount of news."""
    url = f"lmdb://{tmp_path}/store?capacity=256MiB"
    idle, busy = hosted.connect(url, "inline", refresh_s=0.0), hosted.connect(url, "inline", max_age_s=0.0)
    idle.open()
    busy.open()
    server, sent = idle._connection._server, idle._connection._answers
    busy.submit_store(1, "a", names(128), range(128), None, 128 * BLOCK)
    assert busy.flush(20)
    idle.poll()
    assert sorted(idle.take_stored()) == sorted(names(128))
    server._news._congested = lambda: True
    server._news._most_waiting = 64
    busy.submit_store(2, "b", names(100, 128), range(100), None, 100 * BLOCK)
    assert busy.flush(20)
    delete_all_of(busy, names(1)[0])
    for _ in range(3):
        server.step()
        assert not sent
        assert len(server._store.news.stored) + len(server._store.news.removed) <= 64
    server._news._congested = lambda: False
    idle.poll()
    assert sorted(idle.take_stored()) == sorted(names(100, 128))
    assert sorted(idle.take_removed()) == sorted(names(128))
    assert len(idle) == 100
    assert idle.contains(names(1, 128)[0])
    assert not idle.contains(names(1)[0])


def delete_all_of(client: StoreClient, key: bytes) -> None:
    """The pack that holds a key."""
    store = client._connection._server._store  # type: ignore[union-attr]
    pack = store.index.pack_of(key)
    store.medium.backend.commit(store.namespace, CommitBatch(deletions=[pack.pack_id]))


def test_an_end_that_finds_no_room_is_refused(hosted: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Thousands of long contexts end while the store's side takes nothing: the queue of their manifests is bounded."""
    client = hosted.connect("memory://x", "inline")
    client.open()
    long = PackedKeys.of(names(200_000))
    with monkeypatch.context() as patch:
        patch.setattr(client, "_send", lambda message: None)
        for number in range(4):
            client.end_request(EndRequest(f"r{number}", f"m{number}", (long,), 1, 16, True, {}))
    assert client.take_persisted() == {"r2": False, "r3": False}
    assert client.counters.refused_ends == 2
