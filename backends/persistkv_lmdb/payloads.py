"""Payloads of packs: chunked values in LMDB (inline), or extents of segment files. A pack has one or the other.

1. The transaction that publishes a pack allocates its extents, and their bytes are durable before it commits.
2. The recorded placement applies to new packs. Existing packs are read and deleted where they are stored.
"""

from __future__ import annotations

from collections.abc import Iterator

from persistkv.config import PAGE_BYTES
from persistkv.errors import StoreFullError
from persistkv.storage.catalog.pieces import RowPayloads
from persistkv.storage.format.codec import Buffer
from persistkv_lmdb.allocator import Allocator, pages_of, read_extents
from persistkv_lmdb.layout import Transaction
from persistkv_lmdb.options import Placement
from persistkv_lmdb.segments import SegmentFiles

_SEGMENT_BYTES = 1 << 30  # 1 GiB
_MOST_SEGMENTS = 64
"""A store with more than 64 GiB of segments has larger segments instead of more: each takes two descriptors."""
_STEPS = 16  # a file grows by 1/16 of the present size, at most by 1/16 of the limit
_STEP_BYTES = (1 << 20, 128 << 20)  # 1 MiB to 128 MiB: bounds of a step
_LARGE_BYTES = 16 << 20  # 16 MiB
_LEAST_STEP_BYTES = 1 << 16  # 64 KiB: smallest step, used if the limit is below 16 MiB


class Payloads:
    """Payloads as one write transaction sees and changes them."""

    def __init__(self, transaction: Transaction, placement: Placement, files: SegmentFiles, limit: int) -> None:
        self.limit = limit
        """Bound on the bytes of all segments."""
        self.allocator = Allocator(transaction)
        self.freed = 0
        """Bytes deleted from LMDB."""
        self._transaction = transaction
        self._files = files
        self._inline = RowPayloads(transaction.rows)
        self._is_inline = placement is Placement.INLINE

    def write(self, name: bytes, stream: Iterator[Buffer], at_most: int) -> None:
        """See ``persistkv.storage.catalog.Payloads``."""
        if self._is_inline:
            self._inline.write(name, stream, at_most)
            return
        pages = pages_of(at_most)
        if pages > self.allocator.largest():
            self._grow(pages)
        if pages > self.allocator.free:
            raise StoreFullError(
                f"{at_most} bytes of payload: {self.allocator.free * PAGE_BYTES} are free in the segments"
            )
        taken = self.allocator.take(pages)
        written = pages_of(self._files.write(taken, stream))
        kept = []
        for extent in taken:
            count = min(extent.pages, written)
            written -= count
            if count:
                kept.append(extent._replace(pages=count))
            if count < extent.pages:
                self.allocator.untake([extent._replace(page=extent.page + count, pages=extent.pages - count)])
        self.allocator.publish(name, kept)

    def delete(self, name: bytes, length: int) -> None:
        """Delete a pack's payload from extents or from LMDB.

        :param length: of the payload in bytes, for ``freed``.
        """
        if not self.allocator.retire(name):
            self._inline.delete(name, length)
            self.freed += length

    def lower(self, name: bytes, length: int) -> bool:
        """Move a payload to free pages before it.

        :returns: False, with nothing changed: too few pages are free, or the payload cannot be read.
        """
        extents = read_extents(self._transaction, name)
        taken = self.allocator.take_before(pages_of(length), max(extents)) if extents else []
        if not extents or not taken:
            return False
        payload = memoryview(bytearray(length))
        if not self._files.read(extents, 0, [payload]):
            self.allocator.untake(taken)
            return False
        self._files.write(taken, iter([payload]))
        self.allocator.retire(name)
        self.allocator.publish(name, taken)
        return True

    def shrink(self, limit: int) -> None:
        """Release free pages at the ends of segments until all segments together have ``limit`` bytes, if possible.

        A later transaction truncates the files, because this one may be aborted.
        """
        excess = self.allocator.total - limit // PAGE_BYTES
        if excess <= 0 or not self.allocator.free:
            return
        for segment, pages in sorted(self.allocator.segments().items(), reverse=True):
            count = min(excess, self.allocator.free_tail(segment, pages))
            if count > 0:
                self.allocator.resize(segment, pages, pages - count)
                excess -= count

    def finish(self) -> None:
        """Record the free space, and make written payloads durable: the last step before a commit."""
        self.allocator.finish()
        self._files.sync()

    def _grow(self, pages: int) -> None:
        """Grow segments by at least ``pages`` contiguous pages, or by fewer if limit or disk do not allow it."""
        most = self.limit // PAGE_BYTES
        full = max(_SEGMENT_BYTES // PAGE_BYTES, -(-most // _MOST_SEGMENTS))
        wanted = min(max(self._step(most, pages), pages), most - self.allocator.total)
        while wanted > 0:
            segment, held = self._with_room(full)
            count = min(wanted, full - held)
            try:
                self._files.grow(segment, held, held + count)
            except StoreFullError:
                if pages > self.allocator.free:
                    raise
                return
            self.allocator.resize(segment, held, held + count)
            wanted -= count

    def _step(self, most: int, pages: int) -> int:
        """Return the pages of a growth step: few in a store with little content, to keep its files small.

        A large pack raises the step to four times its size, within the bounds: the next packs are likely to be large,
        too, and a commit that grows a file takes half a millisecond longer, regardless of the step.
        """
        least, largest = (number // PAGE_BYTES for number in _STEP_BYTES)
        ahead = 4 * pages if pages * PAGE_BYTES >= _LARGE_BYTES else 0
        step = min(max(self.allocator.total // _STEPS, least, ahead), largest, most // _STEPS)
        return max(step, _LEAST_STEP_BYTES // PAGE_BYTES)

    def _with_room(self, full: int) -> tuple[int, int]:
        """Return number and pages of the first segment that is not full: truncated ones grow before new ones."""
        segments = self.allocator.segments()
        number = next((number for number, held in segments.items() if held < full), max(segments, default=-1) + 1)
        return number, segments.get(number, 0)
