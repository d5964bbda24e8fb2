"""``BlockStore``: blocks of bytes in durable storage, for engines with memory of their own.

Invariants of this file:

1. A key that ``put`` or a completion reports as durable is found by every later opening, until it
   is evicted or deleted.
2. ``get`` reports a key only if its memory holds the bytes that were stored under this key and
   identity.
3. The caller's memory is not in use after a call has returned, or after its completion. Blocks of a
   call with a deadline are therefore copied: a disk that hangs uses the copies.
4. The bytes of stores that wait are bounded. Blocks beyond the bound are refused and counted.
"""

from __future__ import annotations

import logging
import os
import threading
import time
from collections.abc import Callable, Coroutine, Mapping, Sequence
from concurrent.futures import CancelledError, Future
from functools import partial
from pathlib import Path
from types import MappingProxyType
from typing import Any, TypeVar

import msgspec

from persistkv.base import GROUP_INDEX_BYTES, Retention, check_labels
from persistkv.config import parse_size, store_url, without_options
from persistkv.errors import (
    HostError,
    PersistKVError,
    StoreError,
    StoreTimeoutError,
)
from persistkv.memory.budget import default_io_threads
from persistkv.memory.pool import BufferPool
from persistkv.memory.regions import Regions
from persistkv.memory.scattered import ScatteredBlocks
from persistkv.memory.timed import BlocksToLoad, BlocksToStore
from persistkv.storage import open_backend
from persistkv.storage.backend import Backend
from persistkv.storage.blocks.buffers import Block, ByteCount, regions_of
from persistkv.storage.blocks.completions import Completion, CompletionQueue
from persistkv.storage.blocks.identity import BlockIdentity
from persistkv.storage.blocks.service import (
    BlockService,
    PutJob,
    StoreEvents,
)
from persistkv.storage.blocks.usage import StoredBlock, Usage
from persistkv.storage.loop_thread import LoopThread
from persistkv.storage.records import StoreCounters, StoreOptions
from persistkv.storage.store.store import Store, start_threads
from persistkv.tenants import DEFAULT_TENANT, check_tenant

logger = logging.getLogger(__name__)

T = TypeVar("T")

TenantOf = Callable[[bytes], str]
"""Function from a key to the name of its tenant."""

_NO_LABELS: Mapping[str, str] = MappingProxyType({})
_NOT_PINNED = Retention()


class BlockCounters(msgspec.Struct):
    """Counters of one ``BlockStore`` since it was opened."""

    store: StoreCounters
    """Counters of the store below."""
    refused_blocks: int = 0
    """Blocks to store that were refused, because too many bytes were waiting."""
    expired_calls: int = 0
    """Calls that did not end before their deadline."""


class BlockStore:
    """Blocks of bytes by key, in the namespace of one identity in one store.

    Any thread may call any method. To be closed, or used in a ``with`` statement. All keys of a
    call are of one KV cache group, and all blocks of a group have the same size. Methods raise
    ``HostError`` in a forked child, and ``StoreError`` after ``close``.
    """

    def __init__(
        self,
        backend: Backend,
        identity: BlockIdentity,
        block_bytes: Sequence[int],
        options: StoreOptions,
        *,
        url: str,
        max_queue_bytes: int = 1 << 30,  # 1 GiB
        tokens_per_block: int = 1,
        tenant_of: TenantOf | None = None,
    ) -> None:
        """Open a namespace of a store that is open already; ``open`` opens both. This object then
        owns and closes the backend; if this raises, the caller still owns it.

        :param url: URL of the store, for log lines and errors. The other parameters are those of
            ``open``.
        """
        self._memory = ScatteredBlocks(block_bytes)
        threads = start_threads(backend, options)
        try:
            fields = identity.encode(block_bytes)
            self._store = Store(
                backend, fields, self._memory, options, url=url, threads=threads
            )
        except BaseException:
            threads.close()
            raise
        # a notice says, for example, that the store holds other identities only
        if self._store.notice:
            logger.warning("%s", self._store.notice)
        self._service = BlockService(
            self._store,
            self._memory,
            tokens_per_block=tokens_per_block,
        )
        self._tenant_of = tenant_of
        self._loop = LoopThread("persistkv-blocks")
        self._loop.start(self._service.run())
        self._pool = BufferPool()
        """Memory for the copies of calls with a deadline."""
        self._queued = ByteCount(max_queue_bytes)
        """Bytes of stores that wait or run."""
        self._owner_pid = os.getpid()
        """The process that opened the store; a forked child has another."""
        self._start_lock = threading.Lock()
        """Held while a call starts, and while the service is told to end, so that no call starts
        after the end."""
        self._is_closed = False
        self.counters = BlockCounters(self._store.counters)
        """Counters since the opening. They change while calls run."""
        self.namespace = self._store.namespace.hex()
        """Id of the namespace, as ``persistkv stat`` lists it: 32 hexadecimal digits."""

    @classmethod
    def open(
        cls,
        url: str | Path,
        identity: BlockIdentity,
        block_bytes: Sequence[int],
        *,
        codec: str = "raw",
        io_threads: int | None = None,
        staging_bytes: int | str = "256MiB",
        strict_identity: bool = False,
        events: bool = False,
        max_queue_bytes: int | str = "1GiB",
        tokens_per_block: int = 1,
        tenant_of: TenantOf | None = None,
    ) -> BlockStore:
        """Open a store for the blocks of an identity; create it if it is absent.

        :param url: URL such as ``lmdb:///var/cache/kv?capacity=100GiB``, or the path of an LMDB
            store.
        :param block_bytes: for each KV cache group, the bytes of one block, at most 256 MiB.
        :param codec: codec of new packs, such as ``planes`` or ``zstd:1``.
        :param io_threads: threads that read and decode; a remote store always has 8. None: 4 on a
            machine with 8 cores or more, otherwise 2.
        :param staging_bytes: bound on the store's memory beyond its index, at least 64 MiB.
        :param strict_identity: raise IdentityMismatchError if the store holds only other
            identities.
        :param events: whether ``take_events`` reports keys.
        :param max_queue_bytes: bound on the bytes of stores that wait or run.
        :param tokens_per_block: tokens of one block, for the lists of stored contexts.
        :param tenant_of: returns the tenant of a key, which the key must contain, because a key is
            of one tenant; see ``check_tenant``. None: all keys are of the default tenant.
        :raises ConfigurationError: the URL or an option is invalid, or the sizes do not fit the
            identity.
        :raises StoreError: the store cannot be opened.
        """
        name = store_url(url)
        if io_threads is None:
            io_threads = default_io_threads()
        options = StoreOptions(
            codec=codec,
            io_threads=io_threads,
            staging_bytes=parse_size(staging_bytes, name="staging_bytes"),
            strict_identity=strict_identity,
            adopt="never",
            events=events,
        )
        queue_bytes = parse_size(max_queue_bytes, name="max_queue_bytes")
        backend = open_backend(name)
        try:
            return cls(
                backend,
                identity,
                block_bytes,
                options,
                url=without_options(name),
                max_queue_bytes=queue_bytes,
                tokens_per_block=tokens_per_block,
                tenant_of=tenant_of,
            )
        except BaseException:
            backend.close()
            raise

    # Lookups

    def contains(
        self,
        keys: Sequence[bytes],
        group: int = 0,
        *,
        touch: bool = False,
        timeout_s: float | None = None,
    ) -> list[bool]:
        """Return for each key whether its block is durable. Needs no I/O, but may wait for a call
        that plans a large job.

        :param touch: record a use of the blocks.
        :param timeout_s: seconds until the call returns with all keys False.
        """
        deadline = _deadline(timeout_s)
        full = self._full_keys(keys, group)
        lookup = self._service.contains(full, touch=touch)
        call = self._start(lookup)
        return self._result(call, len(keys), deadline)

    def prefix(
        self,
        keys: Sequence[bytes],
        group: int = 0,
        *,
        timeout_s: float | None = None,
    ) -> int:
        """Return how many keys from the first one on are durable.

        :param timeout_s: seconds until the call returns 0.
        """
        held = self.contains(keys, group, timeout_s=timeout_s)
        return held.index(False) if False in held else len(held)

    def touch(
        self,
        keys: Sequence[bytes],
        group: int = 0,
    ) -> None:
        """Record a use of blocks, so that others are evicted first. The next commit stores it."""
        full = self._full_keys(keys, group)
        use = self._service.touch(full)
        self._wait(use, timeout_s=None)

    # Blocks

    def put(
        self,
        keys: Sequence[bytes],
        blocks: Sequence[Block],
        group: int = 0,
        *,
        depth: int | None = None,
        labels: Mapping[str, str] = _NO_LABELS,
        retention: Retention = _NOT_PINNED,
        timeout_s: float | None = None,
    ) -> list[bool]:
        """Store blocks durably; return for each key whether its block is durable now. Blocks that
        are held are not written again.

        If the store is full, fails, or is read-only, a warning is logged, and keys are False. The
        keys of a tenant are listed as one context.

        :param blocks: for each key, its memory, which must not change during the call.
        :param depth: number of blocks of the group that precede the first one in its context; None
            if unknown.
        :param labels: names and values that are stored with the context.
        :param retention: how long the context is kept.
        :param timeout_s: seconds until the call returns with all keys False. Blocks that the store
            has copied by then may become durable later. None: no deadline, and no copy.
        :raises ValueError: there is not one block for each key, a block has another size, or a key
            occurs twice.
        :raises ConfigurationError: a label is invalid; see ``check_labels``; or the tenant of a key
            is (``check_tenant``). Nothing is stored.
        """
        deadline = _deadline(timeout_s)
        job = self._put_job(keys, group, depth, labels, retention)
        regions = self._regions(job.keys, blocks, group)
        num_bytes = self._num_bytes(job)
        if not self._queued.add(num_bytes):
            return self._refuse(len(keys))
        if deadline is None:
            put = self._service.put(job, regions)
            call = self._start(put, on_end=partial(self._queued.subtract, num_bytes))
            return self._result(call, len(keys), deadline=None)
        return self._put_copies(job, regions, num_bytes, deadline)

    def _put_copies(
        self,
        job: PutJob,
        regions: Sequence[Regions],
        num_bytes: int,
        deadline: float,
    ) -> list[bool]:
        """Store copies of blocks, because the call may continue after the deadline; return the
        results of ``put``.

        :param num_bytes: bytes of the blocks, which ``_queued`` counts already.
        :param deadline: monotonic time at which this must return.
        """
        num_keys = len(job.keys)
        # ``copies`` copies a block only when the call reads it, and no block after ``revoke``
        try:
            copies = BlocksToStore(self._pool, regions, self._block_bytes(job.group))
        except OSError:  # no memory is left
            self._queued.subtract(num_bytes)
            return self._refuse(num_keys)

        def on_end() -> None:
            self._queued.subtract(num_bytes)
            copies.release()

        put = self._service.put(job, copies)
        call = self._start(put, on_end)
        try:
            return self._result(call, num_keys, deadline)
        finally:
            # from now on, do not access the caller's memory
            copies.revoke()

    def get(
        self,
        keys: Sequence[bytes],
        into: Sequence[Block],
        group: int = 0,
        *,
        timeout_s: float | None = None,
    ) -> list[bool]:
        """Read blocks into memory, and verify them; return for each key whether its memory holds
        the block. The memory of other keys has undefined content.

        If the store fails, keys are False. Damaged blocks are deleted.

        :param into: for each key, writable memory.
        :param timeout_s: seconds until the call returns; blocks that are not read by then are
            False. With a deadline, blocks are read into other memory, verified, and then copied to
            that of the caller. None: no deadline, and no copy.
        :raises ValueError: there is not one block for each key, a block has another size or is
            read-only, or a key occurs twice.
        """
        deadline = _deadline(timeout_s)
        full = self._full_keys(keys, group)
        regions = self._regions(full, into, group, writable=True)
        if deadline is None:
            read = self._service.get(full, regions)
            call = self._start(read)
            return self._result(call, len(keys), deadline=None)
        return self._get_copies(full, regions, group, deadline)

    def _get_copies(
        self,
        keys: Sequence[bytes],
        regions: Sequence[Regions],
        group: int,
        deadline: float,
    ) -> list[bool]:
        """Read blocks into memory of the pool, because the call may continue after the deadline,
        and copy them to the caller's memory; return the results of ``get``.

        :param keys: keys with their KV cache group.
        :param deadline: monotonic time at which this must return.
        """
        try:
            copies = BlocksToLoad(self._pool, regions, self._block_bytes(group))
        except OSError:  # no memory is left
            return [False] * len(keys)
        read = self._service.get(keys, copies)
        call = self._start(read, on_end=copies.release)
        try:
            # Only wait, and ignore the results, which are all False at the deadline: some blocks
            # may have been copied by then.
            self._result(call, len(keys), deadline)
        finally:
            # from now on, do not copy blocks to the caller's memory
            is_copied = copies.revoke()
        return is_copied

    def submit_put(
        self,
        completions: CompletionQueue,
        keys: Sequence[bytes],
        blocks: Sequence[Block],
        group: int = 0,
        *,
        depth: int | None = None,
        labels: Mapping[str, str] = _NO_LABELS,
        retention: Retention = _NOT_PINNED,
    ) -> int:
        """Start a ``put`` without a deadline, and return its number without waiting. Its completion
        has the results; the memory must not change before that. Raises as ``put``."""
        job = self._put_job(keys, group, depth, labels, retention)
        regions = self._regions(job.keys, blocks, group)
        num_bytes = self._num_bytes(job)
        # add the completion of a refused call at once, because nothing else would add it
        if not self._queued.add(num_bytes):
            number = completions.new_number()
            results = self._refuse(len(keys))
            completions.add(Completion(number, results))
            return number
        put = self._service.put(job, regions)
        return self._submit(
            completions,
            len(keys),
            put,
            on_end=partial(self._queued.subtract, num_bytes),
        )

    def submit_get(
        self,
        completions: CompletionQueue,
        keys: Sequence[bytes],
        into: Sequence[Block],
        group: int = 0,
    ) -> int:
        """Start a ``get`` without a deadline, and return its number without waiting. Its completion
        has the results; the memory is in use before that. Raises as ``get``."""
        full = self._full_keys(keys, group)
        regions = self._regions(full, into, group, writable=True)
        read = self._service.get(full, regions)
        return self._submit(completions, len(keys), read)

    def submit_contains(
        self,
        completions: CompletionQueue,
        keys: Sequence[bytes],
        group: int = 0,
        *,
        touch: bool = False,
    ) -> int:
        """Start a ``contains``, and return its number without waiting. Its completion has the
        results."""
        full = self._full_keys(keys, group)
        lookup = self._service.contains(full, touch=touch)
        return self._submit(completions, len(keys), lookup)

    def delete(
        self,
        keys: Sequence[bytes],
        group: int = 0,
        *,
        timeout_s: float | None = None,
    ) -> list[bool]:
        """Delete blocks; return for each key whether it was held. A pack with other blocks is
        written again without these, so delete many keys with one call.

        On a shared store, other processes know of the deletion some seconds later. One that deletes
        other blocks of the same pack before that may store the blocks again.

        :param timeout_s: seconds until the call raises; the deletion then continues.
        :raises StoreTimeoutError: the deadline has passed.
        :raises StoreError: the medium failed, or the store is read-only. Some blocks may have been
            deleted; no other block is lost.
        """
        full = self._full_keys(keys, group)
        deletion = self._service.delete(full)
        return self._wait(deletion, timeout_s)

    def flush(self, *, timeout_s: float | None = None) -> None:
        """Wait until recorded uses and the blocks of calls that run are durable, or dropped.

        :raises StoreTimeoutError: the deadline has passed; the commit continues.
        """
        flush = self._service.flush()
        self._wait(flush, timeout_s)

    # Pins

    def pin(
        self,
        keys: Sequence[bytes],
        group: int = 0,
        *,
        labels: Mapping[str, str] = _NO_LABELS,
        ttl_s: float | None = None,
        timeout_s: float | None = None,
    ) -> str | None:
        """Keep durable blocks from being evicted, also after restarts; return the id of the pin,
        which ``persistkv ls`` lists. None: not all keys are held, and nothing is pinned.

        :param ttl_s: seconds from the last use on after which the pin expires; None: never.
        :raises ValueError: the keys are of several tenants.
        :raises StoreTimeoutError: the deadline has passed; the blocks may be pinned later.
        :raises StoreError: the medium failed, or the store is read-only.
        """
        full = self._full_keys(keys, group)
        # without keys, there is no tenant either
        tenants = list(self._positions_by_tenant(keys)) or [DEFAULT_TENANT]
        if len(tenants) > 1:
            raise ValueError(f"a pin for keys of {len(tenants)} tenants")
        (tenant,) = tenants
        pinning = self._service.pin(full, group, labels, ttl_s, tenant)
        pin, is_whole = self._wait(pinning, timeout_s)
        if is_whole:
            return pin
        # remove the pin, which would keep only a part of the blocks
        self.unpin(pin, timeout_s=timeout_s)
        return None

    def unpin(
        self,
        pin: str,
        *,
        timeout_s: float | None = None,
    ) -> None:
        """Remove a pin; ignored if there is none with this id.

        :raises StoreTimeoutError: the deadline has passed.
        :raises StoreError: the medium failed, or the store is read-only.
        """
        unpinning = self._service.unpin(pin)
        self._wait(unpinning, timeout_s)

    # Content

    def usage(self, *, timeout_s: float | None = None) -> Usage:
        """Return the bytes of each tenant in the namespace, exact as of the last commit, and those
        of the whole store. The first call reads the tables of all packs, later ones the changes.

        :raises StoreTimeoutError: the deadline has passed.
        :raises StoreError: the medium failed.
        """
        usage = self._service.usage()
        return self._wait(usage, timeout_s)

    def stored_blocks(self, *, timeout_s: float | None = None) -> list[StoredBlock]:
        """Return all durable blocks of the namespace. Reads the tables of all packs.

        :raises StoreTimeoutError: the deadline has passed.
        :raises StoreError: the medium failed.
        """
        blocks = self._service.stored_blocks()
        return self._wait(blocks, timeout_s)

    def take_events(self) -> StoreEvents:
        """Return the blocks that any process stored or removed since the last call. Blocks that the
        store held when it was opened are not included. Changes by other processes are known within
        seconds. Empty unless the option ``events`` is set."""
        events = self._service.take_events()
        return self._wait(events, timeout_s=None)

    # The end

    def close(self, timeout_s: float = 60.0) -> bool:
        """Wait for calls that run, commit, and close the store. Idempotent.

        :returns: False: a call hung for ``timeout_s`` seconds. The store then closes when the call
            ends, or with the process; acknowledged blocks are durable.
        """
        # a forked child has no thread of the store, so there is nothing to wait for
        if os.getpid() != self._owner_pid:
            return True
        # start the end after all calls that have started, so that the service waits for these calls
        with self._start_lock:
            if self._is_closed:
                return True
            self._is_closed = True
            end = self._loop.start(self._service.end())
        try:
            end.result(timeout_s)
        except TimeoutError:
            logger.warning(
                "the store did not close within %g s: it closes when its calls have ended",
                timeout_s,
            )
            return False
        self._loop.close()
        return True

    def __enter__(self) -> BlockStore:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    # Calls

    def _start(
        self,
        coroutine: Coroutine[Any, Any, T],
        on_end: Callable[[], None] = lambda: None,
    ) -> Future[T]:
        """Start a call.

        :param on_end: called when the call has ended, or when this method raises.
        """
        try:
            # check before the lock is acquired: a forked child could wait for ever, because the
            # thread that held the lock does not exist there
            if os.getpid() != self._owner_pid:
                raise HostError(
                    "this store was opened before a fork; open it again in the child"
                )
            with self._start_lock:
                if self._is_closed:
                    raise StoreError("the store is closed")
                if self._service.has_failed:
                    raise StoreError("the store is out of order: see the log")
                call = self._loop.start(coroutine)
        except PersistKVError:
            coroutine.close()
            on_end()
            raise
        call.add_done_callback(lambda _: on_end())
        return call

    def _wait(
        self,
        coroutine: Coroutine[Any, Any, T],
        timeout_s: float | None,
    ) -> T:
        """Run a coroutine in the store's thread, and return its result.

        :raises StoreTimeoutError: the call takes longer than ``timeout_s`` seconds; it continues.
        """
        call = self._start(coroutine)
        try:
            return call.result(timeout_s)
        except TimeoutError:
            self.counters.expired_calls += 1
            raise StoreTimeoutError(timeout_s or 0.0) from None
        # ``BlockService.run`` cancels the calls when an internal error has ended it
        except CancelledError:
            raise StoreError("the store has failed: see the log") from None

    def _result(
        self,
        call: Future[list[bool]],
        num_keys: int,
        deadline: float | None,
    ) -> list[bool]:
        """Wait for the results of a call; all keys are False after the deadline.

        :param deadline: monotonic time; None: there is none.
        """
        left_s = None
        if deadline is not None:
            left_s = max(0.0, deadline - time.monotonic())
        try:
            return call.result(left_s)
        except TimeoutError:
            self.counters.expired_calls += 1
            return [False] * num_keys
        # ``BlockService.run`` cancels the calls when an internal error has ended it, and logs that
        except CancelledError:
            return [False] * num_keys

    def _submit(
        self,
        completions: CompletionQueue,
        num_keys: int,
        coroutine: Coroutine[Any, Any, list[bool]],
        on_end: Callable[[], None] = lambda: None,
    ) -> int:
        """Start a call whose results are added to a queue when it ends; return its number.

        :param num_keys: number of results.
        :param on_end: called when the call has ended, or when this method raises.
        """
        number = completions.new_number()
        call = self._start(coroutine, on_end)
        _complete_at_end(call, number, num_keys, completions)
        return number

    def _refuse(self, num_keys: int) -> list[bool]:
        """Count blocks that are refused; return the results of their call."""
        self.counters.refused_blocks += num_keys
        return [False] * num_keys

    # Keys and memory

    def _put_job(
        self,
        keys: Sequence[bytes],
        group: int,
        depth: int | None,
        labels: Mapping[str, str],
        retention: Retention,
    ) -> PutJob:
        """Check the arguments of ``put``, and return its job."""
        full = self._full_keys(keys, group)
        check_labels(labels)
        positions = self._positions_by_tenant(keys)
        return PutJob(full, group, depth, labels, retention, positions)

    def _full_keys(
        self,
        keys: Sequence[bytes],
        group: int,
    ) -> list[bytes]:
        """Return the keys with their KV cache group."""
        num_groups = len(self._memory.layout.groups)
        if not 0 <= group < num_groups:
            raise ValueError(f"group {group}; there are {num_groups}")
        suffix = group.to_bytes(GROUP_INDEX_BYTES, "big")
        return [key + suffix for key in keys]

    def _positions_by_tenant(self, keys: Sequence[bytes]) -> dict[str, Sequence[int]]:
        """Return the positions in ``keys`` of the keys of each tenant."""
        tenant_of = self._tenant_of
        if tenant_of is None:
            return {DEFAULT_TENANT: range(len(keys))}
        positions: dict[str, list[int]] = {}
        for position, key in enumerate(keys):
            tenant = tenant_of(key)
            positions.setdefault(tenant, []).append(position)
        # check the names, which come from the caller's function
        for tenant in positions:
            check_tenant("tenant_of", tenant)
        return dict(positions)

    def _regions(
        self,
        keys: Sequence[bytes],
        blocks: Sequence[Block],
        group: int,
        *,
        writable: bool = False,
    ) -> list[list[memoryview]]:
        """Return the regions of each key's block.

        :param writable: whether the blocks must be writable.
        :raises ValueError: there is not one block for each key, a key occurs twice, or a block has
            another size or is read-only.
        """
        if len(keys) != len(blocks):
            raise ValueError(f"{len(blocks)} blocks for {len(keys)} keys")
        if len(set(keys)) != len(keys):
            raise ValueError("a key occurs twice")
        return regions_of(blocks, self._block_bytes(group), writable=writable)

    def _num_bytes(self, job: PutJob) -> int:
        return len(job.keys) * self._block_bytes(job.group)

    def _block_bytes(self, group: int) -> int:
        return self._memory.layout.groups[group].block_bytes


def _deadline(timeout_s: float | None) -> float | None:
    """Return the monotonic time at which a call must return; None: no deadline."""
    return None if timeout_s is None else time.monotonic() + timeout_s


def _complete_at_end(
    call: Future[list[bool]],
    number: int,
    num_keys: int,
    completions: CompletionQueue,
) -> None:
    """Have the completion of a call added to a queue when the call ends.

    :param number: number of the call, for its completion.
    :param num_keys: number of its results.
    """

    def end(ended: Future[list[bool]]) -> None:
        # a failed call gets a completion, too, because its caller waits for one
        results = [False] * num_keys
        if ended.cancelled():
            logger.error("call %d was cancelled", number)
        elif (error := ended.exception()) is not None:
            logger.error("call %d failed: %r", number, error)
        else:
            results = ended.result()
        completions.add(Completion(number, results))

    call.add_done_callback(end)
