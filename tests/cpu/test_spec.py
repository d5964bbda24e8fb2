"""A whole primary tier from a dictionary."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any
from uuid import uuid4

import pytest
import torch

from persistkv.base import (
    CanonicalKVCacheRef,
    CanonicalKVCaches,
    CanonicalKVCacheTensor,
    GPULoadStoreSpec,
    ReqContext,
    make_offload_key,
)
from persistkv.cpu.common import CPULoadStoreSpec
from persistkv.cpu.spec import CPUOffloadingSpec, WorkerGeometry
from persistkv.errors import ConfigurationError


def geometry(**changes: Any) -> WorkerGeometry:
    values: dict[str, Any] = {"instance_id": f"test-{uuid4().hex}", "gpu_block_size": 16, "gpu_block_bytes": 3000}
    return WorkerGeometry(**(values | changes))


def caches(page: int) -> CanonicalKVCaches:
    data = torch.randint(-128, 128, (8, page), dtype=torch.int8, generator=torch.Generator().manual_seed(1))
    return CanonicalKVCaches([CanonicalKVCacheTensor(data, page)], [[CanonicalKVCacheRef(0, page)]])


@pytest.fixture
def spec() -> Iterator[CPUOffloadingSpec]:
    options = {"cpu_bytes_to_use": "1MiB", "block_size": 32, "eviction_policy": "arc"}
    spec = CPUOffloadingSpec(extra_config=options, geometry=geometry())
    yield spec
    spec.shutdown()


def test_the_parts_fit_each_other(spec: CPUOffloadingSpec) -> None:
    assert (spec.block_size_factor, spec.row_stride, spec.num_blocks) == (2, 8192, 128)
    kv_caches, context = caches(3000), ReqContext("request")
    key = make_offload_key(b"hash", 0)
    manager = spec.get_manager()
    assert spec.get_manager() is manager
    output = manager.prepare_store([key], context)
    assert output is not None
    handlers = {(source.medium(), target.medium()): handler for source, target, handler in spec.get_handlers(kv_caches)}
    assert next(spec.get_handlers(kv_caches))[2] is handlers["GPU", "CPU"]
    blocks = GPULoadStoreSpec([3, 4], [2], [0])
    original = kv_caches.tensors[0].tensor.clone()
    assert handlers["GPU", "CPU"].transfer_async(1, (blocks, output.store_spec))
    handlers["GPU", "CPU"].wait({1})
    manager.complete_store([key], context)
    kv_caches.tensors[0].tensor.zero_()
    source = manager.prepare_load([key], context)
    assert isinstance(source, CPULoadStoreSpec)
    assert handlers["CPU", "GPU"].transfer_async(2, (source, blocks))
    handlers["CPU", "GPU"].wait({2})
    assert torch.equal(kv_caches.tensors[0].tensor[3:5], original[3:5])


def test_nothing_is_made_that_was_not_asked_for() -> None:
    spec = CPUOffloadingSpec(extra_config={"cpu_bytes_to_use": 1 << 50}, geometry=geometry())
    spec.shutdown()


@pytest.mark.parametrize(
    ("options", "field"),
    [
        ({}, "cpu_bytes_to_use"),
        ({"cpu_bytes_to_use": "much"}, "cpu_bytes_to_use"),
        ({"cpu_bytes_to_use": -1}, "cpu_bytes_to_use"),
        ({"cpu_bytes_to_use": 4095}, "cpu_bytes_to_use"),
        ({"cpu_bytes_to_use": "1MiB", "block_size": 24}, "block_size"),
        ({"cpu_bytes_to_use": "1MiB", "block_size": 0}, "block_size"),
        ({"cpu_bytes_to_use": "1MiB", "block_size": "many"}, "block_size"),
        ({"cpu_bytes_to_use": "1MiB", "eviction_policy": "fifo"}, "eviction_policy"),
        ({"cpu_bytes_to_use": "1MiB", "evictoin_policy": "lru"}, "evictoin_policy"),
    ],
)
def test_a_malformed_configuration_names_the_field(options: dict[str, Any], field: str) -> None:
    with pytest.raises(ConfigurationError) as caught:
        CPUOffloadingSpec(extra_config=options, geometry=geometry())
    assert caught.value.field.removeprefix("offloading option ") == field


@pytest.mark.parametrize("field", ["gpu_block_size", "gpu_block_bytes", "num_workers"])
def test_a_geometry_that_cannot_be(field: str) -> None:
    with pytest.raises(ConfigurationError, match=f"^{field}: 0"):
        geometry(**{field: 0})


def test_caches_must_be_of_the_size_told(spec: CPUOffloadingSpec) -> None:
    with pytest.raises(ConfigurationError, match="gpu_block_bytes: 3000 is not valid; expected 2000"):
        spec.get_handlers(caches(2000))
