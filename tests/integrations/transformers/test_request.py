from __future__ import annotations

import hashlib
from collections.abc import Sequence
from typing import Any

import pytest
import torch

from persistkv.errors import ConfigurationError
from persistkv.integrations.transformers.request import BlockHashChain, Sampler

LOGITS = torch.tensor([0.0, 3.0, 2.9, -5.0])
DEFAULTS = {"temperature": 0.0, "top_p": 1.0, "top_k": 0, "seed": 0}


def hashes(
    tokens: Sequence[int],
    block_size: int = 4,
    salt: str | None = None,
) -> list[bytes]:
    chain = BlockHashChain(block_size, salt)
    chain.extend(tokens)
    return chain.hashes


def test_block_hash_chain_hash_depends_on_all_earlier_tokens() -> None:
    first, second = hashes(list(range(12))), hashes([99, *range(1, 12)])
    assert len(set(first) | set(second)) == 6
    assert hashes([*range(8), 0, 0, 0, 0])[:2] == first[:2]


def test_block_hash_chain_extend_in_parts_equals_extend_at_once() -> None:
    chain = BlockHashChain(4)
    new = [
        chain.extend(piece)
        for piece in ([1, 2, 3], [4, 5], [6, 7, 8, 9, 10, 11, 12], [])
    ]
    assert [len(block) for block in new] == [0, 1, 2, 0]
    assert chain.hashes == hashes(range(1, 13))


def test_block_hash_chain_first_hash_is_sha256_of_root_and_tokens() -> None:
    root = hashlib.sha256(b"persistkv block chain 1\n").digest()
    tokens = b"".join(token.to_bytes(4, "little") for token in (1, 2, 70_000, 4))
    assert hashes([1, 2, 70_000, 4]) == [hashlib.sha256(root + tokens).digest()]


def test_block_hash_chain_different_tenants_share_no_hash() -> None:
    found: set[bytes] = set()
    for tenant in (None, "a", "salt x", "a\u2028"):
        for salt in (None, "x", "a", "tenant a"):
            found.update(BlockHashChain(4, salt, tenant).extend(range(8)))
    assert len(found) == 2 * 4 * 4
    default = BlockHashChain(4, "x", "default").extend(range(8))
    assert default == BlockHashChain(4, "x").extend(range(8))


def test_block_hash_chain_different_salts_share_no_hash() -> None:
    tokens = list(range(8))
    found = [hashes(tokens, salt=salt) for salt in (None, "", "a", "b")]
    assert len({block for chain in found for block in chain}) == 8


def draw(
    count: int = 200,
    *,
    temperature: float = 0.0,
    top_p: float = 1.0,
    top_k: int = 0,
    seed: int = 0,
) -> list[int]:
    sampler = Sampler(temperature, top_p, top_k, seed)
    return [sampler.choose(LOGITS) for _ in range(count)]


def test_sampler_temperature_0_chooses_most_likely_token() -> None:
    assert set(draw()) == {1}


def test_sampler_equal_seeds_choose_equal_tokens() -> None:
    assert draw(temperature=1.0, seed=3) == draw(temperature=1.0, seed=3)
    assert draw(temperature=1.0, seed=3) != draw(temperature=1.0, seed=4)


def test_sampler_temperature_1_chooses_by_probability() -> None:
    drawn = draw(4000, temperature=1.0)
    expected = LOGITS.softmax(-1)
    for token in range(4):
        assert drawn.count(token) / 4000 == pytest.approx(
            float(expected[token]), abs=0.03
        )


def test_sampler_top_p_keeps_likely_tokens_and_at_least_one() -> None:
    assert set(draw(temperature=1.0, top_p=0.6)) == {1, 2}
    assert set(draw(temperature=1.0, top_p=1e-9)) == {1}


def test_sampler_top_k_keeps_k_most_likely_tokens() -> None:
    assert set(draw(temperature=1.0, top_k=2)) == {1, 2}
    assert set(draw(temperature=1.0, top_k=1)) == {1}


@pytest.mark.parametrize(
    "options",
    [
        {"temperature": -1.0},
        {"temperature": float("nan")},
        {"top_p": 0.0},
        {"top_p": 1.1},
        {"top_k": -1},
    ],
)
def test_sampler_invalid_option_raises_naming_it(options: dict[str, Any]) -> None:
    with pytest.raises(ConfigurationError, match=next(iter(options))):
        Sampler(**DEFAULTS | options)
