"""Quotas in an engine's store: what does not fit is dropped and counted for its tenant alone."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from persistkv.base import Retention
from persistkv.errors import QuotaExceededError, StoreError, StoreFullError
from persistkv.storage.store.blocking import BlockingStore
from persistkv.tenants import DEFAULT_TENANT, tenant_key
from tests.storage.stores import end

Keys = Callable[..., list[bytes]]
OpenStore = Callable[..., BlockingStore]
BLOCK = 64 << 10  # 64 KiB


@pytest.fixture
def store(tmp_path: Path, open_store: OpenStore) -> BlockingStore:
    return open_store(f"lmdb://{tmp_path}/store?capacity=256MiB")


def set_quota(store: BlockingStore, tenant: str, num_bytes: int) -> None:
    backend = store.view.backend
    backend.set_policy(replace(backend.policy(), quotas={tenant: num_bytes}))


def put(
    store: BlockingStore,
    tenant: str,
    keys: list[bytes],
    row: int,
    *,
    pin: bool = False,
) -> list[bytes]:
    """Store blocks of a request, which ends; return their keys."""
    names = [tenant_key(tenant, key) for key in keys]
    rows = list(range(row, row + len(names)))
    store.put(f"r-{tenant}-{row}", names, rows, list(range(len(names))), tenant)
    store.end_request(
        end(
            f"r-{tenant}-{row}",
            names,
            tenant=tenant,
            retention=Retention(pin=pin),
        )
    )
    return names


def used(store: BlockingStore, tenant: str) -> int:
    found = {one.tenant: one.stored_bytes for one in store.view.backend.tenants()}
    return found.get(tenant, 0)


def test_blocks_of_tenant_whose_pins_fill_its_quota_are_dropped_and_counted(
    store: BlockingStore,
    keys: Keys,
    caplog: pytest.LogCaptureFixture,
) -> None:
    set_quota(store, "anna", 4 * BLOCK)
    pinned = put(store, "anna", keys(4), 0, pin=True)
    store.flush()
    assert used(store, "anna") == 4 * BLOCK
    # staged together, and committed in one batch
    refused = put(store, "anna", keys(3), 10)
    others = put(store, "berta", keys(5), 20)
    others += put(store, DEFAULT_TENANT, keys(2), 30)
    store.flush()
    assert store.store.missing(pinned) == []
    assert store.store.missing(others) == []
    assert store.store.missing(refused) == refused
    assert store.counters.quota_blocks == store.counters.dropped_blocks == 3
    assert store.counters.dropped_bytes == 3 * BLOCK
    assert "a tenant is at its quota" in caplog.text
    assert "'anna'" in caplog.text
    persisted = dict(store.take_report().persisted)
    assert persisted["r-anna-10"] is False
    assert persisted["r-anna-0"] is persisted["r-berta-20"] is True


def test_quota_failure_does_not_hide_failure_of_the_store_in_the_same_minute(
    store: BlockingStore,
    caplog: pytest.LogCaptureFixture,
) -> None:
    for _ in range(2):
        store.view.log_failure(QuotaExceededError("anna", 2, 1))
        store.view.log_failure(StoreError("no answer"))
        store.view.log_failure(StoreFullError("no space"))
    kinds = [record.getMessage().partition(" (")[0] for record in caplog.records]
    assert kinds == [
        "a tenant is at its quota",
        "the store failed",
        "the store is full",
    ]


def test_quota_evicts_oldest_requests_of_its_tenant_while_engine_runs(
    store: BlockingStore,
    keys: Keys,
) -> None:
    others = put(store, "berta", keys(3), 60)
    store.flush()
    stored = []
    for number in range(6):
        stored.append(put(store, "anna", keys(2), 2 * number))
        store.flush()
    set_quota(store, "anna", 6 * BLOCK)
    stored.append(put(store, "anna", keys(2), 20))
    store.flush()
    assert used(store, "anna") == 6 * BLOCK
    for names in stored[:-3]:
        assert store.store.missing(names) == names
    for names in stored[-3:]:
        assert store.store.missing(names) == []
    assert store.store.missing(others) == []
    assert store.counters.dropped_blocks == 0
