"""One namespace of an open backend: its blocking calls, the index of durable keys, pending news, and the construction
of manifests.

The coroutines of this file run as flows of ``Executor.begin_write``, so their results are applied in call order.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import NamedTuple, TypeVar

import msgspec

from persistkv.config import RowLayout
from persistkv.errors import StoreError, StoreFullError
from persistkv.memory.budget import give_back, no_collections
from persistkv.storage.backend import Backend, Changes, CommitBatch, CommitResult, ManifestWrite
from persistkv.storage.executor import Executor
from persistkv.storage.extensions import InspectableBackend
from persistkv.storage.format.keys import PackedKeys
from persistkv.storage.format.manifest import ManifestKeys, RequestManifest
from persistkv.storage.format.pack_writer import NewPack, PackWriter
from persistkv.storage.index import HeldPack, Index
from persistkv.storage.records import News, RequestEnd, StoreCounters

logger = logging.getLogger(__name__)

_COMPLAIN_S = 60.0  # seconds between warnings that blocks are dropped
_QUARANTINE_ATTEMPTS = 3
SHORTENED_AT_ONCE = 64
"""Manifests that one commit shortens. Many requests may share a bad pack: they are shortened in several short commits.
The last commit deletes the pack."""

T = TypeVar("T")


class NamespaceView:
    """One namespace of an open backend, with its index; see the module docstring."""

    def __init__(
        self, backend: Backend, namespace: bytes, executor: Executor, counters: StoreCounters, layout: RowLayout
    ) -> None:
        """Read the whole catalogue, blocking. Its keys are not reported as news.

        :raises StoreError: the catalogue could not be read.
        """
        self.backend = backend
        self.namespace = namespace
        self.executor = executor
        self.index = Index()
        self.cursor: bytes | None = None
        """Position in the backend's change log; None: the index is out of date and the next refresh reads the whole
        catalogue."""
        self.news = News()
        self._counters = counters
        self._block_bytes = [group.block_bytes for group in layout.groups]
        self._distrusted: dict[bytes, HeldPack] = {}
        """Packs that were removed from the index because they failed to read, until the backend reports their removal
        or replacement, or ``quarantine`` decides about them."""
        self._complained_at: float | None = None
        with no_collections():
            self._learn(backend.changes(namespace, None))
        give_back()  # about 50 bytes per block

    async def call(self, call: Callable[[], T]) -> T:
        """Run a blocking call on the backend with ``Executor.write``.

        :raises StoreError: the call failed. Other exceptions (no memory to encode a frame, a bug in a driver) are
            converted to this one: they fail the call, and the store stays usable.
        """
        try:
            return await self.executor.write(call)
        except StoreError:
            raise
        except Exception as error:
            raise StoreError(f"{type(error).__name__}: {error}") from error

    def commit(self, batch: CommitBatch) -> Awaitable[CommitResult]:
        """Run ``Backend.commit``. After it ends, also with an error, the blocks of its packs are no longer read."""
        return self.call(partial(_commit, self.backend, self.namespace, batch))

    def complain(self, error: StoreError) -> None:
        """Log a warning, at most one per minute, so that a full store does not flood the log."""
        now = time.monotonic()
        if self._complained_at is None or now - self._complained_at >= _COMPLAIN_S:
            self._complained_at = now
            kind = "the store is full" if isinstance(error, StoreFullError) else "the store failed"
            logger.warning("%s (%s); what it was given is dropped", kind, str(error))  # str: the error references rows

    async def refresh(self) -> None:
        """Apply the changes that other processes committed.

        :raises StoreError: the medium failed; the index is unchanged.
        """
        self._learn(await self.call(partial(self.backend.changes, self.namespace, self.cursor)))

    async def refresh_or_complain(self) -> None:
        """Refresh; log a failure instead of raising it."""
        try:
            await self.refresh()
        except StoreError as error:
            self.complain(error)

    def _learn(self, changes: Changes) -> None:
        if changes.reset:
            self._learn_anew(changes)
        else:
            self._forget(changes.removed)
            for table in changes.added:
                self._distrusted.pop(table.pack_id, None)
                self.news.stored += self.index.add(table)
        self.cursor = changes.cursor

    def _learn_anew(self, changes: Changes) -> None:
        before, self.index = self.index, Index()
        self._distrusted.clear()
        for table in changes.added:
            self.index.add(table)
        if before:
            self._gone([key for key in before if key not in self.index])
            self.news.stored += [key for key in self.index if key not in before]

    async def committed(self, writers: Sequence[NewPack], result: CommitResult, *, followed: bool) -> None:
        """Apply the result of this store's own commit to the index, the counters and the news.

        :param followed: no other process committed between the last refresh and this commit, so its cursor can be
            adopted.
        """
        self._counters.commits += 1
        unknown = not all(writer.written for writer in writers)
        if followed and not unknown:
            self.cursor = result.cursor
        for writer in writers:
            if writer.written:
                self._stored(writer)
        self.count_held([writer for writer in writers if not writer.written])
        mine = [pack for pack in result.evicted if pack.namespace == self.namespace]
        self._counters.evicted_blocks += sum(len(pack.keys) for pack in mine)
        self._forget([pack.pack_id for pack in mine])
        if unknown and followed:
            self.cursor = None  # the backend holds a pack that the index lacks: reload the catalogue
        if unknown or not followed:
            await self.refresh_or_complain()

    def count_held(self, writers: Iterable[NewPack]) -> None:
        """Count the blocks of packs that the backend held already: another process stored them, or an earlier commit of
        this store took effect although it reported an error.
        """
        self._counters.held_blocks += sum(len(writer.keys) for writer in writers)

    def _stored(self, writer: NewPack) -> None:
        table = writer.table
        self._distrusted.pop(table.pack_id, None)
        self.news.stored += self.index.add(table)
        self._counters.stored_blocks += len(table.keys)
        self._counters.stored_raw_bytes += table.raw_length
        self._counters.stored_bytes += table.payload_length

    def distrust(self, packs: Iterable[HeldPack]) -> None:
        """Remove packs that failed to read from the index. A pack that was replaced since then is kept."""
        for pack in packs:
            if self.index.holds(pack):
                self._gone(self.index.remove_all([pack.pack_id]))
                self._distrusted[pack.pack_id] = pack

    async def quarantine(self) -> None:
        """Decide about the distrusted packs.

        Packs that were removed or replaced since then need no action. Packs that are unchanged are deleted if the store
        is writable, and the requests that name them are shortened to the part before the pack. If the backend cannot be
        read, all distrusted packs are restored to the index.
        """
        for _ in range(_QUARANTINE_ATTEMPTS):
            try:
                await self.refresh()
            except StoreError as error:  # unknown whether the packs are unchanged
                self.complain(error)
                for pack in self._distrusted.values():
                    self.news.stored += self.index.restore(pack)
                self._distrusted.clear()
                return
            bad = list(self._distrusted)
            if not bad or not self.backend.capabilities.writable:
                return
            if await self._delete(bad):
                return

    async def _delete(self, bad: Sequence[bytes]) -> bool:
        """Delete packs. Return False if another process has committed since the last refresh: it may have replaced
        the packs.

        A failure of the store is logged, and the packs stay distrusted.
        """
        try:
            batch: CommitBatch | None = CommitBatch()
            if isinstance(self.backend, InspectableBackend):
                batch = await self._shorten(self.backend, bad)
            if batch is None:
                return False
            result = await self.commit(replace(batch, bad=bad, seen=self.cursor))
        except StoreError as error:
            self.complain(error)
        else:
            if result.stale:
                return False
            for pack_id in bad:
                self._distrusted.pop(pack_id, None)
            names = ", ".join(pack_id.hex() for pack_id in bad)
            logger.warning("deleted packs whose bytes do not verify: %s; their blocks will be computed again", names)
        await self.refresh_or_complain()  # applies the deletions to the index
        return True

    async def _shorten(self, backend: InspectableBackend, bad: Sequence[bytes]) -> CommitBatch | None:
        """Shorten the requests that name packs, in commits of ``SHORTENED_AT_ONCE``.

        :returns: the last commit, which is still to be done; None if others have committed since our last look.
        """
        maker = ManifestMaker(self.index, self._block_bytes, ())  # the index does not know the packs any more
        heads = await self.call(partial(backend.manifests_naming, self.namespace, bad))
        batch = CommitBatch()
        for start in range(0, len(heads), SHORTENED_AT_ONCE):
            if batch.manifests:
                result = await self.commit(batch)
                if result.stale:
                    return None
                await self.committed([], result, followed=True)
            some = heads[start : start + SHORTENED_AT_ONCE]
            requests = await self.call(partial(read_requests, backend, self.namespace, some))
            batch = shortened(requests, maker, self.cursor)
        return batch

    def _forget(self, pack_ids: Sequence[bytes]) -> None:
        self._gone(self.index.remove_all(pack_ids))
        for pack_id in pack_ids:
            self._distrusted.pop(pack_id, None)

    def _gone(self, keys: Sequence[bytes]) -> None:
        """Report keys as removed. A key that was also stored since the last ``take_news`` is only reported as
        removed.
        """
        gone = set(keys)
        if gone and not gone.isdisjoint(self.news.stored):
            self.news.stored = [key for key in self.news.stored if key not in gone]
        self.news.removed += keys

    def take_news(self) -> News:
        """Return and clear the changes since the last call."""
        news, self.news = self.news, News()
        return news


def _commit(backend: Backend, namespace: bytes, batch: CommitBatch) -> CommitResult:
    for writer in batch.packs:
        writer.restart()
    try:
        return backend.commit(namespace, batch)
    finally:
        for writer in batch.packs:
            writer.settle()


class ManifestMaker:
    """Builds the manifests of one transaction.

    :param block_bytes: raw bytes of one block, for each group.
    :param writers: the packs that the same transaction writes.
    """

    def __init__(self, index: Index, block_bytes: Sequence[int], writers: Sequence[PackWriter]) -> None:
        self._index = index
        self._block_bytes = block_bytes
        self._coming: Mapping[bytes, bytes] = {
            key: writer.pack_id for writer in writers for segment in writer.segments for key in segment.keys
        }

    def make(self, end: RequestEnd) -> tuple[ManifestWrite | None, bool]:
        """Return the manifest of each group's longest durable prefix, and whether it covers the whole context.

        The manifest is None if no group has a durable prefix.
        """
        kept = [self._prefix(keys) for keys in end.group_keys]
        whole = list(map(len, kept)) == list(map(len, end.group_keys))
        if not any(kept):
            return None, whole
        keys: ManifestKeys = tuple(PackedKeys.of(chain) for chain in kept)
        manifest = RequestManifest(
            id=end.manifest_id,
            created=time.time(),
            tokens=end.tokens if whole else min(end.tokens, min(map(len, kept)) * end.block_size),
            group_blocks=tuple(map(len, kept)),
            raw_bytes=sum(len(chain) * size for chain, size in zip(kept, self._block_bytes, strict=True)),
            ordered=end.ordered,
            labels=end.labels,
        )
        return ManifestWrite(manifest, keys, self._packs_of(kept)), whole

    def shorten(self, manifest: RequestManifest, keys: ManifestKeys) -> ManifestWrite | None:
        """Return a manifest as ``make`` would build it now, with the same creation time; None if no block is left.

        The number of tokens per block is estimated from the manifest. For a request of few blocks, the estimate may be
        too high.
        """
        block_size = manifest.tokens // max([1, *manifest.group_blocks])
        chains = tuple(chain.unpack() for chain in keys)
        end = RequestEnd(
            manifest.id, manifest.id, chains, manifest.tokens, block_size, manifest.ordered, manifest.labels
        )
        write, _ = self.make(end)
        if write is None:
            return None
        return replace(write, manifest=msgspec.structs.replace(write.manifest, created=manifest.created))

    def _prefix(self, keys: list[bytes]) -> list[bytes]:
        for position, key in enumerate(keys):
            if key not in self._index and key not in self._coming:
                return keys[:position]
        return keys

    def _packs_of(self, chains: Sequence[Sequence[bytes]]) -> list[bytes]:
        """Return the packs that hold the keys of all groups, sorted by the depth of the first key in each pack."""
        packs: dict[bytes, int] = {}
        for chain in chains:
            for depth, key in enumerate(chain):
                found = self._index.pack_of(key)
                pack_id = self._coming[key] if found is None else found.pack_id
                packs[pack_id] = min(depth, packs.get(pack_id, depth))
        return sorted(packs, key=packs.__getitem__)


class NamedRequest(NamedTuple):
    """A stored request: its manifest, its keys and its pin."""

    manifest: RequestManifest
    keys: ManifestKeys
    pinned: bool


def read_requests(
    backend: InspectableBackend, namespace: bytes, heads: Sequence[RequestManifest]
) -> list[NamedRequest]:
    """Read the keys of requests; skip requests whose keys are missing or damaged.

    :raises StoreError: the medium failed.
    """
    names = [head.id for head in heads]
    rows = zip(heads, backend.manifest_keys(namespace, names), backend.uses(namespace, names), strict=True)
    return [NamedRequest(head, keys, use is not None and use.pinned) for head, keys, use in rows if keys is not None]


def shortened(requests: Iterable[NamedRequest], maker: ManifestMaker, seen: bytes | None) -> CommitBatch:
    """Return the commit that shortens requests and keeps their pins.

    A request of which no block is left is not part of the commit: it is deleted with the bad pack.

    :param maker: uses an index that does not hold the bad packs.
    :param seen: as in ``CommitBatch``.
    """
    shorter: list[ManifestWrite] = []
    pins: list[tuple[str, bool]] = []
    for manifest, keys, pinned in requests:
        if (write := maker.shorten(manifest, keys)) is not None:
            shorter.append(write)
            pins += [(manifest.id, True)] if pinned else []
    return CommitBatch(manifests=shorter, pins=pins, seen=seen)
