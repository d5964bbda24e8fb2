"""Bytes at rest: formats, identity, catalogue, backends, and the store that joins them. No torch.

Backends are opened by URL scheme. All of them are plug-ins, including those shipped with persistkv.
"""

from __future__ import annotations

from persistkv.config import Registry, StoreUrl
from persistkv.errors import UnsupportedStoreError
from persistkv.storage.backend import Backend
from persistkv.storage.extensions import InspectableBackend

BACKENDS = Registry[Backend]("persistkv.backends", "url scheme", Backend)


def open_backend(url: str, *, read_only: bool = False) -> Backend:
    """Open the store at a URL; raises the errors of ``Registry.get`` and ``Backend.open``."""
    parsed = StoreUrl.parse(url)
    return BACKENDS.get(parsed.scheme).open(parsed, read_only=read_only)


def open_inspectable(url: str, *, read_only: bool = False) -> InspectableBackend:
    """Open the store at a URL for tools, which list its content. Raises the errors of ``open_backend``, too.

    :raises UnsupportedStoreError: the driver of this scheme cannot list its content.
    """
    backend = open_backend(url, read_only=read_only)
    if not isinstance(backend, InspectableBackend):
        backend.close()
        raise UnsupportedStoreError(url, "list requests")
    return backend
