"""The end of a host: after its engine, and after errors of its own."""

from __future__ import annotations

import os
import subprocess
import threading
import time

import pytest

from persistkv.storage.backend import CommitBatch
from persistkv.storage.host.connection import SocketConnection
from persistkv.storage.host.protocol import End, JobDone, Opened, Ping
from persistkv.storage.host.server.event_loop import Lifecycle
from tests.storage.host.hosted import Hosted
from tests.storage.host.jobs import Served, make_keys
from tests.storage.host.medium import (
    PATIENCE_S,
    Gate,
    Medium,
    gated_hello,
    load_message,
    store_message,
)


@pytest.mark.parametrize("ends_by", ["close", "end", "death"])
def test_host_waits_for_hung_commit_at_the_end_without_using_the_cpu(
    hosted: Hosted,
    medium: Medium,
    ends_by: str,
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
    """Notes that the server tells its owner that it ends."""

    def __init__(self) -> None:
        self.noted = threading.Event()
        self.count = 0

    def ending(self, *, remote: bool) -> None:
        self.noted.set()
        self.count += 1


class Busy(Lifecycle):
    """Keeps the event loop of the server busy from the opening of the store on, until released."""

    def __init__(self) -> None:
        self.release = threading.Event()

    def opened(self) -> None:
        assert self.release.wait(PATIENCE_S)


def test_host_commits_small_jobs_that_arrived_before_it_saw_the_engines_death(
    hosted: Hosted,
    medium: Medium,
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
    hosted: Hosted,
    medium: Medium,
    monkeypatch: pytest.MonkeyPatch,
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

    monkeypatch.setattr("persistkv.storage.store.store.Store.read", broken)
    # pytest's hook would keep references to the rows
    monkeypatch.setattr(threading, "excepthook", lambda raised: None)
    served.connection.send(load_message(2, make_keys(1, 500), 70))
    is_noted = lifecycle.noted.wait(5.0)
    medium.commits.open()
    served.wait()
    assert is_noted


def test_host_internal_error_while_opening_closes_the_store(
    hosted: Hosted,
    medium: Medium,
    monkeypatch: pytest.MonkeyPatch,
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


def test_host_internal_error_during_the_end_reports_the_end_once(
    hosted: Hosted,
    medium: Medium,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A second report would set the alarm of the host process again, and double its time."""
    lifecycle = Ending()
    served = Served(memoryview(hosted.memory), None, lifecycle)
    served.connection.send(gated_hello())
    served.receive_until(Opened)

    def broken(*_: object) -> None:
        raise RuntimeError("a fault")

    monkeypatch.setattr("persistkv.storage.store.store.Store.flush", broken)
    monkeypatch.setattr(threading, "excepthook", lambda raised: None)
    served.close()
    assert lifecycle.count == 1


def test_host_commits_uses_of_loads_that_end_after_the_engine(
    hosted: Hosted,
    medium: Medium,
) -> None:
    """The load reads key tables of several packs, so its uses are recorded late."""
    contexts = [make_keys(64, start) for start in range(0, 384, 64)]
    served = Served(memoryview(hosted.memory))
    served.connection.send(gated_hello())
    served.receive_until(Opened)
    for job, keys in enumerate(contexts):
        served.connection.send(store_message(job, keys))
        served.receive_until(JobDone)
    served.close()

    medium.reopen()
    tables = Gate(medium.backend, "tables")
    tables.shut()
    used: set[bytes] = set()

    def note(namespace: bytes, batch: CommitBatch) -> None:
        used.update(batch.touches)

    medium.backend.before("commit", note)
    served = Served(memoryview(hosted.memory))
    served.connection.send(gated_hello())
    served.receive_until(Opened)
    first_keys = [keys[0] for keys in contexts]
    served.connection.send(load_message(1, first_keys))
    served.connection.send(End())
    tables.await_waiting()
    time.sleep(0.2)  # a commit at the end of the engine has ended
    tables.open()
    served.wait()
    assert len(used) == len(contexts)
