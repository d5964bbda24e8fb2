"""Codec for general compression with Zstandard."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import zstandard

from persistkv.errors import ConfigurationError, CorruptPackError
from persistkv.storage.format.codec.base import Buffer, Codec

_LEVELS = "1 to 19"
_SMALLEST_WINDOW = 1 << 10  # 1 KiB: the minimum of the Zstandard format


@dataclass(frozen=True)
class ZstdCodec(Codec):
    """Zstandard: one Zstandard frame per frame of a pack."""

    name: ClassVar[str] = "zstd"
    level: int = 1
    """1 (fast) to 19 (small). The default is 1, because higher levels make KV bytes little smaller."""

    def __post_init__(self) -> None:
        if not 1 <= self.level <= 19:
            raise ConfigurationError("codec level", self.level, _LEVELS)

    @classmethod
    def parse(cls, argument: str) -> ZstdCodec:
        """Return the codec for a level; for the default level if the argument is empty.

        :raises ConfigurationError: the level is not a number from 1 to 19.
        """
        if not argument:
            return cls()
        if not (argument.isascii() and argument.isdecimal() and len(argument) <= 2):
            raise ConfigurationError("codec level", argument, _LEVELS)
        return cls(int(argument))

    def __str__(self) -> str:
        return f"{self.name}:{self.level}"

    def encode(self, raw: Buffer) -> Buffer:
        return zstandard.ZstdCompressor(level=self.level).compress(raw)

    def decode_into(self, stored: Buffer, out: memoryview) -> None:
        decompress_into(stored, out)


def decompress_into(stored: Buffer, out: memoryview) -> None:
    """Decode one Zstandard frame, whose header must contain the length, into ``out``. Other codecs use it, too.

    :raises CorruptPackError: the frame does not decode to exactly ``len(out)`` bytes, or other data follows it.
    """
    try:
        claimed = zstandard.get_frame_parameters(stored).content_size
        if claimed != len(out):
            raise CorruptPackError("frame", f"zstd names {claimed} bytes where {len(out)} belong")
        _fill(stored, out)
    except zstandard.ZstdError as error:
        raise CorruptPackError("frame", f"zstd: {error}") from None


def _fill(stored: Buffer, out: memoryview) -> None:
    # A frame may claim a window larger than its content, which would be allocated: limit it.
    window = max(_SMALLEST_WINDOW, 1 << (len(out) - 1).bit_length())
    decompressor = zstandard.ZstdDecompressor(max_window_size=window)
    filled = 0
    with decompressor.stream_reader(stored, read_across_frames=True) as reader:
        while filled < len(out) and (count := reader.readinto(out[filled:])):
            filled += count
        if filled != len(out) or reader.read(1):
            raise CorruptPackError("frame", f"zstd does not decode to {len(out)} bytes")
