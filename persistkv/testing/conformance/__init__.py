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
``persistkv.storage.catalog`` implements for all drivers, such as cascading deletions and ``ttl``,
are tested in persistkv's repository.
"""

from __future__ import annotations

import multiprocessing
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from multiprocessing.connection import Connection

import numpy as np
import pytest

from persistkv.config import StoreUrl
from persistkv.errors import (
    ConfigurationError,
    StoreError,
    StoreFullError,
    StoreUnavailableError,
)
from persistkv.memory.rows import StagedBlocks
from persistkv.storage.backend import Backend, CommitBatch, ReadSpan
from persistkv.storage.format.codec import RawCodec
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
    payload_of,
    sample_blocks,
    sample_keys,
    sample_manifest,
    sample_pack,
)

__all__ = ["BackendConformance", "RawKind", "RawStore"]

_MIB = 1 << 20
_PATIENCE_S = 60


class _SourceFailure(Exception):
    pass


class _FailingSource(StagedBlocks):
    """Blocks that cannot be read from number 30 on."""

    def pieces(self, start: int, stop: int) -> list[memoryview]:
        if stop > 30:
            raise _SourceFailure
        return super().pieces(start, stop)


class BackendConformance(BackendSuite):
    """Tests of the contract of ``persistkv.storage.backend``."""

    def test_open_closed_store_returns_committed_content(self, url: str) -> None:
        self.need_sharing()
        first = self.open(url)
        opened = first.open_namespace(sample_identity())
        pack, manifest = sample_pack(opened.id, 1), sample_manifest("r1")
        cursor = first.commit(opened.id, CommitBatch([pack], [manifest])).cursor
        stats = first.stats()
        first.close()

        again = self.open(url)
        assert list(again.namespaces()) == [opened]
        assert again.open_namespace(sample_identity()) == opened
        assert tables(again, opened.id) == {pack.pack_id: pack.table}
        assert read_pack(again, opened.id, pack.table) == payload_of(pack)
        assert list(again.catalogue(opened.id).manifests()) == [manifest.manifest]
        assert again.manifest_keys(opened.id, ["r1"])[0] == manifest.keys
        assert list(again.changes(opened.id, cursor).added) == []
        assert replace(check_totals(again), disk_bytes=0) == replace(
            stats, disk_bytes=0
        )
        again.close()

    def test_open_read_only_missing_store_raises_and_creates_nothing(
        self, url: str
    ) -> None:
        with pytest.raises(StoreUnavailableError):
            self.open(url, read_only=True)
        with pytest.raises(StoreUnavailableError):  # the first attempt created nothing
            self.open(url, read_only=True)

    def test_open_read_only_reads_and_rejects_writes(self, url: str) -> None:
        self.need_sharing()
        writer = self.open(url)
        assert writer.capabilities.writable
        opened = writer.open_namespace(sample_identity())
        pack = sample_pack(opened.id, 1)
        writer.commit(opened.id, CommitBatch([pack]))
        writer.close()

        reader = self.open(url, read_only=True)
        assert not reader.capabilities.writable
        assert reader.open_namespace(sample_identity()) == opened
        assert read_pack(reader, opened.id, pack.table) == payload_of(pack)
        with pytest.raises(StoreError):
            reader.commit(opened.id, CommitBatch(deletions=[pack.pack_id]))
        assert tables(reader, opened.id) == {pack.pack_id: pack.table}
        assert list(reader.namespaces()) == [opened]
        reader.close()

    def test_open_read_only_absent_namespace_is_empty_until_another_process_begins_it(
        self, url: str
    ) -> None:
        self.need_sharing()
        self.need_ending_namespaces()
        writer = self.open(url)
        pack = sample_pack(writer.open_namespace(sample_identity()).id, 1)
        reader = self.open(url, read_only=True)
        namespace = reader.open_namespace(sample_identity()).id
        before = reader.changes(namespace, None)
        assert (before.reset, list(before.added)) == (True, [])
        assert reader.tables(namespace, [pack.pack_id]) == []
        assert list(reader.namespaces()) == []
        writer.commit(namespace, CommitBatch([pack]))
        assert list(reader.changes(namespace, before.cursor).added) == [pack.table]
        assert read_pack(reader, namespace, pack.table) == payload_of(pack)
        reader.close()
        writer.close()

    def test_open_two_handles_see_each_others_commits(self, url: str) -> None:
        self.need_sharing()
        first, second = self.open(url), self.open(url)
        namespace = first.open_namespace(sample_identity()).id
        assert second.open_namespace(sample_identity()).id == namespace
        cursor = second.changes(namespace, None).cursor
        pack = sample_pack(namespace, 1)
        first.commit(namespace, CommitBatch([pack]))
        assert second.commit(
            namespace, CommitBatch([sample_pack(namespace, 2)], seen=cursor)
        ).stale
        assert list(second.changes(namespace, cursor).added) == [pack.table]
        first.close()
        assert read_pack(second, namespace, pack.table) == payload_of(pack)
        assert not second.commit(
            namespace, CommitBatch([sample_pack(namespace, 2)])
        ).stale
        check_totals(second)
        second.close()

    def test_open_read_only_with_open_writer_sees_its_commits(self, url: str) -> None:
        self.need_sharing()
        writer = self.open(url)
        namespace = writer.open_namespace(sample_identity()).id
        reader = self.open(url, read_only=True)
        cursor = reader.changes(namespace, None).cursor
        pack = sample_pack(namespace, 1)
        writer.commit(namespace, CommitBatch([pack], [sample_manifest("r1")]))
        assert list(reader.changes(namespace, cursor).added) == [pack.table]
        assert read_pack(reader, namespace, pack.table) == payload_of(pack)
        assert [
            manifest.id for manifest in reader.catalogue(namespace).manifests()
        ] == ["r1"]
        writer.close()
        assert reader.stats().packs == 1
        again = self.open(url)
        again.commit(namespace, CommitBatch([sample_pack(namespace, 2)]))
        assert reader.stats().packs == 2
        again.close()
        reader.close()

    def test_open_unknown_option_raises_and_creates_nothing(self, url: str) -> None:
        wrong = f"{url}{'&' if '?' in url else '?'}no_such_option=1"
        with pytest.raises(ConfigurationError, match="no_such_option"):
            self.open(wrong)
        with pytest.raises(StoreUnavailableError):
            self.open(url, read_only=True)

    def test_close_twice_succeeds_and_later_calls_raise(self, url: str) -> None:
        backend = self.open(url)
        namespace = backend.open_namespace(sample_identity()).id
        backend.commit(namespace, CommitBatch([sample_pack(namespace, 1)]))
        backend.close()
        backend.close()
        with pytest.raises(StoreError):
            backend.changes(namespace, None)
        with pytest.raises(StoreError):
            backend.read(
                namespace, [ReadSpan(bytes(16), 0, [memoryview(bytearray(1))])]
            )
        with pytest.raises(StoreError):
            backend.commit(namespace, CommitBatch())
        with pytest.raises(StoreError):
            backend.stats()

    @pytest.mark.parametrize(
        "block_bytes",
        [1, 4095, (1 << 20) - 1, 1 << 20, (1 << 20) + 1, 3 * (1 << 20) + 5],
    )
    def test_commit_any_block_size_stores_payload(
        self, backend: Backend, namespace: bytes, block_bytes: int
    ) -> None:
        pack = sample_pack(namespace, 1, blocks=3, block_bytes=block_bytes)
        backend.commit(namespace, CommitBatch([pack]))
        assert tables(backend, namespace) == {pack.pack_id: pack.table}
        assert list(backend.tables(namespace, [bytes(16), pack.pack_id])) == [
            pack.table
        ]
        assert read_pack(backend, namespace, pack.table) == payload_of(pack)

    def test_commit_unknown_namespace_raises(self, backend: Backend) -> None:
        stranger = sample_identity(9).digest
        with pytest.raises(StoreError):
            backend.commit(stranger, CommitBatch([sample_pack(stranger, 1)]))

    def test_commit_pack_of_other_namespace_raises(
        self, backend: Backend, namespace: bytes
    ) -> None:
        with pytest.raises(StoreError):
            backend.commit(
                namespace, CommitBatch([sample_pack(sample_identity(9).digest, 1)])
            )
        assert tables(backend, namespace) == {}

    def test_commit_existing_pack_id_keeps_first_pack(
        self, backend: Backend, namespace: bytes
    ) -> None:
        first, second = (
            sample_pack(namespace, 1, content=10),
            sample_pack(namespace, 1, content=20),
        )
        assert first.pack_id == second.pack_id
        cursor = backend.commit(namespace, CommitBatch([first, second])).cursor
        backend.commit(namespace, CommitBatch([second]))
        assert tables(backend, namespace) == {first.pack_id: first.table}
        assert read_pack(backend, namespace, first.table) == payload_of(first)
        assert list(backend.changes(namespace, cursor).added) == []
        assert check_totals(backend).packs == 1

    def test_commit_failing_stream_changes_nothing(
        self, backend: Backend, namespace: bytes
    ) -> None:
        held, good = sample_pack(namespace, 1), sample_pack(namespace, 2)
        cursor = backend.commit(namespace, CommitBatch([held])).cursor
        stats = backend.stats()
        source = _FailingSource([sample_blocks(3, 40, 1 << 18)])
        torn = PackWriter(
            namespace, RawCodec(), [Segment(0, 1 << 18, sample_keys(3, 40), source)]
        )
        with pytest.raises(_SourceFailure):
            backend.commit(
                namespace,
                CommitBatch([good, torn], [sample_manifest("r1")], [held.pack_id]),
            )

        assert tables(backend, namespace) == {held.pack_id: held.table}
        assert read_pack(backend, namespace, held.table) == payload_of(held)
        assert read_pack(backend, namespace, good.table) is None
        assert list(backend.catalogue(namespace).manifests()) == []
        assert list(backend.changes(namespace, cursor).added) == []
        assert replace(check_totals(backend), disk_bytes=0) == replace(
            stats, disk_bytes=0
        )
        backend.commit(namespace, CommitBatch([good], seen=cursor))
        assert read_pack(backend, namespace, good.table) == payload_of(good)

    def test_commit_too_large_pack_raises_full_and_changes_nothing(
        self, small: Backend, name: bytes
    ) -> None:
        held = sample_pack(name, 1, blocks=8, block_bytes=1 << 18)
        cursor = small.commit(name, CommitBatch([held])).cursor
        large = sample_pack(name, 2, blocks=32, block_bytes=1 << 18)
        with pytest.raises(StoreFullError):
            small.commit(
                name, CommitBatch([large], [sample_manifest("r1")], [held.pack_id])
            )
        assert tables(small, name) == {held.pack_id: held.table}
        assert read_pack(small, name, held.table) == payload_of(held)
        assert list(small.catalogue(name).manifests()) == []
        check_totals(small)

        fits = sample_pack(name, 3)
        assert not small.commit(name, CommitBatch([fits], seen=cursor)).stale
        assert read_pack(small, name, fits.table) == payload_of(fits)

    def test_commit_emptied_store_can_be_refilled(
        self, small: Backend, name: bytes
    ) -> None:
        for round_number in range(3):
            for number in range(60):
                size = (200_000, 4096)[number % 2]
                pack = sample_pack(
                    name, 100 * round_number + number, blocks=1, block_bytes=size
                )
                small.commit(name, CommitBatch([pack]))
            assert check_totals(small).packs >= 10
            for pack_id in tables(small, name):
                small.commit(name, CommitBatch(deletions=[pack_id]))
            assert check_totals(small).packs == 0

    def test_eviction_respects_order_and_pins(
        self, small: Backend, name: bytes
    ) -> None:
        packs = [
            sample_pack(name, seed, blocks=3, block_bytes=100_000) for seed in range(33)
        ]
        pinned, used, idle, *new = packs
        manifest = sample_manifest("r", packs=[pinned.pack_id])
        small.commit(name, CommitBatch(packs[:3], [manifest], pins=[("r", True)]))
        small.commit(name, CommitBatch(touches=[used.pack_id]))
        stored = {pack.pack_id for pack in packs[:3]}
        evicted: list[bytes] = []
        for pack in new:
            result = small.commit(name, CommitBatch([pack]))
            evicted += [table.pack_id for table in result.evicted]
            stored.add(pack.pack_id)
            assert set(tables(small, name)) == stored - set(evicted)
            check_totals(small)
        in_order = [pack.pack_id for pack in (idle, used, *new)]
        assert evicted == in_order[: len(evicted)]
        assert len(evicted) > 10
        assert read_pack(small, name, pinned.table) == payload_of(pinned)
        assert [manifest.id for manifest in small.catalogue(name).manifests()] == ["r"]

    def test_commit_deletion_removes_pack_and_reports_it(
        self, backend: Backend, namespace: bytes
    ) -> None:
        kept, deleted = (
            sample_pack(namespace, 1),
            sample_pack(namespace, 2, blocks=30, block_bytes=70_000),
        )
        cursor = backend.commit(namespace, CommitBatch([kept, deleted])).cursor
        result = backend.commit(
            namespace,
            CommitBatch(deletions=[deleted.pack_id, bytes(16), deleted.pack_id]),
        )
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

    def test_commit_manifest_deletion_keeps_packs(
        self, backend: Backend, namespace: bytes
    ) -> None:
        pack = sample_pack(namespace, 1)
        manifests = [sample_manifest("a", packs=[pack.pack_id]), sample_manifest("b")]
        pins = [("a", True), ("b", True)]
        backend.commit(namespace, CommitBatch([pack], manifests, pins=pins))
        result = backend.commit(
            namespace, CommitBatch(manifest_deletions=["a", "absent"])
        )
        assert not result.evicted
        assert read_pack(backend, namespace, pack.table) == payload_of(pack)
        catalogue = backend.catalogue(namespace)
        assert [manifest.id for manifest in catalogue.manifests()] == ["b"]
        assert catalogue.manifest_keys(["a"]) == [None]
        assert check_totals(backend).requests == 1
        # a later version of the request is not covered by the deletion
        backend.commit(namespace, CommitBatch(manifests=manifests[:1]))
        assert len(list(backend.catalogue(namespace).manifests())) == 2
        backend.commit(namespace, CommitBatch(manifest_deletions=["b", "a"]))
        assert check_totals(backend).requests == 0

    def test_commit_deletion_and_same_pack_id_replaces_pack(
        self, backend: Backend, namespace: bytes
    ) -> None:
        bad, good = (
            sample_pack(namespace, 1, content=10),
            sample_pack(namespace, 1, content=20),
        )
        cursor = backend.commit(namespace, CommitBatch([bad])).cursor
        result = backend.commit(namespace, CommitBatch([good], deletions=[bad.pack_id]))
        assert list(result.evicted) == [bad.table]
        assert read_pack(backend, namespace, good.table) == payload_of(good)
        changes = backend.changes(namespace, cursor)
        assert changes.removed == {bad.pack_id: bad.table.keys.fingerprints}
        assert list(changes.added) == [good.table]

    def test_commit_stale_cursor_changes_nothing(
        self, backend: Backend, namespace: bytes
    ) -> None:
        seen = backend.changes(namespace, None).cursor
        first, second = sample_pack(namespace, 1), sample_pack(namespace, 2)
        cursor = backend.commit(namespace, CommitBatch([first], seen=seen)).cursor
        result = backend.commit(
            namespace,
            CommitBatch([second], [sample_manifest("r1")], [first.pack_id], seen=seen),
        )
        assert result.stale
        assert list(backend.changes(namespace, result.cursor).added) == [first.table]
        assert tables(backend, namespace) == {first.pack_id: first.table}
        assert list(backend.catalogue(namespace).manifests()) == []

        assert backend.commit(namespace, CommitBatch()).cursor == cursor, (
            "an empty batch changed the store"
        )
        assert not backend.commit(namespace, CommitBatch([second], seen=cursor)).stale
        assert not backend.commit(
            namespace, CommitBatch(deletions=[first.pack_id])
        ).stale
        assert tables(backend, namespace) == {second.pack_id: second.table}

    def test_commit_needed_pack_removed_is_stale(
        self, backend: Backend, namespace: bytes
    ) -> None:
        needed, kept, pack = (sample_pack(namespace, seed) for seed in (1, 2, 3))
        cursor = backend.commit(namespace, CommitBatch([needed, kept])).cursor
        backend.commit(namespace, CommitBatch(deletions=[needed.pack_id]))
        needs = [kept.pack_id, needed.pack_id]
        result = backend.commit(
            namespace, CommitBatch([pack], seen=cursor, needs=needs)
        )
        assert (result.stale, result.cursor) == (True, cursor)
        assert set(tables(backend, namespace)) == {kept.pack_id}

    def test_commit_after_others_needed_packs_held_reports_interleaved_or_stale(
        self, backend: Backend, namespace: bytes
    ) -> None:
        needed, others, pack = (sample_pack(namespace, seed) for seed in (1, 2, 3))
        cursor = backend.commit(namespace, CommitBatch([needed])).cursor
        backend.commit(namespace, CommitBatch([others]))
        result = backend.commit(
            namespace, CommitBatch([pack], seen=cursor, needs=[needed.pack_id])
        )
        assert result.interleaved is not result.stale
        added = {table.pack_id for table in backend.changes(namespace, cursor).added}
        assert added == (
            {others.pack_id} if result.stale else {others.pack_id, pack.pack_id}
        )
        seen = backend.changes(namespace, cursor).cursor
        again = backend.commit(
            namespace, CommitBatch([sample_pack(namespace, 4)], seen=seen, needs=[])
        )
        assert not again.stale
        assert not again.interleaved

    def test_changes_with_cursor_returns_later_changes_only(
        self, backend: Backend, namespace: bytes
    ) -> None:
        first, second, third = (sample_pack(namespace, seed) for seed in range(3))
        backend.commit(namespace, CommitBatch([first]))
        cursor = backend.changes(namespace, None).cursor
        quiet = backend.changes(namespace, cursor)
        assert (quiet.cursor, list(quiet.added), list(quiet.removed), quiet.reset) == (
            cursor,
            [],
            [],
            False,
        )

        backend.commit(namespace, CommitBatch([second]))
        backend.commit(namespace, CommitBatch([third], deletions=[first.pack_id]))
        changes = backend.changes(namespace, cursor)
        assert not changes.reset
        assert {table.pack_id for table in changes.added} == {
            second.pack_id,
            third.pack_id,
        }
        assert changes.removed == {first.pack_id: first.table.keys.fingerprints}
        assert not list(backend.changes(namespace, changes.cursor).added)

    @pytest.mark.parametrize(
        "cursor", [b"", b"x", bytes(15), b"\xff" * 16, bytes(15) + b"\1", b"\xff" * 64]
    )
    def test_changes_unknown_cursor_resets(
        self, backend: Backend, namespace: bytes, cursor: bytes
    ) -> None:
        pack = sample_pack(namespace, 1)
        backend.commit(namespace, CommitBatch([pack]))
        changes = backend.changes(namespace, cursor)
        assert changes.reset
        assert list(changes.added) == [pack.table]
        assert backend.commit(
            namespace, CommitBatch([sample_pack(namespace, 2)], seen=cursor)
        ).stale

    def test_changes_damaged_table_is_omitted_until_rewritten_or_deleted(
        self, backend: Backend, namespace: bytes, raw: RawStore
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
        assert tables(backend, namespace) == {
            good.pack_id: good.table,
            again.pack_id: again.table,
        }
        assert read_pack(backend, namespace, again.table) == payload_of(again)
        assert read_pack(backend, namespace, worse.table) is None
        assert check_totals(backend).packs == 2

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
        self, backend: Backend, namespace: bytes, offset: int, lengths: list[int]
    ) -> None:
        pack = sample_pack(namespace, 1, blocks=9, block_bytes=500_000)
        backend.commit(namespace, CommitBatch([pack]))
        buffers = [memoryview(bytearray(length)) for length in lengths]
        assert backend.read(namespace, [ReadSpan(pack.pack_id, offset, buffers)]) == [
            True
        ]
        assert b"".join(buffers) == payload_of(pack)[offset : offset + sum(lengths)]

    @pytest.mark.parametrize("is_scan", [False, True], ids=["read", "scan"])
    def test_read_random_spans_of_several_packs_returns_stored_bytes(
        self, backend: Backend, namespace: bytes, is_scan: bool
    ) -> None:
        packs = [
            sample_pack(namespace, seed, blocks=5, block_bytes=300_001)
            for seed in range(4)
        ]
        backend.commit(namespace, CommitBatch(packs))
        payloads = [payload_of(pack) for pack in packs]
        rng = np.random.default_rng(11)
        spans, expected = [], []
        for _ in range(60):
            which = int(rng.integers(4))
            offset = int(rng.integers(len(payloads[which])))
            length = int(rng.integers(len(payloads[which]) - offset))
            cut = int(rng.integers(length + 1))
            buffers = [memoryview(bytearray(cut)), memoryview(bytearray(length - cut))]
            spans.append(ReadSpan(packs[which].pack_id, offset, buffers))
            expected.append(payloads[which][offset : offset + length])
        filled = (
            backend.scan(namespace, spans)
            if is_scan
            else backend.read(namespace, spans)
        )
        assert filled == [True] * 60
        assert [b"".join(span.buffers) for span in spans] == expected

    @pytest.mark.parametrize("is_scan", [False, True], ids=["read", "scan"])
    def test_read_hits_and_misses_in_one_call_are_reported_per_span(
        self, backend: Backend, namespace: bytes, is_scan: bool
    ) -> None:
        pack, deleted = sample_pack(namespace, 1), sample_pack(namespace, 2)
        backend.commit(namespace, CommitBatch([pack, deleted]))
        backend.commit(namespace, CommitBatch(deletions=[deleted.pack_id]))
        payload = payload_of(pack)
        hit = bytearray(len(payload))
        spans = [
            ReadSpan(bytes(16), 0, [memoryview(bytearray(10))]),
            ReadSpan(deleted.pack_id, 0, [memoryview(bytearray(10))]),
            ReadSpan(pack.pack_id, 0, [memoryview(hit)]),
            ReadSpan(pack.pack_id, 1, [memoryview(bytearray(len(payload)))]),
            ReadSpan(pack.pack_id, len(payload), [memoryview(bytearray(1))]),
            ReadSpan(pack.pack_id, 1 << 40, [memoryview(bytearray(1))]),
            ReadSpan(
                pack.pack_id,
                len(payload) - 4,
                [memoryview(bytearray(2)), memoryview(bytearray(3))],
            ),
        ]
        filled = (
            backend.scan(namespace, spans)
            if is_scan
            else backend.read(namespace, spans)
        )
        assert filled == [False, False, True, False, False, False, False]
        assert hit == payload

    def test_read_damaged_payload_returns_raw_bytes_or_misses(
        self, backend: Backend, namespace: bytes, raw: RawStore
    ) -> None:
        pack = sample_pack(namespace, 1, blocks=30, block_bytes=70_000)
        backend.commit(namespace, CommitBatch([pack]))
        expected = bytearray(payload_of(pack))
        assert raw.get(RawKind.PAYLOAD, namespace, pack.pack_id) == expected
        for offset in (0, 1_048_576, 1_500_000):
            raw.flip(RawKind.PAYLOAD, namespace, pack.pack_id, offset)
            expected[offset] ^= 0xFF
        assert read_pack(backend, namespace, pack.table) == bytes(expected)

    def test_manifests_damaged_row_is_omitted_until_rewritten(
        self, backend: Backend, namespace: bytes, raw: RawStore
    ) -> None:
        writes = [sample_manifest(f"r{number}", number) for number in range(3)]
        backend.commit(namespace, CommitBatch(manifests=writes))
        raw.flip(RawKind.MANIFEST, namespace, b"r0", -1)
        raw.flip(RawKind.MANIFEST_KEYS, namespace, b"r1", -1)
        assert {
            manifest.id for manifest in backend.catalogue(namespace).manifests()
        } == {
            "r1",
            "r2",
        }
        assert backend.manifest_keys(namespace, ["r0"])[0] == writes[0].keys
        assert backend.manifest_keys(namespace, ["r1"])[0] is None
        assert backend.manifest_keys(namespace, ["r2"])[0] == writes[2].keys

        backend.commit(namespace, CommitBatch(manifests=writes[:2]))
        assert {
            manifest.id for manifest in backend.catalogue(namespace).manifests()
        } == {
            "r0",
            "r1",
            "r2",
        }
        assert backend.manifest_keys(namespace, ["r1"])[0] == writes[1].keys

    def test_holds_namespace_with_content_is_true_others_false(
        self, backend: Backend, namespace: bytes
    ) -> None:
        assert not backend.holds(sample_identity(7).digest)
        backend.commit(namespace, CommitBatch([sample_pack(namespace, 1)]))
        assert backend.holds(namespace)
        assert not backend.holds(sample_identity(7).digest)

    def test_put_note_is_kept_per_namespace(self, backend: Backend) -> None:
        ours, theirs = (
            backend.open_namespace(sample_identity(number)).id for number in (1, 2)
        )
        assert backend.note(ours, "a1") is None
        backend.put_note(ours, "a1", b"first")
        backend.put_note(ours, "b2", b"other")
        backend.put_note(ours, "a1", b"second")
        assert (backend.note(ours, "a1"), backend.note(ours, "b2")) == (
            b"second",
            b"other",
        )
        assert backend.note(theirs, "a1") is None
        check_totals(backend)

    def test_publish_status_adds_replaces_and_removes_row(
        self, backend: Backend
    ) -> None:
        backend.publish_status("one", b"first")
        backend.publish_status("other", b"theirs")
        backend.publish_status("one", b"second")
        assert backend.statuses() == {"one": b"second", "other": b"theirs"}
        for _ in range(2):
            backend.publish_status("one", None)
        assert backend.statuses() == {"other": b"theirs"}

    def test_statuses_read_only_handle_reads_but_cannot_publish(
        self, backend: Backend, url: str
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
        backend = self.open(url)
        namespace = backend.open_namespace(sample_identity()).id
        with _other_process(self.driver, url, range(1000, 1030)) as returned:
            for number in range(30):
                backend.commit(namespace, _batch(namespace, number))
            assert [_receive(returned) for _ in range(30)] == list(range(1000, 1030))
            with pytest.raises(EOFError):
                _receive(returned)
        for number in (*range(30), *range(1000, 1030)):
            assert _held(backend, namespace, _batch(namespace, number)) == [True] * 3
        check_totals(backend)
        backend.close()

    def test_commit_killed_process_keeps_acknowledged_batches(self, url: str) -> None:
        self.need_sharing()
        with _other_process(self.driver, url, range(1_000_000)) as returned:
            numbers = [_receive(returned) for _ in range(12)]
        backend = self.open(url)
        namespace = backend.open_namespace(sample_identity()).id
        held = [
            _held(backend, namespace, _batch(namespace, number))
            for number in range(backend.stats().requests + 2)
        ]
        assert all(all(parts) or not any(parts) for parts in held)
        assert all(all(held[number]) for number in numbers)
        check_totals(backend)
        backend.commit(namespace, _batch(namespace, 5_000_000))
        backend.close()


def _batch(namespace: bytes, number: int) -> CommitBatch:
    packs = [sample_pack(namespace, 10 * number + part, blocks=2) for part in range(2)]
    return CommitBatch(packs, [sample_manifest(f"r{number}", number)])


def _held(backend: Backend, namespace: bytes, batch: CommitBatch) -> list[bool]:
    """Return, for each pack and manifest of a batch, whether it is stored with the same content."""
    held = []
    for pack in batch.packs:
        # before ``read_pack``: a pack's table exists once its stream has run
        payload = payload_of(pack)
        held.append(payload == read_pack(backend, namespace, pack.table))
    for write in batch.manifests:
        keys = backend.manifest_keys(namespace, [write.manifest.id])
        held.append(keys == [write.keys])
    return held


@contextmanager
def _other_process(
    driver: type[Backend], url: str, numbers: range
) -> Iterator[Connection]:
    """Start a process that commits one batch per number and sends the number when the commit has
    returned. Kill the process at the end of the ``with`` block.
    """
    context = multiprocessing.get_context("spawn")
    ours, theirs = context.Pipe()
    process = context.Process(
        target=_commit_all, args=(driver, url, numbers, theirs), daemon=True
    )
    process.start()
    theirs.close()
    try:
        yield ours
    finally:
        process.kill()
        process.join()
        ours.close()


def _receive(connection: Connection) -> int:
    assert connection.poll(_PATIENCE_S), "the other process hangs"
    number: int = connection.recv()
    return number


def _commit_all(
    driver: type[Backend], url: str, numbers: range, returned: Connection
) -> None:
    backend = driver.open(StoreUrl.parse(url))
    namespace = backend.open_namespace(sample_identity()).id
    for number in numbers:
        backend.commit(namespace, _batch(namespace, number))
        returned.send(number)
    backend.close()
    returned.close()
