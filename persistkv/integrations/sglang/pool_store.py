"""The block store of one of SGLang's host pools."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from persistkv.errors import StoreError
from persistkv.integrations.sglang.opening import StoreOpener
from persistkv.integrations.sglang.options import SGLangOptions
from persistkv.integrations.sglang.pools import PageMemory, tensor_memory
from persistkv.integrations.sglang.stats import Transfers
from persistkv.storage.blocks import BlockIdentity, BlockStore

logger = logging.getLogger(__name__)

_DELETED_AT_ONCE = 4096
_CLEAR_CALLS = 12
"""Time limit of a ``clear``, as a multiple of that of a call: a person waits for it."""


class PoolStore:
    """Pages of one pool. Thread-safe.

    If the pool's pages are copied into tensors, their bytes are in another order than in the pool:
    the identity has one region instead of several.
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
        """Open the store, within ``timeout_s``. One that is not open then is opened or tried again
        later.

        :param identity_of: returns the identity of pages with regions of these sizes.
        :param may_use_regions: whether the pages may be read and written in their pool.
        :raises ConfigurationError: the identity is incomplete, or an option is invalid.
        """
        self.memory = memory
        self._options = options
        self._transfers = transfers
        sizes = self._region_sizes() if may_use_regions else None
        self.is_copied = sizes is None
        """Whether pages are copied into tensors."""
        if sizes is None:
            sizes = [memory.flat_bytes()]
        self._page_bytes = sum(sizes)
        self._identity = identity_of(sizes)
        self._opener = StoreOpener(self._open, options.timeout_s)

    def _region_sizes(self) -> list[int] | None:
        """Return the bytes of each region of a page; None if SGLang does not tell where they
        are."""
        try:
            return self.memory.region_sizes()
        except Exception as error:  # of any kind: it depends on the pool and its layout
            logger.info("pages of a pool are copied: %s", error)
            return None

    def _open(self) -> BlockStore:
        options = self._options
        return BlockStore.open(
            options.url,
            self._identity,
            [self._page_bytes],
            codec=options.codec,
            io_threads=options.io_threads,
            staging_bytes=options.staging_bytes,
            max_queue_bytes=options.max_queue_bytes,
            tokens_per_block=self.memory.page_size,
        )

    def held(self, keys: Sequence[str]) -> list[bool]:
        """Return for each key whether its page is durable. Does not wait for I/O."""
        store = self._opener.get()
        if store is None or not keys:
            return [False] * len(keys)
        try:
            return store.contains(_encoded(keys), timeout_s=self._options.timeout_s)
        except StoreError as error:
            return _misses(keys, error)

    # Pages of the pool

    def read(self, keys: Sequence[str], host_indices: Any) -> list[bool]:
        """Read pages into the pool; return for each whether the pool holds it."""
        if not self.is_copied:
            return self._get(keys, self.memory.regions(host_indices))
        tensors = [self.memory.new_flat_page() for _ in keys]
        found = self.read_tensors(keys, tensors)
        for page, is_found in enumerate(found):
            if is_found:
                self.memory.set_flat_page(host_indices, page, tensors[page])
        return found

    def write(
        self, keys: Sequence[str], host_indices: Any, depth: int | None
    ) -> list[bool]:
        """Store pages of the pool; return for each whether it is durable."""
        if not self.is_copied:
            return self._put(keys, self.memory.regions(host_indices), depth)
        return self.write_tensors(keys, self.memory.flat_pages(host_indices), depth)

    # Pages in tensors

    def read_tensors(self, keys: Sequence[str], tensors: Sequence[Any]) -> list[bool]:
        """Read pages into tensors; return for each whether its tensor holds it."""
        return self._get(keys, [[tensor_memory(tensor)] for tensor in tensors])

    def write_tensors(
        self, keys: Sequence[str], tensors: Sequence[Any], depth: int | None
    ) -> list[bool]:
        """Store pages in tensors; return for each whether it is durable."""
        # SGLang's views of a pool are not contiguous
        whole = [tensor.contiguous() for tensor in tensors]
        return self._put(keys, [[tensor_memory(tensor)] for tensor in whole], depth)

    # Calls

    def _get(self, keys: Sequence[str], pages: list[list[memoryview]]) -> list[bool]:
        store = self._opener.get()
        if store is None or not keys:
            return [False] * len(keys)
        begin = time.monotonic()
        try:
            found = store.get(_encoded(keys), pages, timeout_s=self._options.timeout_s)
        except StoreError as error:
            return _misses(keys, error)
        num_bytes = sum(found) * self._page_bytes
        self._transfers.read(sum(found), num_bytes, time.monotonic() - begin)
        return found

    def _put(
        self, keys: Sequence[str], pages: list[list[memoryview]], depth: int | None
    ) -> list[bool]:
        store = self._opener.get()
        if store is None or not keys:
            return [False] * len(keys)
        begin = time.monotonic()
        try:
            stored = store.put(
                _encoded(keys),
                pages,
                depth=depth,
                labels=self._labels,
                timeout_s=self._options.timeout_s,
            )
        except StoreError as error:
            return _misses(keys, error)
        num_bytes = sum(stored) * self._page_bytes
        self._transfers.wrote(sum(stored), num_bytes, time.monotonic() - begin)
        return stored

    @property
    def _labels(self) -> Mapping[str, str]:
        return {"sglang_pool": str(self._identity.more["pool"]), **self._options.labels}

    def clear(self) -> None:
        """Delete all pages of this identity, within twelve times ``timeout_s``.

        :raises StoreTimeoutError: the deadline has passed; some pages may be left.
        :raises StoreError: the store is not open, or the medium failed; some pages may be left.
        """
        store = self._opener.get()
        if store is None:
            raise StoreError("the store is not open: nothing was deleted")
        deadline = time.monotonic() + _CLEAR_CALLS * self._options.timeout_s
        blocks = store.stored_blocks(timeout_s=_seconds_to(deadline))
        keys = [block.key for block in blocks]
        for start in range(0, len(keys), _DELETED_AT_ONCE):
            some_keys = keys[start : start + _DELETED_AT_ONCE]
            store.delete(some_keys, timeout_s=_seconds_to(deadline))

    def close(self) -> None:
        """Commit all accepted work and close the store. Idempotent."""
        self._opener.close()


def _seconds_to(deadline: float) -> float:
    return max(0.0, deadline - time.monotonic())


def _misses(keys: Sequence[str], error: StoreError) -> list[bool]:
    """Log why a call failed, and return its results: an exception would end SGLang's thread."""
    logger.warning("%d pages are misses, or are not stored: %s", len(keys), error)
    return [False] * len(keys)


def _encoded(keys: Sequence[str]) -> list[bytes]:
    return [key.encode() for key in keys]
