"""``persistkv report``."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Annotated

import typer

from persistkv.errors import ConfigurationError
from persistkv_tools import render
from persistkv_tools.inspect.report_page import report_page
from persistkv_tools.inspect.reporting import report_data
from persistkv_tools.options import Json, Url, opened


def report(
    url: Url,
    output: Annotated[Path, typer.Option("--output", "-o", metavar="FILE", help="Where to write; is replaced.")],
    json: Json = False,
) -> None:
    """Write a page about a store: ages, sizes, fill and hits over time, prefix tree, codecs. It needs no network.

    Example: persistkv report lmdb:///var/cache/kv -o report.html
    """
    with opened(url) as backend:
        made = report_page(report_data(url, backend)).encode()
    beside = output.with_name(output.name + ".part")
    try:
        beside.write_bytes(made)
        os.replace(beside, output)
    except OSError as error:
        raise ConfigurationError("--output", str(output), f"a place to write to ({error.strerror})") from None
    if json:
        render.print_json({"url": url, "file": str(output), "bytes": len(made)})
    else:
        render.say(f"{output}: {render.format_size(len(made))}")
