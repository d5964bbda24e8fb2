"""Comparison of two blocks of the same key: whether they hold the same KV, except for rounding.

**Measure.** A block is divided into cells: keys or values of one head of one layer, in one worker.
In each cell, each token has one vector. The error of a token is the norm (the Euclidean length) of
the difference of its two vectors, divided by the larger norm of the two. Two blocks agree if in
every cell at least 90 % of the tokens have an error of at most a limit, which depends on the dtype.

**Why rounding passes.** Batch shapes and thread counts change the order of additions. Each number
then moves by some units in the last place, and all numbers of a vector move independently, so the
vector's norm and direction hardly change. Measured with Llamas of 12 layers (prefill in one
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

**Near zero**, directions are noise. A vector with less than a tenth of its cell's median norm is
measured against that tenth instead of its own norm.
"""

from __future__ import annotations

import math
from functools import cache
from operator import itemgetter
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
# least norm that an error is divided by, as a multiple of the median norm of the cell
_LEAST_NORM = 0.1
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


def fits(
    numbers: NumberLayout,
    group: int,
    block_bytes: int,
) -> bool:
    """Return whether a group's vectors do not overlap, and end within its ``block_bytes`` at the
    start of a row."""
    layout = numbers.groups[group]
    item_bytes = _ITEM_BYTES[numbers.dtype]
    is_aligned = layout.offset % item_bytes == 0
    if layout.length <= 0 or layout.offset < 0 or not is_aligned:
        return False
    axes = [*layout.cells, *layout.tokens]
    # From the innermost axis on, the one with the smallest stride, each step must be at least as
    # long as everything within it.
    used_bytes = layout.length * item_bytes
    for count, stride in sorted(axes, key=itemgetter(1, 0)):
        if count < 1:
            return False
        # an axis of length 1 has no step, so its stride does not matter
        overlaps = count > 1 and stride < used_bytes
        is_unaligned = count > 1 and stride % item_bytes != 0
        if overlaps or is_unaligned:
            return False
        used_bytes += stride * (count - 1)
    return layout.offset + used_bytes <= block_bytes


def compare(
    numbers: NumberLayout,
    group: int,
    ours: ByteArray,
    theirs: ByteArray,
) -> Agreement:
    """Compare two blocks of one key and group, given as whole rows. ``fits`` must be True for the
    layout."""
    layout = numbers.groups[group]
    error_parts = []
    norm_parts = []
    with np.errstate(all="ignore"):  # numbers that are not finite give infinite errors
        for part in _slices(layout):
            compared = _compare_cells(ours, theirs, part, numbers.dtype)
            error_parts.append(compared.errors)
            norm_parts.append(compared.norms)
    errors = np.concatenate(error_parts)
    norms = np.concatenate(norm_parts)
    worst_cell = int(np.argmax(errors))
    error = float(errors[worst_cell])
    # ``num_tokens`` are the tokens for which this comparison is evidence. Blocks of zeros are no
    # evidence, because they always agree.
    is_mostly_zero = np.count_nonzero(norms) * 2 <= len(norms)
    num_tokens = 0
    if math.isfinite(error) and not is_mostly_zero:
        num_tokens = math.prod(count for count, _ in layout.tokens)
    limit = LIMITS[numbers.dtype]
    return Agreement(error, limit, worst_cell, num_tokens)


def _slices(layout: VectorLayout) -> list[VectorLayout]:
    """Divide a layout along the first dimension of its cells that is longer than 1, to bound a
    comparison's memory."""
    counts = [count for count, _ in layout.cells]
    long_axes = [axis for axis, count in enumerate(counts) if count > 1]
    if not long_axes:
        return [layout]
    axis = long_axes[0]
    count, stride = layout.cells[axis]
    axes_before = layout.cells[:axis]
    axes_after = layout.cells[axis + 1 :]
    other_axes = (*axes_before, *axes_after)
    slices: list[VectorLayout] = []
    for number in range(count):
        offset = layout.offset + number * stride
        part = VectorLayout(offset, other_axes, layout.tokens, layout.length)
        slices.append(part)
    return slices


class _ComparedCells(NamedTuple):
    """Result of the comparison of some cells: one number for each."""

    errors: Floats
    """Error that 90 % of the cell's tokens do not exceed; infinite if numbers are not finite."""
    norms: Floats
    """Median over the cell's tokens of the larger norm of the two vectors."""


def _compare_cells(
    ours: ByteArray,
    theirs: ByteArray,
    layout: VectorLayout,
    dtype: str,
) -> _ComparedCells:
    """Compare the cells of a layout in two rows."""
    our_items = _items(ours, layout, dtype)
    their_items = _items(theirs, layout, dtype)
    our_vectors = _decode(our_items, dtype)
    # norms and errors have the shape (cells, tokens)
    norms = _norms(our_vectors)
    if np.array_equal(our_items, their_items):
        # equal bytes have no errors: decode them once only
        errors = np.zeros_like(norms)
    else:
        their_vectors = _decode(their_items, dtype)
        norms = np.maximum(norms, _norms(their_vectors))
        errors = _relative_errors(our_vectors - their_vectors, norms)
    num_tokens = errors.shape[1]
    # in ascending order, the index of the error that 90 % of the tokens do not exceed
    place = math.ceil(_SHARE * num_tokens) - 1
    partitioned = np.partition(errors, place, axis=1)
    cell_errors = partitioned[:, place]
    # A value that is not finite fails its cell, even among the 10 % of tokens that may differ.
    is_finite = np.isfinite(norms).all(axis=1)
    cell_errors[~is_finite] = np.inf
    return _ComparedCells(cell_errors, np.median(norms, axis=1))


def _relative_errors(differences: Floats, norms: Floats) -> Floats:
    """Return the error of each token, shape (cells, tokens).

    :param differences: our vectors minus theirs, shape (cells, tokens, numbers).
    :param norms: the larger norm of the two vectors of each token.
    """
    error_norms = _norms(differences)
    # measure a vector near zero against a part of its cell's median norm, because its own direction
    # is noise
    medians = np.median(norms, axis=1, keepdims=True)
    least_norms = _LEAST_NORM * medians
    reference_norms = np.maximum(norms, least_norms)
    errors: Floats = error_norms / reference_norms
    # where both vectors are 0, the quotient is not a number, but the error is 0
    errors[error_norms == 0] = 0
    return errors


def _items(
    row: ByteArray,
    layout: VectorLayout,
    dtype: str,
) -> npt.NDArray[np.generic]:
    """Return the undecoded numbers of a row as an array of shape (cells, tokens, length)."""
    item_bytes = _ITEM_BYTES[dtype]
    # (count, stride in bytes) of the innermost axis: the numbers of a vector are consecutive
    numbers = (layout.length, item_bytes)
    axes = (*layout.cells, *layout.tokens, numbers)
    shape = [count for count, _ in axes]
    strides = [stride for _, stride in axes]
    # ``fits`` has checked that shape and strides end within the block; NumPy only needs the address
    # of the first item
    end = layout.offset + item_bytes
    first_item = row[layout.offset : end].view(f"u{item_bytes}")
    as_strided = np.lib.stride_tricks.as_strided
    items = as_strided(first_item, shape, strides, writeable=False)
    num_cells = math.prod(count for count, _ in layout.cells)
    return items.reshape(num_cells, -1, layout.length)


def _norms(vectors: Floats) -> Floats:
    """Return the norms of vectors, shape (cells, tokens), given as (cells, tokens, numbers)."""
    # Add in float64: squares of float32 and bfloat16 numbers can exceed the range of float32.
    squares = np.einsum("ctv,ctv->ct", vectors, vectors, dtype=np.float64)
    roots = np.sqrt(squares)
    norms: Floats = roots.astype(np.float32)
    return norms


def _decode(
    items: npt.NDArray[np.generic],
    dtype: str,
) -> Floats:
    """Return the values of numbers of a dtype, given as unsigned integers of the same size."""
    if dtype == "float32":
        return items.view(np.float32)
    if dtype == "float16":
        return items.view(np.float16).astype(np.float32)
    if dtype == "bfloat16":
        # the upper half of a float32
        upper_half = items.astype(np.uint32) << np.uint32(16)
        return upper_half.view(np.float32)
    values_by_code = _float8(dtype)
    values: Floats = values_by_code[items]
    return values


@cache
def _float8(dtype: str) -> Floats:
    """Return the values of the 256 numbers of an 8-bit float with a sign."""
    exponent_bits = 4 if dtype == "float8_e4m3fn" else 5
    mantissa_bits = 7 - exponent_bits
    bias = (1 << (exponent_bits - 1)) - 1
    exponent_mask = (1 << exponent_bits) - 1
    mantissa_mask = (1 << mantissa_bits) - 1
    # bits of a code: sign, exponent, mantissa
    codes = np.arange(256)
    exponent = (codes >> mantissa_bits) & exponent_mask
    mantissa = (codes & mantissa_mask) / (1 << mantissa_bits)
    subnormal = mantissa * 2.0 ** (1 - bias)
    normal = (1 + mantissa) * 2.0 ** (exponent - bias)
    values = np.where(exponent == 0, subnormal, normal)
    # e4m3fn has one NaN and no infinity; e5m2 has both, as IEEE 754
    magnitude = codes & 0x7F
    if dtype == "float8_e4m3fn":
        values[magnitude == 0x7F] = np.nan
    else:
        values[magnitude == 0x7C] = np.inf
        values[magnitude > 0x7C] = np.nan
    signs = np.where(codes & 0x80, -1, 1)
    return (values * signs).astype(np.float32)
