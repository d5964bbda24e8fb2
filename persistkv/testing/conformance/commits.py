"""Tests of commits: all or nothing, the first wins, deletions, staleness, totals. Tests of cursors on the changes."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from persistkv.errors import StoreFullError
from persistkv.storage.backend import CommitBatch
from persistkv.storage.extensions import InspectableBackend
from persistkv.storage.format.codec import RawCodec, ZstdCodec
from persistkv.storage.format.pack_writer import PackWriter, Segment
from persistkv.testing.conformance.suite import (
    BackendSuite,
    RawKind,
    RawStore,
    check_totals,
    read_pack,
    sample_identity,
    tables,
)
from persistkv.testing.samples import (
    FailingSource,
    SourceFailure,
    payload_of,
    sample_blocks,
    sample_keys,
    sample_manifest,
    sample_pack,
    sample_segment,
)


class CommitTests(BackendSuite):
    """Tests of ``commit`` and ``stats``."""

    @pytest.mark.parametrize("codec", [RawCodec(), ZstdCodec(1)], ids=str)
    def test_commit_pack_of_two_groups_stores_table_and_payload(
        self, backend: InspectableBackend, namespace: bytes, codec: RawCodec | ZstdCodec
    ) -> None:
        segments = [
            sample_segment(1, group=0, blocks=20, block_bytes=100_000),
            sample_segment(2, group=1, blocks=7, block_bytes=4097, hash_bytes=8),
        ]
        pack = PackWriter(namespace, codec, segments)
        backend.commit(namespace, CommitBatch([pack]))
        (table,) = backend.changes(namespace, None).added
        assert table == pack.table
        assert table.keys.unpack() == [*segments[0].keys, *segments[1].keys]
        assert read_pack(backend, namespace, table) == payload_of(pack)
        assert check_totals(backend).blocks == 27

    @pytest.mark.parametrize("block_bytes", [1, 4095, (1 << 20) - 1, 1 << 20, (1 << 20) + 1, 3 * (1 << 20) + 5])
    def test_commit_any_block_size_stores_payload(
        self, backend: InspectableBackend, namespace: bytes, block_bytes: int
    ) -> None:
        pack = sample_pack(namespace, 1, blocks=3, block_bytes=block_bytes)
        backend.commit(namespace, CommitBatch([pack]))
        assert tables(backend, namespace) == {pack.pack_id: pack.table}
        assert read_pack(backend, namespace, pack.table) == payload_of(pack)

    def test_commit_several_packs_and_manifests_stores_all(self, backend: InspectableBackend, namespace: bytes) -> None:
        packs = [sample_pack(namespace, seed) for seed in range(5)]
        manifests = [sample_manifest(f"r{seed}", seed) for seed in range(3)]
        result = backend.commit(namespace, CommitBatch(packs, manifests))
        assert not result.stale
        assert not result.evicted
        assert tables(backend, namespace) == {pack.pack_id: pack.table for pack in packs}
        assert {manifest.id for manifest in backend.manifests(namespace)} == {"r0", "r1", "r2"}

    def test_commit_failing_stream_changes_nothing(self, backend: InspectableBackend, namespace: bytes) -> None:
        held, good = sample_pack(namespace, 1), sample_pack(namespace, 2)
        cursor = backend.commit(namespace, CommitBatch([held])).cursor
        stats = backend.stats()
        source = FailingSource([sample_blocks(3, 40, 1 << 18)], fails_at=30)
        torn = PackWriter(namespace, RawCodec(), [Segment(0, 1 << 18, sample_keys(3, 40), source)])
        with pytest.raises(SourceFailure):
            backend.commit(namespace, CommitBatch([good, torn], [sample_manifest("r1")], [held.pack_id]))

        assert tables(backend, namespace) == {held.pack_id: held.table}
        assert read_pack(backend, namespace, held.table) == payload_of(held)
        assert read_pack(backend, namespace, good.table) is None
        assert list(backend.manifests(namespace)) == []
        assert list(backend.changes(namespace, cursor).added) == []
        assert replace(check_totals(backend), disk_bytes=0) == replace(stats, disk_bytes=0)
        backend.commit(namespace, CommitBatch([good], seen=cursor))
        assert read_pack(backend, namespace, good.table) == payload_of(good)

    def test_commit_too_large_pack_raises_full_and_changes_nothing(
        self, small: InspectableBackend, name: bytes
    ) -> None:
        held = sample_pack(name, 1, blocks=8, block_bytes=1 << 18)
        cursor = small.commit(name, CommitBatch([held])).cursor
        large = sample_pack(name, 2, blocks=32, block_bytes=1 << 18)
        with pytest.raises(StoreFullError):
            small.commit(name, CommitBatch([large], [sample_manifest("r1")], [held.pack_id]))
        assert tables(small, name) == {held.pack_id: held.table}
        assert read_pack(small, name, held.table) == payload_of(held)
        assert list(small.manifests(name)) == []
        check_totals(small)

        fits = sample_pack(name, 3)
        assert not small.commit(name, CommitBatch([fits], seen=cursor)).stale
        assert read_pack(small, name, fits.table) == payload_of(fits)

    def test_commit_emptied_store_can_be_refilled(self, small: InspectableBackend, name: bytes) -> None:
        for round_number in range(3):
            for number in range(60):
                size = (200_000, 4096)[number % 2]
                pack = sample_pack(name, 100 * round_number + number, blocks=1, block_bytes=size)
                small.commit(name, CommitBatch([pack]))
            assert check_totals(small).packs >= 10
            for pack_id in tables(small, name):
                small.commit(name, CommitBatch(deletions=[pack_id]))
            assert check_totals(small).packs == 0

    def test_commit_existing_pack_id_keeps_first_pack(self, backend: InspectableBackend, namespace: bytes) -> None:
        first, second = sample_pack(namespace, 1, content=10), sample_pack(namespace, 1, content=20)
        assert first.pack_id == second.pack_id
        cursor = backend.commit(namespace, CommitBatch([first, second])).cursor
        backend.commit(namespace, CommitBatch([second]))
        assert tables(backend, namespace) == {first.pack_id: first.table}
        assert read_pack(backend, namespace, first.table) == payload_of(first)
        assert list(backend.changes(namespace, cursor).added) == []
        assert check_totals(backend).packs == 1

    def test_commit_deletion_removes_pack_and_reports_it(self, backend: InspectableBackend, namespace: bytes) -> None:
        kept, deleted = sample_pack(namespace, 1), sample_pack(namespace, 2, blocks=30, block_bytes=70_000)
        cursor = backend.commit(namespace, CommitBatch([kept, deleted])).cursor
        result = backend.commit(namespace, CommitBatch(deletions=[deleted.pack_id, bytes(16), deleted.pack_id]))
        assert list(result.evicted) == [deleted.table]
        assert read_pack(backend, namespace, deleted.table) is None
        assert read_pack(backend, namespace, kept.table) == payload_of(kept)
        changes = backend.changes(namespace, cursor)
        assert changes.removed == {deleted.pack_id: deleted.table.keys.fingerprints}
        assert changes.cursor == result.cursor
        assert check_totals(backend).packs == 1

        back = sample_pack(namespace, 2, blocks=30, block_bytes=70_000, content=5)
        backend.commit(namespace, CommitBatch([back]))
        assert read_pack(backend, namespace, back.table) == payload_of(back)

    def test_commit_deletion_and_same_pack_id_replaces_pack(
        self, backend: InspectableBackend, namespace: bytes
    ) -> None:
        bad, good = sample_pack(namespace, 1, content=10), sample_pack(namespace, 1, content=20)
        cursor = backend.commit(namespace, CommitBatch([bad])).cursor
        result = backend.commit(namespace, CommitBatch([good], deletions=[bad.pack_id]))
        assert list(result.evicted) == [bad.table]
        assert read_pack(backend, namespace, good.table) == payload_of(good)
        changes = backend.changes(namespace, cursor)
        assert changes.removed == {bad.pack_id: bad.table.keys.fingerprints}
        assert list(changes.added) == [good.table]

    def test_commit_stale_cursor_changes_nothing(self, backend: InspectableBackend, namespace: bytes) -> None:
        seen = backend.changes(namespace, None).cursor
        first, second = sample_pack(namespace, 1), sample_pack(namespace, 2)
        cursor = backend.commit(namespace, CommitBatch([first], seen=seen)).cursor
        result = backend.commit(namespace, CommitBatch([second], [sample_manifest("r1")], [first.pack_id], seen=seen))
        assert result.stale
        assert list(backend.changes(namespace, result.cursor).added) == [first.table]
        assert tables(backend, namespace) == {first.pack_id: first.table}
        assert list(backend.manifests(namespace)) == []

        assert backend.commit(namespace, CommitBatch()).cursor == cursor, "an empty batch changed the store"
        assert not backend.commit(namespace, CommitBatch([second], seen=cursor)).stale
        assert not backend.commit(namespace, CommitBatch(deletions=[first.pack_id])).stale
        assert tables(backend, namespace) == {second.pack_id: second.table}

    def test_stats_after_many_commits_equal_recount(self, backend: InspectableBackend) -> None:
        names = [backend.open_namespace(sample_identity(number)).id for number in range(2)]
        rng = np.random.default_rng(7)
        for step in range(40):
            namespace = names[step % 2]
            held = list(tables(backend, namespace))
            packs = [
                sample_pack(namespace, int(rng.integers(30)), blocks=int(rng.integers(1, 9)), codec=ZstdCodec(1))
                for _ in range(rng.integers(3))
            ]
            deleted = [held[index] for index in rng.permutation(len(held))[: rng.integers(3)]]
            manifests = [sample_manifest(f"r{rng.integers(12)}", step)] if step % 3 else []
            backend.commit(namespace, CommitBatch(packs, manifests, deleted))
            check_totals(backend)
        assert backend.stats().packs


class ChangesTests(BackendSuite):
    """Tests of ``changes``."""

    def test_changes_without_cursor_returns_whole_catalogue(
        self, backend: InspectableBackend, namespace: bytes
    ) -> None:
        empty = backend.changes(namespace, None)
        assert empty.reset
        assert not list(empty.added)
        assert not empty.removed
        packs = [sample_pack(namespace, seed) for seed in range(3)]
        for pack in packs:
            backend.commit(namespace, CommitBatch([pack]))
        changes = backend.changes(namespace, None)
        assert changes.reset
        assert {table.pack_id for table in changes.added} == {pack.pack_id for pack in packs}

    def test_changes_with_cursor_returns_later_changes_only(
        self, backend: InspectableBackend, namespace: bytes
    ) -> None:
        first, second, third = (sample_pack(namespace, seed) for seed in range(3))
        backend.commit(namespace, CommitBatch([first]))
        cursor = backend.changes(namespace, None).cursor
        quiet = backend.changes(namespace, cursor)
        assert (quiet.cursor, list(quiet.added), list(quiet.removed), quiet.reset) == (cursor, [], [], False)

        backend.commit(namespace, CommitBatch([second]))
        backend.commit(namespace, CommitBatch([third], deletions=[first.pack_id]))
        changes = backend.changes(namespace, cursor)
        assert not changes.reset
        assert {table.pack_id: table for table in changes.added} == {
            second.pack_id: second.table,
            third.pack_id: third.table,
        }
        assert changes.removed == {first.pack_id: first.table.keys.fingerprints}
        assert not list(backend.changes(namespace, changes.cursor).added)

    def test_changes_pack_committed_and_deleted_is_not_added(
        self, backend: InspectableBackend, namespace: bytes
    ) -> None:
        cursor = backend.changes(namespace, None).cursor
        pack = sample_pack(namespace, 1)
        backend.commit(namespace, CommitBatch([pack]))
        backend.commit(namespace, CommitBatch(deletions=[pack.pack_id]))
        changes = backend.changes(namespace, cursor)
        assert not list(changes.added)
        assert set(changes.removed) <= {pack.pack_id}

    def test_changes_commits_without_own_packs_keep_cursor_current(
        self, backend: InspectableBackend, namespace: bytes
    ) -> None:
        cursor = backend.changes(namespace, None).cursor
        other = backend.open_namespace(sample_identity(1)).id
        backend.commit(other, CommitBatch([sample_pack(other, 1)]))
        backend.commit(namespace, CommitBatch(manifests=[sample_manifest("r1")]))
        assert not list(backend.changes(namespace, cursor).added)
        assert not backend.commit(namespace, CommitBatch([sample_pack(namespace, 1)], seen=cursor)).stale

    @pytest.mark.parametrize("cursor", [b"", b"x", b"\xff" * 8, b"\xff" * 16, bytes(16), b"\xff" * 64])
    def test_changes_unknown_cursor_resets(self, backend: InspectableBackend, namespace: bytes, cursor: bytes) -> None:
        pack = sample_pack(namespace, 1)
        backend.commit(namespace, CommitBatch([pack]))
        changes = backend.changes(namespace, cursor)
        assert changes.reset
        assert list(changes.added) == [pack.table]
        assert backend.commit(namespace, CommitBatch([sample_pack(namespace, 2)], seen=cursor)).stale

    def test_changes_too_old_cursor_resets(self, backend: InspectableBackend, namespace: bytes) -> None:
        if self.changes_kept is None:
            pytest.skip("the driver keeps all changes")
        old = backend.changes(namespace, None).cursor
        first = sample_pack(namespace, 0, blocks=1, block_bytes=1)
        recent = backend.commit(namespace, CommitBatch([first])).cursor
        rest = [sample_pack(namespace, seed, blocks=1, block_bytes=1) for seed in range(1, self.changes_kept + 1)]
        backend.commit(namespace, CommitBatch(rest))
        assert backend.changes(namespace, old).reset
        assert len(list(backend.changes(namespace, old).added)) == len(rest) + 1
        assert len(list(backend.changes(namespace, recent).added)) >= len(rest)

    def test_changes_damaged_table_is_omitted_until_rewritten_or_deleted(
        self, backend: InspectableBackend, namespace: bytes, raw: RawStore
    ) -> None:
        bad, worse, good = (sample_pack(namespace, seed) for seed in range(3))
        cursor = backend.changes(namespace, None).cursor
        backend.commit(namespace, CommitBatch([bad, worse, good]))
        for pack in (bad, worse):
            raw.flip(RawKind.TABLE, namespace, pack.pack_id, -30)
        assert tables(backend, namespace) == {good.pack_id: good.table}
        assert list(backend.changes(namespace, cursor).added) == [good.table]

        again = sample_pack(namespace, 0, content=9)
        backend.commit(namespace, CommitBatch([again], deletions=[worse.pack_id]))
        assert tables(backend, namespace) == {good.pack_id: good.table, again.pack_id: again.table}
        assert read_pack(backend, namespace, again.table) == payload_of(again)
        assert read_pack(backend, namespace, worse.table) is None
        assert check_totals(backend).packs == 2
