"""Verdicts about namespaces of other releases. The store keeps one for each pair of namespaces, as
a note."""

from __future__ import annotations

import logging
import time
from collections.abc import Iterable, Sequence
from functools import partial
from typing import Literal

import msgspec

from persistkv.errors import StoreError
from persistkv.storage.backend import Backend, Namespace
from persistkv.storage.identity import Identity

logger = logging.getLogger(__name__)

RELEASE_FIELD = "engine.release"
"""The only identity field in which a namespace may differ from the one that adopts it."""
_VERSION = 1


class Verdict(msgspec.Struct, frozen=True, kw_only=True):
    """Outcome of comparisons of newly computed blocks with the stored blocks of another
    namespace."""

    version: int = _VERSION
    verdict: Literal["adopted", "refused"]
    """``adopted``: the namespace serves lookups up to ``depths``. ``refused``: its content is never
    used."""
    depths: tuple[int, ...] = ()
    """For each KV cache group, the number of blocks of a context that may be used, from its
    beginning."""
    final: bool = False
    """Whether ``depths`` must not grow, because a block beyond them differed."""
    tokens: int = 0
    """Number of compared tokens, over all groups."""
    error: float = 0.0
    """Largest relative error of the comparisons, see ``Agreement.error``."""
    limit: float = 0.0
    """Largest relative error at which two blocks agree, see ``Agreement.limit``."""
    at: float = msgspec.field(default_factory=time.time)
    """Time of the verdict: seconds since the epoch, on the clock of the machine that decided."""


def read_verdict(
    backend: Backend,
    ours: bytes,
    theirs: bytes,
) -> Verdict | None:
    """Return the recorded verdict of namespace ``ours`` about ``theirs``; None if there is none
    that can be read."""
    content = backend.note(ours, theirs.hex())
    if content is None:
        return None
    try:
        verdict = msgspec.json.decode(content, type=Verdict)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return None
    return verdict if verdict.version == _VERSION else None


def write_verdict(
    backend: Backend,
    ours: bytes,
    theirs: bytes,
    verdict: Verdict,
) -> None:
    """Record the verdict of namespace ``ours`` about ``theirs``. If the medium fails, the previous
    one is kept."""
    content = msgspec.json.encode(verdict)
    backend.put_note(ours, theirs.hex(), content)


def verdicts(
    backend: Backend,
    namespaces: Sequence[Namespace],
) -> dict[tuple[bytes, bytes], Verdict]:
    """Return all recorded verdicts of namespaces about each other: (id of ours, id of theirs) →
    verdict."""
    found = {}
    for ours in namespaces:
        for theirs in candidates(backend, ours.identity, namespaces):
            verdict = read_verdict(backend, ours.id, theirs.id)
            if verdict is not None:
                found[ours.id, theirs.id] = verdict
    return found


def candidates(
    backend: Backend,
    identity: Identity,
    others: Iterable[Namespace],
) -> list[Namespace]:
    """Return the namespaces of ``others`` that differ from an identity in the release alone, latest
    written first: by the latest manifest, or by their creation if they have none that can be read.
    """
    found = []
    for other in others:
        differences = identity.diff(other.identity)
        differing = [difference.field for difference in differences]
        if differing == [RELEASE_FIELD]:
            found.append(other)
    # order several ones only, because that scans the manifests of each candidate
    if len(found) > 1:
        found.sort(key=partial(_last_write, backend), reverse=True)
    return found


def _last_write(backend: Backend, namespace: Namespace) -> float:
    """Return the time of a namespace's latest manifest, or else of its creation."""
    try:
        heads = backend.catalogue(namespace.id).manifests()
        times = [head.created for head in heads]
        return max(times, default=namespace.created)
    except StoreError as error:
        logger.info(
            "the requests of namespace %s cannot be read: %s", namespace.id.hex(), error
        )
        return namespace.created
