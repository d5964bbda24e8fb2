"""Queries of a namespace in a catalogue: its packs, requests and their uses, in pages."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from itertools import islice
from typing import TypeVar

from persistkv.errors import StoreError
from persistkv.storage.backend import Changes, CommitBatch
from persistkv.storage.catalogue.order import read_clock
from persistkv.storage.catalogue.rows import (
    ADDED,
    CHAINS,
    LOG,
    LOG_KEY,
    MANIFEST_KEYS,
    MANIFESTS,
    NO_GENERATION,
    PACKS,
    REMOVED,
    RESTORED,
    SEQUENCE,
    USES,
    Chain,
    NamespaceState,
    TableRows,
    Use,
    cursor_sequence,
    decode_change,
    decoded,
    manifest_row,
    manifests_of,
    pack_table,
    read_state,
)
from persistkv.storage.format.codec import Buffer
from persistkv.storage.format.manifest import (
    ManifestKeys,
    RequestManifest,
    decode_manifest,
    decode_manifest_keys,
)
from persistkv.storage.format.pack import ID_BYTES, PackTable, table_lengths
from persistkv.storage.format.seal import Seal
from persistkv.storage.stats import BackendStats, RequestUse

T = TypeVar("T")

_AT_ONCE = 256  # maximum number of manifests or tables in one read transaction
# maximum number of rows in one read transaction, while a whole namespace is read
_ROWS_AT_ONCE = 4_096
_KEY_BYTES = 16  # minimum bytes that the key of a block takes in its pack's table


class Catalogue:
    """Queries of the packs and requests of one namespace, as the tables of a store record them.
    Thread-safe.

    A long answer is read in portions, each in a transaction of its own: a read transaction keeps
    LMDB from reusing pages, so none may last for the whole answer.

    :param read: returns a read transaction for a ``with`` block. Any thread may begin one, also
        during a write transaction, for which it must not wait: a commit may wait for packs that are
        encoded in the threads that read.
    """

    def __init__(
        self,
        namespace: bytes,
        read: Callable[[], AbstractContextManager[TableRows]],
    ) -> None:
        self._namespace = namespace
        self._read = read

    def changes(self, cursor: bytes | None) -> Changes:
        """See ``Backend.changes``."""
        with self._read() as rows:
            state = read_state(rows, self._namespace)
            since = None if cursor is None else cursor_sequence(state, cursor)
            if since is not None:
                changes = _changes_since(rows, self._namespace, since, state)
                if changes is not None:
                    return changes
            # The answer is the whole catalogue. A reader allocates memory for as many blocks as the
            # state records. Bound this number by what the store can hold, because it may be
            # damaged.
            max_blocks = rows.used_bytes() // _KEY_BYTES
            blocks = min(state.blocks, max_blocks)
        # read the rows after the cursor: changes in between are in the log after the cursor, so the
        # reader's next call returns them
        added = self._all(PACKS, pack_table)
        return Changes(state.cursor, added, reset=True, blocks=blocks)

    def _all(
        self,
        table: str,
        decode: Callable[[Buffer, Buffer], T | None],
    ) -> Iterator[T]:
        """Yield the decoded rows of the namespace, a bounded number per transaction; skip those for
        which ``decode`` returns None.

        :param decode: called with key and value of a row, whose buffers end with the transaction.
        """
        start: bytes | None = self._namespace
        while start is not None:
            items, start = self._portion(table, start, decode)
            # yield after the transaction, because the caller decides how long it takes to consume
            # the items
            yield from items

    def _portion(
        self,
        table: str,
        start: bytes,
        decode: Callable[[Buffer, Buffer], T | None],
    ) -> tuple[list[T], bytes | None]:
        """Read rows of the namespace in one transaction, from the key ``start`` on. Return them
        decoded, as ``_all`` does, and the key from which the next portion starts; None: no rows are
        left.
        """
        last_key = b""
        num_rows = 0
        items: list[T] = []
        with self._read() as rows:
            remaining = rows.range(table, start)
            for key, row in islice(remaining, _ROWS_AT_ONCE):
                if key[:ID_BYTES] != self._namespace:
                    break
                last_key = bytes(key)
                num_rows += 1
                item = decode(key, row)
                if item is not None:
                    items.append(item)
        # a portion that is not full ends with the namespace, or with the table
        if num_rows < _ROWS_AT_ONCE:
            return items, None
        next_key = last_key + b"\0"  # the smallest key that follows the last one
        return items, next_key

    def tables(self, pack_ids: Sequence[bytes]) -> list[PackTable]:
        """See ``Backend.tables``."""
        names = [self._namespace + pack_id for pack_id in pack_ids]
        found = self._each(names, _table_at)
        return [table for table in found if table is not None]

    def manifests(self) -> Iterator[RequestManifest]:
        """Iterate over the heads of all manifests, in any order, except damaged ones. No snapshot
        is held: manifests that are written or deleted meanwhile may be included or not.
        """
        return self._all(MANIFESTS, lambda _, row: decoded(decode_manifest, row))

    def manifest_keys(self, manifest_ids: Sequence[str]) -> list[ManifestKeys | None]:
        """See ``Backend.manifest_keys``."""
        return self._each(self._names(manifest_ids), _keys_at)

    def manifests_naming(self, packs: Sequence[bytes]) -> list[RequestManifest]:
        """Return the heads of the manifests that name any of these packs, which are given by
        id."""
        # collect distinct names, in order
        names: dict[bytes, None] = {}
        heads: list[RequestManifest] = []
        with self._read() as rows:
            for pack_id in packs:
                naming = manifests_of(rows, self._namespace + pack_id)
                names.update(dict.fromkeys(naming))
            for name in names:
                head = decoded(decode_manifest, rows.get(MANIFESTS, name))
                if head is not None:
                    heads.append(head)
        return heads

    def chain(self, manifest_id: str) -> list[bytes] | None:
        """Return the ids of the packs that a manifest names, from the beginning of the context on;
        None if it is not held.
        """
        name = manifest_row(self._namespace, manifest_id)
        with self._read() as rows:
            chain = Chain.decode(rows.get(CHAINS, name))
        return None if chain is None else list(chain.packs)

    def uses(self, manifest_ids: Sequence[str]) -> list[RequestUse | None]:
        """Return the use of each request, in order; None for a request that is not held or whose
        use is unknown."""
        # cache the manifests that name a pack, because many requests share their last packs
        cache: dict[bytes, _Naming] = {}
        # recorded times are of the store's clock; its skew converts them to the wall clock
        with self._read() as rows:
            _, clock = read_clock(rows)

        def read_use(rows: TableRows, name: bytes) -> RequestUse | None:
            chain = Chain.decode(rows.get(CHAINS, name))
            if chain is None:
                return None
            return _use_of(rows, self._namespace, chain, clock.skew, cache)

        return self._each(self._names(manifest_ids), read_use)

    def state(self) -> NamespaceState:
        """Return the totals of the namespace."""
        with self._read() as rows:
            return read_state(rows, self._namespace)

    def _names(self, manifest_ids: Sequence[str]) -> list[bytes]:
        """Return the keys of manifests' rows, in order."""
        return [
            manifest_row(self._namespace, manifest_id) for manifest_id in manifest_ids
        ]

    def _each(
        self,
        names: Sequence[bytes],
        read: Callable[[TableRows, bytes], T],
    ) -> list[T]:
        """Return what ``read`` returns for each name, in order. Up to 256 names share a read
        transaction, so that none lasts long."""
        found: list[T] = []
        for start in range(0, len(names), _AT_ONCE):
            page = names[start : start + _AT_ONCE]
            with self._read() as rows:
                found += [read(rows, name) for name in page]
        return found


def _table_at(rows: TableRows, name: bytes) -> PackTable | None:
    """Return the table of a pack; None if it is not held or damaged."""
    return pack_table(name, rows.get(PACKS, name))


def _keys_at(rows: TableRows, name: bytes) -> ManifestKeys | None:
    """Return the keys of a manifest; None if it is not held or damaged."""
    return decoded(decode_manifest_keys, rows.get(MANIFEST_KEYS, name))


def totals(
    states: Sequence[NamespaceState],
    disk_bytes: int,
    capacity: int | None,
) -> BackendStats:
    """Return the totals of a store from those of its namespaces.

    :param disk_bytes: bytes that the store takes on its medium.
    :param capacity: bound on ``disk_bytes``; None: there is none.
    """
    # this object only holds the sums: it is the state of no namespace
    total = NamespaceState(NO_GENERATION)
    for state in states:
        total.packs += state.packs
        total.blocks += state.blocks
        total.requests += state.requests
        total.raw_bytes += state.raw_bytes
        total.stored_bytes += state.stored_bytes
    return BackendStats(
        packs=total.packs,
        blocks=total.blocks,
        requests=total.requests,
        raw_bytes=total.raw_bytes,
        stored_bytes=total.stored_bytes,
        disk_bytes=disk_bytes,
        capacity=capacity,
    )


def check_batch(
    namespace: bytes,
    batch: CommitBatch,
    seal: Seal,
) -> None:
    """Raise a StoreError if a pack of the batch belongs to another namespace, or was made for a
    store with other data keys.

    :param seal: the seal of the store.
    """
    for pack in batch.packs:
        if pack.seal.keyring_id != seal.keyring_id:
            raise StoreError("a pack that was sealed with the keys of another store")
        if pack.namespace != namespace:
            raise StoreError(f"a pack of another namespace than {namespace.hex()}")


def tenants_of(batch: CommitBatch) -> set[str]:
    """Return the tenants whose packs and requests a batch writes."""
    tenants = {pack.tenant for pack in batch.packs}
    tenants.update(write.manifest.tenant for write in batch.manifests)
    return tenants


def _changes_since(
    rows: TableRows,
    namespace: bytes,
    since: int,
    state: NamespaceState,
) -> Changes | None:
    """Return the changes after the one with the number ``since``; None if the log no longer has all
    of them, or one does not read."""
    # an ordered set of names; a pack that was added, removed and added again is in this set and in
    # ``removed``
    added: dict[bytes, None] = {}
    # pack id → fingerprints of its keys; empty if the table was damaged at the first removal
    removed: dict[bytes, bytes] = {}
    for sequence in range(since + 1, state.sequence + 1):
        row = rows.get(LOG, LOG_KEY.pack(namespace, sequence))
        # the log only keeps the last ``LOG_ENTRIES`` changes
        if row is None:
            return None
        kind, pack_id, fingerprints = decode_change(row)
        if kind == ADDED:
            added[namespace + pack_id] = None
        elif kind == REMOVED:
            removed.setdefault(pack_id, fingerprints)
        else:
            # the row is damaged, or its data key was destroyed
            return None
    found = [_table_at(rows, name) for name in added]
    # a pack that was removed later has no table
    tables = [table for table in found if table is not None]
    return Changes(state.cursor, tables, removed)


def _use_of(
    rows: TableRows,
    namespace: bytes,
    chain: Chain,
    skew: float,
    cache: dict[bytes, _Naming],
) -> RequestUse | None:
    """Return the last use and the sharing of a stored request; None if the row with the use of its
    last pack is missing or damaged.

    :param skew: seconds from the store's clock to the wall clock (``StoreClock.skew``).
    :param cache: filled by this function: for each last pack that it has read, the manifests that
        name the pack.
    """
    written = chain.time + skew
    # a request without packs is used only when it is written
    if not chain.packs:
        return RequestUse(
            written=written,
            last_used=written,
            reused=False,
            shared_by=0,
            pinned=chain.pinned,
        )
    # a use of the last pack counts as a use of the whole context
    last_pack = namespace + chain.packs[-1]
    use = Use.decode(rows.get(USES, last_pack))
    if use is None:
        return None
    if last_pack not in cache:
        cache[last_pack] = _Naming.read(rows, last_pack)
    naming = cache[last_pack]
    raw_bytes, stored_bytes = _bytes_of(rows, namespace, chain)
    return RequestUse(
        written=written,
        last_used=use.time + skew,
        reused=use.moment > chain.moment,
        shared_by=max(0, naming.count - 1),  # leave out this request
        pinned=chain.pinned,
        hits=naming.restores_after(chain.moment),
        packs_raw_bytes=raw_bytes,
        packs_stored_bytes=stored_bytes,
    )


@dataclass(frozen=True)
class _Naming:
    """The manifests that name one pack."""

    count: int
    """Number of manifests."""
    restores: Sequence[int]
    """For each manifest whose request restored tokens, the moment at which it was written;
    ascending."""

    @classmethod
    def read(cls, rows: TableRows, pack: bytes) -> _Naming:
        """Read the manifests that name the pack with the key ``pack``; damaged ones do not
        count."""
        count = 0
        restores: list[int] = []
        for name in manifests_of(rows, pack):
            chain = Chain.decode(rows.get(CHAINS, name))
            if chain is not None:
                count += 1
                if chain.flags & RESTORED:
                    restores.append(chain.moment)
        return cls(count, sorted(restores))

    def restores_after(self, moment: int) -> int:
        """Return how many of the requests restored tokens and were written after a moment."""
        return len(self.restores) - bisect_right(self.restores, moment)


def _bytes_of(
    rows: TableRows,
    namespace: bytes,
    chain: Chain,
) -> tuple[int, int]:
    """Return the raw and the stored bytes (before the codec, and as payload) of those packs of a
    request that are held."""
    raw = 0
    stored = 0
    for pack_id in chain.packs:
        row = rows.get(PACKS, namespace + pack_id)
        if row is not None:
            table = row[SEQUENCE.size :]
            raw_length, stored_length = table_lengths(table)
            raw += raw_length
            stored += stored_length
    return raw, stored
