"""A store that is full, or whose blocks expire."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path
from typing import Unpack

import pytest

from persistkv.memory.rows import Rows
from persistkv.storage.records import RequestEnd
from persistkv.storage.store.blocking import BlockingStore
from tests.storage.stores import StoreSettings, end, manifests

Keys = Callable[..., list[bytes]]
OpenStore = Callable[..., BlockingStore]


def small_store(
    tmp_path: Path,
    open_store: OpenStore,
    make_rows: Callable[..., Rows],
    **options: Unpack[StoreSettings],
) -> BlockingStore:
    """Open a store of 8 MiB on LMDB, with rows of 64 KiB."""
    return open_store(
        f"lmdb://{tmp_path}/store?capacity=8MiB", make_rows(64), **options
    )


def store_request(
    store: BlockingStore,
    request: str,
    names: list[bytes],
    *,
    close: bool = True,
) -> None:
    store.put(request, names, range(len(names)), range(len(names)))
    if close:
        store.end_request(end(request, names))
    store.flush()


def test_store_full_evicts_oldest_requests_first(
    open_store: OpenStore,
    keys: Keys,
    make_rows: Callable[..., Rows],
    tmp_path: Path,
) -> None:
    store = small_store(tmp_path, open_store, make_rows)
    requests = [keys(16) for _ in range(20)]
    for number, names in enumerate(requests):
        store_request(store, f"r{number}", names)
    held = [all(map(store.contains, names)) for names in requests]
    assert held == sorted(held), "the oldest go first"
    assert 4 <= sum(held) < 20
    report = store.take_report()
    gone = [
        name
        for names, there in zip(requests, held, strict=True)
        if not there
        for name in names
    ]
    assert sorted(report.removed) == sorted(gone)
    assert store.counters.evicted_blocks == len(gone)
    assert store.counters.dropped_blocks == 0
    assert {manifest.id for manifest in manifests(store)} == {
        f"manifest-r{number}" for number, there in enumerate(held) if there
    }
    assert store.read(requests[-1], range(16)) == []


@pytest.mark.parametrize("use", ["read", "touch", "offer", "another request"])
def test_store_full_keeps_used_blocks(
    open_store: OpenStore,
    keys: Keys,
    make_rows: Callable[..., Rows],
    tmp_path: Path,
    use: str,
) -> None:
    store = small_store(tmp_path, open_store, make_rows)
    kept = keys(16)
    store_request(store, "kept", kept)
    for number in range(20):
        if use == "read":
            assert store.read(kept, range(16)) == []
        elif use == "touch":
            store.store.touch([*kept, *keys(3)])
        elif use == "offer":
            store.put("again", kept, range(16), range(16))
        else:
            store.end_request(end(f"again{number}", kept))
        store_request(store, f"r{number}", keys(16))
    assert all(map(store.contains, kept))
    assert store.counters.evicted_blocks


def test_store_full_growing_context_keeps_its_prefix(
    open_store: OpenStore,
    keys: Keys,
    make_rows: Callable[..., Rows],
    tmp_path: Path,
) -> None:
    """Each manifest touches the whole chain, so a prefix is never evicted before the blocks that
    depend on it."""
    store = small_store(tmp_path, open_store, make_rows)
    context: list[bytes] = []
    for turn in range(8):
        fresh = keys(4)
        store.put("chat", fresh, range(4), range(len(context), len(context) + 4))
        context += fresh
        store.end_request(
            RequestEnd("chat", f"turn{turn}", (context[:],), 16 * len(context), 16)
        )
        store.flush()
        store_request(store, f"other{turn}", keys(16))
        assert all(map(store.contains, context))
    for number in range(12):
        store_request(store, f"r{number}", keys(16))
        held = list(map(store.contains, context))
        assert held == sorted(held, reverse=True), "a hole in front of what is held"
    assert not any(map(store.contains, context))


def test_touch_without_stores_is_committed_when_due(
    open_store: OpenStore,
    keys: Keys,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    store = open_store(f"lmdb://{tmp_path}/store", refresh_s=1e6)
    names = keys(16)
    store_request(store, "r", names)
    commits = store.counters.commits
    now = time.monotonic
    # no use becomes due during the test
    monkeypatch.setattr(time, "monotonic", lambda: now() - 1000)
    store.store.touch(names)
    due = store.store.committer.seconds_to_due()
    assert due is not None
    assert 900 < due <= 1002
    store.work()
    assert store.counters.commits == commits
    monkeypatch.setattr(time, "monotonic", lambda: now() + 3)
    assert store.store.committer.seconds_to_due() == 0.0
    store.work()
    assert store.counters.commits == commits + 1
    store.work()
    assert store.counters.commits == commits + 1


def test_tick_idle_store_expires_old_blocks(
    open_store: OpenStore,
    keys: Keys,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """In a local store: the background work of a shared one expires its content."""
    store = open_store(f"lmdb://{tmp_path}/store?ttl=1h")
    names = keys(16)
    store_request(store, "r", names)
    now, since_boot = time.time, time.clock_gettime
    monkeypatch.setattr(time, "time", lambda: now() + 7200)
    monkeypatch.setattr(time, "clock_gettime", lambda clock: since_boot(clock) + 7200)
    monotonic = time.monotonic
    monkeypatch.setattr(time, "monotonic", lambda: monotonic() + 31)
    store.work()
    assert not any(map(store.contains, names))
    assert store.take_report().removed == names


def test_tick_blocks_evicted_by_another_handle_are_removed(
    open_store: OpenStore,
    keys: Keys,
    make_rows: Callable[..., Rows],
    tmp_path: Path,
) -> None:
    one = small_store(tmp_path, open_store, make_rows)
    two = small_store(tmp_path, open_store, make_rows, refresh_s=0.0)
    names = keys(16)
    store_request(one, "mine", names)
    two.work()
    assert all(map(two.contains, names))
    for number in range(12):
        store_request(one, f"r{number}", keys(16))
    two.work()
    assert not any(map(two.contains, names))
    assert sorted(two.index.pack_ids()) == sorted(one.index.pack_ids())
    assert len(two.index) == len(one.index)


def test_store_full_request_larger_than_store_drops_only_its_blocks(
    open_store: OpenStore,
    keys: Keys,
    make_rows: Callable[..., Rows],
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
) -> None:
    store = open_store(f"lmdb://{tmp_path}/store?capacity=2MiB", make_rows(64))
    kept, large = keys(4), keys(64)
    store_request(store, "small", kept)
    for number in range(3):
        store_request(store, f"large{number}", large)
    assert store.counters.dropped_blocks == 3 * 64
    assert all(map(store.contains, kept))
    assert not any(map(store.contains, large))
    assert sum("the store is full" in line for line in caplog.messages) == 1, (
        "one warning a minute"
    )
    assert dict(store.take_report().persisted) == {
        "small": True,
        "large0": False,
        "large1": False,
        "large2": False,
    }
