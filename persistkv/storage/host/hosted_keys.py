"""The keys of a hosted store, as its engine knows them."""

from __future__ import annotations

from collections.abc import Collection
from itertools import compress

from persistkv.storage.records import StoreReport
from persistkv.storage.store.lookup_table import LookupTable

# maximum number of keys in the message of one step: about 75 KB
_TOUCHED_A_STEP = 2_048
_MOST_TOUCHED = 65_536  # bound on keys with a use that is not sent yet


class HostedKeys:
    """What the engine knows about the keys of its host: which are stored, used, and changed.

    ``forget`` clears it when the host ends: another host reads the store again.
    """

    def __init__(self, *, reports_events: bool) -> None:
        """:param reports_events: whether the host reports events, ``StoreOptions.events``."""
        self.table = LookupTable()
        """Fingerprints of the keys that are durable and can be loaded; empty while the host is
        down."""
        self._reports_events = reports_events
        self.touched: set[bytes] = set()
        """Stored keys with a use that is not sent to the host yet; at most 65,536."""
        self._events = StoreReport()
        """Changes since the last ``take_events``; only ``stored``, ``removed`` and ``lost`` are
        set."""

    # Uses

    def touch(self, keys: Collection[bytes]) -> None:
        """Record the use of those keys that are stored. Record none if more than 65,536 keys would
        wait for ``take_touched``."""
        if len(self.touched) + len(keys) > _MOST_TOUCHED:
            return
        candidates = list(keys)
        are_held = self.table.held(candidates)
        held_keys = compress(candidates, are_held)
        self.touched.update(held_keys)

    def take_touched(self) -> list[bytes]:
        """Return some used keys, at most 2,048, and forget their use."""
        count = min(len(self.touched), _TOUCHED_A_STEP)
        return [self.touched.pop() for _ in range(count)]

    # Changes

    @property
    def has_events(self) -> bool:
        """Whether ``take_events`` has something to return."""
        return self._events != StoreReport()

    def add_report(self, report: StoreReport) -> None:
        """Add the changes of keys in a report of the host."""
        self.table.set_collisions(report.collisions)
        if report.lost:
            self._events.lost = True
        self._events.add(stored=report.stored, removed=report.removed)

    def take_events(self) -> StoreReport:
        """Return the keys that were stored or removed since the last call."""
        events = self._events
        self._events = StoreReport()
        return events

    # The end of the host

    def forget(self) -> None:
        """Forget which keys are stored and used. Changes from now on are missing: the events are
        marked as lost."""
        self.table.clear()
        self.touched.clear()
        if self._reports_events:
            self._events.lost = True
