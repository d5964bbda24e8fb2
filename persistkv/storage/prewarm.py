"""Contexts that an engine promotes before a request needs them: those asked for, then those used last.

Requests to promote a context ("warm it up") are rows in the store, for the engines that have it open.

A primary tier lies in its engine's process; whoever wants a context in it can only ask. So ``persistkv warm`` leaves a
row beside the rows of ``persistkv.storage.status``, over the same two methods of a backend:

1. ``ask<n>``, n drawn from namespace and request: one context. To ask again replaces the row, and renews it.
2. ``warmed<n>by<engine>``: that engine's answer. Each engine writes its own, so none is lost to another's.
3. An engine that pre-warms looks when it starts, and promotes what was asked for before what was used last; then it
   looks again now and then, as long as it takes steps. It answers. An answer to an older asking is none.

As with a status nothing is promised to be there later: a row that is lost is asked for again. A row counts until its
``ttl_s`` is over, by the clock of whoever reads it; engines that start in that time warm up too.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterator
from hashlib import blake2b
from itertools import islice
from typing import TypeVar

import msgspec

from persistkv.errors import StoreError, StoreUnavailableError
from persistkv.storage.backend import Backend
from persistkv.storage.extensions import InspectableBackend, SupportsStatus, statuses
from persistkv.storage.manifest import RequestManifest

DEFAULT_TTL_S = 3600.0
_ASK, _ANSWER, _BY = "ask", "warmed", "by"
_NAME_BYTES = 16
_AT_ONCE = 64  # manifests whose keys are read together

logger = logging.getLogger(__name__)

T = TypeVar("T")


class WarmRequest(msgspec.Struct, frozen=True, kw_only=True):
    """One row of ``ask…``. Fields are added, never renamed: engines of several releases share a store."""

    namespace: str
    """The namespace's id, hexadecimal."""
    request: str
    """The request's whole id: that of its manifest, whose keys ``Backend.manifest_keys`` gives."""
    asked: float
    """Seconds since the epoch, by the clock of whoever asked."""
    ttl_s: float
    """How long it counts."""

    def counts(self, now: float) -> bool:
        """Whether it is still to be done."""
        return now < self.asked + self.ttl_s


class WarmAnswer(msgspec.Struct, frozen=True, kw_only=True):
    """One row of ``warmed…``; see ``WarmRequest``."""

    namespace: str
    request: str
    asked: float
    """Of the asking that it answers."""
    engine: str
    """As in ``EngineStatus.engine``."""
    time: float
    """When it was done, by the engine's clock."""
    blocks: int
    """Blocks of the context that the engine was given, to promote them."""
    missing: int
    """Blocks of it that it was not: no pack holds them, or they are more than the engine promotes at its start."""


def request_warm(backend: Backend, namespace: bytes, request: str, ttl_s: float = DEFAULT_TTL_S) -> WarmRequest:
    """Ask all engines on this store for one context. Rows whose time is over are taken away.

    :param request: the whole id of a request that the namespace holds.
    :raises StoreUnavailableError: nobody could see it: the medium shows no rows to others.
    :raises StoreError: it was not written.
    """
    now = time.time()
    for name, row in _rows(backend, _ASK, WarmRequest):
        if not row.counts(now):
            _withdraw(backend, name)
    asked = WarmRequest(namespace=namespace.hex(), request=request, asked=now, ttl_s=ttl_s)
    _publish(backend, _ASK + _name(asked.namespace, request), msgspec.json.encode(asked))
    return asked


def withdraw_warm(backend: Backend, namespace: bytes, request: str) -> None:
    """Ask no longer; idempotent. What was promoted stays.

    :raises StoreError: it is still asked for.
    """
    _withdraw(backend, _ASK + _name(namespace.hex(), request))


def pending_warm(backend: Backend, namespace: bytes, engine: str) -> list[WarmRequest]:
    """What this engine is to promote, what was asked for first first: one listing of the store's small rows.

    :param engine: as in ``EngineStatus.engine``; what it has answered is left out.
    :raises StoreError: the medium failed.
    """
    now, space = time.time(), namespace.hex()
    rows = statuses(backend)
    answered = {
        (answer.request, answer.asked)
        for _, answer in _decoded(rows, _ANSWER, WarmAnswer)
        if answer.engine == engine and answer.namespace == space
    }
    asked = [row for _, row in _decoded(rows, _ASK, WarmRequest) if row.namespace == space and row.counts(now)]
    return sorted((row for row in asked if (row.request, row.asked) not in answered), key=lambda row: row.asked)


def acknowledge_warm(backend: Backend, asked: WarmRequest, engine: str, *, blocks: int, missing: int) -> None:
    """Say that this engine has taken it up.

    :param engine: letters and digits, as in ``EngineStatus.engine``.
    :param blocks: see ``WarmAnswer``, as is ``missing``.
    :raises StoreError: it was not said; ``pending_warm`` names it again.
    """
    answer = WarmAnswer(
        namespace=asked.namespace,
        request=asked.request,
        asked=asked.asked,
        engine=engine,
        time=time.time(),
        blocks=blocks,
        missing=missing,
    )
    name = f"{_ANSWER}{_name(asked.namespace, asked.request)}{_BY}{engine}"
    _publish(backend, name, msgspec.json.encode(answer))


def warm_answers(backend: Backend, asked: WarmRequest) -> list[WarmAnswer]:
    """What engines said to it, the first one first.

    :raises StoreError: the medium failed.
    """
    found = [
        answer
        for _, answer in _rows(backend, f"{_ANSWER}{_name(asked.namespace, asked.request)}{_BY}", WarmAnswer)
        if answer.asked == asked.asked
    ]
    return sorted(found, key=lambda answer: (answer.time, answer.engine))


def _publish(backend: Backend, name: str, row: bytes | None) -> None:
    if not (isinstance(backend, SupportsStatus) and backend.capabilities.shared):
        raise StoreUnavailableError("this store cannot be used to ask engines: it shows no rows to other processes")
    backend.publish_status(name, row)


def _withdraw(backend: Backend, name: str) -> None:
    """The row of an asking, and the answers to it."""
    _publish(backend, name, None)
    prefix = f"{_ANSWER}{name.removeprefix(_ASK)}{_BY}"
    for answer in [other for other in statuses(backend) if other.startswith(prefix)]:
        _publish(backend, answer, None)


def _rows(backend: Backend, prefix: str, kind: type[T]) -> Iterator[tuple[str, T]]:
    return _decoded(statuses(backend), prefix, kind)


def _decoded(rows: dict[str, bytes], prefix: str, kind: type[T]) -> Iterator[tuple[str, T]]:
    """Those that read; what others write there is passed over."""
    for name, row in rows.items():
        if name.startswith(prefix):
            try:
                yield name, msgspec.json.decode(row, type=kind)
            except (msgspec.DecodeError, UnicodeDecodeError):
                continue


def _name(namespace: str, request: str) -> str:
    return blake2b(f"{namespace}/{request}".encode(), digest_size=_NAME_BYTES).hexdigest()


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
