"""CPUOffloadingSpec: options, the manager and handlers that it makes, and shutdown."""

from __future__ import annotations

import os
from collections.abc import Iterator
from uuid import uuid4

import pytest
import torch

from persistkv.base import (
    CanonicalKVCacheRef,
    CanonicalKVCaches,
    CanonicalKVCacheTensor,
    GPULoadStoreSpec,
    OffloadingManager,
    ReqContext,
    make_offload_key,
)
from persistkv.cpu.manager import CPULoadStoreSpec, CPUPrimaryTierOffloadingManager
from persistkv.cpu.reuse_manager import FilterReusedOffloadingManager
from persistkv.cpu.spec import CPUOffloadingSpec, WorkerGeometry
from persistkv.errors import ConfigurationError


def geometry(
    gpu_block_size: int = 16,
    gpu_block_bytes: int = 3000,
    num_workers: int = 1,
) -> WorkerGeometry:
    return WorkerGeometry(
        instance_id=f"test-{uuid4().hex}",
        gpu_block_size=gpu_block_size,
        gpu_block_bytes=gpu_block_bytes,
        num_workers=num_workers,
    )


def caches(page: int) -> CanonicalKVCaches:
    data = torch.randint(
        -128,
        128,
        (8, page),
        dtype=torch.int8,
        generator=torch.Generator().manual_seed(1),
    )
    return CanonicalKVCaches(
        [CanonicalKVCacheTensor(data, page)], [[CanonicalKVCacheRef(0, page)]]
    )


@pytest.fixture
def spec() -> Iterator[CPUOffloadingSpec]:
    options = {"cpu_bytes_to_use": "1MiB", "block_size": 32, "eviction_policy": "arc"}
    spec = CPUOffloadingSpec(extra_config=options, geometry=geometry())
    yield spec
    spec.shutdown()


def test_spec_store_then_load_restores_blocks(spec: CPUOffloadingSpec) -> None:
    assert (spec.block_size_factor, spec.row_stride, spec.num_blocks) == (2, 8192, 128)
    kv_caches, context = caches(3000), ReqContext("request")
    key = make_offload_key(b"hash", 0)
    manager = spec.get_manager()
    assert spec.get_manager() is manager
    output = manager.prepare_store([key], context)
    assert output is not None
    handlers = {
        (source.medium(), target.medium()): handler
        for source, target, handler in spec.get_handlers(kv_caches)
    }
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


class RaisingManager(CPUPrimaryTierOffloadingManager):
    def shutdown(self) -> None:
        raise RuntimeError("tier did not end")


class RaisingManagerSpec(CPUOffloadingSpec):
    def make_manager(self) -> OffloadingManager:
        return RaisingManager(self.get_region())


def test_spec_shutdown_manager_raises_region_is_removed(
    caplog: pytest.LogCaptureFixture,
) -> None:
    spec = RaisingManagerSpec(
        extra_config={"cpu_bytes_to_use": "64KiB"}, geometry=geometry()
    )
    spec.get_manager()
    path = spec.get_region().mmap_path
    assert os.path.exists(path)
    spec.shutdown()
    assert not os.path.exists(path)
    assert "offloading manager raised in shutdown" in caplog.text


def test_spec_store_threshold_filters_blocks_that_are_not_reused() -> None:
    options = {
        "cpu_bytes_to_use": "64KiB",
        "store_threshold": "2",
        "max_tracker_size": 10,
    }
    spec = CPUOffloadingSpec(extra_config=options, geometry=geometry())
    manager, context, key = (
        spec.get_manager(),
        ReqContext("request"),
        make_offload_key(b"hash", 0),
    )
    assert isinstance(manager, FilterReusedOffloadingManager)
    assert spec.get_manager() is manager
    assert manager.max_tracker_size == 10
    for expected in ([], [], [key]):
        output = manager.prepare_store([key], context)
        assert output is not None
        assert output.keys_to_store == expected
        manager.lookup(key, context)
    path = spec.get_region().mmap_path
    spec.shutdown()
    assert not os.path.exists(path)


@pytest.mark.parametrize("options", [{}, {"store_threshold": 0}])
def test_spec_without_store_threshold_stores_every_block(
    options: dict[str, object],
) -> None:
    spec = CPUOffloadingSpec(
        extra_config={"cpu_bytes_to_use": "64KiB", **options}, geometry=geometry()
    )
    assert isinstance(spec.get_manager(), CPUPrimaryTierOffloadingManager)
    spec.shutdown()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (
            {"store_threshold": -1},
            "offloading option store_threshold: -1 is not valid; expected an integer >= 0",
        ),
        (
            {"store_threshold": 1.5},
            "offloading option store_threshold: 1.5 is not valid; expected an integer",
        ),
        (
            {"max_tracker_size": 0},
            "offloading option max_tracker_size: 0 is not valid; expected an integer >= 1",
        ),
        (
            {"max_tracker_size": "all"},
            "offloading option max_tracker_size: 'all' is not valid; expected an integer",
        ),
    ],
)
def test_spec_filter_option_out_of_range_raises_and_names_option(
    options: dict[str, object],
    message: str,
) -> None:
    with pytest.raises(ConfigurationError) as caught:
        CPUOffloadingSpec(
            extra_config={"cpu_bytes_to_use": "64KiB", **options}, geometry=geometry()
        )
    assert str(caught.value) == message


def test_spec_unused_allocates_no_region() -> None:
    spec = CPUOffloadingSpec(
        extra_config={"cpu_bytes_to_use": 1 << 50}, geometry=geometry()
    )
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
def test_spec_malformed_option_raises_and_names_field(
    options: dict[str, object],
    field: str,
) -> None:
    with pytest.raises(ConfigurationError) as caught:
        CPUOffloadingSpec(extra_config=options, geometry=geometry())
    assert caught.value.field.removeprefix("offloading option ") == field


@pytest.mark.parametrize("field", ["gpu_block_size", "gpu_block_bytes", "num_workers"])
def test_worker_geometry_zero_field_raises_and_names_field(field: str) -> None:
    with pytest.raises(ConfigurationError, match=f"^{field}: 0"):
        geometry(**{field: 0})


def test_get_handlers_block_size_differs_from_geometry_raises(
    spec: CPUOffloadingSpec,
) -> None:
    with pytest.raises(
        ConfigurationError, match="gpu_block_bytes: 3000 is not valid; expected 2000"
    ):
        spec.get_handlers(caches(2000))
