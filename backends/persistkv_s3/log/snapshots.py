"""Snapshots: what index objects said, gathered, so that a fresh reader fetches little and a listing stays short.

1. Roots are numbered and written with a condition: number n + 1 was made by somebody who had merged number n and all
   that the listing showed, so it covers at least as much. Of several who try, one wins; nothing else decides who that
   is.
2. An index object is deleted only where the root before the newest covers it, and it is older than ``_TRIM_S`` by the
   server's clock: who is just fetching by an older listing finds it, or lists again and finds a root that covers it.
3. Segments are never changed. A snapshot adds one with the newest entries; when there are ``_SEGMENTS`` of these, all
   are written anew without what was replaced.
"""

from __future__ import annotations

import random
from collections.abc import Iterable

from persistkv_s3.authentication import SignedObjects
from persistkv_s3.client.errors import ObjectExistsError
from persistkv_s3.log.follower import Follower
from persistkv_s3.log.layout import Entry, Root, encode_entries, encode_root
from persistkv_s3.log.names import LogName

_AFTER = (20, 28)  # index objects that no root covers; drawn anew each time, so that not all writers start at once
_SEGMENTS = 8
_SEGMENT_BYTES = 64 << 20  # 64 MiB: of a segment, unless one entry is larger
_TRIM_S = 60.0


class SnapshotWriter:
    """Those of one namespace, made by one handle; used from the thread that commits."""

    def __init__(self, objects: SignedObjects, follower: Follower) -> None:
        self._objects = objects
        self._follower = follower
        self._due = random.randint(*_AFTER)

    def take_if_due(self, writer: bytes) -> None:
        """Where many index objects lie there that no root covers, write one, and delete what is covered twice.

        :raises StoreError: it was not done, or not to the end; the log is as good as before.
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
        """Whether the next one writes all segments anew."""
        root = self._follower.root
        return root is not None and len(root.segments) - root.whole_segments >= _SEGMENTS

    def take(self, writer: bytes) -> bool:
        """Write a snapshot now; whether nobody was faster. What is known is to be fresh and undamaged."""
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
            if not error.uncertain:  # else it may be ours: the next listing tells
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
    """For each writer with an index object in the bucket, the number of the last one that was merged."""
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
