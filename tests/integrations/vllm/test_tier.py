"""``PersistKVTier`` on a real store, without an engine."""

from __future__ import annotations

import dataclasses
import inspect
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt
import pytest

from persistkv.base import OffloadKey, make_offload_key
from persistkv.errors import ConfigurationError
from persistkv.storage import open_backend
from persistkv.storage.store.savings import read_savings
from persistkv.tenants import tenant_key
from tests.integrations.vllm.conftest import stored_contexts
from tests.integrations.vllm.offloading import offloading_config

if TYPE_CHECKING:
    from vllm.v1.kv_offload.base import OffloadingEvent, ReqContext
    from vllm.v1.kv_offload.tiering.base import JobResult, TransferJob

    from persistkv.integrations.vllm import PersistKVTier

pytestmark = pytest.mark.vllm

ROWS, STRIDE, CHUNK = 16, 8192, 16


@pytest.fixture
def rows() -> npt.NDArray[np.int8]:
    return np.random.default_rng(0).integers(-128, 128, (ROWS, STRIDE), dtype=np.int8)


def make_spec(workers: int = 1) -> SimpleNamespace:
    config = offloading_config(STRIDE // workers, CHUNK)
    config = dataclasses.replace(
        config, parallel=dataclasses.replace(config.parallel, world_size=workers)
    )
    return SimpleNamespace(config=config, blocks_per_chunk=1)


MakeTier = Callable[..., "PersistKVTier"]


@pytest.fixture
def make_tier(
    rows: npt.NDArray[np.int8], url: str, monkeypatch: pytest.MonkeyPatch
) -> Iterator[MakeTier]:
    """Return a function that makes tiers over the rows, with a constant engine identity."""
    from persistkv.integrations.vllm import tier as module

    engine = SimpleNamespace(
        cache_config=SimpleNamespace(prefix_caching_hash_algo="sha256"),
        model_config=SimpleNamespace(max_model_len=ROWS * CHUNK),
    )
    monkeypatch.setattr(module, "find_vllm_config", lambda: engine)
    monkeypatch.setattr(module, "engine_identity", lambda *_, **__: {"test": 1})
    built: list[PersistKVTier] = []

    def make(
        *,
        url: str = url,
        view: memoryview | None = None,
        workers: int = 1,
        spec: SimpleNamespace | None = None,
        max_tokens: int | None = None,
        **options: Any,
    ) -> PersistKVTier:
        if max_tokens is not None:
            engine.model_config.max_model_len = max_tokens
        spec = spec or make_spec(workers)
        built.append(
            module.PersistKVTier(
                spec, view or rows.data, "persistkv", url=url, **options
            )
        )
        return built[-1]

    yield make
    for tier in built:
        tier.shutdown()


def keys_of(count: int, first: int = 0) -> list[OffloadKey]:
    return [make_offload_key(bytes([first + index]) * 32, 0) for index in range(count)]


def context_of(
    keys: Sequence[OffloadKey], params: dict[str, Any] | None = None
) -> ReqContext:
    from vllm.v1.kv_offload.base import ReqContext

    context = ReqContext(os.urandom(4).hex(), params)
    for index, key in enumerate(keys):
        context.set_offload_key_position(key, (index + 1) * CHUNK)
    return context


def job_of(
    number: int,
    keys: Sequence[OffloadKey],
    first_row: int,
    context: ReqContext,
    *,
    is_promotion: bool = False,
) -> TransferJob:
    from vllm.v1.kv_offload.tiering.base import TransferJob

    return TransferJob(
        number, keys, np.arange(first_row, first_row + len(keys)), is_promotion, context
    )


def results_of(tier: PersistKVTier, count: int = 1) -> list[JobResult]:
    found: list[JobResult] = []
    deadline = time.monotonic() + 120
    while len(found) < count:
        assert time.monotonic() < deadline
        found += tier.get_finished_jobs()
        time.sleep(0.001)
    return found


def store(
    tier: PersistKVTier, keys: Sequence[OffloadKey], context: ReqContext
) -> JobResult:
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
def test_tier_invalid_store_option_raises_naming_it(
    make_tier: MakeTier, tmp_path: Path, option: str, value: str | int
) -> None:
    with pytest.raises(ConfigurationError) as caught:
        make_tier(url=f"lmdb://{tmp_path}/other", **{option: value})
    assert option in caught.value.field


def test_tier_stored_chunks_load_unchanged_and_emit_event(
    make_tier: MakeTier, rows: npt.NDArray[np.int8]
) -> None:
    from vllm.v1.kv_offload.base import (
        Locality,
        LookupResult,
        Medium,
        OffloadingEvent,
    )

    tier, keys = make_tier(), keys_of(4)
    context = context_of(keys)
    assert tier.lookup(keys[0], context) is LookupResult.MISS
    result = store(tier, keys, context)
    assert (result.success, result.successful_keys, result.transfer_bytes) == (
        True,
        None,
        4 * STRIDE,
    )
    assert [tier.lookup(key, context) for key in keys] == [LookupResult.HIT] * 4
    (event,) = tier.take_events()
    assert sorted(event.keys) == keys
    assert event == OffloadingEvent(
        event.keys,
        Medium.STORAGE,
        removed=False,
        locality=Locality.LOCAL,
        ownership="persistkv",
        removal_expected=True,
    )
    tier.submit_load(job_of(2, keys, 8, context, is_promotion=True))
    (result,) = results_of(tier)
    assert (result.success, result.successful_keys) == (True, None)
    assert np.array_equal(rows[8:12], rows[:4])


def test_tier_chunks_deleted_by_prune_emit_removal_of_all_keys(
    make_tier: MakeTier, url: str
) -> None:
    tier, keys = make_tier(), keys_of(4)
    store(tier, keys, context_of(keys))
    list(tier.take_events())
    command = Path(sys.executable).with_name("persistkv")
    prune = [str(command), "prune", url.partition("?")[0]]
    subprocess.run(
        [*prune, "--label", "model", "--yes"], check=True, capture_output=True
    )
    events: list[OffloadingEvent] = []
    deadline = time.monotonic() + 60
    while not events:
        assert time.monotonic() < deadline
        list(tier.get_finished_jobs())
        events = list(tier.take_events())
        time.sleep(0.05)
    (event,) = events
    assert (sorted(event.keys), event.removed) == (keys, True)


@pytest.mark.parametrize("ends", [False, True])
@pytest.mark.parametrize("stores", [False, True])
def test_tier_loads_of_requests_are_recorded_as_savings(
    make_tier: MakeTier, url: str, stores: bool, ends: bool
) -> None:
    """Also of those that the engine has not ended when it stops."""
    keys = keys_of(4)
    first = make_tier(labels={"app": "chat"})
    store(first, keys, context_of(keys))
    first.shutdown()
    second = make_tier(labels={"app": "chat"})
    warm = context_of(keys, None if stores else {"persistkv": {"store": False}})
    second.on_new_request(warm)
    second.submit_load(job_of(1, keys, 0, warm, is_promotion=True))
    results_of(second)
    if stores:
        second.submit_store(job_of(2, keys, 0, warm))
        results_of(second)
    if ends:
        second.on_request_finished(warm)
    prewarmed = context_of([])
    second.on_new_request(prewarmed)
    second.submit_load(job_of(3, keys, 4, prewarmed, is_promotion=True))
    results_of(second)
    second.on_request_finished(prewarmed)
    second.shutdown()
    with closing(open_backend(url, read_only=True)) as backend:
        (total,) = read_savings(backend)
    assert (total.requests, total.tokens) == (1, 4 * CHUNK)
    assert total.labels["app=chat"].tokens == 4 * CHUNK
    assert total.seconds(total.tokens) is None


def test_tier_rebuilt_over_same_spec_loads_chunks_of_closed_tier(
    make_tier: MakeTier, rows: npt.NDArray[np.int8]
) -> None:
    from vllm.v1.kv_offload.base import LookupResult

    from persistkv.integrations.vllm.tier import engine_stores

    spec, keys = make_spec(), keys_of(4)
    first = make_tier(spec=spec)
    store(first, keys, context_of(keys))
    first.shutdown()
    again, context = make_tier(spec=spec), context_of(keys)
    assert len(engine_stores(spec)) == 1
    assert [again.lookup(key, context) for key in keys] == [LookupResult.HIT] * 4
    again.submit_load(job_of(2, keys, 8, context, is_promotion=True))
    (result,) = results_of(again)
    assert result.success
    assert np.array_equal(rows[8:12], rows[:4])


def test_tier_evicted_chunks_emit_removed_events(
    make_tier: MakeTier, tmp_path: Path
) -> None:
    tier, context = (
        make_tier(url=f"lmdb://{tmp_path}/small?capacity=8MiB"),
        context_of([]),
    )
    stored: set[OffloadKey] = set()
    removed: set[OffloadKey] = set()
    for number in range(400):  # 50 MB
        keys = [make_offload_key(os.urandom(32), 0) for _ in range(ROWS)]
        tier.submit_store(job_of(number, keys, 0, context))
        results_of(tier)
        tier.drain_jobs()
        for event in tier.take_events():
            (removed if event.removed else stored).update(event.keys)
        if removed:
            break
    assert removed
    assert removed < stored


def test_tier_load_with_missing_key_reports_only_loaded_keys(
    make_tier: MakeTier, rows: npt.NDArray[np.int8]
) -> None:
    tier, keys = make_tier(), keys_of(3)
    context = context_of(keys)
    store(tier, keys[:2], context)
    tier.submit_load(job_of(2, keys, 8, context, is_promotion=True))
    (result,) = results_of(tier)
    assert not result.success
    assert list(result.successful_keys) == keys[:2]
    assert np.array_equal(rows[8:10], rows[:2])


def test_tier_chunk_that_failed_to_load_stays_miss_for_its_request(
    make_tier: MakeTier, rows: npt.NDArray[np.int8]
) -> None:
    """An engine that gets a hit again would load the chunk without end."""
    from vllm.v1.kv_offload.base import LookupResult

    tier = make_tier(load_policy="always", load_deadline_s=1e-6)
    keys = keys_of(4)
    store(tier, keys, context_of(keys))
    before = rows.copy()
    warm, other = context_of(keys), context_of(keys)
    for context in (warm, other):
        tier.on_new_request(context)
    assert tier.lookup(keys[0], warm) is LookupResult.HIT
    tier.submit_load(job_of(2, keys, 8, warm, is_promotion=True))
    (result,) = results_of(tier)
    assert (result.success, list(result.successful_keys)) == (False, [])
    assert [tier.lookup(key, warm) for key in keys] == [LookupResult.MISS] * 4
    assert [tier.lookup(key, other) for key in keys] == [LookupResult.HIT] * 4
    tier.drain_jobs()
    assert np.array_equal(rows, before)


def test_tier_opted_out_request_succeeds_without_storing(make_tier: MakeTier) -> None:
    from vllm.v1.kv_offload.base import LookupResult, OffloadPolicy

    tier, keys = make_tier(), keys_of(2)
    context = context_of(keys, {"persistkv": False})
    assert tier.on_new_request(context).policy is OffloadPolicy.CHUNK_LEVEL
    assert store(tier, keys, context).success
    assert tier.lookup(keys[0], context_of(keys)) is LookupResult.MISS


def test_tier_request_with_load_false_misses(make_tier: MakeTier) -> None:
    from vllm.v1.kv_offload.base import LookupResult, OffloadPolicy

    tier, keys = make_tier(), keys_of(2)
    store(tier, keys, context_of(keys))
    context = context_of(keys, {"persistkv": {"load": False}})
    assert tier.on_new_request(context).policy is OffloadPolicy.REQUEST_LEVEL
    assert tier.lookup(keys[0], context) is LookupResult.MISS
    tier.on_request_finished(context)
    assert tier.lookup(keys[0], context_of(keys)) is LookupResult.HIT


TENANTS = (None, "anna", "berta")


def params_of(tenant: str | None) -> dict[str, Any] | None:
    return None if tenant is None else {"persistkv": {"tenant": tenant}}


def found(
    tier: PersistKVTier, keys: Sequence[OffloadKey], tenant: str | None
) -> list[bool]:
    """Return whether a new request of a tenant finds each chunk."""
    from vllm.v1.kv_offload.base import LookupResult

    context = context_of(keys, params_of(tenant))
    tier.on_new_request(context)
    results = [tier.lookup(key, context) is LookupResult.HIT for key in keys]
    tier.on_request_finished(context)
    return results


def packs_by_tenant(url: str) -> dict[str, set[bytes]]:
    """Return the keys of all packs of a store by the tenants that their tables name."""
    packs: dict[str, set[bytes]] = {}
    with closing(open_backend(url, read_only=True)) as backend:
        (namespace,) = backend.namespaces()
        for table in backend.changes(namespace.id, None).added:
            packs.setdefault(table.tenant, set()).update(table.keys.unpack())
    return packs


def test_tier_equal_unsalted_chunks_of_tenants_are_stored_and_served_apart(
    make_tier: MakeTier,
    url: str,
    rows: npt.NDArray[np.int8],
) -> None:
    tier, keys = make_tier(load_policy="always"), keys_of(3)
    for tenant in TENANTS:
        assert found(tier, keys, tenant) == [False] * 3, "chunks of another tenant"
        assert store(tier, keys, context_of(keys, params_of(tenant))).success
        assert found(tier, keys, tenant) == [True] * 3
    assert found(tier, keys, "clara") == [False] * 3
    tier.shutdown()
    assert packs_by_tenant(url) == {
        name or "default": {tenant_key(name or "default", key) for key in keys}
        for name in TENANTS
    }
    assert stored_contexts(url) == 3

    again = make_tier(load_policy="always")
    for tenant in TENANTS:
        assert found(again, keys, tenant) == [True] * 3
        context = context_of(keys, params_of(tenant))
        again.on_new_request(context)
        before = rows[:3].copy()
        rows[8:11] = 0
        again.submit_load(job_of(5, keys, 8, context, is_promotion=True))
        assert results_of(again)[0].success
        assert np.array_equal(rows[8:11], before)
        again.on_request_finished(context)


def test_tier_load_of_tenant_reports_engine_keys_that_were_loaded(
    make_tier: MakeTier,
) -> None:
    tier, keys = make_tier(load_policy="always"), keys_of(3)
    store(tier, keys[:2], context_of(keys[:2], params_of("anna")))
    store(tier, keys[2:], context_of(keys[2:], params_of("berta")))
    context = context_of(keys, params_of("anna"))
    tier.on_new_request(context)
    tier.submit_load(job_of(7, keys, 8, context, is_promotion=True))
    (result,) = results_of(tier)
    assert not result.success
    assert list(result.successful_keys) == keys[:2]
    assert found(tier, keys, "anna") == [True, True, False]


def test_tier_events_of_tenants_have_keys_of_engine(make_tier: MakeTier) -> None:
    tier, keys = make_tier(), keys_of(4)
    for tenant in TENANTS:
        store(tier, keys, context_of(keys, params_of(tenant)))
    reported: list[OffloadKey] = []
    deadline = time.monotonic() + 60
    while len(reported) < 3 * 4:
        assert time.monotonic() < deadline
        list(tier.get_finished_jobs())
        for event in tier.take_events():
            assert not event.removed
            reported += event.keys
        time.sleep(0.01)
    assert sorted(reported) == sorted(3 * keys)


@pytest.mark.parametrize("tenant", ["", "a\nb", 7, "x" * 129])
def test_tier_malformed_tenant_refuses_request_once(
    make_tier: MakeTier, url: str, caplog: pytest.LogCaptureFixture, tenant: str | int
) -> None:
    from vllm.v1.kv_offload.base import LookupResult, OffloadPolicy

    tier, keys = make_tier(load_policy="always"), keys_of(2)
    store(tier, keys, context_of(keys))
    context = context_of(keys, {"persistkv": {"tenant": tenant}})
    caplog.clear()
    assert tier.on_new_request(context).policy is OffloadPolicy.CHUNK_LEVEL
    assert tier.lookup(keys[0], context) is LookupResult.MISS
    tier.touch(keys, context)
    more = keys_of(2, 4)
    tier.submit_store(job_of(3, more, 4, context))
    assert results_of(tier)[0].success, "the engine's request does not fail"
    tier.on_request_finished(context)
    named = [record for record in caplog.records if "tenant" in record.getMessage()]
    assert len(named) == 1
    assert found(tier, more, None) == [False] * 2
    assert requests_refused(tier) == {("lmdb",): 1}
    tier.shutdown()
    assert packs_by_tenant(url) == {"default": set(keys)}


def requests_refused(tier: PersistKVTier) -> Any:
    """Return the counter of refused requests, by labels, in the first metrics of a tier."""
    return tier.get_stats().data["data"]["vllm:kv_offload_persistkv_requests_refused"]


def test_tier_required_tenant_refuses_requests_without_one(
    make_tier: MakeTier, url: str, caplog: pytest.LogCaptureFixture
) -> None:
    from vllm.v1.kv_offload.base import OffloadPolicy

    first, keys = make_tier(load_policy="always"), keys_of(2)
    store(first, keys, context_of(keys))
    first.shutdown()
    tier = make_tier(load_policy="always", tenant="required")
    assert found(tier, keys, None) == [False] * 2, "stored by another engine"
    assert found(tier, keys, "default") == [True] * 2, "named"
    more = keys_of(2, 4)
    context = context_of(more)
    assert tier.on_new_request(context).policy is OffloadPolicy.CHUNK_LEVEL
    assert store(tier, more, context).success
    assert store(tier, more, context_of(more, params_of("anna"))).success
    assert caplog.text.count("names no tenant") == 1
    assert requests_refused(tier) == {("lmdb",): 2}
    tier.shutdown()
    assert packs_by_tenant(url) == {
        "default": set(keys),
        "anna": {tenant_key("anna", key) for key in more},
    }


def test_tier_reused_request_id_of_another_tenant_is_another_request(
    make_tier: MakeTier, url: str
) -> None:
    """A caller may choose ids, and vLLM ends a request later than its answer."""
    from vllm.v1.kv_offload.base import LookupResult, ReqContext

    tier, keys = make_tier(load_policy="always"), keys_of(3)
    store(tier, keys[:1], context_of(keys, params_of("anna")))

    def context(tenant: str) -> ReqContext:
        made = ReqContext("same", params_of(tenant))
        for index, key in enumerate(keys):
            made.set_offload_key_position(key, (index + 1) * CHUNK)
        return made

    first, second = context("anna"), context("berta")
    tier.on_new_request(first)
    assert tier.lookup(keys[0], first) is LookupResult.HIT
    tier.submit_store(job_of(2, keys[1:2], 1, first))
    tier.on_new_request(second)
    assert tier.lookup(keys[0], second) is LookupResult.MISS
    tier.submit_store(job_of(3, keys[2:], 2, second))
    tier.submit_store(job_of(4, keys[1:2], 1, first))  # late
    tier.on_request_finished(first)
    assert tier.lookup(keys[0], second) is LookupResult.MISS
    tier.on_request_finished(second)
    results_of(tier, 3)
    tier.shutdown()
    assert packs_by_tenant(url) == {
        "anna": {tenant_key("anna", key) for key in keys[:2]},
        "berta": {tenant_key("berta", keys[2])},
    }


def test_tier_request_below_min_tokens_is_not_stored(make_tier: MakeTier) -> None:
    from vllm.v1.kv_offload.base import LookupResult

    tier, keys = make_tier(min_tokens=3 * CHUNK), keys_of(8)
    assert store(tier, keys[:2], context_of(keys[:2])).success
    assert tier.lookup(keys[0], context_of(keys)) is LookupResult.MISS
    store(tier, keys, context_of(keys))
    assert tier.lookup(keys[0], context_of(keys)) is LookupResult.HIT


def test_tier_policy_chunk_returns_chunk_level(make_tier: MakeTier) -> None:
    from vllm.v1.kv_offload.base import OffloadPolicy

    assert (
        make_tier(policy="chunk").on_new_request(context_of([])).policy
        is OffloadPolicy.CHUNK_LEVEL
    )


def test_tier_get_stats_reports_only_defined_metrics(make_tier: MakeTier) -> None:
    tier, keys = make_tier(), keys_of(2)
    store(tier, keys, context_of(keys))
    defined = type(tier).build_metric_definitions({})
    reading = tier.get_stats()
    deadline = time.monotonic() + 60
    while reading is None or not any(
        name.endswith("disk_bytes") for name in reading.data["data"]
    ):
        assert time.monotonic() < deadline  # the store sends its statistics later
        list(tier.get_finished_jobs())
        reading = tier.get_stats()
    assert set(reading.data["data"]) <= set(defined)
    assert all(
        labels == ("lmdb",)
        for values in reading.data["data"].values()
        for labels in values
    )


def test_tier_primary_tier_below_longest_request_warns_once_with_sizes(
    make_tier: MakeTier,
    caplog: pytest.LogCaptureFixture,
    tmp_path: Path,
) -> None:
    spec = make_spec()
    make_tier(spec=spec, max_tokens=ROWS * CHUNK + CHUNK - 1)
    assert "cpu_bytes_to_use" not in caplog.text
    spec = make_spec()
    for number in range(2):
        url = f"lmdb://{tmp_path}/store{number}"
        make_tier(spec=spec, max_tokens=100 * CHUNK, url=url)
    (line,) = [text for text in caplog.messages if "cpu_bytes_to_use" in text]
    assert f"{ROWS} chunks, {ROWS * CHUNK} tokens" in line
    assert f"{100 * CHUNK} tokens, needs 100 chunks" in line
    assert f"{100 * STRIDE} bytes" in line


def test_tier_first_stats_contain_every_counter(make_tier: MakeTier) -> None:
    tier = make_tier()
    counters = {
        name: values
        for name, values in tier.get_stats().data["data"].items()
        if values == {("lmdb",): 0}
    }
    from persistkv.integrations.vllm.metrics import COUNTERS, PREFIX

    assert {PREFIX + name for name in COUNTERS} <= set(counters)


def test_tier_idle_has_pending_work_until_its_news_are_exported(
    make_tier: MakeTier,
) -> None:
    tier, keys = make_tier(), keys_of(2)
    store(tier, keys, context_of(keys))
    tier.get_stats()
    deadline = time.monotonic() + 60
    while not tier.has_pending_work():  # without a step
        assert time.monotonic() < deadline
        time.sleep(0.05)
    list(tier.get_finished_jobs())
    (event,) = tier.take_events()
    assert sorted(event.keys) == keys
    assert tier.get_stats() is not None
    assert not tier.has_pending_work()


def test_tier_of_sleeping_engine_requests_no_step(
    make_tier: MakeTier, monkeypatch: pytest.MonkeyPatch
) -> None:
    from persistkv.integrations.vllm import tier as module

    executor = SimpleNamespace(collective_rpc=lambda *_: None)
    monkeypatch.setattr(module, "find_executor", lambda: executor)
    tier = make_tier()
    executor.collective_rpc("sleep")
    time.sleep(3)  # without a step
    assert not tier.has_pending_work()
    executor.collective_rpc("wake_up")
    deadline = time.monotonic() + 60
    while not tier.has_pending_work():
        assert time.monotonic() < deadline
        time.sleep(0.05)


def test_tier_get_stats_counts_chunks_in_flight_when_weights_change(
    make_tier: MakeTier,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    from persistkv.integrations.vllm import tier as module

    executor = SimpleNamespace(collective_rpc=lambda *_: None)
    monkeypatch.setattr(module, "find_executor", lambda: executor)
    tier, keys = make_tier(), keys_of(2)
    context = context_of(keys)
    assert store(tier, keys, context).success
    tier.get_stats()
    executor.collective_rpc("update_weights")
    tier.submit_load(job_of(2, keys, 0, context, is_promotion=True))
    (result,) = results_of(tier)
    assert not result.success
    counted = tier.get_stats().data["data"][
        "vllm:kv_offload_persistkv_changed_weights_chunks"
    ]
    assert counted == {("lmdb",): 2}


def test_tier_config_info_shows_no_namespace_after_weights_change(
    make_tier: MakeTier,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    from persistkv.integrations.vllm import tier as module

    executor = SimpleNamespace(collective_rpc=lambda *_: None)
    monkeypatch.setattr(module, "find_executor", lambda: executor)
    tier = make_tier()
    assert len(tier.config_info()["namespace"]) == 32
    executor.collective_rpc("update_weights")
    list(tier.get_finished_jobs())
    assert tier.config_info()["namespace"] == "none"


def test_tier_shutdown_twice_persists_unfinished_request(
    make_tier: MakeTier, url: str
) -> None:
    tier, keys = make_tier(), keys_of(2)
    context = context_of(keys)
    tier.on_new_request(context)
    tier.submit_store(job_of(1, keys, 0, context))
    tier.shutdown()
    tier.shutdown()
    assert stored_contexts(url) == 1


@pytest.mark.parametrize(
    ("status", "is_measured"),
    [("RUNNING", True), ("FINISHED_STOPPED", False), ("FINISHED_ABORTED", False)],
)
def test_tier_measured_prefills_are_recorded_as_savings(
    make_tier: MakeTier,
    url: str,
    monkeypatch: pytest.MonkeyPatch,
    status: str,
    is_measured: bool,
) -> None:
    """The chunks that are stored between two ends of schedules show what the step before computed;
    the store tells from it how long the computation of restored tokens would have taken.

    After the end of all requests, the engine may have waited for another one: not measured.
    """
    from vllm.v1.kv_offload.base import ScheduleEndContext
    from vllm.v1.metrics.stats import PrefillStats
    from vllm.v1.request import RequestStatus

    from persistkv.integrations.vllm import tier as module

    tier, keys = make_tier(), keys_of(8)
    context, other = context_of(keys), context_of(keys_of(1))
    requests: dict[str, SimpleNamespace] = {}
    monkeypatch.setattr(
        module, "find_scheduler", lambda: SimpleNamespace(requests=requests)
    )

    def run(context: ReqContext, num_cached: int) -> SimpleNamespace:
        stats = PrefillStats()
        stats.set(8 * CHUNK, num_cached, 0)
        status = RequestStatus.RUNNING
        running = SimpleNamespace(prefill_stats=stats, status=status)
        running.is_finished = lambda: RequestStatus.is_finished(running.status)
        requests[context.req_id] = running
        tier.on_new_request(context)
        return running

    running = run(context, 2 * CHUNK)
    tier.on_schedule_end(ScheduleEndContext([context.req_id], []))
    # vLLM's update after the first token
    running.prefill_stats = None
    time.sleep(0.05)
    running.status = RequestStatus[status]
    run(other, 0)
    tier.on_schedule_end(ScheduleEndContext([other.req_id], []))
    store(tier, keys, context)
    tier.on_schedule_end(ScheduleEndContext([], []))
    tier.shutdown()
    with closing(open_backend(url, read_only=True)) as backend:
        totals = read_savings(backend)
    if not is_measured:
        assert totals == []
        return
    (total,) = totals
    assert total.prefill_tokens == 6 * CHUNK
    assert 0.05 <= total.prefill_s < 5


def test_tier_region_of_several_segments_uses_host_process(make_tier: MakeTier) -> None:
    from vllm.v1.kv_offload.cpu.shared_offload_region import SharedOffloadRegion

    if "num_segments" not in inspect.signature(SharedOffloadRegion).parameters:
        pytest.skip("regions of this release are one file")
    name = f"segments-{os.getpid()}"
    region = SharedOffloadRegion(name, ROWS, 0, STRIDE, STRIDE, num_segments=3)
    try:
        view = region.create_kv_memoryview()
        rows = np.frombuffer(view, np.int8).reshape(ROWS, STRIDE)
        rows[:8] = np.random.default_rng(1).integers(
            -128, 128, (8, STRIDE), dtype=np.int8
        )
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


def test_tier_two_workers_without_canonical_layout_logs_remedy(
    make_tier: MakeTier, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO", "persistkv")
    make_tier(workers=2)
    (record,) = [
        record for record in caplog.records if "canonical_layout" in record.getMessage()
    ]
    assert record.levelname == "INFO"  # a fact, and no fault


def test_tier_refused_stores_raise_pressure_and_skipped_stores_do_not(
    make_tier: MakeTier,
) -> None:
    from vllm.v1.kv_offload.tiering.backpressure import EMABackpressureDetector

    if not hasattr(EMABackpressureDetector, "on_store_failed"):
        pytest.skip("detectors of this release do not count failures")
    tier, keys = make_tier(queue_bytes=STRIDE), keys_of(8)
    detector = EMABackpressureDetector(0.05, 0.01, failure_threshold=2)
    skipped, stored = (
        context_of(keys, {"persistkv": {"store": False}}),
        context_of(keys),
    )
    for context in (skipped, stored):
        tier.on_new_request(context)
        for number in range(8):  # the queue holds one chunk
            tier.submit_store(
                job_of(number, keys[number : number + 1], number, context)
            )
        for result in results_of(tier, 8):
            if not result.success:
                detector.on_store_failed()
        assert detector.is_under_pressure() == (context is stored)


def test_register_makes_tier_and_spec_available_to_factories() -> None:
    from vllm.v1.kv_offload.factory import OffloadingSpecFactory
    from vllm.v1.kv_offload.tiering.factory import SecondaryTierFactory

    from persistkv.integrations.vllm import PersistKVSpec, PersistKVTier
    from persistkv.integrations.vllm.plugin import register

    register()
    register()  # vLLM calls it several times
    module = "persistkv.integrations.vllm"
    assert SecondaryTierFactory.get_tier_class({"type": "persistkv"}) is PersistKVTier
    assert (
        SecondaryTierFactory.get_tier_class(
            {"type": "PersistKVTier", "module_path": module}
        )
        is PersistKVTier
    )
    assert (
        OffloadingSpecFactory.get_spec_cls({"spec_name": "PersistKVSpec"})
        is PersistKVSpec
    )
