"""Backends by URL scheme. All are plug-ins, those that come with persistkv too: the core names none of them."""

from __future__ import annotations

from persistkv.config import StoreUrl
from persistkv.registry import Registry
from persistkv.storage.backend import Backend

BACKENDS = Registry[Backend]("persistkv.backends", "url scheme", Backend)


def open_backend(url: str, *, read_only: bool = False) -> Backend:
    """Open the store that a URL names; errors as in ``Registry.get`` and ``Backend.open``."""
    parsed = StoreUrl.parse(url)
    return BACKENDS.get(parsed.scheme).open(parsed, read_only=read_only)
