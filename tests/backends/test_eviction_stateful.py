"""Both placements compared with a model that keeps its store in a list: eviction order, dependent
deletions, totals."""

from __future__ import annotations

import tempfile
from dataclasses import dataclass, field

from hypothesis import strategies as st
from hypothesis.stateful import initialize, invariant, rule

from persistkv.storage.backend import CommitBatch
from persistkv.storage.format.pack import UNKNOWN_DEPTH
from persistkv.storage.format.pack_writer import PackWriter
from persistkv.storage.identity import Identity
from persistkv.testing.conformance.suite import check_totals, tables
from persistkv.testing.samples import sample_manifest, sample_pack
from tests.backends.stateful import StoreMachine, both_placements, run_machine

NUMBERS = st.integers(0, 11)
DEPTHS = (0, 4, 8, UNKNOWN_DEPTH)


@dataclass
class Held:
    """A pack (number, depth) or a manifest (name, depth 0)."""

    used: int
    """Moment of the pack's last use, or of the manifest's creation. A moment is a commit that
    stores or touches."""
    depth: int
    packs: list[int] = field(default_factory=list)
    pinned: bool = False
    named: int = 0
    """1: only requests of low priority have named the pack, or the manifest has low priority; 2:
    others."""


class EvictionMachine(StoreMachine):
    """Driver, with a store of 4 MiB, and model. Packs are numbers. The model determines the
    eviction order, the driver the number of packs."""

    evictions = 0
    kept: set[int]

    @initialize()
    def open(self) -> None:
        self.directory = tempfile.TemporaryDirectory()
        self.backend = self.open_store(self.directory.name)
        self.namespace = self.backend.open_namespace(Identity.of({})).id
        self.ids = {number: self.pack(number).pack_id for number in range(12)}
        self.moment = 0
        self.packs: dict[int, Held] = {}
        self.manifests: dict[str, Held] = {}

    def pack(self, number: int) -> PackWriter:
        return sample_pack(
            self.namespace,
            number,
            blocks=1 + number % 5,
            block_bytes=220_000,
            depth=DEPTHS[number % len(DEPTHS)],
        )

    # The model

    def use(self, number: int) -> None:
        if number in self.packs:
            self.packs[number].used = self.moment

    def delete(self, number: int) -> set[int]:
        gone = {number} if self.packs.pop(number, None) else set()
        for name in [
            name for name, held in self.manifests.items() if number in held.packs
        ]:
            held = self.manifests.pop(name)
            for later in held.packs[held.packs.index(number) + 1 :]:
                if (
                    not any(later in other.packs for other in self.manifests.values())
                    and later not in self.kept
                ):
                    gone |= self.delete(later)
        return gone

    def evict(self, expected: list[int]) -> None:
        """Remove the oldest entries of the model, until exactly the packs that the driver evicted
        are gone."""
        missing = set(expected)
        while missing:
            pinned = {
                number
                for held in self.manifests.values()
                if held.pinned
                for number in held.packs
            }
            order: list[tuple[bool, int, int, int, int | str]] = [
                (held.named != 1, held.used, UNKNOWN_DEPTH - held.depth, 0, number)
                for number, held in self.packs.items()
                if number not in pinned | self.kept
            ]
            order += [
                (held.named != 1, held.used, UNKNOWN_DEPTH, 1, name)
                for name, held in self.manifests.items()
                if not held.pinned and held.used < self.moment
            ]
            # numbers are never compared with names: the fourth item differs
            first = min(order)
            if isinstance(first[4], str):
                assert first[4] not in self.present(), (
                    "a manifest in the store precedes the evicted packs"
                )
                del self.manifests[first[4]]
                continue
            peers = [candidate[4] for candidate in order if candidate[:4] == first[:4]]
            evicted = [
                number for number in expected if number in peers and number in missing
            ]
            assert evicted, "a younger pack was evicted before an older one"
            for number in evicted:  # in the driver's order, which is free among peers
                gone = self.delete(number)
                assert gone <= missing
                missing -= gone
        type(self).evictions += len(expected)

    def present(self) -> set[str]:
        return {
            manifest.id
            for manifest in self.backend.catalogue(self.namespace).manifests()
        }

    def commit(self, batch: CommitBatch) -> list[int]:
        by_id = {pack_id: number for number, pack_id in self.ids.items()}
        return [
            by_id[table.pack_id]
            for table in self.backend.commit(self.namespace, batch).evicted
        ]

    def may_pin(self, name: str, numbers: list[int]) -> bool:
        """Return whether enough space for the next packs remains if the manifest ``name`` pins
        these packs."""
        pinned = {
            number
            for other, held in self.manifests.items()
            if held.pinned and other != name
            for number in held.packs
        }
        return sum(1 + number % 5 for number in pinned.union(numbers)) <= 4

    # Rules

    @rule(
        numbers=st.lists(NUMBERS, min_size=1, max_size=3, unique=True),
        touched=st.lists(NUMBERS, max_size=3),
    )
    def store(self, numbers: list[int], touched: list[int]) -> None:
        self.moment += 1
        self.kept = set(numbers)
        batch = CommitBatch(
            [self.pack(number) for number in numbers],
            touches=[self.ids[n] for n in touched],
        )
        evicted = self.commit(batch)
        for number in numbers:
            self.packs.setdefault(
                number, Held(self.moment, DEPTHS[number % len(DEPTHS)])
            )
        for number in {*numbers, *touched}:
            self.use(number)
        self.evict(evicted)
        self.drop_aged_manifests()

    @rule(
        name=st.sampled_from("abc"),
        numbers=st.lists(NUMBERS, max_size=4, unique=True),
        low=st.booleans(),
    )
    def end_request(self, name: str, numbers: list[int], low: bool) -> None:
        numbers = [number for number in numbers if number in self.packs]
        pinned = name in self.manifests and self.manifests[name].pinned
        if pinned and not self.may_pin(name, numbers):
            return
        self.moment += 1
        self.kept = set(numbers)
        ids = [self.ids[number] for number in numbers]
        evicted = self.commit(
            CommitBatch(
                manifests=[
                    sample_manifest(
                        name, packs=ids, priority="low" if low else "normal"
                    )
                ]
            )
        )
        self.manifests[name] = Held(self.moment, 0, numbers, pinned, 1 if low else 2)
        for number in numbers:
            self.use(number)
            self.packs[number].named = max(self.packs[number].named, 1 if low else 2)
        self.evict(evicted)
        self.drop_aged_manifests()

    @rule(name=st.sampled_from("ab"), pinned=st.booleans())
    def pin(self, name: str, pinned: bool) -> None:
        if pinned and not self.may_pin(
            name, self.manifests[name].packs if name in self.manifests else []
        ):
            return
        assert not self.commit(CommitBatch(pins=[(name, pinned)]))
        if name in self.manifests:
            self.manifests[name].pinned = pinned

    @rule(numbers=st.lists(NUMBERS, min_size=1, max_size=4))
    def touch(self, numbers: list[int]) -> None:
        self.moment += 1
        assert not self.commit(
            CommitBatch(touches=[self.ids[number] for number in numbers])
        )
        for number in numbers:
            self.use(number)

    @rule(number=NUMBERS)
    def remove(self, number: int) -> None:
        self.kept = set()
        assert set(
            self.commit(CommitBatch(deletions=[self.ids[number]]))
        ) == self.delete(number)

    def drop_aged_manifests(self) -> None:
        """Remove manifests that the driver dropped without their packs. Each must be older than all
        evictable packs."""
        gone = set(self.manifests) - self.present()
        for name in gone:
            held = self.manifests.pop(name)
            assert not held.pinned
            pinned = {
                number
                for other in self.manifests.values()
                if other.pinned
                for number in other.packs
            }
            free = [
                (other.named != 1, other.used)
                for number, other in self.packs.items()
                if number not in pinned | self.kept
            ]
            assert all((held.named != 1, held.used) < used for used in free), (
                "the manifest was dropped before an older pack"
            )

    @invariant()
    def equals_model(self) -> None:
        if not hasattr(self, "backend"):
            return
        assert set(tables(self.backend, self.namespace)) == {
            self.ids[number] for number in self.packs
        }
        assert self.present() == set(self.manifests)
        check_totals(self.backend)

    def teardown(self) -> None:
        if hasattr(self, "backend"):
            self.backend.close()
            self.directory.cleanup()


@both_placements(examples=15)
def test_eviction_random_commits_match_model(placement: str, examples: int) -> None:
    options = f"capacity=4MiB&placement={placement}"
    machine = run_machine(EvictionMachine, options, examples)
    assert machine.evictions > examples // 2
