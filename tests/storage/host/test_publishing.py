"""The row by which an engine shows what it does."""

from __future__ import annotations

import logging
from typing import Any

import pytest

from persistkv.errors import StoreError
from persistkv.storage.host.publishing import StatusPublisher


def test_a_row_that_failed_is_followed_by_the_next(
    open_store: Any, tmp_path: Any, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    store = open_store(f"lmdb://{tmp_path}/store")
    backend = store.medium.backend
    monkeypatch.setattr(backend, "status_interval_s", 0.0)
    publisher = StatusPublisher(store, store.medium.executor)

    def fail(engine: str, row: bytes | None) -> None:
        raise StoreError("the disk is full")

    with monkeypatch.context() as patch:
        patch.setattr(backend, "publish_status", fail)
        for _ in range(3):
            publisher.tick(waiting_jobs=0, writing_jobs=0, loading_jobs=0)
    assert caplog.text.count("the disk is full") == 1
    assert backend.statuses() == {}
    publisher.tick(waiting_jobs=0, writing_jobs=0, loading_jobs=0)
    assert len(backend.statuses()) == 1
