"""``persistkv doctor``."""

from __future__ import annotations

import os
from typing import Annotated

import typer
from rich.text import Text

from persistkv_tools import render
from persistkv_tools.inspect.checks import Finding, Level, examine
from persistkv_tools.options import Json

_STYLES = {Level.OK: "green", Level.NOTE: "cyan", Level.WARNING: "yellow", Level.PROBLEM: "bold red"}


def doctor(
    url: Annotated[str | None, typer.Argument(metavar="[URL]", help="A store to look at, too.")] = None,
    json: Json = False,
) -> None:
    """Check this machine, and a store, for what stands in the way. Exit code 1: a warning or a problem.

    Example: persistkv doctor lmdb:///var/cache/kv
    """
    findings = list(examine(url, os.environ))
    if json:
        render.print_json({"url": url, "findings": findings})
    else:
        _print(findings)
    if any(finding.level in (Level.WARNING, Level.PROBLEM) for finding in findings):
        raise typer.Exit(1)


def _print(findings: list[Finding]) -> None:
    made = render.table(("check", "level", "found"), [], left="level found")
    for finding in findings:
        found = [finding.found, f"→ {finding.todo}"] if finding.todo else [finding.found]
        made.add_row(
            render.plain(finding.check),
            render.plain(finding.level.value, _STYLES[finding.level]),
            Text("\n").join(map(render.plain, found)),
        )
    render.console().print(made)
