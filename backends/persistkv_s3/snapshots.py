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

from persistkv_s3.bucket import Bucket
from persistkv_s3.catalogue import Catalogue
from persistkv_s3.errors import ObjectExistsError
from persistkv_s3.follower import Follower
from persistkv_s3.layout import Entry, GoneRow, Head, ManifestRow, PackRow, Root, Stamp, encode_entries, encode_root
from persistkv_s3.names import LogName

_AFTER = (20, 28)  # index objects that no root covers; drawn anew each time, so that not all writers start at once
_SEGMENTS = 8
_SEGMENT_BYTES = 64 << 20  # 64 MiB: of a segment, unless one entry is larger
_TRIM_S = 60.0
_REMEMBER_S = 7 * 86_400.0
"""How long it is remembered that something went: a handle that sleeps for longer may meet a pack again, as a miss."""


class Snapshots:
    """Those of one namespace, made by one handle; used from the thread that commits."""

    def __init__(self, bucket: Bucket, follower: Follower) -> None:
        self._bucket = bucket
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
        if len(self._follower.recent) >= _AFTER[0] and not self._follower.catalogue.damaged:
            self.take(writer)

    def take(self, writer: bytes) -> bool:
        """Write a snapshot now; whether nobody was faster. What is known is to be fresh and undamaged."""
        follower = self._follower
        before = follower.root
        number = 1 if before is None else before.number + 1
        held, whole = ((), 0) if before is None else (before.segments, before.whole_segments)
        parts = [[entry for entries in follower.recent.values() for entry in entries]]
        if len(held) - whole >= _SEGMENTS:
            held, parts = (), _cut(_dump(follower.namespace, follower.catalogue))
            whole = len(parts)
        names = [f"{writer.hex()}-{number:012x}-{part:04x}" for part in range(len(parts))]
        for name, part in zip(names, parts, strict=True):
            self._bucket.put(follower.names.segment(name), encode_entries(part), only_if_absent=False)
        root = Root(
            namespace=follower.namespace,
            number=number,
            covered=tuple(_covered([*follower.recent, *follower.listing.objects])),
            segments=(*held, *names),
            whole_segments=whole,
        )
        try:
            self._bucket.put(follower.names.root(number), [encode_root(root)])
        except ObjectExistsError as error:
            if not error.uncertain:  # else it may be ours: the next listing tells
                self._bucket.delete([follower.names.segment(name) for name in names])
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
            self._bucket.delete([*old, *roots])


def _covered(objects: Iterable[LogName]) -> Iterable[tuple[bytes, int]]:
    """For each writer with an index object in the bucket, the number of the last one that was merged."""
    last: dict[bytes, int] = {}
    for name in objects:
        last[name.writer] = max(name.number, last.get(name.writer, 0))
    return sorted(last.items())


def _dump(namespace: bytes, catalogue: Catalogue) -> list[Entry]:
    """All that is held, as few entries as there are stamps."""
    newest = catalogue.time
    heads: dict[tuple[Stamp, float], _Part] = {}

    def part(stamp: Stamp, time: float) -> _Part:
        return heads.setdefault((stamp, time), _Part())

    for pack_id, pack in catalogue.packs.items():
        part(pack.stamp, pack.time).add_pack(pack_id, pack.generation, pack.table.encode())
        if pack.used.moment != pack.stamp.moment:
            part(Stamp(pack.used.moment, pack.stamp.writer), pack.used.time).uses.append(pack_id)
    for name, manifest in catalogue.manifests.items():
        packs = b"".join(manifest.packs)
        keys = (*manifest.keys, manifest.keys_offset, manifest.keys_length)
        part(manifest.stamp, manifest.used.time).add_manifest(name, manifest.ordered, packs, manifest.head, keys)
    for pack_id, gone in catalogue.gone.items():
        if gone.time > newest - _REMEMBER_S:
            part(gone.stamp, gone.time).gone.append(GoneRow(pack_id, gone.generation))
    for name, gone in catalogue.manifests_gone.items():
        if gone.time > newest - _REMEMBER_S and name not in catalogue.manifests:
            part(gone.stamp, gone.time).manifests_gone.append(name)
    for name, (stamp, pinned) in catalogue.pins().items():
        part(stamp, newest).pins.append((name, pinned))
    return [found.entry(namespace, stamp, time) for (stamp, time), found in sorted(heads.items(), key=_place)]


def _place(item: tuple[tuple[Stamp, float], _Part]) -> tuple[Stamp, float]:
    return item[0]


class _Part:
    """An entry in the making."""

    def __init__(self) -> None:
        self.packs: list[PackRow] = []
        self.gone: list[GoneRow] = []
        self.uses: list[bytes] = []
        self.manifests: list[ManifestRow] = []
        self.manifests_gone: list[str] = []
        self.pins: list[tuple[str, bool]] = []
        self._bodies = bytearray()

    def add_pack(self, pack_id: bytes, generation: int, table: bytes) -> None:
        self.packs.append(PackRow(pack_id, generation, len(self._bodies), len(table)))
        self._bodies += table

    def add_manifest(
        self, name: str, ordered: bool, packs: bytes, head: bytes, keys: tuple[bytes, int, int, int]
    ) -> None:
        self.manifests.append(ManifestRow(name, ordered, packs, len(self._bodies), len(head), *keys))
        self._bodies += head

    def entry(self, namespace: bytes, stamp: Stamp, time: float) -> Entry:
        head = Head(
            namespace=namespace,
            writer=stamp.writer,
            moment=stamp.moment,
            time=time,
            packs=tuple(self.packs),
            gone=tuple(self.gone),
            uses=b"".join(self.uses),
            manifests=tuple(self.manifests),
            manifests_gone=tuple(self.manifests_gone),
            pins=tuple(self.pins),
        )
        return Entry(head, bytes(self._bodies))


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
