"""SGLang's host pools, its configuration, and backends, for tests and benchmarks. SGLang or its
stand-ins must be importable."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import torch

from tests.integrations.sglang import stand_ins
from tests.integrations.sglang.preparation import HAS_SGLANG
from tests.integrations.sglang.stand_ins import HiCacheStorageConfig, HostPool

if TYPE_CHECKING:
    from persistkv.integrations.sglang.backend import PersistKVStorage

PAGE = 16  # tokens
HEAD_DIM = 128


def make_host_pool(
    pages: int,
    *,
    layers: int,
    heads: int,
    layout: str = "page_first",
    dtype: torch.dtype = torch.bfloat16,
) -> HostPool:
    """Return a host pool of an even number of pages."""
    if not HAS_SGLANG:
        return stand_ins.HostPool(
            layout,
            dtype,
            pages=pages,
            page_size=PAGE,
            layers=layers,
            heads=heads,
            head_dim=HEAD_DIM,
        )
    from sglang.srt.mem_cache.memory_pool import MHATokenToKVPool
    from sglang.srt.mem_cache.pool_host.mha import MHATokenToKVPoolHost

    host_to_device = 2
    device_pool = MHATokenToKVPool(
        pages * PAGE // host_to_device,
        PAGE,
        dtype,
        heads,
        HEAD_DIM,
        layers,
        "cpu",
        False,
        start_layer=0,
        end_layer=layers - 1,
        enable_alt_stream=False,
    )
    pool: HostPool = MHATokenToKVPoolHost(
        device_pool.get_device_pool_infos()[0].buffer_info,
        float(host_to_device),
        0,
        PAGE,
        layout,
        pin_memory=False,
        device="cpu",
        allocator_type="shm",
        device_capacity_tokens=device_pool.size,
        start_layer=0,
        end_layer=layers - 1,
    )
    return pool


def page_indices(first: int, count: int) -> torch.Tensor:
    """Return the host indices of consecutive pages."""
    return torch.arange(first * PAGE, (first + count) * PAGE)


def storage_config(
    options: Mapping[str, Any],
    *,
    interface_v1: int = 1,
    **changed: object,
) -> HiCacheStorageConfig:
    """Return SGLang's ``HiCacheStorageConfig`` of one rank, with other values for some fields.

    :param options: those of persistkv.
    """
    from sglang.srt.mem_cache import hicache_storage

    fields: dict[str, Any] = {
        "tp_rank": 0,
        "tp_size": 1,
        "pp_rank": 0,
        "pp_size": 1,
        "attn_cp_rank": 0,
        "attn_cp_size": 1,
        "is_mla_model": False,
        "enable_storage_metrics": True,
        "is_page_first_layout": True,
        "model_name": "org/model",
        **changed,
    }
    extra = {
        "backend_name": "persistkv",
        "module_path": "persistkv.integrations.sglang.backend",
        "class_name": "PersistKVStorage",
        "interface_v1": interface_v1,
        "persistkv": dict(options),
    }
    config: HiCacheStorageConfig = hicache_storage.HiCacheStorageConfig(
        **fields, extra_config=extra
    )
    return config


def create_storage(
    config: HiCacheStorageConfig,
    pool: HostPool | None = None,
) -> PersistKVStorage:
    """Return a backend that SGLang's factory has created, with the main pool registered."""
    from sglang.srt.mem_cache.storage.backend_factory import StorageBackendFactory

    backend: PersistKVStorage = StorageBackendFactory.create_backend(
        "dynamic", config, pool
    )
    if pool is not None:
        backend.register_mem_pool_host(pool)
    return backend
