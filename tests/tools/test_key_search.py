from __future__ import annotations

import random

from persistkv.storage.keys import PackedKeys
from persistkv_tools.key_search import KeySearch


def slowly(wanted, among):
    found = [(number, [key for key in keys.unpack() if key in wanted]) for number, keys in enumerate(among)]
    return [(number, keys) for number, keys in found if keys]


def test_it_finds_what_looking_at_each_key_finds():
    """Keys of all lengths, some of which begin alike, also within the first eight bytes."""
    draw = random.Random(5)
    pool = [draw.randbytes(draw.choice((3, 8, 20, 36))) for _ in range(300)]
    pool += [key + b"x" for key in pool[:50]]
    for _ in range(50):
        wanted = set(draw.sample(pool, 20))
        among = []
        for _ in range(40):
            length = draw.choice((None, 3, 8, 20, 36))
            keys = [key for key in draw.sample(pool, 12) if length in (None, len(key))]
            among.append(PackedKeys.of(keys))
        assert list(KeySearch(wanted).find(among)) == slowly(wanted, among)


def test_many_are_searched_in_portions():
    draw = random.Random(7)
    keys = [draw.randbytes(36) for _ in range(40_000)]
    among = [PackedKeys.of([*keys[start : start + 100], keys[0]]) for start in range(0, len(keys), 100)]
    wanted = {keys[0], keys[39_999], keys[17_000]}
    assert list(KeySearch(wanted).find(among)) == slowly(wanted, among)


def test_nothing_among_nothing():
    assert list(KeySearch([]).find([PackedKeys.of([b"k" * 36])])) == []
    assert list(KeySearch([b"k" * 36]).find([])) == []
    assert list(KeySearch([b"k" * 36]).find([PackedKeys()])) == []
