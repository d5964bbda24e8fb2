"""Commit of a batch into files of bounded size.

With placement ``extents``, a commit has three steps, and holds the writer lock during the first and
the last:

1. Reserve extents for the packs that the store lacks, in a transaction. Usually the previous commit
   has done it: each commit reserves as much for the next one as recent commits took.
2. Write the packs into these extents, and sync the files.
3. Commit the rows of the packs in a transaction. The unused part of the reservation is free again.

Reserved extents count as used, so the capacity holds at each moment. The reservation of a process
that died is released by the next process that reserves in a transaction of its own: its first
commit does, and each one that lacks space.

LMDB reuses freed pages from the second transaction after the one that freed them. A batch therefore
cannot reuse the pages of the catalogue that it frees itself: each commit evicts for later commits.
If that is not enough (large batch, small store, fragmented pages, a disk smaller than the
capacity), short transactions evict, an empty transaction makes their pages reusable, and the batch
is retried.

Pages that a reader's snapshot can see are not reusable, however much is evicted. A stopped reader
must not cause the eviction of the whole store: a batch that lacks only these pages is refused.

The segment files get what the catalogue (``data.mdb``) leaves of the capacity: when it grows, packs
are evicted, and their disk space returns to the file system.
"""

from __future__ import annotations

import mmap
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import suppress
from functools import partial
from itertools import islice
from typing import NamedTuple

from persistkv.config import PAGE_BYTES
from persistkv.errors import StoreError, StoreFullError
from persistkv.storage.backend import CommitBatch, CommitResult
from persistkv.storage.catalog import CatalogTransaction, Evicted, TableRows
from persistkv.storage.catalog.rows import (
    GENERATION_BYTES,
    LINKS,
    NAMESPACES,
    PACKS,
    is_current,
    pack_table,
    read_state,
)
from persistkv.storage.catalog.transaction import kept_names, rows_bound
from persistkv.storage.format.codec import Buffer
from persistkv.storage.format.pack import ID_BYTES, PackTable
from persistkv.storage.format.pack_writer import NewPack
from persistkv_lmdb.allocator import (
    NotPlacedError,
    pages_for,
    pages_of,
    read_reserved,
    read_space,
    split,
    without,
)
from persistkv_lmdb.environment import CATALOGUE_AHEAD, MIN_CATALOGUE, Environment
from persistkv_lmdb.files import ReplacedError
from persistkv_lmdb.inline import page_bytes
from persistkv_lmdb.layout import (
    encode_tail,
    read_erasures,
    read_ttl,
    tail_pages,
    write_erasures,
)
from persistkv_lmdb.segments import Extent

# packs and manifests that one transaction evicts or deletes, in about 3 ms: other engines wait
_EVICTED_AT_ONCE = 32
_DROPPED_AT_ONCE = 128
"""Manifests of a shared pack that one transaction deletes. With 32, the deletion takes twice as
long; with 512, other engines wait twice as long (``benchmarks.maintenance``)."""
# packs and manifests that a transaction may evict for each pack that it adds
_EVICTED_A_PACK = 2
_TRANSACTIONS = 128
"""Maximum number of transactions that evict for one batch and one entry of ``_MORE``."""
_MORE = (0, 2, 8, 32)
"""Amounts to evict, tried in order, for a batch that does not fit. 0: as much as the capacity
requires. Others: additionally this multiple of the batch's bytes, because free pages may be too
fragmented."""
# pause between transactions: other threads of the process get the GIL and the lock
_TURN_S = 0.001
# wait of a commit for readers that still see evicted packs; a read takes about 20 ms
_PATIENCE_S = 0.5
# 256 MiB: a commit of 128 MiB, plus the previous one, whose pages are not reusable yet
_MAX_AHEAD = 256 << 20
# 128 KiB: pages of the catalogue that each commit may rewrite, besides those of its packs
_GROWN_BYTES = 128 << 10
_MAX_RESERVED = 64 << 20  # 64 MiB: reserved for the next commit of a process
_RESERVED_SHARE, _ALL_RESERVED_SHARE = 16, 8
"""At most 1/16 of the segments is reserved for a process's next commit, and at most 1/8 for all
processes."""
# of one batch: between writing and commit, another process may delete a pack that was held
_PLACINGS = 4
_NO_LIMIT = 1 << 62
# of a transaction that only evicts: no identity has this digest
_NO_NAMESPACE = bytes(ID_BYTES)


class _NothingLeftError(StoreFullError):
    """A batch would not fit even if everything evictable were evicted."""


class StaleError(Exception):
    """Another commit has changed the namespace since the caller last read its changes
    (``CommitBatch.seen``)."""


class BatchCommit:
    """Commit of one batch to the namespace with the id ``namespace``, with eviction and retries;
    used once."""

    def __init__(
        self, environment: Environment, namespace: bytes, batch: CommitBatch
    ) -> None:
        self._environment = environment
        self._namespace = namespace
        self._batch = batch
        self._seen = batch.seen
        self._interleaved = False
        self._evicted: list[PackTable] = []
        # used bytes at which the present entry of _MORE ends its evictions
        self._goal: Amount | None = None
        self._freed_by = 0  # number of the last transaction that evicted for this batch
        self._attempted = False
        self._at_once = max(_EVICTED_AT_ONCE, _EVICTED_A_PACK * len(batch.packs))
        """Maximum number of packs and manifests that one transaction evicts: a large batch takes
        its time anyway."""
        self._keep = kept_names(namespace, batch) | {
            namespace + pack_id for pack_id in batch.needs or ()
        }
        # packs that this batch deletes before it adds them
        self._rewritten = {*batch.deletions, *batch.bad}
        self._placed: dict[bytes, list[Extent]] = {}
        """Extents of the packs that were written durably and are not committed yet, by pack id."""
        self._erasures = 0  # number of the last erasure before the packs are written
        self._replacements = environment.files.replacements
        self._renews = False
        """Whether the reserved extents could not be written: others are reserved, the first ones
        that are free."""

    def write(self) -> CommitResult:
        """Write the batch, after short transactions that delete manifests if many name a pack that
        it deletes.

        :raises StaleError: another commit has followed ``CommitBatch.seen``; the batch was not
            written.
        :raises StoreFullError: the batch does not fit and was not written; ``write_after_eviction``
            makes room for it.
        """
        self._drop_shared_manifests(_DROPPED_AT_ONCE)
        for _ in range(_PLACINGS):
            for pack in self._batch.packs if self._attempted else ():
                # another process may have stored it since
                if pack.pack_id not in self._placed:
                    pack.restart()
            self._attempted = True
            try:
                if not self._environment.shares.inline:
                    lacking, extents = self._lacking()
                    if lacking and (
                        self._renews or _bound_pages(lacking) > pages_of(extents)
                    ):
                        lacking, extents = self._reserve()
                    self._write_packs(lacking, extents)
                return self._commit()
            except NotPlacedError:
                continue
            except ReplacedError:
                if not self._environment.is_current():
                    raise
                with self._environment.transaction(write=True) as transaction:
                    # only a segment was removed: creates it again
                    self._environment.payloads(transaction)
        raise StoreError(
            f"{self._environment.path}: packs were deleted and stored again during {_PLACINGS} "
            f"attempts"
        )

    def _lacking(self) -> tuple[list[NewPack], list[Extent]]:
        """Return the packs that the store lacks and that are not placed, and the extents that are
        reserved for this process and free for them.
        """
        environment = self._environment
        if environment.files.replacements != self._replacements:
            self._placed.clear()  # the file that was written may be the deleted one
            self._replacements = environment.files.replacements
        with environment.transaction() as rows:
            # before the work of writing
            self._check_seen(rows, read_state(rows, self._namespace).cursor)
            self._erasures = read_erasures(rows)
            spare = self._spare(rows)  # first: it may forget placed packs
            unplaced = [
                pack for pack in self._added(rows) if pack.pack_id not in self._placed
            ]
            return unplaced, spare

    def _reserve(self) -> tuple[list[NewPack], list[Extent]]:
        """Reserve extents for the packs that the store lacks. If the segments are full, evict for
        them. Release the reservations of dead processes.

        :returns: the packs, and the extents.
        :raises StoreFullError: more must be evicted than one transaction can; nothing changed.
        """
        environment = self._environment
        with environment.transaction(write=True) as transaction:
            commit, room = self._begin(transaction)
            environment.release_reserved(transaction)
            writer, allocator = environment.claim_writer(), room.payloads.allocator
            kept = self._release_spare(room)
            commit.touch(self._batch.touches)
            if not room.need.plus(Amount(0, allocator.reserved * PAGE_BYTES)).within(
                room.limit
            ):
                raise room.full()
            goal = room.limit.minus(room.need)
            ended = commit.evict(lambda: room.fits(goal), self._at_once)
            if ended is not Evicted.ENOUGH:
                raise room.full()
            taken = room.payloads.take(_bound_pages(room.unplaced), first=self._renews)
            allocator.reserve(writer, [*kept, *taken])
            commit.finish()
        self._note(commit)
        return room.unplaced, taken

    def _release_spare(self, room: Room) -> list[Extent]:
        """Release the reservation of this process, except the extents of placed packs, which are
        returned."""
        kept = [extent for extents in self._placed.values() for extent in extents]
        room.payloads.allocator.free_now(room.spare)
        if self._environment.writer is not None:
            room.payloads.allocator.reserve(self._environment.writer, kept)
        return kept

    def _write_packs(self, packs: Sequence[NewPack], extents: Sequence[Extent]) -> None:
        """Write packs and their trailers one behind the other into reserved extents, durably,
        without the writer lock.

        The checksums of a pack are computed while the disk writes its first part, and the packs
        before it.
        """
        if not packs:
            return
        files, rest = self._environment.files, extents
        placed: dict[bytes, list[Extent]] = {}
        tails = memoryview(
            mmap.mmap(
                -1, PAGE_BYTES * sum(tail_pages(pack.table_length) for pack in packs)
            )
        )
        try:
            for pack in packs:
                tail, tails = _cut(tails, PAGE_BYTES * tail_pages(pack.table_length))
                pages = pages_for(files.write(rest, self._whole(pack, rest, tail)))
                placed[pack.pack_id], rest = split(rest, pages)
            files.sync()
        except BaseException as error:
            files.abandon()
            self._renews = isinstance(error, StoreFullError)
            raise
        self._placed.update(placed)

    def _whole(
        self, pack: NewPack, extents: Sequence[Extent], tail: memoryview
    ) -> Iterator[Buffer]:
        """Iterate over the payload of a pack, then its last pages, as they are written to the first
        of the extents.

        :param tail: aligned memory for the last pages, filled with zeros: they are written without
            a copy.
        """
        yield from pack.stream()
        encoded = pack.table.encode()
        own, _ = split(extents, pages_for(pack.table.payload_length + len(tail)))
        # the erasure of this commit covers the copy before
        is_rewritten = pack.pack_id in self._rewritten
        encode_tail(tail, encoded, own, self._erasures + is_rewritten)
        yield tail

    def _commit(self) -> CommitResult:
        """Commit the rows of the batch in one transaction, which evicts and reserves for the next
        one.

        :raises NotPlacedError: a pack is not in extents; nothing changed.
        """
        environment, batch = self._environment, self._batch
        with environment.transaction(write=True) as transaction:
            commit, room = self._begin(transaction)
            if not room.is_inline and (
                room.unplaced or environment.files.replacements != self._replacements
            ):
                raise NotPlacedError
            room.payloads.placed = {
                self._namespace + pack_id: place
                for pack_id, place in self._placed.items()
            }
            room.check()

            commit.remove(batch)
            self._erase(transaction, commit, (*batch.deletions, *batch.bad))
            commit.add(batch)
            commit.expire(read_ttl(transaction))
            if commit.grew:
                self._prepare_next(commit, room)
            commit.finish()

            if commit.grew and not room.fits(room.limit):
                raise room.full()
            row = transaction.get(NAMESPACES, self._namespace)
            if room.payloads.published and row is not None:
                environment.recovery.describe(
                    self._namespace, row, commit.cursor[:GENERATION_BYTES]
                )
            # Last: a segment that is removed after this moment is noticed by the next transaction
            # only.
            environment.files.check_present(
                {extent.segment for place in self._placed.values() for extent in place}
            )
        self._note(commit)
        self._restart_unpublished(room)
        return CommitResult(commit.cursor, self._evicted, interleaved=self._interleaved)

    def _erase(
        self,
        transaction: TableRows,
        commit: CatalogTransaction,
        pack_ids: Iterable[bytes] = (),
    ) -> None:
        """Record that a rebuild must not find the packs that this transaction has deleted so far,
        nor these ones."""
        names = {self._namespace + pack_id for pack_id in pack_ids}
        names.update(table.namespace + table.pack_id for table in commit.evicted)
        if names and not self._environment.shares.inline:
            number = read_erasures(transaction) + 1
            self._environment.recovery.erase(names, number)
            write_erasures(transaction, number)

    def _prepare_next(self, commit: CatalogTransaction, room: Room) -> None:
        """Free what the batch did not need, evict, and reserve extents, so that the next commit
        need not."""
        environment = self._environment
        environment.taken.append(room.payloads.published_bytes)
        if environment.writer is not None:
            room.payloads.release_rest(environment.writer)

        goal = room.low_watermark()
        commit.evict(lambda: room.fits(goal), self._at_once)

        room.payloads.shrink(room.payloads.limit)
        if environment.writer is not None:
            room.reserve_ahead(environment.writer)

    def _restart_unpublished(self, room: Room) -> None:
        """Mark the written packs that another process has stored meanwhile as not written by this
        commit."""
        for pack in self._batch.packs:
            is_published = self._namespace + pack.pack_id in room.payloads.published
            if pack.pack_id in self._placed and not is_published:
                pack.restart()

    def _spare(self, rows: TableRows) -> list[Extent]:
        """Return the extents that are reserved for this process and that no placed pack is in.

        If placed packs are in extents that are not reserved (any more), all placed packs are
        forgotten.
        """
        writer = self._environment.writer
        reserved = [] if writer is None else read_reserved(rows, writer)
        placed = [extent for extents in self._placed.values() for extent in extents]
        spare = without(reserved, placed)
        if pages_of(spare) + pages_of(placed) == pages_of(reserved):
            return spare
        self._placed.clear()
        return reserved

    def _added(self, rows: TableRows) -> list[NewPack]:
        """Return the packs that the batch adds to the store: those not held, or that it deletes
        first."""
        packs: dict[bytes, NewPack] = {}
        for pack in self._batch.packs:
            packs.setdefault(pack.pack_id, pack)
        return [
            pack
            for pack in packs.values()
            if pack.pack_id in self._rewritten or not self._holds(rows, pack.pack_id)
        ]

    def _holds(self, rows: TableRows, pack_id: bytes) -> bool:
        name = self._namespace + pack_id
        return pack_table(name, rows.get(PACKS, name)) is not None

    def write_after_eviction(self, full: StoreFullError) -> CommitResult:
        """Evict in short transactions, and write a batch for which ``write`` raised ``full``.

        :raises StoreFullError: nothing evictable is left, the free pages are too fragmented, or a
            reader's snapshot still needs the evicted packs. The batch is not written; evicted packs
            stay evicted.
        """
        environment = self._environment
        environment.clear_readers()
        try:
            if not (self._batch.packs or self._batch.manifests):
                environment.age()
                self._drop_shared_manifests(1)
                return self.write()
            for more in _MORE:
                self._goal = None
                self._repeat(
                    partial(self._evict_some, more), self._at_once, _TRANSACTIONS
                )
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
            # its traceback references it, and would keep the rows of the batch alive
            del full

    def _repeat(
        self, step: Callable[[int], bool], at_once: int, most: int = _NO_LIMIT
    ) -> None:
        """Call ``step`` until it returns False. If the disk is too full for a transaction, retry
        with one deletion.

        :param step: runs one transaction with at most the given number of deletions; returns
            whether more are needed.
        :param at_once: maximum number of deletions of a transaction; ``most``: maximum number of
            transactions.
        :raises StoreFullError: not even one deletion fits.
        """
        at_most = at_once
        for _ in range(most):
            try:
                if not step(at_most):
                    return
            except StoreFullError as error:
                if at_most == 1 or isinstance(error, _NothingLeftError):
                    raise
                # a full disk has no pages for a larger transaction: deletions need some, too
                at_most = 1
                self._environment.age()
            else:
                at_most = min(4 * at_most, at_once)

    def _begin(
        self, transaction: TableRows, *, as_it_is: bool = False
    ) -> tuple[CatalogTransaction, Room]:
        """Return the catalogue of a write transaction, and the part of the capacity that it may use
        (``Room``)."""
        room = Room(self._environment, transaction, as_it_is=as_it_is)
        opened = self._environment.opened
        commit = CatalogTransaction(
            transaction, room.payloads, self._namespace, self._keep, opened=opened
        )
        self._check_seen(transaction, commit.cursor)
        room.spare = self._spare(transaction)  # first: it may forget placed packs
        added = self._added(transaction)
        room.unplaced = [pack for pack in added if pack.pack_id not in self._placed]
        rows = rows_bound(added, self._batch.manifests)
        if rows:
            rows += commit.beginning_bytes
        room.expect(added, room.unplaced, rows)
        return commit, room

    def _check_seen(self, rows: TableRows, cursor: bytes) -> None:
        """Raise StaleError if other commits, up to the position ``cursor``, make the batch
        stale."""
        if self._seen is None or is_current(cursor, self._seen):
            return
        needs = self._batch.needs
        if needs is None or any(
            rows.get(PACKS, self._namespace + pack_id) is None for pack_id in needs
        ):
            raise StaleError
        self._interleaved = True

    def _note(self, commit: CatalogTransaction) -> None:
        """Remember the evicted packs of a committed transaction, and the namespace's position in
        the change log."""
        self._evicted += commit.evicted
        self._environment.forget_namespaces(commit.ended)
        if self._seen is not None:
            self._seen = commit.cursor

    def _drop_shared_manifests(self, shared_by: int) -> None:
        """Delete, in short transactions, manifests that name packs which the batch deletes, except
        packs that at most ``shared_by`` manifests name: the batch's own transaction handles them.
        """
        for pack_ids, alone in (
            (self._batch.deletions, False),
            (self._batch.bad, True),
        ):
            for pack_id in self._shared(pack_ids, shared_by) if pack_ids else ():
                self._repeat(partial(self._drop_some, pack_id, alone), _DROPPED_AT_ONCE)

    def _shared(self, pack_ids: Sequence[bytes], shared_by: int) -> list[bytes]:
        with self._environment.transaction() as rows:
            links = {
                pack_id: rows.starting_with(LINKS, self._namespace + pack_id)
                for pack_id in pack_ids
            }
            return [
                pack_id
                for pack_id, found in links.items()
                if next(islice(found, shared_by, None), None)
            ]

    def _drop_some(self, pack_id: bytes, alone: bool, at_most: int) -> bool:
        with self._environment.transaction(write=True) as transaction:
            commit, _ = self._begin(transaction)
            more = commit.drop_manifests_of(pack_id, at_most, alone=alone)
            self._erase(transaction, commit)
            commit.finish()
        self._note(commit)
        time.sleep(_TURN_S)
        return more

    def _evict_some(self, more: int, at_most: int) -> bool:
        """Make room for the batch in one transaction; return whether more must be evicted.

        :param more: 0: evict as much as the capacity requires. Otherwise the free pages were not
            usable: additionally evict this multiple of the batch's bytes, and assume that no file
            can grow.
        :raises StoreFullError: nothing evictable is left, or the disk has no space for these
            deletions; nothing changed.
        """
        with self._environment.transaction(write=True) as transaction:
            commit, room = self._begin(transaction, as_it_is=more > 0)
            self._environment.release_reserved(transaction)
            self._release_spare(room)
            commit.touch(self._batch.touches)
            need = room.need
            if self._goal is None:
                catalogue, payload = room.low_watermark()
                most = (
                    transaction.used_bytes() - more * need.catalogue
                    if more
                    else catalogue
                )
                self._goal = Amount(
                    min(catalogue - need.catalogue, most), payload - need.payload
                )
            # of other processes, and with placed packs
            reserved = room.payloads.allocator.reserved * PAGE_BYTES
            if not need.plus(Amount(0, reserved)).within(room.limit):
                raise _NothingLeftError(str(room.full()))
            goal = self._goal
            ended = commit.evict(lambda: room.fits(goal), at_most)
            too_much = not room.fits(room.limit.minus(need))
            if ended is Evicted.ALL and (
                too_much or not (self._evicted or commit.evicted)
            ):
                raise _NothingLeftError(str(room.full()))
            holes_lack = room.payloads.shrink(room.payloads.limit)
            commit.finish()
            self._freed_by = transaction.txn.id()
        self._note(commit)
        return ended is Evicted.SOME or holes_lack


class Amount(NamedTuple):
    """Number of bytes in the catalogue (``data.mdb``) and in the segment files."""

    catalogue: int
    payload: int

    def plus(self, other: Amount) -> Amount:
        return Amount(self.catalogue + other.catalogue, self.payload + other.payload)

    def minus(self, other: Amount) -> Amount:
        return Amount(self.catalogue - other.catalogue, self.payload - other.payload)

    def within(self, limit: Amount) -> bool:
        return self.catalogue <= limit.catalogue and self.payload <= limit.payload


class Room:
    """Part of the capacity that a write transaction may use. ``as_it_is`` assumes that no file can
    grow."""

    def __init__(
        self,
        environment: Environment,
        transaction: TableRows,
        *,
        as_it_is: bool = False,
    ) -> None:
        self._environment = environment
        self._transaction = transaction
        self.payloads = environment.payloads(transaction)
        self.is_inline = environment.shares.inline
        segments = (
            read_space(transaction).total * PAGE_BYTES
            if as_it_is
            else self.payloads.limit
        )
        self.limit = Amount(
            environment.limit_bytes(as_it_is=as_it_is),
            _NO_LIMIT if self.is_inline else segments,
        )
        """Upper bound on the bytes in use after a commit that adds content."""
        self.need = Amount(0, 0)
        """Upper estimate of the bytes that the batch adds. Any further ones use the reserve for
        deletions."""
        self.unplaced: list[NewPack] = []
        """Packs that the batch adds and that are not in extents yet."""
        self.spare: list[Extent] = []
        """Extents that are reserved for this process and that no placed pack is in."""

    @property
    def _segments(self) -> int:
        return self.payloads.allocator.total * PAGE_BYTES

    def fits(self, goal: Amount) -> bool:
        """Return whether the bytes in use are at most ``goal``. Freed pages that are not reusable
        yet do not count: more eviction would not change them.
        """
        payload = self.payloads.allocator.used * PAGE_BYTES
        return (
            payload <= goal.payload and self._transaction.used_bytes() <= goal.catalogue
        )

    def expect(
        self, packs: Sequence[NewPack], unplaced: Sequence[NewPack], rows: int
    ) -> None:
        """Estimate ``need``, the bytes that a batch adds. If ``data.mdb`` may grow by more than
        usual, lower the limit of the segments.

        :param packs: those of its packs that are not stored yet; ``unplaced``: those of them that
            need extents.
        :param rows: upper estimate of the bytes of its rows.
        """
        if self.is_inline:
            self.need = Amount(
                rows + sum(page_bytes(pack.payload_bound) for pack in packs), 0
            )
            return
        self.need = Amount(rows, _bound_pages(unplaced) * PAGE_BYTES)
        if (more := rows - self._environment.shares.growth_bytes // 2) > 0:
            self.payloads.limit = max(0, self.payloads.limit - more)
            self.limit = self.limit._replace(
                payload=min(self.limit.payload, self.payloads.limit)
            )

    def check(self) -> None:
        """Raise a StoreFullError if ``need`` exceeds the free space, including the space by which a
        file may grow."""
        if not any(self.need):
            return
        allocator = self.payloads.allocator
        self._environment.check_growth(self._transaction.used_bytes())
        free = allocator.free * PAGE_BYTES + max(0, self.limit.payload - self._segments)
        if not self.fits(self.limit.minus(self.need)) or self.need.payload > free:
            raise self.full()
        is_too_large = self._segments > self.payloads.limit and allocator.free > 0
        # the catalogue may need the space
        if is_too_large and self._environment.files.punches:
            raise self.full()

    def full(self) -> StoreFullError:
        path, capacity = self._environment.path, self._environment.shares.capacity
        return StoreFullError(
            f"{path}: {sum(self.need)} bytes do not fit a capacity of {capacity}"
        )

    def low_watermark(self) -> Amount:
        """Return the used bytes down to which a commit evicts: ``limit`` less a reserve for later
        commits."""
        catalogue, payload = self.limit
        rewritten = (
            0
            if self.is_inline
            else min((catalogue - MIN_CATALOGUE) // 2, CATALOGUE_AHEAD)
        )
        reserve = max(rewritten, min(catalogue // 16, _MAX_AHEAD))
        grows_by = min(
            2 * self.need.catalogue + _GROWN_BYTES,
            self._environment.shares.growth_bytes,
        )
        return Amount(catalogue - reserve, payload - self._ahead_bytes() - grows_by)

    def reserve_ahead(self, writer: int) -> None:
        """Reserve extents for the next commit of a writer that has none reserved, as far as there
        is room."""
        allocator, most = self.payloads.allocator, self.payloads.limit // PAGE_BYTES
        pages = min(
            self._ahead_bytes() // PAGE_BYTES,
            allocator.free + max(0, most - allocator.total),
        )
        if pages > 0:
            # the disk is full: the next commit evicts first
            with suppress(StoreFullError):
                allocator.reserve(writer, self.payloads.take(pages))

    def _ahead_bytes(self) -> int:
        """Return how much of the segments to reserve for the next commit: what the largest of the
        last ones took."""
        share = (
            self.limit.payload // _ALL_RESERVED_SHARE
            - self.payloads.allocator.reserved * PAGE_BYTES
        )
        largest = max(self._environment.taken, default=0)
        return max(
            0, min(largest, _MAX_RESERVED, self.limit.payload // _RESERVED_SHARE, share)
        )


def fit_capacity(environment: Environment) -> None:
    """Evict until the store fits its capacity, in short transactions; return the space to the file
    system.

    :raises StoreError: a transaction failed; those before it stay in effect, and later commits
        evict the rest.
    """
    while _evict_excess(environment):
        time.sleep(_TURN_S)


def _evict_excess(environment: Environment) -> bool:
    """Evict some of what exceeds the capacity, in one transaction; return whether more exceeds
    it."""
    with environment.transaction(write=True) as transaction:
        environment.release_reserved(transaction)
        room = Room(environment, transaction)
        commit = CatalogTransaction(
            transaction, room.payloads, _NO_NAMESPACE, opened=environment.opened
        )
        ended = commit.evict(lambda: room.fits(room.limit), _EVICTED_AT_ONCE)
        holes_lack = room.payloads.shrink(room.payloads.limit)
        commit.finish()
    environment.forget_namespaces(commit.ended)
    return ended is Evicted.SOME or holes_lack


def release_free(environment: Environment) -> None:
    """Return all free space of the segments to the file system, in short transactions.

    :raises StoreError: a transaction failed; what was returned stays returned.
    """
    with environment.writing(), environment.transaction(write=True) as transaction:
        environment.release_reserved(transaction, own=True)
    more = True
    while more:
        with environment.transaction(write=True) as transaction:
            more = environment.payloads(transaction).shrink(0)
        time.sleep(_TURN_S)


def _cut(memory: memoryview, num_bytes: int) -> tuple[memoryview, memoryview]:
    return memory[:num_bytes], memory[num_bytes:]


def _bound_pages(packs: Iterable[NewPack]) -> int:
    """Return an upper bound on the pages that packs take in the segment files."""
    return sum(
        pages_for(pack.payload_bound) + tail_pages(pack.table_length) for pack in packs
    )
