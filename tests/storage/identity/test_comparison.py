"""``compare``: how much two blocks may differ and still agree."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import pytest
import torch

from persistkv.config import NumberLayout, VectorLayout
from persistkv.storage.identity.comparison import LIMITS, Agreement, compare, fits

CELLS, TOKENS, SIZE = 4, 20, 8
FLOAT32 = NumberLayout(
    "float32",
    (VectorLayout(0, ((CELLS, TOKENS * SIZE * 4),), ((TOKENS, SIZE * 4),), SIZE),),
)
LIMIT = LIMITS["float32"]


@dataclass
class Pair:
    """Two equal blocks of random vectors of length 1."""

    ours: npt.NDArray[np.float32]
    theirs: npt.NDArray[np.float32]

    def compare(self) -> Agreement:
        rows = [block.reshape(-1).view(np.uint8) for block in (self.ours, self.theirs)]
        return compare(FLOAT32, 0, *rows)


@pytest.fixture
def pair() -> Pair:
    block = (
        np.random.default_rng(0)
        .standard_normal((CELLS, TOKENS, SIZE))
        .astype(np.float32)
    )
    block /= np.linalg.norm(block, axis=-1, keepdims=True)
    return Pair(block, block.copy())


def test_comparison_equal_blocks_agree_without_error(pair: Pair) -> None:
    assert pair.compare() == Agreement(0.0, LIMIT, 0, TOKENS)


@pytest.mark.parametrize(("tokens", "agrees"), [(2, True), (3, False)])
def test_comparison_one_tenth_of_cell_tokens_may_differ(
    pair: Pair,
    tokens: int,
    agrees: bool,
) -> None:
    pair.theirs[2, :tokens] *= -1
    found = pair.compare()
    assert found.agrees is agrees
    assert agrees or found.cell == 2


@pytest.mark.parametrize(("factor", "agrees"), [(0.9, True), (1.1, False)])
def test_comparison_error_is_relative_to_longer_vector(
    pair: Pair,
    factor: float,
    agrees: bool,
) -> None:
    pair.theirs[1] /= 1 - factor * LIMIT
    assert pair.compare().agrees is agrees


def test_comparison_vectors_near_zero_are_measured_against_median(pair: Pair) -> None:
    pair.ours[0, ::2] *= 1e-6  # less than half of the lengths: the median stays 1
    pair.ours[0, 0] = pair.theirs[0, 0]
    pair.theirs[0, ::2] = pair.ours[0, ::2]
    pair.theirs[0, 2::2] *= -1
    assert pair.compare().agrees
    pair.ours[0, 2::2] *= 1e4
    assert not pair.compare().agrees


def test_comparison_block_with_zero_cells_agrees_but_counts_no_tokens(
    pair: Pair,
) -> None:
    pair.ours[:3] = pair.theirs[:3] = 0
    found = pair.compare()
    assert found.agrees
    assert found.tokens == 0


@pytest.mark.parametrize("value", [np.nan, np.inf, 3e38])
def test_comparison_not_finite_or_overflowing_number_differs(
    pair: Pair,
    value: float,
) -> None:
    pair.ours[3, 5] = value
    assert not pair.compare().agrees


@pytest.mark.parametrize(
    "dtype", ["float16", "bfloat16", "float8_e4m3fn", "float8_e5m2"]
)
def test_comparison_decodes_every_number_of_each_dtype(dtype: str) -> None:
    """A block of all finite numbers differs from its half by exactly a half."""
    kind = getattr(torch, dtype)
    item = kind.itemsize
    every = (
        torch.arange(256 ** min(item, 2))
        .to(torch.uint8 if item == 1 else torch.uint16)
        .view(kind)
        .float()
    )
    numbers = every[every.isfinite() & (every.abs() > 0.1) & (every.abs() < 200)]
    numbers = numbers[: len(numbers) // 8 * 8]
    vectors = len(numbers) // 8
    rows = [
        (numbers * factor).to(kind).view(torch.uint8).numpy().reshape(-1)
        for factor in (1, 0.5)
    ]
    layout = VectorLayout(0, (), ((vectors, 8 * item),), 8)
    found = compare(NumberLayout(dtype, (layout,)), 0, *rows)  # type: ignore[arg-type]
    assert found.error == pytest.approx(0.5, rel=1e-6)


@pytest.mark.parametrize(
    ("layout", "block_bytes", "is_inside"),
    [
        (VectorLayout(0, ((4, 640),), ((20, 32),), 8), 2560, True),
        (VectorLayout(0, ((4, 640),), ((20, 32),), 8), 2559, False),
        (VectorLayout(4, ((4, 640),), ((20, 32),), 8), 2560, False),
        (VectorLayout(0, ((4, 600),), ((20, 32),), 8), 2560, False),  # cells overlap
        (VectorLayout(0, ((4, 640),), ((20, 34),), 8), 4000, False),
        (VectorLayout(0, ((4, 640),), ((20, 32),), 0), 2560, False),
        (VectorLayout(0, ((4, -640),), ((20, 32),), 8), 2560, False),
    ],
)
def test_fits_accepts_only_vectors_inside_block(
    layout: VectorLayout,
    block_bytes: int,
    is_inside: bool,
) -> None:
    assert fits(NumberLayout("float32", (layout,)), 0, block_bytes) is is_inside
