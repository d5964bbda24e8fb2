from __future__ import annotations

from collections.abc import Callable

import msgspec
import pytest
import xxhash
from hypothesis import example, given
from hypothesis import strategies as st

from persistkv.errors import CorruptPackError
from persistkv.storage.format.manifest import (
    RequestManifest,
    context_digest,
    decode_manifest,
    decode_manifest_keys,
    encode_manifest,
    encode_manifest_keys,
)
from persistkv.storage.format.pack import PackedKeys

MANIFEST = RequestManifest(
    id="engine/7",
    created=1.5,
    tokens=40,
    group_blocks=(2, 1),
    raw_bytes=99,
    labels={"user": "größe"},
)
KEYS = (
    PackedKeys.of([b"a" * 36, b"b" * 36]),
    PackedKeys.of([b"x", b"yz"]),
    PackedKeys(),
)


def test_manifest_head_and_keys_round_trip() -> None:
    assert decode_manifest(encode_manifest(MANIFEST)) == MANIFEST
    assert decode_manifest_keys(encode_manifest_keys(KEYS)) == KEYS
    assert MANIFEST.blocks == 3


@given(
    st.builds(
        RequestManifest,
        id=st.text(),
        created=st.floats(allow_nan=False),
        tokens=st.integers(0, 1 << 40),
        group_blocks=st.lists(st.integers(0, 1 << 20)).map(tuple),
        raw_bytes=st.integers(0, 1 << 60),
        ordered=st.booleans(),
        labels=st.dictionaries(st.text(), st.text()),
        context=st.binary(max_size=8),
        ttl_s=st.none() | st.floats(min_value=0, exclude_min=True),
        priority=st.sampled_from(["low", "normal"]),
    )
)
def test_manifest_any_fields_round_trip(manifest: RequestManifest) -> None:
    assert decode_manifest(encode_manifest(manifest)) == manifest


@pytest.mark.parametrize(
    ("ttl_s", "priority"),
    [(0.0, "low"), (-1.0, "low"), ("1h", "low"), (1.0, "high"), (1.0, 1)],
)
def test_decode_manifest_invalid_retention_raises_corrupt(
    ttl_s: object,
    priority: object,
) -> None:
    body = msgspec.msgpack.encode(
        ("engine/7", 1.5, 40, (2, 1), 99, True, {}, b"", ttl_s, priority)
    )
    with pytest.raises(CorruptPackError, match="manifest"):
        decode_manifest(b"\1" + xxhash.xxh3_64_digest(body) + body)


def test_decode_manifest_without_context_uses_defaults() -> None:
    body = msgspec.msgpack.encode(
        ("engine/7", 1.5, 40, (2, 1), 99, True, {"user": "größe"})
    )
    assert decode_manifest(b"\1" + xxhash.xxh3_64_digest(body) + body) == MANIFEST


def test_context_digest_covers_each_group() -> None:
    one, other = PackedKeys.of([b"a" * 36, b"b" * 36]), PackedKeys.of([b"a" * 36])
    found = {
        context_digest(keys)
        for keys in (
            (one,),
            (other,),
            (other, PackedKeys.of([b"b" * 36])),
            (one, other),
            (),
        )
    }
    assert len(found) == 5
    assert context_digest((one, other)) == context_digest(
        (PackedKeys.of(one.unpack()), other)
    )


@pytest.mark.parametrize(
    ("encoded", "decode"),
    [
        (encode_manifest(MANIFEST), decode_manifest),
        (encode_manifest_keys(KEYS), decode_manifest_keys),
    ],
)
class TestDamagedManifest:
    def test_any_flipped_byte_raises_corrupt(
        self,
        encoded: bytes,
        decode: Callable[[bytes], object],
    ) -> None:
        for offset in range(len(encoded)):
            damaged = bytearray(encoded)
            damaged[offset] ^= 0x40
            with pytest.raises(CorruptPackError):
                decode(bytes(damaged))

    def test_any_truncation_raises_corrupt(
        self,
        encoded: bytes,
        decode: Callable[[bytes], object],
    ) -> None:
        for length in range(len(encoded)):
            with pytest.raises(CorruptPackError):
                decode(encoded[:length])

    def test_newer_version_raises_corrupt_and_is_named(
        self,
        encoded: bytes,
        decode: Callable[[bytes], object],
    ) -> None:
        with pytest.raises(CorruptPackError, match="2; this release reads 1"):
            decode(b"\2" + encoded[1:])


def test_decode_manifest_of_encoded_keys_raises_corrupt() -> None:
    with pytest.raises(CorruptPackError):
        decode_manifest(encode_manifest_keys(KEYS))


@given(st.binary(max_size=200))
@example(b"\x95\xa3\x00\x00\x80")  # a string that is not UTF-8
# lists nested 100,000 levels deep
@example(b"\x98\xa1a\xcb" + bytes(8) + b"\0\x90\0\xc3\x80" + b"\x91" * 100_000)
def test_decode_manifest_garbage_with_valid_checksum_raises_corrupt(
    body: bytes,
) -> None:
    with pytest.raises(CorruptPackError):
        decode_manifest(b"\1" + xxhash.xxh3_64_digest(body) + body)
