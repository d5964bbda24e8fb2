"""No transformation."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from persistkv.errors import ConfigurationError, CorruptPackError
from persistkv.storage.codec.base import Buffer, Codec


@dataclass(frozen=True)
class RawCodec(Codec):
    """Bytes as they are."""

    name: ClassVar[str] = "raw"
    identity: ClassVar[bool] = True

    @classmethod
    def parse(cls, argument: str) -> RawCodec:
        """Takes no argument.

        :raises ConfigurationError: where there is one.
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
