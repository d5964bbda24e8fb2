from __future__ import annotations

from persistkv.integrations.vllm.metrics import (
    COUNTERS,
    GAUGES,
    MetricsReader,
    Observed,
    levels,
    totals,
)
from persistkv.storage.host.client import ClientCounters, StoreStats
from persistkv.storage.host.protocol import HostStats
from persistkv.storage.records import StoreCounters


def host_stats(stored_bytes=0, capacity=100, breaker=None):
    return HostStats(
        0,
        StoreCounters(stored_bytes=stored_bytes),
        3,
        0,
        25,
        capacity,
        0.0,
        breaker=breaker,
    )


def test_totals_and_levels_return_exactly_defined_metrics():
    stats = StoreStats("open", ClientCounters(), host_stats())
    assert totals(Observed(), stats).keys() == COUNTERS.keys()
    assert levels(stats, 3).keys() == GAUGES.keys()


def test_totals_and_levels_before_host_stats_omit_host_metrics():
    stats = StoreStats("opening", ClientCounters(), None)
    assert totals(Observed(), stats).keys() < COUNTERS.keys()
    assert levels(stats, 0) == {"queued_bytes": 0, "held_chunks": 0, "open": 0.0}


def test_levels_fill_perc_is_used_share_of_capacity():
    assert (
        levels(StoreStats("open", ClientCounters(), host_stats()), 3)["fill_perc"]
        == 0.25
    )
    assert (
        levels(StoreStats("open", ClientCounters(), host_stats(capacity=None)), 3)[
            "fill_perc"
        ]
        == 0.0
    )


def test_metrics_reader_growth_after_host_restart_counts_from_zero():
    reader = MetricsReader("lmdb")
    client, observed = ClientCounters(), Observed()
    readings = [
        StoreStats("open", client, host_stats(stored)) for stored in (10, 30, 30, 5)
    ]
    growth = [
        reader.growth(totals(observed, stats)).get("written_bytes", 0)
        for stats in readings
    ]
    assert growth == [10, 20, 0, 5]


def test_metrics_reader_is_due_after_new_count_and_every_second():
    reader, observed = MetricsReader("lmdb"), Observed()
    assert reader.is_due(observed, 10.0)
    assert not reader.is_due(observed, 10.9)
    observed.lookup_misses += 1
    assert reader.is_due(observed, 10.9)
    assert not reader.is_due(observed, 11.8)
    assert reader.is_due(observed, 11.9)


def test_levels_breaker_state_is_number_from_0_to_2():
    states = [None, "closed", "half-open", "open"]
    found = [
        levels(StoreStats("open", ClientCounters(), host_stats(breaker=state)), 3)[
            "breaker"
        ]
        for state in states
    ]
    assert found == [0, 0, 1, 2]
