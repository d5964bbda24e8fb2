"""``persistkv ls``: one page of a store's requests, as values. The JSON output is these, the table is made of them."""

from __future__ import annotations

import enum
import heapq
from collections.abc import Callable, Iterator
from typing import Any

import msgspec

from persistkv.storage.backend import Backend, Namespace
from persistkv.storage.manifest import RequestManifest
from persistkv_tools.selection import Selection, chosen_namespaces


class RequestView(msgspec.Struct, frozen=True):
    """One request's whole context."""

    id: str
    namespace: str
    """The namespace's id, hexadecimal."""
    created: float
    """Seconds since the epoch."""
    tokens: int
    blocks: int
    group_blocks: tuple[int, ...]
    raw_bytes: int
    """Bytes of these blocks before the codec; what requests share is counted for each."""
    ordered: bool
    labels: dict[str, str]

    @classmethod
    def of(cls, namespace: bytes, manifest: RequestManifest) -> RequestView:
        """The view of a manifest's head."""
        return cls(
            manifest.id,
            namespace.hex(),
            manifest.created,
            manifest.tokens,
            manifest.blocks,
            manifest.group_blocks,
            manifest.raw_bytes,
            manifest.ordered,
            manifest.labels,
        )


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
    TOKENS = "tokens"
    BLOCKS = "blocks"
    SIZE = "size"
    ID = "id"
    NAMESPACE = "namespace"


_Key = Callable[[RequestView], tuple[Any, ...]]
_KEYS: dict[Sort, tuple[_Key, bool]] = {
    Sort.CREATED: (lambda view: (view.created, view.id), True),
    Sort.TOKENS: (lambda view: (view.tokens, view.created, view.id), True),
    Sort.BLOCKS: (lambda view: (view.blocks, view.created, view.id), True),
    Sort.SIZE: (lambda view: (view.raw_bytes, view.created, view.id), True),
    Sort.ID: (lambda view: (view.id, view.namespace), False),
    Sort.NAMESPACE: (lambda view: (view.namespace, -view.created, view.id), False),
}
"""What to compare, and whether the largest stands first."""


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
    """One page. All heads are read, but only those of the page, and of the pages before it, are kept.

    :param limit: requests of a page; None: all.
    :raises NotFoundError: no such namespace.
    """
    namespaces = chosen_namespaces(backend, namespace)
    seen = _Counts()
    views = seen.matching(backend, namespaces, selection)
    key, largest_first = _KEYS[sort]
    if reverse:
        largest_first = not largest_first
    if limit is None:
        found = sorted(views, key=key, reverse=largest_first)
    else:
        found = (heapq.nlargest if largest_first else heapq.nsmallest)(offset + limit, views, key=key)
    return Page(url, seen.total, seen.matched, offset, found[offset:], list(map(NamespaceView.of, namespaces)))


class _Counts:
    def __init__(self) -> None:
        self.total = self.matched = 0

    def matching(self, backend: Backend, namespaces: list[Namespace], selection: Selection) -> Iterator[RequestView]:
        for namespace in namespaces:
            for manifest in backend.manifests(namespace.id):
                self.total += 1
                if selection.takes(manifest):
                    self.matched += 1
                    yield RequestView.of(namespace.id, manifest)
