"""Write transaction of the catalogue: applies a batch, evicts and expires."""

from __future__ import annotations

import enum
import os
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from itertools import chain as concatenated
from typing import Protocol

from persistkv.errors import StoreError
from persistkv.storage.backend import CommitBatch, ManifestWrite, Namespace
from persistkv.storage.catalogue.order import EvictionOrder
from persistkv.storage.catalogue.quotas import Quotas
from persistkv.storage.catalogue.rows import (
    ADDED,
    GENERATION_BYTES,
    LINKS,
    LOG,
    LOG_KEY,
    LOW,
    MANIFEST_KEYS,
    MANIFESTS,
    META,
    NAMESPACES,
    NO_GENERATION,
    NO_PRIORITY,
    NOTE,
    ORDERED,
    PACKS,
    PINNED,
    REMOVED,
    RESTORED,
    SEQUENCE,
    STATES,
    Chain,
    NamespaceState,
    TableRows,
    Use,
    encode_change,
    encode_namespace,
    holds_pack,
    link_row,
    manifest_row,
    manifests_of,
    pack_table,
    read_state,
)
from persistkv.storage.format.codec import Buffer
from persistkv.storage.format.keys import STORE
from persistkv.storage.format.manifest import (
    RequestManifest,
    encode_manifest,
    encode_manifest_keys,
)
from persistkv.storage.format.pack import ID_BYTES, UNKNOWN_DEPTH, PackTable
from persistkv.storage.format.pack_writer import NewPack
from persistkv.tenants import DEFAULT_TENANT

LOG_ENTRIES = 4096
"""Changes per namespace that the log keeps. For an older cursor, ``changes`` returns the whole
catalogue."""
# 8 KiB: estimate of the rows that begin a namespace, without its identity
_BEGINNING_BYTES = 8 << 10
# 1 KiB: estimate of the rows of a pack without its table, or of a manifest without its keys
_ROWS_BYTES = 1 << 10
_FRAME_BYTES = 64  # bytes of a frame in the table of its pack, rounded up
# estimate of the bytes of the rows for each pack that a manifest names
_LINK_BYTES = 160


class EvictionEnd(enum.Enum):
    """Reason for which an eviction ended."""

    GOAL_MET = "goal met"
    LIMIT_REACHED = "limit reached"
    """The goal is not met, and this transaction may not evict more. Another one may."""
    NOTHING_LEFT = "nothing left"
    """The goal is not met, and no candidate is left, in any transaction."""


class Payloads(Protocol):
    """Payload storage of one transaction, which a driver implements. A rollback of the transaction
    undoes all writes and deletions."""

    def write(self, name: bytes, stream: Iterator[Buffer]) -> None:
        """Write a pack's payload, or start writing it: the buffers of the stream may be read until
        the transaction ends. Errors of the stream are raised unchanged.

        :param name: namespace and pack id.
        :raises StoreFullError: there is no room for the payload.
        """

    def delete(self, name: bytes) -> None:
        """Delete a pack's payload."""


class CatalogTransaction:
    """Changes of the catalogue within one write transaction of the driver, which commits them
    atomically. The *name* of a pack or manifest is the key of its rows: its namespace's id, then
    the pack id or the digest of the manifest's id (``manifest_row``).

    If a method raises, the driver must roll the transaction back.

    :param namespace: id of the namespace to which the pack ids of all methods belong.
    :param keep: names of packs and manifests that are not evicted.
    :param payloads: storage of the payloads; None: they are not in the store's transactions.
    :param order: the eviction order, of the same rows; None: the one that follows the store's own
        clock.
    :param opened: namespaces, by id, that this transaction may begin. A namespace begins with its
        first content, and ends with its last: ``finish`` writes or deletes its rows. None: the
        driver keeps the rows of namespaces itself.
    :raises CorruptStoreError: the row of the namespace's totals or of the clock is damaged.
    """

    def __init__(
        self,
        rows: TableRows,
        payloads: Payloads | None,
        namespace: bytes,
        keep: Collection[bytes] = (),
        opened: Mapping[bytes, Namespace] | None = None,
        order: EvictionOrder | None = None,
    ) -> None:
        self.evicted: list[PackTable] = []
        """Tables of the packs that this transaction has removed, in all namespaces, except those
        whose table is damaged."""
        self.removed: list[bytes] = []
        """Names of the packs that this transaction has removed, those with a damaged table
        included."""
        self.ended: list[bytes] = []
        """Ids of the namespaces that ``finish`` has deleted: they have lost their last content."""
        self.dropped: list[bytes] = []
        """Names of the manifests that this transaction has deleted, those that it has replaced
        included."""
        self.grew = False
        """Whether this transaction has written a pack or manifest."""
        self._payloads = payloads
        self._rows = rows
        self._namespace = namespace
        self._keep = keep
        self._opened = opened
        self._order = order or EvictionOrder(rows)
        self.quotas = Quotas(rows)
        """Totals and quotas of tenants."""
        self._states: dict[bytes, NamespaceState] = {}
        """Totals of the namespaces that this transaction has read or changed, by id. Evictions may
        change any namespace."""
        self._before: dict[bytes, bytes] = {}
        """The rows of ``_states`` as they were read: ``finish`` writes those that differ."""
        self._state = self._state_of(namespace)
        """Totals of ``namespace``."""

    @property
    def cursor(self) -> bytes:
        """Position in the namespace's change log after this transaction's changes so far."""
        return self._state.cursor

    @property
    def beginning_bytes(self) -> int:
        """Upper estimate of the bytes of the rows that ``finish`` writes to begin the namespace; 0
        if it has begun, if it was not opened, or if the driver keeps these rows itself."""
        is_held = self._state.generation != NO_GENERATION
        if is_held or self._opened is None:
            return 0
        opened = self._opened.get(self._namespace)
        if opened is None:
            return 0
        identity_row = encode_namespace(opened)
        return len(identity_row) + _BEGINNING_BYTES

    def remove(self, batch: CommitBatch) -> None:
        """Apply the deletions of a batch, then its touches, so that ``evict`` chooses the touched
        packs last."""
        # this batch uses packs or manifests, so it gets a moment of its own in the eviction order
        if batch.packs or batch.manifests or batch.touches:
            self._order.is_moment = True
        for pack_id in batch.deletions:
            self._delete_with_manifests(self._namespace + pack_id)
        for pack_id in batch.bad:
            # Keep the packs that follow it in manifests: they can be loaded again as soon as an
            # engine has stored the blocks of this pack again.
            self._delete_with_manifests(self._namespace + pack_id, keep_later=True)
        for manifest_id in batch.manifest_deletions:
            self.drop_manifest(manifest_row(self._namespace, manifest_id))
        self.touch(batch.touches)

    def add(self, batch: CommitBatch) -> None:
        """Write the packs and manifests of a batch, then apply its pins."""
        # The driver has announced these packs by ``quotas.expect``, to evict for them. End the
        # announcement, because each pack counts when it is written, and would count twice.
        self.quotas.expect({})
        for pack in batch.packs:
            self._add_pack(pack)
        for write in batch.manifests:
            self._put_manifest(write)
        for manifest_id, pinned in batch.pins:
            self.pin(manifest_row(self._namespace, manifest_id), pinned)

    def touch(self, pack_ids: Iterable[bytes]) -> None:
        """Record that packs are used by this transaction. Packs that are not held are ignored."""
        for pack_id in pack_ids:
            self._order.touch(self._namespace + pack_id)

    def missing(self, packs: Iterable[NewPack]) -> list[NewPack]:
        """Return the packs that ``add`` would write: those that are not held, or whose table is
        damaged."""
        lacking: list[NewPack] = []
        for pack in packs:
            if not holds_pack(self._rows, self._namespace + pack.pack_id):
                lacking.append(pack)
        return lacking

    def evict(
        self,
        is_enough: Callable[[], bool],
        at_most: int,
    ) -> EvictionEnd:
        """Evict until a goal is met: first packs of the tenants that are above their quotas, until
        none of them is, then packs and manifests of all tenants, both in eviction order.

        :param is_enough: returns whether the goal is met; called before the first eviction and
            after each.
        :param at_most: maximum number of packs and manifests to evict.
        """
        candidates = concatenated(self._above_quota(), self._order.oldest())
        return self._evict(candidates, is_enough, at_most)

    def evict_of(
        self,
        tenant: bytes,
        is_enough: Callable[[], bool],
        at_most: int,
    ) -> EvictionEnd:
        """Evict packs of one tenant as ``evict`` does; ``tenant`` is the digest of its name."""
        return self._evict(self._order.oldest_of(tenant), is_enough, at_most)

    def fit_quota(self, tenant: bytes, at_most: int) -> EvictionEnd:
        """Evict at most ``at_most`` packs of one tenant, until it is not above its quota.

        :param tenant: digest of the tenant's name.
        """

        def fits() -> bool:
            return not self.quotas.is_above(tenant)

        return self.evict_of(tenant, fits, at_most)

    def evict_above(self, at_most: int) -> EvictionEnd:
        """Evict at most ``at_most`` packs of the tenants that are above their quotas, until none of
        them is."""

        def all_fit() -> bool:
            return not self.quotas.above()

        return self._evict(self._above_quota(), all_fit, at_most)

    def _above_quota(self) -> Iterator[tuple[bytes, Use | Chain]]:
        """Iterate over packs of the tenants that are above their quotas, as long as they are. The
        consumer evicts each pack before it asks for the next one."""
        for tenant in self.quotas.above():
            for found in self._order.oldest_of(tenant):
                if not self.quotas.is_above(tenant):
                    break
                yield found

    def _evict(
        self,
        candidates: Iterable[tuple[bytes, Use | Chain]],
        is_enough: Callable[[], bool],
        at_most: int,
    ) -> EvictionEnd:
        """Remove at most ``at_most`` candidates, in their order, until ``is_enough`` returns True.
        No pack or manifest of the transaction's own batch is removed.

        :param candidates: names of packs and manifests, with their rows.
        """
        if is_enough():
            return EvictionEnd.GOAL_MET
        num_left = at_most
        for name, row in candidates:
            if name in self._keep:
                continue
            # check only if there is a candidate: without one, nothing is left in any case
            if not num_left:
                return EvictionEnd.LIMIT_REACHED
            num_left -= 1
            self._evict_one(name, row)
            if is_enough():
                return EvictionEnd.GOAL_MET
        return EvictionEnd.NOTHING_LEFT

    def expire(self, ttl_s: float | None, at_most: int) -> None:
        """Remove expired content: manifests whose own ttl has passed, with those of their packs
        that were unused for that time and that no other manifest names; then packs and manifests
        that were unused for the store's ttl.

        :param ttl_s: the store's ttl in seconds; None: none.
        :param at_most: maximum number of packs and manifests to remove; later calls remove the
            rest.
        """
        num_left = at_most
        for name, chain in self._order.expired():
            if not num_left:
                return
            if name not in self._keep:
                num_left -= 1
                self._expire_manifest(name, chain)
        if ttl_s is None:
            return
        # The order lists all content of low priority before the rest. Search each priority alone,
        # so that a search ends at its first row that is too young.
        low = self._unused_for(ttl_s, low=True)
        others = self._unused_for(ttl_s, low=False)
        # without a goal, all content that was unused for so long is removed
        self._evict(
            concatenated(low, others),
            is_enough=lambda: False,
            at_most=num_left,
        )

    def _unused_for(
        self,
        ttl_s: float,
        *,
        low: bool,
    ) -> Iterator[tuple[bytes, Use | Chain]]:
        """Yield the packs and manifests of one priority that were unused for ``ttl_s``, in eviction
        order."""
        now = self._order.time
        latest = now - ttl_s
        for name, row in self._order.oldest(low):
            # a use later than now is damage: skip the row instead of ending the search here
            if row.time > now:
                continue
            # all further content of this priority was used later
            if row.time >= latest:
                return
            yield name, row

    def _expire_manifest(self, name: bytes, chain: Chain) -> None:
        """Delete a manifest whose ttl has passed, and those of its packs that were not used for the
        time of this ttl and that no other manifest names."""
        self.drop_manifest(name)
        namespace = name[:ID_BYTES]
        for pack_id in chain.packs:
            pack = namespace + pack_id
            use = self._order.use(pack)
            # keep a pack whose last use is unknown
            if use is None:
                continue
            # another request may have used the pack within the ttl
            is_unused = use.time + chain.ttl_s <= self._order.time
            # packs in ``_keep`` are those of the transaction's own batch
            if is_unused and pack not in self._keep and not self._is_named(pack):
                self._delete_pack(pack)

    def discard(self, pack_id: bytes) -> None:
        """Delete a pack alone: the manifests that name it, and the packs after it, are kept."""
        self._delete_pack(self._namespace + pack_id)

    def drop_manifests_of(
        self,
        pack_id: bytes,
        at_most: int,
        *,
        keep_later: bool = False,
    ) -> bool:
        """Delete at most ``at_most`` manifests that name a pack. Several transactions do so before
        the deletion of a pack that many requests share, so that no transaction gets too large.

        :param keep_later: keep the packs that follow this one in the deleted manifests, because the
            pack will be stored again (``CommitBatch.bad``); False: delete those of them that no
            manifest names now, because they are of no use without it (``CommitBatch.deletions``).
        :returns: whether more manifests name the pack, except those in ``keep``, which are not
            deleted.
        """
        name = self._namespace + pack_id
        # collect one manifest more than may be deleted, to know whether any remain
        naming: list[bytes] = []
        for manifest in manifests_of(self._rows, name):
            if manifest not in self._keep:
                naming.append(manifest)
            if len(naming) > at_most:
                break
        self._drop_manifests(naming[:at_most], name, keep_later=keep_later)
        return len(naming) > at_most

    def finish(self) -> None:
        """Write totals and clock, and delete the oldest entries of the log. Begin namespaces with
        their first content, and end those that have none left. Call this last in a transaction.

        :raises StoreError: content was added to a namespace that is neither held nor opened.
        """
        self._order.finish()
        self.quotas.finish()
        for namespace, state in self._states.items():
            if state.encode() != self._before[namespace]:
                self._finish_namespace(namespace, state)

    def _finish_namespace(self, namespace: bytes, state: NamespaceState) -> None:
        """Write the totals of a namespace that has changed, and shorten its log. Its first content
        begins it, and it ends when its last content was removed."""
        # None: the driver begins and ends namespaces itself
        if self._opened is not None:
            if self._is_empty(namespace, state):
                self._end_namespace(namespace, state)
                return
            if state.generation == NO_GENERATION:
                self._begin_namespace(namespace, state, self._opened)
        self._rows.put(STATES, namespace, state.encode())
        self._shorten_log(namespace, state)

    # Packs

    def _add_pack(self, pack: NewPack) -> None:
        """Write a pack, or touch it if it is held. A pack whose table is damaged counts as not
        held, and is written again."""
        name = self._namespace + pack.pack_id
        if holds_pack(self._rows, name):
            self._touch_held(name, pack.tenant)
            return
        # remove a pack with a damaged table, or an entry of the eviction order without a pack
        self._delete_pack(name)
        self.grew = True
        # None: payloads are not part of the transactions of this store
        if self._payloads is not None:
            self._payloads.write(name, pack.stream())
        sequence = self._log(name, ADDED)
        # read the table only now: it is complete after the payload was written
        table = pack.table
        # Count before the row is written: if the tenant's totals are damaged, they are first
        # counted from the rows, which must not contain this pack yet.
        self.quotas.count(table, 1)
        row = SEQUENCE.pack(sequence) + table.encode()
        self._rows.put(PACKS, name, row, table.tenant)
        self._list_pack(name, table.depth, table.tenant)
        # the totals of the namespace; those of the tenant are counted above
        self._state.count(table, 1)

    def _touch_held(self, name: bytes, tenant: str) -> None:
        """Record a use of a pack that is held. If its row in ``USES`` is damaged or missing, write
        a new one: without it, the pack could not be evicted."""
        is_listed = self._order.touch(name)
        if not is_listed:
            self._list_pack(name, UNKNOWN_DEPTH, tenant)

    def _list_pack(
        self,
        name: bytes,
        depth: int,
        tenant: str,
    ) -> None:
        """List a pack in the eviction order, with the pins and the priority of the manifests that
        name it: in a shared store, manifests may arrive before their packs.
        """
        pins = 0
        priority = NO_PRIORITY
        for manifest in manifests_of(self._rows, name):
            chain = self._order.chain(manifest)
            if chain is None:
                continue
            if chain.pinned:
                pins += 1
            priority = max(priority, chain.priority)
        self._order.add_pack(name, depth, pins, priority, tenant)

    def _evict_one(self, name: bytes, row: Use | Chain) -> None:
        """Evict the pack or manifest of a row in the eviction order."""
        if isinstance(row, Chain):
            self.drop_manifest(name)
        else:
            self._delete_with_manifests(name)

    def _delete_with_manifests(self, name: bytes, *, keep_later: bool = False) -> None:
        """Delete a pack and the manifests that name it. Unless ``keep_later``, also delete packs
        that follow it in these manifests and that no other manifest names: they are of no use
        without it.
        """
        # make a list first, because the deletions change the table
        naming = list(manifests_of(self._rows, name))
        self._drop_manifests(naming, name, keep_later=keep_later)
        self._delete_pack(name)

    def _drop_manifests(
        self,
        manifests: list[bytes],
        pack: bytes,
        *,
        keep_later: bool,
    ) -> None:
        """Delete manifests that name a pack, but not this pack. Unless ``keep_later``, also delete
        packs that follow it in these manifests and that no other manifest names."""
        # collect distinct names, in order, because manifests share packs
        later: dict[bytes, None] = {}
        for manifest in manifests:
            packs_after = self.drop_manifest(manifest, after=pack)
            later.update(dict.fromkeys(packs_after))
            # If the manifest's chain is damaged, the call above has not found this link. Delete it
            # here, because the pack would count as named by the deleted manifest.
            self._rows.delete(LINKS, link_row(pack, manifest))
        if keep_later:
            return
        # delete only packs that no manifest names, because other requests need the rest
        for name in later:
            is_held = self._rows.get(PACKS, name) is not None
            if is_held and name not in self._keep and not self._is_named(name):
                self._delete_pack(name)

    def _is_named(self, pack: bytes) -> bool:
        """Return whether any manifest names a pack."""
        return self._rows.has_prefix(LINKS, pack)

    def _delete_pack(self, name: bytes) -> None:
        """Delete a pack's rows and payload; a pack that is not held is ignored."""
        row = self._rows.get(PACKS, name)
        if row is None:
            # a damaged store may have a pack in the eviction order that it does not hold
            self._order.remove_pack(name)
            return
        table = pack_table(name, row)
        if table is None:
            self._delete_rows(name, None)
            # count again, because the damaged row's share of the totals is unknown
            self._recount(name[:ID_BYTES])
            self.quotas.recount()
            return
        # Count before the row is deleted: if the tenant's totals are damaged, they are first
        # counted from the rows, which must still contain this pack.
        self.quotas.count(table, -1)
        self._delete_rows(name, table)
        self.evicted.append(table)
        state = self._state_of(table.namespace)
        state.count(table, -1)

    def _delete_rows(self, name: bytes, table: PackTable | None) -> None:
        """Delete the rows and the payload of a pack that is held, and log the change.

        :param table: table of the pack; None: it is damaged.
        """
        self._rows.delete(PACKS, name)
        if self._payloads is not None:
            self._payloads.delete(name)
        self.removed.append(name)
        self._order.remove_pack(name)
        self._log(name, REMOVED, table)

    # Manifests

    def _put_manifest(self, write: ManifestWrite) -> None:
        """Write a manifest, and record that its packs are used. It replaces the manifest with the
        same id, and is pinned if the replaced one was."""
        self.grew = True
        manifest = write.manifest
        name = manifest_row(self._namespace, manifest.id)
        replaced = self._order.chain(name)
        self.drop_manifest(name)
        flags = _flags_of(manifest)
        if replaced is not None and replaced.pinned:
            flags |= PINNED
        head = encode_manifest(manifest)
        keys = encode_manifest_keys(write.keys)
        self._rows.put(MANIFESTS, name, head, manifest.tenant)
        self._rows.put(MANIFEST_KEYS, name, keys, manifest.tenant)
        # name each pack once, in order
        packs = tuple(dict.fromkeys(write.packs))
        ttl_s = manifest.ttl_s or 0.0
        chain = self._order.add_manifest(name, flags, ttl_s, packs)
        self._link_packs(name, chain)
        self._state.requests += 1

    def _link_packs(self, manifest: bytes, chain: Chain) -> None:
        """Record that a new manifest names and uses its packs, and pins them if it is pinned.

        :param manifest: name of the manifest with the chain ``chain``.
        """
        for pack_id in chain.packs:
            pack = self._namespace + pack_id
            self._rows.put(LINKS, link_row(pack, manifest), b"")
            self._order.touch(pack, chain.priority)
            if chain.pinned:
                self._order.add_pins(pack, 1)

    def drop_manifest(
        self,
        name: bytes,
        after: bytes | None = None,
    ) -> list[bytes]:
        """Delete a manifest, and keep its packs, which lose its pin. A manifest that is not held is
        ignored.

        :param after: name of a pack. None: return no packs.
        :returns: the names of the packs after the pack ``after`` in the manifest's chain, if the
            chain is ordered.
        """
        namespace = name[:ID_BYTES]
        was_held = self._rows.delete(MANIFESTS, name)
        if was_held:
            state = self._state_of(namespace)
            state.requests = max(0, state.requests - 1)
            self.dropped.append(name)
        self._rows.delete(MANIFEST_KEYS, name)
        # continue without a row in ``MANIFESTS``, because a damaged store may still have a chain
        chain = self._order.chain(name)
        if chain is None:
            return []
        self._order.remove_manifest(name, chain)
        self._unlink_packs(name, chain)
        # without an order of the packs, no pack follows another
        if after is None or not chain.flags & ORDERED:
            return []
        packs = [namespace + pack_id for pack_id in chain.packs]
        if after not in packs:
            return []
        position = packs.index(after)
        return packs[position + 1 :]

    def _unlink_packs(self, manifest: bytes, chain: Chain) -> None:
        """Record that a manifest, which is deleted, no longer names its packs, and pins none.

        :param manifest: name of the manifest with the chain ``chain``.
        """
        namespace = manifest[:ID_BYTES]
        for pack_id in chain.packs:
            pack = namespace + pack_id
            self._rows.delete(LINKS, link_row(pack, manifest))
            if chain.pinned:
                self._order.add_pins(pack, -1)

    def pin(self, name: bytes, pinned: bool) -> None:
        """Pin or unpin a manifest, and the packs that it names. A name that is not held is
        ignored."""
        chain = self._order.chain(name)
        if chain is None or chain.pinned == pinned:
            return
        changed = chain._replace(flags=chain.flags ^ PINNED)
        # this also removes a pinned manifest from the eviction order, and lists an unpinned one
        self._order.put(name, changed, before=chain)
        count = 1 if pinned else -1
        for pack_id in chain.packs:
            pack = self._namespace + pack_id
            self._order.add_pins(pack, count)

    # Totals and log

    def _state_of(self, namespace: bytes) -> NamespaceState:
        """Return the totals of a namespace, which the caller may change and ``finish`` writes."""
        if namespace not in self._states:
            state = read_state(self._rows, namespace)
            self._states[namespace] = state
            # keep a copy in encoded form, because the caller may change the object
            self._before[namespace] = state.encode()
        return self._states[namespace]

    def _begin_namespace(
        self,
        namespace: bytes,
        state: NamespaceState,
        opened: Mapping[bytes, Namespace],
    ) -> None:
        """Write the identity of a namespace with its first content, and give it a random
        generation, so that cursors of an earlier namespace of this identity are not valid.

        :raises StoreError: it is not in ``opened``.
        """
        if namespace not in opened:
            raise StoreError(
                f"the store holds no namespace {namespace.hex()}, and it was not opened"
            )
        identity_row = encode_namespace(opened[namespace])
        self._rows.put(NAMESPACES, namespace, identity_row)
        state.generation = os.urandom(GENERATION_BYTES)

    def _is_empty(self, namespace: bytes, state: NamespaceState) -> bool:
        """Return whether a namespace has neither packs nor manifests, not even damaged ones, which
        the totals do not count."""
        if state.packs or state.requests:
            return False
        has_packs = self._rows.has_prefix(PACKS, namespace)
        return not has_packs and not self._rows.has_prefix(MANIFESTS, namespace)

    def _end_namespace(self, namespace: bytes, state: NamespaceState) -> None:
        """Delete the rows of a namespace without content, its notes included."""
        for table, prefix in (
            (NAMESPACES, namespace),
            (STATES, namespace),
            (LOG, namespace),
            (META, NOTE + namespace),
        ):
            rows = self._rows.starting_with(table, prefix)
            # make a list first, because rows must not change during the iteration
            keys = [bytes(key) for key, _ in rows]
            for key in keys:
                self._rows.delete(table, key)
        # the cursor becomes that of a namespace which the store does not hold
        state.generation = NO_GENERATION
        state.sequence = 0
        self.ended.append(namespace)

    def _log(
        self,
        name: bytes,
        kind: bytes,
        table: PackTable | None = None,
    ) -> int:
        """Add an entry to the change log of a pack's namespace; return its sequence number.

        :param kind: ``ADDED`` or ``REMOVED``.
        :param table: of a removed pack, if it could be read. The entry then has the fingerprints
            of its keys.
        """
        namespace = name[:ID_BYTES]
        pack_id = name[ID_BYTES:]
        state = self._state_of(namespace)
        state.sequence += 1
        key = LOG_KEY.pack(namespace, state.sequence)
        # fingerprints are content of the pack's tenant, so the tenant's data key seals them
        tenant = STORE if table is None else table.tenant
        entry = encode_change(kind, pack_id, table)
        self._rows.put(LOG, key, entry, tenant)
        return state.sequence

    def _shorten_log(self, namespace: bytes, state: NamespaceState) -> None:
        """Delete the entries of a change log before its last ``LOG_ENTRIES`` ones."""
        oldest = max(0, state.sequence - LOG_ENTRIES + 1)
        oldest_key = LOG_KEY.pack(namespace, oldest)
        expired_keys: list[bytes] = []
        # the loop ends at the first entry to keep: usually, it visits as many expired entries as
        # this transaction has added
        for key, _ in self._rows.starting_with(LOG, namespace):
            log_key = bytes(key)
            if log_key >= oldest_key:
                break
            expired_keys.append(log_key)
        for key in expired_keys:
            self._rows.delete(LOG, key)

    def _recount(self, namespace: bytes) -> None:
        """Compute the totals of a namespace's packs from their tables, after a row was damaged."""
        state = self._state_of(namespace)
        state.packs = 0
        state.blocks = 0
        state.raw_bytes = 0
        state.stored_bytes = 0
        for key, row in self._rows.starting_with(PACKS, namespace):
            table = pack_table(key, row)
            if table is not None:
                state.count(table, 1)


def _flags_of(manifest: RequestManifest) -> int:
    """Return ``Chain.flags`` of a new manifest that is not pinned."""
    flags = 0
    if manifest.ordered:
        flags |= ORDERED
    if manifest.restored_tokens:
        flags |= RESTORED
    if manifest.priority == "low":
        flags |= LOW
    return flags


def kept_names(namespace: bytes, batch: CommitBatch) -> set[bytes]:
    """Return the names that the transaction of a batch must not evict (its ``keep``): those of the
    packs and manifests that the batch writes, and of the packs that its manifests name."""
    kept = {namespace + pack.pack_id for pack in batch.packs}
    for write in batch.manifests:
        kept.add(manifest_row(namespace, write.manifest.id))
        kept.update(namespace + pack_id for pack_id in write.packs)
    return kept


def bytes_by_tenant(packs: Iterable[NewPack]) -> dict[str, int]:
    """Return upper bounds of the bytes of packs, by tenant. The default tenant is left out, because
    it has no quota."""
    sizes: dict[str, int] = {}
    for pack in packs:
        if pack.tenant != DEFAULT_TENANT:
            num_bytes = sizes.get(pack.tenant, 0)
            sizes[pack.tenant] = num_bytes + pack.payload_bound
    return sizes


def rows_bound(packs: Iterable[NewPack], manifests: Iterable[ManifestWrite]) -> int:
    """Return an upper estimate of the bytes of all rows that packs (without their payloads) and
    manifests add."""
    # estimate twice the content, because LMDB leaves parts of its pages empty
    total = 0
    for pack in packs:
        keys_bytes = pack.keys.packed_bytes
        frames_bytes = _FRAME_BYTES * pack.frame_count
        total += 2 * (frames_bytes + keys_bytes) + _ROWS_BYTES
    for write in manifests:
        keys_bytes = sum(keys.packed_bytes for keys in write.keys)
        links_bytes = _LINK_BYTES * len(write.packs)
        total += 2 * (keys_bytes + links_bytes) + _ROWS_BYTES
    return total
