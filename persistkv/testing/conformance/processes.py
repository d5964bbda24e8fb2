"""Several handles and several processes on one store."""

from __future__ import annotations

import multiprocessing
from collections.abc import Iterator
from contextlib import contextmanager
from multiprocessing.connection import Connection

from persistkv.config import StoreUrl
from persistkv.storage.backend import CommitBatch
from persistkv.storage.extensions import InspectableBackend
from persistkv.testing.conformance.suite import BackendSuite, check_totals, read_pack, sample_identity
from persistkv.testing.samples import payload_of, sample_manifest, sample_pack

_PATIENCE_S = 60


class ProcessTests(BackendSuite):
    """Tests of the guarantees of ``Capabilities.shared`` and of durability."""

    def test_two_handles(self, url: str) -> None:
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

    def test_reader_beside_a_writer(self, url: str) -> None:
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

    def test_two_processes_write(self, url: str) -> None:
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

    def test_killed_process_loses_nothing_that_returned(self, url: str) -> None:
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
    """Return, for each pack and manifest of a batch, whether it is stored with the right content."""
    payloads = [payload_of(pack) for pack in batch.packs]  # the tables exist once the streams have run
    packs = [read_pack(backend, namespace, pack.table) for pack in batch.packs]
    keys = [backend.manifest_keys(namespace, [write.manifest.id])[0] for write in batch.manifests]
    return [
        *(found == payload for found, payload in zip(packs, payloads, strict=True)),
        *(found == write.keys for found, write in zip(keys, batch.manifests, strict=True)),
    ]


@contextmanager
def _other_process(driver: type[InspectableBackend], url: str, numbers: range) -> Iterator[Iterator[int]]:
    """Start a process that commits a batch per number; yield the numbers whose commits returned. Kill it at the end."""
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
