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
from itertools import cycle, takewhile
from typing import Any, NamedTuple

from persistkv.connector.common import KVCacheGroupSpec
from persistkv.rounding import divide_up, round_down


@dataclass(frozen=True)
class GroupGeometry:
    """Division of one KV cache group's tokens into blocks, and the blocks that a prefix of a
    request needs."""

    spec: KVCacheGroupSpec
    block_size_factor: int
    """Device blocks in an offloaded block."""

    @property
    def block_size(self) -> int:
        """Tokens in a device block."""
        return self.spec.block_size

    @property
    def offloaded_tokens(self) -> int:
        """Tokens in an offloaded block."""
        return self.spec.block_size * self.block_size_factor

    def first_needed_token(self, num_tokens: int, start: int = 0) -> int:
        """Return the index of the first token, at least ``start``, to which the token after the
        first ``num_tokens`` tokens attends; ``num_tokens`` if it attends to no earlier one.
        """
        window = self.spec.sliding_window
        if window is None:
            return start
        # the window includes the token itself, at position ``num_tokens``
        window_start = num_tokens - window + 1
        first = max(start, window_start)
        return min(first, num_tokens)

    def device_blocks(self, num_tokens: int, start: int = 0) -> range:
        """Return the indices of the device blocks that a prefix of ``num_tokens`` needs, from token
        ``start`` on."""
        first = self.first_needed_token(num_tokens, start)
        return range(first // self.block_size, num_tokens // self.block_size)

    def offloaded_blocks(self, num_tokens: int, start: int = 0) -> range:
        """Return the indices of the offloaded blocks that a prefix of ``num_tokens`` needs, from
        token ``start`` on. It may need only a part of the first and of the last one."""
        first = self.first_needed_token(num_tokens, start)
        # No token is needed. The range below would hold the block in which the prefix ends.
        if first == num_tokens:
            return range(0)
        stop = divide_up(num_tokens, self.offloaded_tokens)
        return range(first // self.offloaded_tokens, stop)


class GroupBlocks(NamedTuple):
    """One KV cache group's offloaded blocks of a request, and functions that look them up."""

    geometry: GroupGeometry
    keys: Sequence[bytes]
    """Keys of all offloaded blocks of the request, from its first token on."""
    is_available: Callable[[Any], bool]
    """Return whether the block of a key can be loaded."""
    prefix: Callable[[Sequence[Any]], int] | None = None
    """Return how many of the keys, from the first on without a gap, have loadable blocks; faster
    than calls of ``is_available``. None: there is no such function."""


def longest_match(
    groups: Sequence[GroupBlocks],
    unit: int,
    start: int,
    limit: int,
) -> int:
    """Return the length of the longest prefix that all groups can serve, a multiple of ``unit``
    tokens.

    :param unit: number of tokens; a multiple of the tokens in each group's offloaded block.
    :param start: number of leading tokens that the caller has already; blocks of these tokens are
        not looked up.
    :param limit: maximum length in tokens.
    :returns: tokens from the start of the context; 0 if no length above ``start`` can be served.
    """
    length = limit
    for group in groups:
        length = min(length, len(group.keys) * group.geometry.offloaded_tokens)
    length = round_down(length, unit)
    # Searches of the windows. They run last, because they begin at the length that the
    # full-attention groups leave.
    searches = []
    for group in groups:
        if group.geometry.spec.sliding_window is None:
            # match it at once, because its length bounds the lookups of all later groups
            served = _full_attention_match(group, start, length)
            length = round_down(min(length, served), unit)
        else:
            searches.append(_window_search(group, unit, start))
    length = _agreed_length(searches, length)
    return length if length > start else 0


def _full_attention_match(
    group: GroupBlocks,
    start: int,
    limit: int,
) -> int:
    """Return the length up to which a full-attention group has all blocks from token ``start``
    on."""
    size = group.geometry.offloaded_tokens
    first = start // size
    wanted = group.keys[first : limit // size]
    if group.prefix is not None:
        num_served = group.prefix(wanted)
    else:
        num_served = len(list(takewhile(group.is_available, wanted)))
    return (first + num_served) * size


def _agreed_length(
    searches: Sequence[Callable[[int], int]],
    length: int,
) -> int:
    """Return the longest prefix of at most ``length`` tokens that all window groups can serve.

    A group that cannot serve a length shortens it for all others, which may have accepted the
    longer one. The search ends when all groups, one after the other, have accepted the same length.

    :param searches: for each window group, a function that returns the longest prefix, of at most
        so many tokens, that it can serve.
    """
    num_accepted = 0  # number of groups that can serve ``length``
    # without window groups, there is no iteration
    for longest in cycle(searches):
        served = longest(length)
        # the match is shorter: ask the other groups again
        if served < length:
            length = served
            num_accepted = 0
        num_accepted += 1
        if num_accepted == len(searches):
            break
    return length


def longest_that_fits(
    geometries: Sequence[GroupGeometry],
    unit: int,
    start: int,
    limit: int,
    max_blocks: int,
) -> int:
    """Return the length of the longest prefix, of up to ``limit`` tokens, whose blocks from token
    ``start`` on are at most ``max_blocks`` offloaded blocks of all groups together.

    The length is a multiple of ``unit`` tokens. If no prefix above ``start`` fits, it is ``start``,
    rounded down to such a multiple.
    """

    def num_blocks(units: int) -> int:
        num_tokens = units * unit
        total = 0
        for geometry in geometries:
            total += len(geometry.offloaded_blocks(num_tokens, start))
        return total

    # More tokens never need fewer blocks, so the lengths are sorted by their number of blocks.
    start_units = start // unit
    limit_units = limit // unit
    longer = range(start_units + 1, limit_units + 1)
    num_fitting = bisect_right(longer, max_blocks, key=num_blocks)
    return (start_units + num_fitting) * unit


def _window_search(
    group: GroupBlocks,
    unit: int,
    start: int,
) -> Callable[[int], int]:
    """Return a function ``longest(length)`` that finds the longest prefix, of at most ``length``
    tokens, that a sliding-window group can serve.

    The result is ``length`` or a smaller multiple of ``unit``. If it is ``start`` or less, the
    group can serve no token beyond the first ``start`` ones, which the caller has already.
    """
    geometry = group.geometry

    # a lookup may queue a promotion, so a block is looked up once although windows overlap
    @cache
    def is_found(block: int) -> bool:
        return group.is_available(group.keys[block])

    def longest(length: int) -> int:
        while length > start:
            needed = geometry.offloaded_blocks(length, start)
            # search from the end, because the last missing block decides how far the length must
            # shrink
            missing = (block for block in reversed(needed) if not is_found(block))
            last_missing = next(missing, None)
            if last_missing is None:
                break
            # Windows end at the end of a prefix. So all prefixes of up to ``length`` tokens that
            # end after this block's start need the block.
            length = round_down(last_missing * geometry.offloaded_tokens, unit)
        return length

    return longest
