"""Opening and closing of stores, and namespaces."""

from __future__ import annotations

import time

import pytest

from persistkv.errors import ConfigurationError, StoreError, StoreUnavailableError
from persistkv.storage.backend import CommitBatch, ReadSpan
from persistkv.storage.extensions import InspectableBackend
from persistkv.testing.conformance.suite import BackendSuite, check_totals, read_pack, sample_identity, tables
from persistkv.testing.samples import payload_of, sample_manifest, sample_pack


class OpeningTests(BackendSuite):
    """Tests of ``open``, ``close``, ``namespaces`` and ``open_namespace``."""

    def test_reopened_store_holds_what_was_committed(self, url: str) -> None:
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
        assert again.changes(opened.id, cursor).added == []
        assert check_totals(again) == stats
        again.close()

    def test_read_only_needs_a_store(self, url: str) -> None:
        with pytest.raises(StoreUnavailableError):
            self.open(url, read_only=True)
        with pytest.raises(StoreUnavailableError):  # the first attempt created nothing
            self.open(url, read_only=True)

    def test_read_only_reads_and_does_not_write(self, url: str) -> None:
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

    def test_unknown_option_is_named_and_nothing_created(self, url: str) -> None:
        wrong = f"{url}{'&' if '?' in url else '?'}no_such_option=1"
        with pytest.raises(ConfigurationError, match="no_such_option"):
            self.open(wrong)
        with pytest.raises(StoreUnavailableError):
            self.open(url, read_only=True)

    def test_fresh_store_is_empty(self, backend: InspectableBackend) -> None:
        assert list(backend.namespaces()) == []
        stats = check_totals(backend)
        assert (stats.packs, stats.blocks, stats.requests) == (0, 0, 0)

    def test_namespace_is_created_once(self, backend: InspectableBackend) -> None:
        before = time.time()
        opened = backend.open_namespace(sample_identity())
        assert opened.identity == sample_identity()
        assert opened.id == sample_identity().digest
        assert before - 1 <= opened.created <= time.time() + 1
        assert backend.open_namespace(sample_identity()) == opened
        assert list(backend.namespaces()) == [opened]

    def test_namespaces_do_not_see_each_other(self, backend: InspectableBackend) -> None:
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
        check_totals(backend)

    def test_unknown_namespace_cannot_be_committed_to(self, backend: InspectableBackend) -> None:
        stranger = sample_identity(9).digest
        with pytest.raises(StoreError):
            backend.commit(stranger, CommitBatch([sample_pack(stranger, 1)]))

    def test_pack_of_another_namespace_is_refused(self, backend: InspectableBackend, namespace: bytes) -> None:
        with pytest.raises(StoreError):
            backend.commit(namespace, CommitBatch([sample_pack(sample_identity(9).digest, 1)]))
        assert tables(backend, namespace) == {}

    def test_close_is_idempotent_and_final(self, backend: InspectableBackend, namespace: bytes) -> None:
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
