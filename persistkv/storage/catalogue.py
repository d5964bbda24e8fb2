"""What is durable in a namespace, as far as one handle on it knows: the index, and the news of how it moved.

Its flows are begun with ``Executor.begin_write``, so that what they learn is applied in the order in which it happened.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Sequence

from persistkv.errors import StoreError
from persistkv.storage.backend import Changes, CommitBatch, CommitResult
from persistkv.storage.index import HeldPack, Index
from persistkv.storage.medium import Medium
from persistkv.storage.pack import PackWriter
from persistkv.storage.records import News, StoreCounters

logger = logging.getLogger(__name__)


class Catalogue:
    """See the top of this file."""

    def __init__(self, medium: Medium, counters: StoreCounters) -> None:
        """Read the whole catalogue, at once; nothing of it is news.

        :raises StoreError: it does not read.
        """
        self.index = Index()
        self.cursor: bytes | None = None
        """Up to which changes are known; None: what is known is not to be trusted."""
        self.news = News()
        self._medium = medium
        self._counters = counters
        self._learn(medium.backend.changes(medium.namespace, None))
        self.news = News()

    async def refresh(self) -> None:
        """Learn what others committed and deleted.

        :raises StoreError: the medium failed; nothing was learnt.
        """
        self._learn(await self._medium.changes(self.cursor))

    async def refresh_or_complain(self) -> None:
        """The same, but a failure is only told."""
        try:
            await self.refresh()
        except StoreError as error:
            self._medium.complain(error)

    def _learn(self, changes: Changes) -> None:
        before = self.index
        if changes.reset:
            self.index = Index()
        self._gone(self.index.remove_all(changes.removed))
        for table in changes.added:
            self._came(key for key in self.index.add(table) if not changes.reset or key not in before)
        if changes.reset:
            self._gone([key for key in before if key not in self.index])
        self.cursor = changes.cursor

    async def committed(self, writers: Sequence[PackWriter], result: CommitResult, *, followed: bool) -> None:
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
        mine = [pack for pack in result.evicted if pack.namespace == self._medium.namespace]
        self._counters.evicted_blocks += sum(len(pack.keys) for pack in mine)
        self._gone(self.index.remove_all(pack.pack_id for pack in mine))
        if unknown and followed:
            self.cursor = None  # the backend holds a pack that our index does not know: learn it anew
        if unknown or not followed:
            await self.refresh_or_complain()

    def _stored(self, writer: PackWriter) -> None:
        table = writer.table
        self._came(self.index.add(table))
        self._counters.stored_blocks += len(table.keys)
        self._counters.stored_raw_bytes += table.raw_length
        self._counters.stored_bytes += table.payload_length

    async def quarantine(self, suspects: Iterable[HeldPack]) -> None:
        """Packs that others deleted or replaced are learnt anew; those that are still the same leave the store."""
        await self.refresh_or_complain()
        bad = [pack.pack_id for pack in suspects if self.index.holds(pack)]
        if not bad:
            return
        self._gone(self.index.remove_all(bad))
        names = ", ".join(pack_id.hex() for pack_id in bad)
        logger.warning("deleting packs whose bytes do not verify: %s; their blocks will be computed again", names)
        try:
            await self._medium.commit(CommitBatch(deletions=bad))
        except StoreError as error:
            self._medium.complain(error)
        await (
            self.refresh_or_complain()
        )  # what could only be reached through them went too, and others may have committed

    def _came(self, keys: Iterable[bytes]) -> None:
        self.news.stored += keys

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
