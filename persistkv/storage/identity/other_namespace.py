"""View of the namespace of another engine release, whose blocks the engine may use."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace

import msgspec

from persistkv.config import RowLayout
from persistkv.storage.backend import Changes
from persistkv.storage.format.pack import UNKNOWN_DEPTH, PackTable
from persistkv.storage.records import StoreCounters, StoreOptions, StoreReport
from persistkv.storage.store.index import HeldPack
from persistkv.storage.store.namespace_view import NamespaceView


class OtherNamespace(NamespaceView):
    """View of another release's namespace, as a read-only source of blocks. Its usable keys are
    added to the index of the engine's own namespace as adopted keys, so that lookups find them. A
    block is usable if its pack records its depth (the number of blocks before it in its context),
    and the depth is below the limit of its KV cache group.

    Nothing is written to the other namespace, and uses of its packs are not recorded, so they are
    evicted as unused. The engine stores the blocks that it uses in its own namespace.
    """

    def __init__(
        self,
        own: NamespaceView,
        namespace: bytes,
        layout: RowLayout,
        options: StoreOptions,
        depths: tuple[int, ...],
    ) -> None:
        """Read the catalogue, on the caller's thread. ``depths`` are the limits of usable depths,
        by KV cache group."""
        self.depths = depths
        self._own = own
        """View of the engine's own namespace, whose index has the adopted keys."""
        self._own_events = options.events
        """Whether changes of the adopted keys are reported to the engine."""
        self._own_reloads = own.index.reloads
        """Number of reloads of the own index when ``_apply_changes`` last added adopted keys."""
        # this view reports nothing: ``_apply_changes`` reports to the own view
        options = msgspec.structs.replace(options, events=False)
        super().__init__(
            own.backend, namespace, own.threads, StoreCounters(), layout, options
        )

    def _load_index(self) -> Changes:
        # from the beginning (None), not from a saved index: the adopted keys need the tables of all
        # packs
        return self.backend.changes(self.namespace, None)

    @property
    def is_adopted(self) -> bool:
        """Whether lookups use blocks of this namespace. Otherwise it is a candidate, whose limits
        of usable depths are all 0."""
        return any(self.depths)

    def use(self, depths: tuple[int, ...]) -> None:
        """Replace the limits of usable depths. They hold from the next refresh on."""
        self.depths = depths
        # No position: the next refresh reads all packs again, because packs that are known can have
        # more usable blocks now.
        self.cursor = None

    async def refresh(self) -> None:
        """Apply the changes of the other namespace since the last refresh."""
        # A reload of the own index has deleted the adopted keys. Without a position, this refresh
        # reads all packs, and ``_apply_changes`` adds their keys again.
        has_own_reloaded = self._own.index.reloads != self._own_reloads
        if has_own_reloaded:
            self.cursor = None
        await super().refresh()
        # discard the report of this view: the engine looks up only adopted keys, whose changes
        # ``_apply_changes`` adds to the report of the own view
        self.report = StoreReport()

    def _apply_changes(self, changes: Changes) -> None:
        """Apply changes of the other namespace to this view's index, and those of its usable keys
        to the own index."""
        if self.is_adopted:
            # a list, because two calls below read the added tables
            added = list(changes.added)
            # before this view's index changes: it still knows which packs are removed
            self._remove_adopted(changes, added)
            super()._apply_changes(replace(changes, added=added))
            self._adopt_keys(added)
        else:
            # a candidate has no usable keys
            super()._apply_changes(changes)
        # a later reload of the own index deletes the usable keys again
        self._own_reloads = self._own.index.reloads

    def _remove_adopted(self, changes: Changes, added: Sequence[PackTable]) -> None:
        """Remove the keys of removed packs from the own index. After a reset, remove all adopted
        keys: ``_adopt_keys`` adds those of the present packs again.

        :param added: tables of the added packs; after a reset, of all packs.
        """
        index = self._own.index
        are_some_gone = bool(changes.removed)
        if changes.reset:
            index.remove_adopted()
            # a pack that this view's index lacks has the number 0
            known = [table for table in added if self.index.number_of(table.pack_id)]
            are_some_gone = len(known) < self.index.num_packs
        for fingerprints in changes.removed.values():
            index.remove_adopted(fingerprints)
        if self._own_events and are_some_gone:
            # A report names the removed keys, and those of the removed packs are not known: mark
            # the report as incomplete.
            self._own.report.lost = True

    def _adopt_keys(self, tables: Iterable[PackTable]) -> None:
        """Add the usable keys of packs to the own index."""
        index = self._own.index
        keys: list[bytes] = []
        for table in tables:
            keys += self._usable_keys(table)
        if self._own_events:
            # keys that the own namespace holds, too, are reported already
            absent = index.absent(keys)
            self._own.report.add(stored=absent)
        index.add_adopted(keys)

    def _usable_keys(self, table: PackTable) -> list[bytes]:
        """Return the keys of a pack's blocks whose depths are known and below the limits of their
        groups."""
        keys = table.keys.unpack()
        usable: list[bytes] = []
        start = 0  # index of the frame's first key; its blocks follow each other in their context
        for frame in table.frames:
            # a damaged table may name a group that does not exist
            if frame.depth != UNKNOWN_DEPTH and frame.group < len(self.depths):
                limit = self.depths[frame.group]
                below_limit = max(0, limit - frame.depth)
                count = min(frame.block_count, below_limit)
                usable += keys[start : start + count]
            start += frame.block_count
        return usable

    async def holders(self, keys: Sequence[bytes]) -> list[HeldPack | None]:
        """Return, for each key, a pack in which its block is usable; None if there is none.
        Compares full keys."""
        holders = await self.all_holders(keys)
        # the usable keys of each pack, computed once
        usable: dict[bytes, set[bytes]] = {}
        usable_holders: list[HeldPack | None] = []
        for key, pack in zip(keys, holders, strict=True):
            if pack is None:
                usable_holders.append(None)
                continue
            if pack.pack_id not in usable:
                usable_keys = self._usable_keys(pack.table)
                usable[pack.pack_id] = set(usable_keys)
            is_usable = key in usable[pack.pack_id]
            usable_holders.append(pack if is_usable else None)
        return usable_holders

    async def all_holders(self, keys: Sequence[bytes]) -> list[HeldPack | None]:
        """Return, for each key, a pack that holds it, at any depth."""
        return await super().holders(keys)

    def suspect(
        self,
        packs: Sequence[HeldPack],
        bad_frames: Mapping[bytes, int],
    ) -> None:
        """Stop the use of packs of which a read failed, in this view and in lookups.

        :param bad_frames: number of frames of each pack, by id, that failed verification.
        """
        # Count the bad frames here, and pass none of them: the base class counts them when it
        # deletes the packs, which this view never does.
        super().suspect(packs, {})
        for pack in packs:
            bad_count = bad_frames.get(pack.pack_id, 0)
            self._counters.verification_failures += bad_count
            # lookups must not find its keys again
            fingerprints = pack.table.keys.fingerprints
            self._own.index.remove_adopted(fingerprints)

    async def _quarantine(self) -> None:
        """Delete nothing: the engines of the other release decide about their packs."""
        # no suspected pack waits for a decision any more
        self._repair_work.undecided = False

    def close(self, *, saves: bool = True) -> None:
        """Release the view's index, which is not saved; the backend stays open. Idempotent."""
        self.index.close()
