"""Damaged catalogue rows affect only their own packs and manifests; all others expire, neither late nor early."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable

import pytest

from persistkv.storage.backend import CommitBatch
from persistkv.storage.catalog.rows import Use
from persistkv.storage.format.pack_writer import PackWriter
from persistkv.storage.identity import Identity
from persistkv.testing.conformance.suite import tables
from persistkv.testing.memory import MemoryBackend
from persistkv.testing.samples import sample_manifest, sample_pack

HOUR_S = 3600.0

Later = Callable[[float], None]


@pytest.fixture
def later(monkeypatch: pytest.MonkeyPatch) -> Later:
    """Return a function that advances the clocks to some seconds after the start of the test."""
    wall, elapsed = time.time, time.clock_gettime

    def later(seconds: float) -> None:
        monkeypatch.setattr(time, "time", lambda: wall() + seconds)
        monkeypatch.setattr(time, "clock_gettime", lambda clock: elapsed(clock) + seconds)

    return later


@pytest.fixture
def backend() -> MemoryBackend:
    return MemoryBackend(ttl_s=HOUR_S)


@pytest.fixture
def namespace(backend: MemoryBackend) -> bytes:
    return backend.open_namespace(Identity.of({})).id


def small_packs(namespace: bytes, seeds: Iterable[int]) -> list[PackWriter]:
    return [sample_pack(namespace, seed, blocks=1, block_bytes=1) for seed in seeds]


def expire(backend: MemoryBackend, namespace: bytes) -> None:
    for _ in range(5):
        backend.commit(namespace, CommitBatch())


def test_use_in_the_future_does_not_keep_others_from_expiring(
    backend: MemoryBackend, namespace: bytes, later: Later
) -> None:
    packs = small_packs(namespace, range(5))
    backend.commit(namespace, CommitBatch(packs[:1]))
    with backend.rows(write=True) as rows:
        ((key, row),) = rows.range("uses", b"")
        use = Use.decode(row)
        assert use is not None
        rows.put("uses", key, use._replace(time=time.time() + 1e6 * HOUR_S).encode())
    backend.commit(namespace, CommitBatch(packs[1:]))
    later(2 * HOUR_S)
    expire(backend, namespace)
    assert set(tables(backend, namespace)) == {packs[0].pack_id}


@pytest.mark.parametrize(("table", "listed"), [("packs", "uses"), ("manifests", "chains")])
def test_lists_of_what_is_not_held_do_not_keep_others_from_expiring(
    backend: MemoryBackend, namespace: bytes, later: Later, table: str, listed: str
) -> None:
    gone = small_packs(namespace, range(150))
    manifests = [sample_manifest(f"r{seed}", packs=[pack.pack_id]) for seed, pack in enumerate(gone)]
    backend.commit(namespace, CommitBatch(gone, manifests))
    with backend.rows(write=True) as rows:
        for key in [key for key, _ in rows.range(table, b"")]:
            rows.delete(table, key)
    kept = small_packs(namespace, range(200, 220))
    backend.commit(namespace, CommitBatch(kept))
    later(2 * HOUR_S)
    for _ in range(5):
        expire(backend, namespace)
    assert not tables(backend, namespace)
    with backend.rows() as rows:
        assert not list(rows.range(listed, b""))
        assert not list(rows.range("order", b""))


@pytest.mark.parametrize("table", ["chains", "expiries"])
def test_expiry_damaged_row_does_not_keep_other_requests_from_expiring(
    backend: MemoryBackend, namespace: bytes, later: Later, table: str
) -> None:
    packs = small_packs(namespace, range(3))
    manifests = [sample_manifest(f"r{seed}", packs=[pack.pack_id], ttl_s=60.0) for seed, pack in enumerate(packs)]
    backend.commit(namespace, CommitBatch(packs, manifests))
    with backend.rows(write=True) as rows:
        ((key, row), *_) = rows.range(table, b"")
        rows.delete(table, key)
        rows.put(table, key if table == "chains" else key[:-5], bytes(row)[:7])
    later(120.0)
    expire(backend, namespace)
    assert len(tables(backend, namespace)) == 1
    with backend.rows() as rows:
        assert not list(rows.range("expiries", b""))


def test_pack_without_its_use_is_listed_once_it_is_stored_again(
    backend: MemoryBackend, namespace: bytes, later: Later
) -> None:
    (pack,) = small_packs(namespace, [1])
    backend.commit(namespace, CommitBatch([pack]))
    with backend.rows(write=True) as rows:
        rows.delete("uses", namespace + pack.pack_id)
    backend.commit(namespace, CommitBatch([pack]))
    later(2 * HOUR_S)
    expire(backend, namespace)
    assert not tables(backend, namespace)


def test_use_in_a_transaction_that_was_no_moment_counts_again(
    backend: MemoryBackend, namespace: bytes, later: Later
) -> None:
    """A failed commit may durably record a use, and the next transaction then has the same moment."""
    (pack,) = small_packs(namespace, [1])
    backend.commit(namespace, CommitBatch([pack]))
    with backend.rows(write=True) as rows:
        ((key, row),) = rows.range("uses", b"")
        use = Use.decode(row)
        assert use is not None
        rows.delete("order", use.order_key(key))
        use = use._replace(moment=use.moment + 1)
        rows.put("uses", key, use.encode())
        rows.put("order", use.order_key(key), b"")
    later(2 * HOUR_S)
    assert not backend.commit(namespace, CommitBatch(touches=[pack.pack_id])).evicted
    assert set(tables(backend, namespace)) == {pack.pack_id}
