"""``persistkv pin`` and ``unpin``."""

from __future__ import annotations

from persistkv.storage.backend import CommitBatch
from persistkv_tools import render
from persistkv_tools.options import InNamespace, Json, Request, Url, opened
from persistkv_tools.selection import find_request


def pin(url: Url, request: Request, namespace: InNamespace = None, json: Json = False) -> None:
    """Keep a context: neither it nor its packs are evicted, nor do they expire, until it is unpinned.

    Example: persistkv pin lmdb:///var/cache/kv 0c4de6a0
    """
    _set(url, request, namespace, json, pinned=True)


def unpin(url: Url, request: Request, namespace: InNamespace = None, json: Json = False) -> None:
    """Let a context be evicted again.

    Example: persistkv unpin lmdb:///var/cache/kv 0c4de6a0
    """
    _set(url, request, namespace, json, pinned=False)


def _set(url: str, request: str, namespace: str | None, json: bool, *, pinned: bool) -> None:
    with opened(url, writable=True) as backend:
        found = find_request(backend, request, namespace)
        backend.commit(found.namespace.id, CommitBatch(pins=[(found.manifest.id, pinned)]))
    name, space = found.manifest.id, found.namespace.id.hex()
    if json:
        render.print_json({"url": url, "request": name, "namespace": space, "pinned": pinned})
    else:
        render.say(f"{'pinned' if pinned else 'unpinned'} {name} (namespace {space[:8]})")
