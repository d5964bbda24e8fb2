from __future__ import annotations

import time
from collections.abc import Callable

import msgspec
import pytest

from persistkv.storage.host.status import read_statuses
from persistkv.testing import FaultyBackend, MemoryBackend
from tests.storage.statuses import make_status

Report = Callable[..., FaultyBackend[MemoryBackend]]


@pytest.fixture
def backend_with_rows(memory_store: Callable[[], MemoryBackend]) -> Report:
    """Return a function that returns a store, which reports the given status rows."""

    def report(**rows: bytes) -> FaultyBackend[MemoryBackend]:
        backend = FaultyBackend.of(memory_store())
        backend.after("statuses", lambda _: rows)
        return backend

    return report


def test_read_statuses_sorts_rows_by_engine_start(backend_with_rows: Report) -> None:
    first, second = make_status("b"), make_status("a", started=2000.0, breaker="open")
    assert read_statuses(backend_with_rows(a=second.encode(), b=first.encode())) == [
        first,
        second,
    ]


def test_read_statuses_skips_unreadable_rows(backend_with_rows: Report) -> None:
    good = make_status()
    rows = {
        "torn": good.encode()[:50],
        "empty": b"",
        "bytes": b"\xff\xfe",
        "other": b'{"hello": 1}',
    }
    assert read_statuses(backend_with_rows(good=good.encode(), **rows)) == [good]


def test_read_statuses_ignores_unknown_fields_of_newer_release(
    backend_with_rows: Report,
) -> None:
    good = make_status()
    more = msgspec.json.encode({**msgspec.json.decode(good.encode()), "new": [1, 2]})
    assert read_statuses(backend_with_rows(more=more)) == [good]


def test_status_is_live_until_several_rows_are_overdue() -> None:
    status = make_status(time=time.time())
    assert status.is_live(status.time + 4)
    assert not status.is_live(status.time + 60)
