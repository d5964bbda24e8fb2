"""Room for a batch: how much of the capacity a write transaction may use, and how much it needs.

The segment files get what the catalogue (``data.mdb``) leaves of the capacity: when it grows, packs
are evicted, and their disk space returns to the file system.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from contextlib import suppress
from typing import NamedTuple

from persistkv.config import PAGE_BYTES, exact_size
from persistkv.errors import StoreFullError
from persistkv.storage.catalogue import TableRows
from persistkv.storage.format.pack_writer import NewPack
from persistkv_lmdb.database import MIN_CATALOGUE, REWRITTEN_BYTES
from persistkv_lmdb.environment import Environment
from persistkv_lmdb.files import free_disk_bytes
from persistkv_lmdb.layout import tail_pages
from persistkv_lmdb.payloads.allocator import pages_for, read_space
from persistkv_lmdb.payloads.inline import page_bytes

# 1/16: share of the catalogue that stays unused, for later commits
_CATALOGUE_RESERVE_SHARE = 16
# 256 MiB: maximum of the unused share. It is enough for a commit of 128 MiB and the previous one,
# whose pages are not reusable yet.
_MOST_CATALOGUE_RESERVE = 256 << 20
# 128 KiB: pages of the catalogue that each commit may rewrite, besides the pages of its packs
_GROWN_BYTES = 128 << 10
# 64 MiB: maximum that is reserved for the next commit of a process
_MAX_RESERVED = 64 << 20
# 1/16: maximum share of the segments that is reserved for the next commit of a process
_RESERVED_SHARE = 16
_ALL_RESERVED_SHARE = 8  # 1/8: maximum share that is reserved for all processes
# Maximum number of extents that are reserved for the next commit: they take a millisecond, in which
# other engines wait. If free space is in smaller pieces, that commit reserves the rest itself.
_MOST_EXTENTS = 32
# limit of the segments in bytes if payloads are inline: they count in the catalogue, so the
# segments need no limit
_NO_LIMIT = 1 << 62


class Amount(NamedTuple):
    """Number of bytes in the catalogue (``data.mdb``) and in the segment files."""

    catalogue: int
    payload: int

    def minus(self, other: Amount) -> Amount:
        """Return the difference of both numbers, which may be negative."""
        catalogue = self.catalogue - other.catalogue
        payload = self.payload - other.payload
        return Amount(catalogue, payload)


class Room:
    """Part of the capacity that a write transaction may use, and what its batch needs of it.

    A caller sets the need with ``expect``. Then it evicts until ``uses_at_most`` or ``fits_batch``
    returns True, or calls ``check`` before it writes the batch.

    :param without_growth: the limits are the present sizes of the files. For a batch that did not
        fit although the files had free pages, or should have been able to grow.
    """

    def __init__(
        self,
        environment: Environment,
        transaction: TableRows,
        *,
        without_growth: bool = False,
    ) -> None:
        self._environment = environment
        self.transaction = transaction
        self.payloads = environment.prepare_payloads(transaction)
        self.is_inline = environment.database.shares.inline
        if self.is_inline:
            payload_bytes = _NO_LIMIT
        elif without_growth:
            payload_bytes = read_space(transaction).total * PAGE_BYTES
        else:
            payload_bytes = self.payloads.limit
        catalogue_bytes = environment.database.limit_bytes(
            without_growth=without_growth
        )
        self.limit = Amount(catalogue_bytes, payload_bytes)
        """Upper bound on the bytes in use after a commit that adds content."""
        self.need = Amount(catalogue=0, payload=0)
        """Upper estimate of the bytes that the batch adds. Bytes beyond it use the reserve for
        deletions (``Database.limit_bytes``)."""

    def fits_when_empty(self) -> bool:
        """Return whether the batch would fit if all packs were evicted. Reserved extents cannot be
        evicted."""
        reserved = self.payloads.allocator.reserved * PAGE_BYTES
        payload = self.need.payload + reserved
        return (
            self.need.catalogue <= self.limit.catalogue
            and payload <= self.limit.payload
        )

    def uses_at_most(self, goal: Amount) -> bool:
        """Return whether the bytes in use are at most ``goal``. Freed pages of the catalogue do not
        count, also those that LMDB cannot reuse yet: more eviction would not change them.
        """
        used_payload = self.payloads.allocator.used * PAGE_BYTES
        if used_payload > goal.payload:
            return False
        return self.transaction.used_bytes() <= goal.catalogue

    def fits_batch(self) -> bool:
        """Return whether the batch fits the limits, in addition to the bytes in use."""
        most_in_use = self.limit.minus(self.need)
        return self.uses_at_most(most_in_use)

    def expect(
        self,
        packs: Sequence[NewPack],
        unplaced: Sequence[NewPack],
        rows_bytes: int,
    ) -> None:
        """Estimate ``need``, the bytes that a batch adds. If ``data.mdb`` may grow by more than
        usual, lower the limit of the segments.

        :param packs: packs of the batch that the store lacks.
        :param unplaced: those of ``packs`` that still need extents. Extents of packs that were
            written before count as used already.
        :param rows_bytes: upper estimate of the bytes of the rows that the batch adds.
        """
        if self.is_inline:
            payload_bytes = sum(page_bytes(pack.payload_bound) for pack in packs)
            self.need = Amount(catalogue=rows_bytes + payload_bytes, payload=0)
            return
        payload_bytes = bound_pages(unplaced) * PAGE_BYTES
        self.need = Amount(catalogue=rows_bytes, payload=payload_bytes)
        # The limit of the segments leaves ``growth_bytes`` to the catalogue. The rows of a batch
        # may take half of that, because their pages may be half full, and other pages are
        # rewritten.
        usual_bytes = self._environment.database.shares.growth_bytes // 2
        excess = rows_bytes - usual_bytes
        if excess > 0:
            self._lower_segments(excess)

    def _lower_segments(self, num_bytes: int) -> None:
        """Lower both limits of the segments, of disk space and of used bytes, by ``num_bytes``: the
        catalogue needs these."""
        disk_bytes = max(0, self.payloads.limit - num_bytes)
        self.payloads.limit = disk_bytes
        used_bytes = min(self.limit.payload, disk_bytes)
        self.limit = self.limit._replace(payload=used_bytes)

    def check(self) -> None:
        """Check that the batch fits the capacity before it is written, and that the segments do not
        take disk space that the catalogue needs.

        :raises StoreFullError: the batch does not fit, or the segments have more disk space
            than their share: the caller evicts in other transactions, which also return disk space,
            and tries again. Or a stopped reader keeps the catalogue from reusing its pages
            (``check_growth``).
        """
        adds_nothing = not any(self.need)
        # a batch that only deletes uses the reserve for deletions
        if adds_nothing:
            return
        self._environment.database.check_growth(self.transaction)
        if not self.fits_batch():
            raise self.full_error()
        # Segments that grew while the catalogue was small may have disk space that the catalogue
        # needs now. Transactions that evict can return this space if it is in free pages, and if
        # the file system supports holes.
        allocator = self.payloads.allocator
        on_disk = allocator.total * PAGE_BYTES
        has_free_excess = on_disk > self.payloads.limit and allocator.free > 0
        can_return_space = has_free_excess and self._environment.files.punches
        if can_return_space:
            raise self.full_error()

    def full_error(self) -> StoreFullError:
        """Return the error of a batch that does not fit."""
        path = self._environment.path
        capacity = self._environment.database.shares.capacity
        needed = sum(self.need)
        place = f"a capacity of {exact_size(capacity)}"
        free_bytes = free_disk_bytes(path)
        # the capacity would be enough, but other files have filled the disk
        if free_bytes < needed <= capacity:
            place = f"the disk, which has {free_bytes} free bytes"
        return StoreFullError(f"{path}: {needed} bytes do not fit {place}")

    def low_watermark(self) -> Amount:
        """Return the used bytes down to which a commit evicts: ``limit`` less a reserve for later
        commits, which cannot use the pages of the catalogue that they free themselves."""
        # If the next batch makes the catalogue grow, the limit of the segments falls by as much, so
        # evict for this growth now. The next batch is expected to add as much as this one, in pages
        # that may be half full.
        expected_growth = 2 * self.need.catalogue + _GROWN_BYTES
        max_growth = self._environment.database.shares.growth_bytes
        growth = min(expected_growth, max_growth)
        payload_reserve = self._next_reservation_bytes() + growth
        return self.limit.minus(Amount(self._catalogue_reserve(), payload_reserve))

    def _catalogue_reserve(self) -> int:
        """Return the bytes of the catalogue that a commit leaves unused for later ones."""
        catalogue = self.limit.catalogue
        reserve = min(catalogue // _CATALOGUE_RESERVE_SHARE, _MOST_CATALOGUE_RESERVE)
        if self.is_inline:
            return reserve
        # The reserve is at least ``REWRITTEN_BYTES``, or half of what the catalogue exceeds its
        # minimum by, if that is less: otherwise a small catalogue would hold no rows.
        beyond_minimum = catalogue - MIN_CATALOGUE
        rewritten = min(beyond_minimum // 2, REWRITTEN_BYTES)
        return max(reserve, rewritten)

    def reserve_for_next_commit(self, writer: int) -> None:
        """Reserve extents for the next commit of a writer that has none reserved. Evict nothing: if
        the room is too small, reserve less, or nothing."""
        allocator = self.payloads.allocator
        limit_pages = self.payloads.limit // PAGE_BYTES
        growth = max(0, limit_pages - allocator.total)
        wanted = self._next_reservation_bytes() // PAGE_BYTES
        available = allocator.free + growth
        pages = min(wanted, available)
        if pages > 0:
            # if the disk is full, the next commit reserves what it needs, and evicts for that
            with suppress(StoreFullError):
                taken = self.payloads.allocate(pages, _MOST_EXTENTS)
                allocator.reserve(writer, taken)

    def _next_reservation_bytes(self) -> int:
        """Return how many bytes of the segments to reserve for the next commit of this process: as
        many as the largest of its recent commits took, within the share of one process and that of
        all processes."""
        segments = self.limit.payload
        reserved = self.payloads.allocator.reserved * PAGE_BYTES
        share_of_process = min(_MAX_RESERVED, segments // _RESERVED_SHARE)
        left_for_all = segments // _ALL_RESERVED_SHARE - reserved
        largest_commit = max(self._environment.recent_commit_bytes, default=0)
        reservation = min(largest_commit, share_of_process, left_for_all)
        # a negative number means that all processes have reserved more than their share
        return max(0, reservation)


def bound_pages(packs: Iterable[NewPack]) -> int:
    """Return an upper bound on the pages that packs take in the segment files: their payloads, and
    their tables with trailers."""
    pages = 0
    for pack in packs:
        pages += pages_for(pack.payload_bound)
        pages += tail_pages(pack.table_length)
    return pages
