"""Storage backend of SGLang's HiCache.

| SGLang | persistkv |
|---|---|
| page of a pool | block, in the namespace of its pool |
| page hash, with tokens, LoRA adapter and salt | key, with the option ``tenant`` |
| ``prefix_keys`` | depth: deeper pages are evicted before the prefixes that they depend on |
| pages in tensors (without interface v1) | a namespace of their own, for their own order of bytes |

SGLang calls in its storage threads, and each call occupies one. Calls that read or write therefore
have a deadline, and copy through memory of the store: nothing is written to a page after a call.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from importlib.metadata import version
from typing import Any

from sglang.srt.mem_cache.hicache_storage import (
    HiCacheStorage,
    PoolHitPolicy,
    PoolTransferResult,
)

from persistkv.integrations.sglang.hits import (
    all_pages,
    block_groups,
    leading,
    trailing_pages,
)
from persistkv.integrations.sglang.options import sglang_options
from persistkv.integrations.sglang.pool_store import PageKeys, PoolStore
from persistkv.integrations.sglang.pools import MAIN_POOL, PageMemory, pool_identity
from persistkv.integrations.sglang.stats import Transfers
from persistkv.storage.blocks import BlockIdentity
from persistkv.storage.blocks.identity import weights_of


class PersistKVStorage(HiCacheStorage):  # type: ignore[misc]
    """Keeps pages of SGLang's host pools in a store of persistkv.

    The constructor fingerprints the weights. While the store does not open, fails or hangs, pages
    are misses; it is tried again every 30 s.

    :raises ConfigurationError: an option is missing or invalid, or the directory has no weights.
    """

    def __init__(self, config: Any, kwargs: Any = None) -> None:
        """:param config: SGLang's ``HiCacheStorageConfig``.
        :param kwargs: further arguments of SGLang's factory, which are not used.
        """
        self.options = sglang_options(config.extra_config)
        self._config = config
        options = self.options
        self._weights = weights_of(options.model_path, options.weights)
        self._release = version("sglang")
        extra_config = config.extra_config or {}
        self._is_v1 = bool(extra_config.get("interface_v1"))
        """Whether SGLang passes indices of the main pool, and not tensors with copies of its
        pages."""
        self._pools: dict[str, PoolStore] = {}
        """By SGLang's name of the pool; filled when the pools are registered."""
        self._transfers = Transfers()
        """Calls of all pools, for ``get_stats``."""

    # Pools

    def register_mem_pool_host(self, mem_pool_host: Any) -> None:
        """Open the store for KV pages, in the pool if the interface v1 is on, else in tensors.

        :raises ConfigurationError: the identity of the pages is incomplete.
        """
        super().register_mem_pool_host(mem_pool_host)
        self._register(MAIN_POOL, mem_pool_host, may_use_regions=self._is_v1)

    def register_mem_host_pool_v2(self, host_pool: Any, host_pool_name: Any) -> None:
        """Open the store for pages of a pool.

        :raises ConfigurationError: the identity of the pages is incomplete.
        """
        super().register_mem_host_pool_v2(host_pool, host_pool_name)
        name = _pool_name(host_pool_name)
        # SGLang registers the main pool twice: ignore the second time
        if name != MAIN_POOL or MAIN_POOL not in self._pools:
            self._register(name, host_pool, may_use_regions=True)

    def _register(
        self,
        name: str,
        pool: Any,
        *,
        may_use_regions: bool,
    ) -> None:
        """Make a store for the pages of a pool, in place of that of an earlier pool with this
        name."""
        memory = PageMemory.of(pool)

        # ``PoolStore`` calls it once it knows whether pages have regions or are copied
        def identity_of(sizes: Sequence[int]) -> BlockIdentity:
            return pool_identity(
                self._config,
                self.options,
                name,
                memory,
                sizes,
                weights=self._weights,
                release=self._release,
            )

        replaced = self._pools.pop(name, None)
        if replaced is not None:
            replaced.close()
        self._pools[name] = PoolStore(
            memory,
            self.options,
            self._transfers,
            identity_of,
            may_use_regions=may_use_regions,
        )

    # Interface v1: pages in the main pool

    def batch_exists(self, keys: PageKeys, extra_info: Any = None) -> int:
        """Return the length of the run of held pages at the start; 0 if computing them is expected
        to be faster than loading them. Does not wait for I/O."""
        store = self._pools.get(MAIN_POOL)
        if store is None:
            return 0
        held = store.held(keys)
        # count the pages before the first gap, because SGLang restores prefixes
        num_pages = leading(held)
        is_worth_loading = store.is_worth_loading(keys[:num_pages])
        return num_pages if is_worth_loading else 0

    def batch_get_v1(
        self,
        keys: PageKeys,
        host_indices: Any,
        extra_info: Any = None,
    ) -> list[bool]:
        """Read pages into the main pool; return for each whether the pool holds it."""
        return self._pools[MAIN_POOL].read(keys, host_indices)

    def batch_set_v1(
        self,
        keys: PageKeys,
        host_indices: Any,
        extra_info: Any = None,
    ) -> list[bool]:
        """Store pages of the main pool; return for each whether it is durable."""
        depth = _depth(extra_info)
        return self._pools[MAIN_POOL].write(keys, host_indices, depth)

    # Interface v2: pages of any pools

    def batch_exists_v2(
        self,
        keys: PageKeys,
        pool_transfers: Sequence[Any] | None = None,
        extra_info: Any = None,
    ) -> Any:
        """Return which prefixes can be restored from all pools, see SGLang's ``PoolHitPolicy``."""
        kv_pages = self.batch_exists(keys, extra_info)
        found_keys = keys[:kv_pages]
        hits = {MAIN_POOL: kv_pages}
        # lengths of prefixes, in pages, that all pools so far can serve
        restorable = set(range(1, kv_pages + 1))
        for transfer in pool_transfers or ():
            name = _pool_name(transfer.name)
            if transfer.hit_policy == PoolHitPolicy.BLOCK_GROUPS:
                # pages of this pool have their own keys, so they never limit the prefix
                hits[name] = self._block_group_pages(name, transfer)
            else:
                lengths = self._restorable(name, found_keys, transfer)
                hits[name] = max(lengths, default=0)
                restorable &= lengths
        # leave out pools without hits: SGLang counts 0 for a pool that is not named
        nonzero_hits = {name: pages for name, pages in hits.items() if pages}
        return PoolTransferResult(
            kv_hit_pages=max(restorable, default=0),
            extra_pool_hit_pages=nonzero_hits,
            restorable_prefix_pages=sorted(restorable),
        )

    def _block_group_pages(self, name: str, transfer: Any) -> int:
        """Return how many pages the leading groups of a pool cover."""
        held = self._held(name, transfer.keys or ())
        return block_groups(held, transfer.block_pages, transfer.group_pages)

    def _restorable(
        self,
        name: str,
        keys: PageKeys,
        transfer: Any,
    ) -> set[int]:
        """Return the lengths of the keys' prefixes that can be restored from a pool."""
        held = self._held(name, keys)
        if transfer.hit_policy == PoolHitPolicy.ALL_PAGES:
            return all_pages(held)
        # the transfer has as many keys as pages are needed at the end of the prefix
        num_trailing = len(transfer.keys or ())
        return trailing_pages(held, max(1, num_trailing))

    def batch_get_v2(
        self,
        transfers: Sequence[Any],
        extra_info: Any = None,
    ) -> dict[Any, list[bool]]:
        """Read pages into their pools; return for each pool, and each of its pages, whether the
        pool holds it."""
        return self._call_each(transfers, PoolStore.read)

    def batch_set_v2(
        self,
        transfers: Sequence[Any],
        extra_info: Any = None,
    ) -> dict[Any, list[bool]]:
        """Store pages of pools; return for each pool, and each of its pages, whether it is
        durable."""
        write = partial(PoolStore.write, depth=_depth(extra_info))
        return self._call_each(transfers, write)

    def _call_each(
        self,
        transfers: Sequence[Any],
        call: Callable[..., list[bool]],
    ) -> dict[Any, list[bool]]:
        """Call ``call`` for each transfer, with the store of its pool, its keys and its host
        indices; return the results by pool. Pages of a transfer without a store fail."""
        results = {}
        for transfer in transfers:
            keys = transfer.keys or []
            store = self._store_for(transfer)
            if store is None:
                results[transfer.name] = [False] * len(keys)
            else:
                results[transfer.name] = call(store, keys, transfer.host_indices)
        return results

    def _store_for(self, transfer: Any) -> PoolStore | None:
        """Return the store of a transfer's pages; None if its pool is unknown, or if the transfer
        has more or fewer indices than its pages need."""
        name = _pool_name(transfer.name)
        store = self._pools.get(name)
        indices = transfer.host_indices
        if store is None or indices is None:
            return None
        num_pages = len(transfer.keys or ())
        num_indices = num_pages * store.memory.page_size
        return store if len(indices) == num_indices else None

    # Interface without v1: pages of the main pool in tensors

    def exists(self, key: str) -> bool:
        (is_held,) = self._held(MAIN_POOL, [key])
        return is_held

    def get(
        self,
        key: str,
        target_location: Any = None,
        target_sizes: Any = None,
    ) -> Any:
        """Read a page into a tensor; return the tensor, or None."""
        (tensor,) = self.batch_get([key], [target_location])
        return tensor

    def batch_get(
        self,
        keys: PageKeys,
        target_locations: Any = None,
        target_sizes: Any = None,
    ) -> list[Any]:
        """Read pages into tensors; return each tensor, or None."""
        store = self._pools[MAIN_POOL]
        # pages that were stored straight from the pool are not in the byte order of tensors
        if not store.has_flat_pages or target_locations is None:
            return [None] * len(keys)
        found = store.read_tensors(keys, target_locations)
        tensors: list[Any] = []
        for target, is_found in zip(target_locations, found, strict=True):
            tensors.append(target if is_found else None)
        return tensors

    def set(
        self,
        key: str,
        value: Any = None,
        target_location: Any = None,
        target_sizes: Any = None,
    ) -> bool:
        """Store a page; return whether it is durable."""
        return self.batch_set([key], [value])

    def batch_set(
        self,
        keys: PageKeys,
        values: Any = None,
        target_locations: Any = None,
        target_sizes: Any = None,
    ) -> bool:
        """Store pages; return whether all of them are durable."""
        store = self._pools[MAIN_POOL]
        # Only flat pages have the byte order of tensors. Other pages are stored straight from the
        # pool: tensors among them would be read in the wrong order.
        if not store.has_flat_pages or values is None:
            return False
        stored = store.write_tensors(keys, values, depth=None)
        return all(stored)

    # Deletion, statistics and end

    def clear(self) -> None:
        """Delete all pages of this identity: those of other models, ranks and releases remain.

        :raises StoreError: the medium failed; some pages may be left.
        """
        for store in list(self._pools.values()):
            store.clear()

    def get_stats(self) -> Any:
        """Return SGLang's ``StorageMetrics`` of the calls since the last one; None if metrics are
        off."""
        if not self._config.enable_storage_metrics:
            return None
        return self._transfers.take_metrics()

    def close(self) -> None:
        """Commit all accepted work and close the stores. Idempotent."""
        for store in list(self._pools.values()):
            store.close()

    def _held(
        self,
        name: str,
        keys: PageKeys,
    ) -> list[bool]:
        """Return for each key whether a pool's page is durable."""
        store = self._pools.get(name)
        if store is None:
            return [False] * len(keys)
        return store.held(keys)


def _pool_name(name: Any) -> str:
    """Return the text of SGLang's ``PoolName``."""
    return str(getattr(name, "value", name))


def _depth(extra_info: Any) -> int | None:
    """Return the number of pages before the first one of a call; None if it is not known."""
    prefix_keys = getattr(extra_info, "prefix_keys", None)
    return None if prefix_keys is None else len(prefix_keys)
