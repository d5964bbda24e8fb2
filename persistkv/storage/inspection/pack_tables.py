"""Packs of a store by their tables, and the keys in them."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from itertools import zip_longest

from persistkv.batches import batched
from persistkv.storage.backend import Backend
from persistkv.storage.format.manifest import ManifestKeys
from persistkv.storage.format.pack import PackTable

# maximum number of requests in one call, whose keys are in memory together
_REQUESTS_PER_CALL = 256


class NamespacePacks:
    """Tables of the packs of one namespace of a store, as of the last ``refresh``. An index of the
    keys (some 250 bytes for each key) is built on first use."""

    def __init__(self, backend: Backend, namespace: bytes) -> None:
        self.namespace = namespace
        self.tables: dict[bytes, PackTable] = {}
        """By pack id."""
        self.cursor: bytes | None = None
        """Position in the changes of the namespace up to which they are applied."""
        self._backend = backend
        self._holders: dict[bytes, tuple[bytes, ...]] | None = None
        """The index of keys; None until ``holders`` is first used."""
        self.refresh()

    def refresh(self) -> bool:
        """Apply the changes of the store since the last refresh; return whether there were any."""
        found = self._backend.changes(self.namespace, self.cursor)
        has_changed = found.cursor != self.cursor
        self.cursor = found.cursor
        # after a reset, ``added`` is the whole catalogue, so remove all packs first
        removed = self.tables if found.reset else found.removed
        # copy the ids to a list, because ``remove`` changes ``tables``
        for pack in list(removed):
            self.remove(pack)
        # add after the removals, because a pack that was removed and written again is in both
        for table in found.added:
            self.add(table)
        return has_changed

    def add(self, table: PackTable) -> None:
        """Add the table of a pack; it replaces one with the same pack id."""
        if self._holders is not None and table.pack_id not in self.tables:
            self._add_keys(self._holders, table)
        self.tables[table.pack_id] = table

    def remove(self, pack: bytes) -> None:
        """Remove a pack by its id; ignored if it is unknown."""
        table = self.tables.pop(pack, None)
        if table is None or self._holders is None:
            return
        for key in table.keys.unpack():
            holders = self._holders.pop(key)
            others = [holder for holder in holders if holder != pack]
            # a key that no pack holds must have no entry, because ``hold_all`` tests for the entry
            if others:
                self._holders[key] = tuple(others)

    @property
    def holders(self) -> dict[bytes, tuple[bytes, ...]]:
        """For each key, the ids of the packs that hold it."""
        # build the index only when it is needed: lists and totals need the tables only
        if self._holders is None:
            self._holders = {}
            for table in self.tables.values():
                self._add_keys(self._holders, table)
        return self._holders

    @staticmethod
    def _add_keys(
        holders: dict[bytes, tuple[bytes, ...]],
        table: PackTable,
    ) -> None:
        """Add the keys of a pack to an index of keys."""
        alone = (table.pack_id,)  # one tuple for all keys that only this pack holds
        for key in table.keys.unpack():
            others = holders.get(key)
            holders[key] = alone if others is None else others + alone

    def hold_all(self, keys: Iterable[bytes]) -> bool:
        """Return whether the packs together hold all of the keys."""
        return all(map(self.holders.__contains__, keys))

    def holders_of(self, keys: Iterable[bytes]) -> set[bytes]:
        """Return the ids of all packs that hold at least one of the keys."""
        found: set[bytes] = set()
        for key in keys:
            holders = self.holders.get(key, ())
            found.update(holders)
        return found

    def in_order(self, keys: ManifestKeys) -> list[bytes]:
        """Return ids of packs that together hold each held key of a context, in the order of the
        context.

        For a key in several packs, one of them is chosen. Keys that no pack holds are skipped.
        """
        # go block by block over all groups, because an engine needs all groups of a prefix together
        groups = [group.unpack() for group in keys]
        chosen: dict[bytes, None] = {}  # an ordered set
        # groups with fewer blocks are filled with None, which no pack holds
        for block_keys in zip_longest(*groups):
            for key in block_keys:
                packs = self.holders.get(key)
                if packs is None:
                    continue
                first_pack = packs[0]
                chosen[first_pack] = None
        return list(chosen)


def keys_of(
    backend: Backend,
    namespace: bytes,
    requests: Iterable[str],
) -> Iterator[tuple[str, ManifestKeys | None]]:
    """Yield request ids with their keys, read in batches; None instead of keys that are deleted or
    damaged."""
    for some in batched(requests, _REQUESTS_PER_CALL):
        keys = backend.manifest_keys(namespace, some)
        yield from zip(some, keys, strict=True)


def all_keys(keys: ManifestKeys | None) -> list[bytes]:
    """Return the keys of a request in all KV cache groups as one list, one group after the other;
    none if they are None, which means unreadable."""
    found: list[bytes] = []
    for group in keys or ():
        found += group.unpack()
    return found
