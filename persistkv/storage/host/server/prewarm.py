"""Choice of the stored contexts that an engine promotes before a request needs them."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from heapq import nlargest
from itertools import islice

from persistkv.storage.backend import Backend
from persistkv.storage.format.manifest import ManifestKeys
from persistkv.storage.records import Choice

_MANIFESTS_PER_CALL = 64


def recent_contexts(
    backend: Backend,
    namespace: bytes,
    holds: Callable[[bytes], bool],
    max_blocks: int,
    choice: Choice | None = None,
) -> list[list[bytes]]:
    """Return the keys of stored requests to promote, one list per request, the most recently used
    request first, at most ``max_blocks`` keys in all.

    The keys of each request are in token order, one KV cache group after the other. Keys that are
    not held, and keys that an earlier list contains, are left out.

    :param holds: returns whether a key is stored.
    :param choice: return only requests that this filter includes; None: no filter.
    :raises StoreError: the medium failed.
    """
    contexts: list[list[bytes]] = []
    taken: set[bytes] = set()
    names = iter(_by_last_use(backend, namespace, max_blocks, choice or Choice()))

    while len(taken) < max_blocks:
        batch = list(islice(names, _MANIFESTS_PER_CALL))
        if not batch:
            break
        for groups in backend.manifest_keys(namespace, batch):
            keys = []
            for key in _keys_in_order(groups or ()):
                if key not in taken and holds(key):
                    keys.append(key)
            keys = keys[: max_blocks - len(taken)]
            if keys:
                taken.update(keys)
                contexts.append(keys)
    return contexts


def _keys_in_order(groups: ManifestKeys | tuple[()]) -> Iterator[bytes]:
    for group in groups:
        yield from group.unpack()


def _by_last_use(
    backend: Backend, namespace: bytes, most: int, choice: Choice
) -> Iterable[str]:
    """Return the manifest ids of the ``most`` most recently used requests that ``choice`` includes,
    latest first."""
    latest = nlargest(most, _uses(backend, namespace, choice))
    return [name for _, name in latest]


def _uses(
    backend: Backend, namespace: bytes, choice: Choice
) -> Iterator[tuple[float, str]]:
    """Yield the time of the last use and the manifest id of each request that ``choice``
    includes."""
    heads = filter(choice.includes, backend.catalogue(namespace).manifests())
    # in batches, because a store can have millions of requests
    while batch := list(islice(heads, _MANIFESTS_PER_CALL)):
        uses = backend.catalogue(namespace).uses([head.id for head in batch])
        for head, use in zip(batch, uses, strict=True):
            last_used = head.created
            if use is not None:
                last_used = max(last_used, use.last_used)
            yield last_used, head.id
