"""Codecs: lossless transformations of a frame's bytes. Each frame is encoded independently.

The modules of codecs that need Zstandard and NumPy are imported on first use: importing NumPy would take most of the
startup time of commands that decode nothing.
"""

from __future__ import annotations

from collections.abc import Mapping
from importlib import import_module
from types import MappingProxyType
from typing import TYPE_CHECKING

from persistkv.errors import ConfigurationError, CorruptPackError
from persistkv.storage.format.codec.base import Buffer, Codec
from persistkv.storage.format.codec.raw import RawCodec

if TYPE_CHECKING:
    from persistkv.storage.format.codec.planes import PlanesCodec
    from persistkv.storage.format.codec.zstd import ZstdCodec

__all__ = ["Buffer", "Codec", "PlanesCodec", "RawCodec", "ZstdCodec", "parse_codec", "stored_codec"]

_CLASSES: Mapping[str, str] = MappingProxyType({"raw": "RawCodec", "zstd": "ZstdCodec", "planes": "PlanesCodec"})
"""Name of each codec's class. The module has the name of the codec."""


def parse_codec(text: str) -> Codec:
    """Return the codec for a text such as ``raw``, ``zstd:3`` or ``planes``.

    :raises ConfigurationError: no such codec, or it does not take this argument; the error names the valid values.
    """
    name, _, argument = text.partition(":")
    if name not in _CLASSES:
        expected = f"one of {', '.join(_CLASSES)} (zstd:LEVEL sets a level, planes:WIDTH the bytes of a value)"
        raise ConfigurationError("codec", text, expected)
    return _class(name).parse(argument)


def stored_codec(text: str) -> Codec:
    """Return the codec that a pack's table names.

    :raises CorruptPackError: this release does not know the codec.
    """
    try:
        return parse_codec(text)
    except ConfigurationError as error:
        raise CorruptPackError("codec", str(error)) from None


def _class(name: str) -> type[Codec]:
    found: type[Codec] = getattr(import_module(f"{__package__}.{name}"), _CLASSES[name])
    return found


def __getattr__(name: str) -> object:
    for codec, codec_class in _CLASSES.items():
        if codec_class == name:
            return _class(codec)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
