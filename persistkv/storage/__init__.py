"""Durable storage: formats, identity, catalogue, backends, and the store that combines them. Does
not import torch.

The scheme of a store's URL selects the backend. All backends are plug-ins, including those shipped
with persistkv.
"""

from __future__ import annotations

from persistkv.config import Registry, StoreUrl
from persistkv.storage.backend import Backend

BACKENDS = Registry[Backend]("persistkv.backends", "url scheme", Backend)


def open_backend(url: str, *, read_only: bool = False) -> Backend:
    """Open the store at a URL, with the backend of the URL's scheme; create it if it is absent and
    not ``read_only``.

    :raises ConfigurationError: the URL or an option is invalid, or no working backend is installed
        for the scheme.
    :raises StoreError: as ``Backend.open`` raises it.
    """
    parsed = StoreUrl.parse(url)
    return BACKENDS.get(parsed.scheme).open(parsed, read_only=read_only)
