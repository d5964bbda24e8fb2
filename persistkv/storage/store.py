"""One open namespace of one store: put, contains, read into rows, end requests, flush.

Invariants of this file:

1. A key is in the index if and only if, as of the last refresh, a committed pack holds it and no
   read has found that pack bad. Hints, which are keys of an adopted namespace, are the only
   exception.
2. The store may read the rows passed to ``put`` until ``put`` returns True or ``in_flight`` returns
   none of their keys.
3. When ``begin_read`` reports its outcome, a row holds the bytes stored under its key, or the
   outcome lists the key as failed. The store does not write the rows after that.
4. A key is absent, in flight (a transaction reads its row, or will), staged (the block was copied
   to staging memory), or held (durable). Only absent keys are accepted. If a transaction fails, its
   keys are absent again.
5. If a transaction fails, its blocks are dropped and counted in ``StoreCounters``. The store stays
   usable.

Uses of packs (loads, touches, stores of keys that are held already, manifests) are sent to the
backend with the next commit, because eviction is by last use. All state belongs to one thread.
Calls that may block run on the ``Executor``.
"""

from __future__ import annotations

import logging
import math
import time
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from itertools import islice

from persistkv.base import get_offload_group_idx
from persistkv.config import parse_durability
from persistkv.errors import IdentityMismatchError, StoreError
from persistkv.memory.budget import MemoryShares
from persistkv.memory.rows import Rows
from persistkv.storage.backend import Backend, CommitBatch
from persistkv.storage.commit_pipeline import (
    DIRECT_BYTES,
    Blocks,
    Staging,
    Transaction,
    divide,
    plan_packs,
)
from persistkv.storage.executor import Executor
from persistkv.storage.format.codec import parse_codec
from persistkv.storage.format.pack import UNKNOWN_DEPTH
from persistkv.storage.format.pack_writer import PackWriter, Segment
from persistkv.storage.identity import Identity
from persistkv.storage.identity.canary import Canary
from persistkv.storage.index import HeldPack, Index
from persistkv.storage.load import (
    ReadOutcome,
    Scratch,
    part_bytes,
    plan_reads,
    read_part,
)
from persistkv.storage.namespace_view import NamespaceView, make_manifest
from persistkv.storage.records import News, RequestEnd, StoreCounters, StoreOptions

logger = logging.getLogger(__name__)

# repetitions of a commit that another process overtook; the last one does not check for that
_STALE_RETRIES = 2
# seconds since the last commit after which uses of packs are committed without blocks
_TOUCH_S = 2.0
# bound on packs with a pending use: each costs the commit about 10 µs
_MAX_TOUCHED = 4096
# namespaces of a remote store with which a new identity is compared: each costs a request
_COMPARED_REMOTELY = 16
# bound on a remote transaction, as a multiple of that of a local one
_REMOTE_FACTOR = 16
# seconds between empty commits, which give the backend a chance to expire old packs
_EXPIRE_S = 30.0


class Store:
    """One open namespace of a store: accepts blocks, commits them as packs, loads them into rows.
    Not thread-safe."""

    def __init__(
        self,
        backend: Backend,
        identity: Identity,
        rows: Rows,
        options: StoreOptions,
        *,
        url: str,
        executor: Executor | None = None,
    ) -> None:
        """Open the namespace of ``identity``, which the first commit begins if it has no content.

        This object then owns and closes the backend; if this raises, the caller still owns it.

        :param url: URL of the store, for messages only.
        :param executor: runs the blocking calls; by default they run on the caller's thread. The
            caller closes it.
        :raises ConfigurationError: ``options`` has an invalid codec or durability; nothing was
            written.
        :raises IdentityMismatchError: ``strict_identity`` is set and the store holds only other
            identities; nothing was written.
        :raises StoreError: the namespace cannot be opened or read.
        """
        self.codec = parse_codec(options.codec)
        self._interval_s = parse_durability(options.durability)
        self.options = options
        self.rows = rows
        self.counters = StoreCounters()
        self.notice = _notice(backend, identity, options, url)
        """Fields that differ from the nearest namespace, if this one is new and others exist.
        Otherwise empty."""
        backend.open_namespace(identity)
        self.namespace = identity.digest
        executor = executor or Executor()
        self.catalogue = NamespaceView(
            backend, self.namespace, executor, self.counters, rows.layout, options
        )
        self.canary: Canary | None = None
        """Compares and serves another engine release's namespace; None if blocks cannot or must not
        be compared."""
        if rows.layout.numbers is not None and options.adopt == "canary":
            self.canary = Canary(self.catalogue, identity, rows, options)
        self._writable = backend.capabilities.writable
        self._shares = MemoryShares.of(options.staging_bytes)
        self._remote = backend.capabilities.remote
        self._copies_all = self._interval_s is not None or self._remote
        self._scratch = Scratch(self._shares.part)
        waits_s = options.max_age_s if self._interval_s is None else self._interval_s
        self._staging = Staging(
            self._shares.staged, waits_s, gather_all=self._interval_s is not None
        )
        self._direct: list[PackWriter] = []
        self._flying: set[bytes] = set()
        self._ends: list[RequestEnd] = []
        self._ends_bytes = 0
        self._ends_since = 0.0
        self._touched: dict[bytes, None] = {}
        self._commit_waits = False
        self._everything = False
        self._when_committed: list[Callable[[], None]] = []
        self._committed_at = self._refreshed = time.monotonic()
        self.ended_packs = 0
        """Number of accepted packs that became durable or were dropped. ``in_flight`` shrinks only
        when it changes."""

    # Index

    @property
    def index(self) -> Index:
        """Index of the packs that are durable in this namespace and can be read; with an adopted
        namespace, ``in`` and ``len`` include its keys."""
        return self.catalogue.index

    def contains(self, key: bytes) -> bool:
        """Whether the key, or one with the same fingerprint, is durable here or in an adopted
        namespace."""
        return key in self.index

    def missing(self, keys: Iterable[bytes]) -> list[bytes]:
        """Return the keys whose blocks are neither durable in this namespace nor staged: only a row
        may hold them."""
        return [key for key in self.index.absent(keys) if key not in self._staging]

    def in_flight(self, keys: Iterable[bytes]) -> set[bytes]:
        """Return the keys whose blocks are still to be written from their rows. These rows must not
        change."""
        return self._flying.intersection(keys)

    # Writing

    def begin_put(
        self,
        request: str,
        keys: Sequence[bytes],
        block_ids: Sequence[int],
        depths: Sequence[int] | None,
        then: Callable[[bool, set[bytes]], None],
    ) -> None:
        """Start to accept blocks for storage. Keys that are held, staged or in flight are skipped.

        Packs below 4 MiB are copied to staging memory while it has room; if the store is remote or
        durability is an interval, so are larger ones. The next commit writes all others from the
        rows. A read-only store accepts nothing: new blocks are dropped and counted.

        :param request: the engine's request id. The commit after ``end_request`` with this id
            writes the staged blocks.
        :param block_ids: for each key, the row that holds its block.
        :param depths: for each key, the number of blocks of its group before it in the context;
            None if unknown.
        :param then: called, possibly before this method returns, with two values: whether the rows
            may be reused now (if not, they are read until no key is ``in_flight``), and the keys
            that an earlier call has in flight.
        :raises ValueError: a row or a group does not exist, or there is not one row and depth for
            each key; nothing is accepted.
        """
        depths = [UNKNOWN_DEPTH] * len(keys) if depths is None else depths
        if not len(keys) == len(block_ids) == len(depths):
            raise ValueError(
                f"{len(keys)} keys for {len(block_ids)} rows and {len(depths)} depths"
            )
        self.rows.check(block_ids)
        groups = [get_offload_group_idx(key) for key in keys]
        if max(groups, default=0) >= len(self.rows.layout.groups):
            raise ValueError(
                f"key of group {max(groups)}; there are {len(self.rows.layout.groups)} groups"
            )
        if self._writable:
            blocks = Blocks(keys, groups, block_ids, depths)
            self.catalogue.executor.begin(self._put(request, blocks, then))
        else:
            self._drop(keys)
            then(True, set())

    def _drop(self, keys: Sequence[bytes]) -> None:
        """Count the blocks that a read-only store neither holds nor accepts. Log the first ones."""
        absent = self.index.absent(keys)
        if absent and not self.counters.dropped_blocks:
            logger.warning(
                "the store is open for reading only: dropped %d new blocks; further ones are "
                "only counted",
                len(absent),
            )
        self.counters.dropped_blocks += len(absent)
        for key in absent:
            group = self.rows.layout.groups[get_offload_group_idx(key)]
            self.counters.dropped_bytes += group.block_bytes

    async def _put(
        self, request: str, blocks: Blocks, then: Callable[[bool, set[bytes]], None]
    ) -> None:
        try:
            borrowed = await self._accept(request, blocks)
        except (OSError, MemoryError) as error:
            logger.warning(
                "the blocks of a store job are dropped: %s", _shortage(error)
            )
            # so that the caller finds which of its blocks are missing
            self.ended_packs += 1
            then(False, set())
        else:
            then(self._flying.isdisjoint(blocks.keys), borrowed)

    async def _accept(self, request: str, blocks: Blocks) -> set[bytes]:
        """Stage or queue the blocks that are new; return the keys that an earlier call has in
        flight."""
        keys = blocks.keys
        if self.canary is not None:
            await self.canary.examine(request, blocks)
        try:
            holders = await self.catalogue.holders(keys)
            held = {
                key for key, pack in zip(keys, holders, strict=True) if pack is not None
            }
            self._touch(pack.pack_id for pack in holders if pack is not None)
        except StoreError as error:  # probably held
            self.catalogue.log_failure(error)
            held = set(keys).difference(self.catalogue.index.absent(keys))
        borrowed = self.in_flight(keys)
        position_of = {
            key: position
            for position, key in enumerate(keys)
            if not (key in held or key in borrowed or key in self._staging)
        }
        self.counters.held_blocks += len(keys) - len(position_of)
        if len(position_of) < len(keys):
            blocks = Blocks._make(
                [column[position] for position in position_of.values()]
                for column in blocks
            )
        for segments in plan_packs(self.rows, blocks, self._shares.transaction):
            self._stage_or_queue(request, segments)
        return borrowed

    def _stage_or_queue(self, request: str, segments: Sequence[Segment]) -> None:
        """Copy a pack to staging memory if it is small, or if commits are delayed or remote, and if
        there is room. Otherwise queue it to be written directly from its rows.
        """
        num_bytes = sum(segment.raw_length for segment in segments)
        small = num_bytes < DIRECT_BYTES
        if (small or self._copies_all) and self._staging.fits(num_bytes):
            self._staging.add(request, segments, whole=not small)
            return
        self._direct.append(self._writer(segments))
        for segment in segments:
            self._flying.update(segment.keys)

    def _writer(self, segments: Sequence[Segment]) -> PackWriter:
        executor = self.catalogue.executor
        return PackWriter(
            self.namespace,
            self.codec,
            segments,
            executor.ahead if executor.threads else None,
        )

    @property
    def has_room(self) -> bool:
        """Whether memory is left for another ``put`` or ``end_request``, which do not check
        this."""
        next_one = min(DIRECT_BYTES, self._shares.staged)
        return self._staging.fits(next_one) and self._ends_bytes < self._shares.ends

    def drop_direct(self) -> None:
        """Drop the packs that wait to be written from rows and that no commit has taken yet."""
        writers, self._direct = self._direct, []
        for writer in writers:
            self._ended(writer, False)

    def touch(self, keys: Iterable[bytes]) -> None:
        """Record a use of blocks, for the order of eviction; the next commit stores it. Ignored in
        a read-only store, and while 4,096 packs with a use wait for the commit.
        """
        self._touch(self.index.first_candidates(list(keys)))

    def _touch(self, pack_ids: Iterable[bytes | None]) -> None:
        used = dict.fromkeys(
            pack_id for pack_id in pack_ids if pack_id is not None and self._writable
        )
        self._touched.update(
            dict.fromkeys(islice(used, _MAX_TOUCHED - len(self._touched)))
        )

    def end_request(self, end: RequestEnd) -> None:
        """End a request: the next commit writes its staged blocks and its manifest.

        The next ``tick`` that finds no write running starts the commit; with ``interval:``
        durability, one after the interval at the latest. When it has ended, ``News.persisted``
        reports the request. A read-only store writes nothing and reports it at once.

        :raises ValueError: ``end.group_keys`` has more or fewer groups than the rows; nothing was
            accepted.
        """
        if len(end.group_keys) != len(self.rows.layout.groups):
            raise ValueError(
                f"keys of {len(end.group_keys)} groups; there are {len(self.rows.layout.groups)}"
            )
        if self.canary is not None:
            self.canary.ended(end.request)
        if not self._writable:
            self.catalogue.news.persisted.append((end.request, False))
            return
        if not self._ends:
            self._ends_since = time.monotonic()
        self._ends.append(end)
        self._ends_bytes += end.num_bytes

    @property
    def unwritten(self) -> bool:
        """Whether accepted blocks or request ends are neither durable nor dropped yet."""
        return bool(
            self._direct or self._flying or self._ends or self._staging.num_bytes
        )

    def wants_commit(self) -> bool:
        """Whether packs or manifests of ended requests are due to be written."""
        return bool(
            self._direct
            or (self._staging.num_bytes and self._staging.due())
            or self._ends_due()
        )

    def _ends_due(self) -> bool:
        if not self._ends or self._interval_s is None:
            return bool(self._ends)
        return (
            self._ends_bytes >= self._shares.ends
            or time.monotonic() - self._ends_since >= self._interval_s
        )

    def seconds_to_work(self) -> float | None:
        """Return the seconds until ``tick`` has work; None while a write runs: the executor reports
        its end."""
        if self.index.replacing:
            return 0.0
        if self.catalogue.executor.writing:
            return None
        if self.wants_commit():
            return 0.0
        now = time.monotonic()
        waits = [
            self._refreshed + self.options.refresh_s - now,
            self._seconds_to_upkeep(),
        ]
        if (aged := self._staging.seconds_to_due()) is not None:
            waits.append(aged)
        if self._ends:
            waits.append(self._ends_since + (self._interval_s or 0.0) - now)
        return max(0.0, min(waits))

    def _seconds_to_upkeep(self) -> float:
        """Return the seconds until a commit without blocks is due, for uses or the expiry of
        packs."""
        if not self._writable:
            return math.inf
        touch_s = max(_TOUCH_S, self._interval_s or 0.0)
        return max(
            0.0,
            self._committed_at
            + (touch_s if self._touched else _EXPIRE_S)
            - time.monotonic(),
        )

    def begin_flush(self, then: Callable[[], None] | None = None) -> None:
        """Queue a commit of all accepted work, including work that is accepted before the commit
        starts. Without threads in the executor, the commit runs before this method returns.

        :param then: called on the store's thread when all of this work is durable or dropped.
            Dropped packs are counted in ``counters``; dropped ends of requests are reported in
            ``News.persisted``.
        """
        self._everything = True
        if then is not None:
            self._when_committed.append(then)
        if not self._commit_waits:
            self._commit_waits = True
            self.catalogue.executor.begin_write(self._commit())

    async def _commit(self) -> None:
        """Commit the due work in as few transactions as possible.

        A transaction that fails is split into one for each pack and each end of a request, so that
        a pack that does not fit is dropped alone. The first transaction that succeeds also commits
        the uses.
        """
        self._commit_waits = False
        everything, self._everything = self._everything, False
        then, self._when_committed = self._when_committed, []
        waiting = self._take_due(everything)
        if any(waiting[0][:2]) or self._touched or not self._seconds_to_upkeep():
            uses, self._touched = list(self._touched), {}
            while waiting:
                # not kept: copies of blocks are freed after their transaction
                transaction = waiting.popleft()
                if await self._try_commit(transaction, uses):
                    uses = []
                elif alone := transaction.split():
                    waiting.extendleft(reversed(alone))
                else:
                    self.news.persisted += [
                        (end.request, False) for end in transaction.ends
                    ]
                    for writer in transaction.packs:
                        self._ended(writer, False)
            self._committed_at = time.monotonic()
        for call in then:
            call()

    async def _try_commit(
        self, transaction: Transaction, uses: Sequence[bytes]
    ) -> bool:
        catalogue, (packs, ends) = self.catalogue, transaction
        try:
            for retries_left in reversed(range(_STALE_RETRIES + 1)):
                writers, needs = await self._divide(packs)
                pack_of = await self._pack_of(writers, ends)
                manifests = [
                    make_manifest(end, pack_of, catalogue.block_bytes) for end in ends
                ]
                seen = catalogue.cursor if retries_left else None
                written = [
                    manifest for manifest, _ in manifests if manifest is not None
                ]
                made = zip(ends, manifests, strict=True)
                pins = [
                    (end.manifest_id, True)
                    for end, (write, _) in made
                    if write is not None and end.retention.pin
                ]
                needs.update(pack_id for write in written for pack_id in write.packs)
                needs.difference_update(writer.pack_id for writer in writers)
                batch = CommitBatch(
                    writers,
                    written,
                    touches=uses,
                    pins=pins,
                    seen=seen,
                    needs=list(needs),
                    memory=self._shares.transaction,
                )
                result = await catalogue.commit(batch)
                if not result.stale:
                    break
                await catalogue.refresh()
        except (StoreError, OSError, MemoryError) as error:
            catalogue.log_failure(
                error if isinstance(error, StoreError) else StoreError(_shortage(error))
            )
            await catalogue.refresh_or_log()  # the failed commit may have evicted packs
            return False
        await catalogue.committed(
            writers, result, followed=seen is not None and not result.interleaved
        )
        self.counters.held_blocks += sum(
            len(writer.keys) for writer in set(packs).difference(writers)
        )
        for writer in packs:
            self._ended(writer, True)
        self.news.persisted += [
            (end.request, whole)
            for end, (_, whole) in zip(ends, manifests, strict=True)
        ]
        return True

    async def _divide(
        self, packs: Iterable[PackWriter]
    ) -> tuple[list[PackWriter], set[bytes]]:
        """Return the packs with a block that the store lacks, and the ids of those that hold the
        blocks of the others.

        :raises StoreError: the key tables could not be read.
        """
        lacking: list[PackWriter] = []
        holding: set[bytes] = set()
        for writer in packs:
            holders = await self._holders(writer)
            if holders is None:
                lacking.append(writer)
            else:
                holding.update(holders)
        return lacking, holding

    async def _pack_of(
        self, writers: Iterable[PackWriter], ends: Sequence[RequestEnd]
    ) -> dict[bytes, bytes]:
        """Return the id of a pack for each key of the ended requests that is held, or that
        ``writers`` add.

        :raises StoreError: the key tables could not be read.
        """
        if not ends:
            return {}
        added = {
            key: writer.pack_id for writer in writers for key in writer.keys.unpack()
        }
        keys = dict.fromkeys(
            key for end in ends for group in end.group_keys for key in group
        )
        return added | await self.catalogue.pack_of(list(keys))

    async def _holders(self, writer: PackWriter) -> list[bytes] | None:
        """Return the ids of packs that hold all blocks of a pack to write; None if a block is not
        held."""
        keys = writer.keys.unpack()
        if keys[0] not in self.index:
            return None
        holders = await self.catalogue.holders(keys)
        if None in holders:
            return None
        return [holder.pack_id for holder in holders if holder is not None]

    def _take_due(self, everything: bool) -> deque[Transaction]:
        ends, self._ends, self._ends_bytes = self._ends, [], 0
        staging = self._staging
        due = dict.fromkeys(staging.due(everything=everything))
        for end in ends:
            due.update(dict.fromkeys(staging.of_context(end)))
        writers, self._direct = self._direct, []
        writers += [self._writer(staging.take(pack)) for pack in due]
        # A remote driver holds at most ``CommitBatch.memory`` bytes at once. Its transactions only
        # have to end soon.
        return divide(
            writers,
            ends,
            self._shares.transaction * (_REMOTE_FACTOR if self._remote else 1),
        )

    def _ended(self, writer: PackWriter, written: bool) -> None:
        self.ended_packs += 1
        self._flying.difference_update(writer.keys.unpack())
        self._staging.end(writer.segments)
        writer.release()
        if not written:
            self.counters.dropped_blocks += len(writer.keys)
            self.counters.dropped_bytes += writer.raw_length

    # Reading

    def begin_read(
        self,
        keys: Sequence[bytes],
        block_ids: Sequence[int],
        then: Callable[[ReadOutcome], None],
    ) -> None:
        """Start to load blocks into rows, and verify them.

        A bad pack is deleted, if the store is writable, after a refresh of the catalogue has shown
        that no process replaced it meanwhile.

        :param block_ids: for each key, the row to fill.
        :param then: called, possibly before this method returns, with the outcome. An error of the
            medium is not raised: the outcome lists the keys as failed. The content of a failed
            key's row is undefined.
        :raises ValueError: a row does not exist, a key occurs twice, or there is not one row for
            each key; no row is written.
        """
        if not len(set(keys)) == len(keys) == len(block_ids):
            raise ValueError(
                f"{len(keys)} keys, {len(set(keys))} of them distinct, for {len(block_ids)} rows"
            )
        self.rows.check(block_ids)
        self.catalogue.executor.begin(self._read(keys, block_ids, then))

    async def _read(
        self,
        keys: Sequence[bytes],
        block_ids: Sequence[int],
        then: Callable[[ReadOutcome], None],
    ) -> None:
        try:
            outcome = await self._fill(keys, block_ids)
        except (OSError, MemoryError) as error:
            # no row is in use: the parts of a read raise nothing
            logger.warning("the blocks of a load job are misses: %s", _shortage(error))
            outcome = ReadOutcome(list(keys))
        then(outcome)

    async def _fill(
        self, keys: Sequence[bytes], block_ids: Sequence[int]
    ) -> ReadOutcome:
        """Load blocks into rows; see ``begin_read``."""
        catalogue, count = self.catalogue, len(keys)
        size = part_bytes(
            count * self.rows.layout.row_stride,
            catalogue.executor.threads,
            remote=self._remote,
        )
        try:
            holders = await catalogue.holders(keys)
        except StoreError as error:
            catalogue.log_failure(error)
            holders = [None] * count
        reads, missing = self._plan(catalogue, holders, keys, block_ids, size)
        adopted = None if self.canary is None else self.canary.adopted
        if missing and adopted is not None:
            row_of = dict(zip(keys, block_ids, strict=True))
            try:
                holders = await adopted.usable_holders(missing)
                more, missing = self._plan(
                    adopted, holders, missing, [row_of[key] for key in missing], size
                )
                reads += more
            except StoreError as error:
                catalogue.log_failure(error)
        outcome = ReadOutcome(missing)
        for part in await catalogue.executor.read(reads):
            outcome.add(part)
        self.counters.missed_blocks += len(outcome.failed)
        self.counters.loaded_blocks += count - len(outcome.failed)
        self.counters.loaded_bytes += outcome.raw_bytes
        suspects = [
            pack
            for pack in outcome.suspects.values()
            if pack.table.namespace == self.namespace
        ]
        # removed first: when the caller stores a failed block again, it must not count as held
        if suspects:
            catalogue.distrust(suspects, outcome.bad_frames)
            catalogue.executor.begin_write(catalogue.quarantine())
        if adopted is not None and len(suspects) < len(outcome.suspects):
            adopted.distrust(
                [pack for pack in outcome.suspects.values() if pack not in suspects],
                outcome.bad_frames,
            )
        return outcome

    def _plan(
        self,
        catalogue: NamespaceView,
        holders: Sequence[HeldPack | None],
        keys: Sequence[bytes],
        block_ids: Sequence[int],
        part_size: int,
    ) -> tuple[list[Callable[[], ReadOutcome]], list[bytes]]:
        """Return the calls that read blocks of one namespace into rows, and the missing keys, see
        ``plan_reads``. If it is the store's own namespace, record a use of the packs to read.
        """
        bounds = (part_size, self._shares.part)
        parts, missing = plan_reads(
            holders, self.rows, keys, block_ids, *bounds, remote=self._remote
        )
        if catalogue is self.catalogue:
            self._touch(read.pack.pack_id for part in parts for read in part)
        where = catalogue.backend, catalogue.namespace, self.rows, self._scratch
        return [partial(read_part, *where, part) for part in parts], missing

    # Periodic work and totals

    def tick(self) -> None:
        """Start due work: a commit, a refresh, or a step of resizing the index."""
        executor = self.catalogue.executor
        if self.index.replacing:
            self.index.replace_some()
        if executor.writing:
            return
        if self.wants_commit() or not self._seconds_to_upkeep():
            executor.begin_write(self._commit())
        if (
            not executor.writing
            and time.monotonic() - self._refreshed >= self.options.refresh_s
        ):
            self._refreshed = time.monotonic()
            executor.begin_write(self.catalogue.refresh_or_log())
            if self.canary is not None:
                executor.begin_write(self.canary.refresh())

    @property
    def staged_bytes(self) -> int:
        """Raw bytes of staged copies, also of those that a transaction is writing."""
        return self._staging.num_bytes

    @property
    def news(self) -> News:
        """Changes since the last ``take_news``. The caller may drop keys from it to bound
        memory."""
        return self.catalogue.news

    def take_news(self) -> News:
        """Return and clear ``news``. Keys that the store held when it was opened are not
        included."""
        news, self.catalogue.news = self.catalogue.news, News()
        return news

    # Blocking calls

    def put(
        self,
        request: str,
        keys: Sequence[bytes],
        block_ids: Sequence[int],
        depths: Sequence[int] | None,
    ) -> bool:
        """Call ``begin_put``, and wait; return whether the rows may be reused now, see
        ``begin_put``."""
        ended: list[bool] = []
        self.begin_put(
            request, keys, block_ids, depths, lambda free, borrowed: ended.append(free)
        )
        self.catalogue.executor.run_until(lambda: bool(ended))
        return ended[0]

    def flush(self) -> None:
        """Call ``begin_flush``, and wait until its work is durable, or dropped and counted. Errors
        are not raised."""
        ended: list[bool] = []
        self.begin_flush(partial(ended.append, True))
        self.catalogue.executor.run_until(lambda: bool(ended))

    def refresh(self) -> None:
        """Apply the commits and deletions of other processes to the index.

        :raises StoreError: the medium failed; the index is unchanged.
        """
        executor = self.catalogue.executor
        executor.begin_write(self.catalogue.refresh())
        if self.canary is not None:
            executor.begin_write(self.canary.refresh())
        executor.run_until(lambda: not executor.writing)

    def read(self, keys: Sequence[bytes], block_ids: Sequence[int]) -> list[bytes]:
        """Call ``begin_read``, and wait; return the keys that failed. The content of their rows is
        undefined."""
        outcomes: list[ReadOutcome] = []
        self.begin_read(keys, block_ids, outcomes.append)
        self.catalogue.executor.run_until(lambda: bool(outcomes))
        return outcomes[0].failed

    def close(self) -> None:
        """Flush, then close the backend, also if the flush raises. Idempotent."""
        try:
            self.flush()
        finally:
            if self.canary is not None:
                self.canary.close()
            self.catalogue.close()


def _shortage(error: Exception) -> str:
    """Describe a lack of memory or descriptors. Exceptions keep references to rows, so they are not
    kept."""
    return str(error) or "no memory is left"


def _notice(
    backend: Backend, identity: Identity, options: StoreOptions, url: str
) -> str:
    if backend.holds(identity.digest):
        return ""
    compared = _COMPARED_REMOTELY if backend.capabilities.remote else None
    others = [
        namespace.identity for namespace in islice(backend.namespaces(), compared)
    ]
    if not others or identity in others:
        return ""
    differences = identity.nearest(others)
    if options.strict_identity:
        raise IdentityMismatchError(url, differences)
    return (
        f"{url} holds nothing of this identity yet; the nearest namespace differs in "
        + "; ".join(map(str, differences))
    )
