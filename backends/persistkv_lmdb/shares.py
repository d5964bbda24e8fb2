"""How the capacity is shared between the catalogue (``data.mdb``) and the segments.

1. ``data.mdb`` is bounded by its memory map, whose size follows from what LMDB records; a write transaction begins only
   when the map has that size. Segments grow within what the map leaves of the capacity.
2. Beside extents, the catalogue's bound is what was recorded, at least a share of the capacity; it is raised, in a
   transaction of its own, where the segments leave room. Where payloads lie inline, it is all that the segments leave,
   and these grow no more.
"""

from __future__ import annotations

from typing import NamedTuple

from persistkv.config import PAGE_BYTES
from persistkv_lmdb.layout import Transaction, read_capacity, read_catalogue_bytes, read_placement, used_bytes
from persistkv_lmdb.options import Placement
from persistkv_lmdb.segments.allocator import recorded_bytes, recorded_used_bytes

LOCK_FILE_BYTES = 64 << 10  # 64 KiB: lock.mdb for 512 readers and guard, with room
_CATALOGUE_SHARE, _SMALL_SHARE, _SMALL = 256, 32, 8 << 20
"""At first ``data.mdb`` gets 1/256 of the capacity, in a small store 1/32, up to 8 MiB."""
_YOUNG, _MOST_YOUNG, _MOST = 8, 32, 4
"""While payloads are less than 1/8 of a store, they do not tell how much catalogue goes with them: 1/32 is left for it
then at most; 1/4 later."""
CATALOGUE_AHEAD = 2 << 20  # 2 MiB: pages that a commit writes anew, and those of the two before it, not free yet
MIN_CATALOGUE = 1 << 20  # 1 MiB: twice what the pages of a few transactions take


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
            bound = min(whole, max(catalogue_share(self.capacity) - LOCK_FILE_BYTES, self.recorded))
        return bound // PAGE_BYTES * PAGE_BYTES


def read_shares(transaction: Transaction) -> Shares:
    """As recorded."""
    capacity, placement = read_capacity(transaction), read_placement(transaction)
    if placement is Placement.INLINE:
        return Shares(capacity, placement, 0, recorded_bytes(transaction))
    return Shares(capacity, placement, read_catalogue_bytes(transaction), 0)


def catalogue_share(capacity: int) -> int:
    """What ``data.mdb`` and ``lock.mdb`` may take beside extents at first: at least 1 MiB, or 3/4 of less."""
    small = max(min(capacity // _SMALL_SHARE, _SMALL), min(MIN_CATALOGUE, capacity // 4 * 3))
    return max(capacity // _CATALOGUE_SHARE, small)


def wanted_catalogue_bytes(transaction: Transaction, whole: int) -> int:
    """What ``data.mdb`` will want in a store of ``whole`` bytes that is full of what it holds now.

    Half as much again, because requests that share what is stored go on to come when nothing else grows any more.
    """
    catalogue, payload = used_bytes(transaction), recorded_used_bytes(transaction)
    wanted = whole * catalogue // (catalogue + payload) * 3 // 2 + CATALOGUE_AHEAD
    most = whole // (_MOST_YOUNG if payload < whole // _YOUNG else _MOST)
    return max(catalogue_share(whole), min(wanted, most)) - LOCK_FILE_BYTES
