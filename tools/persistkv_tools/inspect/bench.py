"""``persistkv bench``."""

from __future__ import annotations

from typing import Annotated

import typer

from persistkv.config import parse_size
from persistkv.errors import ConfigurationError
from persistkv.storage.planning import DIRECT_BYTES
from persistkv_tools import render
from persistkv_tools.inspect.benching import Figure, Report, bench
from persistkv_tools.options import Json, Url
from persistkv_tools.progress import byte_progress, counted
from persistkv_tools.throttle import Throttle

_COLUMNS = ("operation", "time", "speed", "plain", "ratio", "verdict")
_BLOCK = 64 << 10  # 64 KiB


def bench_(
    url: Url,
    size: Annotated[str, typer.Option(metavar="SIZE", help="Of one job.")] = "32MiB",
    rounds: Annotated[int, typer.Option(min=1, help="Times that all is measured.")] = 7,
    json: Json = False,
) -> None:
    """Measure what this machine's disk or bucket gives persistkv, as ratios to what it gives without, with a verdict.

    It works beside the store, in one of its own that it removes; the store itself is not touched, nor need it exist.
    With the default sizes it writes 1 GiB.

    Example: persistkv bench lmdb:///var/cache/kv
    """
    job_bytes = parse_size(size, name="--size")
    if job_bytes % _BLOCK or job_bytes < DIRECT_BYTES:
        raise ConfigurationError("--size", size, "a multiple of 64KiB, 4MiB or more: what is smaller waits for company")
    with byte_progress() as progress:
        took = counted(progress, "bench", (2 * rounds + 1) * job_bytes, Throttle(None))
        report = bench(url, job_bytes, rounds, took)
    if json:
        render.print_json(report)
    else:
        _print(report)


def _print(report: Report) -> None:
    title = f"jobs of {render.format_size(report.job_bytes)}, medians of {render.count(report.rounds, 'round')}"
    render.console().print(render.table(_COLUMNS, map(_cells, report.figures), title=title, left="verdict"))
    for note in report.notes:
        render.say(note)


def _cells(figure: Figure) -> list[str]:
    return [
        figure.name,
        f"{figure.seconds * 1e3:,.1f} ms",
        f"{render.format_size(round(figure.bytes_per_s))}/s",
        "-" if figure.limit_seconds is None else f"{figure.limit_seconds * 1e3:,.1f} ms",
        "-" if figure.ratio is None else f"{figure.ratio:.2f}",
        figure.verdict,
    ]
