"""Choice of the stored contexts that an engine promotes before a request needs them."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from heapq import nlargest
from itertools import islice
from typing import NamedTuple

from persistkv.base import OffloadKey, StoredContext
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
) -> list[StoredContext]:
    """Return the stored requests to promote, the most recently used one first, with at most
    ``max_blocks`` keys in all.

    The keys of each request are in token order, one KV cache group after the other. Keys that are
    not held, and keys that an earlier request contains, are left out.

    :param holds: returns whether a key is stored.
    :param choice: return only requests that this filter includes; None: no filter.
    :raises StoreError: the medium failed.
    """
    contexts: list[StoredContext] = []
    taken: set[bytes] = set()
    requests = iter(_by_last_use(backend, namespace, max_blocks, choice or Choice()))

    while len(taken) < max_blocks:
        batch = list(islice(requests, _MANIFESTS_PER_CALL))
        if not batch:
            break
        ids = [request.id for request in batch]
        of_batch = backend.manifest_keys(namespace, ids)
        for request, groups in zip(batch, of_batch, strict=True):
            left = max_blocks - len(taken)
            all_keys = _keys_in_order(groups or ())
            new_keys = (key for key in all_keys if key not in taken and holds(key))
            keys = list(map(OffloadKey, islice(new_keys, left)))
            if keys:
                taken.update(keys)
                contexts.append(StoredContext(request.tenant, keys))
    return contexts


def _keys_in_order(groups: ManifestKeys | tuple[()]) -> Iterator[bytes]:
    for group in groups:
        yield from group.unpack()


class _UsedRequest(NamedTuple):
    last_used: float
    """Time of the last use: seconds since the epoch."""
    id: str
    """Id of the manifest."""
    tenant: str


def _by_last_use(
    backend: Backend, namespace: bytes, most: int, choice: Choice
) -> Iterable[_UsedRequest]:
    """Return the ``most`` most recently used requests that ``choice`` includes, latest first."""
    return nlargest(most, _uses(backend, namespace, choice))


def _uses(backend: Backend, namespace: bytes, choice: Choice) -> Iterator[_UsedRequest]:
    """Yield each request that ``choice`` includes, with its last use."""
    heads = filter(choice.includes, backend.catalogue(namespace).manifests())
    # in batches, because a store can have millions of requests
    while batch := list(islice(heads, _MANIFESTS_PER_CALL)):
        uses = backend.catalogue(namespace).uses([head.id for head in batch])
        for head, use in zip(batch, uses, strict=True):
            last_used = head.created
            if use is not None:
                last_used = max(last_used, use.last_used)
            yield _UsedRequest(last_used, head.id, head.tenant)
