"""An engine's store on a shared medium: release of rows, age of packs, the file of its index."""

from __future__ import annotations

import time

import numpy as np

from persistkv.base import make_offload_key
from persistkv.config import GroupLayout, RowLayout
from persistkv.memory.rows import Rows
from persistkv.storage.records import RequestEnd, StoreOptions
from persistkv.storage.store.blocking import BlockingStore
from persistkv.testing.conformance.suite import sample_identity
from persistkv.testing.faulty import FaultyBackend
from tests.storage.shared.town import Engine, Town, pack

BLOCK = 256 << 10
PATIENCE_S = 60


def make_keys(count: int, first: int = 0) -> list[bytes]:
    return [
        bytes(make_offload_key((first + number).to_bytes(32, "little"), 0))
        for number in range(count)
    ]


def make_rows(count: int) -> Rows:
    filled = np.random.default_rng(7).integers(0, 256, count * BLOCK, dtype=np.uint8)
    return Rows(
        memoryview(bytearray(filled.tobytes())),
        RowLayout(BLOCK, (GroupLayout(((0, BLOCK),)),)),
    )


def open_on(engine: Engine, rows: Rows, options: StoreOptions) -> BlockingStore:
    return BlockingStore(
        engine.backend, sample_identity(), rows, options, url="shared://test"
    )


def test_put_copies_rows_and_releases_them_before_upload(town: Town) -> None:
    engine = town.engine(opens=False)
    rows, keys = make_rows(64), make_keys(64)
    store = open_on(engine, rows, StoreOptions())
    before = len(engine.blobs.calls)
    assert store.put("r", keys, range(64), range(64)), "16 MiB are copied"
    assert len(engine.blobs.calls) == before
    expected = rows.array.copy()
    rows.array[:] = 0
    store.end_request(RequestEnd("r", "manifest-r", (keys,), 16 * len(keys), 16))
    store.flush()
    assert store.read(keys, range(64)) == []
    assert (rows.array == expected).all()


def test_put_beyond_staging_writes_from_rows(town: Town) -> None:
    rows, keys = make_rows(128), make_keys(128)
    options = StoreOptions(staging_bytes=64 << 20)  # half of it is for copies
    store = open_on(town.engine(opens=False), rows, options)
    for n in (0, 32, 64, 96):
        assert store.put("r", keys[n : n + 32], range(n, n + 32), range(n, n + 32))
    others = make_keys(32, 1000)
    assert not store.put("s", others, range(32), range(32))
    store.flush()
    assert not store.store.queue.in_flight(others)
    assert all(map(store.contains, [*keys, *others]))


def test_tick_commits_pack_after_max_age(town: Town) -> None:
    rows, keys = make_rows(2), make_keys(2)
    store = open_on(town.engine(opens=False), rows, StoreOptions(max_age_s=0.01))
    store.put("r", keys, range(2), range(2))
    until = time.monotonic() + PATIENCE_S
    while not store.contains(keys[1]):
        store.work()
        assert time.monotonic() < until
    assert store.counters.commits == 1


def test_store_reopen_loads_index_from_file(town: Town) -> None:
    """The rows of the replica are not read again."""
    packs = [pack(seed, blocks=4096, block_bytes=1) for seed in range(17)]
    layout = RowLayout(4096, (GroupLayout(((0, 1),)),))
    asked: list[list[bytes | None]] = []
    for number in range(3):
        engine = town.engine(cache="machine", refresh_s=0.0)
        if number == 0:
            engine.store(*packs[:16])
        backend = FaultyBackend.of(engine.backend)
        cursors: list[bytes | None] = []
        backend.before(
            "changes", lambda namespace, cursor, seen=cursors: seen.append(cursor)
        )
        rows = Rows(memoryview(bytearray(4096)), layout)
        store = BlockingStore(
            backend, sample_identity(), rows, StoreOptions(), url="shared://test"
        )
        held = packs[: 16 + (number == 2)]
        for one in held:
            assert all(map(store.contains, one.keys.unpack()))
        assert len(store.index) == 4096 * len(held)
        asked.append(cursors)
        store.close()
        town.stop(engine)
        if number == 1:
            other = town.engine()
            other.store(packs[16])
    assert None in asked[0]
    assert None not in asked[1] + asked[2]
