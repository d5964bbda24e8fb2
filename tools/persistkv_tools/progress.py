"""Bars of bytes on standard error, on terminals only."""

from __future__ import annotations

from collections.abc import Callable

from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn, TransferSpeedColumn

from persistkv_tools import render
from persistkv_tools.throttle import Throttle


def byte_progress() -> Progress:
    """A bar that goes away at the end."""
    console = render.console(stderr=True)
    columns = (TextColumn("{task.description}"), BarColumn(), DownloadColumn(binary_units=True))
    return Progress(
        *columns,
        TransferSpeedColumn(),
        TimeRemainingColumn(),
        console=console,
        transient=True,
        disable=not console.is_terminal,
    )


def counted(progress: Progress, what: str, total: int | None, throttle: Throttle) -> Callable[[int], None]:
    """What a reader is to call with the bytes it took: moves a bar, and waits where it went too fast.

    :param total: bytes that there will be; None: nobody knows.
    """
    task = progress.add_task(what, total=total)

    def took(num_bytes: int) -> None:
        progress.advance(task, num_bytes)
        throttle.took(num_bytes)

    return took
