"""The longest prefix of a context that all KV cache groups can serve.

1. A full-attention group can serve a length if it has every block before it. A sliding-window group can serve a length
   if it has the blocks in the window that ends there.
2. Full-attention groups are looked up first and bound the length. Window groups are looked up from there downward, and
   only for blocks in the window of a length that the others can serve: a lookup may cause a promotion, so a block is
   looked up only if it can be needed.
3. Each block is looked up at most once.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Sequence
from itertools import takewhile
from typing import Any, NamedTuple

from persistkv.connector.request_state import GroupGeometry


class GroupBlocks(NamedTuple):
    """One group's blocks of a context."""

    geometry: GroupGeometry
    keys: Sequence[bytes]
    """Keys of the offloaded blocks, starting with the first."""
    is_there: Callable[[Any], bool]
    """Return whether the block of a key can be served."""


def longest_match(groups: Sequence[GroupBlocks], unit: int, start: int, limit: int) -> int:
    """Return the longest length, a multiple of ``unit``, that all groups can serve.

    :param unit: tokens, a multiple of each group's offloaded block.
    :param start: tokens that the caller has already: blocks that end up to there are not looked up.
    :param limit: maximum length in tokens.
    :returns: tokens from the start of the context; 0 if no length above ``start`` can be served.
    """
    length = min(limit, *(len(group.keys) * group.geometry.offloaded_tokens for group in groups))
    length -= length % unit
    for group in groups:
        if group.geometry.spec.sliding_window is None:
            length = _served_by_full_attention(group, unit, start, length)
    runs = [_WindowRun(group, unit, start) for group in groups if group.geometry.spec.sliding_window is not None]
    settled = 0
    while runs and settled < len(runs):
        for run in runs:
            served = run.longest(length)
            settled = settled + 1 if served == length else 1
            length = served
    return length if length > start else 0


def longest_that_fits(geometries: Sequence[GroupGeometry], unit: int, start: int, limit: int, max_blocks: int) -> int:
    """Return the longest length, a multiple of ``unit``, that needs at most ``max_blocks`` from ``start`` on."""

    def num_blocks(units: int) -> int:
        return sum(len(geometry.offloaded_blocks(units * unit, start)) for geometry in geometries)

    first = start // unit
    return (first + bisect_right(range(first + 1, limit // unit + 1), max_blocks, key=num_blocks)) * unit


def _served_by_full_attention(group: GroupBlocks, unit: int, start: int, length: int) -> int:
    size = group.geometry.offloaded_tokens
    first = start // size
    served = list(takewhile(group.is_there, group.keys[first : length // size]))
    length = min(length, (first + len(served)) * size)
    return length - length % unit


class _WindowRun:
    """The lowest contiguous run of a window group's blocks that were looked up and found. It only moves downward."""

    def __init__(self, group: GroupBlocks, unit: int, start: int) -> None:
        self._group = group
        self._unit = unit
        self._start = start
        self._first = len(group.keys)

    def longest(self, length: int) -> int:
        """Return the longest length up to ``length`` whose window was found. Lengths up to the start need no block."""
        geometry, keys, is_there = self._group
        while length > self._start:
            needed = geometry.offloaded_blocks(length, self._start)
            self._first = min(self._first, needed.stop)
            while self._first > needed.start and is_there(keys[self._first - 1]):
                self._first -= 1
            if self._first <= needed.start:
                break
            missing = self._first - 1
            length = missing * geometry.offloaded_tokens
            length -= length % self._unit
        return length
