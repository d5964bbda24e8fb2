"""Stores for callers without an event loop, and for callers whose thread runs one."""

from __future__ import annotations

import asyncio
import os
import signal
import threading
from collections.abc import Callable
from typing import Unpack

import pytest

from persistkv.config import StoreUrl
from persistkv.errors import ConfigurationError, StoreError
from persistkv.memory.rows import Rows
from persistkv.storage.backend import CommitBatch
from persistkv.storage.records import StoreOptions
from persistkv.storage.store.blocking import BlockingStore
from persistkv.testing import FaultyBackend
from persistkv.testing.memory import MemoryBackend
from tests.storage.conftest import IDENTITY
from tests.storage.stores import StoreSettings

URL = "memory://test"
THREADS = ("persistkv-loop", "persistkv-reader", "persistkv-writer")


def open_alone(rows: Rows, **options: Unpack[StoreSettings]) -> BlockingStore:
    backend = MemoryBackend.open(StoreUrl.parse(URL))
    return BlockingStore(backend, IDENTITY, rows, StoreOptions(**options), url=URL)


def store_threads() -> list[str]:
    """Return the names of the threads of stores; those of their media have other names."""
    names = [thread.name for thread in threading.enumerate()]
    return [name for name in names if name.startswith(THREADS)]


def test_blocking_store_in_running_event_loop_stores_and_reads(
    make_rows: Callable[..., Rows],
    keys: Callable[..., list[bytes]],
) -> None:
    """As in a notebook, whose cells run in an event loop."""

    async def cell() -> list[bytes]:
        store = open_alone(make_rows())
        names = keys(3)
        store.put("r", names, range(3), range(3))
        store.flush()
        missing = keys(1)
        failed = store.read([*names, *missing], range(4))
        store.close()
        assert failed == missing
        return names

    assert len(asyncio.run(cell())) == 3


def test_close_ends_threads_and_is_idempotent(make_rows: Callable[..., Rows]) -> None:
    before = store_threads()
    store = open_alone(make_rows())
    assert len(store_threads()) > len(before)
    store.close()
    store.close()
    assert store_threads() == before


def test_dropped_store_ends_its_threads(make_rows: Callable[..., Rows]) -> None:
    before = store_threads()
    store = open_alone(make_rows())
    del store
    assert store_threads() == before


def test_failed_open_leaves_no_threads(make_rows: Callable[..., Rows]) -> None:
    before = store_threads()
    with pytest.raises(ConfigurationError, match="codec"):
        open_alone(make_rows(), codec="none")
    assert store_threads() == before


def test_close_after_interrupted_flush_waits_for_its_commits(
    make_rows: Callable[..., Rows],
    keys: Callable[..., list[bytes]],
) -> None:
    """A commit that fails is split into one for each pack; Ctrl-C must not end the store between
    them."""
    backend = FaultyBackend.of(MemoryBackend.open(StoreUrl.parse(URL)))
    is_released = threading.Event()
    calls: list[int] = []
    committed: list[bytes] = []

    def interrupt_and_fail(namespace: bytes, batch: CommitBatch) -> None:
        calls.append(len(batch.packs))
        if len(calls) == 1:
            os.kill(os.getpid(), signal.SIGINT)
            assert is_released.wait(30)
            raise StoreError("the disk went away")
        for pack in batch.packs:
            committed.extend(pack.keys.unpack())

    store = BlockingStore(backend, IDENTITY, make_rows(), StoreOptions(), url=URL)
    names = keys(2)
    store.put("one", names[:1], [0], [0])
    store.put("two", names[1:], [1], [0])
    backend.before("commit", interrupt_and_fail)
    # a shell's background job inherits an ignored SIGINT
    inherited = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        with pytest.raises(KeyboardInterrupt):
            store.flush()
    finally:
        signal.signal(signal.SIGINT, inherited)
    threading.Timer(0.3, is_released.set).start()
    store.close()
    assert calls == [2, 1, 1]
    assert committed == names
