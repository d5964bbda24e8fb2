"""``persistkv ls``."""

from __future__ import annotations

from collections.abc import Callable
from typing import Annotated

import typer

from persistkv_tools import render
from persistkv_tools.inspect.listing import Page, Sort, list_requests
from persistkv_tools.options import (
    InNamespace,
    Json,
    Labels,
    LargerThan,
    NeverHit,
    NewerThan,
    OlderThan,
    SmallerThan,
    Url,
    opened,
)
from persistkv_tools.selection import RequestView, Selection

_PAGE = 50
_WIDE = 120  # columns


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
    never_hit: NeverHit = False,
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
    selection = Selection.parse(label, older_than, newer_than, larger_than, smaller_than, never_hit=never_hit)
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
    columns = _columns(page)
    rows = ([cell(request) for _, cell in columns] for request in page.requests)
    names = [name for name, _ in columns]
    render.console().print(render.table(names, rows, left="pinned labels namespace"))
    namespaces = render.count(len(page.namespaces), "namespace")
    held = f"{render.count(page.total, 'request')} in {namespaces} of {page.url}"
    matched = "" if page.matched == page.total else f"; {page.matched:,} match"
    render.say(held + matched)
    end = page.offset + len(page.requests)
    if page.requests and (page.offset or end < page.matched):
        following = f"; --offset {end} shows the next" if end < page.matched else ""
        render.say(f"shown: {page.offset + 1:,} to {end:,} of {page.matched:,}{following}")


def _columns(page: Page) -> list[tuple[str, Callable[[RequestView], str]]]:
    """What there is something to say of; sizes at rest and groups where there is room."""
    wide = render.console().width >= _WIDE
    columns: list[tuple[str, Callable[[RequestView], str]]] = [
        ("request", lambda request: request.id),
        ("age", lambda request: render.format_age(request.created)),
        ("used", lambda request: "-" if request.last_used is None else render.format_age(request.last_used)),
        ("tokens", lambda request: f"{request.tokens:,}"),
        ("blocks", lambda request: f"{request.blocks:,}"),
        ("size", lambda request: render.format_size(request.raw_bytes)),
    ]
    if wide and any(len(request.group_blocks) > 1 for request in page.requests):
        columns.insert(-1, ("by group", lambda request: "+".join(f"{blocks:,}" for blocks in request.group_blocks)))
    if wide and any(request.stored_bytes is not None for request in page.requests):
        columns.append(("stored", _stored))
    if any(request.hits or request.reused for request in page.requests):
        columns.append(("hits", _hits))
    if any(request.pinned for request in page.requests):
        columns.append(("pinned", lambda request: "yes" if request.pinned else ""))
    if any(request.labels for request in page.requests):
        columns.append(("labels", lambda request: render.format_labels(request.labels)))
    if len(page.namespaces) > 1:
        columns.append(("namespace", lambda request: request.namespace[:8]))
    return columns


def _stored(request: RequestView) -> str:
    return "-" if request.stored_bytes is None else render.format_size(request.stored_bytes)


def _hits(request: RequestView) -> str:
    """At least one where it was used, though whoever did is not held any more, or has not ended yet."""
    return "-" if request.hits is None else f"{max(request.hits, int(request.reused or False)):,}"
