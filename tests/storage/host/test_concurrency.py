"""Concurrent loads, transactions and shutdown: a store on threads, over a medium that blocks on
request."""

from __future__ import annotations

import os
import subprocess
import threading
import time
from array import array
from collections.abc import Callable, Iterator, Sequence
from typing import Any, TypeVar

import pytest

from persistkv.config import GroupLayout, RowLayout
from persistkv.errors import StoreError
from persistkv.storage.backend import CommitBatch, ReadSpan
from persistkv.storage.format.pack import PackedKeys
from persistkv.storage.host.client import StoreClient
from persistkv.storage.host.connection import SocketConnection
from persistkv.storage.host.protocol import (
    End,
    Hello,
    JobDone,
    LoadJob,
    Opened,
    Ping,
    StoreJob,
)
from persistkv.storage.host.server import Lifecycle
from persistkv.storage.identity import Identity
from persistkv.storage.records import RequestEnd, StoreOptions
from persistkv.testing import FaultyBackend, MemoryBackend
from persistkv.testing.conformance.suite import tables
from tests.memory_store import flip
from tests.storage.host.jobs import Served

BLOCK = 64 << 10
PATIENCE_S = 30.0
T = TypeVar("T")


class Gate:
    """Gate that blocks the calls of a method while it is shut."""

    def __init__(self, backend: FaultyBackend[MemoryBackend], method: str) -> None:
        self._open = threading.Event()
        self._open.set()
        self._lock = threading.Lock()
        self.waiting = 0
        self.running = 0
        self.most_running = 0
        self.errors: list[str] = []
        """Errors of the next calls that pass the gate, one per call."""
        backend.before(method, self._enter)
        backend.after(method, self._leave)

    def shut(self) -> None:
        self._open.clear()

    def open(self) -> None:
        self._open.set()

    def _enter(self, *_: object) -> None:
        with self._lock:
            self.waiting += 1
            self.running += 1
            self.most_running = max(self.most_running, self.running)
        assert self._open.wait(PATIENCE_S)
        with self._lock:
            self.waiting -= 1
            if self.errors:
                self.running -= 1
                raise StoreError(self.errors.pop(0))

    def _leave(self, result: T, *_: object) -> T:
        with self._lock:
            self.running -= 1
        return result

    def await_waiting(self, count: int = 1) -> None:
        eventually(lambda: self.waiting >= count)


class Medium:
    """Store in memory, with gates before its commits and reads."""

    def __init__(self) -> None:
        self.backend = FaultyBackend.of(MemoryBackend())
        self.commits, self.reads = (
            Gate(self.backend, "commit"),
            Gate(self.backend, "read"),
        )

    def open(self) -> None:
        self.commits.open()
        self.reads.open()


def eventually(holds: Callable[[], bool]) -> None:
    deadline = time.monotonic() + PATIENCE_S
    while not holds():
        assert time.monotonic() < deadline, "it never comes to that"
        time.sleep(0.001)


def make_keys(count: int, start: int = 0) -> list[bytes]:
    return [
        number.to_bytes(32, "little") + bytes(4)
        for number in range(start, start + count)
    ]


@pytest.fixture
def medium(monkeypatch: pytest.MonkeyPatch) -> Iterator[Medium]:
    medium = Medium()
    monkeypatch.setattr(
        "persistkv.storage.host.session.open_backend", lambda url: medium.backend
    )
    yield medium
    medium.open()
    medium.backend.inner.close()


@pytest.fixture
def client(hosted: Any, medium: Medium) -> StoreClient:
    opened: StoreClient = hosted.connect(
        "lmdb:///gated", "thread", max_age_s=1e6, refresh_s=0.01
    )
    opened.open()
    return opened


def store(client: StoreClient, job: int, keys: list[bytes], first_row: int = 0) -> None:
    rows = range(first_row, first_row + len(keys))
    client.submit_store(job, f"r{job}", keys, rows, range(len(keys)), len(keys) * BLOCK)


def test_load_continues_while_commit_is_blocked(
    hosted: Any, client: StoreClient, medium: Medium
) -> None:
    store(client, 1, make_keys(64))
    assert hosted.finish(client, 1).failed == []
    medium.commits.shut()
    store(client, 2, make_keys(64, 64), 64)
    medium.commits.await_waiting()
    before = hosted.array[:64].copy()
    for job in range(3, 8):
        hosted.array[:64] = 0
        client.submit_load(job, make_keys(64), range(64))
        assert hosted.finish(client, job).failed == []
        assert (hosted.array[:64] == before).all()
    assert client.num_jobs == 1
    medium.commits.open()
    assert hosted.finish(client, 2).failed == []


def test_store_small_job_is_acknowledged_while_commit_is_blocked(
    hosted: Any, client: StoreClient, medium: Medium
) -> None:
    medium.commits.shut()
    store(client, 1, make_keys(64))
    medium.commits.await_waiting()
    store(client, 2, make_keys(4, 64), 64)
    outcome = hosted.finish(client, 2)
    assert (outcome.failed, outcome.refused) == ([], False)
    assert not any(map(client.contains, make_keys(68)))
    medium.commits.open()
    assert client.flush(PATIENCE_S)
    assert all(map(client.contains, make_keys(68)))
    assert medium.commits.most_running == 1


def test_store_job_with_keys_in_flight_rewrites_failed_blocks(
    hosted: Any, client: StoreClient, medium: Medium
) -> None:
    medium.commits.shut()
    store(client, 1, make_keys(64))
    medium.commits.await_waiting()
    store(client, 2, make_keys(70))  # 64 of them are in flight
    # 32 are in flight with the first job, 6 with the second
    store(client, 3, make_keys(64, 32), 32)
    client.flush(0.0)  # includes the blocks that jobs 2 and 3 write after job 1 failed
    medium.commits.errors = ["the disk went away"]
    medium.commits.open()
    outcomes = finish_all(client, {1, 2, 3})
    assert {job: outcome.failed for job, outcome in outcomes.items()} == {
        1: make_keys(64),
        2: [],
        3: [],
    }
    assert client.flush(PATIENCE_S)
    assert all(map(client.contains, make_keys(96)))
    before = hosted.array[:96].copy()
    hosted.array[:] = 0
    client.submit_load(4, make_keys(96), range(96))
    assert hosted.finish(client, 4).failed == []
    assert (hosted.array[:96] == before).all()


def finish_all(client: StoreClient, jobs: set[int]) -> dict[int, Any]:
    ended: dict[int, Any] = {}
    deadline = time.monotonic() + PATIENCE_S
    while not jobs <= ended.keys():
        assert time.monotonic() < deadline
        ended.update((outcome.job_id, outcome) for outcome in client.poll())
    return ended


def end(request: str, keys: list[bytes]) -> RequestEnd:
    return RequestEnd(request, f"m-{request}", (keys,), 16 * len(keys), 16)


def test_load_partly_failed_ends_after_slowest_part(
    hosted: Any, client: StoreClient, medium: Medium
) -> None:
    """One part of a load fails at once while another part still runs: the rows of both are in
    use."""
    store(client, 1, make_keys(128))
    assert hosted.finish(client, 1).failed == []
    assert client.flush(PATIENCE_S)
    fails = threading.Event()

    def fail_first_part(namespace: bytes, spans: Sequence[ReadSpan]) -> None:
        if spans[0].offset == 0 and not fails.is_set():
            fails.set()
            raise StoreError("this part is gone")

    medium.backend.clear_faults("read")
    medium.backend.before("read", fail_first_part)
    medium.reads = Gate(medium.backend, "read")
    medium.reads.shut()
    client.submit_load(2, make_keys(128), range(128))
    eventually(fails.is_set)
    medium.reads.await_waiting()
    assert client.poll() == []
    hosted.array[:] = 0
    medium.reads.open()
    failed = hosted.finish(client, 2).failed
    assert failed
    assert set(failed) < set(make_keys(128))
    frozen = hosted.array.copy()
    assert client.flush(PATIENCE_S)
    assert (hosted.array == frozen).all()


@pytest.mark.parametrize("codec", ["raw", "zstd"])
def test_close_waits_for_running_commits_and_loads(
    hosted: Any, medium: Medium, codec: str
) -> None:
    client = hosted.connect("lmdb:///gated", "thread", codec=codec, max_age_s=1e6)
    client.open()
    store(client, 1, make_keys(64))
    assert hosted.finish(client, 1).failed == []
    medium.commits.shut()
    medium.reads.shut()
    store(client, 2, make_keys(64, 64), 64)
    medium.commits.await_waiting()
    store(client, 3, make_keys(2, 200), 5)
    client.submit_load(4, make_keys(64), range(64))
    medium.reads.await_waiting()
    committed: list[int] = []

    def note_committed() -> None:
        (namespace,) = medium.backend.namespaces()
        committed.extend(
            len(table.keys) for table in tables(medium.backend, namespace.id).values()
        )

    medium.backend.before("close", note_committed)
    opener = threading.Timer(0.05, medium.open)
    opener.start()
    assert client.close(PATIENCE_S)
    opener.join()
    assert sum(committed) == 130


def test_load_missing_keys_is_answered_while_commit_is_blocked(
    hosted: Any, client: StoreClient, medium: Medium
) -> None:
    medium.commits.shut()
    store(client, 1, make_keys(64))
    medium.commits.await_waiting()
    client.submit_load(2, make_keys(3, 500), [70, 71, 72])
    assert hosted.finish(client, 2).failed == make_keys(3, 500)
    medium.commits.open()
    assert hosted.finish(client, 1).failed == []


def test_corrupt_pack_is_deleted_after_running_commit_ends(
    hosted: Any, client: StoreClient, medium: Medium
) -> None:
    store(client, 1, make_keys(64))
    assert hosted.finish(client, 1).failed == []
    (namespace,) = medium.backend.namespaces()
    (pack,) = tables(medium.backend, namespace.id)
    flip(medium.backend, namespace.id, pack, 5)
    medium.commits.shut()
    store(client, 2, make_keys(64, 64), 64)
    medium.commits.await_waiting()
    client.submit_load(3, make_keys(64), range(64))
    assert set(hosted.finish(client, 3).failed) < set(make_keys(64))
    medium.commits.open()
    assert hosted.finish(client, 2).failed == []
    eventually(
        lambda: not client.poll() and not any(map(client.contains, make_keys(64)))
    )
    assert all(map(client.contains, make_keys(64, 64)))


def test_backend_memory_error_fails_job_and_store_continues(
    hosted: Any, client: StoreClient, medium: Medium
) -> None:
    """Any error of the medium fails the job, and the store continues."""
    backend, no_memory = medium.backend, MemoryError("no memory for a frame")
    backend.fail("commit", no_memory)
    store(client, 1, make_keys(64))
    assert hosted.finish(client, 1).failed == make_keys(64)
    backend.clear_faults()
    store(client, 2, make_keys(64))
    assert hosted.finish(client, 2).failed == []
    assert client.flush(PATIENCE_S)
    backend.fail("read", no_memory)
    client.submit_load(3, make_keys(64), range(64))
    assert hosted.finish(client, 3).failed == make_keys(64)
    backend.fail("stats", no_memory)
    assert client.stats(PATIENCE_S).host is not None
    backend.clear_faults()
    client.submit_load(4, make_keys(64), range(64))
    assert hosted.finish(client, 4).failed == []


def test_thread_host_internal_error_refuses_running_jobs(
    hosted: Any, client: StoreClient, medium: Medium, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An internal error must not pin rows for ever: a thread, unlike a process, cannot be killed to
    release them."""
    medium.commits.shut()
    store(client, 1, make_keys(64))
    medium.commits.await_waiting()

    def broken(*_: object) -> None:
        raise RuntimeError("a fault")

    monkeypatch.setattr("persistkv.storage.store.Store.read", broken)
    # pytest's hook would keep references to the rows
    monkeypatch.setattr(threading, "excepthook", lambda raised: None)
    client.submit_load(2, make_keys(3, 500), [70, 71, 72])
    answered = {outcome.job_id for outcome in client.poll()}
    medium.commits.open()
    outcomes = finish_all(client, {1, 2} - answered)
    assert outcomes[1].refused
    assert not client.contains(make_keys(1)[0])


def gated_hello() -> Hello:
    layout = RowLayout(BLOCK, (GroupLayout(((0, BLOCK),)),))
    options = StoreOptions(max_age_s=1e6)
    return Hello("lmdb:///gated", Identity.of({"w": "w"}).encode(), layout, options)


def store_message(job: int, keys: list[bytes], depths: bytes = b"") -> StoreJob:
    rows = array("I", range(len(keys))).tobytes()
    return StoreJob(job, PackedKeys.of(keys), rows, f"r{job}", depths)


@pytest.mark.parametrize("ends_by", ["close", "end", "death"])
def test_host_waits_for_hung_commit_at_the_end_without_using_the_cpu(
    hosted: Any, medium: Medium, ends_by: str
) -> None:
    """Also while the closed connection, or the pidfd of the dead engine, stays readable."""
    engine = subprocess.Popen(["sleep", "1000"])
    pidfd = os.pidfd_open(engine.pid)
    served = Served(memoryview(hosted.memory), pidfd)
    try:
        served.connection.send(gated_hello())
        served.receive_until(Opened)
        medium.commits.shut()
        served.connection.send(store_message(1, make_keys(64)))
        medium.commits.await_waiting()
        if ends_by == "death":
            engine.kill()
            engine.wait()
        else:
            if ends_by == "end":
                served.connection.send(End())
            served.connection.close()
        time.sleep(0.2)
        begin = time.process_time()
        time.sleep(0.5)
        used_s = time.process_time() - begin
        medium.commits.open()
        served.wait()
    finally:
        engine.kill()
        engine.wait()
        os.close(pidfd)
    assert used_s < 0.1


class Ending(Lifecycle):
    """Notes whether the server told its owner that it ends."""

    def __init__(self) -> None:
        self.noted = threading.Event()

    def ending(self, *, remote: bool) -> None:
        self.noted.set()


class Busy(Lifecycle):
    """Keeps the event loop of the server busy from the opening of the store on, until released."""

    def __init__(self) -> None:
        self.release = threading.Event()

    def opened(self) -> None:
        assert self.release.wait(PATIENCE_S)


def test_host_commits_small_jobs_that_arrived_before_it_saw_the_engines_death(
    hosted: Any, medium: Medium
) -> None:
    committed: list[bytes] = []

    def note(namespace: bytes, batch: CommitBatch) -> None:
        for pack in batch.packs:
            committed.extend(pack.keys.unpack())

    medium.backend.before("commit", note)
    engine = subprocess.Popen(["sleep", "1000"])
    pidfd = os.pidfd_open(engine.pid)
    lifecycle = Busy()
    served = Served(memoryview(hosted.memory), pidfd, lifecycle)
    try:
        served.connection.send(gated_hello())
        served.receive_until(Opened)
        served.connection.send(store_message(1, make_keys(2)))
        engine.kill()
        engine.wait()
        lifecycle.release.set()
        served.wait()
    finally:
        lifecycle.release.set()
        engine.kill()
        engine.wait()
        os.close(pidfd)
    assert committed == make_keys(2)


def test_host_internal_error_while_call_hangs_reports_the_end(
    hosted: Any, medium: Medium, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The host process then sets its alarm: an orphan that hangs must not keep the rows."""
    lifecycle = Ending()
    served = Served(memoryview(hosted.memory), None, lifecycle)
    served.connection.send(gated_hello())
    served.receive_until(Opened)
    medium.commits.shut()
    served.connection.send(store_message(1, make_keys(64)))
    medium.commits.await_waiting()

    def broken(*_: object) -> None:
        raise RuntimeError("a fault")

    monkeypatch.setattr("persistkv.storage.store.Store.read", broken)
    # pytest's hook would keep references to the rows
    monkeypatch.setattr(threading, "excepthook", lambda raised: None)
    rows = array("I", [70]).tobytes()
    served.connection.send(LoadJob(2, PackedKeys.of(make_keys(1, 500)), rows))
    is_noted = lifecycle.noted.wait(5.0)
    medium.commits.open()
    served.wait()
    assert is_noted


def test_host_internal_error_while_opening_closes_the_store(
    hosted: Any, medium: Medium, monkeypatch: pytest.MonkeyPatch
) -> None:
    openings = Gate(medium.backend, "open_namespace")
    openings.shut()
    closed = threading.Event()
    medium.backend.before("close", closed.set)
    served = Served(memoryview(hosted.memory))
    served.connection.send(gated_hello())
    openings.await_waiting()

    def broken(*_: object) -> None:
        raise MemoryError("no memory for a message")

    monkeypatch.setattr(threading, "excepthook", lambda raised: None)
    with monkeypatch.context() as patch:
        patch.setattr(SocketConnection, "receive", broken)
        served.connection.send(Ping())
        time.sleep(0.2)
        openings.open()
        served.wait()
    assert closed.is_set()


def test_host_store_job_with_malformed_depths_fails_alone(
    hosted: Any, medium: Medium
) -> None:
    served = Served(memoryview(hosted.memory))
    served.connection.send(gated_hello())
    served.receive_until(Opened)
    served.connection.send(store_message(1, make_keys(2), depths=b"odd"))
    (done,) = of_kind(served.receive_until(JobDone), JobDone)
    assert (done.job_id, done.failed.unpack()) == (1, make_keys(2))
    served.connection.send(store_message(2, make_keys(2)))
    (done,) = of_kind(served.receive_until(JobDone), JobDone)
    assert (done.job_id, done.failed.unpack()) == (2, [])
    served.close()


def of_kind(messages: list[Any], kind: type[T]) -> list[T]:
    return [message for message in messages if isinstance(message, kind)]
