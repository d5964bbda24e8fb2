"""``persistkv ls``: one page of the requests of a store.

The JSON output is the structs; the table is made of them.
"""

from __future__ import annotations

import enum
import heapq
from collections import Counter
from collections.abc import Callable, Iterator
from itertools import repeat
from typing import Annotated, Any

import msgspec
import typer

from persistkv.storage.backend import Namespace
from persistkv.storage.extensions import InspectableBackend
from persistkv_tools import render
from persistkv_tools.options import (
    InNamespace,
    Json,
    Labels,
    LargerThan,
    NeverHit,
    NewerThan,
    OlderThan,
    RequestView,
    Selection,
    SmallerThan,
    Url,
    chosen_namespaces,
    opened,
    with_uses,
)

_PAGE = 50
_WIDE = 120  # columns
_Key = Callable[[RequestView], tuple[Any, ...]]


class NamespaceView(msgspec.Struct, frozen=True):
    """One identity and its namespace."""

    id: str
    """The identity's digest, hexadecimal."""
    created: float
    identity: dict[str, Any]


class Page(msgspec.Struct, frozen=True):
    """Some of a store's requests."""

    url: str
    total: int
    """Requests in the selected namespaces."""
    matched: int
    """Of these, the requests that match the selection."""
    offset: int
    """Matching requests before this page."""
    requests: list[RequestView]
    namespaces: list[NamespaceView]
    """Oldest first."""


class Sort(str, enum.Enum):
    """By what to sort."""

    CREATED = "created"
    USED = "used"
    TOKENS = "tokens"
    BLOCKS = "blocks"
    SIZE = "size"
    HITS = "hits"
    ID = "id"
    NAMESPACE = "namespace"


_KEYS: dict[Sort, tuple[_Key, bool]] = {
    Sort.CREATED: (lambda view: (view.created, view.id), True),
    Sort.USED: (lambda view: (view.last_used or 0.0, view.created, view.id), True),
    Sort.TOKENS: (lambda view: (view.tokens, view.created, view.id), True),
    Sort.BLOCKS: (lambda view: (view.blocks, view.created, view.id), True),
    Sort.SIZE: (lambda view: (view.raw_bytes, view.created, view.id), True),
    Sort.HITS: (lambda view: (view.hits or 0, view.last_used or 0.0, view.id), True),
    Sort.ID: (lambda view: (view.id, view.namespace), False),
    Sort.NAMESPACE: (lambda view: (view.namespace, -view.created, view.id), False),
}
"""Sort key, and whether the largest comes first."""
_BY_USE = (Sort.USED, Sort.HITS)


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
    render.show_table(_columns(page), page.requests, left="pinned,labels,namespace")
    namespaces = render.count(len(page.namespaces), "namespace")
    held = f"{render.count(page.total, 'request')} in {namespaces} of {page.url}"
    matched = "" if page.matched == page.total else f"; {page.matched:,} match"
    render.say(held + matched)
    end = page.offset + len(page.requests)
    if page.requests and (page.offset or end < page.matched):
        following = f"; --offset {end} shows the next" if end < page.matched else ""
        render.say(f"shown: {page.offset + 1:,} to {end:,} of {page.matched:,}{following}")


def _columns(page: Page) -> render.Columns:
    """Columns with content; sizes at rest and groups only on wide terminals."""
    wide = render.console().width >= _WIDE
    requests = page.requests
    columns: dict[str, tuple[str | Callable[[RequestView], str], bool]] = {
        "request": ("id", True),
        "age": ("created", True),
        "used": ("last_used", True),
        "tokens": ("tokens", True),
        "blocks": ("blocks", True),
        "by group": (
            lambda request: "+".join(f"{blocks:,}" for blocks in request.group_blocks),
            wide and any(len(request.group_blocks) > 1 for request in requests),
        ),
        "size": ("raw_bytes", True),
        "stored": ("stored_bytes", wide and any(request.stored_bytes is not None for request in requests)),
        "hits": (_hits, any(request.hits or request.reused for request in requests)),
        "pinned": ("pinned", any(request.pinned for request in requests)),
        "labels": ("labels", any(request.labels for request in requests)),
        "namespace": ("namespace", len(page.namespaces) > 1),
    }
    return {header: column for header, (column, has_content) in columns.items() if has_content}


def _hits(request: RequestView) -> str:
    """At least one if it was used: the request that used it may be evicted, or may not have ended."""
    return "-" if request.hits is None else f"{max(request.hits, int(request.reused or False)):,}"


def list_requests(
    url: str,
    backend: InspectableBackend,
    selection: Selection,
    *,
    namespace: str | None = None,
    sort: Sort = Sort.CREATED,
    reverse: bool = False,
    offset: int = 0,
    limit: int | None = None,
) -> Page:
    """One page. All heads are read, but only those of the page, and of the pages before it, are kept; and it is asked
    for the use of no others, unless they are sorted or selected by it.

    :param limit: requests of a page; None: all.
    :raises NotFoundError: no such namespace.
    """
    namespaces = chosen_namespaces(backend, namespace)
    counts = Counter[str]()
    by_use = sort in _BY_USE or selection.never_hit
    views = _matching(backend, namespaces, selection, counts, by_use=by_use)
    key, largest_first = _KEYS[sort]
    if reverse:
        largest_first = not largest_first
    if limit is None:
        found = sorted(views, key=key, reverse=largest_first)
    else:
        found = (heapq.nlargest if largest_first else heapq.nsmallest)(offset + limit, views, key=key)
    shown = _with_uses(backend, found[offset:])
    return Page(
        url,
        counts["total"],
        counts["matched"],
        offset,
        shown,
        [NamespaceView(space.id.hex(), space.created, space.identity.fields) for space in namespaces],
    )


def _with_uses(backend: InspectableBackend, views: list[RequestView]) -> list[RequestView]:
    """The same requests with their use, as it is now."""
    wanted: dict[str, list[str]] = {}
    for view in views:
        wanted.setdefault(view.namespace, []).append(view.id)
    uses = {
        (namespace, name): use
        for namespace, names in wanted.items()
        for name, use in zip(names, backend.uses(bytes.fromhex(namespace), names), strict=True)
    }
    return [view.with_use(uses[view.namespace, view.id]) for view in views]


def _matching(
    backend: InspectableBackend,
    namespaces: list[Namespace],
    selection: Selection,
    counts: Counter[str],
    *,
    by_use: bool,
) -> Iterator[RequestView]:
    for namespace in namespaces:
        found = backend.manifests(namespace.id)
        for manifest, use in with_uses(backend, namespace.id, found) if by_use else zip(found, repeat(None)):
            counts["total"] += 1
            if selection.takes(manifest, use):
                counts["matched"] += 1
                yield RequestView.of(namespace.id, manifest, use)
