"""Other batch shapes and thread counts change numbers by rounding only. Such releases must be
adopted."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pytest
import torch

from persistkv.storage.identity.verdict import read_verdict
from persistkv.testing.memory import MemoryBackend
from tests.storage.identity.releases import (
    ModelOptions,
    Release,
    compute,
    identity,
    prompt,
)

PROMPTS = [prompt(number) for number in range(2)]
NUMBERS = [
    ("float32", "float32"),
    ("bfloat16", "bfloat16"),
    ("float32", "float16"),
    ("bfloat16", "float8_e4m3fn"),
    ("bfloat16", "float8_e5m2"),
]
"""Dtypes of the computation and of the KV cache."""


@pytest.fixture
def threads() -> Iterator[None]:
    """Restore the number of threads of torch after the test."""
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


def check(runs: int, seed: int = 0) -> None:
    """Compare two releases ``runs`` times, with other batch shapes and thread counts; all must be
    adopted."""
    random = np.random.default_rng(seed)
    verdicts: list[tuple[int, str | None]] = []
    for number in range(runs):
        computes, dtype = NUMBERS[number % len(NUMBERS)]
        options: ModelOptions = {
            "dtype": computes,
            "seed": int(random.integers(3)),
            "deviation": float(random.choice([0.02, 0.06])),
        }
        backend = MemoryBackend()
        for release in ("1", "2"):
            torch.set_num_threads(int(random.integers(1, 3)))
            engine = Release(backend, release, dtype)
            for tokens in PROMPTS:
                pieces = random.integers(1, 65, 3).tolist()
                others = [
                    prompt(int(random.integers(10, 99)))
                    for _ in range(random.integers(3))
                ]
                engine.run(
                    tokens, compute(tokens, pieces=pieces, companions=others, **options)
                )
            engine.end()
        verdict = read_verdict(backend, identity("2").digest, identity("1").digest)
        verdicts.append((number, None if verdict is None else verdict.verdict))
        backend.close()
    assert verdicts == [(number, "adopted") for number in range(runs)]


@pytest.mark.usefixtures("threads")
def test_canary_rounding_of_other_batches_and_threads_is_adopted() -> None:
    check(5)


@pytest.mark.slow
@pytest.mark.usefixtures("threads")
@pytest.mark.parametrize("seed", range(1, 6))
def test_canary_hundred_runs_of_other_batches_and_threads_are_adopted(
    seed: int,
) -> None:
    check(20, seed)
