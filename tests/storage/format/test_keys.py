from __future__ import annotations

import random

import msgspec
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from persistkv.base import OffloadKey, get_offload_group_idx, get_offload_group_indices
from persistkv.errors import CorruptPackError
from persistkv.storage.format.pack import MAX_KEY_BYTES, PackedKeys


@given(st.lists(st.binary(min_size=1, max_size=80), max_size=60))
def test_round_trip(keys: list[bytes]) -> None:
    packed = PackedKeys.of(keys)
    assert packed.unpack() == keys
    assert len(packed) == len(keys)
    assert msgspec.msgpack.decode(msgspec.msgpack.encode(packed), type=PackedKeys) == packed


@given(st.lists(st.binary(min_size=36, max_size=36), min_size=1, max_size=60))
def test_keys_of_one_length_need_no_lengths(keys: list[bytes]) -> None:
    packed = PackedKeys.of(keys)
    assert (packed.key_length, packed.lengths, packed.data) == (36, b"", b"".join(keys))


@pytest.mark.parametrize("count", [1, 512])
@pytest.mark.parametrize("length", [1, 36, 37])
def test_many_keys_of_one_length(count: int, length: int) -> None:
    rng = random.Random(count)
    keys = [rng.randbytes(length) for _ in range(count)]
    assert PackedKeys.of(keys).unpack() == keys


def test_keys_end_in_zeros() -> None:
    keys = [bytes(36), b"\1" + bytes(35)]
    assert PackedKeys.of(keys).unpack() == keys


@pytest.mark.parametrize("keys", [[b""], [b"a", b""], [bytes(MAX_KEY_BYTES + 1)]])
def test_lengths_that_are_refused(keys: list[bytes]) -> None:
    with pytest.raises(ValueError, match="1 to 65535 are possible"):
        PackedKeys.of(keys)


def test_longest_key() -> None:
    keys = [bytes(MAX_KEY_BYTES), b"x"]
    assert PackedKeys.of(keys).unpack() == keys


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
def test_parts_that_do_not_agree(packed: PackedKeys, field: str) -> None:
    with pytest.raises(CorruptPackError) as caught:
        packed.unpack()
    assert caught.value.field == field


_OF_ONE_GROUP = st.binary(max_size=12).map(lambda some: some + bytes(3) + b"\2")


@given(st.lists(st.binary(max_size=12) | _OF_ONE_GROUP, max_size=60) | st.lists(_OF_ONE_GROUP, max_size=60))
@example([b"\2", bytes(3) + b"\1\2"])
def test_groups_of_many_keys_are_those_of_each(keys: list[OffloadKey]) -> None:
    assert get_offload_group_indices(keys) == [get_offload_group_idx(key) for key in keys]
