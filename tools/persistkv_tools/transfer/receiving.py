"""Puts packs and requests that exist elsewhere into a store, as they are.

1. A request is written in the commit of its last packs, and only where every block that it names is there.
2. Content that the store holds is not written again, and nothing is written twice: packs that the store evicts
   meanwhile are reported with their requests.
"""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from persistkv.storage.backend import Backend, CommitBatch, ManifestWrite
from persistkv.storage.identity import Identity
from persistkv.storage.index import Index
from persistkv.storage.manifest import ManifestKeys, RequestManifest
from persistkv.storage.pack import MAX_PACK_BYTES, PackTable
from persistkv.storage.stored_pack import StoredPack


class Received(msgspec.Struct):
    """What came into a store."""

    packs: int = 0
    stored_bytes: int = 0
    requests: int = 0
    packs_held: int = 0
    """Packs whose blocks the store held already."""
    requests_held: int = 0
    evicted_packs: int = 0
    """Packs that the store evicted meanwhile, of any writer."""
    incomplete: list[str] = []
    """Requests that were not written, because some of their blocks are damaged or gone."""
    missing: list[str] = []
    """Requests that were not written, because the capacity has no room for them; newest first."""
    missing_packs: int = 0
    """Packs of no request that were not written for the same reason."""
    lost: list[str] = []
    """Requests that were written, and that the store has evicted since."""
    lost_packs: int = 0
    """Packs likewise."""

    @property
    def complete(self) -> bool:
        """Whether the store holds all that it was to receive."""
        left_out = self.incomplete or self.missing or self.missing_packs
        return not (left_out or self.lost or self.lost_packs)


class Receiver:
    """One namespace of a store that is written to. Others may write to it meanwhile."""

    def __init__(self, backend: Backend, identity: Identity, received: Received) -> None:
        """:param received: is counted up.

        :raises StoreError: the namespace cannot be made.
        """
        self._backend = backend
        self._namespace = backend.open_namespace(identity).id
        self._received = received
        self._index = Index()
        self._cursor: bytes | None = None
        self._waiting: dict[bytes, StoredPack] = {}
        self._waiting_keys: dict[bytes, bytes] = {}
        self._asked: set[bytes] = set()
        self._requests = {manifest.id for manifest in backend.manifests(self._namespace)}
        self._written: list[str] = []
        self._sent: list[bytes] = []
        """A key of each pack that was written."""
        self._refresh()

    def wants(self, table: PackTable) -> bool:
        """Whether the pack has a block that is not here, asked once for each pack. If not, it counts as held."""
        if table.pack_id in self._asked:
            return False
        self._asked.add(table.pack_id)
        missing = any(key not in self._index and key not in self._waiting_keys for key in table.keys.unpack())
        self._received.packs_held += not missing
        return missing

    def pack(self, pack: StoredPack) -> None:
        """Take a pack, which is written now or with what follows.

        :raises StoreError: a commit failed; those before it were done.
        """
        waiting = sum(held.raw_length for held in self._waiting.values())
        if self._waiting and waiting + pack.raw_length > MAX_PACK_BYTES:
            self.flush()
        self._waiting[pack.pack_id] = pack
        self._waiting_keys.update((key, pack.pack_id) for key in pack.keys.unpack())

    def holds(self, request: str) -> bool:
        """Whether the store has it; counted where it does."""
        self._received.requests_held += request in self._requests
        return request in self._requests

    def request(self, manifest: RequestManifest, keys: ManifestKeys) -> None:
        """Write a request with the packs that wait.

        :raises StoreError: the commit failed; those before it were done.
        """
        packs = self._packs_of([group.unpack() for group in keys])
        if packs is None:
            self._received.incomplete.append(manifest.id)
            return
        self._commit([ManifestWrite(manifest, keys, packs)])
        self._requests.add(manifest.id)
        self._written.append(manifest.id)
        self._received.requests += 1

    def flush(self) -> None:
        """Write what waits.

        :raises StoreError: the commit failed; those before it were done.
        """
        if self._waiting:
            self._commit([])

    def check(self) -> None:
        """Report written content that the store no longer holds.

        :raises StoreError: the medium failed.
        """
        self._refresh()
        there = {manifest.id for manifest in self._backend.manifests(self._namespace)}
        self._received.lost += [name for name in self._written if name not in there]
        self._received.lost_packs += sum(key not in self._index for key in self._sent)

    def _packs_of(self, chains: Sequence[Sequence[bytes]]) -> list[bytes] | None:
        """By the depth of the first key in each; None where a key is in no pack."""
        depths: dict[bytes, int] = {}
        for keys in chains:
            for depth, key in enumerate(keys):
                found = self._index.pack_of(key)
                pack = self._waiting_keys.get(key) if found is None else found.pack_id
                if pack is None:
                    return None
                depths[pack] = min(depth, depths.get(pack, depth))
        return sorted(depths, key=depths.__getitem__)

    def _commit(self, manifests: Sequence[ManifestWrite]) -> None:
        packs = list(self._waiting.values())
        result = self._backend.commit(self._namespace, CommitBatch(packs, manifests))
        self._sent += [pack.keys.unpack()[0] for pack in packs]
        self._waiting.clear()
        self._waiting_keys.clear()
        self._received.packs += len(packs)
        self._received.stored_bytes += sum(pack.payload_length for pack in packs)
        self._received.evicted_packs += len(result.evicted)
        self._refresh()

    def _refresh(self) -> None:
        found = self._backend.changes(self._namespace, self._cursor)
        self._cursor = found.cursor
        if found.reset:
            self._index = Index()
        self._index.remove_all(found.removed)
        for table in found.added:
            self._index.add(table)
