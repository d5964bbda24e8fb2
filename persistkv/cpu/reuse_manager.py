"""Filter in front of an offloading manager that stores only blocks which requests look up
repeatedly."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable

from persistkv.base import (
    LoadStoreSpec,
    OffloadingEvent,
    OffloadingManager,
    OffloadKey,
    PrepareStoreOutput,
    ReqContext,
    RequestOffloadingContext,
)
from persistkv.cpu.policies import Keys
from persistkv.errors import ConfigurationError

MAX_TRACKER_SIZE = 64_000  # maximum number of blocks: about 10 MiB


class FilterReusedOffloadingManager(OffloadingManager):
    """Stores a block only after ``store_threshold`` lookups, so that blocks used once do not evict
    blocks used often.

    Each lookup counts for its block, regardless of its result. A request with a description counts
    once for each of its blocks, at its first lookup: engines stop looking up a prefix at its first
    miss, and repeat lookups while blocks are promoted, and neither shows whether a block is reused.
    Blocks that the request fills later are not counted.

    ``prepare_store`` leaves blocks below the threshold out of ``keys_to_store``, like blocks that
    are held. They get no row, evict nothing, and must not be named in ``complete_store``. Blocks
    that ``backing`` holds reach it regardless of their count, because its tiers may need every
    block of a request. All other calls reach ``backing`` unchanged; none of them counts. A
    ``backing`` with tiers promotes blocks regardless of their count.

    :param backing: owned by the filter, which shuts it down.
    :param store_threshold: lookups before a block is stored; at least 1.
    :param max_tracker_size: blocks whose lookups are counted; the least recently counted are
        forgotten; at least 1. Should exceed the number of distinct blocks between two uses of a
        block.
    """

    def __init__(
        self,
        backing: OffloadingManager,
        store_threshold: int = 2,
        max_tracker_size: int = MAX_TRACKER_SIZE,
    ) -> None:
        if store_threshold < 1:
            raise ConfigurationError(
                "store_threshold", store_threshold, "1 lookup or more"
            )
        if max_tracker_size < 1:
            raise ConfigurationError(
                "max_tracker_size", max_tracker_size, "1 block or more"
            )
        self.backing = backing
        self.store_threshold = store_threshold
        self.max_tracker_size = max_tracker_size
        self._num_lookups: OrderedDict[OffloadKey, int] = OrderedDict()
        """Lookups of each block, the least recently counted block first."""
        self._counted: dict[str, set[OffloadKey]] = {}
        """By id of an unfinished request with a description, the blocks for which a lookup was
        counted: at most one is counted per request and block."""

    def lookup(self, key: OffloadKey, req_context: ReqContext) -> bool | None:
        """Count the lookup, and return the answer of ``backing``. The first lookup of a request
        with a description counts for all of its blocks (``_blocks_to_count``)."""
        num_lookups = self._num_lookups
        for block in self._blocks_to_count(key, req_context):
            # remove the block and add it again, so that the least recently counted are first
            num_before = num_lookups.pop(block, 0)
            num_lookups[block] = num_before + 1
        while len(num_lookups) > self.max_tracker_size:
            num_lookups.popitem(last=False)
        return self.backing.lookup(key, req_context)

    def _blocks_to_count(
        self,
        key: OffloadKey,
        req_context: ReqContext,
    ) -> list[OffloadKey]:
        """Return the blocks for which a lookup of ``key`` counts: ``key`` alone for a request
        without a description, otherwise all blocks of the request that were not counted yet. The
        deepest are first, because the tracker forgets the first ones first.
        """
        description = req_context.description
        if description is None:
            return [key]
        counted = self._counted.setdefault(req_context.req_id, set())
        # skip keys for which an earlier lookup of the request has counted
        if key in counted:
            return []
        new: list[OffloadKey] = []
        for keys in description.group_keys:
            new += [block for block in keys if block not in counted]
        # the description may not contain the looked-up block yet: count it as a block at depth 0
        if description.depth(key) is None:
            new.append(key)
        depths = {block: description.depth(block) or 0 for block in new}
        new.sort(key=depths.__getitem__, reverse=True)
        counted.update(new)
        return new

    def prepare_store(
        self,
        keys: Keys,
        req_context: ReqContext,
    ) -> PrepareStoreOutput | None:
        """Pass on the blocks that were looked up often enough, and those that ``backing`` holds
        already: its tiers may need every block of a request, even one that needs no new row."""
        offered = []
        for key in keys:
            num_lookups = self._num_lookups.get(key, 0)
            is_reused = num_lookups >= self.store_threshold
            if is_reused or self.backing.is_held(key):
                offered.append(key)
        return self.backing.prepare_store(offered, req_context)

    def is_held(self, key: OffloadKey) -> bool:
        return self.backing.is_held(key)

    def complete_store(
        self,
        keys: Keys,
        req_context: ReqContext,
        success: bool = True,
    ) -> None:
        self.backing.complete_store(keys, req_context, success)

    def prepare_load(self, keys: Keys, req_context: ReqContext) -> LoadStoreSpec:
        return self.backing.prepare_load(keys, req_context)

    def complete_load(self, keys: Keys, req_context: ReqContext) -> None:
        self.backing.complete_load(keys, req_context)

    def touch(self, keys: Keys, req_context: ReqContext) -> None:
        self.backing.touch(keys, req_context)

    def take_events(self) -> Iterable[OffloadingEvent]:
        return self.backing.take_events()

    def on_new_request(self, req_context: ReqContext) -> RequestOffloadingContext:
        return self.backing.on_new_request(req_context)

    def on_request_finished(self, req_context: ReqContext) -> None:
        self._counted.pop(req_context.req_id, None)
        self.backing.on_request_finished(req_context)

    def reset_cache(self, weights_changed: bool = True) -> None:
        """Forget all blocks, and all counts."""
        self._num_lookups.clear()
        self._counted.clear()
        self.backing.reset_cache(weights_changed)

    def shutdown(self) -> None:
        self.backing.shutdown()
