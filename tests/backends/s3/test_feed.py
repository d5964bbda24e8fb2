"""Feed, leader and local catalogues: several engines on a bucket in memory, whose time the test moves."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

from persistkv.errors import StoreError, StoreUnavailableError
from persistkv.storage.backend import CommitBatch
from persistkv.storage.extensions import Policy
from persistkv.testing.conformance.suite import check_totals, read_pack, sample_identity, tables
from persistkv.testing.samples import payload_of, sample_manifest, sample_pack
from persistkv_s3 import S3Backend
from persistkv_s3.client.transport import BrokenError, LateError
from persistkv_s3.feed import leader
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


def opened(engines: Engines, *, cache: str = "", **options: Any) -> S3Backend:
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


def names(*seeds: int) -> set[bytes]:
    return {sample_pack(NAMESPACE, seed, blocks=1).pack_id for seed in seeds}


def is_intact(engine: S3Backend, *seeds: int) -> bool:
    """Return whether the packs are read as they were stored."""
    expected = [payload_of(sample_pack(NAMESPACE, seed, blocks=1)) for seed in seeds]
    found = tables(engine, NAMESPACE)
    return [read_pack(engine, NAMESPACE, found[name]) for seed in seeds for name in names(seed)] == expected


def held(engine: S3Backend) -> set[bytes]:
    return set(tables(engine, NAMESPACE))


def test_commit_is_visible_to_others_within_three_seconds(engines: Engines) -> None:
    writer, reader = opened(engines), opened(engines)
    store(writer, 0)
    engines.run(10)
    waits = []
    for seed in range(1, 40):
        store(writer, seed)
        began = engines.bucket.now
        while not names(seed) <= held(reader):
            engines.run(1)
        waits.append(engines.bucket.now - began)
        assert is_intact(reader, seed), "the engine is in use"
    assert max(waits) <= 3.0


def test_leader_that_is_killed_is_replaced_within_twenty_seconds(engines: Engines) -> None:
    first, second, reader = opened(engines), opened(engines), opened(engines)
    store(first, 1)
    engines.run(5)
    engines.kill(first)
    store(first, 2)
    store(second, 3)
    began = engines.bucket.now
    while not names(1, 2, 3) <= held(reader):
        engines.run(1)
        assert engines.bucket.now - began <= 20.0


def test_engine_that_closes_merges_its_commits_and_resigns(engines: Engines) -> None:
    first, second, reader = opened(engines), opened(engines), opened(engines)
    store(first, 1)
    engines.run(5)
    store(second, 2)
    store(first, 3)
    engines.stop(first)
    assert not engines.bucket.keys("/inbox/"), "the last round has merged both commits"
    store(second, 4)
    began = engines.bucket.now
    while not names(1, 2, 3, 4) <= held(reader):
        engines.run(1)
        assert engines.bucket.now - began <= 3.0, "the second engine leads at once"
    engines.stop(second)
    assert not engines.bucket.keys("/inbox/")


def test_last_commit_before_closing_is_merged_without_a_leader(engines: Engines) -> None:
    engine = opened(engines)
    store(engine, 1)
    engines.stop(engine)
    assert not engines.bucket.keys("/inbox/")
    assert held(opened(engines)) == names(1)


def test_idle_leader_resigns_and_idle_engines_poll_rarely(engines: Engines) -> None:
    writer, reader = opened(engines), opened(engines)
    store(writer, 1)
    engines.run(120)
    for client in engines.clients.values():
        client.take()
    engines.run(3600)
    for engine in (writer, reader):
        counts = engines.clients[engine].take()
        assert set(counts) == {"GET"}
        assert counts["GET"] <= 160, "every 30 s or so"


def test_commit_costs_its_packs_and_two_requests(engines: Engines) -> None:
    writer = opened(engines)
    client = engines.clients[writer]
    client.take()
    store(writer, 1, 2, 3)
    assert client.take() == {"PUT": 5}
    assert is_intact(writer, 2)
    assert client.take() == {"GET": 1}


def test_snapshots_bound_what_a_fresh_reader_fetches(engines: Engines, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(leader, "SNAPSHOT_AFTER", 8)
    monkeypatch.setattr(leader, "_MOST_TAILS", 3)
    one, two = opened(engines), opened(engines)
    expected: set[bytes] = set()
    for seed in range(120):
        engine = (one, two)[seed % 2]
        expected |= store(engine, seed)
        if seed % 7 == 6:
            gone = names(seed - 3)
            engine.commit(NAMESPACE, CommitBatch(deletions=list(gone), pins=[(f"r{seed}", True)]))
            expected -= gone
        engines.run(1)
    engines.run(5)
    fresh = opened(engines)
    assert sum(engines.clients[fresh].take().values()) <= 25
    for engine in (one, two, fresh):
        assert held(engine) == expected
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
    assert held(opened(engines)) == expected | names(500)


def test_second_opening_takes_the_local_catalogue(engines: Engines) -> None:
    writer = opened(engines)
    for seed in range(30):
        store(writer, seed)
        engines.run(1)
    reader = opened(engines, cache="kept")
    engines.clients[reader].take()
    engines.kill(reader)
    reader.close()
    again = engines.open(cache="kept")
    again.open_namespace(sample_identity())
    assert held(again) == names(*range(30))
    assert sum(engines.clients[again].take().values()) <= 6
    store(writer, 30)
    engines.run(3)
    assert held(again) == names(*range(31))


def test_local_catalogue_of_another_life_of_the_store_is_replaced(engines: Engines) -> None:
    writer = opened(engines)
    store(writer, 1)
    engines.run(3)
    reader = opened(engines, cache="kept")
    engines.kill(writer)
    engines.kill(reader)
    reader.close()
    engines.bucket.server.delete(engines.bucket.keys(""))
    other = opened(engines)
    store(other, 2)
    engines.run(3)
    assert held(opened(engines, cache="kept")) == names(2)


@pytest.mark.parametrize("damage", [b"", b"no database at all" * 500])
def test_damaged_local_catalogue_is_replaced(engines: Engines, tmp_path: Path, damage: bytes) -> None:
    writer = opened(engines)
    store(writer, 1)
    engines.run(3)
    opened(engines, cache="kept").close()
    (path,) = (tmp_path / "kept").glob("*.catalogue")
    path.write_bytes(damage)
    assert held(opened(engines, cache="kept")) == names(1)


def test_two_engines_share_one_local_catalogue(engines: Engines) -> None:
    one, two, other = opened(engines, cache="kept"), opened(engines, cache="kept"), opened(engines)
    for seed in range(0, 30, 3):
        store(one, seed)
        store(two, seed + 1)
        store(other, seed + 2)
        engines.run(1)
    engines.run(3)
    for engine in engines.all:
        assert held(engine) == names(*range(30))
    check_totals(one)


def test_first_of_two_packs_in_the_feed_stays(engines: Engines) -> None:
    ours, theirs = opened(engines), opened(engines)
    first, second = sample_pack(NAMESPACE, 1, content=10), sample_pack(NAMESPACE, 1, content=20)
    ours.commit(NAMESPACE, CommitBatch([first]))
    engines.bucket.now += 0.1
    cursor = theirs.commit(NAMESPACE, CommitBatch([second])).cursor
    assert read_pack(theirs, NAMESPACE, second.table) == payload_of(second), "its own pack is visible at once"
    engines.run(5)
    for engine in (ours, theirs, opened(engines)):
        assert read_pack(engine, NAMESPACE, first.table) == payload_of(first)
    news = theirs.changes(NAMESPACE, cursor)
    assert ([*news.removed], [*news.added]) == ([first.pack_id], [first.table])
    assert len(engines.bucket.keys("/packs/")) == 2
    engines.run(HOUR_S + 60)
    store(ours, 7)
    engines.run(20)
    assert len(engines.bucket.keys("/packs/")) == 2, "the pack, and the new one"
    assert read_pack(theirs, NAMESPACE, first.table) == payload_of(first)


def test_deleted_objects_stay_an_hour(engines: Engines) -> None:
    engine = opened(engines)
    store(engine, 1, 2)
    engine.commit(NAMESPACE, CommitBatch(deletions=list(names(1))))
    engines.run(5)
    engines.bucket.now += 0.5 * HOUR_S
    store(engine, 3)
    engines.run(5)
    assert len(engines.bucket.keys("/packs/")) == 3
    engines.bucket.now += 0.6 * HOUR_S
    store(engine, 4)
    engines.run(5)
    assert len(engines.bucket.keys("/packs/")) == 3, "pack 1 was deleted"
    assert held(opened(engines)) == names(2, 3, 4)
    assert is_intact(engine, 2, 3, 4)
    assert engine.manifest_keys(NAMESPACE, ["r2"])[0] == sample_manifest("r2").keys


def test_capacity_takes_the_oldest_and_spares_the_pinned(engines: Engines) -> None:
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


def test_ttl_counts_from_the_last_use_by_the_clock_of_the_server(engines: Engines) -> None:
    engine = opened(engines, ttl_s=HOUR_S)
    used, idle = names(1), names(2)
    store(engine, 1)
    store(engine, 2)
    engines.run(0.6 * HOUR_S)
    engine.commit(NAMESPACE, CommitBatch([sample_pack(NAMESPACE, 3, blocks=1)], touches=list(used)))
    engines.run(0.6 * HOUR_S)
    store(engine, 4)
    engines.run(5)
    assert held(engine) == used | names(3, 4)
    assert not held(opened(engines)) & idle
    assert {head.id for head in engine.manifests(NAMESPACE)} == {"r4"}, "that of r1 was not used since it was written"


def test_request_own_ttl_expires_it_by_the_clock_of_the_server(engines: Engines) -> None:
    engine = opened(engines)
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
    assert set(tables(opened(engines), NAMESPACE)) >= {pack.pack_id for pack in packs[1:]}
    assert packs[0].pack_id not in tables(engine, NAMESPACE)
    engines.run(2 * HOUR_S)
    store(engine, 5)
    engines.run(5)
    assert {head.id for head in engine.manifests(NAMESPACE)} == {"r2", "r4", "r5"}
    check_totals(engine)


def test_low_priority_does_not_delay_expiry(engines: Engines) -> None:
    engine = opened(engines, ttl_s=HOUR_S)
    store(engine, 1)
    engines.run(0.6 * HOUR_S)
    low = sample_pack(NAMESPACE, 2, blocks=1)
    engine.commit(NAMESPACE, CommitBatch([low], [sample_manifest("low", packs=[low.pack_id], priority="low")]))
    engines.run(0.6 * HOUR_S)
    store(engine, 3)
    engines.run(5)
    assert {head.id for head in engine.manifests(NAMESPACE)} == {"low", "r3"}


def test_policy_in_the_head_is_applied_by_the_next_leader(engines: Engines) -> None:
    one, two = opened(engines), opened(engines)
    store(one, 1)
    engines.run(5)
    two.set_policy(Policy(None, HOUR_S))
    assert one.policy() == Policy(None, HOUR_S)
    engines.run(2 * HOUR_S)
    store(one, 2)
    engines.run(40)
    assert held(two) == names(2)
    assert engines.open().policy() == Policy(None, HOUR_S)


def test_many_expire_in_bounded_steps_and_block_no_commit(engines: Engines) -> None:
    engine = opened(engines, ttl_s=HOUR_S)
    for start in range(0, 1000, 100):
        store(engine, *range(start, start + 100))
    engines.run(5)
    engines.bucket.now += 2 * HOUR_S
    store(engine, 5000)
    engines.run(3)
    assert names(5000) < held(engine), "some of the others are still there"
    engines.run(20)
    assert held(engine) == names(5000)


def test_sweep_deletes_what_nothing_names(engines: Engines) -> None:
    engine = opened(engines)
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
    assert held(opened(engines)) == names(1, 2)


def test_commit_that_took_twelve_hours_fails_and_is_rejected(engines: Engines) -> None:
    sleeper, other = opened(engines), opened(engines)
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
    late = opened(engines)
    assert held(late) == set(), "a commit that the leader rejects holds no pack"
    store(late, 1)
    store(other, 2)
    engines.run(40)
    assert held(other) == names(1, 2)
    assert is_intact(other, 1, 2)
    late.commit(NAMESPACE, CommitBatch(deletions=list(names(1))))
    engines.run(40)
    for engine in (sleeper, other):
        assert held(engine) == names(2)
    store(sleeper, 1)
    engines.run(40)
    assert held(other) == names(1, 2)
    assert is_intact(other, 1, 2)


def test_commit_that_no_leader_merged_for_a_day_counts(engines: Engines) -> None:
    writer = opened(engines)
    store(writer, 1)
    engines.kill(writer)
    engines.bucket.now += 30 * HOUR_S
    other = opened(engines)
    store(other, 2)
    engines.run(5)
    assert held(other) == names(1, 2)
    engines.run(24 * HOUR_S / 60)
    assert is_intact(other, 1, 2)


def test_engines_agree_whatever_they_had_committed_themselves(engines: Engines) -> None:
    """Two engines store one pack while a third deletes another object of it: all keep the same object."""
    one, two, three = (opened(engines) for _ in range(3))
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
    found = {read_pack(engine, NAMESPACE, pack.table) for engine in (one, two, three, opened(engines))}
    assert len(found) == 1
    assert None not in found


def test_leader_that_resumes_after_its_successor_changes_nothing(engines: Engines) -> None:
    old, new = opened(engines), opened(engines)
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
    for engine in (old, new, opened(engines)):
        assert held(engine) == names(1, 2, 3)


def lose_replies(engine: S3Backend, engines: Engines, part: str, error: type[BrokenError | LateError]) -> None:
    """Let PUTs of matching keys succeed without a reply."""

    def lose(verb: str, key: str) -> None:
        if verb == "PUT" and part in key:
            raise error("no reply")

    engines.clients[engine].after = lose


@pytest.mark.parametrize("error", [BrokenError, LateError])
def test_snapshot_whose_upload_fails_is_begun_again(
    engines: Engines, monkeypatch: pytest.MonkeyPatch, error: type[BrokenError | LateError]
) -> None:
    """A part of it must not become the whole one: a fresh reader would lack the other packs."""
    monkeypatch.setattr(leader, "SNAPSHOT_AFTER", 4)
    monkeypatch.setattr(leader, "_MOST_TAILS", 2)
    engine = opened(engines)
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
    assert held(opened(engines)) == names(*range(40))


@pytest.mark.parametrize(
    "part", ["/packs/", "/keys/", "inbox", "/feed/", "store/persistkv", "/segments/", "/snapshots/"]
)
@pytest.mark.parametrize("error", [BrokenError, LateError])
def test_object_that_was_written_though_the_server_failed_is_never_deleted(
    engines: Engines, monkeypatch: pytest.MonkeyPatch, part: str, error: type[BrokenError | LateError]
) -> None:
    monkeypatch.setattr(leader, "SNAPSHOT_AFTER", 4)
    engine = opened(engines)
    store(engine, 0)
    engines.run(3)
    acknowledged = names(0)
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
    fresh = opened(engines)
    assert acknowledged <= held(fresh)
    for table in tables(fresh, NAMESPACE).values():
        assert read_pack(fresh, NAMESPACE, table) is not None


def test_commit_that_arrives_late_is_not_taken_for_the_next_one(engines: Engines) -> None:
    """The next commit must have another name: its upload would fail as that of an object which exists, as after a lost
    reply.
    """
    engine = opened(engines)
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
    assert held(opened(engines)) >= names(0, 2)


def test_engine_that_was_disconnected_reloads_before_it_writes(
    engines: Engines, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(leader, "SNAPSHOT_AFTER", 4)
    away, *others = (opened(engines) for _ in range(3))
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
    fresh = opened(engines)
    assert held(away) == held(fresh) == expected
    for table in tables(fresh, NAMESPACE).values():
        assert read_pack(fresh, NAMESPACE, table) is not None


def test_head_that_was_deleted_is_rebuilt(engines: Engines, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(leader, "SNAPSHOT_AFTER", 8)
    engine = opened(engines)
    for seed in range(21):
        store(engine, seed)
        engines.run(1)
    engines.run(3)
    engines.bucket.server.delete(["store/persistkv"])
    assert held(opened(engines)) == names(*range(21))
    store(engine, 21)
    engines.run(40)
    for each in (engine, opened(engines)):
        assert held(each) == names(*range(22))


@pytest.mark.parametrize("leads", [True, False])
def test_bucket_that_was_emptied_is_used_again(engines: Engines, leads: bool) -> None:
    """What was stored is lost. What the engine stores from now on is found by others, whether or not it was leading."""
    engine = opened(engines)
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
    fresh = opened(engines)
    assert held(engine) == held(fresh)
    assert [namespace.id for namespace in fresh.namespaces()] == [NAMESPACE]
    assert names(9) <= held(fresh)
    assert is_intact(fresh, 9)


@pytest.mark.parametrize("leads", [True, False])
def test_engine_that_closes_in_an_emptied_bucket_leaves_a_store(engines: Engines, leads: bool) -> None:
    engine = opened(engines)
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
def test_unreadable_part_of_the_feed_costs_only_its_packs(
    engines: Engines, monkeypatch: pytest.MonkeyPatch, part: str, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(leader, "SNAPSHOT_AFTER", 4)
    engine = opened(engines)
    for seed in range(11):
        store(engine, seed)
        engines.run(2)
    damaged = engines.bucket.keys(part)[-1]
    engines.bucket.replace(damaged, b"junk")
    fresh = opened(engines)
    assert held(fresh) < names(*range(11))
    assert "unreadable" in caplog.text
    store(engine, 11)
    engines.run(5)
    assert names(11) <= held(fresh)


@pytest.mark.parametrize("header", ["If-None-Match", "If-Match"])
def test_server_that_ignores_conditions_is_refused(engines: Engines, header: str) -> None:
    engines.bucket.server.honours.remove(header)
    with pytest.raises(StoreUnavailableError, match=f"ignores {header}"):
        engines.open()
    assert engines.bucket.keys("") == []


def test_server_that_needs_etags_without_quotes_is_supported(engines: Engines) -> None:
    engines.bucket.server.unquoted = True
    one, two = opened(engines), opened(engines)
    store(one, 1)
    store(two, 2)
    engines.run(5)
    assert held(opened(engines)) == names(1, 2)


SECRET = "0123456789abcdef" * 4


@pytest.fixture
def secret(monkeypatch: pytest.MonkeyPatch) -> dict[str, str]:
    """Option of engines with a key."""
    monkeypatch.setenv("PERSISTKV_TEST_KEY", SECRET)
    return {"key_env": "PERSISTKV_TEST_KEY"}


@pytest.mark.parametrize("part", ["inbox", "/feed/", "/segments/", "/snapshots/", "store/persistkv", "identities"])
def test_unauthentic_object_is_ignored(
    engines: Engines, secret: dict[str, str], monkeypatch: pytest.MonkeyPatch, part: str
) -> None:
    monkeypatch.setattr(leader, "SNAPSHOT_AFTER", 4)
    engine = opened(engines, **secret)
    for seed in range(11):
        store(engine, seed)
        engines.run(2)
    store(engine, 11)
    key = engines.bucket.keys(part)[-1]
    data = engines.bucket.data(key)
    engines.bucket.replace(key, data[:-1] + bytes([data[-1] ^ 1]))
    fresh = opened(engines, **secret)
    assert held(fresh) <= names(*range(12))
    assert (held(fresh) == names(*range(12))) == (part in ("store/persistkv", "identities"))
    store(fresh, 12)
    engines.run(60)
    assert names(12) <= held(engine)
    assert is_intact(engine, 12)


def test_junk_in_the_inbox_is_neither_downloaded_nor_a_hindrance(
    engines: Engines, secret: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    for module in ("session", "feed.leader"):
        monkeypatch.setattr(f"persistkv_s3.{module}.MAX_INBOX_BYTES", 1 << 20)
    engine = opened(engines, **secret)
    store(engine, 1)
    inbox = engines.bucket.keys("inbox")[0].rpartition("/")[0]
    for number in range(1, 20):
        size = (1 << 20) + 1 if number % 2 else 1000
        engines.bucket.replace(f"{inbox}/{NAMESPACE.hex()}-{number:032x}-{1:012x}", bytes(size))
    engines.bucket.replace(f"{inbox}/{'f' * 32}-{1:032x}-{1:012x}", b"of no namespace")
    engines.run(3)
    fresh = opened(engines, **secret)
    for reader in (engine, fresh):
        assert held(reader) == names(1)
    client, downloads = engines.clients[engine], list[str]()
    client.before = lambda verb, key: downloads.append(key) if verb == "GET" and "inbox" in key else None
    store(engine, 2)
    engines.run(5)
    assert held(fresh) == names(1, 2)
    assert not downloads, "neither the leader's own commit nor junk that was looked at once is fetched"


def test_open_with_unmerged_commits_reads_them_concurrently(engines: Engines) -> None:
    writer = opened(engines)
    for seed in range(4):
        store(writer, seed)
    assert held(opened(engines, connections=4)) == names(*range(4))


def test_engines_with_and_without_a_key_share_no_head(engines: Engines, secret: dict[str, str]) -> None:
    keyed, keyless = opened(engines, **secret), opened(engines)
    store(keyed, 1)
    store(keyless, 2)
    engines.run(5)
    assert (held(keyed), held(keyless)) == (names(1), names(2))
    keyed.set_policy(Policy(None, HOUR_S))
    assert keyless.policy() == Policy(None, None)
    assert len(engines.bucket.keys("store/persistkv")) == 2


def test_reads_that_miss_while_commits_run_disturb_none(engines: Engines) -> None:
    engine = opened(engines)
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
    assert held(opened(engines)) == held(engine) == names(*range(100, 116))


def test_uses_wait_for_a_commit_and_outlive_the_handle(engines: Engines) -> None:
    engine, client = opened(engines), engines.clients
    store(engine, 1)
    engines.run(1)
    store(engine, 2)
    engines.run(5)
    client[engine].take()
    engine.commit(NAMESPACE, CommitBatch(touches=list(names(1))))
    assert client[engine].take() == {}
    engines.kill(engine)
    engine.close()
    fresh = opened(engines)
    store(fresh, 3)
    engines.run(5)
    uses = [use for use in fresh.uses(NAMESPACE, ["r1", "r2"]) if use is not None]
    assert [use.reused for use in uses] == [True, False]
    assert uses[0].last_used > uses[1].last_used
