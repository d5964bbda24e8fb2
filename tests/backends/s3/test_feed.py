"""Feed, leader and local catalogues: several engines on a bucket in memory, whose clock the test advances."""

from __future__ import annotations

import threading
import tracemalloc
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import msgspec
import pytest

from persistkv.errors import CorruptPackError, StoreError, StoreUnavailableError
from persistkv.storage.backend import CommitBatch
from persistkv.storage.extensions import Policy
from persistkv.storage.format.codec import RawCodec
from persistkv.storage.format.pack_writer import PackWriter
from persistkv.testing.conformance.suite import check_totals, read_pack, sample_identity, tables
from persistkv.testing.samples import payload_of, sample_manifest, sample_pack, sample_segment
from persistkv_s3 import S3Backend
from persistkv_s3.client.transport import BrokenError, LateError
from persistkv_s3.feed import leader
from persistkv_s3.feed.format import Dump, decode_head, encode_head, seal, split_records, unseal
from tests.backends.s3.memory_bucket import Engines, MemoryBucket

NAMESPACE = sample_identity().digest
HOUR_S = 3600.0


@pytest.fixture
def bucket() -> MemoryBucket:
    return MemoryBucket()


@pytest.fixture
def engines(bucket: MemoryBucket, tmp_path: Path) -> Iterator[Engines]:
    found = Engines(bucket, tmp_path)
    yield found
    found.close()


def open_engine(engines: Engines, *, cache: str = "", **options: Any) -> S3Backend:
    """Open an engine that uses the namespace."""
    engine = engines.open(cache=cache, **options)
    engine.open_namespace(sample_identity())
    engine.changes(NAMESPACE, None)
    return engine


def store(engine: S3Backend, *seeds: int) -> set[bytes]:
    """Commit packs, each with a request; return their ids."""
    packs = [sample_pack(NAMESPACE, seed, blocks=1) for seed in seeds]
    manifests = [sample_manifest(f"r{seed}", packs=[pack.pack_id]) for seed, pack in zip(seeds, packs, strict=True)]
    engine.commit(NAMESPACE, CommitBatch(packs, manifests))
    return {pack.pack_id for pack in packs}


def pack_ids(*seeds: int) -> set[bytes]:
    return {sample_pack(NAMESPACE, seed, blocks=1).pack_id for seed in seeds}


def is_intact(engine: S3Backend, *seeds: int) -> bool:
    """Return whether the packs are read as they were stored."""
    expected = [payload_of(sample_pack(NAMESPACE, seed, blocks=1)) for seed in seeds]
    found = tables(engine, NAMESPACE)
    return [read_pack(engine, NAMESPACE, found[name]) for seed in seeds for name in pack_ids(seed)] == expected


def held_packs(engine: S3Backend) -> set[bytes]:
    return set(tables(engine, NAMESPACE))


def test_commit_is_visible_to_other_engines_within_three_seconds(engines: Engines) -> None:
    writer, reader = open_engine(engines), open_engine(engines)
    store(writer, 0)
    engines.run(10)
    waits = []
    for seed in range(1, 40):
        store(writer, seed)
        began = engines.bucket.now
        while not pack_ids(seed) <= held_packs(reader):
            engines.run(1)
        waits.append(engines.bucket.now - began)
        assert is_intact(reader, seed), "the engine is in use"
    assert max(waits) <= 3.0


def test_leader_killed_is_replaced_within_twenty_seconds(engines: Engines) -> None:
    first, second, reader = open_engine(engines), open_engine(engines), open_engine(engines)
    store(first, 1)
    engines.run(5)
    engines.kill(first)
    store(first, 2)
    store(second, 3)
    began = engines.bucket.now
    while not pack_ids(1, 2, 3) <= held_packs(reader):
        engines.run(1)
        assert engines.bucket.now - began <= 20.0


def test_leader_close_merges_inbox_and_resigns(engines: Engines) -> None:
    first, second, reader = open_engine(engines), open_engine(engines), open_engine(engines)
    store(first, 1)
    engines.run(5)
    store(second, 2)
    store(first, 3)
    engines.stop(first)
    assert not engines.bucket.keys("/inbox/"), "the last round has merged both commits"
    store(second, 4)
    began = engines.bucket.now
    while not pack_ids(1, 2, 3, 4) <= held_packs(reader):
        engines.run(1)
        assert engines.bucket.now - began <= 3.0, "the second engine leads at once"
    engines.stop(second)
    assert not engines.bucket.keys("/inbox/")


def test_close_without_leader_merges_own_commits(engines: Engines) -> None:
    engine = open_engine(engines)
    store(engine, 1)
    engines.stop(engine)
    assert not engines.bucket.keys("/inbox/")
    assert held_packs(open_engine(engines)) == pack_ids(1)


def test_idle_engines_resign_leadership_and_poll_rarely(engines: Engines) -> None:
    writer, reader = open_engine(engines), open_engine(engines)
    store(writer, 1)
    engines.run(120)
    for client in engines.clients.values():
        client.take()
    engines.run(3600)
    for engine in (writer, reader):
        counts = engines.clients[engine].take()
        assert set(counts) == {"GET"}
        assert counts["GET"] <= 160, "every 30 s or so"


def test_commit_sends_one_put_per_pack_and_two_more(engines: Engines) -> None:
    writer = open_engine(engines)
    client = engines.clients[writer]
    client.take()
    store(writer, 1, 2, 3)
    assert client.take() == {"PUT": 5}
    assert is_intact(writer, 2)
    assert client.take() == {"GET": 1}


def test_snapshots_bound_requests_of_new_reader_and_are_pruned(
    engines: Engines, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(leader, "SNAPSHOT_AFTER", 8)
    monkeypatch.setattr(leader, "_MOST_TAILS", 3)
    one, two = open_engine(engines), open_engine(engines)
    expected: set[bytes] = set()
    for seed in range(120):
        engine = (one, two)[seed % 2]
        expected |= store(engine, seed)
        if seed % 7 == 6:
            gone = pack_ids(seed - 3)
            engine.commit(NAMESPACE, CommitBatch(deletions=list(gone), pins=[(f"r{seed}", True)]))
            expected -= gone
        engines.run(1)
    engines.run(5)
    fresh = open_engine(engines)
    assert sum(engines.clients[fresh].take().values()) <= 25
    for engine in (one, two, fresh):
        assert held_packs(engine) == expected
    assert check_totals(fresh) == check_totals(one)
    assert {head.id for head in fresh.manifests(NAMESPACE)} == {head.id for head in one.manifests(NAMESPACE)}
    (use,) = fresh.uses(NAMESPACE, ["r13"])
    assert use is not None
    assert use.pinned
    assert fresh.manifest_keys(NAMESPACE, ["r5"])[0] == sample_manifest("r5").keys

    engines.run(2 * HOUR_S)
    store(one, 500)
    engines.run(60)
    assert len(engines.bucket.keys("/segments/")) <= 6, "superseded ones were deleted"
    assert len(engines.bucket.keys("/feed/")) <= 20
    assert len(engines.bucket.keys("/snapshots/")) <= 3
    assert held_packs(open_engine(engines)) == expected | pack_ids(500)


def test_reopen_with_local_catalogue_needs_few_requests(engines: Engines) -> None:
    writer = open_engine(engines)
    for seed in range(30):
        store(writer, seed)
        engines.run(1)
    reader = open_engine(engines, cache="kept")
    engines.clients[reader].take()
    engines.kill(reader)
    reader.close()
    again = engines.open(cache="kept")
    again.open_namespace(sample_identity())
    assert held_packs(again) == pack_ids(*range(30))
    assert sum(engines.clients[again].take().values()) <= 6
    store(writer, 30)
    engines.run(3)
    assert held_packs(again) == pack_ids(*range(31))


def test_local_catalogue_stale_after_store_recreated_is_replaced(engines: Engines) -> None:
    writer = open_engine(engines)
    store(writer, 1)
    engines.run(3)
    reader = open_engine(engines, cache="kept")
    engines.kill(writer)
    engines.kill(reader)
    reader.close()
    engines.bucket.server.delete(engines.bucket.keys(""))
    other = open_engine(engines)
    store(other, 2)
    engines.run(3)
    assert held_packs(open_engine(engines, cache="kept")) == pack_ids(2)


@pytest.mark.parametrize("damage", [b"", b"no database at all" * 500])
def test_damaged_local_catalogue_is_replaced(engines: Engines, tmp_path: Path, damage: bytes) -> None:
    writer = open_engine(engines)
    store(writer, 1)
    engines.run(3)
    open_engine(engines, cache="kept").close()
    (path,) = (tmp_path / "kept").glob("*.catalogue")
    path.write_bytes(damage)
    assert held_packs(open_engine(engines, cache="kept")) == pack_ids(1)


def test_local_catalogue_shared_by_two_engines_stays_consistent(engines: Engines) -> None:
    one, two, other = open_engine(engines, cache="kept"), open_engine(engines, cache="kept"), open_engine(engines)
    for seed in range(0, 30, 3):
        store(one, seed)
        store(two, seed + 1)
        store(other, seed + 2)
        engines.run(1)
    engines.run(3)
    for engine in engines.all:
        assert held_packs(engine) == pack_ids(*range(30))
    check_totals(one)


def test_feed_duplicate_pack_keeps_first_and_deletes_second(engines: Engines) -> None:
    ours, theirs = open_engine(engines), open_engine(engines)
    first, second = sample_pack(NAMESPACE, 1, content=10), sample_pack(NAMESPACE, 1, content=20)
    ours.commit(NAMESPACE, CommitBatch([first]))
    engines.bucket.now += 0.1
    cursor = theirs.commit(NAMESPACE, CommitBatch([second])).cursor
    assert read_pack(theirs, NAMESPACE, second.table) == payload_of(second), "its own pack is visible at once"
    engines.run(5)
    for engine in (ours, theirs, open_engine(engines)):
        assert read_pack(engine, NAMESPACE, first.table) == payload_of(first)
    news = theirs.changes(NAMESPACE, cursor)
    assert ([*news.removed], [*news.added]) == ([first.pack_id], [first.table])
    assert len(engines.bucket.keys("/packs/")) == 2
    engines.run(HOUR_S + 60)
    store(ours, 7)
    engines.run(20)
    assert len(engines.bucket.keys("/packs/")) == 2, "the pack, and the new one"
    assert read_pack(theirs, NAMESPACE, first.table) == payload_of(first)


def test_deletion_keeps_pack_object_for_one_hour(engines: Engines) -> None:
    engine = open_engine(engines)
    store(engine, 1, 2)
    engine.commit(NAMESPACE, CommitBatch(deletions=list(pack_ids(1))))
    engines.run(5)
    engines.bucket.now += 0.5 * HOUR_S
    store(engine, 3)
    engines.run(5)
    assert len(engines.bucket.keys("/packs/")) == 3
    engines.bucket.now += 0.6 * HOUR_S
    store(engine, 4)
    engines.run(5)
    assert len(engines.bucket.keys("/packs/")) == 3, "pack 1 was deleted"
    assert held_packs(open_engine(engines)) == pack_ids(2, 3, 4)
    assert is_intact(engine, 2, 3, 4)
    assert engine.manifest_keys(NAMESPACE, ["r2"])[0] == sample_manifest("r2").keys


def test_capacity_evicts_least_recently_used_and_keeps_pinned(engines: Engines) -> None:
    engine = engines.open(capacity=1 << 20)
    other = engine.open_namespace(sample_identity(1)).id
    engine.open_namespace(sample_identity())
    packs = [sample_pack((NAMESPACE, other)[seed % 2], seed, blocks=4, block_bytes=50_000) for seed in range(10)]
    cursor = engine.changes(NAMESPACE, None).cursor
    for pack in packs[:3]:
        engine.commit(pack.namespace, CommitBatch([pack]))
        engines.run(2)
    pin = CommitBatch(manifests=[sample_manifest("p", packs=[packs[2].pack_id])], pins=[("p", True)])
    engine.commit(NAMESPACE, pin)
    for pack in packs[3:]:
        engine.commit(pack.namespace, CommitBatch([pack]))
        engine.commit(NAMESPACE, CommitBatch(touches=[packs[0].pack_id]))
        engines.run(2)
    engines.run(10)
    stats = check_totals(engine)
    assert stats.capacity == 1 << 20
    remaining = {**tables(engine, NAMESPACE), **tables(engine, other)}
    assert [pack.pack_id in remaining for pack in packs] == [True, False, True, *[False] * 4, *[True] * 3]
    assert packs[4].pack_id not in {table.pack_id for table in engine.changes(NAMESPACE, cursor).added}


def test_ttl_expires_by_last_use_on_server_clock(engines: Engines) -> None:
    """The engines' clocks differ by days."""
    engine, other = open_engine(engines, ttl_s=HOUR_S), open_engine(engines, ttl_s=HOUR_S)
    used, idle = pack_ids(1), pack_ids(2)
    store(other, 1)
    store(other, 2)
    engines.run(0.6 * HOUR_S)
    other.commit(NAMESPACE, CommitBatch([sample_pack(NAMESPACE, 3, blocks=1)], touches=list(used)))
    engines.run(0.6 * HOUR_S)
    store(engine, 4)
    engines.run(5)
    assert held_packs(engine) == used | pack_ids(3, 4)
    assert not held_packs(open_engine(engines)) & idle
    assert {head.id for head in engine.manifests(NAMESPACE)} == {"r4"}, "that of r1 was not used since it was written"


def test_request_ttl_expires_pinned_and_counts_from_last_use(engines: Engines) -> None:
    engine = open_engine(engines)
    packs = [sample_pack(NAMESPACE, seed, blocks=1) for seed in range(3)]
    manifests = [
        sample_manifest(f"r{number}", packs=[pack.pack_id], ttl_s=ttl_s)
        for number, (pack, ttl_s) in enumerate(zip(packs, (HOUR_S, HOUR_S, None), strict=True))
    ]
    engine.commit(NAMESPACE, CommitBatch(packs, manifests, pins=[("r0", True)]))
    engines.run(0.6 * HOUR_S)
    engine.commit(NAMESPACE, CommitBatch(touches=[packs[1].pack_id]))
    engines.run(0.6 * HOUR_S)
    store(engine, 4)
    engines.run(5)
    assert {head.id for head in engine.manifests(NAMESPACE)} == {"r1", "r2", "r4"}
    assert set(tables(open_engine(engines), NAMESPACE)) >= {pack.pack_id for pack in packs[1:]}
    assert packs[0].pack_id not in tables(engine, NAMESPACE)
    engines.run(2 * HOUR_S)
    store(engine, 5)
    engines.run(5)
    assert {head.id for head in engine.manifests(NAMESPACE)} == {"r2", "r4", "r5"}
    check_totals(engine)


def test_ttl_low_priority_request_delays_no_other_expiry(engines: Engines) -> None:
    engine = open_engine(engines, ttl_s=HOUR_S)
    store(engine, 1)
    engines.run(0.6 * HOUR_S)
    low = sample_pack(NAMESPACE, 2, blocks=1)
    engine.commit(NAMESPACE, CommitBatch([low], [sample_manifest("low", packs=[low.pack_id], priority="low")]))
    engines.run(0.6 * HOUR_S)
    store(engine, 3)
    engines.run(5)
    assert {head.id for head in engine.manifests(NAMESPACE)} == {"low", "r3"}


def test_set_policy_is_applied_by_next_leader(engines: Engines) -> None:
    one, two = open_engine(engines), open_engine(engines)
    store(one, 1)
    engines.run(5)
    two.set_policy(Policy(None, HOUR_S))
    assert one.policy() == Policy(None, HOUR_S)
    engines.run(2 * HOUR_S)
    store(one, 2)
    engines.run(40)
    assert held_packs(two) == pack_ids(2)
    assert engines.open().policy() == Policy(None, HOUR_S)


def test_expiry_of_many_packs_is_gradual_and_blocks_no_commit(engines: Engines) -> None:
    engine = open_engine(engines, ttl_s=HOUR_S)
    for start in range(0, 1000, 100):
        store(engine, *range(start, start + 100))
    engines.run(5)
    engines.bucket.now += 2 * HOUR_S
    store(engine, 5000)
    engines.run(3)
    assert pack_ids(5000) < held_packs(engine), "some of the others are still there"
    engines.run(20)
    assert held_packs(engine) == pack_ids(5000)


def test_sweep_deletes_unreferenced_pack_and_keeps_others(engines: Engines) -> None:
    engine = open_engine(engines)
    store(engine, 1)
    base = engines.bucket.keys("/packs/")[0].partition("packs/")[0]
    engines.bucket.replace(f"{base}packs/{'0' * 32}-{'1' * 16}", b"an upload whose engine was killed")
    engines.run(3)
    for _ in range(26):
        engines.bucket.now += 2 * HOUR_S
        store(engine, 2)
        engines.run(2)
    engines.run(10)
    assert len(engines.bucket.keys("/packs/")) == 2
    assert is_intact(engine, 1, 2)
    assert held_packs(open_engine(engines)) == pack_ids(1, 2)


def test_commit_longer_than_twelve_hours_raises_and_is_rejected(engines: Engines) -> None:
    sleeper, other = open_engine(engines), open_engine(engines)
    client = engines.clients[sleeper]

    def suspend(verb: str, key: str) -> None:
        if "inbox" in key:
            client.after = lambda verb, key: None
            engines.bucket.now += 13 * HOUR_S
            engines.bucket.replace(key, engines.bucket.data(key))

    client.after = suspend
    with pytest.raises(StoreError, match="12 hours"):
        store(sleeper, 1)
    assert engines.bucket.keys("inbox")
    late = open_engine(engines)
    assert held_packs(late) == set(), "a commit that the leader rejects holds no pack"
    store(late, 1)
    store(other, 2)
    engines.run(40)
    assert held_packs(other) == pack_ids(1, 2)
    assert is_intact(other, 1, 2)
    late.commit(NAMESPACE, CommitBatch(deletions=list(pack_ids(1))))
    engines.run(40)
    for engine in (sleeper, other):
        assert held_packs(engine) == pack_ids(2)
    store(sleeper, 1)
    engines.run(40)
    assert held_packs(other) == pack_ids(1, 2)
    assert is_intact(other, 1, 2)


def test_commit_unmerged_for_a_day_is_merged_by_next_leader(engines: Engines) -> None:
    writer = open_engine(engines)
    store(writer, 1)
    engines.kill(writer)
    engines.bucket.now += 30 * HOUR_S
    other = open_engine(engines)
    store(other, 2)
    engines.run(5)
    assert held_packs(other) == pack_ids(1, 2)
    engines.run(24 * HOUR_S / 60)
    assert is_intact(other, 1, 2)


def test_engines_conflicting_commits_agree_on_one_pack_object(engines: Engines) -> None:
    """Two engines store one pack while a third deletes another object of it: all keep the same object."""
    one, two, three = (open_engine(engines) for _ in range(3))
    pack = sample_pack(NAMESPACE, 1, content=1)
    one.commit(NAMESPACE, CommitBatch([pack]))
    engines.run(40)
    two.commit(NAMESPACE, CommitBatch(deletions=[pack.pack_id]))
    engines.bucket.now += 0.1
    two.commit(NAMESPACE, CommitBatch([sample_pack(NAMESPACE, 1, content=2)]))
    engines.bucket.now += 0.1
    three.commit(NAMESPACE, CommitBatch([sample_pack(NAMESPACE, 2)], deletions=[pack.pack_id]))
    three.commit(NAMESPACE, CommitBatch([sample_pack(NAMESPACE, 1, content=3)]))
    engines.run(40)
    engines.run(HOUR_S)
    for seed in range(10, 13):
        store(one, seed)
        engines.run(40)
    found = {read_pack(engine, NAMESPACE, pack.table) for engine in (one, two, three, open_engine(engines))}
    assert len(found) == 1
    assert None not in found


def test_leader_resumed_after_takeover_loses_no_commit(engines: Engines) -> None:
    old, new = open_engine(engines), open_engine(engines)
    store(old, 1)
    engines.run(3)
    client = engines.clients[old]

    def pause(verb: str, key: str) -> None:
        """Stop before the write of the head; meanwhile another engine takes over."""
        if verb == "PUT" and key == "store/persistkv":
            client.before = lambda verb, key: None
            engines.kill(old)
            store(new, 3)
            engines.run(30)

    client.before = pause
    store(old, 2)
    old.step()
    engines.bucket.now += 1
    old.step()
    engines.all.append(old)
    engines.run(5)
    for engine in (old, new, open_engine(engines)):
        assert held_packs(engine) == pack_ids(1, 2, 3)


def test_leader_cut_off_in_feed_upload_loses_no_commit(engines: Engines) -> None:
    old, new = open_engine(engines), open_engine(engines)
    store(old, 1)
    engines.run(3)
    client = engines.clients[old]

    def lose_reply(verb: str, key: str) -> None:
        """Lose the reply of a commit; the successor merges it and the others meanwhile."""
        if verb == "PUT" and "/inbox/" in key:
            client.after = lambda verb, key: None
            for seed in (4, 5, 6, 7):
                store(new, seed)
                engines.run(6)
            raise LateError(f"{verb} {key}")

    def cut_off(verb: str, key: str) -> None:
        """Stop for 24 s before the upload of a feed object; the other thread commits and polls."""
        if verb == "PUT" and "/feed/" in key:
            client.before = lambda verb, key: None
            client.after = lose_reply
            engines.kill(old)
            store(old, 3)

    client.before = cut_off
    store(old, 2)
    engines.bucket.now += 1
    old.step()
    engines.all.append(old)
    engines.run(5)
    store(old, 8)
    engines.run(30)
    for engine in (old, new, open_engine(engines)):
        assert held_packs(engine) == pack_ids(*range(1, 9))
        assert is_intact(engine, *range(1, 9))


def test_head_damaged_repaired_by_two_engines_keeps_commits_between(engines: Engines) -> None:
    fast, slow = open_engine(engines), open_engine(engines)
    store(fast, 1)
    engines.run(60)
    engines.bucket.replace("store/persistkv", engines.bucket.data("store/persistkv")[:-4])
    client = engines.clients[slow]
    steps: list[str] = []

    def pause(verb: str, key: str) -> None:
        """Stop after the rebuild, before the next request for the head; the other engine repairs it meanwhile."""
        if verb == "LIST" and "/feed/" in key:
            steps.append("rebuilt")
        if steps == ["rebuilt"] and key == "store/persistkv":
            steps.append("paused")
            engines.kill(slow)
            fast.refresh()
            for seed in range(2, 8):
                store(fast, seed)
                engines.run(3)

    client.before = pause
    slow.refresh()
    assert steps[:2] == ["rebuilt", "paused"]
    engines.all.append(slow)
    engines.run(30)
    for engine in (fast, slow, open_engine(engines)):
        assert held_packs(engine) == pack_ids(*range(1, 8))
        assert is_intact(engine, *range(1, 8))


def test_head_damaged_under_leader_is_repaired_by_it(engines: Engines) -> None:
    engine = open_engine(engines)
    store(engine, 1)
    engines.run(3)
    engines.bucket.replace("store/persistkv", engines.bucket.data("store/persistkv")[:-4])
    store(engine, 2)
    engines.run(10)
    assert held_packs(open_engine(engines, read_only=True)) == pack_ids(1, 2)


@pytest.mark.parametrize("part", ["/feed/", "/snapshots/", "/segments/"])
def test_object_deleted_by_operator_loses_only_its_content(
    engines: Engines, monkeypatch: pytest.MonkeyPatch, part: str
) -> None:
    monkeypatch.setattr(leader, "SNAPSHOT_AFTER", 4)
    engine = open_engine(engines)
    for seed in range(6):
        store(engine, seed)
        engines.run(2)
    engines.bucket.server.delete(engines.bucket.keys(part)[-1:])
    fresh = open_engine(engines)
    store(fresh, 6)
    engines.run(60)
    assert pack_ids(6) <= held_packs(engine)
    found = held_packs(open_engine(engines))
    assert pack_ids(6) <= found
    if part == "/feed/":
        assert pack_ids(*range(4)) <= found, "content of other objects"


@pytest.mark.parametrize("share", [False, True], ids=["restarted", "shared catalogue"])
def test_pack_whose_object_was_deleted_is_stored_again_by_any_engine_of_the_catalogue(
    engines: Engines, share: bool
) -> None:
    first, noticing = open_engine(engines), open_engine(engines, cache="shared")
    store(first, 1)
    engines.run(3)
    engines.bucket.server.delete(engines.bucket.keys("/packs/"))
    assert not is_intact(noticing, 1)
    if not share:
        engines.kill(noticing)
        noticing.close()
    again = open_engine(engines, cache="shared")
    store(again, 1)
    engines.run(5)
    for engine in (again, first, open_engine(engines)):
        assert is_intact(engine, 1)


def test_leader_whose_snapshot_was_deleted_writes_all_rows_again(
    engines: Engines, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(leader, "SNAPSHOT_AFTER", 4)
    engine = open_engine(engines)
    for seed in range(6):
        store(engine, seed)
        engines.run(2)
    engines.bucket.server.delete(engines.bucket.keys("/snapshots/"))
    for seed in range(6, 16):
        store(engine, seed)
        engines.run(2)
    engines.run(10)
    assert held_packs(open_engine(engines)) == pack_ids(*range(16))
    assert not engines.bucket.keys("/inbox/")


def lose_replies(engine: S3Backend, engines: Engines, part: str, error: type[BrokenError | LateError]) -> None:
    """Let PUTs of matching keys succeed without a reply."""

    def lose(verb: str, key: str) -> None:
        if verb == "PUT" and part in key:
            raise error("no reply")

    engines.clients[engine].after = lose


@pytest.mark.parametrize("error", [BrokenError, LateError])
def test_snapshot_failed_upload_is_restarted_from_scratch(
    engines: Engines, monkeypatch: pytest.MonkeyPatch, error: type[BrokenError | LateError]
) -> None:
    """An incomplete snapshot must not be published: a new reader would lack the other packs."""
    monkeypatch.setattr(leader, "SNAPSHOT_AFTER", 4)
    monkeypatch.setattr(leader, "_MOST_TAILS", 2)
    engine = open_engine(engines)
    failed: list[str] = []

    def fail(verb: str, key: str) -> None:
        of_all_rows = "/segments/" in key and key.rpartition("/")[2].count("-") == 2  # position, nonce, number
        if verb == "PUT" and of_all_rows and len(failed) < 8:
            failed.append(key)
            raise error("the server does not answer")

    engines.clients[engine].before = fail
    for seed in range(40):
        try:
            store(engine, seed)
        except StoreError:
            engines.run(40)  # the breaker may be open
            store(engine, seed)
        engines.run(2)
    assert failed
    engines.run(60)
    assert held_packs(open_engine(engines)) == pack_ids(*range(40))


@pytest.mark.parametrize(
    "part", ["/packs/", "/keys/", "inbox", "/feed/", "store/persistkv", "/segments/", "/snapshots/"]
)
@pytest.mark.parametrize("error", [BrokenError, LateError])
def test_object_put_with_lost_reply_is_never_deleted(
    engines: Engines, monkeypatch: pytest.MonkeyPatch, part: str, error: type[BrokenError | LateError]
) -> None:
    monkeypatch.setattr(leader, "SNAPSHOT_AFTER", 4)
    engine = open_engine(engines)
    store(engine, 0)
    engines.run(3)
    acknowledged = pack_ids(0)
    for seed in range(1, 12):
        lose_replies(engine, engines, part if seed % 2 else "nothing", error)
        try:
            acknowledged |= store(engine, seed)
        except StoreError:
            engines.run(40)  # the breaker may be open
            continue
        engines.run(2)
    lose_replies(engine, engines, "nothing", error)
    engines.run(60)
    fresh = open_engine(engines)
    assert acknowledged <= held_packs(fresh)
    for table in tables(fresh, NAMESPACE).values():
        assert read_pack(fresh, NAMESPACE, table) is not None


def test_commit_delayed_past_deadline_does_not_hide_next_commit(engines: Engines) -> None:
    """The next commit must have another object key. With the same key, its upload would fail because the object exists,
    which looks like the effect of a lost reply.
    """
    engine = open_engine(engines)
    store(engine, 0)
    engines.run(3)
    late: dict[str, bytes] = {}

    def delay(verb: str, key: str) -> None:
        if verb == "PUT" and "inbox" in key:
            late[key] = engines.bucket.data(key)
            engines.bucket.server.delete([key])
            raise LateError("no reply")

    def fail(verb: str, key: str) -> None:
        if verb == "GET" and late:
            raise LateError("no reply")

    client = engines.clients[engine]
    client.before, client.after = fail, delay
    with pytest.raises(StoreError):
        store(engine, 1)
    for key, data in late.items():
        engines.bucket.replace(key, data)
    broken: list[str] = []

    def break_once(verb: str, key: str) -> None:
        if verb == "PUT" and "inbox" in key and not broken:
            broken.append(key)
            raise BrokenError("the connection was reset")

    client.before, client.after = break_once, lambda verb, key: None
    engines.run(40)  # the breaker may be open
    store(engine, 2)
    engines.run(60)
    assert held_packs(open_engine(engines)) >= pack_ids(0, 2)


def test_engine_reconnected_after_hours_reloads_before_writing(
    engines: Engines, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(leader, "SNAPSHOT_AFTER", 4)
    away, *others = (open_engine(engines) for _ in range(3))
    expected = store(away, 0)
    engines.run(3)
    engines.kill(away)
    for seed in range(1, 90):
        expected |= store(others[seed % 2], seed)
        engines.run(2)
    engines.run(2 * HOUR_S)
    for engine in others:
        engines.kill(engine)
    engines.all.append(away)
    expected |= store(away, 90)
    engines.run(60)
    fresh = open_engine(engines)
    assert held_packs(away) == held_packs(fresh) == expected
    for table in tables(fresh, NAMESPACE).values():
        assert read_pack(fresh, NAMESPACE, table) is not None


def test_head_deleted_is_rebuilt_from_snapshots_and_feed(engines: Engines, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(leader, "SNAPSHOT_AFTER", 8)
    engine = open_engine(engines)
    for seed in range(21):
        store(engine, seed)
        engines.run(1)
    engines.run(3)
    engines.bucket.server.delete(["store/persistkv"])
    assert held_packs(open_engine(engines)) == pack_ids(*range(21))
    store(engine, 21)
    engines.run(40)
    for each in (engine, open_engine(engines)):
        assert held_packs(each) == pack_ids(*range(22))


@pytest.mark.parametrize("leads", [True, False])
def test_engine_emptied_bucket_resets_and_stores_new_packs(engines: Engines, leads: bool) -> None:
    """Earlier packs are lost. Other engines find the packs that the engine stores later, whether or not it leads."""
    engine = open_engine(engines)
    for seed in range(3):
        store(engine, seed)
        engines.run(2)
    if not leads:
        engines.run(HOUR_S)
    cursor = engine.changes(NAMESPACE, None).cursor
    engines.bucket.server.delete(engines.bucket.keys(""))
    for seed in range(3, 9):
        with suppress(StoreError):
            store(engine, seed)
        engines.run(2)
    assert engine.changes(NAMESPACE, cursor).reset, "it knows soon that its packs are gone"
    store(engine, 9)
    engines.run(10)
    fresh = open_engine(engines)
    assert held_packs(engine) == held_packs(fresh)
    assert [namespace.id for namespace in fresh.namespaces()] == [NAMESPACE]
    assert pack_ids(9) <= held_packs(fresh)
    assert is_intact(fresh, 9)


@pytest.mark.parametrize("leads", [True, False])
def test_close_emptied_bucket_recreates_store(engines: Engines, leads: bool) -> None:
    engine = open_engine(engines)
    store(engine, 0)
    engines.run(2)
    if not leads:
        engines.run(HOUR_S)
    engines.bucket.server.delete(engines.bucket.keys(""))
    store(engine, 1)
    engines.stop(engine)
    fresh = engines.open()
    assert [namespace.id for namespace in fresh.namespaces()] == [NAMESPACE]
    assert is_intact(fresh, 1)


@pytest.mark.parametrize("part", ["/feed/", "/segments/", "/snapshots/"])
def test_feed_unreadable_object_loses_only_its_packs(
    engines: Engines, monkeypatch: pytest.MonkeyPatch, part: str, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(leader, "SNAPSHOT_AFTER", 4)
    engine = open_engine(engines)
    for seed in range(11):
        store(engine, seed)
        engines.run(2)
    damaged = engines.bucket.keys(part)[-1]
    engines.bucket.replace(damaged, b"junk")
    fresh = open_engine(engines)
    assert held_packs(fresh) < pack_ids(*range(11))
    assert "unreadable" in caplog.text
    store(engine, 11)
    engines.run(5)
    assert pack_ids(11) <= held_packs(fresh)


@pytest.mark.parametrize("header", ["If-None-Match", "If-Match"])
def test_open_server_ignoring_conditional_put_raises(engines: Engines, header: str) -> None:
    engines.bucket.server.honours.remove(header)
    with pytest.raises(StoreUnavailableError, match=f"ignores {header}"):
        engines.open()
    assert engines.bucket.keys("") == []


def test_server_requiring_unquoted_etags_is_supported(engines: Engines) -> None:
    engines.bucket.server.unquoted = True
    one, two = open_engine(engines), open_engine(engines)
    store(one, 1)
    store(two, 2)
    engines.run(5)
    assert held_packs(open_engine(engines)) == pack_ids(1, 2)


SECRET = "0123456789abcdef" * 4


@pytest.fixture
def secret(monkeypatch: pytest.MonkeyPatch) -> dict[str, str]:
    """Option of engines with a key."""
    monkeypatch.setenv("PERSISTKV_TEST_KEY", SECRET)
    return {"key_env": "PERSISTKV_TEST_KEY"}


@pytest.mark.parametrize("part", ["inbox", "/feed/", "/segments/", "/snapshots/", "store/persistkv", "identities"])
def test_keyed_engine_tampered_object_is_ignored(
    engines: Engines, secret: dict[str, str], monkeypatch: pytest.MonkeyPatch, part: str
) -> None:
    monkeypatch.setattr(leader, "SNAPSHOT_AFTER", 4)
    engine = open_engine(engines, **secret)
    for seed in range(11):
        store(engine, seed)
        engines.run(2)
    store(engine, 11)
    key = engines.bucket.keys(part)[-1]
    data = engines.bucket.data(key)
    engines.bucket.replace(key, data[:-1] + bytes([data[-1] ^ 1]))
    fresh = open_engine(engines, **secret)
    assert held_packs(fresh) <= pack_ids(*range(12))
    assert (held_packs(fresh) == pack_ids(*range(12))) == (part in ("store/persistkv", "identities"))
    store(fresh, 12)
    engines.run(60)
    assert pack_ids(12) <= held_packs(engine)
    assert is_intact(engine, 12)


def test_inbox_junk_is_ignored_and_not_fetched_again(
    engines: Engines, secret: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    for module in ("session", "feed.leader"):
        monkeypatch.setattr(f"persistkv_s3.{module}.MAX_INBOX_BYTES", 1 << 20)
    engine = open_engine(engines, **secret)
    store(engine, 1)
    inbox = engines.bucket.keys("inbox")[0].rpartition("/")[0]
    for number in range(1, 20):
        size = (1 << 20) + 1 if number % 2 else 1000
        engines.bucket.replace(f"{inbox}/{NAMESPACE.hex()}-{number:032x}-{1:012x}", bytes(size))
    engines.bucket.replace(f"{inbox}/{'f' * 32}-{1:032x}-{1:012x}", b"of no namespace")
    engines.run(3)
    fresh = open_engine(engines, **secret)
    for reader in (engine, fresh):
        assert held_packs(reader) == pack_ids(1)
    client, downloads = engines.clients[engine], list[str]()
    client.before = lambda verb, key: downloads.append(key) if verb == "GET" and "inbox" in key else None
    store(engine, 2)
    engines.run(5)
    assert held_packs(fresh) == pack_ids(1, 2)
    assert not downloads, "the leader's own commit and known junk are not fetched"


def test_open_unmerged_commits_with_parallel_connections_loads_all(engines: Engines) -> None:
    writer = open_engine(engines)
    for seed in range(4):
        store(writer, seed)
    reader, together = engines.open(connections=4), threading.Barrier(4)

    def meet(verb: str, key: str) -> None:
        if verb == "GET" and "/inbox" in key:
            together.wait(30)  # raises unless all four are read at the same time

    engines.clients[reader].before = meet
    reader.open_namespace(sample_identity())
    assert held_packs(reader) == pack_ids(*range(4))
    assert not together.broken


def test_keyed_and_keyless_engines_have_separate_heads(engines: Engines, secret: dict[str, str]) -> None:
    keyed, keyless = open_engine(engines, **secret), open_engine(engines)
    store(keyed, 1)
    store(keyless, 2)
    engines.run(5)
    assert (held_packs(keyed), held_packs(keyless)) == (pack_ids(1), pack_ids(2))
    keyed.set_policy(Policy(None, HOUR_S))
    assert keyless.policy() == Policy(None, None)
    assert len(engines.bucket.keys("store/persistkv")) == 2


def test_reads_missing_during_commits_lose_no_commit(engines: Engines) -> None:
    engine = open_engine(engines)
    store(engine, *range(60))
    found = tables(engine, NAMESPACE)
    engines.bucket.server.delete(engines.bucket.keys("/packs/"))
    missed = list[bytes | None]()
    readers = [
        threading.Thread(target=lambda part=part: missed.extend(read_pack(engine, NAMESPACE, table) for table in part))
        for part in (list(found.values())[:30], list(found.values())[30:])
    ]
    for reader in readers:
        reader.start()
    for seed in range(100, 115):
        store(engine, seed)
    for reader in readers:
        reader.join()
    assert missed == [None] * 60
    store(engine, 115)
    engines.run(5)
    assert held_packs(open_engine(engines)) == held_packs(engine) == pack_ids(*range(100, 116))


def test_touches_send_no_request_and_are_written_at_close(engines: Engines) -> None:
    engine, client = open_engine(engines), engines.clients
    store(engine, 1)
    engines.run(1)
    store(engine, 2)
    engines.run(5)
    client[engine].take()
    engine.commit(NAMESPACE, CommitBatch(touches=list(pack_ids(1))))
    assert client[engine].take() == {}
    engines.kill(engine)
    engine.close()
    fresh = open_engine(engines)
    store(fresh, 3)
    engines.run(5)
    uses = [use for use in fresh.uses(NAMESPACE, ["r1", "r2"]) if use is not None]
    assert [use.reused for use in uses] == [True, False]
    assert uses[0].last_used > uses[1].last_used


@pytest.mark.parametrize(
    ("table", "key", "value"),
    [
        ("undo", bytes(8), msgspec.msgpack.encode(("packs' (key, value) VALUES (x'00', x'00') --", b"", b""))),
        ("undo", bytes(8), msgspec.msgpack.encode(("absent", b"", b""))),
        ("undo", bytes(8), b"\x93\xa1\xff\xc4\0\xc4\0"),
        ("undo", bytes(8), msgspec.msgpack.encode(("pending", bytes(8), b"junk"))),
        ("undo", bytes(8), msgspec.msgpack.encode(("meta", b"clock", b"junk"))),
        ("undo", bytes(8), msgspec.msgpack.encode(("meta", b"bytes", b"junk"))),
        ("undo", bytes(8), b"junk"),
        ("undo", b"", b"junk"),
        ("states", NAMESPACE, b"junk"),
        ("meta", b"clock", b"junk"),
        ("meta", b"bytes", b"junk"),
        ("meta", b"feed", b"junk"),
        ("objects", NAMESPACE + bytes(16), b"junk"),
        ("packs", NAMESPACE + bytes(16), b"junk"),
        ("writers", bytes(16), b"junk"),
        ("garbage", b"junk", b"junk"),
        ("key_objects", b"junk", b"junk"),
        ("manifest_keys", NAMESPACE + bytes(16), b"junk"),
        ("manifests", NAMESPACE + bytes(16), b"junk"),
        ("order", b"junk", b"junk"),
        ("uses", NAMESPACE + bytes(16), b"junk"),
        ("absent", b"junk", b"junk"),
    ],
)
def test_open_snapshot_with_forged_rows_serves_other_packs_and_stores(
    engines: Engines, monkeypatch: pytest.MonkeyPatch, table: str, key: bytes, value: bytes
) -> None:
    monkeypatch.setattr(leader, "SNAPSHOT_AFTER", 4)
    monkeypatch.setattr(leader, "_MOST_TAILS", 2)
    engine = open_engine(engines)
    for seed in range(30):
        store(engine, seed)
        engines.run(2)
    dumps = 0
    for name in engines.bucket.keys("/segments/"):
        records: list[bytes] = []
        for record in split_records(engines.bucket.data(name)):
            sealed = bytes(record)
            with suppress(CorruptPackError):
                dump = unseal(sealed, Dump)
                dump.tables["undo"] = []  # rows of a pending commit could restore what the forged row replaces
                dump.tables.setdefault(table, []).append((key, value))
                sealed, dumps = seal(dump), dumps + 1
            records.append(len(sealed).to_bytes(8, "little") + sealed)
        engines.bucket.replace(name, b"".join(records))
    assert dumps
    fresh = open_engine(engines)
    assert held_packs(fresh) <= pack_ids(*range(30))
    store(fresh, 30)
    engines.run(60)
    for reader in (fresh, open_engine(engines)):
        assert pack_ids(30) <= held_packs(reader)
        assert is_intact(reader, 30)


def test_open_forged_head_naming_many_feed_objects_takes_little_memory(engines: Engines) -> None:
    engine = open_engine(engines)
    store(engine, 1)
    engines.run(5)
    head = decode_head(engines.bucket.data("store/persistkv"), "head")
    space = head.namespaces[NAMESPACE]
    space.position = 1 << 20
    space.spans = [(1, space.position, space.spans[0][2])]
    engines.bucket.replace("store/persistkv", encode_head(head))
    tracemalloc.start()
    try:
        with pytest.raises(StoreError):
            open_engine(engines)
        assert tracemalloc.get_traced_memory()[1] < 32 << 20
    finally:
        tracemalloc.stop()


def test_read_frames_with_gaps_takes_memory_for_one_gap(engines: Engines) -> None:
    engine = open_engine(engines)
    segments = [sample_segment(n, blocks=1, block_bytes=60_000, depth=2 * n) for n in range(300)]  # a frame each
    pack = PackWriter(NAMESPACE, RawCodec(), segments)
    engine.commit(NAMESPACE, CommitBatch([pack]))
    frames = [frame for number, frame in enumerate(pack.table.frames) if number % 2]
    buffer = memoryview(bytearray(max(frame.stored_length for frame in frames)))
    came: list[int] = []
    tracemalloc.start()
    try:
        engine.read_frames(NAMESPACE, pack.pack_id, frames, buffer, lambda number, _: came.append(number))
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert came == list(range(len(frames)))
    assert peak < pack.table.payload_length + (4 << 20), "the bucket of the test copies the object; gaps took 9 MB"
