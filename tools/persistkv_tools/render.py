"""Output of all commands: tables for people, JSON for programs. Colours appear on terminals only.

All text for people passes through ``plain``, which escapes control characters, because ids, labels,
paths and error texts come from stores and from other processes.
"""

from __future__ import annotations

import json
import math
import os
import sys
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from datetime import datetime
from typing import Any, NoReturn, TextIO, TypeVar, cast

import msgspec
from rich import box
from rich.console import Console
from rich.table import Table
from rich.text import Text

from persistkv.errors import StoreError, printable
from persistkv.rounding import divide_up

PIPE_CLOSED = 141
"""Exit code of a command whose output was closed, equal to that of a process that SIGPIPE ended."""
_PLAIN_WIDTH = 1000  # a pipe or file has no width; rich would take 80 and cut
_WIDE = 120  # columns of a terminal that shows tables in full
_UNBROKEN = 12  # characters that a cell shows on one line
_BAR = 24  # characters of the longest bar
_LONGEST_CELL = 200  # characters
_UNITS = ((86_400, "d"), (3600, "h"), (60, "m"))  # of times, in seconds
_ALMOST = 0.98  # part of a unit that is shown as a whole one

T = TypeVar("T", bound=msgspec.Struct)
N = TypeVar("N", int, float)


class OutputError(StoreError):
    """Standard output cannot be written."""

    def __init__(self, error: OSError) -> None:
        reason = error.strerror or str(error)
        super().__init__(f"the output cannot be written: {reason}")


def format_size(num_bytes: int) -> str:
    """Return a number of bytes for people, such as ``12.3 GiB``."""
    if num_bytes < 1024:
        return f"{num_bytes} B"
    size = num_bytes / 1024
    for unit in ("KiB", "MiB", "GiB", "TiB"):
        # 1023.95 and more would be rounded to 1024.0, so the next unit is used
        if size < 1023.95:
            return f"{size:.1f} {unit}"
        size /= 1024
    return f"{size:.1f} PiB"


def format_pace(num_bytes: int, seconds: float) -> str:
    """Return duration and rate of a transfer for people, such as ``in 1.5 s (8.0 MiB/s)``."""
    # a transfer of nothing takes no time: avoid a division by zero
    rate = num_bytes / max(seconds, 1e-3)
    return f"in {seconds:.1f} s ({format_size(round(rate))}/s)"


def format_age(created: float) -> str:
    """Return the time since ``created`` for people: ``3d``, ``12h``, ``5m``, ``40s``; ``-2m`` if in
    the future."""
    age = time.time() - created
    sign = "-" if age < 0 else ""
    seconds = abs(age)
    for unit, letter in _UNITS:
        if seconds >= unit:
            return f"{sign}{int(seconds // unit)}{letter}"
    return f"{sign}{int(seconds)}s"


def format_expiry(at: float, now: float | None = None) -> str:
    """Return the time until ``at`` for people: ``in 3d``; ``expired`` if it has passed."""
    left_s = at - (time.time() if now is None else now)
    if left_s <= 0:
        return "expired"
    # round to the nearest unit, because a ttl of 7d is not 6d a moment after the store
    for unit, letter in _UNITS:
        if left_s >= unit * _ALMOST:
            return f"in {round(left_s / unit)}{letter}"
    return f"in {math.ceil(left_s)}s"


def format_time(seconds: float) -> str:
    """Return a time in this machine's time zone, which is named: ``2026-11-27 14:05:09 CET``."""
    local = datetime.fromtimestamp(seconds).astimezone()
    return local.strftime("%Y-%m-%d %H:%M:%S %Z")


def format_ratio(raw: int, stored: int) -> str:
    """Return raw bytes per stored byte, such as ``1.50``; ``-`` if nothing is stored."""
    return f"{raw / stored:.2f}" if stored else "-"


def format_model(name: str) -> str:
    """Return the name or path of a model; on a narrow terminal, only its last part; ``-`` if
    empty."""
    if not is_wide():
        name = name.rstrip("/").rpartition("/")[2]
    return name or "-"


def or_dash(
    value: N | None,
    format_value: Callable[[N], str],
) -> str:
    """Return a value as text; ``-`` if it is unknown."""
    return "-" if value is None else format_value(value)


def format_labels(labels: Mapping[str, str]) -> str:
    return " ".join(f"{name}={value}" for name, value in sorted(labels.items()))


def count(number: int, noun: str) -> str:
    """Return a number with its noun: ``1 pack``, ``2 packs``."""
    ending = "" if number == 1 else "s"
    return f"{number:,} {noun}{ending}"


def bar(value: int, largest: int) -> str:
    """Return a bar of text; the largest value has a bar of 24 characters."""
    if not largest:
        return ""
    # round up, so that every value above zero has a bar
    length = divide_up(value * _BAR, largest)
    return "█" * length


def view_of(
    kind: type[T],
    source: object,
    **more: Any,
) -> T:
    """Return a struct whose fields are copied from the attributes of the same names of another
    object.

    :param more: values of fields that are not copied.
    """
    copied = {}
    for name in kind.__struct_fields__:
        if name not in more and hasattr(source, name):
            copied[name] = getattr(source, name)
    return kind(**copied, **more)


def print_json(value: Any) -> None:
    """Print one JSON object. Values are exact; unprintable characters are written as ``\\u``
    sequences."""
    encoded = msgspec.json.encode(value)
    text = msgspec.json.format(encoded, indent=2).decode()
    lines = text.split("\n")
    for at, line in enumerate(lines):
        # unprintable characters occur only in strings, where an escape means the same character
        if not line.isprintable():
            lines[at] = "".join(map(_json_escape, line))
    _write("\n".join(lines) + "\n")


def _json_escape(char: str) -> str:
    """Return a character in the form of a JSON string: an escape if it is unprintable."""
    return char if char.isprintable() else json.dumps(char)[1:-1]


def print_exact(text: str) -> None:
    """Print a text unchanged, without a newline added; on a terminal, with unprintable characters
    escaped."""
    # a terminal would obey control characters; programs that read a pipe get them unchanged
    if sys.stdout.isatty():
        lines = map(printable, text.split("\n"))
        text = "\n".join(lines)
    _write(text)


def _write(text: str) -> None:
    OUTPUT.write(text)
    OUTPUT.flush()


def say(text: str) -> None:
    """Print one line for people."""
    console().print(plain(text))


Columns = Mapping[str, str | Callable[[Any], str]]
"""For each header of a table, the field that the column shows, such as ``blocks`` or
``counters.commits``, or a function that returns the cell's text from the record. Values are
formatted according to the field's name."""


def columns(
    spec: str,
    **derived: Callable[[Any], str],
) -> Columns:
    """Return the columns of a table.

    :param spec: for each column, a word ``header=field``, or one word for both. Headers are shown
        with spaces for ``_``.
    :param derived: functions that return a cell's text from a record, by the name used in place of
        a field.
    """
    made: dict[str, str | Callable[[Any], str]] = {}
    for word in spec.split():
        name, _, cell = word.partition("=")
        header = name.replace("_", " ")
        cell = cell or name
        # use the function of this name, or else the field
        made[header] = derived.get(cell, cell)
    return made


def cells(
    columns: Columns,
    records: Iterable[object],
) -> list[list[str]]:
    """Return the texts of a table: for each record, one for each column."""
    rows = []
    for record in records:
        row = [_cell(record, column) for column in columns.values()]
        rows.append(row)
    return rows


def pairs(columns: Columns, record: object) -> dict[str, str]:
    """Return the texts of one record by header."""
    texts: dict[str, str] = {}
    for header, column in columns.items():
        texts[header] = _cell(record, column)
    return texts


def _cell(
    record: object,
    column: str | Callable[[Any], str],
) -> str:
    """Return the text of a cell of a table.

    :param column: function that returns the text; or a field, formatted according to the end of
        its name. A dot leads to a field of a field; None on the way is shown as ``-``.
    """
    if callable(column):
        return column(record)
    value: Any = record
    for name in column.split("."):
        value = getattr(value, name)
        if value is None:
            return "-"
    for endings, format_value in _FORMATS_BY_NAME:
        if column.endswith(endings):
            return format_value(value)
    format_value = _FORMATS_BY_TYPE.get(type(value), str)
    return format_value(value)


def cut(text: str) -> str:
    """Return the start of a text that is too long for a cell of a table: it would hide the other
    rows."""
    return text if len(text) <= _LONGEST_CELL else f"{text[:_LONGEST_CELL]}…"


_FORMATS_BY_NAME: tuple[tuple[tuple[str, ...], Callable[[Any], str]], ...] = (
    (("created", "updated", "last_used"), format_age),
    (("expires",), format_expiry),
    (("namespace", "pack"), lambda value: str(value)[:8]),
    (("bytes_per_s",), lambda value: f"{format_size(round(value))}/s"),
    (("_bytes",), lambda value: format_size(round(value))),
    (("seconds",), lambda value: f"{value * 1e3:,.1f} ms"),
    (("_rate",), lambda value: f"{value:.1%}"),
)
"""How the values of fields are formatted, by the ends of their names."""
_FORMATS_BY_TYPE: dict[type, Callable[[Any], str]] = {
    bool: lambda value: "yes" if value else "",
    int: lambda value: f"{value:,}",
    float: lambda value: f"{value:.2f}",
    dict: lambda value: cut(format_labels(value)),
    list: " ".join,
}
"""How the values of all other fields are formatted."""


def show_table(
    columns: Columns,
    records: Sequence[object],
    *,
    title: str | None = None,
    left: str = "",
    optional: str = "",
    most: int | None = None,
) -> None:
    """Print a table.

    :param left: headers of left-aligned columns, joined by commas; the first column is always
        left-aligned.
    :param optional: headers of columns that are left out if all their cells are empty, "-" or 0.
    :param most: number of records to show; a line below says how many are left out. None: all.
    """
    shown = records[:most]
    can_be_left_out = optional.split(",")
    kept: dict[str, str | Callable[[Any], str]] = {}
    for header, column in columns.items():
        if header not in can_be_left_out or _has_content(column, shown):
            kept[header] = column
    if title is not None:
        say(title)
    rows = cells(kept, shown)
    console().print(table(kept, rows, left=left))
    if most is not None and len(records) > most:
        say(f"and {len(records) - most:,} more; --json lists all")


def _has_content(
    column: str | Callable[[Any], str],
    records: Iterable[object],
) -> bool:
    """Return whether a cell of the column is none of "", "-" and "0"."""
    return any(_cell(record, column).strip("-0") for record in records)


def is_wide() -> bool:
    """Return whether the terminal is wide enough for tables with all columns; True for pipes and
    files."""
    return console().width >= _WIDE


def table(
    headers: Iterable[str],
    rows: Sequence[Sequence[str]],
    *,
    left: str = "",
) -> Table:
    """Return a table with right-aligned numbers. Only long texts are broken over lines.

    :param left: headers of left-aligned columns, joined by commas; the first column is always
        left-aligned.
    """
    drawn = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    on_the_left = left.split(",")
    for position, header in enumerate(headers):
        if position == 0 or header in on_the_left:
            lengths = [len(row[position]) for row in rows]
            # keep short ids on one line: an id that is broken over lines cannot be copied
            is_short = max(lengths, default=0) <= _UNBROKEN
            drawn.add_column(header, overflow="fold", no_wrap=is_short)
        else:
            # keep a number on one line: over two lines, it reads as two numbers
            drawn.add_column(header, justify="right", no_wrap=True)
    for row in rows:
        drawn.add_row(*map(plain, row))
    return drawn


def show_pairs(
    rows: dict[str, str],
    *,
    title: str | None = None,
) -> None:
    """Print a table of two columns: the names and the values of ``rows``."""
    if title is not None:
        say(title)
    console().print(pair_table(rows))


def pair_table(rows: dict[str, str]) -> Table:
    """Return a table of two columns: the names and the values of ``rows``."""
    drawn = Table(
        show_header=False,
        box=box.SIMPLE,
        pad_edge=False,
    )
    drawn.add_column(no_wrap=True)
    drawn.add_column(overflow="fold")
    for name, value in rows.items():
        drawn.add_row(plain(name), plain(value))
    return drawn


def plain(text: str, style: str = "") -> Text:
    """Return a text for output: markup in it has no effect, and unprintable characters are
    escaped."""
    return Text(printable(text), style=style)


class _Output:
    """Standard output, with errors of commands instead of ``OSError``s; its other attributes are
    those of the stream."""

    def write(self, text: str) -> int:
        try:
            return sys.stdout.write(text)
        except OSError as error:
            raise_output_error(error)

    def flush(self) -> None:
        try:
            sys.stdout.flush()
        except OSError as error:
            raise_output_error(error)

    def __getattr__(self, name: str) -> Any:
        return getattr(sys.stdout, name)


OUTPUT = cast("TextIO", _Output())
"""The stream that all commands write to."""


def raise_output_error(error: OSError) -> NoReturn:
    """Discard the output that could not be written. If its reader closed it, as ``head`` does, exit
    with code 141; code 1 would mean a finding.

    :raises OutputError: it could not be written for another reason.
    """
    # send the rest of the buffer to /dev/null: otherwise the interpreter writes it when it exits,
    # and fails again
    discarding = os.open(os.devnull, os.O_WRONLY)
    os.dup2(discarding, sys.stdout.fileno())
    if isinstance(error, BrokenPipeError):
        raise SystemExit(PIPE_CLOSED) from None
    raise OutputError(error) from None


def console(*, stderr: bool = False) -> Console:
    """Return a console as wide as the terminal; for pipes and files, 1000 columns wide, so that no
    line is broken."""
    file = sys.stderr if stderr else OUTPUT
    of_terminal = Console(file=file)
    if of_terminal.is_terminal:
        return of_terminal
    return Console(file=file, width=_PLAIN_WIDTH)
