"""LMCache's keys and layouts as keys and identities of a block store."""

from __future__ import annotations

import math
import struct
from collections.abc import Sequence
from typing import Any, NamedTuple

_HEAD = struct.Struct(">BQI")  # length of the hash, rank, object group


class ObjectLayout(NamedTuple):
    """Shape and type of the numbers of an object. LMCache has them in its objects, and not in its
    keys."""

    shapes: tuple[tuple[int, ...], ...]
    dtypes: tuple[str, ...]
    num_bytes: int

    @classmethod
    def of_object(cls, memory: Any) -> ObjectLayout:
        """Return the layout of LMCache's ``MemoryObj``."""
        metadata = memory.metadata
        # objects of one array have no lists
        shapes = metadata.shapes or [memory.get_shape()]
        dtypes = metadata.dtypes or [memory.get_dtype()]
        return cls(_shapes(shapes), tuple(map(str, dtypes)), memory.get_size())

    @classmethod
    def of_description(cls, description: Any) -> ObjectLayout | None:
        """Return the layout of LMCache's ``MemoryLayoutDesc``; None if it has no shapes."""
        shapes, dtypes = description.shapes, description.dtypes
        if not shapes:
            return None
        num_bytes = 0
        for shape, dtype in zip(shapes, dtypes, strict=True):
            num_bytes += math.prod(shape) * dtype.itemsize
        return cls(_shapes(shapes), tuple(map(str, dtypes)), num_bytes)


def _shapes(shapes: Sequence[Sequence[int]]) -> tuple[tuple[int, ...], ...]:
    return tuple(tuple(map(int, shape)) for shape in shapes)


class PlainKey(NamedTuple):
    """Fields of LMCache's ``ObjectKey`` that a namespace does not determine."""

    chunk_hash: bytes
    kv_rank: int
    object_group_id: int
    cache_salt: str

    def encode(self) -> bytes:
        """Return the key of the block. Different fields have different keys: the rank and the
        tenant are never mixed."""
        head = _HEAD.pack(len(self.chunk_hash), self.kv_rank, self.object_group_id)
        return head + self.chunk_hash + self.cache_salt.encode()

    @classmethod
    def decode(cls, key: bytes) -> PlainKey:
        """Return the fields of an encoded key."""
        length, kv_rank, group = _HEAD.unpack_from(key)
        salt_start = _HEAD.size + length
        salt = key[salt_start:].decode()
        return cls(key[_HEAD.size : salt_start], kv_rank, group, salt)


def encode_key(key: Any) -> bytes:
    """Return the block store's key of LMCache's ``ObjectKey``."""
    plain = PlainKey(key.chunk_hash, key.kv_rank, key.object_group_id, key.cache_salt)
    return plain.encode()


def salt_of(key: bytes) -> str:
    """Return the tenant of an encoded key: LMCache's ``cache_salt``."""
    return PlainKey.decode(key).cache_salt
