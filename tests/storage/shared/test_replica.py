"""The replica of an index: its content does not depend on the order in which objects are
applied."""

from __future__ import annotations

import random
import tempfile
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple, TypeVar

import msgspec
import pytest

from persistkv.errors import CorruptStoreError
from persistkv.storage.catalogue import LOG_ENTRIES
from persistkv.storage.catalogue.rows import (
    CHAINS,
    MANIFEST_KEYS,
    MANIFESTS,
    PACKS,
    USES,
    TableRows,
    Use,
    manifest_row,
)
from persistkv.storage.format.manifest import encode_manifest
from persistkv.storage.format.pack import ID_BYTES, PackTable
from persistkv.storage.format.pack_writer import PackWriter
from persistkv.storage.shared.format import (
    NONCE_BYTES,
    Delta,
    Dropped,
    ManifestEntry,
    PackEntry,
    Pin,
    Tombstone,
    UseEntry,
    decode_delta,
    encode,
)
from persistkv.storage.shared.replica import Replica
from persistkv.storage.shared.replica.rows import BLOBS, VERSIONS
from persistkv.testing.conformance.suite import sample_identity
from persistkv.testing.samples import payload_of, sample_manifest, sample_pack

T = TypeVar("T")

NAMESPACE = sample_identity().digest
PACKS_COUNT = 4
REQUESTS = 3


@pytest.fixture(scope="module")
def packs() -> list[PackWriter]:
    found = [
        sample_pack(NAMESPACE, seed, blocks=2, block_bytes=512)
        for seed in range(PACKS_COUNT)
    ]
    for pack in found:
        payload_of(pack)
    return found


def random_delta(draw: random.Random, packs: Sequence[PackWriter]) -> Delta:
    """Return a delta with few names, so that many deltas meet the same ones."""

    def time() -> float:
        return float(draw.randint(1, 50))

    def nonce() -> bytes:
        return bytes([draw.randint(0, 2)]) * NONCE_BYTES

    def entry() -> PackEntry:
        pack = draw.choice(packs)
        return PackEntry(pack.pack_id, nonce(), pack.table.encode(), time())

    def digest() -> bytes:
        return manifest_row(NAMESPACE, f"r{draw.randrange(REQUESTS)}")[ID_BYTES:]

    def manifest() -> ManifestEntry:
        number = draw.randrange(REQUESTS)
        write = sample_manifest(f"r{number}", draw.randint(0, 5))
        named = b"".join(
            pack.pack_id for pack in draw.sample(packs, draw.randint(0, 3))
        )
        digest = manifest_row(NAMESPACE, f"r{number}")[ID_BYTES:]
        head = encode_manifest(write.manifest)
        return ManifestEntry(
            digest, draw.randint(1, 4), time(), head, named, nonce(), 0, 10
        )

    def some(make: Callable[[], T], most: int) -> list[T]:
        return [make() for _ in range(draw.randint(0, most))]

    return Delta(
        packs=some(entry, 2),
        uses=some(lambda: UseEntry(time(), draw.choice(packs).pack_id), 2),
        removed=some(
            lambda: Tombstone(draw.choice(packs).pack_id + nonce(), time()), 1
        ),
        manifests=some(manifest, 1),
        dropped=some(lambda: Dropped(digest(), draw.randint(1, 3), time()), 1),
        pins=some(lambda: Pin(digest(), draw.randint(1, 4), draw.random() < 0.5), 1),
        includes=[f"x{draw.randint(0, 9)}"] if draw.random() < 0.3 else [],
    )


class Shown(NamedTuple):
    """All that readers of a replica see."""

    packs: dict[bytes, PackTable]
    num_packs: int
    """Number of packs according to the totals."""
    rest: dict[str, object]
    contained: dict[str, bool]
    """Names of the index objects whose content it contains → whether another one includes it; which
    one was applied last is of no consequence."""


def state(replica: Replica) -> Shown:
    """Return all that readers see."""
    catalogue = replica.catalogue
    packs = {table.pack_id: table for table in catalogue.changes(None).added}
    manifests = {manifest.id: manifest for manifest in catalogue.manifests()}
    places = {name: replica.keys_place(name) for name in manifests}
    chains = {name: catalogue.chain(name) for name in manifests}
    found = catalogue.uses(list(manifests))
    pinned = [use is not None and use.pinned for use in found]
    with replica.rows() as rows:
        uses = {}
        for key, _ in rows.range(PACKS, b""):
            use = Use.decode(rows.get(USES, bytes(key)))
            assert use is not None
            uses[bytes(key)] = (use.time, use.pins)
    blobs = replica.blobs([key[ID_BYTES:] for key in uses])
    nonces = {pack_id: blob.nonce for pack_id, blob in blobs.items()}
    stats = catalogue.state()
    rest: dict[str, object] = {
        "blobs": nonces,
        "uses": uses,
        "manifests": manifests,
        "places": places,
        "chains": chains,
        "pinned": pinned,
        "bytes": replica.disk_bytes(),
        "totals": (
            stats.blocks,
            stats.requests,
            stats.raw_bytes,
            stats.stored_bytes,
        ),
    }
    contained = {name: bool(by) for name, by in replica.contained.items()}
    return Shown(packs, stats.packs, rest, contained)


def new_replica(parent: Path) -> Replica:
    return Replica(Path(tempfile.mkdtemp(dir=parent)), NAMESPACE)


@pytest.mark.parametrize("seed", range(60))
def test_replica_any_order_and_repetition_gives_the_same_content(
    packs: list[PackWriter],
    tmp_path: Path,
    seed: int,
) -> None:
    draw = random.Random(seed)
    objects = [
        (f"o{number}", random_delta(draw, packs))
        for number in range(draw.randint(1, 12))
    ]
    first = new_replica(tmp_path)
    first.apply(objects)
    expected = state(first)
    assert expected.num_packs == len(expected.packs)
    for _ in range(3):
        shuffled = objects + draw.choices(objects, k=3)
        draw.shuffle(shuffled)
        other = new_replica(tmp_path)
        for item in shuffled:
            other.apply([item])
        assert state(other) == expected
        other.close()

    copy = new_replica(tmp_path)
    parts = list(first.dump(part_bytes=2000))
    draw.shuffle(parts)
    copy.apply([("", part) for part in parts])
    copied = state(copy)
    assert copied._replace(contained=expected.contained) == expected
    copy.close()
    first.close()


@pytest.mark.parametrize("seed", range(8))
def test_replica_many_packs_at_once_are_as_one_by_one(
    tmp_path: Path,
    seed: int,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    draw = random.Random(seed)
    found = [
        sample_pack(NAMESPACE, 100 + number, blocks=1, block_bytes=64)
        for number in range(60)
    ]
    for pack in found:
        payload_of(pack)
    before = [(f"o{number}", random_delta(draw, found)) for number in range(6)]
    entries = [
        PackEntry(
            pack.pack_id,
            draw.randbytes(NONCE_BYTES),
            pack.table.encode(),
            float(draw.randint(1, 50)),
        )
        for pack in found
    ]
    entries += [
        msgspec.structs.replace(entry, nonce=draw.randbytes(NONCE_BYTES))
        for entry in entries[:5]
    ]
    entries.append(msgspec.structs.replace(entries[9], body=b"unreadable"))
    draw.shuffle(entries)
    objects = [*before, ("many", Delta(packs=entries))]
    slow = new_replica(tmp_path)
    slow.apply(objects)
    expected = state(slow)
    assert expected.num_packs == len(found)
    monkeypatch.setattr("persistkv.storage.shared.replica.application.LOG_ENTRIES", 10)
    for order in (objects, objects[::-1]):
        fast = new_replica(tmp_path)
        for item in order:
            fast.apply([item])
        assert state(fast) == expected
        cursor = fast.catalogue.changes(None).cursor
        fast.apply([("x", Delta())])
        assert fast.catalogue.changes(cursor).added == []
        fast.close()
    slow.close()


@pytest.mark.parametrize("part_bytes", [1000, 5000])
def test_dump_of_many_packs_gives_no_part_above_the_limit(
    tmp_path: Path,
    part_bytes: int,
) -> None:
    found = [
        sample_pack(NAMESPACE, number, blocks=2, block_bytes=64) for number in range(40)
    ]
    for pack in found:
        payload_of(pack)
    entries = [
        PackEntry(pack.pack_id, bytes(NONCE_BYTES), pack.table.encode(), 1.0)
        for pack in found
    ]
    replica = new_replica(tmp_path)
    replica.apply([("packs", Delta(packs=entries))])
    parts = list(replica.dump(part_bytes))
    assert sum(len(part.packs) for part in parts) == len(found)
    assert max(len(encode(part)) for part in parts) <= part_bytes
    replica.close()


def drop_row(rows: TableRows, table: str, name: bytes) -> None:
    rows.delete(table, name)


def cut_row(rows: TableRows, table: str, name: bytes) -> None:
    rows.put(table, name, b"damaged")


def flip_row(rows: TableRows, table: str, name: bytes) -> None:
    """Change the last byte of a row."""
    row = bytearray(rows.get(table, name) or b"")
    row[-1] ^= 1
    rows.put(table, name, bytes(row))


@pytest.mark.parametrize(
    ("table", "damage"),
    [
        (MANIFEST_KEYS, cut_row),
        (MANIFEST_KEYS, drop_row),
        (MANIFESTS, cut_row),
        (MANIFESTS, drop_row),
        (MANIFESTS, flip_row),
        (CHAINS, cut_row),
        (CHAINS, drop_row),
    ],
)
def test_dump_damaged_request_raises_so_that_no_base_lacks_it(
    tmp_path: Path,
    table: str,
    damage: Callable[[TableRows, str, bytes], None],
) -> None:
    name = manifest_row(NAMESPACE, "r0")
    head = encode_manifest(sample_manifest("r0", 1).manifest)
    nonce = bytes(NONCE_BYTES)
    entry = ManifestEntry(name[ID_BYTES:], 1, 1.0, head, b"", nonce, 0, 10)
    replica = new_replica(tmp_path)
    replica.apply([("x", Delta(manifests=[entry]))])
    with replica.rows(write=True) as rows:
        damage(rows, table, name)

    with pytest.raises(CorruptStoreError):
        list(replica.dump(1 << 20))

    replica.close()


@pytest.mark.parametrize("damage", [cut_row, drop_row, flip_row])
def test_dump_damaged_pack_raises_so_that_no_base_lacks_it(
    tmp_path: Path,
    damage: Callable[[TableRows, str, bytes], None],
) -> None:
    pack = sample_pack(NAMESPACE, 0)
    payload_of(pack)
    entry = PackEntry(pack.pack_id, bytes(NONCE_BYTES), pack.table.encode(), 1.0)
    replica = new_replica(tmp_path)
    replica.apply([("x", Delta(packs=[entry]))])
    with replica.rows(write=True) as rows:
        damage(rows, PACKS, NAMESPACE + pack.pack_id)

    with pytest.raises(CorruptStoreError):
        list(replica.dump(1 << 20))

    assert replica.is_damaged
    replica.close()


def flip_bit(rows: TableRows, table: str, name: bytes, place: int) -> None:
    """Flip the highest bit of a byte of a row."""
    row = bytearray(rows.get(table, name) or b"")
    row[place] ^= 0x80
    rows.put(table, name, bytes(row))


@pytest.mark.parametrize(
    ("table", "place"),
    [(USES, 15), (CHAINS, 15), (VERSIONS, 7), (MANIFEST_KEYS, 23), (BLOBS, 7)],
)
def test_dump_of_flipped_number_gives_no_part_that_readers_refuse(
    tmp_path: Path,
    table: str,
    place: int,
) -> None:
    """A time or a size may be out of range then, for which readers refuse the whole part."""
    pack = sample_pack(NAMESPACE, 0)
    payload_of(pack)
    name = manifest_row(NAMESPACE, "r0")
    head = encode_manifest(sample_manifest("r0", 1).manifest)
    nonce = bytes(NONCE_BYTES)
    delta = Delta(
        packs=[PackEntry(pack.pack_id, nonce, pack.table.encode(), 1.0)],
        manifests=[ManifestEntry(name[ID_BYTES:], 1, 1.0, head, b"", nonce, 0, 10)],
    )
    keys = {
        USES: NAMESPACE + pack.pack_id,
        BLOBS: pack.pack_id + nonce,
        VERSIONS: name[ID_BYTES:],
    }
    replica = new_replica(tmp_path)
    replica.apply([("x", delta)])
    with replica.rows(write=True) as rows:
        flip_bit(rows, table, keys.get(table, name), place)

    with suppress(CorruptStoreError):
        for part in replica.dump(1 << 20):
            decode_delta(encode(part))
    replica.close()


def test_dump_cut_blob_row_is_damage(tmp_path: Path) -> None:
    pack = sample_pack(NAMESPACE, 0)
    payload_of(pack)
    nonce = bytes(NONCE_BYTES)
    entry = PackEntry(pack.pack_id, nonce, pack.table.encode(), 1.0)
    replica = new_replica(tmp_path)
    replica.apply([("x", Delta(packs=[entry]))])
    with replica.rows(write=True) as rows:
        rows.put(BLOBS, pack.pack_id + nonce, b"")

    with pytest.raises(CorruptStoreError):
        list(replica.dump(1 << 20))

    assert replica.is_damaged
    replica.close()


def test_apply_large_object_skips_pack_with_damaged_table(tmp_path: Path) -> None:
    """Also if an object has so many packs that their rows are written at once."""
    nonce = bytes(NONCE_BYTES)
    entries = []
    for number in range(LOG_ENTRIES + 10):
        pack = sample_pack(NAMESPACE, number, blocks=1, block_bytes=16)
        payload_of(pack)
        entries.append(PackEntry(pack.pack_id, nonce, pack.table.encode(), 1.0))
    table = bytearray(entries[7].body)
    table[-40] ^= 1  # in a key
    entries[7] = msgspec.structs.replace(entries[7], body=bytes(table))
    replica = new_replica(tmp_path)
    replica.apply([("x", Delta(packs=entries))])

    parts = list(replica.dump(1 << 24))

    dumped = {entry.pack_id for part in parts for entry in part.packs}
    assert dumped == {entry.pack_id for entry in entries} - {entries[7].pack_id}
    replica.close()
