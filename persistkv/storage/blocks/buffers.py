"""Memory of callers: regions of blocks, and a bound on their bytes."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, TypeAlias

import numpy.typing as npt

if TYPE_CHECKING:
    from typing_extensions import Buffer

Memory: TypeAlias = "Buffer | npt.NDArray[Any]"
"""Contiguous bytes."""
Block: TypeAlias = "Memory | Sequence[Memory]"
"""Memory of one block: contiguous bytes, or regions in order, whose lengths add up to a block."""


def regions_of(
    blocks: Sequence[Block],
    block_bytes: int,
    *,
    writable: bool = False,
) -> list[list[memoryview]]:
    """Return the regions of each block.

    :param block_bytes: bytes that each block must have.
    :raises ValueError: a block has another size, is not contiguous, or is read-only and must be
        ``writable``.
    """
    found: list[list[memoryview]] = []
    # use plain loops, which are fast: each further microsecond per block costs a job of hundreds of
    # blocks 5 % of its time
    for block in blocks:
        parts = block if isinstance(block, (list, tuple)) else (block,)
        regions: list[memoryview] = []
        num_bytes = 0
        for part in parts:
            region = memoryview(part)
            if region.format != "B" or region.ndim != 1 or not region.c_contiguous:
                region = _as_bytes(region)
            if writable and region.readonly:
                raise ValueError("a block to read into is read-only")
            num_bytes += region.nbytes
            regions.append(region)
        if num_bytes != block_bytes:
            raise ValueError(
                f"a block of {num_bytes} bytes; those of the group have {block_bytes}"
            )
        found.append(regions)
    return found


def _as_bytes(region: memoryview) -> memoryview:
    """Return a one-dimensional view of bytes."""
    if not region.c_contiguous:
        raise ValueError("a block is no contiguous memory")
    return region.cast("B")


class ByteCount:
    """Bytes of calls that run, up to a bound. Thread-safe."""

    def __init__(self, bound: int) -> None:
        self._bound = bound
        self._num_bytes = 0
        """Bytes of the calls that run."""
        self._lock = threading.Lock()

    def add(self, num_bytes: int) -> bool:
        """Add the bytes of a call and return True, unless the sum would exceed the bound. If no
        other call runs, a call may exceed it, because it would be refused forever otherwise."""
        with self._lock:
            total = self._num_bytes + num_bytes
            if self._num_bytes and total > self._bound:
                return False
            self._num_bytes = total
            return True

    def subtract(self, num_bytes: int) -> None:
        with self._lock:
            self._num_bytes -= num_bytes
