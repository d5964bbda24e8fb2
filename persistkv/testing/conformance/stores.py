"""Tests of opening, closing and sharing stores: namespaces, several handles and processes, status rows."""

from __future__ import annotations

import multiprocessing
import time
from collections.abc import Iterator
from contextlib import contextmanager
from multiprocessing.connection import Connection

import pytest

from persistkv.config import StoreUrl
from persistkv.errors import ConfigurationError, StoreError, StoreUnavailableError
from persistkv.storage.backend import CommitBatch, ReadSpan
from persistkv.storage.extensions import InspectableBackend, SupportsNotes, SupportsStatus
from persistkv.testing.conformance.suite import BackendSuite, check_totals, read_pack, sample_identity, tables
from persistkv.testing.samples import payload_of, sample_manifest, sample_pack


class OpeningTests(BackendSuite):
    """Tests of ``open``, ``close``, ``namespaces`` and ``open_namespace``."""

    def test_open_closed_store_returns_committed_content(self, url: str) -> None:
        self.need_persistence()
        first = self.open(url)
        opened = first.open_namespace(sample_identity())
        pack, manifest = sample_pack(opened.id, 1), sample_manifest("r1")
        cursor = first.commit(opened.id, CommitBatch([pack], [manifest])).cursor
        stats = first.stats()
        first.close()

        again = self.open(url)
        assert list(again.namespaces()) == [opened]
        assert again.open_namespace(sample_identity()) == opened
        assert tables(again, opened.id) == {pack.pack_id: pack.table}
        assert read_pack(again, opened.id, pack.table) == payload_of(pack)
        assert list(again.manifests(opened.id)) == [manifest.manifest]
        assert again.manifest_keys(opened.id, ["r1"])[0] == manifest.keys
        assert list(again.changes(opened.id, cursor).added) == []
        assert check_totals(again) == stats
        again.close()

    def test_open_read_only_missing_store_raises_and_creates_nothing(self, url: str) -> None:
        with pytest.raises(StoreUnavailableError):
            self.open(url, read_only=True)
        with pytest.raises(StoreUnavailableError):  # the first attempt created nothing
            self.open(url, read_only=True)

    def test_open_read_only_reads_and_rejects_writes(self, url: str) -> None:
        self.need_persistence()
        writer = self.open(url)
        assert writer.capabilities.writable
        opened = writer.open_namespace(sample_identity())
        pack = sample_pack(opened.id, 1)
        writer.commit(opened.id, CommitBatch([pack]))
        writer.close()

        reader = self.open(url, read_only=True)
        assert not reader.capabilities.writable
        assert reader.open_namespace(sample_identity()) == opened
        assert read_pack(reader, opened.id, pack.table) == payload_of(pack)
        with pytest.raises(StoreUnavailableError):
            reader.open_namespace(sample_identity(1))
        with pytest.raises(StoreError):
            reader.commit(opened.id, CommitBatch(deletions=[pack.pack_id]))
        assert tables(reader, opened.id) == {pack.pack_id: pack.table}
        assert list(reader.namespaces()) == [opened]
        reader.close()

    def test_open_unknown_option_raises_and_creates_nothing(self, url: str) -> None:
        wrong = f"{url}{'&' if '?' in url else '?'}no_such_option=1"
        with pytest.raises(ConfigurationError, match="no_such_option"):
            self.open(wrong)
        with pytest.raises(StoreUnavailableError):
            self.open(url, read_only=True)

    def test_open_namespace_twice_returns_same_namespace(self, backend: InspectableBackend) -> None:
        assert list(backend.namespaces()) == [], "a new store is not empty"
        before = time.time()
        opened = backend.open_namespace(sample_identity())
        assert opened.identity == sample_identity()
        assert opened.id == sample_identity().digest
        assert before - 1 <= opened.created <= time.time() + 1
        assert backend.open_namespace(sample_identity()) == opened
        assert list(backend.namespaces()) == [opened]

    def test_namespaces_same_ids_keep_separate_content(self, backend: InspectableBackend) -> None:
        ours, theirs = (backend.open_namespace(sample_identity(number)).id for number in (1, 2))
        mine, other = sample_pack(ours, 1, content=10), sample_pack(theirs, 1, content=20)
        backend.commit(ours, CommitBatch([mine], [sample_manifest("same", 1)]))
        backend.commit(theirs, CommitBatch([other], [sample_manifest("same", 2), sample_manifest("more")]))

        assert {namespace.id for namespace in backend.namespaces()} == {ours, theirs}
        assert tables(backend, ours) == {mine.pack_id: mine.table}
        assert tables(backend, theirs) == {other.pack_id: other.table}
        assert read_pack(backend, ours, mine.table) == payload_of(mine)
        assert read_pack(backend, theirs, other.table) == payload_of(other)
        assert read_pack(backend, ours, other.table) is None
        assert [manifest.id for manifest in backend.manifests(ours)] == ["same"]
        assert backend.manifest_keys(ours, ["same"])[0] == sample_manifest("same", 1).keys
        assert backend.manifest_keys(ours, ["more"])[0] is None

        backend.commit(ours, CommitBatch(deletions=[mine.pack_id, other.pack_id]))
        assert tables(backend, ours) == {}
        assert read_pack(backend, theirs, other.table) == payload_of(other)

    def test_put_note_is_kept_per_namespace(self, backend: InspectableBackend) -> None:
        if not isinstance(backend, SupportsNotes):
            pytest.skip("the driver keeps no notes")
        ours, theirs = (backend.open_namespace(sample_identity(number)).id for number in (1, 2))
        assert backend.note(ours, "a1") is None
        backend.put_note(ours, "a1", b"first")
        backend.put_note(ours, "b2", b"other")
        backend.put_note(ours, "a1", b"second")
        assert (backend.note(ours, "a1"), backend.note(ours, "b2")) == (b"second", b"other")
        assert backend.note(theirs, "a1") is None
        assert {namespace.id for namespace in backend.namespaces()} == {ours, theirs}
        check_totals(backend)

    def test_commit_unknown_namespace_raises(self, backend: InspectableBackend) -> None:
        stranger = sample_identity(9).digest
        with pytest.raises(StoreError):
            backend.commit(stranger, CommitBatch([sample_pack(stranger, 1)]))

    def test_commit_pack_of_other_namespace_raises(self, backend: InspectableBackend, namespace: bytes) -> None:
        with pytest.raises(StoreError):
            backend.commit(namespace, CommitBatch([sample_pack(sample_identity(9).digest, 1)]))
        assert tables(backend, namespace) == {}

    def test_close_twice_succeeds_and_later_calls_raise(self, url: str) -> None:
        backend = self.open(url)
        namespace = backend.open_namespace(sample_identity()).id
        backend.commit(namespace, CommitBatch([sample_pack(namespace, 1)]))
        backend.close()
        backend.close()
        with pytest.raises(StoreError):
            backend.changes(namespace, None)
        with pytest.raises(StoreError):
            backend.read(namespace, [ReadSpan(bytes(16), 0, [memoryview(bytearray(1))])])
        with pytest.raises(StoreError):
            backend.commit(namespace, CommitBatch())
        with pytest.raises(StoreError):
            backend.stats()


_PATIENCE_S = 60


class ProcessTests(BackendSuite):
    """Tests of the guarantees of ``Capabilities.shared`` and of durability."""

    def test_open_two_handles_see_each_others_commits(self, url: str) -> None:
        self.need_sharing()
        first, second = self.open(url), self.open(url)
        namespace = first.open_namespace(sample_identity()).id
        assert second.open_namespace(sample_identity()).id == namespace
        cursor = second.changes(namespace, None).cursor
        pack = sample_pack(namespace, 1)
        first.commit(namespace, CommitBatch([pack]))
        assert second.commit(namespace, CommitBatch([sample_pack(namespace, 2)], seen=cursor)).stale
        assert list(second.changes(namespace, cursor).added) == [pack.table]
        first.close()
        assert read_pack(second, namespace, pack.table) == payload_of(pack)
        assert not second.commit(namespace, CommitBatch([sample_pack(namespace, 2)])).stale
        check_totals(second)
        second.close()

    def test_open_read_only_with_open_writer_sees_its_commits(self, url: str) -> None:
        self.need_sharing()
        writer = self.open(url)
        namespace = writer.open_namespace(sample_identity()).id
        reader = self.open(url, read_only=True)
        cursor = reader.changes(namespace, None).cursor
        pack = sample_pack(namespace, 1)
        writer.commit(namespace, CommitBatch([pack], [sample_manifest("r1")]))
        assert list(reader.changes(namespace, cursor).added) == [pack.table]
        assert read_pack(reader, namespace, pack.table) == payload_of(pack)
        assert [manifest.id for manifest in reader.manifests(namespace)] == ["r1"]
        writer.close()
        assert reader.stats().packs == 1
        again = self.open(url)
        again.commit(namespace, CommitBatch([sample_pack(namespace, 2)]))
        assert reader.stats().packs == 2
        again.close()
        reader.close()

    def test_commit_two_processes_keeps_all_batches(self, url: str) -> None:
        self.need_sharing()
        backend = self.open(url)
        namespace = backend.open_namespace(sample_identity()).id
        with _other_process(self.driver, url, range(1000, 1030)) as returned:
            for number in range(30):
                backend.commit(namespace, _batch(namespace, number))
            assert [next(returned) for _ in range(30)] == list(range(1000, 1030))
            assert next(returned, None) is None
        for number in (*range(30), *range(1000, 1030)):
            assert _held(backend, namespace, _batch(namespace, number)) == [True] * 3
        check_totals(backend)
        backend.close()

    def test_commit_killed_process_keeps_acknowledged_batches(self, url: str) -> None:
        self.need_persistence()
        with _other_process(self.driver, url, range(1_000_000)) as returned:
            numbers = [next(returned) for _ in range(12)]
        backend = self.open(url)
        namespace = backend.open_namespace(sample_identity()).id
        held = [_held(backend, namespace, _batch(namespace, number)) for number in range(backend.stats().requests + 2)]
        assert all(all(parts) or not any(parts) for parts in held)
        assert all(all(held[number]) for number in numbers)
        check_totals(backend)
        backend.commit(namespace, _batch(namespace, 5_000_000))
        backend.close()


def _batch(namespace: bytes, number: int) -> CommitBatch:
    packs = [sample_pack(namespace, 10 * number + part, blocks=2) for part in range(2)]
    return CommitBatch(packs, [sample_manifest(f"r{number}", number)])


def _held(backend: InspectableBackend, namespace: bytes, batch: CommitBatch) -> list[bool]:
    """Return, for each pack and manifest of a batch, whether it is stored with the same content."""
    payloads = [payload_of(pack) for pack in batch.packs]  # the tables exist once the streams have run
    packs = [read_pack(backend, namespace, pack.table) for pack in batch.packs]
    keys = [backend.manifest_keys(namespace, [write.manifest.id])[0] for write in batch.manifests]
    return [
        *(found == payload for found, payload in zip(packs, payloads, strict=True)),
        *(found == write.keys for found, write in zip(keys, batch.manifests, strict=True)),
    ]


@contextmanager
def _other_process(driver: type[InspectableBackend], url: str, numbers: range) -> Iterator[Iterator[int]]:
    """Start a process that commits one batch per number; yield an iterator of the numbers whose commits have returned.
    Kill the process at the end of the ``with`` block.
    """
    context = multiprocessing.get_context("spawn")
    ours, theirs = context.Pipe()
    process = context.Process(target=_commit_all, args=(driver, url, numbers, theirs), daemon=True)
    process.start()
    theirs.close()
    try:
        yield _received(ours)
    finally:
        process.kill()
        process.join()
        ours.close()


def _received(connection: Connection) -> Iterator[int]:
    while connection.poll(_PATIENCE_S):
        try:
            yield connection.recv()
        except EOFError:
            return


def _commit_all(driver: type[InspectableBackend], url: str, numbers: range, returned: Connection) -> None:
    backend = driver.open(StoreUrl.parse(url))
    namespace = backend.open_namespace(sample_identity()).id
    for number in numbers:
        backend.commit(namespace, _batch(namespace, number))
        returned.send(number)
    backend.close()
    returned.close()


class StatusTests(BackendSuite):
    """Tests of ``publish_status`` and ``statuses``."""

    def test_publish_status_adds_replaces_and_removes_row(self, backend: InspectableBackend) -> None:
        if not isinstance(backend, SupportsStatus):
            pytest.skip("the driver keeps no status rows")
        backend.publish_status("one", b"first")
        backend.publish_status("other", b"theirs")
        backend.publish_status("one", b"second")
        assert backend.statuses() == {"one": b"second", "other": b"theirs"}
        for _ in range(2):
            backend.publish_status("one", None)
        assert backend.statuses() == {"other": b"theirs"}

    def test_statuses_read_only_handle_reads_but_cannot_publish(self, backend: InspectableBackend, url: str) -> None:
        self.need_sharing()
        reader = self.open(url, read_only=True)
        if not (isinstance(backend, SupportsStatus) and isinstance(reader, SupportsStatus)):
            pytest.skip("the driver keeps no status rows")
        assert reader.statuses() == {}
        backend.publish_status("one", b"row")
        assert reader.statuses() == {"one": b"row"}
        with pytest.raises(StoreError):
            reader.publish_status("two", b"row")
        reader.close()
