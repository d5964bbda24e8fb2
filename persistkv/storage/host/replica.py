"""The engine's copy of the index, and the news of how it moved.

1. It holds a key from its ``Stored`` to its ``Removed``, and none while nothing is open.
2. A listing replaces it as a whole, when it is complete; until then it stays as it was.
3. News tells what is there in the end: a key that came and went since news was last taken only went.
4. A step's news costs what it tells, however much of what was told before nobody took: not all who poll take any. Nor
   does it pile up: of what went, as much waits as was held at most since news was last taken, and 65,536 keys; what
   went first is let go of. So whoever takes it hears of all that went at once.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Collection, Iterable, Iterator
from itertools import chain

PART_MASK = 15
"""Bits of a key's first byte that tell its part."""
_TOUCHED_A_STEP = 2_048  # keys in a step's message: some 75 KB
_MOST_TOUCHED = 65_536  # keys that wait to be said
_MOST_REMOVED = 65_536  # keys that wait to be taken, beside as many as were held


class KeySet:
    """Set of keys of one byte or more, without the long pauses of one large set.

    Python rehashes a set as it grows, and as its keys are replaced: the whole set at once, which takes 35 to 56 ms for
    a million keys. This is 16 sets, each of the keys whose first byte has the same last bits, so that one of them is
    rehashed at a time. Keys begin with a hash; other keys cost as much as in one set.

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


class Replica:
    """See the top of this file."""

    def __init__(self) -> None:
        self.held = KeySet()
        """The keys; always the same object, so that others may probe it."""
        self._listed: KeySet | None = None
        self._stored: dict[bytes, None] = {}
        """Some of what is held."""
        self._removed: deque[bytes] = deque()
        self._most_held = 0
        """Since what went was last taken."""
        self._touched: set[bytes] = set()

    def begin_listing(self) -> None:
        """All that is held is told anew."""
        self._listed = KeySet()

    def end_listing(self, *, news: bool) -> None:
        """All was told.

        :param news: whether what was not held before is news.
        """
        held, listed, self._listed = self.held, self._listed or KeySet(), None
        gone = held.difference(listed)
        if news:
            self._came(listed.difference(held))
        held.difference_update(gone)
        held.add_all(listed)
        self._most_held = max(self._most_held, len(held))
        self._went(gone)

    def add(self, keys: list[bytes]) -> None:
        """Keys that became durable, or that a listing tells."""
        if self._listed is not None:
            self._listed.update(keys)
        else:
            self.held.update(keys)
            self._most_held = max(self._most_held, len(self.held))
            self._came(keys)

    def remove(self, keys: list[bytes]) -> None:
        """Keys that went."""
        self.held.difference_update(keys)
        self._went(keys)

    def clear(self) -> None:
        """Nothing is open any more."""
        self._went(list(self.held))
        self.held.clear()
        self._listed, self._touched = None, set()

    def _came(self, keys: Iterable[bytes]) -> None:
        came = dict.fromkeys(keys)
        if self._stored:
            self._stored.update(came)
        else:  # so it mostly is, where they are taken step by step
            self._stored = came

    def _went(self, keys: Collection[bytes]) -> None:
        if self._stored:
            for key in keys:
                self._stored.pop(key, None)
        self._removed += keys
        for _ in range(len(self._removed) - self._most_held - _MOST_REMOVED):
            self._removed.popleft()

    def take_stored(self) -> list[bytes]:
        """Keys that became durable since the last call."""
        stored, self._stored = self._stored, {}
        return list(stored)

    def take_removed(self) -> list[bytes]:
        """Keys that went since the last call, as far as they wait."""
        removed, self._removed = self._removed, deque()
        self._most_held = len(self.held)
        return list(removed)

    def touch(self, keys: Collection[bytes]) -> None:
        """Keys were used; those that are not held are passed over, and where too many wait, some of the others."""
        if len(self._touched) + len(keys) <= _MOST_TOUCHED:
            self._touched.update(self.held.intersection(keys))

    @property
    def has_touched(self) -> bool:
        """Whether ``take_touched`` has any."""
        return bool(self._touched)

    def take_touched(self) -> list[bytes]:
        """Some of the keys that were used, a bounded number."""
        return [self._touched.pop() for _ in range(min(len(self._touched), _TOUCHED_A_STEP))]
