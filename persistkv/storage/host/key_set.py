"""A set of keys that does not stop its owner while it changes.

Python orders a set anew as it grows, and as its keys are replaced: all of it at once, which takes 35 to 56 ms of a
million keys. These are some sets, each of the keys whose first byte has the same last bits, so that one of them is
ordered anew at a time. Keys begin with a hash; where they do not, nothing is gained, and nothing is lost.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from itertools import chain

PART_MASK = 15
"""Bits of a key's first byte that tell its part."""


class KeySet:
    """Keys of one byte or more.

    :raises IndexError: an empty key.
    """

    def __init__(self) -> None:
        self.parts: tuple[set[bytes], ...] = tuple(set() for _ in range(PART_MASK + 1))
        """Always the same sets, for who probes them: a key is in ``parts[key[0] & PART_MASK]``."""

    def __contains__(self, key: bytes) -> bool:
        return key in self.parts[key[0] & PART_MASK]

    def __len__(self) -> int:
        return sum(map(len, self.parts))

    def __iter__(self) -> Iterator[bytes]:
        return chain.from_iterable(self.parts)

    def update(self, keys: Iterable[bytes]) -> None:
        """Add keys."""
        parts = self.parts
        for key in keys:
            parts[key[0] & PART_MASK].add(key)

    def difference_update(self, keys: Iterable[bytes]) -> None:
        """Remove keys, as far as they are there."""
        parts = self.parts
        for key in keys:
            parts[key[0] & PART_MASK].discard(key)

    def intersection(self, keys: Iterable[bytes]) -> list[bytes]:
        """Those of the keys that are there, in order: without a call for each, as a step has thousands."""
        parts = self.parts
        return [key for key in keys if key in parts[key[0] & PART_MASK]]

    def difference(self, others: KeySet) -> list[bytes]:
        """Those that the other one has not."""
        return [key for mine, theirs in zip(self.parts, others.parts, strict=True) for key in mine - theirs]

    def add_all(self, others: KeySet) -> None:
        """Add another one's."""
        for mine, theirs in zip(self.parts, others.parts, strict=True):
            mine |= theirs

    def clear(self) -> None:
        """Remove all."""
        for part in self.parts:
            part.clear()
