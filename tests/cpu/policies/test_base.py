"""Eviction order by recency: each key keeps its place, protected or not."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from persistkv.base import OffloadKey
from persistkv.cpu.policies.base import EvictionOrder

KEYS = [OffloadKey(bytes([number])) for number in range(8)]


def test_the_first_of_a_prefix_leaves_last() -> None:
    order = EvictionOrder([0, 0, 0])
    order.append(KEYS[:3], [0, 1, 2])
    assert [order.pop_coldest() for _ in range(4)] == [(KEYS[2], 2), (KEYS[1], 1), (KEYS[0], 0), None]


def test_a_protected_key_returns_to_its_own_place() -> None:
    refs = [0, 1, 1, 0]
    order = EvictionOrder(refs)
    order.append(KEYS[3::-1], [3, 2, 1, 0])  # coldest first: 0, 1, 2, 3
    assert order.pop_coldest() == (KEYS[0], 0)
    assert order.pop_coldest() == (KEYS[3], 3)  # 1 and 2 are parked
    order.append([KEYS[4]], [0])
    refs[2] = 0
    order.release([KEYS[2]])
    refs[1] = 0
    order.release([KEYS[1]])
    assert [order.pop_coldest() for _ in range(3)] == [(KEYS[1], 1), (KEYS[2], 2), (KEYS[4], 0)]


def test_protected_keys_are_passed_over_once() -> None:
    class CountingRefs(list[int]):
        reads = 0

        def __getitem__(self, row):  # type: ignore[no-untyped-def]
            type(self).reads += 1
            return super().__getitem__(row)

    refs = CountingRefs([1] * 1000 + [0] * 100)
    order = EvictionOrder(refs)
    for row in range(1100):
        order.append([OffloadKey(row.to_bytes(4, "big"))], [row])
    for _ in range(100):
        assert order.pop_coldest() is not None
    assert CountingRefs.reads == 1100


@given(
    st.lists(
        st.one_of(
            st.tuples(st.just("use"), st.integers(0, 7)),
            st.tuples(st.just("take out"), st.integers(0, 7)),
            st.tuples(st.just("protect"), st.integers(0, 7)),
            st.tuples(st.just("release"), st.integers(0, 7)),
            st.tuples(st.just("pop"), st.just(0)),
        ),
        max_size=60,
    )
)
def test_it_equals_a_plain_list(steps: list[tuple[str, int]]) -> None:
    refs = [0] * 8
    order = EvictionOrder(refs)
    model: list[int] = []  # coldest first
    for step, number in steps:
        key = KEYS[number]
        if step == "use":
            if number in model:
                order.refresh([key])
                model.remove(number)
            else:
                order.append([key], [number])
            model.append(number)
        elif step == "take out":
            assert order.discard(key) == (number if number in model else None)
            model = [other for other in model if other != number]
        elif step == "protect":
            refs[number] += 1
        elif step == "release" and refs[number]:
            refs[number] -= 1
            if not refs[number]:
                order.release([key])
        elif step == "pop":
            expected = next((other for other in model if not refs[other]), None)
            assert order.pop_coldest() == (None if expected is None else (KEYS[expected], expected))
            model = [other for other in model if other != expected]
        assert len(order) == len(model)
        assert all((KEYS[other] in order) == (other in model) for other in range(8))
