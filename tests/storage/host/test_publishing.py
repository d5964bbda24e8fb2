"""The status row of an engine."""

from __future__ import annotations

import logging
import time
from contextlib import closing
from pathlib import Path

import pytest

from persistkv.errors import StoreError
from persistkv.storage import open_backend
from persistkv.storage.host.server import event_loop
from persistkv.storage.host.status import read_statuses
from persistkv.storage.records import LoadReport
from persistkv.testing import FaultyBackend, MemoryBackend
from tests.storage.host.hosted import Hosted

INTERVAL_S = 0.02
PATIENCE_S = 30.0


@pytest.mark.parametrize("place", ["lmdb://{}/store?", "file://{}/store?status=1s&"])
def test_status_in_store_with_key_shows_no_ids_of_requests(
    hosted: Hosted,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    place: str,
) -> None:
    """Clients may choose them, and they are encrypted elsewhere."""
    monkeypatch.setenv("PERSISTKV_TEST_KEY", "0123456789abcdef" * 4)
    url = f"{place.format(tmp_path)}key_env=PERSISTKV_TEST_KEY"
    client = hosted.connect(url, "thread")
    client.open()
    client.report_load(LoadReport("the-planted-id", "loaded", 0.1, 1.0, time.time()))
    with closing(open_backend(url, read_only=True)) as reader:
        shown: list[str] = []
        deadline = time.monotonic() + PATIENCE_S
        while not shown:
            assert time.monotonic() < deadline
            client.poll()
            time.sleep(INTERVAL_S)
            for status in read_statuses(reader):
                shown += [report.request for report in status.load_reports]
        assert shown == ["the-planted-id"]
    rows = [file for file in tmp_path.rglob("*status/*") if file.is_file()]
    assert rows
    for file in rows:
        assert b"the-planted-id" not in file.read_bytes()


def test_status_failed_row_logs_once_and_next_is_published(
    hosted: Hosted,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    caplog.set_level(logging.INFO)
    backend = FaultyBackend.of(MemoryBackend())
    monkeypatch.setattr(backend.inner, "status_interval_s", INTERVAL_S)
    monkeypatch.setattr(event_loop, "open_backend", lambda url: backend)
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
