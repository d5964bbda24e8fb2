"""Content of a namespace, per tenant and per key, from the tables of its packs."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from itertools import islice
from typing import NamedTuple

import msgspec

from persistkv.base import get_offload_block_hash
from persistkv.storage.backend import Changes
from persistkv.storage.format.pack import PackTable


class Usage(msgspec.Struct, frozen=True):
    """Bytes of a namespace, and of the store that it is in."""

    tenants: Mapping[str, int]
    """For each tenant with content in the namespace, the bytes of its blocks on the medium,
    encoded and with padding."""
    namespace_bytes: int
    """Sum of ``tenants``."""
    disk_bytes: int
    """Bytes that the whole store takes on its medium."""
    capacity: int | None
    """Bound on ``disk_bytes``; None: the store is unbounded."""


class StoredBlock(NamedTuple):
    """A durable block."""

    key: bytes
    group: int
    num_bytes: int
    """Raw bytes of the block."""


class UsageLedger:
    """Bytes per tenant, kept up to date by the changes of the catalogue. Not thread-safe."""

    def __init__(self) -> None:
        self.cursor: bytes | None = None
        """Position in the changes of the catalogue up to which they are applied; None: none are."""
        self.totals: Counter[str] = Counter()
        """Bytes of the packs of each tenant."""
        self._packs: dict[bytes, tuple[str, int]] = {}
        """Tenant and bytes of each pack."""

    def apply(self, changes: Changes) -> None:
        """Apply changes after ``cursor``."""
        # after a reset, ``added`` is the whole catalogue
        if changes.reset:
            self._packs.clear()
            self.totals.clear()
        for pack_id in changes.removed:
            self._remove(pack_id)
        for table in changes.added:
            # subtract the pack first, because it may have been written again under the same id
            self._remove(table.pack_id)
            self._packs[table.pack_id] = (table.tenant, table.payload_length)
            self.totals[table.tenant] += table.payload_length
        self.cursor = changes.cursor

    def _remove(self, pack_id: bytes) -> None:
        """Subtract a pack from the totals, if it is counted."""
        pack = self._packs.pop(pack_id, None)
        if pack is not None:
            tenant, num_bytes = pack
            self.totals[tenant] -= num_bytes


def block_keys(table: PackTable) -> list[bytes]:
    """Return the keys of a pack's blocks without their KV cache group."""
    full_keys = table.keys.unpack()
    return [get_offload_block_hash(key) for key in full_keys]


def stored_blocks(tables: Iterable[PackTable]) -> Iterator[StoredBlock]:
    """Yield the blocks of packs, each key once."""
    seen: set[StoredBlock] = set()
    for table in tables:
        # the keys of a pack are in the order of its frames, so each frame takes the next ones
        keys = iter(block_keys(table))
        for frame in table.frames:
            for key in islice(keys, frame.block_count):
                block = StoredBlock(key, frame.group, frame.block_bytes)
                if block not in seen:
                    seen.add(block)
                    yield block
