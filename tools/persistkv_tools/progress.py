"""Progress bars and rate limits of commands that read or write much. Limits leave engines their
share of the disk."""

from __future__ import annotations

import time
from collections.abc import Callable

from rich.progress import (
    BarColumn,
    Progress,
    ProgressColumn,
    Task,
    TextColumn,
    TimeRemainingColumn,
)
from rich.table import Column
from rich.text import Text

from persistkv_tools import render

_MOST_PAUSE_S = 1.0
"""Longest pause that reduces transfers to their share of the time."""
_MOST_UNUSED_S = 1.0
"""Most seconds without transfers for which later transfers may exceed the rate."""


class _Bytes(ProgressColumn):
    """Column of a progress bar: bytes done, total and rate, formatted as in all commands."""

    def render(self, task: Task) -> Text:
        text = render.format_size(round(task.completed))
        if task.total is not None:
            text += f" of {render.format_size(round(task.total))}"
        if task.speed is not None:
            text += f", {render.format_size(round(task.speed))}/s"
        return render.plain(text)


def byte_progress() -> Progress:
    """Return a progress bar on standard error with total, rate and remaining time. It disappears at
    the end."""
    console = render.console(stderr=True)
    return Progress(
        TextColumn("{task.description}"),
        BarColumn(bar_width=24),
        _Bytes(table_column=Column(no_wrap=True)),
        TimeRemainingColumn(),
        console=console,
        transient=True,
        disable=not console.is_terminal,
    )


def counted(
    progress: Progress | None,
    what: str,
    total: int | None,
    throttle: Throttle | None = None,
) -> Callable[[int], None]:
    """Return a function that takes the bytes of each read, advances a bar, and sleeps as the
    throttle requires.

    :param progress: display of the bar; None: no bar is shown.
    :param what: label of the bar.
    :param total: bytes of all reads; None: unknown.
    :param throttle: limits of the pace; None: no limit.
    """
    shown = progress or Progress(disable=True)
    pace = throttle or Throttle()
    task = shown.add_task(what, total=total)

    def on_bytes(num_bytes: int) -> None:
        shown.advance(task, num_bytes)
        pace.wait_after(num_bytes)

    return on_bytes


class Throttle:
    """Limits the pace of reads or writes: sleeps after each one as long as the limits require.

    :param bytes_per_s: limit on the mean rate; unused time accumulates up to one second. None: no
        such limit.
    :param share: largest share of the time to spend on reads or writes, 0 to 1; 1: no such limit.
        It bounds the use of disk and processor at any speed. A sleep for it takes at most a second.
    """

    def __init__(
        self,
        bytes_per_s: int | None = None,
        *,
        share: float = 1.0,
    ) -> None:
        self._rate = bytes_per_s
        self._share = share
        self._resumed = time.monotonic()
        """When the last sleep ended; the time since then was spent on reads or writes."""
        self._free_at = self._resumed
        """When all bytes so far would be done at the limited rate."""

    @property
    def bounded(self) -> bool:
        """Whether the rate or the share of the time is limited."""
        return self._rate is not None or self._share < 1

    def wait_after(self, num_bytes: int) -> None:
        """Account for bytes that were read or written, and sleep as the limits require."""
        now = time.monotonic()
        pause_s = self._share_pause_s(now)
        if self._rate is not None:
            # After seconds without a transfer, ``_free_at`` is in the past: later transfers may
            # exceed the rate until they have caught up. Limit how much they may catch up.
            begin = max(self._free_at, now - _MOST_UNUSED_S)
            self._free_at = begin + num_bytes / self._rate
            pause_s = max(pause_s, self._free_at - now)
        if pause_s > 0:
            time.sleep(pause_s)
        self._resumed = time.monotonic()

    def _share_pause_s(self, now: float) -> float:
        """Return the pause that reduces the last read or write to its share of the time."""
        busy_s = now - self._resumed
        # with this pause, the busy time is ``share`` of busy time and pause together
        pause_s = busy_s / self._share - busy_s
        # without a bound, a read that waited long for a slow disk would cause a pause of minutes
        return min(_MOST_PAUSE_S, pause_s)
