"""Stand-ins for SGLang 0.5.23, built from its public signatures, for environments without it.

`make test-sglang` runs the same tests with SGLang's own classes, factory and host pools.
"""

from __future__ import annotations

import importlib
from abc import ABC
from dataclasses import dataclass, field
from enum import StrEnum
from pathlib import Path
from typing import Any

import torch

from tests.integrations.stand_ins import install_package

RELEASE = "0.5.23"


@dataclass
class HiCacheStorageConfig:
    tp_rank: int
    tp_size: int
    pp_rank: int
    pp_size: int
    attn_cp_rank: int
    attn_cp_size: int
    is_mla_model: bool
    enable_storage_metrics: bool
    is_page_first_layout: bool
    model_name: str | None
    tp_lcm_size: int | None = None
    should_split_heads: bool = False
    dp_rank: int = 0
    extra_config: dict[str, Any] | None = None
    dcp_size: int = 1
    dcp_rank: int = 0
    logical_page_size: int | None = None


@dataclass
class HiCacheStorageExtraInfo:
    prefix_keys: list[str] | None = None
    extra_info: dict[str, object] | None = None


class PoolName(StrEnum):
    KV = "kv"
    MAMBA = "mamba"
    SWA = "swa"
    INDEXER = "indexer"
    DRAFT = "draft"


class PoolHitPolicy(StrEnum):
    ALL_PAGES = "all_pages"
    TRAILING_PAGES = "trailing_pages"
    BLOCK_GROUPS = "block_groups"


@dataclass
class PoolTransfer:
    name: PoolName
    host_indices: torch.Tensor | None = None
    device_indices: torch.Tensor | None = None
    keys: list[str] | None = None
    hit_policy: PoolHitPolicy = PoolHitPolicy.ALL_PAGES
    nodes_to_load: list[object] | None = None
    indices_from_pool: PoolName | None = None
    block_pages: int = 0
    group_pages: int = 0


@dataclass
class PoolTransferResult:
    kv_hit_pages: int
    extra_pool_hit_pages: dict[str, int]
    restorable_prefix_pages: list[int] | None = None


@dataclass
class StorageMetrics:
    prefetch_pgs: list[int] = field(default_factory=list)
    backup_pgs: list[int] = field(default_factory=list)
    prefetch_bandwidth: list[float] = field(default_factory=list)
    backup_bandwidth: list[float] = field(default_factory=list)


class HiCacheStorage(ABC):  # noqa: B024
    def register_mem_pool_host(self, mem_pool_host: HostPool) -> None:
        self.mem_pool_host = mem_pool_host

    def register_mem_host_pool_v2(
        self, host_pool: HostPool, host_pool_name: str
    ) -> None:
        if not hasattr(self, "registered_pools"):
            self.registered_pools: dict[str, HostPool] = {}
        self.registered_pools[host_pool_name] = host_pool


class StorageBackendFactory:
    @staticmethod
    def create_backend(
        name: str,
        config: HiCacheStorageConfig,
        pool: HostPool | None,
        **kwargs: object,
    ) -> HiCacheStorage:
        assert name == "dynamic"
        assert config.extra_config is not None
        module = importlib.import_module(config.extra_config["module_path"])
        backend = getattr(module, config.extra_config["class_name"])(config, kwargs)
        assert isinstance(backend, HiCacheStorage)
        return backend


class HostPool:
    """Pages of keys and values in the memory of the host, in one of SGLang's layouts."""

    def __init__(
        self,
        layout: str,
        dtype: torch.dtype,
        *,
        pages: int,
        page_size: int,
        layers: int,
        heads: int,
        head_dim: int,
    ) -> None:
        self.layout, self.dtype, self.page_size = layout, dtype, page_size
        self.layer_num, self.head_num, self.head_dim = layers, heads, head_dim
        self.start_layer, self.end_layer = 0, layers - 1
        self.size = pages * page_size
        shape = {
            "layer_first": (2, layers, self.size, heads, head_dim),
            "page_first": (2, self.size, layers, heads, head_dim),
        }[layout]
        self.kv_buffer = torch.zeros(shape, dtype=dtype)

    def get_page_buffer_meta(
        self, indices: torch.Tensor
    ) -> tuple[list[int], list[int]]:
        flat = self.kv_buffer.view(torch.uint8).reshape(-1)
        base = flat.data_ptr()
        half = flat.numel() // 2
        token_bytes = self.head_num * self.head_dim * self.dtype.itemsize
        addresses: list[int] = []
        sizes: list[int] = []
        for start in indices[:: self.page_size].tolist():
            if self.layout == "page_first":
                offsets = [start * self.layer_num * token_bytes]
                size = self.page_size * self.layer_num * token_bytes
            else:
                rows = (layer * self.size + start for layer in range(self.layer_num))
                offsets = [row * token_bytes for row in rows]
                size = self.page_size * token_bytes
            for offset in offsets:
                addresses += [base + offset, base + half + offset]
                sizes += [size, size]
        return addresses, sizes

    def _page(self, index: int) -> torch.Tensor:
        page = slice(int(index), int(index) + self.page_size)
        if self.layout == "page_first":
            return self.kv_buffer[:, page]
        return self.kv_buffer[:, :, page]

    def get_data_page(self, index: int, flat: bool = True) -> torch.Tensor:
        page = self._page(index)
        return page.flatten() if flat else page

    def get_dummy_flat_data_page(self) -> torch.Tensor:
        return torch.zeros_like(self._page(0)).flatten()

    def set_from_flat_data_page(self, index: int, data_page: torch.Tensor) -> None:
        target = self._page(index)
        target[:] = data_page.reshape(target.shape)


_MODULES: dict[str, tuple[type, ...]] = {
    "sglang": (),
    "sglang.srt": (),
    "sglang.srt.observability": (),
    "sglang.srt.observability.metrics_collector": (StorageMetrics,),
    "sglang.srt.mem_cache": (),
    "sglang.srt.mem_cache.storage": (),
    "sglang.srt.mem_cache.storage.backend_factory": (StorageBackendFactory,),
    "sglang.srt.mem_cache.hicache_storage": (
        HiCacheStorage,
        HiCacheStorageConfig,
        HiCacheStorageExtraInfo,
        PoolHitPolicy,
        PoolName,
        PoolTransfer,
        PoolTransferResult,
    ),
}


def install(directory: Path) -> None:
    """Make the stand-ins importable, with the metadata of a release in ``directory``."""
    install_package("sglang", RELEASE, _MODULES, directory)
