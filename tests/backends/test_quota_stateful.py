"""Quotas in both placements compared with a model that keeps its packs in a list: who is evicted in
which order, who is refused, and the totals of each tenant after each commit."""

from __future__ import annotations

import tempfile
from collections.abc import Callable
from dataclasses import dataclass, replace

import pytest
from hypothesis import strategies as st
from hypothesis.stateful import initialize, invariant, rule

from persistkv.errors import QuotaExceededError, StoreError
from persistkv.storage.backend import CommitBatch
from persistkv.storage.catalogue.order import EvictionOrder
from persistkv.storage.catalogue.quotas import TenantTotals
from persistkv.storage.format.pack import UNKNOWN_DEPTH, PackTable
from persistkv.storage.format.pack_writer import PackWriter
from persistkv.storage.identity import Identity
from persistkv.testing.conformance.suite import check_totals, tables
from persistkv.testing.samples import sample_manifest, sample_pack
from persistkv_lmdb.commit import BatchCommit
from tests.backends.stateful import StoreMachine, both_placements, run_machine

PACKS = 24
NUMBERS = st.integers(0, PACKS - 1)
TENANTS = ("anna", "berta", "default")
BLOCK = 16 << 10  # 16 KiB
DEPTHS = (0, 4, UNKNOWN_DEPTH)
ROOM = "capacity=64MiB"


@dataclass
class Held:
    """A pack in the store."""

    used: int
    """Moment of its last use: a commit that stores or touches."""


class QuotaMachine(StoreMachine):
    """Driver, with a store that has room for all packs, and model. Packs are numbers: the third of
    them belongs to each tenant."""

    evictions = 0
    refusals = 0

    @initialize()
    def open(self) -> None:
        self.directory = tempfile.TemporaryDirectory()
        self.backend = self.open_store(self.directory.name)
        self.namespace = self.backend.open_namespace(Identity.of({})).id
        self.ids = {number: self.pack(number).pack_id for number in range(PACKS)}
        self.moment = 0
        self.packs: dict[int, Held] = {}
        self.pinned: dict[str, list[int]] = {}
        self.quotas: dict[str, int] = {}
        for tenant in TENANTS[:2]:
            self.set_quota(tenant, 5)

    def pack(self, number: int) -> PackWriter:
        return sample_pack(
            self.namespace,
            number,
            blocks=size(number) // BLOCK,
            block_bytes=BLOCK,
            depth=DEPTHS[number % len(DEPTHS)],
            tenant=tenant_of(number),
        )

    # The model

    def stored(self, tenant: str) -> int:
        return sum(size(number) for number in self.packs if tenant_of(number) == tenant)

    def evictable(self, tenant: str, keep: set[int]) -> list[int]:
        """Return the packs of a tenant that may be evicted, in eviction order."""
        pinned = {number for numbers in self.pinned.values() for number in numbers}
        found = []
        for number, held in self.packs.items():
            if tenant_of(number) == tenant and number not in keep | pinned:
                height = UNKNOWN_DEPTH - DEPTHS[number % len(DEPTHS)]
                found.append((held.used, height, self.ids[number], number))
        return [number for *_, number in sorted(found)]

    def evict(self, keep: set[int]) -> list[int]:
        """Evict what exceeds the quotas; return the packs."""
        gone: list[int] = []
        for tenant, quota in self.quotas.items():
            for number in self.evictable(tenant, keep):
                if self.stored(tenant) <= quota:
                    break
                del self.packs[number]
                gone.append(number)
        return gone

    def fits(self, numbers: set[int], keep: set[int]) -> bool:
        """Return whether new packs fit the quotas of their tenants."""
        for tenant, quota in self.quotas.items():
            new = sum(size(n) for n in numbers if tenant_of(n) == tenant)
            loose = sum(map(size, self.evictable(tenant, keep)))
            if new and self.stored(tenant) + new - loose > quota:
                return False
        return True

    # Rules

    @rule(
        numbers=st.lists(NUMBERS, min_size=1, max_size=4, unique=True),
        needed=st.lists(NUMBERS, max_size=2),
        name=st.sampled_from(["", "", "", "c", "a", "b"]),
    )
    def store(self, numbers: list[int], needed: list[int], name: str) -> None:
        """Store packs, perhaps with a request that names them and others; ``a`` and ``b`` are
        pinned."""
        # replaced, it would unpin its packs during the commit
        name = "" if name in self.pinned else name
        needed = [number for number in needed if number in self.packs]
        named = list(dict.fromkeys([*numbers, *needed])) if name else []
        keep = {*numbers, *named}
        new = {number for number in numbers if number not in self.packs}
        packs = [self.pack(number) for number in numbers]
        manifests = []
        if name:
            names = [self.ids[number] for number in named]
            manifests = [sample_manifest(name, packs=names, ordered=False)]
        pins = [(name, True)] if name in ("a", "b") else []
        batch = CommitBatch(packs, manifests, pins=pins)
        if not self.fits(new, keep):
            with pytest.raises(QuotaExceededError):
                self.backend.commit(self.namespace, batch)
            type(self).refusals += 1
            return
        result = self.backend.commit(self.namespace, batch)
        self.moment += 1
        for number in keep:
            self.packs[number] = Held(self.moment)
        if pins:
            self.pinned[name] = named
        gone = self.evict(keep)
        found = [table.pack_id for table in result.evicted]
        assert sorted(found) == sorted(self.ids[number] for number in gone)
        for tenant in TENANTS:
            own = {self.ids[n] for n in gone if tenant_of(n) == tenant}
            order = [pack_id for pack_id in found if pack_id in own]
            assert order == [self.ids[n] for n in gone if tenant_of(n) == tenant]
        for tenant in {tenant_of(number) for number in new} & self.quotas.keys():
            assert self.stored(tenant) <= self.quotas[tenant]
        type(self).evictions += len(gone)

    @rule(numbers=st.lists(NUMBERS, min_size=1, max_size=4))
    def touch(self, numbers: list[int]) -> None:
        self.moment += 1
        touches = [self.ids[number] for number in numbers]
        self.backend.commit(self.namespace, CommitBatch(touches=touches))
        for number in self.packs.keys() & set(numbers):
            self.packs[number] = Held(self.moment)
        self.evict(set())

    @rule(name=st.sampled_from("ab"))
    def unpin(self, name: str) -> None:
        self.backend.commit(self.namespace, CommitBatch(pins=[(name, False)]))
        self.pinned.pop(name, None)
        self.evict(set())

    @rule(number=NUMBERS)
    def remove(self, number: int) -> None:
        batch = CommitBatch(deletions=[self.ids[number]])
        self.backend.commit(self.namespace, batch)
        if self.packs.pop(number, None) is not None:
            for name, numbers in list(self.pinned.items()):
                if number in numbers:
                    del self.pinned[name]
        self.evict(set())

    @rule(
        tenant=st.sampled_from(TENANTS[:2]),
        blocks=st.one_of(st.none(), st.integers(2, 9)),
    )
    def set_quota(self, tenant: str, blocks: int | None) -> None:
        if blocks is None:
            self.quotas.pop(tenant, None)
        else:
            self.quotas[tenant] = BLOCK * blocks
        policy = replace(self.backend.policy(), quotas=self.quotas)
        self.backend.set_policy(policy)
        type(self).evictions += len(self.evict(set()))

    @rule()
    def reopen(self) -> None:
        self.backend.close()
        self.backend = self.open_store(self.directory.name)
        self.backend.open_namespace(Identity.of({}))

    @invariant()
    def equals_model(self) -> None:
        if not hasattr(self, "backend"):
            return
        held = set(tables(self.backend, self.namespace))
        assert held == {self.ids[number] for number in self.packs}
        check_totals(self.backend)
        assert self.backend.policy().quotas == self.quotas
        for totals in self.backend.tenants():
            assert totals.stored_bytes == self.stored(totals.tenant)

    def teardown(self) -> None:
        if hasattr(self, "backend"):
            self.backend.close()
            self.directory.cleanup()


def tenant_of(number: int) -> str:
    return TENANTS[number % len(TENANTS)]


def size(number: int) -> int:
    """Return the bytes of a pack."""
    return BLOCK * (1 + number // len(TENANTS) % 4)


@both_placements(examples=15)
def test_quotas_random_commits_match_model(placement: str, examples: int) -> None:
    options = f"{ROOM}&placement={placement}"
    machine = run_machine(QuotaMachine, options, examples)
    assert machine.evictions > examples
    assert machine.refusals > examples // 4


# Bugs that are planted one at a time: the model must find each of them.


def plant_decrement(patch: pytest.MonkeyPatch) -> None:
    """Do not subtract removed packs."""
    count = TenantTotals.count

    def planted(self: TenantTotals, table: PackTable, sign: int) -> None:
        if sign > 0:
            count(self, table, sign)

    patch.setattr(TenantTotals, "count", planted)


def plant_outside(patch: pytest.MonkeyPatch) -> None:
    """Check quotas before the transaction of the commit only."""
    patch.setattr(BatchCommit, "_enforce_quotas", lambda self, commit: None)


def plant_order(patch: pytest.MonkeyPatch) -> None:
    """Evict the packs of a tenant in the reverse order."""
    oldest_of = EvictionOrder.oldest_of
    patch.setattr(
        EvictionOrder,
        "oldest_of",
        lambda self, tenant: reversed(list(oldest_of(self, tenant))),
    )


def plant_touch(patch: pytest.MonkeyPatch) -> None:
    """Forget the tenant of a pack when it is used."""
    touch = EvictionOrder.touch

    def planted(self: EvictionOrder, name: bytes, priority: int = 0) -> bool:
        use = self.use(name)
        if use is not None:
            self.put(name, use._replace(tenant=b""), use)
        return touch(self, name, priority)

    patch.setattr(EvictionOrder, "touch", planted)


@pytest.mark.parametrize(
    "plant", [plant_decrement, plant_outside, plant_order, plant_touch]
)
def test_planted_bug_of_quotas_is_found(
    monkeypatch: pytest.MonkeyPatch,
    plant: Callable[[pytest.MonkeyPatch], None],
) -> None:
    plant(monkeypatch)
    with pytest.raises((AssertionError, ExceptionGroup, StoreError)):
        run_machine(QuotaMachine, f"{ROOM}&placement=inline", 30, shrinks=False)
