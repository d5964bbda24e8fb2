"""Quotas of tenants in a local store: whose content is evicted, and when a commit is refused."""

from __future__ import annotations

from contextlib import closing
from dataclasses import replace
from pathlib import Path

import pytest

from persistkv.config import StoreUrl
from persistkv.errors import ConfigurationError, QuotaExceededError
from persistkv.storage import open_backend
from persistkv.storage.backend import Backend, CommitBatch, CommitResult
from persistkv.storage.catalogue.quotas import TenantTotals, write_quotas
from persistkv.storage.catalogue.rows import TENANTS
from persistkv.storage.format.pack_writer import PackWriter
from persistkv.storage.identity import Identity
from persistkv.storage.policy import Policy
from persistkv.testing.conformance.suite import check_totals, read_pack, tables
from persistkv.testing.samples import payload_of, sample_manifest, sample_pack
from persistkv_lmdb import LmdbBackend
from tests.backends.lmdb.conftest import Opener
from tests.backends.lmdb.consistency import find_faults

KIB, MIB = 1 << 10, 1 << 20
PACK = 64 * KIB


def make(
    backend: Backend,
    namespace: bytes,
    tenant: str,
    seed: int,
    blocks: int = 1,
) -> PackWriter:
    """Return a pack of ``blocks`` times 64 KiB."""
    return sample_pack(
        namespace,
        seed,
        blocks=blocks,
        block_bytes=PACK,
        tenant=tenant,
        seal=backend.seal,
    )


def store(
    backend: Backend,
    namespace: bytes,
    tenant: str,
    seed: int,
    blocks: int = 1,
) -> list[bytes]:
    """Store a pack of ``blocks`` times 64 KiB; return the ids of the evicted packs."""
    pack = make(backend, namespace, tenant, seed, blocks)
    result = backend.commit(namespace, CommitBatch([pack]))
    return ids(result)


def store_each(
    backend: Backend,
    namespace: bytes,
    tenant: str,
    count: int,
) -> list[PackWriter]:
    """Store packs of 64 KiB, each in a commit of its own; return them."""
    packs = [make(backend, namespace, tenant, seed) for seed in range(count)]
    for pack in packs:
        backend.commit(namespace, CommitBatch([pack]))
    return packs


def store_until_full(backend: Backend, namespace: bytes, tenant: str) -> None:
    """Store packs of 64 KiB until the store evicts one."""
    seed = 1000
    while not store(backend, namespace, tenant, seed):
        seed += 1


def ids(result: CommitResult) -> list[bytes]:
    return [table.pack_id for table in result.evicted]


def set_quota(backend: Backend, **quotas: int) -> None:
    backend.set_policy(replace(backend.policy(), quotas=quotas))


def used(backend: Backend, tenant: str) -> int:
    """Return the bytes of a tenant, after a check of all totals."""
    check_totals(backend)
    assert isinstance(backend, LmdbBackend)
    assert find_faults(backend) == []
    found = {totals.tenant: totals for totals in backend.tenants()}
    return found[tenant].stored_bytes if tenant in found else 0


def test_commit_at_quota_evicts_oldest_packs_of_its_tenant_only(
    backend: LmdbBackend,
    namespace: bytes,
) -> None:
    set_quota(backend, anna=4 * PACK)
    for tenant in ("default", "berta"):
        for seed in range(6):
            store(backend, namespace, tenant, 100 * len(tenant) + seed)
    packs = [make(backend, namespace, "anna", seed) for seed in range(9)]
    for number, pack in enumerate(packs):
        result = backend.commit(namespace, CommitBatch([pack]))
        oldest = [packs[number - 4].pack_id] if number >= 4 else []
        assert ids(result) == oldest
        assert used(backend, "anna") == PACK * min(4, number + 1)
    backend.commit(namespace, CommitBatch(touches=[packs[5].pack_id]))
    assert store(backend, namespace, "anna", 9) == [packs[6].pack_id]
    assert used(backend, "berta") == used(backend, "default") == 6 * PACK


def test_quota_counts_packs_of_all_namespaces(
    backend: LmdbBackend,
    namespace: bytes,
) -> None:
    set_quota(backend, anna=3 * PACK)
    other = backend.open_namespace(Identity.of({"weights": "other"})).id
    first = make(backend, other, "anna", 1)
    backend.commit(other, CommitBatch([first]))
    for seed in (2, 3):
        assert store(backend, namespace, "anna", seed) == []
    assert store(backend, namespace, "anna", 4) == [first.pack_id]
    assert used(backend, "anna") == 3 * PACK
    assert {space.id for space in backend.namespaces()} == {namespace}


def test_commit_of_large_pack_evicts_more_packs_than_one_transaction_may(
    backend: LmdbBackend,
    namespace: bytes,
) -> None:
    set_quota(backend, anna=9 * MIB)
    store(backend, namespace, "berta", 1)
    for seed in range(0, 144, 48):
        packs = [make(backend, namespace, "anna", seed + n) for n in range(48)]
        backend.commit(namespace, CommitBatch(packs))
    assert used(backend, "anna") == 9 * MIB
    large = make(backend, namespace, "anna", 500, blocks=136)
    result = backend.commit(namespace, CommitBatch([large]))
    assert len(result.evicted) == 136
    assert used(backend, "anna") == 9 * MIB
    assert read_pack(backend, namespace, large.table) == payload_of(large)
    assert used(backend, "berta") == PACK


def test_commit_of_pack_larger_than_quota_is_refused_and_changes_nothing(
    backend: LmdbBackend,
    namespace: bytes,
) -> None:
    set_quota(backend, anna=4 * PACK)
    for seed in range(3):
        store(backend, namespace, "anna", seed)
    before = set(tables(backend, namespace))
    with pytest.raises(QuotaExceededError, match=r"327680 bytes.*'anna'.*262144"):
        store(backend, namespace, "anna", 10, blocks=5)
    assert set(tables(backend, namespace)) == before
    # a store that refuses is not a damaged one
    assert not store(backend, namespace, "berta", 11, blocks=5)
    assert used(backend, "anna") == 3 * PACK


def test_commit_of_tenant_whose_pins_fill_its_quota_is_refused_until_unpinned(
    backend: LmdbBackend,
    namespace: bytes,
) -> None:
    set_quota(backend, anna=4 * PACK)
    packs = [make(backend, namespace, "anna", seed) for seed in range(4)]
    manifest = sample_manifest("r", packs=[pack.pack_id for pack in packs])
    batch = CommitBatch(packs, [manifest], pins=[("r", True)])
    backend.commit(namespace, batch)
    for seed in (5, 6):
        with pytest.raises(QuotaExceededError):
            store(backend, namespace, "anna", seed)
        assert store(backend, namespace, "berta", 10 + seed) == []
    assert set(tables(backend, namespace)) > {pack.pack_id for pack in packs}
    backend.commit(namespace, CommitBatch(pins=[("r", False)]))
    assert len(store(backend, namespace, "anna", 7)) == 1
    assert used(backend, "anna") == 4 * PACK
    assert used(backend, "berta") == 2 * PACK


def test_commit_that_replaces_packs_of_tenant_above_quota_is_not_refused(
    backend: LmdbBackend,
    namespace: bytes,
) -> None:
    """Deleting a request shortens packs that it shares: that must be possible."""
    packs = [make(backend, namespace, "anna", seed, blocks=2) for seed in range(4)]
    manifests = []
    pins = []
    for number, pack in enumerate(packs):
        manifests.append(sample_manifest(f"r{number}", packs=[pack.pack_id]))
        pins.append((f"r{number}", True))
    backend.commit(namespace, CommitBatch(packs, manifests, pins=pins))
    set_quota(backend, anna=2 * PACK)
    assert used(backend, "anna") == 8 * PACK
    shorter = make(backend, namespace, "anna", 10)
    backend.commit(namespace, CommitBatch([shorter], bad=[packs[3].pack_id]))
    assert used(backend, "anna") == 7 * PACK
    longer = make(backend, namespace, "anna", 11, blocks=3)
    batch = CommitBatch([longer], bad=[packs[2].pack_id])
    with pytest.raises(QuotaExceededError):
        backend.commit(namespace, batch)
    assert set(tables(backend, namespace)) > {pack.pack_id for pack in packs[:3]}


def test_commit_of_refused_tenant_evicts_nothing_of_others_in_full_store(
    open_store: Opener,
    identity: Identity,
) -> None:
    backend = open_store("?capacity=8MiB")
    namespace = backend.open_namespace(identity).id
    packs = [make(backend, namespace, "anna", seed) for seed in range(4)]
    manifest = sample_manifest("r", packs=[pack.pack_id for pack in packs])
    batch = CommitBatch(packs, [manifest], pins=[("r", True)])
    backend.commit(namespace, batch)
    set_quota(backend, anna=2 * PACK)
    store_until_full(backend, namespace, "berta")
    before = set(tables(backend, namespace))
    for number in range(20):
        with pytest.raises(QuotaExceededError):
            store(backend, namespace, "anna", number + 10)
    assert set(tables(backend, namespace)) == before
    # pinned content stays, whatever the quota is
    assert used(backend, "anna") == 4 * PACK


def test_full_store_tenant_at_quota_evicts_its_own_content_only(
    open_store: Opener,
    identity: Identity,
) -> None:
    backend = open_store("?capacity=8MiB")
    namespace = backend.open_namespace(identity).id
    set_quota(backend, anna=10 * PACK)
    # the oldest content of the store is that of others
    store_until_full(backend, namespace, "berta")
    for number in range(30):
        store(backend, namespace, "anna", number)
    assert used(backend, "anna") == 10 * PACK
    held = used(backend, "berta")
    for number in range(100, 160):
        store(backend, namespace, "anna", number)
    assert used(backend, "anna") == 10 * PACK
    assert used(backend, "berta") == held


def test_set_policy_lower_quota_evicts_at_once_and_others_keep_theirs(
    open_store: Opener,
    identity: Identity,
) -> None:
    backend = open_store("?capacity=64MiB")
    namespace = backend.open_namespace(identity).id
    packs = store_each(backend, namespace, "anna", 100)
    store(backend, namespace, "berta", 200)
    second = open_store()
    set_quota(second, anna=7 * PACK, berta=MIB)
    assert used(backend, "anna") == 7 * PACK
    assert {pack.pack_id for pack in packs[-7:]} < set(tables(backend, namespace))
    assert used(backend, "berta") == PACK
    # engines that run know it, too
    assert ids(backend.commit(namespace, CommitBatch([packs[0]]))) == [
        packs[-7].pack_id
    ]
    set_quota(second)
    for pack in packs:
        assert not backend.commit(namespace, CommitBatch([pack])).evicted
    assert used(backend, "anna") == 100 * PACK
    assert backend.policy().quotas == {}


@pytest.mark.parametrize("grows", [True, False])
def test_commit_of_others_works_off_quota_that_set_left(
    backend: LmdbBackend,
    namespace: bytes,
    grows: bool,
) -> None:
    """A process that lowers a quota may die before it has evicted."""
    store_each(backend, namespace, "anna", 100)
    with backend.rows(write=True) as rows:
        write_quotas(rows, {"anna": 10 * PACK})
    evicted: list[bytes] = []
    for seed in range(3):
        if grows:
            evicted += store(backend, namespace, "berta", 200 + seed)
        else:
            evicted += ids(backend.commit(namespace, CommitBatch()))
    assert len(evicted) == 90
    assert used(backend, "anna") == 10 * PACK
    assert used(backend, "berta") == (3 * PACK if grows else 0)


def test_full_store_evicts_from_tenant_above_quota_before_older_content(
    open_store: Opener,
    identity: Identity,
) -> None:
    """The tenant is above by more than one commit may evict for quotas."""
    backend = open_store("?capacity=16MiB")
    namespace = backend.open_namespace(identity).id
    old = store_each(backend, namespace, "berta", 30)
    store_until_full(backend, namespace, "anna")
    kept = set(tables(backend, namespace)) & {pack.pack_id for pack in old}
    with backend.rows(write=True) as rows:
        write_quotas(rows, {"anna": PACK})
    for number in range(8):
        store(backend, namespace, "default", 5000 + number, blocks=8)
        assert kept <= set(tables(backend, namespace))


def test_totals_of_tenants_end_with_their_last_content_and_quota(
    backend: LmdbBackend,
    namespace: bytes,
) -> None:
    packs = [make(backend, namespace, name, 1) for name in ("anna", "berta")]
    backend.commit(namespace, CommitBatch(packs))
    set_quota(backend, berta=MIB, carla=MIB)
    assert backend.tenants() == [
        TenantTotals("anna", 1, PACK),
        TenantTotals("berta", 1, PACK, MIB),
        TenantTotals("carla", 0, 0, MIB),
    ]
    batch = CommitBatch(deletions=[pack.pack_id for pack in packs])
    backend.commit(namespace, batch)
    names = [totals.tenant for totals in backend.tenants()]
    assert names == ["berta", "carla"]
    set_quota(backend)
    assert backend.tenants() == []
    with backend.rows() as rows:
        assert rows.count(TENANTS) == 0
    assert find_faults(backend) == []


@pytest.mark.parametrize(
    ("tenant", "quota"), [("default", MIB), ("", MIB), ("a\nb", MIB), ("anna", 0)]
)
def test_policy_with_impossible_quota_is_refused(tenant: str, quota: int) -> None:
    with pytest.raises(ConfigurationError):
        Policy(None, None, quotas={tenant: quota})


def test_damaged_row_of_tenant_is_counted_anew_without_its_quota(
    backend: LmdbBackend,
    namespace: bytes,
    caplog: pytest.LogCaptureFixture,
) -> None:
    set_quota(backend, anna=2 * PACK, berta=2 * PACK)
    for seed in range(2):
        store(backend, namespace, "anna", seed)
        store(backend, namespace, "berta", 10 + seed)
    with backend.rows(write=True) as rows:
        rows.put(TENANTS, rows.tenant_digest("anna"), b"damaged")
    assert store(backend, namespace, "anna", 2) == []
    assert "quota" in caplog.text
    assert used(backend, "anna") == 3 * PACK
    assert len(store(backend, namespace, "berta", 12)) == 1
    set_quota(backend, anna=2 * PACK)
    assert used(backend, "anna") == 2 * PACK


def test_damaged_rows_of_two_tenants_are_counted_once(
    backend: LmdbBackend,
    namespace: bytes,
) -> None:
    for seed in range(3):
        store(backend, namespace, "anna", seed)
        store(backend, namespace, "berta", 10 + seed)
    with backend.rows(write=True) as rows:
        for tenant in ("anna", "berta"):
            rows.put(TENANTS, rows.tenant_digest(tenant), b"damaged")
    store(backend, namespace, "anna", 3)
    assert used(backend, "anna") == 4 * PACK
    assert used(backend, "berta") == 3 * PACK


def test_damaged_table_of_tenants_pack_is_counted_as_gone(
    backend: LmdbBackend,
    namespace: bytes,
) -> None:
    packs = [make(backend, namespace, "anna", seed) for seed in range(3)]
    backend.commit(namespace, CommitBatch(packs))
    key = namespace + packs[0].pack_id
    with backend.rows(write=True) as rows:
        rows.put("packs", key, bytes(100))
    backend.commit(namespace, CommitBatch(deletions=[packs[0].pack_id]))
    assert used(backend, "anna") == 2 * PACK


def test_rebuild_counts_packs_of_tenants(path: Path) -> None:
    url = f"lmdb://{path}?capacity=64MiB&placement=extents"
    with closing(open_backend(url)) as backend:
        namespace = backend.open_namespace(Identity.of({"weights": "abc"})).id
        set_quota(backend, anna=4 * PACK)
        for seed in range(6):
            store(backend, namespace, "anna", seed)
            store(backend, namespace, "berta", 10 + seed)
    (path / "data.mdb").unlink()
    rebuilt = LmdbBackend.rebuild(StoreUrl.parse(url), lambda done, total: None)
    assert rebuilt is not None
    with closing(open_backend(url)) as backend:
        assert used(backend, "berta") == 6 * PACK
        # quotas are lost with the catalogue, as a capacity is
        assert backend.policy().quotas == {}
        set_quota(backend, anna=2 * PACK)
        assert used(backend, "anna") == 2 * PACK
