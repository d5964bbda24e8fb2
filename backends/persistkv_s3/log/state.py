"""State of a namespace: the merged entries of all writers.

1. Merging is idempotent and commutative: of two entries about one object the one with the greater stamp wins, so
   handles that merged the same entries have the same state.
2. A pack is held if the newest entry about it adds it, and its table is valid.
3. Changes are numbered in the order of merging. A cursor is such a number and a digest of the packs, which shows
   whether a cursor of another handle is current.

``lock`` is held during one call and never during I/O: many threads read while one merges.
"""

from __future__ import annotations

import os
import struct
import threading
from collections.abc import Iterable
from hashlib import blake2b
from operator import xor
from typing import NamedTuple

from persistkv.errors import CorruptPackError
from persistkv.storage.backend import Changes
from persistkv.storage.extensions import RequestUse
from persistkv.storage.format.pack import ID_BYTES, UNKNOWN_DEPTH, PackTable
from persistkv_s3.log.layout import Entry, GoneRow, LogName, ManifestRow, PackRow, Stamp, split_ids, tags_before

CHANGES_KEPT = 4096
_REMEMBER_S = 7 * 86_400.0  # one week: after a longer pause, a handle may list a removed pack again, and its reads miss
_CURSOR = struct.Struct("<8sQ16s")
_NEVER = Stamp(-1, b"")


class LastUse(NamedTuple):
    """Time of the last use."""

    moment: int
    time: float
    """Seconds since the epoch."""


class PackState(NamedTuple):
    """State of a pack that is held."""

    table: PackTable
    generation: int
    stamp: Stamp
    time: float
    """Time of the commit that added it."""
    used: LastUse
    table_bytes: int
    """Bytes of its tags and its table."""
    tags: bytes
    """See ``authentication``."""

    @property
    def depth(self) -> int:
        """Least depth of its frames."""
        return min((frame.depth for frame in self.table.frames), default=UNKNOWN_DEPTH)

    @property
    def stored_bytes(self) -> int:
        """Bytes of its object, and of its table in the index."""
        return self.table.payload_length + 2 * self.table_bytes


class ManifestState(NamedTuple):
    """State of a manifest that is held."""

    row: ManifestRow
    head: bytes
    """Sealed; may be damaged."""
    packs: tuple[bytes, ...]
    stamp: Stamp
    used: LastUse

    @property
    def keys(self) -> LogName:
        """Name of the object that holds its keys."""
        return LogName(self.row.keys_writer, self.row.keys_number)

    @property
    def stored_bytes(self) -> int:
        """Bytes of its head and keys."""
        return len(self.head) + self.row.keys_length + ID_BYTES * len(self.packs)


class Removal(NamedTuple):
    """Removal of a pack or manifest."""

    stamp: Stamp
    time: float
    generation: int = 0
    """Of a pack: the removed generation."""


class LogState:
    """See the top of this file. Attributes are read while holding ``lock``, or in the one thread that merges."""

    def __init__(self) -> None:
        self.lock = threading.RLock()
        self.packs: dict[bytes, PackState] = {}
        self.gone: dict[bytes, Removal] = {}
        self.manifests: dict[str, ManifestState] = {}
        self.manifests_gone: dict[str, Removal] = {}
        self.naming: dict[bytes, set[str]] = {}
        """For each pack, the manifests that reference it."""
        self.moment = 0
        self.time = 0.0
        self.damaged = False
        """An entry or a root was unreadable: the state is incomplete, and no snapshot may be taken of it."""
        self._pins: dict[str, tuple[Stamp, bool]] = {}
        self._handle = os.urandom(8)
        self._log: list[tuple[bytes, bool]] = []
        self._position = 0
        self._digest = bytes(16)

    def pinned(self, manifest_id: str) -> bool:
        """Return whether a pin protects a manifest from eviction."""
        stamp, pinned = self._pins.get(manifest_id, (_NEVER, False))
        gone = self.manifests_gone.get(manifest_id)
        return pinned and (gone is None or stamp > gone.stamp)

    @property
    def pinned_packs(self) -> set[bytes]:
        """Packs that pinned manifests reference."""
        names = [name for name in self._pins if name in self.manifests and self.pinned(name)]
        return {pack_id for name in names for pack_id in self.manifests[name].packs}

    def request_use(self, manifest_id: str) -> RequestUse | None:
        """Return the last use of a request; None if it or its last pack is not held."""
        with self.lock:
            held = self.manifests.get(manifest_id)
            if held is None:
                return None
            pinned = self.pinned(manifest_id)
            if not held.packs:
                return RequestUse(held.used.time, False, 0, pinned)
            last = self.packs.get(held.packs[-1])
            if last is None:
                return None
            naming = [self.manifests[name] for name in self.naming[held.packs[-1]]]
            tables = [self.packs[pack_id].table for pack_id in held.packs if pack_id in self.packs]
            return RequestUse(
                last_used=last.used.time,
                reused=last.used.moment > held.used.moment,
                shared_by=len(naming) - 1,
                pinned=pinned,
                hits=sum(other.used.moment > held.used.moment for other in naming),
                packs_raw_bytes=sum(table.raw_length for table in tables),
                packs_stored_bytes=sum(table.payload_length for table in tables),
            )

    @property
    def stored_bytes(self) -> int:
        """Bytes of all packs and manifests."""
        packs = sum(pack.stored_bytes for pack in self.packs.values())
        return packs + sum(manifest.stored_bytes for manifest in self.manifests.values())

    def merge(self, entry: Entry) -> None:
        """Apply the entry of a commit."""
        head = entry.head
        with self.lock:
            self.moment = max(self.moment, head.moment)
            self.time = max(self.time, head.time)
            use = LastUse(head.moment, head.time)
            for gone in head.gone:
                self._lose(gone.pack_id, Removal(head.stamp, head.time, gone.generation))
            for row in head.packs:
                self._gain(row, entry)
            for pack_id in split_ids(head.uses):
                self.use(pack_id, use)
            for name in head.manifests_gone:
                self._drop(name, Removal(head.stamp, head.time))
            for manifest in head.manifests:
                self._keep(ManifestState(manifest, entry.body(manifest), split_ids(manifest.packs), head.stamp, use))
            for name, pinned in head.pins:
                if self._pins.get(name, (_NEVER, False))[0] < head.stamp:
                    self._pins[name] = (head.stamp, pinned)

    def use(self, pack_id: bytes, use: LastUse) -> None:
        """Record the use of a pack; ignored if it is not held."""
        with self.lock:
            held = self.packs.get(pack_id)
            if held is not None and held.used < use:
                self.packs[pack_id] = held._replace(used=use)

    def _gain(self, row: PackRow, entry: Entry) -> None:
        head, pack_id, generation, stamp = entry.head, row.pack_id, row.generation, entry.head.stamp
        held = self.packs.get(pack_id)
        if _known(stamp, held) or _follows(self.gone.get(pack_id), stamp):
            return
        try:
            body = entry.body(row)
            table = PackTable.parse(body)
        except CorruptPackError:
            return
        if (table.pack_id, table.namespace) != (pack_id, head.namespace):
            return
        self.gone.pop(pack_id, None)
        use = LastUse(head.moment, head.time)
        stored = PackState(table, generation, stamp, head.time, use, row.length, tags_before(body))
        if held is None or _face(held) != _face(stored):
            self._forget(pack_id)
            self._note(pack_id, True, generation)
        self.packs[pack_id] = stored if held is None else stored._replace(used=max(use, held.used))

    def _lose(self, pack_id: bytes, gone: Removal) -> None:
        before = self.gone.get(pack_id)
        if _known(gone.stamp, self.packs.get(pack_id)) or _known(gone.stamp, before):
            return
        self._forget(pack_id)
        self.gone[pack_id] = (
            gone if before is None else gone._replace(generation=max(gone.generation, before.generation))
        )

    def _forget(self, pack_id: bytes) -> None:
        held = self.packs.pop(pack_id, None)
        if held is not None:
            self._note(pack_id, False, held.generation)

    def _note(self, pack_id: bytes, came: bool, generation: int) -> None:
        entry = blake2b(pack_id + generation.to_bytes(4, "little"), digest_size=16).digest()
        self._digest = bytes(map(xor, self._digest, entry))
        self._position += 1
        self._log.append((pack_id, came))
        if len(self._log) > 2 * CHANGES_KEPT:
            del self._log[:CHANGES_KEPT]

    def _keep(self, manifest: ManifestState) -> None:
        name = manifest.row.id
        if _known(manifest.stamp, self.manifests.get(name)) or _follows(self.manifests_gone.get(name), manifest.stamp):
            return
        self._unname(name)
        self.manifests[name] = manifest
        for pack_id in manifest.packs:
            self.naming.setdefault(pack_id, set()).add(name)

    def _drop(self, name: str, gone: Removal) -> None:
        if _known(gone.stamp, self.manifests.get(name)) or _known(gone.stamp, self.manifests_gone.get(name)):
            return
        self._unname(name)
        self.manifests_gone[name] = gone

    def _unname(self, name: str) -> None:
        held = self.manifests.pop(name, None)
        for pack_id in () if held is None else held.packs:
            names = self.naming.get(pack_id, set())
            names.discard(name)
            if not names:
                self.naming.pop(pack_id, None)

    def lose(self, pack_id: bytes, held: PackState) -> bool:
        """Remove a pack whose object is missing; return False if the state has another generation of it by now."""
        with self.lock:
            current = self.packs.get(pack_id)
            if current is None or current.generation != held.generation:
                return False
            self._forget(pack_id)
            self.gone[pack_id] = Removal(held.stamp, held.time, held.generation)
            return True

    def relearn(self, pack_ids: Iterable[bytes]) -> None:
        """Re-announce packs whose tables changed."""
        with self.lock:
            for pack_id in pack_ids:
                if (held := self.packs.get(pack_id)) is not None:
                    self._note(pack_id, False, held.generation)
                    self._note(pack_id, True, held.generation)

    def replace(self, fresh: LogState) -> None:
        """Replace the content by that of ``fresh``, and log the differences as changes."""
        with self.lock, fresh.lock:
            before, after = self.packs, fresh.packs
            for pack_id, held in before.items():
                if pack_id not in after or _face(after[pack_id]) != _face(held):
                    self._note(pack_id, False, held.generation)
            for pack_id, held in after.items():
                if pack_id not in before or _face(before[pack_id]) != _face(held):
                    self._note(pack_id, True, held.generation)
            self.packs, self.gone = fresh.packs, fresh.gone
            self.manifests, self.manifests_gone = fresh.manifests, fresh.manifests_gone
            self.naming, self._pins = fresh.naming, fresh._pins
            self.damaged = fresh.damaged
            self.moment = max(self.moment, fresh.moment)
            self.time = max(self.time, fresh.time)

    @property
    def cursor(self) -> bytes:
        """Cursor after all merged entries."""
        with self.lock:
            return _CURSOR.pack(self._handle, self._position, self._digest)

    def is_current(self, cursor: bytes) -> bool:
        """Return whether nothing has changed since the cursor."""
        with self.lock:
            return self._behind(cursor) == 0

    def _behind(self, cursor: bytes) -> int | None:
        """Return the number of changes since the cursor; None if it is unknown."""
        if len(cursor) != _CURSOR.size:
            return None
        handle, position, digest = _CURSOR.unpack(cursor)
        if handle != self._handle:
            return 0 if digest == self._digest else None
        behind: int = self._position - position
        return behind if 0 <= behind <= len(self._log) else None

    def changes(self, cursor: bytes | None) -> Changes:
        """See ``Backend.changes``."""
        with self.lock:
            behind = None if cursor is None else self._behind(cursor)
            if behind is None:
                return Changes(self.cursor, [pack.table for pack in self.packs.values()], reset=True)
            moved = self._log[len(self._log) - behind :]
            came = dict.fromkeys(pack_id for pack_id, came in moved if came)
            added = [self.packs[pack_id].table for pack_id in came if pack_id in self.packs]
            return Changes(self.cursor, added, [pack_id for pack_id, came in moved if not came])

    def entries(self, namespace: bytes) -> list[Entry]:
        """Return the whole content, as one entry for each stamp and time. Called by the thread that merges."""
        newest = self.time
        found: dict[tuple[Stamp, float], Entry] = {}
        uses: dict[tuple[Stamp, float], list[bytes]] = {}

        def part(stamp: Stamp, time: float) -> Entry:
            return found.setdefault((stamp, time), Entry.of(namespace, stamp, time))

        for pack_id, pack in list(self.packs.items()):  # readers may remove some meanwhile
            part(pack.stamp, pack.time).add_pack(pack_id, pack.generation, pack.tags + pack.table.encode())
            if pack.used.moment != pack.stamp.moment:
                used = (Stamp(pack.used.moment, pack.stamp.writer), pack.used.time)
                part(*used)
                uses.setdefault(used, []).append(pack_id)
        for manifest in self.manifests.values():
            part(manifest.stamp, manifest.used.time).add_manifest(manifest.row, manifest.head)
        for pack_id, gone in list(self.gone.items()):
            if gone.time > newest - _REMEMBER_S:
                part(gone.stamp, gone.time).head.gone.append(GoneRow(pack_id, gone.generation))
        for name, gone in self.manifests_gone.items():
            if gone.time > newest - _REMEMBER_S and name not in self.manifests:
                part(gone.stamp, gone.time).head.manifests_gone.append(name)
        for name, (stamp, pinned) in self._pins.items():
            if name in self.manifests:
                part(stamp, newest).head.pins.append((name, pinned))
        for used, pack_ids in uses.items():
            found[used].head.uses = b"".join(pack_ids)
        return [found[key] for key in sorted(found)]


def _known(stamp: Stamp, about: PackState | ManifestState | Removal | None) -> bool:
    """Return whether a change is not newer than the known one."""
    return about is not None and stamp <= about.stamp


def _follows(gone: Removal | None, stamp: Stamp) -> bool:
    """Return whether a removal is newer than an addition; of equal stamps the addition wins."""
    return gone is not None and stamp < gone.stamp


def _face(pack: PackState) -> tuple[int, PackTable]:
    return pack.generation, pack.table
