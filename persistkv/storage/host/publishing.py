"""Tells others, now and then, what this side of a store does."""

from __future__ import annotations

import logging
import os
import socket
import time
import uuid
from functools import partial

from persistkv.errors import StoreError
from persistkv.storage.executor import Executor
from persistkv.storage.extensions import SupportsCounters, SupportsStatus
from persistkv.storage.status import EngineStatus
from persistkv.storage.store import Store

logger = logging.getLogger(__name__)


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
