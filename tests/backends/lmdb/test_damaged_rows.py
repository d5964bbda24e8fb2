"""Damaged catalogue rows affect only their own packs and manifests; all others expire on time."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable

import pytest

from persistkv.storage.backend import CommitBatch
from persistkv.storage.catalogue.rows import LOW_PRIORITY, TableRows, Use
from persistkv.storage.format.pack_writer import PackWriter
from persistkv.testing.conformance.suite import tables
from persistkv.testing.samples import sample_manifest, sample_pack
from persistkv_lmdb import LmdbBackend
from tests.backends.lmdb.conftest import Opener

HOUR_S = 3600.0

AdvanceClocks = Callable[[float], None]


@pytest.fixture
def advance_clocks(monkeypatch: pytest.MonkeyPatch) -> AdvanceClocks:
    """Return a function that sets the clocks to a number of seconds after the start of the test."""
    wall, elapsed = time.time, time.clock_gettime

    def advance_clocks(seconds: float) -> None:
        monkeypatch.setattr(time, "time", lambda: wall() + seconds)
        monkeypatch.setattr(
            time, "clock_gettime", lambda clock: elapsed(clock) + seconds
        )

    return advance_clocks


@pytest.fixture
def placement() -> str:
    return "inline"


@pytest.fixture
def backend(open_store: Opener) -> LmdbBackend:
    return open_store("?ttl=1h")


def content(rows: TableRows, table: str) -> list[tuple[bytes, bytes]]:
    """Return copies of all rows of a table: the buffers of a transaction end with its next
    change."""
    return [(bytes(key), bytes(value)) for key, value in rows.range(table, b"")]


def small_packs(namespace: bytes, seeds: Iterable[int]) -> list[PackWriter]:
    return [sample_pack(namespace, seed, blocks=1, block_bytes=1) for seed in seeds]


def run_expiry(backend: LmdbBackend, namespace: bytes) -> None:
    for _ in range(5):
        backend.commit(namespace, CommitBatch())


def test_expiry_use_in_future_does_not_delay_other_packs(
    backend: LmdbBackend,
    namespace: bytes,
    advance_clocks: AdvanceClocks,
) -> None:
    packs = small_packs(namespace, range(5))
    backend.commit(namespace, CommitBatch(packs[:1]))
    with backend.rows(write=True) as rows:
        ((key, row),) = content(rows, "uses")
        use = Use.decode(row)
        assert use is not None
        rows.put("uses", key, use._replace(time=time.time() + 1e6 * HOUR_S).encode())
    backend.commit(namespace, CommitBatch(packs[1:]))
    advance_clocks(2 * HOUR_S)
    run_expiry(backend, namespace)
    assert set(tables(backend, namespace)) == {packs[0].pack_id}


@pytest.mark.parametrize(
    ("table", "listed"), [("packs", "uses"), ("manifests", "chains")]
)
def test_expiry_dangling_rows_are_deleted_and_delay_no_other_pack(
    backend: LmdbBackend,
    namespace: bytes,
    advance_clocks: AdvanceClocks,
    table: str,
    listed: str,
) -> None:
    gone = small_packs(namespace, range(150))
    manifests = [
        sample_manifest(f"r{seed}", packs=[pack.pack_id])
        for seed, pack in enumerate(gone)
    ]
    backend.commit(namespace, CommitBatch(gone, manifests))
    with backend.rows(write=True) as rows:
        for key, _ in content(rows, table):
            rows.delete(table, key)
    kept = small_packs(namespace, range(200, 220))
    backend.commit(namespace, CommitBatch(kept))
    advance_clocks(2 * HOUR_S)
    for _ in range(5):
        run_expiry(backend, namespace)
    assert not tables(backend, namespace)
    with backend.rows() as rows:
        assert not content(rows, listed)
        assert not content(rows, "order")


@pytest.mark.parametrize("table", ["chains", "expiries"])
def test_expiry_damaged_row_does_not_delay_other_requests(
    backend: LmdbBackend,
    namespace: bytes,
    advance_clocks: AdvanceClocks,
    table: str,
) -> None:
    packs = small_packs(namespace, range(3))
    manifests = [
        sample_manifest(f"r{seed}", packs=[pack.pack_id], ttl_s=60.0)
        for seed, pack in enumerate(packs)
    ]
    backend.commit(namespace, CommitBatch(packs, manifests))
    with backend.rows(write=True) as rows:
        ((key, row), *_) = content(rows, table)
        rows.delete(table, key)
        rows.put(table, key if table == "chains" else key[:-5], row[:7])
    advance_clocks(120.0)
    run_expiry(backend, namespace)
    assert len(tables(backend, namespace)) == 1
    with backend.rows() as rows:
        assert not content(rows, "expiries")


def test_commit_pack_without_use_row_restores_row_and_pack_expires(
    backend: LmdbBackend,
    namespace: bytes,
    advance_clocks: AdvanceClocks,
) -> None:
    (pack,) = small_packs(namespace, [1])
    backend.commit(namespace, CommitBatch([pack]))
    with backend.rows(write=True) as rows:
        rows.delete("uses", namespace + pack.pack_id)
    backend.commit(namespace, CommitBatch([pack]))
    advance_clocks(2 * HOUR_S)
    run_expiry(backend, namespace)
    assert not tables(backend, namespace)


def test_commit_pack_without_use_row_restores_priority_of_its_requests(
    backend: LmdbBackend, namespace: bytes
) -> None:
    (pack,) = small_packs(namespace, [1])
    name = namespace + pack.pack_id
    low = sample_manifest("low", packs=[pack.pack_id], priority="low")
    backend.commit(namespace, CommitBatch([pack], [low]))
    with backend.rows(write=True) as rows:
        rows.delete("uses", name)
    backend.commit(namespace, CommitBatch([pack]))
    with backend.rows() as rows:
        use = Use.decode(rows.get("uses", name))
    assert use is not None
    assert use.priority == LOW_PRIORITY


def test_commit_touch_at_moment_of_failed_commit_delays_expiry(
    backend: LmdbBackend,
    namespace: bytes,
    advance_clocks: AdvanceClocks,
) -> None:
    """A failed commit may have recorded a use durably; the next transaction then has the same
    moment number."""
    (pack,) = small_packs(namespace, [1])
    backend.commit(namespace, CommitBatch([pack]))
    with backend.rows(write=True) as rows:
        ((key, row),) = content(rows, "uses")
        use = Use.decode(row)
        assert use is not None
        rows.delete("order", use.order_key(key))
        use = use._replace(moment=use.moment + 1)
        rows.put("uses", key, use.encode())
        rows.put("order", use.order_key(key), b"")
    advance_clocks(2 * HOUR_S)
    assert not backend.commit(namespace, CommitBatch(touches=[pack.pack_id])).evicted
    assert set(tables(backend, namespace)) == {pack.pack_id}
