"""What the commands show, as values: the JSON output is these, the tables are made of them."""

from __future__ import annotations

from typing import Any

import msgspec

from persistkv.storage.backend import Backend, Namespace
from persistkv.storage.manifest import RequestManifest


class RequestView(msgspec.Struct, frozen=True):
    """One request's whole context."""

    id: str
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
    def of(cls, manifest: RequestManifest) -> RequestView:
        """The view of a manifest's head."""
        return cls(
            manifest.id,
            manifest.created,
            manifest.tokens,
            manifest.blocks,
            manifest.group_blocks,
            manifest.raw_bytes,
            manifest.ordered,
            manifest.labels,
        )


class NamespaceView(msgspec.Struct, frozen=True):
    """What is stored under one identity."""

    id: str
    """The identity's digest, hexadecimal."""
    created: float
    identity: dict[str, Any]
    requests: list[RequestView]
    """Oldest first."""


class StoreView(msgspec.Struct, frozen=True):
    """Totals of a store."""

    url: str
    namespaces: int
    requests: int
    packs: int
    blocks: int
    raw_bytes: int
    stored_bytes: int
    codec_ratio: float | None
    """Raw bytes per stored byte; None for an empty store."""
    disk_bytes: int
    capacity: int | None


def list_namespaces(backend: Backend) -> list[NamespaceView]:
    """All namespaces with their requests, oldest first."""
    found = [_namespace(backend, namespace) for namespace in backend.namespaces()]
    return sorted(found, key=lambda view: (view.created, view.id))


def _namespace(backend: Backend, namespace: Namespace) -> NamespaceView:
    requests = sorted(map(RequestView.of, backend.manifests(namespace.id)), key=lambda view: (view.created, view.id))
    return NamespaceView(namespace.id.hex(), namespace.created, namespace.identity.fields, requests)


def store_totals(url: str, backend: Backend) -> StoreView:
    """The totals of a store."""
    stats = backend.stats()
    return StoreView(
        url,
        sum(1 for _ in backend.namespaces()),
        stats.requests,
        stats.packs,
        stats.blocks,
        stats.raw_bytes,
        stats.stored_bytes,
        round(stats.raw_bytes / stats.stored_bytes, 4) if stats.stored_bytes else None,
        stats.disk_bytes,
        stats.capacity,
    )
