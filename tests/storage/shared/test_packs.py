"""Packs of a shared store: uploads that fail, blobs that are missing or damaged, and the calls that
reads need."""

from __future__ import annotations

import threading
import time
from concurrent.futures import ThreadPoolExecutor, wait

import pytest

from persistkv.config import GroupLayout, RowLayout
from persistkv.errors import StoreError
from persistkv.memory.rows import Rows
from persistkv.storage.backend import CommitBatch, ReadSpan
from persistkv.storage.blobs import UnavailableError
from persistkv.storage.format.codec import ZstdCodec
from persistkv.storage.identity import Identity
from persistkv.storage.records import StoreOptions
from persistkv.storage.shared.packs import UploadBudget
from persistkv.storage.store.blocking import BlockingStore
from persistkv.testing.conformance.suite import check_totals, read_pack, tables
from persistkv.testing.samples import payload_of, sample_manifest, sample_pack
from tests.storage.shared.town import NAMESPACE, Engine, Town, pack

BLOCK = 4096
LAYOUT = RowLayout(BLOCK, (GroupLayout(((0, BLOCK),)),))


def blob_of(town: Town, pack_id: bytes) -> str:
    """Return the name of the only blob of a pack."""
    (name,) = [name for name in town.names("/packs/") if pack_id.hex() in name]
    return name


# Commits


@pytest.mark.parametrize("where", ["/packs/", "/keys/", "/inbox/"])
def test_commit_failed_put_leaves_no_partial_batch(town: Town, where: str) -> None:
    first, second = town.engine(refresh_s=0.0), town.engine(refresh_s=0.0)
    held = pack(1)
    cursor = first.backend.commit(NAMESPACE, CommitBatch([held])).cursor
    first.blobs.fail(
        "put", UnavailableError("pulled the plug"), only=lambda name: where in name
    )
    batch = CommitBatch([pack(2), pack(3)], [sample_manifest("r")])
    with pytest.raises(StoreError):
        first.backend.commit(NAMESPACE, batch)
    first.blobs.clear_faults()
    for engine in (first, second):
        assert tables(engine.backend, NAMESPACE) == {held.pack_id: held.table}
        assert not list(engine.backend.catalogue(NAMESPACE).manifests())
    assert first.backend.changes(NAMESPACE, cursor).added == []

    first.backend.commit(NAMESPACE, batch)
    assert len(second.held()) == 3
    assert [
        manifest.id for manifest in second.backend.catalogue(NAMESPACE).manifests()
    ] == ["r"]
    check_totals(first.backend)


def test_commit_of_a_request_writes_one_blob_per_pack_and_two_more(town: Town) -> None:
    first = town.engine()
    before = len(first.blobs.calls)
    first.backend.commit(
        NAMESPACE, CommitBatch([pack(1), pack(2)], [sample_manifest("r")])
    )
    sent = first.blobs.calls[before:]
    assert [method for method, _ in sent] == ["put"] * 4, (
        "two packs, the keys of the request, the commit"
    )


def test_touches_send_no_call_and_are_written_at_close(town: Town) -> None:
    first = town.engine()
    first.store(pack(1), pack(2))
    before = len(first.blobs.calls)
    first.backend.commit(NAMESPACE, CommitBatch(touches=[pack(2).pack_id]))
    first.backend.commit(NAMESPACE, CommitBatch(touches=[pack(1).pack_id]))
    assert first.blobs.calls[before:] == []
    town.stop(first)
    assert [method for method, _ in first.blobs.calls[before:]] == ["put"]


def test_upload_budget_bounds_memory_of_encoded_packs() -> None:
    budget = UploadBudget(3 * 4 * BLOCK)
    encoded, raw = (
        sample_pack(bytes(16), 1, codec=ZstdCodec()),
        sample_pack(bytes(16), 2),
    )
    inside: list[int] = []
    most: list[int] = []
    lock = threading.Lock()

    def upload(_: int) -> None:
        with budget.reserved(encoded):
            with lock:
                inside.append(1)
                most.append(len(inside))
            time.sleep(0.001)
            with lock:
                inside.pop()

    with ThreadPoolExecutor(8) as threads:
        list(threads.map(upload, range(40)))
        with (
            budget.reserved(encoded),
            budget.reserved(encoded),
            budget.reserved(encoded),
            budget.reserved(raw),
        ):
            waits = threads.submit(upload, 0)
            assert not wait([waits], timeout=0.05).done
        assert waits.result() is None
    assert max(most) <= 3
    with UploadBudget(1).reserved(encoded):
        pass  # a body larger than the budget is admitted alone


# Reads


def test_read_adjacent_spans_needs_one_call(town: Town) -> None:
    first = town.engine()
    wide = pack(1, blocks=64, block_bytes=1 << 20)
    first.store(wide)
    payload = payload_of(wide)
    before = first.calls("read", "/packs/")
    buffers = [bytearray(1 << 20) for _ in range(8)]
    spans: list[ReadSpan] = []
    for block, buffer in zip((0, 1, 3, 4, 40, 41, 20, 2), buffers, strict=True):
        spans.append(ReadSpan(wide.pack_id, block << 20, [memoryview(buffer)]))
    assert first.backend.read(NAMESPACE, spans) == [True] * 8
    for span, buffer in zip(spans, buffers, strict=True):
        assert buffer == payload[span.offset : span.offset + len(buffer)]
    assert first.calls("read", "/packs/") - before == 3


@pytest.mark.parametrize("left", [0, 1, 500, 1000])
def test_read_truncated_pack_misses_and_leaves_the_index(town: Town, left: int) -> None:
    first = town.engine()
    one = pack(1)
    first.store(one)
    town.server.put(blob_of(town, one.pack_id), [payload_of(one)[:left]])
    assert read_pack(first.backend, NAMESPACE, one.table) is None
    assert first.backend.tables(NAMESPACE, [one.pack_id]) == []
    first.store(pack(2))
    assert town.fresh() == {pack(2).pack_id}
    first.store(pack(1))
    town.run(10)
    second = town.engine()
    assert read_pack(second.backend, NAMESPACE, one.table) == payload_of(one)


def test_missed_pack_written_again_by_another_engine_stays(town: Town) -> None:
    first, second = town.engine(refresh_s=3600.0), town.engine(refresh_s=3600.0)
    one = pack(1)
    first.store(one)
    second.backend.refresh()
    town.server.delete([blob_of(town, one.pack_id)])
    for engine in (first, second):
        assert read_pack(engine.backend, NAMESPACE, one.table) is None
    first.store(pack(1))
    second.backend.refresh()
    second.store(pack(2))
    third = town.engine()
    for engine in (second, third):
        assert read_pack(engine.backend, NAMESPACE, one.table) == payload_of(one)
        assert len(engine.held()) == 2


def test_store_missing_blob_misses_without_verification_failure(town: Town) -> None:
    first = town.engine(opens=False)
    memory = bytearray(8 * BLOCK)
    store = open_store(
        first, Identity.of({"weights": "w"}), Rows(memoryview(memory), LAYOUT)
    )
    packs = [sample_pack(store.namespace, seed) for seed in (1, 2)]
    first.backend.commit(store.namespace, CommitBatch(packs))
    store.refresh()
    gone, held = (pack.sections[0].keys for pack in packs)
    town.server.delete([blob_of(town, packs[0].pack_id)])
    assert set(store.read([*gone, *held], range(8))) == set(gone)
    assert bytes(memory[4 * BLOCK :]) == payload_of(packs[1])
    assert not store.contains(gone[0])
    assert store.counters.verification_failures == 0

    first.backend.commit(
        store.namespace, CommitBatch([sample_pack(store.namespace, 1)])
    )
    store.refresh()
    assert store.read(gone, range(4)) == []
    assert bytes(memory[: 4 * BLOCK]) == payload_of(packs[0])


def open_store(engine: Engine, identity: Identity, rows: Rows) -> BlockingStore:
    return BlockingStore(
        engine.backend, identity, rows, StoreOptions(), url="shared://test"
    )


# Whole stores


def test_opening_among_many_namespaces_reads_few_identities(town: Town) -> None:
    setup = town.engine(opens=False)
    for number in range(60):
        setup.backend.open_namespace(
            Identity.of({"weights": f"w{number}", "config": {"block": 16}})
        )

    def opened(weights: str) -> tuple[int, str]:
        engine = town.engine(opens=False)
        identity = Identity.of({"weights": weights, "config": {"block": 16}})
        store = open_store(engine, identity, Rows(memoryview(bytearray(BLOCK)), LAYOUT))
        return engine.calls("read", "identities/"), store.store.notice

    assert opened("w7") == (1, "")
    count, notice = opened("new")
    assert count <= 21
    assert "other weights); see persistkv why" in notice
    assert len(list(setup.backend.namespaces())) == 61


@pytest.mark.parametrize("commits", [1, 9])
def test_emptied_medium_resets_changes_and_accepts_new_commits(
    town: Town,
    commits: int,
) -> None:
    first = town.engine(refresh_s=0.0)
    for seed in range(commits):
        first.store(pack(seed))
    cursor = first.backend.changes(NAMESPACE, None).cursor
    town.server.delete(town.names(""))
    news = first.backend.changes(NAMESPACE, cursor)
    assert (news.reset, [*news.added]) == (True, [])
    for seed in range(commits, commits + 2):
        first.store(pack(seed))
    expected = {pack(seed).pack_id for seed in range(commits, commits + 2)}
    assert first.held() == town.fresh() == expected
    for seed in range(commits):
        first.store(pack(seed))
    assert len(town.fresh()) == commits + 2
    check_totals(first.backend)


def test_foreign_blob_named_policy_is_kept_and_nothing_is_evicted(
    town: Town,
    caplog: pytest.LogCaptureFixture,
) -> None:
    notes = b"my notes on policies"
    town.server.put("plain/policy", [notes])
    first = town.engine(capacity=1_000_000)
    assert "the policy does not read" in caplog.text
    first.store(pack(1))
    town.run(200)
    assert town.data("plain/policy") == notes
    assert first.backend.policy().capacity is None
    assert town.fresh() == {pack(1).pack_id}
