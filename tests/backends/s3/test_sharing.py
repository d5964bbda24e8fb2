"""Several handles on one store in a bucket, and the requests that they send."""

from __future__ import annotations

import multiprocessing
from multiprocessing.connection import Connection
from typing import TYPE_CHECKING

import pytest

from persistkv.config import StoreUrl
from persistkv.storage.backend import CommitBatch, ReadSpan
from persistkv.storage.format.pack import PackTable
from persistkv.testing.conformance.suite import (
    check_totals,
    read_pack,
    sample_identity,
    tables,
)
from persistkv.testing.samples import payload_of, sample_manifest, sample_pack
from persistkv_s3 import S3Backend
from tests.backends.s3.conftest import Opener

if TYPE_CHECKING:
    from types_boto3_s3 import S3Client

NAMESPACE = sample_identity().digest
WRITERS = 4
COMMITS = 20
SHARED = 12
"""Number of packs that all writers store."""


def keys_under(client: S3Client, bucket: str, prefix: str) -> list[str]:
    return [
        entry["Key"]
        for entry in client.list_objects_v2(Bucket=bucket, Prefix=prefix).get(
            "Contents", ()
        )
    ]


@pytest.mark.parametrize("left", [0, 5000])
def test_read_truncated_pack_misses_and_drops_it(
    open_store: Opener,
    raw_client: S3Client,
    bucket: str,
    left: int,
) -> None:
    backend, client = open_store("refresh=1h")
    backend.open_namespace(sample_identity())
    pack = sample_pack(NAMESPACE, 1)
    backend.commit(NAMESPACE, CommitBatch([pack]))
    (key,) = [key for key in keys_under(raw_client, bucket, "") if "/packs/" in key]
    raw_client.put_object(Bucket=bucket, Key=key, Body=payload_of(pack)[:left])
    client.take()
    assert read_pack(backend, NAMESPACE, pack.table) is None
    assert client.take() == {"GET": 2}, (
        "not retried; the second one shows that the store is there"
    )
    assert backend.breaker_state == "closed"
    assert backend.tables(NAMESPACE, [pack.pack_id]) == []
    backend.commit(NAMESPACE, CommitBatch([sample_pack(NAMESPACE, 2)]))
    (fresh, _) = open_store()
    assert pack.pack_id not in tables(fresh, NAMESPACE)
    backend.commit(NAMESPACE, CommitBatch([sample_pack(NAMESPACE, 1)]))
    assert read_pack(
        fresh, NAMESPACE, tables(fresh, NAMESPACE)[pack.pack_id]
    ) == payload_of(pack)


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


def test_commit_pack_of_huge_blocks_uploads_it_with_one_request(
    open_store: Opener,
) -> None:
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


def seeds_of(writer: int, number: int) -> list[int]:
    """Return the seeds of one commit's packs: one that other writers store too, and one of its
    own."""
    return [(writer * 5 + number) % SHARED, 1000 * (writer + 1) + number]


def write_requests(url: str, writer: int, done: Connection) -> None:
    backend = S3Backend.open(StoreUrl.parse(url))
    namespace = backend.open_namespace(sample_identity()).id
    for number in range(COMMITS):
        packs = [
            sample_pack(namespace, seed, content=seed + 10_000 * writer)
            for seed in seeds_of(writer, number)
        ]
        manifest = sample_manifest(
            f"{writer}-{number}", packs=[pack.pack_id for pack in packs]
        )
        backend.commit(namespace, CommitBatch(packs, [manifest]))
    backend.close()
    done.send(True)


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_concurrent_writers_store_shared_packs_once(
    open_store: Opener,
    endpoint: str,
    raw_client: S3Client,
    bucket: str,
) -> None:
    reader, _ = open_store()
    reader.open_namespace(sample_identity())
    url = f"s3://{bucket}/store?endpoint_url={endpoint}&refresh=1s"
    context = multiprocessing.get_context("spawn")
    ours, theirs = context.Pipe()
    processes = [
        context.Process(target=write_requests, args=(url, writer, theirs), daemon=True)
        for writer in range(WRITERS)
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
    seeds = {
        seed
        for writer in range(WRITERS)
        for number in range(COMMITS)
        for seed in seeds_of(writer, number)
    }
    assert set(held) == {sample_pack(NAMESPACE, seed).pack_id for seed in seeds}
    for seed in seeds:
        table = held[sample_pack(NAMESPACE, seed).pack_id]
        served = read_pack(fresh, NAMESPACE, table)
        written = [
            sample_pack(NAMESPACE, seed, content=seed + 10_000 * writer)
            for writer in range(WRITERS)
        ]
        assert served in [payload_of(pack) for pack in written]
        assert table in [pack.table for pack in written if payload_of(pack) == served]
    reader.changes(NAMESPACE, cursor)
    assert set(tables(reader, NAMESPACE)) == set(held)
    assert check_totals(fresh).requests == WRITERS * COMMITS
