"""Publishing of an engine's status row."""

from __future__ import annotations

import asyncio
import logging
import os
import socket
import time
import uuid
from functools import partial

from persistkv.errors import StoreError
from persistkv.storage.host.server.jobs import Jobs, JobState
from persistkv.storage.host.status import EngineStatus
from persistkv.storage.store.store import Store

logger = logging.getLogger(__name__)


class StatusPublisher:
    """Publishes the status row of one engine periodically. A failure is logged; the next row is
    written as usual."""

    def __init__(
        self,
        store: Store,
        jobs: Jobs,
        engine_pid: int,
    ) -> None:
        self._store = store
        self._jobs = jobs
        self._engine_pid = engine_pid
        self._backend = store.view.backend
        self._engine = uuid.uuid4().hex
        """Random name of this row, ``EngineStatus.engine``."""
        self._started = time.time()
        self._failed = False
        """Whether the last row was not written: of failures in a row, only the first is logged."""

    async def run(self) -> None:
        """Publish a row per interval until the task is cancelled; return at once if the store
        publishes none."""
        interval_s = self._backend.status_interval_s
        while interval_s is not None:
            await self.publish(interval_s)
            await asyncio.sleep(interval_s)

    async def publish(self, interval_s: float) -> None:
        """Publish the present status.

        :param interval_s: ``EngineStatus.interval_s``.
        """
        store = self._store
        jobs = self._jobs
        status = EngineStatus(
            engine=self._engine,
            host=socket.gethostname(),
            pid=os.getpid(),
            engine_pid=self._engine_pid,
            namespace=store.namespace.hex(),
            started=self._started,
            time=time.time(),
            interval_s=interval_s,
            counters=store.counters,
            indexed_blocks=len(store.index),
            staged_bytes=store.queue.staging.num_bytes,
            waiting_jobs=jobs.num_waiting,
            writing_jobs=jobs.counts[JobState.WRITING],
            loading_jobs=jobs.num_loads,
            breaker=self._backend.breaker_state,
            load_counts=dict(jobs.load_counts),
            load_reports=list(jobs.load_reports),
        )
        try:
            await self._write(status.encode(self._backend.seal))
        except StoreError as error:
            if not self._failed:
                logger.info("could not publish engine status: %s", str(error))
            self._failed = True
        else:
            self._failed = False

    async def withdraw(self) -> None:
        """Delete this engine's status row, if the store publishes any."""
        if self._backend.status_interval_s is None:
            return
        try:
            await self._write(None)
        except StoreError as error:
            logger.info(
                "could not delete the status row of engine %s: %s",
                self._engine,
                str(error),
            )

    async def _write(self, row: bytes | None) -> None:
        """Replace the row of this engine; None: delete it."""
        publish = partial(self._backend.publish_status, self._engine, row)
        await self._store.view.call(publish)
