"""Fixtures: backends of SGLang's HiCache, on SGLang itself or on stand-ins for it."""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.integrations.sglang import stand_ins
from tests.integrations.sglang.preparation import HAS_SGLANG, prepare

if HAS_SGLANG:
    prepare()
else:
    stand_ins.install(Path(tempfile.mkdtemp(prefix="persistkv-sglang-")))

PAGE = 16  # tokens
PAGES = 32
LAYERS = 2
HEADS = 2
HEAD_DIM = 128


def make_pool(
    layout: str = "page_first",
    dtype: torch.dtype = torch.bfloat16,
    heads: int = HEADS,
    layers: int = LAYERS,
) -> Any:
    """Return a host pool of 32 pages of 16 tokens."""
    if not HAS_SGLANG:
        return stand_ins.HostPool(
            layout,
            dtype,
            pages=PAGES,
            page_size=PAGE,
            layers=layers,
            heads=heads,
            head_dim=HEAD_DIM,
        )
    from sglang.srt.mem_cache.memory_pool import MHATokenToKVPool
    from sglang.srt.mem_cache.pool_host.mha import MHATokenToKVPoolHost

    device_pool = MHATokenToKVPool(
        PAGES * PAGE,
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
    return MHATokenToKVPoolHost(
        device_pool.get_device_pool_infos()[0].buffer_info,
        2.0,
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


def fill(pool: Any, seed: int) -> None:
    """Fill a pool with random numbers."""
    flat = pool.kv_buffer.view(torch.uint8)
    generator = torch.Generator().manual_seed(seed)
    flat.random_(0, 256, generator=generator)


def page_keys(numbers: range, prefix: str = "") -> list[str]:
    """Return page hashes as SGLang's: 64 hexadecimal digits."""
    return [f"{prefix}{number:0{64 - len(prefix)}x}" for number in numbers]


def indices(first: int, count: int) -> Any:
    """Return the host indices of consecutive pages."""
    return torch.arange(first * PAGE, (first + count) * PAGE)


def pages_of(pool: Any, first: int, count: int) -> Any:
    """Return a copy of consecutive pages."""
    tokens = slice(first * PAGE, (first + count) * PAGE)
    if pool.layout == "page_first":
        return pool.kv_buffer[:, tokens].clone()
    return pool.kv_buffer[:, :, tokens].clone()


def is_equal(one: Any, other: Any) -> bool:
    """Return whether tensors have the same bytes; random numbers include NaN."""
    return torch.equal(one.view(torch.uint8), other.view(torch.uint8))


Open = Callable[..., Any]


@pytest.fixture
def options(tmp_path: Path) -> dict[str, Any]:
    """The options of the backend, for a store of this test."""
    return {
        "url": f"lmdb://{tmp_path}/store?capacity=256MiB",
        "weights": "weights-1",
        "attention_backend": "torch_native",
        "timeout_s": 60.0,
    }


@pytest.fixture
def open_backend(options: dict[str, Any]) -> Iterator[Open]:
    """Return a function that creates backends through SGLang's factory, with the main pool
    registered; close them after the test."""
    from sglang.srt.mem_cache.hicache_storage import HiCacheStorageConfig
    from sglang.srt.mem_cache.storage.backend_factory import StorageBackendFactory

    opened: list[Any] = []

    def open_one(
        pool: Any = None, *, interface_v1: int = 1, config: Any = None, **changed: Any
    ) -> Any:
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
            **(config or {}),
        }
        extra = {
            "backend_name": "persistkv",
            "module_path": "persistkv.integrations.sglang.backend",
            "class_name": "PersistKVStorage",
            "interface_v1": interface_v1,
            "persistkv": {**options, **changed},
        }
        made = HiCacheStorageConfig(**fields, extra_config=extra)
        backend = StorageBackendFactory.create_backend("dynamic", made, pool)
        opened.append(backend)
        if pool is not None:
            backend.register_mem_pool_host(pool)
        return backend

    yield open_one
    for backend in opened:
        with suppress(AttributeError):
            backend.close()
