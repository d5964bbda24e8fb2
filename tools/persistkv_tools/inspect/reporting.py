"""``persistkv report``: what its page shows, as values.

A store keeps no history of itself. What is said of the past is read from the requests that are there still: what each
of them added to those before it, and what it found.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator
from typing import NamedTuple

import msgspec

from persistkv.storage.backend import Backend, Namespace
from persistkv.storage.manifest import RequestManifest
from persistkv_tools.catalogue import all_keys
from persistkv_tools.inspect.totals import StoreTotals, store_totals
from persistkv_tools.inspect.tree import TreeNode, prefix_tree
from persistkv_tools.inspect.watching import EngineView, Watch
from persistkv_tools.selection import RequestView

_PERIODS = 48
_LARGEST = 10
_NODES = 60


class Period(msgspec.Struct):
    """A piece of the past; all are of one length."""

    start: float
    """Seconds since the epoch."""
    requests: int = 0
    """Made in it, and there still."""
    blocks: int = 0
    """Of these."""
    found_blocks: int = 0
    """Of these, those that an earlier request of the store had named."""
    added_bytes: int = 0
    """Raw bytes of the others."""
    held_bytes: int = 0
    """Raw bytes of all that was added up to the end of it."""

    @property
    def hit_rate(self) -> float | None:
        """Share of the blocks that were there already."""
        return self.found_blocks / self.blocks if self.blocks else None


class LargestContexts(msgspec.Struct, frozen=True):
    """The largest request, and what shares its beginning."""

    request: RequestView
    group: int
    """By whose keys the tree goes."""
    tree: TreeNode


class ReportData(msgspec.Struct, frozen=True):
    """All that the page shows."""

    url: str
    made: float
    """Seconds since the epoch."""
    totals: StoreTotals
    periods: list[Period]
    """Empty where there is no request."""
    largest: list[RequestView]
    contexts: LargestContexts | None
    engines: list[EngineView]


class _Found(NamedTuple):
    namespace: Namespace
    manifest: RequestManifest


def report_data(url: str, backend: Backend) -> ReportData:
    """Read it. The keys of all requests are read once: some 150 bytes of memory for each block.

    :raises StoreError: the medium failed.
    """
    totals = store_totals(url, backend)
    found = [_Found(space, manifest) for space in backend.namespaces() for manifest in backend.manifests(space.id)]
    found.sort(key=lambda request: (request.manifest.created, request.manifest.id))
    by_size = sorted(found, key=lambda request: -request.manifest.raw_bytes)[:_LARGEST]
    largest = [_viewed(backend, request) for request in by_size]
    contexts = _contexts(backend, by_size[0]) if by_size else None
    engines = Watch(url, backend).look().engines
    return ReportData(url, time.time(), totals, _periods(backend, found), largest, contexts, engines)


def _contexts(backend: Backend, found: _Found) -> LargestContexts:
    namespace, manifest = found.namespace.id, found.manifest
    group = max(range(len(manifest.group_blocks)), key=manifest.group_blocks.__getitem__, default=0)
    names = (head.id for head in backend.manifests(namespace))
    tree = prefix_tree(backend, namespace, names, manifest.id, group=group, node_limit=_NODES)
    return LargestContexts(_viewed(backend, found), group, tree)


def _viewed(backend: Backend, found: _Found) -> RequestView:
    namespace, manifest = found.namespace.id, found.manifest
    return RequestView.of(namespace, manifest, backend.uses(namespace, [manifest.id])[0])


def _periods(backend: Backend, found: list[_Found]) -> list[Period]:
    """:param found: in the order of their creation."""
    if not found:
        return []
    first, last = found[0].manifest.created, found[-1].manifest.created
    length = max((last - first) / _PERIODS, 1.0)
    periods = [Period(first + number * length) for number in range(int((last - first) / length) + 1)]
    for request, known in _with_known(backend, found):
        period = periods[min(int((request.created - first) / length), len(periods) - 1)]
        period.requests += 1
        period.blocks += request.blocks
        period.found_blocks += known
        period.added_bytes += request.raw_bytes * (request.blocks - known) // max(1, request.blocks)
    held = 0
    for period in periods:
        held += period.added_bytes
        period.held_bytes = held
    return periods


def _with_known(backend: Backend, found: Iterable[_Found]) -> Iterator[tuple[RequestManifest, int]]:
    """Each request that reads, and how many of its blocks an earlier one of its namespace had named."""
    named: dict[bytes, set[bytes]] = {}
    for namespace, manifest in found:
        keys = backend.manifest_keys(namespace.id, manifest.id)
        if keys is None:
            continue
        seen = named.setdefault(namespace.id, set())
        own = all_keys(keys)
        known = sum(key in seen for key in own)
        seen.update(own)
        yield manifest, known
