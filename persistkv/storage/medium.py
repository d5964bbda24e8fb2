"""The calls of a backend that may block, as flows await them, and its failures, told once a minute."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import TypeVar

from persistkv.errors import StoreError, StoreFullError
from persistkv.storage.backend import Backend, BackendStats, Changes, CommitBatch, CommitResult
from persistkv.storage.executor import Executor
from persistkv.storage.recent import recent_contexts
from persistkv.storage.shortening import NamedRequest, requests_naming

logger = logging.getLogger(__name__)

_COMPLAIN_S = 60.0  # seconds between warnings that blocks are dropped

T = TypeVar("T")


class Medium:
    """One namespace of an open backend. All that its calls raise is a ``StoreError``."""

    def __init__(self, backend: Backend, namespace: bytes, executor: Executor) -> None:
        self.backend = backend
        self.namespace = namespace
        self.executor = executor
        self._complained_at: float | None = None

    async def commit(self, batch: CommitBatch) -> CommitResult:
        """As ``Backend.commit``; once it has ended, also by raising, nobody reads the blocks of its packs."""
        return await self._write(partial(_commit, self.backend, self.namespace, batch))

    async def changes(self, cursor: bytes | None) -> Changes:
        """As ``Backend.changes``."""
        return await self._write(partial(self.backend.changes, self.namespace, cursor))

    async def requests_naming(self, packs: Sequence[bytes]) -> list[NamedRequest]:
        """See ``shortening.requests_naming``."""
        return await self._write(partial(requests_naming, self.backend, self.namespace, packs))

    async def stats(self) -> BackendStats:
        """As ``Backend.stats``."""
        return await self._write(self.backend.stats)

    async def recent(
        self, holds: Callable[[bytes], bool], max_blocks: int, engine: str, *, only_asked: bool = False
    ) -> list[list[bytes]]:
        """See ``recent_contexts``."""
        call = partial(recent_contexts, self.backend, self.namespace, holds, max_blocks, engine, only_asked=only_asked)
        return await self._write(call)

    async def _write(self, call: Callable[[], T]) -> T:
        """What is no ``StoreError`` (no memory to encode a frame, a fault of a driver) costs what the call was for,
        too, and not the store.
        """
        try:
            return await self.executor.write(call)
        except StoreError:
            raise
        except Exception as error:
            raise StoreError(f"{type(error).__name__}: {error}") from error

    def complain(self, error: StoreError) -> None:
        """Warn, but once a minute: a full store would fill the log instead."""
        now = time.monotonic()
        if self._complained_at is None or now - self._complained_at >= _COMPLAIN_S:
            self._complained_at = now
            kind = "the store is full" if isinstance(error, StoreFullError) else "the store failed"
            logger.warning("%s (%s); what it was given is dropped", kind, str(error))  # the error holds rows


def _commit(backend: Backend, namespace: bytes, batch: CommitBatch) -> CommitResult:
    for writer in batch.packs:
        writer.restart()
    try:
        return backend.commit(namespace, batch)
    finally:
        for writer in batch.packs:
            writer.settle()
