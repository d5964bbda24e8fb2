"""The loss of a pack: the requests that name it are shortened to what stands before it."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import NamedTuple

from persistkv.storage.backend import Backend, CommitBatch, ManifestWrite
from persistkv.storage.ending import ManifestMaker
from persistkv.storage.manifest import ManifestKeys, RequestManifest


class NamedRequest(NamedTuple):
    """A request, as a store knows it."""

    manifest: RequestManifest
    keys: ManifestKeys
    pinned: bool


def requests_naming(backend: Backend, namespace: bytes, packs: Sequence[bytes]) -> list[NamedRequest]:
    """The requests whose manifests name any of these packs; those that do not read are left out.

    :raises StoreError: the medium failed.
    """
    heads = backend.manifests_naming(namespace, packs)
    names = [head.id for head in heads]
    rows = zip(heads, backend.many_manifest_keys(namespace, names), backend.uses(namespace, names), strict=True)
    return [NamedRequest(head, keys, use is not None and use.pinned) for head, keys, use in rows if keys is not None]


def removal(
    bad: Sequence[bytes], requests: Iterable[NamedRequest], maker: ManifestMaker, seen: bytes | None
) -> CommitBatch:
    """What takes bad packs out of a store. Requests of which nothing is left go.

    :param requests: those that name the packs.
    :param maker: over an index that does not know the packs.
    :param seen: as in ``CommitBatch``.
    """
    shorter: list[ManifestWrite] = []
    pins: list[tuple[str, bool]] = []
    for manifest, keys, pinned in requests:
        if (write := maker.shorten(manifest, keys)) is not None:
            shorter.append(write)
            pins += [(manifest.id, True)] if pinned else []
    return CommitBatch(bad=bad, manifests=shorter, pins=pins, seen=seen)
