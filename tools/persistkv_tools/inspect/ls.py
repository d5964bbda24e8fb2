"""``persistkv ls``: list the requests of a store, page by page.

The JSON output has the fields of the structs below; the table is made from them, too.
"""

from __future__ import annotations

import enum
import heapq
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from csv import DictWriter
from io import StringIO
from itertools import repeat
from typing import Annotated, Any

import msgspec
import typer
from msgspec.structs import asdict

from persistkv import open_store
from persistkv.errors import ConfigurationError, printable
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
_AT_ONCE = 1024
_Key = Callable[[RequestView], tuple[Any, ...]]
_Context = tuple[str, str, frozenset[tuple[str, str]]]
_Best = Callable[[int, Iterable[RequestView]], list[RequestView]]


class NamespaceView(msgspec.Struct, frozen=True):
    """A namespace with its identity."""

    id: str
    """The identity's digest, hexadecimal."""
    created: float
    identity: dict[str, Any]
    model: str
    """Name or path of the model, as the engine gave it that created the namespace; may be empty."""

    @classmethod
    def of(cls, namespace: Namespace) -> NamespaceView:
        """Return the view of a namespace."""
        identity = namespace.identity
        return cls(namespace.id.hex(), namespace.created, identity.properties, identity.model_name)


class Page(msgspec.Struct, frozen=True):
    """One page of a list of requests."""

    url: str
    total: int
    """Number of requests in the selected namespaces."""
    matched: int
    """Number of these requests that match the selection."""
    rows: int
    """Rows of the list over all pages: ``matched``, or fewer if requests of the same context and labels are merged."""
    offset: int
    """Number of rows before this page."""
    requests: list[RequestView]
    namespaces: list[NamespaceView]
    """Oldest first."""


class Sort(str, enum.Enum):
    """Field that the list is sorted by."""

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
    ids: Annotated[bool, typer.Option("--ids", help="Only the full ids, one in a line.")] = False,
    csv: Annotated[bool, typer.Option("--csv", help="Comma-separated values with a header, sizes in bytes.")] = False,
    json: Json = False,
) -> None:
    """List the requests that a store holds, newest first. The table shows requests of the same context as one row.

    Example: persistkv ls lmdb:///var/cache/kv --sort size --label user=anna
    """
    selection = Selection.parse(label, older_than, newer_than, larger_than, smaller_than, never_hit=never_hit)
    if ids + csv + json > 1:
        raise ConfigurationError("output format", "several", "at most one of --ids, --csv and --json")
    for_programs = ids or csv or json
    shown = (None if for_programs else _PAGE) if limit is None else limit or None
    with open_store(url) as store:
        page = store.requests(
            selection,
            namespace=namespace,
            sort=sort,
            reverse=reverse,
            offset=offset,
            limit=shown,
            merge_copies=not for_programs,
        )
    if json:
        render.print_json(page)
    elif ids:
        render.print_exact("".join(f"{printable(request.id)}\n" for request in page.requests))
    elif csv:
        render.print_exact(_csv(page))
    else:
        _print(page)


def _csv(page: Page) -> str:
    text, columns = StringIO(), [name for name in RequestView.__struct_fields__ if name != "copies"]
    writer = DictWriter(text, [*columns, "model"], extrasaction="ignore", lineterminator="\n")
    writer.writeheader()
    models = {space.id: space.model for space in page.namespaces}
    for request in page.requests:
        blocks, labels = "+".join(map(str, request.group_blocks)), render.format_labels(request.labels)
        writer.writerow(
            {**asdict(request), "group_blocks": blocks, "labels": labels, "model": models[request.namespace]}
        )
    return text.getvalue()


def _print(page: Page) -> None:
    wide, models = render.is_wide(), {space.id: render.format_model(space.model) for space in page.namespaces}
    distinct, shorts = len(set(models.values())), Counter(request.short_id for request in page.requests)
    columns = render.columns(
        "request=short age=created"
        + " used=last_used" * wide
        + " tokens"
        + " blocks by_group" * wide
        + " size=raw_bytes"
        + " stored=stored_bytes" * wide
        + " copies hits pinned labels"
        + " model" * (distinct > 1)
        + " namespace" * (wide and len(models) > distinct),
        short=lambda request: request.short_id if shorts[request.short_id] == 1 else request.id,
        by_group=lambda request: "+".join(f"{n:,}" for n in request.group_blocks) * (len(request.group_blocks) > 1),
        copies=lambda request: f"{request.copies:,}" * (request.copies > 1),
        hits=_hits,
        model=lambda request: models[request.namespace],
    )
    optional = "by group,stored,copies,hits,pinned,labels"
    render.show_table(columns, page.requests, left="pinned,labels,model,namespace", optional=optional)
    held = f"{render.count(page.total, 'request')} in {render.count(len(models), 'namespace')} of {page.url}"
    if distinct == 1 and (name := next(space.model for space in page.namespaces)):
        held += f", of {render.format_model(name)}"
    matched = "" if page.matched == page.total else f"; {page.matched:,} match"
    render.say(held + matched)
    end = page.offset + len(page.requests)
    if page.requests and (page.offset or end < page.rows):
        following = f"; --offset {end} shows the next" if end < page.rows else ""
        render.say(f"shown: {page.offset + 1:,} to {end:,} of {page.rows:,}{following}")


def _hits(request: RequestView) -> str:
    """Return the number of stored requests that reused a row's context, as text; ``-`` if unknown.

    It is at least 1 if the context was ever reused, even by a request that was deleted since.
    """
    if request.hits is None:
        return "-"
    return f"{max(request.hits + request.copies - 1, int(request.reused or False)):,}"


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
    merge_copies: bool = False,
) -> Page:
    """Return one page of the matching requests.

    Reads all manifest heads, but keeps only those up to the end of the page in memory. Reads the use of requests
    outside the page only if ``sort`` or ``selection`` depends on it.

    :param limit: largest number of requests on the page; None: unlimited.
    :param merge_copies: show requests of the same context and labels as one row: the first of them by ``sort``.
    :raises NotFoundError: ``namespace`` matches no namespace, or several.
    """
    namespaces = chosen_namespaces(backend, namespace)
    counts = Counter[str]()
    by_use = sort in (Sort.USED, Sort.HITS) or selection.never_hit
    views = _matching(backend, namespaces, selection, counts, by_use=by_use)
    key, largest_first = _KEYS[sort], (sort in (Sort.ID, Sort.NAMESPACE)) == reverse
    keep, choose = None if limit is None else offset + limit, heapq.nlargest if largest_first else heapq.nsmallest
    copies = Counter[_Context]()

    def best(number: int, views: Iterable[RequestView]) -> list[RequestView]:
        return choose(number, views, key=key)

    if merge_copies:
        views = iter(_merged(views, copies, best, keep))
    found = sorted(views, key=key, reverse=largest_first) if keep is None else best(keep, views)
    shown = [
        msgspec.structs.replace(view.with_use(use), copies=copies[_context(view)] or 1)
        for view, use in _uses(backend, found[offset:])
    ]
    return Page(
        url,
        counts["total"],
        counts["matched"],
        len(copies) or counts["matched"],
        offset,
        shown,
        list(map(NamespaceView.of, namespaces)),
    )


def _context(view: RequestView) -> _Context:
    """Return namespace, context and labels of a request: requests with equal ones share a row in merged lists."""
    return view.namespace, view.context or view.id, frozenset(view.labels.items())


def _merged(
    views: Iterable[RequestView], copies: Counter[_Context], best: _Best, keep: int | None
) -> list[RequestView]:
    """Return one request for each table row: the first in list order. Rows after the first ``keep`` may be missing.

    :param copies: receives the number of requests of each row.
    :param best: returns the given number of requests that come first in the order of the list.
    :param keep: number of rows, from the first, that the result must contain; None: all.
    """
    found: dict[_Context, RequestView] = {}
    for view in views:
        context = _context(view)
        copies[context] += 1
        found[context] = best(1, [found[context], view])[0] if context in found else view
        if keep is not None and len(found) > 2 * keep + _AT_ONCE:  # a later, better request adds its row again
            found = {_context(one): one for one in best(keep, found.values())}
    return list(found.values())


def _uses(backend: InspectableBackend, views: list[RequestView]) -> Iterator[tuple[RequestView, RequestUse | None]]:
    """Yield the requests, in order, with their current use. Reads the use with one call for each namespace."""
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
