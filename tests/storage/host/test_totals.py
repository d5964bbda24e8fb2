"""The totals of an open store, and the log line with them."""

from __future__ import annotations

import logging
import re
import time
from pathlib import Path

import pytest

from persistkv.errors import StoreError
from persistkv.testing import FaultyBackend, MemoryBackend
from tests.storage.host.hosted import Hosted
from tests.storage.host.jobs import BLOCK, KINDS, make_keys


@pytest.mark.parametrize("kind", KINDS)
def test_open_store_logs_one_line_with_content_and_fill_level(
    hosted: Hosted,
    tmp_path: Path,
    kind: str,
    caplog: pytest.LogCaptureFixture,
) -> None:
    url = f"lmdb://{tmp_path}/store"
    writer = hosted.connect(url + "?capacity=1GiB", identity={"model_name": "tiny"})
    writer.open()
    writer.submit_store(1, "a", make_keys(70), range(70), None, 70 * BLOCK)
    assert writer.flush(90)
    assert writer.close()
    caplog.clear()
    caplog.set_level(logging.INFO)
    client = hosted.connect(url, kind, identity={"model_name": "tiny"})
    client.open()
    deadline = time.monotonic() + 60
    while " open, " not in caplog.text:
        assert time.monotonic() < deadline
        client.poll()
        time.sleep(0.01)
    (line,) = [text for text in caplog.messages if " open, " in text]
    pattern = r" open, namespace [0-9a-f]{8} \(tiny\), 70 blocks held, 0\.0 of 1\.0 GiB"
    assert re.fullmatch(re.escape(url) + pattern, line)


def test_stats_while_medium_fails_have_no_size_and_log_no_line(
    hosted: Hosted,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    backend = FaultyBackend.of(MemoryBackend())
    monkeypatch.setattr(
        "persistkv.storage.host.server.event_loop.open_backend", lambda url: backend
    )
    client = hosted.connect("memory://outage", "thread")
    client.open()

    def disk_bytes() -> int | None:
        host = client.stats().host
        assert host is not None
        return host.disk_bytes

    for _ in range(2):
        assert disk_bytes() is not None
        backend.fail("stats", StoreError("no answer"))
        assert [disk_bytes(), disk_bytes()] == [None, None]
        assert "no answer" not in caplog.text, "an outage has other lines"
        backend.clear_faults()
