"""One commit, within a transaction that its caller begins and ends: a failure in here undoes all of it."""

from __future__ import annotations

import math
import sqlite3
import time
from collections.abc import Iterable, Iterator
from typing import NamedTuple

from persistkv.config import PAGE_BYTES
from persistkv.errors import CorruptPackError, StoreFullError
from persistkv.storage.backend import CommitBatch, ManifestWrite
from persistkv.storage.manifest import encode_manifest, encode_manifest_keys
from persistkv.storage.pack import UNKNOWN_DEPTH, PackTable
from persistkv.storage.pack_writer import PackWriter
from persistkv_sqlite.schema import PIECE_BYTES

CHANGES_KEPT = 1024
_SPARE_PAGES = 32  # left free by what adds, so that there is room to delete

_OLDEST = """
SELECT place, depth, used, 1 AS is_pack, number, namespace, id FROM packs
    WHERE used < :before AND NOT EXISTS (
        SELECT 1 FROM links JOIN manifests ON manifests.number = links.manifest
        WHERE links.pack = packs.number AND manifests.pinned)
UNION ALL
SELECT place, -1, used, 0, number, namespace, id FROM manifests WHERE used < :before AND NOT pinned
ORDER BY place, depth DESC
"""  # manifests have the depth -1: the last of their place


class _Victim(NamedTuple):
    place: int
    depth: int
    used: float
    is_pack: bool
    number: int
    namespace: bytes
    id: bytes | str


def readable(packed: bytes) -> list[PackTable]:
    """The table of a catalogue row; nothing where it is damaged."""
    try:
        return [PackTable.parse(packed)]
    except CorruptPackError:
        return []


class Commit:
    """What a batch does to the database."""

    def __init__(self, db: sqlite3.Connection, namespace: bytes, batch: CommitBatch) -> None:
        self.evicted: list[PackTable] = []
        self._db = db
        self._namespace = namespace
        self._batch = batch
        self._keep = {pack.pack_id for pack in batch.packs}.union(*(write.packs for write in batch.manifests))
        moment, last = db.execute("SELECT moment, time FROM state").fetchone()
        self._moment, self._now = moment + 1, max(last, time.time())  # a machine's clock may go back
        db.execute("UPDATE state SET moment = moment + ?, time = ?", (batch.uses_anything, self._now))

    def run(self, max_pages: int | None, ttl_s: float | None) -> None:
        """Do all of it.

        :raises StoreFullError: it does not fit.
        """
        batch = self._batch
        for pack_id in batch.deletions:
            self._delete(self._numbers([pack_id]))
        self._delete(self._numbers(batch.bad), alone=True)
        self._touch({*batch.touches, *self._keep})
        if ttl_s is not None:
            for victim in self._oldest(self._now - ttl_s):
                self._remove(victim)
        if max_pages is not None and (batch.packs or batch.manifests):
            self._make_room(max_pages, _pages_for(batch))
        for pack in batch.packs:
            self._write(pack)
        for write in batch.manifests:
            self._put_manifest(write)
        for manifest_id, pinned in batch.pins:
            self._db.execute(
                "UPDATE manifests SET pinned = ? WHERE namespace = ? AND id = ?", (pinned, self._namespace, manifest_id)
            )
        self._db.execute("DELETE FROM changes WHERE number <= (SELECT max(number) FROM changes) - ?", (CHANGES_KEPT,))

    # Making room

    def _make_room(self, max_pages: int, needed: int) -> None:
        victims = self._oldest(math.inf)
        while max_pages - self._used_pages() < needed:
            victim = next(victims, None)
            if victim is None:
                raise StoreFullError(f"the commit takes {needed} pages of {PAGE_BYTES} bytes; there are {max_pages}")
            self._remove(victim)

    def _used_pages(self) -> int:
        pages, free = (self._db.execute(f"PRAGMA {name}").fetchone()[0] for name in ("page_count", "freelist_count"))
        return int(pages - free)

    def _oldest(self, before: float) -> Iterator[_Victim]:
        """What may go, in order. All of it is listed at once: simple, and slow for a very large store."""
        for row in self._db.execute(_OLDEST, {"before": before}).fetchall():
            victim = _Victim(*row)
            if victim.namespace != self._namespace or victim.id not in self._keep:
                yield victim

    def _remove(self, victim: _Victim) -> None:
        """It may be gone already, with something older."""
        if victim.is_pack:
            self._delete([victim.number])
        else:
            self._db.execute("DELETE FROM manifests WHERE number = ?", (victim.number,))

    def _delete(self, doomed: list[int], *, alone: bool = False) -> None:
        """Packs, with the manifests that name them, and, but ``alone``, what only those made reachable behind them."""
        while doomed:
            number = doomed.pop()
            naming = self._db.execute(
                "SELECT manifest, position, ordered FROM links JOIN manifests ON number = manifest WHERE pack = ?",
                (number,),
            )
            for manifest, position, ordered in naming.fetchall():
                later = "SELECT pack FROM links WHERE manifest = ? AND position > ? AND ?"
                behind = [pack for (pack,) in self._db.execute(later, (manifest, position, ordered))]
                self._db.execute("DELETE FROM manifests WHERE number = ?", (manifest,))
                doomed += () if alone else filter(self._is_loose, behind)
            self._drop(number)

    def _is_loose(self, number: int) -> bool:
        """Whether no manifest names a pack, nor does the batch."""
        if self._db.execute("SELECT 1 FROM links WHERE pack = ?", (number,)).fetchone():
            return False
        row = self._db.execute("SELECT namespace, id FROM packs WHERE number = ?", (number,)).fetchone()
        return row is None or row[0] != self._namespace or row[1] not in self._keep

    def _drop(self, number: int) -> None:
        row = self._db.execute("SELECT namespace, id, packed FROM packs WHERE number = ?", (number,)).fetchone()
        if row is not None:
            self._db.execute("DELETE FROM packs WHERE number = ?", (number,))
            self._note(row[0], row[1], came=False)
            self.evicted += readable(row[2])

    # Adding

    def _touch(self, pack_ids: Iterable[bytes]) -> None:
        """What came back after a pause is listed as far behind this moment as its place lay before it."""
        rows = [(self._moment, self._now, self._namespace, pack_id) for pack_id in pack_ids]
        update = "UPDATE packs SET place = max(place, 2 * ? - place), used = ? WHERE namespace = ? AND id = ?"
        self._db.executemany(update, rows)

    def _write(self, pack: PackWriter) -> None:
        """The first of a name wins, unless its row does not read: then its place, and what names it, stay."""
        for number in self._numbers([pack.pack_id]):
            (packed,) = self._db.execute("SELECT packed FROM packs WHERE number = ?", (number,)).fetchone()
            if readable(packed):
                return
            self._db.execute("DELETE FROM packs WHERE number = ?", (number,))
            break
        else:
            (number,) = self._db.execute("SELECT coalesce(max(number), 0) + 1 FROM packs").fetchone()
        for index, piece in enumerate(_cut(pack)):
            self._db.execute("INSERT INTO pieces VALUES (?, ?, ?)", (number, index, piece))
        table = pack.table  # which is there now that the stream has run
        depth = min((frame.depth for frame in table.frames), default=UNKNOWN_DEPTH)
        totals = len(table.keys), table.raw_length, table.payload_length
        self._db.execute(
            "INSERT INTO packs VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?, ?)",
            (number, self._namespace, pack.pack_id, table.encode(), *totals, self._moment, self._now, depth),
        )
        self._note(self._namespace, pack.pack_id, came=True)

    def _put_manifest(self, write: ManifestWrite) -> None:
        name = self._namespace, write.manifest.id
        held = self._db.execute("SELECT number, pinned FROM manifests WHERE namespace = ? AND id = ?", name).fetchone()
        if held is not None:
            self._db.execute("DELETE FROM manifests WHERE number = ?", held[:1])
        body = encode_manifest(write.manifest), encode_manifest_keys(write.keys)
        use = self._moment, self._now, write.manifest.ordered, 0 if held is None else held[1]
        row = self._db.execute("INSERT INTO manifests VALUES (NULL, ?, ?, ?, ?, ?, ?, ?, ?)", (*name, *body, *use))
        links = [(row.lastrowid, at, pack) for at, pack in enumerate(self._numbers(dict.fromkeys(write.packs)))]
        self._db.executemany("INSERT INTO links VALUES (?, ?, ?)", links)
        if write.manifest.ordered:
            self._line_up([pack for _, _, pack in links])

    def _line_up(self, packs: list[int]) -> None:
        """None of a chain is listed before those behind it."""
        place = 0
        for number in reversed(packs):
            self._db.execute("UPDATE packs SET place = max(place, ?) WHERE number = ?", (place, number))
            (place,) = self._db.execute("SELECT place FROM packs WHERE number = ?", (number,)).fetchone()

    def _numbers(self, pack_ids: Iterable[bytes]) -> list[int]:
        """Of those packs of the namespace that are held."""
        find = "SELECT number FROM packs WHERE namespace = ? AND id = ?"
        rows = (self._db.execute(find, (self._namespace, pack_id)).fetchone() for pack_id in pack_ids)
        return [row[0] for row in rows if row is not None]

    def _note(self, namespace: bytes, pack_id: bytes, *, came: bool) -> None:
        row = self._db.execute("INSERT INTO changes VALUES (NULL, ?, ?, ?)", (namespace, pack_id, came))
        self._db.execute("UPDATE namespaces SET changed = ? WHERE id = ?", (row.lastrowid, namespace))


def _cut(pack: PackWriter) -> Iterator[bytes]:
    """The payload in pieces."""
    gathered = bytearray()
    for part in pack.stream():
        gathered += part
        while len(gathered) >= PIECE_BYTES:
            yield bytes(gathered[:PIECE_BYTES])
            del gathered[:PIECE_BYTES]
    yield bytes(gathered)


def _pages_for(batch: CommitBatch) -> int:
    """Pages that a batch may take: codecs may make it smaller, SQLite adds some."""
    frames = [len(list(segment.frame_bounds())) for pack in batch.packs for segment in pack.segments]
    num_bytes = sum(pack.raw_length + 2 * len(pack.keys.data) for pack in batch.packs) + 2 * PAGE_BYTES * sum(frames)
    num_bytes += sum(len(keys.data) + len(keys.lengths) for write in batch.manifests for keys in write.keys)
    rows = len(batch.packs) + sum(1 + len(write.packs) for write in batch.manifests)
    return num_bytes // PAGE_BYTES * 17 // 16 + rows + _SPARE_PAGES
