"""The capacity, shared between the catalogue (``data.mdb``) and the segments.

1. ``data.mdb`` is bounded by its memory map, whose size follows from what LMDB records; a write transaction begins only
   when the map has that size. Segments grow within what the map leaves of the capacity.
2. Beside extents, the catalogue's bound is what was recorded, at least a share of the capacity; it is raised, in a
   transaction of its own, where the segments leave room. Where payloads lie inline, it is all that the segments leave,
   and these grow no more.
3. ``Room`` is what a write transaction may use of both.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

from persistkv.config import PAGE_BYTES
from persistkv.errors import StoreFullError
from persistkv.storage.backend import CommitBatch
from persistkv.storage.catalog.pieces import page_bytes
from persistkv.storage.catalog.transaction import rows_bound
from persistkv.storage.pack_writer import NewPack
from persistkv_lmdb.layout import Transaction, read_capacity, read_catalogue_bytes, read_placement, used_bytes
from persistkv_lmdb.options import Placement
from persistkv_lmdb.segments.allocator import read_extents, recorded_bytes, recorded_used_bytes
from persistkv_lmdb.segments.payloads import Payloads

if TYPE_CHECKING:
    from persistkv_lmdb.environment.environment import Environment

LOCK_FILE_BYTES = 64 << 10  # 64 KiB: lock.mdb for 512 readers and guard, with room
_CATALOGUE_SHARE, _SMALL_SHARE, _SMALL = 256, 32, 8 << 20
"""At first ``data.mdb`` gets 1/256 of the capacity, in a small store 1/32, up to 8 MiB."""
_YOUNG, _MOST_YOUNG, _MOST = 8, 32, 4
"""While payloads are less than 1/8 of a store, they do not tell how much catalogue goes with them: 1/32 is left for it
then at most; 1/4 later."""
_CATALOGUE_AHEAD = 2 << 20  # 2 MiB: pages that a commit writes anew, and those of the two before it, not free yet
_MIN_CATALOGUE = 1 << 20  # 1 MiB: twice what the pages of a few transactions take
_MAX_AHEAD = 256 << 20  # 256 MiB: a commit of 128 MiB, and the one before it, whose pages are not free yet
_NO_LIMIT = 1 << 62


class Shares(NamedTuple):
    """Everything that the bound of ``data.mdb`` depends on."""

    capacity: int
    """Bytes of the whole store."""
    placement: Placement
    recorded: int
    """Bytes that ``data.mdb`` may have beside extents, where that is more than its share of the capacity."""
    segments: int
    """Bytes of all segments; 0 where the bound does not depend on them."""

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
    """As recorded."""
    capacity, placement = read_capacity(transaction), read_placement(transaction)
    if placement is Placement.INLINE:
        return Shares(capacity, placement, 0, recorded_bytes(transaction))
    return Shares(capacity, placement, read_catalogue_bytes(transaction), 0)


def _catalogue_share(capacity: int) -> int:
    """What ``data.mdb`` and ``lock.mdb`` may take beside extents at first: at least 1 MiB, or 3/4 of less."""
    small = max(min(capacity // _SMALL_SHARE, _SMALL), min(_MIN_CATALOGUE, capacity // 4 * 3))
    return max(capacity // _CATALOGUE_SHARE, small)


def wanted_catalogue_bytes(transaction: Transaction, whole: int) -> int:
    """What ``data.mdb`` will want in a store of ``whole`` bytes that is full of what it holds now.

    Half as much again, because requests that share what is stored go on to come when nothing else grows any more.
    """
    catalogue, payload = used_bytes(transaction), recorded_used_bytes(transaction)
    wanted = whole * catalogue // (catalogue + payload) * 3 // 2 + _CATALOGUE_AHEAD
    most = whole // (_MOST_YOUNG if payload < whole // _YOUNG else _MOST)
    return max(_catalogue_share(whole), min(wanted, most)) - LOCK_FILE_BYTES


class Amount(NamedTuple):
    """Bytes in both places."""

    catalogue: int
    """Pages of ``data.mdb``, payloads that lie inline included."""
    payload: int
    """Pages of the segments."""

    def within(self, limit: Amount) -> bool:
        """Whether it is no more in either place."""
        return self.catalogue <= limit.catalogue and self.payload <= limit.payload

    def plus(self, other: Amount) -> Amount:
        """The sum."""
        return Amount(self.catalogue + other.catalogue, self.payload + other.payload)


class Room:
    """What there is and what is used, within one write transaction.

    :param as_it_is: as if no file could grow.
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
        """What ``used`` may be after a commit that adds something."""
        self._growth = max(0, segments - payloads.allocator.total * PAGE_BYTES)

    def used(self) -> Amount:
        """What holds something. What was freed and is not free yet is left out: to evict more would not free it."""
        return Amount(used_bytes(self._transaction), self._payloads.allocator.used * PAGE_BYTES)

    def need(self, packs: list[NewPack], batch: CommitBatch) -> Amount:
        """What a batch adds, roughly and rather too much; the share for deletions takes the rest.

        :param packs: those that would be written.
        """
        payload = sum(pack.payload_bound for pack in packs)
        rows = rows_bound(packs, batch.manifests)
        if self._placement is Placement.INLINE:
            return Amount(rows + sum(page_bytes(pack.payload_bound) for pack in packs), 0)
        return Amount(rows, payload)

    def check(self, need: Amount) -> None:
        """Refuse what does not fit into what is free, or will be once a file has grown.

        :raises StoreFullError: naming the capacity.
        """
        if not any(need):
            return
        pending = self._environment.pending_bytes(self._transaction)
        free = self._payloads.allocator.free * PAGE_BYTES + self._growth
        if not self.used().plus(need).plus(Amount(pending, 0)).within(self.limit) or need.payload > free:
            raise self.full(need)

    def widen(self, need: Amount) -> None:
        """Raise the catalogue's limit, where it lacks something and the segments leave it."""
        lacks = self.used().catalogue + need.catalogue - self.spared().catalogue
        if lacks <= 0 or self._placement is Placement.INLINE:
            return
        if not self.widen_by(2 * lacks + lacks // 8):
            self._payloads.shrink(self._payloads.allocator.total * PAGE_BYTES - lacks)

    def widen_by(self, count: int) -> bool:
        """Raise the catalogue's limit by so much or more, where the segments leave it; False: they do not."""
        if self._placement is Placement.INLINE:
            return False
        segments = self._payloads.allocator.total * PAGE_BYTES
        more = self._environment.widen_catalogue(self._transaction, count, segments)
        self.limit = self.limit._replace(catalogue=self.limit.catalogue + more)
        return more > 0

    def lies_in_extents(self, pack: bytes) -> bool:
        """:param pack: its name."""
        return read_extents(self._transaction, pack) is not None

    def full(self, need: Amount) -> StoreFullError:
        """Why it is refused."""
        environment = self._environment
        return StoreFullError(f"{environment.path}: {sum(need)} bytes do not fit a capacity of {environment.capacity}")

    def spared(self) -> Amount:
        """A limit that leaves room for the commits that follow: of the segments, what the last ones took."""
        catalogue, payload = self.limit
        ahead = min(payload // 16, self._environment.taken_lately(), _MAX_AHEAD)
        rewritten = (
            0 if self._placement is Placement.INLINE else min((catalogue - _MIN_CATALOGUE) // 2, _CATALOGUE_AHEAD)
        )
        return Amount(catalogue - max(rewritten, min(catalogue // 16, _MAX_AHEAD)), payload - ahead)


class Goal:
    """What eviction is to reach.

    :param at_most: what is used is to be.
    """

    def __init__(self, room: Room, at_most: Amount) -> None:
        self._room = room
        self._at_most = at_most

    def met(self) -> bool:
        """Whether enough went."""
        return self._room.used().within(self._at_most)

    def helps(self, pack: bytes) -> bool:
        """Whether it helps that a pack goes: one that lies inline gives nothing to the segments."""
        lacks_catalogue = self._room.used().catalogue > self._at_most.catalogue
        return lacks_catalogue or self._room.lies_in_extents(pack)
