"""Eviction of the least recently used block: order, and blocks that cannot be evicted."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from persistkv.base import OffloadKey
from persistkv.cpu.policies import LRUCachePolicy

KEYS = [OffloadKey(bytes([number])) for number in range(8)]


def test_evict_prefix_is_evicted_last() -> None:
    policy = LRUCachePolicy(3, [0, 0, 0])
    policy.insert(KEYS[:3], [0, 1, 2])
    assert policy.evict(4) == [(KEYS[2], 2), (KEYS[1], 1), (KEYS[0], 0)]


def test_evict_released_blocks_keep_their_order() -> None:
    refs = [0, 1, 1, 0]
    policy = LRUCachePolicy(4, refs)
    policy.insert(KEYS[3::-1], [3, 2, 1, 0])  # coldest first: 0, 1, 2, 3
    assert policy.evict(2) == [(KEYS[0], 0), (KEYS[3], 3)]  # 1 and 2 are parked
    policy.insert([KEYS[4]], [0])
    refs[2] = 0
    policy.release([KEYS[2]])
    refs[1] = 0
    policy.release([KEYS[1]])
    assert policy.evict(3) == [(KEYS[1], 1), (KEYS[2], 2), (KEYS[4], 0)]


def test_release_block_of_two_jobs_stays_protected_until_last() -> None:
    refs = [2, 0]
    policy = LRUCachePolicy(2, refs)
    policy.insert(KEYS[1::-1], [1, 0])
    assert policy.evict(2) == [(KEYS[1], 1)]
    refs[0] = 1
    policy.release([KEYS[0]])
    assert policy.evict(1) == []
    refs[0] = 0
    policy.release([KEYS[0]])
    assert policy.evict(1) == [(KEYS[0], 0)]


def test_evict_protected_blocks_are_skipped_only_once() -> None:
    class CountingRefs(list[int]):
        reads = 0

        def __getitem__(self, row):  # type: ignore[no-untyped-def]
            type(self).reads += 1
            return super().__getitem__(row)

    refs = CountingRefs([1] * 1000 + [0] * 100)
    policy = LRUCachePolicy(1100, refs)
    for row in range(1100):
        policy.insert([OffloadKey(row.to_bytes(4, "big"))], [row])
    for _ in range(100):
        assert len(policy.evict(1)) == 1
    assert CountingRefs.reads == 1100


@given(
    st.lists(
        st.one_of(
            st.tuples(st.just("use"), st.integers(0, 7)),
            st.tuples(st.just("discard"), st.integers(0, 7)),
            st.tuples(st.just("protect"), st.integers(0, 7)),
            st.tuples(st.just("release"), st.integers(0, 7)),
            st.tuples(st.just("evict"), st.just(0)),
        ),
        max_size=60,
    )
)
def test_lru_policy_random_steps_match_list_model(steps: list[tuple[str, int]]) -> None:
    refs = [0] * 8
    policy = LRUCachePolicy(8, refs)
    model: list[int] = []  # coldest first
    for step, number in steps:
        key = KEYS[number]
        if step == "use":
            if number in model:
                policy.touch([key])
                model.remove(number)
            else:
                policy.insert([key], [number])
            model.append(number)
        elif step == "discard":
            assert policy.discard(key) == (number if number in model else None)
            model = [other for other in model if other != number]
        elif step == "protect":
            refs[number] += 1
        elif step == "release" and refs[number]:
            refs[number] -= 1
            if not refs[number]:
                policy.release([key])
        elif step == "evict":
            expected = next((other for other in model if not refs[other]), None)
            assert policy.evict(1) == (
                [] if expected is None else [(KEYS[expected], expected)]
            )
            model = [other for other in model if other != expected]
        assert len(policy) == len(model)
        assert all((KEYS[other] in policy) == (other in model) for other in range(8))
