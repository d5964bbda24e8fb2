"""``persistkv ls``: list the requests of a store, page by page.

The JSON output has the fields of the structs below; the table is made from them, too.
"""

from __future__ import annotations

import enum
from collections import Counter
from collections.abc import Callable
from csv import DictWriter
from io import StringIO
from itertools import repeat
from typing import Annotated, Any

import msgspec
import typer
from msgspec.structs import asdict

from persistkv import open_store
from persistkv.errors import ConfigurationError, printable
from persistkv.storage.backend import Backend, Namespace
from persistkv.storage.stats import RequestUse
from persistkv_tools import options, render
from persistkv_tools.options import RequestView, Selection

_PAGE = 50
_SORT_HELP = (
    "Newest or largest first: created, used, tokens, blocks, size, hits. "
    "Alphabetically: id, namespace."
)
_LIMIT_HELP = (
    f"Requests to show; 0: all. By default {_PAGE} in the table, otherwise all."
)


class NamespaceView(msgspec.Struct, frozen=True):
    """A namespace with its identity."""

    id: str
    """Id of the namespace: the digest of its identity, hexadecimal."""
    created: float
    identity: dict[str, Any]
    model: str
    """Name or path of the model, as given by the engine that created the namespace; may be
    empty."""

    @classmethod
    def of(cls, namespace: Namespace) -> NamespaceView:
        """Return the view of a namespace."""
        identity = namespace.identity
        return cls(
            namespace.id.hex(),
            namespace.created,
            identity.properties,
            identity.model_name,
        )


class Page(msgspec.Struct, frozen=True):
    """One page of a list of requests."""

    url: str
    total: int
    """Number of requests in the selected namespaces."""
    matched: int
    """Number of requests in the selected namespaces that match the filters."""
    rows: int
    """Rows of the list over all pages: ``matched``, or fewer if requests of the same context and
    labels are merged."""
    offset: int
    """Number of rows of the list before this page."""
    requests: list[RequestView]
    namespaces: list[NamespaceView]
    """The selected namespaces, oldest first."""


class Sort(enum.StrEnum):
    """Field that the list is sorted by."""

    CREATED = "created"
    USED = "used"
    TOKENS = "tokens"
    BLOCKS = "blocks"
    SIZE = "size"
    HITS = "hits"
    ID = "id"
    NAMESPACE = "namespace"


_KEYS: dict[Sort, Callable[[RequestView], tuple[Any, ...]]] = {
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
    url: options.Url,
    sort: Annotated[
        Sort, typer.Option(metavar="FIELD", help=_SORT_HELP)
    ] = Sort.CREATED,
    reverse: Annotated[
        bool, typer.Option("--reverse", help="Reverse the order.")
    ] = False,
    namespace: options.InNamespace = None,
    label: options.Labels = None,
    older_than: options.OlderThan = None,
    newer_than: options.NewerThan = None,
    larger_than: options.LargerThan = None,
    smaller_than: options.SmallerThan = None,
    never_hit: options.NeverHit = False,
    limit: Annotated[
        int | None,
        typer.Option(metavar="N", min=0, help=_LIMIT_HELP, show_default=False),
    ] = None,
    offset: Annotated[
        int, typer.Option(metavar="N", min=0, help="Requests to skip.")
    ] = 0,
    ids: Annotated[
        bool, typer.Option("--ids", help="Print only the full ids, one per line.")
    ] = False,
    csv: Annotated[
        bool,
        typer.Option(
            "--csv", help="Print comma-separated values with a header; sizes in bytes."
        ),
    ] = False,
    json: options.Json = False,
) -> None:
    """List the requests of a store, newest first. Requests with the same context and labels are one
    row of the table.

    Example: persistkv ls lmdb:///var/cache/kv --sort size --label user=anna
    """
    selection = Selection.parse(
        label, older_than, newer_than, larger_than, smaller_than, never_hit=never_hit
    )
    if ids + csv + json > 1:
        raise ConfigurationError(
            "output format", "several", "at most one of --ids, --csv and --json"
        )
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
        render.print_exact(
            "".join(f"{printable(request.id)}\n" for request in page.requests)
        )
    elif csv:
        render.print_exact(_csv(page))
    else:
        _print(page)


def _csv(page: Page) -> str:
    text, columns = (
        StringIO(),
        [name for name in RequestView.__struct_fields__ if name != "copies"],
    )
    writer = DictWriter(
        text, [*columns, "model"], extrasaction="ignore", lineterminator="\n"
    )
    writer.writeheader()
    models = {space.id: space.model for space in page.namespaces}
    for request in page.requests:
        blocks, labels = (
            "+".join(map(str, request.group_blocks)),
            render.format_labels(request.labels),
        )
        writer.writerow(
            {
                **asdict(request),
                "group_blocks": blocks,
                "labels": labels,
                "model": models[request.namespace],
            }
        )
    return text.getvalue()


def _print(page: Page) -> None:
    wide, models = (
        render.is_wide(),
        {space.id: render.format_model(space.model) for space in page.namespaces},
    )
    distinct, shorts = (
        len(set(models.values())),
        Counter(request.short_id for request in page.requests),
    )
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
        short=lambda request: (
            request.short_id if shorts[request.short_id] == 1 else request.id
        ),
        by_group=lambda request: (
            "+".join(f"{n:,}" for n in request.group_blocks)
            * (len(request.group_blocks) > 1)
        ),
        copies=lambda request: f"{request.copies:,}" * (request.copies > 1),
        hits=_hits,
        model=lambda request: models[request.namespace],
    )
    optional = "by group,stored,copies,hits,pinned,labels"
    render.show_table(
        columns, page.requests, left="pinned,labels,model,namespace", optional=optional
    )
    held = (
        f"{render.count(page.total, 'request')} in {render.count(len(models), 'namespace')} "
        f"of {page.url}"
    )
    if distinct == 1 and (name := next(space.model for space in page.namespaces)):
        held += f", model {render.format_model(name)}"
    matched = (
        "" if page.matched == page.total else f"; {page.matched:,} match the filters"
    )
    render.say(held + matched)
    end = page.offset + len(page.requests)
    if page.requests and (page.offset or end < page.rows):
        following = f"; next page: --offset {end}" if end < page.rows else ""
        render.say(f"rows {page.offset + 1:,} to {end:,} of {page.rows:,}{following}")


def _hits(request: RequestView) -> str:
    """Return the number of requests that reused a row's context, its further copies included; ``-``
    if unknown.

    It is at least 1 if the context was ever reused, even by a deleted request.
    """
    if request.hits is None:
        return "-"
    return f"{max(request.hits + request.copies - 1, int(request.reused or False)):,}"


def list_requests(
    url: str,
    backend: Backend,
    selection: Selection,
    *,
    namespace: str | None = None,
    sort: Sort = Sort.CREATED,
    reverse: bool = False,
    offset: int = 0,
    limit: int | None = None,
    merge_copies: bool = False,
) -> Page:
    """Return one page of the matching requests; parameters as in ``StoreHandle.requests``.

    Reads the use of requests outside the page only if ``sort`` or ``selection`` depends on it.
    """
    namespaces = options.chosen_namespaces(backend, namespace)
    by_use = sort in (Sort.USED, Sort.HITS) or selection.never_hit
    total, views = 0, list[RequestView]()
    for space in namespaces:
        found = backend.catalogue(space.id).manifests()
        for manifest, use in (
            options.with_uses(backend, space.id, found)
            if by_use
            else zip(found, repeat(None))
        ):
            total += 1
            if selection.takes(manifest, use):
                views.append(RequestView.of(space.id, manifest, use))
    views.sort(key=_KEYS[sort], reverse=(sort in (Sort.ID, Sort.NAMESPACE)) == reverse)
    rows: dict[object, list[RequestView]] = {}
    for number, view in enumerate(views):
        rows.setdefault(
            (view.namespace, options.row(view)) if merge_copies else number, []
        ).append(view)
    shown = list(rows.values())[offset:][:limit]
    uses: dict[tuple[str, str], RequestUse | None] = {}
    for space_id in {copies[0].namespace for copies in shown}:
        names = [view.id for view, *_ in shown if view.namespace == space_id]
        found_uses = backend.catalogue(bytes.fromhex(space_id)).uses(names)
        uses |= {
            (space_id, name): use for name, use in zip(names, found_uses, strict=True)
        }
    requests = [
        msgspec.structs.replace(
            view.with_use(uses[view.namespace, view.id]), copies=1 + len(others)
        )
        for view, *others in shown
    ]
    return Page(
        url,
        total,
        len(views),
        len(rows),
        offset,
        requests,
        list(map(NamespaceView.of, namespaces)),
    )
