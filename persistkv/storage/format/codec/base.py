"""Interface of codecs."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import ClassVar

Buffer = bytes | bytearray | memoryview
"""Contiguous bytes."""


class Codec(ABC):
    """Immutable, thread-safe codec with validated parameters. Every pack contains the text form of its codec."""

    name: ClassVar[str]
    identity: ClassVar[bool] = False
    """Whether encoded bytes equal the raw bytes; callers then skip ``encode`` and need not gather the bytes."""

    @classmethod
    @abstractmethod
    def parse(cls, argument: str) -> Codec:
        """Return the codec with the argument that follows its name in a text; empty if there is no argument.

        :raises ConfigurationError: the codec does not take this argument.
        """

    @abstractmethod
    def __str__(self) -> str:
        """Return the text form, from which ``parse_codec`` makes an equal codec."""

    @abstractmethod
    def encode(self, raw: Buffer) -> Buffer:
        """Return the encoded bytes. If they are not shorter than ``raw``, the pack stores ``raw`` instead."""

    @abstractmethod
    def decode_into(self, stored: Buffer, out: memoryview) -> None:
        """Decode stored bytes and fill ``out`` exactly.

        Memory use depends on ``len(out)``, never on a length that the stored bytes claim.

        :raises CorruptPackError: the stored bytes do not decode to exactly ``len(out)`` bytes. The content of ``out``
            is then undefined.
        """
