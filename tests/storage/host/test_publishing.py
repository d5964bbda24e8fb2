"""The status row of an engine."""

from __future__ import annotations

import logging
from typing import Any

import pytest

from persistkv.errors import StoreError
from persistkv.storage.host.status import StatusPublisher
from tests.storage.stores import inject_faults


def test_status_publisher_failed_row_logs_once_and_next_is_published(
    open_store: Any,
    tmp_path: Any,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    caplog.set_level(logging.INFO)
    store = open_store(f"lmdb://{tmp_path}/store")
    monkeypatch.setattr(store.catalogue.backend, "status_interval_s", 0.0)
    backend = inject_faults(store)
    publisher = StatusPublisher(store, store.catalogue.executor, 1)
    backend.fail("publish_status", StoreError("the disk is full"))
    for _ in range(3):
        publisher.tick(waiting_jobs=0, writing_jobs=0, loading_jobs=0)
    assert caplog.text.count("the disk is full") == 1
    assert backend.inner.statuses() == {}
    backend.clear_faults()
    publisher.tick(waiting_jobs=0, writing_jobs=0, loading_jobs=0)
    assert len(backend.inner.statuses()) == 1
