"""LMCache's keys and layouts as keys and identities of a block store."""

from __future__ import annotations

import math
import struct
from collections.abc import Iterable
from typing import Any, NamedTuple, TypeAlias

from lmcache.v1.distributed.api import ObjectKey

ObjectKeys: TypeAlias = list[Any]
"""LMCache's ``ObjectKey``s: hash, model, rank, object group and salt of each object."""
MemoryObjects: TypeAlias = list[Any]
"""LMCache's ``MemoryObj``s: objects in its first level."""
Shape: TypeAlias = tuple[int, ...]

_HEAD = struct.Struct(">BQI")  # length of the hash, rank, object group


class ObjectLayout(NamedTuple):
    """Shape and type of the numbers of an object. LMCache has them in its objects, and not in its
    keys."""

    shapes: tuple[Shape, ...]
    """Shape of each array of the object."""
    dtypes: tuple[str, ...]
    """Name of the dtype of each array, as torch shows it."""
    num_bytes: int
    """Bytes of the object: of all its arrays."""

    @classmethod
    def of_object(cls, memory: Any) -> ObjectLayout:
        """Return the layout of LMCache's ``MemoryObj``."""
        metadata = memory.metadata
        shapes = metadata.shapes
        dtypes = metadata.dtypes
        # LMCache may leave out these lists for an object of one array
        if not shapes:
            shapes = [memory.get_shape()]
        if not dtypes:
            dtypes = [memory.get_dtype()]
        return cls._of_arrays(shapes, dtypes, memory.get_size())

    @classmethod
    def of_description(cls, description: Any) -> ObjectLayout | None:
        """Return the layout of LMCache's ``MemoryLayoutDesc``; None if it has no shapes."""
        shapes = description.shapes
        dtypes = description.dtypes
        if not shapes:
            return None
        num_bytes = 0
        for shape, dtype in zip(shapes, dtypes, strict=True):
            num_elements = math.prod(shape)
            num_bytes += num_elements * dtype.itemsize
        return cls._of_arrays(shapes, dtypes, num_bytes)

    @classmethod
    def _of_arrays(
        cls,
        shapes: Iterable[Iterable[int]],
        dtypes: Iterable[Any],
        num_bytes: int,
    ) -> ObjectLayout:
        """Return the layout of arrays with torch's shapes and dtypes, as plain values."""
        plain_shapes: list[Shape] = []
        for shape in shapes:
            lengths = map(int, shape)
            plain_shapes.append(tuple(lengths))
        names = map(str, dtypes)
        return cls(tuple(plain_shapes), tuple(names), num_bytes)


def encode_key(key: Any) -> bytes:
    """Return the block store's key of LMCache's ``ObjectKey``, without the model's name, which is
    the namespace's. Different fields have different keys: ranks and tenants are never mixed."""
    hash_bytes = len(key.chunk_hash)
    head = _HEAD.pack(hash_bytes, key.kv_rank, key.object_group_id)
    salt = key.cache_salt.encode()
    encoded: bytes = head + key.chunk_hash + salt
    return encoded


def decode_key(model_name: str, encoded: bytes) -> Any:
    """Return the ``ObjectKey`` of a key in a namespace of a model."""
    _, kv_rank, group = _HEAD.unpack_from(encoded)
    salt_start = _salt_start(encoded)
    return ObjectKey(
        chunk_hash=encoded[_HEAD.size : salt_start],
        model_name=model_name,
        kv_rank=kv_rank,
        object_group_id=group,
        cache_salt=encoded[salt_start:].decode(),
    )


def salt_of(encoded: bytes) -> str:
    """Return the ``cache_salt`` of an encoded key."""
    salt = encoded[_salt_start(encoded) :]
    return salt.decode()


def _salt_start(encoded: bytes) -> int:
    """Return the offset of the salt in an encoded key: after the head and the hash."""
    # the first byte of the head is the length of the hash
    hash_bytes = encoded[0]
    return _HEAD.size + hash_bytes
