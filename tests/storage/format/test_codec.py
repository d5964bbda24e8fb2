from __future__ import annotations

import tracemalloc
from contextlib import suppress

import pytest
import zstandard
from hypothesis import given
from hypothesis import strategies as st

from persistkv.errors import ConfigurationError, CorruptPackError
from persistkv.storage.format.codec import (
    Codec,
    PlanesCodec,
    RawCodec,
    ZstdCodec,
    parse_codec,
    stored_codec,
)

CODECS = [RawCodec(), ZstdCodec(), ZstdCodec(19), PlanesCodec(2), PlanesCodec(4)]


@pytest.mark.parametrize("codec", CODECS, ids=str)
@given(raw=st.binary(max_size=5000))
def test_codec_round_trip_returns_same_bytes(codec: Codec, raw: bytes) -> None:
    out = bytearray(len(raw))
    codec.decode_into(codec.encode(raw), memoryview(out))
    assert out == raw


@pytest.mark.parametrize("codec", CODECS, ids=str)
def test_parse_codec_text_form_returns_equal_codec(codec: Codec) -> None:
    assert parse_codec(str(codec)) == codec


@pytest.mark.parametrize(
    ("text", "codec"),
    [("zstd", ZstdCodec(1)), ("planes", PlanesCodec(2)), ("planes:4", PlanesCodec(4))],
)
def test_parse_codec_argument_or_default_is_applied(text: str, codec: Codec) -> None:
    assert parse_codec(text) == codec


@pytest.mark.parametrize(
    ("text", "names"),
    [
        ("", "raw, zstd, planes"),
        ("lz4", "raw, zstd, planes"),
        ("RAW", "raw, zstd, planes"),
        ("raw,zstd", "raw, zstd, planes"),
        ("raw:1", "without an argument"),
        ("auto", "raw, zstd, planes"),
        ("zstd:0", "1 to 19"),
        ("zstd:20", "1 to 19"),
        ("zstd:-1", "1 to 19"),
        ("zstd:fast", "1 to 19"),
        ("zstd:²", "1 to 19"),
        ("planes:1", "2 or 4"),
        ("planes:3", "2 or 4"),
        ("planes:bf16", "2 or 4"),
    ],
)
def test_parse_codec_invalid_text_raises_and_names_valid_values(
    text: str,
    names: str,
) -> None:
    with pytest.raises(ConfigurationError, match=names):
        parse_codec(text)


def test_codec_constructor_invalid_argument_raises() -> None:
    with pytest.raises(ConfigurationError, match="2 or 4"):
        PlanesCodec(8)
    with pytest.raises(ConfigurationError, match="1 to 19"):
        ZstdCodec(20)


@pytest.mark.parametrize("text", ["", "lz9", "zstd:99", "raw,zstd"])
def test_stored_codec_unknown_text_raises_corrupt(text: str) -> None:
    with pytest.raises(CorruptPackError) as caught:
        stored_codec(text)
    assert caught.value.field == "codec"


@pytest.mark.parametrize("codec", CODECS, ids=str)
@pytest.mark.parametrize("difference", [-800, -100, -1, 1, 100])
def test_decode_into_wrong_length_raises_corrupt(codec: Codec, difference: int) -> None:
    stored = codec.encode(b"abcdefgh" * 100)
    with pytest.raises(CorruptPackError, match="frame"):
        codec.decode_into(stored, memoryview(bytearray(800 + difference)))


@pytest.mark.parametrize("codec", CODECS, ids=str)
def test_decode_into_trailing_bytes_raise_corrupt(codec: Codec) -> None:
    stored = bytes(codec.encode(b"abcdefgh" * 100))
    for more in (b"\0", b"abcdefgh", zstandard.compress(b"more")):
        with pytest.raises(CorruptPackError, match="frame"):
            codec.decode_into(stored + more, memoryview(bytearray(800)))


@pytest.mark.parametrize("codec", CODECS[1:], ids=str)
@given(data=st.data())
def test_decode_into_damaged_frame_never_writes_past_buffer(
    codec: Codec,
    data: st.DataObject,
) -> None:
    """Readers verify checksums first (see pack.py), so the codec only has to stay within its
    buffer."""
    stored = bytearray(codec.encode(bytes(range(256)) * 8))
    for _ in range(data.draw(st.integers(1, 4))):
        stored[data.draw(st.integers(0, len(stored) - 1))] ^= data.draw(
            st.integers(1, 255)
        )
    stored = stored[: data.draw(st.integers(0, len(stored)))]
    out = bytearray(2048 + 16)
    with suppress(CorruptPackError):
        codec.decode_into(bytes(stored), memoryview(out)[:2048])
    assert out[2048:] == bytes(16)


def bombs() -> dict[str, bytes]:
    """Return small Zstandard frames with a huge content, no content size, a huge window, or a
    second frame."""
    content = zstandard.ZstdCompressor(level=1).compress(bytes(512 << 20))
    unsized = zstandard.ZstdCompressor(level=1, write_content_size=False).compress(
        bytes(4096)
    )
    window = bytearray(
        zstandard.ZstdCompressor(level=1, write_content_size=False).compress(
            bytes(4096)
        )
    )
    window[5] = 0xF8  # a window of 2 TiB
    honest = zstandard.ZstdCompressor(level=1).compress(bytes(4096))
    return {
        "huge content": content,
        "no size": unsized,
        "huge window": bytes(window),
        "two frames": honest + bytes(window),
    }


BOMBS = bombs()


@pytest.mark.parametrize("name", BOMBS)
def test_zstd_codec_huge_claimed_size_is_not_allocated(name: str) -> None:
    tracemalloc.start()
    try:
        with pytest.raises(CorruptPackError):
            ZstdCodec().decode_into(BOMBS[name], memoryview(bytearray(4096)))
        assert tracemalloc.get_traced_memory()[1] < 16 << 20
    finally:
        tracemalloc.stop()
