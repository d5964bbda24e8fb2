"""Codec for floating-point values of a fixed width, split into planes of bytes.

The highest byte of a value, with its sign and exponent, is compressible; the bytes of the mantissa are noise. Therefore
the highest bytes of all values are compressed with Huffman codes only (there are no matches to search for), and the
other bytes are stored unchanged. The codec is lossless for any bytes, but makes only such values smaller.

Stored form of ``n`` values of ``w`` bytes, followed by ``t`` bytes (``t`` < ``w``): ``w - 1`` planes of ``n`` bytes,
beginning with the lowest byte of each value; the ``t`` bytes; one Zstandard frame with the ``n`` highest bytes. If
``n`` is 0, the stored form is the ``t`` bytes alone.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import numpy as np
import zstandard

from persistkv.errors import ConfigurationError, CorruptPackError
from persistkv.storage.format.codec.base import Buffer, Codec
from persistkv.storage.format.codec.zstd import decompress_into

_WIDTHS = (2, 4)
_EXPECTED = "the bytes of one value: 2 or 4"

# Matches of at least 7 bytes, in tables of 64 entries: almost none are found, and the search takes little time.
_HUFFMAN_ONLY = zstandard.ZstdCompressionParameters(
    window_log=17,
    hash_log=6,
    chain_log=6,
    search_log=1,
    min_match=7,
    target_length=0,
    strategy=zstandard.STRATEGY_FAST,
)


@dataclass(frozen=True)
class PlanesCodec(Codec):
    """Compresses the highest byte of each value; see the module docstring."""

    name: ClassVar[str] = "planes"
    width: int = 2
    """Bytes of one value: 2 for bfloat16 and float16, 4 for float32."""

    def __post_init__(self) -> None:
        if self.width not in _WIDTHS:
            raise ConfigurationError("codec width", self.width, _EXPECTED)

    @classmethod
    def parse(cls, argument: str) -> PlanesCodec:
        """Return the codec for a width; for the default width if the argument is empty.

        :raises ConfigurationError: the width is not 2 or 4.
        """
        if not argument:
            return cls()
        if argument not in map(str, _WIDTHS):
            raise ConfigurationError("codec width", argument, _EXPECTED)
        return cls(int(argument))

    def __str__(self) -> str:
        return f"{self.name}:{self.width}"

    def encode(self, raw: Buffer) -> Buffer:
        count = len(raw) // self.width
        if not count:
            return raw
        # Shifts and casts of whole values: NumPy's strided copies of single bytes reach a fifth of that speed.
        values = np.frombuffer(raw, dtype=f"<u{self.width}", count=count)
        high = np.empty(count, dtype=np.uint8)
        np.right_shift(values, 8 * (self.width - 1), out=high, casting="unsafe")
        compressed = zstandard.ZstdCompressor(compression_params=_HUFFMAN_ONLY).compress(high.data)
        tail = memoryview(raw)[count * self.width :]
        planes = (self.width - 1) * count
        stored = np.empty(planes + len(tail) + len(compressed), dtype=np.uint8)
        for place in range(self.width - 1):
            np.right_shift(values, 8 * place, out=stored[place * count :][:count], casting="unsafe")
        stored.data[planes : planes + len(tail)] = tail
        stored.data[planes + len(tail) :] = compressed
        return stored.data

    def decode_into(self, stored: Buffer, out: memoryview) -> None:
        count, tail = divmod(len(out), self.width)
        kept = (self.width - 1) * count + tail
        if len(stored) < kept or (not count and len(stored) > kept):
            raise CorruptPackError("frame", f"planes of {len(stored)} bytes where {len(out)} belong")
        source = memoryview(stored)
        out[len(out) - tail :] = source[kept - tail : kept]
        if count:
            self._merge(source, source[kept:], out, count)

    def _merge(self, planes: memoryview, compressed: memoryview, out: memoryview, count: int) -> None:
        """Start with the highest byte of each value; then, plane by plane, shift the values and insert the next
        byte.
        """
        values = np.frombuffer(out, dtype=f"<u{self.width}", count=count)
        high = np.empty(count, dtype=np.uint8)
        decompress_into(compressed, high.data)
        values[:] = high
        for place in reversed(range(self.width - 1)):
            np.left_shift(values, 8, out=values)
            np.bitwise_or(values, np.frombuffer(planes, dtype=np.uint8, count=count, offset=place * count), out=values)
