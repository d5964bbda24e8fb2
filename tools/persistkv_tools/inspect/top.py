"""``persistkv top``."""

from __future__ import annotations

import time
from collections.abc import Iterator
from typing import Annotated

import typer
from rich.console import Group
from rich.live import Live

from persistkv.config import parse_duration
from persistkv_tools import render
from persistkv_tools.inspect.watching import EngineView, Look, Watch
from persistkv_tools.options import Json, Url, opened

_TRAFFIC = ("engine", "seen", "hits", "in/s", "out/s", "queue", "staged")
_HEALTH = ("engine", "blocks", "commits/s", "evicted/s", "dropped", "bad", "breaker")


def top(
    url: Url,
    interval: Annotated[str, typer.Option(metavar="AGE", help="Time between looks, e.g. 2s.")] = "2s",
    count: Annotated[
        int | None, typer.Option(min=1, help="Looks; without it, until Ctrl-C on a terminal, else one.")
    ] = None,
    json: Json = False,
) -> None:
    """Watch engines at work on a store: hits, bytes each way, queues, evictions, breaker. Ctrl-C ends it.

    On S3, engines show themselves only where their URL says so: s3://bucket/kv?status=10s

    Example: persistkv top lmdb:///var/cache/kv
    """
    pause_s = parse_duration(interval, name="--interval")
    console = render.console()
    endless = count is None and console.is_terminal and not json
    with opened(url) as backend:
        looks = _looks(Watch(url, backend), pause_s, None if endless else count or 1)
        if not endless:
            for look in looks:
                if json:
                    render.print_json(look)
                else:
                    console.print(_drawn(look))
            return
        try:
            with Live(console=console, auto_refresh=False) as live:
                for look in looks:
                    live.update(_drawn(look), refresh=True)
        except KeyboardInterrupt:
            return  # the way out


def _looks(watch: Watch, pause_s: float, count: int | None) -> Iterator[Look]:
    """The first look is not shown: rates need two."""
    watch.look()
    shown = 0
    while count is None or shown < count:
        time.sleep(pause_s)
        yield watch.look()
        shown += 1


def _drawn(look: Look) -> Group:
    full = "" if look.fill is None else f" ({look.fill:.1%} of {render.format_size(look.capacity or 0)})"
    held = (
        f"{render.count(look.requests, 'request')}, {render.count(look.packs, 'pack')},"
        f" {render.format_size(look.disk_bytes)}{full}"
    )
    head = Group(render.plain(f"{look.url} at {render.format_time(look.time)}"), render.plain(held))
    if not look.engines:
        return Group(head, render.plain("no engine shows itself"))
    traffic = render.table(_TRAFFIC, [_traffic(view, look.time) for view in look.engines])
    return Group(head, traffic, render.table(_HEALTH, map(_health, look.engines), left="breaker"))


def _traffic(view: EngineView, now: float) -> list[str]:
    rates = view.rates
    return [
        _name(view),
        render.format_age(view.updated, now),
        "-" if view.hit_rate is None else f"{view.hit_rate:.1%}",
        "-" if rates is None else render.format_size(round(rates.stored_raw_bytes)),
        "-" if rates is None else render.format_size(round(rates.loaded_bytes)),
        f"{view.waiting_jobs + view.writing_jobs + view.loading_jobs:,}",
        render.format_size(view.staged_bytes),
    ]


def _health(view: EngineView) -> list[str]:
    rates = view.rates
    return [
        _name(view),
        f"{view.indexed_blocks:,}",
        "-" if rates is None else f"{rates.commits:,.1f}",
        "-" if rates is None else f"{rates.evicted_blocks:,.1f}",
        f"{view.counters.dropped_blocks:,}",
        f"{view.counters.verification_failures:,}",
        view.breaker or "-",
    ]


def _name(view: EngineView) -> str:
    return f"{view.host}:{view.pid}" + ("" if view.live else " (gone)")
