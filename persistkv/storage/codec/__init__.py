"""Codecs: lossless transformations of one frame's bytes, each frame on its own."""

from persistkv.storage.codec.auto import AutoCodec
from persistkv.storage.codec.base import Buffer, Codec, CodecPolicy
from persistkv.storage.codec.planes import PlanesCodec
from persistkv.storage.codec.raw import RawCodec
from persistkv.storage.codec.text import join_codecs, parse_codec, split_codecs, stored_codec
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
