"""The one task that changes a store's catalogue: commits, refreshes, and the removal of damaged
packs, one after another. The index therefore applies changes in order."""

from __future__ import annotations

import asyncio
import math
import time
from collections import deque
from collections.abc import Awaitable, Collection, Iterable, Sequence
from copy import copy
from typing import NamedTuple

from persistkv.config import parse_durability
from persistkv.errors import QuotaExceededError, StoreError, TenantForgottenError
from persistkv.memory.budget import MemoryShares
from persistkv.storage.backend import CommitBatch, CommitResult, ManifestWrite
from persistkv.storage.format.pack_writer import PackWriter
from persistkv.storage.identity.canary import Canary
from persistkv.storage.records import RequestEnd, StoreCounters, StoreOptions
from persistkv.storage.store.commit_pipeline import Transaction
from persistkv.storage.store.commit_queue import CommitQueue
from persistkv.storage.store.manifests import make_manifest
from persistkv.storage.store.namespace_view import NamespaceView
from persistkv.storage.threads import resolve

# repetitions of a commit that was refused because another process had committed first; the last
# repetition is made without this check
_STALE_RETRIES = 2
# seconds since the last commit after which uses of packs are committed even if no block waits
_TOUCH_S = 2.0
# seconds between empty commits, which give the backend a chance to expire old packs
_EXPIRE_S = 30.0


class _Attempt(NamedTuple):
    """A commit that was executed."""

    batch: CommitBatch
    """Without the packs of the transaction whose blocks were all held already."""
    persisted: Sequence[tuple[str, bool]]
    """``StoreReport.persisted`` of the requests."""
    result: CommitResult


class Committer:
    """Commits the work in a queue, and applies the changes of other processes to the index."""

    def __init__(
        self,
        view: NamespaceView,
        queue: CommitQueue,
        counters: StoreCounters,
        options: StoreOptions,
        canary: Canary,
    ) -> None:
        """:param canary: the namespace of another engine release, which is compared and adopted."""
        self._view = view
        self._queue = queue
        self._counters = counters
        self._canary = canary
        self._memory = MemoryShares.of(options.staging_bytes).transaction
        """Bytes of encoded packs that the driver of a remote store may hold at once in a commit."""
        interval_s = parse_durability(options.durability) or 0.0
        self._touch_s = max(_TOUCH_S, interval_s)
        """Seconds after a commit at which uses of packs are committed, also if no blocks are."""
        self._refresh_s = options.refresh_s
        self._attempted_at = time.monotonic()
        """When the last attempt of a transaction ended, by ``time.monotonic``."""
        self._refresh_at = self._attempted_at + options.refresh_s
        """When the next refresh is due, by ``time.monotonic``."""
        self._flushes: list[asyncio.Future[None]] = []
        """One for each call of ``flush`` that waits: done at the end of the next ``_commit``."""
        self.has_work = asyncio.Event()
        """Set by other tasks to have ``run`` look for due work now."""
        self.turn = asyncio.Lock()
        """Held during ``work``. Another task that changes the catalogue acquires it, too."""
        self.changed = asyncio.Event()
        """Set when the index or the report may have changed; the owner clears it."""

    async def run(self) -> None:
        """Do the work as it becomes due, until the task is cancelled."""
        loop = asyncio.get_running_loop()
        while True:
            # Clear the event before looking for work: work that becomes due later sets it again.
            self.has_work.clear()
            seconds = self.seconds_to_due()
            if seconds > 0:
                # use a timer, because ``asyncio.timeout`` is several times as expensive
                timer = loop.call_later(seconds, self.has_work.set)
                await self.has_work.wait()
                timer.cancel()
            else:
                await self.work()

    def seconds_to_due(self) -> float:
        """Return the seconds until one of the steps of ``work`` is due; 0: now."""
        view = self._view
        if self._flushes or view.needs_repair or view.index.replacing:
            return 0.0
        if self._canary.needs_update:
            return 0.0
        next_at = min(self._refresh_at, self._upkeep_at())
        until_timed_work = max(0.0, next_at - time.monotonic())
        return min(until_timed_work, self._queue.seconds_to_due())

    def _is_commit_due(self) -> bool:
        """Return whether a call of ``flush`` waits, or accepted blocks, request ends, uses or the
        expiry of packs are due."""
        if self._flushes or time.monotonic() >= self._upkeep_at():
            return True
        return self._queue.seconds_to_due() == 0

    def _upkeep_at(self) -> float:
        """Return when a commit without blocks is due, for uses or the expiry of packs, by
        ``time.monotonic``."""
        if not self._view.backend.capabilities.writable:
            return math.inf
        wait_s = self._touch_s if self._queue.uses else _EXPIRE_S
        return self._attempted_at + wait_s

    async def flush(self) -> None:
        """Have the next round of ``work`` commit all accepted work; return when it is durable, or
        dropped and counted. Errors are not raised."""
        flushed = asyncio.get_running_loop().create_future()
        self._flushes.append(flushed)
        self.has_work.set()
        await flushed

    async def work(self) -> None:
        """Do the steps that are due (``seconds_to_due``): a slice of the index's replacement, the
        removal of damaged packs, the update of the canary, a commit, a refresh. Each step looks
        for itself whether it is due, because it may have become so during the previous ones."""
        view = self._view
        async with self.turn:
            # one slice in each call, so that a large table delays a commit by a few ms only
            if view.index.replacing:
                view.index.replace_some()
                await asyncio.sleep(0)  # let other tasks run between two slices
            # repair before the commit, because a damaged block must not count as held
            if view.needs_repair:
                await self.repair()
            if self._canary.needs_update:
                await self._forgetting(self._canary.update())
            if self._is_commit_due():
                await self._commit()
            # refresh last, so that accepted blocks do not wait for it
            if time.monotonic() >= self._refresh_at:
                self._refresh_at = time.monotonic() + self._refresh_s
                await view.refresh_or_log()
                await self._canary.refresh()
            self.changed.set()

    async def repair(self) -> None:
        """Call ``NamespaceView.repair``. The caller holds ``turn``, or no other task commits."""
        await self._forgetting(self._view.repair())

    async def _forgetting(self, work: Awaitable[None]) -> None:
        """Await work that may commit. If the backend reports tenants as forgotten, drop their
        accepted content."""
        try:
            await work
        except TenantForgottenError as error:
            self.forget(error.tenants)

    # Commits

    async def _commit(self) -> None:
        """Commit the due work in as few transactions as possible; those that fail are divided
        (``_after_failure``) until each part is durable or dropped."""
        flushes = self._flushes
        self._flushes = []
        waiting = self._queue.take(everything=bool(flushes))
        is_upkeep_due = time.monotonic() >= self._upkeep_at()
        # Commit even without blocks: an empty commit records the uses, and lets the backend
        # expire packs.
        if not waiting and (self._queue.uses or is_upkeep_due):
            waiting.append(Transaction([]))
        # The first transaction that succeeds also commits the uses. If none does, they are lost,
        # which affects only the order of eviction.
        uses = list(self._queue.uses)
        self._queue.uses = {}
        while waiting:
            # remove the transaction, because ``waiting`` would keep its copies of blocks
            transaction = waiting.popleft()
            error = await self._try_commit(transaction, uses)
            if error is None:
                uses = []
            else:
                waiting = self._after_failure(transaction, error, waiting)
            self._attempted_at = time.monotonic()
        # all work that was accepted before these flushes is durable, or dropped and counted
        for flushed in flushes:
            resolve(flushed, None)

    def _after_failure(
        self,
        failed: Transaction,
        error: StoreError,
        waiting: deque[Transaction],
    ) -> deque[Transaction]:
        """Return the transactions to try next: the parts of the failed one, then those that wait.

        The parts are single packs and ends of requests, so that a pack that does not fit is dropped
        alone. If a tenant is above its quota, and others have packs in the transaction, there are
        only two parts: the content of the others, and that of the tenant. A single pack or end has
        no parts: it is dropped.
        """
        if isinstance(error, TenantForgottenError):
            return self._without_tenants(error.tenants, [failed, *waiting])
        tenant_over_quota = (
            error.tenant if isinstance(error, QuotaExceededError) else None
        )
        parts = failed.split(tenant_over_quota)
        if not parts:
            self._drop_transaction(failed, tenant_over_quota)
        # ``extendleft`` adds one part after the other in front, which reverses their order
        waiting.extendleft(reversed(parts))
        return waiting

    async def _try_commit(
        self,
        transaction: Transaction,
        uses: Sequence[bytes],
    ) -> StoreError | None:
        """Commit, and apply the result. Return why the commit failed, which is logged; None: it did
        not."""
        view = self._view
        try:
            done = await self._commit_current(transaction, uses)
        except StoreError as error:
            # keep a copy without the traceback, which references the rows of blocks
            failure: StoreError = copy(error)
        except (OSError, MemoryError) as error:
            # the backend did not raise this: this process lacks memory or descriptors
            failure = StoreError(describe_shortage(error))
        else:
            await self._apply_result(transaction, done)
            return None
        view.log_failure(failure)
        # the failed commit may have evicted packs
        await view.refresh_or_log()
        return failure

    async def _apply_result(self, transaction: Transaction, done: _Attempt) -> None:
        """Apply the result of a commit that succeeded."""
        view = self._view
        batch = done.batch
        # without ``seen``, the driver has not checked for commits of other processes
        is_checked = batch.seen is not None
        follows_cursor = is_checked and not done.result.interleaved
        await view.apply_own_commit(
            batch.packs, done.result, follows_cursor=follows_cursor
        )
        for writer in transaction.packs:
            # a pack that the batch lacks was not written: all its blocks were held already
            if writer not in batch.packs:
                self._counters.held_blocks += len(writer.keys)
            self._queue.end_pack(writer, is_durable=True)
        view.report.persisted += done.persisted
        self.changed.set()

    def _without_tenants(
        self,
        tenants: Collection[str],
        waiting: Iterable[Transaction],
    ) -> deque[Transaction]:
        """Drop all accepted content of tenants that were forgotten; return the transactions without
        it."""
        self.forget(tenants)
        kept: deque[Transaction] = deque()
        for transaction in waiting:
            own, others = transaction.divided(tenants)
            self._drop_transaction(own)
            if others.packs or others.ends:
                kept.append(others)
        return kept

    def forget(self, tenants: Collection[str]) -> None:
        """Drop the accepted content of forgotten tenants that no transaction has taken. Each
        ``TenantForgottenError`` must lead here, because the backend raises it only once."""
        writers = self._queue.take_tenants(tenants)
        ends = self._queue.ends.take_tenants(tenants)
        self._drop_transaction(Transaction(writers, ends))

    def _drop_transaction(
        self, transaction: Transaction, tenant_over_quota: str | None = None
    ) -> None:
        """Drop the packs and ends of requests of a failed transaction, and count and report them.

        :param tenant_over_quota: the tenant whose quota it did not fit; None: it failed otherwise.
        """
        if tenant_over_quota is not None:
            for writer in transaction.packs:
                self._counters.quota_blocks += len(writer.keys)
        persisted = self._view.report.persisted
        for end in transaction.ends:
            # False, because the context is not durable
            persisted.append((end.request, False))
        self.drop_packs(transaction.packs)

    def drop_packs(self, writers: Iterable[PackWriter]) -> None:
        """Drop packs, and count their blocks. Their rows are free then."""
        for writer in writers:
            self._counters.dropped_blocks += len(writer.keys)
            self._counters.dropped_bytes += writer.raw_length
            self._queue.end_pack(writer, is_durable=False)
        self.changed.set()

    async def _commit_current(
        self,
        transaction: Transaction,
        uses: Sequence[bytes],
    ) -> _Attempt:
        """Commit; if other processes have committed since the last refresh, refresh and repeat.

        :raises StoreError, OSError, MemoryError: the commit failed.
        """
        for _ in range(_STALE_RETRIES):
            # With a cursor, the driver refuses a batch that other commits made stale: its blocks
            # may be held by now, or its manifests may name packs that were evicted.
            cursor = self._view.cursor
            done = await self._attempt(transaction, uses, seen=cursor)
            if not done.result.stale:
                return done
            await self._view.refresh()
        # a busy store must not starve this engine: the last attempt may store some blocks twice
        return await self._attempt(transaction, uses, seen=None)

    async def _attempt(
        self,
        transaction: Transaction,
        uses: Sequence[bytes],
        *,
        seen: bytes | None,
    ) -> _Attempt:
        """Commit a transaction once.

        :param uses: ids of packs that were used since the last commit.
        :param seen: ``CommitBatch.seen``.
        """
        # ``needs`` are ids of packs that must still be held when the batch is written; those that
        # the manifests name are added below
        writers, needs = await self._without_held(transaction.packs)
        pack_of = await self._pack_of(writers, transaction.ends)
        manifests: list[ManifestWrite] = []
        pins: list[tuple[str, bool]] = []
        persisted: list[tuple[str, bool]] = []
        for end in transaction.ends:
            manifest, whole = make_manifest(end, pack_of, self._view.block_bytes)
            persisted.append((end.request, whole))
            if manifest is None:
                continue
            manifests.append(manifest)
            needs.update(manifest.packs)
            if end.retention.pin:
                pins.append((end.manifest_id, True))
        # packs that the batch itself writes need not be held before
        needs.difference_update(writer.pack_id for writer in writers)
        batch = CommitBatch(
            packs=writers,
            manifests=manifests,
            touches=uses,
            pins=pins,
            seen=seen,
            needs=list(needs),
            memory=self._memory,
        )
        result = await self._view.commit(batch)
        return _Attempt(batch, persisted, result)

    async def _without_held(
        self,
        packs: Iterable[PackWriter],
    ) -> tuple[list[PackWriter], set[bytes]]:
        """Return the packs to write: those with a block that the store lacks. The other packs need
        not be written: return also the ids of the store's packs that hold their blocks.

        :raises StoreError: the key tables could not be read.
        """
        to_write: list[PackWriter] = []
        holding: set[bytes] = set()
        for writer in packs:
            # Most packs are new: one probe shows that the first block is absent, instead of one
            # probe for each block.
            first_key = writer.sections[0].keys[0]
            if first_key not in self._view.index:
                to_write.append(writer)
                continue
            pack_of = await self._view.pack_of(writer.keys.unpack())
            if len(pack_of) == len(writer.keys):
                holding.update(pack_of.values())
            else:
                to_write.append(writer)
        return to_write, holding

    async def _pack_of(
        self,
        writers: Iterable[PackWriter],
        ends: Sequence[RequestEnd],
    ) -> dict[bytes, bytes]:
        """Return the id of a pack for each key that is held or that ``writers`` add, at least for
        all such keys of the ended requests. A held pack takes precedence over a new one.

        :raises StoreError: the key tables could not be read.
        """
        if not ends:
            return {}
        new_pack_of: dict[bytes, bytes] = {}
        for writer in writers:
            new_keys = writer.keys.unpack()
            new_pack_of.update(dict.fromkeys(new_keys, writer.pack_id))
        keys: dict[bytes, None] = {}  # an ordered set: many requests share keys
        for end in ends:
            for group in end.group_keys:
                keys.update(dict.fromkeys(group))
        held_pack_of = await self._view.pack_of(list(keys))
        return new_pack_of | held_pack_of


def describe_shortage(error: Exception) -> str:
    """Describe a lack of memory or descriptors. Callers keep this text instead of the exception,
    which references rows. An exception without a text is a MemoryError."""
    return str(error) or "no memory is left"
