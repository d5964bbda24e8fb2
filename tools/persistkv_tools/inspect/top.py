"""``persistkv top``: present activity of the engines of a store, from the status rows that they
publish."""

from __future__ import annotations

import time
from argparse import ArgumentParser
from collections.abc import Callable
from contextlib import suppress
from dataclasses import asdict, dataclass
from typing import NoReturn

import msgspec
from rich.console import Console, Group
from rich.live import Live
from rich.table import Table

from persistkv.config import parse_duration
from persistkv.storage.backend import Backend
from persistkv.storage.host.status import EngineStatus, read_statuses
from persistkv.storage.inspection.savings import SavedTotals
from persistkv.storage.records import StoreCounters
from persistkv.storage.stats import BackendStats
from persistkv_tools import options, render, savings
from persistkv_tools.command import URL, Command, number


class Rates(msgspec.Struct, frozen=True):
    """Rates per second of the counters with these names, from the difference of two status rows of
    an engine."""

    stored_raw_bytes: float
    stored_bytes: float
    loaded_bytes: float
    dropped_bytes: float
    evicted_blocks: float
    commits: float


class EngineView(EngineStatus, frozen=True, kw_only=True):
    """Last published status of one engine of a store."""

    model: str
    """Name of the model of the engine's namespace; empty: unknown."""
    live: bool
    """Whether the status is recent, at most five of its intervals old."""
    updated: float
    """When the engine published the status: seconds since the epoch."""
    hit_rate: float | None
    """See the function ``hit_rate``."""
    rates: Rates | None
    """None: only one status of the engine has been read."""


@dataclass(frozen=True, kw_only=True)
class Snapshot(BackendStats):
    """A store and its engines at one moment."""

    url: str
    time: float
    """Seconds since the epoch."""
    fill: float | None
    """``disk_bytes`` divided by ``capacity``; None: the capacity is unlimited."""
    engines: list[EngineView]
    """Engines that have published a status, live ones first."""
    savings: list[SavedTotals]


def engine_name(view: EngineView) -> str:
    """Return the name of an engine in tables: host and PID, with ``(gone)`` if it is not live."""
    name = f"{view.host}:{view.engine_pid or view.pid}"
    return name if view.live else f"{name} (gone)"


def _per_second(name: str) -> Callable[[EngineView], str]:
    """Return a function that formats a field of ``Rates`` that is no size."""
    return lambda view: (
        "-" if view.rates is None else f"{getattr(view.rates, name):,.1f}"
    )


_TRAFFIC = (
    "engine seen=updated hits=hit_rate stored/s=rates.stored_raw_bytes "
    "loaded/s=rates.loaded_bytes queue staged=staged_bytes"
)
_HEALTH = (
    "blocks=indexed_blocks commits/s=commits evicted/s=evicted "
    "dropped=counters.dropped_blocks bad=counters.verification_failures breaker"
)
_CELLS: dict[str, Callable[[EngineView], str]] = {
    "engine": engine_name,
    "model": lambda view: render.format_model(view.model),
    "queue": lambda view: (
        f"{view.waiting_jobs + view.writing_jobs + view.loading_jobs:,}"
    ),
    "commits": _per_second("commits"),
    "evicted": _per_second("evicted_blocks"),
}
_COUNT_HELP = "Number of updates. By default until Ctrl-C on a terminal, otherwise one."
_WIDE = 150  # columns of a terminal that fit one table
_NARROW = 80  # columns: below, tables with an engine in each row do not fit


def top(
    url: str,
    *,
    interval: str,
    count: int | None,
    json: bool,
) -> None:
    """Show the activity of a store's engines: hits, bytes read and written, queues, evictions,
    breaker. Ctrl-C ends it.

    On S3, engines publish their status only if their URL has the option status:
    s3://bucket/kv?status=10s

    Example: persistkv top lmdb:///var/cache/kv
    """
    pause_s = parse_duration(interval, name="--interval")
    console = render.console()
    endless = count is None and console.is_terminal and not json
    with options.opened(url) as backend:
        watch = Watch(url, backend)
        if endless:
            # Ctrl-C is the usual way to end the display, and no error
            with suppress(KeyboardInterrupt):
                _show_live(watch, pause_s, console)
            return
        # take a first snapshot that is not shown, because rates need two
        watch.snapshot()
        for _ in range(count or 1):
            time.sleep(pause_s)
            snapshot = watch.snapshot()
            if json:
                render.print_json(snapshot)
            else:
                console.print(_screen(snapshot))


def _show_live(
    watch: Watch,
    pause_s: float,
    console: Console,
) -> NoReturn:
    """Show the present state on the terminal, again and again, until Ctrl-C."""
    # take a first snapshot that is not shown, because rates need two
    watch.snapshot()
    with Live(console=console, auto_refresh=False) as live:
        while True:
            time.sleep(pause_s)
            live.update(_screen(watch.snapshot()), refresh=True)


def _add_options(parser: ArgumentParser) -> None:
    parser.add_argument(
        "--interval",
        metavar="TIME",
        default="2s",
        help="Time between updates, e.g. 2s.",
    )
    parser.add_argument(
        "--count",
        metavar="N",
        type=number(least=1),
        help=_COUNT_HELP,
    )


COMMAND = Command(top, (URL,), _add_options)


def _screen(snapshot: Snapshot) -> Group:
    """Return what the terminal shows until the next refresh."""
    requests = render.count(snapshot.requests, "request")
    packs = render.count(snapshot.packs, "pack")
    size = render.format_size(snapshot.disk_bytes)
    if snapshot.fill is not None:
        capacity = render.format_size(snapshot.capacity or 0)
        size += f" ({snapshot.fill:.1%} of {capacity})"
    lines = [
        f"{snapshot.url} at {render.format_time(snapshot.time)}",
        f"{requests}, {packs}, {size}",
        f"saved: {savings.summary(snapshot.savings)}",
    ]
    if not snapshot.engines:
        lines.append("no engine has published a status")
    texts = map(render.plain, lines)
    return Group(*texts, *_tables(snapshot.engines))


def _tables(engines: list[EngineView]) -> list[Table]:
    """Return the tables of the engines that fit the terminal: one, or three, with an engine in each
    row; or one for each engine."""
    if not engines:
        return []
    width = render.console().width
    # show each engine in a table of its own, with names and values
    if width < _NARROW:
        columns = render.columns(f"{_TRAFFIC} {_HEALTH} model", **_CELLS)
        pairs = [render.pairs(columns, engine) for engine in engines]
        return list(map(render.pair_table, pairs))
    # the columns of each table
    if width >= _WIDE:
        parts = [f"{_TRAFFIC} {_HEALTH} model"]
    else:
        parts = [_TRAFFIC, f"engine {_HEALTH}", "engine model"]
    tables = []
    for part in parts:
        columns = render.columns(part, **_CELLS)
        rows = render.cells(columns, engines)
        tables.append(render.table(columns, rows, left="model,breaker"))
    return tables


class Watch:
    """Repeated snapshots of a store and its engines."""

    def __init__(self, url: str, backend: Backend) -> None:
        self._url = url
        self._backend = backend
        self._last_statuses: dict[str, EngineStatus] = {}
        """By engine id, the status rows that the last ``snapshot`` read."""
        self._rates: dict[str, Rates] = {}
        """By engine id, the rates between its last two different status rows."""
        self._savings = savings.RecentSavings()

    def snapshot(self) -> Snapshot:
        """Return the present state of the store and its engines.

        The rates of an engine are those between the last two different status rows that calls of
        this method read.
        """
        now = time.time()
        engines = self._engines(now)
        stats = self._backend.stats()
        fill = None
        if stats.capacity:
            fill = round(stats.disk_bytes / stats.capacity, 4)
        return Snapshot(
            **asdict(stats),
            url=self._url,
            time=now,
            fill=fill,
            engines=engines,
            savings=self._savings.rows(self._backend),
        )

    def _engines(self, now: float) -> list[EngineView]:
        """Return the engines that have published a status, live ones first; update their rates."""
        statuses = read_statuses(self._backend)
        # read the identities of namespaces only if there is an engine to show
        models = self._models() if statuses else {}
        engines: list[EngineView] = []
        for status in statuses:
            before = self._last_statuses.get(status.engine)
            # keep the rates of an engine that has published no new status since the last call
            if before is not None and status.time > before.time:
                self._rates[status.engine] = _rates(before, status)
            view = render.view_of(
                EngineView,
                status,
                live=status.is_live(now),
                updated=status.time,
                model=models.get(status.namespace, ""),
                hit_rate=hit_rate(status.counters),
                rates=self._rates.get(status.engine),
            )
            engines.append(view)
        self._last_statuses = {status.engine: status for status in statuses}
        # among live and among other engines, the sort keeps the order of the statuses
        engines.sort(key=lambda view: not view.live)
        return engines

    def _models(self) -> dict[str, str]:
        """Return the name of the model of each namespace, by namespace id."""
        models = {}
        for namespace in self._backend.namespaces():
            models[namespace.id.hex()] = namespace.identity.model_name
        return models


def hit_rate(counters: StoreCounters) -> float | None:
    """Return the share of loaded blocks among all that requests needed: loaded ones, and computed
    ones, which the engine stored or dropped. None: no blocks."""
    needed = counters.loaded_blocks + counters.stored_blocks + counters.dropped_blocks
    return round(counters.loaded_blocks / needed, 4) if needed else None


def _rates(before: EngineStatus, after: EngineStatus) -> Rates:
    """Return the rates of an engine between two of its status rows."""
    seconds = after.time - before.time
    rates: dict[str, float] = {}
    for name in Rates.__struct_fields__:
        amount = getattr(after.counters, name) - getattr(before.counters, name)
        rates[name] = round(amount / seconds, 3)
    return Rates(**rates)
