"""The identity of an engine's blocks: all that must match for their bytes to be valid."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec

from persistkv.errors import ConfigurationError, MissingOptionError
from persistkv.storage.identity import MODEL_NAME, Identity, fingerprint_checkpoint

IDENTITY_VERSION = 1

_REQUIRED = ("engine", "release", "weights", "dtype", "layout", "rank")
"""Fields that must not be empty."""


class BlockIdentity(msgspec.Struct, frozen=True, kw_only=True):
    """Properties of the blocks of an engine. Engines with equal properties share blocks; a
    difference in any field except ``model_name`` makes all blocks misses.

    :raises ConfigurationError: at construction, if a property is empty; the error names it.
    """

    model_name: str
    """Name or path of the model. It is shown to people and need not match."""
    weights: str
    """Fingerprint of the weights, as ``weights_of`` returns it, or a name that changes whenever the
    weights change."""
    engine: str
    """Name of the engine, such as ``sglang``."""
    release: str
    """Release of the engine: the order of bytes in its blocks may change without notice."""
    dtype: str
    """Type of the numbers in a block, such as ``bfloat16``; ``float8_e4m3fn``, not ``uint8``."""
    shapes: tuple[tuple[int, ...], ...]
    """For each KV cache group, the shape of a block's numbers."""
    layout: str
    """Order of the numbers in a block, such as ``page_first``."""
    rank: str
    """Part of the model that the blocks belong to, such as ``tp 0 of 2, pp 0 of 1``. ``in keys`` if
    the keys of blocks contain it."""
    more: dict[str, Any] = {}
    """Further properties that must match, as JSON values: attention backend, RoPE, quantization."""

    def __post_init__(self) -> None:
        # check the types, too, because msgspec checks them only when it decodes
        for name in _REQUIRED:
            value = getattr(self, name)
            if not isinstance(value, str) or not value:
                raise MissingOptionError(
                    "the identity of blocks",
                    f"{name}: without it, wrong KV could be served",
                )
        if not self.shapes or not all(self.shapes):
            raise ConfigurationError(
                "shapes", self.shapes, "the shape of a block for each KV cache group"
            )

    def encode(self, block_bytes: Sequence[int]) -> Identity:
        """Return the identity of the namespace.

        :param block_bytes: for each KV cache group, the bytes of one block.
        :raises ConfigurationError: there is not one size per shape, or ``more`` has other values
            than those of JSON.
        """
        if len(block_bytes) != len(self.shapes):
            raise ConfigurationError(
                "block_bytes",
                list(block_bytes),
                f"one size for each of {len(self.shapes)} shapes",
            )
        fields = {
            "blocks_version": IDENTITY_VERSION,
            MODEL_NAME: self.model_name,
            "engine": {"name": self.engine, "release": self.release},
            "weights": self.weights,
            "dtype": self.dtype,
            "shapes": [list(shape) for shape in self.shapes],
            "layout": self.layout,
            "rank": self.rank,
            "block_bytes": list(block_bytes),
            "more": self.more,
        }
        return Identity.of(fields)

    @classmethod
    def decode(cls, identity: Identity) -> tuple[BlockIdentity, list[int]] | None:
        """Return the properties that ``encode`` has encoded, and the bytes of a block for each KV
        cache group; None for a namespace of another kind."""
        fields = identity.fields
        try:
            found = msgspec.convert(fields, _Encoded)
        except msgspec.ValidationError:
            return None
        if found.blocks_version != IDENTITY_VERSION:
            return None
        decoded = cls(
            model_name=found.model_name,
            weights=found.weights,
            engine=found.engine.name,
            release=found.engine.release,
            dtype=found.dtype,
            shapes=found.shapes,
            layout=found.layout,
            rank=found.rank,
            more=found.more,
        )
        return decoded, found.block_bytes


class _Engine(msgspec.Struct):
    name: str
    release: str


class _Encoded(msgspec.Struct):
    """The fields of an identity that ``BlockIdentity.encode`` returns."""

    blocks_version: int
    model_name: str
    engine: _Engine
    weights: str
    dtype: str
    shapes: tuple[tuple[int, ...], ...]
    layout: str
    rank: str
    block_bytes: list[int]
    more: dict[str, Any]


def weights_of(
    model: str | os.PathLike[str] | None,
    name: str | None = None,
) -> str:
    """Return the ``weights`` of an identity: the fingerprint of a checkpoint's files, or a name for
    them.

    :param model: directory of the checkpoint.
    :param name: a name for the weights instead, which must change whenever they change.
    :raises ConfigurationError: neither is given, or the directory has no readable weights.
    """
    if name:
        return f"name:{name}"
    if not model:
        raise MissingOptionError(
            "the identity of blocks",
            "model_path, the directory of the model's checkpoint, or weights, a name that "
            "changes whenever the weights change",
        )
    return fingerprint_checkpoint(Path(model).expanduser())
