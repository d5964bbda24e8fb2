"""Log of a namespace: reading of new entries, snapshots, and a local cache of the merged state.

1. One listing shows the new objects, and only those are fetched. An index object is merged once; its number implies the
   earlier ones of its writer.
2. A snapshot's root covers index objects, so that a new reader fetches few objects. They are deleted only after a later
   root covers them, too, and ``TRIM_S`` later by the server's clock. A listing therefore shows each entry: in an index
   object, or in the segments of the newest root. If a reader never merged something that a root covers, because it was
   deleted between two listings, it loads everything again.
3. Roots are numbered and written conditionally. The writer of root n + 1 has merged root n and all listed index
   objects, so the root covers at least as much. Of several concurrent writers one wins.
4. Segments are never changed. A snapshot adds one with the newest entries. When there are ``SEGMENTS`` of these, all
   are rewritten without superseded entries.
5. Listings are spaced by ``refresh_s``, with jitter; in between, calls are answered from the state.
6. If an index object that was merged is missing and no newer root covers it, the log was deleted, or the bucket was
   created again: the present content is loaded (``emptied``).
7. The cache file saves fetching the segments that its root references. It may be lost at any time, is replaced
   atomically, and is used only if it is complete, authentic, and of the same namespace and store. Nothing is written or
   deleted because of the cache alone: ``refresh_from_bucket``.
"""

from __future__ import annotations

import logging
import random
import threading
import time
from collections.abc import Iterable, Sequence
from hashlib import sha256
from pathlib import Path
from struct import Struct
from typing import NamedTuple

import xxhash

from persistkv.errors import CorruptPackError
from persistkv.storage.format.codec import Buffer
from persistkv.storage.format.files import replace_file
from persistkv_s3.authentication import SignedObjects
from persistkv_s3.client.transport import ObjectExistsError, ObjectMissingError
from persistkv_s3.log.layout import (
    MAX_LOG_BYTES,
    Entry,
    LogName,
    Root,
    encode_entries,
    encode_root,
    parse_entries,
    parse_log,
    parse_root,
    parse_root_object,
)
from persistkv_s3.log.state import LastUse, LogState, PackState

logger = logging.getLogger(__name__)

SNAPSHOT_AFTER = (20, 28)
"""Uncovered index objects; drawn at random each time, so that not all writers start at the same time."""
SEGMENTS = 8
TRIM_S = 60.0
_SEGMENT_BYTES = 64 << 20  # 64 MiB: of a segment, unless one entry is larger
_TRIES = 5
"""Maximum of listings per load: a listed object may be deleted before it is fetched."""
_CACHE_MAGIC = b"PKVS3CA1"
_CACHE_HEAD = Struct("<8sQI")
_CACHE_SIGNED_AS = "cache"
_CACHE_PAUSE_S = 60.0
_CACHE_SHARE = 100  # pause between writes of the cache, as a multiple of the duration of the last one


class LogListing(NamedTuple):
    """Names of the objects in a namespace's log."""

    objects: dict[LogName, float]
    """Index objects, and their times of upload by the server's clock."""
    roots: list[int]
    """Numbers of snapshots, ascending."""


class Follower:
    """See the top of this file. ``state`` may be read from any thread; one thread at a time calls methods.

    :param directory: of the cache file; None: no cache.
    :param place: distinguishes the namespace from all others that this user may open.
    """

    def __init__(self, objects: SignedObjects, refresh_s: float, directory: Path | None, place: str) -> None:
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
        self._names = objects.names
        self._cache = _CacheFile(objects, directory, place)
        self._from_cache = False
        self._refresh_s = refresh_s
        self._next_look = 0.0
        self._seen: dict[bytes, int] = {}
        self._loaded = False
        self._first = threading.Lock()
        self._snapshot_due = random.randint(*SNAPSHOT_AFTER)

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
            logger.warning("%s was emptied: loading what exists now", self._names.log_prefix)
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
        self._cache.save(self.root, self.state, if_due=True)

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
        found = list(self._objects.bucket.list(self._names.log_prefix))
        self._next_look = time.monotonic() + self._refresh_s * random.uniform(0.75, 1.25)
        objects = {name: info.modified for info in found if (name := parse_log(info.key)) is not None}
        roots = [number for info in found if (number := parse_root(info.key)) is not None]
        return LogListing(objects, sorted(roots))

    def _load(self, listing: LogListing, cached: tuple[Root, LogState] | None) -> None:
        fresh = LogState()
        root = self._newest_root(listing, fresh)
        covered, segments = ({}, ()) if root is None else (dict(root.covered), root.segments)
        if cached is not None and not set(cached[0].segments) <= set(segments):
            cached = None
        if cached is not None:
            cached[1].damaged = fresh.damaged
            fresh = cached[1]
            segments = tuple(name for name in segments if name not in cached[0].segments)
        new = [name for name in listing.objects if name.number > covered.get(name.writer, 0)]
        recent = self._merge(new, list(map(self._names.segment, segments)), fresh)
        for pack_id, held in list(self.lost.items()):
            fresh.lose(pack_id, held)
        for pack_id, use in self.touched.items():
            fresh.use(pack_id, use)
        self.recent = recent
        self.root, self.listing = root, listing
        self._seen = _newest(new, covered)
        self.state.replace(fresh)
        self._from_cache = cached is not None
        self._loaded = True

    def _newest_root(self, listing: LogListing, state: LogState) -> Root | None:
        """Return the newest readable root. An older one implies missing index objects: the state is marked damaged."""
        for number in reversed(listing.roots):
            try:
                found = self._objects.get(self._names.root(number))
                return parse_root_object(found, self._objects.namespace, number)
            except CorruptPackError as error:
                state.damaged = True
                logger.warning("%s does not read (%s)", self._names.root(number), error)
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
        self.recent.update(self._merge(new, [], self.state))
        self._seen = _newest(new, self._seen)
        self.listing = listing
        self._cover(root)
        return False

    def _misses(self, root: Root, new: Sequence[LogName]) -> bool:
        for writer, number in root.covered:
            listed = sum(1 for name in new if name.writer == writer and name.number <= number)
            if self._seen.get(writer, 0) + listed < number:
                return True
        return False

    def _merge(self, names: Sequence[LogName], segments: Sequence[str], state: LogState) -> dict[LogName, list[Entry]]:
        """Fetch index objects and segments, and merge their entries in order; return those of the index objects."""
        bucket, keys = self._objects.bucket, [*segments, *map(self._names.log, names)]
        objects = bucket.all(lambda key: bucket.get(key, MAX_LOG_BYTES), keys)
        parsed = [self._parse(key, data, state) for key, data in zip(keys, objects, strict=True)]
        for entry in sorted((entry for entries in parsed for entry in entries), key=lambda entry: entry.head.moment):
            state.merge(entry)
        return dict(zip(names, parsed[len(segments) :], strict=True))

    def _parse(self, key: str, data: bytearray, state: LogState) -> list[Entry]:
        entries: list[Entry] = []
        try:
            for entry in parse_entries(self._objects.opened(key, data), self._objects.namespace):
                entries.append(entry)
        except CorruptPackError as error:
            state.damaged = True
            logger.warning("%s is damaged (%s): its packs are misses", key, error)
        return entries

    def _cover(self, root: Root | None) -> None:
        """Adopt a root; this follower must have merged everything that it covers."""
        self.root = root
        covered = {} if root is None else dict(root.covered)
        self.recent = {name: held for name, held in self.recent.items() if name.number > covered.get(name.writer, 0)}

    def published(self, name: LogName, entries: list[Entry]) -> None:
        """Merge an index object that this handle wrote."""
        for entry in entries:
            self.state.merge(entry)
        self._seen[name.writer] = name.number
        self.recent[name] = entries

    def miss(self, pack_id: bytes, held: PackState) -> None:
        """Remove a pack whose object is missing from the state. Called from any thread."""
        if self.state.lose(pack_id, held):
            self.lost[pack_id] = held

    def close(self) -> None:
        """Write the local cache."""
        self._cache.save(self.root, self.state)

    # Snapshots

    def take_snapshot_if_due(self, writer: bytes) -> None:
        """Take a snapshot if many index objects are uncovered, and delete those that two roots cover.

        :param writer: of this handle.
        :raises StoreError: it failed; the log is still valid.
        """
        if len(self.recent) < self._snapshot_due:
            return
        self._snapshot_due = random.randint(*SNAPSHOT_AFTER)
        self.refresh()
        rewrites = self.root is not None and len(self.root.segments) - self.root.whole_segments >= SEGMENTS
        if rewrites:
            self.refresh_from_bucket()
        if len(self.recent) >= SNAPSHOT_AFTER[0] and not self.state.damaged:
            self._take_snapshot(writer, rewrites)

    def _take_snapshot(self, writer: bytes, rewrites: bool) -> None:
        """Take a snapshot of the state, which must be fresh and undamaged, unless another writer is first."""
        before, namespace = self.root, self._objects.namespace
        number, held, whole = (
            (1, (), 0) if before is None else (before.number + 1, before.segments, before.whole_segments)
        )
        parts = [[entry for entries in self.recent.values() for entry in entries]]
        if rewrites:
            held, parts = (), _cut(self.state.entries(namespace))
            whole = len(parts)
        names = [f"{writer.hex()}-{number:012x}-{part:04x}" for part in range(len(parts))]
        for name, part in zip(names, parts, strict=True):
            self._objects.put(self._names.segment(name), encode_entries(part), only_if_absent=False)
        root = Root(
            namespace=namespace,
            number=number,
            covered=tuple(sorted(_newest([*self.recent, *self.listing.objects], {}).items())),
            segments=(*held, *names),
            whole_segments=whole,
        )
        try:
            self._objects.put(self._names.root(number), [encode_root(root)])
        except ObjectExistsError as error:
            if not error.uncertain:  # otherwise it may be this one: the next listing shows it
                self._objects.bucket.delete(list(map(self._names.segment, names)))
            return
        self._cover(root)
        if before is not None:
            self._trim(before)

    def _trim(self, before: Root) -> None:
        covered, objects = dict(before.covered), self.listing.objects
        newest = max(objects.values(), default=0.0)
        old = [
            self._names.log(name)
            for name, written in objects.items()
            if name.number <= covered.get(name.writer, 0) and written < newest - TRIM_S
        ]
        roots = [self._names.root(number) for number in self.listing.roots if number < before.number]
        self._objects.bucket.delete([*old, *roots])


class _CacheFile:
    """Cache file of one namespace of one store. An unusable file is ignored."""

    def __init__(self, objects: SignedObjects, directory: Path | None, place: str) -> None:
        self._path = None if directory is None else directory / sha256(place.encode()).hexdigest()[:32]
        self._namespace = objects.namespace
        self._authenticator = objects.authenticator
        self._segments: Sequence[str] = ()
        self._not_before = 0.0

    def load(self) -> tuple[Root, LogState] | None:
        """Return a root and the state of its segments, possibly with later entries; None: there is no usable file."""
        if self._path is None:
            return None
        try:
            found = self._parse(self._path.read_bytes())
        except OSError:
            return None
        except CorruptPackError as error:
            logger.info("%s is unusable (%s): fetching the index", self._path, error)
            return None
        self._segments = found[0].segments
        return found

    def _parse(self, data: bytes) -> tuple[Root, LogState]:
        body = self._authenticator.opened(self._namespace, _CACHE_SIGNED_AS, data)
        if len(body) < _CACHE_HEAD.size:
            raise CorruptPackError("cache", f"{len(body)} bytes are too few")
        magic, checksum, root_length = _CACHE_HEAD.unpack_from(body)
        rest = body[_CACHE_HEAD.size :]
        if magic != _CACHE_MAGIC or xxhash.xxh3_64_intdigest(rest) != checksum:
            raise CorruptPackError("cache", "magic or checksum does not match")
        state = LogState()
        for entry in parse_entries(rest[root_length:], self._namespace):
            state.merge(entry)
        return parse_root_object(rest[:root_length], self._namespace, None), state

    def save(self, root: Root | None, state: LogState, *, if_due: bool = False) -> None:
        """Write the state if the root references other segments than the file.

        :param if_due: only if the last write is long ago.
        """
        if self._path is None or root is None or root.segments == self._segments or state.damaged:
            return
        begin = time.monotonic()
        if if_due and begin < self._not_before:
            return
        self._segments = root.segments
        sealed = encode_root(root)
        pieces: list[Buffer] = [sealed, *encode_entries(state.entries(self._namespace))]
        digest = xxhash.xxh3_64()
        for piece in pieces:
            digest.update(piece)
        head = _CACHE_HEAD.pack(_CACHE_MAGIC, digest.intdigest(), len(sealed))
        try:
            replace_file(self._path, self._authenticator.signed(self._namespace, _CACHE_SIGNED_AS, [head, *pieces]))
        except OSError as error:
            logger.info("%s cannot be written (%s)", self._path, error)
        self._not_before = time.monotonic() + max(_CACHE_PAUSE_S, _CACHE_SHARE * (time.monotonic() - begin))


def _newest(names: Iterable[LogName], before: dict[bytes, int]) -> dict[bytes, int]:
    """Return the greatest number of each writer, in names or before."""
    last = dict(before)
    for name in names:
        last[name.writer] = max(name.number, last.get(name.writer, 0))
    return last


def _cut(entries: list[Entry]) -> list[list[Entry]]:
    """Divide entries into segments."""
    parts: list[list[Entry]] = [[]]
    size = 0
    for entry in entries:
        if parts[-1] and size + len(entry.bodies) > _SEGMENT_BYTES:
            parts.append([])
            size = 0
        parts[-1].append(entry)
        size += len(entry.bodies)
    return parts
