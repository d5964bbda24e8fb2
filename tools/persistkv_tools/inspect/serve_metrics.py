"""``persistkv serve-metrics``: exports a store's totals, and the status of its engines, to
Prometheus.

Each scrape reads the store. No ids or labels of requests are exported, and of tenants only the
names of those with a quota. prometheus_client, an extra, is imported when the command runs.
"""

from __future__ import annotations

import logging
import math
import sys
import threading
import time
from argparse import ArgumentParser
from collections.abc import Iterable
from contextlib import closing, suppress
from typing import TYPE_CHECKING, NamedTuple, cast

from persistkv.config import without_options
from persistkv.errors import (
    ConfigurationError,
    MissingExtraError,
    StoreError,
    StoreUnavailableError,
)
from persistkv.storage import open_backend
from persistkv.storage.backend import Backend
from persistkv.storage.catalogue.quotas import TenantTotals
from persistkv.storage.host.status import EngineStatus, read_statuses
from persistkv.storage.inspection.savings import SavedTotals
from persistkv.storage.stats import BackendStats
from persistkv_tools import render
from persistkv_tools.command import URL, Command, add_flag
from persistkv_tools.savings import RecentSavings

if TYPE_CHECKING:
    from prometheus_client import CollectorRegistry
    from prometheus_client.core import Metric
    from prometheus_client.registry import Collector

logger = logging.getLogger(__name__)

# Each table below maps fields of one struct, which name the metrics, to the help of each metric.
_STORE: dict[str, str] = {
    "packs": "Packs in the store.",
    "blocks": "Blocks in all packs; a block in two packs counts twice.",
    "requests": "Stored requests.",
    "raw_bytes": "Bytes of all blocks, before the codec.",
    "stored_bytes": "Bytes of all payloads, padding included.",
    "disk_bytes": "Bytes on the disk or in the bucket, catalogue included.",
    "quarantined_bytes": "Bytes of damaged stores that were renamed; they count towards no "
    "capacity.",
}
_COUNTERS: dict[str, str] = {
    "stored_blocks": "Blocks written.",
    "stored_raw_bytes": "Bytes of blocks written, before the codec.",
    "stored_bytes": "Bytes written at rest, padding included.",
    "held_blocks": "Blocks that were not written, because the store held them already.",
    "dropped_blocks": "Blocks that were not written, because a commit failed.",
    "dropped_bytes": "Raw bytes of dropped blocks.",
    "quota_blocks": "Dropped blocks that did not fit the quota of their tenant.",
    "loaded_blocks": "Blocks loaded into the primary tier.",
    "loaded_bytes": "Raw bytes of loaded blocks.",
    "missed_blocks": "Blocks to load that the store did not hold.",
    "verification_failures": "Frames that failed verification.",
    "evicted_blocks": "Blocks that commits evicted or deleted.",
    "commits": "Commits to the store.",
}
_GAUGES: dict[str, str] = {
    "indexed_blocks": "Blocks in the engine's index, which lookups find.",
    "staged_bytes": "Bytes of copies that wait to be written.",
    "waiting_jobs": "Store jobs and ends of requests that have not started.",
    "writing_jobs": "Store jobs whose rows are in use.",
    "loading_jobs": "Load jobs that wait or are in progress.",
    "breaker": "0: closed, 1: half-open, 2: open.",
}
_SAVED: dict[str, str] = {
    "requests": "Requests that restored tokens from the store.",
    "tokens": "Prompt tokens that requests restored from the store.",
    "seconds": "Seconds that prefills of these tokens would have taken, as measured.",
}
_TENANTS: dict[str, str] = {
    "packs": "Packs of a tenant with a quota.",
    "stored_bytes": "Bytes of their payloads, padding included.",
    "quota": "Limit of stored_bytes.",
}
_ENGINES = "Running engines that publish their status."
_UP = "Whether the store could be read."
_MAX_PORT = 65_535
_BREAKER = ("closed", "half-open", "open")
"""States of a circuit breaker, in the order of their numbers in the metric."""
_ENGINE_LABELS = ("store", "engine", "host", "namespace")
_REQUESTS = (
    "Requests for which the store held blocks: loaded, or why these were computed."
)
_REQUEST_LABELS = (*_ENGINE_LABELS, "reason")


def serve_metrics(
    url: str,
    *,
    listen: str,
    once: bool,
    json: bool,
) -> None:
    """Export a store's totals, and the status of its engines, to Prometheus. Ctrl-C ends it.

    It can be started before the store exists; persistkv_up is 0 until then.

    Example: persistkv serve-metrics lmdb:///var/cache/kv --listen 0.0.0.0:9464
    """
    # an invalid address ends the command before the store is opened
    _address(listen)
    try:
        from prometheus_client import CollectorRegistry, generate_latest
    except ImportError:
        raise MissingExtraError("prometheus-client", "metrics") from None
    try:
        # open the store once, so that another format or a wrong URL ends the command now
        open_backend(url, read_only=True).close()
    except StoreUnavailableError as error:
        if once:
            raise
        logger.warning("%s; persistkv_up is 0 until the store can be read", error)
    registry = CollectorRegistry()
    with closing(StoreCollector(url)) as collector:
        registry.register(cast("Collector", collector))
        if not once:
            _serve(url, listen, registry, json=json)
        elif json:
            samples = _samples(registry.collect())
            render.print_json({"url": url, "metrics": samples})
        else:
            render.print_exact(generate_latest(registry).decode())


def _serve(
    url: str,
    listen: str,
    registry: CollectorRegistry,
    *,
    json: bool,
) -> None:
    """Serve the metrics at an address until Ctrl-C; print the address first.

    :raises ConfigurationError: the address is invalid or in use.
    """
    from prometheus_client import start_http_server

    host, port = _address(listen)
    try:
        server, thread = start_http_server(port, host, registry)
    except OSError as error:
        expected = f"a free address of this machine ({error.strerror})"
        raise ConfigurationError("--listen", listen, expected) from None
    address = f"http://{host}:{server.server_port}/metrics"
    _say_address(url, address, json=json)
    with suppress(KeyboardInterrupt):  # Ctrl-C ends the command
        thread.join()
    server.shutdown()
    server.server_close()


def _address(listen: str) -> tuple[str, int]:
    """Return host and port of ``HOST:PORT``."""
    host, _, port = listen.rpartition(":")
    if not host or not port.isdecimal() or int(port) > _MAX_PORT:
        raise ConfigurationError("--listen", listen, "HOST:PORT, e.g. 127.0.0.1:9464")
    # an IPv6 address is in brackets, as in [::1]:9464
    return host.strip("[]"), int(port)


def _samples(metrics: Iterable[Metric]) -> list[dict[str, object]]:
    """Return all samples of the metrics as JSON objects."""
    samples: list[dict[str, object]] = []
    for metric in metrics:
        for found in metric.samples:
            sample = {
                "name": found.name,
                "labels": found.labels,
                "value": found.value,
            }
            samples.append(sample)
    return samples


def _say_address(
    url: str,
    address: str,
    *,
    json: bool,
) -> None:
    if json:
        render.print_json({"url": url, "address": address})
    else:
        render.say(f"metrics of {url} at {address}")
    sys.stdout.flush()


def _add_options(parser: ArgumentParser) -> None:
    parser.add_argument(
        "--listen",
        metavar="HOST:PORT",
        default="127.0.0.1:9464",
        help="Address to listen on; port 0: any free port.",
    )
    add_flag(parser, "--once", "Print the metrics once and exit.")


COMMAND = Command(serve_metrics, (URL,), _add_options)


def _gauge_value(status: EngineStatus, name: str) -> float | None:
    """Return the present value of an engine for a metric of ``_GAUGES``; None: it has none."""
    if name != "breaker":
        value: float = getattr(status, name)
        return value
    # a local store has no breaker
    if status.breaker not in _BREAKER:
        return None
    # the number of the state, as the help of the metric says
    return _BREAKER.index(status.breaker)


class _Scrape(NamedTuple):
    """Content of the store that a scrape shows."""

    stats: BackendStats
    statuses: list[EngineStatus]
    tenants: list[TenantTotals]
    savings: list[SavedTotals]


class StoreCollector:
    """Prometheus collector of one store; thread-safe. The store stays open between scrapes, unless
    it failed."""

    def __init__(self, url: str) -> None:
        self._url = url
        self._store = without_options(url)
        """Label ``store`` of all metrics."""
        # Needed because the server answers each scrape in a thread of its own. Reentrant, because
        # a scrape that fails closes the store while it holds the lock.
        self._lock = threading.RLock()
        self._backend: Backend | None = None
        """The open store; None: the next scrape opens it."""
        self._savings = RecentSavings()
        self._failure: str | None = None
        """Error of the last read, as logged; None: it succeeded, or nothing was read yet."""
        self._failed_at = -math.inf
        """When the last read failed, on the monotonic clock; minus infinity: none has failed."""

    def collect(self) -> list[Metric]:
        """Return the metrics of a scrape; only ``persistkv_up``, with value 0, if the store cannot
        be read."""
        content = self._read_unless_failed()
        if content is None:
            return [self._gauge("persistkv_up", _UP, 0)]
        now = time.time()
        live = [status for status in content.statuses if status.is_live(now)]
        return [
            self._gauge("persistkv_up", _UP, 1),
            *self._totals(content.stats),
            self._gauge("persistkv_engines", _ENGINES, len(live)),
            *self._tenants(content.tenants),
            *self._saved(content.savings),
            *self._counters(live),
            *self._gauges(live),
        ]

    def _read_unless_failed(self) -> _Scrape | None:
        """Read the store, which is opened first if it is not open; return None if it cannot be
        read."""
        began = time.monotonic()
        with self._lock:
            # Give up if the read of another scrape failed while this one waited for the lock. If
            # the medium hangs, each attempt takes as long as its deadline: the waiting scrapes
            # would make theirs one after the other, and all of them would time out.
            if self._failed_at >= began:
                return None
            try:
                if self._backend is None:
                    self._backend = open_backend(self._url, read_only=True)
                content = _Scrape(
                    stats=self._backend.stats(),
                    statuses=read_statuses(self._backend),
                    tenants=self._backend.tenants(),
                    savings=self._savings.by_namespace(self._backend),
                )
            except StoreError as error:
                self._log_if_changed(failure=str(error))
                self._failed_at = time.monotonic()
                # the next scrape opens the store again
                self.close()
                return None
            self._log_if_changed(failure=None)
            return content

    def _totals(self, stats: BackendStats) -> list[Metric]:
        """Return the totals of the store."""
        metrics = []
        for name, text in _STORE.items():
            gauge = self._gauge(f"persistkv_store_{name}", text, getattr(stats, name))
            metrics.append(gauge)
        if stats.capacity is not None:
            name = "persistkv_store_capacity_bytes"
            metrics.append(self._gauge(name, "Limit of disk_bytes.", stats.capacity))
        return metrics

    def _gauge(
        self,
        name: str,
        text: str,
        value: float,
    ) -> Metric:
        """Return a metric of the whole store."""
        from prometheus_client.core import GaugeMetricFamily

        gauge = GaugeMetricFamily(name, text, labels=["store"])
        gauge.add_metric([self._store], value)
        return gauge

    def _log_if_changed(self, failure: str | None) -> None:
        """Log a failure of a read unless it is the same as the last one, and the first success
        after it.

        :param failure: the error; None: the read succeeded.
        """
        if failure == self._failure:
            return
        if failure is None:
            logger.warning("%s can be read again", self._store)
        else:
            logger.warning("%s cannot be read: %s", self._store, failure)
        self._failure = failure

    def _tenants(self, rows: list[TenantTotals]) -> list[Metric]:
        """Return the metrics of tenants with a quota. Tenants without one may be too many."""
        from prometheus_client.core import GaugeMetricFamily

        metrics: list[Metric] = []
        for name, text in _TENANTS.items():
            # Prometheus names end with the unit, which the name of this field lacks
            unit = "_bytes" if name == "quota" else ""
            gauge = GaugeMetricFamily(
                f"persistkv_tenant_{name}{unit}", text, labels=["store", "tenant"]
            )
            for row in rows:
                if row.quota is not None:
                    gauge.add_metric([self._store, row.tenant], getattr(row, name))
            metrics.append(gauge)
        return metrics

    def _saved(self, rows: list[SavedTotals]) -> list[Metric]:
        """Return the counters of saved computation, for each namespace."""
        from prometheus_client.core import CounterMetricFamily

        metrics: list[Metric] = []
        for name, text in _SAVED.items():
            labels = ("store", "namespace", "model")
            counter = CounterMetricFamily(
                f"persistkv_saved_{name}", text, labels=labels
            )
            for row in rows:
                # export 0 until a prefill is measured: Prometheus sees an increase only from a
                # value that it has scraped
                value = getattr(row, name) or 0
                counter.add_metric([self._store, row.namespace, row.model], value)
            metrics.append(counter)
        return metrics

    def _counters(self, engines: list[EngineStatus]) -> list[Metric]:
        """Return the counters of the engines, and those of their requests by reason."""
        from prometheus_client.core import CounterMetricFamily

        metrics: list[Metric] = []
        for name, text in _COUNTERS.items():
            metric_name = f"persistkv_engine_{name}"
            counter = CounterMetricFamily(metric_name, text, labels=_ENGINE_LABELS)
            for status in engines:
                value = getattr(status.counters, name)
                labels = self._labels(status)
                # ``created`` tells Prometheus that the engine restarted, and counts from 0 again
                counter.add_metric(labels, value, created=status.started)
            metrics.append(counter)
        name = "persistkv_engine_requests"
        requests = CounterMetricFamily(name, _REQUESTS, labels=_REQUEST_LABELS)
        for status in engines:
            for reason, value in status.load_counts.items():
                labels = [*self._labels(status), reason]
                requests.add_metric(labels, value, created=status.started)
        return [*metrics, requests]

    def _gauges(self, engines: list[EngineStatus]) -> list[Metric]:
        """Return the present values of the engines."""
        from prometheus_client.core import GaugeMetricFamily

        metrics: list[Metric] = []
        for name, text in _GAUGES.items():
            metric_name = f"persistkv_engine_{name}"
            gauge = GaugeMetricFamily(metric_name, text, labels=_ENGINE_LABELS)
            for status in engines:
                value = _gauge_value(status, name)
                if value is not None:
                    gauge.add_metric(self._labels(status), value)
            metrics.append(gauge)
        return metrics

    def _labels(self, status: EngineStatus) -> list[str]:
        return [self._store, status.engine, status.host, status.namespace]

    def close(self) -> None:
        """Release the store; idempotent."""
        with self._lock:
            if self._backend is not None:
                self._backend.close()
                self._backend = None
