"""Concurrent loads, transactions and shutdown: a store on threads, over a medium that blocks on
request."""

from __future__ import annotations

import threading
import time
from collections.abc import Sequence

import msgspec
import pytest

from persistkv.errors import StoreError
from persistkv.storage.backend import ReadSpan
from persistkv.storage.format.pack import PackedKeys
from persistkv.storage.host.client import StoreClient
from persistkv.storage.host.in_flight import JobOutcome
from persistkv.storage.host.protocol import (
    JobDone,
    Loaded,
    LoadJob,
    Opened,
    StoreJob,
    Touch,
)
from persistkv.storage.records import RequestEnd
from persistkv.testing.conformance.suite import tables
from tests.memory_store import flip
from tests.storage.host.hosted import Hosted
from tests.storage.host.jobs import BLOCK, Served, make_keys
from tests.storage.host.medium import (
    PATIENCE_S,
    Gate,
    Medium,
    eventually,
    gated_hello,
    load_message,
    of_kind,
    store_message,
)


@pytest.fixture
def client(hosted: Hosted, medium: Medium) -> StoreClient:
    opened: StoreClient = hosted.connect(
        "lmdb:///gated", "thread", max_age_s=1e6, refresh_s=0.01
    )
    opened.open()
    return opened


def store(client: StoreClient, job: int, keys: list[bytes], first_row: int = 0) -> None:
    rows = range(first_row, first_row + len(keys))
    client.submit_store(job, f"r{job}", keys, rows, range(len(keys)), len(keys) * BLOCK)


def test_load_continues_while_commit_is_blocked(
    hosted: Hosted,
    client: StoreClient,
    medium: Medium,
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
    hosted: Hosted,
    client: StoreClient,
    medium: Medium,
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
    hosted: Hosted,
    client: StoreClient,
    medium: Medium,
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


def finish_all(client: StoreClient, jobs: set[int]) -> dict[int, JobOutcome]:
    ended: dict[int, JobOutcome] = {}
    deadline = time.monotonic() + PATIENCE_S
    while not jobs <= ended.keys():
        assert time.monotonic() < deadline
        ended.update((outcome.job_id, outcome) for outcome in client.poll())
    return ended


def end(request: str, keys: list[bytes]) -> RequestEnd:
    return RequestEnd(request, f"m-{request}", (keys,), 16 * len(keys), 16)


def test_load_partly_failed_ends_after_slowest_part(
    hosted: Hosted,
    client: StoreClient,
    medium: Medium,
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
    hosted: Hosted,
    medium: Medium,
    codec: str,
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
    hosted: Hosted,
    client: StoreClient,
    medium: Medium,
) -> None:
    medium.commits.shut()
    store(client, 1, make_keys(64))
    medium.commits.await_waiting()
    client.submit_load(2, make_keys(3, 500), [70, 71, 72])
    assert hosted.finish(client, 2).failed == make_keys(3, 500)
    medium.commits.open()
    assert hosted.finish(client, 1).failed == []


def test_corrupt_pack_is_deleted_after_running_commit_ends(
    hosted: Hosted,
    client: StoreClient,
    medium: Medium,
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
    hosted: Hosted,
    client: StoreClient,
    medium: Medium,
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
    hosted: Hosted,
    client: StoreClient,
    medium: Medium,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """An internal error must not pin rows for ever: a thread, unlike a process, cannot be killed to
    release them."""
    medium.commits.shut()
    store(client, 1, make_keys(64))
    medium.commits.await_waiting()

    is_broken = threading.Event()

    def broken(*_: object) -> None:
        is_broken.set()
        raise RuntimeError("a fault")

    monkeypatch.setattr("persistkv.storage.store.store.Store.read", broken)
    # pytest's hook would keep references to the rows
    monkeypatch.setattr(threading, "excepthook", lambda raised: None)
    client.submit_load(2, make_keys(3, 500), [70, 71, 72])
    assert is_broken.wait(PATIENCE_S)
    answered = {outcome.job_id for outcome in client.poll()}
    medium.commits.open()
    outcomes = finish_all(client, {1, 2} - answered)
    assert outcomes[1].refused
    assert not client.contains(make_keys(1)[0])


MALFORMED = PackedKeys(b"keys", 3)


@pytest.mark.parametrize(
    "malformed",
    [
        store_message(1, make_keys(2), depths=b"odd"),
        msgspec.structs.replace(store_message(1, make_keys(2)), block_ids=b"odd"),
        msgspec.structs.replace(store_message(1, make_keys(2)), keys=MALFORMED),
        msgspec.structs.replace(load_message(1, make_keys(2)), block_ids=b"odd"),
        msgspec.structs.replace(load_message(1, make_keys(2)), keys=MALFORMED),
    ],
    ids=["depths", "store rows", "store keys", "load rows", "load keys"],
)
def test_host_malformed_job_fails_alone(
    hosted: Hosted,
    medium: Medium,
    malformed: StoreJob | LoadJob,
) -> None:
    served = Served(memoryview(hosted.memory))
    served.connection.send(gated_hello())
    served.receive_until(Opened)
    served.connection.send(malformed)
    (done,) = of_kind(served.receive_until(JobDone), JobDone)
    assert (done.job_id, done.failed) == (1, None)
    served.connection.send(Touch(MALFORMED))
    served.connection.send(Loaded(MALFORMED))
    served.connection.send(store_message(2, make_keys(2)))
    (done,) = of_kind(served.receive_until(JobDone), JobDone)
    assert (done.job_id, done.failed) == (2, PackedKeys())
    served.close()
