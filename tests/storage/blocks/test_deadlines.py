"""Deadlines, bounds and failures of a block store's calls."""

from __future__ import annotations

import itertools
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np
import pytest

from persistkv import BlockStore, CompletionQueue, StoreError, StoreTimeoutError
from persistkv.errors import StoreFullError
from persistkv.storage.records import StoreOptions
from persistkv.testing import FaultyBackend, MemoryBackend
from tests.storage.blocks.conftest import BLOCK_BYTES, identity, new_keys, random_blocks

BACKEND_OPTIONS = StoreOptions(adopt="never", events=True)


@contextmanager
def faulty_store(
    max_queue_bytes: int = 1 << 30,
) -> Iterator[tuple[BlockStore, FaultyBackend[MemoryBackend]]]:
    """Open a store in memory whose calls can be made to hang or fail."""
    backend = FaultyBackend.of(MemoryBackend())
    store = BlockStore(
        backend,
        identity(),
        [BLOCK_BYTES],
        BACKEND_OPTIONS,
        url="test",
        max_queue_bytes=max_queue_bytes,
    )
    try:
        yield store, backend
    finally:
        backend.clear_faults()
        assert store.close()


def test_get_past_its_deadline_never_writes_the_callers_memory() -> None:
    with faulty_store() as (store, backend):
        keys, blocks = new_keys(2), random_blocks(2)
        assert all(store.put(keys, list(blocks)))
        release = threading.Event()
        backend.before("read", lambda *_: release.wait(30))
        into = np.zeros_like(blocks)
        begin = time.monotonic()
        assert store.get(keys, list(into), timeout_s=0.2) == [False, False]
        assert time.monotonic() - begin < 5
        assert store.counters.expired_calls == 1
        into[:] = 7  # the engine uses its memory for other blocks
        release.set()
        store.flush()
        time.sleep(0.3)
        assert (into == 7).all()
        backend.clear_faults()
        assert store.get(keys, list(into), timeout_s=30) == [True, True]
        assert np.array_equal(into, blocks)


def test_get_past_its_deadline_returns_the_blocks_that_were_read() -> None:
    with faulty_store() as (store, backend):
        # two packs, which are read by two calls
        keys, blocks = new_keys(160), random_blocks(160)
        for part in (slice(80), slice(80, None)):
            assert all(store.put(keys[part], list(blocks[part])))
        release = threading.Event()
        num_calls = itertools.count()
        backend.before("read", lambda *_: next(num_calls) == 0 or release.wait(30))
        into = np.zeros_like(blocks)
        found = store.get(keys, list(into), timeout_s=0.5)
        assert found.count(True) == 80
        expected = np.where(np.array(found)[:, None], blocks, 0)
        assert np.array_equal(into, expected)
        release.set()
        store.flush()
        time.sleep(0.3)
        assert np.array_equal(into, expected)


@pytest.mark.parametrize("count", [2, 80])
def test_put_past_its_deadline_stores_the_bytes_of_the_call_or_nothing(
    count: int,
) -> None:
    with faulty_store() as (store, backend):
        keys, blocks = new_keys(count), random_blocks(count)
        original = blocks.copy()
        release = threading.Event()
        backend.before("commit", lambda *_: release.wait(30))
        assert not any(store.put(keys, list(blocks), timeout_s=0.2))
        blocks[:] = 0  # the engine uses its memory for other blocks
        release.set()
        store.flush()
        into = np.zeros_like(blocks)
        # small packs are copied before they are written, large ones while they are
        is_copied = count == 2
        assert store.get(keys, list(into)) == [is_copied] * count
        assert np.array_equal(into, original if is_copied else blocks)
        assert store.put(keys, list(original), timeout_s=30) == [True] * count
        assert all(store.get(keys, list(into)))
        assert np.array_equal(into, original)


@pytest.mark.parametrize("call", ["delete", "usage", "stored_blocks", "flush"])
def test_calls_past_their_deadline_raise(call: str) -> None:
    with faulty_store() as (store, backend):
        keys = new_keys(1)
        assert all(store.put(keys, list(random_blocks(1))))
        release = threading.Event()
        for name in ("commit", "changes", "stats"):
            backend.before(name, lambda *_: release.wait(30))
        store.touch(keys)  # a flush has something to commit
        arguments = [keys] if call == "delete" else []
        with pytest.raises(StoreTimeoutError, match=r"0\.2 s"):
            getattr(store, call)(*arguments, timeout_s=0.2)
        release.set()


def test_stores_beyond_the_bound_are_refused_and_counted() -> None:
    with faulty_store(max_queue_bytes=3 * BLOCK_BYTES) as (store, backend):
        queue = CompletionQueue()
        release = threading.Event()
        backend.before("commit", lambda *_: release.wait(30))
        first = store.submit_put(queue, new_keys(2), list(random_blocks(2)))
        refused = new_keys(2)
        assert store.put(refused, list(random_blocks(2))) == [False, False]
        number = store.submit_put(queue, refused, list(random_blocks(2)))
        assert store.counters.refused_blocks == 4
        release.set()
        store.flush()
        deadline = time.monotonic() + 30
        done: dict[int, list[bool]] = {}
        while len(done) < 2 and time.monotonic() < deadline:
            done.update((one.job_id, list(one.results)) for one in queue.take())
        assert done == {first: [True, True], number: [False, False]}
        assert store.put(refused, list(random_blocks(2))) == [True, True]
        queue.close()


def test_full_store_drops_and_counts(caplog: pytest.LogCaptureFixture) -> None:
    with faulty_store() as (store, backend):
        keys, blocks = new_keys(2), random_blocks(2)
        backend.fail("commit", StoreFullError("no room"))
        assert store.put(keys, list(blocks)) == [False, False]
        assert store.counters.store.dropped_blocks == 2
        assert "the store is full" in caplog.text
        backend.clear_faults()
        assert store.put(keys, list(blocks)) == [True, True]


def test_failing_reads_are_misses_and_deletion_loses_nothing() -> None:
    with faulty_store() as (store, backend):
        keys, blocks = new_keys(4), random_blocks(4)
        assert all(store.put(keys, list(blocks)))
        backend.fail("read", StoreError("no network"))
        into = np.zeros_like(blocks)
        assert store.get(keys, list(into)) == [False] * 4
        # the others cannot be written again
        with pytest.raises(StoreError, match="cannot be read"):
            store.delete(keys[:1])
        backend.clear_faults()
        assert store.get(keys, list(into)) == [True] * 4
        assert np.array_equal(into, blocks)


def test_close_reports_a_call_that_hangs() -> None:
    backend = FaultyBackend.of(MemoryBackend())
    store = BlockStore(backend, identity(), [BLOCK_BYTES], BACKEND_OPTIONS, url="test")
    release = threading.Event()
    backend.before("commit", lambda *_: release.wait(30))
    queue = CompletionQueue()
    store.submit_put(queue, new_keys(1), list(random_blocks(1)))
    assert not store.close(timeout_s=0.2)
    release.set()
    queue.close()


@pytest.mark.parametrize("method", ["changes", "close"])
def test_close_returns_at_its_deadline(method: str) -> None:
    backend = FaultyBackend.of(MemoryBackend())
    options = StoreOptions(adopt="never", refresh_s=0.01)
    store = BlockStore(backend, identity(), [BLOCK_BYTES], options, url="test")
    hangs, release = threading.Event(), threading.Event()

    def hang(*_: object) -> None:
        hangs.set()
        release.wait(30)

    backend.before(method, hang)
    begin = time.monotonic()
    assert method == "close" or hangs.wait(30)
    assert not store.close(timeout_s=0.2)
    assert time.monotonic() - begin < 20
    release.set()
