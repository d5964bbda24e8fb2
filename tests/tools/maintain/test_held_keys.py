from __future__ import annotations

import random

from persistkv.storage.format.pack import PackedKeys
from persistkv_tools.maintain.integrity import HeldKeys


def test_held_keys_missing_random_keys_counts_like_set() -> None:
    """Keys of all lengths, in equal and different packings; some differ only in one bit or in their
    group."""
    draw = random.Random(3)
    for _ in range(50):
        pool = [draw.randbytes(draw.choice((1, 4, 20, 35, 36))) for _ in range(200)]
        pool += [key[:-1] + bytes([key[-1] ^ 1]) for key in pool[:100]]
        held = draw.sample(pool, 150)
        keys = HeldKeys(
            PackedKeys.of(held[start : start + 10]) for start in range(0, 150, 10)
        )
        requests = [
            tuple(
                PackedKeys.of(
                    [
                        key
                        for key in draw.sample(pool if number % 3 else held, 20)
                        if len(key) == 36 or group
                    ]
                )
                for group in range(2)
            )
            for number in range(20)
        ]
        expected = [
            sum(key not in set(held) for group in one for key in group.unpack())
            for one in requests
        ]
        assert keys.missing(requests) == expected


def test_held_keys_missing_without_held_or_requested_keys_is_exact() -> None:
    assert HeldKeys([]).missing([()]) == [0]
    assert HeldKeys([]).missing(
        [(PackedKeys.of([b"one", b"two"]), PackedKeys.of([b"k"]))]
    ) == [3]
    assert HeldKeys([PackedKeys.of([b"one"])]).missing([]) == []


def test_held_keys_missing_60000_keys_is_exact() -> None:
    draw = random.Random(9)
    keys = [draw.randbytes(36) for _ in range(60_000)]
    held = HeldKeys(
        PackedKeys.of(keys[start : start + 100]) for start in range(0, 59_900, 100)
    )
    assert held.missing(
        [(PackedKeys.of(keys[:50_000]),), (PackedKeys.of(keys[50_000:]),)]
    ) == [0, 100]
