from __future__ import annotations

import random
from collections.abc import Callable

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from persistkv.errors import CorruptPackError
from persistkv.storage.format.pack import MAX_KEY_BYTES, PackedKeys


@given(st.lists(st.binary(min_size=1, max_size=80), max_size=60))
def test_packed_keys_unpack_returns_same_keys(keys: list[bytes]) -> None:
    packed = PackedKeys.of(keys)
    assert packed.unpack() == keys
    assert len(packed) == len(keys)
    assert (
        msgspec.msgpack.decode(msgspec.msgpack.encode(packed), type=PackedKeys)
        == packed
    )


@given(st.lists(st.binary(min_size=36, max_size=36), min_size=1, max_size=60))
def test_packed_keys_equal_lengths_are_not_stored(keys: list[bytes]) -> None:
    packed = PackedKeys.of(keys)
    assert (packed.key_length, packed.lengths, packed.data) == (36, b"", b"".join(keys))


@pytest.mark.parametrize("count", [1, 512])
@pytest.mark.parametrize("length", [1, 36, 37])
def test_packed_keys_many_of_one_length_round_trip(count: int, length: int) -> None:
    rng = random.Random(count)
    keys = [rng.randbytes(length) for _ in range(count)]
    assert PackedKeys.of(keys).unpack() == keys


def test_packed_keys_trailing_zeros_are_kept() -> None:
    keys = [bytes(36), b"\1" + bytes(35)]
    assert PackedKeys.of(keys).unpack() == keys


@pytest.mark.parametrize("keys", [[b""], [b"a", b""], [bytes(MAX_KEY_BYTES + 1)]])
def test_packed_keys_empty_or_too_long_key_raises(keys: list[bytes]) -> None:
    with pytest.raises(ValueError, match="1 to 65535 are possible"):
        PackedKeys.of(keys)


def test_packed_keys_longest_key_round_trips() -> None:
    keys = [bytes(MAX_KEY_BYTES), b"x"]
    assert PackedKeys.of(keys).unpack() == keys


@pytest.mark.parametrize(
    "read",
    [
        PackedKeys.unpack,
        lambda packed: PackedKeys.unpack_all([packed]),
        lambda packed: packed.fingerprints,
        lambda packed: packed.distinct,
    ],
    ids=["unpack", "unpack_all", "fingerprints", "distinct"],
)
@pytest.mark.parametrize(
    ("packed", "field"),
    [
        (PackedKeys(bytes(7), 2), "keys"),
        (PackedKeys(bytes(8), -2), "keys"),
        (PackedKeys(bytes(3), 0, b"\1"), "key lengths"),
        (PackedKeys(bytes(3), 0, b"\1\0\1\0"), "key lengths"),
        (PackedKeys(bytes(3), 0, b""), "key lengths"),
        (PackedKeys(bytes(3), 0, b"\3\0\0\0"), "key lengths"),
    ],
)
def test_packed_keys_inconsistent_lengths_raise_corrupt(
    packed: PackedKeys,
    field: str,
    read: Callable[[PackedKeys], object],
) -> None:
    with pytest.raises(CorruptPackError) as caught:
        read(packed)
    assert caught.value.field == field
