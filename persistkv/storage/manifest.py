"""Request manifests: the ordered keys of one request's whole context, with what a person wants to know of it.

The head (small, read for lists) and the keys (large, read for one request) are stored apart. Both are msgpack behind
a version byte and an xxh3-64 of what follows.
"""

from __future__ import annotations

from typing import TypeVar

import msgspec
import xxhash

from persistkv.errors import CorruptPackError
from persistkv.storage.codec import Buffer
from persistkv.storage.keys import PackedKeys

MANIFEST_VERSION = 1
_PREFIX_BYTES = 9

T = TypeVar("T")


class RequestManifest(msgspec.Struct, frozen=True, kw_only=True, array_like=True):
    """The head."""

    id: str
    """Unique over restarts: engine uuid and a sequence number."""
    created: float
    """Seconds since the epoch, by the wall clock of the engine that made it."""
    tokens: int
    """Tokens of the context; 0 where the engine did not tell."""
    group_blocks: tuple[int, ...]
    """Blocks of each KV cache group."""
    raw_bytes: int
    """Bytes of these blocks before the codec."""
    ordered: bool = True
    """False where the engine left out the description: the keys then stand in the order of arrival."""
    labels: dict[str, str] = {}

    @property
    def blocks(self) -> int:
        """Blocks of all groups."""
        return sum(self.group_blocks)


ManifestKeys = tuple[PackedKeys, ...]
"""For each KV cache group, the keys in order."""


def encode_manifest(manifest: RequestManifest) -> bytes:
    """The head at rest."""
    return _seal(msgspec.msgpack.encode(manifest))


def decode_manifest(data: Buffer) -> RequestManifest:
    """The head of its bytes at rest.

    :raises CorruptPackError: where they do not read as one.
    """
    return _open(data, RequestManifest)


def encode_manifest_keys(keys: ManifestKeys) -> bytes:
    """The keys at rest."""
    return _seal(msgspec.msgpack.encode(keys))


def decode_manifest_keys(data: Buffer) -> ManifestKeys:
    """The keys of their bytes at rest.

    :raises CorruptPackError: where they do not read as some.
    """
    return _open(data, ManifestKeys)


def _seal(body: bytes) -> bytes:
    return bytes((MANIFEST_VERSION,)) + xxhash.xxh3_64_digest(body) + body


def _open(data: Buffer, kind: type[T]) -> T:
    view = memoryview(data)
    if len(view) < _PREFIX_BYTES:
        raise CorruptPackError("manifest", f"{len(view)} bytes are too few")
    if view[0] != MANIFEST_VERSION:
        raise CorruptPackError("manifest version", f"{view[0]}; this release reads {MANIFEST_VERSION}")
    body = view[_PREFIX_BYTES:]
    if xxhash.xxh3_64_digest(body) != view[1:_PREFIX_BYTES]:
        raise CorruptPackError("manifest checksum", "does not match")
    try:
        return msgspec.msgpack.decode(body, type=kind)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise CorruptPackError("manifest", str(error)) from None
