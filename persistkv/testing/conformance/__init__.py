"""Conformance suite of drivers, as one test class.

A driver's tests subclass it, and define the driver and the URLs of its stores:

    class TestMyBackend(BackendConformance):
        driver = MyBackend

        @pytest.fixture
        def url(self, tmp_path):
            return f"mine://{tmp_path}/store"

        @pytest.fixture
        def raw(self, url, backend):
            return MyRawStore(url)  # the medium's own client, without the driver

Tests of capacity, and of features that a driver's ``Capabilities`` exclude, are skipped. Rules that
``persistkv.storage.catalogue`` implements for all drivers, such as cascading deletions and ``ttl``,
are tested in persistkv's repository.
"""

from __future__ import annotations

from dataclasses import replace
from multiprocessing.connection import Connection

import numpy as np
import pytest

from persistkv.config import StoreUrl, with_option
from persistkv.errors import (
    ConfigurationError,
    StoreError,
    StoreFullError,
    StoreUnavailableError,
)
from persistkv.memory.rows import StagedBlocks
from persistkv.storage.backend import (
    Backend,
    CommitBatch,
    CommitResult,
    ReadSpan,
)
from persistkv.storage.format.codec import RawCodec
from persistkv.storage.format.pack_writer import NewPack, PackWriter, Section
from persistkv.storage.stats import BackendStats
from persistkv.testing.conformance.suite import (
    BackendSuite,
    NamespaceRig,
    RawKind,
    RawStore,
    other_process,
    read_pack,
    sample_identity,
)
from persistkv.testing.samples import (
    payload_of,
    sample_blocks,
    sample_keys,
    sample_manifest,
    sample_pack,
)

__all__ = ["BackendConformance", "NamespaceRig", "RawKind", "RawStore"]

_MIB = 1 << 20
_PATIENCE_S = 60  # seconds after which another process counts as hung
_UNKNOWN_PACK = bytes(16)  # no pack has this id


class _SourceFailure(Exception):
    """Raised by ``_FailingSource``."""


class _FailingSource(StagedBlocks):
    """Blocks that cannot be read from number ``READABLE`` on."""

    READABLE = 30

    def pieces(self, start: int, stop: int) -> list[memoryview]:
        if stop > self.READABLE:
            raise _SourceFailure
        return super().pieces(start, stop)


class BackendConformance(BackendSuite):
    """Tests of the contract of ``persistkv.storage.backend``."""

    def test_open_closed_store_returns_committed_content(self, url: str) -> None:
        self.need_sharing()
        first = self.open_rig(url)
        pack = first.pack(1)
        manifest = sample_manifest("r1")
        cursor = first.commit(pack, manifests=[manifest]).cursor
        stats = first.backend.stats()
        first.close()

        again = self.open_rig(url)
        assert list(again.backend.namespaces()) == [first.opened]
        assert again.opened == first.opened
        again.check_holds(pack)
        assert again.manifests() == [manifest.manifest]
        assert again.manifest_keys(["r1"]) == [manifest.keys]
        again.check_nothing_added(cursor)
        stats_again = again.check_totals()
        assert _content(stats_again) == _content(stats)
        again.close()

    def test_open_read_only_missing_store_raises_and_creates_nothing(
        self,
        url: str,
    ) -> None:
        # open twice: if the first attempt created a store, the second one would open it
        for _ in range(2):
            with pytest.raises(StoreUnavailableError):
                self.open(url, read_only=True)

    def test_open_read_only_reads_and_rejects_writes(self, url: str) -> None:
        self.need_sharing()
        writer = self.open_rig(url)
        assert writer.backend.capabilities.writable
        pack = writer.pack(1)
        writer.commit(pack)
        writer.close()

        reader = self.open_rig(url, read_only=True)
        assert not reader.backend.capabilities.writable
        assert reader.opened == writer.opened
        reader.check_read(pack)
        with pytest.raises(StoreError):
            reader.commit(deletions=[pack.pack_id])
        reader.check_holds(pack)
        assert list(reader.backend.namespaces()) == [writer.opened]
        reader.close()

    def test_open_read_only_absent_namespace_is_empty_until_another_process_begins_it(
        self,
        url: str,
    ) -> None:
        self.need_sharing()
        self.need_ending_namespaces()
        writer = self.open_rig(url)
        reader = self.open_rig(url, read_only=True)
        pack = writer.pack(1)
        # the writer has opened the namespace, and has stored nothing in it
        nothing = reader.changes(None)
        assert nothing.reset
        assert list(nothing.added) == []
        assert reader.tables_of([pack.pack_id]) == []
        assert list(reader.backend.namespaces()) == []
        writer.commit(pack)
        reader.check_added(nothing.cursor, pack)
        reader.check_read(pack)
        reader.close()
        writer.close()

    def test_open_two_handles_see_each_others_commits(self, url: str) -> None:
        self.need_sharing()
        first = self.open_rig(url)
        second = self.open_rig(url)
        cursor = second.changes(None).cursor
        pack, other = first.packs(2)
        first.commit(pack)
        # the cursor of the second handle is from before this commit
        result = second.commit(other, seen=cursor)
        assert result.stale
        second.check_added(cursor, pack)
        # a handle stays usable after another one is closed
        first.close()
        second.check_read(pack)
        # without ``seen``, a commit is never stale
        unchecked = second.commit(other)
        assert not unchecked.stale
        second.check_totals()
        second.close()

    def test_open_read_only_with_open_writer_sees_its_commits(self, url: str) -> None:
        self.need_sharing()
        writer = self.open_rig(url)
        reader = self.open_rig(url, read_only=True)
        cursor = reader.changes(None).cursor
        pack, other = writer.packs(2)
        writer.commit(pack, manifests=[sample_manifest("r1")])
        reader.check_added(cursor, pack)
        reader.check_read(pack)
        assert reader.manifest_ids() == {"r1"}
        # the reader outlives its first writer, and sees the next one
        writer.close()
        assert reader.backend.stats().packs == 1
        next_writer = self.open_rig(url)
        next_writer.commit(other)
        assert reader.backend.stats().packs == 2
        next_writer.close()
        reader.close()

    def test_open_unknown_option_raises_and_creates_nothing(self, url: str) -> None:
        wrong_url = with_option(url, "no_such_option", 1)
        with pytest.raises(ConfigurationError, match="no_such_option"):
            self.open(wrong_url)
        with pytest.raises(StoreUnavailableError):
            self.open(url, read_only=True)

    def test_close_twice_succeeds_and_later_calls_raise(self, url: str) -> None:
        rig = self.open_rig(url)
        rig.commit(rig.pack(1))
        rig.close()
        rig.close()
        with pytest.raises(StoreError):
            rig.changes(None)
        with pytest.raises(StoreError):
            rig.fill(_span(_UNKNOWN_PACK, 0, 1))
        with pytest.raises(StoreError):
            rig.commit_batch(CommitBatch())
        with pytest.raises(StoreError):
            rig.backend.stats()

    # sizes around the bounds of a page and of a frame
    @pytest.mark.parametrize(
        "block_bytes",
        [1, 4095, _MIB - 1, _MIB, _MIB + 1, 3 * _MIB + 5],
    )
    def test_commit_any_block_size_stores_payload(
        self,
        rig: NamespaceRig,
        block_bytes: int,
    ) -> None:
        pack = rig.pack(1, blocks=3, block_bytes=block_bytes)
        rig.commit(pack)
        rig.check_holds(pack)
        assert rig.tables_of([_UNKNOWN_PACK, pack.pack_id]) == [pack.table]

    def test_commit_unknown_namespace_raises(self, backend: Backend) -> None:
        unknown = sample_identity(9).digest
        batch = CommitBatch([sample_pack(unknown, 1)])
        with pytest.raises(StoreError):
            backend.commit(unknown, batch)

    def test_commit_pack_of_other_namespace_raises(self, rig: NamespaceRig) -> None:
        other = sample_identity(9).digest
        pack_of_other = sample_pack(other, 1)
        with pytest.raises(StoreError):
            rig.commit(pack_of_other)
        rig.check_holds()  # nothing

    def test_commit_existing_pack_id_keeps_first_pack(self, rig: NamespaceRig) -> None:
        self.need_plain(rig)
        # the id is a digest of the keys, and does not depend on the content
        first = rig.pack(1, content=10)
        second = rig.pack(1, content=20)
        assert first.pack_id == second.pack_id
        # the first pack is kept in one commit of both, and in a later commit of the second
        cursor = rig.commit(first, second).cursor
        rig.commit(second)
        rig.check_holds(first)
        rig.check_nothing_added(cursor)

    def test_commit_failing_stream_changes_nothing(self, rig: NamespaceRig) -> None:
        held = rig.pack(1)
        good = rig.pack(2)
        cursor = rig.commit(held).cursor
        stats = rig.backend.stats()
        torn = _torn_pack(rig)
        batch = CommitBatch(
            packs=[good, torn],
            manifests=[sample_manifest("r1")],
            deletions=[held.pack_id],
        )
        with pytest.raises(_SourceFailure):
            rig.commit_batch(batch)

        rig.check_holds(held)
        assert rig.read(good) is None
        assert rig.manifest_ids() == set()
        rig.check_nothing_added(cursor)
        stats_after = rig.check_totals()
        assert _content(stats_after) == _content(stats)
        # the pack that could be read is not lost: it can be committed
        rig.commit(good, seen=cursor)
        rig.check_read(good)

    def test_commit_too_large_pack_raises_full_and_changes_nothing(
        self,
        small_rig: NamespaceRig,
    ) -> None:
        held = small_rig.pack(1, blocks=8, block_bytes=1 << 18)
        cursor = small_rig.commit(held).cursor
        # 8 MiB, twice the capacity
        large = small_rig.pack(2, blocks=32, block_bytes=1 << 18)
        batch = CommitBatch(
            packs=[large],
            manifests=[sample_manifest("r1")],
            deletions=[held.pack_id],
        )
        with pytest.raises(StoreFullError):
            small_rig.commit_batch(batch)
        small_rig.check_holds(held)
        assert small_rig.manifest_ids() == set()
        small_rig.check_totals()

        # the cursor of the first commit is still current, because nothing was changed after it
        fits = small_rig.pack(3)
        result = small_rig.commit(fits, seen=cursor)
        assert not result.stale
        small_rig.check_read(fits)

    def test_commit_emptied_store_can_be_refilled(
        self,
        small_rig: NamespaceRig,
    ) -> None:
        for round_number in range(3):
            for number in range(60):
                # packs of two sizes make the free space fragmented
                size = 4096 if number % 2 else 200_000
                seed = 100 * round_number + number
                pack = small_rig.pack(seed, blocks=1, block_bytes=size)
                small_rig.commit(pack)
            # the store is too small for all 60 packs: some were evicted
            assert small_rig.check_totals().packs >= 10
            for pack_id in small_rig.tables():
                small_rig.commit(deletions=[pack_id])
            assert small_rig.check_totals().packs == 0

    def test_eviction_respects_order_and_pins(self, small_rig: NamespaceRig) -> None:
        # 300 kB each: the store holds about a dozen
        packs = small_rig.packs(33, blocks=3, block_bytes=100_000)
        pinned, used, idle, *new = packs
        batch = CommitBatch(
            packs=[pinned, used, idle],
            manifests=[sample_manifest("r", packs=[pinned.pack_id])],
            pins=[("r", True)],
        )
        small_rig.commit_batch(batch)
        use = CommitBatch(touches=[used.pack_id])
        small_rig.commit_batch(use)

        evicted: list[bytes] = []
        for pack in new:
            result = small_rig.commit(pack)
            evicted += _evicted_by(result)
            small_rig.check_totals()

        # the least recently used pack is evicted first, the pinned one never
        candidates = [pack.pack_id for pack in (idle, used, *new)]
        assert len(evicted) > 10
        assert evicted == candidates[: len(evicted)]
        held = candidates[len(evicted) :]
        assert set(small_rig.tables()) == {pinned.pack_id, *held}
        small_rig.check_read(pinned)
        assert small_rig.manifest_ids() == {"r"}

    def test_eviction_reports_each_pack_that_it_removes(
        self,
        small_rig: NamespaceRig,
    ) -> None:
        stored: set[bytes] = set()
        for pack in small_rig.packs(30, blocks=3, block_bytes=100_000):
            result = small_rig.commit(pack)
            stored.add(pack.pack_id)
            stored.difference_update(_evicted_by(result))
            assert set(small_rig.tables()) == stored

    def test_commit_deletion_removes_pack_and_reports_it(
        self,
        rig: NamespaceRig,
    ) -> None:
        kept = rig.pack(1)
        deleted = rig.pack(2, blocks=30, block_bytes=70_000)
        cursor = rig.commit(kept, deleted).cursor
        # an unknown id and a repeated one are ignored
        deletions = [deleted.pack_id, _UNKNOWN_PACK, deleted.pack_id]
        result = rig.commit(deletions=deletions)
        assert list(result.evicted) == [deleted.table]
        assert rig.read(deleted) is None
        rig.check_read(kept)
        changes = rig.changes(cursor)
        assert changes.removed == _removed(deleted)
        assert changes.cursor == result.cursor
        assert rig.check_totals().packs == 1

        # the same id can be stored again, with other bytes
        again = rig.pack(
            2,
            blocks=30,
            block_bytes=70_000,
            content=5,
        )
        rig.commit(again)
        rig.check_read(again)

    def test_commit_manifest_deletion_keeps_packs(self, rig: NamespaceRig) -> None:
        pack = rig.pack(1)
        with_pack = sample_manifest("a", packs=[pack.pack_id])
        without_packs = sample_manifest("b")
        # requests are deleted although they are pinned
        pinned = CommitBatch(
            packs=[pack],
            manifests=[with_pack, without_packs],
            pins=[("a", True), ("b", True)],
        )
        rig.commit_batch(pinned)
        # an unknown id is ignored
        deletion = CommitBatch(manifest_deletions=["a", "absent"])
        result = rig.commit_batch(deletion)
        assert not result.evicted
        rig.check_read(pack)
        assert rig.manifest_ids() == {"b"}
        assert rig.manifest_keys(["a"]) == [None]
        assert rig.check_totals().requests == 1
        # a request that was deleted can be stored again under the same id
        rig.commit(manifests=[with_pack])
        assert rig.manifest_ids() == {"a", "b"}
        rig.commit_batch(CommitBatch(manifest_deletions=["b", "a"]))
        assert rig.check_totals().requests == 0

    def test_commit_deletion_and_same_pack_id_replaces_pack(
        self,
        rig: NamespaceRig,
    ) -> None:
        bad = rig.pack(1, content=10)
        good = rig.pack(1, content=20)
        cursor = rig.commit(bad).cursor
        result = rig.commit(good, deletions=[bad.pack_id])
        assert list(result.evicted) == [bad.table]
        rig.check_read(good)
        changes = rig.changes(cursor)
        assert changes.removed == _removed(bad)
        assert list(changes.added) == [good.table]

    def test_commit_stale_cursor_changes_nothing(self, rig: NamespaceRig) -> None:
        seen = rig.changes(None).cursor
        first = rig.pack(1)
        second = rig.pack(2)
        cursor = rig.commit(first, seen=seen).cursor
        # ``seen`` is from before the commit of ``first``
        batch = CommitBatch(
            packs=[second],
            manifests=[sample_manifest("r1")],
            deletions=[first.pack_id],
            seen=seen,
        )
        result = rig.commit_batch(batch)
        assert result.stale
        rig.check_added(result.cursor, first)
        rig.check_holds(first)
        assert rig.manifest_ids() == set()

        # an empty batch changes nothing, so the cursor stays current
        empty = rig.commit_batch(CommitBatch())
        assert empty.cursor == cursor
        current = rig.commit(second, seen=cursor)
        assert not current.stale
        # without ``seen``, no batch is stale
        unchecked = rig.commit(deletions=[first.pack_id])
        assert not unchecked.stale
        rig.check_holds(second)

    def test_commit_needed_pack_removed_is_stale(self, rig: NamespaceRig) -> None:
        needed, kept, pack = rig.packs(3)
        cursor = rig.commit(needed, kept).cursor
        rig.commit(deletions=[needed.pack_id])
        # ``cursor`` is from before the deletion, which removed one of the two needed packs
        needs = [kept.pack_id, needed.pack_id]
        result = rig.commit(pack, seen=cursor, needs=needs)
        assert result.stale
        # the result of a stale commit has the cursor ``seen``
        assert result.cursor == cursor
        assert set(rig.tables()) == {kept.pack_id}

    def test_commit_after_others_needed_packs_held_reports_interleaved_or_stale(
        self,
        rig: NamespaceRig,
    ) -> None:
        needed, of_others, pack, last = rig.packs(4)
        cursor = rig.commit(needed).cursor
        rig.commit(of_others)
        # ``cursor`` is from before the last commit, but the pack that the batch needs is still
        # held: a driver may commit the batch nevertheless (interleaved), or refuse it (stale)
        needs = [needed.pack_id]
        result = rig.commit(pack, seen=cursor, needs=needs)
        assert result.interleaved != result.stale
        expected = {of_others.pack_id}
        if not result.stale:
            expected.add(pack.pack_id)
        changes = rig.changes(cursor)
        assert {table.pack_id for table in changes.added} == expected
        # a batch that has seen all changes is neither stale nor interleaved
        last_result = rig.commit(last, seen=changes.cursor, needs=[])
        assert not last_result.stale
        assert not last_result.interleaved

    def test_changes_with_cursor_returns_later_changes_only(
        self,
        rig: NamespaceRig,
    ) -> None:
        first, second, third = rig.packs(3)
        rig.commit(first)
        cursor = rig.changes(None).cursor
        no_changes = rig.changes(cursor)
        assert no_changes.cursor == cursor
        assert not no_changes.reset
        assert list(no_changes.added) == []
        assert list(no_changes.removed) == []

        rig.commit(second)
        rig.commit(third, deletions=[first.pack_id])
        changes = rig.changes(cursor)
        assert not changes.reset
        added = {table.pack_id for table in changes.added}
        assert added == {second.pack_id, third.pack_id}
        assert changes.removed == _removed(first)
        rig.check_nothing_added(changes.cursor)

    @pytest.mark.parametrize(
        "cursor",
        [
            b"",
            b"x",
            bytes(15),
            b"\xff" * 16,
            bytes(15) + b"\1",
            b"\xff" * 64,
        ],
    )
    def test_changes_unknown_cursor_resets(
        self,
        rig: NamespaceRig,
        cursor: bytes,
    ) -> None:
        pack, other = rig.packs(2)
        rig.commit(pack)
        # a reset: the changes are the whole content of the namespace
        changes = rig.changes(cursor)
        assert changes.reset
        assert list(changes.added) == [pack.table]
        assert rig.commit(other, seen=cursor).stale

    def test_changes_damaged_table_is_omitted_until_rewritten_or_deleted(
        self,
        rig: NamespaceRig,
        raw: RawStore,
    ) -> None:
        self.need_plain(rig)
        rewritten, deleted, good = rig.packs(3)
        cursor = rig.changes(None).cursor
        rig.commit(rewritten, deleted, good)
        # damage a byte near the end of each row
        for pack in (rewritten, deleted):
            raw.flip(RawKind.TABLE, rig.namespace, pack.pack_id, offset=-30)
        rig.check_holds(good)
        rig.check_added(cursor, good)

        # a pack with the id of ``rewritten``, and other bytes
        again = rig.pack(0, content=9)
        assert again.pack_id == rewritten.pack_id
        rig.commit(again, deletions=[deleted.pack_id])
        rig.check_holds(good, again)
        assert rig.read(deleted) is None

    # offsets around the bounds of pages, and of the pieces in which media store payloads
    @pytest.mark.parametrize(
        ("offset", "lengths"),
        [
            (0, [4096]),
            (1, [1]),
            (4095, [3, 7, 1]),
            (_MIB - 1, [2]),
            (_MIB - 5, [5, 5]),
            (_MIB, [_MIB]),
            (_MIB - 4096, [8192, 100, 2 * _MIB]),
            (3, [_MIB - 3, 0, _MIB, 17]),
            (7, []),
        ],
    )
    def test_read_span_of_several_buffers_returns_stored_bytes(
        self,
        rig: NamespaceRig,
        offset: int,
        lengths: list[int],
    ) -> None:
        self.need_plain(rig)
        pack = rig.pack(1, blocks=9, block_bytes=500_000)
        rig.commit(pack)
        span = _span(pack.pack_id, offset, *lengths)
        assert rig.fill(span) == [True]
        end = offset + sum(lengths)
        expected = payload_of(pack)[offset:end]
        assert b"".join(span.buffers) == expected

    def test_read_random_spans_of_several_packs_returns_stored_bytes(
        self,
        rig: NamespaceRig,
    ) -> None:
        self.need_plain(rig)
        packs = rig.packs(4, blocks=5, block_bytes=300_001)
        rig.commit(*packs)
        payloads = [payload_of(pack) for pack in packs]
        rng = np.random.default_rng(11)
        spans = []
        expected = []
        for _ in range(60):
            number = int(rng.integers(4))
            payload = payloads[number]
            offset = int(rng.integers(len(payload)))
            length = int(rng.integers(len(payload) - offset))
            # read into two buffers, of which one may be empty
            cut = int(rng.integers(length + 1))
            span = _span(packs[number].pack_id, offset, cut, length - cut)
            spans.append(span)
            expected.append(payload[offset : offset + length])
        filled = rig.fill(*spans)
        assert filled == [True] * len(spans)
        found = [b"".join(span.buffers) for span in spans]
        assert found == expected

    def test_read_hits_and_misses_in_one_call_are_reported_per_span(
        self,
        rig: NamespaceRig,
    ) -> None:
        self.need_plain(rig)
        pack, deleted = rig.packs(2)
        rig.commit(pack, deleted)
        rig.commit(deletions=[deleted.pack_id])
        payload = payload_of(pack)
        size = len(payload)
        hit = _span(pack.pack_id, 0, size)
        misses_before = [
            _span(_UNKNOWN_PACK, 0, 10),
            _span(deleted.pack_id, 0, 10),
        ]
        # each of these spans ends after the payload
        misses_after = [
            _span(pack.pack_id, 1, size),
            _span(pack.pack_id, size, 1),
            _span(pack.pack_id, 1 << 40, 1),
            _span(pack.pack_id, size - 4, 2, 3),
        ]
        filled = rig.fill(*misses_before, hit, *misses_after)
        assert filled == [False, False, True, False, False, False, False]
        assert b"".join(hit.buffers) == payload

    def test_read_damaged_payload_returns_raw_bytes_or_misses(
        self,
        rig: NamespaceRig,
        raw: RawStore,
    ) -> None:
        self.need_plain(rig)
        pack = rig.pack(1, blocks=30, block_bytes=70_000)
        rig.commit(pack)
        expected = bytearray(payload_of(pack))
        stored = raw.get(RawKind.PAYLOAD, rig.namespace, pack.pack_id)
        assert stored == expected
        # a driver returns the bytes as they are: its callers verify them
        for offset in (0, 1_048_576, 1_500_000):
            raw.flip(RawKind.PAYLOAD, rig.namespace, pack.pack_id, offset)
            expected[offset] ^= 0xFF
        assert rig.read(pack) == bytes(expected)

    def test_manifests_damaged_row_is_omitted_until_rewritten(
        self,
        rig: NamespaceRig,
        raw: RawStore,
    ) -> None:
        bad_head = sample_manifest("r0", seed=0)
        bad_keys = sample_manifest("r1", seed=1)
        intact = sample_manifest("r2", seed=2)
        ids = ["r0", "r1", "r2"]
        rig.commit(manifests=[bad_head, bad_keys, intact])
        # head and keys are separate rows: each is lost alone
        raw.flip(RawKind.MANIFEST, rig.namespace, b"r0", offset=-1)
        raw.flip(RawKind.MANIFEST_KEYS, rig.namespace, b"r1", offset=-1)
        assert rig.manifest_ids() == {"r1", "r2"}
        assert rig.manifest_keys(ids) == [bad_head.keys, None, intact.keys]

        rig.commit(manifests=[bad_head, bad_keys])
        assert rig.manifest_ids() == set(ids)
        all_keys = [bad_head.keys, bad_keys.keys, intact.keys]
        assert rig.manifest_keys(ids) == all_keys

    def test_holds_namespace_with_content_is_true_others_false(
        self,
        rig: NamespaceRig,
    ) -> None:
        other = sample_identity(7).digest
        assert not rig.backend.holds(other)
        rig.commit(rig.pack(1))
        assert rig.backend.holds(rig.namespace)
        assert not rig.backend.holds(other)

    def test_put_note_is_kept_per_namespace(self, backend: Backend) -> None:
        ours = backend.open_namespace(sample_identity(1)).id
        theirs = backend.open_namespace(sample_identity(2)).id
        assert backend.note(ours, "a1") is None
        backend.put_note(ours, "a1", b"first")
        backend.put_note(ours, "b2", b"other")
        backend.put_note(ours, "a1", b"second")
        assert backend.note(ours, "a1") == b"second"
        assert backend.note(ours, "b2") == b"other"
        assert backend.note(theirs, "a1") is None

    def test_publish_status_adds_replaces_and_removes_row(
        self,
        backend: Backend,
    ) -> None:
        backend.publish_status("one", b"first")
        backend.publish_status("other", b"theirs")
        backend.publish_status("one", b"second")
        assert backend.statuses() == {"one": b"second", "other": b"theirs"}
        # remove it twice: a status that is gone may be removed again
        for _ in range(2):
            backend.publish_status("one", None)
        assert backend.statuses() == {"other": b"theirs"}

    def test_statuses_read_only_handle_reads_but_cannot_publish(
        self,
        backend: Backend,
        url: str,
    ) -> None:
        self.need_sharing()
        reader = self.open(url, read_only=True)
        assert reader.statuses() == {}
        backend.publish_status("one", b"row")
        assert reader.statuses() == {"one": b"row"}
        with pytest.raises(StoreError):
            reader.publish_status("two", b"row")
        reader.close()

    def test_commit_two_processes_keeps_all_batches(self, url: str) -> None:
        self.need_sharing()
        ours = range(30)
        theirs = range(1000, 1030)
        rig = self.open_rig(url)
        with other_process(_commit_all, self.driver, url, theirs) as returned:
            for number in ours:
                batch = _batch(rig.backend, number)
                rig.commit_batch(batch)
            received = [_receive(returned) for _ in theirs]
            assert received == list(theirs)
            # the process has sent nothing else, and has closed its end
            with pytest.raises(EOFError):
                _receive(returned)
        for number in (*ours, *theirs):
            batch = _batch(rig.backend, number)
            held = _held(rig, batch)
            assert all(held)
        rig.check_totals()
        rig.close()

    def test_commit_killed_process_keeps_acknowledged_batches(self, url: str) -> None:
        self.need_sharing()
        # more numbers than the process can commit before it is killed
        numbers = range(1_000_000)
        with other_process(_commit_all, self.driver, url, numbers) as returned:
            acknowledged = [_receive(returned) for _ in range(12)]
        rig = self.open_rig(url)
        # Batches are committed in order, and each has one request. So the number of requests is
        # that of the stored batches. The two after them must not be stored in part.
        num_batches = rig.backend.stats().requests + 2
        for number in range(num_batches):
            batch = _batch(rig.backend, number)
            held = _held(rig, batch)
            # a batch is stored as a whole, or not at all
            assert len(set(held)) == 1
            if number in acknowledged:
                assert all(held)
        assert max(acknowledged) < rig.backend.stats().requests
        rig.check_totals()
        # the store accepts another batch, with a number that the process has not used
        another = _batch(rig.backend, number=numbers.stop)
        rig.commit_batch(another)
        rig.close()


def _torn_pack(rig: NamespaceRig) -> PackWriter:
    """Return a pack whose stream fails after some of its frames."""
    block_bytes = 1 << 18
    blocks = sample_blocks(seed=3, count=40, block_bytes=block_bytes)
    section = Section(
        group=0,
        block_bytes=block_bytes,
        keys=sample_keys(seed=3, count=40),
        source=_FailingSource([blocks]),
    )
    return PackWriter(
        rig.namespace,
        RawCodec(),
        [section],
        seal=rig.backend.seal,
    )


def _span(
    pack_id: bytes,
    offset: int,
    *lengths: int,
) -> ReadSpan:
    """Return a span of a pack to read into new buffers of these lengths."""
    buffers = [memoryview(bytearray(length)) for length in lengths]
    return ReadSpan(pack_id, offset, buffers)


def _removed(pack: NewPack) -> dict[bytes, bytes]:
    """Return ``Changes.removed`` of changes that remove this pack only."""
    return {pack.pack_id: pack.table.keys.fingerprints}


def _evicted_by(result: CommitResult) -> list[bytes]:
    """Return the ids of the packs that a commit evicted, in order."""
    return [table.pack_id for table in result.evicted]


def _content(stats: BackendStats) -> BackendStats:
    """Return the totals without the bytes on disk, which depend on the history of a store."""
    return replace(stats, disk_bytes=0)


def _batch(backend: Backend, number: int) -> CommitBatch:
    """Return a batch of two packs and a manifest, different for each number."""
    namespace = sample_identity().digest
    first_seed = 10 * number
    packs: list[PackWriter] = []
    for seed in (first_seed, first_seed + 1):
        pack = sample_pack(namespace, seed, blocks=2, seal=backend.seal)
        packs.append(pack)
    manifest = sample_manifest(f"r{number}", number)
    return CommitBatch(packs, [manifest])


def _held(rig: NamespaceRig, batch: CommitBatch) -> list[bool]:
    """Return, for each pack and manifest of a batch, whether it is stored with the same content."""
    held = []
    # Find packs by their keys. The batch was made again, and if the store has a key, the ids of two
    # packs of the same blocks differ.
    by_keys = {table.keys: table for table in rig.tables().values()}
    for pack in batch.packs:
        table = by_keys.get(pack.keys)
        content = None
        if table is not None:
            content = read_pack(rig.backend, rig.namespace, table)
        held.append(content == payload_of(pack))
    for write in batch.manifests:
        keys = rig.manifest_keys([write.manifest.id])
        held.append(keys == [write.keys])
    return held


def _receive(connection: Connection) -> int:
    """Return the next number from ``_commit_all``; raise EOFError if it has ended."""
    assert connection.poll(_PATIENCE_S), "the other process hangs"
    number: int = connection.recv()
    return number


def _commit_all(
    driver: type[Backend],
    url: str,
    numbers: range,
    returned: Connection,
) -> None:
    """Commit one batch per number; send the number when the commit has returned."""
    backend = driver.open(StoreUrl.parse(url))
    namespace = backend.open_namespace(sample_identity()).id
    for number in numbers:
        backend.commit(namespace, _batch(backend, number))
        returned.send(number)
    backend.close()
    returned.close()
