"""Codec without transformation."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from persistkv.errors import ConfigurationError, CorruptPackError
from persistkv.storage.format.codec.base import Buffer, Codec


@dataclass(frozen=True)
class RawCodec(Codec):
    """Stores bytes unchanged."""

    name: ClassVar[str] = "raw"
    identity: ClassVar[bool] = True

    @classmethod
    def parse(cls, argument: str) -> RawCodec:
        """Return the codec; it takes no argument.

        :raises ConfigurationError: the argument is not empty.
        """
        if argument:
            raise ConfigurationError("codec", f"raw:{argument}", "raw, without an argument")
        return cls()

    def __str__(self) -> str:
        return self.name

    def encode(self, raw: Buffer) -> Buffer:
        return raw

    def decode_into(self, stored: Buffer, out: memoryview) -> None:
        if len(stored) != len(out):
            raise CorruptPackError("frame", f"{len(stored)} raw bytes where {len(out)} belong")
        out[:] = stored
