"""Codecs by their text forms: what a user asks for, and what stands in a pack."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from importlib import import_module
from types import MappingProxyType

from persistkv.errors import ConfigurationError, CorruptPackError
from persistkv.storage.codec.base import Codec, CodecPolicy
from persistkv.storage.codec.raw import RawCodec

POLICIES: Mapping[str, str] = MappingProxyType(
    {"raw": "RawCodec", "zstd": "ZstdCodec", "planes": "PlanesCodec", "auto": "AutoCodec"}
)
"""Class of each, in the module of the codec's name. See ``policy_class``."""
_SEPARATOR = ","


def parse_codec(text: str) -> CodecPolicy:
    """What a text such as ``raw``, ``zstd:3``, ``planes`` or ``auto`` asks for.

    :raises ConfigurationError: naming the codecs that exist.
    """
    name, _, argument = text.partition(":")
    if name not in POLICIES:
        expected = f"one of {', '.join(POLICIES)} (zstd:LEVEL sets a level, planes:WIDTH the bytes of a value)"
        raise ConfigurationError("codec", text, expected)
    return policy_class(name).parse(argument)


def policy_class(name: str) -> type[CodecPolicy]:
    """The class of a codec that stands in ``POLICIES``; imports its module."""
    found: type[CodecPolicy] = getattr(import_module(f"{__package__}.{name}"), POLICIES[name])
    return found


def join_codecs(codecs: Sequence[Codec]) -> str:
    """The codecs of a pack as they stand in its table."""
    return _SEPARATOR.join(map(str, codecs))


def split_codecs(text: str) -> list[str]:
    """The texts that ``join_codecs`` joined, unchecked."""
    return text.split(_SEPARATOR) if text else []


def stored_codec(text: str, number: int) -> Codec:
    """The codec that wrote a frame: the one of this number in a pack's text, counted from 1; 0 is ``raw``.

    :raises CorruptPackError: where there is none, or this release does not know it.
    """
    if not number:
        return RawCodec()
    names = split_codecs(text)
    if not 1 <= number <= len(names):
        raise CorruptPackError("frame codec", f"{number} of the {len(names)} in {text!r}")
    try:
        codec = parse_codec(names[number - 1])
    except ConfigurationError as error:
        raise CorruptPackError("codec", str(error)) from None
    if not isinstance(codec, Codec):
        raise CorruptPackError("codec", f"{names[number - 1]!r} is none that frames are written with")
    return codec
