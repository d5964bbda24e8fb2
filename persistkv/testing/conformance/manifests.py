"""Storing, listing and reading of manifests."""

from __future__ import annotations

import time

import pytest

from persistkv.storage.backend import CommitBatch, ManifestWrite
from persistkv.storage.extensions import InspectableBackend
from persistkv.storage.format.keys import PackedKeys
from persistkv.storage.format.manifest import RequestManifest
from persistkv.storage.format.pack_writer import PackWriter
from persistkv.testing.conformance.suite import BackendSuite, RawKind, RawStore, check_totals
from persistkv.testing.samples import sample_keys, sample_manifest, sample_pack


class ManifestTests(BackendSuite):
    """Tests of ``manifests`` and ``manifest_keys``."""

    @pytest.mark.parametrize("manifest_id", ["engine-1/0", "größe ✓", "x" * 5000, " "])
    def test_round_trip(self, backend: InspectableBackend, namespace: bytes, manifest_id: str) -> None:
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
        assert backend.manifest_keys(namespace, [manifest_id])[0] == keys
        assert check_totals(backend).requests == 1

    def test_same_id_is_replaced(self, backend: InspectableBackend, namespace: bytes) -> None:
        backend.commit(namespace, CommitBatch(manifests=[sample_manifest("r1", 1), sample_manifest("r2", 2)]))
        newer = sample_manifest("r1", 3, blocks=5)
        backend.commit(namespace, CommitBatch([sample_pack(namespace, 1)], [newer]))
        assert {manifest.id: manifest for manifest in backend.manifests(namespace)} == {
            "r1": newer.manifest,
            "r2": sample_manifest("r2", 2).manifest,
        }
        assert backend.manifest_keys(namespace, ["r1"])[0] == newer.keys
        assert check_totals(backend).requests == 2

    def test_unknown_manifest_has_no_keys(self, backend: InspectableBackend, namespace: bytes) -> None:
        assert backend.manifest_keys(namespace, ["nobody"])[0] is None

    def test_damaged_ones_are_left_out(self, backend: InspectableBackend, namespace: bytes, raw: RawStore) -> None:
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
        check_totals(backend)

    def test_many_while_others_commit(self, backend: InspectableBackend, namespace: bytes) -> None:
        writes = [sample_manifest(f"r{number}", number) for number in range(700)]
        backend.commit(namespace, CommitBatch(manifests=writes))
        seen = []
        for count, manifest in enumerate(backend.manifests(namespace)):
            seen.append(manifest.id)
            if count % 100 == 0:  # the iteration must not hold a lock that this call waits for
                backend.commit(namespace, CommitBatch([sample_pack(namespace, count)]))
        assert sorted(seen) == sorted(write.manifest.id for write in writes)

    def test_uses_tell_who_uses_a_request_again(self, backend: InspectableBackend, namespace: bytes) -> None:
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
            pytest.skip("the driver does not tell")
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

    def test_abandoned_iteration_holds_nothing(self, backend: InspectableBackend, namespace: bytes) -> None:
        backend.commit(namespace, CommitBatch(manifests=[sample_manifest(f"r{number}") for number in range(3)]))
        iterator = iter(backend.manifests(namespace))
        next(iterator)
        backend.commit(namespace, CommitBatch([sample_pack(namespace, 1)]))
        backend.close()


def _sizes(pack: PackWriter) -> tuple[int, int]:
    return pack.table.raw_length, pack.table.payload_length
