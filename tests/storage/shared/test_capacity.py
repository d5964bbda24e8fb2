"""Capacity and ttl of a shared store: of one namespace and of several."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

import msgspec
import pytest

from persistkv.errors import StoreError
from persistkv.storage.backend import CommitBatch
from persistkv.storage.blobs import UnavailableError
from persistkv.storage.format.seal import PLAIN
from persistkv.storage.policy import Policy
from persistkv.storage.shared import SharedOptions
from persistkv.storage.shared.format import StoreNames, seal_object
from persistkv.testing.conformance.suite import sample_identity
from tests.storage.shared.town import (
    NAMES,
    NAMESPACE,
    START,
    Engine,
    Town,
    pack,
)

HOUR_S = 3600.0


def sizes(engine: Engine) -> int:
    return engine.backend.stats().disk_bytes


def test_capacity_is_enforced_by_merges(town: Town) -> None:
    first, second = town.engine(capacity=200_000), town.engine(capacity=200_000)
    for seed in range(40):
        (first, second)[seed % 2].store(pack(seed, blocks=2, block_bytes=8192))
        town.run(3)
    town.run(10)
    assert 100_000 < sizes(first) <= 200_000
    assert first.held() == second.held() == town.fresh()
    assert pack(39).pack_id in first.held()
    assert pack(0).pack_id not in first.held()


def test_evicted_blobs_are_deleted_after_an_hour(town: Town) -> None:
    first = town.engine(capacity=100_000)
    for seed in range(30):
        first.store(pack(seed, blocks=2, block_bytes=8192))
        town.run(3)
    assert len(town.names("/packs/")) == 30
    town.run(HOUR_S + 200)
    assert len(town.names("/packs/")) == len(first.held()) < 10


def test_lowered_capacity_and_ttl_act_without_commits(town: Town) -> None:
    first = town.engine()
    for seed in range(20):
        first.store(pack(seed, blocks=2, block_bytes=8192))
    town.run(10)
    first.backend.set_policy(Policy(100_000, None))
    town.run(180)
    assert 0 < sizes(first) <= 100_000
    first.backend.set_policy(Policy(None, HOUR_S))
    town.run(1.1 * HOUR_S)
    assert first.held() == set()


def test_capacity_is_shared_by_namespaces(town: Town) -> None:
    engines = [town.engine(opens=False, capacity=600_000) for _ in range(3)]
    names = [engine.open(number) for number, engine in enumerate(engines)]
    for seed in range(60):
        for engine, name in zip(engines, names, strict=True):
            engine.store(pack(seed, blocks=2, block_bytes=8192, namespace=name))
        town.run(4)
    town.run(120)
    total = sum(
        engine.backend.opened_namespace(name).replica.disk_bytes()
        for engine, name in zip(engines, names, strict=True)
    )
    assert 400_000 < total <= 630_000


def test_capacity_holds_for_four_namespaces_and_eight_writers(town: Town) -> None:
    """They write a fifth of the capacity in a minute; then one of them writes all of it."""
    capacity, block_bytes = 2 << 20, 2048
    engines = [town.engine(opens=False, capacity=capacity) for _ in range(8)]
    namespaces = [engine.open(number % 4) for number, engine in enumerate(engines)]
    seeds = iter(range(10_000))
    used: list[float] = []
    for round_number in range(96):
        rates = [1] * 8 if round_number < 60 else [8] + [0] * 7
        for engine, namespace, rate in zip(engines, namespaces, rates, strict=True):
            for _ in range(rate):
                new = pack(next(seeds), block_bytes=block_bytes, namespace=namespace)
                engine.store(new)
        town.run(5)
        # the first eviction follows a minute after the totals of all namespaces are known
        if round_number >= 48:
            used.append(used_bytes(town) / capacity)
    assert max(used) <= 1.05
    assert min(used) > 0.8


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_capacity_holds_however_fast_eight_writers_of_four_namespaces_write(
    town: Town,
) -> None:
    """They write 2.7 times the capacity in a minute; then one of them does."""
    capacity = 1 << 20
    engines = [town.engine(opens=False, capacity=capacity) for _ in range(8)]
    for number, engine in enumerate(engines):
        engine.open(number % 4)
    seeds = iter(range(100_000))
    write_for(town, engines, seeds, 60)
    used = write_for(town, engines, seeds, 40)
    write_for(town, engines[:1], seeds, 60)
    used += write_for(town, engines[:1], seeds, 10)
    assert max(used) <= 1.05 * capacity
    assert min(used) > 0.8 * capacity


def write_for(
    town: Town,
    engines: Sequence[Engine],
    seeds: Iterator[int],
    seconds: int,
) -> list[int]:
    """Let engines write 32 packs of 1.5 KB a second together; return the bytes of all namespaces
    after every fifth second."""
    used: list[int] = []
    rounds = 32 // len(engines)
    for second in range(1, seconds + 1):
        for _ in range(rounds):
            for engine in engines:
                engine.store(pack(next(seeds), namespace=engine.namespace))
            town.run(1 / rounds)
        if second % 5 == 0:
            used.append(used_bytes(town))
    return used


def used_bytes(town: Town, namespaces: int = 4) -> int:
    """Return the bytes of all namespaces, as an engine finds them that knows nothing."""
    options = SharedOptions(cache=False, read_only=True)
    engine = Engine(town, options, read_only=True)
    try:
        for number in range(namespaces):
            engine.open(number)
        return engine.backend.stats().disk_bytes
    finally:
        engine.backend.close()


def test_namespace_without_engine_is_evicted(town: Town) -> None:
    old = town.engine(capacity=1_600_000)
    for seed in range(80):
        old.store(pack(seed, blocks=2, block_bytes=8192))
    town.run(120)
    town.stop(old)
    other = town.engine(opens=False, capacity=1_600_000)
    name = other.open(1)
    for seed in range(360):
        other.store(pack(seed, blocks=2, block_bytes=8192, namespace=name))
        town.run(10)
        if seed % 12 == 0:
            assert used_bytes(town, namespaces=2) <= 1.05 * 1_600_000
    assert len(town.fresh()) < 20
    assert len(other.held(name)) > 60
    town.run(2 * HOUR_S)
    assert len(town.names(NAMES.packs)) < 20


def test_namespace_without_engine_expires(town: Town) -> None:
    old = town.engine(ttl_s=HOUR_S)
    old.store(pack(1))
    town.run(120)
    town.stop(old)
    town.engine(opens=False, ttl_s=HOUR_S).open(1)
    town.run(3 * HOUR_S)
    assert town.fresh() == set()
    town.run(2 * HOUR_S)
    assert town.names(NAMES.packs) == []


def test_deletion_in_a_store_without_room_needs_no_merge(town: Town) -> None:
    first = town.engine(capacity=100_000)
    first.blobs.fail(
        "put", UnavailableError("no connection"), only=lambda name: "/index/" in name
    )
    packs = [pack(seed, blocks=2, block_bytes=8192) for seed in range(20)]
    first.store(*packs[:19])
    town.run(70)  # the limits are known
    with pytest.raises(StoreError):
        first.store(packs[19])
    held = sorted(first.held())
    first.backend.commit(NAMESPACE, CommitBatch(deletions=held[:1]))
    assert first.held() == set(held[1:])


def put_totals(town: Town, number: int) -> None:
    """Publish the totals of a small namespace, as an engine does."""
    namespace = sample_identity(number).digest
    name = f"{StoreNames().totals}{namespace.hex()}"
    body = msgspec.msgpack.encode((2000, [(START + town.now, 2000)]))
    town.server.put(name, [seal_object(name, body, PLAIN, namespace)])


def test_namespace_beside_many_idle_ones_uses_the_room_of_the_store(town: Town) -> None:
    growing = town.engine(capacity=8 << 20)
    for number in range(1, 150):
        put_totals(town, number)
    town.run(600)
    for seed in range(1000, 1300):
        growing.store(pack(seed, blocks=2, block_bytes=8192))
        town.run(0.5)
    assert len(growing.held()) == 300


def test_full_store_exchanges_totals_once_a_minute(town: Town) -> None:
    """However little it grows: more often would cost more than its merges."""
    capacity = 1 << 20
    engines = [town.engine(opens=False, capacity=capacity) for _ in range(2)]
    for number, engine in enumerate(engines):
        engine.open(number)
    seeds = iter(range(10_000))
    for _ in range(400):
        for engine in engines:
            engine.store(
                pack(next(seeds), block_bytes=2048, namespace=engine.namespace)
            )
        town.run(0.5)
    town.run(120)
    before = [engine.calls("put", "totals/") for engine in engines]
    for _ in range(60):
        for engine in engines:
            new = pack(
                next(seeds), blocks=1, block_bytes=16, namespace=engine.namespace
            )
            engine.store(new)
        town.run(5)
    for engine, calls in zip(engines, before, strict=True):
        assert engine.calls("put", "totals/") - calls <= 8


class Writers:
    """Eight engines that write to four namespaces of one store.

    :param rate: packs of 5 KB that they write in a second together.
    """

    def __init__(self, town: Town, capacity: int, rate: int) -> None:
        self.capacity = capacity
        self._town = town
        self.rate = rate
        self._number = 0
        self._seeds = iter(range(1_000_000))
        self.engines = [self.start() for _ in range(8)]

    def start(self) -> Engine:
        """Return a new engine, which uses one of the namespaces."""
        engine = self._town.engine(opens=False, capacity=self.capacity)
        engine.open(self._number % 4)
        self._number += 1
        return engine

    def write(self, seconds: float) -> float:
        """Let them write; return the most bytes that all namespaces had, as a share of the
        capacity."""
        most = 0
        for _ in range(int(seconds / 5)):
            for _ in range(5 * self.rate):
                engine = self._town.random.choice(self.engines)
                new = pack(
                    next(self._seeds), block_bytes=2048, namespace=engine.namespace
                )
                engine.store(new)
                self._town.run(1 / self.rate)
            most = max(most, used_bytes(self._town))
        return most / self.capacity


def lower_the_capacity(town: Town, writers: Writers) -> None:
    writers.capacity //= 2
    writers.rate //= 2
    writers.engines[0].backend.set_policy(Policy(writers.capacity, None))


def kill_an_engine_of_each_namespace(town: Town, writers: Writers) -> None:
    for engine in writers.engines[:4]:
        town.kill(engine)
    del writers.engines[:4]


def replace_all_engines(town: Town, writers: Writers) -> None:
    for engine in writers.engines:
        town.kill(engine)
    writers.engines = [writers.start() for _ in range(8)]


def set_clocks_wrong(town: Town, writers: Writers) -> None:
    for engine, ahead_s in zip(writers.engines, (-1e8, -7200, 7200, 1e8), strict=False):
        engine.clock.ahead_s = ahead_s


def misdate_replies(town: Town, writers: Writers) -> None:
    writers.engines[0].date_replies(365 * 86_400.0)
    writers.engines[1].date_replies(-365 * 86_400.0)


def empty_a_namespace(town: Town, writers: Writers) -> None:
    engine = writers.engines[0]
    held = sorted(engine.held(engine.namespace))
    engine.backend.commit(engine.namespace, CommitBatch(deletions=held))
    del writers.engines[4], writers.engines[0]


def delete_the_totals(town: Town, writers: Writers) -> None:
    town.server.delete(town.names("/totals/"))


def suspend_half_of_them(town: Town, writers: Writers) -> None:
    """They resume after minutes, with the views of before."""
    suspended = writers.engines[:4]
    for engine in suspended:
        town.engines.remove(engine)
    writers.engines = writers.engines[4:]
    writers.write(180)
    town.engines += suspended
    writers.engines += suspended


EVENTS = (
    lower_the_capacity,
    kill_an_engine_of_each_namespace,
    replace_all_engines,
    set_clocks_wrong,
    misdate_replies,
    empty_a_namespace,
    delete_the_totals,
    suspend_half_of_them,
)


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("event", EVENTS)
def test_capacity_holds_from_a_minute_after_an_event(
    town: Town,
    event: Callable[[Town, Writers], None],
) -> None:
    """They write 2.4 times the capacity in a minute."""
    writers = Writers(town, capacity=1 << 20, rate=8)
    writers.write(60)
    assert writers.write(30) <= 1.05
    event(town, writers)
    writers.write(60)
    assert writers.write(60) <= 1.05


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_capacity_holds_from_a_minute_after_idle_namespaces_are_used_at_once(
    town: Town,
) -> None:
    writers = Writers(town, capacity=1 << 20, rate=8)
    writers.write(60)
    town.run(600)
    writers.write(60)
    assert writers.write(30) <= 1.05
