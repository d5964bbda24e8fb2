"""The contexts of a namespace that an engine may want in its primary tier before a request asks: those that somebody
chose (``warming``), then those that were used last.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from itertools import islice

from persistkv.errors import StoreError
from persistkv.storage.extensions import InspectableBackend
from persistkv.storage.manifest import RequestManifest
from persistkv.storage.warming import WarmRequest, acknowledge_warm, pending_warm

logger = logging.getLogger(__name__)

_AT_ONCE = 64  # manifests whose keys are read together


def recent_contexts(
    backend: InspectableBackend,
    namespace: bytes,
    holds: Callable[[bytes], bool],
    max_blocks: int,
    engine: str = "",
    *,
    only_asked: bool = False,
) -> list[list[bytes]]:
    """Keys of the contexts that were asked for, then of those used last, the last one first, until there are
    ``max_blocks`` of them.

    A context's keys stand in its order, group after group, each key in one context only. What is not held is left out.

    :param engine: who answers those who asked; empty: nobody does.
    :param only_asked: those used last are left out.
    :raises StoreError: the medium failed.
    """
    asked = pending_warm(backend, namespace, engine)
    found: list[list[bytes]] = []
    named: set[bytes] = set()
    used = [] if only_asked else _by_last_use(backend, namespace)
    names = iter(dict.fromkeys([*(row.request for row in asked), *used]))
    while len(named) < max_blocks and (some := list(islice(names, _AT_ONCE))):
        for groups in backend.manifest_keys(namespace, some):
            keys = [key for group in groups or () for key in group.unpack() if key not in named and holds(key)]
            keys = keys[: max_blocks - len(named)]
            if keys:
                named.update(keys)
                found.append(keys)
    for row in asked if engine else ():
        _answer(backend, row, named, engine)
    return found


def _answer(backend: InspectableBackend, asked: WarmRequest, named: set[bytes], engine: str) -> None:
    groups = backend.manifest_keys(bytes.fromhex(asked.namespace), [asked.request])[0] or ()
    given = [key in named for group in groups for key in group.unpack()]
    try:
        acknowledge_warm(backend, asked, engine, blocks=sum(given), missing=len(given) - sum(given))
    except StoreError as error:
        logger.info("that %s was asked for is not answered: %s", asked.request, error)


def _by_last_use(backend: InspectableBackend, namespace: bytes) -> list[str]:
    heads: list[RequestManifest] = list(backend.manifests(namespace))
    uses = backend.uses(namespace, [head.id for head in heads])
    moments = [max(head.created, use.last_used) if use else head.created for head, use in zip(heads, uses, strict=True)]
    order = sorted(range(len(heads)), key=moments.__getitem__, reverse=True)
    return [heads[place].id for place in order]
