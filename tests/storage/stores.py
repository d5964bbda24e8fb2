"""What the tests of stores share: ends of requests, manifests, rows, a backend that fails."""

from __future__ import annotations

from typing import Any

import numpy as np

from persistkv.errors import StoreError, StoreFullError
from persistkv.storage.backend import Backend, CommitBatch, CommitResult
from persistkv.storage.identity import Identity
from persistkv.storage.manifest import RequestManifest
from persistkv.storage.records import RequestEnd
from persistkv.storage.store import Store


def end(request: str, *chains: list[bytes], tokens: int | None = None, **more: Any) -> RequestEnd:
    count = 16 * len(chains[0]) if tokens is None else tokens
    return RequestEnd(request, f"manifest-{request}", chains, count, 16, **more)


def manifests(store: Store) -> list[RequestManifest]:
    return sorted(store.medium.backend.manifests(store.namespace), key=lambda manifest: manifest.id)


def refill(store: Store) -> np.ndarray[Any, Any]:
    """Wipe the rows, hand over what they held."""
    before = store.rows.array.copy()
    store.rows.array[:] = 0
    return before


class FailingBackend(Backend):
    """Passes everything on, but what it is told to fail."""

    def __init__(self, inner: Backend) -> None:
        self.inner = inner
        self.commit_errors: list[StoreError] = []
        self.max_packs: int | None = None
        self.read_error: StoreError | None = None
        self.flip = False

    @classmethod
    def open(cls, *args: Any, **kwargs: Any) -> Backend:
        raise NotImplementedError

    def commit(self, namespace: bytes, batch: CommitBatch) -> CommitResult:
        if self.commit_errors:
            raise self.commit_errors.pop(0)
        if self.max_packs is not None and len(batch.packs) > self.max_packs:
            raise StoreFullError("too many packs")
        return self.inner.commit(namespace, batch)

    def read(self, namespace: bytes, spans: Any) -> list[bool]:
        if self.read_error:
            raise self.read_error
        filled = self.inner.read(namespace, spans)
        if self.flip:
            spans[0].buffers[0][11] ^= 1
        return filled

    def namespaces(self) -> Any:
        return self.inner.namespaces()

    def open_namespace(self, identity: Identity) -> Any:
        return self.inner.open_namespace(identity)

    def changes(self, namespace: bytes, cursor: bytes | None) -> Any:
        return self.inner.changes(namespace, cursor)

    def manifests(self, namespace: bytes) -> Any:
        return self.inner.manifests(namespace)

    def manifest_keys(self, namespace: bytes, manifest_id: str) -> Any:
        return self.inner.manifest_keys(namespace, manifest_id)

    def stats(self) -> Any:
        return self.inner.stats()

    def close(self) -> None:
        self.inner.close()
