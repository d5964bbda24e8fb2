"""What an engine shows of a store that it has open: a small row that ``persistkv top`` and exporters read.

It is no part of what is stored: nothing is lost with it, nobody waits for it, and a row that does not read is passed
over.
"""

from __future__ import annotations

import logging
import os
import socket
import time
import uuid
from functools import partial
from typing import TYPE_CHECKING

import msgspec

from persistkv.errors import StoreError
from persistkv.storage.backend import Backend
from persistkv.storage.executor import Executor
from persistkv.storage.extensions import SupportsCounters, SupportsStatus, statuses
from persistkv.storage.records import StoreCounters

if TYPE_CHECKING:
    from persistkv.storage.store import Store

logger = logging.getLogger(__name__)

_MISSED = 5  # rows in a row that an engine may be late with before it counts as gone


class EngineStatus(msgspec.Struct, frozen=True, kw_only=True):
    """One row. Fields are added, never renamed: engines of several releases share a store."""

    engine: str
    """Random, drawn when the store was opened."""
    host: str
    """The machine's name."""
    pid: int
    """Of the process that does the I/O."""
    namespace: str
    """The namespace's id, hexadecimal."""
    started: float
    """Seconds since the epoch."""
    time: float
    """When this row was made, by that machine's clock."""
    interval_s: float
    """When the next one is due."""
    counters: StoreCounters
    """Since ``started``."""
    indexed_blocks: int
    """Blocks of the namespace that a lookup finds."""
    staged_bytes: int
    """Raw bytes of copies that wait to be written, or are."""
    waiting_jobs: int
    """Store jobs and ends of requests that were not begun."""
    writing_jobs: int
    """Store jobs whose rows are in use."""
    loading_jobs: int
    """Load jobs that wait or are read."""
    breaker: str | None = None
    """See ``Backend.breaker_state``."""

    def encode(self) -> bytes:
        """The row."""
        return msgspec.json.encode(self)

    def is_live(self, now: float) -> bool:
        """Whether the engine can be taken to run still."""
        return now - self.time <= _MISSED * self.interval_s


def read_statuses(backend: Backend) -> list[EngineStatus]:
    """The rows that read, those of engines that went without a word included, in the order of their start.

    :raises StoreError: the medium failed.
    """
    found: list[EngineStatus] = []
    for row in statuses(backend).values():
        try:
            found.append(msgspec.json.decode(row, type=EngineStatus))
        except (msgspec.DecodeError, UnicodeDecodeError):
            continue
    return sorted(found, key=lambda status: (status.started, status.engine))


class StatusPublisher:
    """Publishes rows as often as the backend asks for them; where that fails, the next one is tried all the same."""

    def __init__(self, store: Store, executor: Executor) -> None:
        self._store = store
        self._executor = executor
        backend = store.catalogue.backend
        self._backend = backend if isinstance(backend, SupportsStatus) else None
        self._interval_s = None if self._backend is None else self._backend.status_interval_s
        self.engine = uuid.uuid4().hex
        """The name of its rows."""
        self._started = time.time()
        self._due = time.monotonic()
        self._failed = False

    def tick(self, *, waiting_jobs: int, writing_jobs: int, loading_jobs: int) -> None:
        """Begin to publish, where it is time and nothing is being written."""
        now = time.monotonic()
        if self._backend is None or self._interval_s is None or now < self._due or self._executor.writing:
            return
        self._due = now + self._interval_s
        status = EngineStatus(
            engine=self.engine,
            host=socket.gethostname(),
            pid=os.getpid(),
            namespace=self._store.namespace.hex(),
            started=self._started,
            time=time.time(),
            interval_s=self._interval_s,
            counters=self._store.counters,
            indexed_blocks=len(self._store.index),
            staged_bytes=self._store.staged_bytes,
            waiting_jobs=waiting_jobs,
            writing_jobs=writing_jobs,
            loading_jobs=loading_jobs,
            breaker=self._backend.breaker_state if isinstance(self._backend, SupportsCounters) else None,
        )
        self._executor.begin_write(self._publish(self._backend, status.encode()))

    async def _publish(self, backend: SupportsStatus, row: bytes) -> None:
        try:
            await self._executor.write(partial(backend.publish_status, self.engine, row))
        except StoreError as error:
            if not self._failed:
                logger.info("what this engine does is not shown to others: %s", error)
            self._failed = True
        else:
            self._failed = False

    def withdraw(self) -> None:
        """Take the row away. Nothing may be written meanwhile."""
        if self._backend is None or self._interval_s is None:
            return
        try:
            self._backend.publish_status(self.engine, None)
        except StoreError as error:
            logger.info("the status of engine %s stays: %s", self.engine, error)
