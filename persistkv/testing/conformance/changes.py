"""Following the changes of a catalogue."""

from __future__ import annotations

import pytest

from persistkv.storage.backend import CommitBatch
from persistkv.storage.extensions import InspectableBackend
from persistkv.testing.conformance.suite import (
    BackendSuite,
    RawKind,
    RawStore,
    check_totals,
    read_pack,
    sample_identity,
    tables,
)
from persistkv.testing.samples import payload_of, sample_manifest, sample_pack


class ChangesTests(BackendSuite):
    """Tests of ``changes``."""

    def test_first_call_is_the_whole_catalogue(self, backend: InspectableBackend, namespace: bytes) -> None:
        empty = backend.changes(namespace, None)
        assert empty.reset
        assert not empty.added
        assert not empty.removed
        packs = [sample_pack(namespace, seed) for seed in range(3)]
        for pack in packs:
            backend.commit(namespace, CommitBatch([pack]))
        changes = backend.changes(namespace, None)
        assert changes.reset
        assert {table.pack_id for table in changes.added} == {pack.pack_id for pack in packs}

    def test_cursor_goes_on_where_it_was(self, backend: InspectableBackend, namespace: bytes) -> None:
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
        assert list(changes.removed) == [first.pack_id]
        assert not backend.changes(namespace, changes.cursor).added

    def test_what_came_and_went_is_not_added(self, backend: InspectableBackend, namespace: bytes) -> None:
        cursor = backend.changes(namespace, None).cursor
        pack = sample_pack(namespace, 1)
        backend.commit(namespace, CommitBatch([pack]))
        backend.commit(namespace, CommitBatch(deletions=[pack.pack_id]))
        changes = backend.changes(namespace, cursor)
        assert not changes.added
        assert set(changes.removed) <= {pack.pack_id}

    def test_commits_to_others_move_no_cursor(self, backend: InspectableBackend, namespace: bytes) -> None:
        cursor = backend.changes(namespace, None).cursor
        other = backend.open_namespace(sample_identity(1)).id
        backend.commit(other, CommitBatch([sample_pack(other, 1)]))
        backend.commit(namespace, CommitBatch(manifests=[sample_manifest("r1")]))
        assert not backend.changes(namespace, cursor).added
        assert not backend.commit(namespace, CommitBatch([sample_pack(namespace, 1)], seen=cursor)).stale

    @pytest.mark.parametrize("cursor", [b"", b"x", b"\xff" * 8, b"\xff" * 16, bytes(16), b"\xff" * 64])
    def test_strange_cursor_starts_over(self, backend: InspectableBackend, namespace: bytes, cursor: bytes) -> None:
        pack = sample_pack(namespace, 1)
        backend.commit(namespace, CommitBatch([pack]))
        changes = backend.changes(namespace, cursor)
        assert changes.reset
        assert list(changes.added) == [pack.table]
        assert backend.commit(namespace, CommitBatch([sample_pack(namespace, 2)], seen=cursor)).stale

    def test_cursor_that_is_too_old_starts_over(self, backend: InspectableBackend, namespace: bytes) -> None:
        if self.changes_kept is None:
            pytest.skip("the driver keeps all changes")
        old = backend.changes(namespace, None).cursor
        first = sample_pack(namespace, 0, blocks=1, block_bytes=1)
        recent = backend.commit(namespace, CommitBatch([first])).cursor
        rest = [sample_pack(namespace, seed, blocks=1, block_bytes=1) for seed in range(1, self.changes_kept + 1)]
        backend.commit(namespace, CommitBatch(rest))
        assert backend.changes(namespace, old).reset
        assert len(backend.changes(namespace, old).added) == len(rest) + 1
        assert len(backend.changes(namespace, recent).added) >= len(rest)
        check_totals(backend)

    def test_damaged_row_is_left_out_and_heals(
        self, backend: InspectableBackend, namespace: bytes, raw: RawStore
    ) -> None:
        bad, good = sample_pack(namespace, 1), sample_pack(namespace, 2)
        cursor = backend.changes(namespace, None).cursor
        backend.commit(namespace, CommitBatch([bad, good]))
        raw.flip(RawKind.TABLE, namespace, bad.pack_id, -30)
        assert tables(backend, namespace) == {good.pack_id: good.table}
        assert list(backend.changes(namespace, cursor).added) == [good.table]

        again = sample_pack(namespace, 1, content=9)
        backend.commit(namespace, CommitBatch([again]))
        assert tables(backend, namespace) == {good.pack_id: good.table, again.pack_id: again.table}
        assert read_pack(backend, namespace, again.table) == payload_of(again)
        check_totals(backend)

    def test_damaged_row_can_be_deleted(self, backend: InspectableBackend, namespace: bytes, raw: RawStore) -> None:
        bad, good = sample_pack(namespace, 1), sample_pack(namespace, 2)
        backend.commit(namespace, CommitBatch([bad, good]))
        raw.flip(RawKind.TABLE, namespace, bad.pack_id, -30)
        backend.commit(namespace, CommitBatch(deletions=[bad.pack_id]))
        assert read_pack(backend, namespace, bad.table) is None
        assert tables(backend, namespace) == {good.pack_id: good.table}
        assert check_totals(backend).packs == 1
