"""Packs of one namespace and the keys in them, read from a store."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from itertools import chain, islice

from persistkv.storage.extensions import InspectableBackend
from persistkv.storage.format.manifest import ManifestKeys
from persistkv.storage.format.pack import PackTable

_AT_ONCE = 256


class Catalogue:
    """The packs of one namespace. Some 250 bytes for each key."""

    def __init__(self, tables: Iterable[PackTable]) -> None:
        self.tables = {table.pack_id: table for table in tables}
        self._where: dict[bytes, bytes] = {}
        self._also: dict[bytes, list[bytes]] = {}
        for table in self.tables.values():
            for key in table.keys.unpack():
                if self._where.setdefault(key, table.pack_id) != table.pack_id:
                    self._also.setdefault(key, []).append(table.pack_id)

    @classmethod
    def of(cls, backend: InspectableBackend, namespace: bytes) -> Catalogue:
        """The catalogue as it is now."""
        return cls(backend.changes(namespace, None).added)

    def __contains__(self, key: bytes) -> bool:
        return key in self._where

    def packs_holding(self, keys: Iterable[bytes]) -> set[bytes]:
        """All packs that hold one of the keys."""
        wanted = list(keys)
        found = {pack for pack in map(self._where.get, wanted) if pack is not None}
        for key in self._also.keys() & wanted if self._also else ():
            found.update(self._also[key])
        return found

    def packs_in_order(self, chains: Sequence[Sequence[bytes]]) -> list[bytes]:
        """One pack for each key of a context, each pack once, by the depth of its first key in any group."""
        depths: dict[bytes, int] = {}
        for keys in chains:
            for depth, key in enumerate(keys):
                if (pack := self._where.get(key)) is not None:
                    depths[pack] = min(depth, depths.get(pack, depth))
        return sorted(depths, key=depths.__getitem__)


class LivePacks:
    """The tables as of the last look; ``refresh`` looks again."""

    def __init__(self, backend: InspectableBackend, namespace: bytes) -> None:
        self.namespace = namespace
        self._backend = backend
        found = backend.changes(namespace, None)
        self.cursor = found.cursor
        self.tables = {table.pack_id: table for table in found.added}

    def refresh(self) -> bool:
        """Apply what happened since; whether anything did."""
        found = self._backend.changes(self.namespace, self.cursor)
        moved = found.cursor != self.cursor
        self.cursor = found.cursor
        if found.reset:
            self.tables.clear()
        for pack_id in found.removed:
            self.tables.pop(pack_id, None)
        self.tables.update((table.pack_id, table) for table in found.added)
        return moved


def keys_of(
    backend: InspectableBackend, namespace: bytes, requests: Iterable[str]
) -> Iterator[tuple[str, ManifestKeys | None]]:
    """Ids of requests with their keys, some at a time; None where these are gone or do not read."""
    waiting = iter(requests)
    while some := list(islice(waiting, _AT_ONCE)):
        yield from zip(some, backend.manifest_keys(namespace, some), strict=True)


def all_keys(keys: ManifestKeys) -> list[bytes]:
    """The keys of all groups."""
    return list(chain.from_iterable(group.unpack() for group in keys))
