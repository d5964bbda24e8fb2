"""One commit: what a batch does inside a write transaction, and what it evicts."""

from __future__ import annotations

import enum
from collections.abc import Collection, Iterable
from itertools import islice

from persistkv.errors import StoreError
from persistkv.storage.backend import CommitBatch, ManifestWrite
from persistkv.storage.manifest import encode_manifest, encode_manifest_keys
from persistkv.storage.pack import ID_BYTES, UNKNOWN_DEPTH, PackTable
from persistkv.storage.pack_writer import PackWriter
from persistkv_lmdb.layout import (
    ADDED,
    LOG_KEY,
    ORDERED,
    PINNED,
    REMOVED,
    SEQUENCE,
    NamespaceState,
    Transaction,
    manifest_row,
    pack_table,
    rows,
)
from persistkv_lmdb.payload import Payloads, payload_bound
from persistkv_lmdb.recency import Candidate, Recency
from persistkv_lmdb.room import Goal

LOG_ENTRIES = 4096


class Evicted(enum.Enum):
    """How a search for room ended."""

    ENOUGH = "enough"
    SOME = "some"
    """As many as one transaction may take; there are more."""
    ALL = "all"
    """Nothing is left that may go."""


class Commit:
    """Changes within one transaction, which makes them one; ``sum_up`` writes what sums them up."""

    def __init__(
        self, transaction: Transaction, payloads: Payloads, namespace: bytes, keep: Collection[bytes] = ()
    ) -> None:
        """:param keep: the names (see ``Candidate``) of packs and manifests that are not evicted.

        :raises StoreError: there is no such namespace.
        """
        self.evicted: list[PackTable] = []
        self.payloads = payloads
        self.grew = False
        """Whether anything was written that stays."""
        self._transaction = transaction
        self._txn, self._db = transaction
        self._namespace = namespace
        self._keep = keep
        self._recency = Recency(transaction)
        self._states: dict[bytes, NamespaceState] = {}
        self._before: dict[bytes, bytes] = {}
        self.state = self._state_of(namespace)

    def apply(self, batch: CommitBatch) -> None:
        """Do what the batch says."""
        if batch.uses_anything:
            self._recency.count()
        for pack_id in batch.deletions:
            self._delete(self._namespace + pack_id)
        for pack_id in batch.bad:
            self._delete(self._namespace + pack_id, alone=True)
        for pack in batch.packs:
            self._add(pack)
        for write in batch.manifests:
            self._put_manifest(write)
        for manifest_id, pinned in batch.pins:
            self._pin(manifest_id, pinned)
        self.touch(batch.touches)

    def touch(self, packs: Iterable[bytes]) -> None:
        """Packs were used, by their ids."""
        for pack_id in packs:
            self._recency.touch(self._namespace + pack_id)

    def missing(self, packs: Iterable[PackWriter]) -> list[PackWriter]:
        """Those that would be written."""
        return [pack for pack in packs if not self._holds(self._namespace + pack.pack_id)]

    def evict(self, goal: Goal, at_most: int) -> Evicted:
        """Take what is listed first, and helps, until there is enough room."""
        if goal.met():
            return Evicted.ENOUGH
        for candidate in self._recency.oldest():
            if candidate.name in self._keep or not (candidate.is_manifest or goal.helps(candidate.name)):
                continue
            if not at_most:
                return Evicted.SOME
            at_most -= 1
            self._remove(candidate)
            if goal.met():
                return Evicted.ENOUGH
        return Evicted.ALL

    def expire(self, ttl_s: float, at_most: int, start: bytes) -> bytes:
        """Take what was last used so long ago; the rest of it is left to the next commits.

        What came back after a pause is listed behind what was used later. So this looks at the first in the order, as
        long as they are old, and then at as many more from ``start`` on.

        :param start: a key of ``order``.
        :returns: where the next commit goes on; empty behind the last one.
        """
        for candidate in islice(self._recency.oldest(), at_most):
            if not self._expire(candidate, ttl_s):
                break
        for looked, candidate in enumerate(self._recency.oldest(start)):
            if looked == at_most:
                return candidate.key
            self._expire(candidate, ttl_s)
        return b""

    def _expire(self, candidate: Candidate, ttl_s: float) -> bool:
        """Remove the candidate if it is older than the ttl; return whether it is."""
        old = candidate.time < self._recency.time - ttl_s
        if old and candidate.name not in self._keep:
            self._remove(candidate)
        return old

    def finish(self) -> None:
        """Sum up, and make payloads durable: the disk had them till now."""
        self.sum_up()
        self.payloads.finish()

    def sum_up(self) -> None:
        """Write totals and the clock, and shorten the log. What payloads write behind it takes no page more."""
        self._recency.finish()
        for name, state in self._states.items():
            if (row := state.encode()) != self._before[name]:
                self._txn.put(name, row, db=self._db.states)
                self._shorten_log(name, state)

    # Packs

    def _holds(self, name: bytes) -> bool:
        row = self._txn.get(name, db=self._db.packs)
        return row is not None and pack_table(name, row) is not None

    def _add(self, pack: PackWriter) -> None:
        """Write a pack; where it is held it was used. One whose row is damaged is not held: it is written anew."""
        name = self._namespace + pack.pack_id
        if self._holds(name):
            self._recency.touch(name)
            return
        self._delete_pack(name)
        self.grew = True
        self.payloads.write(name, pack.stream(), payload_bound(pack))
        self._log(name, ADDED)
        self._txn.put(name, SEQUENCE.pack(self.state.sequence) + pack.table.encode(), db=self._db.packs)
        depth = min((frame.depth for frame in pack.table.frames), default=UNKNOWN_DEPTH)
        self._recency.add_pack(name, depth, sum(map(self._is_pinned, manifests_of(self._transaction, name))))
        self.state.count(pack.table, 1)

    def _remove(self, candidate: Candidate) -> None:
        if candidate.is_manifest:
            self._drop_manifest(candidate.name)
        else:
            self._delete(candidate.name)

    def _delete(self, name: bytes, *, alone: bool = False) -> None:
        """Delete a pack, the manifests that name it, and, but ``alone``, what only they made reachable behind it."""
        doomed = [name]
        while doomed:
            name = doomed.pop()
            for manifest in manifests_of(self._transaction, name):
                behind = self._drop_manifest(manifest, behind=name)
                doomed += [] if alone else behind
            self._delete_pack(name)

    def _delete_pack(self, name: bytes) -> None:
        row = self._txn.get(name, db=self._db.packs)
        if row is None:
            return
        table = pack_table(name, row)
        self._txn.delete(name, db=self._db.packs)
        self.payloads.delete(name, 0 if table is None else table.payload_length)
        self._recency.remove_pack(name)
        self._log(name, REMOVED)
        if table is None:  # nobody knows what the damaged row had counted
            self._recount(name[:ID_BYTES])
        else:
            self.evicted.append(table)
            self._state_of(table.namespace).count(table, -1)

    # Manifests

    def _put_manifest(self, write: ManifestWrite) -> None:
        """Write a manifest, over one of the same id, whose pin it takes over.

        None of its packs is listed before one behind it.
        """
        self.grew = True
        name = manifest_row(self._namespace, write.manifest.id)
        before = self._recency.chain(name)
        self._drop_manifest(name)
        pinned = before is not None and before.pinned
        flags = (ORDERED if write.manifest.ordered else 0) | (PINNED if pinned else 0)
        self._txn.put(name, encode_manifest(write.manifest), db=self._db.manifests)
        self._txn.put(name, encode_manifest_keys(write.keys), db=self._db.manifest_keys)
        packs = tuple(dict.fromkeys(write.packs))
        self._recency.add_manifest(name, flags, packs)
        self.state.requests += 1
        place = 0
        for pack_id in reversed(packs):
            pack = self._namespace + pack_id
            self._txn.put(pack + name[ID_BYTES:], b"", db=self._db.links)
            place = self._recency.touch(pack, place if write.manifest.ordered else 0)
            if pinned:
                self._recency.pin(pack, 1)

    def _drop_manifest(self, name: bytes, behind: bytes | None = None) -> list[bytes]:
        """Delete a manifest.

        :returns: the names of the packs that only it made reachable through the pack ``behind``.
        """
        if not self._txn.delete(name, db=self._db.manifests):
            return []
        self._txn.delete(name, db=self._db.manifest_keys)
        namespace, digest = name[:ID_BYTES], name[ID_BYTES:]
        self._state_of(namespace).requests -= 1
        chain = self._recency.chain(name)
        if chain is None:
            return []
        self._recency.remove_manifest(name, chain)
        packs = [namespace + pack_id for pack_id in chain.packs]
        for pack in packs:
            self._txn.delete(pack + digest, db=self._db.links)
            if chain.pinned:
                self._recency.pin(pack, -1)
        if behind not in packs or not chain.ordered:
            return []
        later = packs[packs.index(behind) + 1 :]
        return [pack for pack in later if pack not in self._keep and not manifests_of(self._transaction, pack)]

    def _is_pinned(self, manifest: bytes) -> bool:
        chain = self._recency.chain(manifest)
        return chain is not None and chain.pinned

    def _pin(self, manifest_id: str, pinned: bool) -> None:
        name = manifest_row(self._namespace, manifest_id)
        chain = self._recency.chain(name)
        if chain is None or chain.pinned == pinned:
            return
        self._recency.reflag(name, chain, chain.flags ^ PINNED)
        for pack_id in chain.packs:
            self._recency.pin(self._namespace + pack_id, 1 if pinned else -1)

    # Sums

    def _state_of(self, namespace: bytes) -> NamespaceState:
        if namespace not in self._states:
            row = self._txn.get(namespace, db=self._db.states)
            if row is None:
                raise StoreError(f"the store holds no namespace {namespace.hex()}")
            self._before[namespace] = bytes(row)
            self._states[namespace] = NamespaceState.decode(row)
        return self._states[namespace]

    def _log(self, name: bytes, kind: bytes) -> None:
        namespace, pack_id = name[:ID_BYTES], name[ID_BYTES:]
        state = self._state_of(namespace)
        state.sequence += 1
        self._txn.put(LOG_KEY.pack(namespace, state.sequence), kind + pack_id, db=self._db.log)

    def _shorten_log(self, namespace: bytes, state: NamespaceState) -> None:
        oldest = LOG_KEY.pack(namespace, max(0, state.sequence - LOG_ENTRIES + 1))
        with self._txn.cursor(self._db.log) as cursor:
            found = cursor.set_range(namespace)
            while found and bytes(cursor.key()) < oldest:
                found = cursor.delete()

    def _recount(self, namespace: bytes) -> None:
        state = self._state_of(namespace)
        state.packs = state.blocks = state.raw_bytes = state.stored_bytes = 0
        for key, row in rows(self._transaction, self._db.packs, namespace):
            if (table := pack_table(key, row)) is not None:
                state.count(table, 1)


def manifests_of(transaction: Transaction, pack: bytes) -> list[bytes]:
    """The keys of the manifests that name a pack, by its own."""
    return [pack[:ID_BYTES] + bytes(key[2 * ID_BYTES :]) for key, _ in rows(transaction, transaction.db.links, pack)]
