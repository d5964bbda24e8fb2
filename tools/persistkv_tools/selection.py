"""Requests of a store: their selection by commands, and their view."""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator
from itertools import islice
from typing import NamedTuple

import msgspec

from persistkv.config import parse_duration, parse_size
from persistkv.errors import ConfigurationError, PersistKVError
from persistkv.storage.backend import Namespace
from persistkv.storage.extensions import InspectableBackend, RequestUse
from persistkv.storage.format.manifest import RequestManifest

_NAMED_AT_MOST = 5
_AT_ONCE = 256


class NotFoundError(PersistKVError):
    """No request or namespace of the store has this name, or several have."""


class FoundRequest(NamedTuple):
    """One request of a store."""

    namespace: Namespace
    manifest: RequestManifest


class RequestView(msgspec.Struct, frozen=True):
    """One request's whole context."""

    id: str
    namespace: str
    """The namespace's id, hexadecimal."""
    created: float
    """Seconds since the epoch."""
    tokens: int
    blocks: int
    group_blocks: tuple[int, ...]
    raw_bytes: int
    """Bytes of these blocks before the codec; what requests share is counted for each."""
    ordered: bool
    labels: dict[str, str]
    last_used: float | None = None
    """Seconds since the epoch: when all of it was used last. None here and below: the store does not tell."""
    reused: bool | None = None
    """Whether it was used after it was stored: a hit."""
    shared_by: int | None = None
    """Other requests whose context goes through all of it."""
    pinned: bool | None = None
    hits: int | None = None
    """Of those, the ones that were stored after it: its hits by requests that are still held."""
    stored_bytes: int | None = None
    """Size of its blocks at rest, by the codec ratio of its packs."""

    @classmethod
    def of(cls, namespace: bytes, manifest: RequestManifest, use: RequestUse | None) -> RequestView:
        """The view of a manifest's head, and of what the store knows of its use."""
        view = cls(
            manifest.id,
            namespace.hex(),
            manifest.created,
            manifest.tokens,
            manifest.blocks,
            manifest.group_blocks,
            manifest.raw_bytes,
            manifest.ordered,
            manifest.labels,
        )
        return view.with_use(use)

    def with_use(self, use: RequestUse | None) -> RequestView:
        """The same request with what the store knows of its use."""
        if use is None:
            return self
        packed = use.packs_raw_bytes
        return msgspec.structs.replace(
            self,
            last_used=use.last_used,
            reused=use.reused,
            shared_by=use.shared_by,
            pinned=use.pinned,
            hits=use.hits,
            stored_bytes=round(self.raw_bytes * use.packs_stored_bytes / packed) if packed else None,
        )


class Selection(msgspec.Struct, frozen=True):
    """Requests that fulfil all of these; every request for the default."""

    labels: tuple[tuple[str, str | None], ...] = ()
    """(name, value); None: any value."""
    made_before: float | None = None
    """Seconds since the epoch."""
    made_after: float | None = None
    more_bytes_than: int | None = None
    """Of raw bytes."""
    fewer_bytes_than: int | None = None
    never_hit: bool = False
    """Only requests that were never used after they were stored."""

    @classmethod
    def parse(
        cls,
        labels: Iterable[str] | None = None,
        older_than: str | None = None,
        newer_than: str | None = None,
        larger_than: str | None = None,
        smaller_than: str | None = None,
        *,
        never_hit: bool = False,
    ) -> Selection:
        """Parse options of a command line.

        :raises ConfigurationError: naming the option that is wrong.
        """
        now = time.time()
        return cls(
            tuple(map(_label, labels or ())),
            None if older_than is None else now - parse_duration(older_than, name="--older-than"),
            None if newer_than is None else now - parse_duration(newer_than, name="--newer-than"),
            None if larger_than is None else parse_size(larger_than, name="--larger-than"),
            None if smaller_than is None else parse_size(smaller_than, name="--smaller-than"),
            never_hit,
        )

    def takes(self, manifest: RequestManifest, use: RequestUse | None = None) -> bool:
        """Whether a request fulfils all.

        :param use: is looked at for ``never_hit``; where a store does not tell, nothing counts as unused.
        """
        return (
            (not self.never_hit or (use is not None and not use.reused))
            and (self.made_before is None or manifest.created < self.made_before)
            and (self.made_after is None or manifest.created > self.made_after)
            and (self.more_bytes_than is None or manifest.raw_bytes > self.more_bytes_than)
            and (self.fewer_bytes_than is None or manifest.raw_bytes < self.fewer_bytes_than)
            and all(_has_label(manifest, name, value) for name, value in self.labels)
        )


def chosen_namespaces(backend: InspectableBackend, wanted: str | None) -> list[Namespace]:
    """All namespaces, oldest first; or the one whose id begins like ``wanted``.

    :raises NotFoundError: there is none, or more than one.
    """
    found = sorted(backend.namespaces(), key=lambda namespace: (namespace.created, namespace.id))
    if wanted is None:
        return found
    matching = [namespace for namespace in found if namespace.id.hex().startswith(wanted.lower())]
    if not wanted or len(matching) != 1:
        ids = _named(namespace.id.hex() for namespace in (matching or found))
        raise NotFoundError(f"--namespace {wanted!r} is not the begin of one namespace's id; there are: {ids}")
    return matching


def find_request(
    backend: InspectableBackend, wanted: str, namespace: str | None = None, names: dict[bytes, list[str]] | None = None
) -> FoundRequest:
    """The request of this id, or the only one whose id begins so.

    :param names: receives the ids of all requests that were read, by namespace.
    :raises NotFoundError: there is none, or more than one.
    """
    similar: list[FoundRequest] = []
    exact: list[FoundRequest] = []
    for space in chosen_namespaces(backend, namespace):
        seen = [] if names is None else names.setdefault(space.id, [])
        for manifest in backend.manifests(space.id):
            seen.append(manifest.id)
            if manifest.id == wanted:
                exact.append(FoundRequest(space, manifest))
            elif manifest.id.startswith(wanted):
                similar.append(FoundRequest(space, manifest))
    candidates = exact or similar
    if len(candidates) == 1:
        return candidates[0]
    if not candidates:
        raise NotFoundError(f"no request {wanted!r}; persistkv ls shows those that there are")
    meant = _named(f"{found.manifest.id} (namespace {found.namespace.id.hex()[:8]})" for found in candidates)
    raise NotFoundError(f"{wanted!r} means {len(candidates)} requests: {meant}")


def chosen_requests(
    backend: InspectableBackend, names: Iterable[str], selection: Selection, namespace: str | None
) -> list[FoundRequest]:
    """The requests of these names, each once; without names, all that are selected.

    :raises NotFoundError: a name means none, or more than one.
    """
    found = [find_request(backend, name, namespace) for name in names]
    if found:
        return list({(one.namespace.id, one.manifest.id): one for one in found}.values())
    return [
        FoundRequest(space, manifest)
        for space in chosen_namespaces(backend, namespace)
        for manifest in backend.manifests(space.id)
        if selection.takes(manifest)
    ]


def _named(names: Iterator[str]) -> str:
    found = sorted(names)
    more = f" and {len(found) - _NAMED_AT_MOST} more" if len(found) > _NAMED_AT_MOST else ""
    return (", ".join(found[:_NAMED_AT_MOST]) or "none") + more


def _label(text: str) -> tuple[str, str | None]:
    name, equals, value = text.partition("=")
    if not name:
        raise ConfigurationError("--label", text, "NAME or NAME=VALUE")
    return name, value if equals else None


def _has_label(manifest: RequestManifest, name: str, value: str | None) -> bool:
    return name in manifest.labels and value in (None, manifest.labels[name])


def with_uses(
    backend: InspectableBackend, namespace: bytes, manifests: Iterable[RequestManifest]
) -> Iterator[tuple[RequestManifest, RequestUse | None]]:
    """Requests with what the store knows of their use."""
    waiting = iter(manifests)
    while some := list(islice(waiting, _AT_ONCE)):
        yield from zip(some, backend.uses(namespace, [manifest.id for manifest in some]), strict=True)
