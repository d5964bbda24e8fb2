"""Codecs: lossless transformations of one frame's bytes, each frame on its own.

Those that rest on Zstandard and NumPy are imported when somebody asks for one: commands that only look at what a store
holds decode nothing, and NumPy would be most of their start.
"""

from typing import TYPE_CHECKING

from persistkv.storage.codec.base import Buffer, Codec, CodecPolicy
from persistkv.storage.codec.raw import RawCodec
from persistkv.storage.codec.text import POLICIES, join_codecs, parse_codec, policy_class, split_codecs, stored_codec

if TYPE_CHECKING:
    from persistkv.storage.codec.auto import AutoCodec
    from persistkv.storage.codec.planes import PlanesCodec
    from persistkv.storage.codec.zstd import ZstdCodec

__all__ = [
    "AutoCodec",
    "Buffer",
    "Codec",
    "CodecPolicy",
    "PlanesCodec",
    "RawCodec",
    "ZstdCodec",
    "join_codecs",
    "parse_codec",
    "split_codecs",
    "stored_codec",
]


def __getattr__(name: str) -> object:
    for codec, policy in POLICIES.items():
        if policy == name:
            return policy_class(codec)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
