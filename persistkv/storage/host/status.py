"""Engine status: a small row per engine and open store, which ``persistkv top`` and exporters read.

Status is best effort: rows may be lost, no call waits for one, and readers skip rows that cannot be
decoded.
"""

from __future__ import annotations

import logging
import os
import socket
import time
import uuid
from contextlib import suppress
from functools import partial
from typing import TYPE_CHECKING

import msgspec

from persistkv.errors import StoreError
from persistkv.storage.backend import Backend
from persistkv.storage.executor import Executor
from persistkv.storage.records import StoreCounters

if TYPE_CHECKING:
    from persistkv.storage.store import Store

logger = logging.getLogger(__name__)

# an engine without an update for more than this many intervals counts as stopped
_MISSED = 5


class EngineStatus(msgspec.Struct, frozen=True, kw_only=True):
    """The status row of one engine. Fields are added, never renamed: engines of several releases
    share a store."""

    engine: str
    """Random name of 32 hexadecimal digits, chosen when the store was opened."""
    host: str
    """Name of the machine on which the store is open; times are those of its clock, in seconds
    since the epoch."""
    pid: int
    """Id of the process that does the I/O."""
    namespace: str
    """The namespace's id, hexadecimal."""
    started: float
    """Time when the store was opened."""
    time: float
    """Time when this row was written."""
    interval_s: float
    """Seconds until the next row is due."""
    counters: StoreCounters
    indexed_blocks: int
    """Number of blocks that a lookup finds, including usable ones of an adopted namespace; a block
    in two packs counts twice."""
    staged_bytes: int
    """Raw bytes of staged copies that are waiting or being written."""
    waiting_jobs: int
    """Store jobs and request ends that have not started."""
    writing_jobs: int
    """Store jobs whose rows the host may still read."""
    loading_jobs: int
    """Load jobs that are queued or being read."""
    breaker: str | None = None
    """State of the medium's circuit breaker: ``closed``, ``open`` (no requests are sent) or
    ``half-open``; None: it has none."""
    engine_pid: int | None = None
    """Id of the process that runs the model; None: unknown."""

    def encode(self) -> bytes:
        return msgspec.json.encode(self)

    def is_live(self, now: float) -> bool:
        """Return whether the row is at most five intervals old at ``time.time()`` = ``now``."""
        return now - self.time <= _MISSED * self.interval_s


# made at import: two threads may be the first to use it
_DECODE = msgspec.json.Decoder(EngineStatus).decode


def read_statuses(backend: Backend) -> list[EngineStatus]:
    """Return the status of each engine, sorted by start time. Rows that killed engines left are
    included.

    :raises StoreError: the medium failed.
    """
    found = []
    for row in backend.statuses().values():
        with suppress(msgspec.DecodeError, UnicodeDecodeError, RecursionError):
            found.append(_DECODE(row))
    return sorted(found, key=lambda status: (status.started, status.engine))


class StatusPublisher:
    """Publishes the status row of one engine periodically. A failure is logged; the next row is
    written as usual."""

    def __init__(self, store: Store, executor: Executor, engine_pid: int) -> None:
        self._store = store
        self._engine_pid = engine_pid
        self._executor = executor
        self._backend = store.catalogue.backend
        self._interval_s = self._backend.status_interval_s
        self.engine = uuid.uuid4().hex
        """Name of the engine's row."""
        self._started = time.time()
        self._due = time.monotonic()
        self._failed = False

    def tick(self, *, waiting_jobs: int, writing_jobs: int, loading_jobs: int) -> None:
        """Start to write the status row if it is due and the executor runs no other write. The
        arguments are fields of ``EngineStatus``.
        """
        now = time.monotonic()
        if self._interval_s is None or now < self._due or self._executor.writing:
            return
        self._due = now + self._interval_s
        status = EngineStatus(
            engine=self.engine,
            host=socket.gethostname(),
            pid=os.getpid(),
            engine_pid=self._engine_pid,
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
            breaker=self._backend.breaker_state,
        )
        self._executor.begin_write(self._publish(status.encode()))

    async def _publish(self, row: bytes) -> None:
        try:
            await self._executor.write(
                partial(self._backend.publish_status, self.engine, row)
            )
        except StoreError as error:
            if not self._failed:
                logger.info("could not publish engine status: %s", error)
            self._failed = True
        else:
            self._failed = False

    def withdraw(self) -> None:
        """Delete this engine's status row and wait until it is deleted. No other write may be in
        progress."""
        if self._interval_s is None:
            return
        try:
            self._backend.publish_status(self.engine, None)
        except StoreError as error:
            logger.info(
                "could not delete the status row of engine %s: %s", self.engine, error
            )
