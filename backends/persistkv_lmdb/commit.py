"""Commit of a batch into files of bounded size.

With placement ``extents``, a commit has three steps, and holds the writer lock during the first and
the last:

1. Reserve extents for the packs that the store lacks, in a transaction. Usually the previous commit
   has done it: each commit reserves as much for the next one as recent commits took.
2. Write the packs into these extents, and sync the files.
3. Commit the rows of the packs in a transaction. The unused part of the reservation is free again.

Reserved extents count as used, so the capacity holds at each moment. The reservation of a process
that closed the store or died is released by the next process that reserves in a transaction of its
own: its first commit does, and each one that lacks space.

LMDB reuses freed pages from the second transaction after the one that freed them. A batch therefore
cannot reuse the pages of the catalogue that it frees itself: each commit evicts for later commits.
If that is not enough (large batch, small store, fragmented pages, a disk smaller than the
capacity), short transactions evict, an empty transaction makes their pages reusable, and the batch
is retried.

A tenant is never above its quota after a commit that adds packs of it: the commit's own transaction
evicts the tenant's oldest packs. If they are too many for one transaction, short transactions
before it evict them.

Pages that a reader's snapshot can see are not reusable, however much is evicted. A stopped reader
must not cause the eviction of the whole store: a batch that lacks only these pages is refused.
"""

from __future__ import annotations

import mmap
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from itertools import islice

from persistkv.config import PAGE_BYTES
from persistkv.errors import QuotaExceededError, StoreError, StoreFullError
from persistkv.storage.backend import CommitBatch, CommitResult
from persistkv.storage.catalogue import CatalogTransaction, EvictionEnd, TableRows
from persistkv.storage.catalogue.catalogue import tenants_of
from persistkv.storage.catalogue.quotas import Quotas
from persistkv.storage.catalogue.rows import (
    GENERATION_BYTES,
    LINKS,
    NAMESPACES,
    PACKS,
    TENANT_ORDER,
    holds_pack,
    is_current,
    read_state,
)
from persistkv.storage.catalogue.transaction import (
    bytes_by_tenant,
    kept_names,
    rows_bound,
)
from persistkv.storage.format.codec import Buffer
from persistkv.storage.format.pack import ID_BYTES, PackTable
from persistkv.storage.format.pack_writer import NewPack
from persistkv_lmdb.environment import Environment
from persistkv_lmdb.layout import (
    encode_tail,
    read_last_erasure,
    read_ttl,
    tail_pages,
)
from persistkv_lmdb.payloads.allocator import (
    ExtentPayloads,
    NotPlacedError,
    pages_for,
    pages_of,
    read_reserved,
    split,
)
from persistkv_lmdb.payloads.room import Room, bound_pages
from persistkv_lmdb.payloads.segments import Extent

# maximum number of packs and manifests that one transaction evicts or deletes. This takes about 3
# ms, during which other engines wait.
_EVICTED_AT_ONCE = 32
_DROPPED_AT_ONCE = 128
"""Manifests of a shared pack that one transaction deletes. With 32, the deletion takes twice as
long; with 512, other engines wait twice as long (``benchmarks.maintenance``)."""
# A transaction that adds many packs and manifests may evict more than this: two for each that it
# adds.
_EVICTED_PER_ADDED = 2
# maximum number of packs whose use one transaction records, in about 2 ms
_TOUCHED_AT_ONCE = 128
_TRANSACTIONS = 128
"""Maximum number of transactions that evict for one batch and one entry of ``_EXTRA_MULTIPLES``."""
_EXTRA_MULTIPLES = (0, 2, 8, 32)
"""Amounts to evict, tried in order, for a batch that does not fit. 0: as much as the capacity
requires. Other values: additionally this multiple of the batch's bytes, because free pages may be
too fragmented."""
_TURN_S = 0.001  # seconds of pause between two transactions (``let_others_run``)
# seconds for which a commit waits for readers that still see evicted packs; a read takes about 20
# ms
_PATIENCE_S = 0.5
# Maximum number of attempts to write the packs of a batch and commit them. An attempt fails if
# another process deletes a pack that was held, or releases the reservation, before the commit.
_ATTEMPTS = 4
_NO_LIMIT = 1 << 62  # maximum number of transactions where there is no limit
# namespace of a transaction that only evicts, in all namespaces: no identity has this digest
_NO_NAMESPACE = bytes(ID_BYTES)


class _NothingLeftError(StoreFullError):
    """A batch would not fit even if everything evictable were evicted."""


class StaleError(Exception):
    """Another commit has changed the namespace since the caller last read its changes
    (``CommitBatch.seen``)."""


class _TenantAboveError(Exception):
    """A batch fits the quota of its tenant only if more is evicted than its own transaction may.

    :param num_bytes: of the tenant's packs that the batch adds.
    """

    def __init__(self, tenant: str, num_bytes: int) -> None:
        super().__init__(tenant, num_bytes)
        self.tenant = tenant
        self.num_bytes = num_bytes


class BatchCommit:
    """Commit of one batch to the namespace with the id ``namespace``, with eviction and retries;
    used once.

    :param forgotten: ``KeyFile.forgotten`` when the content of the batch was accepted: the batch is
        refused if one of its tenants has been forgotten after that.
    """

    def __init__(
        self,
        environment: Environment,
        namespace: bytes,
        batch: CommitBatch,
        forgotten: Mapping[str, int],
    ) -> None:
        self._environment = environment
        self._forgotten = forgotten
        self._namespace = namespace
        self._batch = batch
        self._seen = batch.seen
        """Position in the change log up to which the changes of the namespace are known: first
        ``CommitBatch.seen``, then the position after the last transaction of this commit, whose
        changes do not make the batch stale. None: the position is not checked."""
        self._interleaved = False
        """Whether other commits followed ``seen``, and the batch is written all the same; see
        ``CommitResult``."""
        self._evicted: list[PackTable] = []
        """Tables of the packs that the transactions of this commit have removed."""
        num_added = len(batch.packs) + len(batch.manifests)
        self._most_evicted = max(_EVICTED_AT_ONCE, _EVICTED_PER_ADDED * num_added)
        """Maximum number of packs and manifests that one transaction evicts or expires. A large
        batch may evict more: its own transaction is long in any case."""
        self._keep = kept_names(namespace, batch)
        """Names of packs and manifests that this commit must not evict: the batch contains or needs
        them."""
        for pack_id in batch.needs or ():
            self._keep.add(namespace + pack_id)
        self._packs_to_delete = {*batch.deletions, *batch.bad}
        """Ids of the packs that this batch deletes. If it also adds one of them, the pack is
        written again although the store holds it."""
        self._lacking: list[NewPack] = []
        """Packs of the batch that the store lacked in the last transaction."""

        # state of the present attempt to write the packs and commit them
        self._reserved: list[Extent] = []
        """Extents that were reserved for this process when the present attempt began to write."""
        self._placed: dict[bytes, list[Extent]] = {}
        """Extents of the packs that the present attempt has written durably, by namespace and pack
        id. They are the first extents of ``_reserved``."""
        self._last_erasure = 0
        """Number of the last erasure (``recovery``) before the present attempt wrote its packs."""

    def write(self) -> CommitResult:
        """Write the batch: usually the payloads, then one transaction.

        Work that would hold the lock for too long is done before, in short transactions: the
        deletion of many manifests that name one pack, and the recording of many uses.

        :raises TenantForgottenError: the batch has content of a tenant that was forgotten after it
            was accepted; the batch was not written.
        :raises StaleError: another commit has followed ``CommitBatch.seen``; the batch was not
            written.
        :raises QuotaExceededError: packs of a tenant do not fit its quota; nothing was written.
        :raises StoreFullError: the batch does not fit and was not written; ``write_after_eviction``
            makes room for it.
        """
        if self._packs_to_delete:
            self._drop_shared_manifests(shared_by=_DROPPED_AT_ONCE)
        while len(self._batch.touches) > _TOUCHED_AT_ONCE:
            self._record_early_uses()
        for _ in range(_ATTEMPTS):
            try:
                # the transaction of the batch writes inline payloads itself
                if not self._environment.database.shares.inline:
                    self._write_lacking()
                return self._commit_within_quotas()
            except NotPlacedError:
                # another process has deleted a pack that was held, or released the reservation:
                # write the lacking packs again
                self._restart_packs()
        raise StoreError(
            f"{self._environment.path}: packs were deleted and stored again during {_ATTEMPTS} "
            f"attempts"
        )

    def _restart_packs(self) -> None:
        """Prepare the packs for another attempt, which reads their payloads from the beginning."""
        for pack in self._batch.packs:
            pack.restart()

    def _record_early_uses(self) -> None:
        """Record the first ``_TOUCHED_AT_ONCE`` uses of the batch in a short transaction. Remove
        them from the batch, whose own transaction records the others."""
        early = self._batch.touches[:_TOUCHED_AT_ONCE]
        with self._short_transaction() as (commit, _room):
            commit.touch(early)
        rest = self._batch.touches[_TOUCHED_AT_ONCE:]
        self._batch = replace(self._batch, touches=rest)
        let_others_run()

    def _write_lacking(self) -> None:
        """Write the packs that the store lacks durably, into extents that are reserved for this
        process, without the writer lock. The transaction of the batch then checks that the store
        still lacks them, and that the extents are still reserved.

        Set ``_lacking``, ``_reserved``, ``_placed`` and ``_last_erasure``.
        """
        self._placed.clear()
        environment = self._environment
        with environment.transaction() as rows:
            # Check before packs are written for a batch that is refused. The transaction of the
            # batch checks again.
            state = read_state(rows, self._namespace)
            self._check_not_stale(rows, state.cursor)
            # the packs will name this number, so that a rebuild knows which erasures precede them
            self._last_erasure = read_last_erasure(rows)
            self._reserved = self._read_reserved(rows)
            self._lacking = self._find_lacking(rows)
            self._check_quotas(rows, bytes_by_tenant(self._lacking))
        # usually, the previous commit has reserved enough
        needed_pages = bound_pages(self._lacking)
        if needed_pages > pages_of(self._reserved):
            self._reserve()
        if self._lacking:
            self._write_packs(self._lacking)

    def _reserve(self) -> None:
        """Reserve extents for the packs that the store lacks, in a transaction of its own. They
        replace the present reservation of this process, which is too small.

        The transaction also releases the reservations of dead processes, and evicts packs if the
        segments are full.

        :raises StoreFullError: more must be evicted than one transaction can; nothing changed.
            ``write_after_eviction`` then evicts in several transactions.
        """
        environment = self._environment
        with self._short_transaction() as (commit, room):
            environment.release_reserved(room.transaction, include_own=True)
            # Claim the writer's number after the release: it may be that of a dead process, whose
            # extents must be free before this process reserves any under it.
            writer = environment.claim_writer(room.transaction)
            # Record the uses first: used packs are evicted last, so that eviction spares the packs
            # that the batch uses as long as there are others.
            commit.touch(self._batch.touches)
            # evict nothing for a batch that cannot fit
            if not room.fits_when_empty():
                raise room.full_error()
            end = commit.evict(room.fits_batch, at_most=self._most_evicted)
            if end is not EvictionEnd.GOAL_MET:
                raise room.full_error()
            num_pages = bound_pages(self._lacking)
            self._reserved = room.payloads.allocate(num_pages)
            room.payloads.allocator.reserve(writer, self._reserved)

    def _write_packs(self, packs: Sequence[NewPack]) -> None:
        """Write packs and their trailers one behind the other into the reserved extents, and sync
        the files. Set ``_placed``.

        The checksums of a pack are computed while the disk writes its first part and earlier packs.
        """
        files = self._environment.files
        unwritten = self._reserved  # the extents that the next packs are written to
        num_tail_pages = sum(tail_pages(pack.table_length) for pack in packs)
        # Memory for the tables and trailers of all packs, which stays in use until the sync. A
        # mapping is aligned, so it is written without a copy.
        tails = memoryview(mmap.mmap(-1, PAGE_BYTES * num_tail_pages))
        tail_start = 0
        placed: dict[bytes, list[Extent]] = {}
        try:
            for pack in packs:
                tail_end = tail_start + PAGE_BYTES * tail_pages(pack.table_length)
                tail = tails[tail_start:tail_end]
                tail_start = tail_end
                # the stream fills ``tail`` at its end, because the table names the checksums of the
                # payload, and the trailer the extents that the payload has taken
                stream = self._stream_with_tail(pack, unwritten, tail)
                written_bytes = files.write(unwritten, stream)
                extents, unwritten = split(unwritten, pages_for(written_bytes))
                placed[self._namespace + pack.pack_id] = extents
            files.sync()
        except BaseException:
            # end the writes, because the next attempt uses the same extents
            files.abandon()
            raise
        # set only now, because nothing counts as written before the sync
        self._placed = placed

    def _stream_with_tail(
        self,
        pack: NewPack,
        extents: Sequence[Extent],
        tail: memoryview,
    ) -> Iterator[Buffer]:
        """Yield the payload of a pack, then its last pages with table and trailer.

        :param extents: reserved extents that no pack has yet. The pack takes their first pages, and
            its trailer names these.
        :param tail: aligned memory for the last pages, filled with zeros: they are written without
            a copy.
        """
        yield from pack.stream()
        # the table is complete only after the stream
        encoded = self._environment.database.seal.encode_table(pack.table)
        # the length of the payload is known now, and with it the extents that this pack takes
        pack_bytes = pack.table.payload_length + len(tail)
        own_extents, _rest = split(extents, pages_for(pack_bytes))
        encode_tail(tail, encoded, own_extents, self._last_erasure)
        yield tail

    def _commit_within_quotas(self) -> CommitResult:
        """Commit the rows of the batch in one transaction, within the quotas of its tenants.

        That transaction may evict at most ``_most_evicted`` packs and manifests of a tenant. If the
        tenant's quota requires more, it is rolled back. Then short transactions evict packs of the
        tenant, and the commit is tried again.

        :raises NotPlacedError: a pack must be written again first; the batch was not committed.
        """
        while True:
            try:
                return self._commit()
            except _TenantAboveError as error:
                evict = partial(
                    self._evict_some_of_tenant, error.tenant, error.num_bytes
                )
                self._repeat_deletions(evict, at_once=self._most_evicted)
            # Other engines may add content of the tenant as fast as this one evicts it. Doubling
            # the bound on each attempt ends this: at last, the batch's own transaction, which
            # excludes other writers, may evict all that the quota requires.
            self._most_evicted *= 2
            # the transaction that was rolled back has read the payloads: restart them
            if self._environment.database.shares.inline:
                self._restart_packs()

    def _commit(self) -> CommitResult:
        """Commit the rows of the batch in one transaction, which also evicts and reserves extents
        for the next batch.

        An error that is raised within the transaction rolls it back.

        :raises NotPlacedError: a pack that the store lacks is not in extents that are reserved for
            this process (``_check_placed``); nothing changed.
        :raises StoreFullError: the batch does not fit; nothing changed.
        :raises _TenantAboveError: more must be evicted for a quota; nothing changed.
        """
        environment = self._environment
        batch = self._batch
        with environment.transaction(write=True) as transaction:
            commit, room = self._prepare_transaction(transaction)
            if not room.is_inline:
                self._check_placed(transaction)
            room.payloads.placed = self._placed
            room.check()

            # delete first, so that a pack that is written again is added like a new one
            commit.remove(batch)
            if self._packs_to_delete:
                names = self._deleted_names(commit)
                environment.record_erasure(transaction, names)
            commit.add(batch)
            # expire after the uses of this batch, which keep content from expiring
            commit.expire(read_ttl(transaction), at_most=self._most_evicted)
            self._enforce_quotas(commit)
            # after a batch with new content, the next batch is expected to add some, too
            if commit.grew:
                self._prepare_next_commit(commit, room)
            # write the last rows: only now is it known how many pages all rows take
            commit.finish()

            # the estimates of ``room.check`` were too low: roll back, and evict first
            if commit.grew and not room.uses_at_most(room.limit):
                raise room.full_error()
            # a rebuild lists only packs in extents, and only if it knows their namespace
            if room.payloads.recorded_packs:
                self._write_identity(transaction, commit)
            # A user may remove a segment file at any time, so check this last: if the packs in it
            # counted as held, the next attempt would not write them.
            segments = {extent.segment for extent in self._reserved}
            environment.files.check_present(segments)
        self._after_commit(commit)
        self._mark_unrecorded(room)
        return CommitResult(commit.cursor, self._evicted, interleaved=self._interleaved)

    def _write_identity(
        self,
        transaction: TableRows,
        commit: CatalogTransaction,
    ) -> None:
        """Write the identity of the namespace to its file, from which a rebuild reads it if
        ``data.mdb`` is lost or damaged."""
        row = transaction.get(NAMESPACES, self._namespace)
        if row is not None:
            generation = commit.cursor[:GENERATION_BYTES]
            self._environment.recovery.write_identity(self._namespace, row, generation)

    def _check_placed(self, rows: TableRows) -> None:
        """Raise NotPlacedError if a pack that the store lacks was not written, or was written to
        extents that are not reserved for this process any more."""
        is_reserved = self._read_reserved(rows) == self._reserved
        if self._unplaced() or not is_reserved:
            raise NotPlacedError

    def _deleted_names(self, commit: CatalogTransaction) -> set[bytes]:
        """Return the names of the packs that the batch deletes and does not add again, after
        ``commit`` has deleted them. A rebuild must not find these."""
        deleted = _names_of(commit.evicted)
        # add packs with damaged tables, which are not in ``evicted``
        for pack_id in self._packs_to_delete:
            deleted.add(self._namespace + pack_id)
        added = {self._namespace + pack.pack_id for pack in self._lacking}
        return deleted - added

    def _enforce_quotas(self, commit: CatalogTransaction) -> None:
        """Evict packs of the tenants that the batch has enlarged, until none of them is above its
        quota. Then evict some packs of other tenants, whose quotas were lowered.

        :raises QuotaExceededError: evicting all that may be evicted is not enough.
        :raises _TenantAboveError: too much must be evicted for one transaction.
        """
        quotas = commit.quotas
        # Check only tenants that grow: a batch that replaces packs by smaller ones is accepted even
        # above the quota.
        for digest, num_bytes in quotas.grown():
            end = commit.fit_quota(digest, at_most=self._most_evicted)
            totals = quotas.of_digest(digest)
            # without a quota, nothing had to be evicted
            if totals is None or totals.quota is None:
                continue
            if end is EvictionEnd.LIMIT_REACHED:
                raise _TenantAboveError(totals.tenant, num_bytes)
            if end is EvictionEnd.NOTHING_LEFT:
                raise QuotaExceededError(totals.tenant, num_bytes, totals.quota)
        commit.evict_above(at_most=self._most_evicted)

    def _prepare_next_commit(self, commit: CatalogTransaction, room: Room) -> None:
        """Make room for the next commit within the transaction of this one: free the reserved
        extents that the batch did not need, evict down to the low watermark, return disk space that
        the catalogue may need, and reserve extents."""
        # None: this process has not reserved anything yet
        writer = self._environment.writer
        if writer is not None:
            self._release_unused(room.payloads, writer)

        goal = room.low_watermark()
        commit.evict(lambda: room.uses_at_most(goal), at_most=self._most_evicted)
        # Shrink the segments to their limit: the rest of the capacity is for the catalogue. This
        # follows the eviction, because only the space of free pages can be returned.
        room.payloads.shrink(room.payloads.limit)
        if writer is not None:
            room.reserve_for_next_commit(writer)

    def _release_unused(self, payloads: ExtentPayloads, writer: int) -> None:
        """End the reservation of this process, whose number is ``writer``: free those of its
        extents that no added pack occupies. Remember how much the packs took, because the next
        reservation depends on it."""
        # the packs were written from the beginning of the reservation on
        num_written = sum(map(pages_of, self._placed.values()))
        _written, unused = split(self._reserved, num_written)
        for name, extents in self._placed.items():
            # another process has stored this pack meanwhile, so its extents are unused
            if name not in payloads.recorded_packs:
                unused += extents
        num_taken = pages_of(self._reserved) - pages_of(unused)
        self._environment.recent_commit_bytes.append(num_taken * PAGE_BYTES)
        payloads.allocator.reserve(writer, extents=())
        payloads.allocator.make_free(unused)

    def _mark_unrecorded(self, room: Room) -> None:
        """Mark packs as not written (``NewPack.written``) whose payloads this commit has written,
        but whose rows another process has recorded before."""
        for pack in self._batch.packs:
            name = self._namespace + pack.pack_id
            if name in self._placed and name not in room.payloads.recorded_packs:
                pack.restart()

    def _read_reserved(self, rows: TableRows) -> list[Extent]:
        """Return the extents that are reserved for this process, as LMDB records them."""
        writer = self._environment.writer
        # without a number, this process has never reserved any extent
        if writer is None:
            return []
        return read_reserved(rows, writer)

    def _find_lacking(self, rows: TableRows) -> list[NewPack]:
        """Return the packs of the batch that the store does not hold, or that the batch deletes
        before it adds them."""
        # keyed by id, because a batch may contain a pack twice
        added: dict[bytes, NewPack] = {}
        for pack in self._batch.packs:
            if pack.pack_id in added:
                continue
            is_rewritten = pack.pack_id in self._packs_to_delete
            name = self._namespace + pack.pack_id
            if is_rewritten or not holds_pack(rows, name):
                added[pack.pack_id] = pack
        return list(added.values())

    def _unplaced(self) -> list[NewPack]:
        """Return the packs that the store lacks and that the present attempt has not written."""
        unplaced: list[NewPack] = []
        for pack in self._lacking:
            if self._namespace + pack.pack_id not in self._placed:
                unplaced.append(pack)
        return unplaced

    def write_after_eviction(self) -> CommitResult:
        """Evict in short transactions, and write a batch for which ``write`` raised a
        StoreFullError.

        If the batch still does not fit, evict more and try again (``_EXTRA_MULTIPLES``).

        :raises StoreFullError: nothing evictable is left, the free pages are too fragmented, or a
            reader's snapshot still needs the evicted packs. The batch is not written; evicted packs
            stay evicted.
        """
        # the entries of dead readers would keep pages from reuse
        self._environment.database.clear_readers()
        # forget the written packs: the evictions below release the reservation that holds them
        self._placed.clear()
        if not self._batch.packs and not self._batch.manifests:
            return self._write_deletions()
        for multiple in _EXTRA_MULTIPLES:
            are_reusable = self._evict_and_wait(multiple)
            self._restart_packs()
            try:
                return self.write()
            except StoreFullError:
                # The pages are not reusable: a stopped reader still sees the evicted packs. It
                # would keep the pages of further evicted packs, too, so evict no more.
                is_last = multiple == _EXTRA_MULTIPLES[-1]
                if is_last or not are_reusable:
                    raise
        raise AssertionError("the last attempt returns or raises")

    def _evict_and_wait(self, multiple: int) -> bool:
        """Make room for the batch in short transactions; return whether the pages of the evicted
        packs are reusable.

        :param multiple: as in ``_evict_for_batch``.
        """
        environment = self._environment
        with environment.transaction() as rows:
            used_before = rows.used_bytes()
        evict = partial(self._evict_for_batch, multiple, used_before)
        self._repeat_deletions(
            evict,
            at_once=self._most_evicted,
            most_transactions=_TRANSACTIONS,
        )
        # LMDB reuses the pages after another commit, and once no reader has a snapshot from before
        # the last eviction
        last_eviction = environment.commit_nothing()
        return environment.database.wait_for_readers(last_eviction, _PATIENCE_S)

    def _write_deletions(self) -> CommitResult:
        """Write a batch that only deletes, for which ``write`` found no free pages."""
        # Deletions need few pages. The pages that the last transaction freed may be enough, and the
        # empty commit makes them reusable.
        self._environment.commit_nothing()
        # For each pack that more than one manifest names, first delete these manifests in short
        # transactions, which need even fewer pages. ``write`` deletes the remaining ones.
        self._drop_shared_manifests(shared_by=1)
        return self.write()

    def _repeat_deletions(
        self,
        delete_some: Callable[[int], bool],
        at_once: int,
        most_transactions: int = _NO_LIMIT,
    ) -> None:
        """Call ``delete_some`` until it returns False. If the disk is too full for a transaction,
        retry with one deletion, then raise the number step by step.

        :param delete_some: runs one transaction with at most the given number of deletions; returns
            whether more are needed.
        :param at_once: maximum number of deletions of a transaction.
        :param most_transactions: maximum number of transactions.
        :raises StoreFullError: not even one deletion fits.
        """
        at_most = at_once  # maximum number of deletions in the next transaction
        for _ in range(most_transactions):
            try:
                if not delete_some(at_most):
                    return
            except _NothingLeftError:
                # fewer deletions in a transaction would not help: nothing is left to evict
                raise
            except StoreFullError:
                if at_most == 1:
                    raise
                # Deletions write new pages, too, and a full disk has few. The empty commit makes
                # those reusable that the last transaction freed.
                at_most = 1
                self._environment.commit_nothing()
            else:
                # after a success with fewer deletions, return to ``at_once`` in steps
                at_most = min(4 * at_most, at_once)
            let_others_run()

    @contextmanager
    def _short_transaction(
        self,
        *,
        without_growth: bool = False,
    ) -> Iterator[tuple[CatalogTransaction, Room]]:
        """Run a short transaction before the one that writes the batch. Yield its catalogue and
        room. After its commit, its evictions count as those of this commit, and its changes do not
        make the batch stale.

        :param without_growth: as in ``Room``.
        """
        with self._environment.transaction(write=True) as transaction:
            commit, room = self._prepare_transaction(
                transaction, without_growth=without_growth
            )
            yield commit, room
            commit.finish()
        self._after_commit(commit)

    def _prepare_transaction(
        self,
        transaction: TableRows,
        *,
        without_growth: bool = False,
    ) -> tuple[CatalogTransaction, Room]:
        """Prepare a write transaction of this commit: check that the batch may still be written,
        and set ``_lacking`` to the packs that the store lacks now.

        Return the transaction's catalogue, and its room: the part of the capacity that it may use,
        and what the batch needs of it.

        :param without_growth: as in ``Room``.
        :raises TenantForgottenError: a tenant of the batch was forgotten, or is being forgotten.
        :raises StaleError: other commits make the batch stale.
        :raises QuotaExceededError: its packs cannot fit the quota of their tenant.
        """
        tenants = tenants_of(self._batch)
        # First refuse tenants that were forgotten since the content was accepted. Then refuse
        # tenants that a process is forgetting now, because that process may miss the content that
        # this commit adds.
        self._environment.database.keys.check_not_forgotten(tenants, self._forgotten)
        self._environment.check_not_being_forgotten(transaction, tenants)
        room = Room(self._environment, transaction, without_growth=without_growth)
        opened = self._environment.opened_namespaces
        commit = CatalogTransaction(
            transaction, room.payloads, self._namespace, self._keep, opened=opened
        )
        self._check_not_stale(transaction, commit.cursor)
        self._lacking = self._find_lacking(transaction)
        sizes = bytes_by_tenant(self._lacking)
        self._check_quotas(transaction, sizes)
        # announce the sizes, so that evictions begin with tenants that this batch makes exceed
        # their quotas
        commit.quotas.expect(sizes)
        rows_bytes = rows_bound(self._lacking, self._batch.manifests)
        # a batch that adds nothing begins no namespace
        if rows_bytes:
            rows_bytes += commit.beginning_bytes
        room.expect(self._lacking, self._unplaced(), rows_bytes)
        return commit, room

    def _check_quotas(
        self,
        rows: TableRows,
        sizes: Mapping[str, int],
    ) -> None:
        """Raise a QuotaExceededError if packs are larger than the quota of their tenant, or do not
        fit it and the tenant has no pack that may be evicted. Called before the packs are written
        and room is made for them.

        :param sizes: upper bounds of the packs' bytes, which the codec has not encoded yet, by
            tenant.
        """
        # a batch with deletions may need no additional room
        if self._packs_to_delete:
            return
        quotas = Quotas(rows)
        for tenant, num_bytes in sizes.items():
            totals = quotas.of(tenant)
            if totals.quota is None or not totals.is_above(num_bytes):
                continue
            # A pack of the tenant may be evicted, unless this batch uses it. Only the transaction
            # of the batch finds out (``_enforce_quotas``).
            has_evictable = rows.has_prefix(TENANT_ORDER, rows.tenant_digest(tenant))
            if num_bytes > totals.quota or not has_evictable:
                raise QuotaExceededError(tenant, num_bytes, totals.quota)

    def _check_not_stale(self, rows: TableRows, cursor: bytes) -> None:
        """Raise a StaleError if other commits changed the namespace after ``_seen``. But if the
        batch names the packs that it needs, and the store holds all of them, set ``_interleaved``
        instead: the batch is written, and the caller must apply the changes of these commits.

        :param cursor: present position in the change log.
        """
        if self._seen is None or is_current(cursor, self._seen):
            return
        if self._batch.needs is None:
            raise StaleError
        for pack_id in self._batch.needs:
            if rows.get(PACKS, self._namespace + pack_id) is None:
                raise StaleError
        self._interleaved = True

    def _after_commit(self, commit: CatalogTransaction) -> None:
        """After a transaction was committed, remember its evicted packs and the namespace's
        position in the change log. Delete the files of namespaces that have lost all content."""
        self._evicted += commit.evicted
        self._environment.delete_files_of(commit.ended)
        if self._seen is not None:
            self._seen = commit.cursor

    def _drop_shared_manifests(self, shared_by: int) -> None:
        """For each pack that the batch deletes and that more than ``shared_by`` manifests name,
        delete these manifests in short transactions. The batch's own transaction deletes the other
        manifests, and the packs.
        """
        for pack_id in self._shared_by_more_than(self._batch.deletions, shared_by):
            self._drop_manifests_of(pack_id, keep_later=False)
        # keep the packs that follow a bad pack: they are of use again once an engine has stored the
        # blocks of the bad pack again
        for pack_id in self._shared_by_more_than(self._batch.bad, shared_by):
            self._drop_manifests_of(pack_id, keep_later=True)

    def _shared_by_more_than(
        self,
        pack_ids: Sequence[bytes],
        shared_by: int,
    ) -> list[bytes]:
        """Return the ids of the packs that more than ``shared_by`` manifests name."""
        shared: list[bytes] = []
        if not pack_ids:
            return shared
        with self._environment.transaction() as rows:
            for pack_id in pack_ids:
                # one row per manifest that names the pack; at most ``shared_by`` + 1 are read
                links = rows.starting_with(LINKS, self._namespace + pack_id)
                first_beyond = next(islice(links, shared_by, None), None)
                if first_beyond is not None:
                    shared.append(pack_id)
        return shared

    def _drop_manifests_of(self, pack_id: bytes, *, keep_later: bool) -> None:
        """Delete all manifests that name a pack, in short transactions.

        :param keep_later: keep the packs that follow this one in the manifests. False: delete those
            that no other manifest names.
        """
        drop = partial(self._drop_some_manifests, pack_id, keep_later=keep_later)
        self._repeat_deletions(drop, at_once=_DROPPED_AT_ONCE)

    def _drop_some_manifests(
        self, pack_id: bytes, at_most: int, *, keep_later: bool
    ) -> bool:
        """Delete at most ``at_most`` manifests that name a pack in one transaction; return whether
        more name it.

        :param keep_later: as in ``_drop_manifests_of``.
        """
        with self._short_transaction() as (commit, room):
            more = commit.drop_manifests_of(pack_id, at_most, keep_later=keep_later)
            # record that the packs were deleted with the manifests: a rebuild must not find them
            names = _names_of(commit.evicted)
            self._environment.record_erasure(room.transaction, names)
        return more

    def _evict_for_batch(
        self,
        multiple: int,
        used_before: int,
        at_most: int,
    ) -> bool:
        """Make room for the batch in one transaction; return whether more must be evicted.

        :param multiple: 0: evict as much as the capacity requires. Otherwise the free pages were
            not usable: additionally evict this multiple of the batch's bytes, and assume that no
            file can grow.
        :param used_before: used bytes of the catalogue before the first transaction that evicts for
            this multiple, from which the multiple is subtracted.
        :param at_most: maximum number of packs and manifests to evict.
        :raises StoreFullError: nothing evictable is left, or the disk has no space for these
            deletions; nothing changed.
        """
        needs_more_free = multiple > 0
        with self._short_transaction(without_growth=needs_more_free) as (commit, room):
            self._environment.release_reserved(room.transaction, include_own=True)
            commit.touch(self._batch.touches)
            if not room.fits_when_empty():
                raise _NothingLeftError(str(room.full_error()))
            goal = room.low_watermark().minus(room.need)
            if needs_more_free:
                # evict more only from the catalogue: values in LMDB need contiguous pages, payloads
                # in segments do not
                left_bytes = used_before - multiple * room.need.catalogue
                goal = goal._replace(catalogue=min(goal.catalogue, left_bytes))
            end = commit.evict(lambda: room.uses_at_most(goal), at_most)
            if end is EvictionEnd.NOTHING_LEFT:
                self._check_can_retry(commit, room)
            can_shrink_more = room.payloads.shrink(room.payloads.limit)
        return end is EvictionEnd.LIMIT_REACHED or can_shrink_more

    def _check_can_retry(self, commit: CatalogTransaction, room: Room) -> None:
        """Raise a _NothingLeftError unless another attempt to write the batch may succeed: it fits
        the limit now, and this commit has evicted something. Called when no pack is left to
        evict, although the low watermark is not reached."""
        has_evicted = bool(self._evicted or commit.evicted)
        if not has_evicted or not room.fits_batch():
            raise _NothingLeftError(str(room.full_error()))

    def _evict_some_of_tenant(
        self,
        tenant: str,
        num_bytes: int,
        at_most: int,
    ) -> bool:
        """Evict some packs of a tenant in one transaction, so that ``num_bytes`` more will fit its
        quota; return whether more must be evicted."""
        with self._short_transaction() as (commit, room):
            commit.touch(self._batch.touches)
            commit.quotas.expect({tenant: num_bytes})
            digest = room.transaction.tenant_digest(tenant)
            end = commit.fit_quota(digest, at_most)
        return end is EvictionEnd.LIMIT_REACHED


def _names_of(tables: Iterable[PackTable]) -> set[bytes]:
    """Return the names of packs: namespace and pack id."""
    return {table.namespace + table.pack_id for table in tables}


def let_others_run() -> None:
    """Pause between two transactions: other threads of the process get the GIL, and other writers
    the lock."""
    time.sleep(_TURN_S)


def enforce_policy(environment: Environment) -> None:
    """Evict until the store fits its capacity and its quotas, in short transactions; return the
    space to the file system.

    :raises StoreError: a transaction failed; those before it stay in effect, and later commits
        evict the rest.
    """
    while _evict_excess(environment):
        let_others_run()


def _evict_excess(environment: Environment) -> bool:
    """Evict some of what exceeds the quotas and the capacity, in one transaction; return whether
    another one is needed: packs are left to evict, or free space to return."""
    with environment.transaction(write=True) as transaction:
        environment.release_reserved(transaction)
        room = Room(environment, transaction)
        commit = CatalogTransaction(
            transaction,
            room.payloads,
            _NO_NAMESPACE,
            opened=environment.opened_namespaces,
        )
        # evict for the quotas first, which may make enough room
        end = commit.evict_above(_EVICTED_AT_ONCE)
        if end is not EvictionEnd.LIMIT_REACHED:
            end = commit.evict(lambda: room.uses_at_most(room.limit), _EVICTED_AT_ONCE)
        can_shrink_more = room.payloads.shrink(room.payloads.limit)
        commit.finish()
    environment.delete_files_of(commit.ended)
    return end is EvictionEnd.LIMIT_REACHED or can_shrink_more


def release_free(environment: Environment) -> None:
    """Return all free space of the segments to the file system, in short transactions.

    :raises StoreError: a transaction failed; space that was returned before stays returned.
    """
    # ``writing``: no thread of this process may be writing into the extents to release
    with environment.writing(), environment.transaction(write=True) as transaction:
        environment.release_reserved(transaction, include_own=True)
    can_shrink_more = True
    while can_shrink_more:
        # no thread writes into free extents, so other commits may run between the transactions
        with environment.transaction(write=True) as transaction:
            can_shrink_more = environment.prepare_payloads(transaction).shrink(limit=0)
        let_others_run()
