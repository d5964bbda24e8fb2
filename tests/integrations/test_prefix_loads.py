"""Decisions about the loads of a block store by the adapters of LMCache and SGLang."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator

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


class Clock:
    """A clock that tests advance."""

    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def loads(clock: Clock) -> Iterator[PrefixLoads]:
    loads = PrefixLoads(TOKENS_PER_S, clock=clock)
    yield loads
    loads.close()


def load(loads: PrefixLoads, clock: Clock, loaded_bytes: int, seconds: float) -> None:
    """Run a load of one block."""
    number = loads.begin_load(BLOCK_BYTES)
    clock.now += seconds
    loads.end_load(number, loaded_bytes)


def test_is_worth_compares_load_with_computing(
    loads: PrefixLoads,
    clock: Clock,
) -> None:
    assert loads.is_worth_loading(BLOCK_BYTES, 100), "nothing is known of the store"
    load(loads, clock, BLOCK_BYTES, 0.5)
    assert not loads.is_worth_loading(BLOCK_BYTES, 100)
    assert loads.is_worth_loading(BLOCK_BYTES, 1000)
    assert loads.num_declined == 1


def test_is_worth_counts_the_calls_of_a_load(clock: Clock) -> None:
    loads = PrefixLoads(TOKENS_PER_S, call_bytes=BLOCK_BYTES, clock=clock)
    load(loads, clock, BLOCK_BYTES, 0.1)
    assert loads.is_worth_loading(10 * BLOCK_BYTES, 1050)
    assert not loads.is_worth_loading(10 * BLOCK_BYTES, 750), (
        "it may have been late by chance"
    )
    assert loads.expected_load_s(10 * BLOCK_BYTES + 1) < 1.1
    loads.close()


def test_is_worth_counts_loads_in_progress(loads: PrefixLoads, clock: Clock) -> None:
    load(loads, clock, BLOCK_BYTES, 0.1)
    assert loads.is_worth_loading(BLOCK_BYTES, 150)
    number = loads.begin_load(BLOCK_BYTES)
    assert not loads.is_worth_loading(BLOCK_BYTES, 150)
    loads.end_load(number, 0)
    assert loads.is_worth_loading(BLOCK_BYTES, 150)


def test_is_worth_without_speed_loads_everything(
    store: BlockStore,
    clock: Clock,
) -> None:
    loads = PrefixLoads(None, clock=clock)
    load(loads, clock, BLOCK_BYTES, 1000.0)
    assert loads.is_worth_loading(BLOCK_BYTES, 1)
    loads.probe_if_due(store, KEY, BLOCK_BYTES)
    loads.close()


def test_load_of_nothing_is_stall_only_if_it_took_long(
    loads: PrefixLoads,
    clock: Clock,
) -> None:
    load(loads, clock, 0, 0.001)
    assert loads.is_worth_loading(BLOCK_BYTES, 100), "the blocks were evicted"
    load(loads, clock, 0, 5.0)
    assert not loads.is_worth_loading(BLOCK_BYTES, 1_000_000)


def test_load_that_ends_at_a_short_timeout_is_stall(clock: Clock) -> None:
    loads = PrefixLoads(TOKENS_PER_S, timeout_s=0.5, clock=clock)
    load(loads, clock, BLOCK_BYTES, 0.01)
    load(loads, clock, 0, 0.5)
    assert not loads.is_worth_loading(BLOCK_BYTES, 1_000_000)
    loads.close()


def test_load_that_hangs_is_stall_until_another_one_ends(
    loads: PrefixLoads,
    clock: Clock,
) -> None:
    load(loads, clock, BLOCK_BYTES, 1.0)
    hung = loads.begin_load(BLOCK_BYTES)
    clock.now += 2.3
    assert loads.is_worth_loading(BLOCK_BYTES, 1_000_000), (
        "three times the expected time"
    )
    clock.now += 0.3
    assert not loads.is_worth_loading(BLOCK_BYTES, 1_000_000)
    load(loads, clock, BLOCK_BYTES, 1.0)
    clock.now += 1000.0
    assert loads.is_worth_loading(BLOCK_BYTES, 2_000), "a load is counted once"
    loads.end_load(hung, BLOCK_BYTES)
    assert not loads.is_worth_loading(BLOCK_BYTES, 2_000), "it took 1,000 s"


def test_probe_shows_that_store_is_fast_again(
    loads: PrefixLoads,
    clock: Clock,
    store: BlockStore,
) -> None:
    load(loads, clock, 0, 5.0)
    assert not loads.is_worth_loading(BLOCK_BYTES, 100_000)
    loads.probe_if_due(store, KEY, BLOCK_BYTES)
    deadline = time.monotonic() + 60
    while not loads.is_worth_loading(BLOCK_BYTES, 100_000):
        assert time.monotonic() < deadline
        time.sleep(0.01)


def test_probe_of_hung_store_delays_no_caller(
    loads: PrefixLoads,
    clock: Clock,
    store: BlockStore,
    backend: FaultyBackend[MemoryBackend],
) -> None:
    goes_on = threading.Event()
    backend.before("read", lambda *_: goes_on.wait(60))
    load(loads, clock, 0, 5.0)
    begin = time.monotonic()
    loads.probe_if_due(store, KEY, BLOCK_BYTES)
    loads.probe_if_due(store, KEY, BLOCK_BYTES)
    assert not loads.is_worth_loading(BLOCK_BYTES, 100)
    loads.close()
    assert time.monotonic() - begin < 30
    goes_on.set()


def test_probe_after_close_is_ignored(
    loads: PrefixLoads,
    clock: Clock,
    store: BlockStore,
) -> None:
    """A late lookup, beside the end of the adapter."""
    load(loads, clock, 0, 5.0)
    loads.close()
    assert not loads.is_worth_loading(BLOCK_BYTES, 100)
    loads.probe_if_due(store, KEY, BLOCK_BYTES)
