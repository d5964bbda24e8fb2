"""Snapshots merge index objects, so that a new reader fetches few objects and listings stay short.

1. Roots are numbered and written conditionally. The writer of root n + 1 has merged root n and all listed index
   objects, so the root covers at least as much. Of several concurrent writers one wins.
2. An index object is deleted only if the root before the newest covers it, and it is older than ``_TRIM_S`` by the
   server's clock. A reader with an older listing still finds it, or lists again and finds a root that covers it.
3. Segments are never changed. A snapshot adds one with the newest entries. When there are ``_SEGMENTS`` of these, all
   are rewritten without superseded entries.
"""

from __future__ import annotations

import random
from collections.abc import Iterable

from persistkv_s3.authentication import SignedObjects
from persistkv_s3.client.errors import ObjectExistsError
from persistkv_s3.log.follower import Follower
from persistkv_s3.log.layout import Entry, Root, encode_entries, encode_root
from persistkv_s3.log.names import LogName

_AFTER = (20, 28)  # uncovered index objects; drawn at random each time, so that not all writers start at the same time
_SEGMENTS = 8
_SEGMENT_BYTES = 64 << 20  # 64 MiB: of a segment, unless one entry is larger
_TRIM_S = 60.0


class SnapshotWriter:
    """Takes the snapshots of one namespace; used from the thread that commits."""

    def __init__(self, objects: SignedObjects, follower: Follower) -> None:
        self._objects = objects
        self._follower = follower
        self._due = random.randint(*_AFTER)

    def take_if_due(self, writer: bytes) -> None:
        """Take a snapshot if many index objects are uncovered, and delete those that two roots cover.

        :raises StoreError: it failed; the log is still valid.
        """
        if len(self._follower.recent) < self._due:
            return
        self._due = random.randint(*_AFTER)
        self._follower.refresh()
        if self._rewrites:
            self._follower.refresh_from_bucket()
        if len(self._follower.recent) >= _AFTER[0] and not self._follower.state.damaged:
            self.take(writer)

    @property
    def _rewrites(self) -> bool:
        """Whether the next snapshot rewrites all segments."""
        root = self._follower.root
        return root is not None and len(root.segments) - root.whole_segments >= _SEGMENTS

    def take(self, writer: bytes) -> bool:
        """Take a snapshot of the state, which must be fresh and undamaged; return False if another writer was first."""
        follower = self._follower
        before = follower.root
        number = 1 if before is None else before.number + 1
        held, whole = ((), 0) if before is None else (before.segments, before.whole_segments)
        parts = [[entry for entries in follower.recent.values() for entry in entries]]
        if self._rewrites:
            held, parts = (), _cut(follower.state.entries(follower.namespace))
            whole = len(parts)
        names = [f"{writer.hex()}-{number:012x}-{part:04x}" for part in range(len(parts))]
        for name, part in zip(names, parts, strict=True):
            self._objects.put(follower.names.segment(name), encode_entries(part), only_if_absent=False)
        root = Root(
            namespace=follower.namespace,
            number=number,
            covered=tuple(_covered([*follower.recent, *follower.listing.objects])),
            segments=(*held, *names),
            whole_segments=whole,
        )
        try:
            self._objects.put(follower.names.root(number), [encode_root(root)])
        except ObjectExistsError as error:
            if not error.uncertain:  # otherwise it may be this one: the next listing shows it
                self._objects.bucket.delete([follower.names.segment(name) for name in names])
            return False
        follower.cover(root)
        self._trim(before, root)
        return True

    def _trim(self, before: Root | None, root: Root) -> None:
        if before is None:
            return
        follower = self._follower
        covered, listing = dict(before.covered), follower.listing
        newest = max(listing.objects.values(), default=0.0)
        old = [
            follower.names.log(name)
            for name, written in listing.objects.items()
            if name.number <= covered.get(name.writer, 0) and written < newest - _TRIM_S
        ]
        roots = [follower.names.root(number) for number in listing.roots if number < before.number]
        if old or roots:
            self._objects.bucket.delete([*old, *roots])


def _covered(objects: Iterable[LogName]) -> Iterable[tuple[bytes, int]]:
    """Return the last merged number of each writer with an index object in the bucket."""
    last: dict[bytes, int] = {}
    for name in objects:
        last[name.writer] = max(name.number, last.get(name.writer, 0))
    return sorted(last.items())


def _cut(entries: list[Entry]) -> list[list[Entry]]:
    parts: list[list[Entry]] = [[]]
    size = 0
    for entry in entries:
        length = len(entry.bodies)
        if parts[-1] and size + length > _SEGMENT_BYTES:
            parts.append([])
            size = 0
        parts[-1].append(entry)
        size += length
    return parts
