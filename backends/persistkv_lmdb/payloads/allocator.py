"""Allocator of pages in the segment files, and payloads of packs. Its state is rows in LMDB,
changed in the same transactions as the rows of packs.

1. Every page of every recorded segment belongs to exactly one extent: of a pack, reserved by a
   writer, free, or a hole. Holes take no disk space: if a file system has no space for the files,
   free extents become holes.
2. Free extents never touch: neighbours are merged.
3. A writer writes into extents that a committed transaction has reserved for it, and into no
   others. The bytes are durable before the transaction begins that makes the extents a pack's.
4. The extents of a deleted pack are free at once. A reader whose pack is overwritten meanwhile
   reads bytes that fail verification, and then finds the pack deleted.
5. The payloads of a store are all in extents, or all in chunked values of LMDB (inline): the
   placement never changes.
"""

from __future__ import annotations

import struct
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from persistkv.config import PAGE_BYTES
from persistkv.errors import CorruptStoreError, StoreFullError
from persistkv.rounding import divide_up
from persistkv.storage.catalogue.rows import META, TableRows
from persistkv.storage.format.codec import Buffer
from persistkv_lmdb.layout import (
    EXTENTS,
    FREE,
    HOLES,
    RESERVED,
    SEGMENTS,
    SIZES,
    SPACE_ROW,
    WRITER,
)
from persistkv_lmdb.payloads.inline import InlinePayloads
from persistkv_lmdb.payloads.segments import PLACE, Extent, SegmentFiles

# Fields of rows. Big-endian in keys, so that LMDB's byte order is the order of the numbers.
_EXTENT = struct.Struct("<III")  # segment, first page, number of pages
_SEGMENT = struct.Struct(">I")  # number of a segment, as a key
# number of pages, segment, first page: a key of ``sizes``
_SIZE = struct.Struct(">III")
_PAGES = struct.Struct("<I")  # number of pages, as a value
_SPACE = struct.Struct("<QQQ")  # the fields of ``Space``

SEGMENT_BYTES = 1 << 30  # 1 GiB
_MOST_SEGMENTS = 64
"""Maximum number of segments, because each takes two file descriptors. A store of more than 64 GiB
has larger segments."""
# 1/16: share of the present size of all segments by which a file grows, and maximum share of their
# limit
_STEP_SHARE = 16
_LEAST_STEP_BYTES = 1 << 20  # 1 MiB
_MOST_STEP_BYTES = 128 << 20  # 128 MiB
# maximum number of pages of an extent, which is recorded in 32 bits
_MOST_PAGES = (1 << 32) - 1
_UNBOUNDED = 1 << 32  # stands for a bound on a number of extents: there is none
# maximum number of holes that one transaction makes, in milliseconds
_HOLES_AT_ONCE = 64
# 16 MiB: from this size on, a pack makes the file grow by four times its size
_LARGE_BYTES = 16 << 20


def encode_extents(extents: Iterable[Extent]) -> bytes:
    return b"".join([_EXTENT.pack(*extent) for extent in extents])


def decode_extents(row: Buffer) -> list[Extent]:
    """Return the extents in a row of the table ``extents``; an empty list if the row is damaged."""
    if len(row) % _EXTENT.size:
        return []
    return [Extent(*fields) for fields in _EXTENT.iter_unpack(row)]


def read_extents(rows: TableRows, name: bytes) -> list[Extent] | None:
    """Return the extents of a pack; None if its payload is not in extents, an empty list if its row
    is damaged."""
    row = rows.get(EXTENTS, name)
    if row is None:
        return None
    return decode_extents(row)


def read_reserved(rows: TableRows, writer: int) -> list[Extent]:
    """Return the extents that a writer has reserved, in the order in which it uses them."""
    row = rows.get(RESERVED, WRITER.pack(writer))
    if row is None:
        return []
    return decode_extents(row)


def pages_of(extents: Iterable[Extent]) -> int:
    """Return the number of pages of extents."""
    return sum(extent.pages for extent in extents)


def pages_for(length: int) -> int:
    """Return the number of pages that a payload of ``length`` bytes takes."""
    return divide_up(length, PAGE_BYTES)


def split(
    extents: Sequence[Extent],
    pages: int,
) -> tuple[list[Extent], list[Extent]]:
    """Divide extents into those of the first ``pages`` pages and the rest."""
    first: list[Extent] = []
    missing = pages
    for number, extent in enumerate(extents):
        if extent.pages <= missing:
            first.append(extent)
            missing -= extent.pages
            continue
        # the boundary is within this extent, or at its beginning if no page is missing
        begin, end = extent.split(missing)
        if begin.pages:
            first.append(begin)
        rest = [end, *extents[number + 1 :]]
        return first, rest
    return first, []


class Space(NamedTuple):
    """Counts of 4 KiB pages over all segments, as the last transaction recorded them."""

    total: int = 0
    """Pages with disk space, that is, without the holes."""
    free: int = 0
    """Pages that can be allocated without growing a file."""
    reserved: int = 0
    """Pages that writers have reserved, and that no pack has yet."""


def read_space(rows: TableRows) -> Space:
    """Return the recorded counts of pages; zeros if the row is missing or invalid."""
    row = rows.get(META, SPACE_ROW)
    if row is None or len(row) != _SPACE.size:
        return Space()
    return Space(*_SPACE.unpack(row))


class Allocator:
    """Allocator of segment pages within one transaction, which must call ``finish`` before it
    commits: the methods write extents to LMDB at once, but ``finish`` writes the totals.

    A *name* is a namespace id followed by a pack id. If a method raises CorruptStoreError (fewer
    pages are free than the totals say, or an extent is outside of its segment), the transaction
    must be rolled back.
    """

    def __init__(self, transaction: TableRows) -> None:
        self._rows = transaction
        self._recorded = read_space(transaction)
        """Totals as the last transaction recorded them."""
        self.total = self._recorded.total
        """Pages of all segments, without holes."""
        self.free = self._recorded.free
        """Free pages."""
        self.reserved = self._recorded.reserved
        """Reserved pages."""
        self._segments: dict[int, int] | None = None
        """Pages of each segment, holes included, by segment number; None until ``segments`` reads
        them."""

    @property
    def used(self) -> int:
        """Number of segment pages of packs, and reserved ones."""
        return self.total - self.free

    def segments(self) -> dict[int, int]:
        """Return the number of pages of each segment, holes included, by segment number. Do not
        change the dictionary."""
        if self._segments is None:
            self._segments = {}
            for key, row in self._rows.starting_with(SEGMENTS, prefix=b""):
                (segment,) = _unpack(_SEGMENT, key)
                (pages,) = _unpack(_PAGES, row)
                self._segments[segment] = pages
        return self._segments

    def _record_segment(self, segment: int, pages: int) -> None:
        """Record the length of a new segment, or of one that grew."""
        self.segments()[segment] = pages
        key = _SEGMENT.pack(segment)
        self._rows.put(SEGMENTS, key, _PAGES.pack(pages))

    def record_pack(self, name: bytes, extents: Iterable[Extent]) -> None:
        """Record in which extents the payload of the pack ``name`` is stored."""
        self._rows.put(EXTENTS, name, encode_extents(extents))

    def largest(self) -> int:
        """Return the number of pages of the largest free extent; 0 if there is none."""
        with self._rows.cursor(SIZES) as cursor:
            # the table is ordered by size
            if not cursor.last():
                return 0
            return _free_extent(cursor.key()).pages

    def num_free_extents(self) -> int:
        """Return the number of free extents."""
        return self._rows.count(FREE)

    def allocate(
        self,
        pages: int,
        most_extents: int = _UNBOUNDED,
    ) -> list[Extent]:
        """Allocate ``pages`` pages: from the smallest free extent that is large enough, otherwise
        from several. The caller has checked that so many are free.

        :param most_extents: allocate fewer pages rather than more extents.
        """
        taken: list[Extent] = []
        missing = pages
        while missing and len(taken) < most_extents:
            free = self._best_free_extent(missing)
            num_taken = min(missing, free.pages)
            extent, rest = free.split(num_taken)
            # the rest, which may have no pages, stays free
            self._replace_free([free], rest)
            self.free -= num_taken
            taken.append(extent)
            missing -= num_taken
        return taken

    def writers(self) -> list[int]:
        """Return the numbers of the writers that have reserved extents."""
        writers: list[int] = []
        for key, _ in self._rows.starting_with(RESERVED, prefix=b""):
            (writer,) = _unpack(WRITER, key)
            writers.append(writer)
        return writers

    def reserve(self, writer: int, extents: Sequence[Extent]) -> None:
        """Record allocated extents as the whole reservation of a writer; if ``extents`` is empty,
        delete its reservation. The extents of the former reservation stay allocated: the caller
        frees those that no pack occupies.
        """
        self.reserved -= pages_of(read_reserved(self._rows, writer))
        self.reserved += pages_of(extents)
        key = WRITER.pack(writer)
        if extents:
            self._rows.put(RESERVED, key, encode_extents(extents))
        else:
            self._rows.delete(RESERVED, key)

    def release(self, writer: int) -> None:
        """Make all extents free that a writer has reserved. It must not be writing into them."""
        extents = read_reserved(self._rows, writer)
        self.reserve(writer, extents=())
        self.make_free(extents)

    def make_free(self, extents: Iterable[Extent]) -> None:
        """Make allocated extents free."""
        for extent in extents:
            self._add_free_extent(extent)
            self.free += extent.pages

    def free_pack(self, name: bytes) -> None:
        """Make the extents of the pack ``name`` free, if it has any."""
        extents = read_extents(self._rows, name)
        if extents is None:
            return
        self._rows.delete(EXTENTS, name)
        segments = self.segments()
        for extent in extents:
            segment_end = segments.get(extent.segment, 0)
            # An extent outside of its segment means a damaged row. Its pages stay allocated to no
            # pack: freeing wrong ones could let another pack be overwritten.
            if extent.pages > 0 and extent.end <= segment_end:
                self.make_free([extent])

    def make_holes(self, pages: int, at_most: int) -> list[Extent]:
        """Turn free pages into holes, from the largest extents on, so that few holes are made;
        return these holes. The files are not changed: the caller punches them after the commit.

        :param pages: number of pages to turn into holes; fewer if fewer are free.
        :param at_most: maximum number of holes to make.
        """
        holes: list[Extent] = []
        left = pages
        while left > 0 and self.free and len(holes) < at_most:
            # no extent has so many pages, so this returns the largest one
            free = self._best_free_extent(_MOST_PAGES)
            num_kept = max(0, free.pages - left)
            kept, hole = free.split(num_kept)
            self._replace_free([free], kept)
            self._put_extent(HOLES, hole)
            self.free -= hole.pages
            self.total -= hole.pages
            left -= hole.pages
            holes.append(hole)
        return holes

    def fill(self, space: Extent, pages: int) -> None:
        """Record that the first ``pages`` pages of ``space`` have disk space now, and are free.

        :param space: a hole, or pages after the end of a segment, which may be new.
        """
        filled, rest = space.split(pages)
        segment_end = self.segments().get(space.segment, 0)
        is_after_end = space.page >= segment_end
        if is_after_end:
            self._record_segment(space.segment, filled.end)
        else:
            # only holes have a row; the rest of this one remains a hole
            self._rows.delete(HOLES, space.place)
            if rest.pages:
                self._put_extent(HOLES, rest)
        self.total += pages
        self.make_free([filled])

    def holes(self) -> Iterator[Extent]:
        """Yield all holes, ordered by segment and page."""
        return map(_extent_at, self._rows.starting_with(HOLES, prefix=b""))

    def record_files(
        self,
        segments: Sequence[Extent],
        holes: Sequence[Extent],
    ) -> None:
        """Record existing segment files in a new catalogue.

        :param segments: for each file, the extent of all its pages.
        :param holes: all of their pages that no pack has; their disk space is returned later.
        """
        for segment in segments:
            self._record_segment(segment.segment, segment.pages)
        for hole in holes:
            self._put_extent(HOLES, hole)
        # ``free`` does not change: every page outside of the holes belongs to a pack
        self.total += pages_of(segments) - pages_of(holes)

    def finish(self) -> None:
        """Record the totals in LMDB."""
        totals = (self.total, self.free, self.reserved)
        if totals != self._recorded:
            self._rows.put(META, SPACE_ROW, _SPACE.pack(*totals))

    def free_extents(self) -> Iterator[Extent]:
        """Yield all free extents, ordered by segment and page."""
        return map(_extent_at, self._rows.starting_with(FREE, prefix=b""))

    def free_sizes(self) -> Iterator[Extent]:
        """Yield all free extents, ordered by size, as the table ``sizes`` lists them."""
        for key, _ in self._rows.starting_with(SIZES, prefix=b""):
            yield _free_extent(key)

    def _best_free_extent(self, pages: int) -> Extent:
        """Return the smallest free extent of at least ``pages`` pages; if all are smaller, the
        largest one. It stays free: the caller changes its rows.

        :raises CorruptStoreError: there is none, or its row is damaged.
        """
        least_key = _SIZE.pack(pages, 0, 0)
        with self._rows.cursor(SIZES) as cursor:
            # the first entry of at least this size, otherwise the last entry
            is_found = cursor.set_range(least_key) or cursor.last()
            if not is_found:
                raise CorruptStoreError(
                    "there are fewer free extents than the totals say"
                )
            found = _free_extent(cursor.key())
        # check the row: a damaged one would let a payload be written outside of the recorded pages
        segment_end = self.segments().get(found.segment, 0)
        if not found.pages or found.end > segment_end:
            raise CorruptStoreError(
                f"a free extent of {found.pages} pages is outside of segment {found.segment}"
            )
        return found

    def _add_free_extent(self, extent: Extent) -> None:
        """Record a free extent, merged with the free extents that it touches."""
        before, after = self._neighbours(extent)
        merged = extent
        touching = []
        if before is not None and before.touches(merged):
            touching.append(before)
            merged = before._replace(pages=before.pages + merged.pages)
        if after is not None and merged.touches(after):
            touching.append(after)
            merged = merged._replace(pages=merged.pages + after.pages)
        self._replace_free(touching, merged)

    def _neighbours(self, extent: Extent) -> tuple[Extent | None, Extent | None]:
        """Return the last free extent before, and the first one after, an extent that is not free.
        They need not touch it, nor be in its segment. None: there is none."""
        before = None
        after = None
        with self._rows.cursor(FREE) as cursor:
            # move to the first free extent after ``extent``; False if there is none
            if cursor.set_range(extent.place):
                after = _extent_at(cursor.item())
                has_before = cursor.prev()
            else:
                has_before = cursor.last()
            if has_before:
                before = _extent_at(cursor.item())
        return before, after

    def _put_extent(self, table: str, extent: Extent) -> None:
        """Put the row of an extent into ``free`` or ``holes``. The caller changes the totals."""
        self._rows.put(table, extent.place, _PAGES.pack(extent.pages))

    def _replace_free(self, old: Iterable[Extent], new: Extent) -> None:
        """Replace the rows of free extents by those of ``new``, or by none if ``new`` has no pages.
        The caller changes the totals.

        The new row is put before the old ones are deleted: a table that becomes empty frees its
        last page, which this transaction cannot reuse.
        """
        if new.pages:
            self._put_extent(FREE, new)
            self._rows.put(SIZES, _size_key(new), b"")
        for extent in old:
            # at the same place, putting the new row has replaced the old one
            is_replaced = new.pages > 0 and extent.place == new.place
            if not is_replaced:
                self._rows.delete(FREE, extent.place)
            self._rows.delete(SIZES, _size_key(extent))


class NotPlacedError(Exception):
    """A pack must be written before the transaction that adds it: another process deleted the one
    that was held, or the extents that it was written to are no longer reserved for this process.
    """


class ExtentPayloads:
    """Storage of packs' payloads within one write transaction: in extents of the segment files, or
    in LMDB. Implements ``persistkv.storage.catalogue.Payloads``.

    :param inline: True: payloads are stored in LMDB, and no extents are used.
    :param limit: bound on the bytes that all segments take on disk.
    """

    def __init__(
        self,
        transaction: TableRows,
        files: SegmentFiles,
        limit: int,
        *,
        inline: bool,
    ) -> None:
        self.limit = limit
        """Bound on the disk space of all segments in bytes. ``Room.expect`` lowers it for a batch
        with many rows."""
        self.allocator = Allocator(transaction)
        self.placed: Mapping[bytes, Sequence[Extent]] = {}
        """For each pack to add, by namespace and pack id: the reserved extents that hold its
        payload already. Set by ``BatchCommit`` before it adds the packs."""
        self.recorded_packs: set[bytes] = set()
        """Names of the packs that this transaction has added from ``placed``."""
        self.holes: list[Extent] = []
        """Holes that this transaction has made, to be punched after its commit."""
        self._rows = transaction
        self._files = files
        self._inline = InlinePayloads(transaction) if inline else None
        """Storage in LMDB; None: payloads are in extents."""

    def write(self, name: bytes, stream: Iterator[Buffer]) -> None:
        """Store a payload in LMDB; or record the extents in ``placed`` as those of the pack,
        without reading the stream, because the payload is in them already.

        :raises NotPlacedError: the payload is to be in extents, and was not written.
        """
        if self._inline is not None:
            self._inline.write(name, stream)
        elif name in self.placed:
            self.allocator.record_pack(name, self.placed[name])
            self.recorded_packs.add(name)
        else:
            raise NotPlacedError

    def allocate(
        self,
        pages: int,
        most_extents: int = _UNBOUNDED,
    ) -> list[Extent]:
        """Allocate pages; let the segments grow if no free extent is large enough.

        :param most_extents: allocate fewer pages rather than more extents.
        :raises StoreFullError: too few pages are free, and the limit or the disk keeps the segments
            from growing.
        """
        if pages > self.allocator.largest():
            self._grow(pages)
        # even if the segments could not grow, several smaller extents may be enough
        if pages > self.allocator.free:
            free_bytes = self.allocator.free * PAGE_BYTES
            raise StoreFullError(
                f"{pages * PAGE_BYTES} bytes of payload: {free_bytes} are free in the segments"
            )
        return self.allocator.allocate(pages, most_extents)

    def delete(self, name: bytes) -> None:
        """Delete the payload of the pack ``name``, if it has any: its space is free at once."""
        if self._inline is not None:
            self._inline.delete(name)
        else:
            self.allocator.free_pack(name)

    def shrink(self, limit: int) -> bool:
        """Return disk space of free pages to the file system, until all segments together take at
        most ``limit`` bytes.

        :returns: whether more pages could be returned: a transaction makes a bounded number of
            holes.
        """
        allocator = self.allocator
        limit_pages = limit // PAGE_BYTES
        excess = allocator.total - limit_pages
        # pages that are in use stay: the caller evicts, and a later call returns their space
        if excess <= 0 or not allocator.free or not self._files.punches:
            return False
        self.holes += allocator.make_holes(excess, _HOLES_AT_ONCE)
        return allocator.free > 0 and allocator.total > limit_pages

    def _grow(self, pages: int) -> None:
        """Give the segments at least ``pages`` more free pages, or fewer if the limit or the disk
        prevents it: fill holes, then let a file grow.

        :raises StoreFullError: the disk is full, and fewer than ``pages`` pages are free.
        """
        # at the limit, this is 0 or less, and nothing grows
        up_to_limit = self.limit // PAGE_BYTES - self.allocator.total
        wanted = max(self._growth_pages(pages), pages)
        missing = min(wanted, up_to_limit)
        try:
            while missing > 0:
                space = next(self.allocator.holes(), None)
                if space is None:
                    space = self._growing_end()
                num_filled = min(missing, space.pages)
                # let the file grow first: if the disk has no space, nothing is recorded
                self._files.allocate_space(space._replace(pages=num_filled))
                self.allocator.fill(space, num_filled)
                missing -= num_filled
        except StoreFullError:
            # The free pages, with the part of the step that was added, may be enough.
            if pages > self.allocator.free:
                raise

    def _growth_pages(self, pages: int) -> int:
        """Return by how many pages the segments should grow when ``pages`` are lacking; it may be
        less than ``pages``.

        Growing takes 0.5 ms, whatever the step: a large step makes it rare, and its bounds leave
        disk space to others.
        """
        least = _LEAST_STEP_BYTES // PAGE_BYTES
        most = _MOST_STEP_BYTES // PAGE_BYTES
        limit_pages = self.limit // PAGE_BYTES
        step = max(self.allocator.total // _STEP_SHARE, least)
        # grow by more for a large pack: the next packs are likely to be large, too
        is_large = pages * PAGE_BYTES >= _LARGE_BYTES
        if is_large:
            step = max(step, 4 * pages)
        return min(step, most, limit_pages // _STEP_SHARE)

    def _growing_end(self) -> Extent:
        """Return the space into which segments grow next: after the end of the first segment that
        is not full, or all of a new one."""
        limit_pages = self.limit // PAGE_BYTES
        # a large store has larger segments, and at most ``_MOST_SEGMENTS``
        share_of_limit = divide_up(limit_pages, _MOST_SEGMENTS)
        full_pages = max(SEGMENT_BYTES // PAGE_BYTES, share_of_limit)
        segments = self.allocator.segments()
        for number in sorted(segments):
            end = segments[number]
            if end < full_pages:
                return Extent(number, page=end, pages=full_pages - end)
        new_number = max(segments, default=-1) + 1
        return Extent(new_number, page=0, pages=full_pages)


def _extent_at(item: Sequence[Buffer]) -> Extent:
    """Return the extent in a row of ``free`` or ``holes``."""
    key, row = item
    segment, page = _unpack(PLACE, key)
    (pages,) = _unpack(_PAGES, row)
    return Extent(segment, page, pages)


def _free_extent(key: Buffer) -> Extent:
    """Return the free extent in a key of ``sizes``."""
    pages, segment, page = _unpack(_SIZE, key)
    return Extent(segment, page, pages)


def _size_key(extent: Extent) -> bytes:
    """Return the key of a free extent in ``sizes``, which is ordered by size, then by place."""
    return _SIZE.pack(extent.pages, extent.segment, extent.page)


def _unpack(
    shape: struct.Struct,
    row: Buffer,
) -> tuple[Any, ...]:
    """Decode a key or value; raise CorruptStoreError if it has another length."""
    if len(row) != shape.size:
        raise CorruptStoreError(
            f"a row of the free space has {len(row)} bytes instead of {shape.size}"
        )
    return shape.unpack(row)
