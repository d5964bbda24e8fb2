"""A store on each driver: a read returns the stored bytes or reports a miss."""

from __future__ import annotations

import random
import time
from collections.abc import Callable
from contextlib import closing
from pathlib import Path

import numpy as np
import pytest

from persistkv.errors import ConfigurationError, CorruptPackError, IdentityMismatchError
from persistkv.memory.rows import Rows
from persistkv.storage import open_backend
from persistkv.storage.backend import CommitBatch, ReadSpan
from persistkv.storage.format.pack import PackedKeys, PackTable
from persistkv.storage.identity import Identity
from persistkv.storage.store.blocking import BlockingStore
from persistkv.testing.conformance.suite import tables
from tests.memory_store import payload
from tests.storage.stores import end, inject_faults, is_due, manifests, refill

Keys = Callable[..., list[bytes]]
OpenStore = Callable[..., BlockingStore]


@pytest.mark.parametrize("codec", ["raw", "zstd", "zstd:3"])
@pytest.mark.parametrize("count", [1, 3, 16, 64])
def test_store_round_trip_returns_stored_bytes(
    store_url: str,
    open_store: OpenStore,
    keys: Keys,
    codec: str,
    count: int,
) -> None:
    store = open_store(store_url, codec=codec)
    store.rows.array[:, ::3] = 0  # so that zstd can compress the blocks
    names, places = keys(count), list(range(count))[::-1]
    # 64 blocks are written directly from the rows
    assert store.put("r", names, places, range(count)) is (count < 64)
    store.end_request(end("r", names))
    store.flush()
    before = refill(store)
    assert store.read(names, range(count)) == []
    assert (store.rows.array[:count] == before[places]).all()
    assert store.counters.stored_blocks == store.counters.loaded_blocks == count


def test_read_blocks_of_several_groups_writes_only_their_ranges(
    store_url: str,
    open_store: OpenStore,
    keys: Keys,
    make_rows: Callable[..., Rows],
) -> None:
    rows = make_rows(64, 12288, (((0, 4096), (8192, 100)), ((4096, 4096),)))
    store = open_store(store_url, rows)
    full, window = keys(20, 0), keys(20, 1)
    store.put("r", full + window, list(range(20)) * 2, list(range(20)) * 2)
    store.flush()
    before = refill(store)
    wanted = [full[7], window[19], full[0], window[3]]
    assert store.read(wanted, [40, 40, 41, 42]) == []
    assert (rows.array[40, :4096] == before[7, :4096]).all()
    assert (rows.array[40, 8192:8292] == before[7, 8192:8292]).all()
    assert (rows.array[40, 4096:8192] == before[19, 4096:8192]).all()
    assert not rows.array[40, 8292:].any(), (
        "what is no part of the group must not be touched"
    )
    assert (rows.array[42, 4096:8192] == before[3, 4096:8192]).all()
    assert not rows.array[42, :4096].any()


def test_put_blocks_are_found_only_after_flush(
    store_url: str,
    open_store: OpenStore,
    keys: Keys,
) -> None:
    store = open_store(store_url)
    small, large = keys(2), keys(64)
    assert store.put("r", small, [0, 1], [0, 1])
    assert not store.put("r", large, range(64), None)
    assert not any(map(store.contains, small + large))
    assert store.store.missing(small) == []
    assert store.store.missing(large) == large
    store.flush()
    assert all(map(store.contains, small + large))
    assert sorted(store.take_report().stored) == sorted(small + large)


def test_put_staged_blocks_survive_overwritten_rows(
    store_url: str,
    open_store: OpenStore,
    keys: Keys,
) -> None:
    store = open_store(store_url)
    names = keys(3)
    store.put("r", names, [5, 6, 7], [0, 1, 2])
    before = refill(store)
    store.flush()
    assert store.read(names, [0, 1, 2]) == []
    assert (store.rows.array[:3] == before[5:8]).all()


def test_put_held_or_pending_block_is_not_written_again(
    store_url: str,
    open_store: OpenStore,
    keys: Keys,
) -> None:
    store = open_store(store_url)
    names = keys(64)
    store.put("a", names, range(64), None)
    assert not store.put("b", names[:2], [0, 1], None), (
        "its rows are needed until the write has succeeded"
    )
    store.flush()
    assert store.put("c", names + names, list(range(64)) * 2, None)
    store.flush()
    assert store.counters.stored_blocks == 64
    assert store.counters.held_blocks == 2 + 128


def test_put_single_blocks_of_request_become_one_frame(
    store_url: str,
    open_store: OpenStore,
    keys: Keys,
) -> None:
    store = open_store(store_url)
    names = keys(5)
    for depth, name in enumerate(names):
        store.put("r", [name], [depth], [depth])
    store.end_request(end("r", names))
    store.flush()
    (pack,) = store.view.backend.tables(store.namespace, store.index.pack_ids())
    assert pack.keys.unpack() == names
    assert len(pack.frames) == 1


def test_put_same_prefix_in_other_steps_gives_same_packs(
    open_store: OpenStore,
    keys: Keys,
    make_rows: Callable[..., Rows],
) -> None:
    names = keys(96)
    cut = []
    for runs in ([range(96)], [range(32), range(32, 96)]):
        store = open_store("memory://x", make_rows(96, 1 << 20))
        for run in runs:
            store.put("r", [names[i] for i in run], list(run), list(run))
        store.flush()
        cut.append(
            {
                table.pack_id
                for table in store.view.backend.changes(store.namespace, None).added
            }
        )
    assert cut[0] == cut[1]
    assert len(cut[0]) == 3


def test_end_request_manifest_names_whole_context(
    store_url: str,
    open_store: OpenStore,
    keys: Keys,
) -> None:
    store = open_store(store_url)
    names = keys(4)
    store.put("a", names[:2], [0, 1], [0, 1])
    store.put("b", names, range(4), range(4))
    store.end_request(end("b", names, tokens=70, labels={"user": "x"}))
    store.flush()
    assert store.take_report().persisted == [("b", True)]
    (manifest,) = manifests(store)
    assert (manifest.id, manifest.tokens, manifest.blocks, manifest.labels) == (
        "manifest-b",
        70,
        4,
        {"user": "x"},
    )
    assert manifest.raw_bytes == 4 * (64 << 10)
    (chain,) = store.view.backend.manifest_keys(store.namespace, ["manifest-b"])[0] or [
        PackedKeys()
    ]
    assert chain.unpack() == names
    assert all(map(store.contains, names)), (
        "what another request staged is written with it"
    )


def test_end_request_missing_block_shortens_manifest(
    store_url: str,
    open_store: OpenStore,
    keys: Keys,
) -> None:
    store = open_store(store_url)
    names = keys(4)
    store.put("r", [names[0], names[1], names[3]], [0, 1, 3], [0, 1, 3])
    store.end_request(end("r", names, tokens=64))
    store.end_request(end("nothing", keys(2)))
    store.end_request(end("empty", []))
    store.flush()
    assert dict(store.take_report().persisted) == {
        "r": False,
        "nothing": False,
        "empty": True,
    }
    (manifest,) = manifests(store)
    assert (manifest.tokens, manifest.group_blocks) == (32, (2,))


def test_seconds_to_due_age_or_staging_bound_makes_blocks_due(
    open_store: OpenStore,
    keys: Keys,
) -> None:
    aged = open_store("memory://x", max_age_s=0.0)
    aged.put("r", keys(1), [0], None)
    assert is_due(aged)
    assert aged.store.committer.seconds_to_due() == 0.0
    bounded = open_store("memory://y", max_age_s=1e6, staging_bytes=512 << 10)
    bounded.put("r", keys(1), [0], None)
    assert not is_due(bounded)
    bounded.put("s", keys(1), [1], None)
    bounded.work()
    assert bounded.store.queue.staging.num_bytes == 0
    assert len(bounded.index) == 2


def test_put_and_read_invalid_arguments_raise_and_stage_nothing(
    open_store: OpenStore,
    keys: Keys,
) -> None:
    store = open_store("memory://x")
    with pytest.raises(ValueError, match="rows 0 to 64"):
        store.put("r", keys(2), [0, 64], None)
    with pytest.raises(ValueError, match="key of group 3"):
        store.put("r", keys(1, group=3), [0], None)
    with pytest.raises(ValueError, match="2 keys for 1 rows"):
        store.put("r", keys(2), [0], None)
    with pytest.raises(ValueError, match="2 rows and 3 depths"):
        store.put("r", keys(2), [0, 1], [0, 1, 2])
    with pytest.raises(ValueError, match="rows 99 to 99"):
        store.read(keys(1), [99])
    assert not is_due(store)


def test_store_reopened_finds_all_blocks(
    open_store: OpenStore,
    keys: Keys,
    tmp_path: Path,
) -> None:
    url = f"lmdb://{tmp_path}/store"
    first = open_store(url)
    names = keys(64)
    first.put("r", names, range(64), range(64))
    first.end_request(end("r", names))
    first.close()
    again = open_store(url)
    assert all(map(again.contains, names))
    before = refill(again)
    assert again.read(names, range(64)) == []
    assert (again.rows.array == before).all()
    assert again.store.notice == ""


def test_tick_applies_stores_and_deletions_of_other_handles(
    open_store: OpenStore,
    keys: Keys,
    tmp_path: Path,
) -> None:
    url = f"lmdb://{tmp_path}/store"
    writer = open_store(url)
    old, names, kept = keys(8), keys(64), keys(8)
    writer.put("old", old, range(8), None)
    writer.flush()
    reader = open_store(url, refresh_s=0.0)
    for number, some in enumerate((names, kept)):
        writer.put(f"r{number}", some, range(len(some)), None)
        writer.flush()
    reader.work()
    assert sorted(reader.take_report().stored) == sorted(names + kept)

    def delete(some: list[bytes]) -> None:
        packs = writer.index.candidates(some[0])
        batch = CommitBatch(deletions=packs)
        writer.view.backend.commit(writer.namespace, batch)
        reader.work()

    delete(names)
    report = reader.take_report()
    assert (sorted(report.removed), report.lost) == (sorted(names), False)
    assert not any(map(reader.contains, names))
    assert reader.read(names, range(64)) == names
    delete(old)
    assert reader.take_report().lost, (
        "its keys, held at the opening, are not known here"
    )


def test_commit_to_namespace_ended_by_other_handle_begins_it_again(
    open_store: OpenStore,
    keys: Keys,
    tmp_path: Path,
) -> None:
    url = f"lmdb://{tmp_path}/store"
    ours, theirs = open_store(url), open_store(url)
    old, new, later = keys(4), keys(4), keys(4)
    ours.put("old", old, range(4), range(4))
    ours.flush()
    theirs.refresh()
    held = theirs.view.backend.changes(theirs.namespace, None).added
    theirs.view.backend.commit(
        theirs.namespace, CommitBatch(deletions=[table.pack_id for table in held])
    )
    assert list(theirs.view.backend.namespaces()) == []

    ours.put("new", new, range(4), range(4))
    ours.end_request(end("new", new))
    ours.flush()
    assert [ours.contains(key) for key in old + new] == [False] * 4 + [True] * 4
    assert ours.read(old + new, range(8)) == old
    assert ours.counters.dropped_blocks == 0
    theirs.put("later", later, range(4), range(4))
    theirs.flush()
    ours.refresh()
    for store in (ours, theirs):
        assert [store.contains(key) for key in old + new + later] == [False] * 4 + [
            True
        ] * 8
    assert [head.id for head in manifests(theirs)] == ["manifest-new"]


def test_commit_blocks_stored_by_others_are_not_written_again(
    open_store: OpenStore,
    keys: Keys,
    tmp_path: Path,
) -> None:
    url = f"lmdb://{tmp_path}/store"
    one, two = open_store(url), open_store(url)
    names = keys(64)
    one.put("r", names, range(64), range(64))
    two.put("r", names, range(64), range(64))
    one.flush()
    two.flush()
    assert all(map(two.contains, names))
    assert two.counters.stored_blocks == 0
    assert one.view.backend.stats().packs == 1


def test_commit_after_commits_of_others_finds_their_blocks(
    open_store: OpenStore,
    keys: Keys,
    tmp_path: Path,
) -> None:
    """The last retry commits regardless of other commits, so its cursor may be newer than commits
    not yet applied."""
    url = f"lmdb://{tmp_path}/store"
    ours, theirs = open_store(url), open_store(url)
    foreign, stored = keys(3), list[bytes]()

    def commit_before(namespace: bytes, batch: CommitBatch) -> None:
        if foreign:
            stored.append(foreign.pop())
            theirs.put("r", stored[-1:], [0], None)
            theirs.flush()

    inject_faults(ours).before("commit", commit_before)
    ours.put("r", mine := keys(64), range(64), None)
    ours.flush()
    ours.refresh()
    assert stored
    assert all(map(ours.contains, mine + stored))


def test_put_full_staging_leaves_blocks_in_their_rows(
    open_store: OpenStore,
    keys: Keys,
) -> None:
    store = open_store("memory://x", staging_bytes=8 * (64 << 10), max_age_s=1e6)
    names = [keys(4) for _ in range(3)]
    free = [
        store.put("r", names[job], range(4 * job, 4 * job + 4), None)
        for job in range(3)
    ]
    assert free == [True, False, False], "what has no room is written from its rows"
    assert store.store.queue.staging.num_bytes == 4 * (64 << 10)
    assert not store.store.queue.has_room
    store.flush()
    assert store.store.queue.has_room
    assert all(store.contains(key) for job in names for key in job)


def test_store_of_another_model_notice_is_one_short_line(
    open_store: OpenStore,
    keys: Keys,
    tmp_path: Path,
) -> None:
    url = f"lmdb://{tmp_path}/store"
    config = {f"field{number}": number for number in range(50)}
    first = {"model_name": "/models/gpt2", "weights": "w", "config": config}
    store = open_store(url, identity=Identity.of(first))
    store.put("r", keys(1), [0], None)
    store.flush()
    second = {
        "model_name": "/models/llama",
        "weights": "x" * 80,
        "config": {"field0": 1},
    }
    notice = open_store(url, identity=Identity.of(second)).store.notice
    shown = "(gpt2: other weights, config.field0, config.field1 and 48 more)"
    assert notice == (
        f"{url} holds nothing for this model yet, only for another model {shown}; "
        f"see persistkv why"
    ), notice


def test_store_other_identity_misses_and_notice_names_difference(
    open_store: OpenStore,
    keys: Keys,
    tmp_path: Path,
) -> None:
    url = f"lmdb://{tmp_path}/store"
    store = open_store(url)
    names = keys(2)
    store.put("r", names, [0, 1], None)
    store.flush()
    other = Identity.of({"weights": "w", "dtype": "bfloat16"})
    with pytest.raises(
        IdentityMismatchError, match="dtype: 'bfloat16' here, 'float32' stored"
    ):
        open_store(url, identity=other, strict_identity=True)
    assert len(list(store.view.backend.namespaces())) == 1, "a refusal creates nothing"
    stranger = open_store(url, identity=other)
    assert "other dtype); see persistkv why" in stranger.store.notice
    assert not any(map(stranger.contains, names))
    stranger.put("r", names, [0, 1], None)
    stranger.flush()
    assert open_store(url, identity=other).store.notice == ""


def test_store_unknown_codec_raises_and_creates_no_namespace(
    open_store: OpenStore,
    tmp_path: Path,
) -> None:
    url = f"lmdb://{tmp_path}/store"
    with pytest.raises(ConfigurationError, match="codec: 'lz5'"):
        open_store(url, codec="lz5")
    with closing(open_backend(url)) as backend:
        assert list(backend.namespaces()) == []


def test_read_adjacent_frames_use_one_span(open_store: OpenStore, keys: Keys) -> None:
    store = open_store("memory://x", io_threads=1)
    names = keys(32)
    store.put("r", names, range(32), None)
    store.flush()
    seen: list[ReadSpan] = []
    inject_faults(store).before("read", lambda namespace, spans: seen.extend(spans))
    assert store.read(names, range(32)) == []
    assert len(seen) == 1
    assert sum(map(len, seen[0].buffers)) == 32 * (64 << 10)


def test_stored_pack_with_table_parses_without_catalogue(
    open_store: OpenStore,
    keys: Keys,
) -> None:
    store = open_store("memory://x", codec="zstd")
    names = keys(8)
    store.put("r", names, range(8), range(8))
    store.flush()
    ((name, held),) = tables(store.view.backend, store.namespace).items()
    stored = payload(store.view.backend, store.namespace, name)
    table = PackTable.parse(stored + held.encode())
    assert table.keys.unpack() == names
    assert [frame.depth for frame in table.frames] == [0]
    with pytest.raises(CorruptPackError):
        PackTable.parse(stored)


def test_durability_interval_copies_blocks_and_flush_commits_once(
    store_url: str,
    open_store: OpenStore,
    keys: Keys,
) -> None:
    """Large jobs are copied, too: their rows are free at once, and their blocks become durable with
    the flush."""
    store = open_store(
        store_url, durability="interval:1h", max_age_s=0.0, refresh_s=1e6
    )
    large, small = keys(64), keys(3)
    assert store.put("a", large, range(64), range(64))
    assert store.put("b", small, [0, 1, 2], None)
    store.end_request(end("a", large))
    before = refill(store)
    assert not is_due(store)
    assert store.store.committer.seconds_to_due() != 0
    store.work()
    assert not any(map(store.contains, large + small))
    assert store.take_report().persisted == []
    store.flush()
    assert store.counters.commits == 1, "one transaction for all"
    assert all(map(store.contains, large + small))
    assert store.take_report().persisted == [("a", True)]
    assert store.read(large, range(64)) == []
    assert (store.rows.array == before).all()


@pytest.mark.parametrize("use", ["blocks", "request end"])
def test_durability_interval_elapsed_work_commits(
    open_store: OpenStore,
    keys: Keys,
    monkeypatch: pytest.MonkeyPatch,
    use: str,
) -> None:
    store = open_store("memory://x", durability="interval:1h")
    names = keys(2)
    if use == "blocks":
        store.put("r", names, [0, 1], None)
    else:
        store.end_request(end("r", names))
    assert store.store.committer.seconds_to_due() != 0.0
    now = time.monotonic
    monkeypatch.setattr(time, "monotonic", lambda: now() + 3601)
    assert store.store.committer.seconds_to_due() == 0.0
    store.work()
    assert store.counters.commits == 1
    assert not is_due(store)


def test_durability_interval_full_staging_commits_early(
    open_store: OpenStore,
    keys: Keys,
    make_rows: Callable[..., Rows],
) -> None:
    store = open_store(
        "memory://x",
        make_rows(64, 1 << 20),
        durability="interval:1h",
        staging_bytes=64 << 20,
    )
    names = keys(48)
    assert store.put("r", names[:8], range(8), range(8))
    assert not is_due(store)
    assert store.put("r", names[8:16], range(8, 16), range(8, 16))
    assert is_due(store), "half of what may be staged"
    assert store.put("r", names[16:32], range(16, 32), range(16, 32))
    assert not store.put("r", names[32:], range(32, 48), range(32, 48)), (
        "no room is left: written from the rows"
    )
    store.work()
    assert all(map(store.contains, names))
    assert store.store.queue.staging.num_bytes == 0


def test_begin_read_rows_do_not_match_distinct_keys_raises(
    store_url: str,
    open_store: OpenStore,
    keys: Keys,
    make_rows: Callable[..., Rows],
) -> None:
    store = open_store(store_url, make_rows(64, 16 << 10))
    names = keys(16)
    store.put("r", names, range(16), range(16))
    store.flush()
    before = store.rows.array.copy()
    for some, block_ids in (
        (names, range(32, 49)),
        (names, range(32, 47)),
        (names[::-1], range(32, 49)),
        ([*names, names[5]], range(32, 49)),
    ):
        with pytest.raises(
            ValueError, match=f"16 of them distinct, for {len(block_ids)} rows"
        ):
            store.read(some, block_ids)
    assert np.array_equal(store.rows.array, before)


def test_read_any_blocks_into_any_rows_returns_stored_bytes(
    store_url: str,
    open_store: OpenStore,
    keys: Keys,
    make_rows: Callable[..., Rows],
) -> None:
    """Read whole and partial frames into adjacent and scattered rows, from raw and encoded
    packs."""
    draw = np.random.default_rng(11)
    for codec, ranges in (
        ("raw", ()),
        ("zstd", ()),
        ("raw", (((0, 4096), (8192, 100)),)),
        ("zstd", (((0, 100),),)),
    ):
        store = open_store(
            store_url.replace("?", f"-{codec}{len(ranges)}?"),
            make_rows(256, 16 << 10, ranges),
            codec=codec,
        )
        store.rows.array[:, ::2] = 0
        names = keys(100)
        store.put("r", names, range(100), range(100))
        store.flush()
        before = store.rows.array.copy()
        for count in (1, 64, 100):
            store.rows.array[:] = 0
            wanted = (
                list(range(count))
                if count == 100
                else list(draw.permutation(100)[:count])
            )
            places = (
                list(range(count))
                if draw.integers(2)
                else list(draw.permutation(256)[:count])
            )
            assert store.read([names[block] for block in wanted], places) == []
            expected = np.zeros_like(before)
            for offset, size in store.rows.layout.groups[0].ranges:
                expected[places, offset : offset + size] = before[
                    wanted, offset : offset + size
                ]
            assert (store.rows.array == expected).all()


@pytest.mark.parametrize(
    "order", ["as stored", "packs in turn", "reversed", "shuffled", "packs swapped"]
)
def test_read_long_runs_in_any_order_fill_the_right_rows(
    open_store: OpenStore,
    store_url: str,
    keys: Keys,
    order: str,
) -> None:
    """Keys of two packs, and four keys that no pack holds."""
    store, names = open_store(store_url), keys(52)
    positions = {
        "as stored": list(range(52)),
        "packs in turn": [first + 24 * pack for first in range(24) for pack in (0, 1)]
        + [48, 49, 50, 51],
        "reversed": list(range(52))[::-1],
        "shuffled": random.Random(0).sample(range(52), 52),
        "packs swapped": [*range(24, 48), 48, 49, *range(24), 50, 51],
    }[order]
    for start in (0, 24):
        store.put(
            "r",
            names[start : start + 24],
            range(start, start + 24),
            range(start, start + 24),
        )
        store.flush()
    before = refill(store)
    failed = store.read([names[position] for position in positions], range(52))
    assert sorted(failed) == sorted(names[48:])
    for row, position in enumerate(positions):
        if position < 48:
            assert (store.rows.array[row] == before[position]).all()
