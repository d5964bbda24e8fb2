"""Allocator of pages in the segment files. Its state is rows, changed in the transaction that allocates.

1. Every page of every recorded segment belongs to exactly one extent: of a pack, free, or aging.
2. Free extents never touch: neighbours are merged.
3. Extents freed by a transaction age first, because readers may still see them and the transaction may be aborted. A
   later transaction makes them free, once no snapshot is older than the transaction that freed them.
"""

from __future__ import annotations

import struct
from collections.abc import Iterable, Iterator
from typing import Any, NamedTuple

from persistkv.config import PAGE_BYTES
from persistkv.errors import CorruptStoreError
from persistkv.storage.format.codec import Buffer
from persistkv_lmdb.layout import Transaction, rows

_EXTENT = struct.Struct("<III")
_SEGMENT = struct.Struct(">I")
_PLACE = struct.Struct(">II")
_SIZE = struct.Struct(">III")
_AGING = struct.Struct(">QII")
_PAGES = struct.Struct("<I")
_SPACE_ROW = b"space"
_SPACE = struct.Struct("<QQQ")


class Extent(NamedTuple):
    """Consecutive pages of one segment."""

    segment: int
    page: int
    pages: int

    @property
    def end(self) -> int:
        """The page after the last one."""
        return self.page + self.pages


def pages_of(length: int) -> int:
    """Return the number of pages that ``length`` bytes need."""
    return -(-length // PAGE_BYTES)


def encode_extents(extents: Iterable[Extent]) -> bytes:
    """Return the row of a pack."""
    return b"".join([_EXTENT.pack(*extent) for extent in extents])


def decode_extents(row: Buffer) -> list[Extent]:
    """Return the extents of a pack's row; an empty list if it is damaged."""
    return [] if len(row) % _EXTENT.size else [Extent(*fields) for fields in _EXTENT.iter_unpack(row)]


def read_extents(transaction: Transaction, name: bytes) -> list[Extent] | None:
    """Return the extents of a pack's payload; None if it is not stored in extents."""
    row = transaction.txn.get(name, db=transaction.db.extents)
    return None if row is None else decode_extents(row)


def first_place(transaction: Transaction, name: bytes) -> tuple[int, int]:
    """Return segment and page of the start of a payload; a value before all others if it is not stored in extents."""
    extents = read_extents(transaction, name)
    return (extents[0].segment, extents[0].page) if extents else (-1, 0)


class Allocator:
    """State of the allocator within one transaction."""

    def __init__(self, transaction: Transaction) -> None:
        self._txn, self._db = transaction
        self._transaction = transaction
        self._before = _recorded(transaction)
        self.total: int = self._before[0]
        self.free: int = self._before[1]
        self.aging: int = self._before[2]
        """Pages of all segments; free pages; aging pages."""

    @property
    def used(self) -> int:
        """Pages that payloads of packs occupy."""
        return self.total - self.free - self.aging

    def segments(self) -> dict[int, int]:
        """Return number and pages of each segment."""
        found = rows(self._transaction, self._db.segments, b"")
        return {_unpack(_SEGMENT, key)[0]: _unpack(_PAGES, row)[0] for key, row in found}

    def publish(self, name: bytes, extents: Iterable[Extent]) -> None:
        """Record the extents of a pack's payload."""
        self._txn.put(name, encode_extents(extents), db=self._db.extents)

    def largest(self) -> int:
        """Return the pages of the largest free extent."""
        with self._txn.cursor(self._db.sizes) as cursor:
            pages: int = _unpack(_SIZE, cursor.key())[0] if cursor.last() else 0
        return pages

    def pieces(self) -> int:
        """Return the number of free and aging extents."""
        return sum(int(self._txn.stat(db)["entries"]) for db in (self._db.free, self._db.aging))

    def take(self, pages: int) -> list[Extent]:
        """Allocate free pages: the smallest single extent that is large enough, otherwise several extents.

        :raises CorruptStoreError: fewer pages are free than the totals say.
        """
        taken: list[Extent] = []
        while pages:
            found = self._best(pages)
            taken.append(Extent(found.segment, found.page, min(pages, found.pages)))
            pages -= taken[-1].pages
            self._replace([found], Extent(found.segment, taken[-1].end, found.end - taken[-1].end))
        self.free -= sum(extent.pages for extent in taken)
        return taken

    def take_before(self, pages: int, place: Extent) -> list[Extent]:
        """Allocate free pages before ``place``: the first extent that is large enough, otherwise the first ones.

        :returns: an empty list if there are too few; nothing changed then.
        """
        whole = self._first_fit(pages)
        found: list[Extent] = []
        lacks = pages
        for extent in [whole] if whole is not None and whole < place else self.free_extents():
            if extent >= place or lacks <= 0:
                break
            found.append(extent)
            lacks -= extent.pages
        if lacks > 0:
            return []
        taken: list[Extent] = []
        left = pages
        for extent in found:
            taken.append(extent._replace(pages=min(left, extent.pages)))
            left -= taken[-1].pages
            self._replace([extent], Extent(extent.segment, taken[-1].end, extent.end - taken[-1].end))
        self.free -= pages
        return taken

    def untake(self, extents: Iterable[Extent]) -> None:
        """Return extents that this transaction allocated and did not publish to the free ones."""
        for extent in extents:
            self._join(extent)
            self.free += extent.pages

    def retire(self, name: bytes) -> bool:
        """Remove a pack's extents, which then age; return False if it has none."""
        extents = read_extents(self._transaction, name)
        if extents is None:
            return False
        self._txn.delete(name, db=self._db.extents)
        segments = self.segments()
        for extent in extents:
            if not 0 < extent.pages <= segments.get(extent.segment, 0) - extent.page:
                continue  # damaged row: its pages are leaked, so that no page of another pack is freed
            key = _AGING.pack(self._txn.id(), extent.segment, extent.page)
            self._txn.put(key, _PAGES.pack(extent.pages), db=self._db.aging)
            self.aging += extent.pages
        return True

    def ripen(self, oldest: int) -> None:
        """Free aging extents of transactions up to ``oldest``, the transaction that the oldest snapshot sees."""
        with self._txn.cursor(self._db.aging) as cursor:
            while cursor.first():
                number, segment, page = _unpack(_AGING, cursor.key())
                if number > oldest:
                    return
                extent = Extent(segment, page, *_unpack(_PAGES, cursor.value()))
                cursor.delete()
                self.aging -= extent.pages
                self.untake([extent])

    def resize(self, segment: int, before: int, pages: int) -> None:
        """Record a new number of pages of a segment.

        Pages after ``before`` become free, or those after ``pages``, which must be free, are removed.
        """
        self._txn.put(_SEGMENT.pack(segment), _PAGES.pack(pages), db=self._db.segments)
        self.total += pages - before
        if pages > before:
            self.untake([Extent(segment, before, pages - before)])
            return
        tail = self._last_free(segment)
        if tail is None or tail.end != before or tail.page > pages:
            raise CorruptStoreError(f"segment {segment}: pages {pages} to {before} are not free")
        self._replace([tail], Extent(segment, tail.page, pages - tail.page))
        self.free -= before - pages

    def free_tail(self, segment: int, pages: int) -> int:
        """Return the number of free pages at the end of a segment."""
        tail = self._last_free(segment)
        return tail.pages if tail is not None and tail.end == pages else 0

    def finish(self) -> None:
        """Write the totals if they changed."""
        totals = (self.total, self.free, self.aging)
        if totals != self._before:
            self._txn.put(_SPACE_ROW, _SPACE.pack(*totals), db=self._db.meta)

    def free_extents(self) -> Iterator[Extent]:
        """Yield all free extents by place."""
        for key, row in rows(self._transaction, self._db.free, b""):
            yield Extent(*_unpack(_PLACE, key), *_unpack(_PAGES, row))

    def free_sizes(self) -> Iterator[Extent]:
        """Yield all free extents by size, from the second index."""
        for key, _ in rows(self._transaction, self._db.sizes, b""):
            pages, segment, page = _unpack(_SIZE, key)
            yield Extent(segment, page, pages)

    def aging_extents(self) -> Iterator[tuple[int, Extent]]:
        """Yield all aging extents, each with the number of the transaction that freed it."""
        for key, row in rows(self._transaction, self._db.aging, b""):
            number, segment, page = _unpack(_AGING, key)
            yield number, Extent(segment, page, *_unpack(_PAGES, row))

    def _best(self, pages: int) -> Extent:
        with self._txn.cursor(self._db.sizes) as cursor:
            if not cursor.set_range(_SIZE.pack(pages, 0, 0)) and not cursor.last():
                raise CorruptStoreError("there are fewer free extents than the totals say")
            size, segment, page = _unpack(_SIZE, cursor.key())
        row = self._txn.get(_SEGMENT.pack(segment), db=self._db.segments)
        if not size or row is None or page + size > _unpack(_PAGES, row)[0]:
            raise CorruptStoreError(f"a free extent of {size} pages lies outside of segment {segment}")
        return Extent(segment, page, size)

    def _first_fit(self, pages: int) -> Extent | None:
        """Return the first free extent by place with at least ``pages`` pages; probes the first extent of each size."""
        first: Extent | None = None
        with self._txn.cursor(self._db.sizes) as cursor:
            found = cursor.set_range(_SIZE.pack(pages, 0, 0))
            while found:
                size, segment, page = _unpack(_SIZE, cursor.key())
                extent = Extent(segment, page, size)
                first = extent if first is None else min(first, extent)
                found = cursor.set_range(_SIZE.pack(size + 1, 0, 0))
        return first

    def _join(self, extent: Extent) -> None:
        """List a free extent, merged with the free extents that it touches."""
        with self._txn.cursor(self._db.free) as cursor:
            behind = _extent_at(cursor.item()) if cursor.set_range(_PLACE.pack(extent.segment, extent.page)) else None
            before = _extent_at(cursor.item()) if (cursor.prev() if behind else cursor.last()) else None
        touching = []
        if before is not None and (before.segment, before.end) == (extent.segment, extent.page):
            touching.append(before)
            extent = Extent(extent.segment, before.page, before.pages + extent.pages)
        if behind is not None and (behind.segment, behind.page) == (extent.segment, extent.end):
            touching.append(behind)
            extent = Extent(extent.segment, extent.page, extent.pages + behind.pages)
        self._replace(touching, extent)

    def _last_free(self, segment: int) -> Extent | None:
        with self._txn.cursor(self._db.free) as cursor:
            found = cursor.prev() if cursor.set_range(_PLACE.pack(segment + 1, 0)) else cursor.last()
            last = _extent_at(cursor.item()) if found else None
        return last if last is not None and last.segment == segment else None

    def _replace(self, old: Iterable[Extent], new: Extent) -> None:
        """Replace free extents by another one, or by none if ``new`` has no pages.

        The new row is put before the old ones are deleted: a database that becomes empty loses a page until the
        transaction ends.
        """
        if new.pages:
            self._txn.put(_place(new), _PAGES.pack(new.pages), db=self._db.free)
            self._txn.put(_size(new), b"", db=self._db.sizes)
        for extent in old:
            if not new.pages or _place(extent) != _place(new):
                self._txn.delete(_place(extent), db=self._db.free)
            self._txn.delete(_size(extent), db=self._db.sizes)


def recorded_bytes(transaction: Transaction) -> int:
    """Return the bytes of all segments."""
    return _recorded(transaction)[0] * PAGE_BYTES


def recorded_used_bytes(transaction: Transaction) -> int:
    """Return the bytes of all extents of packs."""
    total, free, aging = _recorded(transaction)
    return max(0, total - free - aging) * PAGE_BYTES


def _recorded(transaction: Transaction) -> tuple[int, int, int]:
    """Return the totals as the last transaction left them; zeros if the row is missing or invalid."""
    row = transaction.txn.get(_SPACE_ROW, db=transaction.db.meta)
    return (0, 0, 0) if row is None or len(row) != _SPACE.size else _SPACE.unpack(row)


def _place(extent: Extent) -> bytes:
    return _PLACE.pack(extent.segment, extent.page)


def _size(extent: Extent) -> bytes:
    return _SIZE.pack(extent.pages, extent.segment, extent.page)


def _extent_at(item: tuple[memoryview, memoryview]) -> Extent:
    return Extent(*_unpack(_PLACE, item[0]), *_unpack(_PAGES, item[1]))


def _unpack(shape: struct.Struct, row: Buffer) -> tuple[Any, ...]:
    if len(row) != shape.size:
        raise CorruptStoreError(f"a row of the free space has {len(row)} bytes instead of {shape.size}")
    return shape.unpack(row)
