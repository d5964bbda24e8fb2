"""What a codec is, and what a store asks for one."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import ClassVar

Buffer = bytes | bytearray | memoryview
"""Contiguous bytes."""


class CodecPolicy(ABC):
    """What a store writes with: a codec, or something that chooses one for each KV cache group."""

    name: ClassVar[str]

    @classmethod
    @abstractmethod
    def parse(cls, argument: str) -> CodecPolicy:
        """The policy of what stands behind its name in a text, empty where nothing does.

        :raises ConfigurationError: it takes no such argument.
        """

    @abstractmethod
    def __str__(self) -> str:
        """The text that ``parse_codec`` makes this policy of."""

    @abstractmethod
    def choose(self, group: int, sample: Callable[[], Buffer]) -> Codec:
        """The codec that a pack's frames of this group are written with.

        :param sample: makes raw bytes of the pack's first frame of the group; called at most once, and the bytes are
            not used after the return.
        """


class Codec(CodecPolicy):
    """A frozen value with validated parameters, safe in threads; its text form stands in every pack that it wrote."""

    identity: ClassVar[bool] = False
    """Whether the stored form is the raw one: ``encode`` need not be called then, nor the bytes be gathered for it."""

    def choose(self, group: int, sample: Callable[[], Buffer]) -> Codec:
        """Itself, for any group; ``sample`` is not called."""
        return self

    @abstractmethod
    def encode(self, raw: Buffer) -> Buffer:
        """The stored form. It may be longer than ``raw``; the pack then keeps ``raw`` itself."""

    @abstractmethod
    def decode_into(self, stored: Buffer, out: memoryview) -> None:
        """Fill ``out`` exactly.

        :raises CorruptPackError: where the stored form does not decode to exactly ``len(out)`` bytes; what ``out``
            holds is then undefined. Never allocates by a length that the stored form claims.
        """
