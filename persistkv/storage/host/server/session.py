"""An open store and its engine: the tasks that serve it, from its opening to its end."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable
from functools import partial
from typing import Any

from persistkv.base import StoredContext
from persistkv.errors import CorruptPackError, StoreError
from persistkv.storage.host import protocol
from persistkv.storage.host.server.channel import Channel
from persistkv.storage.host.server.jobs import Jobs
from persistkv.storage.host.server.prewarm import recent_contexts
from persistkv.storage.host.server.publishing import ReportPublisher
from persistkv.storage.host.server.status_publisher import StatusPublisher
from persistkv.storage.identity import Identity
from persistkv.storage.stats import BackendStats
from persistkv.storage.store.namespace_view import NamespaceView
from persistkv.storage.store.savings import SavingsRecorder
from persistkv.storage.store.store import Store

logger = logging.getLogger(__name__)

_SHORT_ID = 8  # hexadecimal digits of a namespace's id in log lines
_GIB = 1 << 30


def _keys_of(message: protocol.Loaded | protocol.Touch) -> list[bytes]:
    """Return the keys of a message; an empty list, which is logged, if they cannot be unpacked."""
    try:
        return message.keys.unpack()
    except CorruptPackError as error:
        # log the error as text: a log record that holds the exception keeps its stack frames alive,
        # and with them the memory of the engine's rows
        logger.error("the keys of a message are ignored: %s", str(error))
        return []


async def _record_savings(savings: SavingsRecorder, view: NamespaceView) -> None:
    """Write the statistics of restored tokens and prefills periodically, until the task is
    cancelled."""
    while True:
        await asyncio.sleep(savings.interval_s)
        await view.call(savings.write)


class Session:
    """Serves an engine from the opening of its store on."""

    def __init__(
        self,
        store: Store,
        channel: Channel,
        tasks: asyncio.TaskGroup,
        hello: protocol.Hello,
    ) -> None:
        """Start the tasks of the store, and inform the engine that it is open.

        :param tasks: the group to which tasks are added.
        :param hello: the message for which the store was opened.
        :raises OSError: there is no descriptor for the lookup table.
        """
        self.store = store
        self._channel = channel
        self._tasks = tasks
        self._publisher = ReportPublisher(store, channel)
        self._jobs = Jobs(store, channel, self._publisher, tasks)
        self._status = StatusPublisher(store, self._jobs, hello.engine_pid)
        # send the table first, because the engine sends jobs only after this message
        table = self._publisher.share_table()
        opened = protocol.Opened(
            table,
            store.notice,
            prefill=store.savings.prefill,
            sends_held_blocks=store.sources.active,
        )
        channel.send(opened)
        endless = (
            store.committer.run(),
            self._jobs.run(),
            self._publisher.run(),
            self._status.run(),
            # use a function instead of a method, whose task would refer to the session: in that
            # cycle, a closed session would keep the rows mapped
            _record_savings(store.savings, store.view),
        )
        self._running = [tasks.create_task(run) for run in endless]
        """Tasks that run until ``end`` cancels them."""
        tasks.create_task(self._log_opening(hello))

    def handle(self, message: Any) -> None:
        """Process one message from the engine, other than the first and the last one."""
        match message:
            case protocol.Touch():
                self.store.touch(_keys_of(message))
            case protocol.Loaded():
                # no keys, or unreadable ones, mean that any block may have been loaded elsewhere
                self.store.sources.loaded_elsewhere(_keys_of(message))
            case protocol.Saved():
                self.store.savings.add(
                    message.restored_tokens,
                    message.labels,
                    message.prefill_tokens,
                    message.prefill_s,
                )
            case protocol.Mapped():
                self._publisher.note_mapped()
            case protocol.AskStats():
                self._tasks.create_task(self._answer_stats(message))
            case protocol.AskRecent():
                self._tasks.create_task(self._answer_recent(message))
            case _:
                self._jobs.handle(message)

    async def _log_opening(self, hello: protocol.Hello) -> None:
        """Log what the store holds: one line for operators after each start."""
        backend = self.store.view.backend
        totals = await self._read_totals()
        filled = "the medium fails"
        # without an answer of its medium, a shared store is open and finds its content later
        if totals is not None and backend.breaker_state in (None, "closed"):
            filled = _fill_level(totals)
        logger.info(
            "%s open, namespace %s (%s), %d blocks held, %s",
            hello.url.partition("?")[0],
            self.store.namespace.hex()[:_SHORT_ID],
            Identity.decode(hello.identity).model_name or "unnamed model",
            len(self.store.index),
            filled,
        )

    async def _read_totals(self) -> BackendStats | None:
        """Return the store's totals; None: the medium failed."""
        view = self.store.view
        try:
            return await view.call(view.backend.stats)
        except StoreError as error:
            # Commits and lookups log this failure as a warning. Log it as text, because a log
            # record with the exception would keep the rows mapped.
            logger.debug("totals cannot be read: %s", str(error))
            return None

    async def _answer_stats(self, ask: protocol.AskStats) -> None:
        """Answer with the state of the store and of this process."""
        store = self.store
        backend = store.view.backend
        totals = await self._read_totals()
        disk_bytes = None if totals is None else totals.disk_bytes
        capacity = None if totals is None else totals.capacity
        stats = protocol.HostStats(
            ask.token,
            store.counters,
            held_blocks=len(store.index),
            staged_bytes=store.queue.staging.num_bytes,
            disk_bytes=disk_bytes,
            capacity=capacity,
            cpu_seconds=time.process_time(),
            requests=dict(backend.requests),
            breaker=backend.breaker_state,
        )
        self._channel.send(stats)

    async def _answer_recent(self, ask: protocol.AskRecent) -> None:
        """Answer with the contexts that were used last; with none if they cannot be read."""
        store = self.store
        contexts: list[StoredContext] = []
        read = partial(
            recent_contexts,
            store.view.backend,
            store.namespace,
            store.contains,
            ask.max_blocks,
            ask.choice,
        )
        try:
            contexts = await store.view.call(read)
        except StoreError as error:
            why = str(error)
            logger.warning("the most recently used contexts cannot be read: %s", why)
        self._channel.send(protocol.Recent.of(contexts))

    async def end(self, on_released: Callable[[], None]) -> None:
        """Drop the jobs that have not begun, commit accepted work, and end the tasks.

        :param on_released: called when no row is in use any more.
        """
        # begin to flush before the wait for jobs, which lasts as long as a read hangs
        flushing = self._tasks.create_task(self.store.flush())
        await self._jobs.end()
        on_released()
        await flushing
        # jobs that ended after the start of this flush have added work: blocks to store, and uses
        # of blocks
        while not self.store.queue.is_empty or self.store.queue.uses:
            await self.store.flush()
        # cancel these tasks, because they may wait for calls on other threads, such as a refresh,
        # whose results nothing needs any more
        for task in self._running:
            task.cancel()
        await self.store.view.call(self.store.savings.write)
        # Withdraw the status after the cancellation: the writer's thread runs its calls in order,
        # so it deletes the status after a last write that the cancelled task has begun.
        await self._status.withdraw()


def _fill_level(totals: BackendStats) -> str:
    """Return used space and capacity as text for a log line."""
    used_gib = totals.disk_bytes / _GIB
    if totals.capacity is None:
        return f"{used_gib:.1f} GiB"
    capacity_gib = totals.capacity / _GIB
    return f"{used_gib:.1f} of {capacity_gib:.1f} GiB"
