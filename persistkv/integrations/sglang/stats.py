"""Counts of pages and bandwidths for SGLang's metrics."""

from __future__ import annotations

import threading
from typing import Any

_MOST_CALLS = 4096  # that wait to be reported
_GB = 1e9


class Transfers:
    """Pages that were read and written since the last report. Thread-safe."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._read: list[tuple[int, float]] = []
        self._written: list[tuple[int, float]] = []

    def read(self, pages: int, num_bytes: int, seconds: float) -> None:
        """Record a call that read pages."""
        self._add(self._read, pages, num_bytes, seconds)

    def wrote(self, pages: int, num_bytes: int, seconds: float) -> None:
        """Record a call that stored pages."""
        self._add(self._written, pages, num_bytes, seconds)

    def _add(
        self,
        calls: list[tuple[int, float]],
        pages: int,
        num_bytes: int,
        seconds: float,
    ) -> None:
        bandwidth = num_bytes / _GB / max(seconds, 1e-9)
        with self._lock:
            if pages and len(calls) < _MOST_CALLS:
                calls.append((pages, bandwidth))

    def take(self) -> Any:
        """Return SGLang's ``StorageMetrics`` of the calls since the last report."""
        from sglang.srt.observability.metrics_collector import StorageMetrics

        with self._lock:
            read, self._read = self._read, []
            written, self._written = self._written, []
        read_pages, read_bandwidths = _columns(read)
        written_pages, written_bandwidths = _columns(written)
        return StorageMetrics(
            prefetch_pgs=read_pages,
            backup_pgs=written_pages,
            prefetch_bandwidth=read_bandwidths,
            backup_bandwidth=written_bandwidths,
        )


def _columns(calls: list[tuple[int, float]]) -> tuple[list[int], list[float]]:
    """Return the pages and the bandwidths of calls."""
    pages = [num_pages for num_pages, _ in calls]
    bandwidths = [bandwidth for _, bandwidth in calls]
    return pages, bandwidths
