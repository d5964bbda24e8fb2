"""Several handles on one store, and the state after one of them fails between two requests."""

from __future__ import annotations

import multiprocessing
from typing import Any

import pytest

from persistkv.config import GroupLayout, RowLayout, StoreUrl
from persistkv.errors import StoreError
from persistkv.memory.rows import Rows
from persistkv.storage.backend import CommitBatch, Namespace, ReadSpan
from persistkv.storage.catalog.rows import encode_namespace
from persistkv.storage.format.pack import PackTable
from persistkv.storage.identity import Identity
from persistkv.storage.records import StoreOptions
from persistkv.storage.store import Store
from persistkv.testing.conformance.suite import check_totals, read_pack, sample_identity, tables
from persistkv.testing.samples import payload_of, sample_manifest, sample_pack
from persistkv_s3 import S3Backend
from persistkv_s3.client.transport import BrokenError
from persistkv_s3.feed.format import Names
from tests.backends.s3.conftest import Opener

NAMESPACE = sample_identity().digest
WRITERS = 4
COMMITS = 20
SHARED = 12
"""Number of packs that all writers store."""


def keys_under(client: Any, bucket: str, prefix: str) -> list[str]:
    return [entry["Key"] for entry in client.list_objects_v2(Bucket=bucket, Prefix=prefix).get("Contents", ())]


def pack_key(backend: S3Backend, pack_id: bytes) -> str:
    """Return the key of the object of a pack that the backend holds."""
    session = backend.session(NAMESPACE)
    return session.objects.names.pack(pack_id, session.catalogue.objects([pack_id])[pack_id].nonce)


@pytest.mark.parametrize("where", ["/packs/", "/keys/", "/inbox/"])
def test_commit_failed_put_leaves_no_partial_batch(open_store: Opener, where: str, monkeypatch: Any) -> None:
    monkeypatch.setattr("persistkv_s3.client.bucket.MOST_ATTEMPTS", 2)
    backend, client = open_store()
    backend.open_namespace(sample_identity())
    held = sample_pack(NAMESPACE, 1)
    cursor = backend.commit(NAMESPACE, CommitBatch([held])).cursor

    def fail(verb: str, url: str) -> None:
        if verb == "PUT" and where in url:
            raise BrokenError("pulled the plug")

    client.before = fail
    batch = CommitBatch([sample_pack(NAMESPACE, 2), sample_pack(NAMESPACE, 3)], [sample_manifest("r")])
    with pytest.raises(StoreError):
        backend.commit(NAMESPACE, batch)
    client.before = lambda verb, url: None
    (other, _) = open_store()
    for handle in (backend, other):
        assert tables(handle, NAMESPACE) == {held.pack_id: held.table}
        assert not list(handle.manifests(NAMESPACE))
    assert backend.changes(NAMESPACE, cursor).added == []

    backend.commit(NAMESPACE, batch)
    assert len(tables(other, NAMESPACE)) == 3
    assert [manifest.id for manifest in other.manifests(NAMESPACE)] == ["r"]
    check_totals(backend)


def test_read_missing_object_misses_without_quarantine(open_store: Opener, raw_client: Any, bucket: str) -> None:
    backend, _ = open_store("refresh=1h")
    identity = Identity.of({"weights": "w"})
    memory = bytearray(8 * 4096)
    rows = Rows(memoryview(memory), RowLayout(4096, (GroupLayout(((0, 4096),)),)))
    store = Store(backend, identity, rows, StoreOptions(), url="s3://test")
    packs = [sample_pack(store.namespace, seed) for seed in (1, 2)]
    backend.commit(store.namespace, CommitBatch(packs))
    store.refresh()
    gone, held = (pack.segments[0].keys for pack in packs)
    session = backend.session(store.namespace)
    nonce = session.catalogue.objects([packs[0].pack_id])[packs[0].pack_id].nonce
    raw_client.delete_object(Bucket=bucket, Key=session.objects.names.pack(packs[0].pack_id, nonce))
    assert set(store.read([*gone, *held], range(8))) == set(gone)
    assert bytes(memory[4 * 4096 :]) == payload_of(packs[1])
    assert not store.contains(gone[0])
    assert store.counters.verification_failures == 0

    backend.commit(store.namespace, CommitBatch([sample_pack(store.namespace, 1)]))
    store.refresh()
    assert store.read(gone, range(4)) == []
    assert bytes(memory[: 4 * 4096]) == payload_of(packs[0])
    (other, _) = open_store()
    assert len(tables(other, store.namespace)) == 2


@pytest.mark.parametrize("left", [0, 1, 5000, 16_000])
def test_read_truncated_pack_misses_and_drops_it(open_store: Opener, raw_client: Any, bucket: str, left: int) -> None:
    backend, client = open_store("refresh=1h")
    backend.open_namespace(sample_identity())
    pack = sample_pack(NAMESPACE, 1)
    backend.commit(NAMESPACE, CommitBatch([pack]))
    key = pack_key(backend, pack.pack_id)
    raw_client.put_object(Bucket=bucket, Key=key, Body=payload_of(pack)[:left])
    client.take()
    assert read_pack(backend, NAMESPACE, pack.table) is None
    assert client.take() == {"GET": 1}, "not retried"
    assert backend.breaker.state == "closed"
    assert backend.tables(NAMESPACE, [pack.pack_id]) == []
    backend.commit(NAMESPACE, CommitBatch([sample_pack(NAMESPACE, 2)]))
    (fresh, _) = open_store()
    assert pack.pack_id not in tables(fresh, NAMESPACE)
    backend.commit(NAMESPACE, CommitBatch([sample_pack(NAMESPACE, 1)]))
    assert read_pack(fresh, NAMESPACE, tables(fresh, NAMESPACE)[pack.pack_id]) == payload_of(pack)


def test_open_store_with_many_namespaces_reads_few_identities(
    open_store: Opener, raw_client: Any, bucket: str, caplog: pytest.LogCaptureFixture
) -> None:
    for number in range(60):
        other = Namespace(Identity.of({"weights": f"w{number}", "config": {"block": 16}}), 1.7e9 + number)
        raw_client.put_object(Bucket=bucket, Key=Names("store/").identity(other.id), Body=encode_namespace(other))
    layout = RowLayout(4096, (GroupLayout(((0, 4096),)),))

    def opened(weights: str) -> tuple[dict[str, int], str]:
        backend, client = open_store("refresh=1h")
        identity = Identity.of({"weights": weights, "config": {"block": 16}})
        store = Store(backend, identity, Rows(memoryview(bytearray(4096)), layout), StoreOptions(), url="s3://test")
        return client.take(), store.notice

    counts, notice = opened("w7")
    assert (counts["GET"] <= 5, notice) == (True, "")
    counts, notice = opened("new")
    assert counts["GET"] <= 25
    assert "nearest namespace differs in weights" in notice
    assert len(list(open_store().backend.namespaces())) == 61


def commit_many(backend: S3Backend, seeds: range) -> None:
    for seed in seeds:
        batch = CommitBatch([sample_pack(NAMESPACE, seed, blocks=1)], [sample_manifest(f"r{seed}")])
        backend.commit(NAMESPACE, batch)


def test_touches_send_no_request_and_are_written_at_close(open_store: Opener) -> None:
    backend, client = open_store("refresh=1h")
    backend.open_namespace(sample_identity())
    packs = [sample_pack(NAMESPACE, seed) for seed in range(2)]
    backend.commit(NAMESPACE, CommitBatch(packs))
    client.take()
    backend.commit(NAMESPACE, CommitBatch(touches=[packs[1].pack_id]))
    backend.commit(NAMESPACE, CommitBatch(touches=[packs[0].pack_id]))
    assert client.take() == {}
    backend.close()
    assert "PUT" in client.take(), "the uses are written"


def test_read_adjacent_spans_sends_one_request(open_store: Opener) -> None:
    backend, client = open_store("refresh=1h")
    backend.open_namespace(sample_identity())
    pack = sample_pack(NAMESPACE, 1, blocks=64, block_bytes=65_536)
    backend.commit(NAMESPACE, CommitBatch([pack]))
    payload = payload_of(pack)
    client.take()
    buffers = [bytearray(65_536) for _ in range(8)]
    spans = [
        ReadSpan(pack.pack_id, 65_536 * block, [memoryview(buffer)])
        for block, buffer in zip((0, 1, 3, 4, 40, 41, 20, 2), buffers, strict=True)
    ]
    assert backend.read(NAMESPACE, spans) == [True] * 8
    for span, buffer in zip(spans, buffers, strict=True):
        assert buffer == payload[span.offset : span.offset + 65_536]
    assert client.take() == {"GET": 3}


def test_commit_pack_of_huge_blocks_uploads_it_with_one_request(open_store: Opener) -> None:
    (ours, client), (theirs, _) = open_store("refresh=1h"), open_store("refresh=1h")
    for backend in (ours, theirs):
        backend.open_namespace(sample_identity())
        backend.changes(NAMESPACE, None)
    client.take()
    pack = sample_pack(NAMESPACE, 1, blocks=1, block_bytes=80 << 20)
    ours.commit(NAMESPACE, CommitBatch([pack]))
    assert client.take() == {"PUT": 2}, "the pack and the commit"
    theirs.refresh()
    for backend in (ours, theirs):
        assert read_pack(backend, NAMESPACE, pack.table) == payload_of(pack)


def test_missed_pack_rewritten_by_other_handle_stays_in_store(open_store: Opener, raw_client: Any, bucket: str) -> None:
    (one, _), (two, _) = open_store("refresh=1h"), open_store("refresh=1h")
    one.open_namespace(sample_identity())
    pack = sample_pack(NAMESPACE, 1)
    one.commit(NAMESPACE, CommitBatch([pack]))
    for backend in (one, two):
        backend.changes(NAMESPACE, None)
    raw_client.delete_object(Bucket=bucket, Key=pack_key(one, pack.pack_id))
    for backend in (one, two):
        assert read_pack(backend, NAMESPACE, pack.table) is None
    one.commit(NAMESPACE, CommitBatch([sample_pack(NAMESPACE, 1)]))
    two.refresh()
    two.commit(NAMESPACE, CommitBatch([sample_pack(NAMESPACE, 2)]))
    (fresh, _) = open_store()
    for backend in (two, fresh):
        assert read_pack(backend, NAMESPACE, pack.table) == payload_of(pack)
        assert len(tables(backend, NAMESPACE)) == 2


@pytest.mark.parametrize("commits", [1, 9])
def test_emptied_bucket_resets_changes_and_accepts_new_commits(
    open_store: Opener, raw_client: Any, bucket: str, commits: int
) -> None:
    backend, _ = open_store("refresh=0s&cache=no")
    backend.open_namespace(sample_identity())
    commit_many(backend, range(commits))
    cursor = backend.changes(NAMESPACE, None).cursor
    for key in keys_under(raw_client, bucket, ""):
        raw_client.delete_object(Bucket=bucket, Key=key)
    news = backend.changes(NAMESPACE, cursor)
    assert (news.reset, [*news.added]) == (True, [])
    commit_many(backend, range(commits, commits + 2))
    (fresh, _) = open_store("refresh=0s&cache=no")
    assert [namespace.id for namespace in fresh.namespaces()] == [NAMESPACE]
    expected = {sample_pack(NAMESPACE, seed, blocks=1).pack_id for seed in range(commits, commits + 2)}
    for handle in (backend, fresh):
        assert set(tables(handle, NAMESPACE)) == expected
    commit_many(backend, range(commits))
    assert len(tables(fresh, NAMESPACE)) == commits + 2
    check_totals(fresh)


def seeds_of(writer: int, number: int) -> list[int]:
    """Return the seeds of one commit's packs: one that other writers store too, and one of its own."""
    return [(writer * 5 + number) % SHARED, 1000 * (writer + 1) + number]


def write_requests(url: str, writer: int, done: Any) -> None:
    backend = S3Backend.open(StoreUrl.parse(url))
    namespace = backend.open_namespace(sample_identity()).id
    for number in range(COMMITS):
        packs = [sample_pack(namespace, seed, content=seed + 10_000 * writer) for seed in seeds_of(writer, number)]
        manifest = sample_manifest(f"{writer}-{number}", packs=[pack.pack_id for pack in packs])
        backend.commit(namespace, CommitBatch(packs, [manifest]))
    backend.close()
    done.send(True)


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_concurrent_writers_store_shared_packs_once(
    open_store: Opener, endpoint: str, raw_client: Any, bucket: str
) -> None:
    reader, _ = open_store()
    reader.open_namespace(sample_identity())
    url = f"s3://{bucket}/store?endpoint_url={endpoint}&refresh=1s"
    context = multiprocessing.get_context("spawn")
    ours, theirs = context.Pipe()
    processes = [
        context.Process(target=write_requests, args=(url, writer, theirs), daemon=True) for writer in range(WRITERS)
    ]
    for process in processes:
        process.start()
    cursor = reader.changes(NAMESPACE, None).cursor
    known: dict[bytes, PackTable] = {}
    while any(process.is_alive() for process in processes):
        news = reader.changes(NAMESPACE, cursor)
        cursor = news.cursor
        for pack_id in news.removed:
            known.pop(pack_id, None)
        for table in news.added:
            known[table.pack_id] = table
            assert read_pack(reader, NAMESPACE, table) is not None
    for process in processes:
        process.join()
    assert sum(ours.recv() for _ in range(WRITERS)) == WRITERS

    (fresh, _) = open_store()
    held = tables(fresh, NAMESPACE)
    seeds = {seed for writer in range(WRITERS) for number in range(COMMITS) for seed in seeds_of(writer, number)}
    assert set(held) == {sample_pack(NAMESPACE, seed).pack_id for seed in seeds}
    for seed in seeds:
        table = held[sample_pack(NAMESPACE, seed).pack_id]
        served = read_pack(fresh, NAMESPACE, table)
        written = [sample_pack(NAMESPACE, seed, content=seed + 10_000 * writer) for writer in range(WRITERS)]
        assert served in [payload_of(pack) for pack in written]
        assert table in [pack.table for pack in written if payload_of(pack) == served]
    reader.changes(NAMESPACE, cursor)
    assert set(tables(reader, NAMESPACE)) == set(held)
    assert check_totals(fresh).requests == WRITERS * COMMITS
