"""Room in a store: whether content fits, decided before anything is written.

Sizes are upper estimates, from totals: payload, page headers, rows of the catalogue. A store keeps
part of its capacity free, for the next commit and for its catalogue. Content fits if that part
stays free, so a copy evicts nothing.
"""

from __future__ import annotations

from typing import NamedTuple

from persistkv.rounding import divide_up, round_up
from persistkv.storage.backend import Backend
from persistkv.storage.inspection.requests import stored_requests

_PAGE_HEADERS = 64  # 1/64 of the payload: a page of 4 KiB for each piece of 256 KiB
# 5 KiB: catalogue rows of a pack, and the unused part of its last page
_PACK_BYTES = 5 << 10
_REQUEST_BYTES = 1280  # catalogue rows of a request
_KEY_BYTES = 80  # a key of 36 bytes in a tree whose pages are half full
_EMPTY_BYTES = 256 << 10  # 256 KiB: files of an empty store
# The constants below bound the reserves that stores of all drivers keep free.
# For commits, a store keeps 1/16 of its capacity, at most 256 MiB.
_COMMIT_SHARE = 16
_MOST_COMMIT_BYTES = 256 << 20  # 256 MiB
# For the growth of its catalogue, a store keeps 1/32 of its capacity, at most 8 MiB. A store of
# more than 2 GiB keeps 1/256 instead.
_LARGEST_CATALOGUE_SHARE = 32
_SMALL_CATALOGUE_BYTES = 8 << 20  # 8 MiB
_LEAST_CATALOGUE_SHARE = 256
# 2 MiB: catalogue pages that the last commits have freed, and that cannot be reused yet
_PAGES_BYTES = 2 << 20
# 1 MiB: minimum of the catalogue, with these pages and the empty files. A store below 4/3 MiB keeps
# 3/4 of its capacity for it.
_LEAST_CATALOGUE_BYTES = 1 << 20
_MIB = 1 << 20


def store_bytes(
    payload_bytes: int,
    packs: int,
    requests: int,
    keys: int,
) -> int:
    """Return an upper bound of the bytes that content takes in a store.

    :param keys: number of keys in packs and in requests.
    """
    rows = packs * _PACK_BYTES + requests * _REQUEST_BYTES + keys * _KEY_BYTES
    headers = divide_up(payload_bytes, _PAGE_HEADERS)
    return payload_bytes + headers + rows


def capacity_for(content_bytes: int) -> int:
    """Return the capacity for a new store that is to hold this content: bytes, a multiple of 1
    MiB."""
    # add more than the reserves that ``TargetRoom.free_bytes`` subtracts, so that the content fits
    wanted = content_bytes + content_bytes // 8 + 16 * _MIB
    return round_up(wanted, _MIB)


class TargetRoom(NamedTuple):
    """Capacity of a store, and the bytes of it that content and catalogue rows take."""

    capacity: int
    held_bytes: int = _EMPTY_BYTES
    """Bytes of the capacity that are taken; by default, those of an empty store."""

    @classmethod
    def of(cls, backend: Backend) -> TargetRoom | None:
        """Return the room in an open store; None if its size is unlimited."""
        stats = backend.stats()
        if stats.capacity is None:
            return None

        # a key is stored in the table of its pack, and also in each request that names it
        named_blocks = sum(found.manifest.blocks for found in stored_requests(backend))
        num_keys = stats.blocks + named_blocks
        content_bytes = store_bytes(
            stats.stored_bytes, stats.packs, stats.requests, num_keys
        )
        used_on_disk = stats.disk_bytes
        free = backend.free_space()
        if free is not None:
            used_on_disk -= free.catalogue_bytes + free.payload_bytes
        # Both values are upper bounds. ``used_on_disk`` may be far too high: a killed writer leaves
        # files longer than their content, until the next commit.
        upper_bound = min(used_on_disk, content_bytes + _EMPTY_BYTES)
        # the payload alone takes this
        lower_bound = stats.stored_bytes + _EMPTY_BYTES
        return cls(stats.capacity, max(upper_bound, lower_bound))

    @property
    def free_bytes(self) -> int:
        """Bytes that can be added without an eviction: capacity less content and reserves for
        catalogue and commits."""
        commits = min(self.capacity // _COMMIT_SHARE, _MOST_COMMIT_BYTES)
        reserves = _catalogue_reserve(self.capacity) + commits
        return max(0, self.capacity - reserves - self.held_bytes)


def _catalogue_reserve(capacity: int) -> int:
    """Return the bytes that a store of this capacity keeps free for its catalogue. They are the
    larger of two values: space to grow with pages that cannot be reused yet, and what an empty
    store lacks of the smallest catalogue."""
    growth_of_small = min(capacity // _LARGEST_CATALOGUE_SHARE, _SMALL_CATALOGUE_BYTES)
    growth_of_large = capacity // _LEAST_CATALOGUE_SHARE
    growth = max(growth_of_small, growth_of_large)
    unusable_pages = min(_PAGES_BYTES, capacity // 4)
    least_catalogue = min(_LEAST_CATALOGUE_BYTES, capacity // 4 * 3)
    # ``TargetRoom.held_bytes`` counts the empty files already
    rest_of_least = least_catalogue - _EMPTY_BYTES
    return max(growth + unusable_pages, rest_of_least)
