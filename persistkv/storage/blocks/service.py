"""The coroutines behind ``BlockStore``: one store, its commit task, and its reports."""

from __future__ import annotations

import asyncio
import logging
import secrets
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, TypeAlias

import msgspec

from persistkv.base import (
    Retention,
    get_offload_block_hash,
    get_offload_group_idx,
)
from persistkv.memory.regions import Regions
from persistkv.memory.scattered import ScatteredBlocks
from persistkv.memory.timed import TimedBlocks
from persistkv.storage.backend import CommitBatch
from persistkv.storage.blocks.usage import (
    StoredBlock,
    Usage,
    UsageLedger,
    stored_blocks,
)
from persistkv.storage.records import RequestEnd, StoreReport
from persistkv.storage.store.store import Store

logger = logging.getLogger(__name__)


class StoreEvents(msgspec.Struct):
    """Keys that were stored or removed, by any process."""

    stored: list[tuple[bytes, int]] = []
    """(key, KV cache group) of each block that became durable."""
    removed: list[tuple[bytes, int]] = []
    """(key, KV cache group) of each block that cannot be read any more."""
    lost: bool = False
    """Whether further events were lost: more than 65,536 were waiting, or another process removed
    packs whose keys are not known."""


Keys: TypeAlias = Sequence[bytes]
JobMemory: TypeAlias = Sequence[Regions] | TimedBlocks
"""Memory of the blocks of a call: the regions of each block, or, for a call with a deadline,
``TimedBlocks``."""


class PutJob(msgspec.Struct, frozen=True):
    """Blocks to store, and how their context is recorded."""

    keys: Keys
    """Keys with their KV cache group, all of one group."""
    group: int
    depth: int | None
    """Number of blocks of the context before the first one; None: unknown."""
    labels: Mapping[str, str]
    retention: Retention
    positions: Mapping[str, Sequence[int]]
    """For each tenant, the positions of its keys in ``keys``."""


class BlockService:
    """Stores and loads blocks of callers' memory. Each call is a task of one event loop; the task
    ``run`` commits meanwhile."""

    def __init__(
        self,
        store: Store,
        memory: ScatteredBlocks,
        *,
        tokens_per_block: int,
    ) -> None:
        self.store = store
        self._memory = memory
        self._tokens_per_block = tokens_per_block
        self._ledger = UsageLedger()
        """Bytes of each tenant as of the last call of ``usage``."""
        self._unread_events = StoreReport()
        """Stored and removed keys that ``take_events`` has not returned yet."""
        self._open_ends: dict[str, asyncio.Future[bool]] = {}
        """Future of each request whose end is not committed yet: whether all its keys are
        durable."""
        # One load more than there are threads that read: the packs of the extra load are looked up
        # while the threads read.
        num_readers = store.view.threads.readers
        self._load_slots = asyncio.Semaphore(num_readers + 1)
        self._calls: set[asyncio.Task[Any]] = set()
        """Tasks of the calls that are running; see ``_call``."""
        self._call_ended = asyncio.Event()
        """Set when a call ends; ``end`` clears it."""
        self._run_task: asyncio.Task[Any] | None = None
        """Task of ``run``; None: it has not begun."""
        self.has_failed = False
        """Whether an internal error has ended ``run``: no call would end any more."""

    async def run(self) -> None:
        """Run the commit task and apply the changes of other processes, until ``end`` cancels the
        task."""
        self._run_task = asyncio.current_task()
        try:
            async with asyncio.TaskGroup() as tasks:
                tasks.create_task(self.store.committer.run())
                tasks.create_task(self._follow_changes())
        except Exception:
            logger.exception("internal error: the store answers no more calls")
            self.has_failed = True
            # cancel the running calls: they wait for work that is not done any more
            for call in self._calls:
                call.cancel()

    async def _follow_changes(self) -> None:
        """Take the store's report whenever its commit task may have changed it."""
        changed = self.store.committer.changed
        while True:
            await changed.wait()
            changed.clear()
            self._take_report()

    def _take_report(self) -> None:
        """Pass on what the store has reported: requests that are stored now or lost, and events."""
        report = self.store.take_report()
        for request, is_whole in report.persisted:
            end = self._open_ends.pop(request, None)
            # skip an end that no call waits for: the call was cancelled, which ends the future
            if end is None or end.done():
                continue
            end.set_result(is_whole)
        if report.lost:
            self._unread_events.lost = True
        self._unread_events.add(stored=report.stored, removed=report.removed)

    # Blocks

    async def put(self, job: PutJob, memory: JobMemory) -> list[bool]:
        """Store blocks; return for each key whether it is durable. The blocks' memory is not in use
        after the return."""
        store = self.store
        keys = job.keys
        # if all blocks are durable, only record their use
        if not store.index.absent(keys):
            store.touch(keys)
            return [True] * len(keys)
        with self._call():
            await store.queue.wait_for_room()
            places = self._register(memory)
            try:
                is_whole = True
                # one call for each tenant, because a pack and a context have blocks of one tenant
                for tenant in job.positions:
                    is_durable = await self._put_context(job, tenant, places)
                    is_whole = is_whole and is_durable
            finally:
                self._memory.remove(places)
        if is_whole:
            return [True] * len(keys)
        # a part of the blocks may be durable
        return await self.contains(keys)

    def _register(self, memory: JobMemory) -> range:
        """Register the blocks of a call in ``_memory``; return their places there."""
        if isinstance(memory, TimedBlocks):
            return self._memory.add_timed(memory)
        return self._memory.add(memory)

    async def _put_context(
        self, job: PutJob, tenant: str, places: Sequence[int]
    ) -> bool:
        """Store a tenant's blocks of a job as one context; return whether all are durable.

        :param places: places in ``_memory`` of all blocks of the job, in the order of its keys.
        """
        positions = job.positions[tenant]
        keys = [job.keys[position] for position in positions]
        own_places = [places[position] for position in positions]
        depths = None
        if job.depth is not None:
            depths = [job.depth + position for position in positions]
        request = secrets.token_hex(16)
        accepted = await self.store.put(request, keys, own_places, depths, tenant)
        # End the request before the next ``await``, in which the commit task could run: one
        # transaction then has both the blocks and the manifest.
        end = self._end_request(
            request,
            keys,
            job.group,
            job.labels,
            job.retention,
            tenant,
        )
        await self.store.finish(accepted)
        return await end

    def _end_request(
        self,
        request: str,
        keys: Keys,
        group: int,
        labels: Mapping[str, str],
        retention: Retention,
        tenant: str,
    ) -> asyncio.Future[bool]:
        """End a request. The result of the returned future will be whether all of its keys are
        durable.

        :param keys: keys of the context, all of one KV cache group.
        """
        loop = asyncio.get_running_loop()
        committed: asyncio.Future[bool] = loop.create_future()
        self._open_ends[request] = committed  # ``_take_report`` sets its result
        num_groups = len(self._memory.layout.groups)
        group_keys: list[list[bytes]] = [[] for _ in range(num_groups)]
        group_keys[group] = list(keys)
        end = RequestEnd(
            request=request,
            manifest_id=request,
            group_keys=tuple(group_keys),
            tokens=len(keys) * self._tokens_per_block,
            block_size=self._tokens_per_block,
            labels=dict(labels),
            retention=retention,
            tenant=tenant,
        )
        self.store.end_request(end)
        return committed

    async def get(self, keys: Keys, memory: JobMemory) -> list[bool]:
        """Read blocks of one group; return for each key whether its memory holds the verified
        block. The memory of other keys has undefined content. No memory is in use after the
        return."""
        with self._call():
            # wait for a slot before memory is registered, so that it is registered for running
            # loads only
            async with self._load_slots:
                places = self._register(memory)
                try:
                    outcome = await self.store.read(keys, places)
                finally:
                    self._memory.remove(places)
        if not outcome.failed:
            return [True] * len(keys)
        failed = set(outcome.failed)
        return [key not in failed for key in keys]

    async def contains(
        self,
        keys: Keys,
        *,
        touch: bool = False,
    ) -> list[bool]:
        """Return for each key whether it is durable; ``touch`` records a use of the blocks."""
        absent_keys = self.store.index.absent(keys)
        absent = set(absent_keys)
        if touch and len(absent) < len(keys):
            # ``touch`` ignores absent keys
            self.store.touch(keys)
        return [key not in absent for key in keys]

    async def touch(self, keys: Keys) -> None:
        """Record a use of blocks."""
        self.store.touch(keys)

    async def delete(self, keys: Keys) -> list[bool]:
        """Delete blocks; return for each key whether it was held."""
        with self._call():
            # flush first, because staged blocks would be stored after the deletion
            await self.store.flush()
            held = await self.store.delete(keys)
        return [key in held for key in keys]

    async def flush(self) -> None:
        """Commit all accepted work."""
        with self._call():
            await self.store.flush()

    # Pins

    async def pin(
        self,
        keys: Keys,
        group: int,
        labels: Mapping[str, str],
        ttl_s: float | None,
        tenant: str,
    ) -> tuple[str, bool]:
        """Pin blocks of a tenant; return the id of the pin, and whether the store holds all of the
        blocks."""
        request = secrets.token_hex(16)
        retention = Retention(pin=True, ttl_s=ttl_s)
        with self._call():
            is_whole = await self._end_request(
                request,
                keys,
                group,
                labels,
                retention,
                tenant,
            )
        return request, is_whole

    async def unpin(self, pin: str) -> None:
        """Remove a pin."""
        view = self.store.view
        with self._call():
            async with self.store.committer.turn:
                is_pinned = False  # unpinned from now on
                batch = CommitBatch(pins=[(pin, is_pinned)])
                result = await view.commit(batch)
                # refresh afterwards, because other processes may have committed since the last
                # refresh
                await view.apply_own_commit(
                    packs=[],
                    result=result,
                    follows_cursor=False,
                )

    # Content

    async def usage(self) -> Usage:
        """Return the bytes of each tenant, and those of the store."""
        view = self.store.view
        ledger = self._ledger
        with self._call():
            changes = await view.read_changes(ledger.cursor)
            ledger.apply(changes)
            stats = await view.call(view.backend.stats)
        # the unary plus of a ``Counter`` leaves out tenants whose total is 0
        tenants = dict(+ledger.totals)
        num_bytes = sum(tenants.values())
        return Usage(tenants, num_bytes, stats.disk_bytes, stats.capacity)

    async def stored_blocks(self) -> list[StoredBlock]:
        """Return all durable blocks."""
        with self._call():
            changes = await self.store.view.read_changes(None)
        return list(stored_blocks(changes.added))

    async def take_events(self) -> StoreEvents:
        """Return the events since the last call."""
        self._take_report()
        events = self._unread_events
        self._unread_events = StoreReport()
        # leave out keys that are still durable, because another pack with them replaced the removed
        # one
        removed = self.store.index.absent(events.removed)
        return StoreEvents(
            stored=_split_groups(events.stored),
            removed=_split_groups(removed),
            lost=events.lost,
        )

    # The end

    @contextmanager
    def _call(self) -> Iterator[None]:
        """Count the present task as a running call during the ``with`` block: ``end`` waits for it,
        and a failure of ``run`` cancels it."""
        call = asyncio.current_task()
        assert call is not None
        self._calls.add(call)
        try:
            yield
        finally:
            self._calls.discard(call)
            self._call_ended.set()

    async def end(self) -> None:
        """Wait until no call is running, flush the store, end ``run``, and close the store."""
        while self._calls:
            self._call_ended.clear()
            await self._call_ended.wait()
        # without the commit task, which has failed, a flush would never end
        if not self.has_failed:
            await self.store.flush()
        if self._run_task is not None:
            self._run_task.cancel()
            await asyncio.wait([self._run_task])
        # these calls may block, because no other task needs the loop any more
        self.store.view.threads.close()
        self.store.close()


def _split_groups(keys: Keys) -> list[tuple[bytes, int]]:
    """Divide keys into the caller's keys and their KV cache groups."""
    return [(get_offload_block_hash(key), get_offload_group_idx(key)) for key in keys]
