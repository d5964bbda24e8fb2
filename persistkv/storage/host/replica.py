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
from collections.abc import Collection, Iterable

from persistkv.storage.host.key_set import KeySet

_TOUCHED_A_STEP = 2_048  # keys in a step's message: some 75 KB
_MOST_TOUCHED = 65_536  # keys that wait to be said
_MOST_REMOVED = 65_536  # keys that wait to be taken, beside as many as were held


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
