"""Matching: the blocks that a prefix needs of each KV cache group, and the longest prefix that all
groups can serve.

1. A full-attention group can serve a length if it has every block before it. A sliding-window group
   can serve a length if it has the blocks in the window that ends there.
2. Full-attention groups are looked up first and bound the length. Window groups are looked up from
   there downward, and only for blocks in the window of a length that the others can serve: a lookup
   may cause a promotion, so a block is looked up only if it can be needed.
3. Each block is looked up at most once.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache
from itertools import takewhile
from typing import Any, NamedTuple

from persistkv.connector.common import KVCacheGroupSpec


@dataclass(frozen=True)
class GroupGeometry:
    """Division of one KV cache group's tokens into blocks, and the blocks that a prefix of a
    request needs."""

    spec: KVCacheGroupSpec
    factor: int
    """Device blocks in an offloaded block."""

    @property
    def block_size(self) -> int:
        return self.spec.block_size

    @property
    def offloaded_tokens(self) -> int:
        return self.spec.block_size * self.factor

    def first_needed(self, num_tokens: int, start: int = 0) -> int:
        """Return the index of the first token, at least ``start``, to which the token after the
        first ``num_tokens`` tokens attends; ``num_tokens`` if it attends to no earlier one.
        """
        window = self.spec.sliding_window
        return (
            start
            if window is None
            else min(max(start, num_tokens - window + 1), num_tokens)
        )

    def device_blocks(self, num_tokens: int, start: int = 0) -> range:
        """Return the indices of the device blocks that a prefix of ``num_tokens`` needs, from token
        ``start`` on."""
        return range(
            self.first_needed(num_tokens, start) // self.block_size,
            num_tokens // self.block_size,
        )

    def offloaded_blocks(self, num_tokens: int, start: int = 0) -> range:
        """Return the indices of the offloaded blocks that a prefix needs, also in part, from token
        ``start`` on."""
        first = self.first_needed(num_tokens, start)
        if first == num_tokens:
            return range(0)
        return range(
            first // self.offloaded_tokens, -(-num_tokens // self.offloaded_tokens)
        )


class GroupBlocks(NamedTuple):
    """One KV cache group's offloaded blocks of a request, and functions that look them up."""

    geometry: GroupGeometry
    keys: Sequence[bytes]
    is_available: Callable[[Any], bool]
    """Return whether the block of a key can be loaded."""
    prefix: Callable[[Sequence[Any]], int] | None = None
    """Return how many of the keys, from the first on without a gap, have loadable blocks; faster
    than calls of ``is_available``. None: there is no such function."""


def longest_match(
    groups: Sequence[GroupBlocks], unit: int, start: int, limit: int
) -> int:
    """Return the length of the longest prefix that all groups can serve, a multiple of ``unit``
    tokens.

    :param unit: number of tokens; a multiple of the tokens in each group's offloaded block.
    :param start: number of leading tokens that the caller has already; blocks of these tokens are
        not looked up.
    :param limit: maximum length in tokens.
    :returns: tokens from the start of the context; 0 if no length above ``start`` can be served.
    """
    length = min(
        limit, *(len(group.keys) * group.geometry.offloaded_tokens for group in groups)
    )
    length -= length % unit
    for geometry, keys, is_available, prefix in groups:
        if geometry.spec.sliding_window is None:
            size = geometry.offloaded_tokens
            first = start // size
            wanted = keys[first : length // size]
            served = (
                prefix(wanted) if prefix else len(list(takewhile(is_available, wanted)))
            )
            length = min(length, (first + served) * size)
            length -= length % unit
    windows = [
        group for group in groups if group.geometry.spec.sliding_window is not None
    ]
    searches, settled = [_window_search(group, unit, start) for group in windows], 0
    while settled < len(searches):
        for longest in searches:
            served = longest(length)
            settled = settled + 1 if served == length else 1
            length = served
    return length if length > start else 0


def longest_that_fits(
    geometries: Sequence[GroupGeometry],
    unit: int,
    start: int,
    limit: int,
    max_blocks: int,
) -> int:
    """Return the longest prefix of up to ``limit`` tokens that needs at most ``max_blocks``
    offloaded blocks, of all groups together, from token ``start`` on: a multiple of ``unit``;
    ``start`` rounded down to one if no longer one fits.
    """

    def num_blocks(units: int) -> int:
        return sum(
            len(geometry.offloaded_blocks(units * unit, start))
            for geometry in geometries
        )

    first = start // unit
    return (
        first
        + bisect_right(range(first + 1, limit // unit + 1), max_blocks, key=num_blocks)
    ) * unit


def _window_search(group: GroupBlocks, unit: int, start: int) -> Callable[[int], int]:
    """Return a function that finds the longest prefix of at most ``length`` tokens that a
    sliding-window group can serve: ``length`` or a smaller multiple of ``unit``. A prefix of up to
    ``start`` tokens needs no block.
    """
    geometry, keys, is_available, _ = group

    @cache
    def is_found(block: int) -> bool:
        return is_available(keys[block])

    def longest(length: int) -> int:
        while length > start:
            needed = reversed(geometry.offloaded_blocks(length, start))
            missing = next((block for block in needed if not is_found(block)), None)
            if missing is None:
                break
            length = missing * geometry.offloaded_tokens
            length -= length % unit
        return length

    return longest
