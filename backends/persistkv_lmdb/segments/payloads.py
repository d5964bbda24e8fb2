"""Where payloads lie: pieces in LMDB (inline), or extents of segment files. A pack has one or the other.

1. An extent is taken by the transaction that publishes its pack, and its bytes are durable before that commits.
2. A recorded placement is that of new packs. What a pack has says how it is read and deleted.
"""

from __future__ import annotations

from collections.abc import Iterator

from persistkv.config import PAGE_BYTES
from persistkv.errors import StoreFullError
from persistkv.storage.catalog.pieces import RowPayloads
from persistkv.storage.codec import Buffer
from persistkv_lmdb.layout import Transaction
from persistkv_lmdb.options import Placement
from persistkv_lmdb.segments.allocator import Allocator, pages_of, read_extents
from persistkv_lmdb.segments.segment_files import SegmentFiles

_SEGMENT_BYTES = 1 << 30  # 1 GiB
_MOST_SEGMENTS = 64
"""In a store so large that segments of 1 GiB would be more, they are larger: each takes two descriptors."""
_STEPS = 16  # a file grows by 1/16 of what there is, and by no more than 1/16 of what there may be
_STEP_BYTES = (1 << 20, 128 << 20)  # 1 MiB to 128 MiB: the least and the most of a step
_LARGE_BYTES = 16 << 20  # 16 MiB
_LEAST_STEP_BYTES = 1 << 16  # 64 KiB: where all that there may be is less than 16 MiB


class Payloads:
    """The payloads of one write transaction."""

    def __init__(self, transaction: Transaction, placement: Placement, files: SegmentFiles, limit: int) -> None:
        self.limit = limit
        """Bytes that all segments may have."""
        self.allocator = Allocator(transaction)
        self.freed = 0
        """Bytes that left LMDB."""
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
        """Delete a pack's payload, wherever it lies.

        :param length: of the payload, for ``freed``.
        """
        if not self.allocator.retire(name):
            self._inline.delete(name, length)
            self.freed += length

    def lower(self, name: bytes, length: int) -> bool:
        """Move a payload to free pages that lie before it; False: there are not as many, or it does not read. Nothing
        changed then.
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
        """Give back free pages at the ends of segments, as far as these have more than the limit.

        The files are cut by a later transaction: this one may be undone.
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
        """Record what is free, and make what was written durable: the last to be done before a commit."""
        self.allocator.finish()
        self._files.sync()

    def _grow(self, pages: int) -> None:
        """Make room for so many pages side by side, or less where the limit or the disk says so."""
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
        """Pages: few in a store that holds little, so that it takes little more than it holds.

        Four times what a large pack takes: the next ones will be large, too, and a commit that grows a file takes half
        a millisecond longer, whatever the step.
        """
        least, largest = (number // PAGE_BYTES for number in _STEP_BYTES)
        ahead = 4 * pages if pages * PAGE_BYTES >= _LARGE_BYTES else 0
        step = min(max(self.allocator.total // _STEPS, least, ahead), largest, most // _STEPS)
        return max(step, _LEAST_STEP_BYTES // PAGE_BYTES)

    def _with_room(self, full: int) -> tuple[int, int]:
        """The first segment that is not full, and its pages: one that was cut grows again before there are new ones."""
        segments = self.allocator.segments()
        number = next((number for number, held in segments.items() if held < full), max(segments, default=-1) + 1)
        return number, segments.get(number, 0)
