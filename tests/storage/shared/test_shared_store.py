"""Rules of the shared store (docs/shared.md), one after the other, with handles whose time the test
moves."""

from __future__ import annotations

import random

import pytest

from persistkv.errors import ConfigurationError, StoreError, StoreUnavailableError
from persistkv.storage.backend import CommitBatch
from persistkv.storage.blobs import BlobInfo, RefusedError, UnavailableError
from persistkv.storage.format.pack import PackTable
from persistkv.storage.format.seal import PLAIN
from persistkv.storage.identity import Identity
from persistkv.storage.shared import SharedOptions
from persistkv.storage.shared import format as index_format
from persistkv.storage.shared.format import NONCE_BYTES, Delta, StoreNames, seal_object
from persistkv.testing.conformance.suite import read_pack, sample_identity
from persistkv.testing.samples import payload_of, sample_manifest
from tests.storage.shared.town import (
    NAMES,
    NAMESPACE,
    START,
    Engine,
    Town,
    pack,
)

HOUR_S = 3600.0
DAY_S = 24 * HOUR_S


# Commits and merges


def test_commit_is_seen_by_another_engine_after_a_merge(town: Town) -> None:
    first, second = town.engine(), town.engine()
    one = pack(1)
    first.store(one)
    assert first.held() == {one.pack_id}
    assert second.held() == set()
    town.run(6)
    assert second.held() == {one.pack_id}
    assert read_pack(second.backend, NAMESPACE, one.table) == payload_of(one)


def test_commit_of_dead_engine_is_found_by_opening_and_merged_later(town: Town) -> None:
    first = town.engine()
    first.store(pack(1))
    town.kill(first)
    second = town.engine()
    assert second.held() == {pack(1).pack_id}
    town.run(15)
    assert town.names("/inbox/") == []
    assert town.fresh() == {pack(1).pack_id}


def test_segment_is_seen_soon_if_another_merger_replaces_latest(town: Town) -> None:
    first, second, third = town.engine(), town.engine(), town.engine()
    second.store(pack(1))
    town.run(6)
    before = town.data(NAMES.latest)
    first.store(pack(2))
    while town.data(NAMES.latest) == before:
        town.run(0.05)
    town.server.put(NAMES.latest, [before])  # a merge that began earlier ends now
    town.run(4)
    assert third.held() == {pack(1).pack_id, pack(2).pack_id}


def test_merge_deletes_commits_and_names_them(town: Town) -> None:
    first, second = town.engine(), town.engine()
    first.store(pack(1))
    second.store(pack(2))
    commits = set(town.names("/inbox/"))
    assert len(commits) == 2
    town.run(6)
    assert town.names("/inbox/") == []
    included: set[str] = set()
    for name in town.names("/index/"):
        included.update(town.delta(name).includes)
    assert included == commits


def test_merge_before_failed_deletion_is_repeated_without_harm(town: Town) -> None:
    first = town.engine()
    first.blobs.fail("delete", UnavailableError("no reply"), times=1)
    first.store(pack(1))
    town.run(6)
    assert len(town.names("/inbox/")) == 1
    first.store(pack(2))
    town.run(130)  # deletions pause for a minute
    assert town.names("/inbox/") == []
    assert town.fresh() == {pack(1).pack_id, pack(2).pack_id}


def test_merge_paused_for_more_than_an_hour_is_begun_anew(town: Town) -> None:
    first = town.engine()
    first.store(pack(1))

    def pause(subject: str) -> None:
        if "/inbox/" in subject and not town.names("/index/"):
            first.blobs.clear_faults()
            town.now += 2 * HOUR_S

    first.blobs.after("list", pause)
    town.run(4)
    assert town.now > 2 * HOUR_S
    town.run(10)
    (name,) = town.names("/index/")
    _, milliseconds, _ = name.removeprefix(NAMES.index).split("-")
    assert int(milliseconds, 16) / 1000 > START + 2 * HOUR_S
    assert town.fresh() == {pack(1).pack_id}


def test_commit_with_unknown_outcome_is_not_acknowledged_and_may_appear(
    town: Town,
) -> None:
    first = town.engine()
    first.blobs.fail(
        "put",
        UnavailableError("no reply"),
        after=True,
        only=lambda name: "/inbox/" in name,
    )
    with pytest.raises(UnavailableError):
        first.store(pack(1))
    assert first.held() == set()
    first.blobs.clear_faults()
    first.store(pack(1))
    town.run(10)
    assert first.held() == town.fresh() == {pack(1).pack_id}


def test_commit_that_took_twelve_hours_is_not_acknowledged(town: Town) -> None:
    first = town.engine()

    def pause(subject: str) -> None:
        if "/inbox/" in subject:
            town.now += 13 * HOUR_S

    first.blobs.before("put", pause)
    with pytest.raises(StoreError, match="12 hours"):
        first.store(pack(1))


def test_backlog_is_merged_in_bounded_steps(town: Town) -> None:
    first = town.engine()
    for seed in range(1100):
        first.store(pack(seed, blocks=1, block_bytes=16))
    town.run(10)
    assert town.names("/inbox/") == []
    assert max(len(town.delta(name).includes) for name in town.names("/index/")) <= 1000
    assert len(town.fresh()) == 1100


# What readers do not trust


def junk_in(town: Town, name: str, data: bytes = b"junk" * 20) -> str:
    town.server.put(name, [data])
    return name


def newer_object(name: str) -> bytes:
    """Return an index object of a later release."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(index_format, "FORMAT_VERSION", index_format.FORMAT_VERSION + 1)
        return seal_object(name, b"later", PLAIN, NAMESPACE)


def test_junk_costs_only_itself(town: Town) -> None:
    for prefix in ("inbox", "index"):
        junk_in(town, f"{NAMES.base}{prefix}/junk")
    bad = [junk_in(town, NAMES.new_commit(random.Random(1)))]
    bad.append(junk_in(town, NAMES.new_index(5, START, random.Random(2))))
    first = town.engine()
    first.store(pack(1))
    town.run(300)
    assert town.fresh() == {pack(1).pack_id}
    assert set(bad) <= set(town.names("/in"))


def test_object_under_another_name_is_junk(town: Town) -> None:
    first = town.engine()
    first.store(pack(1))
    (commit,) = town.names("/inbox/")
    junk_in(town, NAMES.new_commit(random.Random(3)), town.data(commit))
    town.server.delete([commit])
    assert town.fresh() == set()


def test_newer_object_is_never_included_nor_deleted_and_blocks_the_sweep(
    town: Town,
) -> None:
    first = town.engine()
    newer = [
        NAMES.new_commit(random.Random(1)),
        NAMES.new_index(1, START, random.Random(2)),
    ]
    for name in newer:
        town.server.put(name, [newer_object(name)])
    orphan = f"{NAMES.packs}{'1' * 32}-{'2' * 32}"
    town.server.put(orphan, [b"unnamed"])
    for seed in range(10):
        first.store(pack(seed))
        town.run(4)
    first.backend.opened_namespace(NAMESPACE).merger.write_base()
    town.kill(first)
    first = town.engine()
    town.run(10)
    assert any(is_base(name) for name in town.names("/index/") if name not in newer)
    town.now += 9 * DAY_S
    assert first.backend.opened_namespace(NAMESPACE).sweep() == 0
    assert set(newer) <= set(town.names("/in"))
    assert town.names(orphan) == [orphan]
    ours = set(town.names("/index/")) - set(newer)
    for name in ours:
        includes = town.delta(name).includes
        assert set(newer).isdisjoint(includes)


def test_listed_object_that_is_missing_is_skipped(town: Town) -> None:
    first = town.engine()
    first.store(pack(1))
    town.run(6)
    second = town.engine(opens=False)
    (index,) = town.names("/index/")
    second.blobs.fail("read", StoreError("unused"), only=lambda name: False)
    second.blobs.before(
        "read", lambda name: town.server.delete([index]) if "/index/" in name else None
    )
    listed = second.blobs.inner.list

    def stale(prefix: str, after: str = "") -> object:
        found = list(listed(prefix, after))
        if prefix.endswith("/index/") and index not in [info.name for info in found]:
            found.append(BlobInfo(index, 100, START))
        return iter(found)

    second.blobs.inner.list = stale  # type: ignore[method-assign, assignment]
    second.open()
    assert second.held() == set()
    second.store(pack(2))
    town.run(120)
    assert second.held() == {pack(2).pack_id}


def test_junk_in_the_inbox_that_was_deleted_is_forgotten(
    town: Town,
    caplog: pytest.LogCaptureFixture,
) -> None:
    name = NAMES.new_commit(random.Random(1))
    town.engine()
    for reports in (1, 2):
        junk_in(town, name)
        town.run(700)
        assert sum(name in record.getMessage() for record in caplog.records) == reports
        town.server.delete([name])
        town.run(5000)


def test_entry_whose_blob_is_missing_is_removed_from_the_index(town: Town) -> None:
    first, second = town.engine(), town.engine()
    first.store(pack(1), pack(2))
    town.run(6)
    (blob,) = [name for name in town.names("/packs/") if pack(1).pack_id.hex() in name]
    town.server.delete([blob])
    assert read_pack(first.backend, NAMESPACE, table_of(first, pack(1).pack_id)) is None
    assert first.held() == {pack(2).pack_id}
    first.store(pack(3))
    town.run(6)
    assert second.held() == {pack(2).pack_id, pack(3).pack_id}
    first.store(pack(1))  # under a new name
    town.run(6)
    assert (
        read_pack(second.backend, NAMESPACE, table_of(second, pack(1).pack_id))
        is not None
    )


def table_of(engine: Engine, pack_id: bytes) -> PackTable:
    (table,) = engine.backend.tables(NAMESPACE, [pack_id])
    return table


def test_store_that_vanishes_for_a_while_loses_nothing(town: Town) -> None:
    """As a directory does that is not mounted."""
    first = town.engine()
    first.store(pack(1))
    town.run(6)
    held = {name: town.data(name) for name in town.names("")}
    town.server.delete(list(held))
    assert read_pack(first.backend, NAMESPACE, table_of(first, pack(1).pack_id)) is None
    for name, data in held.items():
        town.server.put(name, [data])
    assert first.held() == {pack(1).pack_id}
    assert (
        read_pack(first.backend, NAMESPACE, table_of(first, pack(1).pack_id))
        is not None
    )


# Bases


def is_base(name: str) -> bool:
    return NAMES.level(name) >= index_format.BASE_LEVEL


def test_base_includes_what_was_read_and_its_objects_are_deleted_after_ten_minutes(
    town: Town,
) -> None:
    first, second = town.engine(), town.engine()
    for seed in range(66):
        first.store(pack(seed))
        town.run(5)
    first.backend.opened_namespace(NAMESPACE).merger.write_base()
    assert any(is_base(name) for name in town.names("/index/"))
    assert len(town.names("/index/")) > 60
    town.run(1000)  # ten minutes, and up to 375 s until an idle engine lists the index
    assert len(town.names("/index/")) < 10
    expected = {pack(seed).pack_id for seed in range(66)}
    assert town.fresh() == first.held() == second.held() == expected


def test_base_is_not_read_by_engines_that_have_read_what_it_includes(
    town: Town,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("persistkv.storage.shared.index.merge.PART_BYTES", 2000)
    first, second = town.engine(), town.engine()
    for seed in range(70):
        first.store(pack(seed))
        town.run(5)
    first.backend.opened_namespace(NAMESPACE).merger.write_base()
    town.run(120)
    last = next(name for name in town.names("/index/") if town.delta(name).parts)
    parts = set(town.delta(last).parts)
    assert len(parts) > 5
    assert not [
        subject
        for method, subject in second.blobs.calls
        if method == "read" and subject in parts
    ]
    town.run(700)
    assert len(town.fresh()) == len(second.held()) == 70


def test_base_keeps_requests_pins_and_young_tombstones(town: Town) -> None:
    first = town.engine()
    one, two = pack(1), pack(2)
    first.backend.commit(
        NAMESPACE,
        CommitBatch(
            [one, two], [sample_manifest("r", packs=[one.pack_id])], pins=[("r", True)]
        ),
    )
    town.run(6)
    first.backend.commit(NAMESPACE, CommitBatch(deletions=[two.pack_id]))
    town.run(6)
    first.backend.opened_namespace(NAMESPACE).merger.write_base()
    town.run(1000)
    (base,) = town.names("/index/")
    delta = town.delta(base)
    assert (
        len(delta.packs)
        == len(delta.manifests)
        == len(delta.pins)
        == len(delta.removed)
        == 1
    )
    second = town.engine()
    (use,) = second.backend.catalogue(NAMESPACE).uses(["r"])
    assert use is not None
    assert use.pinned
    assert second.backend.manifest_keys(NAMESPACE, ["r"]) == [sample_manifest("r").keys]


# Openings


def test_opening_never_merges_at_once(town: Town) -> None:
    first = town.engine()
    for seed in range(5):
        first.store(pack(seed))
    town.kill(first)
    engines = [town.engine() for _ in range(40)]
    assert town.names("/index/") == []
    assert all(len(engine.held()) == 5 for engine in engines)
    town.run(60)
    assert town.names("/inbox/") == []
    assert len(town.names("/index/")) <= 3


def test_opening_while_others_commit_without_a_pause_finds_all_that_is_durable(
    town: Town,
) -> None:
    first = town.engine()
    first.store(pack(1))
    second = town.engine(opens=False)
    seeds = iter(range(2, 1000))
    second.blobs.after("list", lambda prefix: first.store(pack(next(seeds))))
    second.open()
    assert pack(1).pack_id in second.held()


def test_opening_while_others_merge_without_a_pause_finds_all_that_is_durable(
    town: Town,
) -> None:
    first = town.engine()
    first.store(pack(1))
    second = town.engine(opens=False)
    seeds = iter(range(2, 1000))

    def commit_and_merge(prefix: str) -> None:
        first.store(pack(next(seeds)))
        town.run(12)

    town.engines.remove(second)
    second.blobs.after("list", commit_and_merge)
    second.open()
    assert pack(1).pack_id in second.held()
    second.blobs.clear_faults()
    town.engines.append(second)


def test_replica_is_kept_after_a_clean_end_only(town: Town) -> None:
    first = town.engine(cache="machine")
    for seed in range(30):
        first.store(pack(seed))
        town.run(5)
    town.stop(first)
    second = town.engine(cache="machine")
    assert second.calls("read", "/index/") == 0
    assert len(second.held()) == 30
    town.kill(second)
    second.backend.opened_namespace(NAMESPACE).discard()
    third = town.engine(cache="machine")
    assert third.calls("read", "/index/") > 0
    assert len(third.held()) == 30


def test_medium_that_does_not_answer_lets_the_handle_start(town: Town) -> None:
    town.engine().store(pack(1))
    town.run(6)
    late = town.engine(opens=False)
    for method in ("put", "read", "list", "delete"):
        late.blobs.fail(method, UnavailableError("no route"))
    late.open()
    assert late.held() == set()
    with pytest.raises(StoreError):
        late.store(pack(2))
    late.blobs.clear_faults()
    town.run(20)
    assert late.held() == {pack(1).pack_id}
    late.store(pack(2))


def test_read_only_handle_of_missing_store_raises(town: Town) -> None:
    with pytest.raises(StoreUnavailableError):
        Engine(town, SharedOptions(cache=False), read_only=True)


def test_read_only_handle_writes_nothing(town: Town) -> None:
    first = town.engine()
    first.store(pack(1))
    town.kill(first)
    reader = Engine(town, SharedOptions(cache=False), read_only=True)
    town.engines.append(reader)
    reader.open()
    town.run(2 * DAY_S)
    assert reader.held() == {pack(1).pack_id}
    assert reader.calls("put") == reader.calls("delete") == 0
    with pytest.raises(StoreError):
        reader.store(pack(2))


def test_refused_deletions_do_not_stop_commits(town: Town) -> None:
    first, second = town.engine(), town.engine()
    first.blobs.fail("delete", RefusedError("403"))
    second.blobs.fail("delete", RefusedError("403"))
    for seed in range(5):
        first.store(pack(seed))
        town.run(40)
    assert len(second.held()) == 5
    assert first.calls("delete") < 40


# What readers check, writers check first

TOO_LONG = "x" * (256 << 10)


def test_identity_that_readers_would_refuse_is_refused(town: Town) -> None:
    engine = town.engine()
    identity = Identity.of({"config": TOO_LONG})
    with pytest.raises(ConfigurationError, match="identity"):
        engine.backend.open_namespace(identity)
    town.run(60)
    assert [found.id for found in engine.backend.namespaces()] == [NAMESPACE]
    assert not town.names(identity.digest.hex())


def test_identity_that_readers_would_refuse_is_refused_while_the_medium_does_not_answer(
    town: Town,
) -> None:
    town.server.close()
    engine = town.engine(opens=False)
    with pytest.raises(ConfigurationError, match="identity"):
        engine.backend.open_namespace(Identity.of({"config": TOO_LONG}))


def test_status_that_readers_would_refuse_is_refused(town: Town) -> None:
    engine = town.engine()
    engine.backend.publish_status("e1", b"first")
    with pytest.raises(StoreError, match="status"):
        engine.backend.publish_status("e1", TOO_LONG.encode() + b"x")
    assert engine.backend.statuses() == {"e1": b"first"}


def test_statuses_larger_one_of_another_program_is_skipped(town: Town) -> None:
    engine = town.engine()
    engine.backend.publish_status("e1", b"first")
    junk_in(town, f"{StoreNames().statuses}e2", TOO_LONG.encode() + b"x")
    assert engine.backend.statuses() == {"e1": b"first"}


def test_note_that_readers_would_refuse_is_refused(town: Town) -> None:
    engine = town.engine()
    engine.backend.put_note(NAMESPACE, "warm", b"first")
    with pytest.raises(StoreError, match="readers accept"):
        engine.backend.put_note(NAMESPACE, "warm", TOO_LONG.encode())
    assert engine.backend.note(NAMESPACE, "warm") == b"first"


# Eviction


def test_wrong_clock_of_the_medium_expires_nothing(town: Town) -> None:
    first = town.engine(ttl_s=10 * DAY_S)
    first.store(pack(1))
    town.run(60)
    town.server_ahead_s = 365 * DAY_S
    # it cannot know that the clock jumped
    with pytest.raises(StoreError, match="12 hours"):
        first.store(pack(2))
    first.store(pack(2))
    town.run(DAY_S)
    town.server_ahead_s = -365 * DAY_S
    town.run(DAY_S)
    town.server_ahead_s = 0.0
    town.run(DAY_S)
    first.store(pack(3))
    expected = {pack(seed).pack_id for seed in (1, 2, 3)}
    assert first.held() == town.fresh() == expected
    for seed in (1, 2, 3):
        assert (
            read_pack(first.backend, NAMESPACE, table_of(first, pack(seed).pack_id))
            is not None
        )


@pytest.mark.parametrize("age_s", [0, 60], ids=["before a list", "after lists"])
def test_replies_dated_a_year_back_expire_nothing(town: Town, age_s: int) -> None:
    """Between the engine and an S3 server, the times of replies are wrong; those in lists are
    right."""
    first = town.engine(ttl_s=HOUR_S)
    first.store(pack(1))
    town.run(age_s)
    first.date_replies(-365 * DAY_S)
    for seed in (2, 3):
        first.store(pack(seed))
        town.run(60)
    first.store(pack(1), pack(4))  # a use of a pack that is held
    first.date_replies(0.0)
    with pytest.raises(StoreError, match="12 hours"):
        first.store(pack(5))
    town.run(60)
    expected = {pack(seed).pack_id for seed in (1, 2, 3, 4, 5)}
    assert first.held() == town.fresh() == expected
    town.run(2 * HOUR_S)
    assert first.held() == town.fresh() == set()


@pytest.mark.parametrize("streams", [False, True])
def test_read_of_missing_blob_tries_the_others_of_the_pack(
    town: Town,
    streams: bool,
) -> None:
    first, second = town.engine(), town.engine()
    first.store(pack(1))
    second.store(pack(1))
    town.run(10)
    (shown,) = [
        name for name in town.names("/packs/") if held_nonce(first).hex() in name
    ]
    assert len(town.names("/packs/")) == 2
    town.server.delete([shown])
    table = table_of(first, pack(1).pack_id)
    if streams:
        assert read_frames(first, table) == content_of_frames(table)
    else:
        assert read_pack(first.backend, NAMESPACE, table) == payload_of(pack(1))


def read_frames(engine: Engine, table: PackTable) -> list[bytes]:
    found: list[bytes] = []
    buffer = memoryview(bytearray(max(frame.stored_length for frame in table.frames)))
    engine.backend.read_frames(
        NAMESPACE,
        table.pack_id,
        table.frames,
        buffer,
        lambda _, stored: found.append(bytes(stored)),
    )
    return found


def content_of_frames(table: PackTable) -> list[bytes]:
    payload = payload_of(pack(1))
    found: list[bytes] = []
    for frame in table.frames:
        found.append(payload[frame.offset : frame.offset + frame.stored_length])
    return found


def held_nonce(engine: Engine) -> bytes:
    (blob,) = (
        engine.backend.opened_namespace(NAMESPACE)
        .replica.blobs([pack(1).pack_id])
        .values()
    )
    return blob.nonce


# Sweep


def test_sweep_deletes_old_blobs_that_nothing_names(town: Town) -> None:
    first = town.engine()
    first.blobs.fail(
        "put", UnavailableError("down"), only=lambda name: "/inbox/" in name
    )
    with pytest.raises(StoreError):
        first.backend.commit(NAMESPACE, CommitBatch([pack(1)], [sample_manifest("r")]))
    first.blobs.clear_faults()
    first.backend.commit(NAMESPACE, CommitBatch([pack(2)], [sample_manifest("s")]))
    assert len(town.names("/packs/")) == len(town.names("/keys/")) == 2
    town.run(DAY_S - 2 * HOUR_S)
    assert len(town.names("/packs/")) == 2
    town.run(2.5 * DAY_S)
    assert len(town.names("/packs/")) == len(town.names("/keys/")) == 1
    assert town.fresh() == {pack(2).pack_id}
    assert first.backend.manifest_keys(NAMESPACE, ["s"])[0] is not None


def test_sweep_runs_once_a_day_for_all_engines(town: Town) -> None:
    engines = [town.engine() for _ in range(3)]
    engines[0].store(pack(1))
    town.run(2.2 * DAY_S)
    sweeps = sum(engine.calls("put", "/swept") for engine in engines)
    assert 2 <= sweeps <= 4


def test_sweep_of_an_engine_that_has_seen_no_commit_deletes_old_blobs(
    town: Town,
) -> None:
    """It learns the medium's time from lists only."""
    first = town.engine()
    first.blobs.fail("put", UnavailableError("no reply"), only=NAMES.is_commit)
    with pytest.raises(UnavailableError):
        first.store(pack(1))
    town.run(2 * HOUR_S)
    assert town.names("/swept") != []
    town.kill(first)
    town.engine()
    town.run(3 * DAY_S)
    assert town.names("/packs/") == []


def sweep_during_a_commit(town: Town, sweeper: Engine) -> None:
    """Let an engine sweep when another one has uploaded a pack and not committed it."""
    writer = town.engine()

    def sweep(name: str) -> None:
        if NAMES.is_commit(name):
            sweeper.backend.opened_namespace(NAMESPACE).sweep()
            town.server_ahead_s = 0.0

    writer.blobs.before("put", sweep)
    writer.store(pack(1))
    writer.blobs.clear_faults()
    town.run(10)
    table = table_of(writer, pack(1).pack_id)
    assert read_pack(writer.backend, NAMESPACE, table) == payload_of(pack(1))


@pytest.mark.parametrize("ahead_s", [-365 * DAY_S, 365 * DAY_S])
def test_sweep_with_replies_of_a_wrong_date_deletes_no_young_blob(
    town: Town,
    ahead_s: float,
) -> None:
    sweeper = town.engine()
    sweeper.date_replies(ahead_s)
    sweep_during_a_commit(town, sweeper)


def test_sweep_while_the_clock_of_the_medium_is_wrong_deletes_no_young_blob(
    town: Town,
) -> None:
    sweeper = town.engine()

    def jump(name: str) -> None:
        town.server_ahead_s = 365 * DAY_S

    sweeper.blobs.before("put", jump)
    sweep_during_a_commit(town, sweeper)


def test_commit_that_was_suspended_for_a_day_is_refused_despite_a_wrong_date(
    town: Town,
) -> None:
    writer = town.engine()
    town.run(5)

    def suspend(name: str) -> None:
        if NAMES.is_commit(name):
            town.now += DAY_S
            town.server_ahead_s = -DAY_S

    writer.blobs.before("put", suspend)
    with pytest.raises(StoreError, match="12 hours"):
        writer.store(pack(1))


def test_sweep_spares_packs_that_only_others_name(town: Town) -> None:
    first = town.engine()
    first.store(pack(1))
    (commit,) = town.names("/inbox/")
    second = town.engine(opens=False)
    second.blobs.fail(
        "read", UnavailableError("down"), only=lambda name: name == commit
    )
    town.kill(first)
    town.now += 2 * DAY_S
    second.blobs.clear_faults()
    second.open()
    second.backend.opened_namespace(NAMESPACE).sweep()
    assert len(town.names("/packs/")) == 1


# Key


@pytest.fixture
def key(monkeypatch: pytest.MonkeyPatch) -> str:
    monkeypatch.setenv("PERSISTKV_TEST_KEY", "k" * 32)
    return "PERSISTKV_TEST_KEY"


def test_objects_without_the_key_do_not_exist(town: Town, key: str) -> None:
    first = town.engine(key_env=key)
    held = first.pack(1)
    first.store(held)
    names = first.backend.opened_namespace(NAMESPACE).names
    name = names.new_commit(random.Random(1))
    entry = index_format.PackEntry(pack(2).pack_id, bytes(NONCE_BYTES), b"", START)
    body = index_format.encode(Delta(packs=[entry]))
    town.server.put(name, [seal_object(name, body, PLAIN, NAMESPACE)])
    town.run(10)
    assert first.held() == {held.pack_id}
    second = town.engine(key_env=key)
    assert second.held() == {held.pack_id}
    table = table_of(second, held.pack_id)
    assert read_pack(second.backend, NAMESPACE, table) == payload_of(held)


def test_stores_with_and_without_key_share_a_medium(town: Town, key: str) -> None:
    plain = town.engine()
    plain.store(pack(1))
    town.run(10)
    keyed = Engine(town, SharedOptions(cache=False, key_env=key))
    town.engines.append(keyed)
    keyed.namespace = keyed.backend.open_namespace(sample_identity()).id
    held = keyed.pack(2)
    keyed.store(held)
    town.run(10)
    assert keyed.held() == {held.pack_id}
    assert plain.held() == {pack(1).pack_id}


# Cost


def test_idle_engine_sends_few_requests(town: Town) -> None:
    first = town.engine()
    first.store(pack(1))
    town.run(300)
    before = len(first.blobs.calls)
    town.run(HOUR_S)
    assert len(first.blobs.calls) - before < 250
    assert first.calls("put") < 12


def test_failing_medium_is_asked_less_and_less(town: Town) -> None:
    first = town.engine()
    first.store(pack(1))
    for method in ("put", "list", "delete"):
        first.blobs.fail(method, UnavailableError("down"))
    town.run(60)
    before = len(first.blobs.calls)
    town.run(HOUR_S)
    assert len(first.blobs.calls) - before < 1000


# Rebuild


def test_rebuild_names_packs_that_the_index_has_lost(town: Town) -> None:
    first = town.engine()
    large = pack(2, blocks=64, block_bytes=20_000)
    first.store(pack(1), large, pack(3))
    town.run(10)
    first.backend.commit(NAMESPACE, CommitBatch(deletions=[pack(3).pack_id]))
    tombstones = set(town.names("/inbox/"))
    town.kill(first)
    town.server.delete([name for name in town.names("/in") if name not in tombstones])
    town.server.put(f"{NAMES.packs}{'1' * 32}-{'2' * 32}", [b"no pack"])
    assert town.fresh() == set()
    second = town.engine()
    found = second.backend.rebuild_index(lambda done, total: None)
    assert found is not None
    assert (found.packs, found.blocks, found.namespaces) == (2, 66, 1)
    assert found.skipped == {"deleted packs": 1, "blobs without a readable table": 1}
    assert town.fresh() == {pack(1).pack_id, large.pack_id}
    assert read_pack(
        second.backend, NAMESPACE, table_of(second, large.pack_id)
    ) == payload_of(large)


def test_rebuild_of_whole_index_finds_nothing(town: Town) -> None:
    first = town.engine()
    first.store(pack(1))
    assert first.backend.rebuild_index(lambda done, total: None) is None


def test_rebuild_with_key_opens_sealed_tables(town: Town, key: str) -> None:
    first = town.engine(key_env=key)
    held = first.pack(1)
    first.store(held)
    town.kill(first)
    town.server.delete(town.names("/inbox/"))
    second = town.engine(key_env=key)
    assert second.held() == set()
    second.backend.rebuild_index(lambda done, total: None)
    table = table_of(second, held.pack_id)
    assert read_pack(second.backend, NAMESPACE, table) == payload_of(held)
