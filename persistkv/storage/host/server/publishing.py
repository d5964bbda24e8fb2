"""Publishing of a store's changes to its engine: lookup tables and reports."""

from __future__ import annotations

import asyncio
import logging

from persistkv.storage.host import protocol
from persistkv.storage.host.server.channel import Channel
from persistkv.storage.records import StoreReport
from persistkv.storage.store.store import Store

logger = logging.getLogger(__name__)

_RETRY_S = 0.1  # seconds between attempts to send


class ReportPublisher:
    """Sends the engine each new lookup table, and the store's reports."""

    def __init__(self, store: Store, channel: Channel) -> None:
        self._store = store
        self._channel = channel
        self._table_version = -1
        """Version of the index whose table was shared last; -1: none was."""
        self._is_mapping = False
        """Whether the engine has not mapped the last table yet. The next one waits: an idle engine
        maps none for hours, and each table that was sent must be kept."""
        self._sent = asyncio.Event()
        """Set after each attempt to send changes: ``wait_until_sent`` then looks for further
        ones."""

    async def run(self) -> None:
        """Send new tables and reports until the task is cancelled."""
        changed = self._store.committer.changed
        while True:
            await changed.wait()
            changed.clear()
            while not self.send_report():
                await asyncio.sleep(_RETRY_S)

    def send_report(self) -> bool:
        """Send the new lookup table and the report, unless they have to wait.

        A new table waits while the engine has not mapped the last one: ``note_mapped`` then has it
        sent.

        :returns: False: try again soon, because the engine is slow to receive, or no descriptor was
            free for the table. A table that waits for ``note_mapped`` needs no new attempt.
        """
        # an idle engine may receive nothing for hours, and the outbox must not grow meanwhile
        if self._channel.is_congested:
            return False
        is_sent = True
        if self._has_new_table and not self._is_mapping:
            try:
                # this clears ``_has_new_table``, unless it raises
                table = self.share_table()
                self._channel.send(table)
            except OSError as error:
                # The engine uses the last table until a descriptor is free. The error is logged as
                # text: a log record that holds the exception keeps its stack frames alive, and with
                # them the memory of the engine's rows.
                logger.warning("the new lookup table is not sent yet: %s", str(error))
                is_sent = False
        if self._has_report:
            self._channel.send(self._store.take_report())
        # wake ``wait_until_sent`` even after an error: it checks whether changes are left
        self._sent.set()
        return is_sent

    def share_table(self) -> protocol.Table:
        """Return a message with the present lookup table, which the engine answers with
        ``Mapped``.

        :raises OSError: there is no descriptor left.
        """
        fd, slots = self._store.index.share()
        self._table_version = self._store.index.version
        self._is_mapping = True
        return protocol.Table(slots, fd)

    def note_mapped(self) -> None:
        """Release replaced tables: the engine has mapped the last one that was sent."""
        self._is_mapping = False
        # release replaced tables only now, because the engine has read one until it sent this
        # message
        self._store.index.release_retired()
        # this wakes the committer, which releases the memory of a large table in slices
        self._store.committer.has_work.set()
        # this wakes ``run``, which sends a table that has waited
        self._store.committer.changed.set()

    async def wait_until_sent(self) -> None:
        """Wait until the engine has been sent all changes."""
        self.send_report()
        # ``run`` sends the rest: another table only after the engine has mapped the last one
        while self._has_new_table or self._has_report:
            self._sent.clear()
            await self._sent.wait()

    @property
    def _has_report(self) -> bool:
        """Whether the store has changes to report."""
        return self._store.view.report != StoreReport()

    @property
    def _has_new_table(self) -> bool:
        """Whether the index has a newer lookup table than the one that was shared last."""
        return self._store.index.version != self._table_version
