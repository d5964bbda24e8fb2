"""Values of a fixed width, split into planes of bytes.

The bytes of a value that hold its sign and exponent repeat, those of its mantissa are noise. So the
highest byte of each value is compressed with Huffman codes alone (no search for matches, which there are not), and the
other bytes are kept as they are. Lossless for any bytes; they only shrink where they are such values.

The stored form of ``n`` values of ``w`` bytes and ``t`` bytes behind them (fewer than ``w``): ``w - 1`` planes of ``n``
bytes, the lowest byte of each value first; the ``t`` bytes; one Zstandard frame of the ``n`` highest bytes. Where ``n``
is 0, the ``t`` bytes alone.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import numpy as np
import zstandard

from persistkv.errors import ConfigurationError, CorruptPackError
from persistkv.storage.codec.base import Buffer, Codec
from persistkv.storage.codec.zstd import decompress_into

_WIDTHS = (2, 4)
_EXPECTED = "the bytes of one value: 2 or 4"

# Matches of at least 7 bytes, in tables of 64 entries: next to none are found, and little time goes into looking.
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
    """See the top of this file."""

    name: ClassVar[str] = "planes"
    width: int = 2
    """Bytes of one value: 2 for bfloat16 and float16, 4 for float32."""

    def __post_init__(self) -> None:
        if self.width not in _WIDTHS:
            raise ConfigurationError("codec width", self.width, _EXPECTED)

    @classmethod
    def parse(cls, argument: str) -> PlanesCodec:
        """The width, or nothing for the default.

        :raises ConfigurationError: where it is no such number.
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
        # Shifts and casts of whole values, because numpy copies single bytes with a stride at a fifth of their speed.
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
        """The highest bytes go to the lowest place and are shifted up as the others come in below them."""
        values = np.frombuffer(out, dtype=f"<u{self.width}", count=count)
        high = np.empty(count, dtype=np.uint8)
        decompress_into(compressed, high.data)
        values[:] = high
        for place in reversed(range(self.width - 1)):
            np.left_shift(values, 8, out=values)
            np.bitwise_or(values, np.frombuffer(planes, dtype=np.uint8, count=count, offset=place * count), out=values)
