"""Damaged, truncated or forged pack tables: parsing reports corruption or returns a consistent
table."""

from __future__ import annotations

import tracemalloc

import pytest
import xxhash
from hypothesis import given, settings
from hypothesis import strategies as st

from persistkv.errors import CorruptPackError
from persistkv.storage.format.codec import ZstdCodec
from persistkv.storage.format.pack import (
    FRAME_BYTES,
    Frame,
    PackTable,
    align,
)
from persistkv.testing.samples import sample_keys, sample_section
from tests.storage.packs import FRAME, HEADER, NAMESPACE, TRAILER, sealed, write

REAL = [
    write(sample_section(1, blocks=40, block_bytes=65_536))[1].encode(),
    write(
        sample_section(1, blocks=2, hash_bytes=8),
        sample_section(2, group=1, blocks=3),
        codec=ZstdCodec(),
    )[1].encode(),
    write(sample_section(3, blocks=1, block_bytes=2 << 20))[1].encode(),
]


@settings(max_examples=100, deadline=None)
@given(
    st.sampled_from(REAL),
    st.lists(
        st.tuples(st.integers(0, 1 << 16), st.integers(1, 255)), min_size=1, max_size=6
    ),
)
def test_pack_table_parse_flipped_bytes_raise_corrupt(
    encoded: bytes,
    flips: list[tuple[int, int]],
) -> None:
    damaged = bytearray(encoded)
    for position, value in flips:
        damaged[position % len(encoded)] ^= value
    if damaged != encoded:
        with pytest.raises(CorruptPackError):
            PackTable.parse(damaged)


@settings(max_examples=100, deadline=None)
@given(st.sampled_from(REAL), st.integers(0, 1 << 16), st.binary(max_size=64))
def test_pack_table_parse_truncated_raises_and_prefix_is_ignored(
    encoded: bytes,
    cut: int,
    extra: bytes,
) -> None:
    with pytest.raises(CorruptPackError):
        PackTable.parse(encoded[: cut % len(encoded)])
    assert PackTable.parse(extra + encoded) == PackTable.parse(encoded)


@settings(max_examples=200, deadline=None)
@given(st.sampled_from(REAL), st.data())
def test_pack_table_parse_forged_table_is_sound_or_raises_corrupt(
    encoded: bytes,
    data: st.DataObject,
) -> None:
    """Damaged tables with valid checksums: an accepted table keeps every guarantee that readers
    rely on."""
    body = bytearray(encoded[: -TRAILER.size])
    for _ in range(data.draw(st.integers(1, 4))):
        kind = data.draw(st.sampled_from(["flip", "number", "cut", "insert"]))
        at = data.draw(st.integers(0, len(body) - 1))
        if kind == "flip":
            body[at] ^= data.draw(st.integers(1, 255))
        elif kind == "number":
            number = data.draw(
                st.sampled_from(
                    [
                        0,
                        1,
                        0xFF,
                        0xFFFF,
                        0x7FFFFFFF,
                        0xFFFFFFFF,
                        (1 << 63) - 1,
                        (1 << 64) - 1,
                    ]
                )
            )
            width = data.draw(st.sampled_from([2, 4, 8]))
            at -= at % width
            body[at : at + width] = (number & ((1 << 8 * width) - 1)).to_bytes(
                width, "little"
            )
        elif kind == "cut":
            del body[at : at + data.draw(st.integers(1, 60))]
        else:
            body[at:at] = data.draw(st.binary(max_size=60))
        if not body:
            break
    try:
        table = PackTable.parse(sealed(bytes(body)))
    except CorruptPackError as error:
        assert error.field  # noqa: PT017
        return
    check_sound(table)
    assert table.encode() == sealed(bytes(body))


def check_sound(table: PackTable) -> None:
    keys = table.keys.unpack()
    assert (
        len(keys)
        == len(set(keys))
        == len(table.keys)
        == sum(frame.block_count for frame in table.frames)
    )
    assert table.raw_length == sum(frame.raw_length for frame in table.frames)
    end = 0
    for frame in table.frames:
        assert frame.offset == end
        assert 0 <= frame.stored_length <= frame.raw_length
        assert frame.raw_length <= max(FRAME_BYTES, frame.block_bytes)
        end = align(frame.offset + frame.stored_length)
    assert table.payload_length == end


@settings(max_examples=200, deadline=None)
@given(st.binary(max_size=300))
def test_pack_table_parse_garbage_raises_corrupt(data: bytes) -> None:
    for candidate in (data, sealed(data)):
        with pytest.raises(CorruptPackError):
            PackTable.parse(candidate)


def forged(**changes: int | bytes) -> bytes:
    """Return a table of one frame of 4 blocks; ``changes`` replace fields of its header and
    frame."""
    header: dict[str, int | bytes] = {
        "version": 1, "key_length": 36, "frames": 1, "blocks": 4, "codec_length": 3, "tenant_length": 0, "payload": 16384, "raw": 16384,
        "namespace": NAMESPACE, "name": bytes(16), "key": bytes(8), "salt": bytes(16),
    }  # fmt: skip
    frame: dict[str, int | bytes] = {
        "group": 0, "count": 4, "block_bytes": 4096, "depth": 0, "offset": 0,
        "stored": 16384, "tag": bytes(16),
    }  # fmt: skip
    codec = changes.pop("codec", b"raw")
    keys = changes.pop("keys", b"".join(sample_keys(1, 4)))
    assert isinstance(codec, bytes)
    assert isinstance(keys, bytes)
    for name, value in changes.items():
        (header if name in header else frame)[name] = value
    body = HEADER.pack(*header.values()) + codec + FRAME.pack(*frame.values()) + keys
    return sealed(body)


def test_pack_table_parse_valid_table_returns_frames() -> None:
    assert PackTable.parse(forged()).frames == (
        Frame(0, 4, 4096, 0, 0, 16384, bytes(16)),
    )


@pytest.mark.parametrize(
    ("changes", "field"),
    [
        ({"version": 2}, "version"),
        ({"frames": 0xFFFFFFFF}, "counts"),
        ({"blocks": 0xFFFFFFFF, "key_length": 0}, "counts"),
        ({"blocks": 0xFFFFFFFF}, "keys"),
        ({"codec_length": 0xFFFF}, "counts"),
        ({"tenant_length": 0xFFFF}, "counts"),
        ({"tenant_length": 2, "codec": b"raw\xc3\x28"}, "tenant"),
        ({"tenant_length": 2, "codec": b"raw\n\n"}, "tenant"),
        ({"tenant_length": 7, "codec": b"rawdefault"}, "tenant"),
        ({"tenant_length": 129, "codec": b"raw" + 129 * b"x"}, "tenant"),
        ({"blocks": 3, "key_length": 48}, "block count"),
        ({"key_length": 35}, "keys"),
        ({"key_length": 0}, "key lengths"),
        ({"codec": b"\xff\xfe\xfd"}, "codec name"),
        ({"count": 3, "raw": 12288}, "frame length"),
        ({"count": 0}, "frame length"),
        ({"block_bytes": 0}, "frame length"),
        (
            {"block_bytes": 0xFFFFFFFF, "codec": b"lz9", "raw": 4 * 0xFFFFFFFF},
            "frame length",
        ),
        ({"stored": 16385, "codec": b"lz9"}, "frame length"),
        ({"stored": 100}, "frame length"),
        ({"stored": (1 << 64) - 1}, "frame length"),
        ({"offset": 4096}, "frame offset"),
        ({"offset": 1}, "frame offset"),
        ({"offset": (1 << 64) - 4096}, "frame offset"),
        ({"raw": 16385}, "raw length"),
        ({"payload": 12288}, "payload length"),
        ({"payload": (1 << 64) - 4096}, "payload length"),
    ],
)
def test_pack_table_parse_wrong_field_raises_and_names_it(
    changes: dict[str, int | bytes],
    field: str,
) -> None:
    tracemalloc.start()
    try:
        with pytest.raises(CorruptPackError) as caught:
            PackTable.parse(forged(**changes))
        # no allocation depends on a claimed size
        assert tracemalloc.get_traced_memory()[1] < 1 << 20
    finally:
        tracemalloc.stop()
    assert caught.value.field == field


def table_with(keys: list[bytes], key_length: int) -> bytes:
    """Return a forged table of one frame that holds these keys.

    :param key_length: 0 to write the length of each key.
    """
    lengths = (
        b"" if key_length else b"".join(len(key).to_bytes(2, "little") for key in keys)
    )
    sizes = {
        "block_bytes": 1,
        "raw": len(keys),
        "stored": len(keys),
        "payload": align(len(keys)),
    }
    changes: dict[str, int | bytes] = {
        "blocks": len(keys),
        "count": len(keys),
        "key_length": key_length,
        **sizes,
    }
    return forged(**changes, keys=lengths + b"".join(keys))


@pytest.mark.parametrize("key_length", [0, 4, 12, 36])
@pytest.mark.parametrize("count", [2, 20, 100, 300])
def test_pack_table_parse_repeated_key_raises_corrupt(
    count: int,
    key_length: int,
) -> None:
    keys = [
        number.to_bytes(4, "big") * (key_length // 4 or 9) for number in range(count)
    ]
    assert PackTable.parse(table_with(keys, key_length)).keys.unpack() == keys
    for first, second in ((0, 1), (0, count - 1), (count // 2, count - 1)):
        if first < second:
            repeated = [*keys[:second], keys[first], *keys[second + 1 :]]
            with pytest.raises(CorruptPackError) as caught:
                PackTable.parse(table_with(repeated, key_length))
            assert caught.value.field == "keys"


@pytest.mark.parametrize("count", [2, 20, 100])
def test_pack_table_parse_keys_with_equal_ends_are_distinct(count: int) -> None:
    keys = [number.to_bytes(4, "big") + bytes(32) for number in range(count)]
    assert PackTable.parse(table_with(keys, 36)).keys.unpack() == keys


@pytest.mark.parametrize("length", [0, 63, 68, 1 << 20, (1 << 64) - 1])
def test_pack_table_parse_wrong_length_raises_corrupt(length: int) -> None:
    body = forged()[: -TRAILER.size]
    wrong = body + TRAILER.pack(length, xxhash.xxh3_64_intdigest(body), b"PKVPACK1")
    with pytest.raises(CorruptPackError) as caught:
        PackTable.parse(wrong)
    assert caught.value.field in ("table length", "table checksum")
