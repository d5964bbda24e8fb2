"""Several threads of one handle: commits and loads beside the background thread, and beside the end
of a replica."""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from persistkv.errors import StoreError
from persistkv.storage.backend import CommitBatch
from persistkv.storage.shared import SharedBackend, SharedOptions
from persistkv.storage.shared.format import NAME_BYTES
from persistkv.testing import FaultyBlobs, MemoryBlobs
from persistkv.testing.conformance.suite import sample_identity, tables
from tests.storage.shared.town import NAMESPACE, pack


@pytest.fixture
def quick_switches() -> Iterator[None]:
    """Threads that take turns every few microseconds."""
    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    yield
    sys.setswitchinterval(before)


def opened(
    blobs: MemoryBlobs | FaultyBlobs,
    *,
    background: bool = False,
) -> SharedBackend:
    backend = SharedBackend(blobs, SharedOptions(cache=False), background=background)
    backend.open_namespace(sample_identity())
    return backend


def wait_for(condition: Callable[[], bool]) -> None:
    end = time.monotonic() + 30
    while not condition():
        assert time.monotonic() < end, "it does not happen"
        time.sleep(0.05)


def test_background_thread_survives_an_unexpected_exception() -> None:
    server = MemoryBlobs()
    reader_blobs = FaultyBlobs(server.handle())
    reader_blobs.fail(
        "read",
        ZeroDivisionError("a bug"),
        times=1,
        only=lambda name: name.endswith("latest"),
    )
    reader, writer = (
        opened(reader_blobs, background=True),
        opened(server.handle(), background=True),
    )
    wait_for(lambda: sum(name.endswith("latest") for _, name in reader_blobs.calls) > 1)
    writer.commit(NAMESPACE, CommitBatch([pack(1)]))
    wait_for(lambda: pack(1).pack_id in tables(reader, NAMESPACE))
    reader.close()
    writer.close()


@pytest.mark.usefixtures("quick_switches")
def test_commits_beside_lists_of_the_index_raise_nothing() -> None:
    backend = opened(MemoryBlobs())
    namespace = backend.opened_namespace(NAMESPACE)
    namespace.replica.mark_contained([f"old{number}" for number in range(3000)])
    failures: list[BaseException] = []
    stops = threading.Event()

    def look() -> None:
        try:
            while not stops.is_set():
                backend.refresh()
        except BaseException as error:
            failures.append(error)

    thread = threading.Thread(target=look)
    thread.start()
    for seed in range(60):
        backend.commit(NAMESPACE, CommitBatch([pack(seed, blocks=1, block_bytes=16)]))
    stops.set()
    thread.join()
    assert failures == []
    backend.close()


@pytest.mark.usefixtures("quick_switches")
def test_deletions_are_planned_beside_the_thread_that_deletes(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("persistkv.storage.shared.index.deletions.TOMBSTONE_S", 0.0)
    backend = opened(MemoryBlobs())
    deletions = backend.opened_namespace(NAMESPACE).merger.deletions
    failures: list[BaseException] = []
    stops = threading.Event()

    def delete() -> None:
        try:
            while not stops.is_set():
                deletions.step()
        except BaseException as error:
            failures.append(error)

    thread = threading.Thread(target=delete)
    thread.start()
    for number in range(3000):
        deletions.add_packs([number.to_bytes(NAME_BYTES, "big")])
    stops.set()
    thread.join()
    assert failures == []
    backend.close()


def test_replica_is_closed_only_when_no_thread_reads_it(tmp_path: Path) -> None:
    """Its rows are views of a memory map, which closing removes."""
    backend = opened(MemoryBlobs())
    backend.commit(NAMESPACE, CommitBatch([pack(1)]))
    replica = backend.opened_namespace(NAMESPACE).replica
    began, ends = threading.Event(), threading.Event()
    found: list[int] = []

    def read() -> None:
        with replica.rows() as rows:
            _, row = next(rows.range("packs", b""))
            began.set()
            ends.wait(30)
            found.append(len(bytes(row)))

    thread = threading.Thread(target=read)
    thread.start()
    began.wait(30)
    threading.Timer(0.3, ends.set).start()
    start = time.monotonic()
    replica.close()
    assert time.monotonic() - start > 0.2
    thread.join()
    assert found[0] > 0
    with pytest.raises(StoreError), replica.rows():
        pass
    backend.close()
