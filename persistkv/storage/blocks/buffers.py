"""Memory of callers: regions of blocks, and copies of them."""

from __future__ import annotations

import mmap
import threading
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, TypeAlias

import numpy as np
import numpy.typing as npt

from persistkv.memory.pool import BufferPool, split
from persistkv.memory.scattered import Regions

if TYPE_CHECKING:
    from typing_extensions import Buffer

Memory: TypeAlias = "Buffer | npt.NDArray[Any]"
"""Contiguous bytes."""
Block: TypeAlias = "Memory | Sequence[Memory]"
"""Memory of one block: contiguous bytes, or regions in order, whose lengths add up to a block."""


def regions_of(
    blocks: Sequence[Block], block_bytes: int, *, writable: bool = False
) -> list[list[memoryview]]:
    """Return the regions of each block.

    :raises ValueError: a block has another size, is not contiguous, or is read-only and must be
        ``writable``.
    """
    found: list[list[memoryview]] = []
    for block in blocks:
        if isinstance(block, (list, tuple)):
            found.append([_as_bytes(part) for part in block])
        else:
            found.append([_as_bytes(block)])
    # plain loops: a job has hundreds of blocks, and each microsecond per block costs it 5 %
    for regions in found:
        num_bytes = 0
        for region in regions:
            num_bytes += region.nbytes
            if writable and region.readonly:
                raise ValueError("a block to read into is read-only")
        if num_bytes != block_bytes:
            raise ValueError(
                f"a block of {num_bytes} bytes; those of the group have {block_bytes}"
            )
    return found


def _as_bytes(part: Any) -> memoryview:
    view = part if type(part) is memoryview else memoryview(part)
    if not view.c_contiguous:
        raise ValueError("a block is no contiguous memory")
    is_plain = view.ndim == 1 and view.format == "B"
    return view if is_plain else view.cast("B")


class Copies:
    """Copies of blocks in memory of a pool. Copying releases the GIL."""

    def __init__(self, pool: BufferPool, blocks: Sequence[Regions]) -> None:
        """:raises OSError: no memory is left."""
        self._pool = pool
        self._originals = blocks
        lengths = [sum(map(len, regions)) for regions in blocks]
        self._buffer: mmap.mmap = pool.take(sum(lengths))
        self._views = split(self._buffer, lengths)

    @property
    def blocks(self) -> list[list[memoryview]]:
        """The memory of the copies."""
        return [[view] for view in self._views]

    def fill(self) -> None:
        """Copy the blocks."""
        for view, regions in zip(self._views, self._originals, strict=True):
            start = 0
            for region in regions:
                stop = start + len(region)
                _copy(region, view[start:stop])
                start = stop

    def copy_back(self, chosen: Sequence[bool]) -> None:
        """Copy some blocks to where they came from.

        :param chosen: for each block, whether to copy it.
        """
        blocks = zip(chosen, self._views, self._originals, strict=True)
        for is_chosen, view, regions in blocks:
            start = 0
            for region in regions if is_chosen else ():
                stop = start + len(region)
                _copy(view[start:stop], region)
                start = stop

    def release(self) -> None:
        """Return the memory to the pool. Nothing may use it any more."""
        self._pool.give_back(self._buffer)


def _copy(source: memoryview, target: memoryview) -> None:
    np.copyto(np.frombuffer(target, np.uint8), np.frombuffer(source, np.uint8))


class ByteCount:
    """Bytes of calls that run, up to a bound. Thread-safe."""

    def __init__(self, bound: int) -> None:
        self._bound = bound
        self._num_bytes = 0
        self._lock = threading.Lock()

    def add(self, num_bytes: int) -> bool:
        """Add bytes and return True, unless the sum would exceed the bound. The only call may."""
        with self._lock:
            if self._num_bytes and self._num_bytes + num_bytes > self._bound:
                return False
            self._num_bytes += num_bytes
            return True

    def subtract(self, num_bytes: int) -> None:
        with self._lock:
            self._num_bytes -= num_bytes
