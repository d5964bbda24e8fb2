"""Output of all commands: tables for people, JSON for programs. Colours appear on terminals only.

Only ``plain`` makes text for people. It escapes control characters, because ids, labels, paths and error texts come
from stores and from other processes.
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Iterable, Sequence
from datetime import datetime
from typing import Any, NoReturn

import msgspec
from rich import box
from rich.console import Console
from rich.table import Table
from rich.text import Text

from persistkv.errors import printable

_PIPE_CLOSED = 141  # as of a process that SIGPIPE ended
_PLAIN_WIDTH = 1000  # a pipe or file has no width; rich would take 80 and cut
_UNITS = ("B", "KiB", "MiB", "GiB", "TiB", "PiB")
_AGES = ((86_400, "d"), (3600, "h"), (60, "m"))
_BAR = 24


def format_size(num_bytes: int) -> str:
    """Bytes for a person: ``12.3 GiB``."""
    size = float(num_bytes)
    for unit in _UNITS:
        if size < 1023.95 or unit == _UNITS[-1]:
            break
        size /= 1024
    return f"{num_bytes} B" if unit == "B" else f"{size:.1f} {unit}"


def format_age(created: float, now: float | None = None) -> str:
    """How long ago, for a person: ``3d``, ``12h``, ``5m``, ``40s``; ``-2m`` in the future."""
    seconds = (time.time() if now is None else now) - created
    sign, seconds = ("-", -seconds) if seconds < 0 else ("", seconds)
    for unit, letter in _AGES:
        if seconds >= unit:
            return f"{sign}{int(seconds // unit)}{letter}"
    return f"{sign}{int(seconds)}s"


def format_time(seconds: float) -> str:
    """A moment, in the local time zone."""
    return datetime.fromtimestamp(seconds).astimezone().strftime("%Y-%m-%d %H:%M:%S")


def format_ratio(raw: int, stored: int) -> str:
    """Raw bytes per stored byte."""
    return f"{raw / stored:.2f}" if stored else "-"


def format_labels(labels: dict[str, str]) -> str:
    """``name=value``, sorted."""
    return " ".join(f"{name}={value}" for name, value in sorted(labels.items()))


def count(number: int, noun: str) -> str:
    """``1 pack``, ``2 packs``."""
    return f"{number:,} {noun}" + ("" if number == 1 else "s")


def bar(value: int, largest: int) -> str:
    """A bar as long as its share of the largest."""
    return "█" * (-(-value * _BAR // largest) if largest else 0)


def print_json(value: Any) -> None:
    """Print one JSON object. Values are exact; unprintable characters are written as ``\\u`` sequences."""
    lines = msgspec.json.format(msgspec.json.encode(value), indent=2).decode().split("\n")
    try:
        sys.stdout.write("\n".join(map(_escaped_json, lines)) + "\n")
        sys.stdout.flush()
    except BrokenPipeError:
        _nobody_reads()


def print_exact(text: str) -> None:
    """Print lines for a program; on a terminal, with unprintable characters escaped."""
    lines = text.split("\n")
    try:
        sys.stdout.write("\n".join(map(printable, lines) if sys.stdout.isatty() else lines))
        sys.stdout.flush()
    except BrokenPipeError:
        _nobody_reads()


def _escaped_json(line: str) -> str:
    """Unprintable characters occur within strings only."""
    if line.isprintable():
        return line
    return "".join(char if char.isprintable() else json.dumps(char)[1:-1] for char in line)


def say(text: str) -> None:
    """Print one line."""
    console().print(plain(text))


def table(columns: Sequence[str], rows: Iterable[Sequence[str]], *, title: str | None = None, left: str = "") -> Table:
    """A table with right-aligned numbers.

    :param columns: their headers.
    :param left: headers of left-aligned columns, joined by spaces; the first column is always left-aligned.
    """
    made = Table(
        title=None if title is None else plain(title), title_justify="left", box=box.SIMPLE_HEAD, pad_edge=False
    )
    for position, header in enumerate(columns):
        is_text = position == 0 or header in left.split()
        made.add_column(
            header,
            justify="left" if is_text else "right",
            no_wrap=not is_text,
            overflow="fold" if is_text else "ellipsis",
        )
    for row in rows:
        made.add_row(*map(plain, row))
    return made


def pairs(rows: dict[str, str], *, title: str | None = None) -> Table:
    """A table of names and values."""
    heading = None if title is None else plain(title)
    made = Table(show_header=False, title=heading, title_justify="left", box=box.SIMPLE, pad_edge=False)
    made.add_column(no_wrap=True)
    made.add_column(overflow="fold")
    for name, value in rows.items():
        made.add_row(plain(name), plain(value))
    return made


def plain(text: str, style: str = "") -> Text:
    """Text of one line that is no markup, with unprintable characters escaped."""
    return Text(printable(text), style=style)


def console(*, stderr: bool = False) -> Console:
    """Where to print; as wide as the terminal."""
    made = _Console(stderr=stderr)
    return made if made.is_terminal else _Console(stderr=stderr, width=_PLAIN_WIDTH)


class _Console(Console):
    def on_broken_pipe(self) -> None:
        _nobody_reads()


def _nobody_reads() -> NoReturn:
    """Exit after the reader of the output closed it, as ``head`` does; the exit code must not mean a finding."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # the rest of the buffer is discarded
    raise SystemExit(_PIPE_CLOSED)
