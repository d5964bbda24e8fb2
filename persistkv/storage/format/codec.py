"""Codecs: lossless transformations of a frame's bytes. Each frame is encoded independently.

Zstandard and NumPy are imported on first use: importing NumPy would take most of the startup time
of commands that decode nothing.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cache
from types import MappingProxyType
from typing import TYPE_CHECKING, ClassVar

from persistkv.errors import ConfigurationError, CorruptPackError

if TYPE_CHECKING:
    from zstandard import ZstdCompressionParameters

Buffer = bytes | bytearray | memoryview
"""Contiguous bytes."""

_SMALLEST_WINDOW = 1 << 10  # 1 KiB: the minimum of the Zstandard format


class Codec(ABC):
    """Immutable, thread-safe codec with validated parameters. Every pack contains the text form of
    its codec."""

    name: ClassVar[str]
    identity: ClassVar[bool] = False
    """Whether encoded bytes equal the raw bytes; callers then skip ``encode``, which needs
    contiguous bytes."""

    @abstractmethod
    def __str__(self) -> str:
        """Return the text form, from which ``parse_codec`` makes an equal codec."""

    @abstractmethod
    def encode(self, raw: Buffer) -> Buffer:
        """Return the encoded bytes. If they are not shorter than ``raw``, the pack stores ``raw``
        instead."""

    @abstractmethod
    def decode_into(self, stored: Buffer, out: memoryview) -> None:
        """Decode stored bytes and fill ``out`` exactly.

        Memory use depends on ``len(out)``, never on a length that the stored bytes claim.

        :raises CorruptPackError: the stored bytes do not decode to exactly ``len(out)`` bytes. The
            content of ``out`` is then undefined.
        """


@dataclass(frozen=True)
class RawCodec(Codec):
    """Stores bytes unchanged."""

    name: ClassVar[str] = "raw"
    identity: ClassVar[bool] = True

    def __str__(self) -> str:
        return self.name

    def encode(self, raw: Buffer) -> Buffer:
        return raw

    def decode_into(self, stored: Buffer, out: memoryview) -> None:
        if len(stored) != len(out):
            raise CorruptPackError(
                "frame", f"{len(stored)} raw bytes where {len(out)} belong"
            )
        out[:] = stored


@dataclass(frozen=True)
class ZstdCodec(Codec):
    """General compression: one Zstandard frame per frame of a pack."""

    name: ClassVar[str] = "zstd"
    level: int = 1
    """1 (fast) to 19 (small). The default is 1, because higher levels make KV bytes only slightly
    smaller."""

    def __post_init__(self) -> None:
        if self.level not in range(1, 20):
            raise ConfigurationError("codec level", self.level, "1 to 19")

    def __str__(self) -> str:
        return f"{self.name}:{self.level}"

    def encode(self, raw: Buffer) -> Buffer:
        import zstandard

        return zstandard.ZstdCompressor(level=self.level).compress(raw)

    def decode_into(self, stored: Buffer, out: memoryview) -> None:
        decompress_into(stored, out)


@dataclass(frozen=True)
class PlanesCodec(Codec):
    """Codec for floating-point values of a fixed width, split into planes of bytes.

    The highest byte of a value, with its sign and exponent, is compressible; the bytes of the
    mantissa are noise and are stored unchanged. Compression uses only Huffman codes, because
    repeated strings are rare. Lossless for any bytes; makes only floating-point values smaller.

    Stored form of ``n`` values of ``w`` bytes, followed by ``t`` bytes (``t`` < ``w``): ``w - 1``
    planes of ``n`` bytes, beginning with the lowest byte of each value; the ``t`` bytes; one
    Zstandard frame with the ``n`` highest bytes. If ``n`` is 0, the stored form is the ``t`` bytes
    alone.
    """

    name: ClassVar[str] = "planes"
    width: int = 2
    """Bytes of one value: 2 for bfloat16 and float16, 4 for float32."""

    def __post_init__(self) -> None:
        if self.width not in (2, 4):
            raise ConfigurationError(
                "codec width", self.width, "the bytes of one value: 2 or 4"
            )

    def __str__(self) -> str:
        return f"{self.name}:{self.width}"

    def encode(self, raw: Buffer) -> Buffer:
        """Return the planes, the tail and the compressed highest bytes (see the class)."""
        import numpy as np
        import zstandard

        count = len(raw) // self.width
        # there is less than one value, so the stored form is the tail alone
        if not count:
            return raw
        # Shift and cast whole values: NumPy's strided copies of single bytes are five times as
        # slow.
        values = np.frombuffer(raw, dtype=f"<u{self.width}", count=count)
        num_low_planes = self.width - 1
        # compress the highest bytes first, because their compressed length determines the stored
        # length
        high = np.empty(count, dtype=np.uint8)
        np.right_shift(values, 8 * num_low_planes, out=high, casting="unsafe")
        compressor = zstandard.ZstdCompressor(compression_params=_huffman_only())
        compressed = compressor.compress(high.data)
        tail = memoryview(raw)[count * self.width :]
        tail_at = num_low_planes * count
        high_at = tail_at + len(tail)
        num_bytes = high_at + len(compressed)
        stored = np.empty(num_bytes, dtype=np.uint8)
        for number in range(num_low_planes):
            start = number * count
            # the cast to u8 keeps the lowest byte of each shifted value
            plane = stored[start : start + count]
            np.right_shift(values, 8 * number, out=plane, casting="unsafe")
        stored.data[tail_at:high_at] = tail
        stored.data[high_at:] = compressed
        return stored.data

    def decode_into(self, stored: Buffer, out: memoryview) -> None:
        """Join the planes to values in ``out``, and copy the tail behind them."""
        import numpy as np

        count, tail_bytes = divmod(len(out), self.width)
        num_low_planes = self.width - 1
        # ``stored`` has the low planes, then the tail, then the compressed plane of the highest
        # bytes
        tail_at = num_low_planes * count
        high_at = tail_at + tail_bytes
        # with values, ``decompress_into`` checks the length of the compressed plane
        is_short = len(stored) < high_at
        # without values, no compressed plane follows the tail
        is_long = not count and len(stored) > high_at
        if is_short or is_long:
            raise CorruptPackError(
                "frame", f"planes of {len(stored)} bytes where {len(out)} belong"
            )
        source = memoryview(stored)
        out_tail_at = len(out) - tail_bytes
        out[out_tail_at:] = source[tail_at:high_at]
        if not count:
            return
        # Start with the highest byte of each value; then, plane by plane, shift the values and
        # insert the next byte.
        values = np.frombuffer(out, dtype=f"<u{self.width}", count=count)
        high = np.empty(count, dtype=np.uint8)
        decompress_into(source[high_at:], high.data)
        values[:] = high
        for number in reversed(range(num_low_planes)):
            np.left_shift(values, 8, out=values)
            plane_at = number * count
            plane = np.frombuffer(source, np.uint8, count=count, offset=plane_at)
            np.bitwise_or(values, plane, out=values)


_CODECS: Mapping[str, Callable[..., Codec]] = MappingProxyType(
    {codec.name: codec for codec in (RawCodec, ZstdCodec, PlanesCodec)}
)


def parse_codec(text: str) -> Codec:
    """Return the codec for a text such as ``raw``, ``zstd:3`` or ``planes``.

    :raises ConfigurationError: the codec does not exist or does not take this argument.
    """
    name, _, argument = text.partition(":")
    make_codec = _CODECS.get(name)
    if make_codec is None:
        names = ", ".join(_CODECS)
        expected = (
            f"one of {names} (zstd:LEVEL sets a level, planes:WIDTH the bytes of a "
            f"value)"
        )
        raise ConfigurationError("codec", text, expected)
    if not argument:
        return make_codec()
    if name == RawCodec.name:
        raise ConfigurationError("codec", text, "raw, without an argument")
    # check more than ``int``, which also accepts signs, spaces and digits of other scripts
    is_decimal = argument.isascii() and argument.isdecimal()
    if not is_decimal or len(argument) > 2:
        # this raises the codec's error, which names the expected values
        return make_codec(argument)
    return make_codec(int(argument))


def stored_codec(text: str) -> Codec:
    """Return the codec that a pack's table names; raise CorruptPackError if this release does not
    know it."""
    try:
        return parse_codec(text)
    except ConfigurationError as error:
        raise CorruptPackError("codec", str(error)) from None


@cache
def _huffman_only() -> ZstdCompressionParameters:
    """Return Zstandard parameters with which almost only the Huffman codes compress. The bytes of
    KV data hardly repeat, and the search for matches would take most of the time: it accepts only
    matches of 7 bytes or more, and its tables have 64 entries."""
    import zstandard

    return zstandard.ZstdCompressionParameters(
        window_log=17,  # 128 KiB
        hash_log=6,
        chain_log=6,
        search_log=1,
        min_match=7,
        target_length=0,
        strategy=zstandard.STRATEGY_FAST,
    )


def decompress_into(stored: Buffer, out: memoryview) -> None:
    """Decode one Zstandard frame, whose header must contain the length, into ``out``.

    :raises CorruptPackError: the frame does not decode to exactly ``len(out)`` bytes, or other data
        follows it.
    """
    import zstandard

    # The header names a window, which is allocated, and may be larger than the content: limit it to
    # the length of the content, rounded up to a power of two.
    power_of_two = 1 << (len(out) - 1).bit_length()
    window = max(_SMALLEST_WINDOW, power_of_two)
    filled = 0
    try:
        claimed = zstandard.get_frame_parameters(stored).content_size
        if claimed != len(out):
            raise CorruptPackError(
                "frame", f"zstd names {claimed} bytes where {len(out)} belong"
            )
        decompressor = zstandard.ZstdDecompressor(max_window_size=window)
        # read across frames, because a second frame behind the first would otherwise go unnoticed
        with decompressor.stream_reader(stored, read_across_frames=True) as reader:
            while filled < len(out):
                count = reader.readinto(out[filled:])
                if not count:
                    break
                filled += count
            has_more = bool(reader.read(1))
            if filled != len(out) or has_more:
                raise CorruptPackError(
                    "frame", f"zstd does not decode to {len(out)} bytes"
                )
    except zstandard.ZstdError as error:
        raise CorruptPackError("frame", f"zstd: {error}") from None
