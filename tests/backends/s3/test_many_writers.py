"""Several processes write overlapping requests into one bucket, each taking snapshots, while a reader follows."""

from __future__ import annotations

import multiprocessing
from typing import Any

import pytest

from persistkv.config import StoreUrl
from persistkv.storage.backend import CommitBatch
from persistkv.testing.conformance.suite import check_totals, read_pack, sample_identity, tables
from persistkv.testing.samples import payload_of, sample_manifest, sample_pack
from persistkv_s3 import S3Backend
from persistkv_s3.log.names import Names
from tests.backends.s3.conftest import Opener
from tests.backends.s3.test_retention import objects, run

NAMESPACE = sample_identity().digest
WRITERS = 4
COMMITS = 20
SHARED = 12
"""Packs that all of them write."""


def seeds_of(writer: int, number: int) -> list[int]:
    """What one commit stores: a pack that others store too, and one of its own."""
    return [(writer * 5 + number) % SHARED, 1000 * (writer + 1) + number]


def write(url: str, writer: int, done: Any) -> None:
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
def test_overlapping_requests_are_stored_once(open_store: Opener, endpoint: str, raw_client: Any, bucket: str) -> None:
    reader, _ = open_store()
    reader.open_namespace(sample_identity())
    url = f"s3://{bucket}/store?endpoint_url={endpoint}&refresh=1s"
    context = multiprocessing.get_context("spawn")
    ours, theirs = context.Pipe()
    processes = [context.Process(target=write, args=(url, writer, theirs), daemon=True) for writer in range(WRITERS)]
    for process in processes:
        process.start()
    cursor, known = reader.changes(NAMESPACE, None).cursor, {}
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
    assert len(objects(raw_client, bucket, Names("store/", NAMESPACE).packs_prefix)) == len(seeds), "each once"
    assert run(fresh, hours=2).evicted == 0
    assert len(objects(raw_client, bucket, Names("store/", NAMESPACE).packs_prefix)) == len(seeds), "no orphan"
