"""Commit of a batch into files of bounded size, and compaction of the segments.

With placement ``extents``, a commit has three steps, and holds the writer lock during the first and the last:

1. Reserve extents for the packs that the store lacks, in a transaction. Usually the previous commit has done it: each
   commit reserves as much for the next one as recent commits took.
2. Write the packs into these extents, and sync the files.
3. Commit the rows of the packs in a transaction. The unused part of the reservation is free again.

Reserved extents count as used, so the capacity holds at each moment. The reservation of a process that died is released
by the next process that reserves in a transaction of its own: its first commit does, and each one that lacks space.

LMDB reuses freed pages from the second transaction after the one that freed them. A batch therefore cannot reuse the
pages of the catalogue that it frees itself: each commit evicts for later commits. If that is not enough (large batch,
small store, fragmented pages, a disk smaller than the capacity), short transactions evict, an empty transaction makes
their pages reusable, and the batch is retried.

Pages that a reader's snapshot can see are not reusable, however much is evicted. A stopped reader must not cause the
eviction of the whole store: a batch that lacks only these pages is refused.

The capacity is divided between the catalogue (``data.mdb``) and the segment files. With placement ``extents``, a
separate transaction raises the bound of the catalogue if the segments leave enough of the capacity.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import suppress
from functools import partial
from itertools import islice
from typing import NamedTuple

from persistkv.config import PAGE_BYTES
from persistkv.errors import StoreError, StoreFullError
from persistkv.storage.backend import CommitBatch, CommitResult
from persistkv.storage.catalog import CatalogTransaction, Evicted
from persistkv.storage.catalog.rows import LINKS, PACKS, pack_table, page_bytes, read_state
from persistkv.storage.catalog.transaction import kept_names, rows_bound
from persistkv.storage.extensions import CompactProgress
from persistkv.storage.format.pack import PackTable, align
from persistkv.storage.format.pack_writer import NewPack
from persistkv_lmdb.allocator import (
    NotPlacedError,
    pages_for,
    pages_of,
    read_extents,
    read_reserved,
    read_space,
    split,
    without,
)
from persistkv_lmdb.environment import (
    CATALOGUE_AHEAD,
    LOCK_FILE_BYTES,
    MIN_CATALOGUE,
    Environment,
    wanted_catalogue_bytes,
)
from persistkv_lmdb.files import ReplacedError, map_is_full
from persistkv_lmdb.layout import Transaction, read_ttl, write_catalogue_bytes
from persistkv_lmdb.segments import Extent

_EVICTED_AT_ONCE = 512  # packs and manifests that one transaction evicts or deletes, in tens of milliseconds
_TRANSACTIONS = 8
"""Maximum number of transactions that evict for one batch and one entry of ``_MORE``. After the capacity was lowered,
many commits shrink the store."""
_MORE = (0, 2, 8, 32)
"""Amounts to evict, tried in order, for a batch that does not fit. 0: as much as the capacity requires. Others:
additionally this multiple of the batch's bytes, because free pages may be too fragmented."""
_WIDER_BY = 8  # at least 1/8 more
_TURN_S = 0.01  # pause between transactions: other threads of the process get the GIL and the lock
_PATIENCE_S = 0.5  # wait of a commit for readers that still see evicted packs; a read takes about 20 ms
_MAX_AHEAD = 256 << 20  # 256 MiB: a commit of 128 MiB, plus the previous one, whose pages are not reusable yet
_MAX_RESERVED = 64 << 20  # 64 MiB: reserved for the next commit of a process
_RESERVED_SHARE, _ALL_RESERVED_SHARE = 16, 8
"""At most 1/16 of the segments is reserved for a process's next commit, and at most 1/8 for all processes."""
_PLACINGS = 4  # of one batch: between writing and commit, another process may delete a pack that was held
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
        self._interleaved = False
        self._evicted: list[PackTable] = []
        self._goal: Amount | None = None  # used bytes at which the present entry of _MORE ends its evictions
        self._freed_by = 0  # number of the last transaction that evicted for this batch
        self._attempted = False
        self._keep = kept_names(namespace, batch) | {namespace + pack_id for pack_id in batch.needs or ()}
        self._rewritten = {*batch.deletions, *batch.bad}  # packs that this batch deletes before it adds them
        self._placed: dict[bytes, list[Extent]] = {}
        """Extents of the packs that were written durably and are not committed yet, by pack id."""
        self._replacements = environment.files.replacements
        self._renews = False
        """Whether the reserved extents could not be written: others are reserved, the first ones that are free."""

    def write(self) -> CommitResult:
        """Write the batch, after short transactions that delete manifests if many name a pack that it deletes.

        :raises StaleError: another commit has followed ``CommitBatch.seen``; the batch was not written.
        :raises StoreFullError: the batch does not fit and was not written; ``write_after_eviction`` makes room for it.
        """
        self._drop_shared_manifests(_EVICTED_AT_ONCE)
        for _ in range(_PLACINGS):
            for pack in self._batch.packs if self._attempted else ():
                if pack.pack_id not in self._placed:  # another process may have stored it since
                    pack.restart()
            self._attempted = True
            try:
                if not self._environment.shares.inline:
                    lacking, extents = self._lacking()
                    if lacking and (self._renews or _bound_pages(lacking) > pages_of(extents)):
                        lacking, extents = self._reserve()
                    self._write_packs(lacking, extents)
                return self._commit()
            except NotPlacedError:
                continue
            except ReplacedError:
                if not self._environment.is_current():
                    raise
                with self._environment.transaction(write=True) as transaction:
                    self._environment.payloads(transaction)  # only a segment was removed: creates it again
        raise StoreError(f"{self._environment.path}: packs were deleted and stored again during {_PLACINGS} attempts")

    def _lacking(self) -> tuple[list[NewPack], list[Extent]]:
        """Return the packs that the store lacks and that are not placed, and the extents that are reserved for this
        process and free for them.
        """
        environment = self._environment
        if environment.files.replacements != self._replacements:
            self._placed.clear()  # the file that was written may be the deleted one
            self._replacements = environment.files.replacements
        with environment.transaction() as rows:
            self._check_seen(rows, read_state(rows, self._namespace).cursor)  # before the work of writing
            spare = self._spare(rows)  # first: it may forget placed packs
            unplaced = [pack for pack in self._added(rows) if pack.pack_id not in self._placed]
            return unplaced, spare

    def _reserve(self) -> tuple[list[NewPack], list[Extent]]:
        """Reserve extents for the packs that the store lacks. If the segments are full, evict for them. Release the
        reservations of dead processes.

        :returns: the packs, and the extents.
        :raises StoreFullError: more must be evicted than one transaction can; nothing changed.
        """
        environment = self._environment
        with environment.transaction(write=True) as transaction:
            commit, room = self._begin(transaction)
            environment.release_reserved(transaction)
            writer, allocator = environment.claim_writer(), room.payloads.allocator
            kept = [extent for extents in self._placed.values() for extent in extents]
            allocator.free_now(room.spare)
            allocator.reserve(writer, kept)
            commit.touch(self._batch.touches)
            room.widen(room.need)
            if not room.need.plus(Amount(0, allocator.reserved * PAGE_BYTES)).within(room.limit):
                raise room.full()
            ended = commit.evict(lambda: room.used().plus(room.need).within(room.limit), _EVICTED_AT_ONCE)
            if ended is not Evicted.ENOUGH:
                raise room.full()
            taken = room.payloads.take(_bound_pages(room.unplaced), first=self._renews)
            allocator.reserve(writer, [*kept, *taken])
            commit.finish()
        self._note(commit)
        return room.unplaced, taken

    def _write_packs(self, packs: Sequence[NewPack], extents: Sequence[Extent]) -> None:
        """Write packs one behind the other into reserved extents, durably, without the writer lock."""
        files, rest = self._environment.files, extents
        placed: dict[bytes, list[Extent]] = {}
        try:
            for pack in packs:
                pages = pages_for(files.write(rest, pack.stream()))
                placed[pack.pack_id], rest = split(rest, pages)
                _ = pack.table  # computes checksums while the disk writes
            files.sync()
        except BaseException as error:
            files.abandon()
            self._renews = isinstance(error, StoreFullError)
            raise
        self._placed.update(placed)

    def _commit(self) -> CommitResult:
        """Commit the rows of the batch in one transaction, which evicts and reserves for the next one.

        :raises NotPlacedError: a pack is not in extents; nothing changed.
        """
        environment, batch = self._environment, self._batch
        with environment.transaction(write=True) as transaction:
            commit, room = self._begin(transaction)
            if not room.is_inline and (room.unplaced or environment.files.replacements != self._replacements):
                raise NotPlacedError
            room.payloads.placed = {self._namespace + pack_id: place for pack_id, place in self._placed.items()}
            room.check()

            commit.remove(batch)
            commit.add(batch)
            commit.expire(read_ttl(transaction))
            if commit.grew:
                self._prepare_next(commit, room)
            commit.finish()

            if commit.grew and not room.used().within(room.limit):
                raise room.full()
            # Last: a segment that is removed after this moment is noticed by the next transaction only.
            environment.files.check_present({extent.segment for place in self._placed.values() for extent in place})
        self._note(commit)
        self._restart_unpublished(room)
        return CommitResult(commit.cursor, self._evicted, interleaved=self._interleaved)

    def _prepare_next(self, commit: CatalogTransaction, room: Room) -> None:
        """Free what the batch did not need, evict, and reserve extents, so that the next commit need not."""
        environment = self._environment
        environment.taken.append(room.payloads.published_bytes)
        if environment.writer is not None:
            room.payloads.release_rest(environment.writer)

        room.widen(Amount(0, 0))
        goal = room.low_watermark()
        commit.evict(lambda: room.used().within(goal), _EVICTED_AT_ONCE)

        room.payloads.shrink(room.payloads.limit)
        if environment.writer is not None:
            room.reserve_ahead(environment.writer)

    def _restart_unpublished(self, room: Room) -> None:
        """Mark the written packs that another process has stored meanwhile as not written by this commit."""
        for pack in self._batch.packs:
            is_published = self._namespace + pack.pack_id in room.payloads.published
            if pack.pack_id in self._placed and not is_published:
                pack.restart()

    def _spare(self, rows: Transaction) -> list[Extent]:
        """Return the extents that are reserved for this process and that no placed pack is in.

        If placed packs are in extents that are not reserved (any more), all placed packs are forgotten.
        """
        writer = self._environment.writer
        reserved = [] if writer is None else read_reserved(rows, writer)
        placed = [extent for extents in self._placed.values() for extent in extents]
        spare = without(reserved, placed)
        if pages_of(spare) + pages_of(placed) == pages_of(reserved):
            return spare
        self._placed.clear()
        return reserved

    def _added(self, rows: Transaction) -> list[NewPack]:
        """Return the packs that the batch adds to the store: those not held, or that it deletes first."""
        packs: dict[bytes, NewPack] = {}
        for pack in self._batch.packs:
            packs.setdefault(pack.pack_id, pack)
        return [
            pack for pack in packs.values() if pack.pack_id in self._rewritten or not self._holds(rows, pack.pack_id)
        ]

    def _holds(self, rows: Transaction, pack_id: bytes) -> bool:
        name = self._namespace + pack_id
        return pack_table(name, rows.get(PACKS, name)) is not None

    def write_after_eviction(self, full: StoreFullError) -> CommitResult:
        """Evict in short transactions, and write a batch for which ``write`` raised ``full``.

        :raises StoreFullError: nothing evictable is left, the free pages are too fragmented, or a reader's snapshot
            still needs the evicted packs. The batch is not written; evicted packs stay evicted.
        """
        environment = self._environment
        environment.clear_readers()
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
        self._check_seen(transaction, commit.cursor)
        room.spare = self._spare(transaction)  # first: it may forget placed packs
        added = self._added(transaction)
        room.unplaced = [pack for pack in added if pack.pack_id not in self._placed]
        room.need = room.need_of(added, room.unplaced, self._batch)
        return commit, room

    def _check_seen(self, rows: Transaction, cursor: bytes) -> None:
        """Raise StaleError if other commits, up to the position ``cursor``, make the batch stale."""
        if self._seen in (None, cursor):
            return
        needs = self._batch.needs
        if needs is None or any(rows.get(PACKS, self._namespace + pack_id) is None for pack_id in needs):
            raise StaleError
        self._interleaved = True

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
            self._environment.release_reserved(transaction)
            commit.touch(self._batch.touches)
            spare = pages_of(room.spare)
            need = room.need._replace(payload=max(0, room.need.payload - spare * PAGE_BYTES))
            if not more:
                room.widen(need)
            if self._goal is None:
                catalogue, payload = room.low_watermark()
                most = room.used().catalogue - more * need.catalogue if more else catalogue
                self._goal = Amount(min(catalogue - need.catalogue, most), payload - need.payload)
            unavailable = room.payloads.allocator.reserved - spare  # of other processes, and with placed packs
            if not room.need.plus(Amount(0, unavailable * PAGE_BYTES)).within(room.limit):
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
        self.is_inline = environment.shares.inline
        segments = read_space(transaction).total * PAGE_BYTES if as_it_is else self.payloads.limit
        self.limit = Amount(environment.limit_bytes(as_it_is=as_it_is), _NO_LIMIT if self.is_inline else segments)
        """Upper bound on ``used()`` after a commit that adds content."""
        self._growth = max(0, segments - self._segments)
        self.need = Amount(0, 0)
        """Upper estimate of the bytes that the batch adds. Any further ones use the reserve for deletions."""
        self.unplaced: list[NewPack] = []
        """Packs that the batch adds and that are not in extents yet."""
        self.spare: list[Extent] = []
        """Extents that are reserved for this process and that no placed pack is in."""

    @property
    def _segments(self) -> int:
        return self.payloads.allocator.total * PAGE_BYTES

    def used(self) -> Amount:
        """Return the bytes in use, without freed pages: those not reusable yet would not become so by more eviction."""
        return Amount(self._transaction.used_bytes(), self.payloads.allocator.used * PAGE_BYTES)

    def need_of(self, packs: Sequence[NewPack], unplaced: Sequence[NewPack], batch: CommitBatch) -> Amount:
        """Estimate the bytes that a batch adds.

        :param packs: those of its packs that are not stored yet; ``unplaced``: those of them that need extents.
        """
        rows = rows_bound(packs, batch.manifests)
        if self.is_inline:
            return Amount(rows + sum(page_bytes(pack.payload_bound) for pack in packs), 0)
        return Amount(rows, _bound_pages(unplaced) * PAGE_BYTES)

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
        if lacks > 0 and not self.is_inline and not self.widen_by(2 * lacks + lacks // 8):
            self.payloads.shrink(self._segments - lacks)

    def widen_by(self, count: int) -> bool:
        """Raise the bound of ``data.mdb`` by at least ``count`` bytes: in ``limit`` at once, in LMDB's map from the
        next transaction on. Return False, with nothing changed, if that is impossible: the segments leave too little,
        or payloads are stored inline.
        """
        if self.is_inline:
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
        rewritten = 0 if self.is_inline else min((catalogue - MIN_CATALOGUE) // 2, CATALOGUE_AHEAD)
        reserve = max(rewritten, min(catalogue // 16, _MAX_AHEAD))
        return Amount(catalogue - reserve, payload - self._ahead_bytes())

    def reserve_ahead(self, writer: int) -> None:
        """Reserve extents for the next commit of a writer that has none reserved, as far as there is room."""
        allocator, most = self.payloads.allocator, self.payloads.limit // PAGE_BYTES
        pages = min(self._ahead_bytes() // PAGE_BYTES, allocator.free + max(0, most - allocator.total))
        if pages > 0:
            with suppress(StoreFullError):  # the disk is full: the next commit evicts first
                allocator.reserve(writer, self.payloads.take(pages))

    def _ahead_bytes(self) -> int:
        """Return how much of the segments to reserve for the next commit: what the largest of the last ones took."""
        share = self.limit.payload // _ALL_RESERVED_SHARE - self.payloads.allocator.reserved * PAGE_BYTES
        largest = max(self._environment.taken, default=0)
        return max(0, min(largest, _MAX_RESERVED, self.limit.payload // _RESERVED_SHARE, share))


def compact(environment: Environment) -> Iterator[CompactProgress]:
    """Return free space of the segments to the file system while engines use the store; yield after each step.

    Packs at the end of the segments are moved, byte for byte, to free extents before them, until no pack can be moved;
    then the free ends of the files are truncated. A killed compaction leaves a valid store; the next one continues.

    :raises StoreFullError: the catalogue has no space for the rows; packs that were moved stay moved.
    """
    with environment.writing(), environment.transaction(write=True) as transaction:
        environment.release_reserved(transaction, own=True)
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
            moved += _move(environment, step)
            yield CompactProgress(moved, max(moved, total))
            time.sleep(_TURN_S)
        _truncate(environment)
        if moved == before:
            return
        waiting = _packs_by_place(environment)


def _move(environment: Environment, packs: Sequence[tuple[bytes, int]]) -> int:
    """Move the payloads of packs (name, bytes) to free pages before them; return the bytes moved."""
    with environment.writing(), environment.transaction(write=True) as transaction:
        room = Room(environment, transaction)
        room.need = Amount(_MOVED_ROWS_BYTES * len(packs), 0)
        room.check()
        try:
            moved = sum(length for name, length in packs if room.payloads.lower(name, length))
            environment.files.sync()
        except BaseException:
            environment.files.abandon()
            raise
    return moved


def _bound_pages(packs: Iterable[NewPack]) -> int:
    """Return an upper bound on the pages that the payloads of packs take."""
    return sum(pages_for(pack.payload_bound) for pack in packs)


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
