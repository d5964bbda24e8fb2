"""One open namespace of one store: put, contains, read into rows, end requests, flush.

Invariants of this file:

1. A key is in the index if and only if, as of the last refresh, a committed pack holds it and no
   read has found that pack bad. Keys of an adopted namespace are the only exception.
2. The store may read the rows passed to ``put`` until ``StoredJob.writes`` are done, or
   ``in_flight`` returns none of their keys.
3. When ``read`` returns, a row holds the bytes stored under its key, or the outcome lists the key
   as failed. The store does not write the rows after that.
4. Only absent keys are accepted (``commit_queue`` has the states of a key). If a transaction fails,
   its keys are absent again.
5. If a transaction fails, its blocks are dropped and counted in ``StoreCounters``. The store stays
   usable.

Uses of packs (loads, touches, stores of keys that are held already, manifests) are sent to the
backend with the next commit, because eviction is by last use. All state belongs to the tasks of one
event loop. Calls that may block run on ``StoreThreads``.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import islice
from pathlib import Path

from persistkv.base import GROUP_INDEX_BYTES, get_offload_group_idx
from persistkv.config import parse_durability
from persistkv.errors import (
    FieldDifference,
    IdentityMismatchError,
    StoreError,
    printable,
)
from persistkv.memory.budget import MAX_IO_THREADS, MemoryShares
from persistkv.memory.rows import BlockMemory
from persistkv.storage.backend import Backend
from persistkv.storage.format.codec import parse_codec
from persistkv.storage.format.pack import UNKNOWN_DEPTH
from persistkv.storage.format.pack_writer import PackWriter, Section
from persistkv.storage.identity import Identity
from persistkv.storage.identity.canary import Canary
from persistkv.storage.records import (
    RequestEnd,
    StoreCounters,
    StoreOptions,
    StoreReport,
)
from persistkv.storage.store.commit_pipeline import Blocks, plan_packs
from persistkv.storage.store.commit_queue import CommitQueue, PackFuture
from persistkv.storage.store.committer import Committer, describe_shortage
from persistkv.storage.store.deletion import Deleter
from persistkv.storage.store.load import ReadOutcome
from persistkv.storage.store.loading import Loader
from persistkv.storage.store.namespace_view import NamespaceView
from persistkv.storage.store.savings import SavingsRecorder
from persistkv.storage.threads import StoreThreads
from persistkv.tenants import DEFAULT_TENANT, check_tenant

logger = logging.getLogger(__name__)

# maximum namespaces of a remote store with which a new identity is compared: each costs a request
_COMPARED_REMOTELY = 16
_NOTICED_FIELDS = 3  # maximum fields that a notice names, because it is one line


@dataclass
class StoredJob:
    """A store job whose blocks the store has accepted; see ``Store.put``."""

    tenant: str
    request: str
    blocks: Blocks
    borrowed: set[bytes] = field(default_factory=set)
    """Keys that an earlier job is storing from its rows. If that fails, this job's rows are
    used."""
    writes: set[PackFuture] = field(default_factory=set)
    """One future for each pack that is to be written from rows of this job, or holds borrowed keys;
    True: the pack is durable. The rows are free when all are done, or now if there are none."""
    lost: list[bytes] = field(default_factory=list)
    """Keys whose blocks were dropped because memory was short; complete if ``writes`` is empty."""
    times_forgotten: int = 0
    """``CommitQueue.times_forgotten`` of the tenant when the job was accepted. If the number is
    larger now, the tenant was forgotten since."""


class Store:
    """One open namespace of a store: accepts blocks, commits them as packs, loads them into rows.

    For the tasks of one event loop. One of them must await ``committer.run`` (or
    ``committer.work``, again and again): it commits, and applies the changes of other processes.
    """

    def __init__(
        self,
        backend: Backend,
        identity: Identity,
        rows: BlockMemory,
        options: StoreOptions,
        *,
        url: str,
        threads: StoreThreads,
    ) -> None:
        """Open the namespace of ``identity``, which the first commit begins if it has no content.
        Runs on the caller's thread, which may be another one than that of the event loop.

        This object then owns and closes the backend; if this raises, the caller still owns it.

        :param rows: the engine's blocks, which ``put`` reads and ``read`` fills.
        :param url: URL of the store, for messages only.
        :param threads: run the blocking calls. The caller closes them after the store.
        :raises ConfigurationError: ``options`` has an invalid codec or durability; nothing was
            written.
        :raises IdentityMismatchError: ``strict_identity`` is set and the store holds only other
            identities; nothing was written.
        :raises StoreError: the namespace cannot be opened or read.
        """
        codec = parse_codec(options.codec)
        parse_durability(options.durability)
        self.rows = rows
        self.counters = StoreCounters()
        # compare before the namespace is opened: with ``strict_identity``, a mismatch must leave
        # the store as it is
        self.notice = _notice(backend, identity, options, url)
        """Fields that differ from the nearest namespace, if this one is new and others exist.
        Otherwise empty."""
        backend.open_namespace(identity)
        # computed once, because the digest of a whole identity takes some 50 µs
        self.namespace = identity.digest
        self.savings = SavingsRecorder(backend, identity)
        """Adds up what requests restored; its caller writes it into the store."""
        self.view = NamespaceView(
            backend, self.namespace, threads, self.counters, rows.layout, options
        )
        self.index = self.view.index
        """Index of the packs that are durable in this namespace and can be read; with an adopted
        namespace, ``in`` and ``len`` include its keys."""
        self.sources = Canary(self.view, identity, rows, options)
        """The namespaces that serve loads: the own one, and one of another engine release."""
        self._is_writable = backend.capabilities.writable
        self._is_ending = False
        """Whether ``refuse_rows`` was called."""
        self._max_pack_bytes = MemoryShares.of(options.staging_bytes).transaction
        """Bound on the raw bytes of one pack."""

        # ``make_writer`` does not reference ``self``: in a reference cycle, a closed store would
        # keep the rows mapped.
        namespace = self.namespace

        def make_writer(sections: Sequence[Section], tenant: str) -> PackWriter:
            return PackWriter(
                namespace, codec, sections, threads.start, backend.seal, tenant
            )

        self.queue = CommitQueue(
            make_writer, options, remote=backend.capabilities.remote
        )
        self.committer = Committer(
            self.view, self.queue, self.counters, options, self.sources
        )
        self._loader = Loader(
            self.view,
            rows,
            self.queue,
            self.counters,
            options,
            self.sources.readable,
        )
        # makes a deleter for each call of ``delete``, which is rare
        self._new_deleter = partial(
            Deleter, self.view, self.committer, self.queue, options, make_writer
        )

    # Index

    def contains(self, key: bytes) -> bool:
        """Whether the key, or one with the same fingerprint, is durable here or in an adopted
        namespace."""
        return key in self.index

    def missing(self, keys: Iterable[bytes]) -> list[bytes]:
        """Return the keys whose blocks are neither durable in this namespace nor staged: only a row
        may hold them."""
        absent = self.index.absent(keys)
        staged = self.queue.staging.staged(absent)
        return [key for key in absent if key not in staged]

    # Writing

    async def put(
        self,
        request: str,
        keys: Sequence[bytes],
        block_ids: Sequence[int],
        depths: Sequence[int] | None,
        tenant: str = DEFAULT_TENANT,
    ) -> StoredJob:
        """Accept blocks for storage. Keys that are held, staged or in flight are skipped.

        Blocks of small packs (below 4 MiB) are copied to staging memory while it has room. If the
        store is remote or durability is an interval, blocks of large packs are copied, too. The
        next commit writes packs that are not copied from the rows. A read-only store accepts
        nothing: new blocks are dropped and counted.

        :param request: the engine's request id. The commit after ``end_request`` with this id
            writes the staged blocks.
        :param block_ids: for each key, the row that holds its block.
        :param depths: for each key, the number of blocks of its group before it in the context;
            None if unknown.
        :param tenant: whose blocks these are. Its keys are those of ``tenant_key``.
        :returns: the accepted job. If it has ``writes``, its rows must not change until ``finish``
            returns.
        :raises ValueError: a row or a group does not exist, there is not one row and depth for
            each key, or the tenant's name is not valid; nothing is accepted.
        """
        check_tenant("tenant", tenant)
        if depths is None:
            depths = [UNKNOWN_DEPTH] * len(keys)
        if not len(keys) == len(block_ids) == len(depths):
            raise ValueError(
                f"{len(keys)} keys for {len(block_ids)} rows and {len(depths)} depths"
            )
        self.rows.check(block_ids)
        groups = self._groups_of(keys)
        blocks = Blocks(keys, groups, block_ids, depths)
        if self._is_writable:
            return await self._accept(tenant, request, blocks)
        self._count_refused(keys)
        return StoredJob(tenant, request, blocks)

    def _groups_of(self, keys: Sequence[bytes]) -> list[int]:
        """Return the index of each key's KV cache group.

        :raises ValueError: a group does not exist.
        """
        # the suffix of a key names its group; decode each distinct suffix once
        suffixes = [key[-GROUP_INDEX_BYTES:] for key in keys]
        group_of = {suffix: get_offload_group_idx(suffix) for suffix in set(suffixes)}
        groups = [group_of[suffix] for suffix in suffixes]
        num_groups = len(self.rows.layout.groups)
        last_group = max(groups, default=0)
        if last_group >= num_groups:
            raise ValueError(
                f"key of group {last_group}; there are {num_groups} groups"
            )
        return groups

    async def finish(self, job: StoredJob) -> list[bytes]:
        """Wait until the rows of a job are free; return the keys whose blocks were dropped.

        If an earlier job failed to store keys that both have, this job's blocks are accepted again,
        and the rows are free later.
        """
        while job.writes:
            await asyncio.wait(job.writes)
            are_durable = all(write.result() for write in job.writes)
            if are_durable and not job.lost:
                return []
            missing = self.missing(job.blocks.keys)
            # no missing block is borrowed: they were in packs of this job alone, which were dropped
            if job.borrowed.isdisjoint(missing):
                return missing
            # the content of a forgotten tenant must not be stored again
            is_forgotten = self.queue.times_forgotten[job.tenant] != job.times_forgotten
            if is_forgotten or self._is_ending:
                return missing
            # An earlier job has failed to store the borrowed keys: the rows of this job have the
            # only copies left of their blocks.
            job = await self._accept(job.tenant, job.request, job.blocks)
        return job.lost

    def _count_refused(self, keys: Sequence[bytes]) -> None:
        """Count the blocks that a read-only store neither holds nor accepts. Log the first
        ones only, because a line for each job would flood the log."""
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

    async def _accept(
        self,
        tenant: str,
        request: str,
        blocks: Blocks,
    ) -> StoredJob:
        """Skip the blocks that need not be written, and queue packs of the others for the next
        commit. If memory or descriptors are short, blocks that are not queued yet are dropped.

        :returns: the job, whose rows are in use until its ``writes`` are done. After a shortage,
            ``lost`` has all keys that are neither held nor staged. Those in flight are included,
            although their writes may succeed: ``finish`` looks again when these are done.
        """
        borrowed: set[bytes] = set()
        writes: set[PackFuture] = set()
        lost: list[bytes] = []
        try:
            # The store may adopt KV of another engine release if its blocks equal those that this
            # engine computes: the offered ones are compared. This is done before the keys are
            # looked up, because the states of keys may change while the comparison waits.
            await self.sources.examine(request, blocks)
            held = await self._held_keys(blocks.keys)
            # No ``await`` follows, so no other task changes the states of the keys.
            in_flight = self.queue.in_flight(blocks.keys)
            # earlier jobs are writing these blocks from rows of their own
            borrowed = set(in_flight)
            writes = set(in_flight.values())
            new_blocks = self._blocks_to_write(blocks, held | borrowed)
            # blocks that need not be written: held, in flight, staged, or twice in this job
            self.counters.held_blocks += len(blocks.keys) - len(new_blocks.keys)
            for sections in plan_packs(self.rows, new_blocks, self._max_pack_bytes):
                write = self.queue.add(tenant, request, sections)
                # None: the blocks were copied to staging memory, so their rows are free
                if write is not None:
                    writes.add(write)
        except (OSError, MemoryError) as error:
            why = describe_shortage(error)
            logger.warning("the blocks of a store job are dropped: %s", why)
            lost = self.missing(blocks.keys)
            # look again: the loop may have queued packs before the error, and the rows of these
            # packs must not change until the packs are written
            in_flight = self.queue.in_flight(blocks.keys)
            writes = set(in_flight.values())
        self._announce()
        return StoredJob(
            tenant,
            request,
            blocks,
            borrowed=borrowed,
            writes=writes,
            lost=lost,
            times_forgotten=self.queue.times_forgotten[tenant],
        )

    async def _held_keys(self, keys: Sequence[bytes]) -> set[bytes]:
        """Return the keys that the store holds, and record uses of their packs. If the medium
        fails, the keys that it probably holds."""
        try:
            holders = await self.view.holders(keys)
        except StoreError as error:
            self.view.log_failure(error)
            # keys with held fingerprints are probably held
            absent = self.index.absent(keys)
            return set(keys).difference(absent)
        held: set[bytes] = set()
        used: dict[bytes, None] = {}
        for key, pack in zip(keys, holders, strict=True):
            if pack is not None:
                held.add(key)
                used[pack.pack_id] = None
        self._touch(used)
        return held

    def _blocks_to_write(self, blocks: Blocks, known: set[bytes]) -> Blocks:
        """Return the blocks that are neither ``known`` nor staged, one for each key.

        :param known: keys that are held or in flight.
        """
        skipped = known | self.queue.staging.staged(blocks.keys)
        position_of: dict[bytes, int] = {}
        for position, key in enumerate(blocks.keys):
            if key not in skipped:
                position_of[key] = position
        if len(position_of) == len(blocks.keys):
            return blocks
        positions = list(position_of.values())
        return blocks.at(positions)

    def touch(self, keys: Iterable[bytes]) -> None:
        """Record a use of blocks, for the order of eviction; the next commit stores it. Ignored in
        a read-only store, and while 4,096 packs with a use wait for the commit.
        """
        pack_ids = self.index.first_candidates(list(keys))
        self._touch(pack_ids)

    def _touch(self, pack_ids: Iterable[bytes | None]) -> None:
        """Record uses of packs, unless the store is read-only; None is skipped."""
        if self._is_writable:
            self.queue.touch(pack_ids)
            self.committer.has_work.set()

    def end_request(self, end: RequestEnd) -> None:
        """End a request: the next commit writes its staged blocks and its manifest.

        It starts at once, or, with ``interval:`` durability, after the interval at the latest. When
        it has ended, ``StoreReport.persisted`` names the request. A read-only store writes nothing
        and reports it at once.

        :raises ValueError: ``end.group_keys`` has more or fewer groups than the rows, or the
            tenant's name is not valid; nothing was accepted.
        """
        check_tenant("tenant", end.tenant)
        num_groups = len(self.rows.layout.groups)
        if len(end.group_keys) != num_groups:
            raise ValueError(
                f"keys of {len(end.group_keys)} groups; there are {num_groups}"
            )
        self.sources.ended(end.request)
        if self._is_writable:
            self.queue.ends.add(end)
        else:
            self.view.report.persisted.append((end.request, False))
        self._announce()

    async def delete(self, keys: Sequence[bytes]) -> set[bytes]:
        """Delete durable blocks of this namespace; return the keys that were held. Blocks that are
        stored meanwhile may be kept. Pins do not protect single blocks.

        :raises StoreError: the medium failed, a pack with other blocks could not be read, or the
            store is read-only. Some blocks may have been deleted; no other block is lost.
        """
        return await self._new_deleter().delete(keys)

    def refuse_rows(self) -> None:
        """Drop the packs that wait to be written from rows and that no commit has taken yet. From
        now on, ``finish`` accepts no blocks again from their rows."""
        self._is_ending = True
        self.committer.drop_packs(self.queue.take_direct())

    async def flush(self) -> None:
        """Commit all accepted work; return when it is durable, or dropped and counted in
        ``counters``. Dropped ends of requests are in ``StoreReport.persisted``. Errors are not
        raised. Another task must await ``committer.run``."""
        await self.committer.flush()

    # Reading

    async def read(
        self,
        keys: Sequence[bytes],
        block_ids: Sequence[int],
        deadline: float | None = None,
    ) -> ReadOutcome:
        """Load blocks into rows, and verify them.

        A bad pack is deleted, if the store is writable, after a refresh of the catalogue has shown
        that no process replaced it meanwhile.

        :param block_ids: for each key, the row to fill.
        :param deadline: ``time.monotonic`` time at which blocks fail that are not read yet; None:
            no deadline. A local store reads into rows, so its reads in progress end first.
        :returns: the outcome. An error of the medium is not raised: the outcome lists the keys as
            failed. The content of a failed key's row is undefined.
        :raises ValueError: a row does not exist, a key occurs twice, or there is not one row for
            each key; no row is written.
        """
        num_distinct = len(set(keys))
        if not num_distinct == len(keys) == len(block_ids):
            raise ValueError(
                f"{len(keys)} keys, {num_distinct} of them distinct, for {len(block_ids)} rows"
            )
        self.rows.check(block_ids)
        outcome = await self._loader.read(keys, block_ids, deadline)
        self._announce()
        return outcome

    async def probe(self, keys: Sequence[bytes], deadline: float) -> ReadOutcome:
        """Read and verify the first blocks of these keys, 8 MiB or one block, into memory that is
        then discarded, to measure the medium.

        :param keys: distinct; at least one.
        :param deadline: ``time.monotonic`` time at which the probe ends, whatever the medium does.
        """
        outcome = await self._loader.probe(keys, deadline)
        self._announce()
        return outcome

    # Report

    def _announce(self) -> None:
        """Have the other tasks look for due work, and for a report to send."""
        self.committer.has_work.set()
        if self.view.report != StoreReport():
            self.committer.changed.set()

    def take_report(self) -> StoreReport:
        """Return the changes since the last call, and clear ``view.report``, in which they
        are. Keys that the store held when it was opened are not included."""
        report = self.view.report
        self.view.report = StoreReport()
        return report

    def close(self, *, is_sound: bool = True) -> None:
        """Close the backend; drop what is not committed. No task may use the store. Idempotent.

        :param is_sound: False: after an internal error, the index is not saved for the next
            opening.
        """
        self.sources.close()
        self.view.close(saves=is_sound)


def start_threads(backend: Backend, options: StoreOptions) -> StoreThreads:
    """Start threads for a store; the caller closes them."""
    num_readers = options.io_threads
    if backend.capabilities.remote:
        # more threads than cores, because readers mostly wait
        num_readers = MAX_IO_THREADS
    return StoreThreads(num_readers)


def _notice(
    backend: Backend,
    identity: Identity,
    options: StoreOptions,
    url: str,
) -> str:
    """Return ``Store.notice``: one line that names the fields in which the identity differs from
    the nearest namespace. It is empty if the store has this identity, or no other one.

    :raises IdentityMismatchError: ``strict_identity`` is set, and the store has only other
        identities.
    """
    if backend.holds(identity.digest):
        return ""
    most_compared = None  # no maximum
    if backend.capabilities.remote:
        most_compared = _COMPARED_REMOTELY
    namespaces = islice(backend.namespaces(), most_compared)
    others = [namespace.identity for namespace in namespaces]
    # the namespace may have appeared since ``holds``: another engine has begun it, or the medium
    # answers only now
    if not others or identity in others:
        return ""
    nearest = identity.nearest(others)
    differences = identity.diff(nearest)
    if options.strict_identity:
        raise IdentityMismatchError(url, differences)
    name = printable(Path(nearest.model_name).name)
    if not name:
        name = nearest.digest.hex()[:8]
    return (
        f"{url} holds nothing for this model yet, only for another model ({name}: other "
        f"{_summary(differences)}); see persistkv why"
    )


def _summary(differences: Iterable[FieldDifference]) -> str:
    """Return the names of the fields that differ, the first ones of many."""
    fields = [printable(difference.field) for difference in differences]
    # False sorts before True: weights and dtype before the model's configuration
    fields.sort(key=lambda field: field.startswith("config"))
    shown = ", ".join(fields[:_NOTICED_FIELDS])
    if len(fields) > _NOTICED_FIELDS:
        shown += f" and {len(fields) - _NOTICED_FIELDS} more"
    return shown
