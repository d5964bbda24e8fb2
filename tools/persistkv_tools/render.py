"""Tables for people, JSON for programs. Colours on terminals only (rich sees to it)."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Sequence
from datetime import datetime
from typing import Any

import msgspec
from rich.console import Console
from rich.progress import Progress
from rich.table import Table
from rich.text import Text

from persistkv.storage.backend import MoveProgress
from persistkv_tools.views import NamespaceView, RequestView, StoreView

_PLAIN_WIDTH = 200  # a pipe or file has no width; rich would take 80 and cut
_UNITS = ("B", "KiB", "MiB", "GiB", "TiB", "PiB")


def format_size(num_bytes: int) -> str:
    """Bytes for a person: ``12.3 GiB``."""
    size = float(num_bytes)
    for unit in _UNITS:
        if size < 1023.95 or unit == _UNITS[-1]:
            break
        size /= 1024
    return f"{num_bytes} B" if unit == "B" else f"{size:.1f} {unit}"


def print_json(value: Any) -> None:
    """One JSON object and a line end."""
    sys.stdout.write(msgspec.json.format(msgspec.json.encode(value), indent=2).decode() + "\n")


def print_requests(url: str, namespaces: Sequence[NamespaceView]) -> None:
    """A table for each namespace."""
    console = _console()
    for namespace in namespaces:
        console.print(_requests_table(namespace))
    requests = sum(len(namespace.requests) for namespace in namespaces)
    console.print(Text(f"{_count(requests, 'request')} in {_count(len(namespaces), 'namespace')} of {url}"))


def _requests_table(namespace: NamespaceView) -> Table:
    title = Text(f"namespace {namespace.id}, made {_time(namespace.created)}")
    table = Table("request", "made", title=title, title_justify="left")
    for header in ("tokens", "blocks", "size"):
        table.add_column(header, justify="right")
    table.add_column("labels")
    for request in namespace.requests:
        table.add_row(*map(Text, _cells(request)))
    return table


def _cells(request: RequestView) -> list[str]:
    return [
        request.id,
        _time(request.created),
        f"{request.tokens:,}",
        f"{request.blocks:,}",
        format_size(request.raw_bytes),
        " ".join(f"{name}={value}" for name, value in sorted(request.labels.items())),
    ]


def print_totals(store: StoreView) -> None:
    """One table."""
    table = Table(show_header=False, title=Text(store.url), title_justify="left")
    table.add_column()
    table.add_column(justify="right")
    ratio = "-" if store.codec_ratio is None else f"{store.codec_ratio:.2f}"
    full = "" if store.capacity is None else f" ({store.disk_bytes / store.capacity:.1%})"
    rows = {
        "namespaces": f"{store.namespaces:,}",
        "requests": f"{store.requests:,}",
        "packs": f"{store.packs:,}",
        "blocks": f"{store.blocks:,}",
        "raw": format_size(store.raw_bytes),
        "stored": format_size(store.stored_bytes),
        "codec ratio": ratio,
        "on disk": format_size(store.disk_bytes) + full,
        "capacity": "none" if store.capacity is None else format_size(store.capacity),
    }
    for name, value in rows.items():
        table.add_row(name, value)
    _console().print(table)


def follow(steps: Iterable[MoveProgress]) -> int:
    """Show a bar on standard error while the steps are made; the bytes that were moved."""
    moved = 0
    console = Console(stderr=True)
    with Progress(*Progress.get_default_columns(), console=console, disable=not console.is_terminal) as progress:
        task = progress.add_task("moving")
        for step in steps:
            moved = step.moved_bytes
            progress.update(task, completed=step.moved_bytes, total=step.total_bytes)
    return moved


def print_moved(url: str, placement: str, moved: int) -> None:
    """One line."""
    _console().print(Text(f"{format_size(moved)} moved to {placement} in {url}"))


def _console() -> Console:
    console = Console()
    return console if console.is_terminal else Console(width=_PLAIN_WIDTH)


def _time(seconds: float) -> str:
    return datetime.fromtimestamp(seconds).astimezone().strftime("%Y-%m-%d %H:%M:%S")


def _count(number: int, noun: str) -> str:
    return f"{number:,} {noun}" + ("" if number == 1 else "s")
