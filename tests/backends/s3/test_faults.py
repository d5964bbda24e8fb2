"""Network and server faults: no wrong bytes, no wait past the deadline, and recovery after each
fault.

Each fault hits a commit and a read, through a proxy that really breaks the connection.
"""

from __future__ import annotations

import time
from contextlib import suppress
from typing import TYPE_CHECKING

import pytest

from persistkv.config import GroupLayout, RowLayout
from persistkv.errors import StoreError
from persistkv.memory.rows import Rows
from persistkv.storage.backend import CommitBatch, ReadSpan
from persistkv.storage.records import StoreOptions
from persistkv.storage.store.blocking import BlockingStore
from persistkv.testing.conformance.suite import (
    check_totals,
    read_pack,
    sample_identity,
    tables,
)
from persistkv.testing.samples import payload_of, sample_manifest, sample_pack
from persistkv_s3 import S3Backend
from tests.backends.s3.conftest import Opener
from tests.backends.s3.faults import FaultProxy

if TYPE_CHECKING:
    from types_boto3_s3 import S3Client

pytestmark = pytest.mark.slow

NAMESPACE = sample_identity().digest
OPTIONS = "refresh=0s&deadline=5s&slow=1h"
HARD = [
    "hang",
    "hang_reply",
    "lose_reply",
    "rst",
    "rst_after 100",
    "delay 60",
    "s503 100000",
]
SOFT = ["lose_reply1", "s503 2", "rate 4000000"]
"""Faults that an operation survives within its deadline."""


@pytest.fixture(autouse=True)
def short_breaker_pause(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("persistkv_s3.client.bucket.LONGEST_PAUSE_S", 1.0)


def wait_until_recovered(backend: S3Backend) -> None:
    """Repeat a request until the breaker has closed."""
    until = time.monotonic() + 60
    while True:
        try:
            backend.changes(NAMESPACE, backend.changes(NAMESPACE, None).cursor)
            return
        except StoreError:
            assert time.monotonic() < until, (
                "the pack could not be stored after the server had recovered"
            )
            time.sleep(0.1)


@pytest.mark.parametrize("fault", HARD)
def test_backend_lasting_fault_raises_in_time_then_recovers(
    open_store: Opener,
    proxy: FaultProxy,
    fault: str,
) -> None:
    backend, _ = open_store(OPTIONS, port=proxy.port)
    backend.open_namespace(sample_identity())
    held, lost = (
        sample_pack(NAMESPACE, seed, blocks=16, block_bytes=65_536) for seed in (1, 2)
    )
    backend.commit(NAMESPACE, CommitBatch([held], [sample_manifest("r1")]))

    proxy.set(fault)
    begin = time.monotonic()
    with pytest.raises(StoreError):
        backend.commit(NAMESPACE, CommitBatch([lost], [sample_manifest("r2")]))
    buffer = bytearray(held.table.payload_length)
    with pytest.raises(StoreError):
        backend.read(NAMESPACE, [ReadSpan(held.pack_id, 0, [memoryview(buffer)])])
    assert time.monotonic() - begin < 60, (
        "limit: two operations of 5 s, each extended by a socket timeout"
    )

    proxy.set("ok")
    wait_until_recovered(backend)
    assert backend.breaker_state == "closed"
    assert read_pack(backend, NAMESPACE, held.table) == payload_of(held)
    backend.commit(NAMESPACE, CommitBatch([lost], [sample_manifest("r2")]))
    (other, _) = open_store()
    for handle in (backend, other):
        assert set(tables(handle, NAMESPACE)) == {held.pack_id, lost.pack_id}
        assert {
            manifest.id for manifest in handle.catalogue(NAMESPACE).manifests()
        } == {"r1", "r2"}
        assert read_pack(handle, NAMESPACE, lost.table) == payload_of(lost)
        check_totals(handle)


@pytest.mark.parametrize("fault", SOFT)
def test_backend_transient_fault_is_retried_without_error(
    open_store: Opener,
    proxy: FaultProxy,
    fault: str,
) -> None:
    backend, _ = open_store("refresh=0s", port=proxy.port)
    backend.open_namespace(sample_identity())
    backend.changes(NAMESPACE, None)
    pack = sample_pack(NAMESPACE, 1, blocks=16, block_bytes=65_536)
    proxy.set(fault)
    backend.commit(NAMESPACE, CommitBatch([pack], [sample_manifest("r1")]))
    proxy.set(fault)
    assert read_pack(backend, NAMESPACE, pack.table) == payload_of(pack)
    proxy.set("ok")
    (other, _) = open_store()
    assert tables(other, NAMESPACE) == {pack.pack_id: pack.table}
    assert check_totals(other).requests == 1


def test_read_reset_connection_resumes_at_broken_offset(
    open_store: Opener,
    proxy: FaultProxy,
) -> None:
    backend, client = open_store("refresh=1h", port=proxy.port)
    backend.open_namespace(sample_identity())
    pack = sample_pack(NAMESPACE, 1, blocks=8, block_bytes=1 << 18)
    backend.commit(NAMESPACE, CommitBatch([pack]))
    proxy.set("rst_after 900000")
    client.take()
    assert read_pack(backend, NAMESPACE, pack.table) == payload_of(pack)
    assert client.take()["GET"] >= 3, (
        "no attempt got more than 900 kB, and none began anew"
    )


def test_read_trickling_body_raises_at_deadline(
    open_store: Opener,
    proxy: FaultProxy,
) -> None:
    backend, _ = open_store(OPTIONS, port=proxy.port)
    backend.open_namespace(sample_identity())
    pack = sample_pack(NAMESPACE, 1, blocks=16, block_bytes=1 << 18)
    backend.commit(NAMESPACE, CommitBatch([pack]))
    proxy.set("rate 100000")
    begin = time.monotonic()
    with pytest.raises(StoreError):
        read_pack(backend, NAMESPACE, pack.table)
    assert time.monotonic() - begin < 20, "at 100 kB/s it would be 42 s"
    proxy.set("ok")
    wait_until_recovered(backend)
    assert read_pack(backend, NAMESPACE, pack.table) == payload_of(pack)


def test_breaker_open_fails_operations_without_delay(
    open_store: Opener,
    proxy: FaultProxy,
) -> None:
    backend, _ = open_store("refresh=1h&deadline=5s&slow=1h", port=proxy.port)
    backend.open_namespace(sample_identity())
    pack = sample_pack(NAMESPACE, 1)
    backend.commit(NAMESPACE, CommitBatch([pack]))
    proxy.set("rst")
    while backend.breaker_state == "closed":
        with pytest.raises(StoreError):
            read_pack(backend, NAMESPACE, pack.table)
    begin = time.monotonic()
    for seed in range(20):
        with pytest.raises(StoreError):
            backend.commit(NAMESPACE, CommitBatch([sample_pack(NAMESPACE, 10 + seed)]))
        with pytest.raises(StoreError):
            read_pack(backend, NAMESPACE, pack.table)
    assert time.monotonic() - begin < 60, (
        "40 operations that try until their deadline take 200 s"
    )
    assert backend.breaker_state != "closed"


def test_backend_deleted_bucket_raises_instead_of_missing(
    open_store: Opener,
    raw_client: S3Client,
    bucket: str,
) -> None:
    backend, _ = open_store("refresh=1h")
    backend.open_namespace(sample_identity())
    pack = sample_pack(NAMESPACE, 1)
    backend.commit(NAMESPACE, CommitBatch([pack]))
    for entry in raw_client.list_objects_v2(Bucket=bucket)["Contents"]:
        raw_client.delete_object(Bucket=bucket, Key=entry["Key"])
    raw_client.delete_bucket(Bucket=bucket)
    with pytest.raises(StoreError):
        read_pack(backend, NAMESPACE, pack.table)
    with pytest.raises(StoreError):
        backend.commit(NAMESPACE, CommitBatch([sample_pack(NAMESPACE, 2)]))
    with pytest.raises(StoreError):
        open_store()


@pytest.mark.parametrize("options", ["", "&read_only=yes"])
def test_store_opened_during_outage_misses_until_server_recovers(
    open_store: Opener,
    proxy: FaultProxy,
    options: str,
    caplog: pytest.LogCaptureFixture,
) -> None:
    writer, _ = open_store()
    writer.open_namespace(sample_identity())
    theirs, ours = sample_pack(NAMESPACE, 1), sample_pack(NAMESPACE, 2)
    writer.commit(NAMESPACE, CommitBatch([theirs]))
    proxy.set("rst")
    with pytest.raises(StoreError):
        open_store("refresh=0s", port=proxy.port, read_only=True)
    backend, _ = open_store(f"refresh=0s{options}", port=proxy.port)
    rows = Rows(
        memoryview(bytearray(8 * 4096)), RowLayout(4096, (GroupLayout(((0, 4096),)),))
    )
    store = BlockingStore(
        backend, sample_identity(), rows, StoreOptions(), url="s3://test"
    )
    assert "does not answer" in caplog.text
    key = theirs.sections[0].keys[0]
    assert not store.contains(key)
    with pytest.raises(StoreError):
        backend.commit(NAMESPACE, CommitBatch([ours]))

    proxy.set("ok")
    until = time.monotonic() + 60
    while not store.contains(key):
        assert time.monotonic() < until, "it never came"
        store.refresh()
        time.sleep(0.1)
    assert store.read([key], [0]) == []
    if not options:
        backend.commit(NAMESPACE, CommitBatch([ours]))
        (fresh, _) = open_store()
        assert set(tables(fresh, NAMESPACE)) == {theirs.pack_id, ours.pack_id}
        check_totals(fresh)


def test_backend_opened_during_outage_creates_store_on_recovery(
    open_store: Opener,
    proxy: FaultProxy,
) -> None:
    proxy.set("rst")
    backend, _ = open_store("refresh=0s", port=proxy.port)
    assert backend.open_namespace(sample_identity()).id == NAMESPACE
    cursor = backend.changes(NAMESPACE, None).cursor
    proxy.set("ok")
    pack, until = sample_pack(NAMESPACE, 1), time.monotonic() + 60
    while pack.pack_id not in tables(backend, NAMESPACE):
        assert time.monotonic() < until, (
            "the pack could not be stored after the server had recovered"
        )
        with suppress(StoreError):
            backend.commit(NAMESPACE, CommitBatch([pack]))
        time.sleep(0.1)
    assert [table.pack_id for table in backend.changes(NAMESPACE, cursor).added] == [
        pack.pack_id
    ]
    (fresh, _) = open_store()
    assert [namespace.id for namespace in fresh.namespaces()] == [NAMESPACE]
    assert read_pack(fresh, NAMESPACE, pack.table) == payload_of(pack)
