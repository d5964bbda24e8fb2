"""The contexts of a namespace that were used last: what an engine may want in its primary tier before anyone asks."""

from __future__ import annotations

from collections.abc import Callable
from itertools import islice

from persistkv.storage.backend import Backend
from persistkv.storage.manifest import RequestManifest

_AT_ONCE = 64  # manifests whose keys are read together


def recent_contexts(
    backend: Backend, namespace: bytes, holds: Callable[[bytes], bool], max_blocks: int
) -> list[list[bytes]]:
    """Keys of the contexts that were used last, the last one first, until there are ``max_blocks`` of them.

    A context's keys stand in its order, group after group, each key in one context only. What is not held is left out.

    :raises StoreError: the medium failed.
    """
    found: list[list[bytes]] = []
    named: set[bytes] = set()
    names = iter(_by_last_use(backend, namespace))
    while len(named) < max_blocks and (some := list(islice(names, _AT_ONCE))):
        for groups in backend.many_manifest_keys(namespace, some):
            keys = [key for group in groups or () for key in group.unpack() if key not in named and holds(key)]
            keys = keys[: max_blocks - len(named)]
            if keys:
                named.update(keys)
                found.append(keys)
    return found


def _by_last_use(backend: Backend, namespace: bytes) -> list[str]:
    heads: list[RequestManifest] = list(backend.manifests(namespace))
    uses = backend.uses(namespace, [head.id for head in heads])
    moments = [max(head.created, use.last_used) if use else head.created for head, use in zip(heads, uses, strict=True)]
    order = sorted(range(len(heads)), key=moments.__getitem__, reverse=True)
    return [heads[place].id for place in order]
