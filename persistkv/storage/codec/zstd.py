"""General compression."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import zstandard

from persistkv.errors import ConfigurationError, CorruptPackError
from persistkv.storage.codec.base import Buffer, Codec

_LEVELS = "1 to 19"
_SMALLEST_WINDOW = 1 << 10  # 1 KiB: no Zstandard frame has a smaller one


@dataclass(frozen=True)
class ZstdCodec(Codec):
    """Zstandard, one frame of its own format per frame of ours."""

    name: ClassVar[str] = "zstd"
    level: int = 1
    """1 (fast) to 19 (small); 1 because KV bytes gain little beyond it."""

    def __post_init__(self) -> None:
        if not 1 <= self.level <= 19:
            raise ConfigurationError("codec level", self.level, _LEVELS)

    @classmethod
    def parse(cls, argument: str) -> ZstdCodec:
        """The level, or nothing for the default.

        :raises ConfigurationError: where it is no such number.
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
    """Fill ``out`` from one Zstandard frame, which says its length. Also what other codecs compress a part with.

    :raises CorruptPackError: where it does not decode to exactly ``len(out)`` bytes, or something else follows it.
    """
    try:
        claimed = zstandard.get_frame_parameters(stored).content_size
        if claimed != len(out):
            raise CorruptPackError("frame", f"zstd names {claimed} bytes where {len(out)} belong")
        _fill(stored, out)
    except zstandard.ZstdError as error:
        raise CorruptPackError("frame", f"zstd: {error}") from None


def _fill(stored: Buffer, out: memoryview) -> None:
    # A window beyond the content is only claimed, and would be allocated.
    window = max(_SMALLEST_WINDOW, 1 << (len(out) - 1).bit_length())
    decompressor = zstandard.ZstdDecompressor(max_window_size=window)
    filled = 0
    with decompressor.stream_reader(stored, read_across_frames=True) as reader:
        while filled < len(out) and (count := reader.readinto(out[filled:])):
            filled += count
        if filled != len(out) or reader.read(1):
            raise CorruptPackError("frame", f"zstd does not decode to {len(out)} bytes")
