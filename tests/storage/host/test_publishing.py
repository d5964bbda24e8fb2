"""The status row of an engine."""

from __future__ import annotations

import logging
import time
from typing import Any

import pytest

from persistkv.errors import StoreError
from persistkv.storage.host.server import session
from persistkv.testing import FaultyBackend, MemoryBackend

INTERVAL_S = 0.02
PATIENCE_S = 30.0


def test_status_failed_row_logs_once_and_next_is_published(
    hosted: Any,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    caplog.set_level(logging.INFO)
    backend = FaultyBackend.of(MemoryBackend())
    monkeypatch.setattr(backend.inner, "status_interval_s", INTERVAL_S)
    monkeypatch.setattr(session, "open_backend", lambda url: backend)
    failed: list[str] = []

    def refuse(*_: object) -> None:
        failed.append("publish_status")
        raise StoreError("the disk is full")

    backend.before("publish_status", refuse)
    client = hosted.connect("lmdb:///refused", "thread")
    client.open()
    deadline = time.monotonic() + PATIENCE_S
    while len(failed) < 3:
        assert time.monotonic() < deadline
        time.sleep(INTERVAL_S)
    assert caplog.text.count("the disk is full") == 1
    assert backend.inner.statuses() == {}
    backend.clear_faults()
    while not backend.inner.statuses():
        assert time.monotonic() < deadline
        time.sleep(INTERVAL_S)
    withdrawn: list[bytes | None] = []
    backend.before("publish_status", lambda engine, row: withdrawn.append(row))
    client.close()
    assert withdrawn[-1] is None
