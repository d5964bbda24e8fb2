"""A medium that hangs: calls of LMCache return, and lookups stop to report hits."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator

import pytest

from persistkv.storage import open_backend
from persistkv.storage.backend import Backend
from persistkv.testing import FaultyBackend
from tests.integrations.lmcache.conftest import (
    Listener,
    Open,
    descriptions,
    memories,
    object_keys,
)

KEYS = object_keys(range(8))
MOST_S = 20.0
"""An upper bound of calls with a time limit of 0.3 s."""


class Medium:
    """The backends of one test."""

    def __init__(self) -> None:
        self._opened: list[FaultyBackend[Backend]] = []
        self._goes_on = threading.Event()
        self._opening_hangs = False

    def open(self, url: str) -> FaultyBackend[Backend]:
        if self._opening_hangs:
            self._goes_on.wait(120)
        backend = FaultyBackend.of(open_backend(url))
        self._opened.append(backend)
        return backend

    def hang(self, method: str) -> None:
        for backend in self._opened:
            backend.before(method, lambda *_: self._goes_on.wait(120))

    def hang_opening(self) -> None:
        self._opening_hangs = True

    def go_on(self) -> None:
        self._goes_on.set()


@pytest.fixture
def medium(monkeypatch: pytest.MonkeyPatch, open_adapter: Open) -> Iterator[Medium]:
    medium = Medium()
    for module in ("storage.blocks.store", "integrations.lmcache.stores"):
        monkeypatch.setattr(f"persistkv.{module}.open_backend", medium.open)
    yield medium
    medium.go_on()


def _wait_until(has_happened: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 60
    while not has_happened():
        assert time.monotonic() < deadline
        time.sleep(0.1)


def test_lookups_are_declined_while_a_load_hangs(
    open_adapter: Open,
    medium: Medium,
) -> None:
    driver = open_adapter(prefill_tokens_per_s=100.0)
    assert driver.store(KEYS, memories(8, seed=1))
    assert driver.load(KEYS, memories(8)) == [True] * 8
    assert driver.lookup(KEYS) == [True] * 8
    medium.hang("read")
    objects = memories(8)
    task = driver.adapter.submit_load_task(KEYS, objects)
    _wait_until(lambda: not any(driver.lookup(KEYS)))
    assert driver.adapter.query_load_result(task) is None
    medium.go_on()
    # a probe has shown that the store answers again
    _wait_until(lambda: all(driver.lookup(KEYS)))


def test_calls_return_while_lists_hang(open_adapter: Open, medium: Medium) -> None:
    driver = open_adapter(delete_timeout_s=0.3)
    assert driver.store(KEYS, memories(8, seed=1))
    medium.hang("changes")
    begin = time.monotonic()
    driver.adapter.register_listener(Listener())
    driver.adapter.delete(KEYS)
    assert time.monotonic() - begin < MOST_S


def test_constructor_returns_while_opening_hangs_and_store_opens_later(
    open_adapter: Open,
    medium: Medium,
) -> None:
    driver = open_adapter()
    assert driver.store(KEYS, memories(8, seed=1))
    driver.adapter.close()
    medium.hang_opening()
    begin = time.monotonic()
    driver = open_adapter(delete_timeout_s=0.3)
    assert time.monotonic() - begin < MOST_S
    task = driver.adapter.submit_lookup_and_lock_task(KEYS, descriptions())
    assert driver.adapter.query_lookup_and_lock_result(task) is None
    medium.go_on()
    assert driver.lookup(KEYS) == [True] * 8


def test_close_returns_while_opening_hangs_and_store_is_closed_later(
    open_adapter: Open,
    medium: Medium,
) -> None:
    threads_before = _threads()
    driver = open_adapter(delete_timeout_s=0.3)
    medium.hang_opening()
    driver.adapter.submit_store_task(KEYS, memories(8, seed=1))
    begin = time.monotonic()
    driver.adapter.close()
    assert time.monotonic() - begin < MOST_S
    medium.go_on()
    _wait_until(lambda: _threads() <= threads_before)


def _threads() -> set[threading.Thread]:
    """Return the threads of stores, and those that open them."""
    names = ("persistkv-opener", "persistkv-blocks")
    return {one for one in threading.enumerate() if one.name.startswith(names)}
