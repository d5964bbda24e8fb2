"""Calls of many threads at the same time, and the end of the store among them."""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from functools import partial
from pathlib import Path

import numpy as np
import pytest

from persistkv import BlockStore, StoreError
from persistkv.storage.records import StoreOptions
from persistkv.testing import MemoryBackend
from tests.storage.blocks.conftest import BLOCK_BYTES, identity, random_blocks


@pytest.fixture
def often_switched() -> Iterator[None]:
    """Threads run for 1 µs at a time instead of 5 ms: between any two steps of a call."""
    interval_s = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    yield
    sys.setswitchinterval(interval_s)


def _run(functions: Sequence[Callable[[], None]]) -> None:
    """Run functions in threads; raise the first error."""
    errors: list[BaseException] = []

    def run(function: Callable[[], None]) -> None:
        try:
            function()
        except BaseException as error:
            errors.append(error)

    threads = []
    for function in functions:
        threads.append(threading.Thread(target=run, args=(function,), daemon=True))
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert not any(thread.is_alive() for thread in threads), "a call does not return"
    if errors:
        raise errors[0]


def test_timed_calls_of_many_threads_store_and_load_no_other_bytes(
    tmp_path: Path,
) -> None:
    """The memory of each call has other content right after it, whatever its result."""
    url = f"lmdb://{tmp_path}/store?capacity=256MiB"
    num_blocks = 96
    with BlockStore.open(url, identity(), [BLOCK_BYTES]) as store:

        def run(thread: int) -> None:
            rng = np.random.default_rng(thread)
            memory = np.zeros((num_blocks, BLOCK_BYTES), np.uint8)
            for number in range(12):
                keys = [f"{number} {block}".encode() for block in range(num_blocks)]
                memory[:] = number + 1
                store.put(keys, list(memory), timeout_s=rng.uniform(0, 0.02))
                memory[:] = 100
                timeout_s = float(rng.choice([rng.uniform(0, 0.02), 30]))
                found = store.get(keys, list(memory), timeout_s=timeout_s)
                read = memory[found]
                memory[:] = 200
                assert (read == number + 1).all()
                time.sleep(rng.uniform(0, 0.01))
                assert (memory == 200).all(), "a late write"

        _run([partial(run, thread) for thread in range(4)])


def test_acknowledged_calls_before_close_are_durable(
    tmp_path: Path,
    often_switched: None,
) -> None:
    url = f"lmdb://{tmp_path}/store?capacity=256MiB"
    store = BlockStore.open(url, identity(), [BLOCK_BYTES])
    held: dict[bytes, int] = {}
    deleted: set[bytes] = set()

    def run(thread: int) -> None:
        for number in range(100):
            keys = [f"{thread} {number} {block}".encode() for block in range(3)]
            blocks = random_blocks(3, seed=number)
            try:
                if not all(store.put(keys, list(blocks))):
                    continue
                held.update(dict.fromkeys(keys, number))
                into = np.zeros_like(blocks)
                assert all(store.get(keys, list(into)))
                assert np.array_equal(into, blocks)
                gone = keys[number % 3]
                held.pop(gone)
                assert store.delete([gone]) == [True]
                deleted.add(gone)
            except StoreError:
                return  # closed

    def close() -> None:
        time.sleep(0.5)
        assert store.close()

    _run([*(partial(run, thread) for thread in range(4)), close])
    assert held
    assert deleted
    with BlockStore.open(url, identity(), [BLOCK_BYTES]) as again:
        keys = list(held)
        into = np.zeros((len(keys), BLOCK_BYTES), np.uint8)
        assert all(again.get(keys, list(into)))
        for block, number, key in zip(into, held.values(), keys, strict=True):
            expected = random_blocks(3, seed=number)[int(key.split()[-1])]
            assert np.array_equal(block, expected)
        assert not any(again.contains(list(deleted)))


@pytest.mark.slow
def test_calls_during_close_return_or_raise(often_switched: None) -> None:
    for _ in range(100):
        store = BlockStore(
            MemoryBackend(),
            identity(),
            [BLOCK_BYTES],
            StoreOptions(adopt="never"),
            url="test",
        )

        def call(store: BlockStore = store) -> None:
            with suppress(StoreError):  # closed
                while True:
                    store.contains([b"a"])

        def close(store: BlockStore = store) -> None:
            assert store.close()

        _run([*([call] * 6), close])
