"""Announcements to LMCache: what any process has stored in the open stores or removed from them."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Sequence

from persistkv.errors import PersistKVError
from persistkv.integrations.lmcache.stores import LayoutStores, Place

logger = logging.getLogger(__name__)

_TICK_S = 1.0  # between looks for changes by other processes
_AT_ONCE = 4096  # keys in one call to a listener

Announce = Callable[[Place, Sequence[bytes], Sequence[bytes]], None]
"""Receives the place of keys, those that were stored, and those that were removed."""


class Announcer:
    """Reads the events of stores in a thread of its own."""

    def __init__(self, stores: LayoutStores, announce: Announce) -> None:
        self._stores = stores
        self._announce = announce
        self._has_news = threading.Event()
        self._is_stopped = False
        # one at a time: a removal must not overtake the announcement of its key
        self._turn = threading.Lock()
        self._thread = threading.Thread(
            target=self._run, name="persistkv-announcer", daemon=True
        )

    def start(self) -> None:
        """Start the thread."""
        self._thread.start()

    def wake(self) -> None:
        """Have the thread look for events now."""
        self._has_news.set()

    def stop(self) -> None:
        """End the thread."""
        self._is_stopped = True
        self._has_news.set()
        self._thread.join()

    def _run(self) -> None:
        while not self._is_stopped:
            self._has_news.wait(_TICK_S)
            self._has_news.clear()
            self.announce()

    def announce(self) -> None:
        """Announce the changes since the last call. Failures are logged."""
        with self._turn:
            for place, store in self._stores.items():
                try:
                    events = store.take_events()
                    stored = [key for key, _ in events.stored]
                    removed = [key for key, _ in events.removed]
                    if stored or removed:
                        self._announce(place, stored, removed)
                except PersistKVError as error:
                    logger.warning("events of a store are lost: %s", error)
                except Exception:  # of a listener: the thread must not end
                    logger.exception("a listener of LMCache failed: events are lost")

    def announce_stored(
        self, announce: Callable[[Place, Sequence[bytes]], None]
    ) -> None:
        """Announce all keys that the open stores hold. Failures are logged."""
        for place, store in self._stores.items():
            try:
                blocks = store.stored_blocks()
            except PersistKVError as error:
                logger.warning("stored keys are not announced: %s", error)
                continue
            keys = [block.key for block in blocks]
            for start in range(0, len(keys), _AT_ONCE):
                announce(place, keys[start : start + _AT_ONCE])
