"""Follower of a namespace's log: one listing shows the new objects, and only those are fetched.

1. An index object is merged once; its number implies the earlier ones of its writer.
2. A snapshot's root covers index objects, which are deleted only after a later root covers them, too. A listing
   therefore shows each entry: in an index object, or in the segments of the newest root.
3. If a root covers something that this follower never merged, because it was deleted between two listings, everything
   is loaded again.
4. Listings are spaced by ``refresh_s``, with jitter; in between, calls are answered from the state.
5. If an index object that was merged is missing and no newer root covers it, the log was deleted, or the bucket was
   created again: the present content is loaded (``emptied``).
6. The local cache (``cache``) saves fetching the segments that it holds. Nothing is written or deleted because of the
   cache alone: ``refresh_from_bucket``.
"""

from __future__ import annotations

import logging
import random
import threading
import time
from collections.abc import Sequence
from typing import NamedTuple

from persistkv.errors import CorruptPackError
from persistkv_s3.authentication import SignedObjects
from persistkv_s3.client.errors import ObjectMissingError
from persistkv_s3.log.cache import Cached, IndexCache
from persistkv_s3.log.layout import MAX_LOG_BYTES, Entry, Root, parse_entries, parse_root_object
from persistkv_s3.log.names import LogName, parse_log, parse_root
from persistkv_s3.log.state import LastUse, LogState, PackState

logger = logging.getLogger(__name__)

_TRIES = 5
"""Maximum of listings per load: a listed object may be deleted before it is fetched."""


class LogListing(NamedTuple):
    """Names of the objects in a namespace's log."""

    objects: dict[LogName, float]
    """Index objects, and their times of upload by the server's clock."""
    roots: list[int]
    """Numbers of snapshots, ascending."""


class Follower:
    """See the top of this file. ``state`` may be read from any thread; one thread at a time calls methods."""

    def __init__(self, objects: SignedObjects, refresh_s: float, cache: IndexCache) -> None:
        self.names = objects.names
        self.namespace = objects.namespace
        self.state = LogState()
        self.root: Root | None = None
        self.recent: dict[LogName, list[Entry]] = {}
        """Entries that no snapshot covers."""
        self.listing = LogListing({}, [])
        self.lost: dict[bytes, PackState] = {}
        """Packs whose objects are missing, until a commit removes them for all handles."""
        self.touched: dict[bytes, LastUse] = {}
        """Uses that no commit has written."""
        self.emptied = False
        """The log was deleted; format and identity may be missing, too."""
        self._objects = objects
        self._cache = cache
        self._from_cache = False
        self._refresh_s = refresh_s
        self._next_look = 0.0
        self._seen: dict[bytes, int] = {}
        self._loaded = False
        self._first = threading.Lock()

    # Looking

    def ensure(self) -> None:
        """Load the log if it was never loaded. Called from any thread."""
        if not self._loaded:
            with self._first:
                if not self._loaded:
                    self.load()

    def look(self) -> None:
        """Refresh if the last listing is old enough."""
        if not self._loaded:
            self.ensure()
        elif time.monotonic() >= self._next_look:
            self.refresh()

    def look_before_commit(self) -> None:
        """``look`` only if ``refresh_s`` is 0: otherwise a commit costs no listing."""
        if not self._loaded or not self._refresh_s:
            self.look()

    def refresh(self) -> None:
        """List the log now, and fetch new objects."""
        if not self._loaded:
            self.ensure()
            return
        listing = self._list()
        if self._is_emptied(listing):
            logger.warning("%s was emptied: loading what exists now", self.names.log_prefix)
            self.emptied = True
            self.lost.clear()
            self.load()
            return
        try:
            gap = self._follow(listing)
        except ObjectMissingError:  # deleted after the listing
            gap = True
        if gap:
            self.load()
        self._cache.save_if_due(self.root, self.state)

    def refresh_from_bucket(self) -> None:
        """Refresh, and reload everything if the state contains content of the local cache."""
        self.refresh()
        if self._from_cache:
            self.load()

    def load(self) -> None:
        """Load everything; the first time, with the local cache. After a failure the state is unchanged."""
        cached = None if self._loaded else self._cache.load()
        for tries_left in reversed(range(_TRIES)):
            try:
                self._load(self._list(), cached)
                return
            except ObjectMissingError:
                if not tries_left:
                    raise

    def _list(self) -> LogListing:
        found = self._objects.bucket.list(self.names.log_prefix)
        self._next_look = time.monotonic() + self._refresh_s * random.uniform(0.75, 1.25)
        objects = {name: info.modified for info in found if (name := parse_log(info.key)) is not None}
        roots = [number for info in found if (number := parse_root(info.key)) is not None]
        return LogListing(objects, sorted(roots))

    def _load(self, listing: LogListing, cached: Cached | None) -> None:
        fresh = LogState()
        root = self._newest_root(listing, fresh)
        covered, segments = ({}, ()) if root is None else (dict(root.covered), root.segments)
        if cached is not None and not set(cached.root.segments) <= set(segments):
            cached = None
        if cached is not None:
            cached.state.damaged = fresh.damaged
            fresh = cached.state
            segments = tuple(name for name in segments if name not in cached.root.segments)
        new = [name for name in listing.objects if name.number > covered.get(name.writer, 0)]
        keys = [self.names.segment(name) for name in segments]
        fetched = self._fetch([*keys, *map(self.names.log, new)], fresh)
        for entry in sorted((entry for entries in fetched for entry in entries), key=_moment):
            fresh.merge(entry)
        for pack_id, held in list(self.lost.items()):
            fresh.lose(pack_id, held)
        for pack_id, use in self.touched.items():
            fresh.use(pack_id, use)
        self.recent = dict(zip(new, fetched[len(keys) :], strict=True))
        self.root, self.listing = root, listing
        self._seen = covered
        for name in new:
            self._seen[name.writer] = max(name.number, self._seen.get(name.writer, 0))
        self.state.replace(fresh)
        self._from_cache = cached is not None
        self._loaded = True

    def _newest_root(self, listing: LogListing, state: LogState) -> Root | None:
        """Return the newest readable root. An older one implies missing index objects: the state is marked damaged."""
        for number in reversed(listing.roots):
            try:
                found = self._objects.get(self.names.root(number))
                return parse_root_object(found, self.namespace, number)
            except CorruptPackError as error:
                state.damaged = True
                logger.warning("%s does not read (%s)", self.names.root(number), error)
        return None

    def _is_emptied(self, listing: LogListing) -> bool:
        held = 0 if self.root is None else self.root.number
        newest = listing.roots[-1] if listing.roots else 0
        if newest > held:
            return False  # it may cover the missing objects
        return newest < held or any(name not in listing.objects for name in self.recent)

    def _follow(self, listing: LogListing) -> bool:
        """Merge new objects; return True if objects are missing, so that everything must be loaded."""
        root = self.root
        if listing.roots and (root is None or listing.roots[-1] > root.number):
            root = self._newest_root(listing, self.state)
        new = [name for name in listing.objects if name.number > self._seen.get(name.writer, 0)]
        if root is not None and root is not self.root and self._misses(root, new):
            return True
        fetched = self._fetch([self.names.log(name) for name in new], self.state)
        for entry in sorted((entry for entries in fetched for entry in entries), key=_moment):
            self.state.merge(entry)
        self.recent.update(zip(new, fetched, strict=True))
        for name in new:
            self._seen[name.writer] = max(name.number, self._seen.get(name.writer, 0))
        self.listing = listing
        self.cover(root)
        return False

    def _misses(self, root: Root, new: Sequence[LogName]) -> bool:
        coming: dict[bytes, int] = {}
        for name in new:
            coming[name.writer] = coming.get(name.writer, 0) + 1
        for writer, number in root.covered:
            listed = sum(1 for name in new if name.writer == writer and name.number <= number)
            if self._seen.get(writer, 0) + listed < number:
                return True
        return False

    def _fetch(self, keys: Sequence[str], state: LogState) -> list[list[Entry]]:
        bucket = self._objects.bucket
        objects = bucket.all(lambda key: bucket.get(key, MAX_LOG_BYTES), keys) if keys else []
        return [self._parse(key, data, state) for key, data in zip(keys, objects, strict=True)]

    def _parse(self, key: str, data: bytearray, state: LogState) -> list[Entry]:
        entries: list[Entry] = []
        try:
            for entry in parse_entries(self._objects.opened(key, data), self.namespace):
                entries.append(entry)
        except CorruptPackError as error:
            state.damaged = True
            logger.warning("%s does not read in full (%s): what it named is missed", key, error)
        return entries

    # Changes by this handle

    def save(self) -> None:
        """Write the local cache."""
        self._cache.save(self.root, self.state)

    def published(self, name: LogName, entries: list[Entry]) -> None:
        """Merge an index object that this handle wrote."""
        for entry in entries:
            self.state.merge(entry)
        self._seen[name.writer] = name.number
        self.recent[name] = entries

    def cover(self, root: Root | None) -> None:
        """Adopt a root; this follower must have merged everything that it covers."""
        self.root = root
        covered = {} if root is None else dict(root.covered)
        self.recent = {name: held for name, held in self.recent.items() if name.number > covered.get(name.writer, 0)}

    def miss(self, pack_id: bytes, held: PackState) -> None:
        """Remove a pack whose object is missing from the state. Called from any thread."""
        if self.state.lose(pack_id, held):
            self.lost[pack_id] = held


def _moment(entry: Entry) -> int:
    return entry.head.moment
