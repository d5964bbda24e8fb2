"""``persistkv move``."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Annotated

import typer

from persistkv.storage.backend import MoveProgress
from persistkv_tools import render
from persistkv_tools.options import Json, Url, opened
from persistkv_tools.progress import byte_progress

Placement = Annotated[str, typer.Option("--to", metavar="PLACEMENT", help="One that the driver has, e.g. extents.")]


def move(url: Url, to: Placement, json: Json = False) -> None:
    """Move payloads to another placement, while engines use the store. Ask again to finish what was interrupted.

    Example: persistkv move lmdb:///var/cache/kv --to inline
    """
    with opened(url, writable=True) as backend:
        moved = _follow(backend.move(to))
    if json:
        render.print_json({"url": url, "placement": to, "moved_bytes": moved})
    else:
        render.say(f"moved {render.format_size(moved)} to {to}")


def _follow(steps: Iterable[MoveProgress]) -> int:
    """Show a bar while the steps are made; the bytes that were moved."""
    moved = 0
    with byte_progress() as progress:
        task = progress.add_task("move", total=None)
        for step in steps:
            moved = step.moved_bytes
            progress.update(task, completed=moved, total=step.total_bytes)
    return moved
