"""Request manifests: the ordered keys of one request's whole context, with a description of the
request.

The head (description: small, read for listings) and the keys (large, read for one request) are
stored separately. Both have the same format: a version byte, the xxh3-64 of the body, and the body
in msgpack.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

import msgspec
import xxhash

from persistkv.base import Priority, TtlSeconds
from persistkv.errors import CorruptPackError
from persistkv.storage.format.codec import Buffer
from persistkv.storage.format.pack import PackedKeys
from persistkv.tenants import DEFAULT_TENANT

MANIFEST_VERSION = 1
_PREFIX_BYTES = 9  # version (1) and checksum (8)

T = TypeVar("T")


class RequestManifest(msgspec.Struct, frozen=True, kw_only=True, array_like=True):
    """The head of a manifest: everything except the keys."""

    id: str
    """Unique across restarts, random unless the engine's own ids are unique."""
    created: float
    """Time of creation: seconds since the epoch, on the engine's wall clock."""
    tokens: int
    """Tokens of the context; 0 if the engine did not report them."""
    group_blocks: tuple[int, ...]
    """Number of blocks in each KV cache group."""
    raw_bytes: int
    """Bytes of the context's blocks before the codec."""
    ordered: bool = True
    """Whether the keys are in the order of the context. False: the engine did not describe the
    request, so the keys are in the order in which they arrived."""
    labels: dict[str, str] = {}
    """Names and values that the request's caller chose."""
    context: bytes = b""
    """Digest of the keys (``context_digest``), equal for requests of the same context; empty:
    unknown."""
    ttl_s: TtlSeconds | None = None
    """Seconds from the last use of the context's last block to the expiry of the context; None: no
    ttl of its own."""
    priority: Priority = "normal"
    """``low``: evicted before contexts of normal priority."""
    restored_tokens: int = 0
    """Prompt tokens that the request restored from the store."""
    tenant: str = DEFAULT_TENANT
    """Whose request it was."""

    @property
    def blocks(self) -> int:
        """Number of blocks in all groups."""
        return sum(self.group_blocks)


ManifestKeys = tuple[PackedKeys, ...]
"""Keys of a context: for each KV cache group, the keys of its blocks in order."""


def context_digest(keys: ManifestKeys) -> bytes:
    """Return the xxh3-64 (8 bytes) of, group after group, the number of keys (little-endian u32)
    and the keys."""
    digest = xxhash.xxh3_64()
    for group in keys:
        num_keys = len(group).to_bytes(4, "little")
        digest.update(num_keys)
        digest.update(group.data)
    return digest.digest()


def encode_manifest(manifest: RequestManifest) -> bytes:
    """Encode a manifest's head for storage."""
    return _seal(msgspec.msgpack.encode(manifest))


def decode_manifest(data: Buffer) -> RequestManifest:
    """Decode the stored head of a manifest.

    :raises CorruptPackError: the bytes are not a valid head.
    """
    return _open(data, _DECODE_MANIFEST)


def encode_manifest_keys(keys: ManifestKeys) -> bytes:
    """Encode a manifest's keys for storage."""
    return _seal(msgspec.msgpack.encode(keys))


def decode_manifest_keys(data: Buffer) -> ManifestKeys:
    """Decode the stored keys of a manifest.

    :raises CorruptPackError: the bytes are not valid keys.
    """
    return _open(data, _DECODE_KEYS)


# Made at import: msgspec 0.22 crashes if two threads are the first to decode a type.
_DECODE_MANIFEST = msgspec.msgpack.Decoder(RequestManifest).decode
_DECODE_KEYS = msgspec.msgpack.Decoder(ManifestKeys).decode


def _seal(body: bytes) -> bytes:
    """Return a body after its version and its checksum."""
    version = bytes((MANIFEST_VERSION,))
    checksum = xxhash.xxh3_64_digest(body)
    return version + checksum + body


def _open(
    data: Buffer,
    decode: Callable[[Buffer], T],
) -> T:
    """Verify bytes that ``_seal`` returned, and decode their body.

    :raises CorruptPackError: they are damaged, or of another version.
    """
    view = memoryview(data)
    if len(view) < _PREFIX_BYTES:
        raise CorruptPackError("manifest", f"{len(view)} bytes are too few")
    if view[0] != MANIFEST_VERSION:
        raise CorruptPackError(
            "manifest version", f"{view[0]}; this release reads {MANIFEST_VERSION}"
        )
    # the prefix is the version (one byte) and the checksum
    checksum = view[1:_PREFIX_BYTES]
    body = view[_PREFIX_BYTES:]
    # compare before msgpack decodes the bytes: damage must not decode to another valid manifest
    if xxhash.xxh3_64_digest(body) != checksum:
        raise CorruptPackError("manifest checksum", "does not match")
    try:
        return decode(body)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise CorruptPackError("manifest", str(error)) from None
