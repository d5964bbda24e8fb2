from __future__ import annotations

import hashlib

from persistkv.base import get_offload_block_hash, get_offload_group_idx
from persistkv.integrations.transformers.hashing import BlockHashChain, offload_keys


def hashes(tokens, block_size=4, salt=None):
    chain = BlockHashChain(block_size, salt)
    chain.extend(tokens)
    return chain.hashes


def test_a_hash_stands_for_all_tokens_up_to_its_end():
    first, second = hashes(list(range(12))), hashes([99, *range(1, 12)])
    assert len(set(first) | set(second)) == 6
    assert hashes([*range(8), 0, 0, 0, 0])[:2] == first[:2]


def test_growth_in_pieces_is_growth_at_once():
    chain = BlockHashChain(4)
    new = [chain.extend(piece) for piece in ([1, 2, 3], [4, 5], [6, 7, 8, 9, 10, 11, 12], [])]
    assert [len(block) for block in new] == [0, 1, 2, 0]
    assert chain.hashes == hashes(range(1, 13))


def test_is_what_the_identity_says():
    root = hashlib.sha256(b"persistkv block chain 1\n").digest()
    tokens = b"".join(token.to_bytes(4, "little") for token in (1, 2, 70_000, 4))
    assert hashes([1, 2, 70_000, 4]) == [hashlib.sha256(root + tokens).digest()]


def test_salts_share_nothing():
    tokens = list(range(8))
    found = [hashes(tokens, salt=salt) for salt in (None, "", "a", "b")]
    assert len({block for chain in found for block in chain}) == 8


def test_keys_carry_hash_and_group():
    (block_hash,) = hashes([1, 2, 3, 4])
    (key,) = offload_keys([block_hash], group_idx=3)
    assert (get_offload_block_hash(key), get_offload_group_idx(key)) == (block_hash, 3)
