from __future__ import annotations

import time

import msgspec

from persistkv.storage.host.status import read_statuses
from persistkv.testing import FaultyBackend, MemoryBackend
from tests.storage.statuses import make_status


def showing(**rows: bytes) -> FaultyBackend[MemoryBackend]:
    """Return a store that reports these status rows."""
    backend = FaultyBackend.of(MemoryBackend())
    backend.after("statuses", lambda _: rows)
    return backend


def test_rows_come_back_in_the_order_of_their_start() -> None:
    first, second = make_status("b"), make_status("a", started=2000.0, breaker="open")
    assert read_statuses(showing(a=second.encode(), b=first.encode())) == [first, second]


def test_what_does_not_read_is_passed_over() -> None:
    good = make_status()
    rows = {"torn": good.encode()[:50], "empty": b"", "bytes": b"\xff\xfe", "other": b'{"hello": 1}'}
    assert read_statuses(showing(good=good.encode(), **rows)) == [good]


def test_a_newer_release_may_say_more() -> None:
    good = make_status()
    more = msgspec.json.encode({**msgspec.json.decode(good.encode()), "new": [1, 2]})
    assert read_statuses(showing(more=more)) == [good]


def test_an_engine_counts_as_gone_after_some_rows_that_did_not_come() -> None:
    status = make_status(time=time.time())
    assert status.is_live(status.time + 4)
    assert not status.is_live(status.time + 60)
