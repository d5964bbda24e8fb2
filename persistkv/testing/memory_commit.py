"""One commit to a store in memory: works on copies, which its caller swaps in at the end."""

from __future__ import annotations

import struct
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from itertools import chain
from typing import NamedTuple

from persistkv.errors import CorruptPackError
from persistkv.storage.backend import CommitBatch, ManifestWrite, Namespace, RequestUse
from persistkv.storage.manifest import encode_manifest, encode_manifest_keys
from persistkv.storage.pack import UNKNOWN_DEPTH, PackTable
from persistkv.storage.pack_writer import PackWriter

CHANGES_KEPT = 64
_CURSOR = struct.Struct(">Q")


class StoredPack(NamedTuple):
    """A pack at rest."""

    table: bytes
    payload: bytearray

    def readable(self) -> list[PackTable]:
        """The pack's table; nothing where it is damaged."""
        try:
            return [PackTable.parse(self.table)]
        except CorruptPackError:
            return []


class StoredManifest(NamedTuple):
    """A manifest at rest."""

    head: bytes
    keys: bytes


class PackUse(NamedTuple):
    """When a pack was used last, and where that put it."""

    moment: int
    time: float
    """Seconds since the epoch."""
    depth: int
    place: int
    """In the order of eviction."""


class Chain(NamedTuple):
    """A manifest's packs, and when it was written."""

    moment: int
    time: float
    ordered: bool
    packs: tuple[bytes, ...]
    pinned: bool = False


@dataclass
class Space:
    """A namespace at rest."""

    namespace: Namespace
    packs: dict[bytes, StoredPack] = field(default_factory=dict)
    manifests: dict[str, StoredManifest] = field(default_factory=dict)
    uses: dict[bytes, PackUse] = field(default_factory=dict)
    chains: dict[str, Chain] = field(default_factory=dict)
    log: list[tuple[bytes, bool]] = field(default_factory=list)
    """(pack id, whether it came) of the last changes; older ones are forgotten."""
    changed: int = 0
    """Changes so far: the cursor."""

    def copy(self) -> Space:
        """One that can be changed."""
        parts = dict(self.packs), dict(self.manifests), dict(self.uses), dict(self.chains), list(self.log)
        return Space(self.namespace, *parts, self.changed)

    def note(self, pack_id: bytes, came: bool) -> None:
        """Log a change."""
        self.log = [*self.log, (pack_id, came)][-CHANGES_KEPT:]
        self.changed += 1

    @property
    def cursor(self) -> bytes:
        """Where the catalogue stands."""
        return _CURSOR.pack(self.changed)

    @property
    def held_bytes(self) -> int:
        """Of payloads, tables and manifests."""
        return sum(len(part) for row in chain(self.packs.values(), self.manifests.values()) for part in row)

    @property
    def pinned_packs(self) -> set[bytes]:
        """Those that a pinned manifest names."""
        return {pack_id for held in self.chains.values() if held.pinned for pack_id in held.packs}

    def request_use(self, manifest_id: str) -> RequestUse | None:
        """What is known of a request's use; None where it is not held, or its last pack is not."""
        held = self.chains.get(manifest_id)
        if held is None:
            return None
        if not held.packs:
            return RequestUse(held.time, False, 0, held.pinned)
        use = self.uses.get(held.packs[-1])
        if use is None:
            return None
        naming = self.naming(held.packs[-1])
        later = sum(self.chains[name].moment > held.moment for name in naming)
        packs = [self.packs[pack_id] for pack_id in held.packs if pack_id in self.packs]
        raw = sum(table.raw_length for pack in packs for table in pack.readable())
        stored = sum(len(pack.payload) for pack in packs)
        return RequestUse(use.time, use.moment > held.moment, len(naming) - 1, held.pinned, later, raw, stored)

    def naming(self, pack_id: bytes) -> list[str]:
        """The manifests that name a pack."""
        return [name for name, held in self.chains.items() if pack_id in held.packs]


class Candidate(NamedTuple):
    """Something that may be evicted; sorts as it goes."""

    place: int
    depth_left: int
    is_manifest: bool
    namespace: bytes
    id: bytes | str
    time: float


class Draft:
    """What a commit makes of a store."""

    def __init__(
        self, spaces: Mapping[bytes, Space], namespace: bytes, moment: int, now: float, batch: CommitBatch
    ) -> None:
        self.spaces = {name: space.copy() for name, space in spaces.items()}
        self.space = self.spaces[namespace]
        self.evicted: list[PackTable] = []
        self._batch = batch
        self._moment = moment
        self._now = now
        keep: set[bytes | str] = {pack.pack_id for pack in batch.packs}
        for write in batch.manifests:
            keep.update([write.manifest.id, *write.packs])
        self._keep = {(namespace, held) for held in keep}

    def apply(self) -> None:
        """Do what the batch says."""
        batch = self._batch
        for pack_id in batch.deletions:
            self._delete(self.space, pack_id)
        for pack_id in batch.bad:
            self._delete(self.space, pack_id, alone=True)
        for pack in batch.packs:
            self._add(pack)
        for write in batch.manifests:
            self._put_manifest(write)
        for manifest_id, pinned in batch.pins:
            if manifest_id in self.space.chains:
                self.space.chains[manifest_id] = self.space.chains[manifest_id]._replace(pinned=pinned)
        for pack_id in batch.touches:
            self._touch(pack_id)

    def evict(self, enough: Callable[[int], bool]) -> bool:
        """Take what is listed first, until what is held is little enough; whether it is."""
        for candidate in self._oldest():
            if enough(self.held_bytes):
                break
            self._remove(candidate)
        return enough(self.held_bytes)

    def expire(self, ttl_s: float) -> None:
        """Take what was last used so long ago."""
        for candidate in self._oldest():
            if candidate.time < self._now - ttl_s:
                self._remove(candidate)

    @property
    def held_bytes(self) -> int:
        """In all namespaces."""
        return sum(space.held_bytes for space in self.spaces.values())

    def _oldest(self) -> Iterator[Candidate]:
        found: list[Candidate] = []
        for name, space in self.spaces.items():
            pinned = space.pinned_packs
            found += [
                Candidate(use.place, UNKNOWN_DEPTH - use.depth, False, name, pack_id, use.time)
                for pack_id, use in space.uses.items()
                if pack_id not in pinned and (name, pack_id) not in self._keep
            ]
            found += [
                Candidate(held.moment, UNKNOWN_DEPTH, True, name, manifest_id, held.time)
                for manifest_id, held in space.chains.items()
                if not held.pinned and (name, manifest_id) not in self._keep
            ]
        return iter(sorted(found))

    def _remove(self, candidate: Candidate) -> None:
        """It may be gone already, with something older."""
        space = self.spaces[candidate.namespace]
        if isinstance(candidate.id, bytes):
            self._delete(space, candidate.id)
        elif candidate.id in space.chains:
            self._drop(space, candidate.id)

    def _touch(self, pack_id: bytes, at_least: int = 0) -> int:
        """Used now, and listed at that place or behind it; its place."""
        use = self.space.uses.get(pack_id)
        if use is None:
            return at_least
        place = max(use.place, 2 * self._moment - use.place, at_least)
        self.space.uses[pack_id] = use._replace(moment=self._moment, time=self._now, place=place)
        return place

    def _add(self, pack: PackWriter) -> None:
        held = self.space.packs.get(pack.pack_id)
        if held is not None and held.readable():
            self._touch(pack.pack_id)
            return
        payload = bytearray()
        for piece in pack.stream():
            payload += piece
        self.space.packs[pack.pack_id] = StoredPack(pack.table.encode(), payload)
        depth = min((frame.depth for frame in pack.table.frames), default=UNKNOWN_DEPTH)
        self.space.uses[pack.pack_id] = PackUse(self._moment, self._now, depth, self._moment)
        self.space.note(pack.pack_id, True)

    def _put_manifest(self, write: ManifestWrite) -> None:
        name, packs = write.manifest.id, tuple(dict.fromkeys(write.packs))
        before = self.space.chains.get(name)
        self.space.manifests[name] = StoredManifest(encode_manifest(write.manifest), encode_manifest_keys(write.keys))
        self.space.chains[name] = Chain(
            self._moment, self._now, write.manifest.ordered, packs, before is not None and before.pinned
        )
        place = 0
        for pack_id in reversed(packs):
            place = self._touch(pack_id, place if write.manifest.ordered else 0)

    def _delete(self, space: Space, pack_id: bytes, *, alone: bool = False) -> None:
        """With the manifests that name it, and, but ``alone``, what only they made reachable behind it."""
        doomed = [pack_id]
        while doomed:
            pack_id = doomed.pop()
            for manifest_id in space.naming(pack_id):
                held = self._drop(space, manifest_id)
                later = held.packs[held.packs.index(pack_id) + 1 :] if held.ordered and not alone else ()
                doomed += [other for other in later if not space.naming(other) and not self._keeps(space, other)]
            gone = space.packs.pop(pack_id, None)
            space.uses.pop(pack_id, None)
            if gone is not None:
                space.note(pack_id, False)
                self.evicted += gone.readable()

    def _drop(self, space: Space, manifest_id: str) -> Chain:
        del space.manifests[manifest_id]
        return space.chains.pop(manifest_id)

    def _keeps(self, space: Space, pack_id: bytes) -> bool:
        return (space.namespace.id, pack_id) in self._keep
