"""Concurrent calls of a shared store."""

from __future__ import annotations

import threading
from collections.abc import Iterable

import pytest

from persistkv.errors import StoreError
from persistkv.storage.shared import Clock
from persistkv.storage.shared.calls import Calls, Medium
from persistkv.testing import MemoryBlobs
from tests.tools.signals import run_interrupted

INTERRUPTED_CALLS = """
from persistkv.storage.shared.calls import Calls

begun = []

def hang(number):
    begun.append(number)
    time.sleep(3600)

calls = Calls(2, "test")
interrupt_in(0.3)
begin = time.monotonic()
try:
    calls.all(hang, range(10))
except KeyboardInterrupt:
    calls.close()
    print(len(begun), time.monotonic() - begin)
"""


def test_calls_interrupted_do_not_block_exit() -> None:
    """The medium hangs. Running calls are abandoned, and queued calls never start."""
    begun, seconds = run_interrupted(INTERRUPTED_CALLS).split()
    assert int(begun) == 2
    assert float(seconds) < 10


def test_calls_run_at_once_up_to_the_number_of_connections() -> None:
    calls = Calls(4, "test")
    meeting = threading.Barrier(4, timeout=60)

    def meet(number: int) -> int:
        meeting.wait()
        return number

    assert calls.all(meet, range(8)) == list(range(8))
    calls.close()


def test_calls_failed_call_raises_after_all_have_ended() -> None:
    calls = Calls(2, "test")
    ended: list[int] = []

    def fail_first(number: int) -> None:
        if number == 0:
            raise StoreError("it fails")
        ended.append(number)

    with pytest.raises(StoreError, match="it fails"):
        calls.all(fail_first, range(6))
    assert sorted(ended) == [1, 2, 3, 4, 5]
    calls.close()


class KeepingBlobs(MemoryBlobs):
    """A medium that keeps views of the buffers of its reads, as the traceback of a first try
    does."""

    def __init__(self) -> None:
        super().__init__()
        self.kept: list[memoryview] = []

    def read(
        self,
        name: str,
        offset: int,
        length: int,
        buffers: Iterable[memoryview],
    ) -> int:
        views = list(buffers)
        self.kept += [view[:1] for view in views]
        return super().read(name, offset, length, views)


def test_whole_medium_that_keeps_the_buffer_returns_content() -> None:
    medium = Medium(KeepingBlobs(), None, Clock())
    medium.put("a", [b"content"])
    assert medium.whole("a", 100) == b"content"
    medium.close()
