"""A store whose backend fails or whose bytes are damaged: reads miss, and never return wrong
bytes."""

from __future__ import annotations

import logging
from collections.abc import Callable
from pathlib import Path
from typing import NoReturn

import pytest

from persistkv.errors import ConfigurationError, StoreError, StoreFullError
from persistkv.memory.rows import Rows
from persistkv.storage.backend import Backend, CommitBatch
from persistkv.storage.store.blocking import BlockingStore
from persistkv.testing import FaultyBackend
from persistkv.testing.conformance.suite import tables
from tests.memory_store import set_payload, swap_payloads
from tests.storage.stores import end, flip_reads, inject_faults, manifests

Keys = Callable[..., list[bytes]]
OpenStore = Callable[..., BlockingStore]
FaultyStore = tuple[BlockingStore, FaultyBackend[Backend]]


@pytest.fixture
def faulty_store(open_store: OpenStore, store_url: str) -> FaultyStore:
    store = open_store(store_url)
    return store, inject_faults(store)


def test_commit_store_full_drops_only_its_blocks(
    faulty_store: FaultyStore,
    keys: Keys,
    caplog: pytest.LogCaptureFixture,
) -> None:
    store, backend = faulty_store
    backend.fail("commit", StoreFullError("no room"), times=1)
    lost, kept = keys(64), keys(2)
    store.put("r", lost, range(64), None)
    with caplog.at_level(logging.WARNING):
        store.flush()
    assert "the store is full (no room)" in caplog.text
    assert store.store.missing(lost) == lost
    assert store.counters.dropped_blocks == 64
    assert store.counters.dropped_bytes == 64 * (64 << 10)
    store.put("r", kept, [0, 1], None)
    store.end_request(end("r", kept))
    store.flush()
    assert all(map(store.contains, kept))
    store.put("r", lost, range(64), None)
    store.flush()
    assert all(map(store.contains, lost)), "what was dropped can be stored later"


def test_commit_store_full_for_whole_batch_commits_packs_one_by_one(
    faulty_store: FaultyStore,
    keys: Keys,
) -> None:
    store, backend = faulty_store

    def refuse_two(namespace: bytes, batch: CommitBatch) -> None:
        if len(batch.packs) > 1:
            raise StoreFullError("too many packs")

    backend.before("commit", refuse_two)
    first, second = keys(64), keys(64)
    store.put("a", first, range(64), None)
    store.put("b", second, range(64), None)
    store.end_request(end("a", first))
    store.flush()
    assert all(map(store.contains, first + second))
    assert [manifest.id for manifest in manifests(store)] == ["manifest-a"]


def test_read_backend_error_misses_and_deletes_nothing(
    faulty_store: FaultyStore,
    keys: Keys,
) -> None:
    store, backend = faulty_store
    names = keys(64)
    store.put("r", names, range(64), None)
    store.flush()
    backend.fail("read", StoreError("the disk does not answer"))
    assert store.read(names, range(64)) == names
    backend.clear_faults()
    assert store.read(names, range(64)) == []


@pytest.mark.parametrize("codec", ["raw", "zstd"])
def test_read_flipped_byte_misses_and_deletes_pack(
    open_store: OpenStore,
    store_url: str,
    keys: Keys,
    codec: str,
    caplog: pytest.LogCaptureFixture,
) -> None:
    store = open_store(store_url, codec=codec, io_threads=1)
    store.rows.array[:, ::2] = 0
    backend = inject_faults(store)
    names = keys(32)
    store.put("r", names, range(32), range(32))
    store.flush()
    store.take_report()
    flip_reads(backend)
    with caplog.at_level(logging.WARNING):
        failed = store.read(names, range(32))
    backend.clear_faults()
    assert failed, "a flipped byte was served"
    assert set(failed) < set(names)
    assert "do not verify" in caplog.text
    assert store.counters.verification_failures == 1
    assert sorted(store.take_report().removed) == sorted(names)
    assert not any(map(store.contains, names))
    store.put("r", names, range(32), range(32))
    store.flush()
    assert store.read(names, range(32)) == [], "the same blocks can be stored anew"


def test_read_pack_replaced_by_another_store_misses_and_keeps_pack(
    open_store: OpenStore,
    keys: Keys,
    tmp_path: Path,
) -> None:
    """Equal keys give equal pack IDs; only the pack's table shows that the bytes differ."""
    url = f"lmdb://{tmp_path}/store"
    ours, theirs = open_store(url), open_store(url)
    kept, names = keys(1), keys(64)
    for request in (kept, names):
        ours.put("r", request, range(len(request)), None)
        ours.flush()
    theirs.refresh()
    held = theirs.view.backend.changes(theirs.namespace, None).added
    tables = [table for table in held if kept[0] not in table.keys.unpack()]
    theirs.view.backend.commit(
        theirs.namespace, CommitBatch(deletions=[table.pack_id for table in tables])
    )
    theirs.refresh()
    theirs.rows.array[:] ^= 0xFF
    theirs.put("r", names, range(64), None)
    theirs.flush()
    ours.take_report()
    assert ours.read(names, range(64)), "our table is of the old bytes"
    assert all(map(theirs.contains, names))
    assert theirs.read(names, range(64)) == []
    assert ours.read(names, range(64)) == [], "the new table was learnt"
    report = ours.take_report()
    assert set(names) <= set(report.stored)


def test_read_pack_without_payload_misses_and_can_be_stored_again(
    open_store: OpenStore,
    keys: Keys,
) -> None:
    store = open_store("memory://x")
    names = keys(64)
    for _ in range(2):
        store.put("r", names, range(64), None)
        store.flush()
        assert store.read(names, range(64)) == []
        (name,) = tables(store.view.backend, store.namespace)
        set_payload(store.view.backend, store.namespace, name, b"")
        assert store.read(names, range(64)) == names
        assert not any(map(store.contains, names))


def test_read_unknown_codec_misses_and_keeps_pack(
    open_store: OpenStore,
    keys: Keys,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    store = open_store("memory://x", codec="zstd")
    store.rows.array[:] = 0
    names = keys(64)
    store.put("r", names, range(64), None)
    store.flush()

    def unknown(text: str) -> NoReturn:
        raise ConfigurationError("codec", text, "one that this release knows")

    with monkeypatch.context() as patch:
        patch.setattr("persistkv.storage.format.codec.parse_codec", unknown)
        assert store.read(names, range(64)) == names
    assert store.counters.verification_failures == 0
    assert store.read(names, range(64)) == []


def test_commit_store_full_repeatedly_warns_once(
    faulty_store: FaultyStore,
    keys: Keys,
    caplog: pytest.LogCaptureFixture,
) -> None:
    store, backend = faulty_store
    backend.fail("commit", StoreFullError("no room"), times=10)
    for _ in range(5):
        store.put("r", keys(64), range(64), None)
        store.flush()
    assert caplog.text.count("the store is full") == 1
    assert store.counters.dropped_blocks == 5 * 64


def test_read_swapped_payloads_miss(open_store: OpenStore, keys: Keys) -> None:
    """Swap the payloads of two packs of equal size: each frame is intact, but in the wrong pack."""
    store = open_store("memory://x")
    one, two = keys(64), keys(64)
    store.put("a", one, range(64), None)
    store.rows.array[:] ^= 0xFF
    store.flush()
    store.rows.array[:] ^= 0xFF
    store.put("b", two, range(64), None)
    store.flush()
    swap_payloads(
        store.view.backend,
        store.namespace,
        *tables(store.view.backend, store.namespace),
    )
    assert store.read(one, range(64)) == one
    assert store.read(two, range(64)) == two


def test_read_pack_of_other_block_size_misses(
    open_store: OpenStore,
    keys: Keys,
    make_rows: Callable[..., Rows],
    tmp_path: Path,
) -> None:
    url = f"lmdb://{tmp_path}/store"
    store = open_store(url)
    names = keys(4)
    store.put("r", names, range(4), None)
    store.flush()
    other = open_store(url, make_rows(8, 4096))
    assert other.contains(names[0])
    assert other.read(names, range(4)) == names
