"""The capacity of a store, divided between the catalogue (``data.mdb``) and the segment files.

1. The memory map bounds ``data.mdb``. The size of the map is computed from values that LMDB records, and a write
   transaction begins only when the map has that size. Segments may use the part of the capacity that the map does not.
2. With placement ``extents``, the bound of the catalogue is the recorded one, at least a fixed share of the capacity. A
   separate transaction raises it if the segments leave enough of the capacity. With placement ``inline``, the catalogue
   may use everything except the present segments, which no longer grow.
3. ``Room`` is the part of both that a write transaction may use.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

from persistkv.config import PAGE_BYTES
from persistkv.errors import StoreFullError
from persistkv.storage.backend import CommitBatch
from persistkv.storage.catalog.pieces import page_bytes
from persistkv.storage.catalog.transaction import rows_bound
from persistkv.storage.format.pack_writer import NewPack
from persistkv_lmdb.allocator import read_extents, recorded_bytes, recorded_used_bytes
from persistkv_lmdb.layout import Transaction, read_capacity, read_catalogue_bytes, read_placement, used_bytes
from persistkv_lmdb.options import Placement
from persistkv_lmdb.payloads import Payloads

if TYPE_CHECKING:
    from persistkv_lmdb.environment import Environment

LOCK_FILE_BYTES = 64 << 10  # 64 KiB: upper bound for lock.mdb (512 readers) and the guard file
_CATALOGUE_SHARE, _SMALL_SHARE, _SMALL = 256, 32, 8 << 20
"""Initial share of ``data.mdb``: 1/256 of the capacity. In a small store: 1/32, at most 8 MiB."""
_YOUNG, _MOST_YOUNG, _MOST = 8, 32, 4
"""While payloads fill less than 1/8 of a store, their ratio to the catalogue says little about a full store: at most
1/32 of the store is reserved for the catalogue. Later it is at most 1/4."""
_CATALOGUE_AHEAD = 2 << 20  # 2 MiB: pages that a commit rewrites, and those of the last two, not reusable yet
_MIN_CATALOGUE = 1 << 20  # 1 MiB: twice the pages of a few transactions
_MAX_AHEAD = 256 << 20  # 256 MiB: a commit of 128 MiB, plus the previous one, whose pages are not reusable yet
_NO_LIMIT = 1 << 62


class Shares(NamedTuple):
    """All values that determine the bound of ``data.mdb``."""

    capacity: int
    """Bytes of the whole store."""
    placement: Placement
    recorded: int
    """Recorded bound of ``data.mdb`` in bytes (placement ``extents``); used if it exceeds the share of the capacity."""
    segments: int
    """Bytes of all segments; 0 if the bound does not depend on them."""

    @property
    def catalogue_bytes(self) -> int:
        """Bound of ``data.mdb`` in bytes."""
        whole = self.capacity - LOCK_FILE_BYTES
        if self.placement is Placement.INLINE:
            bound = whole - self.segments
        else:
            bound = min(whole, max(_catalogue_share(self.capacity) - LOCK_FILE_BYTES, self.recorded))
        return bound // PAGE_BYTES * PAGE_BYTES


def read_shares(transaction: Transaction) -> Shares:
    """Return the recorded values."""
    capacity, placement = read_capacity(transaction), read_placement(transaction)
    if placement is Placement.INLINE:
        return Shares(capacity, placement, 0, recorded_bytes(transaction))
    return Shares(capacity, placement, read_catalogue_bytes(transaction), 0)


def _catalogue_share(capacity: int) -> int:
    """Return the initial bytes of ``data.mdb`` plus ``lock.mdb``: at least 1 MiB, or 3/4 of a smaller capacity."""
    small = max(min(capacity // _SMALL_SHARE, _SMALL), min(_MIN_CATALOGUE, capacity // 4 * 3))
    return max(capacity // _CATALOGUE_SHARE, small)


def wanted_catalogue_bytes(transaction: Transaction, whole: int) -> int:
    """Return the bytes that ``data.mdb`` needs once a store of ``whole`` bytes is full of content like the present one.

    Half is added, because requests that share stored blocks keep adding rows when no file can grow any more.
    """
    catalogue, payload = used_bytes(transaction), recorded_used_bytes(transaction)
    wanted = whole * catalogue // (catalogue + payload) * 3 // 2 + _CATALOGUE_AHEAD
    most = whole // (_MOST_YOUNG if payload < whole // _YOUNG else _MOST)
    return max(_catalogue_share(whole), min(wanted, most)) - LOCK_FILE_BYTES


class Amount(NamedTuple):
    """Bytes in the catalogue and in the segments."""

    catalogue: int
    """Pages of ``data.mdb``, including inline payloads."""
    payload: int
    """Pages of the segments."""

    def within(self, limit: Amount) -> bool:
        """Return whether neither part exceeds ``limit``."""
        return self.catalogue <= limit.catalogue and self.payload <= limit.payload

    def plus(self, other: Amount) -> Amount:
        """Return the sum."""
        return Amount(self.catalogue + other.catalogue, self.payload + other.payload)


class Room:
    """Limits and usage of a store within one write transaction.

    :param as_it_is: calculate as if no file could grow.
    """

    def __init__(
        self, environment: Environment, transaction: Transaction, payloads: Payloads, *, as_it_is: bool = False
    ) -> None:
        self._environment = environment
        self._transaction = transaction
        self._payloads = payloads
        self._placement = environment.placement
        segments = recorded_bytes(transaction) if as_it_is else payloads.limit
        self.limit = Amount(
            environment.limit_bytes(as_it_is=as_it_is), _NO_LIMIT if self._placement is Placement.INLINE else segments
        )
        """Upper bound on ``used`` after a commit that adds content."""
        self._growth = max(0, segments - payloads.allocator.total * PAGE_BYTES)

    def used(self) -> Amount:
        """Return the pages in use. Freed pages that are not reusable yet do not count: evicting more would not help."""
        return Amount(used_bytes(self._transaction), self._payloads.allocator.used * PAGE_BYTES)

    def need(self, packs: list[NewPack], batch: CommitBatch) -> Amount:
        """Return an upper estimate of the bytes that a batch adds; the reserve for deletions covers the remainder.

        :param packs: packs of the batch that would be written.
        """
        payload = sum(pack.payload_bound for pack in packs)
        rows = rows_bound(packs, batch.manifests)
        if self._placement is Placement.INLINE:
            return Amount(rows + sum(page_bytes(pack.payload_bound) for pack in packs), 0)
        return Amount(rows, payload)

    def check(self, need: Amount) -> None:
        """Check that ``need`` fits into the free space, including the space by which a file may still grow.

        :raises StoreFullError: it does not fit; the message names the capacity.
        """
        if not any(need):
            return
        pending = self._environment.pending_bytes(self._transaction)
        free = self._payloads.allocator.free * PAGE_BYTES + self._growth
        if not self.used().plus(need).plus(Amount(pending, 0)).within(self.limit) or need.payload > free:
            raise self.full(need)

    def widen(self, need: Amount) -> None:
        """Raise the catalogue's limit if it is too low and the segments leave enough; otherwise shrink the segments."""
        lacks = self.used().catalogue + need.catalogue - self.spared().catalogue
        if lacks <= 0 or self._placement is Placement.INLINE:
            return
        if not self.widen_by(2 * lacks + lacks // 8):
            self._payloads.shrink(self._payloads.allocator.total * PAGE_BYTES - lacks)

    def widen_by(self, count: int) -> bool:
        """Raise the catalogue's limit by at least ``count`` bytes; return False if the segments leave less."""
        if self._placement is Placement.INLINE:
            return False
        segments = self._payloads.allocator.total * PAGE_BYTES
        more = self._environment.widen_catalogue(self._transaction, count, segments)
        self.limit = self.limit._replace(catalogue=self.limit.catalogue + more)
        return more > 0

    def lies_in_extents(self, pack: bytes) -> bool:
        """Return whether the payload of the pack named ``pack`` is stored in extents."""
        return read_extents(self._transaction, pack) is not None

    def full(self, need: Amount) -> StoreFullError:
        """Return the error for a batch that does not fit."""
        environment = self._environment
        return StoreFullError(f"{environment.path}: {sum(need)} bytes do not fit a capacity of {environment.capacity}")

    def spared(self) -> Amount:
        """Return a limit that reserves space for the next commits; in the segments, as much as recent commits took."""
        catalogue, payload = self.limit
        ahead = min(payload // 16, self._environment.taken_lately(), _MAX_AHEAD)
        rewritten = (
            0 if self._placement is Placement.INLINE else min((catalogue - _MIN_CATALOGUE) // 2, _CATALOGUE_AHEAD)
        )
        return Amount(catalogue - max(rewritten, min(catalogue // 16, _MAX_AHEAD)), payload - ahead)


class Goal:
    """Target of an eviction.

    :param at_most: bound on the used bytes that the eviction must reach.
    """

    def __init__(self, room: Room, at_most: Amount) -> None:
        self._room = room
        self._at_most = at_most

    def met(self) -> bool:
        """Return whether the target is reached."""
        return self._room.used().within(self._at_most)

    def helps(self, pack: bytes) -> bool:
        """Return whether evicting a pack helps: if only the segments are too full, an inline pack does not."""
        lacks_catalogue = self._room.used().catalogue > self._at_most.catalogue
        return lacks_catalogue or self._room.lies_in_extents(pack)
