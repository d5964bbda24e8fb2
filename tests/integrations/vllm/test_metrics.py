from __future__ import annotations

from persistkv.integrations.vllm.metrics import COUNTERS, GAUGES, MetricsReader, Observed, levels, totals
from persistkv.storage.host.client import ClientCounters, StoreStats
from persistkv.storage.host.protocol import HostStats
from persistkv.storage.records import StoreCounters


def host(stored_bytes=0, capacity=100, breaker=None):
    return HostStats(0, StoreCounters(stored_bytes=stored_bytes), 3, 0, 25, capacity, 0.0, breaker=breaker)


def test_every_metric_is_defined_and_every_definition_has_a_value():
    stats = StoreStats("open", ClientCounters(), host())
    assert totals(Observed(), stats).keys() == COUNTERS.keys()
    assert levels(stats, 3).keys() == GAUGES.keys()


def test_before_the_store_has_told_its_totals_are_left_out():
    stats = StoreStats("opening", ClientCounters(), None)
    assert totals(Observed(), stats).keys() < COUNTERS.keys()
    assert levels(stats, 0) == {"queued_bytes": 0, "held_chunks": 0, "open": 0.0}


def test_fill():
    assert levels(StoreStats("open", ClientCounters(), host()), 3)["fill_perc"] == 0.25
    assert levels(StoreStats("open", ClientCounters(), host(capacity=None)), 3)["fill_perc"] == 0.0


def test_counters_tell_their_growth_also_after_the_stores_process_began_anew():
    reader = MetricsReader("lmdb")
    client, observed = ClientCounters(), Observed()
    readings = [StoreStats("open", client, host(stored)) for stored in (10, 30, 30, 5)]
    growth = [reader.growth(totals(observed, stats)).get("written_bytes", 0) for stats in readings]
    assert growth == [10, 20, 0, 5]


def test_a_reading_is_due_when_something_was_counted_and_each_second():
    reader, observed = MetricsReader("lmdb"), Observed()
    assert reader.is_due(observed, 10.0)
    assert not reader.is_due(observed, 10.9)
    observed.lookup_misses += 1
    assert reader.is_due(observed, 10.9)
    assert not reader.is_due(observed, 11.8)
    assert reader.is_due(observed, 11.9)


def test_breaker():
    states = [None, "closed", "half-open", "open"]
    found = [levels(StoreStats("open", ClientCounters(), host(breaker=state)), 3)["breaker"] for state in states]
    assert found == [0, 0, 1, 2]
