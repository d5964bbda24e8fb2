"""``persistkv ls``: one page of a store's requests, as values. The JSON output is these, the table is made of them."""

from __future__ import annotations

import enum
import heapq
from collections.abc import Callable, Iterator
from itertools import repeat
from typing import Any

import msgspec

from persistkv.storage.backend import Backend, Namespace
from persistkv_tools.selection import RequestView, Selection, chosen_namespaces, used


class NamespaceView(msgspec.Struct, frozen=True):
    """What all that is stored under it shares."""

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
    """Requests in the namespaces that were looked at."""
    matched: int
    """Of these, the ones that were asked for."""
    offset: int
    """How many of the matched ones stand before this page."""
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


_Key = Callable[[RequestView], tuple[Any, ...]]
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
"""What to compare, and whether the largest stands first."""
_BY_USE = (Sort.USED, Sort.HITS)


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
) -> Page:
    """One page. All heads are read, but only those of the page, and of the pages before it, are kept; and it is asked
    for the use of no others, unless they are sorted or selected by it.

    :param limit: requests of a page; None: all.
    :raises NotFoundError: no such namespace.
    """
    namespaces = chosen_namespaces(backend, namespace)
    seen = _Counts()
    views = seen.matching(backend, namespaces, selection, with_uses=sort in _BY_USE or selection.never_hit)
    key, largest_first = _KEYS[sort]
    if reverse:
        largest_first = not largest_first
    if limit is None:
        found = sorted(views, key=key, reverse=largest_first)
    else:
        found = (heapq.nlargest if largest_first else heapq.nsmallest)(offset + limit, views, key=key)
    shown = _with_uses(backend, found[offset:])
    return Page(url, seen.total, seen.matched, offset, shown, list(map(NamespaceView.of, namespaces)))


def _with_uses(backend: Backend, views: list[RequestView]) -> list[RequestView]:
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


class _Counts:
    def __init__(self) -> None:
        self.total = self.matched = 0

    def matching(
        self, backend: Backend, namespaces: list[Namespace], selection: Selection, *, with_uses: bool
    ) -> Iterator[RequestView]:
        for namespace in namespaces:
            found = backend.manifests(namespace.id)
            uses = used(backend, namespace.id, found) if with_uses else zip(found, repeat(None), strict=False)
            for manifest, use in uses:
                self.total += 1
                if selection.takes(manifest, use):
                    self.matched += 1
                    yield RequestView.of(namespace.id, manifest, use)
