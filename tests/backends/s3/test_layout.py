"""Stored formats, checked against docs/format.md without the parsers; errors of the parsers for damaged bytes."""

from __future__ import annotations

import struct

import msgspec
import pytest
import xxhash

from persistkv.errors import CorruptPackError, CorruptStoreError
from persistkv.storage.backend import Namespace
from persistkv.storage.extensions import Policy
from persistkv.testing.conformance.suite import sample_identity
from persistkv.testing.samples import payload_of, sample_pack
from persistkv_s3.log.layout import (
    Entry,
    GoneRow,
    Head,
    ManifestRow,
    Names,
    PackRow,
    Root,
    decode_format,
    encode_entries,
    encode_format,
    encode_namespace,
    encode_root,
    parse_entries,
    parse_log,
    parse_namespace,
    parse_root,
    parse_root_object,
)
from persistkv_s3.log.state import LogState

NAMESPACE, WRITER = sample_identity().digest, bytes(range(16))


def make_entries() -> list[Entry]:
    packs = [sample_pack(NAMESPACE, seed) for seed in (1, 2)]
    for pack in packs:
        payload_of(pack)
    bodies = [pack.table.encode() for pack in packs]
    rows = [
        PackRow(packs[0].pack_id, 0, 0, len(bodies[0])),
        PackRow(packs[1].pack_id, 7, len(bodies[0]), len(bodies[1])),
    ]
    first = Head(namespace=NAMESPACE, writer=WRITER, moment=5, time=1.5e9, packs=rows, gone=[GoneRow(bytes(16), 3)])
    manifest = ManifestRow("r", True, packs[0].pack_id, 0, 4, WRITER, 9, 10, 11)
    second = Head(
        namespace=NAMESPACE,
        writer=WRITER,
        moment=6,
        time=1.5e9 + 1,
        uses=packs[0].pack_id + packs[1].pack_id,
        manifests=[manifest],
        manifests_gone=["old"],
        pins=[("r", True)],
    )
    return [Entry(first, bytearray().join(bodies)), Entry(second, bytearray(b"head"))]


def test_index_object_as_documented() -> None:
    entries = make_entries()
    data = b"".join(encode_entries(entries))
    assert data[:8] == b"PKVS3IX1"
    at = 8
    for head, bodies in entries:
        head_length, body_length = struct.unpack_from("<IQ", data, at)
        sealed = data[at + 12 : at + 12 + head_length]
        assert sealed[0] == 1
        assert struct.unpack_from("<Q", sealed, 1) == (xxhash.xxh3_64_intdigest(sealed[9:]),)
        fields = msgspec.msgpack.decode(sealed[9:])
        assert fields[:4] == [NAMESPACE, WRITER, head.moment, head.time]
        at += 12 + head_length
        for pack_id, _, offset, length in fields[4]:
            assert data[at + offset : at + offset + length] == bodies[offset : offset + length]
            assert data[at + offset + 48 : at + offset + 64] == pack_id, "where a table has its pack id"
        at += body_length
    assert at == len(data)
    assert list(parse_entries(data, NAMESPACE)) == entries


def test_damage_costs_what_it_touches() -> None:
    entries = make_entries()
    data = bytearray(b"".join(encode_entries(entries)))
    data[8 + 12 + 20] ^= 1  # in the first head
    found = parse_entries(data, NAMESPACE)
    assert next(found) == entries[1]
    with pytest.raises(CorruptPackError, match="index checksum"):
        next(found)


@pytest.mark.parametrize(
    ("change", "field"),
    [
        ({"namespace": bytes(16)}, "index namespace"),
        ({"writer": b"short"}, "index head"),
        ({"uses": b"x" * 17}, "index ids"),
        ({"packs": [PackRow(b"short", 0, 0, 0)]}, "index head"),
        ({"packs": [PackRow(bytes(16), 0, 1, 1 << 20)]}, "index body"),
        ({"packs": [PackRow(bytes(16), 0, 1, 1 << 40)]}, "index head"),
        ({"packs": [PackRow(bytes(16), 0, -1, 1)]}, "index head"),
        ({"packs": [PackRow(bytes(16), 1 << 32, 0, 0)]}, "index head"),
        ({"manifests": [ManifestRow("r", True, b"x", 0, 0, WRITER, 0, 0, 0)]}, "index ids"),
        ({"manifests": [ManifestRow("r", True, b"", 0, 0, WRITER, 0, 0, 1 << 40)]}, "index head"),
        ({"moment": -1}, "index head"),
        ({"time": float("nan")}, "index time"),
    ],
)
def test_heads_that_lie_are_refused(change: dict[str, object], field: str) -> None:
    head = msgspec.structs.replace(Head(namespace=NAMESPACE, writer=WRITER, moment=1, time=0.0), **change)
    with pytest.raises(CorruptPackError) as caught:
        list(parse_entries(b"".join(encode_entries([Entry(head, bytearray())])), NAMESPACE))
    assert caught.value.field == field


@pytest.mark.parametrize("data", [b"", b"PKVS3IX", b"PKVPACK1", b"PKVS3IX1x", b"PKVS3IX1" + b"\xff" * 12])
def test_what_is_no_index_object(data: bytes) -> None:
    with pytest.raises(CorruptPackError):
        list(parse_entries(data, NAMESPACE))


def test_row_that_names_another_table_is_not_held() -> None:
    first, _ = make_entries()
    swapped = msgspec.structs.replace(
        first.head, packs=[msgspec.structs.replace(row, pack_id=bytes(16)) for row in first.head.packs], gone=[]
    )
    state = LogState()
    state.merge(Entry(swapped, first.bodies))
    assert not state.packs


def test_table_of_another_namespace_is_not_held() -> None:
    first, _ = make_entries()
    state = LogState()
    state.merge(Entry(msgspec.structs.replace(first.head, namespace=bytes(16)), first.bodies))
    assert not state.packs


def test_root_round_trip_and_damage() -> None:
    root = Root(namespace=NAMESPACE, number=3, covered=((WRITER, 17),), segments=("a", "b"), whole_segments=1)
    data = encode_root(root)
    assert parse_root_object(data, NAMESPACE, 3) == root
    for wrong in (data[:-1], data[:5], b"\x02" + data[1:], data[:9] + b"\xc1" + data[10:]):
        with pytest.raises(CorruptPackError):
            parse_root_object(wrong, NAMESPACE, 3)
    with pytest.raises(CorruptPackError, match="in place of 4"):
        parse_root_object(data, NAMESPACE, 4)
    evil = msgspec.structs.replace(root, segments=("../../other",))
    with pytest.raises(CorruptPackError, match="segments"):
        parse_root_object(encode_root(evil), NAMESPACE, 3)


def test_identity_objects() -> None:
    namespace = Namespace(sample_identity(), 12.5)
    data = encode_namespace(namespace)
    assert data == struct.pack("<d", 12.5) + sample_identity().encode()
    assert parse_namespace(data, NAMESPACE) == namespace
    assert parse_namespace(data, bytes(16)) is None
    assert parse_namespace(data[:10], NAMESPACE) is None
    plain = encode_format(Policy(None, None))
    assert plain == b"PKVS3FM1" + struct.pack("<I", 1) + b'{"capacity":null,"ttl_s":null}'
    for policy in (Policy(None, None), Policy(1 << 40, 86_400.0)):
        assert decode_format(encode_format(policy), "s3://b") == policy
    with pytest.raises(CorruptStoreError, match="format 2"):
        decode_format(b"PKVS3FM1" + struct.pack("<I", 2), "s3://b")
    with pytest.raises(CorruptStoreError, match="no persistkv store"):
        decode_format(b"hello", "s3://b")


def test_names_that_are_not_ours_are_passed_over() -> None:
    names = Names("p/", NAMESPACE)
    assert parse_root(names.root(255)) == 255
    assert parse_log(names.root(255)) is None
    for strange in ("p/x", "p/i-", "p/i-" + "g" * 32 + "-000000000001", "p/s-1", "p/s-00000000000g"):
        assert (parse_log(strange), parse_root(strange)) == (None, None)
