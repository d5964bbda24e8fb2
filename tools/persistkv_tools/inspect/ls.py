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

from persistkv import open_store
from persistkv.storage.backend import Namespace
from persistkv.storage.extensions import InspectableBackend, RequestUse
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

    @classmethod
    def of(cls, namespace: Namespace) -> NamespaceView:
        """The view of a namespace."""
        return cls(namespace.id.hex(), namespace.created, namespace.identity.fields)


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


_KEYS: dict[Sort, _Key] = {
    Sort.CREATED: lambda view: (view.created, view.id),
    Sort.USED: lambda view: (view.last_used or 0.0, view.created, view.id),
    Sort.TOKENS: lambda view: (view.tokens, view.created, view.id),
    Sort.BLOCKS: lambda view: (view.blocks, view.created, view.id),
    Sort.SIZE: lambda view: (view.raw_bytes, view.created, view.id),
    Sort.HITS: lambda view: (view.hits or 0, view.last_used or 0.0, view.id),
    Sort.ID: lambda view: (view.id, view.namespace),
    Sort.NAMESPACE: lambda view: (view.namespace, -view.created, view.id),
}


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
    with open_store(url) as store:
        page = store.requests(selection, namespace=namespace, sort=sort, reverse=reverse, offset=offset, limit=shown)
    if json:
        render.print_json(page)
    else:
        _print(page)


def _print(page: Page) -> None:
    wide = render.console().width >= _WIDE
    columns = render.columns(
        "request=id age=created used=last_used tokens blocks"
        + " by_group size=raw_bytes stored=stored_bytes" * wide
        + " size=raw_bytes" * (not wide)
        + " hits pinned labels"
        + " namespace" * (len(page.namespaces) > 1),
        by_group=lambda request: "+".join(f"{n:,}" for n in request.group_blocks) * (len(request.group_blocks) > 1),
        hits=_hits,
    )
    optional = "by group,stored,hits,pinned,labels"
    render.show_table(columns, page.requests, left="pinned,labels,namespace", optional=optional)
    namespaces = render.count(len(page.namespaces), "namespace")
    held = f"{render.count(page.total, 'request')} in {namespaces} of {page.url}"
    matched = "" if page.matched == page.total else f"; {page.matched:,} match"
    render.say(held + matched)
    end = page.offset + len(page.requests)
    if page.requests and (page.offset or end < page.matched):
        following = f"; --offset {end} shows the next" if end < page.matched else ""
        render.say(f"shown: {page.offset + 1:,} to {end:,} of {page.matched:,}{following}")


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
    by_use = sort in (Sort.USED, Sort.HITS) or selection.never_hit
    views = _matching(backend, namespaces, selection, counts, by_use=by_use)
    key, largest_first = _KEYS[sort], (sort in (Sort.ID, Sort.NAMESPACE)) == reverse
    if limit is None:
        found = sorted(views, key=key, reverse=largest_first)
    else:
        found = (heapq.nlargest if largest_first else heapq.nsmallest)(offset + limit, views, key=key)
    shown = [view.with_use(use) for view, use in _uses(backend, found[offset:])]
    return Page(
        url,
        counts["total"],
        counts["matched"],
        offset,
        shown,
        list(map(NamespaceView.of, namespaces)),
    )


def _uses(backend: InspectableBackend, views: list[RequestView]) -> Iterator[tuple[RequestView, RequestUse | None]]:
    """Requests with their use, as it is now, read with one call for each namespace; in their order."""
    uses: dict[str, Iterator[RequestUse | None]] = {}
    for namespace in {view.namespace for view in views}:
        names = [view.id for view in views if view.namespace == namespace]
        uses[namespace] = iter(backend.uses(bytes.fromhex(namespace), names))
    for view in views:
        yield view, next(uses[view.namespace])


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
