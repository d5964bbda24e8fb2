"""How a batch gets into bounded files.

LMDB uses the pages that a transaction freed again in the second one after it, and extents are used again in the next
one at the earliest. So a batch cannot be written over what it evicts itself: each commit evicts for the ones that
follow. Where that was not enough (a large batch, a small store, pages that lie too scattered, a disk that is smaller
than the capacity), short transactions evict, one more lets their pages age, and the batch is tried again.

What a reader still sees is not free, however much is evicted: a reader that was stopped must not drain the store. A
batch that lacks just that is refused.
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
from persistkv.storage.pack import PackTable
from persistkv_lmdb.capacity import Amount, Goal, Room
from persistkv_lmdb.environment.environment import Environment
from persistkv_lmdb.environment.errors import met_the_maps_end
from persistkv_lmdb.layout import Transaction, read_ttl
from persistkv_lmdb.segments.payloads import Payloads

_EVICTED_AT_ONCE = 512
"""Packs and manifests that one transaction evicts at most: tens of milliseconds."""
_TRANSACTIONS = 8
"""Transactions that evict for one batch at most; a store whose capacity was lowered shrinks over many commits."""
_MORE = (0, 2, 8, 32)
"""How much is evicted for a batch that found no room, one after the other: first what the capacity asks for, then that
many times its bytes, because free pages do not help where they do not lie side by side."""
_WIDER_BY = 8  # by 1/8 at least
_EXPIRED_AT_ONCE = 128
"""Packs and manifests that one commit expires: under a millisecond each."""
_DROPPED_AT_ONCE = 512
"""Manifests that one transaction drops for a pack that is deleted: some 10 ms."""
TURN_S = 0.01  # between such transactions: another process that waits for the lock looks every 5 ms
_PATIENCE_S = 0.5
"""How long a commit waits for readers: a call that reads takes some 20 ms."""


class _NothingLeftError(StoreFullError):
    """Not even all that may be evicted is enough."""


class BatchCommit:
    """One batch on its way into the store. Used once."""

    def __init__(self, environment: Environment, namespace: bytes, batch: CommitBatch) -> None:
        self._environment = environment
        self._namespace = namespace
        self._batch = batch
        self._seen = batch.seen
        self._evicted: list[PackTable] = []
        self._goals: dict[int, Amount] = {}  # for each of _MORE, what is used is to be at most
        self._freed_by = 0
        """The last transaction that evicted for this one."""
        self._keep = kept_names(namespace, batch)

    def run(self) -> CommitResult:
        """Commit; see ``Backend.commit``."""
        if not self._drop_shared_manifests():
            return self._stale()
        try:
            return self._write()
        except StoreFullError as error:
            if not (self._batch.packs or self._batch.manifests):
                raise
            full = error
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
            del full  # by its traceback, it would keep itself, and the rows that were being written

    def _drop_shared_manifests(self) -> bool:
        """Delete manifests of packs that the batch deletes, in short transactions, where very many name one.

        :returns: whether the caller has still seen all that happened.
        """
        for pack_ids, alone in ((self._batch.deletions, False), (self._batch.bad, True)):
            for pack_id in self._shared(pack_ids):
                more = True
                while more:
                    environment = self._environment
                    with environment.transaction(write=True) as transaction:
                        payloads = environment.payloads(transaction)
                        commit = self._begin(transaction, payloads)
                        if commit is None:
                            return False
                        more = commit.drop_manifests_of(pack_id, _DROPPED_AT_ONCE, alone=alone)
                        commit.finish()
                        payloads.finish()
                    self._note(commit)
                    time.sleep(TURN_S)
        return True

    def _shared(self, pack_ids: Sequence[bytes]) -> list[bytes]:
        """Those that more manifests name than one transaction drops."""
        if not pack_ids:
            return []
        with self._environment.transaction() as transaction:
            rows = transaction.rows
            counts = [
                sum(1 for _ in islice(rows.starting_with(LINKS, self._namespace + pack_id), _DROPPED_AT_ONCE + 1))
                for pack_id in pack_ids
            ]
        return [pack_id for pack_id, count in zip(pack_ids, counts, strict=True) if count > _DROPPED_AT_ONCE]

    def _note(self, commit: CatalogTransaction) -> None:
        """Note what a transaction before that of the batch did."""
        self._evicted += commit.evicted
        if self._seen is not None:
            self._seen = commit.cursor

    def _write(self) -> CommitResult:
        """The batch in one transaction.

        :raises StoreFullError: there is no room; nothing was done.
        """
        environment = self._environment
        for pack in self._batch.packs:
            pack.restart()  # another process may have stored it since an attempt that failed
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
            if commit.grew and not room.used().within(room.limit):  # asked while the disk is at work
                raise room.full(need)
            payloads.finish()
            environment.note_freed(transaction, payloads.freed)
        return CommitResult(commit.cursor, [*self._evicted, *commit.evicted])

    def _widen(self) -> bool:
        """Let the catalogue have more where LMDB found no page for it and the capacity has room: a large batch writes
        many pages anew, which are free only two transactions later. False: the segments leave none.
        """
        environment = self._environment
        try:
            with environment.transaction(write=True) as transaction:
                payloads = environment.payloads(transaction)
                commit = self._begin(transaction, payloads)
                if commit is None:
                    return True  # who tries again learns why
                room = Room(environment, transaction, payloads)
                widened = room.widen_by(room.limit.catalogue // _WIDER_BY)
                commit.finish()
                payloads.finish()
        except StoreFullError:
            return False
        return widened

    def _make_room(self, more: int) -> bool:
        """Evict what the batch needs, in short transactions.

        :param more: 0 for what the capacity asks for. Else the pages that are free were of no use: as many times the
            batch's bytes beside them, within the file as it is.
        :returns: whether the caller has still seen all that happened.
        :raises StoreFullError: nothing is left that may be evicted.
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
                at_most = 1  # a full disk has no pages for a larger transaction: to delete takes some, too
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
        """One transaction of ``_make_room``; None where others committed meanwhile."""
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
        """What is used is to be at most; pages of the segments need not lie side by side."""
        spared, used = room.spared(), room.used()
        catalogue = spared.catalogue - need.catalogue
        if more:
            catalogue = min(catalogue, used.catalogue - more * need.catalogue)
        return Amount(catalogue, spared.payload - need.payload)

    def _begin(self, transaction: Transaction, payloads: Payloads) -> CatalogTransaction | None:
        """None where others committed after what the caller has seen; what became free meanwhile is recorded then."""
        commit = CatalogTransaction(transaction.rows, payloads, self._namespace, self._keep)
        if self._seen is None or self._seen == commit.cursor:
            return commit
        payloads.finish()
        return None

    def _stale(self) -> CommitResult:
        """What was evicted meanwhile is among the changes since then."""
        return CommitResult(self._batch.seen or b"", stale=True)
