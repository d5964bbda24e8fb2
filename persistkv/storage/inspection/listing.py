"""Lists of requests, page by page."""

from __future__ import annotations

import enum
from collections.abc import Callable, Mapping
from operator import attrgetter
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


_SortKey = Callable[[RequestView], tuple[Any, ...]]
# Sort keys. Each contains the id of the request, so that pages of equal values have a fixed order.
_KEYS: dict[Sort, _SortKey] = {
    Sort.CREATED: attrgetter("created", "id"),
    Sort.USED: lambda view: (view.last_used or 0.0, view.created, view.id),
    Sort.TOKENS: attrgetter("tokens", "created", "id"),
    Sort.BLOCKS: attrgetter("blocks", "created", "id"),
    Sort.SIZE: attrgetter("raw_bytes", "created", "id"),
    Sort.HITS: lambda view: (view.hits or 0, view.last_used or 0.0, view.id),
    Sort.ID: attrgetter("id", "namespace"),
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
    needs_use = sort in (Sort.USED, Sort.HITS) or selection.needs_use
    ttl_s = backend.policy().ttl_s
    all_ids: list[str] = []
    views: list[RequestView] = []  # views of the requests that match
    for space in namespaces:
        manifests = backend.catalogue(space.id).manifests()
        uses = with_uses(backend, space.id, manifests, needed=needs_use)
        for manifest, use in uses:
            all_ids.append(manifest.id)
            if selection.takes(manifest, use, ttl_s):
                view = RequestView.of(space.id, manifest, use, ttl_s)
                views.append(view)

    # ``reverse`` turns the usual direction of this sort around
    is_descending = (sort in _DESCENDING) != reverse
    views.sort(key=_KEYS[sort], reverse=is_descending)
    # each group is a row of the list
    groups = _groups(views, merge_copies=merge_copies)
    end = None if limit is None else offset + limit
    groups_of_page = groups[offset:end]
    # make short ids unique among all requests: other commands could not find a request by an id
    # that is unique on this page only
    shorts = short_ids(all_ids)
    return Page(
        url=url,
        total=len(all_ids),
        matched=len(views),
        rows=len(groups),
        offset=offset,
        requests=_with_uses_and_copies(backend, groups_of_page, shorts, ttl_s),
        namespaces=[NamespaceSummary.of(space) for space in namespaces],
    )


def _groups(
    views: list[RequestView],
    *,
    merge_copies: bool,
) -> list[list[RequestView]]:
    """Return the views in groups, each of which is one row of the list: the copies of one request,
    or a single view."""
    if not merge_copies:
        return [[view] for view in views]
    groups: dict[object, list[RequestView]] = {}
    for view in views:
        shared = (view.namespace, copy_group(view))
        group = groups.setdefault(shared, [])
        group.append(view)
    return list(groups.values())


def _with_uses_and_copies(
    backend: Backend,
    groups: list[list[RequestView]],
    shorts: Mapping[str, str],
    ttl_s: float | None,
) -> list[RequestView]:
    """Return the first view of each group, with its use, the hits of the whole group, the number of
    its copies, and its short id."""
    uses = _uses_of(backend, groups)
    shown = []
    for group in groups:
        first = group[0]  # the request that the order of the list puts first
        own_use = uses[first.namespace, first.id]
        view = first.with_use(own_use, ttl_s)
        # a hit counts for each copy that was stored before the hit, so the oldest copy has all hits
        oldest_use = uses[first.namespace, _oldest(group).id]
        hits = view.hits if oldest_use is None else oldest_use.hits
        changed = msgspec.structs.replace(
            view,
            copies=len(group),
            short_id=shorts[view.id],
            hits=hits,
        )
        shown.append(changed)
    return shown


def _uses_of(
    backend: Backend,
    groups: list[list[RequestView]],
) -> dict[tuple[str, str], RequestUse | None]:
    """Return the uses of the first and of the oldest view of each group, by namespace and id."""
    ids_by_namespace: dict[str, set[str]] = {}
    for group in groups:
        first = group[0]
        ids = ids_by_namespace.setdefault(first.namespace, set())
        ids.add(first.id)
        ids.add(_oldest(group).id)
    uses: dict[tuple[str, str], RequestUse | None] = {}
    # one call for each namespace, which reads the uses of many requests in a transaction
    for namespace, ids in ids_by_namespace.items():
        ordered_ids = sorted(ids)
        catalogue = backend.catalogue(bytes.fromhex(namespace))
        found = catalogue.uses(ordered_ids)
        for request, use in zip(ordered_ids, found, strict=True):
            uses[namespace, request] = use
    return uses


def _oldest(group: list[RequestView]) -> RequestView:
    """Return the oldest copy of a group."""
    return min(group, key=attrgetter("created"))
