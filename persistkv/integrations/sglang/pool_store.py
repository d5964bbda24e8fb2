"""The block store of one of SGLang's host pools."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence
from typing import Any, TypeAlias

from persistkv.batches import batched
from persistkv.errors import PersistKVError, StoreError
from persistkv.integrations.prefix_loads import PrefixLoads
from persistkv.integrations.sglang.opening import StoreOpener
from persistkv.integrations.sglang.options import SGLangOptions
from persistkv.integrations.sglang.pools import PageMemory, tensor_memory
from persistkv.integrations.sglang.stats import Transfers
from persistkv.storage.blocks import BlockIdentity, BlockStore
from persistkv.tenants import DEFAULT_TENANT

logger = logging.getLogger(__name__)

PageKeys: TypeAlias = Sequence[str]
"""Page hashes."""
Page: TypeAlias = list[memoryview]
"""The regions of a page."""
StoreCall: TypeAlias = Callable[[BlockStore, Sequence[bytes]], list[bool]]
"""A call for keys, which returns a result for each."""

_KEYS_PER_DELETION = 4096  # maximum number of keys in one call of a ``clear``
_CLEAR_CALLS = 12
"""Time limit of a ``clear``, as a multiple of ``timeout_s``: it deletes all pages of a tenant."""
_PAGES_PER_READ = 128
"""Maximum number of pages in one of SGLang's calls: its ``STORAGE_BATCH_SIZE``."""
_SEPARATOR = b"\0"
"""Separates the page's hash from the tenant's name in a key; neither contains it."""


class PoolStore:
    """Pages of one pool. Thread-safe.

    They are stored straight from the regions of the pool, or SGLang copies each of them into a
    tensor, a flat page. The bytes of a flat page are in another order than in the pool: its
    identity has one region instead of several.
    """

    def __init__(
        self,
        memory: PageMemory,
        options: SGLangOptions,
        transfers: Transfers,
        identity_of: Callable[[Sequence[int]], BlockIdentity],
        *,
        may_use_regions: bool,
    ) -> None:
        """Open the store; return after ``timeout_s`` at the latest. If it is not open by then, its
        opening continues or is tried again later.

        :param transfers: counts the pages that are read and written.
        :param identity_of: returns the identity of pages with regions of these sizes, in bytes.
        :param may_use_regions: whether the pages may be read and written in their pool.
        :raises ConfigurationError: the identity is incomplete, or an option is invalid.
        """
        self.memory = memory
        self._options = options
        self._transfers = transfers
        region_sizes = self._region_sizes() if may_use_regions else None
        self.has_flat_pages = region_sizes is None
        """Whether a stored page is the tensor that SGLang copies from its pool. False: it consists
        of the page's regions in the pool, whose bytes may be in another order."""
        # without regions, SGLang copies each page as a whole
        sizes = [memory.flat_bytes()] if region_sizes is None else region_sizes
        self._page_bytes = sum(sizes)
        """Bytes of a page: of all its regions."""
        self._identity = identity_of(sizes)
        pool_name = str(self._identity.more["pool"])
        self._labels = {"sglang_pool": pool_name, **options.labels}
        """Labels that are stored with each context."""
        self._opener = StoreOpener(self._open, options.timeout_s)
        self._loads = PrefixLoads(
            options.prefill_tokens_per_s,
            call_bytes=_PAGES_PER_READ * self._page_bytes,
            timeout_s=options.timeout_s,
        )
        """Decides whether held pages are loaded, by the times of earlier loads."""

    def _region_sizes(self) -> list[int] | None:
        """Return the bytes of each region of a page; None if SGLang does not tell where they
        are."""
        try:
            return self.memory.region_sizes()
        # catch any error, because its kind depends on the pool and its layout
        except Exception as error:
            logger.info("pages of a pool are copied: %s", error)
            return None

    def _open(self) -> BlockStore:
        """Open the block store; called in a thread of ``StoreOpener``, because the opening may
        hang."""
        return self._options.open(
            self._identity,
            self._page_bytes,
            tenant_of,
            tokens_per_block=self.memory.page_size,
        )

    def held(self, keys: PageKeys) -> list[bool]:
        """Return for each key whether its page is durable. Does not wait for I/O."""
        timeout_s = self._options.timeout_s

        def look_up(
            store: BlockStore,
            encoded: Sequence[bytes],
        ) -> list[bool]:
            return store.contains(encoded, timeout_s=timeout_s)

        return self._call_store(keys, look_up)

    def is_worth_loading(self, keys: PageKeys) -> bool:
        """Return whether held pages are expected to be loaded faster than computed."""
        num_bytes = len(keys) * self._page_bytes
        num_tokens = len(keys) * self.memory.page_size
        if self._loads.is_worth_loading(num_bytes, num_tokens):
            return True
        # the load is declined: read a page now and then, to notice when the store is fast again
        store = self._opener.get()
        if store is not None:
            (key,) = self._store_keys(keys[:1])
            self._loads.probe_if_due(store, key, self._page_bytes)
        return False

    # Pages of the pool

    def read(
        self,
        keys: PageKeys,
        host_indices: Any,
    ) -> list[bool]:
        """Read pages into the pool; return for each whether the pool holds it."""
        memory = self.memory
        if not self.has_flat_pages:
            pages = memory.regions(host_indices)
            return self._get(keys, pages)
        # the store fills tensors, which SGLang copies into its pool
        tensors = [memory.new_flat_page() for _ in keys]
        found = self.read_tensors(keys, tensors)
        for page, tensor in enumerate(tensors):
            if found[page]:
                memory.set_flat_page(host_indices, page, tensor)
        return found

    def write(
        self,
        keys: PageKeys,
        host_indices: Any,
        depth: int | None,
    ) -> list[bool]:
        """Store pages of the pool; return for each whether it is durable."""
        memory = self.memory
        if not self.has_flat_pages:
            pages = memory.regions(host_indices)
            return self._put(keys, pages, depth)
        tensors = memory.flat_pages(host_indices)
        return self.write_tensors(keys, tensors, depth)

    # Pages in tensors

    def read_tensors(
        self,
        keys: PageKeys,
        tensors: Sequence[Any],
    ) -> list[bool]:
        """Read pages into tensors; return for each whether its tensor holds it."""
        pages = _pages_of(tensors)
        return self._get(keys, pages)

    def write_tensors(
        self,
        keys: PageKeys,
        tensors: Sequence[Any],
        depth: int | None,
    ) -> list[bool]:
        """Store pages in tensors; return for each whether it is durable."""
        # SGLang's views of a pool are not contiguous
        whole = [tensor.contiguous() for tensor in tensors]
        pages = _pages_of(whole)
        return self._put(keys, pages, depth)

    # Calls

    def _get(
        self,
        keys: PageKeys,
        pages: Sequence[Page],
    ) -> list[bool]:
        """Read pages, and count the read and its time."""
        timeout_s = self._options.timeout_s

        def get(
            store: BlockStore,
            encoded: Sequence[bytes],
        ) -> list[bool]:
            return store.get(encoded, pages, timeout_s=timeout_s)

        begin = time.monotonic()
        wanted_bytes = len(keys) * self._page_bytes
        # record the load, whose time counts in the decisions about later loads
        load = self._loads.begin_load(wanted_bytes)
        try:
            found = self._call_store(keys, get)
        except BaseException:
            # end the load, which would otherwise count as one that hangs
            self._loads.end_load(load, loaded_bytes=0)
            raise
        num_pages = sum(found)
        loaded_bytes = num_pages * self._page_bytes
        self._loads.end_load(load, loaded_bytes)
        seconds = time.monotonic() - begin
        self._transfers.add_read(num_pages, loaded_bytes, seconds)
        return found

    def _put(
        self,
        keys: PageKeys,
        pages: Sequence[Page],
        depth: int | None,
    ) -> list[bool]:
        """Store pages, and count the write and its time."""
        timeout_s = self._options.timeout_s
        labels = self._labels

        def put(
            store: BlockStore,
            encoded: Sequence[bytes],
        ) -> list[bool]:
            return store.put(
                encoded, pages, depth=depth, labels=labels, timeout_s=timeout_s
            )

        begin = time.monotonic()
        stored = self._call_store(keys, put)
        seconds = time.monotonic() - begin
        num_pages = sum(stored)
        num_bytes = num_pages * self._page_bytes
        self._transfers.add_write(num_pages, num_bytes, seconds)
        return stored

    def _call_store(
        self,
        keys: PageKeys,
        call: StoreCall,
    ) -> list[bool]:
        """Make a call of the store with its own keys of these pages; return all False if the store
        is not open, or fails."""
        misses = [False] * len(keys)
        store = self._opener.get()
        if store is None or not keys:
            return misses
        encoded = self._store_keys(keys)
        try:
            return call(store, encoded)
        except PersistKVError as error:
            # an exception would end SGLang's thread
            logger.warning(
                "%d pages are misses, or are not stored: %s", len(keys), error
            )
            return misses

    def _store_keys(self, keys: PageKeys) -> list[bytes]:
        """Return the store's keys of pages: SGLang's keys, followed by the tenant's name unless it
        is the default tenant."""
        suffix = b""
        tenant = self._options.tenant
        if tenant != DEFAULT_TENANT:
            suffix = _SEPARATOR + tenant.encode()
        return [key.encode() + suffix for key in keys]

    def clear(self) -> None:
        """Delete the tenant's pages of this identity, within twelve times ``timeout_s``.

        :raises StoreTimeoutError: the deadline has passed; some pages may be left.
        :raises StoreError: the store is not open, or the medium failed; some pages may be left.
        """
        store = self._opener.get()
        if store is None:
            raise StoreError("the store is not open: nothing was deleted")
        timeout_s = _CLEAR_CALLS * self._options.timeout_s
        deadline = time.monotonic() + timeout_s
        blocks = store.stored_blocks(timeout_s=timeout_s)
        tenant = self._options.tenant
        keys = []
        for block in blocks:
            if tenant_of(block.key) == tenant:
                keys.append(block.key)
        for some_keys in batched(keys, _KEYS_PER_DELETION):
            left_s = max(0.0, deadline - time.monotonic())
            store.delete(some_keys, timeout_s=left_s)

    def close(self) -> None:
        """Commit all accepted work and close the store. Idempotent."""
        self._loads.close()
        self._opener.close()


def tenant_of(key: bytes) -> str:
    """Return the tenant of a page's key."""
    _, separator, tenant = key.rpartition(_SEPARATOR)
    return tenant.decode() if separator else DEFAULT_TENANT


def _pages_of(tensors: Sequence[Any]) -> list[Page]:
    """Return the memory of pages in tensors."""
    pages = []
    for tensor in tensors:
        memory = tensor_memory(tensor)
        pages.append([memory])
    return pages
