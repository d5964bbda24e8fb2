"""Allocator of pages in the segment files, and payloads of packs. Its state is rows in LMDB, changed in the same
transactions as the rows of packs.

1. Every page of every recorded segment belongs to exactly one extent: of a pack, free, or aging.
2. Free extents never touch: neighbours are merged.
3. Extents freed by a transaction age first, because readers may still see them and the transaction may be aborted. A
   later transaction makes them free, once no snapshot is older than the transaction that freed them.
4. The payloads of a store are all in extents, or all in chunked values of LMDB (inline): the placement never changes.
5. The transaction that publishes a pack allocates its extents, and their bytes are durable before it commits.
"""

from __future__ import annotations

import struct
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, NamedTuple

from persistkv.config import PAGE_BYTES
from persistkv.errors import CorruptStoreError, StoreFullError
from persistkv.storage.catalog.rows import META, RowPayloads, Rows
from persistkv.storage.format.codec import Buffer
from persistkv_lmdb.layout import AGING, EXTENTS, FREE, SEGMENTS, SIZES, SPACE_ROW, Transaction
from persistkv_lmdb.segments import Extent, SegmentFiles

_EXTENT = struct.Struct("<III")
_SEGMENT = struct.Struct(">I")
_PLACE = struct.Struct(">II")
_SIZE = struct.Struct(">III")
_AGING = struct.Struct(">QII")
_PAGES = struct.Struct("<I")
_SPACE = struct.Struct("<QQQ")

SEGMENT_BYTES = 1 << 30  # 1 GiB
_MOST_SEGMENTS = 64
"""Maximum number of segments, because each takes two file descriptors. A store of more than 64 GiB has larger
segments."""
_STEPS = 16  # a file grows by 1/16 of the present size, at most by 1/16 of the limit
_STEP_BYTES = (1 << 20, 128 << 20)  # 1 MiB to 128 MiB: bounds of a step
_LARGE_BYTES = 16 << 20  # 16 MiB: from this size on, a pack makes the file grow by four times its size


def decode_extents(row: Buffer) -> list[Extent]:
    """Return the extents in a row of the table ``extents``; an empty list if the row is damaged."""
    return [] if len(row) % _EXTENT.size else [Extent(*fields) for fields in _EXTENT.iter_unpack(row)]


def read_extents(rows: Rows, name: bytes) -> list[Extent] | None:
    """Return the extents of a pack; None if its payload is not in extents, an empty list if its row is damaged."""
    row = rows.get(EXTENTS, name)
    return None if row is None else decode_extents(row)


class Space(NamedTuple):
    """Counts of 4 KiB pages over all segments, as the last transaction recorded them."""

    total: int = 0
    free: int = 0
    """Pages that can be allocated without growing a file."""
    aging: int = 0
    """Released pages that cannot be allocated yet, because readers may still see them."""

    @property
    def used_bytes(self) -> int:
        """Bytes of the segment pages that payloads of packs occupy."""
        return max(0, self.total - self.free - self.aging) * PAGE_BYTES


def read_space(rows: Rows) -> Space:
    """Return the recorded counts of pages; zeros if the row is missing or invalid."""
    row = rows.get(META, SPACE_ROW)
    return Space() if row is None or len(row) != _SPACE.size else Space(*_SPACE.unpack(row))


class Allocator:
    """Allocator of segment pages within one transaction, which must call ``finish`` before it commits.

    A *name* is a namespace id followed by a pack id. If a method raises CorruptStoreError (fewer pages are free than
    the totals say, or an extent is outside of its segment), the transaction must be rolled back.
    """

    def __init__(self, transaction: Transaction) -> None:
        self._rows = transaction
        self._before = read_space(transaction)
        self.total, self.free, self.aging = self._before
        """Pages of all segments; free pages; aging pages."""

    @property
    def used(self) -> int:
        """Number of segment pages that payloads of packs occupy."""
        return self.total - self.free - self.aging

    def segments(self) -> dict[int, int]:
        """Return the number of pages of each segment, by segment number."""
        return {
            _unpack(_SEGMENT, key)[0]: _unpack(_PAGES, row)[0] for key, row in self._rows.starting_with(SEGMENTS, b"")
        }

    def publish(self, name: bytes, extents: Iterable[Extent]) -> None:
        """Record in which extents the payload of the pack ``name`` is stored."""
        self._rows.put(EXTENTS, name, b"".join([_EXTENT.pack(*extent) for extent in extents]))

    def largest(self) -> int:
        """Return the number of pages of the largest free extent; 0 if there is none."""
        with self._rows.cursor(SIZES) as cursor:
            pages: int = _unpack(_SIZE, cursor.key())[0] if cursor.last() else 0
        return pages

    def pieces(self) -> int:
        """Return the number of free and aging extents."""
        return self._rows.count(FREE) + self._rows.count(AGING)

    def take(self, pages: int) -> list[Extent]:
        """Allocate ``pages`` pages: from the smallest free extent that is large enough, otherwise from several."""
        taken: list[Extent] = []
        while pages:
            taken.append(self._cut(self._best(pages), pages))
            pages -= taken[-1].pages
        return taken

    def take_before(self, pages: int, place: Extent) -> list[Extent]:
        """Allocate ``pages`` pages before ``place`` (by segment, then page): from the first free extent that is large
        enough, otherwise from several, from the start on. Return an empty list if too few pages are free there.
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
        for extent in found:
            taken.append(self._cut(extent, pages))
            pages -= taken[-1].pages
        return taken

    def _cut(self, free: Extent, pages: int) -> Extent:
        """Allocate the first ``pages`` pages of a free extent, or all if it has fewer."""
        taken = free._replace(pages=min(pages, free.pages))
        self._replace([free], Extent(free.segment, taken.end, free.end - taken.end))
        self.free -= taken.pages
        return taken

    def free_now(self, extents: Iterable[Extent]) -> None:
        """Make extents that no reader can see free at once, without aging."""
        for extent in extents:
            self._join(extent)
            self.free += extent.pages

    def retire(self, name: bytes) -> bool:
        """Release the extents of the pack ``name``: they age before they are free. Return False if it has none."""
        extents = read_extents(self._rows, name)
        if extents is None:
            return False
        self._rows.delete(EXTENTS, name)
        segments = self.segments()
        for extent in extents:
            if not 0 < extent.pages <= segments.get(extent.segment, 0) - extent.page:
                continue  # damaged row: its pages are leaked, so that no page of another pack is freed
            key = _AGING.pack(self._rows.txn.id(), extent.segment, extent.page)
            self._rows.put(AGING, key, _PAGES.pack(extent.pages))
            self.aging += extent.pages
        return True

    def free_aged(self, oldest: int) -> None:
        """Make aging extents free, except those that the snapshot of transaction ``oldest`` may see."""
        with self._rows.cursor(AGING) as cursor:
            while cursor.first():
                number, segment, page = _unpack(_AGING, cursor.key())
                if number > oldest:
                    return
                extent = Extent(segment, page, *_unpack(_PAGES, cursor.value()))
                cursor.delete()
                self.aging -= extent.pages
                self.free_now([extent])

    def resize(self, segment: int, before: int, pages: int) -> None:
        """Record that a segment has ``pages`` pages instead of ``before``. Added pages become free; removed ones are
        free.
        """
        self._rows.put(SEGMENTS, _SEGMENT.pack(segment), _PAGES.pack(pages))
        self.total += pages - before
        if pages > before:
            self.free_now([Extent(segment, before, pages - before)])
            return
        tail = self._last_free(segment)
        if tail is None or tail.end != before or tail.page > pages:
            raise CorruptStoreError(f"segment {segment}: pages {pages} to {before} are not free")
        self._replace([tail], Extent(segment, tail.page, pages - tail.page))
        self.free -= before - pages

    def free_tail(self, segment: int, pages: int) -> int:
        """Return the number of free pages at the end of a segment that has ``pages`` pages."""
        tail = self._last_free(segment)
        return tail.pages if tail is not None and tail.end == pages else 0

    def finish(self) -> None:
        """Record the totals in LMDB."""
        totals = (self.total, self.free, self.aging)
        if totals != self._before:
            self._rows.put(META, SPACE_ROW, _SPACE.pack(*totals))

    def free_extents(self) -> Iterator[Extent]:
        """Yield all free extents, ordered by segment and page."""
        return map(_extent_at, self._rows.starting_with(FREE, b""))

    def free_sizes(self) -> Iterator[Extent]:
        """Yield all free extents, ordered by size, as the table ``sizes`` lists them."""
        for key, _ in self._rows.starting_with(SIZES, b""):
            pages, segment, page = _unpack(_SIZE, key)
            yield Extent(segment, page, pages)

    def aging_extents(self) -> Iterator[tuple[int, Extent]]:
        """Yield all aging extents, each with the number of the transaction that freed it."""
        for key, row in self._rows.starting_with(AGING, b""):
            number, segment, page = _unpack(_AGING, key)
            yield number, Extent(segment, page, *_unpack(_PAGES, row))

    def _best(self, pages: int) -> Extent:
        with self._rows.cursor(SIZES) as cursor:
            if not cursor.set_range(_SIZE.pack(pages, 0, 0)) and not cursor.last():
                raise CorruptStoreError("there are fewer free extents than the totals say")
            size, segment, page = _unpack(_SIZE, cursor.key())
        row = self._rows.get(SEGMENTS, _SEGMENT.pack(segment))
        if not size or row is None or page + size > _unpack(_PAGES, row)[0]:
            raise CorruptStoreError(f"a free extent of {size} pages is outside of segment {segment}")
        return Extent(segment, page, size)

    def _first_fit(self, pages: int) -> Extent | None:
        """Return the first free extent with at least ``pages`` pages, by looking at the first extent of each size."""
        first: Extent | None = None
        with self._rows.cursor(SIZES) as cursor:
            found = cursor.set_range(_SIZE.pack(pages, 0, 0))
            while found:
                size, segment, page = _unpack(_SIZE, cursor.key())
                extent = Extent(segment, page, size)
                first = extent if first is None else min(first, extent)
                found = cursor.set_range(_SIZE.pack(size + 1, 0, 0))
        return first

    def _join(self, extent: Extent) -> None:
        """Record a free extent, merged with the free extents that it touches."""
        with self._rows.cursor(FREE) as cursor:
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
        with self._rows.cursor(FREE) as cursor:
            found = cursor.prev() if cursor.set_range(_PLACE.pack(segment + 1, 0)) else cursor.last()
            last = _extent_at(cursor.item()) if found else None
        return last if last is not None and last.segment == segment else None

    def _replace(self, old: Iterable[Extent], new: Extent) -> None:
        """Replace free extents by another one, or by none if ``new`` has no pages.

        The new row is put first: a database that becomes empty loses a page until the transaction ends.
        """
        place = _PLACE.pack(new.segment, new.page)
        if new.pages:
            self._rows.put(FREE, place, _PAGES.pack(new.pages))
            self._rows.put(SIZES, _SIZE.pack(new.pages, new.segment, new.page), b"")
        for extent in old:
            if not new.pages or _PLACE.pack(extent.segment, extent.page) != place:
                self._rows.delete(FREE, _PLACE.pack(extent.segment, extent.page))
            self._rows.delete(SIZES, _SIZE.pack(extent.pages, extent.segment, extent.page))


class Payloads:
    """Payload storage of one write transaction. Implements ``persistkv.storage.catalog.Payloads``.

    :param inline: whether payloads are stored in LMDB.
    :param limit: bound on the bytes of all segments.
    """

    def __init__(self, transaction: Transaction, files: SegmentFiles, limit: int, *, inline: bool) -> None:
        self.limit = limit
        self.allocator = Allocator(transaction)
        self._rows = transaction
        self._files = files
        self._inline = RowPayloads(transaction)
        self._is_inline = inline

    def write(self, name: bytes, stream: Iterator[Buffer], at_most: int) -> None:
        """Store a payload of up to ``at_most`` bytes, whose buffers are in use until ``SegmentFiles.sync`` returns.

        :raises StoreFullError: too few pages are free, and the limit or the disk keeps the segments from growing.
        """
        if self._is_inline:
            self._inline.write(name, stream, at_most)
            return
        pages = _pages_of(at_most)
        if pages > self.allocator.largest():
            self._grow(pages)
        if pages > self.allocator.free:
            raise StoreFullError(
                f"{at_most} bytes of payload: {self.allocator.free * PAGE_BYTES} are free in the segments"
            )
        taken = self.allocator.take(pages)
        written = _pages_of(self._files.write(taken, stream))
        kept = []
        for extent in taken:
            count = min(extent.pages, written)
            written -= count
            if count:
                kept.append(extent._replace(pages=count))
            if count < extent.pages:
                self.allocator.free_now([extent._replace(page=extent.page + count, pages=extent.pages - count)])
        self.allocator.publish(name, kept)

    def delete(self, name: bytes) -> None:
        if not self.allocator.retire(name):
            self._inline.delete(name)

    def lower(self, name: bytes, length: int) -> bool:
        """Move a pack's payload of ``length`` bytes to free pages nearer to the start of the segments. Return False,
        with nothing changed, if there are too few, or if the payload cannot be read.
        """
        extents = read_extents(self._rows, name)
        taken = self.allocator.take_before(_pages_of(length), max(extents)) if extents else []
        if not extents or not taken:
            return False
        payload = memoryview(bytearray(length))
        if self._files.read([(extents, 0, [payload])]) != [True]:
            self.allocator.free_now(taken)
            return False
        self._files.write(taken, iter([payload]))
        self.allocator.retire(name)
        self.allocator.publish(name, taken)
        return True

    def shrink(self, limit: int) -> None:
        """Release free pages at the ends of segments, down to ``limit`` bytes in all. A later transaction truncates the
        files, because this one may be aborted.
        """
        excess = self.allocator.total - limit // PAGE_BYTES
        if excess <= 0 or not self.allocator.free:
            return
        for segment, pages in sorted(self.allocator.segments().items(), reverse=True):
            count = min(excess, self.allocator.free_tail(segment, pages))
            if count > 0:
                self.allocator.resize(segment, pages, pages - count)
                excess -= count

    def _grow(self, pages: int) -> None:
        """Grow segments by at least ``pages`` pages, or by fewer if the limit or the disk prevents it.

        :raises StoreFullError: the disk is full, and fewer than ``pages`` pages are free.
        """
        most, total = self.limit // PAGE_BYTES, self.allocator.total
        full = max(SEGMENT_BYTES // PAGE_BYTES, -(-most // _MOST_SEGMENTS))
        least, largest = (number // PAGE_BYTES for number in _STEP_BYTES)
        # packs after a large one are likely to be large, too, and growing takes 0.5 ms, whatever the step
        ahead = 4 * pages if pages * PAGE_BYTES >= _LARGE_BYTES else 0
        step = min(max(total // _STEPS, least, ahead), largest, most // _STEPS)
        wanted = min(max(step, pages), most - total)
        while wanted > 0:
            segments = self.allocator.segments()  # truncated ones grow before a new one is created
            number = next((number for number, held in segments.items() if held < full), max(segments, default=-1) + 1)
            held = segments.get(number, 0)
            count = min(wanted, full - held)
            try:
                self._files.grow(number, held, held + count)
            except StoreFullError:
                if pages > self.allocator.free:
                    raise
                return
            self.allocator.resize(number, held, held + count)
            wanted -= count


def _extent_at(item: Sequence[Buffer]) -> Extent:
    return Extent(*_unpack(_PLACE, item[0]), *_unpack(_PAGES, item[1]))


def _pages_of(length: int) -> int:
    return -(-length // PAGE_BYTES)


def _unpack(shape: struct.Struct, row: Buffer) -> tuple[Any, ...]:
    if len(row) != shape.size:
        raise CorruptStoreError(f"a row of the free space has {len(row)} bytes instead of {shape.size}")
    return shape.unpack(row)
