"""The primary tier's words for other tiers, and its memory."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest

from persistkv.base import OffloadKey, ReqContext
from persistkv.cpu.manager import CPULoadStoreSpec, CPUPrimaryTierOffloadingManager
from persistkv.cpu.shared_offload_region import SharedOffloadRegion
from persistkv.errors import ConfigurationError, RegionError

MakeKeys = Callable[[int], list[OffloadKey]]


@pytest.fixture
def region(shared_memory: str) -> SharedOffloadRegion:
    return SharedOffloadRegion("engine", 4 * 4096, 4, None, 1, 4096, directory=shared_memory)


def test_rows_are_written_read_and_given_back(region: SharedOffloadRegion, keys: MakeKeys, context: ReqContext) -> None:
    manager = CPUPrimaryTierOffloadingManager(4, region)
    held = keys(2)
    output = manager.prepare_write(held, context)
    assert output is not None
    assert isinstance(output.store_spec, CPULoadStoreSpec)
    view = manager.get_kv_memoryview()
    assert manager.get_kv_memoryview() is view
    np.asarray(view)[output.store_spec.block_ids[1]] = 3
    manager.complete_write(held, context)
    row = manager.prepare_read(held[1:], context).block_ids[0]
    assert row == manager.get_block_id(held[1], context)
    assert view[row, 4095] == 3
    manager.complete_read(held[1:], context)
    with pytest.raises(KeyError, match="not held"):
        manager.get_block_id(keys(1)[0], context)
    manager.shutdown()


def test_shutdown_releases_view_and_region(region: SharedOffloadRegion) -> None:
    manager = CPUPrimaryTierOffloadingManager(4, region)
    view = manager.get_kv_memoryview()
    manager.shutdown()
    manager.shutdown()
    with pytest.raises(ValueError, match="released"):
        view[0, 0]
    with pytest.raises(RegionError, match="cleaned up"):
        manager.get_kv_memoryview()


def test_shutdown_survives_an_array_over_the_view(
    region: SharedOffloadRegion, caplog: pytest.LogCaptureFixture
) -> None:
    manager = CPUPrimaryTierOffloadingManager(4, region)
    array = np.asarray(manager.get_kv_memoryview())
    manager.shutdown()
    assert "still in use" in caplog.text
    assert array.sum() == 0


def test_rows_must_be_the_regions(region: SharedOffloadRegion) -> None:
    with pytest.raises(ConfigurationError, match="num_blocks: 5 is not valid; expected 4"):
        CPUPrimaryTierOffloadingManager(5, region)
    region.cleanup()
