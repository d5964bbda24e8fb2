"""Tiers created by type name, and the manager with its tiers created from a dictionary."""

from __future__ import annotations

import glob
import math
import os
import uuid
from inspect import signature
from pathlib import Path

import numpy as np
import pytest

from persistkv.base import ReqContext, make_offload_key
from persistkv.config import GroupLayout, OffloadingConfig, RowLayout
from persistkv.cpu.reuse_manager import FilterReusedOffloadingManager
from persistkv.cpu.spec import WorkerGeometry
from persistkv.errors import ConfigurationError
from persistkv.tiering.base import SecondaryTierManager
from persistkv.tiering.example import ExampleSecondaryTier
from persistkv.tiering.manager import TieringOffloadingManager
from persistkv.tiering.persistent import PersistentTier
from persistkv.tiering.spec import TieringOffloadingSpec, create_secondary_tier

CONFIG = OffloadingConfig(
    {"a": 1}, 16, RowLayout(4096, (GroupLayout(((0, 4096),)),)), 4
)


def create(**tier_config: object) -> SecondaryTierManager:
    return create_secondary_tier(
        tier_config, memoryview(bytearray(4 * 4096)).cast("B", (4, 4096)), CONFIG
    )


def spec(**extra: object) -> TieringOffloadingSpec:
    geometry = WorkerGeometry(
        instance_id=uuid.uuid4().hex, gpu_block_size=16, gpu_block_bytes=6000
    )
    return TieringOffloadingSpec(
        extra_config=extra, geometry=geometry, identity={"weights": "w"}
    )


def test_create_secondary_tier_known_type_returns_its_class(tmp_path: Path) -> None:
    tier = create(type="example", max_blocks=3)
    assert isinstance(tier, ExampleSecondaryTier)
    assert tier.max_blocks == 3
    persistent = create(
        type="persistent", url=f"lmdb://{tmp_path}/store", host="thread"
    )
    assert isinstance(persistent, PersistentTier)
    persistent.shutdown()


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({}, "secondary_tiers type: None"),
        (
            {"type": "tape"},
            "secondary_tiers type: 'tape' .* one of example, persistent",
        ),
        (
            {"type": "example", "max_block": 3},
            "tier example option max_block: 3 .* one of max_blocks, simulate_async",
        ),
        ({"type": "example", "max_blocks": 0}, "tier example option max_blocks: 0"),
        (
            {"type": "persistent", "uri": "x"},
            "tier persistent option uri: 'x' .* one of adopt, codec, .* url, ",
        ),
    ],
)
def test_create_secondary_tier_invalid_option_raises_and_names_it(
    config: dict[str, object],
    message: str,
) -> None:
    with pytest.raises(ConfigurationError, match=message):
        create(**config)


@pytest.mark.parametrize(
    "tier", [SecondaryTierManager, ExampleSecondaryTier, PersistentTier]
)
def test_tier_submit_methods_take_job_metadata(
    tier: type[SecondaryTierManager],
) -> None:
    for submit in (tier.submit_store, tier.submit_load):
        assert list(signature(submit).parameters) == ["self", "job_metadata"]


def test_manager_jobs_carry_int64_array_of_rows() -> None:
    made = spec(
        cpu_bytes_to_use="64KiB",
        secondary_tiers=[{"type": "example", "simulate_async": True}],
    )
    manager, req = made.get_manager(), ReqContext("r")
    assert isinstance(manager, TieringOffloadingManager)
    (tier,) = manager.secondary_tiers
    assert isinstance(tier, ExampleSecondaryTier)
    manager.on_new_request(req)
    output = manager.prepare_store([make_offload_key(b"k" * 32, 0)], req)
    assert output is not None
    manager.complete_store(output.keys_to_store, req)
    rows = tier.pending_jobs[0].block_ids
    assert isinstance(rows, np.ndarray)
    assert rows.dtype == np.int64
    made.shutdown()


def test_spec_dictionary_builds_working_stack(tmp_path: Path) -> None:
    made = spec(
        cpu_bytes_to_use="128KiB",
        block_size=32,
        eviction_policy="arc",
        secondary_tiers=[
            {"type": "example"},
            {"type": "persistent", "url": f"lmdb://{tmp_path}/store"},
        ],
    )
    manager = made.get_manager()
    assert isinstance(manager, TieringOffloadingManager)
    assert [tier.get_tier_type() for tier in manager.secondary_tiers] == [
        "example",
        "persistent",
    ]
    assert (made.block_size_factor, made.num_blocks, made.row_stride) == (2, 10, 12288)
    req, key = ReqContext("r"), make_offload_key(b"k" * 32, 0)
    manager.on_new_request(req)
    output = manager.prepare_store([key], req)
    assert output is not None
    manager.complete_store([key], req)
    manager.on_request_finished(req)
    assert manager.secondary_tiers[1].wait_persisted("r", 90)  # type: ignore[attr-defined]
    manager.take_events()
    assert made.get_manager() is manager
    path = made.get_region().mmap_path
    made.shutdown()
    made.shutdown()
    assert not os.path.exists(path)


def test_spec_store_threshold_keeps_blocks_from_tiers_until_reused() -> None:
    made = spec(
        cpu_bytes_to_use="64KiB",
        store_threshold=2,
        secondary_tiers=[{"type": "example"}],
    )
    manager = made.get_manager()
    assert isinstance(manager, FilterReusedOffloadingManager)
    assert isinstance(manager.backing, TieringOffloadingManager)
    (tier,) = manager.backing.secondary_tiers
    assert isinstance(tier, ExampleSecondaryTier)
    key = make_offload_key(b"k" * 32, 0)
    for number, blocks in enumerate([0, 1]):
        req = ReqContext(f"r{number}")
        manager.on_new_request(req)
        manager.lookup(key, req)
        output = manager.prepare_store([key], req)
        assert output is not None
        manager.complete_store(output.keys_to_store, req)
        manager.on_request_finished(req)
        manager.take_events()
        assert len(tier.blocks) == blocks
    made.shutdown()


def test_spec_default_has_no_secondary_tiers() -> None:
    made = spec(cpu_bytes_to_use="64KiB")
    manager = made.get_manager()
    assert isinstance(manager, TieringOffloadingManager)
    assert manager.secondary_tiers == []
    made.shutdown()


@pytest.mark.parametrize(
    ("extra", "message"),
    [
        ({}, "cpu_bytes_to_use"),
        (
            {"cpu_bytes_to_use": "64KiB", "secondary_tier": []},
            "offloading option secondary_tier",
        ),
        (
            {"cpu_bytes_to_use": "64KiB", "secondary_tiers": [{"type": "tape"}]},
            "secondary_tiers type: 'tape'",
        ),
        (
            {"cpu_bytes_to_use": "64KiB", "secondary_tiers": "lmdb"},
            "offloading option secondary_tiers",
        ),
        (
            {"cpu_bytes_to_use": "64KiB", "secondary_tiers": [{"url": "x"}]},
            "secondary_tiers type: None",
        ),
        ({"cpu_bytes_to_use": "1KiB"}, "cpu_bytes_to_use: 1024"),
        ({"cpu_bytes_to_use": "64KiB", "block_size": 20}, "block_size: 20"),
        (
            {"cpu_bytes_to_use": "64KiB", "eviction_policy": "fifo"},
            "eviction_policy: 'fifo' .* one of arc, lru",
        ),
        (
            {"cpu_bytes_to_use": "64KiB", "cascade_share": 0},
            "cascade_share: 0 .* expected a number > 0",
        ),
        ({"cpu_bytes_to_use": "64KiB", "cascade_share": 1.5}, "cascade_share: 1.5"),
        ({"cpu_bytes_to_use": "64KiB", "hold_s": 0}, "hold_s: 0"),
        ({"cpu_bytes_to_use": "64KiB", "room_wait_s": -1}, "room_wait_s: -1"),
        ({"cpu_bytes_to_use": "64KiB", "prewarm_share": 1.5}, "prewarm_share: 1.5"),
    ],
)
def test_spec_invalid_option_raises_and_names_it(
    extra: dict[str, object],
    message: str,
) -> None:
    with pytest.raises(ConfigurationError, match=message):
        spec(**extra)


@pytest.mark.parametrize("name", ["cascade_share", "hold_s", "room_wait_s"])
def test_spec_option_that_is_no_number_raises(name: str) -> None:
    with pytest.raises(ConfigurationError, match=f"{name}: nan"):
        spec(cpu_bytes_to_use="64KiB", **{name: math.nan})


def test_spec_tier_fails_to_open_leaves_no_region_file(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("in the way")
    url = f"lmdb://{tmp_path}/file"
    persistent = {"type": "persistent", "url": url, "required": True}
    made = spec(
        cpu_bytes_to_use="64KiB", secondary_tiers=[{"type": "example"}, persistent]
    )
    with pytest.raises(Exception, match="file"):
        made.get_manager()
    made.shutdown()
    assert glob.glob(f"/dev/shm/*{made.geometry.instance_id}*") == []
