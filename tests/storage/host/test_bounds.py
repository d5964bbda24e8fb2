"""Queues to a store that accepts little or nothing are bounded, and the engine never blocks on
them."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path

import pytest

from persistkv.storage import open_backend
from persistkv.storage.backend import CommitBatch
from persistkv.storage.host.client import StoreClient
from persistkv.storage.host.protocol import ToStore, Touch
from persistkv.storage.host.supervisor import State
from persistkv.storage.records import RequestEnd, StoreReport
from tests.storage.host.hosted import Hosted
from tests.storage.host.jobs import BLOCK, make_keys, pid_of


def test_submit_store_beyond_queue_bytes_is_refused(
    hosted: Hosted,
    tmp_path: Path,
) -> None:
    client = hosted.connect(f"lmdb://{tmp_path}/store", max_queue_bytes=80 * BLOCK)
    client.open()
    os.kill(pid_of(hosted), signal.SIGSTOP)
    client.submit_store(1, "a", make_keys(70), range(70), None, 70 * BLOCK)
    client.submit_store(2, "a", make_keys(20, 70), range(70, 90), None, 20 * BLOCK)
    (refused,) = client.poll()
    assert (refused.job_id, refused.refused, len(refused.failed)) == (2, True, 20)
    assert client.counters.refused_bytes == 20 * BLOCK
    os.kill(pid_of(hosted), signal.SIGCONT)
    assert hosted.finish(client, 1).failed == []
    client.submit_store(3, "a", make_keys(20, 70), range(70, 90), None, 20 * BLOCK)
    assert hosted.finish(client, 3).failed == []


def test_submit_store_job_larger_than_queue_is_accepted_alone(
    hosted: Hosted,
    tmp_path: Path,
) -> None:
    client = hosted.connect(f"lmdb://{tmp_path}/store", max_queue_bytes=BLOCK)
    client.open()
    client.submit_store(1, "a", make_keys(70), range(70), None, 70 * BLOCK)
    client.submit_store(2, "a", make_keys(1, 70), [70], None, BLOCK)
    assert hosted.finish(client, 2).refused
    assert hosted.finish(client, 1).failed == []


def test_client_stopped_host_process_does_not_block_engine(
    hosted: Hosted,
    tmp_path: Path,
) -> None:
    """The engine queues thousands of messages to a process that reads none, and never blocks on
    them."""
    client = hosted.connect(f"lmdb://{tmp_path}/store", max_queue_bytes=1 << 40)
    client.open()
    os.kill(pid_of(hosted), signal.SIGSTOP)
    for job in range(3000):
        client.submit_store(
            job, "a", make_keys(128, 128 * job), range(128), None, 128 * BLOCK
        )
        assert client.poll() == []
    os.kill(pid_of(hosted), signal.SIGKILL)
    os.kill(pid_of(hosted), signal.SIGCONT)
    lost: set[int] = set()
    deadline = time.monotonic() + 60
    while len(lost) < 3000 and time.monotonic() < deadline:
        lost.update(outcome.job_id for outcome in client.poll() if outcome.refused)
    assert len(lost) == 3000
    assert client.counters.lost_jobs == 3000


def test_touch_sends_held_keys_once_and_drops_overflow(
    hosted: Hosted,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    client = hosted.connect(
        f"lmdb://{tmp_path}/store?capacity=64MiB", "thread", max_age_s=0.0
    )
    client.touch(make_keys(3))  # the store is not open yet
    client.open()
    held = make_keys(100)
    client.submit_store(1, "a", held, range(100), range(100), 100 * BLOCK)
    hosted.finish(client, 1)
    assert client.flush(90)
    sent: list[int] = []
    send = client.supervisor.connection.send

    def count(message: ToStore) -> None:
        if isinstance(message, Touch):
            sent.append(len(message.keys))
        send(message)

    monkeypatch.setattr(client.supervisor.connection, "send", count)
    client.touch([*held, *make_keys(50, 1000)])
    client.touch(held[:10])
    client.touch(make_keys(70_000, 2000))  # exceeds the limit of pending uses: dropped
    client.poll()
    client.poll()
    assert sent == [100], "only held keys, each once"


def test_events_overflow_of_idle_engine_reports_loss(
    hosted: Hosted,
    tmp_path: Path,
) -> None:
    """The keys in the events of an idle engine are bounded on both sides while another process
    fills the store."""
    url = f"lmdb://{tmp_path}/store?capacity=256MiB"
    idle, busy = (
        hosted.connect(url, "thread", refresh_s=0.0),
        hosted.connect(url, "thread", max_age_s=0.0),
    )
    idle.open()
    busy.open()
    busy.submit_store(1, "a", make_keys(128), range(128), None, 128 * BLOCK)
    assert busy.flush(90)
    assert sorted(next_events(idle).stored) == sorted(make_keys(128))
    delete_all_of(busy, make_keys(1)[0])
    assert next_events(idle).lost, "the removal names no keys"
    assert len(idle) == 0
    assert not idle.contains(make_keys(1)[0])
    report = StoreReport()
    for start in range(0, 200_000, 4_000):
        report.add(stored=make_keys(4_000, start))
        assert len(report.stored) + len(report.removed) <= 70_000
    assert report.lost


def next_events(client: StoreClient) -> StoreReport:
    """Poll until there are events; return them."""
    deadline = time.monotonic() + 90
    while True:
        client.poll()
        events = client.take_events()
        if events != StoreReport():
            return events
        assert time.monotonic() < deadline


def test_take_events_without_subscription_is_empty(
    hosted: Hosted, tmp_path: Path
) -> None:
    client = hosted.connect(
        f"lmdb://{tmp_path}/store", "thread", events=False, max_age_s=0.0
    )
    client.open()
    client.submit_store(1, "a", make_keys(3), range(3), None, 3 * BLOCK)
    assert client.flush(90)
    assert all(map(client.contains, make_keys(3)))
    assert client.take_events() == StoreReport()


def delete_all_of(client: StoreClient, key: bytes) -> None:
    """Delete all packs that hold this key, as another process."""
    backend = open_backend(client.supervisor.hello.url)
    (space,) = backend.namespaces()
    packs = [
        table.pack_id
        for table in backend.changes(space.id, None).added
        if key in table.keys.unpack()
    ]
    backend.commit(space.id, CommitBatch(deletions=packs))
    backend.close()


def test_end_request_full_manifest_queue_is_refused(
    hosted: Hosted,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The queue of manifests is bounded while the store accepts nothing and long contexts end."""
    client = hosted.connect(f"lmdb://{tmp_path}/store", "thread")
    client.open()
    long = make_keys(180_000)
    with monkeypatch.context() as patch:
        patch.setattr(client.supervisor.connection, "send", lambda message: None)
        for number in range(4):
            client.end_request(RequestEnd(f"r{number}", f"m{number}", (long,), 1, 16))
    assert client.take_persisted() == {"r2": False, "r3": False}
    assert client.counters.refused_ends == 2


def test_end_request_without_keys_counts_toward_queue_bound(
    hosted: Hosted,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Requests without keys use memory, too, and so do labels."""
    client = hosted.connect(f"lmdb://{tmp_path}/store", "thread")
    client.open()
    with monkeypatch.context() as patch:
        patch.setattr(client.supervisor.connection, "send", lambda message: None)
        for number in range(80_000):
            client.end_request(RequestEnd(f"r{number}", f"m{number}", ([],), 0, 16))
        client.end_request(
            RequestEnd("long", "long", ([],), 0, 16, True, {"label": "x" * (32 << 20)})
        )
    assert client.counters.refused_ends > 1000
    assert "long" in client.take_persisted()


def test_touch_stopped_host_bounds_queued_bytes(
    hosted: Hosted,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """No reply is pending, so the watchdog does not check the stopped host; the queue to it is
    still bounded."""
    client = hosted.connect(f"lmdb://{tmp_path}/store")
    client.open()
    held = make_keys(128)
    client.submit_store(1, "a", held, range(128), range(128), 128 * BLOCK)
    hosted.finish(client, 1)
    assert client.flush(90)
    os.kill(pid_of(hosted), signal.SIGSTOP)
    connection, sent = client.supervisor.connection, list[int]()
    send = connection.send

    def counted(message: Touch) -> None:
        sent.append(len(message.keys.data))
        send(message)

    monkeypatch.setattr(connection, "send", counted)
    for _ in range(6000):
        client.touch(held)
        client.poll()
    assert sum(sent) <= 12 << 20, "more than the socket takes and the outbox may hold"
    monkeypatch.undo()
    assert client.state is State.OPEN
    os.kill(pid_of(hosted), signal.SIGCONT)
    assert client.flush(90)
