"""Splitting of waiting packs into transactions."""

from __future__ import annotations

import pytest

from persistkv.storage.commit_pipeline import Outgoing, divide
from persistkv.storage.format.codec import Codec, RawCodec, ZstdCodec
from persistkv.testing.samples import sample_pack

PACK_BYTES = 4 * 4096


@pytest.mark.parametrize(
    ("codec", "lends", "expected"),
    [
        (RawCodec(), False, [2, 2, 2, 2, 1]),
        (ZstdCodec(), False, [2, 2, 2, 2, 1]),
        (RawCodec(), True, [9]),
        (ZstdCodec(), True, [9]),
    ],
)
def test_transactions_are_bounded_by_the_memory_they_take(codec: Codec, lends: bool, expected: list[int]) -> None:
    packs = [Outgoing(sample_pack(bytes(16), seed, codec=codec)) for seed in range(9)]
    transactions = divide(packs, [], 2 * PACK_BYTES, lends=lends)
    assert [len(one.packs) for one in transactions] == expected
    assert [one for some in transactions for one in some.packs] == packs


def test_a_transaction_does_not_take_for_ever() -> None:
    packs = [Outgoing(sample_pack(bytes(16), seed)) for seed in range(33)]
    assert [len(one.packs) for one in divide(packs, [], PACK_BYTES, lends=True)] == [16, 16, 1]
