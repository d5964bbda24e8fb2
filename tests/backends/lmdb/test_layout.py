"""A store decoded by the rules of docs/format.md, with lmdb, struct, msgspec's MessagePack and the
hashes only."""

from __future__ import annotations

import hashlib
import json
import struct
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import lmdb
import msgspec
import pytest
import xxhash

from persistkv.storage.backend import CommitBatch
from persistkv.storage.catalogue import LOG_ENTRIES
from persistkv.storage.catalogue.rows import NamespaceState, cursor_sequence
from persistkv.storage.identity import Identity
from persistkv.testing.samples import payload_of, sample_manifest, sample_pack
from persistkv_lmdb.layout import DATABASES
from tests.backends.lmdb.conftest import Opener

Dump = Callable[[], dict[str, dict[bytes, bytes]]]


@pytest.fixture
def dump(path: Path) -> Dump:
    """Return all databases of a closed store as dictionaries."""

    def dump() -> dict[str, dict[bytes, bytes]]:
        with lmdb.open(str(path), max_dbs=32, readonly=True) as env:
            with env.begin() as txn:
                names = [key for key, _ in txn.cursor()]
            databases = {
                name.decode(): env.open_db(name, create=False) for name in names
            }
            with env.begin() as txn:
                return {name: dict(txn.cursor(db)) for name, db in databases.items()}

    return dump


def unsealed(row: bytes) -> Any:
    assert row[0] == 1
    assert int.from_bytes(row[1:9], "big") == xxhash.xxh3_64_intdigest(row[9:])
    return msgspec.msgpack.decode(row[9:])


def check_pieces(
    rows: dict[str, dict[bytes, bytes]],
    name: bytes,
    payload: bytes,
) -> None:
    """Check that LMDB holds the payload of the only pack."""
    count = -(-len(payload) // (256 << 10))
    pieces = [name + struct.pack(">I", index) for index in range(count)]
    assert list(rows["pieces"]) == pieces
    assert {len(rows["pieces"][piece]) for piece in pieces[:-1]} == {256 << 10}
    assert b"".join(rows["pieces"].values()) == payload
    assert rows["extents"] == rows["segments"] == {}


def check_extents(
    rows: dict[str, dict[bytes, bytes]],
    name: bytes,
    payload: bytes,
    file: Path,
    totals: tuple[int, int, int],
) -> None:
    """Check that the only segment holds the only pack: its payload, its table, and a trailer. It
    was written before the first erasure.
    """
    total, free, reserved = totals
    ((owner, extents),) = rows["extents"].items()
    assert owner == name
    ((segment, page, pages),) = struct.iter_unpack("<III", extents)
    assert rows["segments"] == {struct.pack(">I", segment): struct.pack("<I", total)}
    content = file.read_bytes()
    assert len(content) == total * 4096
    pack = content[page * 4096 : (page + pages) * 4096]
    table = rows["packs"][name][8:]
    fields = struct.pack("<IIIIQ", segment, page, pages, 1, 0)
    trailer = fields + struct.pack(
        "<Q8s", xxhash.xxh3_64_intdigest(table[-24:] + fields), b"PKVXTNT1"
    )
    zeros = len(pack) - len(payload) - len(table) - len(trailer)
    assert pack == payload + bytes(zeros) + table + trailer
    assert 0 <= zeros < 4096
    places = {
        struct.unpack(">II", key): struct.unpack("<I", row)[0]
        for key, row in rows["free"].items()
    }
    assert sum(places.values()) == free
    assert rows["sizes"] == {
        struct.pack(">III", count, *place): b"" for place, count in places.items()
    }
    ((writer, row),) = rows["reserved"].items()
    assert writer == struct.pack(">I", 0)
    held = sum(count for _, _, count in struct.iter_unpack("<III", row))
    assert held == reserved > 0, "for the next commit"
    assert total == pages + free + reserved
    assert rows["pieces"] == {}


def test_layout_after_commits_matches_format_documentation(
    open_store: Opener,
    identity: Identity,
    placement: str,
    path: Path,
    dump: Dump,
) -> None:
    backend = open_store("?capacity=64MiB")
    namespace = backend.open_namespace(identity).id
    gone, kept = (
        sample_pack(namespace, 1),
        sample_pack(namespace, 2, blocks=30, block_bytes=70_000, depth=7),
    )
    write = sample_manifest("engine/1", 4, labels={"a": "b"})
    pinned = sample_manifest(
        "engine/2", packs=[kept.pack_id], ordered=False, ttl_s=60.0, priority="low"
    )
    before = int(time.time())
    backend.commit(namespace, CommitBatch([gone, kept], [write]))
    backend.commit(namespace, CommitBatch(deletions=[gone.pack_id]))
    backend.commit(
        namespace, CommitBatch(manifests=[pinned], pins=[("engine/2", True)])
    )
    backend.commit(namespace, CommitBatch(touches=[kept.pack_id]))
    backend.close()

    rows = dump()
    assert set(rows) == set(DATABASES)
    clock = rows["meta"].pop(b"clock")
    total, free, reserved = struct.unpack("<QQQ", rows["meta"].pop(b"space", bytes(24)))
    erasures = {} if placement == "inline" else {b"erasures": struct.pack("<Q", 1)}
    assert rows["meta"] == erasures | {
        b"format": b"PKVLMDB1" + struct.pack("<I", 1),
        b"capacity": struct.pack("<Q", 64 << 20),
        b"placement": placement.encode(),
    }
    moment, seconds, wall, since_boot, boot, unconfirmed, _ = struct.unpack(
        "<Qddd16sdd", clock
    )
    assert moment == 3
    assert before <= seconds <= time.time()
    assert abs(wall - seconds) < 1
    assert 0 < since_boot <= time.clock_gettime(time.CLOCK_BOOTTIME)
    assert boot.hex() == Path(
        "/proc/sys/kernel/random/boot_id"
    ).read_text().strip().replace("-", "")
    assert unconfirmed == 0

    canonical = json.dumps(
        identity.fields, sort_keys=True, separators=(",", ":")
    ).encode()
    assert (
        namespace == hashlib.sha256(b"persistkv identity 1\n" + canonical).digest()[:16]
    )
    ((name, row),) = rows["namespaces"].items()
    assert (name, row[8:]) == (namespace, canonical)
    assert abs(struct.unpack("<d", row[:8])[0] - time.time()) < 3600

    table = rows["packs"][namespace + kept.pack_id]
    assert len(rows["packs"]) == 1
    assert struct.unpack_from("<Q", table) == (2,)
    (length, checksum, magic) = struct.unpack("<QQ8s", table[-24:])
    assert magic == b"PKVPACK1"
    assert length == len(table) - 8 - 24
    assert xxhash.xxh3_64_intdigest(table[8:-24]) == checksum

    payload = payload_of(kept)
    if placement == "inline":
        check_pieces(rows, namespace + kept.pack_id, payload)
    else:
        totals = (total, free, reserved)
        check_extents(
            rows,
            namespace + kept.pack_id,
            payload,
            path / "segments" / "00000000.seg",
            totals,
        )
        checksum = xxhash.xxh3_64_intdigest(namespace + gone.pack_id)
        assert (path / "segments" / "erased").read_bytes() == struct.pack(
            "<QQQQ", 0, 0, 1, checksum
        )
        assert (path / "segments" / f"{namespace.hex()}.identity").read_bytes() == rows[
            "namespaces"
        ][namespace]

    fingerprints = b"".join(
        struct.pack("<Q", xxhash.xxh3_64_intdigest(key)) for key in gone.keys.unpack()
    )
    removal = b"-" + gone.pack_id + fingerprints
    log = {namespace + struct.pack(">Q", number): entry for number, entry in
           enumerate([b"+" + gone.pack_id, b"+" + kept.pack_id, removal], start=1)}  # fmt: skip
    assert rows["log"] == log
    assert struct.unpack("<8s6Q", rows["states"][namespace])[1:] == (
        3,
        1,
        30,
        2,
        30 * 70_000,
        len(payload),
    )

    row = namespace + hashlib.blake2b(b"engine/1", digest_size=16).digest()
    head = unsealed(rows["manifests"][row])
    assert head == [
        "engine/1",
        write.manifest.created,
        48,
        [3],
        3 * 4096,
        True,
        {"a": "b"},
        b"",
        None,
        "normal",
        0,
        "default",
    ]
    assert unsealed(rows["manifest_keys"][row]) == [[write.keys[0].data, 36, b""]]

    other = namespace + hashlib.blake2b(b"engine/2", digest_size=16).digest()
    assert unsealed(rows["manifests"][other])[-4:] == [60.0, "low", 0, "default"]
    uses = {name: struct.unpack("<QdIIB", use) for name, use in rows["uses"].items()}
    assert {name: (use[0], *use[2:]) for name, use in uses.items()} == {
        namespace + kept.pack_id: (3, 7, 1, 1)
    }
    chains = {
        name: (*struct.unpack_from("<QdBdd", chain), chain[33:])
        for name, chain in rows["chains"].items()
    }
    expires = chains[other][1] + 60.0
    assert {name: (chain[0], *chain[2:]) for name, chain in chains.items()} == {
        row: (1, 2, 0.0, 0.0, b""),
        other: (2, 5, 60.0, expires, kept.pack_id),
    }
    assert rows["expiries"] == {struct.pack(">d", expires) + other: b""}
    assert rows["links"] == {namespace + kept.pack_id + other[16:]: b""}
    assert rows["order"] == {struct.pack(">BQIB", 1, 1, 0xFFFFFFFF, 1) + row: b""}


def test_log_beyond_limit_keeps_newest_entries_only(
    open_store: Opener,
    identity: Identity,
    dump: Dump,
) -> None:
    backend = open_store("?capacity=64MiB")
    namespace = backend.open_namespace(identity).id
    packs = [
        sample_pack(namespace, seed, blocks=1, block_bytes=1)
        for seed in range(LOG_ENTRIES + 10)
    ]
    backend.commit(namespace, CommitBatch(packs))
    backend.commit(namespace, CommitBatch(deletions=[packs[0].pack_id]))
    backend.close()
    numbers = [struct.unpack(">16sQ", key)[1] for key in dump()["log"]]
    assert numbers == list(range(12, LOG_ENTRIES + 12))


def test_commit_all_packs_deleted_removes_their_rows(
    open_store: Opener,
    identity: Identity,
    dump: Dump,
) -> None:
    backend = open_store()
    namespace = backend.open_namespace(identity).id
    packs = [
        sample_pack(namespace, seed, blocks=3, block_bytes=900_000) for seed in range(4)
    ]
    backend.commit(namespace, CommitBatch(packs))
    backend.commit(namespace, CommitBatch(deletions=[pack.pack_id for pack in packs]))
    backend.close()
    rows = dump()
    assert rows["packs"] == rows["pieces"] == rows["uses"] == rows["order"] == {}
    assert rows["namespaces"] == rows["states"] == rows["log"] == {}


@pytest.mark.parametrize(
    ("cursor", "sequence"),
    [
        (b"generati" + (5).to_bytes(8, "big"), 5),
        (b"generati" + (9).to_bytes(8, "big"), 9),
        (b"generati" + (10).to_bytes(8, "big"), None),
        (b"another!" + (5).to_bytes(8, "big"), None),
        (b"generati", None),
        (b"", None),
        (b"generati" + bytes(9), None),
    ],
)
def test_cursor_sequence_unknown_cursor_returns_none(
    cursor: bytes,
    sequence: int | None,
) -> None:
    assert cursor_sequence(NamespaceState(b"generati", sequence=9), cursor) == sequence


def test_order_rows_match_format_documentation(
    open_store: Opener,
    identity: Identity,
    dump: Dump,
) -> None:
    backend = open_store()
    namespace = backend.open_namespace(identity).id
    packs = [
        sample_pack(namespace, seed, depth=depth)
        for seed, depth in enumerate((0, 5, 0xFFFFFFFF))
    ]
    backend.commit(namespace, CommitBatch(packs))
    backend.commit(namespace, CommitBatch(touches=[packs[1].pack_id]))
    backend.close()
    order = [struct.unpack(">BQIB32s", key) for key in dump()["order"]]
    assert order == [
        (1, 1, 0, 0, namespace + packs[2].pack_id),
        (1, 1, 0xFFFFFFFF, 0, namespace + packs[0].pack_id),
        (1, 2, 0xFFFFFFFF - 5, 0, namespace + packs[1].pack_id),
    ]
