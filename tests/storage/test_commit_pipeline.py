"""``divide`` splits the packs that wait for a commit into transactions."""

from __future__ import annotations

import pytest

from persistkv.storage.format.codec import Codec, RawCodec, ZstdCodec
from persistkv.storage.store.commit_pipeline import divide
from persistkv.testing.samples import sample_pack

PACK_BYTES = 4 * 4096


@pytest.mark.parametrize("codec", [RawCodec(), ZstdCodec()])
def test_divide_packs_are_grouped_up_to_raw_byte_limit(codec: Codec) -> None:
    packs = [sample_pack(bytes(16), seed, codec=codec) for seed in range(9)]
    transactions = divide(packs, [], 2 * PACK_BYTES)
    assert [len(one.packs) for one in transactions] == [2, 2, 2, 2, 1]
    assert [one for some in transactions for one in some.packs] == packs
