"""Tests of reading payloads, and of storing, listing and reading manifests."""

from __future__ import annotations

import mmap
import time
from collections.abc import Sequence

import numpy as np
import pytest

from persistkv.storage.backend import CommitBatch, ManifestWrite, ReadSpan
from persistkv.storage.extensions import InspectableBackend, SupportsFrames
from persistkv.storage.format.codec import ZstdCodec
from persistkv.storage.format.manifest import RequestManifest
from persistkv.storage.format.pack import PackedKeys
from persistkv.storage.format.pack_writer import PackWriter
from persistkv.testing.conformance.suite import (
    BackendSuite,
    RawKind,
    RawStore,
    check_totals,
    read_pack,
    sample_identity,
)
from persistkv.testing.samples import payload_of, sample_keys, sample_manifest, sample_pack

_MIB = 1 << 20


class ReadTests(BackendSuite):
    """Tests of ``read``."""

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
        self, backend: InspectableBackend, namespace: bytes, offset: int, lengths: list[int]
    ) -> None:
        pack = sample_pack(namespace, 1, blocks=9, block_bytes=500_000)
        backend.commit(namespace, CommitBatch([pack]))
        buffers = [bytearray(length) for length in lengths]
        assert backend.read(
            namespace, [ReadSpan(pack.pack_id, offset, [memoryview(buffer) for buffer in buffers])]
        ) == [True]
        assert b"".join(buffers) == payload_of(pack)[offset : offset + sum(lengths)]

    def test_read_into_array_rows_fills_only_their_bytes(self, backend: InspectableBackend, namespace: bytes) -> None:
        pack = sample_pack(namespace, 1, blocks=40, block_bytes=65_536)
        backend.commit(namespace, CommitBatch([pack]))
        rows = np.zeros((40, 2, 50_000), np.int8)
        order = np.random.default_rng(3).permutation(40)
        spans = [ReadSpan(pack.pack_id, int(block) * 65_536, [memoryview(rows[block, 0])]) for block in order]
        assert backend.read(namespace, spans) == [True] * 40
        stored = np.frombuffer(payload_of(pack), np.int8).reshape(40, 65_536)
        assert np.array_equal(rows[:, 0], stored[:, :50_000])
        assert not rows[:, 1].any()

    @pytest.mark.parametrize("method", ["read", "scan"])
    def test_read_random_spans_of_several_packs_returns_stored_bytes(
        self, backend: InspectableBackend, namespace: bytes, method: str
    ) -> None:
        packs = [sample_pack(namespace, seed, blocks=5, block_bytes=300_001) for seed in range(4)]
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
        assert getattr(backend, method)(namespace, spans) == [True] * 60
        assert [b"".join(span.buffers) for span in spans] == expected

    @pytest.mark.parametrize("numbers", [range(6), [1, 2, 5], [4], []])
    def test_read_frames_passes_frames_in_order_through_one_buffer(
        self, backend: InspectableBackend, namespace: bytes, numbers: Sequence[int]
    ) -> None:
        if not isinstance(backend, SupportsFrames):
            pytest.skip("the driver does not read single frames")
        pack = sample_pack(namespace, 1, blocks=6, block_bytes=900_000, codec=ZstdCodec())
        backend.commit(namespace, CommitBatch([pack]))
        payload, frames = payload_of(pack), [pack.table.frames[number] for number in numbers]
        buffer = memoryview(bytearray(max((frame.stored_length for frame in frames), default=1)))
        received: list[tuple[int, bytes]] = []

        def read(pack_id: bytes) -> None:
            backend.read_frames(
                namespace, pack_id, frames, buffer, lambda *frame: received.append((frame[0], bytes(frame[1])))
            )

        read(pack.pack_id)
        stored = [payload[frame.offset : frame.offset + frame.stored_length] for frame in frames]
        assert received == list(enumerate(stored))
        backend.commit(namespace, CommitBatch(deletions=[pack.pack_id]))
        read(pack.pack_id)
        read(bytes(16))
        assert received == list(enumerate(stored)), "frames of a deleted pack were passed on"

    @pytest.mark.parametrize("method", ["read", "scan"])
    def test_read_hits_and_misses_in_one_call_are_reported_per_span(
        self, backend: InspectableBackend, namespace: bytes, method: str
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
            ReadSpan(pack.pack_id, len(payload) - 4, [memoryview(bytearray(2)), memoryview(bytearray(3))]),
        ]
        assert getattr(backend, method)(namespace, spans) == [False, False, True, False, False, False, False]
        assert hit == payload

    def test_scan_all_packs_in_scan_order_returns_stored_bytes(
        self, backend: InspectableBackend, namespace: bytes
    ) -> None:
        """Reads all payloads, in ``scan_order``, into page-aligned memory, as ``verify`` does. One pack was deleted."""
        packs = [sample_pack(namespace, seed, blocks=3, block_bytes=5000 + seed) for seed in range(12)]
        backend.commit(namespace, CommitBatch(packs))
        backend.commit(namespace, CommitBatch(deletions=[packs[4].pack_id]))
        payloads = {pack.pack_id: payload_of(pack) for pack in packs}
        order = backend.scan_order(namespace, [*payloads, bytes(16)])
        assert sorted(order) == sorted([*payloads, bytes(16)])
        wanted = [pack_id for pack_id in order if pack_id in payloads]
        memory = memoryview(mmap.mmap(-1, sum(map(len, payloads.values()))))
        spans, end = [], 0
        for pack_id in wanted:
            begin, end = end, end + len(payloads[pack_id])
            spans.append(ReadSpan(pack_id, 0, [memory[begin:end]]))
        present = [pack_id != packs[4].pack_id for pack_id in wanted]
        assert backend.scan(namespace, spans) == present
        found = [bytes(span.buffers[0]) for span, filled in zip(spans, present, strict=True) if filled]
        assert found == [payloads[pack_id] for pack_id in wanted if pack_id != packs[4].pack_id]

    def test_read_damaged_payload_returns_raw_bytes_or_misses(
        self, backend: InspectableBackend, namespace: bytes, raw: RawStore
    ) -> None:
        pack = sample_pack(namespace, 1, blocks=30, block_bytes=70_000)
        backend.commit(namespace, CommitBatch([pack]))
        expected = bytearray(payload_of(pack))
        assert raw.get(RawKind.PAYLOAD, namespace, pack.pack_id) == expected
        for offset in (0, 1_048_576, 1_500_000):
            raw.flip(RawKind.PAYLOAD, namespace, pack.pack_id, offset)
            expected[offset] ^= 0xFF
        assert read_pack(backend, namespace, pack.table) == bytes(expected)

    def test_read_result_stays_valid_after_deletion_and_close(self, url: str) -> None:
        backend = self.open(url)
        namespace = backend.open_namespace(sample_identity()).id
        pack = sample_pack(namespace, 1, blocks=8, block_bytes=100_000)
        backend.commit(namespace, CommitBatch([pack]))
        held = list(backend.changes(namespace, None).added)
        bytes_read = read_pack(backend, namespace, pack.table)
        backend.commit(namespace, CommitBatch(deletions=[pack.pack_id]))
        for seed in range(2, 6):
            backend.commit(namespace, CommitBatch([sample_pack(namespace, seed, blocks=8, block_bytes=100_000)]))
        backend.close()
        assert bytes_read == payload_of(pack)
        assert list(held) == [pack.table]


class ManifestTests(BackendSuite):
    """Tests of ``manifests`` and ``manifest_keys``."""

    @pytest.mark.parametrize("manifest_id", ["engine-1/0", "größe ✓", "x" * 5000, " "])
    def test_manifests_round_trip_returns_manifest_and_keys(
        self, backend: InspectableBackend, namespace: bytes, manifest_id: str
    ) -> None:
        keys = (PackedKeys.of(sample_keys(1, 300)), PackedKeys.of([b"short", b"of another length", b"x"]), PackedKeys())
        manifest = RequestManifest(
            id=manifest_id,
            created=1234.5,
            tokens=4801,
            group_blocks=(300, 3, 0),
            raw_bytes=1 << 40,
            ordered=False,
            labels={"user": "größe", "empty": ""},
        )
        backend.commit(namespace, CommitBatch(manifests=[ManifestWrite(manifest, keys)]))
        assert list(backend.manifests(namespace)) == [manifest]
        assert backend.manifest_keys(namespace, [manifest_id, "nobody"]) == [keys, None]
        assert check_totals(backend).requests == 1

    def test_manifests_same_id_is_replaced(self, backend: InspectableBackend, namespace: bytes) -> None:
        backend.commit(namespace, CommitBatch(manifests=[sample_manifest("r1", 1), sample_manifest("r2", 2)]))
        newer = sample_manifest("r1", 3, blocks=5)
        backend.commit(namespace, CommitBatch([sample_pack(namespace, 1)], [newer]))
        assert {manifest.id: manifest for manifest in backend.manifests(namespace)} == {
            "r1": newer.manifest,
            "r2": sample_manifest("r2", 2).manifest,
        }
        assert backend.manifest_keys(namespace, ["r1"])[0] == newer.keys
        assert check_totals(backend).requests == 2

    def test_manifests_damaged_row_is_omitted_until_rewritten(
        self, backend: InspectableBackend, namespace: bytes, raw: RawStore
    ) -> None:
        writes = [sample_manifest(f"r{number}", number) for number in range(3)]
        backend.commit(namespace, CommitBatch(manifests=writes))
        raw.flip(RawKind.MANIFEST, namespace, b"r0", -1)
        raw.flip(RawKind.MANIFEST_KEYS, namespace, b"r1", -1)
        assert {manifest.id for manifest in backend.manifests(namespace)} == {"r1", "r2"}
        assert backend.manifest_keys(namespace, ["r0"])[0] == writes[0].keys
        assert backend.manifest_keys(namespace, ["r1"])[0] is None
        assert backend.manifest_keys(namespace, ["r2"])[0] == writes[2].keys

        backend.commit(namespace, CommitBatch(manifests=writes[:2]))
        assert {manifest.id for manifest in backend.manifests(namespace)} == {"r0", "r1", "r2"}
        assert backend.manifest_keys(namespace, ["r1"])[0] == writes[1].keys

    def test_manifests_commits_during_iteration_returns_all(
        self, backend: InspectableBackend, namespace: bytes
    ) -> None:
        writes = [sample_manifest(f"r{number}", number) for number in range(700)]
        backend.commit(namespace, CommitBatch(manifests=writes))
        seen = []
        for count, manifest in enumerate(backend.manifests(namespace)):
            seen.append(manifest.id)
            if count % 100 == 0:  # the iteration must not hold a lock that this call waits for
                backend.commit(namespace, CommitBatch([sample_pack(namespace, count)]))
        assert sorted(seen) == sorted(write.manifest.id for write in writes)

    def test_uses_shared_pack_reports_reuse_hits_and_sizes(self, backend: InspectableBackend, namespace: bytes) -> None:
        first, second = sample_pack(namespace, 1), sample_pack(namespace, 2, depth=4)
        before = time.time()
        short, long, bare = (
            sample_manifest("short", 1, packs=[first.pack_id]),
            sample_manifest("long", 2, packs=[first.pack_id, second.pack_id]),
            sample_manifest("bare", 3),
        )
        backend.commit(namespace, CommitBatch([first], [short, bare]))
        uses = backend.uses(namespace, ["short", "nobody", "bare"])
        if uses == [None] * 3:
            pytest.skip("the driver does not record uses")
        assert uses[1] is None
        for use in (uses[0], uses[2]):
            assert use is not None
            assert (use.reused, use.shared_by, use.pinned) == (False, 0, False)
            assert before - 2 <= use.last_used <= time.time() + 2

        backend.commit(namespace, CommitBatch([second], [long], pins=[("long", True)]))
        shorter, longer = backend.uses(namespace, ["short", "long"])
        assert shorter is not None
        assert longer is not None
        assert (shorter.reused, shorter.shared_by, shorter.pinned) == (True, 1, False)
        assert (longer.reused, longer.shared_by, longer.pinned) == (False, 0, True)
        assert (shorter.hits, longer.hits) == (1, 0)
        assert (shorter.packs_raw_bytes, shorter.packs_stored_bytes) == _sizes(first)
        assert (longer.packs_raw_bytes, longer.packs_stored_bytes) == tuple(
            one + other for one, other in zip(_sizes(first), _sizes(second), strict=True)
        )

        backend.commit(namespace, CommitBatch(deletions=[first.pack_id]))
        assert backend.uses(namespace, ["short", "long"]) == [None, None]

    def test_manifests_abandoned_iteration_blocks_neither_commit_nor_close(self, url: str) -> None:
        backend = self.open(url)
        namespace = backend.open_namespace(sample_identity()).id
        backend.commit(namespace, CommitBatch(manifests=[sample_manifest(f"r{number}") for number in range(3)]))
        iterator = iter(backend.manifests(namespace))
        next(iterator)
        backend.commit(namespace, CommitBatch([sample_pack(namespace, 1)]))
        backend.close()


def _sizes(pack: PackWriter) -> tuple[int, int]:
    return pack.table.raw_length, pack.table.payload_length
