from __future__ import annotations

import struct

import numpy as np
import pytest
import zstandard
from hypothesis import given
from hypothesis import strategies as st

from persistkv.errors import CorruptPackError
from persistkv.storage.format.codec import PlanesCodec

WIDTHS = [2, 4]


def floats(count: int, width: int) -> bytes:
    """Return normally distributed values in the formats of KV caches: bfloat16 (``width`` 2) or
    float32 (4)."""
    values = np.random.default_rng(5).standard_normal(count).astype(np.float32)
    return (
        (values.view(np.uint32) >> 16).astype(np.uint16).tobytes()
        if width == 2
        else values.tobytes()
    )


@pytest.mark.parametrize("width", WIDTHS)
@given(length=st.integers(0, 300), first=st.integers(0, 7), seed=st.integers(0, 1000))
def test_planes_codec_any_length_and_alignment_round_trips(
    width: int,
    length: int,
    first: int,
    seed: int,
) -> None:
    raw = (
        np.random.default_rng(seed)
        .integers(0, 256, first + length, dtype=np.uint8)
        .data[first:]
    )
    stored = PlanesCodec(width).encode(raw)
    shifted = memoryview(bytes(first) + bytes(stored))[first:]
    out = bytearray(first + length + 3)
    PlanesCodec(width).decode_into(shifted, memoryview(out)[first : first + length])
    assert out == bytes(first) + bytes(raw) + bytes(3)


@pytest.mark.parametrize("width", WIDTHS)
@pytest.mark.parametrize("tail", [0, 1, 3])
def test_planes_codec_format_matches_documentation(width: int, tail: int) -> None:
    """Decode as docs/format.md describes, with the zstandard package only."""
    raw = (
        bytes(np.random.default_rng(1).integers(0, 256, 4 * 1000, dtype=np.uint8))
        + b"xyz"[:tail]
    )
    stored = bytes(PlanesCodec(width).encode(raw))
    count, rest = divmod(len(raw), width)
    planes = [stored[place * count : (place + 1) * count] for place in range(width - 1)]
    behind = stored[(width - 1) * count :]
    planes.append(zstandard.ZstdDecompressor().decompress(behind[rest:]))
    assert b"".join(map(bytes, zip(*planes, strict=True))) + behind[:rest] == raw


@pytest.mark.parametrize(("width", "entropy_bits"), [(2, 8), (4, 24)])
def test_planes_codec_floats_compress_close_to_entropy_of_high_byte(
    width: int,
    entropy_bits: float,
) -> None:
    raw = floats(1 << 18, width)
    counts = np.bincount(
        np.frombuffer(raw, np.uint8)[width - 1 :: width], minlength=256
    )
    shares = counts[counts > 0] / counts.sum()
    bound = len(raw) / width * (entropy_bits - float(shares @ np.log2(shares))) / 8
    assert bound <= len(PlanesCodec(width).encode(raw)) <= bound / 0.98


def test_planes_codec_random_bytes_grow_by_less_than_100() -> None:
    raw = np.random.default_rng(2).bytes(1 << 20)
    assert len(raw) <= len(PlanesCodec().encode(raw)) < len(raw) + 100


@pytest.mark.parametrize("width", WIDTHS)
def test_planes_codec_truncated_frame_raises_corrupt(width: int) -> None:
    codec = PlanesCodec(width)
    stored = bytes(codec.encode(b"abcdefgh" * 10 + b"xyz"))
    for length in range(len(stored)):
        with pytest.raises(CorruptPackError, match="frame"):
            codec.decode_into(stored[:length], memoryview(bytearray(83)))


def test_planes_codec_wrong_high_plane_length_raises_corrupt() -> None:
    high = zstandard.compress(bytes(10))
    for count in (9, 11):
        with pytest.raises(CorruptPackError, match="10 bytes where"):
            PlanesCodec().decode_into(
                bytes(count) + high, memoryview(bytearray(2 * count))
            )
    claims = bytearray(
        zstandard.ZstdCompressor(write_content_size=True).compress(bytes(70_000))
    )
    # offset of the content size in the frame header
    struct.pack_into("<I", claims, 5, 0xFFFFFFF0)
    with pytest.raises(CorruptPackError, match="frame"):
        PlanesCodec().decode_into(
            bytes(70_000) + bytes(claims), memoryview(bytearray(140_000))
        )
