"""Further tests of our drivers: namespaces, commits, cursors, manifests, scans.

Most of these rules are implemented once, in ``persistkv.storage.catalogue``.
"""

from __future__ import annotations

import mmap
import time
from collections.abc import Sequence
from typing import ClassVar

import numpy as np
import pytest

from persistkv.storage.backend import Backend, CommitBatch, ManifestWrite, ReadSpan
from persistkv.storage.format.codec import RawCodec, ZstdCodec
from persistkv.storage.format.manifest import RequestManifest
from persistkv.storage.format.pack import PackedKeys
from persistkv.storage.format.pack_writer import PackWriter
from persistkv.testing.conformance.suite import (
    BackendSuite,
    check_totals,
    read_pack,
    sample_identity,
    tables,
)
from persistkv.testing.samples import (
    payload_of,
    sample_keys,
    sample_manifest,
    sample_pack,
    sample_section,
)


class CatalogueRules(BackendSuite):
    """Tests for the test class of a driver, next to ``BackendConformance``."""

    changes_kept: ClassVar[int | None] = None
    """A cursor is too old for ``Backend.changes`` once more than this number of packs were
    committed after it; None: cursors never become too old."""

    def test_open_namespace_twice_returns_same_namespace(
        self,
        backend: Backend,
    ) -> None:
        assert list(backend.namespaces()) == [], "a new store is not empty"
        before = time.time()
        opened = backend.open_namespace(sample_identity())
        assert opened.identity == sample_identity()
        assert opened.id == sample_identity().digest
        assert before - 1 <= opened.created <= time.time() + 1
        assert backend.open_namespace(sample_identity()) == opened
        backend.commit(opened.id, CommitBatch([sample_pack(opened.id, 1)]))
        assert list(backend.namespaces()) == [opened]

    def test_open_namespace_without_content_adds_nothing(
        self,
        backend: Backend,
    ) -> None:
        self.need_ending_namespaces()
        names = [
            backend.open_namespace(sample_identity(number)).id for number in range(3)
        ]
        for name in names:
            empty = backend.changes(name, None)
            assert (empty.reset, list(empty.added)) == (True, [])
            batch = CommitBatch(
                deletions=[bytes(16)],
                touches=[bytes(16)],
                pins=[("r", True)],
                seen=empty.cursor,
            )
            assert not backend.commit(name, batch).stale
            assert backend.changes(name, empty.cursor).cursor == empty.cursor
        assert list(backend.namespaces()) == []

    def test_changes_cursor_before_first_content_returns_all_content(
        self,
        backend: Backend,
        namespace: bytes,
    ) -> None:
        cursor = backend.changes(namespace, None).cursor
        pack, other = (sample_pack(namespace, seed) for seed in range(2))
        backend.commit(namespace, CommitBatch(manifests=[sample_manifest("r")]))
        assert not backend.commit(namespace, CommitBatch([pack], seen=cursor)).stale, (
            "no pack was added before"
        )
        assert backend.commit(namespace, CommitBatch([other], seen=cursor)).stale
        changes = backend.changes(namespace, cursor)
        assert (changes.reset, list(changes.added)) == (False, [pack.table])

    def test_namespace_last_content_deleted_ends(self, backend: Backend) -> None:
        self.need_ending_namespaces()
        ours, theirs = (
            backend.open_namespace(sample_identity(number)) for number in (1, 2)
        )
        for space in (ours, theirs):
            pack = sample_pack(space.id, 1)
            manifest = sample_manifest("r", packs=[pack.pack_id])
            backend.commit(space.id, CommitBatch([pack], [manifest]))
        cursor = backend.changes(ours.id, None).cursor
        ended = backend.commit(
            ours.id,
            CommitBatch(deletions=[sample_pack(ours.id, 1).pack_id], seen=cursor),
        )
        assert not ended.stale
        assert list(backend.namespaces()) == [theirs]
        assert list(backend.catalogue(ours.id).manifests()) == []
        assert tables(backend, ours.id) == {}
        assert list(backend.changes(ours.id, ended.cursor).added) == []
        gone = backend.changes(ours.id, cursor)
        assert (gone.cursor, gone.reset, list(gone.added)) == (ended.cursor, True, [])
        check_totals(backend)

    def test_namespace_with_manifest_only_stays(
        self,
        backend: Backend,
        namespace: bytes,
    ) -> None:
        pack = sample_pack(namespace, 1)
        manifest = sample_manifest("r")  # names no packs
        backend.commit(namespace, CommitBatch([pack], [manifest], pins=[("r", True)]))
        cursor = backend.commit(namespace, CommitBatch(deletions=[pack.pack_id])).cursor
        assert [space.id for space in backend.namespaces()] == [namespace]
        assert [head.id for head in backend.catalogue(namespace).manifests()] == ["r"]
        assert not backend.changes(namespace, cursor).reset

    def test_namespace_last_pack_replaced_in_one_commit_goes_on(
        self,
        backend: Backend,
        namespace: bytes,
    ) -> None:
        old, new = (sample_pack(namespace, seed) for seed in range(2))
        cursor = backend.commit(namespace, CommitBatch([old])).cursor
        backend.commit(namespace, CommitBatch([new], deletions=[old.pack_id]))
        assert [space.id for space in backend.namespaces()] == [namespace]
        changes = backend.changes(namespace, cursor)
        assert (changes.reset, list(changes.added), set(changes.removed)) == (
            False,
            [new.table],
            {old.pack_id},
        )

    def test_namespace_begun_again_rejects_positions_before_its_end(
        self,
        backend: Backend,
        namespace: bytes,
    ) -> None:
        self.need_ending_namespaces()
        packs = [sample_pack(namespace, seed) for seed in range(3)]
        cursors = [
            backend.commit(namespace, CommitBatch([pack])).cursor for pack in packs
        ]
        backend.commit(
            namespace, CommitBatch(deletions=[pack.pack_id for pack in packs])
        )
        again = sample_pack(namespace, 1, content=9)
        for cursor in cursors:
            assert backend.commit(namespace, CommitBatch([again], seen=cursor)).stale
        backend.commit(namespace, CommitBatch([again]))
        backend.commit(namespace, CommitBatch([packs[2]]))
        for cursor in cursors:
            assert backend.commit(namespace, CommitBatch([packs[0]], seen=cursor)).stale
            changes = backend.changes(namespace, cursor)
            assert changes.reset
            assert {table.pack_id for table in changes.added} == {
                again.pack_id,
                packs[2].pack_id,
            }
        assert read_pack(backend, namespace, again.table) == payload_of(again)
        check_totals(backend)

    def test_namespace_ended_loses_its_notes(self, backend: Backend) -> None:
        self.need_ending_namespaces()
        ours, theirs = (
            backend.open_namespace(sample_identity(number)).id for number in (1, 2)
        )
        for name in (ours, theirs):
            backend.put_note(name, "a1", b"before the first content")
            backend.commit(name, CommitBatch([sample_pack(name, 1)]))
            backend.put_note(name, "b2", b"after it")
        backend.commit(ours, CommitBatch(deletions=[sample_pack(ours, 1).pack_id]))
        assert [backend.note(ours, name) for name in ("a1", "b2")] == [None, None]
        assert [backend.note(theirs, name) for name in ("a1", "b2")] == [
            b"before the first content",
            b"after it",
        ]

    def test_namespaces_same_ids_keep_separate_content(self, backend: Backend) -> None:
        ours, theirs = (
            backend.open_namespace(sample_identity(number)).id for number in (1, 2)
        )
        mine, other = (
            sample_pack(ours, 1, content=10),
            sample_pack(theirs, 1, content=20),
        )
        backend.commit(ours, CommitBatch([mine], [sample_manifest("same", 1)]))
        backend.commit(
            theirs,
            CommitBatch([other], [sample_manifest("same", 2), sample_manifest("more")]),
        )

        assert {namespace.id for namespace in backend.namespaces()} == {ours, theirs}
        assert tables(backend, ours) == {mine.pack_id: mine.table}
        assert tables(backend, theirs) == {other.pack_id: other.table}
        assert read_pack(backend, ours, mine.table) == payload_of(mine)
        assert read_pack(backend, theirs, other.table) == payload_of(other)
        assert read_pack(backend, ours, other.table) is None
        assert [manifest.id for manifest in backend.catalogue(ours).manifests()] == [
            "same"
        ]
        assert (
            backend.manifest_keys(ours, ["same"])[0] == sample_manifest("same", 1).keys
        )
        assert backend.manifest_keys(ours, ["more"])[0] is None

        backend.commit(ours, CommitBatch(deletions=[mine.pack_id, other.pack_id]))
        assert tables(backend, ours) == {}
        assert read_pack(backend, theirs, other.table) == payload_of(other)

    def test_stats_after_many_commits_equal_recount(self, backend: Backend) -> None:
        names = [
            backend.open_namespace(sample_identity(number)).id for number in range(2)
        ]
        rng = np.random.default_rng(7)
        for step in range(40):
            namespace = names[step % 2]
            held = list(tables(backend, namespace))
            packs = [
                sample_pack(
                    namespace,
                    int(rng.integers(30)),
                    blocks=int(rng.integers(1, 9)),
                    codec=ZstdCodec(1),
                )
                for _ in range(rng.integers(3))
            ]
            deleted = [
                held[index] for index in rng.permutation(len(held))[: rng.integers(3)]
            ]
            manifests = (
                [sample_manifest(f"r{rng.integers(12)}", step)] if step % 3 else []
            )
            backend.commit(namespace, CommitBatch(packs, manifests, deleted))
            check_totals(backend)
        assert backend.stats().packs

    def test_changes_without_cursor_returns_whole_catalogue(
        self,
        backend: Backend,
        namespace: bytes,
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
        assert {table.pack_id for table in changes.added} == {
            pack.pack_id for pack in packs
        }

    def test_changes_pack_committed_and_deleted_is_not_added(
        self,
        backend: Backend,
        namespace: bytes,
    ) -> None:
        cursor = backend.changes(namespace, None).cursor
        pack = sample_pack(namespace, 1)
        backend.commit(namespace, CommitBatch([pack]))
        backend.commit(namespace, CommitBatch(deletions=[pack.pack_id]))
        changes = backend.changes(namespace, cursor)
        assert not list(changes.added)
        assert set(changes.removed) <= {pack.pack_id}

    def test_changes_commits_without_own_packs_keep_cursor_current(
        self,
        backend: Backend,
        namespace: bytes,
    ) -> None:
        cursor = backend.changes(namespace, None).cursor
        other = backend.open_namespace(sample_identity(1)).id
        backend.commit(other, CommitBatch([sample_pack(other, 1)]))
        backend.commit(namespace, CommitBatch(manifests=[sample_manifest("r1")]))
        assert not list(backend.changes(namespace, cursor).added)
        assert not backend.commit(
            namespace, CommitBatch([sample_pack(namespace, 1)], seen=cursor)
        ).stale

    def test_changes_too_old_cursor_resets(
        self,
        backend: Backend,
        namespace: bytes,
    ) -> None:
        if self.changes_kept is None:
            pytest.skip("the driver keeps all changes")
        old = backend.changes(namespace, None).cursor
        first = sample_pack(namespace, 0, blocks=1, block_bytes=1)
        recent = backend.commit(namespace, CommitBatch([first])).cursor
        rest = [
            sample_pack(namespace, seed, blocks=1, block_bytes=1)
            for seed in range(1, self.changes_kept + 1)
        ]
        backend.commit(namespace, CommitBatch(rest))
        assert backend.changes(namespace, old).reset
        assert len(list(backend.changes(namespace, old).added)) == len(rest) + 1
        assert len(list(backend.changes(namespace, recent).added)) >= len(rest)

    def test_read_into_array_rows_fills_only_their_bytes(
        self,
        backend: Backend,
        namespace: bytes,
    ) -> None:
        pack = sample_pack(namespace, 1, blocks=40, block_bytes=65_536)
        backend.commit(namespace, CommitBatch([pack]))
        rows = np.zeros((40, 2, 50_000), np.int8)
        order = np.random.default_rng(3).permutation(40)
        spans = [
            ReadSpan(pack.pack_id, int(block) * 65_536, [memoryview(rows[block, 0])])
            for block in order
        ]
        assert backend.read(namespace, spans) == [True] * 40
        stored = np.frombuffer(payload_of(pack), np.int8).reshape(40, 65_536)
        assert np.array_equal(rows[:, 0], stored[:, :50_000])
        assert not rows[:, 1].any()

    def test_read_result_stays_valid_after_deletion_and_close(self, url: str) -> None:
        backend = self.open(url)
        namespace = backend.open_namespace(sample_identity()).id
        pack = sample_pack(namespace, 1, blocks=8, block_bytes=100_000)
        backend.commit(namespace, CommitBatch([pack]))
        held = list(backend.changes(namespace, None).added)
        bytes_read = read_pack(backend, namespace, pack.table)
        backend.commit(namespace, CommitBatch(deletions=[pack.pack_id]))
        for seed in range(2, 6):
            backend.commit(
                namespace,
                CommitBatch(
                    [sample_pack(namespace, seed, blocks=8, block_bytes=100_000)]
                ),
            )
        backend.close()
        assert bytes_read == payload_of(pack)
        assert list(held) == [pack.table]

    @pytest.mark.parametrize("numbers", [range(6), [1, 2, 5], [4], []])
    def test_read_frames_passes_frames_in_order_through_one_buffer(
        self,
        backend: Backend,
        namespace: bytes,
        numbers: Sequence[int],
    ) -> None:
        pack = sample_pack(
            namespace, 1, blocks=6, block_bytes=900_000, codec=ZstdCodec()
        )
        backend.commit(namespace, CommitBatch([pack]))
        payload, frames = (
            payload_of(pack),
            [pack.table.frames[number] for number in numbers],
        )
        buffer = memoryview(
            bytearray(max((frame.stored_length for frame in frames), default=1))
        )
        received: list[tuple[int, bytes]] = []

        def read(pack_id: bytes) -> None:
            backend.read_frames(
                namespace,
                pack_id,
                frames,
                buffer,
                lambda *frame: received.append((frame[0], bytes(frame[1]))),
            )

        read(pack.pack_id)
        stored = [
            payload[frame.offset : frame.offset + frame.stored_length]
            for frame in frames
        ]
        assert received == list(enumerate(stored))
        backend.commit(namespace, CommitBatch(deletions=[pack.pack_id]))
        read(pack.pack_id)
        read(bytes(16))
        assert received == list(enumerate(stored)), (
            "frames of a deleted pack were passed on"
        )

    def test_read_all_packs_in_one_call_returns_stored_bytes(
        self,
        backend: Backend,
        namespace: bytes,
    ) -> None:
        """Reads all payloads into page-aligned memory, as ``verify`` does. One pack was deleted."""
        packs = [
            sample_pack(namespace, seed, blocks=3, block_bytes=5000 + seed)
            for seed in range(12)
        ]
        backend.commit(namespace, CommitBatch(packs))
        backend.commit(namespace, CommitBatch(deletions=[packs[4].pack_id]))
        payloads = {pack.pack_id: payload_of(pack) for pack in packs}
        wanted = sorted(payloads)
        memory = memoryview(mmap.mmap(-1, sum(map(len, payloads.values()))))
        spans, end = [], 0
        for pack_id in wanted:
            begin, end = end, end + len(payloads[pack_id])
            spans.append(ReadSpan(pack_id, 0, [memory[begin:end]]))
        present = [pack_id != packs[4].pack_id for pack_id in wanted]
        assert backend.read(namespace, spans) == present
        found = [
            bytes(span.buffers[0])
            for span, filled in zip(spans, present, strict=True)
            if filled
        ]
        assert found == [
            payloads[pack_id] for pack_id in wanted if pack_id != packs[4].pack_id
        ]

    def test_manifests_same_id_is_replaced(
        self,
        backend: Backend,
        namespace: bytes,
    ) -> None:
        backend.commit(
            namespace,
            CommitBatch(manifests=[sample_manifest("r1", 1), sample_manifest("r2", 2)]),
        )
        newer = sample_manifest("r1", 3, blocks=5)
        backend.commit(namespace, CommitBatch([sample_pack(namespace, 1)], [newer]))
        assert {
            manifest.id: manifest
            for manifest in backend.catalogue(namespace).manifests()
        } == {
            "r1": newer.manifest,
            "r2": sample_manifest("r2", 2).manifest,
        }
        assert backend.manifest_keys(namespace, ["r1"])[0] == newer.keys
        assert check_totals(backend).requests == 2

    def test_uses_shared_pack_reports_reuse_hits_and_sizes(
        self,
        backend: Backend,
        namespace: bytes,
    ) -> None:
        first, second = sample_pack(namespace, 1), sample_pack(namespace, 2, depth=4)
        before = time.time()
        both = [first.pack_id, second.pack_id]
        short = sample_manifest("short", 1, packs=[first.pack_id])
        long = sample_manifest("long", 2, packs=both, restored_tokens=16)
        bare = sample_manifest("bare", 3)
        backend.commit(namespace, CommitBatch([first], [short, bare]))
        uses = backend.catalogue(namespace).uses(["short", "nobody", "bare"])
        if uses == [None] * 3:
            pytest.skip("the driver does not record uses")
        assert uses[1] is None
        for use in (uses[0], uses[2]):
            assert use is not None
            assert (use.reused, use.shared_by, use.pinned) == (False, 0, False)
            assert before - 2 <= use.last_used <= time.time() + 2

        backend.commit(namespace, CommitBatch([second], [long], pins=[("long", True)]))
        shorter, longer = backend.catalogue(namespace).uses(["short", "long"])
        assert shorter is not None
        assert longer is not None
        assert (shorter.reused, shorter.shared_by, shorter.pinned) == (True, 1, False)
        assert (longer.reused, longer.shared_by, longer.pinned) == (False, 0, True)
        assert (shorter.hits, longer.hits) == (1, 0)
        assert (shorter.packs_raw_bytes, shorter.packs_stored_bytes) == _sizes(first)
        assert (longer.packs_raw_bytes, longer.packs_stored_bytes) == tuple(
            one + other
            for one, other in zip(_sizes(first), _sizes(second), strict=True)
        )

        backend.commit(namespace, CommitBatch(deletions=[first.pack_id]))
        assert backend.catalogue(namespace).uses(["short", "long"]) == [None, None]

    def test_manifests_abandoned_iteration_blocks_neither_commit_nor_close(
        self,
        url: str,
    ) -> None:
        backend = self.open(url)
        namespace = backend.open_namespace(sample_identity()).id
        backend.commit(
            namespace,
            CommitBatch(
                manifests=[sample_manifest(f"r{number}") for number in range(3)]
            ),
        )
        iterator = iter(backend.catalogue(namespace).manifests())
        next(iterator)
        backend.commit(namespace, CommitBatch([sample_pack(namespace, 1)]))
        backend.close()

    def test_commit_several_packs_and_manifests_stores_all(
        self,
        backend: Backend,
        namespace: bytes,
    ) -> None:
        packs = [sample_pack(namespace, seed) for seed in range(5)]
        manifests = [sample_manifest(f"r{seed}", seed) for seed in range(3)]
        result = backend.commit(namespace, CommitBatch(packs, manifests))
        assert not result.stale
        assert not result.evicted
        assert tables(backend, namespace) == {
            pack.pack_id: pack.table for pack in packs
        }
        assert {
            manifest.id for manifest in backend.catalogue(namespace).manifests()
        } == {
            "r0",
            "r1",
            "r2",
        }

    def test_manifests_commits_during_iteration_returns_all(
        self,
        backend: Backend,
        namespace: bytes,
    ) -> None:
        writes = [sample_manifest(f"r{number}", number) for number in range(700)]
        backend.commit(namespace, CommitBatch(manifests=writes))
        seen = []
        for count, manifest in enumerate(backend.catalogue(namespace).manifests()):
            seen.append(manifest.id)
            # the iteration must not hold a lock that this call waits for
            if count % 100 == 0:
                backend.commit(namespace, CommitBatch([sample_pack(namespace, count)]))
        assert sorted(seen) == sorted(write.manifest.id for write in writes)

    @pytest.mark.parametrize("codec", [RawCodec(), ZstdCodec(1)], ids=str)
    def test_commit_pack_of_two_groups_stores_table_and_payload(
        self,
        backend: Backend,
        namespace: bytes,
        codec: RawCodec | ZstdCodec,
    ) -> None:
        segments = [
            sample_section(1, group=0, blocks=20, block_bytes=100_000),
            sample_section(2, group=1, blocks=7, block_bytes=4097, hash_bytes=8),
        ]
        pack = PackWriter(namespace, codec, segments)
        backend.commit(namespace, CommitBatch([pack]))
        (table,) = backend.changes(namespace, None).added
        assert table == pack.table
        assert list(backend.tables(namespace, [bytes(16), pack.pack_id])) == [table]
        assert table.keys.unpack() == [*segments[0].keys, *segments[1].keys]
        assert read_pack(backend, namespace, table) == payload_of(pack)
        assert check_totals(backend).blocks == 27

    @pytest.mark.parametrize("manifest_id", ["engine-1/0", "größe ✓", "x" * 5000, " "])
    def test_manifests_round_trip_returns_manifest_and_keys(
        self,
        backend: Backend,
        namespace: bytes,
        manifest_id: str,
    ) -> None:
        keys = (
            PackedKeys.of(sample_keys(1, 300)),
            PackedKeys.of([b"short", b"of another length", b"x"]),
            PackedKeys(),
        )
        manifest = RequestManifest(
            id=manifest_id,
            created=1234.5,
            tokens=4801,
            group_blocks=(300, 3, 0),
            raw_bytes=1 << 40,
            ordered=False,
            labels={"user": "größe", "empty": ""},
        )
        backend.commit(
            namespace, CommitBatch(manifests=[ManifestWrite(manifest, keys)])
        )
        assert list(backend.catalogue(namespace).manifests()) == [manifest]
        assert backend.manifest_keys(namespace, [manifest_id, "nobody"]) == [keys, None]
        assert check_totals(backend).requests == 1


def _sizes(pack: PackWriter) -> tuple[int, int]:
    return pack.table.raw_length, pack.table.payload_length
