"""Room for a batch: how much of the capacity a write transaction may use, and how much it needs.

The segment files get what the catalogue (``data.mdb``) leaves of the capacity: when it grows, packs
are evicted, and their disk space returns to the file system.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from contextlib import suppress
from typing import NamedTuple

from persistkv.config import PAGE_BYTES
from persistkv.errors import StoreFullError
from persistkv.storage.catalog import TableRows
from persistkv.storage.format.pack_writer import NewPack
from persistkv_lmdb.allocator import pages_for, read_space
from persistkv_lmdb.database import CATALOGUE_AHEAD, MIN_CATALOGUE
from persistkv_lmdb.environment import Environment
from persistkv_lmdb.inline import page_bytes
from persistkv_lmdb.layout import tail_pages

# 256 MiB: a commit of 128 MiB, plus the previous one, whose pages are not reusable yet
_MAX_AHEAD = 256 << 20
# 128 KiB: pages of the catalogue that each commit may rewrite, besides those of its packs
_GROWN_BYTES = 128 << 10
_MAX_RESERVED = 64 << 20  # 64 MiB: reserved for the next commit of a process
_RESERVED_SHARE, _ALL_RESERVED_SHARE = 16, 8
"""At most 1/16 of the segments is reserved for a process's next commit, and at most 1/8 for all
processes."""
_NO_LIMIT = 1 << 62


class Amount(NamedTuple):
    """Number of bytes in the catalogue (``data.mdb``) and in the segment files."""

    catalogue: int
    payload: int

    def plus(self, other: Amount) -> Amount:
        return Amount(self.catalogue + other.catalogue, self.payload + other.payload)

    def minus(self, other: Amount) -> Amount:
        return Amount(self.catalogue - other.catalogue, self.payload - other.payload)

    def within(self, limit: Amount) -> bool:
        return self.catalogue <= limit.catalogue and self.payload <= limit.payload


class Room:
    """Part of the capacity that a write transaction may use. ``as_it_is`` assumes that no file can
    grow."""

    def __init__(
        self,
        environment: Environment,
        transaction: TableRows,
        *,
        as_it_is: bool = False,
    ) -> None:
        self._environment = environment
        self._transaction = transaction
        self.payloads = environment.payloads(transaction)
        self.is_inline = environment.database.shares.inline
        if self.is_inline:
            payload_bytes = _NO_LIMIT
        elif as_it_is:
            payload_bytes = read_space(transaction).total * PAGE_BYTES
        else:
            payload_bytes = self.payloads.limit
        catalogue_bytes = environment.database.limit_bytes(as_it_is=as_it_is)
        self.limit = Amount(catalogue_bytes, payload_bytes)
        """Upper bound on the bytes in use after a commit that adds content."""
        self.need = Amount(0, 0)
        """Upper estimate of the bytes that the batch adds. Any further ones use the reserve for
        deletions."""

    @property
    def _segments(self) -> int:
        return self.payloads.allocator.total * PAGE_BYTES

    @property
    def reserved(self) -> Amount:
        """The bytes that writers have reserved."""
        return Amount(0, self.payloads.allocator.reserved * PAGE_BYTES)

    def fits(self, goal: Amount) -> bool:
        """Return whether the bytes in use are at most ``goal``. Freed pages that are not reusable
        yet do not count: more eviction would not change them.
        """
        if self.payloads.allocator.used * PAGE_BYTES > goal.payload:
            return False
        return self._transaction.used_bytes() <= goal.catalogue

    def expect(
        self, packs: Sequence[NewPack], unplaced: Sequence[NewPack], rows: int
    ) -> None:
        """Estimate ``need``, the bytes that a batch adds. If ``data.mdb`` may grow by more than
        usual, lower the limit of the segments.

        :param packs: those of its packs that are not stored yet; ``unplaced``: those of them that
            need extents.
        :param rows: upper estimate of the bytes of its rows.
        """
        if self.is_inline:
            rows += sum(page_bytes(pack.payload_bound) for pack in packs)
            self.need = Amount(rows, 0)
            return
        self.need = Amount(rows, bound_pages(unplaced) * PAGE_BYTES)
        more = rows - self._environment.database.shares.growth_bytes // 2
        if more > 0:
            self.payloads.limit = max(0, self.payloads.limit - more)
            payload = min(self.limit.payload, self.payloads.limit)
            self.limit = self.limit._replace(payload=payload)

    def check(self) -> None:
        """Raise a StoreFullError if ``need`` exceeds the free space, including the space by which a
        file may grow."""
        if not any(self.need):
            return
        allocator = self.payloads.allocator
        self._environment.database.check_growth(self._transaction.used_bytes())
        free = allocator.free * PAGE_BYTES + max(0, self.limit.payload - self._segments)
        if not self.fits(self.limit.minus(self.need)) or self.need.payload > free:
            raise self.full()
        is_too_large = self._segments > self.payloads.limit and allocator.free > 0
        # the catalogue may need the space
        if is_too_large and self._environment.files.punches:
            raise self.full()

    def full(self) -> StoreFullError:
        path, capacity = (
            self._environment.path,
            self._environment.database.shares.capacity,
        )
        return StoreFullError(
            f"{path}: {sum(self.need)} bytes do not fit a capacity of {capacity}"
        )

    def low_watermark(self) -> Amount:
        """Return the used bytes down to which a commit evicts: ``limit`` less a reserve for later
        commits."""
        catalogue, payload = self.limit
        reserve = min(catalogue // 16, _MAX_AHEAD)
        if not self.is_inline:
            rewritten = min((catalogue - MIN_CATALOGUE) // 2, CATALOGUE_AHEAD)
            reserve = max(reserve, rewritten)
        growth = self._environment.database.shares.growth_bytes
        growth = min(2 * self.need.catalogue + _GROWN_BYTES, growth)
        return Amount(catalogue - reserve, payload - self._ahead_bytes() - growth)

    def reserve_ahead(self, writer: int) -> None:
        """Reserve extents for the next commit of a writer that has none reserved, as far as there
        is room."""
        allocator = self.payloads.allocator
        growth = max(0, self.payloads.limit // PAGE_BYTES - allocator.total)
        pages = min(self._ahead_bytes() // PAGE_BYTES, allocator.free + growth)
        if pages > 0:
            # the disk is full: the next commit evicts first
            with suppress(StoreFullError):
                allocator.reserve(writer, self.payloads.take(pages))

    def _ahead_bytes(self) -> int:
        """Return how much of the segments to reserve for the next commit: what the largest of the
        last ones took."""
        of_all = self.limit.payload // _ALL_RESERVED_SHARE - self.reserved.payload
        own = min(_MAX_RESERVED, self.limit.payload // _RESERVED_SHARE)
        largest = max(self._environment.taken, default=0)
        return max(0, min(largest, own, of_all))


def bound_pages(packs: Iterable[NewPack]) -> int:
    """Return an upper bound on the pages that packs take in the segment files."""
    return sum(
        pages_for(pack.payload_bound) + tail_pages(pack.table_length) for pack in packs
    )
