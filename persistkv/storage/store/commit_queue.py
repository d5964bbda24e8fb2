"""Accepted work of a store that is not committed yet: blocks, ends of requests, uses of packs.

A block is absent, in flight, staged or held:

=========  ==========================================  ====================================
state      its bytes are in                            next state
=========  ==========================================  ====================================
absent     a row that the caller may change            in flight or staged, if it is offered
in flight  a row that must not change                  held, or absent if its commit fails
staged     a copy in memory                            held, or absent if its commit fails
held       a committed pack                            absent, if the pack is removed
=========  ==========================================  ====================================
"""

from __future__ import annotations

import asyncio
import math
import time
from collections import Counter, deque
from collections.abc import Callable, Collection, Iterable, Sequence
from typing import TypeAlias

from persistkv.config import parse_durability
from persistkv.memory.budget import MemoryShares
from persistkv.storage.format.pack_writer import PackWriter, Section
from persistkv.storage.records import RequestEnd, StoreOptions
from persistkv.storage.store.commit_pipeline import (
    DIRECT_BYTES,
    Staging,
    Transaction,
    divide,
)
from persistkv.storage.threads import resolve

# bound on packs with a pending use: each costs the commit about 10 µs
_MAX_TOUCHED = 4096
# Bound on a remote transaction, as a multiple of that of a local one: larger, because the driver
# holds only ``CommitBatch.memory`` bytes of it at once, and bounded, because it must end soon.
_REMOTE_FACTOR = 16

PackFuture: TypeAlias = asyncio.Future[bool]
"""Future of a pack that is written from rows. Result: True if the pack is durable, False if it was
dropped."""


class RequestEnds:
    """Ended requests whose manifests are not written yet."""

    def __init__(self, max_bytes: int, interval_s: float | None) -> None:
        """:param max_bytes: memory in bytes at which ``has_room`` becomes False.
        :param interval_s: seconds for which an end may wait; None: it is due at once."""
        self._max_bytes = max_bytes
        self._interval_s = interval_s
        self._ends: list[RequestEnd] = []
        self._num_bytes = 0
        """Memory that ``_ends`` take."""
        self._oldest_at = 0.0
        """Time of ``add`` of the oldest end, by ``time.monotonic``; without meaning if no end
        waits."""

    def __bool__(self) -> bool:
        return bool(self._ends)

    @property
    def has_room(self) -> bool:
        """Whether memory is left for another end."""
        return self._num_bytes < self._max_bytes

    def add(self, end: RequestEnd) -> None:
        """Queue the end of a request; does not check ``has_room``."""
        if not self._ends:
            self._oldest_at = time.monotonic()
        self._ends.append(end)
        self._num_bytes += end.num_bytes

    def seconds_to_due(self) -> float:
        """Return the seconds until the ends are to be written; infinite if there are none."""
        if not self._ends:
            return math.inf
        # without room, no further request could end until these ends are written
        if self._interval_s is None or not self.has_room:
            return 0.0
        due_at = self._oldest_at + self._interval_s
        return max(0.0, due_at - time.monotonic())

    def take(self) -> list[RequestEnd]:
        """Remove and return all ends."""
        taken = self._ends
        self._ends = []
        self._num_bytes = 0
        return taken

    def take_tenants(self, tenants: Collection[str]) -> list[RequestEnd]:
        """Remove and return the ends of these tenants."""
        taken: list[RequestEnd] = []
        # The remaining ends are added again, which restarts the interval for which they may wait.
        for end in self.take():
            if end.tenant in tenants:
                taken.append(end)
            else:
                self.add(end)
        return taken


class CommitQueue:
    """Accepted blocks, ends of requests and uses of packs that wait for a commit. For the tasks of
    one event loop."""

    def __init__(
        self,
        make_writer: Callable[[Sequence[Section], str], PackWriter],
        options: StoreOptions,
        *,
        remote: bool,
    ) -> None:
        """:param make_writer: returns a new pack of these blocks of a tenant.
        :param remote: whether the medium is on another machine.
        """
        shares = MemoryShares.of(options.staging_bytes)
        interval_s = parse_durability(options.durability)
        is_delayed = interval_s is not None
        self._make_writer = make_writer
        self._copies_all = is_delayed or remote
        """Whether large blocks are copied, too, instead of being written from rows."""
        self._max_bytes = shares.transaction
        """Bound on the raw bytes of one transaction, or one larger pack."""
        if remote:
            self._max_bytes *= _REMOTE_FACTOR
        self._least_room = min(DIRECT_BYTES, shares.staged)
        """Raw bytes of staging memory that must be free before another job is accepted: enough for
        a small pack, which would otherwise be written from its rows, and alone."""
        max_age_s = options.max_age_s if interval_s is None else interval_s
        self.staging = Staging(shares.staged, max_age_s, gather_all=is_delayed)
        self.ends = RequestEnds(shares.ends, interval_s)
        self._direct: list[PackWriter] = []
        """Packs of the next commit that are written from rows."""
        self._writes: dict[PackWriter, PackFuture] = {}
        """For each pack that is written from rows, a future that ends with its transaction."""
        self._in_flight: dict[bytes, PackFuture] = {}
        """Key of a block in flight → future of its pack."""
        self.times_forgotten: Counter[str] = Counter()
        """Tenant → how often its content was dropped because it was forgotten. A job whose tenant's
        number has grown since it was accepted is not stored again."""
        self.uses: dict[bytes, None] = {}
        """Ids of used packs, whose uses no commit has recorded yet; at most 4,096."""
        self._freed = asyncio.Event()
        """Set when a pack has ended or ends of requests were taken: ``has_room`` may have
        changed."""

    # Blocks

    def add(
        self,
        tenant: str,
        request: str,
        sections: Sequence[Section],
    ) -> PackFuture | None:
        """Copy a pack to staging memory, or queue it to be written from its rows at once.

        A pack is copied if it is small, or if commits are delayed or remote, as long as there is
        room.

        :returns: None: the pack was copied. Else its future: the rows must not change until it is
            done.
        """
        num_bytes = sum(section.raw_length for section in sections)
        is_small = num_bytes < DIRECT_BYTES
        should_copy = is_small or self._copies_all
        if should_copy and self.staging.fits(num_bytes):
            # small packs of a request are joined
            self.staging.add(tenant, request, sections, own_pack=not is_small)
            return None
        writer = self._make_writer(sections, tenant)
        write = asyncio.get_running_loop().create_future()
        self._direct.append(writer)
        self._writes[writer] = write
        for section in sections:
            self._in_flight.update(dict.fromkeys(section.keys, write))
        return write

    def in_flight(self, keys: Iterable[bytes]) -> dict[bytes, PackFuture]:
        """Return those of the keys whose blocks are still to be written from their rows, with the
        futures of their packs, as ``add`` returned them. These rows must not change."""
        return {key: self._in_flight[key] for key in keys if key in self._in_flight}

    def take_direct(self) -> list[PackWriter]:
        """Remove and return the packs to be written from rows that no commit has taken yet."""
        taken = self._direct
        self._direct = []
        return taken

    def take_tenants(self, tenants: Collection[str]) -> list[PackWriter]:
        """Remove and return the packs of these tenants that no commit has taken yet, for the caller
        to drop."""
        # ``Store.finish`` compares this number: a job that waits for one of these packs must not
        # store its blocks again.
        self.times_forgotten.update(tenants)
        taken: list[PackWriter] = []
        for writer in self.take_direct():
            if writer.tenant in tenants:
                taken.append(writer)
            else:
                self._direct.append(writer)
        # Make packs of the staged copies, because ``end_pack`` releases copies by their pack only.
        for pack in self.staging.of_tenants(tenants):
            sections = self.staging.take(pack)
            writer = self._make_writer(sections, pack.tenant)
            taken.append(writer)
        return taken

    def end_pack(self, writer: PackWriter, *, is_durable: bool) -> None:
        """End the wait for a pack that is durable or was dropped: its rows or copies are free."""
        write = self._writes.pop(writer, None)
        if write is None:  # written from staged copies
            self.staging.release(writer.sections)
            writer.release()
        else:
            for section in writer.sections:
                for key in section.keys:
                    self._in_flight.pop(key, None)
            # release before ``resolve``, after which the caller may reuse the rows
            writer.release()
            resolve(write, is_durable)
        self._freed.set()

    # Uses

    def touch(self, pack_ids: Iterable[bytes | None]) -> None:
        """Record uses of packs; ignored while 4,096 of them wait for a commit.

        :param pack_ids: None, in the place of a pack that is not held, is skipped.
        """
        for pack_id in pack_ids:
            if pack_id is not None and len(self.uses) < _MAX_TOUCHED:
                self.uses[pack_id] = None

    # Time and room

    @property
    def is_empty(self) -> bool:
        """Whether all accepted blocks and request ends are durable or dropped."""
        if self._direct or self._in_flight:
            return False
        return not self.ends and not self.staging.num_bytes

    def seconds_to_due(self) -> float:
        """Return the seconds until packs or ends are to be written; infinite if none wait."""
        if self._direct:
            return 0.0
        # the size of staged packs can make them due before their age does
        has_staged = self.staging.num_bytes > 0
        if has_staged and self.staging.due():
            return 0.0
        until_ends = self.ends.seconds_to_due()
        until_staged = self.staging.seconds_to_due()
        return min(until_ends, until_staged)

    @property
    def has_room(self) -> bool:
        """Whether memory is left for another job or end of a request, which ``add`` does not
        check."""
        return self.staging.fits(self._least_room) and self.ends.has_room

    async def wait_for_room(self) -> None:
        """Wait until a commit has freed memory for another job, if there is none."""
        while not self.has_room:
            self._freed.clear()
            await self._freed.wait()

    def take(self, *, everything: bool) -> deque[Transaction]:
        """Remove the due packs, and all ends of requests with the staged blocks of their contexts;
        return their transactions.

        :param everything: take all staged blocks.
        """
        ends = self.ends.take()
        # taken ends no longer count against ``has_room``
        self._freed.set()
        due = self.staging.due(everything=everything)
        staged = dict.fromkeys(due)  # an ordered set
        # a manifest names only durable packs, so the staged blocks of its context are written too
        for end in ends:
            of_context = self.staging.of_context(end)
            staged.update(dict.fromkeys(of_context))
        # packs that are written from the rows, without staging
        writers = self.take_direct()
        for pack in staged:
            sections = self.staging.take(pack)
            writer = self._make_writer(sections, pack.tenant)
            writers.append(writer)
        return divide(writers, ends, self._max_bytes)
