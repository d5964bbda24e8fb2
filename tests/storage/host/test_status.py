from __future__ import annotations

import time

import msgspec

from persistkv.storage.host.status import read_statuses
from persistkv.testing import FaultyBackend, MemoryBackend
from tests.storage.statuses import make_status


def backend_with_rows(**rows: bytes) -> FaultyBackend[MemoryBackend]:
    """Return a store that reports these status rows."""
    backend = FaultyBackend.of(MemoryBackend())
    backend.after("statuses", lambda _: rows)
    return backend


def test_read_statuses_sorts_rows_by_engine_start() -> None:
    first, second = make_status("b"), make_status("a", started=2000.0, breaker="open")
    assert read_statuses(backend_with_rows(a=second.encode(), b=first.encode())) == [first, second]


def test_read_statuses_skips_unreadable_rows() -> None:
    good = make_status()
    rows = {"torn": good.encode()[:50], "empty": b"", "bytes": b"\xff\xfe", "other": b'{"hello": 1}'}
    assert read_statuses(backend_with_rows(good=good.encode(), **rows)) == [good]


def test_read_statuses_ignores_unknown_fields_of_newer_release() -> None:
    good = make_status()
    more = msgspec.json.encode({**msgspec.json.decode(good.encode()), "new": [1, 2]})
    assert read_statuses(backend_with_rows(more=more)) == [good]


def test_status_is_live_until_several_rows_are_overdue() -> None:
    status = make_status(time=time.time())
    assert status.is_live(status.time + 4)
    assert not status.is_live(status.time + 60)
