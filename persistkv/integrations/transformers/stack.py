"""The tiers behind an engine: region, primary tier, persistent tiers, and the connector's two sides over them."""

from __future__ import annotations

import uuid
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from persistkv.connector.scheduler import OffloadingConnectorScheduler
from persistkv.connector.worker import OffloadingConnectorWorker
from persistkv.cpu.layout import cell_bytes, group_layouts
from persistkv.cpu.shared_offload_region import remove_leftover_regions, row_stride_bytes
from persistkv.cpu.spec import WorkerGeometry
from persistkv.errors import ConfigurationError
from persistkv.integrations.transformers.kv_cache import PagedKVCache
from persistkv.tiering.manager import TieringOffloadingManager
from persistkv.tiering.persistent import PersistentTier
from persistkv.tiering.spec import TieringOffloadingSpec


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
    if options.cpu_bytes < (stride := row_stride_bytes(1, cell)):
        raise ConfigurationError("cpu_bytes", options.cpu_bytes, f"room for one block, {stride} bytes, or more")
    remove_leftover_regions()  # file names are unique per engine, so no engine replaces a killed engine's file
    tier = {
        "type": "persistent",
        "codec": options.codec,
        "host": options.host,
        "strict_identity": options.strict_identity,
    }
    spec = TieringOffloadingSpec(
        {"cpu_bytes_to_use": options.cpu_bytes, "secondary_tiers": [{**tier, "url": url} for url in options.urls]},
        geometry=WorkerGeometry(instance_id=uuid.uuid4().hex, gpu_block_size=device.block_size, gpu_block_bytes=cell),
        identity=identity,
        group_layouts=group_layouts(caches, 1),
    )
    try:
        manager = spec.get_manager()
        worker = OffloadingConnectorWorker(spec.get_handlers(caches))
    except BaseException:
        spec.shutdown()
        raise
    scheduler = OffloadingConnectorScheduler(manager, device.specs(), max_load_blocks=spec.num_blocks)
    tiers = manager.secondary_tiers if isinstance(manager, TieringOffloadingManager) else ()
    persistent = [built for built in tiers if isinstance(built, PersistentTier)]
    return OffloadingStack(scheduler, worker, persistent, spec.num_blocks)
