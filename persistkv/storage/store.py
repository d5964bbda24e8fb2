"""One open namespace of one store: put, contains, read into rows, end requests, flush.

Invariants of this file:

1. A key is in the index exactly where a committed pack holds it and no read has found that pack bad.
2. Rows handed to ``put`` are read until it says they are free, or until ``in_flight`` names none of their keys.
3. Rows handed to ``begin_read`` hold what was stored under their keys, or their keys are in the answer. Nothing in
   between; and nobody writes them any more when it comes.
4. A key is absent, in flight (in rows that a transaction waits for or reads), staged (copied), or held. Only what is
   absent is taken; what is in flight or staged when a transaction fails is absent again.
5. Failure of a transaction costs the blocks in it, never the store: they are dropped, counted, and stay absent.

What was used (read, touched, offered though it is held, named by a manifest) goes to the backend with the next commit,
which makes it go later. All state belongs to one thread; what may block runs where its ``Executor`` says.
"""

from __future__ import annotations

import math
import time
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from itertools import islice

from persistkv.base import get_offload_group_indices
from persistkv.errors import IdentityMismatchError, StoreError
from persistkv.storage.backend import Backend
from persistkv.storage.catalogue import Catalogue
from persistkv.storage.codec import parse_codec
from persistkv.storage.executor import Executor, InPlaceExecutor
from persistkv.storage.extensions import BackendStats, InspectableBackend
from persistkv.storage.identity import Identity
from persistkv.storage.index import Index
from persistkv.storage.memory import MemoryShares
from persistkv.storage.pack import UNKNOWN_DEPTH
from persistkv.storage.pack_writer import PackWriter, Segment
from persistkv.storage.planning import DIRECT_BYTES, Blocks, PlannedPack, plan_packs
from persistkv.storage.reading import ReadOutcome, make_scratch, part_bytes, plan_reads, read_part
from persistkv.storage.recent import recent_contexts
from persistkv.storage.records import News, RequestEnd, StoreCounters, StoreOptions, parse_durability
from persistkv.storage.rows import Rows
from persistkv.storage.staging import Staging
from persistkv.storage.writing import Outgoing, Writing, slices_of

_TOUCH_S = 2.0  # seconds that uses wait for a commit to go along with
_MAX_TOUCHED = 4096  # packs whose use waits, at most: some 10 µs each in the commit that takes them
_EXPIRE_S = 30.0  # seconds between commits that do nothing else than let the backend expire what is old


class Store:
    """See the top of this file."""

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
        """Open a namespace of an open backend, which this object then owns.

        :param executor: where blocking calls run; in the caller's stack by default. Stays the caller's to close.
        :raises ConfigurationError: a bad codec or durability; nothing was written.
        :raises IdentityMismatchError: ``strict_identity``, and there are other identities only; nothing was written.
        :raises StoreError: as ``Backend.open_namespace``.
        """
        self.codec = parse_codec(options.codec)
        self._interval_s = parse_durability(options.durability)
        self.options = options
        self.rows = rows
        self.counters = StoreCounters()
        self.notice = _notice(backend, identity, options, url)
        """What differs from the nearest namespace, where this one is new beside others; else empty."""
        self.namespace = backend.open_namespace(identity).id
        executor = executor or InPlaceExecutor()
        self.catalogue = Catalogue(backend, self.namespace, executor, self.counters, rows.layout)
        self._writable = backend.capabilities.writable
        self._shares = MemoryShares.of(options.staging_bytes)
        self._remote = backend.capabilities.remote
        self._copies_all = self._interval_s is not None or self._remote
        self._scratch = make_scratch(self._shares.part)
        waits_s = options.max_age_s if self._interval_s is None else self._interval_s
        self._staging = Staging(self._shares.staged, waits_s, gather_all=self._interval_s is not None)
        self._direct: list[Outgoing] = []
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
        """Packs that became durable or were dropped so far: ``in_flight`` changes with it only."""

    # What is there

    @property
    def index(self) -> Index:
        """Keys that are durable here and can be read."""
        return self.catalogue.index

    def contains(self, key: bytes) -> bool:
        """Whether the key is durable here and can be read."""
        return key in self.catalogue.index

    def took(self, key: bytes) -> bool:
        """Whether the key's bytes are durable or copied: its row is not needed any more."""
        return key in self.catalogue.index or key in self._staging

    def took_all(self, keys: Iterable[bytes]) -> bool:
        """Whether ``took`` says so of all of them."""
        return all(key in self._staging for key in self.catalogue.index.absent(keys))

    def in_flight(self, keys: Iterable[bytes]) -> set[bytes]:
        """Those of the keys that are written from rows: whoever offered them keeps his rows meanwhile."""
        return self._flying.intersection(keys)

    # Writing

    def put(self, request: str, keys: Sequence[bytes], block_ids: Sequence[int], depths: Sequence[int] | None) -> bool:
        """Take blocks out of rows: what is held is passed over, small packs are copied, large ones wait for a commit.

        :param depths: for each key, the blocks of its group before it; None where nobody can tell.
        :returns: whether the rows are free already; else they are read while any of the keys is ``in_flight``.
        :raises ValueError: a row or a group that does not exist; nothing was taken.
        """
        self.rows.check(block_ids)
        if not self._writable:
            return True
        blocks = self._absent(request, keys, block_ids, depths)
        self.counters.held_blocks += len(keys) - len(blocks.keys)
        if len(blocks.keys) < len(keys):
            self.touch(keys)
        for pack in plan_packs(self.rows, blocks, self._shares.transaction):
            self._take_in(request, pack)
        return self._flying.isdisjoint(keys)

    def _absent(
        self, request: str, keys: Sequence[bytes], block_ids: Sequence[int], depths: Sequence[int] | None
    ) -> Blocks:
        position_of = {key: position for position, key in enumerate(keys)}
        absent = self.catalogue.index.absent(position_of)
        if self._flying:
            absent = [key for key in absent if key not in self._flying]
        staged = self._staging.held(absent)
        if staged:
            absent = [key for key in absent if key not in self._staging]
        groups = get_offload_group_indices(absent)
        if max(groups, default=0) >= len(self.rows.layout.groups):
            raise ValueError(f"key of group {max(groups)}; there are {len(self.rows.layout.groups)} groups")
        for key in staged:
            self._staging.claim(key, request)
        known = [UNKNOWN_DEPTH] * len(keys) if depths is None else depths
        if len(absent) < len(keys):
            positions = [position_of[key] for key in absent]
            block_ids = [block_ids[position] for position in positions]
            known = [known[position] for position in positions]
        return Blocks(absent, groups, block_ids, known)

    def _take_in(self, request: str, pack: PlannedPack) -> None:
        """Copy what is small, or all where writing takes its time; write from the rows what has no room."""
        small = pack.raw_length < DIRECT_BYTES
        if (small or self._copies_all) and self._staging.fits(pack.raw_length):
            self._staging.add(request, pack.segments, whole=not small)
            return
        self._direct.append(Outgoing(self._writer(pack.segments)))
        for segment in pack.segments:
            self._flying.update(segment.keys)

    def _writer(self, segments: Sequence[Segment]) -> PackWriter:
        executor = self.catalogue.executor
        return PackWriter(self.namespace, self.codec, segments, executor.ahead if executor.threads else None)

    @property
    def has_room(self) -> bool:
        """Whether memory is left for what ``put`` copies and ``end_request`` keeps."""
        next_one = min(DIRECT_BYTES, self._shares.staged)
        return self._staging.fits(next_one) and self._ends_bytes < self._shares.ends

    def touch(self, keys: Iterable[bytes]) -> None:
        """Blocks were used; those that are not held are passed over. Durable with the next commit."""
        pack_of = self.catalogue.index.pack_of
        self._touch({pack.pack_id: None for key in keys if (pack := pack_of(key)) is not None})

    def _touch(self, pack_ids: Mapping[bytes, None]) -> None:
        if not self._writable:
            return
        self._touched.update(dict.fromkeys(islice(pack_ids, _MAX_TOUCHED - len(self._touched))))

    def end_request(self, end: RequestEnd) -> None:
        """The request stores nothing more: at the next commit what it staged is written, with its manifest.

        :raises ValueError: it has not as many chains of keys as there are groups; nothing was taken.
        """
        if len(end.group_keys) != len(self.rows.layout.groups):
            raise ValueError(f"keys of {len(end.group_keys)} groups; there are {len(self.rows.layout.groups)}")
        if not self._writable:
            self.catalogue.news.persisted.append((end.request, False))
            return
        if not self._ends:
            self._ends_since = time.monotonic()
        self._ends.append(end)
        self._ends_bytes += end.num_bytes

    @property
    def unwritten(self) -> bool:
        """Whether anything was taken that is not durable yet, nor dropped."""
        return bool(self._direct or self._flying or self._ends or self._staging.num_bytes)

    def wants_commit(self) -> bool:
        """Whether something is to be written now."""
        return bool(self._direct or self._staging.due() or self._ends_due())

    def _ends_due(self) -> bool:
        if not self._ends or self._interval_s is None:
            return bool(self._ends)
        return self._ends_bytes >= self._shares.ends or time.monotonic() - self._ends_since >= self._interval_s

    def seconds_to_work(self) -> float | None:
        """How long the owner may sleep before ``tick`` has something to do; None: until what is written has ended."""
        if self.catalogue.executor.writing:
            return None
        if self.wants_commit():
            return 0.0
        now = time.monotonic()
        waits = [self._refreshed + self.options.refresh_s - now, self._seconds_to_upkeep()]
        if (aged := self._staging.seconds_to_due()) is not None:
            waits.append(aged)
        if self._ends:
            waits.append(self._ends_since + (self._interval_s or 0.0) - now)
        return max(0.0, min(waits))

    def _seconds_to_upkeep(self) -> float:
        """How long until uses are to be written, or the backend is to be given a chance to expire what is old."""
        if not self._writable:
            return math.inf
        touch_s = max(_TOUCH_S, self._interval_s or 0.0)
        return max(0.0, self._committed_at + (touch_s if self._touched else _EXPIRE_S) - time.monotonic())

    def begin_commit(self, *, everything: bool = False, then: Callable[[], None] | None = None) -> None:
        """Write what waits, once what is being written has ended; all that comes until then goes along.

        :param everything: also what is staged and not due yet.
        :param then: called when all of that is durable, or was dropped and counted.
        """
        self._everything |= everything
        if then is not None:
            self._when_committed.append(then)
        if not self._commit_waits:
            self._commit_waits = True
            self.catalogue.executor.begin_write(self._commit())

    async def _commit(self) -> None:
        self._commit_waits = False
        everything, self._everything = self._everything, False
        then, self._when_committed = self._when_committed, []
        slices, ends = self._take_out(everything)
        if slices or ends or self._touched or not self._seconds_to_upkeep():
            uses, self._touched = list(self._touched), {}
            memory = self._shares.transaction
            writing = Writing(self.catalogue, self.rows.layout, uses, memory, self._ended)
            await writing.run(slices, ends)
            self._committed_at = time.monotonic()
        for call in then:
            call()

    def _take_out(self, everything: bool) -> tuple[deque[list[Outgoing]], list[RequestEnd]]:
        ends, self._ends, self._ends_bytes = self._ends, [], 0
        staging = self._staging
        due = dict.fromkeys(staging.waiting() if everything else staging.due())
        for end in ends:
            due.update(dict.fromkeys(staging.of_request(end.request)))
            for keys in end.group_keys:
                due.update(dict.fromkeys(staging.owners(keys)))
        outgoing, self._direct = self._direct, []
        outgoing += [Outgoing(self._writer(staging.take(pack)), pack) for pack in due]
        return slices_of(outgoing, self._shares.transaction, lends=self._remote), ends

    def _ended(self, outgoing: Outgoing, written: bool) -> None:
        self.ended_packs += 1
        lost = 0 if written else len(outgoing.writer.keys)
        if outgoing.staged is None:
            for segment in outgoing.writer.segments:
                self._flying.difference_update(segment.keys)
        else:
            lost = self._staging.end(outgoing.staged, written=written)
        outgoing.writer.release()
        if lost:
            self.counters.dropped_blocks += lost
            self.counters.dropped_bytes += outgoing.writer.raw_length * lost // len(outgoing.writer.keys)

    # Reading

    def begin_read(self, keys: Sequence[bytes], block_ids: Sequence[int], then: Callable[[ReadOutcome], None]) -> None:
        """Fill rows with the blocks of keys, verified.

        :param then: called with the keys that could not be served; what their rows hold is undefined. A bad pack is
            deleted, once a second look at the catalogue has shown that it was not merely replaced.
        :raises ValueError: a row that does not exist, or not one for each key; nothing is written.
        """
        if len(keys) != len(block_ids):
            raise ValueError(f"{len(keys)} keys for {len(block_ids)} rows")
        self.rows.check(block_ids)
        self.catalogue.executor.begin(self._read(keys, block_ids, then))

    async def _read(self, keys: Sequence[bytes], block_ids: Sequence[int], then: Callable[[ReadOutcome], None]) -> None:
        catalogue, count = self.catalogue, len(keys)
        size = part_bytes(count * self.rows.layout.row_stride, catalogue.executor.threads, remote=self._remote)
        bounds = (size, self._shares.part)
        parts, missing = plan_reads(catalogue.index, self.rows, keys, block_ids, *bounds, remote=self._remote)
        self._touch({read.pack.pack_id: None for part in parts for read in part})
        outcome = ReadOutcome(missing)
        calls = [
            partial(read_part, catalogue.backend, self.namespace, self.rows, self._scratch, part) for part in parts
        ]
        for part in await catalogue.executor.read(calls):
            outcome.add(part)
        self.counters.verification_failures += outcome.bad_frames
        self.counters.missed_blocks += len(outcome.failed)
        self.counters.loaded_blocks += count - len(outcome.failed)
        self.counters.loaded_bytes += outcome.raw_bytes
        if outcome.suspects:  # out of the index before the caller hears of it: what he computes again is not held
            catalogue.distrust(outcome.suspects.values())
            catalogue.executor.begin_write(catalogue.quarantine())
        then(outcome)

    # The rest

    def tick(self) -> None:
        """Begin what is due: a commit, or a look for what others stored."""
        executor = self.catalogue.executor
        if executor.writing:
            return
        if self.wants_commit() or not self._seconds_to_upkeep():
            self.begin_commit()
        if not executor.writing and time.monotonic() - self._refreshed >= self.options.refresh_s:
            self._refreshed = time.monotonic()
            executor.begin_write(self.catalogue.refresh_or_complain())

    @property
    def staged_bytes(self) -> int:
        """Raw bytes of copies that wait to be written, or are."""
        return self._staging.num_bytes

    async def stats(self) -> BackendStats:
        """Totals of the whole store, once what is being written has ended; as ``Backend.stats``."""
        backend = self.catalogue.backend
        if not isinstance(backend, InspectableBackend):
            raise StoreError(f"{type(backend).__name__} counts nothing")
        return await self.catalogue.call(backend.stats)

    async def recent(self, max_blocks: int, engine: str = "", *, only_asked: bool = False) -> list[list[bytes]]:
        """The contexts that were asked for, and those used last; see ``recent_contexts``."""
        backend = self.catalogue.backend
        if not isinstance(backend, InspectableBackend):
            return []
        where = backend, self.namespace, self.contains
        return await self.catalogue.call(partial(recent_contexts, *where, max_blocks, engine, only_asked=only_asked))

    @property
    def news(self) -> News:
        """What came and went since it was last taken; whoever cannot take it may let go of keys in it."""
        return self.catalogue.news

    def take_news(self) -> News:
        """What came and went since the last call; what opening found is no news."""
        return self.catalogue.take_news()

    # Calls that wait

    def commit(self, *, everything: bool = False) -> None:
        """Write what waits; it is durable on return, or it was dropped and counted. See ``begin_commit``."""
        ended: list[bool] = []
        self.begin_commit(everything=everything, then=partial(ended.append, True))
        self.catalogue.executor.run_until(lambda: bool(ended))

    def flush(self) -> None:
        """Write everything that was taken; durable on return, or dropped and counted."""
        self.commit(everything=True)

    def refresh(self) -> None:
        """Learn what others committed and deleted.

        :raises StoreError: the medium failed; nothing was learnt.
        """
        executor = self.catalogue.executor
        executor.begin_write(self.catalogue.refresh())
        executor.run_until(lambda: not executor.writing)

    def read(self, keys: Sequence[bytes], block_ids: Sequence[int]) -> list[bytes]:
        """Fill rows with the blocks of keys; the keys that could not be served. See ``begin_read``."""
        outcomes: list[ReadOutcome] = []
        self.begin_read(keys, block_ids, outcomes.append)
        self.catalogue.executor.run_until(lambda: bool(outcomes))
        return outcomes[0].failed

    def close(self) -> None:
        """Write what was taken, then release the backend, which is released whatever writing raises; idempotent."""
        try:
            self.flush()
        finally:
            self.catalogue.backend.close()


def _notice(backend: Backend, identity: Identity, options: StoreOptions, url: str) -> str:
    others = [namespace.identity for namespace in backend.namespaces()]
    if not others or identity in others:
        return ""
    differences = identity.nearest(others)
    if options.strict_identity:
        raise IdentityMismatchError(url, differences)
    return f"{url} holds nothing of this identity yet; the nearest namespace differs in " + "; ".join(
        map(str, differences)
    )
