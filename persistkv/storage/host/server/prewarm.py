"""Choice of the stored contexts that an engine promotes before a request needs them."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from heapq import nlargest
from itertools import islice
from typing import NamedTuple

from persistkv.base import OffloadKey, StoredContext
from persistkv.storage.backend import Backend
from persistkv.storage.format.pack import PackedKeys
from persistkv.storage.records import Choice

# maximum number of manifests in one call of the backend, which bounds its memory and time
_MANIFESTS_PER_CALL = 64


def recent_contexts(
    backend: Backend,
    namespace: bytes,
    holds: Callable[[bytes], bool],
    max_blocks: int,
    choice: Choice | None,
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
    uses = _uses(backend, namespace, choice or Choice())
    # Read at most ``max_blocks`` requests, enough if each request adds a key. The result has fewer
    # keys than possible if some requests add none, because earlier requests contain all their keys.
    latest = nlargest(max_blocks, uses)
    for request, keys in _with_keys(backend, namespace, latest):
        new_keys = (key for key in keys if key not in taken and holds(key))
        room = max_blocks - len(taken)
        promoted = [OffloadKey(key) for key in islice(new_keys, room)]
        if promoted:
            taken.update(promoted)
            contexts.append(StoredContext(request.tenant, promoted))
        # stop before the next iteration, which would read the keys of further requests
        if len(taken) == max_blocks:
            break
    return contexts


class _UsedRequest(NamedTuple):
    last_used: float
    """Time of the last use: seconds since the epoch."""
    id: str
    """Id of the manifest."""
    tenant: str


def _uses(
    backend: Backend,
    namespace: bytes,
    choice: Choice,
) -> Iterator[_UsedRequest]:
    """Yield each request that ``choice`` includes, with its last use."""
    manifests = backend.catalogue(namespace).manifests()
    heads = filter(choice.includes, manifests)
    # read in batches, because a store can have millions of requests
    while batch := list(islice(heads, _MANIFESTS_PER_CALL)):
        ids = [head.id for head in batch]
        # get the catalogue again for each batch: if a shared store is replaced by another one, the
        # queries of an earlier catalogue fail
        catalogue = backend.catalogue(namespace)
        uses = catalogue.uses(ids)
        for head, use in zip(batch, uses, strict=True):
            # a request without a recorded use was last used when it was created
            last_used = head.created
            if use is not None:
                last_used = max(last_used, use.last_used)
            yield _UsedRequest(last_used, head.id, head.tenant)


def _with_keys(
    backend: Backend,
    namespace: bytes,
    requests: Sequence[_UsedRequest],
) -> Iterator[tuple[_UsedRequest, list[bytes]]]:
    """Yield requests with their keys in token order, one KV cache group after the other; without
    those whose keys are damaged or no longer held."""
    for start in range(0, len(requests), _MANIFESTS_PER_CALL):
        batch = requests[start : start + _MANIFESTS_PER_CALL]
        ids = [request.id for request in batch]
        keys_of_each = backend.manifest_keys(namespace, ids)
        for request, groups in zip(batch, keys_of_each, strict=True):
            if groups is not None:
                yield request, PackedKeys.unpack_all(groups)
