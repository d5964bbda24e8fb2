"""The tier between vLLM's abstract classes and a store, without an engine."""

from __future__ import annotations

import inspect
import os
import time
from types import SimpleNamespace

import numpy as np
import pytest

from persistkv.errors import ConfigurationError
from tests.integrations.vllm.conftest import stored_contexts
from tests.integrations.vllm.offloading import offloading_config

pytestmark = pytest.mark.vllm

ROWS, STRIDE, CHUNK = 16, 8192, 16


@pytest.fixture
def rows():
    return np.random.default_rng(0).integers(-128, 128, (ROWS, STRIDE), dtype=np.int8)


@pytest.fixture
def make_tier(rows, url, monkeypatch):
    """Return a function that makes tiers over the rows; other tests cover the identity."""
    from persistkv.integrations.vllm import tier as module

    engine = SimpleNamespace(cache_config=SimpleNamespace(prefix_caching_hash_algo="sha256"))
    monkeypatch.setattr(module, "find_vllm_config", lambda: engine)
    monkeypatch.setattr(module, "engine_identity", lambda *_, **__: {"test": 1})
    built = []

    def make(*, url=url, view=None, **options):
        spec = SimpleNamespace(config=offloading_config(STRIDE, CHUNK), blocks_per_chunk=1)
        built.append(module.PersistKVTier(spec, view or memoryview(rows), "persistkv", url=url, **options))
        return built[-1]

    yield make
    for tier in built:
        tier.shutdown()


def keys_of(count, first=0):
    return [bytes([first + index]) * 32 + bytes(4) for index in range(count)]


def context_of(keys, params=None):
    from vllm.v1.kv_offload.base import ReqContext

    context = ReqContext(os.urandom(4).hex(), params)
    for index, key in enumerate(keys):
        context.set_offload_key_position(key, (index + 1) * CHUNK)
    return context


def job_of(number, keys, first_row, context, *, is_promotion=False):
    from vllm.v1.kv_offload.tiering.base import TransferJob

    return TransferJob(number, keys, np.arange(first_row, first_row + len(keys)), is_promotion, context)


def results_of(tier, count=1):
    found = []
    deadline = time.monotonic() + 120
    while len(found) < count:
        assert time.monotonic() < deadline
        found += tier.get_finished_jobs()
        time.sleep(0.001)
    return found


def store(tier, keys, context):
    tier.on_new_request(context)
    tier.submit_store(job_of(1, keys, 0, context))
    tier.on_request_finished(context)
    (result,) = results_of(tier)
    tier.drain_jobs()
    return result


@pytest.mark.parametrize(
    ("option", "value"),
    [
        ("codec", "gzip"),
        ("durability", "never"),
        ("io_threads", 0),
        ("queue_bytes", "much"),
        ("staging_bytes", "1KiB"),
        ("capacity", "1 horse"),
        ("ttl", "soon"),
    ],
)
def test_an_option_of_the_store_that_is_wrong_is_named(make_tier, tmp_path, option, value):
    with pytest.raises(ConfigurationError) as caught:
        make_tier(url=f"lmdb://{tmp_path}/other", **{option: value})
    assert option in caught.value.field


def test_what_was_stored_is_loaded_and_events_tell_of_it(make_tier, rows):
    from vllm.v1.kv_offload.base import Locality, LookupResult, Medium

    tier, keys = make_tier(), keys_of(4)
    context = context_of(keys)
    assert tier.lookup(keys[0], context) is LookupResult.MISS
    result = store(tier, keys, context)
    assert (result.success, result.successful_keys, result.transfer_bytes) == (True, None, 4 * STRIDE)
    assert [tier.lookup(key, context) for key in keys] == [LookupResult.HIT] * 4
    (event,) = tier.take_events()
    assert sorted(event.keys) == keys
    assert (event.medium, event.removed, event.locality, event.ownership) == (
        Medium.STORAGE,
        False,
        Locality.LOCAL,
        "persistkv",
    )
    tier.submit_load(job_of(2, keys, 8, context, is_promotion=True))
    (result,) = results_of(tier)
    assert (result.success, result.successful_keys) == (True, None)
    assert np.array_equal(rows[8:12], rows[:4])


def test_events_tell_of_what_was_evicted(make_tier, tmp_path):
    tier, context = make_tier(url=f"lmdb://{tmp_path}/small?capacity=8MiB"), context_of([])
    stored, removed = set(), set()
    for number in range(400):  # 50 MB
        keys = [os.urandom(32) + bytes(4) for _ in range(ROWS)]
        tier.submit_store(job_of(number, keys, 0, context))
        results_of(tier)
        tier.drain_jobs()
        for event in tier.take_events():
            (removed if event.removed else stored).update(event.keys)
        if removed:
            break
    assert removed
    assert removed < stored


def test_keys_that_could_not_be_loaded_are_left_out_of_the_successful_ones(make_tier, rows):
    tier, keys = make_tier(), keys_of(3)
    context = context_of(keys)
    store(tier, keys[:2], context)
    tier.submit_load(job_of(2, keys, 8, context, is_promotion=True))
    (result,) = results_of(tier)
    assert not result.success
    assert list(result.successful_keys) == keys[:2]
    assert np.array_equal(rows[8:10], rows[:2])


def test_a_request_that_opted_out_is_answered_and_not_stored(make_tier):
    from vllm.v1.kv_offload.base import LookupResult, OffloadPolicy

    tier, keys = make_tier(), keys_of(2)
    context = context_of(keys, {"persistkv": False})
    assert tier.on_new_request(context).policy is OffloadPolicy.CHUNK_LEVEL
    assert store(tier, keys, context).success
    assert tier.lookup(keys[0], context_of(keys)) is LookupResult.MISS


def test_a_request_that_does_not_load_misses(make_tier):
    from vllm.v1.kv_offload.base import LookupResult, OffloadPolicy

    tier, keys = make_tier(), keys_of(2)
    store(tier, keys, context_of(keys))
    context = context_of(keys, {"persistkv": {"load": False}})
    assert tier.on_new_request(context).policy is OffloadPolicy.REQUEST_LEVEL
    assert tier.lookup(keys[0], context) is LookupResult.MISS
    tier.on_request_finished(context)
    assert tier.lookup(keys[0], context) is LookupResult.HIT


def test_short_requests_are_not_stored(make_tier):
    from vllm.v1.kv_offload.base import LookupResult

    tier, keys = make_tier(min_tokens=3 * CHUNK), keys_of(8)
    assert store(tier, keys[:2], context_of(keys[:2])).success
    assert tier.lookup(keys[0], context_of(keys)) is LookupResult.MISS
    store(tier, keys, context_of(keys))
    assert tier.lookup(keys[0], context_of(keys)) is LookupResult.HIT


def test_chunk_level(make_tier):
    from vllm.v1.kv_offload.base import OffloadPolicy

    assert make_tier(policy="chunk").on_new_request(context_of([])).policy is OffloadPolicy.CHUNK_LEVEL


def test_statistics_are_of_metrics_that_were_defined(make_tier):
    tier, keys = make_tier(), keys_of(2)
    store(tier, keys, context_of(keys))
    defined = type(tier).build_metric_definitions({})
    reading = tier.get_stats()
    deadline = time.monotonic() + 60
    while reading is None or not any(name.endswith("disk_bytes") for name in reading.data["data"]):
        assert time.monotonic() < deadline  # the store's answer arrives in a later step
        list(tier.get_finished_jobs())
        reading = tier.get_stats()
    assert set(reading.data["data"]) <= set(defined)
    assert all(labels == ("lmdb",) for values in reading.data["data"].values() for labels in values)


def test_shutdown_ends_the_requests_that_live_and_may_come_twice(make_tier, url):
    tier, keys = make_tier(), keys_of(2)
    context = context_of(keys)
    tier.on_new_request(context)
    tier.submit_store(job_of(1, keys, 0, context))
    tier.shutdown()
    tier.shutdown()
    assert stored_contexts(url) == 1


def test_region_of_several_segments_is_served_by_a_host_process(make_tier):
    from vllm.v1.kv_offload.cpu.shared_offload_region import SharedOffloadRegion

    if "num_segments" not in inspect.signature(SharedOffloadRegion).parameters:
        pytest.skip("regions of this release are one file")
    name = f"segments-{os.getpid()}"
    region = SharedOffloadRegion(name, ROWS, 0, STRIDE, STRIDE, num_segments=3)
    try:
        view = region.create_kv_memoryview()
        rows = np.frombuffer(view, np.int8).reshape(ROWS, STRIDE)
        rows[:8] = np.random.default_rng(1).integers(-128, 128, (8, STRIDE), dtype=np.int8)
        tier, keys = make_tier(view=view), keys_of(8)
        context = context_of(keys)
        assert tier.config_info()["host"] == "process"
        store(tier, keys, context)
        tier.submit_load(job_of(2, keys, 8, context, is_promotion=True))
        assert results_of(tier)[0].success
        assert np.array_equal(rows[8:], rows[:8])
        tier.shutdown()
        del rows, view
    finally:
        region.cleanup()


def test_refused_stores_put_a_tier_under_pressure_and_skipped_ones_do_not(make_tier):
    from vllm.v1.kv_offload.tiering.backpressure import EMABackpressureDetector

    if not hasattr(EMABackpressureDetector, "on_store_failed"):
        pytest.skip("detectors of this release do not count failures")
    tier, keys = make_tier(queue_bytes=STRIDE), keys_of(8)
    detector = EMABackpressureDetector(0.05, 0.01, failure_threshold=2)
    skipped, stored = context_of(keys, {"persistkv": {"store": False}}), context_of(keys)
    for context in (skipped, stored):
        tier.on_new_request(context)
        for number in range(8):  # the queue has room for one
            tier.submit_store(job_of(number, keys[number : number + 1], number, context))
        for result in results_of(tier, 8):
            if not result.success:
                detector.on_store_failed()
        assert detector.is_under_pressure() == (context is stored)


def test_is_found_by_its_short_name_and_by_its_module():
    from vllm.v1.kv_offload.factory import OffloadingSpecFactory
    from vllm.v1.kv_offload.tiering.factory import SecondaryTierFactory

    from persistkv.integrations.vllm import PersistKVSpec, PersistKVTier
    from persistkv.integrations.vllm.plugin import register

    register()
    register()  # vLLM calls it several times
    module = "persistkv.integrations.vllm"
    assert SecondaryTierFactory.get_tier_class({"type": "persistkv"}) is PersistKVTier
    assert SecondaryTierFactory.get_tier_class({"type": "PersistKVTier", "module_path": module}) is PersistKVTier
    assert OffloadingSpecFactory.get_spec_cls({"spec_name": "PersistKVSpec"}) is PersistKVSpec
