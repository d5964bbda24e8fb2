"""Lists of requests, page by page."""

from __future__ import annotations

import enum
from collections.abc import Callable, Mapping
from typing import Any

import msgspec

from persistkv.storage.backend import Backend
from persistkv.storage.inspection.requests import (
    NamespaceSummary,
    RequestView,
    chosen_namespaces,
    copy_group,
    short_ids,
    with_uses,
)
from persistkv.storage.inspection.selection import Selection
from persistkv.storage.stats import RequestUse


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
    namespaces: list[NamespaceSummary]
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


# Sort keys. Each contains the id of the request, so that pages of equal values have a fixed order.
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
# people look for the newest and the largest, but read names from the beginning of the alphabet
_DESCENDING = frozenset(Sort) - {Sort.ID, Sort.NAMESPACE}


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
    namespaces = chosen_namespaces(backend, namespace)
    by_use = sort in (Sort.USED, Sort.HITS) or selection.needs_use
    ttl_s = backend.policy().ttl_s
    total = 0
    views: list[RequestView] = []  # of the requests that match
    names: list[str] = []  # ids of all requests
    for space in namespaces:
        manifests = backend.catalogue(space.id).manifests()
        uses = with_uses(backend, space.id, manifests, needed=by_use)
        for manifest, use in uses:
            total += 1
            names.append(manifest.id)
            if selection.takes(manifest, use, ttl_s):
                view = RequestView.of(space.id, manifest, use, ttl_s)
                views.append(view)

    is_descending = (sort in _DESCENDING) != reverse
    views.sort(key=_KEYS[sort], reverse=is_descending)
    rows = _rows(views, merge_copies=merge_copies)
    end = None if limit is None else offset + limit
    # short ids are unique among all requests: those of a page alone would be ambiguous elsewhere
    shorts = short_ids(names)
    return Page(
        url=url,
        total=total,
        matched=len(views),
        rows=len(rows),
        offset=offset,
        requests=_with_uses_and_copies(backend, rows[offset:end], shorts, ttl_s),
        namespaces=[NamespaceSummary.of(space) for space in namespaces],
    )


def _rows(views: list[RequestView], *, merge_copies: bool) -> list[list[RequestView]]:
    """Return the views in groups, each of which is one row of the list: of copies, or of one
    request."""
    if not merge_copies:
        return [[view] for view in views]
    groups: dict[object, list[RequestView]] = {}
    for view in views:
        place = (view.namespace, copy_group(view))
        group = groups.setdefault(place, [])
        group.append(view)
    return list(groups.values())


def _with_uses_and_copies(
    backend: Backend,
    rows: list[list[RequestView]],
    shorts: Mapping[str, str],
    ttl_s: float | None,
) -> list[RequestView]:
    """Return the first view of each row, with its use, the hits of the oldest copy, which are those
    of all, the number of its copies, and its short id."""
    # one call for each namespace: it reads the uses of many requests in a transaction
    names: dict[str, set[str]] = {}
    for row in rows:
        first = row[0]
        ids = names.setdefault(first.namespace, set())
        ids.add(first.id)
        ids.add(_oldest(row).id)
    uses: dict[tuple[str, str], RequestUse | None] = {}
    for namespace, wanted in names.items():
        ordered = sorted(wanted)
        catalogue = backend.catalogue(bytes.fromhex(namespace))
        found = catalogue.uses(ordered)
        for name, use in zip(ordered, found, strict=True):
            uses[namespace, name] = use

    shown = []
    for row in rows:
        first = row[0]  # the one that the order of the list puts first
        own_use = uses[first.namespace, first.id]
        view = first.with_use(own_use, ttl_s)
        oldest = uses[first.namespace, _oldest(row).id]
        hits = view.hits if oldest is None else oldest.hits
        changed = msgspec.structs.replace(
            view, copies=len(row), short_id=shorts[view.id], hits=hits
        )
        shown.append(changed)
    return shown


def _oldest(row: list[RequestView]) -> RequestView:
    """Return the oldest copy of a row: it alone counts the hits of later requests."""
    return min(row, key=lambda view: view.created)
