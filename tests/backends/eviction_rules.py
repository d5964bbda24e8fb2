"""Rules of eviction, which persistkv implements once, for all drivers: order, dependencies, pins,
ttl, capacity."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator

import numpy as np
import pytest

from persistkv.errors import StoreFullError
from persistkv.storage.backend import Backend, CommitBatch
from persistkv.storage.format.pack import UNKNOWN_DEPTH
from persistkv.storage.format.pack_writer import PackWriter
from persistkv.testing.conformance.suite import (
    BackendSuite,
    check_totals,
    read_pack,
    sample_identity,
    tables,
)
from persistkv.testing.samples import payload_of, sample_manifest, sample_pack

_HOUR_S = 3600


class EvictionRules(BackendSuite):
    """Tests for the test class of a driver, next to ``BackendConformance``."""

    @pytest.fixture
    def ttl_url(self) -> str | None:
        """URL of another store, with a ttl of an hour by ``time.time``; None if the driver does not
        support ttl."""
        return None

    @pytest.fixture
    def aging(self, ttl_url: str | None) -> Iterator[Backend]:
        yield from self.opened(ttl_url)

    @pytest.fixture
    def set_clocks(
        self,
        monkeypatch: pytest.MonkeyPatch,
    ) -> Callable[[float, float], None]:
        """Return a function of two numbers: seconds by which it sets the wall clock (``time.time``)
        and the clock since boot (``time.clock_gettime``) ahead of their real values, until the test
        ends.
        """
        wall, elapsed = time.time, time.clock_gettime

        def set_clocks(wall_s: float, elapsed_s: float) -> None:
            monkeypatch.setattr(time, "time", lambda: wall() + wall_s)
            monkeypatch.setattr(
                time, "clock_gettime", lambda clock: elapsed(clock) + elapsed_s
            )

        return set_clocks

    def test_eviction_least_recently_used_pack_is_evicted_first(
        self,
        small: Backend,
        name: bytes,
    ) -> None:
        rng = np.random.default_rng(3)
        seeds: dict[bytes, int] = {}
        used: dict[bytes, int] = {}
        evicted = 0
        for moment in range(1, 241):
            if len(used) > 5 and rng.random() < 0.6:
                held = sorted(used)
                again = [
                    held[number]
                    for number in set(
                        rng.integers(len(held), size=rng.integers(1, 3)).tolist()
                    )
                ]
                written = (
                    [large_pack(name, seeds[pack_id]) for pack_id in again]
                    if moment % 2
                    else []
                )
                assert not small.commit(
                    name, CommitBatch(written, touches=[] if written else again)
                ).evicted
                used.update(dict.fromkeys(again, moment))
                continue
            pack = large_pack(name, moment)
            for table in small.commit(name, CommitBatch([pack])).evicted:
                first = min(used.values())
                assert used.pop(table.pack_id) == first
                evicted += 1
            used[pack.pack_id], seeds[pack.pack_id] = moment, moment
        assert evicted > 50

    def test_eviction_commits_without_uses_leave_order_unchanged(
        self,
        small: Backend,
        name: bytes,
    ) -> None:
        packs = [large_pack(name, seed, depth=3 * seed) for seed in range(4)]
        ids = [pack.pack_id for pack in packs]
        small.commit(name, CommitBatch(packs))
        for _ in range(50):
            small.commit(
                name, CommitBatch(deletions=[bytes(16)], pins=[("nobody", True)])
            )
        small.commit(
            name, CommitBatch(touches=[ids[2], ids[0], ids[3], ids[1], bytes(16)])
        )
        evicted_ids = write_until_evicted(small, name, until=ids[0])
        assert [pack_id for pack_id in evicted_ids if pack_id in ids] == ids[::-1]

    def test_eviction_shared_prefix_is_evicted_after_dependent_pack(
        self,
        small: Backend,
        name: bytes,
    ) -> None:
        prefix, end = (large_pack(name, seed, depth=3 * seed) for seed in range(2))
        chain = [prefix.pack_id, end.pack_id]
        small.commit(
            name, CommitBatch([prefix, end], [sample_manifest("first", packs=chain)])
        )
        other = large_pack(name, 7)
        small.commit(name, CommitBatch([other]))
        small.commit(
            name, CommitBatch(manifests=[sample_manifest("second", packs=chain)])
        )
        evicted_ids = write_until_evicted(small, name, until=prefix.pack_id)
        assert [
            pack_id for pack_id in evicted_ids if pack_id in {other.pack_id, *chain}
        ] == [
            other.pack_id,
            *chain[::-1],
        ]

    def test_eviction_equal_use_evicts_deeper_packs_first_and_manifest_last(
        self,
        small: Backend,
        name: bytes,
    ) -> None:
        depths = [0, 16, 8, UNKNOWN_DEPTH, 24]
        packs = [
            large_pack(name, seed, blocks=2, depth=depth)
            for seed, depth in enumerate(depths)
        ]
        small.commit(name, CommitBatch(packs, [sample_manifest("r")]))
        evicted_ids = write_until_evicted(small, name, until=packs[0].pack_id)
        assert evicted_ids[:5] == [packs[number].pack_id for number in (3, 4, 1, 2, 0)]
        write_until_evicted(small, name, rounds=3)
        assert not list(small.catalogue(name).manifests())

    def test_commit_large_pack_evicts_many_small_packs(
        self,
        small: Backend,
        name: bytes,
    ) -> None:
        for seed in range(100, 130):
            small.commit(name, CommitBatch([large_pack(name, seed, blocks=1)]))
        large = large_pack(name, 1, blocks=24)
        small.commit(name, CommitBatch([large]))
        assert read_pack(small, name, large.table) == payload_of(large)
        check_totals(small)
        small.commit(name, CommitBatch([large_pack(name, 2, blocks=24)]))
        assert large.pack_id not in tables(small, name)

    def test_eviction_packs_named_or_touched_by_batch_are_kept(
        self,
        small: Backend,
        name: bytes,
    ) -> None:
        held = [large_pack(name, seed) for seed in range(3)]
        for pack in held:
            small.commit(name, CommitBatch([pack]))
        write_until_evicted(small, name, rounds=6)
        manifest = sample_manifest("r", packs=[held[0].pack_id, held[1].pack_id])
        batch = CommitBatch(
            [large_pack(name, 50, blocks=20)], [manifest], touches=[held[2].pack_id]
        )
        evicted_ids = [table.pack_id for table in small.commit(name, batch).evicted]
        assert evicted_ids
        assert not {pack.pack_id for pack in held} & set(evicted_ids)
        assert [manifest.id for manifest in small.catalogue(name).manifests()] == ["r"]

    def test_eviction_all_packs_touched_in_batch_evicts_deepest_first(
        self,
        small: Backend,
        name: bytes,
    ) -> None:
        packs = [large_pack(name, seed, depth=3 * seed) for seed in range(10)]
        for pack in packs:
            small.commit(name, CommitBatch([pack]))
        batch = CommitBatch(
            [large_pack(name, 50, blocks=18)], touches=list(tables(small, name))
        )
        evicted = small.commit(name, batch).evicted
        assert evicted
        assert [table.pack_id for table in evicted] == [
            pack.pack_id for pack in packs[::-1]
        ][: len(evicted)]

    def test_eviction_evicted_pack_drops_manifests_naming_it(
        self,
        small: Backend,
        name: bytes,
    ) -> None:
        packs = [large_pack(name, seed, depth=3 * seed) for seed in range(3)]
        ids = [pack.pack_id for pack in packs]
        small.commit(name, CommitBatch(packs, [sample_manifest("long", packs=ids)]))
        small.commit(
            name, CommitBatch(manifests=[sample_manifest("short", packs=ids[:1])])
        )
        evicted_ids = write_until_evicted(small, name, until=ids[2])
        assert evicted_ids[0] == ids[2]
        assert [manifest.id for manifest in small.catalogue(name).manifests()] == [
            "short"
        ]
        assert small.manifest_keys(name, ["long"])[0] is None
        assert ids[0] in tables(small, name)

    def test_eviction_old_manifest_is_dropped_while_its_pack_is_kept(
        self,
        small: Backend,
        name: bytes,
    ) -> None:
        used = large_pack(name, 1, blocks=1)
        small.commit(
            name, CommitBatch([used], [sample_manifest("old", packs=[used.pack_id])])
        )
        seed = 1000
        while list(small.catalogue(name).manifests()):
            small.commit(
                name, CommitBatch([large_pack(name, seed)], touches=[used.pack_id])
            )
            seed += 1
            assert seed < 1100
        assert used.pack_id in tables(small, name)

    def test_commit_deletion_removes_packs_reachable_only_through_it(
        self,
        backend: Backend,
        namespace: bytes,
    ) -> None:
        """A pin does not protect a manifest and its packs from deletions."""
        packs = [large_pack(namespace, seed, depth=3 * seed) for seed in range(5)]
        ids = [pack.pack_id for pack in packs]
        other = large_pack(namespace, 9)
        first = sample_manifest("first", packs=ids[:4])
        second = sample_manifest("second", packs=[other.pack_id, ids[2]])
        loose = sample_manifest("loose", packs=[ids[1], ids[4]], ordered=False)
        backend.commit(
            namespace,
            CommitBatch(
                [*packs, other], [first, second, loose], pins=[("first", True)]
            ),
        )
        result = backend.commit(namespace, CommitBatch(deletions=[ids[1]]))
        assert {table.pack_id for table in result.evicted} == {ids[1], ids[3]}
        assert set(tables(backend, namespace)) == {
            ids[0],
            ids[2],
            ids[4],
            other.pack_id,
        }
        assert [
            manifest.id for manifest in backend.catalogue(namespace).manifests()
        ] == ["second"]

    @pytest.mark.parametrize("kind", ["deletions", "bad"])
    def test_commit_deletion_of_pack_in_many_requests_drops_them_all(
        self,
        backend: Backend,
        namespace: bytes,
        kind: str,
    ) -> None:
        shared, other = (
            large_pack(namespace, 1, blocks=1),
            large_pack(namespace, 2, blocks=1),
        )
        kept = sample_manifest("kept", packs=[other.pack_id])
        backend.commit(namespace, CommitBatch([shared, other], [kept]))
        for start in range(0, 1300, 100):
            packs = [
                sample_pack(namespace, 10 + start + n, blocks=1, block_bytes=1, depth=3)
                for n in range(100)
            ]
            chains = [[shared.pack_id, pack.pack_id] for pack in packs]
            manifests = [
                sample_manifest(f"r{start + number}", packs=chain)
                for number, chain in enumerate(chains)
            ]
            cursor = backend.commit(namespace, CommitBatch(packs, manifests)).cursor
        batch = CommitBatch(seen=cursor, **{kind: [shared.pack_id]})  # type: ignore[arg-type]
        result = backend.commit(namespace, batch)
        assert not result.stale
        assert len(result.evicted) == (1301 if kind == "deletions" else 1)
        assert [
            manifest.id for manifest in backend.catalogue(namespace).manifests()
        ] == ["kept"]
        assert other.pack_id in tables(backend, namespace)
        assert list(backend.changes(namespace, result.cursor).added) == []

    def test_commit_bad_pack_is_removed_without_later_packs(
        self,
        backend: Backend,
        namespace: bytes,
    ) -> None:
        packs = [large_pack(namespace, seed, depth=3 * seed) for seed in range(4)]
        ids = [pack.pack_id for pack in packs]
        long, other = (
            sample_manifest("long", packs=ids[:3]),
            sample_manifest("other", 1, packs=ids[2:]),
        )
        lost = sample_manifest("lost", 2, packs=ids[1:3])
        backend.commit(
            namespace, CommitBatch(packs, [long, other, lost], pins=[("long", True)])
        )
        named = {
            head.id
            for head in backend.catalogue(namespace).manifests_naming([ids[1], ids[1]])
        }
        assert named == {"long", "lost"}
        chain = backend.catalogue(namespace).chain("long")
        assert chain == ids[:3]
        assert [
            table.pack_id for table in backend.tables(namespace, [*chain, bytes(16)])
        ] == chain
        assert backend.catalogue(namespace).chain("nobody") is None
        shorter = sample_manifest("long", 3, packs=ids[:1])
        batch = CommitBatch(
            bad=[ids[1], bytes(16)], manifests=[shorter], pins=[("long", True)]
        )
        result = backend.commit(namespace, batch)
        assert [table.pack_id for table in result.evicted] == [ids[1]]
        assert set(tables(backend, namespace)) == {ids[0], ids[2], ids[3]}
        assert {head.id for head in backend.catalogue(namespace).manifests()} == {
            "long",
            "other",
        }
        assert backend.manifest_keys(namespace, ["long"])[0] == shorter.keys

    def test_eviction_pinned_request_is_kept_until_unpinned(
        self,
        small: Backend,
        name: bytes,
    ) -> None:
        packs = [large_pack(name, seed, depth=3 * seed) for seed in range(2)]
        ids = [pack.pack_id for pack in packs]
        batch = CommitBatch(
            packs,
            [sample_manifest("r", packs=ids)],
            pins=[("r", True), ("nobody", True)],
        )
        small.commit(name, batch)
        write_until_evicted(small, name, rounds=30)
        assert [manifest.id for manifest in small.catalogue(name).manifests()] == ["r"]
        for pack in packs:
            assert read_pack(small, name, pack.table) == payload_of(pack)
        check_totals(small)

        small.commit(
            name, CommitBatch(manifests=[sample_manifest("r", 1, packs=ids[:1])])
        )
        evicted_ids = write_until_evicted(small, name, rounds=30)
        assert ids[1] in evicted_ids, (
            "a pack that only the replaced manifest names is still pinned"
        )
        assert ids[0] not in evicted_ids, (
            "the new manifest is not pinned like the old one"
        )
        small.commit(name, CommitBatch(pins=[("r", False)]))
        assert ids[0] in write_until_evicted(small, name, rounds=30)
        assert not list(small.catalogue(name).manifests())

    def test_commit_store_full_of_pins_raises_full_and_evicts_nothing(
        self,
        small: Backend,
        name: bytes,
    ) -> None:
        packs = [large_pack(name, seed, blocks=8) for seed in range(3)]
        manifest = sample_manifest("r", packs=[pack.pack_id for pack in packs])
        small.commit(name, CommitBatch(packs, [manifest], pins=[("r", True)]))
        loose = large_pack(name, 5, blocks=1)
        cursor = small.commit(name, CommitBatch([loose])).cursor
        with pytest.raises(StoreFullError):
            small.commit(name, CommitBatch([large_pack(name, 6, blocks=24)]))
        assert loose.pack_id in tables(small, name), (
            "a pack was evicted although the batch cannot fit"
        )
        assert not small.commit(
            name, CommitBatch(touches=[loose.pack_id], seen=cursor)
        ).stale
        assert check_totals(small).packs == 4

    def test_eviction_capacity_is_shared_by_all_namespaces(
        self,
        small: Backend,
        name: bytes,
    ) -> None:
        other = small.open_namespace(sample_identity(1)).id
        ours, theirs = large_pack(name, 1), large_pack(other, 1)
        cursor = small.commit(
            other, CommitBatch([theirs], [sample_manifest("r", packs=[theirs.pack_id])])
        ).cursor
        small.commit(name, CommitBatch([ours]))
        evicted_ids = write_until_evicted(small, name, until=ours.pack_id)
        assert evicted_ids[:2] == [theirs.pack_id, ours.pack_id]
        changes = small.changes(other, cursor)
        assert changes.reset, "it has lost its last content"
        assert not list(changes.added)
        assert not list(small.catalogue(other).manifests())
        assert [space.id for space in small.namespaces()] == [name]

    def test_eviction_other_namespaces_pack_is_in_its_changes(
        self,
        small: Backend,
        name: bytes,
    ) -> None:
        other = small.open_namespace(sample_identity(1)).id
        ours, theirs = large_pack(name, 1), large_pack(other, 1)
        # names no packs, and is pinned: the namespace stays
        manifest = sample_manifest("r")
        batch = CommitBatch([theirs], [manifest], pins=[("r", True)])
        cursor = small.commit(other, batch).cursor
        small.commit(name, CommitBatch([ours]))
        write_until_evicted(small, name, until=ours.pack_id)
        assert small.changes(other, cursor).removed == {
            theirs.pack_id: theirs.table.keys.fingerprints
        }
        assert {space.id for space in small.namespaces()} == {name, other}

    def test_ttl_expires_unpinned_pack_after_its_last_use(
        self,
        aging: Backend,
        set_clocks: Callable[[float, float], None],
    ) -> None:
        name = aging.open_namespace(sample_identity()).id
        used, idle, pinned = (large_pack(name, seed, blocks=1) for seed in range(3))
        manifests = [
            sample_manifest("r", packs=[idle.pack_id]),
            sample_manifest("p", packs=[pinned.pack_id]),
        ]
        aging.commit(
            name, CommitBatch([used, idle, pinned], manifests, pins=[("p", True)])
        )
        set_clocks(0.6 * _HOUR_S, 0.6 * _HOUR_S)
        assert not aging.commit(name, CommitBatch(touches=[used.pack_id])).evicted
        set_clocks(1.2 * _HOUR_S, 1.2 * _HOUR_S)
        assert [
            table.pack_id for table in aging.commit(name, CommitBatch()).evicted
        ] == [idle.pack_id]
        assert [manifest.id for manifest in aging.catalogue(name).manifests()] == ["p"]
        set_clocks(1.5 * _HOUR_S, 1.5 * _HOUR_S)
        assert not aging.commit(name, CommitBatch()).evicted
        set_clocks(1.8 * _HOUR_S, 1.8 * _HOUR_S)
        assert [
            table.pack_id for table in aging.commit(name, CommitBatch()).evicted
        ] == [used.pack_id]
        assert set(tables(aging, name)) == {pinned.pack_id}

    def test_ttl_many_packs_and_requests_expire_after_several_commits(
        self,
        aging: Backend,
        set_clocks: Callable[[float, float], None],
    ) -> None:
        name = aging.open_namespace(sample_identity()).id
        packs = [
            sample_pack(name, seed, blocks=1, block_bytes=1) for seed in range(300)
        ]
        aging.commit(
            name,
            CommitBatch(packs, [sample_manifest(f"r{number}") for number in range(50)]),
        )
        set_clocks(2 * _HOUR_S, 2 * _HOUR_S)
        for _ in range(50):
            aging.commit(name, CommitBatch())
        assert (aging.stats().packs, aging.stats().requests) == (0, 0)
        assert list(aging.namespaces()) == []

    def test_ttl_of_request_expires_only_that_request(
        self,
        aging: Backend,
        set_clocks: Callable[[float, float], None],
    ) -> None:
        name = aging.open_namespace(sample_identity()).id
        shared, own, kept = (
            large_pack(name, seed, blocks=1, depth=seed) for seed in range(3)
        )
        manifests = [
            sample_manifest(
                "short", packs=[shared.pack_id, own.pack_id], ttl_s=0.25 * _HOUR_S
            ),
            sample_manifest("longer", packs=[shared.pack_id], ttl_s=0.5 * _HOUR_S),
            sample_manifest("kept", packs=[kept.pack_id]),
        ]
        aging.commit(
            name, CommitBatch([shared, own, kept], manifests, pins=[("short", True)])
        )
        set_clocks(0.15 * _HOUR_S, 0.15 * _HOUR_S)
        assert not aging.commit(
            name, CommitBatch(touches=[shared.pack_id, own.pack_id])
        ).evicted
        set_clocks(0.3 * _HOUR_S, 0.3 * _HOUR_S)
        assert not aging.commit(name, CommitBatch()).evicted, (
            "the packs were touched 0.15 hours ago"
        )
        set_clocks(0.45 * _HOUR_S, 0.45 * _HOUR_S)
        assert [
            table.pack_id for table in aging.commit(name, CommitBatch()).evicted
        ] == [own.pack_id]
        assert {manifest.id for manifest in aging.catalogue(name).manifests()} == {
            "longer",
            "kept",
        }
        set_clocks(0.7 * _HOUR_S, 0.7 * _HOUR_S)
        assert [
            table.pack_id for table in aging.commit(name, CommitBatch()).evicted
        ] == [shared.pack_id]
        assert set(tables(aging, name)) == {kept.pack_id}

    def test_eviction_low_priority_pack_is_evicted_first(
        self,
        small: Backend,
        name: bytes,
    ) -> None:
        shared, normal, low, last = (
            large_pack(name, seed, depth=3 * seed) for seed in range(4)
        )
        small.commit(
            name,
            CommitBatch(
                [shared, normal],
                [sample_manifest("n", packs=[shared.pack_id, normal.pack_id])],
            ),
        )
        for number, pack in enumerate((low, last)):
            batch = sample_manifest(
                f"batch{number}", packs=[shared.pack_id, pack.pack_id], priority="low"
            )
            small.commit(name, CommitBatch([pack], [batch]))
        small.commit(name, CommitBatch(touches=[low.pack_id]))
        evicted_ids = write_until_evicted(small, name, until=shared.pack_id)
        ours = [
            pack_id
            for pack_id in evicted_ids
            if pack_id in {pack.pack_id for pack in (shared, normal, low, last)}
        ]
        assert ours == [pack.pack_id for pack in (last, low, normal, shared)]

    def test_eviction_low_priority_ends_once_normal_request_names_pack(
        self,
        small: Backend,
        name: bytes,
    ) -> None:
        first, second = (large_pack(name, seed) for seed in range(2))
        for pack in (first, second):
            manifest = sample_manifest(
                f"{pack.pack_id.hex()}", packs=[pack.pack_id], priority="low"
            )
            small.commit(name, CommitBatch([pack], [manifest]))
        small.commit(
            name,
            CommitBatch(manifests=[sample_manifest("normal", packs=[first.pack_id])]),
        )
        small.commit(
            name,
            CommitBatch(
                manifests=[
                    sample_manifest("low", packs=[first.pack_id], priority="low")
                ]
            ),
        )
        evicted_ids = write_until_evicted(small, name, until=second.pack_id)
        assert first.pack_id not in evicted_ids

    def test_ttl_low_priority_pack_expires_after_its_own_last_use(
        self,
        aging: Backend,
        set_clocks: Callable[[float, float], None],
    ) -> None:
        name = aging.open_namespace(sample_identity()).id
        normal, low = (large_pack(name, seed, blocks=1) for seed in range(2))
        aging.commit(name, CommitBatch([normal]))
        set_clocks(0.6 * _HOUR_S, 0.6 * _HOUR_S)
        aging.commit(
            name,
            CommitBatch(
                [low], [sample_manifest("low", packs=[low.pack_id], priority="low")]
            ),
        )
        set_clocks(1.2 * _HOUR_S, 1.2 * _HOUR_S)
        assert [
            table.pack_id for table in aging.commit(name, CommitBatch()).evicted
        ] == [normal.pack_id]
        set_clocks(1.8 * _HOUR_S, 1.8 * _HOUR_S)
        assert [
            table.pack_id for table in aging.commit(name, CommitBatch()).evicted
        ] == [low.pack_id]
        assert not list(aging.catalogue(name).manifests())

    def test_commit_wall_clock_set_back_expires_nothing(
        self,
        aging: Backend,
        set_clocks: Callable[[float, float], None],
    ) -> None:
        name = aging.open_namespace(sample_identity()).id
        first, second = large_pack(name, 1, blocks=1), large_pack(name, 2, blocks=1)
        aging.commit(name, CommitBatch([first]))
        set_clocks(-10 * _HOUR_S, 0.0)
        aging.commit(name, CommitBatch([second]))
        assert set(tables(aging, name)) == {first.pack_id, second.pack_id}
        set_clocks(0.0, 0.0)
        assert not aging.commit(name, CommitBatch()).evicted

    def test_commit_evicted_equals_packs_removed_from_catalogue(
        self,
        small: Backend,
        name: bytes,
    ) -> None:
        rng = np.random.default_rng(3)
        written: dict[bytes, PackWriter] = {}
        cursor = small.changes(name, None).cursor
        for step in range(60):
            pack = large_pack(name, step, blocks=int(rng.integers(1, 9)))
            held = set(tables(small, name))
            result = small.commit(name, CommitBatch([pack], seen=cursor))
            assert not result.stale
            written[pack.pack_id] = pack
            evicted_ids = {table.pack_id for table in result.evicted}
            assert {*held, pack.pack_id} - evicted_ids == set(tables(small, name))
            assert evicted_ids <= held
            changes = small.changes(name, cursor)
            assert set(changes.removed) == evicted_ids or changes.reset
            cursor = result.cursor
            assert changes.cursor == cursor
            check_totals(small)
        assert check_totals(small).stored_bytes >= 2 << 20, (
            "less than half of the capacity is used"
        )
        for table in tables(small, name).values():
            assert read_pack(small, name, table) == payload_of(written[table.pack_id])

    def test_eviction_order_is_kept_after_reopen(self, small_url: str | None) -> None:
        self.need_sharing()
        if small_url is None:
            pytest.skip("the driver does not support a capacity")
        packs: list[PackWriter] = []
        for step, used in enumerate((None, None, None, 1, 0)):
            backend = self.open(small_url)
            name = backend.open_namespace(sample_identity()).id
            if used is None:
                packs.append(large_pack(name, step))
                backend.commit(name, CommitBatch([packs[-1]]))
            else:
                backend.commit(name, CommitBatch(touches=[packs[used].pack_id]))
            backend.close()
        backend = self.open(small_url)
        evicted_ids = write_until_evicted(backend, name, until=packs[0].pack_id)
        ids = [pack.pack_id for pack in packs]
        assert [pack_id for pack_id in evicted_ids if pack_id in ids] == ids[::-1]
        backend.close()

    def test_eviction_pack_of_two_pinned_requests_is_kept_until_both_unpinned(
        self,
        small: Backend,
        name: bytes,
    ) -> None:
        pack = large_pack(name, 1)
        manifests = [sample_manifest(number, packs=[pack.pack_id]) for number in "ab"]
        small.commit(
            name,
            CommitBatch(
                [pack], manifests, pins=[("a", True), ("b", True), ("b", True)]
            ),
        )
        small.commit(name, CommitBatch(pins=[("a", False), ("a", False)]))
        assert pack.pack_id not in write_until_evicted(small, name, rounds=30)
        small.commit(name, CommitBatch(pins=[("b", False)]))
        assert pack.pack_id in write_until_evicted(small, name, rounds=30)


def large_pack(
    namespace: bytes,
    seed: int,
    *,
    blocks: int = 3,
    depth: int = 0,
) -> PackWriter:
    """Return a pack with blocks of 100,000 bytes, so that few packs fill a small store."""
    return sample_pack(namespace, seed, blocks=blocks, block_bytes=100_000, depth=depth)


def write_until_evicted(
    backend: Backend,
    namespace: bytes,
    *,
    until: bytes = b"",
    rounds: int = 100,
) -> list[bytes]:
    """Write up to ``rounds`` new packs, one per commit; return the ids of the evicted packs, in
    order.

    :param until: id of the pack whose eviction ends the writes; the test fails if it is not
        evicted. Empty: write all ``rounds`` packs.
    """
    evicted_ids: list[bytes] = []
    first = 1000 + 1000 * backend.stats().packs  # unique within a test
    for seed in range(first, first + rounds):
        pack = large_pack(namespace, int.from_bytes(namespace[:2], "big") + seed)
        evicted_ids += [
            table.pack_id
            for table in backend.commit(namespace, CommitBatch([pack])).evicted
        ]
        if until in evicted_ids:
            return evicted_ids
    assert not until, "the pack was not evicted"
    return evicted_ids
