"""Loads of blocks into rows: which packs hold them, reads in parts, and what failed."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from functools import partial
from typing import NamedTuple

from persistkv.errors import StoreError
from persistkv.memory.budget import MemoryShares
from persistkv.memory.rows import BlockMemory
from persistkv.storage.commit_queue import CommitQueue
from persistkv.storage.committer import describe_shortage
from persistkv.storage.identity.canary import Canary
from persistkv.storage.index import HeldPack
from persistkv.storage.load import (
    ReadOutcome,
    Scratch,
    part_bytes,
    plan_reads,
    read_part,
)
from persistkv.storage.namespace_view import NamespaceView
from persistkv.storage.records import StoreCounters, StoreOptions

logger = logging.getLogger(__name__)


class _Wanted(NamedTuple):
    """Blocks to load."""

    keys: Sequence[bytes]
    block_ids: Sequence[int]
    """For each key, the row to fill."""
    part_bytes: int
    """Bound on the stored bytes of a part."""


class Loader:
    """Loads blocks of a store's own namespace, and of an adopted one, into rows."""

    def __init__(
        self,
        catalogue: NamespaceView,
        rows: BlockMemory,
        queue: CommitQueue,
        counters: StoreCounters,
        options: StoreOptions,
        canary: Canary | None,
    ) -> None:
        self._catalogue = catalogue
        self._rows = rows
        self._queue = queue
        self._counters = counters
        self._canary = canary
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
        self._distrust(outcome)
        return outcome

    async def _fill(
        self, keys: Sequence[bytes], block_ids: Sequence[int]
    ) -> ReadOutcome:
        catalogue = self._catalogue
        size = part_bytes(
            len(keys) * self._rows.layout.row_stride,
            catalogue.threads.readers,
            remote=self._remote,
        )
        wanted = _Wanted(keys, block_ids, size)
        # if the tables cannot be read, all blocks are misses, or the adopted namespace serves them
        holders: Sequence[HeldPack | None] = [None] * len(keys)
        try:
            holders = await catalogue.holders(keys)
        except StoreError as error:
            catalogue.log_failure(error)
        reads, missing = self._plan(catalogue, holders, wanted)
        if missing:
            more, missing = await self._plan_adopted(wanted, missing)
            reads += more
        outcome = ReadOutcome(missing)
        for part in await catalogue.threads.read(reads):
            outcome.add(part)
        return outcome

    async def _plan_adopted(
        self, wanted: _Wanted, missing: list[bytes]
    ) -> tuple[list[Callable[[], ReadOutcome]], list[bytes]]:
        """Plan to read the missing blocks from the adopted namespace, if there is one."""
        adopted = None if self._canary is None else self._canary.adopted
        if adopted is None:
            return [], missing
        row_of = dict(zip(wanted.keys, wanted.block_ids, strict=True))
        block_ids = [row_of[key] for key in missing]
        try:
            holders = await adopted.usable_holders(missing)
        except StoreError as error:
            adopted.log_failure(error)
            return [], missing
        return self._plan(
            adopted, holders, wanted._replace(keys=missing, block_ids=block_ids)
        )

    def _plan(
        self,
        catalogue: NamespaceView,
        holders: Sequence[HeldPack | None],
        wanted: _Wanted,
    ) -> tuple[list[Callable[[], ReadOutcome]], list[bytes]]:
        """Return the calls that read blocks of one namespace into rows, and the missing keys, see
        ``plan_reads``. If it is the store's own namespace, record a use of the packs to read.
        """
        parts, missing = plan_reads(
            holders,
            self._rows,
            wanted.keys,
            wanted.block_ids,
            wanted.part_bytes,
            self._scratch_bytes,
            remote=self._remote,
        )
        # uses of an adopted namespace are not recorded: its blocks are stored again in the own one
        if catalogue is self._catalogue and self._writable:
            for part in parts:
                self._queue.touch(read.pack.pack_id for read in part)
        where = catalogue.backend, catalogue.namespace, self._rows, self._scratch
        return [partial(read_part, *where, part) for part in parts], missing

    def _distrust(self, outcome: ReadOutcome) -> None:
        """Remove packs with bad or missing frames from the index that they are in."""
        own: list[HeldPack] = []
        others: list[HeldPack] = []
        for pack in outcome.suspects.values():
            is_own = pack.table.namespace == self._catalogue.namespace
            (own if is_own else others).append(pack)
        if own:
            self._catalogue.distrust(own, outcome.bad_frames)
        adopted = None if self._canary is None else self._canary.adopted
        if others and adopted is not None:
            adopted.distrust(others, outcome.bad_frames)
