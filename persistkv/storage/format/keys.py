"""Many keys packed into a few byte strings, which keeps messages and tables cheap for any number of keys."""

from __future__ import annotations

import struct
import sys
from collections.abc import Sequence
from functools import lru_cache
from itertools import accumulate, chain
from typing import Any

import msgspec

from persistkv.errors import CorruptPackError

MAX_KEY_BYTES = 0xFFFF
_CUT_AT_ONCE = 256  # keys per struct format: 8 KB of memory, parsed in 6 µs and then cached
_TAIL_BYTES = 8
_MANY = 32  # keys; for fewer, NumPy is slower


class PackedKeys(msgspec.Struct, frozen=True, array_like=True):
    """An ordered sequence of keys, joined."""

    data: bytes = b""
    """All keys, concatenated."""
    key_length: int = 0
    """Bytes of each key; 0 if the keys differ in length."""
    lengths: bytes = b""
    """Length of each key as little-endian u16; empty if all keys have the same length."""

    @classmethod
    def of(cls, keys: Sequence[bytes]) -> PackedKeys:
        """Pack keys.

        :raises ValueError: a key is empty or longer than 65,535 bytes.
        """
        found = set(map(len, keys))
        if found and (min(found) == 0 or max(found) > MAX_KEY_BYTES):
            raise ValueError(f"keys have {min(found)} to {max(found)} bytes; 1 to {MAX_KEY_BYTES} are possible")
        if len(found) < 2:
            return cls(b"".join(keys), max(found, default=0))
        return cls(b"".join(keys), 0, struct.pack(f"<{len(keys)}H", *map(len, keys)))

    def __len__(self) -> int:
        return len(self.data) // self.key_length if self.key_length else len(self.lengths) // 2

    def joined(self, start: int, stop: int) -> bytes:
        """Return keys ``start`` to ``stop``, concatenated.

        :raises CorruptPackError: the keys differ in length, and the lengths are malformed or do not fit the data.
        """
        if self.key_length:
            return self.data[start * self.key_length : stop * self.key_length]
        return b"".join(self.unpack()[start:stop])

    def unpack(self) -> list[bytes]:
        """Return the keys, in order.

        :raises CorruptPackError: the lengths are malformed or do not fit the data.
        """
        if self.key_length:
            if self.key_length < 0 or len(self.data) % self.key_length:
                raise CorruptPackError("keys", f"{len(self.data)} bytes are no multiple of {self.key_length}")
            return _cut(self.data, self.key_length)
        if len(self.lengths) % 2:
            raise CorruptPackError("key lengths", f"{len(self.lengths)} bytes are no run of 16-bit numbers")
        lengths = struct.unpack(f"<{len(self.lengths) // 2}H", self.lengths)
        if sum(lengths) != len(self.data):
            raise CorruptPackError(
                "key lengths", f"they add up to {sum(lengths)}, the keys have {len(self.data)} bytes"
            )
        if 0 in lengths:
            raise CorruptPackError("key lengths", "a key has no bytes")
        ends = list(accumulate(lengths))
        return [self.data[end - length : end] for end, length in zip(ends, lengths, strict=True)]

    @property
    def distinct(self) -> bool:
        """Whether no key occurs twice.

        Most keys differ in their last 8 bytes, which NumPy compares faster (2 to 15 ns per key) than a set whole keys
        (70 ns and more).

        :raises CorruptPackError: the lengths are malformed or do not fit the data.
        """
        count = len(self)
        if self.key_length >= _TAIL_BYTES and count >= _MANY and _have_distinct_tails(self.data, self.key_length):
            return True
        return len(set(self.unpack())) == count


def _have_distinct_tails(data: bytes, length: int) -> bool:
    """Return whether the last 8 bytes of all keys are distinct; False also if NumPy is not loaded, because importing it
    takes longer than it saves.
    """
    numpy: Any = sys.modules.get("numpy")
    if numpy is None:
        return False
    tails = numpy.frombuffer(data, _tail_type(length))["tail"].copy()
    tails.sort()
    return not numpy.count_nonzero(tails[1:] == tails[:-1])


@lru_cache(maxsize=16)
def _tail_type(length: int) -> Any:
    fields = {"names": ["tail"], "formats": ["<u8"], "offsets": [length - _TAIL_BYTES], "itemsize": length}
    return sys.modules["numpy"].dtype(fields)


def _cut(data: bytes, length: int) -> list[bytes]:
    """Split data into parts of one length: four times as fast as slicing (512 parts of 36 bytes in 12 µs)."""
    count = len(data) // length
    if count <= _CUT_AT_ONCE:
        return list(_parts(length, count).unpack(data))
    whole = count // _CUT_AT_ONCE * _CUT_AT_ONCE * length
    many = _parts(length, _CUT_AT_ONCE).iter_unpack(memoryview(data)[:whole])
    return [*chain.from_iterable(many), *_parts(length, count % _CUT_AT_ONCE).unpack_from(data, whole)]


@lru_cache(maxsize=256)
def _parts(length: int, count: int) -> struct.Struct:
    return struct.Struct(f"{length}s" * count)
