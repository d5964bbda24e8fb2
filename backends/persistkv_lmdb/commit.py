"""Commit of a batch into files of bounded size.

LMDB reuses pages that a transaction freed in the second transaction after it. Extents are reused in the next one at the
earliest. A batch therefore cannot reuse the space that it frees itself: each commit evicts for later commits. If that
is not enough (large batch, small store, fragmented pages, a disk smaller than the capacity), short transactions evict,
an empty transaction makes their pages reusable, and the batch is retried.

Space that a reader's snapshot can see is not reusable, however much is evicted. A stopped reader must not cause the
eviction of the whole store: a batch that lacks only this space is refused.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from itertools import islice

from persistkv.errors import StoreFullError
from persistkv.storage.backend import CommitBatch, CommitResult
from persistkv.storage.catalog import CatalogTransaction, Evicted
from persistkv.storage.catalog.rows import LINKS
from persistkv.storage.catalog.transaction import kept_names
from persistkv.storage.format.pack import PackTable
from persistkv_lmdb.capacity import Amount, Goal, Room
from persistkv_lmdb.environment import Environment
from persistkv_lmdb.errors import met_the_maps_end
from persistkv_lmdb.layout import Transaction, read_ttl
from persistkv_lmdb.payloads import Payloads

_EVICTED_AT_ONCE = 512
"""Maximum of packs and manifests that one transaction evicts: takes tens of milliseconds."""
_TRANSACTIONS = 8
"""Maximum of transactions that evict for one batch. After the capacity was lowered, many commits shrink the store."""
_MORE = (0, 2, 8, 32)
"""Amounts to evict, in order, for a batch that does not fit: first as much as the capacity requires, then this multiple
of the batch's bytes, because fragmented free pages do not help."""
_WIDER_BY = 8  # at least 1/8 more
_EXPIRED_AT_ONCE = 128
"""Maximum of packs and manifests that one commit expires: each takes less than a millisecond."""
_DROPPED_AT_ONCE = 512
"""Maximum of manifests that one transaction deletes for a deleted pack: takes about 10 ms."""
TURN_S = 0.01  # pause between such transactions: another process that waits for the lock polls every 5 ms
_PATIENCE_S = 0.5
"""Maximum wait of a commit for readers: a read takes about 20 ms."""


class _NothingLeftError(StoreFullError):
    """Evicting everything evictable would not be enough."""


class BatchCommit:
    """Commit of one batch. Used once."""

    def __init__(self, environment: Environment, namespace: bytes, batch: CommitBatch) -> None:
        self._environment = environment
        self._namespace = namespace
        self._batch = batch
        self._seen = batch.seen
        self._evicted: list[PackTable] = []
        self._goals: dict[int, Amount] = {}  # bound on the used bytes, by entry of _MORE
        self._freed_by = 0
        """Number of the last transaction that evicted for this batch."""
        self._attempted = False
        self._keep = kept_names(namespace, batch)

    def run(self) -> CommitResult:
        """Commit the batch; see ``Backend.commit``."""
        if not self._drop_shared_manifests():
            return self._stale()
        try:
            return self._write()
        except StoreFullError as error:
            full = error
        if not (self._batch.packs or self._batch.manifests):
            self._environment.age()
            return self._write() if self._drop_shared_manifests(1) else self._stale()
        try:
            while met_the_maps_end(full) and self._widen():
                try:
                    return self._write()
                except StoreFullError as error:
                    full = error
            for more in _MORE:
                if not self._make_room(more):
                    return self._stale()
                seen = self._environment.wait_for_readers(self._freed_by, _PATIENCE_S)
                try:
                    return self._write()
                except StoreFullError as error:
                    full = error
                if not seen:
                    break
            raise full
        finally:
            del full  # its traceback references it, and would keep the rows of the batch alive

    def _drop_shared_manifests(self, at_most: int = _DROPPED_AT_ONCE) -> bool:
        """Delete manifests that reference packs of the batch's deletions, if many do, in short transactions.

        :param at_most: maximum for the first transaction; packs with fewer manifests are left to the batch's own one.
        :returns: False if others have committed since the caller last read the changes.
        :raises StoreFullError: the disk has no space for the deletion of a single manifest.
        """
        for pack_ids, alone in ((self._batch.deletions, False), (self._batch.bad, True)):
            for pack_id in self._shared(pack_ids, at_most):
                more = True
                while more:
                    try:
                        dropped = self._drop_some(pack_id, at_most, alone=alone)
                    except StoreFullError:
                        if at_most == 1:
                            raise
                        at_most = 1  # a full disk has no pages for a larger transaction: deletions need some, too
                        self._environment.age()
                        continue
                    if dropped is None:
                        return False
                    more = dropped
                    at_most = min(4 * at_most, _DROPPED_AT_ONCE)
                    time.sleep(TURN_S)
        return True

    def _drop_some(self, pack_id: bytes, at_most: int, *, alone: bool) -> bool | None:
        """Run one transaction of ``_drop_shared_manifests``; return None if another process has committed meanwhile."""
        environment = self._environment
        with environment.transaction(write=True) as transaction:
            payloads = environment.payloads(transaction)
            commit = self._begin(transaction, payloads)
            if commit is None:
                return None
            more = commit.drop_manifests_of(pack_id, at_most, alone=alone)
            commit.finish()
            payloads.finish()
        self._note(commit)
        return more

    def _shared(self, pack_ids: Sequence[bytes], at_most: int) -> list[bytes]:
        """Return the packs that more than ``at_most`` manifests reference."""
        if not pack_ids:
            return []
        with self._environment.transaction() as transaction:
            rows = transaction.rows
            counts = [
                sum(1 for _ in islice(rows.starting_with(LINKS, self._namespace + pack_id), at_most + 1))
                for pack_id in pack_ids
            ]
        return [pack_id for pack_id, count in zip(pack_ids, counts, strict=True) if count > at_most]

    def _note(self, commit: CatalogTransaction) -> None:
        """Record the result of a transaction that preceded the batch's."""
        self._evicted += commit.evicted
        if self._seen is not None:
            self._seen = commit.cursor

    def _write(self) -> CommitResult:
        """Write the batch in one transaction.

        :raises StoreFullError: it does not fit; nothing was changed.
        """
        environment = self._environment
        for pack in self._batch.packs if self._attempted else ():
            pack.restart()  # another process may have stored it since the attempt that failed
        self._attempted = True
        with environment.transaction(write=True) as transaction:
            payloads = environment.payloads(transaction)
            commit = self._begin(transaction, payloads)
            if commit is None:
                return self._stale()
            room = Room(environment, transaction, payloads)
            need = room.need(commit.missing(self._batch.packs), self._batch)
            room.check(need)
            commit.apply(self._batch)
            if (ttl_s := read_ttl(transaction)) is not None:
                commit.expire(ttl_s, _EXPIRED_AT_ONCE)
            if commit.grew:
                environment.note_taken(need.payload)
                room.widen(Amount(0, 0))
                commit.evict(Goal(room, room.spared()), _EVICTED_AT_ONCE)
            commit.finish()
            if commit.grew and not room.used().within(room.limit):  # checked while the disk writes
                raise room.full(need)
            payloads.finish()
            environment.note_freed(transaction, payloads.freed)
        return CommitResult(commit.cursor, [*self._evicted, *commit.evicted])

    def _widen(self) -> bool:
        """Raise the catalogue's limit after LMDB found no free page; return False if the segments leave no space.

        A large batch rewrites many pages, which are reusable only two transactions later. If others committed
        meanwhile, return True without raising the limit.
        """
        environment = self._environment
        try:
            with environment.transaction(write=True) as transaction:
                payloads = environment.payloads(transaction)
                commit = self._begin(transaction, payloads)
                if commit is None:
                    return True  # the retry reports the stale batch
                room = Room(environment, transaction, payloads)
                widened = room.widen_by(room.limit.catalogue // _WIDER_BY)
                commit.finish()
                payloads.finish()
        except StoreFullError:
            return False
        return widened

    def _make_room(self, more: int) -> bool:
        """Evict the bytes that the batch needs, in short transactions.

        :param more: 0: as much as the capacity requires. Otherwise the free pages were not usable: additionally this
            multiple of the batch's bytes, calculated as if no file could grow.
        :returns: False if others have committed since the caller last read the changes.
        :raises StoreFullError: nothing evictable is left.
        """
        at_most = _EVICTED_AT_ONCE
        for _ in range(_TRANSACTIONS):
            try:
                ended = self._evict_some(more, at_most)
            except _NothingLeftError:
                raise
            except StoreFullError:
                if at_most == 1:
                    raise
                at_most = 1  # a full disk has no pages for a larger transaction: deletions need some, too
                self._environment.age()
                continue
            if ended is None:
                return False
            if ended is not Evicted.SOME:
                break
            at_most = min(4 * at_most, _EVICTED_AT_ONCE)
        self._environment.age()
        return True

    def _evict_some(self, more: int, at_most: int) -> Evicted | None:
        """Run one transaction of ``_make_room``; return None if another process has committed meanwhile."""
        environment = self._environment
        with environment.transaction(write=True) as transaction:
            payloads = environment.payloads(transaction)
            commit = self._begin(transaction, payloads)
            if commit is None:
                return None
            commit.touch(self._batch.touches)
            room = Room(environment, transaction, payloads, as_it_is=more > 0)
            need = room.need(commit.missing(self._batch.packs), self._batch)
            if not more:
                room.widen(need)
            goal = self._goals.setdefault(more, self._goal(room, need, more))
            if not need.within(room.limit):
                raise _NothingLeftError(str(room.full(need)))
            ended = commit.evict(Goal(room, goal), at_most)
            too_much = not room.used().plus(need).within(room.limit)
            if ended is Evicted.ALL and (too_much or not (self._evicted or commit.evicted)):
                raise _NothingLeftError(str(room.full(need)))
            commit.finish()
            payloads.finish()
            self._freed_by = transaction.txn.id()
        self._note(commit)
        return ended

    def _goal(self, room: Room, need: Amount, more: int) -> Amount:
        """Return the bound on the used bytes; pages of the segments need not be contiguous."""
        spared, used = room.spared(), room.used()
        catalogue = spared.catalogue - need.catalogue
        if more:
            catalogue = min(catalogue, used.catalogue - more * need.catalogue)
        return Amount(catalogue, spared.payload - need.payload)

    def _begin(self, transaction: Transaction, payloads: Payloads) -> CatalogTransaction | None:
        """Begin the transaction on the catalogue; return None if others have committed since ``seen``.

        In that case, extents that have become free meanwhile are recorded.
        """
        commit = CatalogTransaction(transaction.rows, payloads, self._namespace, self._keep)
        if self._seen is None or self._seen == commit.cursor:
            return commit
        payloads.finish()
        return None

    def _stale(self) -> CommitResult:
        """Return the result of a stale batch. The changes since ``seen`` include packs evicted meanwhile."""
        return CommitResult(self._batch.seen or b"", stale=True)
