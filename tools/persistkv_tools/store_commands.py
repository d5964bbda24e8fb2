"""The commands that look into a store. They open it read-only, and may run while engines use it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from typing import Annotated

import typer

from persistkv.storage.backend import Backend
from persistkv.storage.registry import open_backend
from persistkv_tools import render
from persistkv_tools.views import NamespaceView, StoreView, list_namespaces, store_totals

Url = Annotated[str, typer.Argument(metavar="URL", help="The store, e.g. lmdb:///var/cache/kv", show_default=False)]
Json = Annotated[bool, typer.Option("--json", help="One JSON object on standard output, sizes in bytes.")]


def ls(url: Url, json: Json = False) -> None:
    """List the requests that a store holds, newest last."""
    with _opened(url) as backend:
        namespaces: list[NamespaceView] = list_namespaces(backend)
    if json:
        render.print_json({"url": url, "namespaces": namespaces})
    else:
        render.print_requests(url, namespaces)


def stat(url: Url, json: Json = False) -> None:
    """Show what a store holds in total, and how full it is."""
    with _opened(url) as backend:
        totals: StoreView = store_totals(url, backend)
    if json:
        render.print_json(totals)
    else:
        render.print_totals(totals)


def move(
    url: Url,
    to: Annotated[str, typer.Option("--to", metavar="PLACEMENT", help="Such as extents or inline, by the driver.")],
) -> None:
    """Move what a store holds to another placement, while engines use it. Ask again to finish what was interrupted."""
    with _opened(url):  # moving makes no store where there is none
        pass
    with closing(open_backend(url)) as backend:
        moved = render.follow(backend.move(to))
    render.print_moved(url, to, moved)


COMMANDS: dict[str, Callable[..., None]] = {"ls": ls, "stat": stat, "move": move}


@contextmanager
def _opened(url: str) -> Iterator[Backend]:
    with closing(open_backend(url, read_only=True)) as backend:
        yield backend
