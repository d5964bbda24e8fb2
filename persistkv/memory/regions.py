"""Regions of a block: memory of a caller that has no rows."""

from __future__ import annotations

from collections.abc import Sequence

Regions = Sequence[memoryview]
"""The bytes of one block: contiguous views of bytes, one after the other."""

# The functions below copy with views instead of NumPy, which releases the GIL for each copy: 32 KiB
# take 3.3 instead of 4.6 µs.


def copy_in(regions: Regions, block: memoryview) -> None:
    """Copy regions into a block, which has as many bytes as all of them together."""
    start = 0
    for region in regions:
        stop = start + len(region)
        block[start:stop] = region
        start = stop


def copy_out(block: memoryview, regions: Regions) -> None:
    """Copy a block into regions, which together have as many bytes as the block."""
    start = 0
    for region in regions:
        stop = start + len(region)
        region[:] = block[start:stop]
        start = stop
