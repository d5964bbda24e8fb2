"""Counts of pages and bandwidths for SGLang's metrics."""

from __future__ import annotations

import threading
from typing import Any

_MOST_CALLS = 4096  # maximum number of calls that wait to be reported
_GB = 1e9
_SHORTEST_S = 1e-9  # a clock may show 0 for a short call


class _Calls:
    """Calls of one kind, reads or writes, since the last report."""

    def __init__(self) -> None:
        self.pages: list[int] = []
        """Pages of each call."""
        self.bandwidths: list[float] = []
        """Bandwidth of each call in GB/s."""

    def add(
        self,
        num_pages: int,
        num_bytes: int,
        seconds: float,
    ) -> None:
        """Add a call, unless it transferred nothing or too many calls wait for a report."""
        if not num_pages or len(self.pages) >= _MOST_CALLS:
            return
        gigabytes = num_bytes / _GB
        bandwidth = gigabytes / max(seconds, _SHORTEST_S)
        self.pages.append(num_pages)
        self.bandwidths.append(bandwidth)


class Transfers:
    """Pages that were read and written since the last report. Thread-safe."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._read = _Calls()
        """Calls that have read pages."""
        self._written = _Calls()
        """Calls that have stored pages."""

    def add_read(
        self,
        num_pages: int,
        num_bytes: int,
        seconds: float,
    ) -> None:
        """Record a call that read pages."""
        with self._lock:
            self._read.add(num_pages, num_bytes, seconds)

    def add_write(
        self,
        num_pages: int,
        num_bytes: int,
        seconds: float,
    ) -> None:
        """Record a call that stored pages."""
        with self._lock:
            self._written.add(num_pages, num_bytes, seconds)

    def take_metrics(self) -> Any:
        """Return SGLang's ``StorageMetrics`` of the calls since the last report."""
        from sglang.srt.observability.metrics_collector import StorageMetrics

        with self._lock:
            read = self._read
            written = self._written
            self._read = _Calls()
            self._written = _Calls()
        return StorageMetrics(
            prefetch_pgs=read.pages,
            backup_pgs=written.pages,
            prefetch_bandwidth=read.bandwidths,
            backup_bandwidth=written.bandwidths,
        )
