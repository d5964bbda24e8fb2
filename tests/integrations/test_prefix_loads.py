"""Decisions about the loads of a block store by the adapters of LMCache and SGLang."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from typing import Any

import pytest

from persistkv import BlockStore
from persistkv.integrations.prefix_loads import PrefixLoads
from persistkv.storage.records import StoreOptions
from persistkv.testing import FaultyBackend, MemoryBackend, MemoryBlobs
from tests.storage.blocks.conftest import BLOCK_BYTES, identity

KEY = b"block"
TOKENS_PER_S = 1000.0


@pytest.fixture
def backend() -> FaultyBackend[MemoryBackend]:
    return FaultyBackend.of(MemoryBackend(MemoryBlobs()))


@pytest.fixture
def store(backend: FaultyBackend[MemoryBackend]) -> Iterator[BlockStore]:
    store = BlockStore(
        backend, identity(), [BLOCK_BYTES], StoreOptions(), url="memory://"
    )
    with store:
        assert store.put([KEY], [bytes(BLOCK_BYTES)]) == [True]
        yield store


@pytest.fixture
def loads() -> Iterator[PrefixLoads]:
    loads = PrefixLoads(TOKENS_PER_S)
    yield loads
    loads.close()


def test_is_worth_compares_load_with_computing(loads: PrefixLoads) -> None:
    assert loads.is_worth(BLOCK_BYTES, 0, 100), "nothing is known of the store"
    loads.add_load(BLOCK_BYTES, 0.5)
    assert not loads.is_worth(BLOCK_BYTES, 0, 100)
    assert loads.is_worth(BLOCK_BYTES, 0, 1000)
    assert not loads.is_worth(BLOCK_BYTES, 900, 1000)
    assert loads.num_declined == 2


def test_is_worth_counts_the_calls_of_a_load() -> None:
    loads = PrefixLoads(TOKENS_PER_S, call_bytes=BLOCK_BYTES)
    loads.add_load(BLOCK_BYTES, 0.1)
    assert loads.is_worth(10 * BLOCK_BYTES, 0, 1050)
    assert not loads.is_worth(10 * BLOCK_BYTES, 0, 950)
    assert loads.expected_load_s(10 * BLOCK_BYTES + 1) < 1.1
    loads.close()


def test_is_worth_without_speed_loads_everything(store: BlockStore) -> None:
    loads = PrefixLoads(None)
    loads.add_load(BLOCK_BYTES, 1000.0)
    assert loads.is_worth(BLOCK_BYTES, 0, 1)
    loads.probe(store, KEY, BLOCK_BYTES)
    loads.close()


def test_add_load_of_nothing_is_stall_only_if_it_took_long(loads: PrefixLoads) -> None:
    loads.add_load(0, 0.001)
    assert loads.is_worth(BLOCK_BYTES, 0, 100), "the blocks were evicted"
    loads.add_load(0, 5.0)
    assert not loads.is_worth(BLOCK_BYTES, 0, 1_000_000)


def test_probe_shows_that_store_is_fast_again(
    loads: PrefixLoads, store: BlockStore
) -> None:
    loads.add_load(0, 5.0)
    assert not loads.is_worth(BLOCK_BYTES, 0, 100_000)
    loads.probe(store, KEY, BLOCK_BYTES)
    deadline = time.monotonic() + 60
    while not loads.is_worth(BLOCK_BYTES, 0, 100_000):
        assert time.monotonic() < deadline
        time.sleep(0.01)


def test_probe_of_hung_store_delays_no_caller(
    loads: PrefixLoads, store: BlockStore, backend: FaultyBackend[Any]
) -> None:
    goes_on = threading.Event()
    backend.before("read", lambda *_: goes_on.wait(60))
    loads.add_load(0, 5.0)
    begin = time.monotonic()
    loads.probe(store, KEY, BLOCK_BYTES)
    loads.probe(store, KEY, BLOCK_BYTES)
    assert not loads.is_worth(BLOCK_BYTES, 0, 100)
    loads.close()
    assert time.monotonic() - begin < 30
    goes_on.set()
