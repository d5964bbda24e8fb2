"""The tiers behind an engine: region, primary tier, persistent tiers, and the connector's two sides over them."""

from __future__ import annotations

import uuid
from collections.abc import Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any

from persistkv.base import GPULoadStoreSpec, OffloadingManager
from persistkv.config import OffloadingConfig, RowLayout
from persistkv.connector.scheduler import OffloadingConnectorScheduler
from persistkv.connector.worker import OffloadingConnectorWorker
from persistkv.cpu.gpu_worker import CpuGpuOffloadingHandlers
from persistkv.cpu.layout import cell_bytes, group_layouts
from persistkv.cpu.manager import CPULoadStoreSpec, CPUPrimaryTierOffloadingManager
from persistkv.cpu.shared_offload_region import SharedOffloadRegion, remove_leftover_regions, row_stride_bytes
from persistkv.errors import ConfigurationError
from persistkv.integrations.transformers.kv_cache import PagedKVCache
from persistkv.tiering.manager import TieringOffloadingManager
from persistkv.tiering.persistent import PersistentTier


@dataclass(frozen=True)
class StackOptions:
    """Options of the tiers."""

    cpu_bytes: int
    """Size of the primary tier, rounded down to whole rows."""
    urls: tuple[str, ...]
    """The stores, nearest first: each is a persistent tier."""
    codec: str
    host: str
    strict_identity: bool


@dataclass
class OffloadingStack:
    """The built tiers."""

    scheduler: OffloadingConnectorScheduler
    worker: OffloadingConnectorWorker
    persistent: list[PersistentTier]
    """In the order of lookups."""
    num_cpu_blocks: int

    def close(self) -> None:
        """Wait for transfers, then release the worker before the rows that it copies to."""
        try:
            self.worker.shutdown()
        finally:
            self.scheduler.shutdown()


def build_stack(device: PagedKVCache, identity: Mapping[str, Any], options: StackOptions) -> OffloadingStack:
    """Build the tiers behind a paged cache. If one part cannot be built, the others are released.

    :param identity: identity of the KV bytes, as JSON values.
    :raises ConfigurationError: if the primary tier is too small for one block, or an option is invalid.
    """
    caches = device.canonical()
    cell = cell_bytes(caches, 1)
    stride = row_stride_bytes(1, cell)
    num_blocks = options.cpu_bytes // stride
    if not num_blocks:
        raise ConfigurationError("cpu_bytes", options.cpu_bytes, f"room for one block, {stride} bytes, or more")
    remove_leftover_regions()  # file names are unique per engine, so no engine replaces a killed engine's file
    with ExitStack() as undo:
        region = SharedOffloadRegion(uuid.uuid4().hex, num_blocks * stride, num_blocks, 0, 1, cell)
        undo.callback(region.cleanup)
        primary = CPUPrimaryTierOffloadingManager(num_blocks, region)
        undo.callback(primary.shutdown)
        layout = RowLayout(stride, group_layouts(caches, 1))
        config = OffloadingConfig(identity, device.block_size, layout, num_blocks, region.fd)
        persistent = []
        for url in options.urls:
            tier = PersistentTier(
                config,
                primary.get_kv_memoryview(),
                url=url,
                codec=options.codec,
                host=options.host,
                strict_identity=options.strict_identity,
            )
            undo.callback(tier.shutdown)
            persistent.append(tier)
        manager: OffloadingManager = TieringOffloadingManager(primary, persistent)
        handlers = CpuGpuOffloadingHandlers(caches, 1, num_blocks, region)  # last: it references the region's memory
        undo.pop_all()
    worker = OffloadingConnectorWorker(
        [
            (GPULoadStoreSpec, CPULoadStoreSpec, handlers.gpu_to_cpu_handler),
            (CPULoadStoreSpec, GPULoadStoreSpec, handlers.cpu_to_gpu_handler),
        ]
    )
    scheduler = OffloadingConnectorScheduler(manager, device.specs(), max_load_blocks=num_blocks)
    return OffloadingStack(scheduler, worker, persistent, num_blocks)
