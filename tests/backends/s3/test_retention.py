"""Retention: eviction, orphans, and the election of the engine that runs it."""

from __future__ import annotations

import os
import threading
import time
from typing import Any

import pytest

from persistkv.errors import StoreError
from persistkv.storage.backend import CommitBatch
from persistkv.testing.conformance.suite import check_totals, read_pack, sample_identity, tables
from persistkv.testing.samples import payload_of, sample_manifest, sample_pack
from persistkv_s3 import S3Backend
from persistkv_s3.client.transport import BrokenError
from persistkv_s3.log.layout import Names
from persistkv_s3.retention import Round
from tests.backends.s3.conftest import Opener

NAMESPACE = sample_identity().digest
HOUR_S = 3600.0

sets_the_server_clock = pytest.mark.skipif(
    "PERSISTKV_S3_ENDPOINT" in os.environ, reason="the clock of a real server cannot be set"
)


def run(backend: S3Backend, *, hours: float = 0.0) -> Round:
    """Run one round of retention at a clock that is ``hours`` ahead."""
    done = backend.retain(time.time() + hours * HOUR_S)
    assert done is not None
    return done


def objects(raw_client: Any, bucket: str, prefix: str) -> set[str]:
    found = raw_client.list_objects_v2(Bucket=bucket, Prefix=prefix).get("Contents", ())
    return {entry["Key"] for entry in found}


def test_orphans_go_when_they_are_old(
    open_store: Opener, raw_client: Any, bucket: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("persistkv_s3.client.bucket.MOST_ATTEMPTS", 1)
    backend, client = open_store()
    backend.open_namespace(sample_identity())
    held, deleted, lost = (sample_pack(NAMESPACE, seed) for seed in range(3))
    backend.commit(NAMESPACE, CommitBatch([held, deleted], [sample_manifest("r", packs=[held.pack_id])]))
    backend.commit(NAMESPACE, CommitBatch(deletions=[deleted.pack_id]))

    def fail(verb: str, url: str) -> None:
        if verb == "PUT" and "/log/" in url:
            raise BrokenError("pulled the plug")

    client.before = fail
    with pytest.raises(StoreError):
        backend.commit(NAMESPACE, CommitBatch([lost], [sample_manifest("r2")]))
    client.before = lambda verb, url: None

    names = Names("store/", NAMESPACE)
    assert run(backend, hours=0.5) == Round(0, 0), "they are young"
    assert len(objects(raw_client, bucket, names.packs_prefix)) == 3
    assert run(backend, hours=1.5) == Round(0, 3)
    assert objects(raw_client, bucket, names.packs_prefix) == {names.pack(held.pack_id, 0)}
    assert len(objects(raw_client, bucket, names.keys_prefix)) == 1
    assert read_pack(backend, NAMESPACE, held.table) == payload_of(held)
    assert backend.manifest_keys(NAMESPACE, ["r"])[0] == sample_manifest("r").keys
    backend.commit(NAMESPACE, CommitBatch([sample_pack(NAMESPACE, 1), sample_pack(NAMESPACE, 2)]))
    for pack in (deleted, lost):
        assert read_pack(backend, NAMESPACE, pack.table) == payload_of(pack)
    check_totals(backend)


def test_nothing_goes_where_a_part_of_the_index_does_not_read(open_store: Opener, raw_client: Any, bucket: str) -> None:
    backend, _ = open_store()
    backend.open_namespace(sample_identity())
    pack = sample_pack(NAMESPACE, 1)
    backend.commit(NAMESPACE, CommitBatch([pack]))
    names = Names("store/", NAMESPACE)
    (index,) = objects(raw_client, bucket, names.log_prefix)
    body = bytearray(raw_client.get_object(Bucket=bucket, Key=index)["Body"].read())
    body[30] ^= 1  # in the head
    raw_client.put_object(Bucket=bucket, Key=index, Body=bytes(body))
    (fresh, _) = open_store()
    assert tables(fresh, NAMESPACE) == {}
    assert run(fresh, hours=100) == Round(0, 0)
    assert len(objects(raw_client, bucket, names.packs_prefix)) == 1


def test_capacity_takes_the_oldest_and_spares_the_pinned(open_store: Opener) -> None:
    backend, _ = open_store("refresh=0s&capacity=1MiB")
    other = backend.open_namespace(sample_identity(1)).id
    backend.open_namespace(sample_identity())
    packs = [sample_pack((NAMESPACE, other)[seed % 2], seed, blocks=4, block_bytes=50_000) for seed in range(10)]
    for pack in packs:
        backend.commit(pack.namespace, CommitBatch([pack]))
    pin = CommitBatch(manifests=[sample_manifest("p", packs=[packs[2].pack_id])], pins=[("p", True)])
    backend.commit(NAMESPACE, pin)
    backend.commit(NAMESPACE, CommitBatch(touches=[packs[0].pack_id]))
    cursor = backend.changes(NAMESPACE, None).cursor
    assert backend.stats().disk_bytes > 1 << 20
    run(backend)
    stats = check_totals(backend)
    assert stats.capacity == 1 << 20
    assert stats.disk_bytes <= 1 << 20
    held = {**tables(backend, NAMESPACE), **tables(backend, other)}
    assert [pack.pack_id in held for pack in packs] == [True, False, True, *[False] * 4, *[True] * 3]
    assert set(backend.changes(NAMESPACE, cursor).removed) == {packs[4].pack_id, packs[6].pack_id}


@sets_the_server_clock
def test_ttl_counts_from_the_last_use(open_store: Opener, monkeypatch: pytest.MonkeyPatch) -> None:
    backend, _ = open_store("refresh=0s&ttl=1h")
    backend.open_namespace(sample_identity())
    used, idle = (sample_pack(NAMESPACE, seed) for seed in range(2))
    backend.commit(NAMESPACE, CommitBatch([used, idle], [sample_manifest("r", packs=[idle.pack_id])]))
    now = time.time
    monkeypatch.setattr(time, "time", lambda: now() + 0.6 * HOUR_S)
    backend.commit(NAMESPACE, CommitBatch(touches=[used.pack_id]))
    monkeypatch.setattr(time, "time", lambda: now() + 1.2 * HOUR_S)
    assert run(backend).evicted == 1
    assert set(tables(backend, NAMESPACE)) == {used.pack_id}
    assert not list(backend.manifests(NAMESPACE))


def test_ttl_of_an_engine_with_a_wrong_clock_counts_by_the_server(
    open_store: Opener, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The clock of this thread, which runs the engine, is a year ahead. The clock of the server's threads is right."""
    now, year_s = time.time, 365 * 24 * HOUR_S
    engine = threading.current_thread()
    with monkeypatch.context() as patch:
        patch.setattr(time, "time", lambda: now() + (year_s if threading.current_thread() is engine else 0.0))
        ahead, _ = open_store("refresh=0s&ttl=1h")
        ahead.open_namespace(sample_identity())
        ahead.commit(NAMESPACE, CommitBatch([sample_pack(NAMESPACE, 1)]))
    other, _ = open_store()
    other.changes(NAMESPACE, None)
    other.commit(NAMESPACE, CommitBatch([sample_pack(NAMESPACE, 2)]))
    assert run(other, hours=0.5).evicted == 0
    assert run(other, hours=1.5).evicted == 2


def test_one_engine_looks_in_each_period(open_store: Opener, raw_client: Any, bucket: str) -> None:
    (one, _), (two, _) = open_store("retention=36500d"), open_store("retention=36500d")
    rounds = [one.retain(), two.retain(), one.retain()]
    assert rounds.count(None) == 2
    assert len(objects(raw_client, bucket, "store/leases/")) == 1


@sets_the_server_clock
def test_commits_look_when_a_period_begins(
    open_store: Opener, raw_client: Any, bucket: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    backend, _ = open_store("refresh=0s&retention=36500d")
    backend.open_namespace(sample_identity())
    backend.commit(NAMESPACE, CommitBatch())
    assert not objects(raw_client, bucket, "store/leases/")
    now = time.time
    monkeypatch.setattr(time, "time", lambda: now() + 36_500 * 24 * HOUR_S)
    backend.commit(NAMESPACE, CommitBatch())
    assert len(objects(raw_client, bucket, "store/leases/")) == 1


def test_readers_do_not_look(open_store: Opener) -> None:
    open_store()
    reader, _ = open_store(read_only=True)
    with pytest.raises(StoreError):
        reader.retain()
