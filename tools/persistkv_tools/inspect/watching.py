"""What engines do with a store right now, as values: the rows that they publish, and how these move."""

from __future__ import annotations

import time

import msgspec

from persistkv.storage.backend import Backend, BackendStats
from persistkv.storage.records import StoreCounters
from persistkv.storage.status import EngineStatus, read_statuses


class Rates(msgspec.Struct, frozen=True):
    """Per second, between two rows of an engine."""

    stored_raw_bytes: float
    """Written to the store, before the codec."""
    stored_bytes: float
    """Written to the store, as it lies there."""
    loaded_bytes: float
    """Read from the store into rows."""
    dropped_bytes: float
    evicted_blocks: float
    commits: float


class EngineView(msgspec.Struct, frozen=True):
    """One engine."""

    engine: str
    host: str
    pid: int
    namespace: str
    live: bool
    """False: it stopped without a word, or its clock differs from ours."""
    started: float
    """Seconds since the epoch."""
    updated: float
    """When it said this."""
    hit_rate: float | None
    """Blocks that it got from the store, of those that it got there or had to compute and store, since its start. What
    it had in memory all the time counts in neither."""
    rates: Rates | None
    """None before the second look, and where its row is the same one still."""
    indexed_blocks: int
    waiting_jobs: int
    writing_jobs: int
    loading_jobs: int
    staged_bytes: int
    breaker: str | None
    counters: StoreCounters


class Look(msgspec.Struct, frozen=True):
    """A store and its engines at one moment."""

    url: str
    time: float
    requests: int
    packs: int
    blocks: int
    stored_bytes: int
    disk_bytes: int
    capacity: int | None
    fill: float | None
    """Share of the capacity that is taken."""
    engines: list[EngineView]
    """Those that run, in the order of their start; then those that are gone."""


class Watch:
    """Looks at a store again and again."""

    def __init__(self, url: str, backend: Backend) -> None:
        self._url = url
        self._backend = backend
        self._before: dict[str, EngineStatus] = {}
        self._rates: dict[str, Rates] = {}

    def look(self) -> Look:
        """The store as it is now.

        :raises StoreError: the medium failed.
        """
        now = time.time()
        statuses = read_statuses(self._backend)
        for status in statuses:
            before = self._before.get(status.engine)
            if before is not None and status.time > before.time:
                self._rates[status.engine] = _rates(before, status)
        self._before = {status.engine: status for status in statuses}
        views = [_view(status, self._rates.get(status.engine), now) for status in statuses]
        return _look(self._url, now, self._backend.stats(), sorted(views, key=lambda view: not view.live))


def hit_rate(counters: StoreCounters) -> float | None:
    """See ``EngineView.hit_rate``; None where nothing was needed yet."""
    needed = counters.loaded_blocks + counters.stored_blocks + counters.dropped_blocks
    return round(counters.loaded_blocks / needed, 4) if needed else None


def _rates(before: EngineStatus, after: EngineStatus) -> Rates:
    seconds = after.time - before.time

    def rate(name: str) -> float:
        moved: int = getattr(after.counters, name) - getattr(before.counters, name)
        return round(moved / seconds, 3)

    return Rates(**{name: rate(name) for name in Rates.__struct_fields__})


def _view(status: EngineStatus, rates: Rates | None, now: float) -> EngineView:
    return EngineView(
        status.engine,
        status.host,
        status.pid,
        status.namespace,
        status.is_live(now),
        status.started,
        status.time,
        hit_rate(status.counters),
        rates,
        status.indexed_blocks,
        status.waiting_jobs,
        status.writing_jobs,
        status.loading_jobs,
        status.staged_bytes,
        status.breaker,
        status.counters,
    )


def _look(url: str, now: float, stats: BackendStats, engines: list[EngineView]) -> Look:
    fill = round(stats.disk_bytes / stats.capacity, 4) if stats.capacity else None
    return Look(
        url,
        now,
        stats.requests,
        stats.packs,
        stats.blocks,
        stats.stored_bytes,
        stats.disk_bytes,
        stats.capacity,
        fill,
        engines,
    )
