"""The tier's counters and gauges, in the form that vLLM exports to Prometheus, labelled with the
kind of store."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from persistkv.storage.host.client import StoreStats

PREFIX = "vllm:kv_offload_persistkv_"
LABELS = ("store",)

COUNTERS: Mapping[str, str] = {
    "lookup_hits": "Chunks that were looked up and are held by the store",
    "lookup_misses": "Chunks that were looked up and are not held by the store",
    "load_bytes": "Bytes read from the store into the primary tier",
    "load_seconds": "Seconds from the submission of loads to their end, added up",
    "load_failed_chunks": "Chunks that were to be loaded and could not be",
    "store_bytes": "Bytes written to the store, before the codec; blocks that it held are "
    "not counted",
    "store_seconds": "Seconds from the submission of stores to their end, added up",
    "requests_loaded": "Requests that loaded the chunks that the store held for them",
    "requests_too_slow": "Requests that the engine computed: the store is slower",
    "requests_too_short": "Requests that the engine computed: only a longer prefix is worth "
    "the latency of the store",
    "requests_deadline": "Requests whose load was abandoned at its deadline",
    "requests_refused": "Requests that neither used nor filled the store: their options are "
    "invalid, or they name no tenant and one is required",
    "changed_weights_chunks": "Chunks in flight that were not stored or not served because "
    "weights changed",
    "stores_refused": "Store jobs that were refused because the queue was full or the store "
    "not open",
    "dropped_chunks": "Chunks that were taken and lost to a failed commit",
    "quota_chunks": "Part of dropped_chunks that did not fit the quota of their tenant",
    "written_bytes": "Bytes written to the store, after the codec",
    "verification_failures": "Frames that did not verify and were not used",
    "evicted_chunks": "Chunks that left the store to make room",
    "restarts": "Restarts of the store's process",
}

GAUGES: Mapping[str, str] = {
    "queued_bytes": "Bytes of stores in flight",
    "held_chunks": "Chunks that a lookup finds",
    "disk_bytes": "Bytes that the store takes, all models together",
    "capacity_bytes": "The bound on the bytes of the store; 0 where there is none",
    "fill_perc": "disk_bytes by capacity_bytes; 0 where there is no bound",
    "breaker": "0 while the store is asked, 1 while a failing one is tried again, 2 while it "
    "is left alone",
    "open": "1 while the store is open, 0 while lookups miss because it is not",
}
_LONGEST_S = 1.0  # maximum seconds between two readings
_BREAKER = {"half-open": 1.0, "open": 2.0}


@dataclass
class Observed:
    """Counters that the tier itself maintains in the engine, since its construction. ``COUNTERS``
    describes them under the same names."""

    lookup_hits: int = 0
    lookup_misses: int = 0
    load_bytes: int = 0
    load_seconds: float = 0.0
    load_failed_chunks: int = 0
    store_seconds: float = 0.0
    requests_loaded: int = 0
    requests_too_slow: int = 0
    requests_too_short: int = 0
    requests_deadline: int = 0
    requests_refused: int = 0
    changed_weights_chunks: int = 0


def metric_definitions() -> dict[str, Any]:
    """Return vLLM's description of each counter and gauge, by the full name."""
    from vllm.v1.kv_offload.base import (
        OffloadingCounterMetadata,
        OffloadingGaugeMetadata,
    )

    definitions: dict[str, Any] = {}
    for name, text in COUNTERS.items():
        definitions[PREFIX + name] = OffloadingCounterMetadata(text, LABELS)
    for name, text in GAUGES.items():
        definitions[PREFIX + name] = OffloadingGaugeMetadata(text, LABELS)
    return definitions


class MetricsReader:
    """Builds vLLM's metrics: increments of the counters since the last reading, which vLLM adds up,
    and gauges."""

    def __init__(self, store: str) -> None:
        """:param store: kind of the store, such as ``lmdb``."""
        self.observed = Observed()
        """Counters that the tier increments."""
        self._labels = (store,)
        """Values of ``LABELS``."""
        self._last_totals: dict[str, float] = {}
        """By name, the totals that were read last: vLLM's counters take increases of them."""
        self._last_levels: dict[str, float] = {}
        """By name, the present values that were read last."""
        self._last_observed: tuple[float, ...] = ()
        """Values of ``observed`` when ``is_due`` was last true."""
        self._due_at = 0.0
        """Monotonic time from which on the metrics are due even if the tier's own totals are the
        same."""

    def is_due(self, now: float) -> bool:
        """Return whether to read the metrics now: the tier's own totals changed, or the last
        reading is 1 s old. If so, ``read`` must follow. Cheap, because it is called in every step.
        """
        observed = tuple(vars(self.observed).values())
        if observed == self._last_observed and now < self._due_at:
            return False
        self._last_observed = observed
        self._due_at = now + _LONGEST_S
        return True

    def read(self, stats: StoreStats, held_chunks: int) -> Any:
        """Return vLLM's ``OffloadingConnectorStats`` with the counters' increments and the gauges'
        present values."""
        from vllm.distributed.kv_transfer.kv_connector.v1.offloading.metrics import (
            OffloadingConnectorStats,
        )

        reading = OffloadingConnectorStats()
        present = totals(self.observed, stats)
        for name, growth in self.growth(present).items():
            reading.increase_counter(PREFIX + name, growth, self._labels)
        self._last_levels = levels(stats, held_chunks)
        for name, value in self._last_levels.items():
            reading.set_gauge(PREFIX + name, value, self._labels)
        return reading

    def is_outdated(self, stats: StoreStats, held_chunks: int) -> bool:
        """Return whether ``read`` would change what Prometheus shows. May be called in any
        thread."""
        if levels(stats, held_chunks) != self._last_levels:
            return True
        return totals(self.observed, stats) != self._last_totals

    def growth(self, now: Mapping[str, float]) -> dict[str, float]:
        """Return the growth of each total since the last call, if any; in the first call, all
        totals, those of 0 included. A smaller total was reset and grows from 0.

        The zeros make each counter appear before its first event: ``increase`` of Prometheus
        compares with an earlier value, and would not see an event that creates the counter.
        """
        growth: dict[str, float] = {}
        for name, value in now.items():
            last = self._last_totals.get(name, 0)
            # a new process of the store counts from 0
            grown = value - last if value >= last else value
            if grown or name not in self._last_totals:
                growth[name] = grown
            self._last_totals[name] = value
        return growth


def totals(
    observed: Observed,
    stats: StoreStats,
) -> dict[str, float]:
    """Return the value of each counter: the tier's since its construction, and the store process's
    since its start, 0 until its first report."""
    found: dict[str, float] = dict.fromkeys(COUNTERS, 0)
    # the attributes of ``Observed`` have the names of counters
    found.update(vars(observed))
    found["stores_refused"] = stats.client.refused_jobs
    found["restarts"] = stats.client.restarts
    if stats.host is not None:
        counters = stats.host.counters
        found["dropped_chunks"] = counters.dropped_blocks
        found["quota_chunks"] = counters.quota_blocks
        found["store_bytes"] = counters.stored_raw_bytes
        found["written_bytes"] = counters.stored_bytes
        found["verification_failures"] = counters.verification_failures
        found["evicted_chunks"] = counters.evicted_blocks
    return found


def levels(
    stats: StoreStats,
    held_chunks: int,
) -> dict[str, float]:
    """Return the gauges' values by name. A gauge whose value is not known is missing, and keeps its
    last value in Prometheus: ``breaker`` until the first report of the host process, and the bytes
    and the fill level also while the medium fails."""
    found: dict[str, float] = {
        "queued_bytes": stats.queued_bytes,
        "held_chunks": held_chunks,
        "open": float(stats.state == "open"),
    }
    if stats.host is None:
        return found
    # a local store has no breaker: it counts as a closed one, whose value is 0
    breaker = stats.host.breaker or ""
    found["breaker"] = _BREAKER.get(breaker, 0.0)
    disk_bytes = stats.host.disk_bytes
    capacity = stats.host.capacity or 0
    if disk_bytes is not None:
        found["disk_bytes"] = disk_bytes
        found["capacity_bytes"] = capacity
        found["fill_perc"] = disk_bytes / capacity if capacity else 0.0
    return found
