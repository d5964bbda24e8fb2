from __future__ import annotations

import msgspec

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


def host_stats(
    stored_bytes: int = 0,
    capacity: int | None = 100,
    breaker: str | None = None,
    disk: int | None = 25,
) -> HostStats:
    return HostStats(
        0,
        StoreCounters(stored_bytes=stored_bytes),
        3,
        0,
        disk,
        capacity,
        0.0,
        breaker=breaker,
    )


def test_totals_and_levels_return_exactly_defined_metrics() -> None:
    stats = StoreStats("open", ClientCounters(), host_stats())
    assert totals(Observed(), stats).keys() == COUNTERS.keys()
    assert levels(stats, 3).keys() == GAUGES.keys()


def test_totals_before_host_stats_are_all_0() -> None:
    stats = StoreStats("opening", ClientCounters(), None)
    assert totals(Observed(), stats) == dict.fromkeys(COUNTERS, 0)


def test_levels_before_host_stats_omit_host_metrics() -> None:
    stats = StoreStats("opening", ClientCounters(), None)
    assert levels(stats, 0) == {"queued_bytes": 0, "held_chunks": 0, "open": 0.0}


def test_levels_while_medium_fails_omit_fill_level() -> None:
    stats = StoreStats("open", ClientCounters(), host_stats(disk=None, breaker="open"))
    assert levels(stats, 3) == {
        "queued_bytes": 0,
        "held_chunks": 3,
        "open": 1.0,
        "breaker": 2.0,
    }


def test_totals_store_bytes_are_those_written_before_codec() -> None:
    counters = StoreCounters(
        stored_raw_bytes=88, stored_bytes=60, held_blocks=7, dropped_bytes=9
    )
    host = msgspec.structs.replace(host_stats(), counters=counters)
    found = totals(Observed(), StoreStats("open", ClientCounters(), host))
    assert (found["store_bytes"], found["written_bytes"]) == (88, 60)


def test_totals_quota_chunks_are_part_of_dropped_ones() -> None:
    counters = StoreCounters(dropped_blocks=5, quota_blocks=3)
    host = msgspec.structs.replace(host_stats(), counters=counters)
    found = totals(Observed(), StoreStats("open", ClientCounters(), host))
    assert (found["dropped_chunks"], found["quota_chunks"]) == (5, 3)


def test_metrics_reader_first_growth_contains_every_counter() -> None:
    reader, observed = MetricsReader("lmdb"), Observed()
    stats = StoreStats("opening", ClientCounters(), None)
    assert reader.growth(totals(observed, stats)) == dict.fromkeys(COUNTERS, 0)
    assert reader.growth(totals(observed, stats)) == {}
    observed.lookup_hits += 2
    assert reader.growth(totals(observed, stats)) == {"lookup_hits": 2}


def test_levels_fill_perc_is_used_share_of_capacity() -> None:
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


def test_metrics_reader_growth_after_host_restart_counts_from_zero() -> None:
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


def test_metrics_reader_is_due_after_new_count_and_every_second() -> None:
    reader = MetricsReader("lmdb")
    assert reader.is_due(10.0)
    assert not reader.is_due(10.9)
    reader.observed.lookup_misses += 1
    assert reader.is_due(10.9)
    assert not reader.is_due(11.8)
    assert reader.is_due(11.9)


def test_levels_breaker_state_is_number_from_0_to_2() -> None:
    states = [None, "closed", "half-open", "open"]
    found = [
        levels(StoreStats("open", ClientCounters(), host_stats(breaker=state)), 3)[
            "breaker"
        ]
        for state in states
    ]
    assert found == [0, 0, 1, 2]
