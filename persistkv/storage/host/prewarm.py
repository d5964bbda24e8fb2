"""Prewarming: contexts that an engine promotes before a request needs them.

A primary tier is memory of its engine, so other processes cannot fill it; they can only send a warm
request. ``persistkv warm`` publishes the request as a row in the store, with the backend methods
that publish engine status (``Backend.publish_status``):

1. ``ask<n>``: one warm request for one context; n is a digest of namespace and request id. Asking
   again replaces the row and restarts its ttl.
2. ``warmed<n>by<engine>``: the answer of one engine. Each engine writes a row of its own, so
   answers do not overwrite each other.
3. An engine with prewarming enabled reads the requests when it starts, and polls them while it
   takes steps. It promotes requested contexts before recently used ones and then writes its answer.
   Answers to an older request for the same context are ignored.

Like rows of engine status, these rows may be lost; the tool must then ask again. If the medium
fails, all functions raise a StoreError. A warm request is valid until ``asked + ttl_s`` on the
reader's clock, also for engines that start within that time.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterator
from hashlib import blake2b
from heapq import nlargest
from itertools import islice

import msgspec

from persistkv.errors import StoreError, StoreUnavailableError
from persistkv.storage.backend import Backend
from persistkv.storage.host.status import decoded
from persistkv.storage.records import Choice

DEFAULT_TTL_S = 3600.0
_ASK, _ANSWER, _BY = "ask", "warmed", "by"
_NAME_BYTES = 16
_AT_ONCE = 64  # manifests whose keys are read with one call

logger = logging.getLogger(__name__)


class _WarmRow(msgspec.Struct, frozen=True, kw_only=True):
    """Common fields of warm requests and their answers.

    Fields are added, never renamed: engines of several releases share a store.
    """

    namespace: str
    """The namespace's id, hexadecimal."""
    request: str
    """Full manifest id of the stored request."""
    asked: float
    """Time of the warm request: seconds since the epoch, on the clock of the process that asked."""


class WarmRequest(_WarmRow, frozen=True, kw_only=True):
    """Row ``ask<n>``: asks engines to promote one stored request to their primary tiers."""

    ttl_s: float
    """Seconds from ``asked`` for which this warm request is valid."""


class WarmAnswer(_WarmRow, frozen=True, kw_only=True):
    """Row ``warmed<n>by<engine>``: the answer of one engine to the ``WarmRequest`` in row
    ``ask<n>``."""

    engine: str
    """Name of the answering engine, as in ``EngineStatus.engine``."""
    time: float
    """Time of the answer: seconds since the epoch, on the engine's clock."""
    blocks: int
    """Number of blocks of the stored request that were passed to the engine for promotion."""
    missing: int
    """Number of blocks of the stored request that were not passed to the engine, because no pack
    holds them or because they exceed the engine's prewarming limit."""


def request_warm(
    backend: Backend, namespace: bytes, request: str, ttl_s: float = DEFAULT_TTL_S
) -> WarmRequest:
    """Ask all engines that use this store to promote one stored request; delete expired warm
    requests and answers.

    :param namespace: the namespace's id, 16 bytes.
    :param request: full manifest id of the stored request.
    :param ttl_s: seconds that the warm request is valid.
    :raises StoreUnavailableError: the medium cannot publish rows to other processes.
    :raises StoreError: the medium failed; the request was not published.
    """
    now = time.time()
    for name, row in decoded(backend.statuses(), _DECODE_REQUEST, _ASK):
        if now >= row.asked + row.ttl_s:
            _withdraw(backend, name)
    asked = WarmRequest(
        namespace=namespace.hex(), request=request, asked=now, ttl_s=ttl_s
    )
    _publish(
        backend, _ASK + _name(asked.namespace, request), msgspec.json.encode(asked)
    )
    return asked


def withdraw_warm(backend: Backend, namespace: bytes, request: str) -> None:
    """Delete a warm request and its answers; idempotent. Blocks that were promoted stay in the
    primary tiers.

    :param namespace: the namespace's id, 16 bytes.
    :param request: full manifest id of the stored request.
    :raises StoreError: the medium failed; the warm request or some answers may remain.
    """
    _withdraw(backend, _ASK + _name(namespace.hex(), request))


def pending_warm(backend: Backend, namespace: bytes, engine: str) -> list[WarmRequest]:
    """Return the namespace's valid warm requests that this engine has not answered, oldest first.

    :param engine: name of this engine's status row (``EngineStatus.engine``).
    """
    now, space = time.time(), namespace.hex()
    rows = backend.statuses()
    answers = [
        answer
        for _, answer in decoded(rows, _DECODE_ANSWER, _ANSWER)
        if answer.engine == engine
    ]
    answered = {(answer.namespace, answer.request, answer.asked) for answer in answers}
    asked = [
        row for _, row in decoded(rows, _DECODE_REQUEST, _ASK) if row.namespace == space
    ]
    valid = [
        row
        for row in asked
        if now < row.asked + row.ttl_s
        and (space, row.request, row.asked) not in answered
    ]
    return sorted(valid, key=lambda row: row.asked)


def acknowledge_warm(
    backend: Backend, asked: WarmRequest, engine: str, *, blocks: int, missing: int
) -> None:
    """Publish this engine's answer to a warm request.

    The parameters are those of ``WarmAnswer``; ``engine`` has letters and digits only.

    :raises StoreError: the answer was not published; ``pending_warm`` returns the request again.
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
    """Return the engines' answers to a warm request, earliest first."""
    prefix = f"{_ANSWER}{_name(asked.namespace, asked.request)}{_BY}"
    found = [
        answer
        for _, answer in decoded(backend.statuses(), _DECODE_ANSWER, prefix)
        if answer.asked == asked.asked
    ]
    return sorted(found, key=lambda answer: (answer.time, answer.engine))


def _publish(backend: Backend, name: str, row: bytes | None) -> None:
    if not backend.capabilities.shared:
        raise StoreUnavailableError(
            "this store publishes no rows to other processes: engines cannot be asked"
        )
    backend.publish_status(name, row)


def _withdraw(backend: Backend, name: str) -> None:
    _publish(backend, name, None)
    prefix = f"{_ANSWER}{name.removeprefix(_ASK)}{_BY}"
    for row in list(backend.statuses()):
        if row.startswith(prefix):
            _publish(backend, row, None)


# Made at import: msgspec 0.22 crashes if two threads are the first to decode a type.
_DECODE_REQUEST = msgspec.json.Decoder(WarmRequest).decode
_DECODE_ANSWER = msgspec.json.Decoder(WarmAnswer).decode


def _name(namespace: str, request: str) -> str:
    return blake2b(
        f"{namespace}/{request}".encode(), digest_size=_NAME_BYTES
    ).hexdigest()


def recent_contexts(
    backend: Backend,
    namespace: bytes,
    holds: Callable[[bytes], bool],
    max_blocks: int,
    engine: str = "",
    *,
    only_asked: bool = False,
    choice: Choice | None = None,
) -> list[list[bytes]]:
    """Return the keys of stored requests to prewarm, one list per stored request, at most
    ``max_blocks`` keys in all.

    Stored requests that pending warm requests name come first, then the others, most recently used
    first. The keys of each are in token order, one KV cache group after the other. Left out are
    keys that are not held, and keys that an earlier list contains.

    :param holds: returns whether a key is stored.
    :param engine: name of this engine; its answers to the warm requests are published. Empty:
        publish no answers.
    :param only_asked: return only stored requests that pending warm requests name; ignored if
        ``choice`` is set.
    :param choice: return only stored requests that this filter includes, latest used first; pending
        warm requests are neither read nor answered. None: no filter.
    """
    asked = [] if choice else pending_warm(backend, namespace, engine)
    found: list[list[bytes]] = []
    named: set[bytes] = set()
    used = (
        []
        if only_asked and choice is None
        else _by_last_use(backend, namespace, max_blocks, choice or Choice())
    )
    names = iter(dict.fromkeys([*(row.request for row in asked), *used]))
    while len(named) < max_blocks and (some := list(islice(names, _AT_ONCE))):
        for groups in backend.manifest_keys(namespace, some):
            keys = [
                key
                for group in groups or ()
                for key in group.unpack()
                if key not in named and holds(key)
            ]
            keys = keys[: max_blocks - len(named)]
            if keys:
                named.update(keys)
                found.append(keys)
    for row in asked if engine else ():
        _answer(backend, row, named, engine)
    return found


def _answer(
    backend: Backend, asked: WarmRequest, named: set[bytes], engine: str
) -> None:
    groups = (
        backend.manifest_keys(bytes.fromhex(asked.namespace), [asked.request])[0] or ()
    )
    given = [key in named for group in groups for key in group.unpack()]
    try:
        acknowledge_warm(
            backend, asked, engine, blocks=sum(given), missing=len(given) - sum(given)
        )
    except StoreError as error:
        logger.info(
            "could not answer the warm request for %s: %s", asked.request, error
        )


def _by_last_use(
    backend: Backend, namespace: bytes, most: int, choice: Choice
) -> list[str]:
    """Return manifest ids of the ``most`` most recently used requests that ``choice`` includes,
    latest first."""

    # in batches, because a store can have millions
    def moments() -> Iterator[tuple[float, str]]:
        heads = filter(choice.includes, backend.manifests(namespace))
        while some := list(islice(heads, _AT_ONCE)):
            for head, use in zip(
                some, backend.uses(namespace, [head.id for head in some]), strict=True
            ):
                yield max(head.created, use.last_used) if use else head.created, head.id

    return [name for _, name in nlargest(most, moments())]
