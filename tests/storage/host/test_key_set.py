"""A set in parts, beside Python's own."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from persistkv.storage.host.replica import PART_MASK, KeySet

KEYS = st.lists(st.binary(min_size=1, max_size=2), max_size=20)


@given(st.lists(st.tuples(st.sampled_from(["add", "remove", "add_all", "clear"]), KEYS), max_size=12), KEYS)
def test_it_does_what_a_set_does(steps: list[tuple[str, list[bytes]]], others: list[bytes]) -> None:
    held, expected = KeySet(), set[bytes]()
    parts = held.parts
    for step, keys in steps:
        match step:
            case "add":
                held.update(keys)
                expected.update(keys)
            case "remove":
                held.difference_update(keys)
                expected.difference_update(keys)
            case "add_all":
                held.add_all(of(keys))
                expected |= set(keys)
            case "clear":
                held.clear()
                expected.clear()
        assert sorted(held) == sorted(expected)
        assert len(held) == len(expected)
    assert held.intersection(others) == [key for key in others if key in expected]
    assert sorted(held.difference(of(others))) == sorted(expected.difference(others))
    for key in [*expected, *others]:
        assert (key in held) == (key in expected) == (key in parts[key[0] & PART_MASK])


def test_keys_that_begin_with_hashes_are_spread() -> None:
    held = of([bytes([number, 0]) for number in range(256)])
    assert {len(part) for part in held.parts} == {256 // (PART_MASK + 1)}


def of(keys: list[bytes]) -> KeySet:
    made = KeySet()
    made.update(keys)
    return made
