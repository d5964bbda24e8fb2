"""Changes of the labels of a request while other processes write."""

from __future__ import annotations

from collections.abc import Collection, Mapping

import msgspec

from persistkv.errors import StoreError
from persistkv.storage.backend import Backend, CommitBatch, ManifestWrite
from persistkv.storage.inspection.pack_tables import NamespacePacks
from persistkv.storage.inspection.requests import FoundRequest, find_request

# maximum number of attempts; one fails only if another process commits within the same milliseconds
_ATTEMPTS = 100


def relabel(
    backend: Backend,
    found: FoundRequest,
    given: Mapping[str, str],
    removed: Collection[str],
) -> dict[str, str]:
    """Set and remove labels of a request; return its labels afterwards. A change counts as a use of
    the request.

    :param given: values to set by name.
    :param removed: names of the labels to remove.
    :raises NotFoundError: the request was deleted meanwhile, or its keys are unreadable.
    :raises StoreError: a commit failed, or other processes wrote during each attempt. The labels
        are unchanged, unless only the second commit failed: then the labels are set, and a request
        that was hit counts as never hit.
    """
    for _ in range(_ATTEMPTS):
        labels = _try_relabel(backend, found, given, removed)
        if labels is not None:
            return labels
    raise StoreError(
        f"{found.manifest.id} could not be labelled: other processes wrote during all"
        f" {_ATTEMPTS} attempts"
    )


def _try_relabel(
    backend: Backend,
    found: FoundRequest,
    given: Mapping[str, str],
    removed: Collection[str],
) -> dict[str, str] | None:
    """Return the labels after the change; None: another process wrote meanwhile, and nothing has
    changed."""
    namespace = found.namespace.id
    request = found.manifest.id
    # read the packs before the request: if one of its packs is removed between the two reads, the
    # backend refuses the commit as stale
    packs = NamespacePacks(backend, namespace)
    present = find_request(backend, request, namespace.hex())
    keys = present.keys(backend)
    labels = {**present.manifest.labels, **given}
    for name in removed:
        labels.pop(name, None)
    if labels == present.manifest.labels:
        return labels

    held_packs = packs.in_order(keys)
    manifest = msgspec.structs.replace(present.manifest, labels=labels)
    write = ManifestWrite(manifest, keys, held_packs)
    # read the use before the commit, which writes the request as a new one without hits
    (use,) = backend.catalogue(namespace).uses([request])
    was_hit = use is not None and use.reused
    batch = CommitBatch(manifests=[write], seen=packs.cursor)
    if backend.commit(namespace, batch).stale:
        return None
    # A use of the packs after the request was written counts as a hit. Without one, the new row
    # would count as never hit.
    if was_hit:
        hit = CommitBatch(touches=held_packs)
        backend.commit(namespace, hit)
    return labels
