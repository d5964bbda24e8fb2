"""What the tests of stores share: ends of requests, manifests, rows, faults."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from persistkv.storage.backend import ReadSpan
from persistkv.storage.extensions import InspectableBackend
from persistkv.storage.format.manifest import RequestManifest
from persistkv.storage.records import RequestEnd
from persistkv.storage.store import Store
from persistkv.testing import FaultyBackend


def end(request: str, *chains: list[bytes], tokens: int | None = None, **more: Any) -> RequestEnd:
    count = 16 * len(chains[0]) if tokens is None else tokens
    return RequestEnd(request, f"manifest-{request}", chains, count, 16, **more)


def manifests(store: Store) -> list[RequestManifest]:
    return sorted(inspectable(store).manifests(store.namespace), key=lambda manifest: manifest.id)


def refill(store: Store) -> np.ndarray[Any, Any]:
    """Wipe the rows, hand over what they held."""
    before = store.rows.array.copy()
    store.rows.array[:] = 0
    return before


def inspectable(store: Store) -> InspectableBackend:
    """The store's backend, which lists its content."""
    backend = store.catalogue.backend
    assert isinstance(backend, InspectableBackend)
    return backend


def inject_faults(store: Store) -> FaultyBackend[InspectableBackend]:
    """Wrap the store's backend."""
    backend = FaultyBackend.of(inspectable(store))
    store.catalogue.backend = backend
    return backend


def flip_reads(backend: FaultyBackend[InspectableBackend], pack_id: bytes | None = None) -> None:
    """Have each read flip a bit, of this pack if one is named."""

    def flip(filled: list[bool], namespace: bytes, spans: Sequence[ReadSpan]) -> list[bool]:
        for span in [span for span in spans if pack_id in (None, span.pack_id)][:1]:
            span.buffers[0][11] ^= 1
        return filled

    backend.after("read", flip)
