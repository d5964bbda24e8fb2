"""StoreClient with each host: jobs, ends of requests, and restarts after the host process dies."""

from __future__ import annotations

import gc
import os
import signal
import subprocess
import sys
import time
import weakref
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest

from persistkv.config import GroupLayout, RowLayout
from persistkv.errors import HostError
from persistkv.storage.format.pack import PackedKeys
from persistkv.storage.host.client import StoreClient
from persistkv.storage.host.hosts import ThreadHost
from persistkv.storage.host.protocol import (
    Hello,
    JobDone,
    Ping,
    Pong,
    Probed,
    Table,
)
from persistkv.storage.host.supervisor import State
from persistkv.storage.identity import Identity
from persistkv.storage.records import RequestEnd, StoreOptions, StoreReport
from tests.host_processes import host_processes
from tests.storage.host.hosted import Hosted
from tests.storage.host.jobs import (
    BLOCK,
    KINDS,
    ScriptedHost,
    end,
    make_keys,
    pid_of,
    wait_for,
)


def test_client_idle_receives_keys_of_other_clients(
    hosted: Hosted,
    tmp_path: Path,
) -> None:
    url = f"lmdb://{tmp_path}/store"
    resting, writing = hosted.connect(url), hosted.connect(url)
    resting.open()
    writing.open()
    keys = make_keys(3)
    resting.poll()
    assert resting.poll() == []
    writing.submit_store(1, "a", keys, range(3), range(3), 3 * BLOCK)
    writing.end_request(end("a", keys))
    assert writing.flush(90)
    deadline = time.monotonic() + 90
    while not all(map(resting.contains, keys)):
        assert time.monotonic() < deadline
        assert resting.poll() == []
        time.sleep(0.001)


@pytest.mark.parametrize("kind", KINDS)
def test_client_stored_blocks_load_after_reopen(
    hosted: Hosted,
    tmp_path: Path,
    kind: str,
) -> None:
    url = f"lmdb://{tmp_path}/store"
    client = hosted.connect(url, kind)
    client.open()
    large, small = make_keys(70), make_keys(3, 100)
    client.submit_store(1, "a", large, range(70), range(70), 70 * BLOCK)
    assert hosted.finish(client, 1).failed == []
    client.submit_store(2, "a", small, [100, 101, 102], [70, 71, 72], 3 * BLOCK)
    outcome = hosted.finish(client, 2)
    assert (outcome.failed, outcome.refused, outcome.num_bytes) == (
        [],
        False,
        3 * BLOCK,
    )
    client.end_request(end("a", large + small))
    assert client.flush(90)
    assert client.take_persisted() == {"a": True}
    assert sorted(client.take_events().stored) == sorted(large + small)
    assert client.close()

    before = hosted.array.copy()
    hosted.array[:] = 0
    again = hosted.connect(url, kind)
    again.open()
    assert all(map(again.contains, large + small))
    assert again.take_events() == StoreReport(), "what opening found is no event"
    again.submit_load(7, [*large, b"x" * 32 + bytes(4), *small], range(74))
    outcome = hosted.finish(again, 7)
    assert (outcome.failed, outcome.num_bytes) == ([b"x" * 32 + bytes(4)], 73 * BLOCK)
    assert (hosted.array[:70] == before[:70]).all()
    assert (hosted.array[71:74] == before[100:103]).all()
    stats = again.stats()
    assert stats.host is not None
    assert stats.host.held_blocks == 73
    assert stats.host.counters.missed_blocks == 1


def test_submit_store_invalid_key_raises_and_queues_nothing(
    hosted: Hosted,
    tmp_path: Path,
) -> None:
    client = hosted.connect(f"lmdb://{tmp_path}/store", "thread")
    client.open()
    with pytest.raises(ValueError, match="keys have 0"):
        client.submit_store(1, "a", [b""], [0], None, BLOCK)
    assert not client.has_pending_work


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("request_id", ["\ud800", 7])
def test_client_request_id_without_encoding_is_refused(
    hosted: Hosted,
    tmp_path: Path,
    kind: str,
    request_id: Any,
) -> None:
    client = hosted.connect(f"lmdb://{tmp_path}/store", kind)
    client.open()
    client.submit_store(1, request_id, make_keys(2), range(2), None, 2 * BLOCK)
    outcome = hosted.finish(client, 1)
    assert (outcome.refused, outcome.failed) == (True, make_keys(2))
    client.end_request(end(request_id, make_keys(2)))
    labelled = RequestEnd(
        "a", "m-a", (make_keys(2),), 32, 16, labels={"session": "\ud800"}
    )
    client.end_request(labelled)
    assert client.take_persisted() == {request_id: False, "a": False}
    assert not client.has_pending_work
    client.submit_store(2, "b", make_keys(2), range(2), None, 2 * BLOCK)
    assert hosted.finish(client, 2).failed == [], "the host lives on"
    assert client.counters.restarts == 0


def test_client_host_dying_after_each_answer_is_restarted_ever_later(
    hosted: Hosted,
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
) -> None:
    client = hosted.connect(f"lmdb://{tmp_path}/store")
    client.open()
    for job in range(3):
        client.submit_load(job, make_keys(1), [0])
        assert not hosted.finish(client, job).refused
        os.kill(pid_of(hosted), signal.SIGKILL)
        wait_for(client, State.DOWN)
        wait_for(client, State.OPEN)
    for delay in ("0.1", "0.2", "0.4"):
        assert f"in {delay} s or more" in caplog.text


def test_host_ignores_termination_signals_and_commits_on_close(
    hosted: Hosted,
    tmp_path: Path,
) -> None:
    """A supervisor signals all processes of a unit at once; the host still commits all accepted
    blocks."""
    url = f"lmdb://{tmp_path}/store"
    client = hosted.connect(url, max_age_s=1e6)
    client.open()
    client.submit_store(1, "a", make_keys(2), [0, 1], None, 2 * BLOCK)
    hosted.finish(client, 1)
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        os.kill(pid_of(hosted), number)
    assert client.close()
    again = hosted.connect(url, "thread")
    again.open()
    assert all(map(again.contains, make_keys(2)))


def test_close_with_forked_child_still_ends_host(
    hosted: Hosted, tmp_path: Path
) -> None:
    client = hosted.connect(f"lmdb://{tmp_path}/store")
    client.open()
    child = os.fork()
    if child == 0:
        time.sleep(600)
        os._exit(0)
    try:
        assert client.close(timeout_s=90), "it was killed"
    finally:
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)


def test_watchdog_slow_but_answering_host_is_not_killed() -> None:
    """The oldest job exceeds the watchdog's limit, but the host is alive: it answers other jobs."""
    host = ScriptedHost()
    layout = RowLayout(4096, (GroupLayout(((0, 4096),)),))
    hello = Hello("lmdb:///absent", b"{}", layout, StoreOptions())
    client = StoreClient(host, hello, max_queue_bytes=1 << 30, watchdog_s=0.3)
    host.send_opened()
    client.open()
    for job in range(8):
        client.submit_store(job, "a", make_keys(1, job), [0], None, 4096)
    for job in range(1, 8):
        time.sleep(0.1)
        host.connection.send(JobDone(job, PackedKeys(), 0))
        assert [outcome.job_id for outcome in client.poll()] == [job]
    time.sleep(0.4)
    client.poll()
    assert client.state is State.OPEN, "asked whether it is alive"
    assert [type(message) for message in host.connection.receive_rest()][-1] is Ping
    host.connection.send(Pong(2.0))
    client.poll()
    time.sleep(0.4)
    client.poll()
    assert client.state is State.OPEN, "its loop is alive, its medium is slow"
    time.sleep(0.4)
    client.poll()
    assert client.state is not State.OPEN, "silent for longer than the watchdog waits"
    host.connection.close()
    client.close()


def test_watchdog_detects_stopped_host_with_only_end_pending(
    hosted: Hosted,
    tmp_path: Path,
) -> None:
    client = hosted.connect(f"lmdb://{tmp_path}/store", watchdog_s=0.2)
    client.open()
    os.kill(pid_of(hosted), signal.SIGSTOP)
    client.end_request(end("a", make_keys(2)))
    wait_for(client, State.DOWN)
    assert client.take_persisted() == {"a": False}


def test_events_after_host_restart_report_loss(hosted: Hosted, tmp_path: Path) -> None:
    client = hosted.connect(f"lmdb://{tmp_path}/store")
    client.open()
    client.submit_store(1, "a", make_keys(70), range(70), None, 70 * BLOCK)
    hosted.finish(client, 1)
    assert client.flush(90)
    assert sorted(client.take_events().stored) == sorted(make_keys(70))
    os.kill(pid_of(hosted), signal.SIGKILL)
    wait_for(client, State.DOWN)
    assert client.take_events().lost
    while client.state is not State.OPEN:
        assert not client.contains(make_keys(1)[0]), "found while no job would be taken"
        client.poll()
    assert all(map(client.contains, make_keys(70)))


def test_client_malformed_reply_ends_host_not_engine(
    hosted: Hosted,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    client = hosted.connect(f"lmdb://{tmp_path}/store", "thread")
    client.open()
    monkeypatch.setattr(
        client.supervisor.connection,
        "receive",
        lambda: [JobDone(1, PackedKeys(b"abc", 2), 0)],
    )
    client.poll()
    assert client.state is not State.OPEN


def test_client_malformed_reply_closes_descriptors_of_messages_after_it(
    hosted: Hosted,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    client = hosted.connect(f"lmdb://{tmp_path}/store", "thread")
    client.open()
    reader, writer = os.pipe()
    os.set_blocking(reader, False)
    malformed = JobDone(1, PackedKeys(b"abc", 2), 0)
    monkeypatch.setattr(
        client.supervisor.connection, "receive", lambda: [malformed, Table(1, writer)]
    )
    client.poll()
    assert client.state is not State.OPEN
    assert os.read(reader, 1) == b"", "the descriptor of the table is closed"
    os.close(reader)


def test_client_killed_host_fails_jobs_and_restarts(
    hosted: Hosted,
    tmp_path: Path,
) -> None:
    client = hosted.connect(f"lmdb://{tmp_path}/store")
    client.open()
    durable = make_keys(70)
    client.submit_store(1, "a", durable, range(70), None, 70 * BLOCK)
    hosted.finish(client, 1)
    assert client.flush(90), "the report of these blocks arrived"
    first_pid = pid_of(hosted)
    os.kill(first_pid, signal.SIGSTOP)
    client.submit_load(2, durable, range(70))
    client.submit_store(3, "b", make_keys(20, 70), range(70, 90), None, 20 * BLOCK)
    client.end_request(end("b", make_keys(20, 70)))
    os.kill(first_pid, signal.SIGKILL)
    outcomes = {2: hosted.finish(client, 2)}
    assert outcomes[2].refused
    assert set(outcomes[2].failed) == set(durable)
    assert not client.contains(durable[0]), "lookups miss while nothing is open"
    assert client.take_persisted() == {"b": False}
    assert client.take_events().lost
    client.submit_load(4, durable, range(70))
    assert hosted.finish(client, 4).refused
    wait_for(client, State.OPEN)
    assert pid_of(hosted) != first_pid
    assert all(map(client.contains, durable))
    client.submit_load(5, durable, range(70))
    assert hosted.finish(client, 5).failed == []
    assert client.counters.restarts == 1


def test_client_idle_host_killed_is_restarted_without_poll(
    hosted: Hosted,
    tmp_path: Path,
) -> None:
    client = hosted.connect(f"lmdb://{tmp_path}/store")
    client.open()
    durable = make_keys(70)
    client.submit_store(1, "a", durable, range(70), None, 70 * BLOCK)
    hosted.finish(client, 1)
    assert client.flush(90)
    first_pid = pid_of(hosted)
    os.kill(first_pid, signal.SIGKILL)
    deadline = time.monotonic() + 90
    while pid_of(hosted) == first_pid or client.state is not State.OPEN:
        assert time.monotonic() < deadline, f"still {client.state}"
        time.sleep(0.01)
    assert all(map(client.contains, durable)), "the first request hits"
    assert client.counters.restarts == 1


def test_close_in_idle_thread_ends_host(hosted: Hosted, tmp_path: Path) -> None:
    """A garbage collection may close an engine in any thread."""
    client = hosted.connect(f"lmdb://{tmp_path}/store")
    client.open()
    ends: list[bool | Exception] = []

    def close() -> None:
        try:
            ends.append(client.close())
        except RuntimeError as error:
            ends.append(error)

    client.idle.callback = close
    deadline = time.monotonic() + 60
    while not ends:
        assert time.monotonic() < deadline
        time.sleep(0.01)
    assert ends == [True]
    assert client.state is State.CLOSED


def test_client_nobody_refers_to_is_not_kept_by_its_idle_thread(tmp_path: Path) -> None:
    layout = RowLayout(BLOCK, (GroupLayout(((0, BLOCK),)),))
    hello = Hello(
        f"lmdb://{tmp_path}/store",
        Identity.of({"a": 1}).encode(),
        layout,
        StoreOptions(),
    )
    client = StoreClient(
        ThreadHost(memoryview(bytearray(BLOCK))), hello, max_queue_bytes=1 << 30
    )
    client.open()
    held = weakref.ref(client)
    del client
    deadline = time.monotonic() + 30
    while held() is not None:
        assert time.monotonic() < deadline
        gc.collect()
        time.sleep(0.1)


@pytest.mark.parametrize("num_answered", [0, 4, 7])
def test_client_host_killed_mid_job_answers_each_job_once(
    hosted: Hosted,
    tmp_path: Path,
    num_answered: int,
) -> None:
    """Whatever the number of jobs that were answered before the kill, each job is answered once,
    and every stored block has its content."""
    client = hosted.connect(f"lmdb://{tmp_path}/store")
    client.open()
    content = hosted.array.copy()
    jobs = {}
    answered: list[int] = []
    for job in range(8):
        if job == num_answered:
            while len(answered) < num_answered:
                answered += [outcome.job_id for outcome in client.poll()]
        keys = make_keys(16, 16 * job)
        jobs[job] = keys
        client.submit_store(
            job, "a", keys, range(16 * job, 16 * job + 16), None, 16 * BLOCK
        )
    os.kill(pid_of(hosted), signal.SIGKILL)
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


def test_watchdog_silent_host_is_killed_and_restarted(
    hosted: Hosted,
    tmp_path: Path,
) -> None:
    client = hosted.connect(f"lmdb://{tmp_path}/store", watchdog_s=0.2)
    client.open()
    os.kill(pid_of(hosted), signal.SIGSTOP)
    client.submit_load(1, make_keys(1), [0])
    assert hosted.finish(client, 1).refused
    wait_for(client, State.OPEN)


def test_watchdog_stopped_host_with_load_due_is_dead_before_load_fails(
    hosted: Hosted,
    tmp_path: Path,
) -> None:
    """With the default limit of 60 s. No row is written after the load has failed."""
    client = hosted.connect(f"lmdb://{tmp_path}/store")
    client.open()
    keys = make_keys(64)
    client.submit_store(1, "a", keys, range(64), None, 64 * BLOCK)
    assert hosted.finish(client, 1).failed == []
    pid = pid_of(hosted)
    os.kill(pid, signal.SIGSTOP)
    client.submit_load(2, keys, range(64, 128))
    outcome = hosted.finish(client, 2, timeout_s=30)
    assert outcome.refused
    assert outcome.failed == keys
    assert pid not in host_processes()
    before = hosted.array.copy()
    wait_for(client, State.OPEN)
    assert (hosted.array == before).all()


def test_load_of_killed_host_fails_only_when_it_is_dead(
    hosted: Hosted,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A process that waits for a disk outlives its SIGKILL, and may write rows until its end."""
    client = hosted.connect(f"lmdb://{tmp_path}/store")
    client.open()
    keys = make_keys(64)
    client.submit_store(1, "a", keys, range(64), None, 64 * BLOCK)
    assert hosted.finish(client, 1).failed == []
    os.kill(pid_of(hosted), signal.SIGSTOP)
    host = hosted.hosts[-1]
    kill = host.kill
    monkeypatch.setattr(host, "kill", lambda: None)
    client.submit_load(2, keys, range(64, 128))
    deadline = time.monotonic() + 30
    while client.state is not State.DYING:
        assert client.poll() == []
        assert time.monotonic() < deadline
        time.sleep(0.001)
    for _ in range(100):
        assert client.poll() == []
        time.sleep(0.001)
    kill()
    assert hosted.finish(client, 2, timeout_s=30).refused


@pytest.mark.slow
def test_process_host_cpu_wait_s_counts_time_without_cpu(
    hosted: Hosted,
    tmp_path: Path,
) -> None:
    client = hosted.connect(f"lmdb://{tmp_path}/store")
    client.open()
    for thread in os.listdir(f"/proc/{pid_of(hosted)}/task"):
        os.sched_setscheduler(int(thread), os.SCHED_IDLE, os.sched_param(0))
    before = client.supervisor.host.cpu_wait_s()
    spin = [sys.executable, "-c", "while True: pass"]
    with ExitStack() as stack:
        for _ in range(2 * len(os.sched_getaffinity(0))):
            stack.callback(stack.enter_context(subprocess.Popen(spin)).kill)
        job = 0
        # the test's timeout ends this
        while client.supervisor.host.cpu_wait_s() < before + 0.05:
            job += 1
            client.submit_store(job, "a", make_keys(1, job), [0], None, BLOCK)
            assert hosted.finish(client, job).failed == []


def test_client_used_in_forked_child_raises(hosted: Hosted, tmp_path: Path) -> None:
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
    assert client.flush(90)


def test_host_process_does_not_load_torch(hosted: Hosted, tmp_path: Path) -> None:
    client = hosted.connect(f"lmdb://{tmp_path}/store", codec="zstd")
    client.open()
    client.submit_store(1, "a", make_keys(70), range(70), None, 70 * BLOCK)
    hosted.finish(client, 1)
    maps = Path(f"/proc/{pid_of(hosted)}/maps").read_text()
    assert "lmdb" in maps
    assert "torch" not in maps


def test_close_commits_all_submitted_blocks(hosted: Hosted, tmp_path: Path) -> None:
    url = f"lmdb://{tmp_path}/store"
    client = hosted.connect(url)
    client.open()
    client.submit_store(1, "a", make_keys(128), range(128), None, 128 * BLOCK)
    assert client.close()
    assert client.close(), "closing is idempotent"
    again = hosted.connect(url, "thread")
    again.open()
    assert len(again) == 128


def test_client_late_replies_are_discarded(hosted: Hosted, tmp_path: Path) -> None:
    client = hosted.connect(f"lmdb://{tmp_path}/store")
    client.open()
    os.kill(pid_of(hosted), signal.SIGSTOP)
    for _ in range(3):
        assert client.stats(0.0).host is None
        assert not client.flush(0.0)
    os.kill(pid_of(hosted), signal.SIGCONT)
    stats = client.stats(90).host
    assert stats is not None
    assert stats.held_blocks == 0
    assert client.flush(90)


@pytest.mark.parametrize("kind", KINDS)
def test_load_past_deadline_fails_without_reading(
    hosted: Hosted,
    tmp_path: Path,
    kind: str,
) -> None:
    client = hosted.connect(f"lmdb://{tmp_path}/store", kind)
    client.open()
    keys = make_keys(64)
    client.submit_store(1, "a", keys, range(64), None, 64 * BLOCK)
    assert hosted.finish(client, 1).failed == []
    before = hosted.array.copy()
    client.submit_load(2, keys, range(64, 128), time.monotonic())
    outcome = hosted.finish(client, 2)
    assert (outcome.failed, outcome.is_late) == (keys, True)
    assert (hosted.array == before).all()
    client.submit_load(3, keys, range(64, 128), time.monotonic() + 600)
    outcome = hosted.finish(client, 3)
    assert (outcome.failed, outcome.is_late) == ([], False)
    assert (hosted.array[64:] == before[:64]).all()


@pytest.mark.parametrize("kind", KINDS)
def test_probe_measures_reads_and_writes_no_row(
    hosted: Hosted,
    tmp_path: Path,
    kind: str,
) -> None:
    client = hosted.connect(f"lmdb://{tmp_path}/store", kind)
    client.open()
    keys = make_keys(64)
    assert client.probe(keys, 600)
    assert probed(client).num_bytes == 0, "nothing is stored yet"
    client.submit_store(1, "a", keys, range(64), None, 64 * BLOCK)
    assert hosted.finish(client, 1).failed == []
    before = hosted.array.copy()
    assert client.probe(keys, 600)
    found = probed(client)
    assert found.num_bytes == 64 * BLOCK
    assert found.seconds > 0
    assert (hosted.array == before).all()
    host = client.stats().host
    assert host is not None
    assert host.counters.loaded_blocks == 0
    client.close()
    assert not client.probe(keys, 600)


def probed(client: StoreClient) -> Probed:
    """Poll until the result of a probe arrives; return it."""
    deadline = time.monotonic() + 90
    while time.monotonic() < deadline:
        client.poll()
        found = client.take_probed()
        if found is not None:
            return found
        time.sleep(0.001)
    raise AssertionError("the probe does not end")


def test_probe_whose_host_dies_has_read_nothing(hosted: Hosted, tmp_path: Path) -> None:
    client = hosted.connect(f"lmdb://{tmp_path}/store")
    client.open()
    os.kill(pid_of(hosted), signal.SIGSTOP)
    assert client.probe(make_keys(64), 600)
    os.kill(pid_of(hosted), signal.SIGKILL)
    assert probed(client).num_bytes == 0
    assert client.probe(make_keys(64), 600) is (client.state is State.OPEN)


def test_probe_by_stopped_host_has_it_killed(hosted: Hosted, tmp_path: Path) -> None:
    """A probe is an answer that the host owes."""
    client = hosted.connect(f"lmdb://{tmp_path}/store", watchdog_s=1.0)
    client.open()
    os.kill(pid_of(hosted), signal.SIGSTOP)
    assert client.probe(make_keys(64), 600)
    assert probed(client).num_bytes == 0
