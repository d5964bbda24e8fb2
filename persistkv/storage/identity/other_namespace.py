"""The namespace of another engine release, as a second and read-only source of blocks."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace

import msgspec

from persistkv.config import RowLayout
from persistkv.storage.backend import Changes
from persistkv.storage.format.pack import UNKNOWN_DEPTH, PackTable
from persistkv.storage.index import HeldPack
from persistkv.storage.namespace_view import NamespaceView
from persistkv.storage.records import News, StoreCounters, StoreOptions


class OtherNamespace(NamespaceView):
    """View of another namespace. Its usable keys are added to the index of the engine's own namespace as hints, so that
    lookups find them.

    A block is usable if its pack records its depth (the number of blocks before it in its context), and the depth is
    below the limit of its KV cache group. Nothing is written to the other namespace, and uses of its packs are not
    recorded, so they are evicted as unused. The engine stores the blocks that it uses in its own namespace.
    """

    def __init__(
        self, own: NamespaceView, namespace: bytes, layout: RowLayout, options: StoreOptions, depths: tuple[int, ...]
    ) -> None:
        """Read the other namespace's catalogue, on the caller's thread.

        :param own: view of the engine's namespace; its index gets the hints.
        :param depths: for each KV cache group, the limit of usable depths.
        :raises StoreError: the catalogue could not be read.
        """
        self.depths = depths
        self._own = own
        self._own_events = options.events
        self._own_reloads = own.index.reloads
        options = msgspec.structs.replace(options, events=False)
        super().__init__(own.backend, namespace, own.executor, StoreCounters(), layout, options)

    def _load(self) -> Changes:
        return self.backend.changes(self.namespace, None)  # the tables of all packs are needed for the hints

    async def use(self, depths: tuple[int, ...]) -> None:
        """Replace the limits of usable depths. Must run as a flow of ``Executor.begin_write``.

        :raises StoreError: the catalogue could not be read; the new limits hold from the next refresh on.
        """
        self.depths = depths
        self.cursor = None
        await self.refresh()

    async def refresh(self) -> None:
        if self._own.index.reloads != self._own_reloads:  # the hints were deleted
            self.cursor = None
        await super().refresh()
        self.news = News()  # of keys that only the hints make readable

    def _learn(self, changes: Changes) -> None:
        if not any(self.depths):
            super()._learn(changes)
            return
        self._own_reloads = self._own.index.reloads
        index, added = self._own.index, list(changes.added)
        if changes.reset:
            index.remove_hints()
        for fingerprints in changes.removed.values():
            index.remove_hints(fingerprints)
        super()._learn(replace(changes, added=added))
        keys = [key for table in added for key in self._usable(table)]
        if self._own_events:
            self._own.news.add(stored=index.absent(keys))
            self._own.news.lost |= bool(changes.removed)
        index.add_hints(keys)

    def _usable(self, table: PackTable) -> list[bytes]:
        keys, found, start = table.keys.unpack(), list[bytes](), 0
        for frame in table.frames:
            if frame.depth != UNKNOWN_DEPTH and frame.group < len(self.depths):
                count = min(frame.block_count, max(0, self.depths[frame.group] - frame.depth))
                found += keys[start : start + count]
            start += frame.block_count
        return found

    async def usable_holders(self, keys: Sequence[bytes]) -> list[HeldPack | None]:
        """Return, for each key, a pack in which its block is usable; None if there is none. Compares full keys.

        :raises StoreError: the key tables could not be read.
        """
        holders = await self.holders(keys)
        packs = {pack.pack_id: pack.table for pack in holders if pack is not None}
        usable = {pack_id: set(self._usable(table)) for pack_id, table in packs.items()}
        return [
            pack if pack is not None and key in usable[pack.pack_id] else None
            for key, pack in zip(keys, holders, strict=True)
        ]

    def distrust(self, packs: Iterable[HeldPack]) -> None:
        packs = list(packs)
        super().distrust(packs)
        for pack in packs:
            self._own.index.remove_hints(pack.table.keys.fingerprints)

    def close(self) -> None:
        """Release the view's index; the backend stays open. Idempotent."""
        self.index.close()
