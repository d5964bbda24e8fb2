"""One namespace of an open backend: its blocking calls, the index of durable keys, and the news since the last look.

Its flows are begun with ``Executor.begin_write``: their results are applied in the order of the calls.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import TypeVar

from persistkv.config import RowLayout
from persistkv.errors import StoreError, StoreFullError
from persistkv.storage.backend import Backend, Changes, CommitBatch, CommitResult
from persistkv.storage.ending import ManifestMaker
from persistkv.storage.executor import Executor
from persistkv.storage.extensions import InspectableBackend
from persistkv.storage.index import HeldPack, Index
from persistkv.storage.memory import give_back, no_collections
from persistkv.storage.pack_writer import NewPack
from persistkv.storage.records import News, StoreCounters
from persistkv.storage.shortening import SHORTENED_AT_ONCE, read_requests, shortened

logger = logging.getLogger(__name__)

_COMPLAIN_S = 60.0  # seconds between warnings that blocks are dropped
_QUARANTINE_ATTEMPTS = 3

T = TypeVar("T")


class Catalogue:
    """See the top of this file."""

    def __init__(
        self, backend: Backend, namespace: bytes, executor: Executor, counters: StoreCounters, layout: RowLayout
    ) -> None:
        """Read the whole catalogue, at once; nothing of it is news.

        :raises StoreError: it does not read.
        """
        self.backend = backend
        self.namespace = namespace
        self.executor = executor
        self.index = Index()
        self.cursor: bytes | None = None
        """Up to which changes are known; None: what is known is not to be trusted."""
        self.news = News()
        self._counters = counters
        self._block_bytes = [group.block_bytes for group in layout.groups]
        self._distrusted: dict[bytes, HeldPack] = {}
        """Packs that left the index because they did not read, as long as nothing was heard of them."""
        self._complained_at: float | None = None
        with no_collections():
            self._learn(backend.changes(namespace, None))
        give_back()  # some 50 bytes a block

    async def call(self, call: Callable[[], T]) -> T:
        """Run a blocking call on the backend with ``Executor.write``.

        :raises StoreError: whatever the call raised: no memory to encode a frame and a fault of a driver cost what the
            call was for, and not the store.
        """
        try:
            return await self.executor.write(call)
        except StoreError:
            raise
        except Exception as error:
            raise StoreError(f"{type(error).__name__}: {error}") from error

    async def commit(self, batch: CommitBatch) -> CommitResult:
        """As ``Backend.commit``; once it has ended, also by raising, the blocks of its packs are not read any more."""
        return await self.call(partial(_commit, self.backend, self.namespace, batch))

    def complain(self, error: StoreError) -> None:
        """Warn, at most once a minute: a full store would fill the log."""
        now = time.monotonic()
        if self._complained_at is None or now - self._complained_at >= _COMPLAIN_S:
            self._complained_at = now
            kind = "the store is full" if isinstance(error, StoreFullError) else "the store failed"
            logger.warning("%s (%s); what it was given is dropped", kind, str(error))  # the error holds rows

    async def refresh(self) -> None:
        """Learn what others committed and deleted.

        :raises StoreError: the medium failed; nothing was learnt.
        """
        self._learn(await self.call(partial(self.backend.changes, self.namespace, self.cursor)))

    async def refresh_or_complain(self) -> None:
        """The same, but a failure is only told."""
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
        """Take in what a commit of ours did.

        :param followed: nobody committed between our last look and this commit: its cursor is ours.
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
            self.cursor = None  # the backend holds a pack that our index does not know: learn it anew
        if unknown or not followed:
            await self.refresh_or_complain()

    def count_held(self, writers: Iterable[NewPack]) -> None:
        """Packs that somebody else stored meanwhile, or a commit of ours that failed and was done all the same."""
        self._counters.held_blocks += sum(len(writer.keys) for writer in writers)

    def _stored(self, writer: NewPack) -> None:
        table = writer.table
        self._distrusted.pop(table.pack_id, None)
        self.news.stored += self.index.add(table)
        self._counters.stored_blocks += len(table.keys)
        self._counters.stored_raw_bytes += table.raw_length
        self._counters.stored_bytes += table.payload_length

    def distrust(self, packs: Iterable[HeldPack]) -> None:
        """Forget packs that did not read as the index knew them; one that was replaced since is another, and stays."""
        for pack in packs:
            if self.index.holds(pack):
                self._gone(self.index.remove_all([pack.pack_id]))
                self._distrusted[pack.pack_id] = pack

    async def quarantine(self) -> None:
        """Of the packs that are distrusted, those that went or were replaced meanwhile are no matter; those that are
        still the same leave the store, where it takes that, and the requests that name them are shortened to what
        stands before. Where nobody can tell, they are trusted again.
        """
        for _ in range(_QUARANTINE_ATTEMPTS):
            try:
                await self.refresh()
            except StoreError as error:  # nobody can tell whether they are the same
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
        """Delete packs as our last look saw them; False: others have committed since, and may have replaced them."""
        try:
            maker = ManifestMaker(self.index, self._block_bytes, ())  # the index does not know them any more
            if isinstance(self.backend, InspectableBackend) and not await self._shorten(self.backend, bad, maker):
                return False
            result = await self.commit(CommitBatch(bad=bad, seen=self.cursor))
        except StoreError as error:
            self.complain(error)
        else:
            if result.stale:
                return False
            for pack_id in bad:
                self._distrusted.pop(pack_id, None)
            names = ", ".join(pack_id.hex() for pack_id in bad)
            logger.warning("deleted packs whose bytes do not verify: %s; their blocks will be computed again", names)
        await self.refresh_or_complain()  # what could only be reached through them went too
        return True

    async def _shorten(self, backend: InspectableBackend, bad: Sequence[bytes], maker: ManifestMaker) -> bool:
        """Shorten the requests that name packs; False: others have committed since our last look."""
        heads = await self.call(partial(backend.manifests_naming, self.namespace, bad))
        for start in range(0, len(heads), SHORTENED_AT_ONCE):
            some = heads[start : start + SHORTENED_AT_ONCE]
            requests = await self.call(partial(read_requests, backend, self.namespace, some))
            result = await self.commit(shortened(requests, maker, self.cursor))
            if result.stale:
                return False
            await self.committed([], result, followed=True)
        return True

    def _forget(self, pack_ids: Sequence[bytes]) -> None:
        self._gone(self.index.remove_all(pack_ids))
        for pack_id in pack_ids:
            self._distrusted.pop(pack_id, None)

    def _gone(self, keys: Sequence[bytes]) -> None:
        """News tells what is there in the end: a key that came and went since it was last taken only went."""
        gone = set(keys)
        if gone and not gone.isdisjoint(self.news.stored):
            self.news.stored = [key for key in self.news.stored if key not in gone]
        self.news.removed += keys

    def take_news(self) -> News:
        """What came and went since the last call."""
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
