"""Commit of a batch into files of bounded size, and compaction of the segments.

LMDB reuses freed pages from the second transaction after the one that freed them. Extents of the segment files are
reused from the next one at the earliest. A batch therefore cannot reuse the space that it frees itself: each commit
evicts for later commits. If that is not enough (large batch, small store, fragmented pages, a disk smaller than the
capacity), short transactions evict, an empty transaction makes their pages reusable, and the batch is retried.

Space that a reader's snapshot can see is not reusable, however much is evicted. A stopped reader must not cause the
eviction of the whole store: a batch that lacks only this space is refused.

The capacity is divided between the catalogue (``data.mdb``) and the segment files. With placement ``extents``, a
separate transaction raises the bound of the catalogue if the segments leave enough of the capacity.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from itertools import islice
from typing import NamedTuple

from persistkv.config import PAGE_BYTES
from persistkv.errors import StoreFullError
from persistkv.storage.backend import CommitBatch, CommitResult
from persistkv.storage.catalog import CatalogTransaction, Evicted
from persistkv.storage.catalog.rows import LINKS, PACKS, pack_table, page_bytes
from persistkv.storage.catalog.transaction import kept_names, rows_bound
from persistkv.storage.extensions import CompactProgress
from persistkv.storage.format.pack import PackTable, align
from persistkv.storage.format.pack_writer import NewPack
from persistkv_lmdb.allocator import read_extents, read_space
from persistkv_lmdb.environment import (
    CATALOGUE_AHEAD,
    LOCK_FILE_BYTES,
    MIN_CATALOGUE,
    Environment,
    wanted_catalogue_bytes,
)
from persistkv_lmdb.files import map_is_full
from persistkv_lmdb.layout import Transaction, read_ttl, write_catalogue_bytes

_EVICTED_AT_ONCE = 512  # packs and manifests that one transaction evicts or deletes, in tens of milliseconds
_TRANSACTIONS = 8
"""Maximum number of transactions that evict for one batch and one entry of ``_MORE``. After the capacity was lowered,
many commits shrink the store."""
_MORE = (0, 2, 8, 32)
"""Amounts to evict, tried in order, for a batch that does not fit. 0: as much as the capacity requires. Others:
additionally this multiple of the batch's bytes, because free pages may be too fragmented."""
_WIDER_BY = 8  # at least 1/8 more
_TURN_S = 0.01  # pause between transactions: another process that waits for the lock polls every 5 ms
_PATIENCE_S = 0.5  # wait of a commit for readers that still see evicted packs; a read takes about 20 ms
_MAX_AHEAD = 256 << 20  # 256 MiB: a commit of 128 MiB, plus the previous one, whose pages are not reusable yet
_NO_LIMIT = 1 << 62

MOVED_BYTES = 16 << 20  # 16 MiB: moved per transaction of a compaction, takes tens of milliseconds
_MOVED_PACKS = 64  # maximum per transaction: more would need more space in the catalogue than a small store has
_MOVED_ROWS_BYTES = 8 << 10  # 8 KiB: pages of the catalogue that moving one pack may add
_PASSES = 4  # the old place of a moved pack is reusable only later
_COMPACTION_PATIENCE_S = 5.0


class _NothingLeftError(StoreFullError):
    """A batch would not fit even if everything evictable were evicted."""


class StaleError(Exception):
    """Another commit has changed the namespace since the caller last read its changes (``CommitBatch.seen``)."""


class BatchCommit:
    """Commit of one batch to the namespace with the id ``namespace``, with eviction and retries; used once."""

    def __init__(self, environment: Environment, namespace: bytes, batch: CommitBatch) -> None:
        self._environment = environment
        self._namespace = namespace
        self._batch = batch
        self._seen = batch.seen
        self._evicted: list[PackTable] = []
        self._goal: Amount | None = None  # used bytes at which the present entry of _MORE ends its evictions
        self._freed_by = 0  # number of the last transaction that evicted for this batch
        self._attempted = False
        self._keep = kept_names(namespace, batch)

    def write(self) -> CommitResult:
        """Write the batch in one transaction, after short ones that delete manifests if many name a pack that the batch
        deletes.

        :raises StaleError: another commit has followed ``CommitBatch.seen``; the batch was not written.
        :raises StoreFullError: the batch does not fit and was not written; ``write_after_eviction`` makes room for it.
        """
        environment, batch = self._environment, self._batch
        self._drop_shared_manifests(_EVICTED_AT_ONCE)
        for pack in batch.packs if self._attempted else ():
            pack.restart()  # another process may have stored it since the attempt that failed
        self._attempted = True
        with environment.transaction(write=True) as transaction:
            commit, room = self._begin(transaction)
            room.check()
            commit.remove(batch)
            commit.add(batch)
            commit.expire(read_ttl(transaction))
            if commit.grew:
                environment.taken.append(room.need.payload)
                room.widen(Amount(0, 0))
                goal = room.low_watermark()
                commit.evict(lambda: room.used().within(goal), _EVICTED_AT_ONCE)
            commit.finish()
            if commit.grew and not room.used().within(room.limit):  # checked while the disk writes
                raise room.full()
        self._note(commit)
        return CommitResult(commit.cursor, self._evicted)

    def write_after_eviction(self, full: StoreFullError) -> CommitResult:
        """Evict in short transactions, and write a batch for which ``write`` raised ``full``.

        :raises StoreFullError: nothing evictable is left, the free pages are too fragmented, or a reader's snapshot
            still needs the evicted packs. The batch is not written; evicted packs stay evicted.
        """
        environment = self._environment
        try:
            if not (self._batch.packs or self._batch.manifests):
                environment.age()
                self._drop_shared_manifests(1)
                return self.write()
            while map_is_full(full) and not environment.shares.inline and self._widen():
                try:
                    return self.write()
                except StoreFullError as error:
                    full = error
            for more in _MORE:
                self._goal = None
                self._repeat(partial(self._evict_some, more), _TRANSACTIONS)
                environment.age()
                seen = environment.wait_for_readers(self._freed_by, _PATIENCE_S)
                try:
                    return self.write()
                except StoreFullError as error:
                    full = error
                if not seen:
                    break
            raise full
        finally:
            del full  # its traceback references it, and would keep the rows of the batch alive

    def _repeat(self, step: Callable[[int], bool], most: int = _NO_LIMIT) -> None:
        """Call ``step`` until it returns False. If the disk is too full for a transaction, retry with one deletion.

        :param step: runs one transaction with at most the given number of deletions; returns whether more are needed.
        :raises StoreFullError: not even one deletion fits.
        """
        at_most = _EVICTED_AT_ONCE
        for _ in range(most):
            try:
                if not step(at_most):
                    return
            except StoreFullError as error:
                if at_most == 1 or isinstance(error, _NothingLeftError):
                    raise
                at_most = 1  # a full disk has no pages for a larger transaction: deletions need some, too
                self._environment.age()
            else:
                at_most = min(4 * at_most, _EVICTED_AT_ONCE)

    def _begin(self, transaction: Transaction, *, as_it_is: bool = False) -> tuple[CatalogTransaction, Room]:
        """Return the catalogue of a write transaction, and the part of the capacity that it may use (``Room``)."""
        room = Room(self._environment, transaction, as_it_is=as_it_is)
        commit = CatalogTransaction(transaction, room.payloads, self._namespace, self._keep)
        if self._seen not in (None, commit.cursor):
            raise StaleError
        room.need = room.need_of(commit.missing(self._batch.packs), self._batch)
        return commit, room

    def _note(self, commit: CatalogTransaction) -> None:
        """Remember the evicted packs of a committed transaction, and the namespace's position in the change log."""
        self._evicted += commit.evicted
        if self._seen is not None:
            self._seen = commit.cursor

    def _drop_shared_manifests(self, shared_by: int) -> None:
        """Delete, in short transactions, manifests that name packs which the batch deletes, except packs that at most
        ``shared_by`` manifests name: the batch's own transaction handles them.
        """
        for pack_ids, alone in ((self._batch.deletions, False), (self._batch.bad, True)):
            for pack_id in self._shared(pack_ids, shared_by) if pack_ids else ():
                self._repeat(partial(self._drop_some, pack_id, alone))

    def _shared(self, pack_ids: Sequence[bytes], shared_by: int) -> list[bytes]:
        with self._environment.transaction() as rows:
            links = {pack_id: rows.starting_with(LINKS, self._namespace + pack_id) for pack_id in pack_ids}
            return [pack_id for pack_id, found in links.items() if next(islice(found, shared_by, None), None)]

    def _drop_some(self, pack_id: bytes, alone: bool, at_most: int) -> bool:
        with self._environment.transaction(write=True) as transaction:
            commit, _ = self._begin(transaction)
            more = commit.drop_manifests_of(pack_id, at_most, alone=alone)
            commit.finish()
        self._note(commit)
        time.sleep(_TURN_S)
        return more

    def _widen(self) -> bool:
        """Raise the bound of ``data.mdb`` after LMDB found no free page: a large batch rewrites many pages, which are
        reusable only two transactions later. Return False if the bound cannot be raised.
        """
        try:
            with self._environment.transaction(write=True) as transaction:
                _, room = self._begin(transaction)
                return room.widen_by(room.limit.catalogue // _WIDER_BY)
        except StoreFullError:
            return False

    def _evict_some(self, more: int, at_most: int) -> bool:
        """Make room for the batch in one transaction; return whether more must be evicted.

        :param more: 0: evict as much as the capacity requires. Otherwise the free pages were not usable: additionally
            evict this multiple of the batch's bytes, and assume that no file can grow.
        :raises StoreFullError: nothing evictable is left, or the disk has no space for these deletions; nothing
            changed.
        """
        with self._environment.transaction(write=True) as transaction:
            commit, room = self._begin(transaction, as_it_is=more > 0)
            commit.touch(self._batch.touches)
            need = room.need
            if not more:
                room.widen(need)
            if self._goal is None:
                catalogue, payload = room.low_watermark()
                most = room.used().catalogue - more * need.catalogue if more else catalogue
                self._goal = Amount(min(catalogue - need.catalogue, most), payload - need.payload)
            if not need.within(room.limit):
                raise _NothingLeftError(str(room.full()))
            goal = self._goal
            ended = commit.evict(lambda: room.used().within(goal), at_most)
            too_much = not room.used().plus(need).within(room.limit)
            if ended is Evicted.ALL and (too_much or not (self._evicted or commit.evicted)):
                raise _NothingLeftError(str(room.full()))
            commit.finish()
            self._freed_by = transaction.txn.id()
        self._note(commit)
        return ended is Evicted.SOME


class Amount(NamedTuple):
    """Number of bytes in the catalogue (``data.mdb``) and in the segment files."""

    catalogue: int
    payload: int

    def plus(self, other: Amount) -> Amount:
        return Amount(self.catalogue + other.catalogue, self.payload + other.payload)

    def within(self, limit: Amount) -> bool:
        return self.catalogue <= limit.catalogue and self.payload <= limit.payload


class Room:
    """Part of the capacity that a write transaction may use. ``as_it_is`` assumes that no file can grow."""

    def __init__(self, environment: Environment, transaction: Transaction, *, as_it_is: bool = False) -> None:
        self._environment = environment
        self._transaction = transaction
        self.payloads = environment.payloads(transaction)
        self._is_inline = environment.shares.inline
        segments = read_space(transaction).total * PAGE_BYTES if as_it_is else self.payloads.limit
        self.limit = Amount(environment.limit_bytes(as_it_is=as_it_is), _NO_LIMIT if self._is_inline else segments)
        """Upper bound on ``used()`` after a commit that adds content."""
        self._growth = max(0, segments - self._segments)
        self.need = Amount(0, 0)
        """Upper estimate of the bytes that the batch adds. Any further ones use the reserve for deletions."""

    @property
    def _segments(self) -> int:
        return self.payloads.allocator.total * PAGE_BYTES

    def used(self) -> Amount:
        """Return the bytes in use, without freed pages: those not reusable yet would not become so by more eviction."""
        return Amount(self._transaction.used_bytes(), self.payloads.allocator.used * PAGE_BYTES)

    def need_of(self, packs: Sequence[NewPack], batch: CommitBatch) -> Amount:
        """Estimate the bytes that a batch adds. ``packs`` are those of its packs that are not stored yet."""
        rows = rows_bound(packs, batch.manifests)
        if self._is_inline:
            return Amount(rows + sum(page_bytes(pack.payload_bound) for pack in packs), 0)
        return Amount(rows, sum(pack.payload_bound for pack in packs))

    def check(self) -> None:
        """Raise a StoreFullError if ``need`` exceeds the free space, including the space by which a file may grow."""
        if not any(self.need):
            return
        free = self.payloads.allocator.free * PAGE_BYTES + self._growth
        if not self.used().plus(self.need).within(self.limit) or self.need.payload > free:
            raise self.full()

    def widen(self, need: Amount) -> None:
        """Make room for ``need`` in the catalogue: raise its bound, or shrink the segments if they leave too little."""
        lacks = self.used().catalogue + need.catalogue - self.low_watermark().catalogue
        if lacks > 0 and not self._is_inline and not self.widen_by(2 * lacks + lacks // 8):
            self.payloads.shrink(self._segments - lacks)

    def widen_by(self, count: int) -> bool:
        """Raise the bound of ``data.mdb`` by at least ``count`` bytes: in ``limit`` at once, in LMDB's map from the
        next transaction on. Return False, with nothing changed, if that is impossible: the segments leave too little,
        or payloads are stored inline.
        """
        if self._is_inline:
            return False
        held, capacity = self._environment.map_bytes, self._environment.shares.capacity
        room = capacity - LOCK_FILE_BYTES - held - self._segments
        wanted = wanted_catalogue_bytes(self._transaction, capacity) - held
        more = align(max(count, min(wanted, room // PAGE_BYTES * PAGE_BYTES)))
        if more > room:
            return False
        write_catalogue_bytes(self._transaction, held + more)
        self.limit = self.limit._replace(catalogue=self.limit.catalogue + more)
        return True

    def full(self) -> StoreFullError:
        path, capacity = self._environment.path, self._environment.shares.capacity
        return StoreFullError(f"{path}: {sum(self.need)} bytes do not fit a capacity of {capacity}")

    def low_watermark(self) -> Amount:
        """Return the used bytes down to which a commit evicts: ``limit`` less a reserve for later commits."""
        catalogue, payload = self.limit
        ahead = min(payload // 16, max(self._environment.taken, default=0), _MAX_AHEAD)
        rewritten = 0 if self._is_inline else min((catalogue - MIN_CATALOGUE) // 2, CATALOGUE_AHEAD)
        return Amount(catalogue - max(rewritten, min(catalogue // 16, _MAX_AHEAD)), payload - ahead)


def compact(environment: Environment) -> Iterator[CompactProgress]:
    """Return free space of the segments to the file system while engines use the store; yield after each step.

    Packs at the end of the segments are moved, byte for byte, to free extents before them, until no pack can be moved;
    then the free ends of the files are truncated. A killed compaction leaves a valid store; the next one continues.

    :raises StoreFullError: the catalogue has no space for the rows; packs that were moved stay moved.
    """
    _truncate(environment)
    waiting = _packs_by_place(environment)
    total, moved = sum(length for _, length in waiting), 0
    for _ in range(_PASSES):
        before = moved
        while waiting:
            step = [waiting.pop()]
            num_bytes = step[0][1]
            while waiting and len(step) < _MOVED_PACKS and num_bytes + waiting[-1][1] <= MOVED_BYTES:
                step.append(waiting.pop())
                num_bytes += step[-1][1]
            with environment.transaction(write=True) as transaction:
                room = Room(environment, transaction)
                room.need = Amount(_MOVED_ROWS_BYTES * len(step), 0)
                room.check()
                moved += sum(length for name, length in step if room.payloads.lower(name, length))
            yield CompactProgress(moved, max(moved, total))
            time.sleep(_TURN_S)
        _truncate(environment)
        if moved == before:
            return
        waiting = _packs_by_place(environment)


def _packs_by_place(environment: Environment) -> list[tuple[bytes, int]]:
    """Return (namespace id and pack id, payload bytes) of each pack in the segments, in the order of their last
    extents.
    """
    with environment.transaction() as transaction:
        found = []
        for key, row in transaction.starting_with(PACKS, b""):
            table, extents = pack_table(key, row), read_extents(transaction, bytes(key))
            if table is not None and extents:
                found.append((max(extents), bytes(key), table.payload_length))
    return [(name, length) for _, name, length in sorted(found)]


def _truncate(environment: Environment) -> None:
    """Remove free pages at the ends of the segments, and truncate the files, unless the disk has no space for a
    transaction. First wait up to 5 s for readers that still see freed pages; pages that they see afterwards stay.
    """
    try:
        environment.wait_for_readers(environment.age(), _COMPACTION_PATIENCE_S)
    except StoreFullError:
        return
    for _ in range(2):
        with environment.transaction(write=True) as transaction:
            environment.payloads(transaction).shrink(0)
    with environment.transaction(write=True) as transaction:
        environment.payloads(transaction)  # truncates what the others committed
