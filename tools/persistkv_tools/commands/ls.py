"""``persistkv ls``."""

from __future__ import annotations

from typing import Annotated

import typer

from persistkv_tools import render
from persistkv_tools.listing import Page, RequestView, Sort, list_requests
from persistkv_tools.options import (
    InNamespace,
    Json,
    Labels,
    LargerThan,
    NewerThan,
    OlderThan,
    SmallerThan,
    Url,
    opened,
)
from persistkv_tools.selection import Selection

_PAGE = 50
_COLUMNS = ("request", "age", "tokens", "blocks", "size", "labels", "namespace")


def ls(
    url: Url,
    sort: Annotated[Sort, typer.Option(help="Newest or largest first; id and namespace by letter.")] = Sort.CREATED,
    reverse: Annotated[bool, typer.Option("--reverse", help="The other way round.")] = False,
    namespace: InNamespace = None,
    label: Labels = None,
    older_than: OlderThan = None,
    newer_than: NewerThan = None,
    larger_than: LargerThan = None,
    smaller_than: SmallerThan = None,
    limit: Annotated[
        int | None,
        typer.Option(min=0, help=f"Requests to show; 0: all. Tables show {_PAGE}, JSON all.", show_default=False),
    ] = None,
    offset: Annotated[int, typer.Option(min=0, help="Requests to pass over: the next page.")] = 0,
    json: Json = False,
) -> None:
    """List the requests that a store holds, newest first.

    Example: persistkv ls lmdb:///var/cache/kv --sort size --label user=anna
    """
    selection = Selection.parse(label, older_than, newer_than, larger_than, smaller_than)
    shown = (None if json else _PAGE) if limit is None else limit or None
    with opened(url) as backend:
        page = list_requests(
            url, backend, selection, namespace=namespace, sort=sort, reverse=reverse, offset=offset, limit=shown
        )
    if json:
        render.print_json(page)
    else:
        _print(page)


def _print(page: Page) -> None:
    render.console().print(render.table(_COLUMNS, map(_cells, page.requests), left="labels namespace"))
    namespaces = render.count(len(page.namespaces), "namespace")
    held = f"{render.count(page.total, 'request')} in {namespaces} of {page.url}"
    matched = "" if page.matched == page.total else f"; {page.matched:,} match"
    render.say(held + matched)
    end = page.offset + len(page.requests)
    if page.requests and (page.offset or end < page.matched):
        following = f"; --offset {end} shows the next" if end < page.matched else ""
        render.say(f"shown: {page.offset + 1:,} to {end:,} of {page.matched:,}{following}")


def _cells(request: RequestView) -> list[str]:
    return [
        request.id,
        render.format_age(request.created),
        f"{request.tokens:,}",
        f"{request.blocks:,}",
        render.format_size(request.raw_bytes),
        render.format_labels(request.labels),
        request.namespace[:8],
    ]
