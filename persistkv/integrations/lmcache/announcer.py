"""Announcements to LMCache: what the open stores held when they were opened, and what any process
has stored in them or removed from them since."""

from __future__ import annotations

import itertools
import logging
import os
import threading
from collections.abc import Callable, Sequence
from typing import NamedTuple

from persistkv.batches import batched
from persistkv.errors import PersistKVError
from persistkv.integrations.lmcache.stores import LayoutStores, Place
from persistkv.storage.blocks import BlockStore

logger = logging.getLogger(__name__)

_TICK_S = 1.0  # seconds between looks for changes by other processes
_KEYS_PER_CALL = 4096  # maximum number of keys in one call of a listener

Keys = Sequence[bytes]
Announce = Callable[[Place, Keys], None]
"""Receives keys of one place that were stored, or removed."""


class Announcer:
    """Announces the events of the open stores, which it reads in a thread of its own."""

    def __init__(
        self,
        stores: LayoutStores,
        stored: Announce,
        removed: Announce,
        list_timeout_s: float,
    ) -> None:
        """:param stored: receives the keys that were stored, before those of ``removed``.
        :param removed: receives the keys that were removed.
        :param list_timeout_s: time limit for the list of one store, in seconds.
        """
        self._stores = stores
        self._list_timeout_s = list_timeout_s
        self._stored = stored
        self._removed = removed
        self._announced: set[Place] = set()
        """Places whose content at the opening was announced."""
        self._is_woken = threading.Event()
        """Set to have the thread look for events before its next tick, or end."""
        self._is_stopped = False
        self._pid = os.getpid()
        """The process that has the thread; a forked child has none."""
        self._lock = threading.Lock()
        """Held while changes are read and announced, so that no removal overtakes the announcement
        of its key."""
        self._thread = threading.Thread(
            target=self._run, name="persistkv-announcer", daemon=True
        )

    def start(self) -> None:
        """Start the thread."""
        self._thread.start()

    def wake(self) -> None:
        """Have the thread look for events now."""
        self._is_woken.set()

    def stop(self) -> None:
        """End the thread. Wait while it reads the list of a store, within the time limit."""
        self._is_stopped = True
        self._is_woken.set()
        self._thread.join()

    def _run(self) -> None:
        """Announce changes each second, and when ``wake`` is called, until ``stop``."""
        while not self._is_stopped:
            self._is_woken.wait(_TICK_S)
            self._is_woken.clear()
            self.announce()

    def announce(self) -> None:
        """Announce the changes since the last call. Failures are logged. Without effect in a forked
        child."""
        # in a forked child, a thread may hold the lock for ever
        if os.getpid() != self._pid:
            return
        with self._lock:
            self._announce_changes()

    def add_listener(
        self,
        register: Callable[[], None],
        stored: Announce,
    ) -> None:
        """Register a listener. It may get a key twice that is stored during the call.
        Failures are logged.

        :param register: registers the listener with LMCache: it hears of all changes after this
            call.
        :param stored: receives the keys that the open stores hold.
        """
        with self._lock:
            # announce earlier changes before the registration: this listener gets the present
            # content instead
            self._announce_changes()
            register()
            for place, store in self._stores.items():
                try:
                    held = _loadable_keys(store, self._list_timeout_s)
                    for keys in batched(held, _KEYS_PER_CALL):
                        stored(place, keys)
                except PersistKVError as error:
                    logger.warning("stored keys are not announced: %s", error)

    def _announce_changes(self) -> None:
        """Announce the changes of all open stores. Log the failure of a store, and continue with
        the next one."""
        for place, store in self._stores.items():
            if self._is_stopped:
                return
            try:
                self._announce_store(place, store)
            except PersistKVError as error:
                logger.warning("events of a store are lost: %s", error)
            except Exception:  # an error of a listener must not end the thread
                logger.exception("a listener of LMCache failed: events are lost")

    def _announce_store(self, place: Place, store: BlockStore) -> None:
        """Announce the changes of a store since the last call, at first its whole content."""
        if place in self._announced:
            changes = _take_changes(store)
        else:
            changes = _take_content(store, self._list_timeout_s)
            # add the place after the list was read, so that the next call retries a failed list
            self._announced.add(place)
        for keys in batched(changes.stored, _KEYS_PER_CALL):
            self._stored(place, keys)
        for keys in batched(changes.removed, _KEYS_PER_CALL):
            self._removed(place, keys)


class _Changes(NamedTuple):
    """Keys of one store, to announce in this order."""

    stored: Keys
    removed: Keys


def _take_changes(store: BlockStore) -> _Changes:
    """Take the events of a store since the last call, and return their keys."""
    events = store.take_events()
    stored = [key for key, _ in events.stored]
    removed = [key for key, _ in events.removed]
    return _Changes(stored, removed)


def _take_content(store: BlockStore, list_timeout_s: float) -> _Changes:
    """Return the content of a store as changes of an empty one, and take the events until now, so
    that events that are taken later tell only of further changes."""
    # drop the events from before the listing, because the list contains their keys
    _take_changes(store)
    listed = _loadable_keys(store, list_timeout_s)
    meanwhile = _take_changes(store)
    # announce each block once: one that was stored during the listing may also be in the list
    stored = dict.fromkeys([*listed, *meanwhile.stored])
    # announce the removal only of keys that were announced as stored
    removed = [key for key in meanwhile.removed if key in stored]
    return _Changes(list(stored), removed)


def _loadable_keys(store: BlockStore, list_timeout_s: float) -> list[bytes]:
    """Return the keys that can be loaded now."""
    blocks = store.stored_blocks(timeout_s=list_timeout_s)
    listed = [block.key for block in blocks]
    # the list may contain keys that the store's index does not have yet
    are_held = store.contains(listed)
    return list(itertools.compress(listed, are_held))
