"""The loss of a pack: the requests that name it are shortened to what stands before it.

Very many requests may share a pack. They are shortened in commits of ``SHORTENED_AT_ONCE`` manifests, so that none of
them takes long; the last commit deletes the pack.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import NamedTuple

from persistkv.storage.backend import CommitBatch, ManifestWrite
from persistkv.storage.ending import ManifestMaker
from persistkv.storage.extensions import InspectableBackend
from persistkv.storage.manifest import ManifestKeys, RequestManifest

SHORTENED_AT_ONCE = 64


class NamedRequest(NamedTuple):
    """A request, as a store knows it."""

    manifest: RequestManifest
    keys: ManifestKeys
    pinned: bool


def read_requests(
    backend: InspectableBackend, namespace: bytes, heads: Sequence[RequestManifest]
) -> list[NamedRequest]:
    """Read the keys of requests; those that do not read are left out.

    :raises StoreError: the medium failed.
    """
    names = [head.id for head in heads]
    rows = zip(heads, backend.manifest_keys(namespace, names), backend.uses(namespace, names), strict=True)
    return [NamedRequest(head, keys, use is not None and use.pinned) for head, keys, use in rows if keys is not None]


def shortened(requests: Iterable[NamedRequest], maker: ManifestMaker, seen: bytes | None) -> CommitBatch:
    """Return the commit that shortens requests. Those of which nothing is left stay: they go with the pack.

    :param maker: over an index that does not know the packs.
    :param seen: as in ``CommitBatch``.
    """
    shorter: list[ManifestWrite] = []
    pins: list[tuple[str, bool]] = []
    for manifest, keys, pinned in requests:
        if (write := maker.shorten(manifest, keys)) is not None:
            shorter.append(write)
            pins += [(manifest.id, True)] if pinned else []
    return CommitBatch(manifests=shorter, pins=pins, seen=seen)
