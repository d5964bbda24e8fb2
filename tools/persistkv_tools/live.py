"""A namespace's packs while others write to it."""

from __future__ import annotations

from persistkv.storage.backend import Backend


class LivePacks:
    """The tables as of the last look; ``refresh`` looks again."""

    def __init__(self, backend: Backend, namespace: bytes) -> None:
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
