"""The engine's copy of the index, and its pending changes (stored and removed keys).

1. The copy holds a key from its ``Stored`` message to its ``Removed`` message. It is empty while no namespace is open.
2. A complete listing replaces the copy as a whole; until it is complete, the copy is unchanged.
3. Pending changes give the final state: a key that was stored and then removed is only reported as removed.
4. Recording a change costs the same regardless of how many are pending, because some callers never take them. Pending
   removals are bounded by the most keys held since they were last taken, plus 65,536; the oldest are dropped first. So
   a removal of all held keys at once is always reported completely.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Collection, Iterable, Iterator
from itertools import chain

PART_MASK = 15
"""Bits of a key's first byte that select its part."""
_TOUCHED_A_STEP = 2_048  # keys in the message of one step: about 75 KB
_MOST_TOUCHED = 65_536  # bound on keys with a use that is not sent yet
_MOST_REMOVED = 65_536  # bound on pending removals, in addition to the number of held keys


class KeySet:
    """Set of non-empty keys, without the long pauses of one large set.

    Python rehashes a set as it grows and as its keys are replaced: the whole set at once, which takes 35 to 56 ms for a
    million keys. This class uses 16 sets, selected by the last bits of the key's first byte, so that only one of them
    is rehashed at a time. Keys start with a hash; other keys may all be in one set, with its long pauses.

    :raises IndexError: a key is empty.
    """

    def __init__(self) -> None:
        self.parts: tuple[set[bytes], ...] = tuple(set() for _ in range(PART_MASK + 1))
        """Always the same set objects, so that callers may probe them: a key is in ``parts[key[0] & PART_MASK]``."""

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
        """Remove keys; missing ones are ignored."""
        parts = self.parts
        for key in keys:
            parts[key[0] & PART_MASK].discard(key)

    def intersection(self, keys: Iterable[bytes]) -> list[bytes]:
        """Return the keys that are in the set, in order. Makes no call per key: a step has thousands of keys."""
        parts = self.parts
        return [key for key in keys if key in parts[key[0] & PART_MASK]]

    def difference(self, others: KeySet) -> list[bytes]:
        """Return the keys that are not in the other set."""
        return [key for mine, theirs in zip(self.parts, others.parts, strict=True) for key in mine - theirs]

    def add_all(self, others: KeySet) -> None:
        """Add the keys of another set."""
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
        """The held keys; always the same object, so that callers may probe it."""
        self._listed: KeySet | None = None
        self._stored: dict[bytes, None] = {}
        """Held keys whose addition has not been taken yet, in order."""
        self._removed: deque[bytes] = deque()
        self._most_held = 0
        """Most keys held since removals were last taken."""
        self._touched: set[bytes] = set()

    def begin_listing(self) -> None:
        """Start a listing of all held keys."""
        self._listed = KeySet()

    def end_listing(self, *, news: bool) -> None:
        """Replace the held keys with the listed ones.

        :param news: whether keys that were not held before are reported by ``take_stored``.
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
        """Add keys that became durable, or that are part of a listing."""
        if self._listed is not None:
            self._listed.update(keys)
        else:
            self.held.update(keys)
            self._most_held = max(self._most_held, len(self.held))
            self._came(keys)

    def remove(self, keys: list[bytes]) -> None:
        """Remove keys that are no longer held."""
        self.held.difference_update(keys)
        self._went(keys)

    def clear(self) -> None:
        """Remove all keys, because the namespace is no longer open."""
        self._went(list(self.held))
        self.held.clear()
        self._listed, self._touched = None, set()

    def _came(self, keys: Iterable[bytes]) -> None:
        came = dict.fromkeys(keys)
        if self._stored:
            self._stored.update(came)
        else:  # the usual case if the engine takes them at each step
            self._stored = came

    def _went(self, keys: Collection[bytes]) -> None:
        if self._stored:
            for key in keys:
                self._stored.pop(key, None)
        self._removed += keys
        for _ in range(len(self._removed) - self._most_held - _MOST_REMOVED):
            self._removed.popleft()

    def take_stored(self) -> list[bytes]:
        """Return keys that became durable since the last call."""
        stored, self._stored = self._stored, {}
        return list(stored)

    def take_removed(self) -> list[bytes]:
        """Return keys that were removed since the last call, except those dropped by the bound."""
        removed, self._removed = self._removed, deque()
        self._most_held = len(self.held)
        return list(removed)

    def touch(self, keys: Collection[bytes]) -> None:
        """Record uses of keys. Keys that are not held are ignored. If too many are pending, the call is ignored."""
        if len(self._touched) + len(keys) <= _MOST_TOUCHED:
            self._touched.update(self.held.intersection(keys))

    @property
    def has_touched(self) -> bool:
        """Whether ``take_touched`` has keys to return."""
        return bool(self._touched)

    def take_touched(self) -> list[bytes]:
        """Return a bounded number of the keys that were used."""
        return [self._touched.pop() for _ in range(min(len(self._touched), _TOUCHED_A_STEP))]
