"""Stored formats, checked against docs/format.md without the parsers; errors of the parsers for damaged bytes."""

from __future__ import annotations

import struct
import subprocess
import sys

import msgspec
import pytest
import xxhash

from persistkv.errors import CorruptPackError, CorruptStoreError
from persistkv.storage.backend import Namespace
from persistkv.storage.catalog.rows import decode_namespace, encode_namespace
from persistkv.testing.conformance.suite import sample_identity
from persistkv.testing.samples import payload_of, sample_pack
from persistkv_s3.feed.format import (
    Entry,
    Feed,
    Head,
    InboxName,
    ManifestRow,
    Names,
    NamespaceHead,
    PackRow,
    Snapshot,
    decode_head,
    encode_head,
    feed_name,
    frame_records,
    parse_feed,
    parse_inbox,
    parse_pack,
    seal,
    split_records,
    unseal,
)

NAMESPACE, WRITER, NONCE, TERM = sample_identity().digest, bytes(range(16)), bytes(range(8)), bytes(range(12))


def make_entry() -> Entry:
    pack = sample_pack(NAMESPACE, 1)
    payload_of(pack)
    return Entry(
        writer=WRITER,
        number=5,
        time=1.5e9,
        gone=[(bytes(16), NONCE)],
        manifests_gone=[bytes(16)],
        uses=[pack.pack_id, b""],
        packs=[PackRow(pack.pack_id, NONCE, pack.table.encode())],
        manifests=[ManifestRow(b"head", pack.pack_id, "keys/x", 10, 11)],
        pins=[("r", True)],
    )


def make_feed() -> Feed:
    return Feed(
        generation=NONCE, position=7, term=TERM, previous=TERM, time=1.5e9, merged={WRITER: 5}, entries=[make_entry()]
    )


def test_seal_commit_matches_documented_format() -> None:
    entry = make_entry()
    data = seal(entry)
    assert data[0] == 1
    assert struct.unpack_from("<Q", data, 1) == (xxhash.xxh3_64_intdigest(data[9:]),)
    fields = msgspec.msgpack.decode(data[9:])
    assert fields[:3] == [WRITER, 5, 1.5e9]
    assert fields[3] == [[bytes(16), NONCE]]
    ((pack_id, nonce, body),) = fields[6]
    assert (pack_id, nonce) == (entry.packs[0].pack_id, NONCE)
    assert body[48:64] == pack_id, "where a table has its pack id"
    assert unseal(data, Entry) == entry


def test_seal_feed_object_matches_documented_format() -> None:
    feed = make_feed()
    fields = msgspec.msgpack.decode(seal(feed)[9:])
    assert fields[:6] == [NONCE, 7, TERM, TERM, 1.5e9, {WRITER: 5}]
    assert unseal(seal(feed), Feed) == feed


@pytest.mark.parametrize(
    "change",
    [
        {"writer": b"short"},
        {"number": -1},
        {"time": float("nan")},
        {"uses": [b"x" * 17]},
        {"packs": [PackRow(b"short", NONCE, b"")]},
        {"packs": [PackRow(bytes(16), b"short", b"")]},
        {"manifests": [ManifestRow(b"", b"x", "keys/x", 0, 0)]},
        {"manifests": [ManifestRow(b"", b"", "../../other", 0, 0)]},
        {"manifests": [ManifestRow(b"", b"", "keys/x", 0, 1 << 48)]},
    ],
)
def test_unseal_commit_with_wrong_fields_raises(change: dict[str, object]) -> None:
    entry = msgspec.structs.replace(make_entry(), **change)
    with pytest.raises(CorruptPackError):
        unseal(seal(entry), Entry)
    with pytest.raises(CorruptPackError):
        unseal(seal(msgspec.structs.replace(make_feed(), entries=[entry])), Feed)


@pytest.mark.parametrize(
    "change", [{"term": b"x"}, {"time": float("inf")}, {"retired": ["../x"]}, {"merged": {b"x": "y"}}]
)
def test_unseal_feed_object_with_wrong_fields_raises(change: dict[str, object]) -> None:
    with pytest.raises(CorruptPackError):
        unseal(seal(msgspec.structs.replace(make_feed(), **change)), Feed)


@pytest.mark.parametrize("damage", [b"", b"\x01", b"\x02" + bytes(20), b"\x01" + bytes(8) + b"\xc1"])
def test_unseal_damaged_record_raises(damage: bytes) -> None:
    for kind in (Entry, Feed, Snapshot, Head):
        with pytest.raises(CorruptPackError):
            unseal(damage, kind)
    data = bytearray(seal(make_feed()))
    data[40] ^= 1
    with pytest.raises(CorruptPackError, match="checksum"):
        unseal(data, Feed)


def test_segment_records_match_documented_format() -> None:
    records = [b"one", b"", b"three"]
    data = b"".join(bytes(piece) for piece in frame_records(records))
    assert data == b"".join(struct.pack("<Q", len(record)) + record for record in records)
    assert list(map(bytes, split_records(data))) == records
    for wrong in (data[:-1], data + b"x", struct.pack("<Q", 1 << 60)):
        with pytest.raises(CorruptPackError, match="segment"):
            list(split_records(wrong))


def test_encode_head_matches_documented_format() -> None:
    spans = [(1, 7, TERM)]
    head = Head(
        store=NONCE,
        epoch=3,
        leader=TERM,
        beat=9,
        capacity=1 << 40,
        namespaces={NAMESPACE: NamespaceHead(generation=NONCE, position=7, spans=spans)},
    )
    data = encode_head(head)
    assert data[:9] == b"PKVS3HD1\x01"
    fields = msgspec.msgpack.decode(data[17:])
    assert fields[:6] == [NONCE, 3, TERM, 9, 1 << 40, None]
    assert decode_head(data, "s3://b") == head
    assert head.namespaces[NAMESPACE].term_of(7) == TERM
    assert head.namespaces[NAMESPACE].term_of(8) is None
    with pytest.raises(CorruptStoreError, match="format 2"):
        decode_head(b"PKVS3HD1\x02", "s3://b")
    with pytest.raises(CorruptStoreError, match="no persistkv store"):
        decode_head(b"hello", "s3://b")
    with pytest.raises(CorruptPackError):
        decode_head(data[:-1], "s3://b")


def test_decode_namespace_round_trips_and_rejects_damaged_row() -> None:
    namespace = Namespace(sample_identity(), 12.5)
    data = encode_namespace(namespace)
    assert data == struct.pack("<d", 12.5) + sample_identity().encode()
    assert decode_namespace(NAMESPACE, data) == namespace
    assert decode_namespace(bytes(16), data) is None
    assert decode_namespace(NAMESPACE, data[:10]) is None


def test_object_keys_match_format_and_parsers_reject_others() -> None:
    names = Names("p/", NAMESPACE, "k")
    base = f"p/{NAMESPACE.hex()}-k/"
    assert names.pack(NAMESPACE, NONCE) == f"{base}packs/{NAMESPACE.hex()}-{NONCE.hex()}"
    assert names.base + feed_name(255, TERM) == f"{base}feed/0000000000ff-{TERM.hex()}"
    commit = InboxName(NAMESPACE, WRITER, 255)
    assert names.inbox(commit) == f"p/inbox-k/{NAMESPACE.hex()}-{WRITER.hex()}-0000000000ff"
    assert names.head == "p/persistkv-k"
    assert parse_inbox(names.inbox(commit)) == commit
    assert parse_pack(names.pack(NAMESPACE, NONCE)) == (NAMESPACE, NONCE)
    assert parse_feed(names.base + feed_name(255, TERM)) == (255, TERM)
    for strange in ("p/x", "p/0-0", "p/" + "g" * 32 + "-000000000001", "p/-1"):
        assert (parse_inbox(strange), parse_pack(strange), parse_feed(strange)) == (None, None, None)


FIRST_DECODING = """
import sys, threading
from persistkv_s3.feed.format import Entry, seal, unseal
data = seal(Entry(writer=bytes(16), number=1, time=1.0))
sys.setswitchinterval(1e-6)
together = threading.Barrier(8)
def decode():
    together.wait()
    unseal(data, Entry)
threads = [threading.Thread(target=decode) for _ in range(8)]
for thread in threads:
    thread.start()
for thread in threads:
    thread.join()
"""


@pytest.mark.slow
def test_unseal_first_use_in_parallel_threads_does_not_crash() -> None:
    """msgspec 0.22 crashes in one of 15 such processes unless its decoders are created first."""
    for _ in range(40):
        assert subprocess.run([sys.executable, "-c", FIRST_DECODING], check=False).returncode == 0
