"""The engine's copy of the index, and the news of how it moved.

1. It holds a key from its ``Stored`` to its ``Removed``, and none while nothing is open.
2. A listing replaces it as a whole, when it is complete; until then it stays as it was.
3. News tells what is there in the end: a key that came and went since news was last taken only went.
4. A step's news costs what it tells, however much of what was told before nobody took: an engine whose events are
   switched off may never take any. It does not pile up, either.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable

_TOUCHED_A_STEP = 2_048  # keys in a step's message: some 75 KB
_MOST_TOUCHED = 65_536  # keys that wait to be said
_MOST_REMOVED = 65_536  # keys that wait to be taken, or twice as many as are held: a listing may replace all of them


class Replica:
    """See the top of this file."""

    def __init__(self) -> None:
        self.held: set[bytes] = set()
        """The keys; always the same set, so that others may probe it."""
        self._listed: set[bytes] | None = None
        self._stored: dict[bytes, None] = {}
        """Some of what is held."""
        self._removed: list[bytes] = []
        self._touched: set[bytes] = set()

    def begin_listing(self) -> None:
        """All that is held is told anew."""
        self._listed = set()

    def end_listing(self, *, news: bool) -> None:
        """All was told.

        :param news: whether what was not held before is news.
        """
        held, listed, self._listed = self.held, self._listed or set(), None
        gone = [key for key in held if key not in listed]
        if news:
            self._came(key for key in listed if key not in held)
        held.difference_update(gone)
        held |= listed
        self._went(gone)

    def add(self, keys: list[bytes]) -> None:
        """Keys that became durable, or that a listing tells."""
        if self._listed is not None:
            self._listed.update(keys)
        else:
            self.held.update(keys)
            self._came(keys)

    def remove(self, keys: list[bytes]) -> None:
        """Keys that went."""
        self.held.difference_update(keys)
        if len(self._removed) > max(_MOST_REMOVED, 2 * len(self.held)):
            self._removed.clear()  # nobody takes them
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

    def take_stored(self) -> list[bytes]:
        """Keys that became durable since the last call."""
        stored, self._stored = self._stored, {}
        return list(stored)

    def take_removed(self) -> list[bytes]:
        """Keys that went since the last call; not all of them where many more wait than are held."""
        removed, self._removed = self._removed, []
        return removed

    def touch(self, keys: Collection[bytes]) -> None:
        """Keys were used; those that are not held are passed over, and where too many wait, some of the others."""
        if len(self._touched) + len(keys) <= _MOST_TOUCHED:
            self._touched |= self.held.intersection(keys)

    @property
    def has_touched(self) -> bool:
        """Whether ``take_touched`` has any."""
        return bool(self._touched)

    def take_touched(self) -> list[bytes]:
        """Some of the keys that were used, a bounded number."""
        return [self._touched.pop() for _ in range(min(len(self._touched), _TOUCHED_A_STEP))]
