"""A store for callers without an event loop."""

from __future__ import annotations

import asyncio
import weakref
from collections.abc import Coroutine, Sequence
from functools import partial
from typing import Any, TypeVar

from persistkv.memory.rows import Rows
from persistkv.storage.backend import Backend
from persistkv.storage.identity import Identity
from persistkv.storage.loop_thread import LoopThread
from persistkv.storage.records import RequestEnd, StoreOptions
from persistkv.storage.store.savings import Savings, add_savings
from persistkv.storage.store.store import Store, start_threads
from persistkv.storage.threads import StoreThreads
from persistkv.tenants import DEFAULT_TENANT

T = TypeVar("T")


class BlockingStore:
    """A store whose calls wait for their results. Its event loop runs in a thread of its own.

    Between two calls nothing happens: only ``flush`` and ``work`` commit. Not thread-safe.
    """

    def __init__(
        self,
        backend: Backend,
        identity: Identity,
        rows: Rows,
        options: StoreOptions,
        *,
        url: str,
    ) -> None:
        """Open the namespace of ``identity``. This object then owns and closes the backend; if this
        raises, the caller still owns it.

        The parameters and errors are those of ``Store``.
        """
        self._turn = asyncio.Lock()
        """Held by the coroutine that runs, so that one runs at a time."""
        # ``Store`` leaves its threads to its caller, which is this object
        threads = start_threads(backend, options)
        try:
            self.store = Store(
                backend, identity, rows, options, url=url, threads=threads
            )
        except BaseException:
            threads.close()
            raise
        self._loop = LoopThread("persistkv-loop")
        self._end = weakref.finalize(self, _end_threads, self._loop, threads)
        """Ends all threads, once: in ``close``, or when this object is deleted without it."""
        # a call that hangs must not delay the interpreter's exit
        self._end.atexit = False
        # attributes and methods of the store that callers may use without the event loop
        self.rows = rows
        self.counters = self.store.counters
        self.view = self.store.view
        self.namespace = self.store.namespace
        self.index = self.store.index
        self.contains = self.store.contains
        self.take_report = self.store.take_report

    def _wait(self, coroutine: Coroutine[Any, Any, T]) -> T:
        """Run a coroutine on the loop's thread after all earlier ones; return its result, or raise
        its exception."""
        return self._loop.wait(self._in_turn(coroutine))

    async def _in_turn(self, coroutine: Coroutine[Any, Any, T]) -> T:
        # A call continues after Ctrl-C has ended the wait for it: the next call waits for its end.
        async with self._turn:
            return await coroutine

    def put(
        self,
        request: str,
        keys: Sequence[bytes],
        block_ids: Sequence[int],
        depths: Sequence[int] | None,
        tenant: str = DEFAULT_TENANT,
    ) -> bool:
        """Accept blocks for storage; return whether the rows may be reused now. If not, they may be
        after ``flush``. See ``Store.put``.
        """
        putting = self.store.put(request, keys, block_ids, depths, tenant)
        job = self._wait(putting)
        return not job.writes

    def end_request(self, end: RequestEnd) -> None:
        """End a request: the next commit writes its staged blocks and its manifest."""
        self.store.end_request(end)

    def read(
        self,
        keys: Sequence[bytes],
        block_ids: Sequence[int],
    ) -> list[bytes]:
        """Load blocks into rows; return the keys that failed. The content of their rows is
        undefined. Bad packs are deleted. See ``Store.read``."""
        return self._wait(self._read(keys, block_ids))

    async def _read(
        self,
        keys: Sequence[bytes],
        block_ids: Sequence[int],
    ) -> list[bytes]:
        outcome = await self.store.read(keys, block_ids)
        # delete bad packs now: no task runs ``Committer.run`` here, which would do it later
        await self.store.committer.repair()
        return outcome.failed

    def flush(self) -> None:
        """Commit all accepted work; see ``Store.flush``."""
        self._wait(self._flush())

    async def _flush(self) -> None:
        # ``flush`` only requests a commit. No task runs ``Committer.run`` here, so ``work`` makes
        # it; ``flush`` starts first, so that ``work`` sees the request.
        flushing = self.store.flush()
        working = self.store.committer.work()
        await asyncio.gather(flushing, working)

    def add_savings(
        self,
        identity: Identity,
        source: str,
        part: Savings,
    ) -> None:
        """Record savings; see ``persistkv.storage.store.savings.add_savings``."""
        add = partial(add_savings, self.view.backend, identity, source, part)
        self._wait(self.view.call(add))

    def work(self) -> None:
        """Do the due commits and refreshes; see ``Committer.work``."""
        self._wait(self.store.committer.work())

    def refresh(self) -> None:
        """Apply the commits and deletions of other processes to the index.

        :raises StoreError: the medium failed; the index is unchanged.
        """
        self._wait(self._refresh())

    async def _refresh(self) -> None:
        await self.view.refresh()
        await self.store.sources.refresh()

    def close(self) -> None:
        """Flush, then close the backend, also if the flush raises. Idempotent."""
        if not self._end.alive:  # closed before
            return
        try:
            self.flush()
        finally:
            # end the threads first, because none of them may use a closed backend
            self._end()
            self.store.close()


def _end_threads(loop: LoopThread, threads: StoreThreads) -> None:
    """End all threads of a ``BlockingStore``. A function of the module, because the finalizer must
    not reference the object whose deletion it waits for."""
    # end the loop first, because its tasks submit calls to the other threads
    loop.close()
    threads.close()
