"""Quotas of tenants in a shared store: mergers evict what exceeds them, in all namespaces."""

from __future__ import annotations

from contextlib import AbstractContextManager
from dataclasses import replace

import pytest

from persistkv.errors import QuotaExceededError
from persistkv.storage.backend import CommitBatch
from persistkv.storage.catalogue import TableRows
from persistkv.storage.format.pack_writer import PackWriter
from persistkv.storage.shared import SharedOptions
from persistkv.storage.shared.replica import Replica
from persistkv.testing.conformance.suite import check_totals, tables
from persistkv.testing.samples import sample_manifest, sample_pack
from tests.storage.shared.town import NAMES, NAMESPACE, Engine, Town

MINUTE_S, HOUR_S = 60.0, 3600.0
SIZE = 16 << 10  # 16 KiB: payload of a pack


def make(tenant: str, seed: int, namespace: bytes = NAMESPACE) -> PackWriter:
    return sample_pack(namespace, seed, blocks=2, block_bytes=SIZE // 2, tenant=tenant)


def set_quota(engine: Engine, **quotas: int) -> None:
    backend = engine.backend
    backend.set_policy(replace(backend.policy(), quotas=quotas))
    engine.due_at = engine.clock.monotonic()


def used(town: Town, tenant: str, namespaces: int = 1) -> int:
    """Return the bytes of a tenant in all namespaces, as an engine finds them that knows
    nothing."""
    options = SharedOptions(cache=False, read_only=True)
    engine = Engine(town, options, read_only=True)
    try:
        for number in range(namespaces):
            engine.open(number)
        check_totals(engine.backend)
        found = {one.tenant: one.stored_bytes for one in engine.backend.tenants()}
        return found.get(tenant, 0)
    finally:
        engine.backend.close()


def ids(tenant: str, seeds: range) -> set[bytes]:
    return {make(tenant, seed).pack_id for seed in seeds}


def test_tenant_above_quota_loses_its_oldest_packs_and_others_none(town: Town) -> None:
    first, second = town.engine(), town.engine()
    set_quota(first, anna=10 * SIZE)
    for seed in range(40):
        (first, second)[seed % 2].store(make("anna", seed))
        first.store(make("berta", 1000 + seed))
        second.store(make("default", 2000 + seed))
        town.run(3)
    town.run(MINUTE_S)
    assert first.held() == second.held() == town.fresh()
    kept = ids("anna", range(30, 40))
    others = ids("berta", range(1000, 1040)) | ids("default", range(2000, 2040))
    assert first.held() == kept | others
    assert used(town, "anna") == 10 * SIZE


def test_quota_holds_over_namespaces_and_writers(town: Town) -> None:
    """Four engines of three namespaces write twice the quota in a minute; then one of them
    does."""
    quota = 60 * SIZE
    engines = [town.engine(opens=False) for _ in range(4)]
    namespaces = [engine.open(number % 3) for number, engine in enumerate(engines)]
    set_quota(engines[0], anna=quota)
    seeds = iter(range(10_000))
    shares: list[float] = []
    for number in range(48):
        rates = [3] * 4 if number < 30 else [10, 0, 0, 0]
        for engine, namespace, rate in zip(engines, namespaces, rates, strict=True):
            for _ in range(rate):
                engine.store(make("anna", next(seeds), namespace))
            engine.store(make("berta", next(seeds), namespace))
        town.run(5)
        if number >= 24:
            shares.append(used(town, "anna", namespaces=3) / quota)
    assert max(shares) <= 1.05
    assert min(shares) > 0.75
    assert used(town, "berta", namespaces=3) == 4 * 48 * SIZE


def test_lowered_quota_acts_within_a_minute_without_commits(town: Town) -> None:
    first, second = town.engine(), town.engine()
    for seed in range(40):
        first.store(make("anna", seed), make("berta", 100 + seed))
        town.run(1)
    set_quota(second, anna=5 * SIZE, berta=1 << 30)
    town.run(MINUTE_S)
    assert used(town, "anna") == 5 * SIZE
    assert first.held() >= ids("anna", range(35, 40))
    set_quota(second)
    town.run(MINUTE_S)
    for seed in range(40):
        first.store(make("anna", seed))
    town.run(3 * MINUTE_S)
    assert used(town, "anna") == used(town, "berta") == 40 * SIZE


def test_store_above_capacity_evicts_from_tenant_above_quota_before_older_content(
    town: Town,
) -> None:
    """Another namespace holds the older content."""
    first, second = town.engine(opens=False), town.engine(opens=False)
    names = [first.open(0), second.open(1)]
    for seed in range(20):
        first.store(make("berta", seed, names[0]))
        town.run(1)
    for seed in range(40):
        second.store(make("anna", seed, names[1]))
        town.run(1)
    quotas = {"anna": 1 << 30}
    policy = replace(first.backend.policy(), capacity=1 << 30, quotas=quotas)
    first.backend.set_policy(policy)
    town.run(3 * MINUTE_S)
    assert len(first.held(names[0])) == 20
    # what is above the quota is more than what is above the capacity
    lower = replace(policy, capacity=45 * 20_000, quotas={"anna": 5 * SIZE})
    first.backend.set_policy(lower)
    town.run(5 * MINUTE_S)
    assert len(first.held(names[0])) == 20
    assert used(town, "anna", namespaces=2) == 5 * SIZE


def test_commit_and_step_read_few_of_many_quotas(
    town: Town,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Each is a transaction: 2,000 quotas took 65 ms of each commit."""
    engine = town.engine(capacity=1 << 30)
    set_quota(engine, **{f"tenant{number}": 1 << 30 for number in range(300)})
    engine.store(make("tenant1", 1))
    town.run(120)
    transactions = 0
    rows = Replica.rows

    def counted(replica: Replica, **options: bool) -> AbstractContextManager[TableRows]:
        nonlocal transactions
        transactions += 1
        return rows(replica, **options)

    monkeypatch.setattr(Replica, "rows", counted)
    for seed in range(2, 6):
        engine.store(make(f"tenant{seed % 2}", seed))
    town.run(3)
    assert 4 < transactions < 300


def test_pack_larger_than_quota_is_refused(town: Town) -> None:
    engine = town.engine()
    set_quota(engine, anna=SIZE - 1)
    town.run(10)
    with pytest.raises(QuotaExceededError, match="anna"):
        engine.store(make("anna", 1))
    engine.store(make("berta", 2))
    town.run(10)
    assert engine.held() == ids("berta", range(2, 3))


def test_tenant_whose_pins_exceed_its_quota_is_refused_until_unpinned(
    town: Town,
) -> None:
    engine = town.engine()
    packs = [make("anna", seed) for seed in range(10)]
    names = [pack.pack_id for pack in packs]
    manifest = sample_manifest("r", packs=names, ordered=False)
    batch = CommitBatch(packs, [manifest], pins=[("r", True)])
    engine.backend.commit(NAMESPACE, batch)
    set_quota(engine, anna=5 * SIZE)
    town.run(MINUTE_S)
    with pytest.raises(QuotaExceededError, match="anna"):
        engine.store(make("anna", 20))
    engine.store(make("berta", 21))
    assert used(town, "anna") == 10 * SIZE
    engine.backend.commit(NAMESPACE, CommitBatch(pins=[("r", False)]))
    engine.store(make("anna", 22))
    town.run(3 * MINUTE_S)
    assert used(town, "anna") == 5 * SIZE
    assert engine.held() >= ids("berta", range(21, 22)) | ids("anna", range(22, 23))


def test_namespace_without_engine_is_evicted_for_quota(town: Town) -> None:
    old = town.engine(opens=False)
    name = old.open(0)
    for seed in range(40):
        old.store(make("anna", seed, name), make("berta", 100 + seed, name))
    set_quota(old, anna=1 << 30)
    town.run(3 * MINUTE_S)
    town.stop(old)
    other = town.engine(opens=False)
    other.open(1)
    set_quota(other, anna=4 * SIZE)
    town.run(3 * HOUR_S)
    assert used(town, "anna", namespaces=2) <= 4 * SIZE
    assert used(town, "berta", namespaces=2) == 40 * SIZE


def test_quotas_are_read_by_later_handles_and_survive_other_policies(
    town: Town,
) -> None:
    first = town.engine()
    set_quota(first, anna=3 * SIZE)
    first.store(make("anna", 1))
    town.run(10)
    later = town.engine()
    assert later.backend.policy().quotas == {"anna": 3 * SIZE}
    policy = replace(later.backend.policy(), ttl_s=HOUR_S)
    later.backend.set_policy(policy)
    assert first.backend.policy() == policy
    names = [totals.tenant for totals in later.backend.tenants()]
    assert names == ["anna"]


def test_replica_read_from_a_base_counts_tenants(town: Town) -> None:
    """A reader adds the packs of a large base all at once."""
    engine = town.engine()
    for start in range(0, 4200, 600):
        packs = [
            sample_pack(
                NAMESPACE, seed, blocks=1, block_bytes=1, tenant=f"tenant {seed % 3}"
            )
            for seed in range(start, start + 600)
        ]
        engine.store(*packs)
    town.run(20 * MINUTE_S)
    assert any(name.startswith(NAMES.index) for name in town.names("/index/"))
    later = town.engine()
    check_totals(later.backend)
    assert len(tables(later.backend, NAMESPACE)) == 4200
    counts = {totals.tenant: totals.packs for totals in later.backend.tenants()}
    assert counts == dict.fromkeys(["tenant 0", "tenant 1", "tenant 2"], 1400)
