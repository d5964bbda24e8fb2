"""Loads of blocks into rows: which packs hold them, reads in parts, and what failed."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Sequence
from functools import partial

from persistkv.errors import StoreError
from persistkv.memory.budget import MemoryShares
from persistkv.memory.rows import BlockMemory
from persistkv.storage.commit_queue import CommitQueue
from persistkv.storage.committer import describe_shortage
from persistkv.storage.index import HeldPack
from persistkv.storage.load import (
    FrameRead,
    ReadOutcome,
    Scratch,
    part_bytes,
    plan_reads,
    read_part,
)
from persistkv.storage.namespace_view import NamespaceView
from persistkv.storage.records import StoreCounters, StoreOptions

logger = logging.getLogger(__name__)


class Loader:
    """Loads blocks of a store's own namespace, and of an adopted one, into rows."""

    def __init__(
        self,
        catalogue: NamespaceView,
        rows: BlockMemory,
        queue: CommitQueue,
        counters: StoreCounters,
        options: StoreOptions,
        sources: Callable[[], Sequence[NamespaceView]],
    ) -> None:
        """:param sources: returns the namespaces that serve loads, in order."""
        self._catalogue = catalogue
        self._rows = rows
        self._queue = queue
        self._counters = counters
        self._sources = sources
        self._scratch_bytes = MemoryShares.of(options.staging_bytes).part
        self._scratch = Scratch(self._scratch_bytes)
        capabilities = catalogue.backend.capabilities
        self._remote = capabilities.remote
        self._writable = capabilities.writable

    async def read(
        self, keys: Sequence[bytes], block_ids: Sequence[int]
    ) -> ReadOutcome:
        """See ``Store.read``."""
        try:
            outcome = await self._fill(keys, block_ids)
        except (OSError, MemoryError) as error:
            # no row is in use: the parts of a read raise nothing
            why = describe_shortage(error)
            logger.warning("the blocks of a load job are misses: %s", why)
            return ReadOutcome(list(keys))
        self._counters.missed_blocks += len(outcome.failed)
        self._counters.loaded_blocks += len(keys) - len(outcome.failed)
        self._counters.loaded_bytes += outcome.raw_bytes
        # before the caller stores a failed block again: it must not count as held
        self._suspect(outcome)
        return outcome

    async def _fill(
        self, keys: Sequence[bytes], block_ids: Sequence[int]
    ) -> ReadOutcome:
        threads = self._catalogue.threads
        size = part_bytes(
            len(keys) * self._rows.layout.row_stride,
            threads.readers,
            remote=self._remote,
        )
        row_of = dict(zip(keys, block_ids, strict=True))
        reads: list[Callable[[], ReadOutcome]] = []
        missing = list(keys)
        for source in self._sources():
            if not missing:
                break
            try:
                holders = await source.holders(missing)
            except StoreError as error:
                # all blocks are misses, or the next namespace serves them
                source.log_failure(error)
                continue
            rows = [row_of[key] for key in missing]
            parts, missing = plan_reads(
                holders,
                self._rows,
                missing,
                rows,
                size,
                self._scratch_bytes,
                remote=self._remote,
            )
            self._record_uses(source, parts)
            where = source.backend, source.namespace, self._rows, self._scratch
            for part in parts:
                reads.append(partial(read_part, *where, part))
        outcome = ReadOutcome(missing)
        for read in await threads.read(reads):
            outcome.add(read)
        return outcome

    def _record_uses(
        self, source: NamespaceView, parts: Iterable[Sequence[FrameRead]]
    ) -> None:
        """Record a use of the packs to read, if they are in the store's own namespace: the blocks
        of another one are stored again in the own one."""
        if source is not self._catalogue or not self._writable:
            return
        for part in parts:
            self._queue.touch(read.pack.pack_id for read in part)

    def _suspect(self, outcome: ReadOutcome) -> None:
        """Remove packs with bad or missing frames from the index that they are in."""
        for source in self._sources():
            packs: list[HeldPack] = []
            for pack in outcome.suspects.values():
                if pack.table.namespace == source.namespace:
                    packs.append(pack)
            if packs:
                source.distrust(packs, outcome.bad_frames)
