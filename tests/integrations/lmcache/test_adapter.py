"""The adapter keeps LMCache's contract, and serves no wrong KV."""

from __future__ import annotations

import mmap
import os
import signal
import time
import traceback
import tracemalloc
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from persistkv import ConfigurationError
from persistkv.memory.libc import address_of
from persistkv.memory.pages import HUGE_PAGE_BYTES, prefer_huge_pages
from tests.integrations.lmcache.conftest import (
    MODEL,
    OTHER_MODEL,
    Listener,
    Memory,
    Open,
    descriptions,
    memories,
    object_keys,
)
from tests.integrations.lmcache.stand_ins import KeyEntry, ObjectKey
from tests.memory.mappings import prefers_huge_pages

OBJECT_BYTES = 2 * 4 * 16 * 64 * 2


def test_store_lookup_load(open_adapter: Open) -> None:
    driver, keys, objects = open_adapter(), object_keys(range(8)), memories(8, seed=1)
    assert driver.store(keys, objects)
    more = [*keys, *object_keys([100])]
    assert driver.lookup(more) == [True] * 8 + [False]
    targets = memories(9)
    assert driver.load(more, targets) == [True] * 8 + [False]
    for stored, loaded in zip(objects, targets, strict=False):
        assert np.array_equal(stored.bytes, loaded.bytes)
    driver.adapter.submit_unlock(more)
    assert driver.adapter.report_status()["is_healthy"]


@pytest.mark.parametrize("tokens_per_s", [None, 1.0, 1e12])
def test_lookup_reports_hits_if_loading_is_faster_than_computing(
    open_adapter: Open,
    tokens_per_s: float | None,
) -> None:
    driver = open_adapter(prefill_tokens_per_s=tokens_per_s)
    keys, objects = object_keys(range(8)), memories(8, seed=1)
    assert driver.store(keys, objects)
    assert driver.lookup(keys) == [True] * 8, "nothing is known of the store"
    assert driver.load(keys, memories(8)) == [True] * 8
    is_declined = tokens_per_s == 1e12
    assert driver.lookup(keys) == [not is_declined] * 8
    status = driver.adapter.report_status()
    assert status["declined_lookups"] == is_declined


def test_l1_prefers_huge_pages(open_adapter: Open) -> None:
    from lmcache.v1.distributed.internal_api import L1MemoryDesc

    l1 = mmap.mmap(-1, 4 * HUGE_PAGE_BYTES)
    address = address_of(memoryview(l1))
    open_adapter(L1MemoryDesc(address, len(l1), mmap.PAGESIZE))
    other = mmap.mmap(-1, len(l1))
    if not prefer_huge_pages(address_of(memoryview(other)), len(other)):
        pytest.skip("the kernel has no huge pages")
    assert prefers_huge_pages(address)


def test_descriptors_are_distinct_and_tasks_empty(open_adapter: Open) -> None:
    driver = open_adapter()
    adapter = driver.adapter
    fds = {
        adapter.get_store_event_fd(),
        adapter.get_lookup_and_lock_event_fd(),
        adapter.get_load_event_fd(),
    }
    assert len(fds) == 3
    assert driver.store([], [])
    assert driver.lookup([]) == []
    assert driver.load([], []) == []
    assert adapter.pop_completed_store_tasks() == {}
    assert adapter.query_load_result(12345) is None


def test_restarted_adapter_serves_and_announces(open_adapter: Open) -> None:
    driver, keys, objects = open_adapter(), object_keys(range(6)), memories(6, seed=2)
    assert driver.store(keys, objects)
    driver.adapter.close()
    again, listener = open_adapter(), Listener()
    again.adapter.register_listener(listener)
    assert listener.stored == dict.fromkeys(keys, OBJECT_BYTES)
    usage = again.adapter.get_usage()
    assert usage.total_bytes_used == 6 * OBJECT_BYTES
    # without a layout, as LMCache's benchmark looks keys up
    assert again.lookup(keys, {}) == [True] * 6
    targets = memories(6)
    assert again.load(keys, targets) == [True] * 6
    assert all(
        np.array_equal(stored.bytes, loaded.bytes)
        for stored, loaded in zip(objects, targets, strict=True)
    )


def test_announcements_count_each_byte_once(open_adapter: Open) -> None:
    """LMCache counts the bytes of all announced keys, too, and warns of negative sums."""
    from lmcache.v1.distributed.l2_adapters.base import L2AdapterInterface

    def announced_bytes() -> int:
        usage = L2AdapterInterface.get_usage(adapter)
        return int(usage.total_bytes_used)

    keys = object_keys(range(6))
    assert open_adapter().store(keys, memories(6, seed=2))
    driver = open_adapter()
    adapter = driver.adapter
    for _ in range(2):
        listener = Listener()
        adapter.register_listener(listener)
        assert listener.stored == dict.fromkeys(keys, OBJECT_BYTES)
    assert announced_bytes() == 6 * OBJECT_BYTES
    adapter.delete(keys[:2])
    assert announced_bytes() == 4 * OBJECT_BYTES


def test_other_dtype_of_the_same_size_is_a_miss(open_adapter: Open) -> None:
    """LMCache's own adapters give a float16 engine the bfloat16 chunks of the same model name."""
    driver, keys = open_adapter(), object_keys(range(4))
    assert driver.store(keys, memories(4, seed=3, dtype=torch.bfloat16))
    for adapter in (driver, open_adapter()):
        halves = descriptions(dtype=torch.float16)
        assert adapter.lookup(keys, halves) == [False] * 4
        targets = memories(4, dtype=torch.float16)
        assert adapter.load(keys, targets) == [False] * 4
    # both can be held
    stored = memories(4, seed=4, dtype=torch.float16)
    assert driver.store(keys, stored)
    assert driver.load(keys, targets) == [True] * 4
    assert np.array_equal(stored[0].bytes, targets[0].bytes)
    assert driver.load(keys, memories(4)) == [True] * 4


@pytest.mark.parametrize("shape", [(2, 16, 4, 64), (2, 4, 16, 32), (2, 4, 64, 16)])
def test_other_shape_is_a_miss(open_adapter: Open, shape: tuple[int, ...]) -> None:
    driver, keys = open_adapter(), object_keys(range(4))
    assert driver.store(keys, memories(4, seed=5))
    assert driver.lookup(keys, descriptions(shape)) == [False] * 4
    assert driver.load(keys, memories(4, shape=shape)) == [False] * 4


def test_models_ranks_groups_and_salts_are_apart(open_adapter: Open) -> None:
    driver, keys = open_adapter(), object_keys([7])
    variants = {
        "model": object_keys([7], model=OTHER_MODEL),
        "rank": object_keys([7], rank=0x02010201),
        "salt": object_keys([7], salt="tenant"),
        "group": object_keys([7], group=1),
    }
    layouts = descriptions()
    layouts[1] = layouts[0]
    assert driver.store(keys, memories(1, seed=6))
    for name, other in variants.items():
        assert driver.lookup(other, layouts) == [False], name
        assert driver.load(other, memories(1)) == [False], name
    for seed, other in enumerate(variants.values(), 10):
        assert driver.store(other, memories(1, seed=seed))
    for seed, other in enumerate(variants.values(), 10):
        target = memories(1)
        assert driver.load(other, target) == [True]
        assert np.array_equal(target[0].bytes, memories(1, seed=seed)[0].bytes)


def test_salts_of_one_task_are_tenants_and_usage_is_exact_for_each(
    open_adapter: Open,
) -> None:
    driver = open_adapter()
    keys = []
    for number in range(3):
        for salt in ("", "anna", "berta"):
            keys += object_keys([number], salt=salt)
    stored = memories(9, seed=21)
    assert driver.store(keys, stored)
    targets = memories(9)
    assert driver.load(keys, targets) == [True] * 9
    for source, target in zip(stored, targets, strict=True):
        assert np.array_equal(source.bytes, target.bytes)
    expected = dict.fromkeys(("", "anna", "berta"), 3 * OBJECT_BYTES)
    for adapter in (driver.adapter, open_adapter().adapter):
        assert dict(adapter.get_usage().bytes_by_cache_salt) == expected
    assert driver.lookup(object_keys(range(3), salt="clara")) == [False] * 3


def test_salt_that_is_no_tenant_is_neither_stored_nor_found(
    open_adapter: Open,
    caplog: pytest.LogCaptureFixture,
) -> None:
    salt = "a\nb"  # LMCache itself refuses salts of more than 128 characters
    driver = open_adapter()
    keys = [*object_keys([1]), *object_keys([1, 2], salt=salt)]
    assert not driver.store(keys, memories(3, seed=22))
    assert driver.lookup(keys) == [True, False, False]
    assert driver.load(keys, memories(3)) == [True, False, False]
    assert caplog.text.count("is neither stored nor found") == 1
    assert driver.adapter.report_status()["refused_objects"] == 6


def test_required_tenant_refuses_objects_without_salt(
    open_adapter: Open,
    caplog: pytest.LogCaptureFixture,
) -> None:
    assert open_adapter().store(object_keys([1]), memories(1, seed=23))
    driver = open_adapter(tenant="required")
    unsalted, salted = object_keys([1, 2]), object_keys([1, 2], salt="anna")
    assert driver.lookup(unsalted) == [False] * 2
    assert not driver.store(unsalted, memories(2, seed=24))
    assert driver.store(salted, memories(2, seed=25))
    assert driver.lookup(salted) == [True] * 2
    assert dict(driver.adapter.get_usage().bytes_by_cache_salt) == {
        "": OBJECT_BYTES,
        "anna": 2 * OBJECT_BYTES,
    }
    assert caplog.text.count("the option tenant is required") == 1


def test_refused_stores_whose_results_are_taken_at_once_use_no_memory(
    open_adapter: Open,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """LMCache takes results in another thread, maybe before the submission returns."""
    adapter = open_adapter(tenant="required").adapter
    keys, objects = object_keys([1]), memories(1)

    def size_after_taking() -> int:
        adapter.pop_completed_store_tasks()
        return OBJECT_BYTES

    monkeypatch.setattr(objects[0], "get_size", size_after_taking)
    tracemalloc.start()
    try:
        for _ in range(2_000):
            adapter.submit_store_task(keys, objects)
            adapter.pop_completed_store_tasks()
        used_bytes, _ = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert used_bytes < 64 << 10


@pytest.mark.parametrize(
    "changed",
    [
        {"engine": "vllm 0.33 FLASH_ATTN"},
        {"models": {MODEL: "name:weights-of-tomorrow"}},
    ],
)
def test_other_engine_or_weights_miss(
    open_adapter: Open,
    changed: dict[str, object],
) -> None:
    driver, keys = open_adapter(), object_keys(range(3))
    assert driver.store(keys, memories(3, seed=7))
    other = open_adapter(**changed)
    assert other.adapter.get_usage().total_bytes_used == 0
    assert other.lookup(keys) == [False] * 3
    assert other.load(keys, memories(3)) == [False] * 3
    assert other.adapter.list_l2_keys().entries == ()


def test_unknown_model_is_neither_stored_nor_found(
    open_adapter: Open,
    caplog: pytest.LogCaptureFixture,
) -> None:
    driver, keys = open_adapter(), object_keys(range(2), model="unknown")
    assert not driver.store(keys, memories(2, seed=8))
    assert driver.lookup(keys) == [False, False]
    assert driver.load(keys, memories(2)) == [False, False]
    assert caplog.text.count("model unknown is not in") == 1


@pytest.mark.parametrize("missing", ["url", "models", "engine"])
def test_missing_option_is_refused(params: dict[str, Any], missing: str) -> None:
    from persistkv.integrations.lmcache.adapter import PersistKVL2Adapter

    del params[missing]
    with pytest.raises(ConfigurationError, match=missing):
        PersistKVL2Adapter(params)
    params[missing] = {} if missing == "models" else ""
    with pytest.raises(ConfigurationError, match=missing):
        PersistKVL2Adapter(params)


def test_weights_are_fingerprinted(open_adapter: Open, tmp_path: Path) -> None:
    weights = tmp_path / "checkpoint" / "model.bin"
    weights.parent.mkdir()
    weights.write_bytes(b"one")
    models = {"models": {MODEL: str(weights.parent)}}
    keys = object_keys(range(2))
    assert open_adapter(**models).store(keys, memories(2, seed=9))
    assert open_adapter(**models).lookup(keys) == [True, True]
    weights.write_bytes(b"two")
    assert open_adapter(**models).lookup(keys) == [False, False]
    with pytest.raises(ConfigurationError, match="checkpoint"):
        open_adapter(models={MODEL: str(tmp_path / "nothing")})


def test_locked_keys_are_not_deleted(open_adapter: Open) -> None:
    driver, keys = open_adapter(lease_s=600.0), object_keys(range(3))
    listener = Listener()
    driver.adapter.register_listener(listener)
    assert driver.store(keys, memories(3, seed=10))
    assert driver.lookup(keys[:2]) == [True, True]
    assert driver.lookup(keys[:1]) == [True]
    driver.adapter.delete(keys)
    assert driver.lookup(keys, descriptions()) == [True, True, False]
    assert listener.deleted == [keys[2]]
    driver.adapter.submit_unlock(keys[:2])
    driver.adapter.submit_unlock(keys[:2])
    driver.adapter.delete(keys[1:2])
    assert driver.lookup(keys[:2]) == [True, False]
    driver.adapter.submit_unlock(object_keys([500]))


def test_locks_that_nobody_releases_expire(open_adapter: Open) -> None:
    driver, keys = open_adapter(lease_s=0.1), object_keys(range(1))
    assert driver.store(keys, memories(1, seed=10))
    assert driver.lookup(keys) == [True]
    time.sleep(0.2)
    driver.adapter.delete(keys)
    assert driver.lookup(keys, descriptions()) == [False]
    assert driver.adapter.report_status()["locked_keys"] == 0


def test_usage_and_lists_are_exact(open_adapter: Open) -> None:
    driver = open_adapter()
    for salt, count in (("", 3), ("a", 4), ("b", 5)):
        keys = object_keys(range(count), salt=salt)
        assert driver.store(keys, memories(count, seed=count))
    keys = object_keys(range(2), model=OTHER_MODEL)
    assert driver.store(keys, memories(2, seed=1))
    usage = driver.adapter.get_usage()
    assert dict(usage.bytes_by_cache_salt) == {
        "": 5 * OBJECT_BYTES,
        "a": 4 * OBJECT_BYTES,
        "b": 5 * OBJECT_BYTES,
    }
    assert usage.total_bytes_used == 14 * OBJECT_BYTES
    # its own eviction is off: the store has the only bound
    assert usage.total_capacity_bytes == 0
    assert not driver.adapter.supports_global_eviction

    listed: list[KeyEntry] = []
    cursor = None
    while True:
        page = driver.adapter.list_l2_keys(page_size=4, cursor=cursor)
        assert len(page.entries) <= 4
        listed += page.entries
        cursor = page.next_page_token
        if cursor is None:
            break
    assert len({entry.key for entry in listed}) == len(listed) == 14
    assert all(entry.size_bytes == OBJECT_BYTES for entry in listed)
    of_model = driver.adapter.list_l2_keys(OTHER_MODEL)
    assert {entry.key for entry in of_model.entries} == {
        key.to_encoded_object_key() for key in keys
    }
    with pytest.raises(ValueError, match="page_size"):
        driver.adapter.list_l2_keys(page_size=0)


def test_capacity_is_kept_and_evictions_are_announced(open_adapter: Open) -> None:
    driver, listener = open_adapter(), Listener()
    driver.adapter.register_listener(listener)
    count, shape = 4, (2, 16, 64, 512)  # 2 MiB
    layouts = descriptions(shape)
    for number in range(0, 60, count):
        keys = object_keys(range(number, number + count))
        assert driver.store(keys, memories(count, seed=number, shape=shape))
        assert driver.adapter.get_usage().total_bytes_used <= 64 << 20
    driver.adapter.delete([])  # announces what has happened
    held = driver.lookup(object_keys(range(60)), layouts)
    assert 20 <= sum(held) < 32
    assert held[-count:] == [True] * count
    evicted = set(listener.stored).difference(listener.deleted)
    assert evicted == {
        key
        for key, is_held in zip(object_keys(range(60)), held, strict=True)
        if is_held
    }


def test_other_process_stores_are_announced(open_adapter: Open) -> None:
    driver, other, listener = open_adapter(), open_adapter(), Listener()
    keys = object_keys(range(2))
    assert driver.store(keys, memories(2, seed=1))
    other.adapter.register_listener(listener)
    assert other.lookup(object_keys([50])) == [False]  # opens the layout
    more = object_keys(range(10, 12))
    assert driver.store(more, memories(2, seed=2))
    deadline = time.monotonic() + 30
    while not set(more) <= set(listener.stored) and time.monotonic() < deadline:
        time.sleep(0.1)
    assert set(more) <= set(listener.stored)
    assert other.load(more, memories(2)) == [True, True]


def test_failing_listener_does_not_end_announcements(
    open_adapter: Open,
    caplog: pytest.LogCaptureFixture,
) -> None:
    class FailingListener(Listener):
        has_failed = False

        def on_l2_keys_stored(
            self, keys: Sequence[ObjectKey], sizes: Sequence[int]
        ) -> None:
            if keys and not self.has_failed:
                self.has_failed = True
                raise RuntimeError("listener")
            super().on_l2_keys_stored(keys, sizes)

    driver, listener = open_adapter(), FailingListener()
    driver.adapter.register_listener(listener)
    assert driver.store(object_keys([1]), memories(1, seed=1))
    _wait_until(lambda: listener.has_failed)
    keys = object_keys([2])
    assert driver.store(keys, memories(1, seed=2))
    _wait_until(lambda: set(keys) <= set(listener.stored))
    assert "a listener of LMCache failed" in caplog.text


def _wait_until(has_happened: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 30
    while not has_happened() and time.monotonic() < deadline:
        time.sleep(0.05)
    assert has_happened()


def test_store_that_does_not_open_costs_misses(
    open_adapter: Open,
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
) -> None:
    (tmp_path / "file").write_text("no directory")
    driver = open_adapter(url=f"lmdb://{tmp_path}/file/store")
    keys = object_keys(range(2))
    assert not driver.store(keys, memories(2, seed=1))
    assert driver.lookup(keys) == [False, False]
    assert driver.load(keys, memories(2)) == [False, False]
    assert "does not open" in caplog.text
    assert not driver.adapter.report_status()["is_healthy"]


def test_calls_in_a_forked_child_fail_without_an_exception(open_adapter: Open) -> None:
    driver, keys = open_adapter(), object_keys(range(2))
    assert driver.store(keys, memories(2, seed=1))
    before = driver.adapter.get_usage()
    child = os.fork()
    if not child:
        signal.alarm(60)  # instead of a hang
        status = 1
        try:
            assert not driver.store(object_keys([5]), memories(1, seed=2))
            assert driver.lookup(keys) == [False, False]
            assert driver.load(keys, memories(2)) == [False, False]
            driver.adapter.delete(keys)
            assert driver.adapter.get_usage() == before
            status = 0
        except BaseException:
            traceback.print_exc()
        os._exit(status)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    assert driver.load(keys, memories(2)) == [True, True]


def test_flipped_bits_serve_no_wrong_bytes(open_adapter: Open, tmp_path: Path) -> None:
    """LMCache's ``fs`` adapter serves every damaged object."""
    count, shape = 100, (2, 4, 64, 256)  # 256 KiB
    keys, objects = object_keys(range(count)), memories(count, seed=1, shape=shape)
    driver = open_adapter(url=f"lmdb://{tmp_path}/damaged?capacity=256MiB")
    assert driver.store(keys, objects)
    driver.adapter.close()
    damaged = _flip_bits(tmp_path / "damaged" / "segments", objects[::25])
    assert damaged == 4
    again = open_adapter(url=f"lmdb://{tmp_path}/damaged?capacity=256MiB")
    assert sum(again.lookup(keys, descriptions(shape))) == count
    targets = memories(count, shape=shape)
    loaded = again.load(keys, targets)
    # a frame of 1 MiB has four objects: they fall with the damaged one
    assert count - 4 * damaged <= sum(loaded) <= count - damaged
    wrong = 0
    for is_loaded, stored, target in zip(loaded, objects, targets, strict=True):
        wrong += is_loaded and not np.array_equal(stored.bytes, target.bytes)
    assert wrong == 0


def _flip_bits(segments: Path, objects: Sequence[Memory]) -> int:
    """Flip a bit of each object in the payload files; return how many were found."""
    flipped = 0
    for file in segments.iterdir():
        data = bytearray(file.read_bytes())
        for memory in objects:
            at = data.find(memory.bytes.tobytes())
            if at >= 0:
                data[at + 1000] ^= 16
                flipped += 1
        file.write_bytes(data)
    return flipped
