"""Simulated incompatible releases, which store other numbers under the same keys. None may be
adopted."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest

from persistkv.storage.identity.verdict import read_verdict
from persistkv.testing.memory import MemoryBackend
from tests.storage.identity.releases import (
    BLOCKS,
    HEADS,
    KV,
    LAYERS,
    SIZE,
    THETA,
    TOKENS,
    Release,
    compute,
    identity,
    prompt,
)

Random = np.random.Generator
DTYPES = ("float32", "bfloat16", "float16", "float8_e4m3fn", "float8_e5m2")
PROMPTS = [prompt(number) for number in range(3)]
MODELS = [0, 1, 2]


def rotated(kv: KV, change: np.ndarray) -> KV:
    """Return KV whose keys are rotated further.

    :param change: angles in radians, shape (tokens, numbers / 2): for each position and pair of
        numbers.
    """
    changed, half = kv.copy(), SIZE // 2
    first, second = kv[:, 0, :, :, :half], kv[:, 0, :, :, half:]
    changed[:, 0, :, :, :half] = first * np.cos(change) - second * np.sin(change)
    changed[:, 0, :, :, half:] = second * np.cos(change) + first * np.sin(change)
    return changed


def angles(theta: float) -> np.ndarray:
    frequencies = theta ** (-2 * np.arange(SIZE // 2) / SIZE)
    return np.arange(BLOCKS * TOKENS)[:, None] * frequencies


def permuted_heads(kv: KV, random: Random) -> KV:
    changed, layer, part = kv.copy(), random.integers(LAYERS), random.integers(2)
    changed[layer, part] = kv[layer, part, ::-1]
    return changed


def swapped_keys_and_values(kv: KV, random: Random) -> KV:
    changed, layer = kv.copy(), random.integers(LAYERS)
    changed[layer] = kv[layer, ::-1]
    return changed


def other_theta(kv: KV, random: Random) -> KV:
    theta = THETA * random.choice([0.1, 0.25, 0.5, 2, 5, 10, 50, 100])
    return rotated(kv, angles(theta) - angles(THETA))


def rope_scaled_at_depth(kv: KV, random: Random) -> KV:
    """Positions are divided by a factor, except in the first block or blocks."""
    start, factor = (
        TOKENS * random.integers(1, BLOCKS),
        random.choice([0.25, 0.5, 2, 4, 8]),
    )
    change = angles(THETA) * (1 / factor - 1)
    change[:start] = 0
    return rotated(kv, change)


def other_scale(kv: KV, random: Random) -> KV:
    changed, layer, part = kv.copy(), random.integers(LAYERS), random.integers(2)
    changed[layer, part] *= random.choice([0.25, 0.5, 0.6, 1.6, 2, 4])
    return changed


def other_weights(kv: KV, random: Random) -> KV:
    return OTHERS[random.integers(len(OTHERS))]


def swapped_layers(kv: KV, random: Random) -> KV:
    changed, pair = kv.copy(), random.choice(LAYERS, 2, replace=False)
    changed[pair] = kv[pair[::-1]]
    return changed


def layer_of_another_model(kv: KV, random: Random) -> KV:
    changed, layer = kv.copy(), random.integers(LAYERS)
    changed[layer] = OTHERS[random.integers(len(OTHERS))][layer]
    return changed


def swapped_tokens(kv: KV, random: Random) -> KV:
    """Exchange each pair of adjacent tokens."""
    changed = kv.copy()
    changed[:, :, :, 0::2], changed[:, :, :, 1::2] = (
        kv[:, :, :, 1::2],
        kv[:, :, :, 0::2],
    )
    return changed


def one_head_of_zeros(kv: KV, random: Random) -> KV:
    changed = kv.copy()
    changed[random.integers(LAYERS), random.integers(2), random.integers(HEADS)] = 0
    return changed


CHANGES: list[Callable[[KV, Random], KV]] = [
    permuted_heads,
    swapped_keys_and_values,
    other_theta,
    rope_scaled_at_depth,
    other_scale,
    other_weights,
    swapped_layers,
    layer_of_another_model,
    swapped_tokens,
    one_head_of_zeros,
]
OTHERS: list[KV] = []


@pytest.fixture(scope="module")
def contexts() -> list[list[KV]]:
    """For each model, the KV of the prompts."""
    OTHERS[:] = [compute(PROMPTS[0], seed=seed) for seed in (7, 8, 9)]
    return [[compute(tokens, seed=seed) for tokens in PROMPTS] for seed in MODELS]


def verdict_after(
    stored: list[KV],
    computed: list[KV],
    old_dtype: str,
    dtype: str,
) -> str | None:
    """Return the verdict of a release that computes contexts which an older release stored."""
    backend = MemoryBackend()
    for release, contexts, kind in (("1", stored, old_dtype), ("2", computed, dtype)):
        engine = Release(backend, release, kind)
        for tokens, kv in zip(PROMPTS, contexts, strict=True):
            engine.run(tokens, kv)
        engine.end()
    verdict = read_verdict(backend, identity("2").digest, identity("1").digest)
    backend.close()
    return None if verdict is None else verdict.verdict


def check(contexts: list[list[KV]], count: int, seed: int = 0) -> None:
    random = np.random.default_rng(seed)
    verdicts = []
    for number in range(count):
        own = contexts[random.integers(len(contexts))]
        # bfloat16 that is read as float16, or the other way round
        if number % (len(CHANGES) + 1) == len(CHANGES):
            pair = (
                ("bfloat16", "float16")
                if random.integers(2)
                else ("float16", "bfloat16")
            )
            verdicts.append(verdict_after(own, own, *pair))
            continue
        change = CHANGES[number % (len(CHANGES) + 1)]
        dtype = DTYPES[random.integers(len(DTYPES))]
        changed = [change(kv, random) for kv in own]
        verdicts.append(verdict_after(changed, own, dtype, dtype))
    assert verdicts == ["refused"] * count


def test_canary_planted_incompatibilities_are_refused(contexts: list[list[KV]]) -> None:
    check(contexts, 66)


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(1, 11))
def test_canary_thousand_planted_incompatibilities_are_refused(
    contexts: list[list[KV]],
    seed: int,
) -> None:
    check(contexts, 100, seed)


def test_canary_equal_numbers_are_adopted_in_each_dtype(
    contexts: list[list[KV]],
) -> None:
    assert [
        verdict_after(contexts[0], contexts[0], dtype, dtype) for dtype in DTYPES
    ] == ["adopted"] * len(DTYPES)
