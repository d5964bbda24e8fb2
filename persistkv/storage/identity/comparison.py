"""Comparison of two blocks of the same key: whether they hold the same KV, except for rounding.

**Measure.** A block is divided into cells: keys or values of one head of one layer, in one worker.
In each cell, each token has one vector. The error of a token is the length of the difference of its
two vectors, divided by the length of the longer one. Two blocks agree if in every cell at least 90
% of the tokens have an error of at most a limit, which depends on the dtype.

**Why rounding passes.** Batch shapes and thread counts change the order of additions. Each number
then moves by some units in the last place, and all numbers of a vector move independently, so the
vector's length and direction hardly change. Measured with Llamas of 12 layers (prefill in one
piece, in pieces of 1 to 100 tokens, in batches of 1 to 3, on 1 and 2 threads; standard deviation of
the weights 0.02, 0.06, 0.15): in the worst cell of 16 tokens, 90 % of the tokens had errors up to
1.4e-5 in float32, 4.1e-3 in float16 (0.15 excluded) and 5.6e-2 in bfloat16. Numbers that 4 layers
computed in bfloat16 and stored in float8 had errors up to 0.045 (e4m3fn) and 0.071 (e5m2). The
limits are at least twice as large. The other 10 % are tokens in which rounding was amplified (the
largest error in bfloat16 was 0.13).

**Why changes of the meaning fail.** Another order of heads or layers, keys and values swapped,
other weights or another dtype compare unrelated vectors: the error is near 1 in all tokens of at
least one cell. Another RoPE rotates all keys of a position: the error is twice the sine of half the
angle. A scale of ``s`` > 1 gives the error ``1 - 1/s``. A single wrong cell is enough to fail,
since cells are not averaged. RoPE that differs only at larger positions passes at smaller ones:
therefore callers may conclude nothing about positions beyond those compared.

**Near zero**, directions are noise. A vector shorter than a tenth of its cell's median length is
measured against that tenth instead of its own length.
"""

from __future__ import annotations

import math
from functools import cache
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from persistkv.config import NumberLayout, VectorLayout
from persistkv.memory.rows import ByteArray

Floats = npt.NDArray[np.float32]

LIMITS = {
    "float32": 1e-3,
    "float16": 2.5e-2,
    "bfloat16": 0.125,
    "float8_e4m3fn": 0.2,
    "float8_e5m2": 0.3,
}
"""For each dtype, the largest error at which a token counts as equal."""
_SHARE = 0.9  # share of a cell's tokens that must be within the limit
# shortest length that errors are relative to, in median lengths of the cell
_LEAST_LENGTH = 0.1
_ITEM_BYTES = {
    "float32": 4,
    "float16": 2,
    "bfloat16": 2,
    "float8_e4m3fn": 1,
    "float8_e5m2": 1,
}


class Agreement(NamedTuple):
    """Result of the comparison of two blocks."""

    error: float
    """Error that 90 % of the tokens of the worst cell do not exceed; infinite if numbers are not
    finite."""
    limit: float
    """Largest ``error`` at which the blocks agree."""
    cell: int
    """Index of the worst cell, in the order of ``VectorLayout.cells``."""
    tokens: int
    """Number of compared tokens; 0 if most cells are zero in both blocks, which proves nothing."""

    @property
    def agrees(self) -> bool:
        """Whether the blocks hold the same KV, except for rounding."""
        return self.error <= self.limit


def fits(numbers: NumberLayout, group: int, block_bytes: int) -> bool:
    """Return whether a group's vectors do not overlap, and end within its ``block_bytes`` at the
    start of a row."""
    layout = numbers.groups[group]
    item = _ITEM_BYTES[numbers.dtype]
    axes = sorted((stride, count) for count, stride in (*layout.cells, *layout.tokens))
    end = layout.length * item
    for stride, count in axes:
        if count < 1 or (count > 1 and (stride < end or stride % item)):
            return False
        end += stride * (count - 1)
    return (
        layout.length > 0
        and layout.offset >= 0
        and layout.offset % item == 0
        and layout.offset + end <= block_bytes
    )


def compare(
    numbers: NumberLayout, group: int, ours: ByteArray, theirs: ByteArray
) -> Agreement:
    """Compare two blocks of one key and group, given as whole rows. ``fits`` must be True for the
    layout."""
    layout, limit = numbers.groups[group], LIMITS[numbers.dtype]
    with np.errstate(all="ignore"):  # numbers that are not finite give infinite errors
        parts = [_errors(ours, theirs, part, numbers.dtype) for part in _slices(layout)]
    errors, lengths = (np.concatenate(found) for found in zip(*parts, strict=True))
    cell = int(np.argmax(errors))
    is_evidence = np.isfinite(errors[cell]) and np.count_nonzero(lengths) * 2 > len(
        lengths
    )
    tokens = math.prod(count for count, _ in layout.tokens)
    return Agreement(float(errors[cell]), limit, cell, tokens if is_evidence else 0)


def _slices(layout: VectorLayout) -> list[VectorLayout]:
    """Divide a layout along the first dimension of its cells that is longer than 1, to bound a
    comparison's memory."""
    axis = next(
        (axis for axis, (count, _) in enumerate(layout.cells) if count > 1), None
    )
    if axis is None:
        return [layout]
    count, stride = layout.cells[axis]
    rest = (
        (*layout.cells[:axis], *layout.cells[axis + 1 :]),
        layout.tokens,
        layout.length,
    )
    return [
        VectorLayout(layout.offset + number * stride, *rest) for number in range(count)
    ]


def _errors(
    ours: ByteArray, theirs: ByteArray, layout: VectorLayout, dtype: str
) -> tuple[Floats, Floats]:
    """Return for each cell the error that 90 % of its tokens do not exceed, infinite if numbers are
    not finite, and the median over its tokens of the length of the longer vector.
    """
    items = [_items(row, layout, dtype) for row in (ours, theirs)]
    own = _decode(items[0], dtype)
    lengths = _lengths(own)
    if np.array_equal(items[0], items[1]):
        errors = np.zeros_like(lengths)
    else:
        other = _decode(items[1], dtype)
        lengths = np.maximum(lengths, _lengths(other))
        difference = _lengths(own - other)
        errors = difference / np.maximum(
            lengths, _LEAST_LENGTH * np.median(lengths, axis=1, keepdims=True)
        )
        errors[difference == 0] = 0
    errors[~np.isfinite(lengths)] = np.inf
    place = int(np.ceil(_SHARE * errors.shape[1])) - 1
    worst = np.partition(errors, place, axis=1)[:, place]
    worst[~np.isfinite(lengths).all(axis=1)] = np.inf
    return worst, np.median(lengths, axis=1)


def _items(row: ByteArray, layout: VectorLayout, dtype: str) -> npt.NDArray[np.generic]:
    """Return the undecoded numbers of a row as an array of shape (cells, tokens, length)."""
    item = _ITEM_BYTES[dtype]
    axes = (*layout.cells, *layout.tokens, (layout.length, item))
    flat = row[layout.offset :].view(f"u{item}")
    strided = np.lib.stride_tricks.as_strided(
        flat[:1],
        [count for count, _ in axes],
        [stride for _, stride in axes],
        writeable=False,
    )
    return strided.reshape(
        math.prod(count for count, _ in layout.cells), -1, layout.length
    )


def _lengths(vectors: Floats) -> Floats:
    lengths: Floats = np.sqrt(
        np.einsum("ctv,ctv->ct", vectors, vectors, dtype=np.float64)
    ).astype(np.float32)
    return lengths


def _decode(items: npt.NDArray[np.generic], dtype: str) -> Floats:
    """Return the values of numbers of a dtype, given as unsigned integers of the same size."""
    if dtype == "float32":
        return items.view(np.float32)
    if dtype == "float16":
        return items.view(np.float16).astype(np.float32)
    if dtype == "bfloat16":
        return (items.astype(np.uint32) << np.uint32(16)).view(np.float32)
    values: Floats = _float8(dtype)[items]
    return values


@cache
def _float8(dtype: str) -> Floats:
    """Return the values of the 256 numbers of an 8-bit float with a sign."""
    exponent_bits, has_infinity = (4, False) if dtype == "float8_e4m3fn" else (5, True)
    codes = np.arange(256)
    mantissa_bits = 7 - exponent_bits
    exponent = (codes >> mantissa_bits) & ((1 << exponent_bits) - 1)
    mantissa = (codes & ((1 << mantissa_bits) - 1)) / (1 << mantissa_bits)
    bias = (1 << (exponent_bits - 1)) - 1
    values = np.where(
        exponent == 0,
        mantissa * 2.0 ** (1 - bias),
        (1 + mantissa) * 2.0 ** (exponent - bias),
    )
    special = codes & 0x7F
    values[special > 0x7C if has_infinity else special == 0x7F] = np.nan
    if has_infinity:
        values[special == 0x7C] = np.inf
    return (values * np.where(codes & 0x80, -1, 1)).astype(np.float32)
