"""Interface of codecs."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import ClassVar

Buffer = bytes | bytearray | memoryview
"""Contiguous bytes."""


class Codec(ABC):
    """A frozen value with validated parameters, safe in threads; every pack names the text form of its codec."""

    name: ClassVar[str]
    identity: ClassVar[bool] = False
    """Whether the stored form is the raw one: ``encode`` need not be called then, nor the bytes be gathered for it."""

    @classmethod
    @abstractmethod
    def parse(cls, argument: str) -> Codec:
        """The codec with the argument that follows its name in a text, empty if there is none.

        :raises ConfigurationError: it takes no such argument.
        """

    @abstractmethod
    def __str__(self) -> str:
        """The text form: ``parse_codec`` makes an equal codec of it."""

    @abstractmethod
    def encode(self, raw: Buffer) -> Buffer:
        """The stored form. It may be longer than ``raw``; the pack then keeps ``raw`` itself."""

    @abstractmethod
    def decode_into(self, stored: Buffer, out: memoryview) -> None:
        """Fill ``out`` exactly.

        :raises CorruptPackError: where the stored form does not decode to exactly ``len(out)`` bytes; what ``out``
            holds is then undefined. Never allocates by a length that the stored form claims.
        """
